"""A trial inside Ray Tune: one process runs many of them, one after the other."""

import dataclasses
import errno
import gc
import logging
import math
import os
import socket
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray import tune

from service.queue.cluster import named
from service.queue.shares import Amount, on_whole_cards
from service.storage import trouble_of
from service.storage.attempts import LOG
from ttsv.config.trial import TrialConfig
from ttsv.errors import (
    BrokenContextError,
    DeviceError,
    DivergedError,
    LibraryMemoryError,
    LostDeviceError,
    MachineMemoryError,
    OutOfMemoryError,
    TrialError,
)
from ttsv.hardware.mps import PIPES
from ttsv.results import EpochMetrics, StageProgress, TrialResult
from ttsv.runtime.faults import fault
from workers.node.cards import OFFERED
from workers.node.depot.data_sets import OtherDataError
from workers.node.depot.home import Home
from workers.node.notes import complain
from workers.trial_process.messages import (
    FETCHING,
    GOING_ON,
    NOT_TAKEN,
    UNABLE,
    CrowdedReport,
    EpochReport,
    FailureReport,
    HinderedReport,
    Job,
    Report,
    ResourceReport,
    ResultReport,
    RunTrial,
    StageReport,
    StartedReport,
    TuneConfig,
)
from workers.trial_process.resources import Sampler
from workers.trial_process.signs import SignsOfLife, signs
from workers.trial_process.trial_folder import Furthest, Journal, manifest, require_room, require_there
from workers.trial_process.trial_log import trial_log
from workers.trial_process.workplace import DroppedError, Workplace, workplace

logger = logging.getLogger(__name__)

_Failure = TypeVar("_Failure", bound=TrialError)

_DEVICES = Path("/dev")
_GIB = 2**30
_NODE_ID = "ray.io/node-id"
"""A label that Ray gives to each node."""
_TRACEBACK_CHARACTERS = 4000
_NO_THREAD = "can't start new thread"
"""What Python says of one that the machine refuses; the error has no number."""

REPORT_SECONDS = 0.5
"""Epochs shorter than this are reported together, unless each is wanted for itself."""
STAGE_SECONDS = 10.0
"""Between two reports of how far an evaluation is."""
UNABLE_SECONDS = 15.0
"""How long a process in which no trial can run keeps the next one from starting."""


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What trials need, by which Tune reserves it for each of them.

    It stands here as Tune sends it to their processes, with the class.
    """

    needs: Amount

    def __call__(self, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """What is reserved for a configuration, and not on a node that is shunned: for one alone a whole card."""
        needs = on_whole_cards(self.needs) if config.get("job", {}).get("alone") else self.needs
        bundle = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": needs.memory_gib * _GIB}
        if not config.get("shunned"):
            return tune.PlacementGroupFactory([bundle])
        elsewhere = {_NODE_ID: f"!in({', '.join(config['shunned'])})"}
        return tune.PlacementGroupFactory([bundle], bundle_label_selector=[elsewhere])


class TrialTrainable(tune.Trainable):
    """Each step is one epoch; the last one is the result or the failure.

    A failure that would come again is reported, not raised: Ray would take the process down for it. A step's result is
    the report, and beside it the newest numbers for Tune's schedulers and loggers.
    """

    _reports: Iterator[Report]

    def setup(self, config: dict[str, Any]) -> None:
        """Prepares the process, then the first trial."""
        gpus = config["gpus"]
        # Tune gives a process that has a whole card for a trial alone to no other trials.
        shares = 0 < gpus < 1 and not config["job"].get("alone")
        self._broken = False
        # Of a card with others on it: what is missing may be theirs.
        self._shared = f"; it had {gpus:g} of a GPU" if shares else ""
        self._refused: str | None = None
        self._unable: Exception | None = None
        try:
            self._prepare(gpus, config["cpus"], shares=shares)
        except Exception as error:  # of torch's libraries, or the driver: whatever trial came here would meet it
            logger.exception("no trial can run in this process")
            self._unable = error
        if self._unable is not None or self._refused is not None:
            time.sleep(UNABLE_SECONDS)  # its trial has not begun: to no limit of it does this count
        self._begin(cast(TuneConfig, config))

    def _prepare(self, gpus: float, cpus: float, *, shares: bool) -> None:
        if gpus == 0:
            # Whoever started the cluster: without a GPU reserved it shows all of them, or none.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        elif cards := _cards():
            # As Ray does, unless it was told not to (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES): with all of them in
            # sight every trial of a node would compute on the first.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
        import torch  # here, as drivers import this module, and compute nothing

        from ttsv.config.memory import allocator_share
        from ttsv.runtime.determinism import CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACE
        from ttsv.runtime.devices import keep_freed_memory
        from ttsv.runtime.failures import why_no_card

        # Before the GPU is used: one of this process's later trials may have to be deterministic.
        os.environ.setdefault(CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACE)

        torch.set_num_threads(math.ceil(cpus))
        # Whom MPS does not take, as while its server recovers, or whose driver is broken, sees no card: it would
        # compute on the processor.
        expected = PIPES in os.environ or any(_DEVICES.glob("nvidia[0-9]*"))
        self._refused = why_no_card() if gpus > 0 and expected else None
        if shares and torch.cuda.is_available():
            card = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(allocator_share(gpus, card))
        keep_freed_memory()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepares the next trial in the same process; raises where that can run none, and must end.

        To one that says so by False instead Tune gives a trial, and tells nobody what became of that.
        """
        if self._broken:
            raise BrokenContextError(f"{UNABLE} {socket.gethostname()} in a process whose card or libraries failed")
        try:
            self._end()
        except DeviceError as error:  # while no trial was here: the next one is not charged with it
            self._broken = True
            raise BrokenContextError(f"{UNABLE} {socket.gethostname()} in an idle process: {error}") from error
        self._begin(cast(TuneConfig, new_config))
        return True

    def step(self) -> dict[str, Any]:
        """Runs up to the next report."""
        report = self._next_report()
        return {"report": report, "done": not isinstance(report, GOING_ON), **_numbers(report)}

    def cleanup(self) -> None:
        """Closes the trial."""
        self._end()

    def give_way(self) -> None:
        """Ends the trial after the report that it made last, with a checkpoint of it; it will go on in another process.

        Tune has asked for the next report by then, and waits for it until this process is killed.
        """
        self._end(goes_on=True)
        self._reports = _silence()

    def _begin(self, config: TuneConfig) -> None:
        if (error := self._hindrance()) is not None:
            self._reports = _turned_away(error)
            return
        pause = 0.0 if config["every_epoch"] else REPORT_SECONDS
        self._reports = _reports(
            Job(**config["job"]), config["run"], Path(config["data_dir"]), config.get("home"), pause
        )

    def _hindrance(self) -> DeviceError | None:
        """Why no trial can run in this process; None where one can."""
        host = socket.gethostname()
        if self._unable is not None:
            return BrokenContextError(f"{UNABLE} {host}: {self._unable}")
        if self._refused is None:
            return None
        from ttsv.runtime.failures import NEVER

        words = f"torch cannot use the GPU that {host} offers: {self._refused}"
        if NEVER.search(self._refused):
            words = f"{words}; `ttsv doctor` there says what mends it"
            _show_problem(words)
            if not _have_gpus_elsewhere():
                return BrokenContextError(words)  # which is charged to the trial: it would wait for ever
        elif PIPES in os.environ:
            return BrokenContextError(f"{NOT_TAKEN} on {host}: {self._refused}")
        return LostDeviceError(words)

    def _end(self, *, goes_on: bool = False) -> None:
        """Leaves nothing of the last trial behind, least of all in the GPU's memory.

        One that `goes_on` elsewhere has a checkpoint first; of one that its scheduler stopped nobody would remove it.
        """
        if isinstance(self._reports, Generator) and goes_on:
            self._reports.close()
        elif isinstance(self._reports, Generator):
            try:
                self._reports.throw(DroppedError())
            except DroppedError:
                pass
            except Exception:  # which the next trial here would be blamed for
                logger.exception("the trial before was not ended in order")
        self._reports = iter(())
        gc.collect()
        if self._unable is not None:
            return
        import torch

        from ttsv.runtime.devices import return_freed_memory
        from ttsv.runtime.failures import known_failures

        return_freed_memory()
        if torch.cuda.is_initialized() and not self._broken:  # type: ignore[no-untyped-call]
            with known_failures():
                torch.cuda.empty_cache()

    def _next_report(self) -> Report:
        try:
            return next(self._reports)
        except Exception as error:
            # What a disk refuses while that is dealt with would hide it.
            failed = _cause(error, DeviceError)
            self._broken = failed is not None or _cause(error, LibraryMemoryError) is not None
            if failed is None:
                return self._last_report(error)
        raise failed  # Ray ends the process: nothing more can be computed in it, and another one may have better luck

    def _last_report(self, error: Exception) -> Report:
        """What is said of a trial that ended so, and left the process to others."""
        if isinstance(error, OutOfMemoryError):
            if self._shared and not isinstance(error, MachineMemoryError):
                return CrowdedReport(f"{error}{self._shared}")
            return FailureReport(error.failure, str(error))
        if isinstance(error, MemoryError):
            return FailureReport("oom", "the trial does not fit the machine's memory")
        if trouble_of(error) is not None:
            return HinderedReport(f"{socket.gethostname()} cannot keep the trial's files: {error}")
        if _lacks_process(error):
            return HinderedReport(f"{socket.gethostname()} has no further thread or process now: {error}")
        if isinstance(error, OtherDataError):
            _show_problem(str(error))
            return HinderedReport(str(error))
        if isinstance(error, TrialError):
            return FailureReport(error.failure, str(error))
        return FailureReport("error", traceback.format_exc()[-_TRACEBACK_CHARACTERS:])  # which nobody foresaw


_FETCHES, _FETCHED = (StageReport(StageProgress(stage=FETCHING, done=done, total=1), further=False) for done in (0, 1))


def _reports(job: Job, run: RunTrial, data_dir: Path, home: Home | None, pause: float) -> Iterator[Report]:
    """What the trial has to say. The first epoch at once, later ones together, as each report costs a round trip."""
    gpus = _numbered(_cards())
    host, node = _here()
    yield StartedReport(host, gpus, _environment(), node)
    config = TrialConfig.from_dict(job.config)
    final: Report | None = None
    if home is not None:  # the files may be elsewhere, and there be away
        yield _FETCHES
    with (
        workplace(job, data_dir, home) as place,
        trial_log(place.folder / LOG),
        Sampler() as sampler,
        SignsOfLife(job, sampler, signs()),
        closing(_told(job, run, config, place, pause)) as told,
    ):
        logger.info("trial %d begins, fence %d; %d epochs are stored", job.trial_id, job.fence, job.stored_epochs)
        if home is not None:
            yield _FETCHED
        if gpus:
            import torch  # here, as drivers import this module

            if not torch.cuda.is_available():
                logger.warning("the trial reserves a GPU, and torch sees none: it computes on the processor")
        try:
            for report in told:
                if (series := sampler.series(at_once=isinstance(report, ResultReport))) is not None:
                    yield ResourceReport(series)
                if isinstance(report, ResultReport):
                    final = report
                else:
                    yield report
        except DroppedError as error:
            told.throw(error)
        except Exception as error:
            if isinstance(error, TrialError):
                logger.error("%s: %s", error.failure, error)
            else:
                logger.exception("the trial failed")
            if (series := sampler.series(at_once=True)) is not None:
                yield ResourceReport(series)
            require_there(place.folder)
            if not isinstance(error, TrialError):  # what a trial says of itself is believed
                require_room(place.folder)
            raise
    assert final is not None, "the trial ends with a result, or an error"
    fault("before_result")
    yield final  # once nothing is left to be done here: whoever hears it may end this process


def _turned_away(error: DeviceError) -> Iterator[Report]:
    """Says where it is that no trial can run, so that the next attempt is elsewhere where others have room, and why."""
    host, node = _here()
    yield StartedReport(host, _numbered(_cards()), node=node, hinders=True)
    raise error


def _cause(error: BaseException, kind: type[_Failure]) -> _Failure | None:
    """An error, or the one of which it came, that is of a kind."""
    told: BaseException | None = error
    while told is not None and not isinstance(told, kind):
        told = told.__cause__ or told.__context__
    return told


def _lacks_process(error: Exception) -> bool:
    """Whether the machine refused a thread or a process, of which its user or container has as many as it may."""
    refused = isinstance(error, OSError) and error.errno == errno.EAGAIN
    return refused or (isinstance(error, RuntimeError) and _NO_THREAD in str(error))


def _silence() -> Iterator[Report]:
    """Never says anything."""
    threading.Event().wait()
    yield from ()


def _cards() -> list[str]:
    """The GPUs that Ray gave to this process, by what the node calls them; none outside a cluster."""
    return ray.get_runtime_context().get_accelerator_ids().get("GPU", []) if ray.is_initialized() else []


def _numbered(cards: Sequence[str]) -> list[str]:
    """Cards by their numbers among those that the node offers, where these are known: people count them."""
    offered = os.environ.get(OFFERED, "").split(",")
    return [str(offered.index(card)) if card in offered else card for card in cards]


def _have_gpus_elsewhere() -> bool:
    """Whether further nodes of the cluster have GPUs, or may have."""
    if not ray.is_initialized():
        return False
    try:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        return sum(bool(one["Alive"] and one["Resources"].get("GPU")) for one in nodes) > 1
    except Exception:  # Ray's, of many kinds
        logger.exception("the nodes of the cluster are not known")
        return True


def _here() -> tuple[str, str | None]:
    """What this node is called, and its id: a machine may be several nodes of a cluster."""
    host = socket.gethostname()
    if not ray.is_initialized():
        return host, None
    node = None
    try:
        node = str(ray.get_runtime_context().get_node_id())
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alike = [one for one in nodes if one["Alive"] and one["NodeManagerHostname"] == host]
    except Exception:  # Ray's, of many kinds: it ends no trial
        logger.exception("the nodes of the cluster are not known")
        alike = []
    return (named(host, node) if node is not None and len(alike) > 1 else host), node


def _show_problem(words: str) -> None:
    """Has the node say what is wrong with it: no further trial begins here, and this one elsewhere."""
    if not ray.is_initialized():
        return
    try:
        complain(words)
    except Exception:  # Ray's, of many kinds: the trial is told to run again anyhow
        logger.exception("the node cannot say what is wrong with it")


def _environment() -> Mapping[str, object] | None:
    """Where and with what this process runs; None where that cannot be told, which ends no trial."""
    from ttsv.runtime.provenance import provenance

    try:
        return provenance()
    except Exception:
        logger.exception("where this process runs is not known")
        return None


def _told(
    job: Job, run: RunTrial, config: TrialConfig, place: Workplace, pause: float
) -> Generator[Report, None, None]:
    """Runs the trial and packs what it yields. What a report tells of is stored before it."""
    journal, furthest = Journal(place.folder), Furthest(place.folder)
    unheard = journal.after(job.stored_epochs)
    points = list[EpochMetrics]()
    for stage in place.bring_data_sets(config):
        _log_stage(stage)
        yield StageReport(stage, further=False)
    reported_at = stage_at = -math.inf
    source = dict[str, Path]()
    if job.source is not None:
        if place.stores:
            yield _FETCHES
        source = {"source": place.network(job.source)}
        if place.stores:
            yield _FETCHED
    items = run(config, data_dir=place.data_dir, folder=place.folder, **source)
    try:
        for item in items:
            if unheard:  # what is trained again, where no checkpoint is left, is told when it is
                at = item.epoch if isinstance(item, EpochMetrics) else math.inf
                if known := [point for point in unheard if point.epoch < at]:
                    yield EpochReport(known)
                unheard = []
            if isinstance(item, EpochMetrics):
                _require_finite(item, f"epoch {item.epoch}")
                try:
                    journal.append(item)
                except Exception as error:
                    if isinstance(items, Generator):
                        items.throw(error)  # not closed: of an epoch that nobody will tell no checkpoint may be left
                    raise
                points.append(item)
                _log_epoch(item)
                if time.monotonic() - reported_at >= pause:
                    yield from _synced(place)
                    yield EpochReport(points)
                    points, reported_at = [], time.monotonic()
            elif isinstance(item, StageProgress):
                _log_stage(item)
                if time.monotonic() - stage_at >= STAGE_SECONDS:
                    yield from _synced(place)
                    if points:
                        yield EpochReport(points)
                        points = []
                    yield StageReport(item, furthest.passed(item))
                    stage_at = time.monotonic()
            else:
                _require_finite(item, "the result")
                fault("before_manifest")
                files = manifest(item.artifacts, place.root)
                logger.info("the trial succeeded: accuracy %.4f", item.accuracy)
                yield from _synced(place)
                if points:
                    yield EpochReport(points)
                yield ResultReport(item, files)
                return
    except DroppedError as error:
        if isinstance(items, Generator):
            items.throw(error)  # closed it would save its epoch
        raise
    except Exception:
        if points:
            yield EpochReport(points)
        if isinstance(items, Generator):
            items.close()  # what it was still writing may fail as well, which is heard here
        raise
    raise RuntimeError("the trial ended without a result")


def _synced(place: Workplace) -> Iterator[Report]:
    for stage in place.sync():
        yield StageReport(stage, further=False)


def _log_epoch(item: EpochMetrics) -> None:
    logger.info(
        "epoch %(epoch)d of %(epochs)d: train loss %(train_loss).4g, accuracy %(train_accuracy).4f; "
        "validation loss %(val_loss).4g, accuracy %(val_accuracy).4f; lr %(lr).3g, %(seconds).2f s",
        dataclasses.asdict(item),
    )


def _log_stage(item: StageProgress) -> None:
    left = "" if item.seconds_left is None else f", about {item.seconds_left:.0f} s left"
    logger.info("%s: %s of %s%s", item.stage, item.done, item.total, left)


def _numbers(report: Report) -> dict[str, float]:
    """The newest numbers, by name; `timesteps_total` is what TensorBoard draws them over."""
    if isinstance(report, EpochReport):
        newest = report.points[-1]
        plain = dataclasses.asdict(dataclasses.replace(newest, spectra=None))
        numbers = {name: value for name, value in plain.items() if value is not None}
        return {**numbers, "timesteps_total": newest.epoch}
    if isinstance(report, ResultReport):
        values = ((f.name, getattr(report.result, f.name)) for f in dataclasses.fields(report.result))
        return {f"result/{name}": value for name, value in values if type(value) in (int, float)}
    return {}


def _require_finite(item: EpochMetrics | TrialResult, where: str) -> None:
    """Raises `DivergedError` naming the first number that is not finite: none may reach the database."""
    for path, value in _leaves(dataclasses.asdict(item), ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise DivergedError(f"{where}: {path} is {value}; try a smaller learning rate")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
