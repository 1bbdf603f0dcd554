"""What a worker tells its drivers, whatever these do."""

import json
import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.queue.leases import Lease
from workers.worker.drivers import Driver, most_drivers


@pytest.mark.parametrize("nodes", [0, 200], ids=["short words", "words longer than what a pipe takes at once"])
def test_one_that_stands_still_keeps_nobody_waiting(nodes: int) -> None:
    """Else the worker would never come to see that it does, and to end it."""
    reader, writer = os.pipe()
    driver = Driver(Lease(1, 1), cast("Any", SimpleNamespace(stdin=os.fdopen(writer, "wb"))))
    shunned = ["f" * 56] * nodes

    def tell() -> None:
        for slots in range(5000):
            driver.tell(slots, 9, shunned)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    os.set_blocking(reader, False)
    said = b""
    for _ in range(3):
        while True:
            try:
                said += os.read(reader, 2**16)
            except BlockingIOError:
                break
        driver.tell(4999, 9, shunned)
    lines = [json.loads(line) for line in said.splitlines()]
    assert said.endswith(b"\n")
    assert lines[-1]["slots"] == 4999
    slots = [line["slots"] for line in lines]
    assert slots == sorted(set(slots)), "in order, and none twice"
    driver.child.stdin.close()  # type: ignore[union-attr]
    os.close(reader)


def test_one_that_is_dead_is_told_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    driver = Driver(Lease(1, 1), cast("Any", SimpleNamespace(stdin=os.fdopen(writer, "wb"))))
    driver.tell(1, 9)
    driver.tell(2, 9)
    driver.child.stdin.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("gib", "cores", "most"), [(2, 1, 8), (16, 1, 16), (16, 8, 17), (512, 8, 128), (512, 64, 549)], ids=str
)
def test_a_machine_holds_as_many_as_a_quarter_of_its_memory_and_its_cores_do(
    monkeypatch: pytest.MonkeyPatch, gib: int, cores: int, most: int
) -> None:
    monkeypatch.setattr("workers.worker.drivers.memory_bytes", lambda: gib * 2**30)
    monkeypatch.setattr("workers.worker.drivers.local_cpus", lambda: cores)
    assert most_drivers() == most
