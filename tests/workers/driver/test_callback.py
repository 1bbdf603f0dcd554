"""What is told of a trial whose process died, and what the log says of each trial."""

import logging
from dataclasses import asdict
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from service.database.experiments import Pace
from tests.results import made_epoch, made_result
from ttsv.results import StageProgress
from workers.driver.callback import TuneCallback, job_of
from workers.driver.deaths import death_of
from workers.trial_process.messages import (
    BRINGING,
    STORING,
    EpochReport,
    FailureReport,
    Job,
    Report,
    ResourceReport,
    ResultReport,
    StageReport,
    StartedReport,
)

STAGE = StageReport(StageProgress(stage="attack", done=1, total=2, seconds_left=None), further=True)


def tunes_trial(trial_id: int = 7) -> Any:
    return MagicMock(config={"job": asdict(Job(trial_id, 1, 0, {}))})


@pytest.mark.parametrize(
    ("report", "end"),
    [
        (ResultReport(made_result(accuracy=0.75), []), "succeeded: accuracy 0.7500"),
        (FailureReport("diverged", "the loss is nan"), "failed (diverged): the loss is nan"),
        (FailureReport("error", "Traceback:\n  File x\nRuntimeError: a bug\n"), "failed (error): RuntimeError: a bug"),
        (EpochReport([made_epoch(2)]), "was stopped by its scheduler after epoch 2"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_the_log_tells_each_trials_start_and_end(report: Report, end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    nothing: Any = MagicMock()
    callback, trial = TuneCallback(nothing, nothing, MagicMock()), tunes_trial()
    callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, {"report": EpochReport([made_epoch(1)]), "done": False})
    callback.on_trial_result(0, [], trial, {"report": report, "done": True})
    assert [record.message for record in caplog.records] == ["trial 7 begins", f"trial 7 {end}"]


def test_what_a_trial_used_is_written_with_the_pace_of_its_reports() -> None:
    recorder, watchdog = MagicMock(), MagicMock()
    pace: Pace = {"reported": 90.0, "longest_pause": 40.0}
    watchdog.pace.return_value = pace
    series: Any = {"interval": 1.0, "seconds": [1.0]}
    report = ResourceReport(series)
    TuneCallback(recorder, watchdog, MagicMock()).on_trial_result(
        0, [], tunes_trial(), {"report": report, "done": False}
    )
    assert recorder.reported.call_args == call(7, ResourceReport(series | {"pace": pace}))
    # What it heard just now ends a pause first.
    assert watchdog.mock_calls == [call.pace(7), call.heard(7, None, waits=False)]


@pytest.mark.parametrize("failure", ["infrastructure", "bad_data"])
def test_a_data_folder_that_was_not_found_is_looked_for_here_too(failure: str) -> None:
    recorder, verification, report = MagicMock(), MagicMock(), FailureReport(failure, "not seen")
    callback = TuneCallback(recorder, MagicMock(), verification)
    callback.on_trial_result(0, [], tunes_trial(), {"report": report, "done": True})
    doubted = failure == "infrastructure"
    assert verification.mock_calls == ([call.doubt(7, report)] if doubted else [])
    assert recorder.mock_calls == ([] if doubted else [call.reported(7, report)])


def test_the_recorder_hears_of_a_death_whose_doing_it_was() -> None:
    watchdog, trial = MagicMock(), tunes_trial()
    trial.temporary_state.said = "it runs low: 9 GB / 10 GB, running low on memory"
    for began in (True, False):
        recorder, watchdog.has_spoken.return_value = MagicMock(), began
        TuneCallback(recorder, watchdog, MagicMock(), memory_gib=4.0).on_trial_error(0, [], trial)
        reason, charged, longest_rest = death_of(trial, 4.0, began=began)
        assert recorder.mock_calls == [call.died(7, reason, charged=began, longest_rest=longest_rest)]
        assert (charged, longest_rest > 0) == (began, True)
    assert watchdog.mock_calls[:2] == [call.has_spoken(7), call.ended(7)], "which forgets it"


def test_what_was_killed_on_purpose_did_not_die() -> None:
    """Whoever killed it said why."""
    recorder, watchdog = MagicMock(), MagicMock()
    watchdog.ended.return_value = False
    TuneCallback(recorder, watchdog, MagicMock()).on_trial_error(0, [], tunes_trial())
    watchdog.ended.assert_called_once_with(7)
    recorder.died.assert_not_called()


@pytest.mark.parametrize(
    "last", [ResultReport(made_result(), []), FailureReport("oom", ""), EpochReport([made_epoch(1)])]
)
def test_the_last_word_of_what_was_killed_comes_too_late(last: Report) -> None:
    """It was under way: the trial waits again, and goes on from the checkpoints that an end would remove."""
    recorder, watchdog, verification = MagicMock(), MagicMock(), MagicMock()
    watchdog.ended.return_value = False
    callback = TuneCallback(recorder, watchdog, verification)
    callback.on_trial_result(0, [], tunes_trial(), {"report": last, "done": True})
    assert recorder.mock_calls == verification.mock_calls == []


def test_every_word_but_the_last_is_heard() -> None:
    """Stored first: a trial that gives way upon it keeps what it said."""
    both = MagicMock()
    both.watchdog.ended.return_value = True
    callback, trial = TuneCallback(both.recorder, both.watchdog, both.verification), tunes_trial()
    callback.on_trial_start(0, [], trial)
    assert both.mock_calls == [
        call.watchdog.began(7, trial.temporary_state.ray_actor, job_of(trial)),
        call.recorder.started(7),
    ]
    epoch = EpochReport([made_epoch(1)])
    began = StartedReport("node-1", [], node="a1b2")
    stages = (STORING, f"{BRINGING} digits")
    files = [StageReport(StageProgress(stage=stage, done=0, total=1), further=False) for stage in stages]
    words = [(began, "a1b2", False), (epoch, None, False), (STAGE, None, False), *((one, None, True) for one in files)]
    for report, node, waits in words:
        both.reset_mock()
        callback.on_trial_result(0, [], trial, {"report": report, "done": False})
        assert both.mock_calls == [call.recorder.reported(7, report), call.watchdog.heard(7, node, waits=waits)]
    both.reset_mock()
    failure, result = FailureReport("oom", "too large"), ResultReport(made_result(), [])
    callback.on_trial_result(0, [], trial, {"report": failure, "done": True})
    assert both.mock_calls == [call.watchdog.ended(7), call.recorder.reported(7, failure)]
    both.reset_mock()
    callback.on_trial_result(0, [], trial, {"report": result, "done": True, "hostname": "node-2"})
    assert both.mock_calls == [call.watchdog.ended(7), call.verification.begin(7, result, "node-2")]
    both.reset_mock()
    callback.on_trial_result(0, [], trial, {"report": epoch, "done": True})
    assert both.mock_calls == [
        call.watchdog.ended(7),
        call.recorder.stopped_early(7, epoch),
    ]
