"""Long evaluations as generators: each step is handed over, and the result comes at the end."""

from collections.abc import Callable, Generator
from typing import TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


def finish(steps: Generator[Step, None, Result], progress: Callable[[Step], None] | None = None) -> Result:
    """Runs to the end, telling `progress` every step; returns the result."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        if progress:
            progress(step)
