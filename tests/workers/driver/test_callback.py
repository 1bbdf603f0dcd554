"""What is told of a trial whose process died, and what the log says of each trial."""

import logging
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from service.database.experiments import Pace
from service.queue.rests import LONGEST_OF_HINDERED
from tests.results import made_epoch, made_result
from ttsv.results import StageProgress
from workers.driver.callback import TuneCallback, job_of, reason_of
from workers.trial_process.messages import (
    BRINGING,
    NOT_TAKEN,
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
STAGE = StageReport(StageProgress(stage="attack", done=1, total=2, seconds_left=None), further=True)


def tunes_trial(trial_id: int = 7, error_file: str | None = None) -> Any:
    return MagicMock(config={"job": asdict(Job(trial_id, 1, 0, {}))}, error_file=error_file)


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


NODE_DIED = [
    "The actor died because its node has died. Node Id: 5e2f",
    "The actor is dead because its node has died.",
    "The actor is dead because its owner has died. Owner Id: 01ff",
    "The actor died unexpectedly before finishing this task.\n\tthe actor's node was terminated unexpectedly: health "
    "check failed due to missing too many heartbeats",
    "\tthe actor's node was terminated expectedly: received SIGTERM",
    "\tthe actor's node was terminated: unknown",
    "\tthe actor's node was preempted: spot",
    "The actor 4f7b is unavailable: rpc error 14. The task may or may not have been executed on the actor.",
    "The task's local raylet died. Check raylet.out for more information.",
    "Could not create the actor because its associated placement group was removed.",
    "The actor is dead because it was killed by `ray.kill`.",
]
"""What the installed Ray says where a node, its raylet or the way to it is gone."""
REFUSED = (
    "ray.exceptions.RayTaskError(BrokenContextError): ray::ResourceTrainable.train() (pid=1)\n"
    '  File "trainable.py", line 1, in _next_report\n'
    f"ttsv.errors.BrokenContextError: {NOT_TAKEN} on gpu1: Error 807: MPS server is not ready"
)
LOST = (
    "ray.exceptions.RayTaskError(LostDeviceError): ray::ResourceTrainable.train() (pid=1)\n"
    "ttsv.errors.LostDeviceError: the GPU is lost (CUDA error: uncorrectable ECC error encountered)"
)
BROKEN = LOST.replace("LostDeviceError", "BrokenContextError").replace("the GPU is lost", "a kernel failed")
DISK_FULL = (
    "The actor died because of an error raised in its creation task, ray::ResourceTrainable.__init__() (pid=4711, "
    "ip=10.0.0.2)\n    os.makedirs(self._logdir)\nOSError: [Errno 28] No space left on device: '/tmp/ray'"
)
TORCH_MISSING = (
    "ray::ResourceTrainable.train() (pid=4711)\nttsv.errors.BrokenContextError: no trial can run on node-2: "
    "libtorch_cuda.so: cannot open shared object file"
)
PROCESS_DIED = [
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file.",
    "The worker died unexpectedly while executing this task. Check python-core-worker-*.log files.",
    "The actor is dead because its worker process has died. Worker exit type: USER_ERROR",
    "a trial whose cat, node and owner died of it",
]


@pytest.mark.parametrize(
    ("words", "charged"),
    [(words, False) for words in (*NODE_DIED, REFUSED, LOST)] + [(words, True) for words in (*PROCESS_DIED, BROKEN)],
)
def test_only_a_healthy_process_that_died_alone_is_charged_to_its_trial(
    tmp_path: Path, words: str, charged: bool
) -> None:
    file = tmp_path / "error.txt"
    file.write_text(f"Failure # 1 (occurred at 2026-11-22_08-00-00)\n{words}\n")
    recorder, watchdog = MagicMock(), MagicMock()
    TuneCallback(recorder, watchdog, MagicMock()).on_trial_error(0, [], tunes_trial(7, str(file)))
    (said,) = recorder.died.call_args_list
    longest = LONGEST_OF_HINDERED if words is LOST else 0.0
    assert (said.args[0], said.kwargs) == (7, {"charged": charged, "longest_rest": longest})


@pytest.mark.parametrize(("words", "rests"), [(DISK_FULL, True), (TORCH_MISSING, False)])
def test_what_ends_a_process_before_a_trial_is_in_it_is_nobodys_fault(tmp_path: Path, words: str, rests: bool) -> None:
    file = tmp_path / "error.txt"
    file.write_text(f"Failure # 1 (occurred at 2026-11-22_08-00-00)\n{words}\n")
    recorder = MagicMock()
    TuneCallback(recorder, MagicMock(), MagicMock()).on_trial_error(0, [], tunes_trial(7, str(file)))
    said = recorder.died.call_args.kwargs
    longest = LONGEST_OF_HINDERED if rests else 0.0
    assert said == {"charged": False, "longest_rest": longest}, "or the process has waited by itself"


SHORT = (
    "The actor died unexpectedly before finishing this task.\n"
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 5e2f) was "
    "60.91GB used / 64.00GB limit (0.951)\nOOM kill reason: memory usage above threshold\nObject store memory usage: "
    "[- objects spillable: 0]\nRay killed 1 worker(s) based on the killing policy\nConsidered workers: [\n"
    "(Worker's Lease ID: 01 | Granted time: 2026-11-27 19:24 | Retriable: 0 | Memory used: 3.90 GiB),\n"
    "(Worker's Lease ID: 02 | Granted time: 2026-11-27 19:25 | Retriable: 0 | Memory used: 4.00 GiB)\n]\n"
    f"{'To see more information about memory usage on this node, use `ray logs raylet.out -ip 10.0.0.2`. ' * 30}\n"
    "Top 10 memory users: PID MEM(GB) COMMAND\n4711 31.20 python train.py --password hunter2\n"
)
"""What Ray 2.60 says, of which only the end would be kept."""


@pytest.mark.parametrize(
    ("words", "memory_gib", "charged"),
    [
        (SHORT, 0.0, True),
        (SHORT, 3.95, True),
        (SHORT, 4.0, False),
        (SHORT.replace("3.90 GiB", "38.0 GiB"), 4.0, False),
        (SHORT.replace("4.00 GiB", "38.0 GiB"), 4.0, True),
        (
            "Memory on the node (IP: 10.0.0.2, ID: 5e2f) where the task (actor ID: 4f7b, name=ResourceTrainable.train) "
            "was running was 60.9GB / 64.0GB (0.951), which exceeds the memory usage threshold of 0.95. Ray killed "
            "this worker (ID: 77) because it was the most recently scheduled task.",
            4.0,
            True,
        ),
        ("The actor died. Ray killed 1 worker(s) based on the killing policy", 0.0, True),
    ],
)
def test_what_ray_killed_for_memory_rests_and_is_told_what_to_do(
    tmp_path: Path, words: str, memory_gib: float, charged: bool
) -> None:
    """Charged unless all kept to what is reserved for them: a minute's shortage is nothing, half an hour of it ends it.

    What other people run on that machine is nobody's business.
    """
    file = tmp_path / "error.txt"
    file.write_text(f"Failure # 1 (occurred at 2026-11-22_08-00-00)\n{words}\n")
    recorder = MagicMock()
    callback = TuneCallback(recorder, MagicMock(), MagicMock(), memory_gib=memory_gib)
    callback.on_trial_error(0, [], tunes_trial(7, str(file)))
    assert recorder.died.call_args.kwargs == {"charged": charged, "longest_rest": 300.0}
    reason = recorder.died.call_args.args[1]
    assert reason.startswith("its machine ran short of memory, and Ray ended it; ")
    assert "resources.memory_gib" in reason
    assert "hunter2" not in reason
    assert ("60.91GB used / 64.00GB" in reason) == ("60.91GB used" in words)


def test_without_a_word_of_ray_the_trial_is_charged() -> None:
    recorder, watchdog = MagicMock(), MagicMock()
    TuneCallback(recorder, watchdog, MagicMock()).on_trial_error(0, [], tunes_trial())
    assert recorder.died.call_args.kwargs == {"charged": True, "longest_rest": 0.0}


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
