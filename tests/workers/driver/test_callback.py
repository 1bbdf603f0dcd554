"""What is told of a trial whose process died, and what the log says of each trial."""

import logging
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.results import made_epoch, made_result
from workers.driver.callback import TuneCallback, reason_of
from workers.trial_process.messages import EpochReport, FailureReport, Job, Report, ResultReport, SkippedReport

DIED = """Failure # 1 (occurred at 2026-11-22_08-00-00)
an older one
Failure # 2 (occurred at 2026-11-22_08-10-00)
The actor died unexpectedly before finishing this task.
\tclass_name: with_resources.<locals>.ResourceTrainable
\tactor_id: 4f7b
\tpid: 4711
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the OOM killer
"""
"""As Ray writes it."""


def test_the_last_sentence_of_ray_without_names_and_advice(tmp_path: Path) -> None:
    file = tmp_path / "error.txt"
    file.write_text(DIED)
    trial: Any = SimpleNamespace(error_file=str(file))
    assert reason_of(trial) == (
        "The actor died unexpectedly before finishing this task. The actor is dead because its worker process has "
        "died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
        "code 2. End of file."
    )


@pytest.mark.parametrize("file", [None, "nowhere"])
def test_without_a_word_of_ray(file: str | None) -> None:
    trial: Any = SimpleNamespace(error_file=file)
    assert reason_of(trial) == "the process died, and Ray does not say why"


@pytest.mark.parametrize(
    ("report", "end"),
    [
        (ResultReport(made_result(accuracy=0.75), []), "succeeded: accuracy 0.7500"),
        (FailureReport("diverged", "the loss is nan"), "failed (diverged): the loss is nan"),
        (FailureReport("error", "Traceback:\n  File x\nRuntimeError: a bug\n"), "failed (error): RuntimeError: a bug"),
        (EpochReport([made_epoch(2)]), "was stopped by its scheduler after epoch 2"),
        (SkippedReport(), "did not begin: its experiment is to stop"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_the_log_tells_each_trials_start_and_end(report: Report, end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    nothing: Any = MagicMock()
    callback = TuneCallback(nothing, nothing, lambda: 1, lambda: None)
    trial: Any = MagicMock(config={"job": asdict(Job(7, 1, 0, {}))})
    callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, {"report": EpochReport([made_epoch(1)]), "done": False})
    callback.on_trial_result(0, [], trial, {"report": report, "done": True})
    assert [record.message for record in caplog.records] == ["trial 7 begins", f"trial 7 {end}"]
