"""What goes from the driver to a trial's process, and back: plain data, light to import."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NotRequired, TypedDict

from service.queue.cluster import GPUS
from ttsv.config.fields import TrialFields
from ttsv.results import EpochMetrics, StageProgress, TrialResult
from workers.node.depot.home import Home

if TYPE_CHECKING:
    from service.database.experiments import ResourceSeries

RunTrial = Callable[..., Iterator[EpochMetrics | TrialResult | StageProgress]]
"""The shape of `ttsv.trial.run_trial`."""


@dataclass(frozen=True)
class Job:
    """One trial to be run under one fence; the database has its epochs up to `stored_epochs` already.

    With `source`, a saved network's path in the data folder, nothing is trained: that network is evaluated. `attempt`
    numbers the driver's attempts at the trial, from 0. `alone`: with a whole card, where the pass reserves a fraction.
    """

    trial_id: int
    fence: int
    stored_epochs: int
    config: TrialFields
    source: str | None = None
    attempt: int = 0
    alone: bool = False


class JobFields(TypedDict):
    """The fields of a `Job`, as Tune hands them on."""

    trial_id: int
    fence: int
    stored_epochs: int
    config: TrialFields
    source: str | None
    attempt: int
    alone: bool


class TuneConfig(TypedDict):
    """What Tune hands to a trial's process.

    `shunned` are nodes on which it must not begin; all else is common to a pass:
    `run` has the shape of `run_trial`, `cpus` and `gpus` are reserved, and `every_epoch` says whether each is reported
    for itself. `home`: where files belong, which without it is `data_dir`.
    """

    job: NotRequired[JobFields]
    shunned: NotRequired[Sequence[str]]
    run: RunTrial
    data_dir: str
    home: NotRequired[Home | None]
    cpus: float
    gpus: float
    every_epoch: bool


@dataclass(frozen=True)
class EpochReport:
    """Epochs that finished: usually one; after a resume also those that a killed driver could not store."""

    points: list[EpochMetrics]


class FileFields(TypedDict):
    """A file that is on disk: the fields of `service.queue.trials.ArtifactFile`, which only the driver imports."""

    kind: str
    path: str
    sha256: str
    size: int


@dataclass(frozen=True)
class ResultReport:
    """The trial succeeded, and left these files."""

    result: TrialResult
    artifacts: list[FileFields]


@dataclass(frozen=True)
class FailureReport:
    """The trial failed for a reason that would come again: its class, and what to do about it."""

    failure: str
    message: str


@dataclass(frozen=True)
class CrowdedReport:
    """The trial found too little memory on a card that it shared: others may have had it."""

    message: str


@dataclass(frozen=True)
class HinderedReport:
    """The trial cannot run here now, by no fault of its own.

    A disk is full, a store away, torch cannot be loaded, or the machine has another data set of the name.
    """

    message: str


NOT_TAKEN = "NVIDIA's MPS does not take a process"
"""How a process says why it ends that MPS refused, by no fault of its trial's: only another one may be taken."""
UNABLE = "no trial can run on"
"""How one says so in which no trial could: torch cannot be loaded, or the driver of its card fails."""


@dataclass(frozen=True)
class StartedReport:
    """The trial begins in its process: on this host, with these GPUs of it; `environment` its provenance.

    `host` names the node too where the machine has several; `node` is its id, None outside a cluster. `hinders`: no
    trial can run in that process, which ends next.
    """

    host: str
    gpus: list[str]
    environment: Mapping[str, object] | None = field(default=None, compare=False)
    node: str | None = field(default=None, compare=False)
    hinders: bool = field(default=False, compare=False)

    @property
    def place(self) -> str:
        """Where it runs, in words."""
        return f"{self.host}{GPUS}{', '.join(self.gpus)}" if self.gpus else self.host


@dataclass(frozen=True)
class ResourceReport:
    """What the process has used since the trial began (`workers.trial_process.resources.Sampler.series`)."""

    series: "ResourceSeries"


STORING, BRINGING, FETCHING = "storing files", "data set", "fetching files"
"""How stages begin in which a trial waits for files to be where they belong, for those of its data set, or for what
earlier attempts left, until that is there."""


@dataclass(frozen=True)
class StageReport:
    """The trial's evaluation got on; `further`: to where no earlier attempt came."""

    stage: StageProgress
    further: bool

    @property
    def waits(self) -> bool:
        """Whether it waits for files, which is no doing of the trial's."""
        fetches = self.stage.stage == FETCHING and self.stage.done < self.stage.total
        return fetches or self.stage.stage.startswith((STORING, BRINGING))


Report = (
    StartedReport
    | EpochReport
    | StageReport
    | ResourceReport
    | ResultReport
    | FailureReport
    | CrowdedReport
    | HinderedReport
)
GOING_ON = (StartedReport, EpochReport, StageReport, ResourceReport)
"""After these there is more to come."""
