"""What becomes of a trial whose process died, by what Ray says of it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray import exceptions
from ray.exceptions import RayActorError

from service.queue.rests import LONGEST_OF_HINDERED, LONGEST_SECONDS
from workers.driver.deaths import Death, Processes, _remember, death_of, reason_of
from workers.trial_process.messages import NOT_TAKEN

SAYS: Any = exceptions
"""As Ray has no types of them."""
DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: with_resources.<locals>.ResourceTrainable
\tactor_id: 4f7b
\tpid: 4711
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the OOM killer
"""
"""As Ray writes it."""


def of_which_ray_said(words: str | None) -> Any:
    """A trial as Tune keeps it once it was told of an error."""
    trial: Any = SimpleNamespace(run_metadata=MagicMock(num_failures=0), temporary_state=SimpleNamespace())
    if words is not None:
        _remember(trial, RuntimeError(words))
    return trial


def test_the_last_sentence_of_ray_without_names_and_advice() -> None:
    trial = of_which_ray_said("an older one")
    _remember(trial, RuntimeError(DIED))
    assert reason_of(trial) == (
        "The actor died unexpectedly before finishing this task. The actor is dead because its worker process has "
        "died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
        "code 2. End of file."
    )


def test_without_a_word_of_ray() -> None:
    assert reason_of(of_which_ray_said(None)) == "the process died, and Ray does not say why"


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


def died(words: str, memory_gib: float = 0.0) -> Death:
    """Death of a trial of which Ray said that, for each of which so much memory is reserved."""
    return death_of(of_which_ray_said(words), memory_gib)


@pytest.mark.parametrize(
    ("words", "charged"),
    [(words, False) for words in (*NODE_DIED, REFUSED, LOST)] + [(words, True) for words in (*PROCESS_DIED, BROKEN)],
)
def test_only_a_healthy_process_that_died_alone_is_charged_to_its_trial(words: str, charged: bool) -> None:
    assert died(words)[1:] == (charged, LONGEST_OF_HINDERED if words is LOST else 0.0)


@pytest.mark.parametrize(("words", "rests"), [(DISK_FULL, True), (TORCH_MISSING, False)])
def test_what_ends_a_process_before_a_trial_is_in_it_is_nobodys_fault(words: str, rests: bool) -> None:
    assert died(words)[1:] == (False, LONGEST_OF_HINDERED if rests else 0.0), "or the process has waited by itself"


@pytest.mark.parametrize("words", [*PROCESS_DIED, BROKEN, *NODE_DIED, DISK_FULL])
def test_of_a_process_in_which_it_never_began_nothing_is_held_against_a_trial(words: str) -> None:
    """No code of it ran there; what ends processes as they start rests, and would end the next one too."""
    _, charged, longest_rest = death_of(of_which_ray_said(words), 0.0, began=False)
    assert not charged
    assert longest_rest == (0.0 if words in NODE_DIED else LONGEST_OF_HINDERED)


def test_without_a_word_of_ray_the_trial_is_charged() -> None:
    assert death_of(of_which_ray_said(None), 0.0) == Death("the process died, and Ray does not say why", charged=True)


SHORT = (
    "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 5e2f) was "
    "60.91GB used / 64.00GB limit (0.951)\nOOM kill reason: Memory usage 65401574195B exceeded threshold of "
    "65283502899B (95.0% of 68719476736B limit)\nObject store memory usage: [- objects spillable: 0\n- bytes "
    "spillable: 0\n(global lru) capacity: 83886080\n(global lru) bytes evicted: 0]\n"
    "Ray killed 2 worker(s) based on the killing policy\nConsidered workers: [\n"
    "Selected to kill: (Actor(7aef): job ID=01000000, lease ID=0100, task name=ResourceTrainable.__init__, required "
    "resources={bundle_group_9498: 0.001, CPU_group_0_9498: 1}, pid=24968, actual memory used=0.37GB, worker ID=538e)\n"
    "Selected to kill: (Actor(c987): job ID=01000000, lease ID=0000, task name=ResourceTrainable.__init__, required "
    "resources={CPU_group_0_97e8: 1, bundle_group_97e8: 0.001}, pid=24967, actual memory used=2.46GB, worker ID=1a74)\n"
    "]\nTotal non-selected idle workers: 0\n"
    f"{'To see more information about memory usage on this node, use `ray logs raylet.out -ip 10.0.0.2`. ' * 30}\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n4711 31.20 python train.py --password hunter2\n"
)
"""What Ray 2.60 says, of which only the end would be kept."""


def test_what_ray_killed_for_memory_rests_and_is_told_what_to_do() -> None:
    """What other people run on that machine is nobody's business."""
    reason, _, longest_rest = died(SHORT)
    assert longest_rest == LONGEST_SECONDS
    assert reason.startswith("its machine ran short of memory, and Ray ended it; ")
    assert "resources.memory_gib" in reason
    assert "hunter2" not in reason
    assert reason.endswith("(max_concurrent_trials): 60.91GB used / 64.00GB")


@pytest.mark.parametrize(
    ("process", "memory_gib", "charged"),
    [
        ("c987", 0.0, True),
        ("c987", 2.4, True),
        ("c987", 2.46, False),
        ("7aef", 0.0, False),
        ("7aef", 0.1, False),
        ("0000", 4.0, True),
        (None, 4.0, True),
    ],
)
def test_of_what_ray_killed_at_once_the_largest_is_charged_unless_it_kept_to_what_is_reserved(
    process: str | None, memory_gib: float, charged: bool
) -> None:
    """A minute's shortage is nothing, half an hour of it ends it. Who cannot be found among them may be the one."""
    error: Exception = SAYS.OutOfMemoryError(SHORT)
    if process is not None:
        error = failed(error, process)
    assert died(str(error), memory_gib).charged == charged


def failed(error: Exception, process: str = "4f7b", killed: list[object] | None = None) -> Exception:
    """What Tune hears of a process of which Ray says that."""
    processes: Any = Processes(MagicMock())
    told, actor = list[Exception](), MagicMock()
    actor._actor_id.hex.return_value = process
    task = MagicMock(_on_error=lambda _tracked, told_of: told.append(told_of))
    task._tracked_actor._on_error = None
    processes._live_actors_to_ray_actors_resources[task._tracked_actor] = actor, MagicMock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.driver.deaths.ray.kill", ([] if killed is None else killed).append)
        processes._actor_task_failed(task, error)
    (only,) = told
    return only


@pytest.mark.parametrize(
    "error",
    [SAYS.OutOfMemoryError("x"), SAYS.NodeDiedError("x"), SAYS.LocalRayletDiedError()],
    ids=lambda error: type(error).__name__,
)
def test_no_word_of_ray_ends_tune(error: Exception) -> None:
    """It knows two kinds, and raises where it hears of another: all that it runs would end."""
    killed = list[object]()
    heard = failed(error, killed=killed)
    assert isinstance(heard, RayActorError)
    assert str(error) in str(heard)
    assert len(killed) == 1, "nobody would hear of it, if it lives"
    assert died(str(heard)).charged is False


@pytest.mark.parametrize("error", [SAYS.ActorDiedError(), SAYS.RayTaskError("train", "a traceback", ValueError())])
def test_what_tune_knows_it_hears_as_it_is(error: Exception) -> None:
    assert failed(error) is error
