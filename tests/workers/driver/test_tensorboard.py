"""TensorBoard's files are a copy for people: whatever becomes of them, the trials go on."""

import errno
import logging
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from workers.driver.tensorboard import TensorBoardLogger
from workers.trial_process.messages import Job


def report(logger: TensorBoardLogger, trial: Any, number: int) -> None:
    numbers = {f"metric {place}": 1.0 for place in range(20)}
    logger.log_trial_result(number, trial, {**numbers, "timesteps_total": number, "training_iteration": number})


@pytest.mark.timeout(60)
def test_a_disk_that_was_full_for_a_moment_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that writes ended of it, and takes nothing any more."""
    logger, trial = TensorBoardLogger(tmp_path), MagicMock(evaluated_params={})
    trial.config = {"job": asdict(Job(7, 1, 0, {}))}
    logger.log_trial_start(trial)
    report(logger, trial, 1)
    events = logger._trial_writer[trial].file_writer.event_writer
    worker, written, flush = events._worker, type(events._ev_writer), type(events._ev_writer).flush

    def full(writer: Any) -> Any:
        if threading.current_thread() is worker:
            raise OSError(errno.ENOSPC, "No space left on device")
        return flush(writer)

    with monkeypatch.context() as patched:
        patched.setattr(written, "flush", full)
        patched.setattr("threading.excepthook", lambda _: None)
        worker._next_flush_time = 0
        report(logger, trial, 2)
        worker.join(20)
    assert not worker.is_alive()
    with caplog.at_level(logging.WARNING):
        for number in range(3, 10):
            report(logger, trial, number)
        logger.log_trial_end(trial)
    assert caplog.text.count("no further TensorBoard logs") == 1
    assert not logger._trial_writer
    assert list((tmp_path / "trial-7").iterdir())
