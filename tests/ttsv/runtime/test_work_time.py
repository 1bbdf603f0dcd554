"""The seconds of a generator are those in which it works."""

import time
from collections.abc import Generator

import pytest

from ttsv.runtime.work_time import WorkTime, timed


def steps(heard: list[str]) -> Generator[int, None, str]:
    """Works for a fiftieth of a second before each of two steps and its result."""
    for number in range(2):
        time.sleep(0.02)
        try:
            yield number
        except ValueError as error:
            heard.append(str(error))
    time.sleep(0.02)
    return "result"


def test_what_passes_while_nobody_asks_is_not_counted() -> None:
    spent, told, results = WorkTime(), list[int](), list[str]()

    def whole() -> Generator[int, None, None]:
        results.append((yield from timed(steps([]), spent)))

    for step in whole():
        told.append(step)
        time.sleep(0.3)
    assert (told, results) == ([0, 1], ["result"])
    assert 0.06 <= spent.seconds < 0.3


def test_what_is_thrown_reaches_it() -> None:
    heard = list[str]()
    running = timed(steps(heard), WorkTime())
    assert next(running) == 0
    assert running.throw(ValueError("dropped")) == 1
    assert heard == ["dropped"]
    with pytest.raises(KeyError):
        running.throw(KeyError("not known"))


def test_it_is_closed_with_its_reader() -> None:
    over = list[bool]()

    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            over.append(True)

    running = timed(endless(), WorkTime())
    next(running)
    running.close()
    assert over == [True]
