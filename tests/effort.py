"""How much computing something is, however quick the processor is and whoever has it besides."""

import time
from collections.abc import Callable

_COUNTED = 1_000_000
_SECONDS = 0.04
"""For so long a processor of ours counts, where nobody else has it."""


def effort(work: Callable[[], object]) -> float:
    """The processor's seconds that `work` would take on one of ours: by how it counts just before and just after."""
    counting = _count()
    start = time.process_time()
    work()
    spent = time.process_time() - start
    return 2 * _SECONDS * spent / (counting + _count())


def _count() -> float:
    start, counted = time.process_time(), 0
    for number in range(_COUNTED):
        counted += number
    return time.process_time() - start
