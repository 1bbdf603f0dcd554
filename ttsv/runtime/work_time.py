"""How long a generator works, without the time in which nobody asks it for more."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


@dataclass
class WorkTime:
    """The seconds of work so far."""

    seconds: float = 0.0


def timed(steps: Generator[Step, None, Result], spent: WorkTime) -> Generator[Step, None, Result]:
    """Passes a generator on, and adds up in `spent` what it takes from one step to the next.

    Between two steps of an evaluation a trial may wait for hours: for a database or a store that is away.
    """
    error: BaseException | None = None
    while True:
        began = time.perf_counter()
        try:
            step = next(steps) if error is None else steps.throw(error)
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            spent.seconds += time.perf_counter() - began
        try:
            yield step
            error = None
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as thrown:  # for the generator, which may go on
            error = thrown
