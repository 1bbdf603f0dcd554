"""Bodies of requests about an experiment that is there; `service.specs.spec.ExperimentSpec` is what makes one."""

from typing import Annotated, Any, Literal, cast

from pydantic import Field, WithJsonSchema

from service.database import TrialState
from service.specs.json_schema import base_schema
from service.specs.patterns import NAME, NO_NUL
from service.specs.spec import LONGEST_NAME, Changes, Part, TagName

Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME, pattern=NAME)]
EvaluationFields = Annotated[dict[str, Any], WithJsonSchema(base_schema()["properties"]["evaluation"])]


class Retry(Part):
    """Which trials are to run again."""

    states: list[Literal["failed", "diverged", "cancelled"]] = Field(
        default=["failed"],
        max_length=3,
        description="`diverged` ones diverge again unless the code changed; `cancelled` are those that were dropped.",
    )

    def trial_states(self) -> list[TrialState]:
        """The states as the database has them."""
        return [TrialState(state) for state in self.states]


class Clone(Part):
    """What a clone is called."""

    name: Name | None = Field(None, description="By default the experiment's own with `(clone)` behind it.")


class Reevaluation(Part):
    """How networks that were trained are to be evaluated anew."""

    evaluation: EvaluationFields = Field(description="Laid over each trial's own `evaluation`.")
    name: Name | None = Field(None, description="By default the experiment's own with `(re-evaluated)` behind it.")


class Change(Part):
    """What is to be changed; what is left out or null stays."""

    name: Name | None = Field(None, description="For people; need not be unique.")
    notes: str | None = Field(None, max_length=10_000, pattern=NO_NUL, description="Free text.")
    tags: list[TagName] | None = Field(
        None, max_length=32, json_schema_extra={"uniqueItems": True}, description="All of them, in place of the former."
    )
    priority: int | None = Field(None, ge=-1000, le=1000, description="Takes effect within a second.")
    max_concurrent_trials: int | None = Field(
        None, ge=1, le=10_000, description="At most so many at a time, within a second; 10,000 is no limit."
    )

    def fields(self) -> Changes:
        """The changes as fields of a spec."""
        found = cast(Changes, self.model_dump(exclude_none=True))
        if "tags" in found:
            found["tags"] = list(dict.fromkeys(found["tags"]))
        return found
