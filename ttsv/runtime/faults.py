"""Named points between two steps whose order matters, at which a process is killed, fails or waits when asked to.

`TTSV_FAULTS` says so of some of them (`after_claim=kill,before_commit=raise,after_checkpoint=sleep:5`). It is read at
import, so that a process with a mistake in it does not start; without it a point is a look into an empty table.
Torch-free, as everything has points.
"""

import errno
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

logger = logging.getLogger(__name__)

FAULTS = "TTSV_FAULTS"
"""Which points do what."""
ONCE = "TTSV_FAULTS_ONCE"
"""A folder, in which each point that was met leaves a file; it is met no more while that is there."""
VARIABLES = (FAULTS, ONCE)


class Point(NamedTuple):
    """In whose process a point is, and which moment it is."""

    who: str
    moment: str


POINTS: Mapping[str, Point] = MappingProxyType(
    {
        "after_submission": Point("API", "an experiment is committed, and whoever posted it has no answer yet"),
        "after_claim": Point("worker", "an experiment is claimed, and its driver not started yet"),
        "after_start": Point(
            "driver",
            "a trial has a process and is about to be marked running, and the process was asked for nothing yet",
        ),
        "before_commit": Point("driver", "a batch of reports is written, and its COMMIT not sent yet"),
        "after_commit": Point("driver", "a batch of reports is committed, and nothing done yet of what follows of it"),
        "before_complete": Point(
            "driver",
            "the last result is committed, and the experiment about to be completed (where no driver is: worker)",
        ),
        "before_rename": Point(
            "trial", "the files of the attempt before are copied, and the copy not renamed yet (on the head: depot)"
        ),
        "after_tensors": Point(
            "trial", "a checkpoint's tensors are on disk, and its record not yet, without which it is none"
        ),
        "after_checkpoint": Point("trial", "a checkpoint is whole, and what it replaces not removed yet"),
        "before_manifest": Point("trial", "the last epoch is over, and the files not made durable nor described yet"),
        "before_result": Point("trial", "all files are where they belong, and the result not reported yet"),
    }
)


class _Deed(NamedTuple):
    action: str
    seconds: float = 0.0


def read(words: str) -> dict[str, _Deed]:
    """What `TTSV_FAULTS` asks for, by point. Raises `ValueError`, which says what would be right."""
    found: dict[str, _Deed] = {}
    for entry in filter(None, map(str.strip, words.split(","))):
        name, _, action = map(str.strip, entry.partition("="))
        if name not in POINTS:
            raise ValueError(f"{FAULTS}: {name!r} is no fault point; there are {', '.join(POINTS)}")
        if name in found:
            raise ValueError(f"{FAULTS}: {name} is named twice; a point does one thing")
        found[name] = _deed(name, action)
    return found


def _deed(name: str, action: str) -> _Deed:
    kind, _, number = action.partition(":")
    if action in ("kill", "raise"):
        return _Deed(action)
    try:
        seconds = float(number) if kind == "sleep" else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{FAULTS}: {action!r} is nothing that {name} can do: write kill, raise or sleep:SECONDS")
    return _Deed(kind, seconds)


_armed = read(os.environ.get(FAULTS, ""))


def failed_disk(words: str) -> Exception:
    """The error of a disk that fails (EIO), as those who handle files meet it."""
    return OSError(errno.EIO, words)


def fault(name: str, error: Callable[[str], Exception] = failed_disk) -> None:
    """The point of this name: nothing, unless it is asked for.

    `error` makes of words what `raise` raises: what a real trouble would at this place. By default that is the error
    of a disk, after which a trial is run again and nothing held against it; where the database is written, that of a
    lost connection (`service.database.outages`).
    """
    deed = _armed.get(name)
    if deed is None or not _is_due(name):
        return
    words = f"fault point {name} ({FAULTS})"
    logger.warning("%s: %s", words, deed.action)
    if deed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed.action == "raise":
        raise error(words)
    else:
        time.sleep(deed.seconds)


def _is_due(name: str) -> bool:
    """Whether nobody was here before, where that is asked for; of two who come at once, one."""
    folder = os.environ.get(ONCE)
    if not folder:
        return True
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        with Path(folder, name).open("x") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        return False
    return True
