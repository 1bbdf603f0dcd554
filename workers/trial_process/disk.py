"""A disk that is full or fails, or a store that is away: no fault of the trial that meets it first."""

import errno
import tempfile
from pathlib import Path

_PROBE_BYTES = 2**18

PAUSE = 15.0
"""How many seconds a process waits before its trial is tried again, here or elsewhere."""


def require_room(folder: Path) -> None:
    """Raises `OSError` where `folder` takes nothing more, as libraries that write files do not always say so.

    (safetensors and NumPy tell of a full disk by errors of their own, without a number.)
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if file.write(bytes(_PROBE_BYTES)) < _PROBE_BYTES:
            raise OSError(errno.ENOSPC, f"{folder} takes nothing more")
