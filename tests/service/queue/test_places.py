"""For whom nodes are kept, in a simulated pool: Ray spreads trials, a driver goes on where its last trial ended."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.queue import places
from service.queue.capacity import Place, Standing
from service.queue.places import Decision, Places
from service.queue.shares import Amount, Demand
from tests import simulation
from tests.effort import effort
from tests.simulation import LENT_SECONDS, MOST, NEEDS, NODES, ONE_GPU, OWNERS, TWO_GPUS, Grid, Pool, Run

TWO_NODES = [Place("a", "gpu1", Amount(8, 2)), Place("b", "gpu2", Amount(8, 2))]


def spread_and_large() -> tuple[Grid, Grid]:
    """Two at a time of one GPU each, whose ends do not coincide; then trials of two GPUs."""
    return Grid(1, ONE_GPU, ticks=7, most=2), Grid(2, TWO_GPUS, ticks=5, most=1)


class TestFragments:
    """Nodes of 2 + 2 GPUs, an endless grid with a trial on each, and one whose trials need two GPUs."""

    def pool(self, *, mend: bool) -> tuple[Pool, Grid, Grid]:
        small, large = spread_and_large()
        pool = Pool(TWO_NODES, small, mend=mend)
        pool.tick()
        assert {run.node for run in pool.runs} == {"a", "b"}
        pool.runs[0].ends -= 3
        pool.grids.append(large)
        return pool, small, large

    def test_the_larger_one_would_starve(self) -> None:
        pool, _, large = self.pool(mend=False)
        pool.ticks(600)
        assert pool.shares == {1: 2, 2: 1}
        assert large.begun == 0, "half of the GPUs are idle"

    def test_a_node_is_cleared_for_it(self) -> None:
        pool, small, large = self.pool(mend=True)
        pool.ticks(12)
        assert large.begun >= 1
        before = small.begun
        pool.ticks(100)
        assert small.begun - before >= 2 * 100 // 7 - 4, "and the other goes on beside it"
        assert large.begun >= 100 // 5 - 2

    def test_it_says_what_it_waits_for(self) -> None:
        pool, _, _ = self.pool(mend=True)
        for run in pool.runs:
            run.ends = 100
        pool.ticks(9)
        assert pool.decision.reasons == {}
        pool.ticks(3)
        reason = "needs 2 GPUs on one node; 2 are free, on different nodes; gpu1 is kept for it while trials end there"
        assert pool.decision.reasons == {2: reason}
        assert pool.decision.kept == {"a": frozenset({2})}
        assert (pool.decision.shunned_by(1), pool.decision.shunned_by(2)) == (["a"], [])
        pool.ticks(100)
        assert pool.decision == Decision()

    def test_nothing_is_asked_where_all_have_their_shares(self) -> None:
        """Where trials run is read from the database: only where somebody is short of his share."""

        def unasked() -> list[Standing]:
            raise AssertionError

        mind = Places()
        for now in range(60):
            demands = [Demand(1, 99, ONE_GPU, running=2), Demand(2, 9, TWO_GPUS, running=int(now % 3 > 0))]
            assert mind.decide(demands, {1: 2, 2: 1}, TWO_NODES, unasked, now) == Decision()


class TestKeeping:
    def decide(self, mind: Places, now: float, *standing: Standing, large: int = 0, share: int = 1) -> Decision:
        demands = [Demand(1, 99, ONE_GPU, running=2), Demand(2, 9, TWO_GPUS, running=large)]
        return mind.decide(demands, {1: 2, 2: share}, TWO_NODES, lambda: standing, now)

    def apart(self) -> list[Standing]:
        return [Standing(1, "a", ONE_GPU), Standing(1, "b", ONE_GPU)]

    def test_until_its_trial_has_begun_there(self) -> None:
        mind = Places()
        self.decide(mind, 0, *self.apart())
        for now in (4, 20, 40):
            assert self.decide(mind, now, *self.apart(), share=2).kept == {"a": frozenset({2})}
        begun = Standing(2, "a", TWO_GPUS)
        rest = Standing(1, "b", ONE_GPU)
        assert self.decide(mind, 50, begun, rest, rest, large=1, share=2).kept == {}

    def test_no_longer_than_it_has_a_share_or_the_node_is_there(self) -> None:
        mind = Places()
        self.decide(mind, 0, *self.apart())
        assert self.decide(mind, 4, *self.apart()).kept
        assert not self.decide(mind, 5, *self.apart(), share=0).kept
        self.decide(mind, 6, *self.apart())
        assert self.decide(mind, 10, *self.apart()).kept
        demands = [Demand(2, 9, TWO_GPUS)]
        left = mind.decide(demands, {2: 1}, TWO_NODES[1:], lambda: [Standing(1, "b", ONE_GPU)], 11)
        assert left.kept == {}, "the one that is left has not even room for all that would have to end"

    def test_not_for_what_does_not_begin_though_there_is_room(self) -> None:
        """A search that has nothing to try now, or others use the cluster: its room must not stay empty for ever."""
        mind = Places()
        self.decide(mind, 0, *self.apart())
        assert self.decide(mind, 4, *self.apart()).kept
        cleared = [Standing(1, "b", ONE_GPU)] * 2
        assert self.decide(mind, 5, *cleared).kept
        assert self.decide(mind, 5 + places.BEGIN_SECONDS, *cleared).kept
        assert not self.decide(mind, 6 + places.BEGIN_SECONDS, *cleared).kept
        assert not self.decide(mind, 100, *self.apart()).kept
        assert self.decide(mind, 7 + places.BEGIN_SECONDS + places.NOT_AGAIN_SECONDS, *self.apart()).kept

    def test_also_where_there_seems_to_be_room_that_nothing_begins_in(self) -> None:
        """Trials that follow each other faster than is heard of them leave some at each look, on this node or that."""
        mind, room = Places(), [Standing(1, "a", ONE_GPU)]
        for now in (0, 4, 19):
            assert not self.decide(mind, now, *room).kept
        assert not self.decide(mind, 20, *room, large=1, share=2).kept, "it runs one already"
        assert self.decide(mind, 21, *room).kept == {"b": frozenset({2})}

    def test_not_where_others_have_to_give_places_back_first(self) -> None:
        full = [Standing(1, "a", ONE_GPU)] * 2 + [Standing(1, "b", ONE_GPU)] * 2
        mind = Places()
        self.decide(mind, 0, *full)
        assert self.decide(mind, 4, *full).kept == {}
        said = self.decide(mind, 12, *full).reasons
        assert said == {2: "needs 2 GPUs on one node; none is free"}
        assert self.decide(mind, 13, *full[1:]).reasons == said, "what is free changes all the time"
        assert self.decide(mind, 23, *full[1:]).reasons == {2: "needs 2 GPUs on one node; 1 is free"}

    def test_while_no_node_is_known_nothing_is_said_to_be_lacking(self) -> None:
        """A cluster that has just started takes trials before anybody has told of its nodes."""
        mind, demands = Places(), [Demand(1, 4, Amount(1))]
        for now in (0, 4, 12):
            assert mind.decide(demands, {1: 4}, [], list, now, hungry=demands) == Decision()
        full = [Standing(2, node.id, Amount(8)) for node in TWO_NODES]
        said = mind.decide(demands, {1: 4}, TWO_NODES, lambda: full, 13).reasons
        assert said == {1: "needs 1 CPU on one node; none is free"}

    def test_one_node_for_each_who_waits(self) -> None:
        demands = [Demand(1, 99, ONE_GPU, running=2), Demand(2, 1, TWO_GPUS), Demand(3, 1, TWO_GPUS)]
        nodes = [*TWO_NODES, Place("c", "gpu3", Amount(8, 2))]
        mind = Places()
        standing = [Standing(1, node.id, ONE_GPU) for node in nodes]
        for now in (0, 4):
            found = mind.decide(demands, {1: 2, 2: 1, 3: 1}, nodes, lambda: standing, now)
        assert found.kept == {"a": frozenset({2})}, "for the other one there is no room yet, apart or not"
        del standing[2]
        found = mind.decide(demands, {1: 2, 2: 1, 3: 1}, nodes, lambda: standing, 5)
        assert found.kept == {"a": frozenset({2})}
        standing = [Standing(1, node.id, Amount(1, 0.5)) for node in nodes]
        found = mind.decide(demands, {1: 2, 2: 1, 3: 1}, nodes, lambda: standing, 6)
        assert found.kept == {"a": frozenset({2}), "b": frozenset({3})}


class TestLending:
    """Shares are packed better than Ray does: what these leave over is lent to who can use it."""

    SMALL, WHOLE = Amount(1, 0.5), Amount(1, 1)

    def decide(self, mind: Places, now: float, *standing: Standing, large: int = 1, shares: dict[int, int]) -> Decision:
        """Half a card of each node is in use, and a third experiment could use what is left of one."""
        counts = Counter(trial.experiment_id for trial in standing)
        demands = [
            Demand(1, 2, self.SMALL, running=counts[1]),
            Demand(2, large, self.WHOLE, running=counts[2]),
            Demand(3, 9, self.SMALL, running=counts[3]),
        ]
        nodes = [Place("a", "gpu1", Amount(8, 1)), Place("b", "gpu2", Amount(8, 1))]
        return mind.decide(demands, shares, nodes, lambda: standing, now, hungry=demands)

    def test_what_is_left_over_is_lent_and_given_back(self) -> None:
        mind, apart = Places(), [Standing(1, "a", self.SMALL, ("0",)), Standing(1, "b", self.SMALL, ("0",))]
        assert self.decide(mind, 0, *apart, large=0, shares={1: 2}).lent == {}, (
            "a trial that has just ended is followed"
        )
        assert self.decide(mind, 4, *apart, large=0, shares={1: 2}).lent == {3: 2}
        lent = [*apart, Standing(3, "a", self.SMALL, ("0",))]
        assert self.decide(mind, 5, *lent, large=0, shares={1: 2}).lent == {3: 2}, "the one that runs, and one more"
        full = [*lent, Standing(3, "b", self.SMALL, ("0",))]
        assert self.decide(mind, 6, *full, large=0, shares={1: 2}).lent == {3: 2}
        assert self.decide(mind, 7, *full, shares={1: 2, 2: 1}).lent == {}, "who has a share waits for it to end"
        for now in (8, 12):
            again = self.decide(mind, now, *apart, *full[3:], shares={1: 2, 3: 1}, large=0)
        assert again.lent == {3: 1}

    def test_what_runs_and_did_not_say_where_yet_is_in_nobodys_room(self) -> None:
        mind, large = Places(), Amount(5)
        demands = [Demand(1, 2, large, running=2), Demand(2, 9, large)]
        for now in (0, 4):
            found = mind.decide(demands, {1: 2}, TWO_NODES, lambda: [Standing(1, "a", large)], now, hungry=demands)
        assert found.lent == {}, "three processors are left on each node"

    def test_a_place_that_is_kept_or_another_is_to_begin_in_is_nobodys(self) -> None:
        mind, apart = Places(), [Standing(1, "a", self.SMALL, ("0",)), Standing(1, "b", self.SMALL, ("0",))]
        for now in (0, 4):
            found = self.decide(mind, now, *apart, shares={1: 2, 2: 1})
        assert (found.kept, found.lent) == ({"a": frozenset({2})}, {3: 1})
        for now in (5, 9):
            assert self.decide(mind, now, apart[0], shares={1: 2}, large=0).lent == {3: 2}, "one of three halves is its"


class TestGivingWay:
    """Of an experiment whose trials give way they do so on a node that is kept, not only by their ends."""

    def decide(self, shares: dict[int, int], *standing: Standing, nodes: list[Place] = TWO_NODES) -> Decision:
        counts = Counter(trial.experiment_id for trial in standing)
        demands = [Demand(one, 9, ONE_GPU, running=counts[one]) for one in (1, 3)] + [Demand(2, 1, TWO_GPUS)]
        mind = Places()
        for now in (0, 4):
            found = mind.decide(demands, {3: counts[3], **shares}, nodes, lambda: standing, now, willing={1: shares[1]})
        return found

    def test_where_it_has_its_share_on_two_nodes(self) -> None:
        apart = [Standing(1, "a", ONE_GPU), Standing(1, "b", ONE_GPU)]
        found = self.decide({1: 2, 2: 1}, *apart)
        assert (found.kept, found.staying) == ({"a": frozenset({2})}, {1: {"a": 0}})

    def test_what_it_gives_back_anyhow_is_given_on_one_node(self) -> None:
        full = [Standing(1, "a", ONE_GPU)] * 2 + [Standing(1, "b", ONE_GPU)] * 2
        found = self.decide({1: 2, 2: 1}, *full)
        assert (found.kept, found.staying) == ({"a": frozenset({2})}, {1: {"a": 0}})

    def test_no_more_than_it_takes(self) -> None:
        four = [Place("a", "gpu1", Amount(8, 4))]
        full = [Standing(1, "a", ONE_GPU, (str(card),)) for card in range(4)]
        assert self.decide({1: 2, 2: 1}, *full, nodes=four).staying == {1: {"a": 2}}

    def test_on_the_node_where_that_makes_room(self) -> None:
        """On the other one stands a trial of an experiment that does not give way."""
        found = self.decide({1: 1, 2: 1}, Standing(3, "a", ONE_GPU), Standing(1, "b", ONE_GPU))
        assert (found.kept, found.staying) == ({"b": frozenset({2})}, {1: {"b": 0}})

    def test_not_in_vain(self) -> None:
        large = [Place("a", "gpu1", Amount(8, 3)), Place("b", "gpu2", Amount(8, 1))]
        others = [Standing(3, "a", ONE_GPU)] * 2 + [Standing(1, "a", ONE_GPU)]
        assert self.decide({1: 1, 2: 1}, *others, nodes=large).staying == {}


class TestGivingWayInVain:
    """Nobody's trial is stopped where that wins nothing, nor more than it takes."""

    def decide(
        self,
        shares: dict[int, int],
        going_on: dict[int, int],
        needs: dict[int, Amount],
        *standing: Standing,
        nodes: list[Place],
    ) -> Decision:
        counts = Counter(trial.experiment_id for trial in standing)
        demands = [Demand(one, 99, what, running=counts[one]) for one, what in needs.items()]
        mind, found = Places(), Decision()
        for now in (0, 4):
            found = mind.decide(demands, shares, nodes, lambda: standing, now, going_on)
        return found

    def test_turns_are_taken_as_trials_end(self) -> None:
        """Two that give way and are equal share three cards: whose turn the third is changes all the time."""
        full = [Standing(1, "a", ONE_GPU)] * 2 + [Standing(2, "a", ONE_GPU)]
        three, needs = [Place("a", "gpu1", Amount(8, 3))], {1: ONE_GPU, 2: ONE_GPU}
        assert self.decide({1: 1, 2: 2}, {1: 2, 2: 2}, needs, *full, nodes=three) == Decision()

    def test_who_could_not_go_on_elsewhere_stays(self) -> None:
        """On the other node it lacks processors: it would be short, and have the first one's trial give way in turn."""
        nodes, large = [Place("a", "gpu1", Amount(16, 2)), Place("b", "gpu2", Amount(2, 2))], Amount(6, 1)
        apart = [Standing(1, "a", large), Standing(3, "b", ONE_GPU)]
        needs = {1: large, 2: TWO_GPUS, 3: ONE_GPU}
        found = self.decide({1: 1, 2: 1, 3: 1}, {1: 1, 2: 1}, needs, *apart, nodes=nodes)
        assert (set(found.kept.values()), found.staying) == ({frozenset({2})}, {})

    def test_who_goes_on_elsewhere_is_under_its_share_until_all_have(self) -> None:
        """Its trials come to their checkpoints one after another."""
        nodes = [*TWO_NODES, Place("c", "gpu3", Amount(8, 2))]
        demands = [Demand(1, 9, ONE_GPU), Demand(2, 9, TWO_GPUS), Demand(3, 9, ONE_GPU, running=2)]
        mine, others = [Standing(1, "a", ONE_GPU)] * 2, [Standing(3, "b", ONE_GPU), Standing(3, "c", ONE_GPU)]
        shares, mind = {1: 2, 2: 1, 3: 2}, Places()
        for now, running in ((0, 2), (4, 2), (5, 1), (6, 1)):
            demands[0] = Demand(1, 9, ONE_GPU, running=running)
            found = mind.decide(demands, shares, nodes, partial(iter, mine[:running] + others), now, {1: 2})
        assert (found.kept, found.staying) == ({"a": frozenset({2})}, {1: {"a": 0}})

    def test_who_is_under_its_share_stays(self) -> None:
        nodes = [*TWO_NODES, Place("c", "gpu3", Amount(8, 1))]
        apart = [Standing(1, "a", ONE_GPU), Standing(1, "b", ONE_GPU), Standing(3, "c", ONE_GPU)]
        needs = {1: ONE_GPU, 2: TWO_GPUS, 3: ONE_GPU}
        assert self.decide({1: 3, 2: 1}, {1: 3}, needs, *apart, nodes=nodes).staying == {}

    def test_two_for_whom_one_node_is_kept_do_not_count_the_same_trials(self) -> None:
        six = [Place("a", "gpu1", Amount(8, 6))]
        needs = {1: ONE_GPU, 2: TWO_GPUS, 3: TWO_GPUS}
        found = self.decide({1: 2, 2: 1, 3: 1}, {1: 2}, needs, *[Standing(1, "a", ONE_GPU)] * 6, nodes=six)
        assert (found.kept, found.staying) == ({"a": frozenset({2, 3})}, {1: {"a": 2}})

    def test_what_is_given_back_anyhow_goes_first(self) -> None:
        four = [Place("a", "gpu1", Amount(8, 4)), Place("b", "gpu2", Amount(8, 1))]
        full = [Standing(1, "a", ONE_GPU), *[Standing(3, "a", ONE_GPU)] * 3]
        needs = {1: ONE_GPU, 2: TWO_GPUS, 3: ONE_GPU}
        found = self.decide({2: 1, 3: 3}, {1: 0, 3: 3}, needs, *full, nodes=four)
        assert found.staying == {1: {"a": 0}, 3: {"a": 2}}

    def test_its_own_trials_do_not_give_way_to_it(self) -> None:
        """The node where only its own would is no better than one where others do."""
        nodes = [Place("a", "gpu1", Amount(8, 4)), Place("b", "gpu2", Amount(8, 4))]
        full = [Standing(2, "a", TWO_GPUS), *[Standing(3, "a", ONE_GPU)] * 2, *[Standing(1, "b", ONE_GPU)] * 4]
        needs = {1: ONE_GPU, 2: TWO_GPUS, 3: ONE_GPU}
        found = self.decide({1: 2, 2: 2, 3: 2}, {1: 2, 2: 2}, needs, *full, nodes=nodes)
        assert (found.kept, found.staying) == ({"b": frozenset({2})}, {1: {"b": 2}})


class TestKeptInVain:
    """No node is kept where that wins nothing, and none shuts out what would be in nobody's way."""

    def decide(
        self, demands: list[Demand], shares: dict[int, int], *standing: Standing, nodes: list[Place] = TWO_NODES
    ) -> Decision:
        mind, decision = Places(), Decision()
        for now in (0, 4):
            decision = mind.decide(demands, shares, nodes, lambda: standing, now)
        return decision

    def test_where_only_its_own_trials_could_end(self) -> None:
        """Where one of them ends the next one begins there, as ever."""
        three, cards = Amount(1, 3), ("0", "1", "2")
        nodes = [Place("a", "gpu1", Amount(8, 4)), Place("b", "gpu2", Amount(8, 4)), Place("c", "gpu3", Amount(8, 1))]
        own, others = Standing(1, "a", three, cards), [Standing(2, "b", ONE_GPU, (card,)) for card in cards]
        asked = [Demand(1, 9, three, running=1), Demand(2, 9, ONE_GPU, running=3)]
        assert self.decide(asked, {1: 2, 2: 3}, own, *others, nodes=nodes).kept == {"b": frozenset({1})}

    def test_where_others_would_be_the_next_to_wait(self) -> None:
        """On the first node less has to end, and has no room elsewhere: the two would take turns there for ever."""
        nodes = [Place("a", "gpu1", Amount(16)), Place("b", "gpu2", Amount(8)), Place("c", "gpu3", Amount(8))]
        large, others = [Standing(1, "a", Amount(6)), Standing(3, "a", Amount(6))], [Standing(2, "c", Amount(1))] * 8
        asked = [
            Demand(1, 9, Amount(6), running=2),
            Demand(2, 9, Amount(1), running=8),
            Demand(3, 1, Amount(6), running=1),
        ]
        standing = [*large, Standing(1, "b", Amount(6)), *others]
        assert self.decide(asked, {1: 3, 2: 8, 3: 1}, *standing, nodes=nodes).kept == {"c": frozenset({1})}

    def test_what_fits_beside_what_is_promised_begins_there(self) -> None:
        two, part = Amount(1, 0.6), Amount(1, 0.4)
        full = [Standing(4, "a", TWO_GPUS, ("0", "1")), Standing(5, "b", two, ("0",)), Standing(5, "b", two, ("1",))]
        first, second = Demand(1, 1, two), Demand(2, 1, part)
        decision = self.decide([first, second], {1: 1, 2: 1}, *full)
        assert decision.kept == {"b": frozenset({1, 2})}
        assert decision.shunned_by(2) == []


@st.composite
def pools(draw: st.DrawFn, *, giving: bool = False) -> Pool:
    """One to four nodes and two to six grids."""
    nodes = [
        Place(name, name, draw(st.sampled_from(NODES))) for name in ("a", "b", "c", "d")[: draw(st.integers(1, 4))]
    ]
    grids = [
        Grid(
            number,
            draw(st.sampled_from(NEEDS)),
            ticks=draw(st.integers(3, 20)),  # of shorter ones the worker would never hear
            most=draw(st.sampled_from(MOST)),
            priority=draw(st.integers(0, 1)),
            owner=draw(st.sampled_from(OWNERS)),
            gives_way=giving and draw(st.booleans()),
        )
        for number in range(1, draw(st.integers(2, 6)) + 1)
    ]
    return Pool(nodes, *grids)


@given(st.one_of(pools(), pools(giving=True)))
def test_nothing_that_has_a_share_waits_for_ever(pool: Pool) -> None:
    """However Ray spreads the rest: some trials' ends, and the seconds until anybody is asked, and it has begun."""
    pool.ticks(200)
    patience = 4 * (max(grid.ticks for grid in pool.grids) + int(places.SHORT_SECONDS) + 2)
    assert all(grid.longest_short <= patience for grid in pool.grids), pool.grids
    assert all(run.stops <= 3 for _, run in pool.stopped), "trials stop each other"
    standing = Counter(run.node for run in pool.runs)
    assert all(min(pool.free(node)) >= 0 for node in pool.nodes if standing[node.id])


@given(pools())
def test_no_room_stays_empty_that_fits_what_has_a_share(pool: Pool) -> None:
    """But where a node is being cleared.

    Nor for longer than a few seconds any that fits anything, but where a trial that has a share waits for room.
    """
    idle = 0
    for _ in range(60):
        pool.tick()
        idle = idle + 1 if pool.idle() and not pool.waits() else 0
        assert idle <= LENT_SECONDS
        for grid in pool.grids:
            if pool.running(grid) < pool.shares.get(grid.number, 0):
                shunned = pool.decision.shunned_by(grid.number)
                open_to_it = [node for node in pool.nodes if node.id not in shunned]
                assert not any(grid.needs.fits(pool.free(node)) for node in open_to_it)


@given(pools(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=6))
def test_whatever_shares_leave_over_is_lent(pool: Pool, put: list[tuple[int, int]]) -> None:
    """Wherever those trials stand that shares are for: of what else fits some begins every few seconds, and goes on."""
    pool.due = Counter()
    for at, where in put:
        grid, node = pool.grids[at % len(pool.grids)], pool.nodes[where % len(pool.nodes)]
        if pool.running(grid) < grid.most and grid.needs.fits(pool.free(node)):
            pool.runs.append(Run(grid, node.id, ends=99))
            pool.due[grid.number] += 1
    idle = 0
    for _ in range(16):
        before = len(pool.runs)
        pool.tick()
        assert len(pool.runs) >= before
        idle = idle + 1 if pool.idle() and len(pool.runs) == before else 0
        assert idle <= LENT_SECONDS


@pytest.mark.parametrize("lends", [True, False])
def test_a_simulation_ends_badly_where_places_stay_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, lends: bool
) -> None:
    if not lends:
        monkeypatch.setattr(Places, "_lend", lambda *_, **__: {})
    kept = simulation.RECORDS.read_text()
    monkeypatch.setattr(sys, "argv", ["simulation", "--pools", "1", "--seed", "11", "--seconds", "40"])
    assert simulation.main() == int(not lends)
    figures = json.loads(capsys.readouterr().out)
    assert (figures["pools"], figures["longest empty for nobody"] > LENT_SECONDS) == (1, not lends)
    assert simulation.RECORDS.read_text() == kept


def test_a_decision_over_a_thousand_places_is_quick() -> None:
    """A few milliseconds each; the bound leaves room."""
    nodes = [Place(f"n{number}", f"host{number}", Amount(64, 8, 512)) for number in range(125)]
    needs = [Amount(1 + number % 4, (1.0, 2.0, 3.0, 6.0)[number % 4]) for number in range(100)]
    standing = [Standing(number % 80, f"n{number % 125}", ONE_GPU, (str(number // 125),)) for number in range(900)]
    demands = [Demand(number, 9_999, needs[number], running=0 if number >= 80 else 11) for number in range(100)]
    shares = dict.fromkeys(range(100), 12)
    mind = Places()
    spent = effort(lambda: [mind.decide(demands, shares, nodes, lambda: standing, now) for now in range(0, 40, 2)])
    assert len(mind._kept) >= 20
    assert spent / 20 < 0.1
