"""A trial inside Ray Tune: one process runs many of them, one after the other."""

import dataclasses
import errno
import gc
import math
import time
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from ray import tune

from ttsv.config import TrialConfig
from ttsv.errors import DivergedError, TrialError
from ttsv.trial import EpochMetrics, TrialResult
from workers.folder import Journal, manifest, trial_folder
from workers.reports import EpochReport, FailureReport, Job, Report, ResultReport

_DISK_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
_TRACEBACK_CHARACTERS = 4000

REPORT_SECONDS = 0.5
"""Epochs shorter than this are reported together."""


class TrialTrainable(tune.Trainable):
    """Each step is one epoch; the last one is the result or the failure.

    A failure that would come again is reported, not raised: Ray would take the process down for it. Reading the
    configuration: `job` (the fields of a `Job`), `run` (in the shape of `run_trial`), `data_dir` and `cpus`.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Prepares the process, then the first trial."""
        import torch

        torch.set_num_threads(math.ceil(config["cpus"]))
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepares the next trial in the same process."""
        self._end()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Runs up to the next report."""
        report = self._guarded()
        return {"report": report, "done": not isinstance(report, EpochReport)}

    def cleanup(self) -> None:
        """Closes the trial."""
        self._end()

    def _begin(self, config: dict[str, Any]) -> None:
        self._reports: Iterator[Report] = _reports(Job(**config["job"]), config["run"], Path(config["data_dir"]))

    def _end(self) -> None:
        """Leaves nothing of the last trial behind, least of all in the GPU's memory."""
        import torch

        if isinstance(self._reports, Generator):
            self._reports.close()
        self._reports = iter(())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()
            torch.cuda.empty_cache()

    def _guarded(self) -> Report:
        try:
            return next(self._reports)
        except TrialError as error:
            return FailureReport(error.failure, str(error))
        except MemoryError:
            return FailureReport("oom", "the trial does not fit into the machine's memory")
        except OSError as error:
            if error.errno in _DISK_TROUBLE:
                raise  # the machine's fault, not the trial's: the attempt counts as lost, and another one may succeed
            return _bug()
        except Exception:
            return _bug()


def _reports(job: Job, run: Any, data_dir: Path) -> Iterator[Report]:
    """What the trial has to say. The first epoch at once, later ones together, as each report costs a round trip."""
    config = TrialConfig.from_dict(job.config)
    folder = trial_folder(data_dir, job.trial_id, job.fence)
    journal = Journal(folder)
    points = journal.after(job.stored_epochs)
    if points:
        yield EpochReport(points)
        points = []
    reported_at = -math.inf
    try:
        for item in run(config, data_dir=data_dir, folder=folder):
            if isinstance(item, EpochMetrics):
                _require_finite(item, f"epoch {item.epoch}")
                journal.append(item)
                points.append(item)
                if time.monotonic() - reported_at >= REPORT_SECONDS:
                    yield EpochReport(points)
                    points, reported_at = [], time.monotonic()
            else:
                _require_finite(item, "the result")
                files = manifest(item.artifacts, data_dir)
                if points:
                    yield EpochReport(points)
                yield ResultReport(item, files)
                return
    except Exception:
        if points:
            yield EpochReport(points)
        raise
    raise RuntimeError("the trial ended without a result")


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


def _bug() -> FailureReport:
    """The exception being handled, as a failure that nobody foresaw."""
    return FailureReport("error", traceback.format_exc()[-_TRACEBACK_CHARACTERS:])
