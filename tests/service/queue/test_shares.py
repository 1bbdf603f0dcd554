"""Shares of a cluster: who gets how many trials, against brute force and by laws that must hold."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.queue.shares import Amount, Demand, Group, Spent, Usage, allocate, on_whole_cards, shortage
from tests.effort import effort
from tests.examples import deep

ONE = Amount(1)

amounts = st.builds(Amount, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.just(0.0))
nodes_of_a_cluster = st.lists(
    st.builds(Amount, st.sampled_from([2.0, 4.0]), st.sampled_from([0.0, 2.0, 4.0]), st.just(0.0)), max_size=4
)


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    weights = {None: 1.0, 1: draw(st.sampled_from([1.0, 0.001])), 2: draw(st.sampled_from([1.0, 3.0, 1000.0]))}
    people = {None: 1.0, 1: draw(st.sampled_from([1.0, 2.0, 1000.0])), 2: draw(st.sampled_from([1.0, 0.001]))}
    projects = st.sampled_from([None, 1, 2])
    return [
        Demand(
            number,
            trials=draw(st.integers(0, 9)),
            needs=draw(amounts),
            priority=draw(st.integers(-1, 1)),
            project_id=(project := draw(projects)),
            weight=weights[project],
            owner=(owner := draw(st.sampled_from([None, "ada", "bob"]))),
            person_weight=people[project] if owner == "ada" else 1.0,
            running=draw(st.integers(0, 3)),
        )
        for number in range(1, draw(st.integers(1, 6)) + 1)
    ]


def packs(wanted: list[Amount], nodes: list[Amount]) -> bool:
    """Whether so many trials can stand on the nodes at once, by trying every way."""
    if not wanted:
        return True
    first, *rest = wanted
    for place, node in enumerate(nodes):
        if first.fits(node):
            left = Amount(node.cpus - first.cpus, node.gpus - first.gpus, node.memory_gib - first.memory_gib)
            if packs(rest, [*nodes[:place], left, *nodes[place + 1 :]]):
                return True
    return False


class TestAlone:
    """Of an experiment whose trials have half a card each, one is to run on a whole one."""

    SHARED = Amount(1, 0.5)

    def given(self, nodes: list[Amount], *asked: Demand, usage: Usage | None = None) -> dict[int, int]:
        return allocate(asked, nodes, most_experiments=9, usage=usage)

    def test_it_comes_first_and_takes_a_card(self) -> None:
        card = Amount(8, 1)
        assert self.given([card], Demand(1, 9, self.SHARED)) == {1: 2}
        assert self.given([card], Demand(1, 9, self.SHARED, alone=1)) == {1: 1}
        assert self.given([card, card], Demand(1, 9, self.SHARED, alone=1)) == {1: 3}
        assert self.given([card, card], Demand(1, 9, self.SHARED, alone=9)) == {1: 2}

    def test_where_no_card_is_whole_any_more_it_waits(self) -> None:
        """And the others of its experiment with it, which would else keep it from ever having one."""
        first, second = Demand(1, 1, self.SHARED), Demand(2, 9, self.SHARED, alone=1)
        assert self.given([Amount(8, 1)], first, second) == {1: 1}
        assert self.given([Amount(8, 1)] * 2, first, second) == {1: 1, 2: 2}

    def test_who_waits_for_a_card_has_it_once_others_used_more(self) -> None:
        usage, room = Usage(), [Amount(8, 1)]
        rival = Demand(1, 9, self.SHARED, running=2)
        usage.add([rival], room, 1)
        assert self.given(room, rival, Demand(2, 9, self.SHARED, alone=1), usage=usage) == {2: 1}

    def test_what_it_uses_is_a_card(self) -> None:
        usage, room = Usage(), [Amount(8, 1)]
        usage.add([Demand(1, 9, self.SHARED, running=1), Demand(2, 9, self.SHARED, running=1, alone=1)], room, 1)
        usage.add([Demand(3, 9, self.SHARED, running=1, alone=1, running_alone=1)], room, 1)
        used = [usage.of(Demand(number, 1, self.SHARED).group) for number in (1, 2, 3)]
        assert used == pytest.approx([0.5, 0.5, 1.0], rel=1e-3)

    @pytest.mark.parametrize(("cards", "given"), [(8, {1: 8, 2: 6}), (3, {1: 4, 2: 1})])
    def test_a_whole_card_counts_as_one_in_its_share(self, cards: int, given: dict[int, int]) -> None:
        """Two projects share alike: two trials of one have a card each if they can, the rest half a card.

        Of three cards the older project's third trial splits the last one, as both have a third by then.
        """
        rival = Demand(1, 99, self.SHARED, project_id=1)
        asks = Demand(2, 99, self.SHARED, project_id=2, alone=2)
        assert self.given([Amount(64, 1)] * cards, rival, asks) == given

    def test_whole_cards_stay_what_they_are(self) -> None:
        for needs in (Amount(1), Amount(2, 1, 3), Amount(1, 4)):
            assert on_whole_cards(needs) == needs
        assert on_whole_cards(Amount(2, 0.25, 3)) == Amount(2, 1, 3)


@given(demands(), nodes_of_a_cluster, st.booleans())
def test_what_is_given_fits_and_nothing_that_fits_is_left_idle(
    asked: list[Demand], nodes: list[Amount], remembered: bool
) -> None:
    usage = Usage() if remembered else None
    got = allocate(asked, nodes, most_experiments=99, usage=usage)
    by_id = {demand.experiment_id: demand for demand in asked}
    assert all(0 < count <= by_id[number].trials for number, count in got.items())
    trials = [by_id[number].needs for number, count in got.items() for _ in range(count)]
    trials.sort(key=lambda needs: (-needs.gpus, -needs.cpus))
    assert packs(trials, nodes)
    if len(nodes) == 1:
        (node,) = nodes
        cpus, gpus = (node[place] - sum(needs[place] for needs in trials) for place in (0, 1))
        hungry = [demand for demand in asked if got.get(demand.experiment_id, 0) < demand.trials]
        assert not any(demand.needs.fits((cpus, gpus, 0)) for demand in hungry)


def cards_hold(parts: list[int], cards: list[int]) -> bool:
    """Whether so many twentieths of a card go onto cards with so many left, by trying every way."""
    if not parts:
        return True
    first, *rest = parts
    return any(
        cards_hold(rest, [*cards[:at], left - first, *cards[at + 1 :]])
        for at, left in enumerate(cards)
        if left >= first and left not in cards[:at]
    )


class TestPartsOfCards:
    @given(
        st.lists(st.tuples(st.sampled_from([8, 12, 15, 6, 10, 20, 40]), st.integers(4, 9)), min_size=1, max_size=4),
        st.integers(1, 3),
    )
    def test_what_is_given_stands_on_cards(self, asked: list[tuple[int, int]], count: int) -> None:
        grids = [Demand(number, trials, Amount(0, part / 20)) for number, (part, trials) in enumerate(asked)]
        got = allocate(grids, [Amount(0, count)], most_experiments=9)
        taken = [part for number, (part, _) in enumerate(asked) for _ in range(got.get(number, 0))]
        whole = sum(part // 20 for part in taken if part >= 20)
        parts = sorted((part for part in taken if part < 20), reverse=True)
        assert whole <= count
        assert cards_hold(parts, [20] * (count - whole))

    @given(st.sampled_from([0.02, 0.1, 0.25, 0.3, 0.4, 0.5, 0.6, 0.9]), st.lists(st.integers(0, 4), max_size=4))
    def test_one_grid_has_as_many_as_each_card_holds(self, part: float, cards: list[int]) -> None:
        got = allocate([Demand(1, 9999, Amount(0, part))], [Amount(0, each) for each in cards], most_experiments=1)
        assert got.get(1, 0) == sum(cards) * int(1 / part + 1e-9)

    def test_what_one_grid_cannot_use_another_has(self) -> None:
        """Else it would stay empty, and a node be kept for a trial that never fits."""
        large, small = Demand(1, 9, Amount(1, 0.6)), Demand(2, 9, Amount(1, 0.3), priority=-1)
        assert allocate([large, small], [Amount(9, 2)], most_experiments=9) == {1: 2, 2: 2}

    def test_a_card_of_which_others_have_a_part(self) -> None:
        half, whole = Demand(1, 9, Amount(1, 0.5)), Demand(2, 9, Amount(1, 1))
        assert allocate([half], [Amount(9, 1.5)], most_experiments=9) == {1: 3}
        assert allocate([whole], [Amount(9, 1.5)], most_experiments=9) == {2: 1}
        assert allocate([half], [Amount(9, 0.9999999999999999)], most_experiments=9) == {1: 2}


def due(projects: list[tuple[float, int]], slots: Fraction | int) -> list[Fraction]:
    """What each of a list of weights and trials is due: as much for its weight, or all that it asks for."""
    found, left = [Fraction(0)] * len(projects), Fraction(slots)
    hungry = set(range(len(projects)))
    while hungry and left:
        level = left / sum(Fraction(projects[at][0]) for at in hungry)
        full = {at for at in hungry if projects[at][1] <= found[at] + level * Fraction(projects[at][0])}
        for at in full or hungry:
            gets = projects[at][1] - found[at] if full else level * Fraction(projects[at][0])
            found[at], left = found[at] + gets, left - gets
        hungry = hungry - full if full else set()
    return found


def weighing(number: int, weight: float, *, person: bool, **more: Any) -> Demand:
    """Of a project that weighs so much, or of a person in one."""
    if person:
        return Demand(number, needs=ONE, project_id=1, owner=f"person {number}", person_weight=weight, **more)
    return Demand(number, needs=ONE, project_id=number, owner="ada", weight=weight, **more)


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(1, 40),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.booleans(),
)
def test_shares_follow_weights(parties: list[tuple[float, int]], slots: int, used: list[int], person: bool) -> None:
    """Each has what it is due but for a part of a trial, whoever used what before."""
    asked = [
        weighing(number, weight, person=person, trials=trials, running=used[number])
        for number, (weight, trials) in enumerate(parties)
    ]
    usage = Usage()
    usage.add(asked, [Amount(slots)], 60)
    for remembered in (None, usage):
        got = allocate(asked, [Amount(slots)], most_experiments=99, usage=remembered)
        assert sum(got.values()) == min(slots, sum(trials for _, trials in parties))
        for number, share in enumerate(due(parties, slots)):
            assert math.floor(share) <= got.get(number, 0) <= math.ceil(share)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 2.0]),
            st.lists(st.tuples(st.sampled_from([1.0, 3.0]), st.integers(1, 15)), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 40),
)
def test_people_divide_what_is_due_to_their_project(
    projects: list[tuple[float, list[tuple[float, int]]]], slots: int
) -> None:
    """But for a part of a trial of the project's, and one of their own."""
    asked = [
        Demand(10 * project + person, trials, ONE, 0, project, f"person {person}", weight, person_weight)
        for project, (weight, people) in enumerate(projects)
        for person, (person_weight, trials) in enumerate(people)
    ]
    for usage in (None, Usage()):
        got = allocate(asked, [Amount(slots)], most_experiments=99, usage=usage)
        wanted = [(weight, sum(trials for _, trials in people)) for weight, people in projects]
        for project, share in enumerate(due(wanted, slots)):
            had = [got.get(10 * project + person, 0) for person in range(len(projects[project][1]))]
            assert math.floor(share) <= sum(had) <= math.ceil(share)
            for count, part in zip(had, due(projects[project][1], share), strict=True):
                assert math.floor(part) - 1 <= count <= math.ceil(part) + 1


def test_what_people_weigh_is_a_word_within_their_project() -> None:
    ada, bob = (Demand(1, 99, ONE, 0, 1, "ada", 3.0, 2.0), Demand(2, 99, ONE, 0, 1, "bob", 3.0))
    eve = Demand(3, 99, ONE, 0, 2, "eve", 1.0, 1000.0)
    assert allocate([ada, bob, eve], [Amount(16)], most_experiments=9) == {1: 8, 2: 4, 3: 4}
    equal = [replace(demand, weight=1.0) for demand in (ada, bob, eve)]
    assert allocate(equal, [Amount(12)], most_experiments=9) == {1: 4, 2: 2, 3: 6}
    few = replace(ada, trials=1)
    assert allocate([few, bob, eve], [Amount(16)], most_experiments=9) == {1: 1, 2: 11, 3: 4}


def test_however_unlike_weights_are_there_are_shares() -> None:
    """The sum of both is the larger one, as numbers are written."""
    for trials, expected in ((50, {1: 4}), (3, {1: 3, 2: 1})):
        for person, firm in product((False, True), repeat=2):
            asked = [weighing(1, 1000, person=person, trials=trials), weighing(2, 1e-20, person=person, trials=99)]
            assert allocate(asked, [Amount(4)], most_experiments=9, firm=firm) == expected


def parts_of_time(asking: Sequence[Demand], slots: int) -> list[float]:
    """What part of all places each has, where trials take one each.

    Trials of many lengths end one by one, and who has no more than it may goes on where one of its own has ended.
    """
    rng, usage, nodes = random.Random(0), Usage(), [Amount(slots)]
    ends: list[list[int]] = [[] for _ in asking]
    ran = [0] * len(asking)
    for now in range(2000 * len(asking) // slots):
        asked = [replace(demand, running=len(mine)) for demand, mine in zip(asking, ends, strict=True)]
        usage.add(asked, nodes, 0.5)
        got = allocate(asked, nodes, most_experiments=99, usage=usage)
        for number, mine in enumerate(ends):
            going = [end for end in mine if end > now]
            going += [now + rng.randint(10, 30) for _ in range(min(got.get(number, 0), len(mine)) - len(going))]
            ends[number] = going
        for number in rng.sample(range(len(asking)), len(asking)):
            while len(ends[number]) < got.get(number, 0) and sum(map(len, ends)) < slots:
                ends[number].append(now + rng.randint(10, 30))
        assert sum(map(len, ends)) == slots, "none stays empty"
        ran = [before + len(mine) for before, mine in zip(ran, ends, strict=True)]
    return [had / sum(ran) for had in ran]


@pytest.mark.parametrize(
    ("weights", "slots", "person"),
    [
        *(((3, 1), 1, False), ((3, 1), 2, True), ((3, 2), 4, False), ((5, 1), 3, True), ((4, 2, 1), 3, True)),
        *(((2, 1), 2, False), ((10, *[1] * 10), 10, False)),
        *(deep((3, 1), 1, True), deep((3, 1), 2, False), deep((3, 2), 4, True), deep((5, 1), 3, False)),
        *(deep((4, 2, 1), 3, False), deep((2, 1), 2, True), deep((10, *[1] * 10), 10, True)),
    ],
)
def test_what_is_due_in_part_is_had_in_turns(weights: tuple[int, ...], slots: int, person: bool) -> None:
    asking = [weighing(number, weight, person=person, trials=9999) for number, weight in enumerate(weights)]
    for had, weight in zip(parts_of_time(asking, slots), weights, strict=True):
        assert had == pytest.approx(weight / sum(weights), rel=0.1)


@pytest.mark.parametrize(
    ("projects", "slots"),
    [
        ([(1, (1, 3)), (1, (1,))], 2),
        ([(1, (1, 3)), (1, (1,))], 3),
        ([(3, (1, 3)), (1, (1,))], 2),
        ([(3, (1, 3)), (1, (1, 2))], 5),
        ([(3, (1, 1)), (1, (1, 2))], 3),
    ],
)
def test_so_it_is_within_a_project_to_which_a_part_is_due(
    projects: list[tuple[int, tuple[int, ...]]], slots: int
) -> None:
    rows = [(number, weight, people, one) for number, (weight, people) in enumerate(projects) for one in people]
    asking = [
        Demand(at, 9999, ONE, 0, number, f"person {at}", weight, one)
        for at, (number, weight, _, one) in enumerate(rows)
    ]
    whole = sum(weight for weight, _ in projects)
    for had, (_, weight, people, one) in zip(parts_of_time(asking, slots), rows, strict=True):
        assert had == pytest.approx(weight / whole * one / sum(people), rel=0.1)


@pytest.mark.parametrize(
    ("weights", "sizes"), [((2, 1, 1), (1, 4, 2)), ((3, 1, 2, 2), (4, 3, 4, 1)), ((1, 1, 1), (1, 4, 2))]
)
def test_weights_are_kept_though_trials_are_larger_than_what_is_due(
    weights: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """Who is due whole trials alone has back what another's larger one took."""
    asking = [
        Demand(number, 99, Amount(1, size), project_id=number, owner="ada", weight=weight)
        for number, (weight, size) in enumerate(zip(weights, sizes, strict=True))
    ]
    node, rng, usage = [Amount(99, 4)], random.Random(0), Usage()
    ends, had = [list[int]() for _ in asking], [0.0] * len(asking)
    for now in range(0, 16 * 3600, 20):
        ends = [[end for end in mine if end > now] for mine in ends]
        running = [replace(one, running=len(mine)) for one, mine in zip(asking, ends, strict=True)]
        usage.add(running, node, 20)
        shares = allocate(running, node, most_experiments=9, usage=usage)
        for number, one in sorted(enumerate(asking), key=lambda _: rng.random()):
            while len(ends[number]) < shares.get(number, 0) and one.needs.gpus <= 4 - _gpus(asking, ends):
                ends[number].append(now + rng.randint(140, 260))
        had = [before + len(mine) * one.needs.gpus for before, mine, one in zip(had, ends, asking, strict=True)]
    for part, weight in zip(had, weights, strict=True):
        assert part / sum(had) == pytest.approx(weight / sum(weights), rel=0.1)


def _gpus(asking: Sequence[Demand], ends: Sequence[Sequence[int]]) -> float:
    return sum(len(mine) * one.needs.gpus for one, mine in zip(asking, ends, strict=True))


def test_a_large_trial_of_which_a_part_is_due_has_its_turn_too() -> None:
    usage, nodes = Usage(), [Amount(8)]
    small, large = of_project(1, weight=3), Demand(2, 9, Amount(5), project_id=2, owner="bob")
    assert allocate([small, large], nodes, most_experiments=9, usage=usage) == {1: 8}
    usage.add([replace(small, running=8)], nodes, 10)
    assert allocate([small, large], nodes, most_experiments=9, usage=usage) == {2: 1, 1: 3}


def test_a_turn_stops_nobody() -> None:
    """What may go on where trials give way at once: those that run."""
    for running in ((2, 0), (1, 1)):
        heavy, light = of_project(1, weight=3, running=running[0]), of_project(2, running=running[1])
        got = allocate([heavy, light], [Amount(2)], most_experiments=9)
        assert (got.get(1, 0), got.get(2, 0)) == running


@pytest.mark.parametrize("slots", [1, 4])
def test_priority_comes_first_and_then_age_within_what_one_person_asked_for(slots: int) -> None:
    def of(number: int, trials: int, priority: int = 0, owner: str | None = "ada") -> Demand:
        return Demand(number, trials, ONE, priority, 1, owner)

    nodes = [Amount(slots)]
    assert allocate([of(1, 50), of(2, 50)], nodes, most_experiments=9) == {1: slots}
    urgent = allocate([of(1, 50), of(2, 2, 1000)], nodes, most_experiments=9)
    assert urgent == ({2: 1} if slots == 1 else {2: 2, 1: 2})
    if slots == 4:
        shared = allocate([of(1, 50, 9), of(2, 50, owner="bob")], nodes, most_experiments=9)
        assert shared == {1: 2, 2: 2}, "priority is a word among one person's experiments"


def test_experiments_of_nobody_known_share_where_none_is_more_urgent() -> None:
    grids = [Demand(1, 50, ONE), Demand(2, 50, ONE)]
    assert allocate(grids, [Amount(4)], most_experiments=9) == {1: 2, 2: 2}
    assert allocate([*grids, Demand(3, 3, ONE, 5)], [Amount(4)], most_experiments=9) == {3: 3, 1: 1}


def test_turns_are_taken_where_there_are_fewer_slots_than_projects() -> None:
    usage, nodes = Usage(), [ONE]
    ran = dict.fromkeys((1, 2, 3), 0)
    holder = 1
    for _ in range(300):
        asked = [
            Demand(number, 99, ONE, project_id=number, owner="ada", running=int(number == holder)) for number in ran
        ]
        usage.add(asked, nodes, 60)
        ((holder, count),) = allocate(asked, nodes, most_experiments=9, usage=usage).items()
        assert count == 1
        ran[holder] += 1
    assert max(ran.values()) - min(ran.values()) <= 3


def of_project(number: int, *, weight: float = 1.0, running: int = 0) -> Demand:
    return Demand(number, 99, ONE, project_id=number, owner="ada", weight=weight, running=running)


def test_what_was_used_counts_half_after_six_hours() -> None:
    usage, nodes = Usage(), [Amount(2)]
    one, other = of_project(1, running=1), of_project(2, running=1)
    usage.add([one], nodes, 60)
    assert usage.of(one.group) == usage.of(Group(1)) == 30
    usage.add([], nodes, 6 * 3600)
    assert usage.of(one.group) == usage.of(Group(1)) == pytest.approx(15)
    usage.add([other], nodes, 40)  # of less in all, but just now
    assert allocate([one, other], [ONE], most_experiments=9, usage=usage) == {1: 1}
    usage.add([], nodes, 30 * 24 * 3600)
    usage.add([], nodes, 1)
    assert usage.of(one.group) == usage.of(other.group) == 0, "so little is forgotten"


def test_what_ended_before_anybody_counted_is_as_if_it_had_been_counted() -> None:
    usage, later, nodes = Usage(), Usage(), [Amount(2)]
    one = replace(of_project(1, running=2), needs=Amount(0.5))
    usage.add([one], nodes, 60)
    usage.add([], nodes, 6 * 3600)
    later.recall([Spent(one.group, one.needs, 60, 6 * 3600)] * 2, nodes)
    assert later.of(one.group) == later.of(Group(1)) == pytest.approx(usage.of(one.group))
    later.recall([Spent(one.group, one.needs, 60, 0)], [])
    assert later.of(one.group) == pytest.approx(usage.of(one.group)), "of nothing nobody used a part"


@pytest.mark.parametrize("person", [False, True], ids=["projects", "people"])
def test_turns_go_by_what_was_used_for_its_weight(person: bool) -> None:
    usage, nodes = Usage(), [ONE]
    heavy = weighing(2, 3, person=person, trials=99, running=1)
    light = weighing(1, 1, person=person, trials=99, running=1)
    usage.add([heavy], nodes, 20)
    usage.add([light], nodes, 10)
    assert allocate([heavy, light], nodes, most_experiments=9, usage=usage) == {2: 1}
    usage.add([heavy], nodes, 20)
    assert allocate([heavy, light], nodes, most_experiments=9, usage=usage) == {1: 1}


def test_without_usage_nothing_changes_hands_without_a_reason() -> None:
    holding = [Demand(1, 99, ONE, running=0), Demand(2, 99, ONE, running=1)]
    assert allocate(holding, [ONE], most_experiments=9) == {2: 1}
    over = [Demand(1, 99, ONE, running=0), Demand(2, 99, ONE, running=2)]
    assert allocate(over, [Amount(2)], most_experiments=9) == {1: 1, 2: 1}


def test_what_is_due_as_a_whole_is_nobodys_turn() -> None:
    """Two of a weight of one are due half a trial of three each: it is what may stop others' trials."""

    def firm(asked: list[Demand], slots: int) -> dict[int, int]:
        return allocate(asked, [Amount(slots)], most_experiments=9, firm=True)

    one, other = of_project(1, running=2), of_project(2, running=1)
    assert firm([one, other], 3) == {1: 1, 2: 1}
    assert firm([of_project(1, weight=3), other], 4) == {1: 3, 2: 1}
    assert firm([of_project(1, weight=3), other], 3) == {1: 2}
    assert firm([one], 3) == {1: 3}
    mates = [Demand(number, 9, ONE, project_id=1, owner=owner) for number, owner in enumerate(("ada", "bob", "cid"))]
    assert firm([*mates, of_project(3)], 7) == {0: 1, 1: 1, 2: 1, 3: 3}
    assert firm([*mates[:2], of_project(3)], 6) == {0: 1, 1: 1, 3: 3}, "who is left over has no more for that"
    weighed = [replace(mates[0], person_weight=3.0), mates[1]]
    assert firm([*weighed, of_project(3)], 8) == {0: 3, 1: 1, 3: 4}
    assert firm([*weighed, of_project(3)], 6) == {0: 2, 3: 3}
    large = Demand(4, 9, Amount(3), project_id=2, owner="eve")
    assert firm([of_project(1), large], 5) == {1: 2}


def test_who_runs_more_than_a_part_has_the_turn_by_what_its_trials_take() -> None:
    """Of fourteen cards a quarter is due to trials of four: three and a half. The others run eight and two of three."""
    small = Demand(1, 99, ONE, project_id=1, weight=3, owner="ada", running=8)
    wide = Demand(2, 2, Amount(3), project_id=1, weight=3, owner="bob", running=2)
    large = Demand(3, 9, Amount(4), project_id=2, owner="eve")
    assert allocate([small, wide, large], [Amount(14)], most_experiments=9) == {1: 8, 2: 2}


def test_a_large_trial_finds_its_node_before_small_ones_fill_it() -> None:
    nodes = [Amount(8, 2), Amount(8, 4)]
    small, large = Demand(1, 99, Amount(1, 1)), Demand(2, 1, Amount(1, 3))
    assert allocate([small, large], nodes, most_experiments=9) == {1: 3, 2: 1}


@pytest.mark.parametrize("order", [1, -1])
def test_a_small_trial_that_comes_first_leaves_the_large_node(order: int) -> None:
    """Else who comes first would decide whether both can run, and that changes all the time."""
    nodes = [Amount(8, 2), Amount(8, 1)][::order]
    small = Demand(1, 1, Amount(1, 1), project_id=1)
    large = Demand(2, 1, Amount(1, 2), project_id=2)
    assert allocate([small, large], nodes, most_experiments=9) == {1: 1, 2: 1}


def test_drivers_are_bounded() -> None:
    grids = [Demand(number, 1, ONE) for number in range(1, 9)]
    assert list(allocate(grids, [Amount(8)], most_experiments=3)) == [1, 2, 3]


def test_a_shortage_is_told_by_node() -> None:
    nodes = [Amount(8, 2, 64), Amount(8, 2, 64)]
    assert shortage(Amount(1, 2), nodes) is None
    assert shortage(Amount(1, 3), nodes) == "needs 3 GPUs on one node; the largest has 2"
    assert shortage(Amount(9), nodes) == "needs 9 CPUs on one node; the largest has 8"
    assert shortage(Amount(1, 1), [Amount(8)]) == "needs 1 GPU on one node; the largest has 0"
    assert shortage(Amount(1, 0, 99.5), nodes) == "needs 99.5 GiB of memory on one node; the largest has 64"
    assert shortage(Amount(4, 4), [Amount(2, 8), Amount(8, 1)]) == (
        "needs 4 CPUs, 4 GPUs and 0 GiB of memory on one node; each node has too little of one of them"
    )
    assert shortage(ONE, []) == "no node is ready for trials"


def test_a_decision_over_a_thousand_slots_and_a_hundred_experiments_is_quick() -> None:
    """Ten milliseconds; the bound leaves room."""
    nodes = [Amount(64, 8, 512)] * 125
    asked = [
        Demand(
            number,
            10_000,
            Amount(1 + number % 4, (0.5, 1, 2, 3)[number % 4]),
            number % 5,
            number % 7,
            f"o{number % 20}",
        )
        for number in range(100)
    ]
    assert effort(lambda: [allocate(asked, nodes, most_experiments=100, usage=Usage()) for _ in range(5)]) / 5 < 0.1


def test_nobodys_experiments_are_one_that_takes_turns_with_people() -> None:
    """Else one of them that never comes first among these would have used nothing, and with it all of them."""
    one, usage, had = [Amount(8, 1)], Usage(), Counter[int]()
    wanted = [
        Demand(1, 9, Amount(1, 1)),
        Demand(2, 9, Amount(1, 1), priority=5),
        Demand(3, 9, Amount(1, 1), owner="root"),
    ]
    last: dict[int, int] = {}
    for _ in range(100):
        usage.add([replace(each, running=last.get(each.experiment_id, 0)) for each in wanted], one, 60)
        last = allocate(wanted, one, most_experiments=9, usage=usage)
        had.update(last)
    assert had == {2: 50, 3: 50}


@given(demands(), nodes_of_a_cluster, st.integers(1, 6))
def test_who_is_first_has_a_trial_wherever_one_fits(wanted: list[Demand], nodes: list[Amount], first: int) -> None:
    shares = allocate(wanted, nodes, most_experiments=9, first=first)
    for one in wanted:
        if one.experiment_id == first and one.trials:
            assert (shares.get(first, 0) > 0) == any(_needs_first(one).fits(node) for node in nodes)
    taken = [one.needs for one in wanted for _ in range(shares.get(one.experiment_id, 0))]
    assert all(shares.get(one.experiment_id, 0) <= one.trials for one in wanted)
    assert packs(taken, nodes)


def _needs_first(demand: Demand) -> Amount:
    return on_whole_cards(demand.needs) if demand.alone else demand.needs
