"""What Ray says of trials' processes that died: who is to blame, and for how long their trials rest."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.air.execution._internal import RayActorManager
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.tune.execution import tune_controller
from ray.tune.experiment import Trial

from service.queue import rests
from service.storage.store import TROUBLE
from ttsv.errors import LostDeviceError
from workers.trial_process.messages import NOT_TAKEN, UNABLE

_REASON_CHARACTERS = 2000
_NAMES = re.compile(r"\s+\w+: ")
"""A line in which Ray names what has died: its class, its numbers."""
_NODE_DIED = re.compile(
    r"(its|the actor's) (node|owner) (has|is) d(ied|ead)|node was (forcibly )?(terminated|preempted)"
    r"|local raylet (has )?died|actor \w+ is unavailable|placement group was removed",
    re.I,
)
"""What Ray says where the process died with all around it, or cannot be reached: a raylet's death shows so at first."""

_KILLED = "killed by `ray.kill`"
"""What Ray says of a process that was killed from here for an earlier trial, whose last word was under way."""

_GPU_LOST = f"{LostDeviceError.__name__}: "
"""What a process says last whose card failed: the next trial would have fared no better there."""

_DISK = re.compile(rf"Error: \[Errno ({'|'.join(map(str, sorted(TROUBLE)))})\]")
"""What ends a process that finds no room for Ray's own files: what its trial raises it reports."""
_MEMORY = re.compile(r"memory usage threshold|running low on memory|Ray killed (this|\d+) worker", re.I)
"""What Ray says where its memory monitor ended the process, before the kernel would end any."""
_MEMORY_THEN = re.compile(r"[\d.]+ ?GB (used )?/ [\d.]+ ?GB")
_ENDED = re.compile(r"Selected to kill: \(\w+\((\w+)\).*?actual memory used=([\d.]+)GB")
"""Each of the processes that Ray ended at once, and what it had of the memory."""
_PROCESS = "Ray has no answer of process "
"""What is said here where Ray names no death."""
_WHICH = re.compile(rf"{_PROCESS}(\w+)")
_SHORT_OF_MEMORY = (
    "its machine ran short of memory, and Ray ended it; it may need more than others: have `resources.memory_gib` "
    "reserve what it needs, or let fewer run at a time (max_concurrent_trials)"
)
_OF_OTHERS = "Top 10 memory users"
"""Behind it Ray lists command lines, those of other people too."""


class Death(NamedTuple):
    """Why a process died, whether that is held against its trial, and how long this rests at most before it begins."""

    reason: str
    charged: bool
    longest_rest: float = 0.0


class Processes(RayActorManager):  # type: ignore[misc] # Ray has no types of it
    """Tune's processes, of which any may end in any way.

    Tune knows the death of an actor and the error of a task. All else that Ray says in place of an answer, as when its
    memory monitor ended the process, ends Tune, and with it every other trial.
    """

    def _actor_task_failed(self, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, RayError) and not isinstance(exception, RayActorError | RayTaskError):
            process, _ = self._live_actors_to_ray_actors_resources[tracked_actor_task._tracked_actor]
            name = process._actor_id.hex()
            exception = RayActorError(name, f"{_PROCESS}{name}: {type(exception).__name__}: {exception}")
            with contextlib.suppress(RayError):
                ray.kill(process)  # it may live, and nobody would hear of it
        super()._actor_task_failed(tracked_actor_task, exception)


def survive_deaths() -> None:
    """Has Tune go on whichever way one of its processes ends, also where its own disk is full.

    What it would write down, of the death and of its own state, serves nobody, and what it cannot write ends it.
    """
    tune_controller.RayActorManager = Processes  # type: ignore[attr-defined]
    controller: Any = tune_controller.TuneController
    controller.checkpoint = _if_there_is_room(controller.checkpoint)
    tunes_trial: Any = Trial
    tunes_trial.handle_error = _remember


def _if_there_is_room(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def written(*names: object, **options: object) -> None:
        with contextlib.suppress(OSError):
            write(*names, **options)

    return written


def _remember(trial: Any, exc: Exception | None = None) -> None:
    """In place of two files."""
    trial.run_metadata.num_failures += 1
    trial.run_metadata.invalidate_cache()
    trial.temporary_state.said = str(exc)


def death_of(trial: Trial, memory_gib: float, *, began: bool = True) -> Death:
    """What became of a trial's process, for each of which so much of its node's memory is reserved.

    Of one in which the trial never `began` nothing is held against it: no code of it ran there.
    """
    said = reason_of(trial)
    if _MEMORY.search(said):
        charged = began and _needs_too_much(said, memory_gib)
        return Death(_short_of_memory(said), charged, rests.LONGEST_SECONDS)
    reason = said[-_REASON_CHARACTERS:]
    unheld = any(words in said for words in (NOT_TAKEN, UNABLE, _KILLED, _PROCESS)) or _NODE_DIED.search(said)
    if _GPU_LOST in said or _DISK.search(said) or not (began or unheld):
        return Death(reason, charged=False, longest_rest=rests.LONGEST_OF_HINDERED)
    return Death(reason, charged=not unheld)


def reason_of(trial: Trial) -> str:
    """What Ray knows about the death of a trial's process, in one line."""
    said = getattr(trial.temporary_state, "said", None)
    if said is None:
        return "the process died, and Ray does not say why"
    reason = said.partition(" Some common causes")[0]  # the rest is advice about Ray
    lines = (line.strip() for line in reason.partition(_OF_OTHERS)[0].splitlines() if not _NAMES.match(line))
    return " ".join(filter(None, lines))


def _needs_too_much(said: str, memory_gib: float) -> bool:
    """Whether a trial whose machine ran short of memory may be the one that needs too much.

    Ray ends as many at once as it takes, the newest first. Who had no more than is reserved for it, or less than
    another one of them, did not fill the machine. Else it may be the one, and would be killed for ever: it is charged,
    as for the kernel's killing, but so slowly that ten times in a row last for half an hour.
    """
    had = {name: float(gib) for name, gib in _ENDED.findall(said)}
    which = _WHICH.search(said)
    own = None if which is None else had.get(which[1])
    return own is None or (own > memory_gib and own == max(had.values()))


def _short_of_memory(said: str) -> str:
    """What became of the process, and what to do; what Ray says is long, and names what others run."""
    then = _MEMORY_THEN.search(said)
    return f"{_SHORT_OF_MEMORY}{'' if then is None else f': {then[0]}'}"
