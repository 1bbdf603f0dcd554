"""Who comes before all others after a long time: that nobody waits for ever, and that nobody else has more by it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from service.queue.shares import Amount, Demand, Usage, allocate
from service.queue.turns import OVERDUE_SECONDS, Turns

NODE = [Amount(32, 4)]


def begun(wanted: Sequence[Demand], hours: float, seconds: float, *, turns: bool = True) -> dict[int, int]:
    """Experiment -> how many trials of so many seconds began on a node of four GPUs in so many hours."""
    usage, asked, ends, found = Usage(), Turns(), list[tuple[float, int]](), Counter[int]()
    gpus = {one.experiment_id: one.needs.gpus for one in wanted}
    step, now = min(300.0, seconds / 4), 0.0
    while (now := now + step) < hours * 3600:
        ends = [(at, number) for at, number in ends if at > now]
        running = Counter(number for _, number in ends)
        demands = [replace(one, running=running[one.experiment_id]) for one in wanted]
        usage.add(demands, NODE, step)
        first = asked.first(demands, usage, now) if turns else None
        for number, share in allocate(demands, NODE, most_experiments=99, usage=usage, first=first).items():
            while running[number] < share and sum(gpus[one] for _, one in ends) + gpus[number] <= NODE[0].gpus:
                ends.append((now + seconds, number))
                running[number] += 1
                found[number] += 1
    return dict(found)


ZOE = Demand(1, 1, Amount(1, 1), project_id=1, owner="zoe")
ADA = Demand(2, 99, Amount(1, 1), project_id=2, owner="ada")
BOB = Demand(3, 2, Amount(1, 4), project_id=2, owner="bob", priority=1000)


def test_a_person_whose_project_is_never_next_gets_a_turn() -> None:
    assert 3 not in begun([ZOE, ADA, BOB], hours=24, seconds=600, turns=False)
    found = begun([ZOE, ADA, BOB], hours=24, seconds=600)
    assert found[3] == 20, "after an hour, the ends of those that run, and one trial, again"
    assert found[1] > 24 * 6 * 0.7


def test_who_comes_first_of_a_person_is_not_left_behind_by_what_comes_later() -> None:
    """The smaller one fits beside somebody else's; without a turn it would run in the larger one's place for ever."""
    large, small = replace(BOB, experiment_id=1, owner="ada"), ADA
    zoe = replace(ZOE, experiment_id=3, project_id=2)
    wanted = [large, small, zoe]
    assert begun(wanted, hours=12, seconds=600)[1] == 9


def test_a_turn_lasts_until_its_trial_ends_or_for_as_long_as_anybody_waits() -> None:
    turns, usage = Turns(), Usage()
    waiting = [replace(ADA, running=3), replace(ZOE, running=1), BOB]
    running = [ADA, ZOE, replace(BOB, running=1)]
    usage.add(waiting, NODE, 60)
    began = OVERDUE_SECONDS + 7200.0
    assert turns.first(waiting, usage, 0.0) is None
    assert turns.first(waiting, usage, OVERDUE_SECONDS) == 3
    assert turns.first(waiting, usage, began - 1) == 3, "others' trials take as long as they take"
    assert turns.first(running, usage, began) == 3
    assert turns.first(running, usage, began + OVERDUE_SECONDS) == 3
    assert turns.first(running, usage, began + OVERDUE_SECONDS + 1) == 1, "who has waited for as long"
    assert turns.first(waiting, usage, began + OVERDUE_SECONDS + 2) == 1
    assert turns.first([ADA, ZOE, BOB], usage, began + OVERDUE_SECONDS + 3) is None, "its trial ended"
    assert turns.first(waiting, usage, began + 2 * OVERDUE_SECONDS + 4) == 3, "it waited anew"


def test_nobody_gets_one_in_place_of_more_urgent_ones_of_its_own() -> None:
    """Priority is a promise among one person's experiments."""
    turns, usage = Turns(), Usage()
    waiting = [replace(ADA, experiment_id=9, priority=1, running=3), replace(ZOE, running=1), ADA]
    usage.add(waiting, NODE, 60)
    for now in (0.0, 10 * OVERDUE_SECONDS):
        assert turns.first(waiting, usage, now) is None


@pytest.mark.parametrize("seconds", [600.0, 7200.0])
def test_where_many_wait_long_nobody_has_more_by_it(seconds: float) -> None:
    """Who has had what is due to it gets no turn, however long it waits for the next one."""
    wanted = [
        Demand(number, 99, Amount(1, 1), project_id=1, owner=f"person {number}", person_weight=weight)
        for number, weight in enumerate([3.0, *[1.0] * 11], start=1)
    ]
    with_turns, without = (begun(wanted, hours=seconds / 60, seconds=seconds, turns=turns) for turns in (True, False))
    assert len(without) == 12
    assert all(abs(with_turns[number] - count) <= 1 for number, count in without.items())
