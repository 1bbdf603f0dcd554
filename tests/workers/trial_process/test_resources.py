"""What a trial's process uses over time: bounded, cheap, and silent about what it cannot see."""

import ctypes
import math
import sys
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.effort import effort
from workers.trial_process import resources
from workers.trial_process.resources import MOST_POINTS, Card, Process, Sampler


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sampler(clock: Clock) -> Sampler:
    return Sampler(lambda: (150.04, 2048.26, None, None), clock=clock)


def test_points_are_columns() -> None:
    clock = Clock()
    taken = sampler(clock)
    assert taken.series(at_once=True) is None, "nothing was seen yet"
    for _ in range(2):
        clock.now += 1
        taken.take()
    assert taken.series(at_once=True) == {
        "interval": 1.0,
        "seconds": [1.0, 2.0],
        "cpu": [150.0, 150.0],
        "memory": [2048.3, 2048.3],
        "gpu": [None, None],
        "gpu_memory": [None, None],
    }


def test_reports_come_every_half_minute() -> None:
    clock = Clock()
    taken = sampler(clock)
    taken.take()
    assert taken.series() is None
    clock.now += 30
    assert taken.series() is not None
    assert taken.series() is None
    assert taken.series(by="signs") is not None, "each of those who ask has them"
    assert taken.series(by="signs") is None


@pytest.mark.parametrize("looks", [1, MOST_POINTS - 1, MOST_POINTS, 10 * MOST_POINTS, 100_000])
def test_a_long_trial_has_no_more_points(looks: int) -> None:
    clock = Clock()
    taken = sampler(clock)
    done = 0
    while done < looks:
        clock.now += taken.interval
        taken.take()
        done += 1
    found = taken.series(at_once=True)
    assert found is not None
    seconds = found["seconds"]
    assert len(seconds) < MOST_POINTS
    assert len(seconds) >= min(looks, MOST_POINTS // 2 - 1)
    assert seconds == sorted(seconds)
    assert found["interval"] == 2 ** round(math.log2(found["interval"]))
    gaps = {round(b - a, 3) for a, b in pairwise(seconds)}
    assert gaps <= {found["interval"]}, "evenly spaced, whatever was thinned"


def test_the_thread_looks_at_this_process() -> None:
    with Sampler(first=0.02) as taken:
        deadline = time.monotonic() + 20
        found = None
        while found is None or len(found["seconds"]) < 3:
            assert time.monotonic() < deadline
            sum(range(10_000))
            found = taken.series(at_once=True)
    memory = psutil.Process().memory_info().rss / 2**20
    assert found["memory"][-1] == pytest.approx(memory, rel=0.5)
    assert max(value or 0 for value in found["cpu"]) > 0
    assert not taken._thread.is_alive()


def test_a_look_that_fails_ends_nothing() -> None:
    looks = iter([OSError("gone"), None, RuntimeError("again")])

    def look() -> tuple[float | None, ...]:
        error = next(looks, None)
        if error is not None:
            raise error
        return 1.0, 2.0, None, None

    with Sampler(look, first=0.01) as taken:
        deadline = time.monotonic() + 20
        while taken.series(at_once=True) is None:
            assert time.monotonic() < deadline


def test_a_look_costs_next_to_nothing() -> None:
    process = Process()
    assert effort(lambda: [process.look() for _ in range(100)]) / 100 < 0.005


class Nvml:
    """NVIDIA's library as far as it is asked."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.asked = code, b""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked = uuid
        return self.code

    def nvmlDeviceGetUtilizationRates(self, handle: Any, found: Any) -> int:
        target = ctypes.cast(found, ctypes.POINTER(resources._Utilisation))
        target.contents.gpu = 87
        return 0


def test_a_card_says_how_busy_it_is() -> None:
    library = Nvml()
    assert Card("GPU-1", library).utilisation() == 87
    assert library.asked == b"GPU-1"
    with pytest.raises(OSError, match="NVML error 6"):
        Card("GPU-1", Nvml(6))


def test_a_gpu_is_looked_at_once_torch_computes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: False,
        current_device=lambda: 0,
        get_device_properties=lambda _index: SimpleNamespace(uuid="abc"),
        memory_reserved=lambda: 3 * 2**20,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Nvml())
    process = Process()
    assert process.look()[2:] == (None, None)
    cuda.is_initialized = lambda: True
    assert process.look()[2:] == (87.0, 3.0)
    monkeypatch.setattr(Card, "utilisation", lambda _self: 1 / 0)
    assert process.look()[2:] == (None, 3.0)
