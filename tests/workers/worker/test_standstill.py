from service.queue.leases import Watched
from workers.worker.poller import Standstill


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(heartbeat: int, *, experiment: int = 1, fence: int = 1) -> Watched:
    return Watched(experiment, fence, heartbeat, "worker", None)


def stillness(watch: Standstill, *running: Watched) -> list[float]:
    return [seconds for _, seconds in watch.look(running)]


def test_only_a_heartbeat_or_a_new_fence_starts_anew() -> None:
    clock = Clock()
    watch = Standstill(2, clock)
    assert stillness(watch, seen(5), seen(0, experiment=2)) == [0, 0]
    clock.now += 1
    assert stillness(watch, seen(5), seen(1, experiment=2)) == [1, 0]
    clock.now += 2
    assert stillness(watch, seen(5), seen(1, experiment=2)) == [3, 2]
    clock.now += 1
    assert stillness(watch, seen(5, fence=2), seen(1, experiment=2)) == [0, 3]


def test_gaps_do_not_count() -> None:
    """A suspended machine, a stopped process, a jumping clock."""
    clock = Clock()
    watch = Standstill(2, clock)
    stillness(watch, seen(5))
    clock.now += 3600
    assert stillness(watch, seen(5)) == [2]


def test_outage_does_not_count() -> None:
    clock = Clock()
    watch = Standstill(2, clock)
    stillness(watch, seen(5))
    clock.now += 1
    stillness(watch, seen(5))
    watch.interrupt()
    clock.now += 1.5
    assert stillness(watch, seen(5)) == [1]
    clock.now += 1.5
    assert stillness(watch, seen(5)) == [2.5]


def test_absence_forgets() -> None:
    clock = Clock()
    watch = Standstill(2, clock)
    stillness(watch, seen(5))
    clock.now += 1
    assert stillness(watch) == []
    clock.now += 1
    assert stillness(watch, seen(5)) == [0]
