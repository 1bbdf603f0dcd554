"""The pulse of a worker or node, felt on its own machine: for a container's health check, whatever the API does."""

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path

from workers.node.processes import identity, is_dead

LONGEST_PAUSE = 150.0
"""Between two beats of one that lives, in seconds: so long a node waits for cards and a head that do not answer."""


def beat() -> None:
    """Says that this process turns; a full disk does not stop it."""
    path = _path()
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        try:
            partial.write_text(json.dumps({"process": identity(), "at": time.monotonic()}))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def silence() -> str | None:
    """Why nobody of this user seems to turn on this machine, or None where somebody does.

    The clock is the machine's own since it started: it jumps for nobody.
    """
    try:
        said = json.loads(_path().read_text())
    except (OSError, ValueError):
        return "no worker and no node was started here"
    if is_dead(said["process"]):
        return "the worker or node that was started here is gone"
    age = time.monotonic() - said["at"]
    return None if 0 <= age <= LONGEST_PAUSE else f"the worker or node here has not turned for {age:.0f} s"


def _path() -> Path:
    """Of a temporary folder: a container has its own."""
    return Path(tempfile.gettempdir()) / f"ttsv-pulse-{os.getuid()}.json"
