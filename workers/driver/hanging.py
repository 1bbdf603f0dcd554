"""Ends a driver whose main thread hangs: its lease is renewed by another one, so that nobody else would.

A thread counts the seconds that a block takes, but for those in which the whole process stood still, as in a container
that was paused. Where the interpreter itself hangs no thread goes on, nor that of the lease: the worker sees it.
"""

import faulthandler
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HUNG_SECONDS = 300.0
"""So long imports, or one of Tune's steps, may take."""
_LOOK_SECONDS = 1.0
_limit = _left = math.inf
"""What the innermost block may take that the main thread is in, and what is left of that."""
_waiting = False


@contextmanager
def ended_if_hung(seconds: float | None = None) -> Iterator[None]:
    """Ends this process where the block takes longer without a `turn`; the log then says where every thread stands."""
    over = threading.Event()
    with _limited(HUNG_SECONDS if seconds is None else seconds):
        threading.Thread(target=_count, args=(over,), name="hanging", daemon=True).start()
        try:
            yield
        finally:
            over.set()


@contextmanager
def unlimited() -> Iterator[None]:
    """A block within such a block that may take any time: a database that stands still is waited for."""
    global _waiting
    with _limited(math.inf):
        _waiting = True
        try:
            yield
        finally:
            _waiting = False


def is_waiting() -> bool:
    """Whether the main thread is in a block that may take any time: it hears no trial meanwhile."""
    return _waiting


def turn() -> None:
    """Begins the innermost block's time anew: a loop may go on for as long as it turns."""
    global _left
    _left = _limit


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    global _limit
    before, _limit = _limit, seconds
    turn()
    try:
        yield
    finally:
        _limit = before
        turn()


def _count(over: threading.Event) -> None:
    global _left
    while not over.wait(_LOOK_SECONDS):
        _left -= _LOOK_SECONDS
        if _left <= 0:
            faulthandler.dump_traceback()
            os._exit(1)
