"""What all answers of the API are made of, and the parts of them that `fields` names."""

from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, RootModel

ByPath: TypeAlias = dict[str, Any]
"""Values of a trial's fields by their paths, such as `training.lr`."""


class Out(BaseModel):
    """Base of all answers."""

    # Built when it is first used: a command needs few of the schemas.
    model_config = ConfigDict(from_attributes=True, frozen=True, defer_build=True)


class Selection(RootModel[dict[str, Any]]):
    """The parts of an answer that `fields` named."""


class SelectionPage(Out):
    """A page of which `fields` named some parts."""

    items: list[dict[str, Any]] = Field(description="Items in the order asked for, each with the fields asked for.")
    next: str | None = Field(description="Cursor of the next page; null: this is the last.")


class SelectionMetrics(Out):
    """Epochs of which `fields` named some metrics."""

    items: list[dict[str, float | None]] = Field(description="Epochs in their order, each with the fields asked for.")
    next: int | None = Field(description="The epoch after which the next page begins; null: this is the last.")
    sampled: bool = Field(description="Whether `points` chose some epochs of all.")


class SelectionEvents(Out):
    """Events of which `fields` named some parts."""

    items: list[dict[str, Any]] = Field(description="Events in the order asked for, each with the fields asked for.")
    next: int | None = Field(description="`after` of the next page; null where there is none yet.")
