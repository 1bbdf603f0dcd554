"""Ends a driver whose main thread hangs: its lease is renewed by another one, so that nobody else would.

`faulthandler` needs no help of the interpreter for it, and says in the log where every thread stands.
"""

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager

HUNG_SECONDS = 300.0
"""So long imports, or one of Tune's steps, may take."""
_TURN_SECONDS = 10.0


@contextmanager
def ended_if_hung(seconds: float | None = None) -> Iterator[None]:
    """Ends this process where the block takes longer, or where a `Loop` in it does not turn."""
    _end_after(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Loop:
    """A loop that may go on for as long as it turns, inside such a block."""

    def __init__(self) -> None:
        self._turned = time.monotonic()

    def turn(self) -> None:
        """Gives it time anew; often is cheap."""
        if time.monotonic() - self._turned >= _TURN_SECONDS:
            _end_after(None)
            self._turned = time.monotonic()


def _end_after(seconds: float | None) -> None:
    faulthandler.dump_traceback_later(HUNG_SECONDS if seconds is None else seconds, exit=True)
