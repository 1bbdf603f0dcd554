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
_limit: float | None = None
"""What the innermost block may take that the main thread is in."""


@contextmanager
def ended_if_hung(seconds: float | None = None) -> Iterator[None]:
    """Ends this process where the block takes longer, or where a `Loop` in it does not turn."""
    with _limited(HUNG_SECONDS if seconds is None else seconds):
        yield


@contextmanager
def unlimited() -> Iterator[None]:
    """A block within such a block that may take any time: a database that stands still is waited for."""
    with _limited(None):
        yield


class Loop:
    """A loop that may go on for as long as it turns, inside such a block."""

    def __init__(self) -> None:
        self._turned = time.monotonic()

    def turn(self) -> None:
        """Gives it time anew; often is cheap."""
        if time.monotonic() - self._turned >= _TURN_SECONDS:
            _begin()
            self._turned = time.monotonic()


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    global _limit
    before, _limit = _limit, seconds
    _begin()
    try:
        yield
    finally:
        _limit = before
        _begin()


def _begin() -> None:
    if _limit is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(_limit, exit=True)
