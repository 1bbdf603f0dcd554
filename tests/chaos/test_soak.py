"""The verdict on a soak sees what grows and what is not given back, and nothing where all is steady."""

import dataclasses

import pytest

from tests.chaos.soak import Diary, Look, growths, leaks

LOOKS = 40


def diary(
    *,
    memory: float = 0.0,
    descriptors: float = 0.0,
    threads: float = 0.0,
    processes: float = 0.0,
    connections: float = 0.0,
) -> Diary:
    """An API of 100 MiB and a worker of 50, and what the API has more of (memory in MiB) with every look."""
    written = Diary()
    for number in range(LOOKS):
        worker = Look("worker", 50 * 2**20, 30, 8)
        api = Look("api", 100 * 2**20, 20, 4)
        api = dataclasses.replace(
            api,
            memory=api.memory + int(number * memory * 2**20),
            descriptors=20 + int(number * descriptors),
            threads=4 + int(number * threads),
        )
        short = {1000 + number: Look("ray::IDLE", 2**20 * number, number, 1)}
        more = {2000 + count: Look("orphan", 2**20, 1, 1) for count in range(int(number * processes))}
        written.processes.append({1: api, 2: worker, **short, **more})
        written.connections.append(9 + int(number * connections))
        written.experiments.append(2 * number)
    return written


def test_nothing_is_said_of_what_is_steady_or_short_lived() -> None:
    assert leaks(diary()) == []
    assert [growth.name for growth in growths(diary())] == ["api", "worker"]


def test_what_fills_at_first_and_then_no_more_is_no_leak() -> None:
    written = diary()
    for looks in written.processes[:4]:
        looks[1] = dataclasses.replace(looks[1], memory=50 * 2**20, descriptors=9)
    assert leaks(written) == []


def test_memory_may_grow_by_five_percent() -> None:
    assert leaks(diary(memory=0.12)) == []
    assert leaks(diary(memory=0.2)) == ["api grew from 101.4 to 107.4 MiB"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"descriptors": 0.1}, "api has 23 descriptors, 20 when it was warm"),
        ({"threads": 0.1}, "api has 7 threads, 4 when it was warm"),
        ({"processes": 0.1}, "there are 6 processes, 3 when all was warm"),
        ({"connections": 0.1}, "there are 12 connections, 9 when all was warm"),
    ],
)
def test_what_is_not_given_back_is_named(more: dict[str, float], said: str) -> None:
    assert leaks(diary(**more)) == [said]


def test_a_pool_of_threads_that_is_larger_now_and_then_is_no_leak() -> None:
    written = diary()
    for number in range(0, LOOKS, 3):
        written.processes[number][1] = dataclasses.replace(written.processes[number][1], threads=6)
    for number in range(LOOKS - 3, LOOKS):  # what a median would take for more
        written.processes[number][1] = dataclasses.replace(written.processes[number][1], threads=6)
    assert leaks(written) == []


def test_the_one_that_grows_most_speaks_for_those_alike() -> None:
    written = diary(memory=0.3)
    for looks in written.processes:
        looks[3] = Look("api", 80 * 2**20, 20, 4)
    assert leaks(written) == ["api grew from 102.1 to 111.1 MiB", "all together grew from 152.1 to 161.1 MiB"]


def rays(kibibytes: float, threads: int = 0) -> Diary:
    """One with a raylet of 16 MiB, which keeps so much of every experiment, and has more threads in the end."""
    written = diary()
    for looks, experiments in zip(written.processes, written.experiments, strict=True):
        kept = int(kibibytes * experiments * 2**10)
        looks[4] = Look("raylet", 16 * 2**20 + kept, 48, 30 + (threads if experiments > LOOKS else 0))
    return written


def test_rays_own_may_keep_a_little_of_every_experiment() -> None:
    assert leaks(rays(19, threads=2)) == []
    assert leaks(rays(22)) == ["raylet grew from 16.3 to 17.6 MiB"]
    assert leaks(rays(19, threads=3)) == ["raylet has 33 threads, 30 when it was warm"]


def test_of_many_kinds_the_sum_is_judged() -> None:
    written = diary(memory=0.12)  # 4.2 %
    for looks, experiments in zip(written.processes, written.experiments, strict=True):
        looks[4] = Look("gcs_server", 30 * 2**20 + 100 * experiments * 2**10, 48, 30)
    assert leaks(written) == [
        "gcs_server grew from 31.4 to 37.2 MiB",
        "all together grew from 182.2 to 191.6 MiB",
    ]
