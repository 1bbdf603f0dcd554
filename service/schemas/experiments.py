"""What the API says of experiments and events; `service.specs.grid.ExperimentSpec` is what comes in."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from service.schemas.answers import Out
from service.specs.states import ExperimentState, TrialState

BEST_SAID: dict[str | None, str] = {
    None: "best validation accuracy",
    "held-out": "best validation accuracy",
    "test": "best test accuracy of an epoch: not for selection",
    "both": "best accuracy of an epoch, validation or test: not for selection",
}
"""What the best accuracy of an epoch is, by the images on which trials validate."""


class ExperimentProgress(Out):
    """How far an experiment is."""

    trials: dict[TrialState, int] = Field(description="How many trials are in each state.")
    epochs_done: int = Field(description="Epochs that are done, summed over trials.")
    epochs: int = Field(description="Epochs done or still planned: of trials that ended early, those they did.")
    best_accuracy: float | None = Field(
        description="Best test accuracy of a finished trial: not to choose by, or it is no test any more."
    )
    best_val_accuracy: float | None = Field(
        description="Best accuracy of any epoch so far, on the images that `validated_on` names."
    )
    seconds_left: float | None = Field(
        description="From its last epoch on, at its pace; null unless it runs and enough is done to tell."
    )
    validated_on: Literal["held-out", "test", "both"] | None = Field(
        None,
        description="As `training.validation` of its trials; `test`: `best_val_accuracy` is of test images, not to "
        "choose by; null: there is no trial yet.",
    )

    @property
    def best_said(self) -> str:
        """What `best_val_accuracy` is, in words."""
        return BEST_SAID[self.validated_on]

    @property
    def best_to_choose_by(self) -> float | None:
        """`best_val_accuracy`, where no test image is in it."""
        return self.best_val_accuracy if self.validated_on in (None, "held-out") else None


class ExperimentOut(Out):
    """An experiment with its progress."""

    id: int = Field(description="Number by which other operations name it.")
    name: str = Field(description="For people; need not be unique.")
    state: ExperimentState = Field(description="`succeeded`, `stopped`, `failed` and `cancelled` are final.")
    error: str | None = Field(description="Why it failed, and what to do; else null.")
    waiting: str | None = Field(None, description="Why none of its trials can run now; null where some can.")
    priority: int = Field(description="-1000 to 1000; higher runs first among experiments of the same owner.")
    grid_points: int = Field(
        description="Points of the grid, before those that are equal become one trial; of a search the most it may try."
    )
    trial_count: int = Field(description="Trials, of which no two train the same network the same way.")
    created_at: datetime = Field(description="When it was posted.")
    started_at: datetime | None = Field(description="When a worker first claimed it.")
    finished_at: datetime | None = Field(description="When it became final; null before, and once it is queued again.")
    progress: ExperimentProgress = Field(description="How far it is.")
    spec: dict[str, Any] = Field(description="As it was stored, defaults included.")
    tags: list[str] = Field([], description="Words by which it is found.")
    owner: str | None = Field(None, description="Whose key posted it.")
    stopping: bool = Field(False, description="Running trials finish, no other begins.")
    revision: int = Field(0, description="Grows with every change that people make.")
    archived_at: datetime | None = Field(
        None, description="Since when lists and leaderboards leave it out; null: they do not."
    )


class NewExperimentOut(ExperimentOut):
    """An experiment as it was stored."""

    warnings: list[str] = Field(
        [], description="Fields that have no effect, what is lacking, and what would not fit, with why."
    )


class ExperimentUpdate(Out):
    """What a stream says of an experiment's progress."""

    id: int = Field(description="The experiment's.")
    state: ExperimentState = Field(description="Of the whole experiment.")
    error: str | None = Field(description="Why it failed, and what to do; else null.")
    waiting: str | None = Field(None, description="Why none of its trials can run now; null where some can.")
    progress: ExperimentProgress = Field(description="How far it is.")


class ExperimentPosted(Out):
    """What a stream says of new experiments."""

    id: int = Field(description="The number of the newest one; 0 where there is none.")


class TrialsChanged(Out):
    """What a stream says of trials: which of them began or ended to run."""

    ids: list[int] = Field(description="Their numbers; what became of them, their events and the API say.")


class DeletionOut(Out):
    """What goes with an experiment that is deleted."""

    id: int = Field(description="The experiment's.")
    name: str = Field(description="The experiment's.")
    trials: int = Field(description="Trials that go, with their epochs and events.")
    results: int = Field(description="Results that go.")
    files: int = Field(description="Files in manifests that go; logs and checkpoints go, too.")
    size: int = Field(description="Bytes of those files.")
    shown_on: list[str] = Field(description="Data sets on whose boards, and in whose tables, its results count now.")
    deleted: bool = Field(description="Whether it is deleted: files and rows go within minutes, while a worker runs.")


class ExperimentPage(Out):
    """In the order asked for, newest first by default."""

    items: list[ExperimentOut] = Field(description="Experiments in the order asked for.")
    next: str | None = Field(description="Cursor of the next page; null: this is the last.")


class EventOut(Out):
    """Something that happened."""

    id: int = Field(description="Grows with time: what comes `after` it is later.")
    experiment_id: int | None = Field(description="The experiment to which it happened.")
    trial_id: int | None = Field(description="The trial to which it happened; null: to the experiment as a whole.")
    at: datetime = Field(description="When it happened.")
    actor: str = Field(description="Who did it: the name of a key's owner, or of a worker.")
    kind: str = Field(description="What happened, such as `submitted` or `trial_finished`.")
    detail: dict[str, Any] = Field(description="What there is to say of it, by kind.")


class EventPage(Out):
    """In the order asked for, oldest first by default."""

    items: list[EventOut] = Field(description="Events in the order asked for.")
    next: int | None = Field(description="`after` of the next page; null where there is none yet.")


class PresetOut(Out):
    """A table or figure of the paper that can be asked for by name."""

    name: str = Field(description="By which it is asked for: `paper/table`.")
    title: str = Field(description="What the table or figure shows.")
