"""What is posted: an experiment as a document (JSON or YAML), and what one is extended by."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from service.errors import SpecError
from service.specs.json_schema import base_schema, grid_schema
from service.specs.patterns import NAME, NO_NUL, PRINTABLE, TAG
from service.specs.search import Metric, Search
from service.specs.validation_errors import wrong_fields
from service.specs.versions import NEWEST, checked_version, upgrade

LONGEST_NAME = 200

_MOST = 10_000

PartialTrial = Annotated[dict[str, Any], WithJsonSchema(base_schema())]
TagName = Annotated[str, Field(pattern=TAG)]


class Part(BaseModel):
    """Base of what a spec consists of."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Resources(Part):
    """What Ray reserves for one trial. A fraction of a GPU shares it between trials, its memory, too."""

    cpus: float = Field(1, gt=0, le=1024, allow_inf_nan=False, description="Cores, or a fraction of one.")
    gpus: float = Field(0, ge=0, le=1024, allow_inf_nan=False, description="A fraction of one, or whole ones.")
    memory_gib: float | None = Field(
        None,
        gt=0,
        le=2**20,
        allow_inf_nan=False,
        description="Main memory in GiB; null: none reserved. Ray counts it and stops no trial that takes more.",
    )

    @field_validator("gpus")
    @classmethod
    def _whole_above_one(cls, gpus: float) -> float:
        if gpus > 1 and not gpus.is_integer():
            raise ValueError(f"must be whole above 1 (a trial shares one GPU or has several to itself), not {gpus:g}")
        return gpus


class Fifo(Part):
    """Every trial runs to its end."""

    type: Literal["fifo"] = Field("fifo", description="Names this scheduler.")


class Asha(Part):
    """Asynchronous successive halving (Li et al., MLSys 2020): trials that are worse than their siblings stop early.

    Trials are compared after `grace_epochs`, then each time that `reduction` times as many are done, up to
    `max_epochs`; the best 1 / `reduction` of those that came as far go on. What has run to its end is never stopped.
    """

    type: Literal["asha"] = Field(description="Names this scheduler.")
    grace_epochs: int = Field(1, ge=1, le=100_000, description="The first comparison.")
    reduction: float = Field(
        4, ge=1.1, le=1000, allow_inf_nan=False, description="One in so many goes on, for so many times the epochs."
    )
    max_epochs: int | None = Field(
        None, ge=1, le=100_000, description="No comparison comes later; null: up to the trials' own end."
    )
    metric: Metric = Field("val_accuracy", description="By which trials are compared.")

    @model_validator(mode="after")
    def _some_comparison(self) -> Self:
        if self.max_epochs is not None and self.max_epochs < self.grace_epochs:
            raise ValueError(f"max_epochs must be at least grace_epochs, {self.grace_epochs}, not {self.max_epochs}")
        return self


class ExperimentSpec(Part):
    """An experiment: its trials are a grid, a list, or what a search finds.

    The grid is the product of the variants (without any: of `base` alone) and the axes. `trials` are added to it; where
    neither an axis nor a variant is named they are all there is. Earlier versions are read as what they meant.
    """

    spec_version: Annotated[
        Literal[2], BeforeValidator(checked_version), WithJsonSchema({"enum": [*range(1, NEWEST + 1)]})
    ] = Field(2, description="Of this document's form; earlier ones are read as what they meant.")
    name: str = Field(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern=PRINTABLE,
        description="For people; need not be unique.",
        # Refused where a spec is expanded: what was stored before is read as it is.
        json_schema_extra={"pattern": NAME},
    )
    base: PartialTrial = Field(default={}, description="Fields that all trials share.")
    grid: Annotated[dict[str, list[Any]], WithJsonSchema(grid_schema())] = Field(
        default={}, description="Axes by dotted path (`rank`, `training.lr`), each a list of values."
    )
    variants: list[PartialTrial] = Field(
        default=[],
        max_length=_MOST,
        description="Partial trials, each laid over `base`: the grid multiplies every one of them.",
    )
    trials: list[PartialTrial] = Field(
        default=[],
        max_length=_MOST,
        description="Partial trials, each laid over `base`: one trial each, which the grid does not multiply.",
    )
    repeat: int = Field(
        1,
        ge=1,
        le=_MOST,
        description="Each trial so many times, with the seeds that follow its own. No seed axis then.",
    )
    search: Search | None = Field(
        None, description="Trials that a search finds, over `base`, instead of grid, variants, trials and repeat."
    )
    scheduler: Annotated[Fifo | Asha, Field(discriminator="type")] = Field(
        Fifo(), description="Which trials run to their end."
    )
    resources: Resources = Field(Resources(), description="What is reserved for each trial.")
    timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=10**8,
        allow_inf_nan=False,
        description="A trial that runs longer (each attempt for itself) is killed and failed; null: no limit.",
    )
    hung_after: float | None = Field(
        None,
        ge=1,
        le=10**8,
        allow_inf_nan=False,
        description="A trial that reports nothing and gets on by no step for so many seconds is killed and tried "
        "again; null: ten times its own longest pause, and never less than half an hour. Of steps is heard every few "
        "seconds: with less than 15 a trial may be killed for an epoch that takes as long.",
    )
    max_concurrent_trials: int | None = Field(None, ge=1, le=_MOST, description="At most so many at a time.")
    order: Literal["grid", "random", "seeds-last"] = Field(
        "grid",
        description="In which order trials begin: as the grid lists them, mixed, or one seed of every cell before the "
        "second of any.",
    )
    priority: int = Field(0, ge=-1000, le=1000, description="Higher runs first among one's own experiments.")
    preempt: bool = Field(
        False,
        description="Whether running trials give way, at their newest checkpoint, when others are to run; they go on "
        "later. Else a trial that runs is never interrupted.",
    )
    tags: Annotated[list[TagName], Field(max_length=32, json_schema_extra={"uniqueItems": True})] = Field(
        default=[], description="Words by which the experiment is found."
    )
    notes: str = Field("", max_length=10_000, pattern=NO_NUL, description="Free text.")

    @model_validator(mode="before")
    @classmethod
    def _newest(cls, document: Any) -> Any:
        return upgrade(document) if isinstance(document, dict) else document

    @field_validator("tags")
    @classmethod
    def _once(cls, tags: list[str]) -> list[str]:
        if twice := next((tag for index, tag in enumerate(tags) if tag in tags[:index]), None):
            raise ValueError(f"{twice!r} stands twice; name each tag once")
        return tags


class Changes(TypedDict, total=False):
    """Fields of a spec that may change once it was posted."""

    name: str
    notes: str
    tags: list[str]
    priority: int
    max_concurrent_trials: int


class Additions(Part):
    """What an experiment is extended by. What it has already is not added again."""

    grid: Annotated[dict[str, list[Any]], WithJsonSchema(grid_schema())] = Field(
        default={}, description="More values of axes that the experiment has; a new axis would change its trials."
    )
    variants: list[PartialTrial] = Field(default=[], max_length=_MOST, description="More variants.")
    trials: list[PartialTrial] = Field(default=[], max_length=_MOST, description="More trials beside the grid's.")
    repeat: int | None = Field(None, ge=1, le=_MOST, description="So many seeds of each trial, instead of fewer.")


def read_spec(document: Mapping[str, object]) -> ExperimentSpec:
    """The spec that a document is: a stored one, one made of it, or one from outside. Raises `SpecError`."""
    try:
        return ExperimentSpec.model_validate(document)
    except ValidationError as error:
        found: list[ErrorDetails] = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise SpecError(wrong_fields(found, document)) from error
