"""A disk that is full or fails, or a store that is away: no fault of the trial that meets it first."""

import contextlib
import errno
import tempfile
import time
from pathlib import Path

from ttsv.errors import TrialError

_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
_PROBE_BYTES = 2**18

SHORTEST_WAIT, LONGEST_WAIT = 10.0, 60.0
"""How many seconds a process waits before its trial is tried again, here or elsewhere."""


def is_disk_trouble(error: BaseException, folder: Path) -> bool:
    """Whether the disk is to blame: the error says so, or one of which it came does, or `folder` takes nothing more.

    Libraries that write files themselves (safetensors, NumPy) tell of a full disk by errors of their own. What the
    trial says of itself, a `TrialError`, is believed.
    """
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, OSError) and told.errno in _TROUBLE:
            return True
        told = told.__cause__ or told.__context__
    return not isinstance(error, TrialError) and not _takes_more(folder)


def wait_for_disk(folder: Path) -> None:
    """Returns once `folder` takes files again, within those bounds: nobody is served by failing again at once."""
    began = time.monotonic()
    time.sleep(SHORTEST_WAIT)
    while not _takes_more(folder) and time.monotonic() < began + LONGEST_WAIT:
        time.sleep(1)


def _takes_more(folder: Path) -> bool:
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return file.write(bytes(_PROBE_BYTES)) == _PROBE_BYTES
    return False
