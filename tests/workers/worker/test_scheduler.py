"""Whose trials go on where trials give way, and whose turn it is when a worker starts."""

import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
from sqlalchemy import update

from service.access.security import ANYONE
from service.database import Experiment, Trial, now
from service.experiments import actions, submission
from service.experiments.submission import Draft
from service.queue import driver_reads, leases, places
from service.queue import nodes as queue_nodes
from service.queue import turns as queue_turns
from service.queue.cluster import Node
from service.queue.contenders import Contender
from service.queue.shares import Amount, Demand, Usage, allocate
from service.queue.trials import HeldExperiment
from service.settings import Settings
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.held import under, unfinished_trials
from workers.worker.scheduler import Scheduler, going_on

if TYPE_CHECKING:
    from service.database.engine import Database
    from service.queue.leases import Lease

NODE = [Amount(8, 2)]


def told(demands: list[Demand], usage: Usage) -> tuple[dict[int, int], dict[int, int]]:
    """Their shares, and of each how many go on."""
    shares = allocate(demands, NODE, most_experiments=9, usage=usage)
    holding, firm = (allocate(demands, NODE, most_experiments=9, firm=firm) for firm in (False, True))
    found = [Contender(demand, preempt=True, claimed=True, waiting=None, unfit_since=None) for demand in demands]
    return shares, going_on(found, shares, holding, firm)


def test_turns_that_come_and_go_stop_no_trial() -> None:
    """Three share one place for six processors; who is next changes with each second that one of them runs."""
    usage, turns = Usage(), set[int]()
    for second in range(240):
        holder = (1, 3, 4)[second // 20 % 3]  # as trials end
        asked = [
            Demand(1, 9, Amount(6), priority=1, project_id=2, owner="bob", running=int(holder == 1)),
            Demand(2, 1, Amount(1, 0.3), running=1),
            Demand(3, 9, Amount(6), priority=1, owner="bob", running=int(holder == 3)),
            Demand(4, 1, Amount(6), owner="ada", running=int(holder == 4)),
        ]
        usage.add(asked, NODE, 1)
        shares, going_on = told(asked, usage)
        turns |= shares.keys()
        assert going_on[holder] == 1, second
    assert turns == {1, 2, 3, 4}


def test_who_lacks_what_is_due_to_it_as_a_whole_has_it_at_once() -> None:
    urgent = Demand(2, 2, Amount(2), owner="bob")
    running = Demand(1, 9, Amount(2), owner="ada", running=4)
    assert told([running], Usage())[1] == {1: 4}
    assert told([running, urgent], Usage())[1] == {1: 2, 2: 2}


class Claims(list["Lease"]):
    """Drivers of which none is ever there; it has the claims for which one was to start."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())

    def trouble(self, _experiment_id: int) -> None:
        """None has any."""

    def start(self, lease: "Lease") -> None:
        """Starts none."""
        self.append(lease)


class Hands:
    """A driver that begins what it may at once, and whose trials end when they are told to."""

    def __init__(self, database: "Database", lease: "Lease", host: str) -> None:
        self.lease, self.host, self.slots, self.most, self.running = lease, host, 0, 0, list[int]()
        self._database = database

    def tell(self, slots: int, most: int, *_: object, **__: object) -> None:
        """Hears of its share."""
        self.slots, self.most = slots, most

    def begin(self) -> int:
        """Begins what it may; how many run."""
        while len(self.running) < self.slots:
            with self._database.read() as session:
                trial = driver_reads.next_trial(session, self.lease, [])
            assert trial is not None
            self._database.write(under(self.lease, HeldExperiment.start_trial, trial.id))
            self._database.write(under(self.lease, HeldExperiment.place_trial, trial.id, self.host))
            self.running.append(trial.id)
        return len(self.running)

    def end(self) -> None:
        """The oldest of its trials ends."""
        self._database.write(under(self.lease, HeldExperiment.early_stop_trial, self.running.pop(0)))


class AllHands(list[Hands]):
    """Drivers whose trials begin on `host`."""

    def __init__(self, database: "Database", host: str) -> None:
        self.host, self._database = host, database

    def trouble(self, _experiment_id: int) -> None:
        """None has any."""

    def start(self, lease: "Lease") -> Hands:
        """Starts at once."""
        self.append(Hands(self._database, lease, self.host))
        return self[-1]


def grid_of(database: "Database", trials: int, **words: object) -> int:
    """An experiment of nobody's, with so many trials."""
    document = {"name": "grid", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [*range(trials)]}}
    spec = ExperimentSpec.model_validate(document | words)
    plan = expand_grid(spec, max_trials=trials)
    return database.write(lambda session: submission.submit(session, Draft(spec, plan), ANYONE).id)


def test_a_limit_that_is_lowered_holds_though_nobody_else_waits(database: "Database") -> None:
    """What runs beyond it is lent to nobody: its ends are not followed by others, or it gives way."""
    number, giving = grid_of(database, 30), grid_of(database, 30, preempt=True)
    hands = AllHands(database, "a")
    scheduler = Scheduler(Settings(), database, cast("Any", hands), "worker", None, most=4)
    nodes = [Node("a", "a", "", 8, 0, 8)]

    def turn() -> tuple[int, ...]:
        scheduler.share(nodes)
        return tuple(driver.begin() for driver in sorted(hands, key=lambda one: one.lease.experiment_id))

    turn()
    assert turn() == (4, 4)
    for experiment in (number, giving):
        database.write(partial(actions.change, experiment_id=experiment, fields={"max_concurrent_trials": 1}))
    turn()
    assert sorted((driver.slots, driver.most) for driver in hands) == [(1, 1), (1, sys.maxsize)]
    for left in (3, 2, 1, 1, 1):
        hands[0].end()
        assert turn()[0] == left, "nobody follows"
    database.write(partial(actions.change, experiment_id=number, fields={"max_concurrent_trials": 10_000}))
    assert turn()[0] == 7, "all that the other one does not want"


def test_what_runs_on_a_node_that_fits_no_more_takes_nobodys_place(
    database: "Database", monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on there; its experiment begins as many on the others as if it ran nothing."""
    monkeypatch.setattr(places, "SHORT_SECONDS", 0.0)
    first, late = grid_of(database, 30), 0
    hands = AllHands(database, "a")
    scheduler = Scheduler(Settings(), database, cast("Any", hands), "worker", None, most=4)
    fit = Node("a", "a", "", 4, 0, 8)
    nodes = [fit]

    def turn() -> dict[int, int]:
        scheduler.share(nodes)
        return {driver.lease.experiment_id: driver.begin() for driver in hands}

    turn()
    assert turn() == {first: 4}
    nodes = [replace(fit, problem="its clock is 7 s behind"), Node("b", "b", "", 4, 0, 8)]
    for driver in hands:
        driver.host = "b"
    hands.host = "b"
    late = grid_of(database, 30)
    turn()
    assert turn() == {first: 6, late: 2}, "two and two on the node that fits"
    for _ in range(2):
        hands[0].end()  # of those that it has on the other node
    assert turn() == {first: 4, late: 2}
    for limit in (1, 3):
        database.write(partial(actions.change, experiment_id=first, fields={"max_concurrent_trials": limit}))
        turn()
        assert hands[0].slots == limit, "of its own limit all that run count"
    for _ in range(2):
        hands[0].end()
    assert turn()[first] == 2


def test_who_used_more_before_the_worker_began_is_not_first_again(database: "Database") -> None:
    """Workers of a few hours each, as Slurm has them, would else give every first turn to the oldest experiment."""
    spec = ExperimentSpec.model_validate(
        {"name": "turns", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0, 1]}}
    )
    plan = expand_grid(spec, max_trials=10)
    for name in ("ada", "bob"):
        who = replace(ANYONE, name=name)
        database.write(partial(submission.submit, draft=Draft(spec, plan), who=who))
    adas = database.write(lambda session: leases.claim(session, "before", None))
    assert adas is not None
    with database.read() as session:
        first = unfinished_trials(session, adas)[0].id
    database.write(under(adas, HeldExperiment.start_trial, first))
    database.write(under(adas, HeldExperiment.early_stop_trial, first))
    database.write(lambda session: leases.release(session, adas, drained=True))

    def claimed() -> list[int]:
        claims = Claims()
        scheduler = Scheduler(Settings(), database, cast("Any", claims), "worker", None, most=4)
        scheduler.share([])
        scheduler.share([Node("a", "a", "", 1, 0, 8)])
        found = [lease.experiment_id for lease in list.__iter__(claims)]
        for lease in list.__iter__(claims):
            database.write(partial(leases.release, lease=lease, drained=True))
        return found

    database.write(lambda session: session.execute(update(Trial).values(run_seconds=0)))
    assert claimed() == [adas.experiment_id], "nobody used anything: the oldest"
    database.write(lambda session: session.execute(update(Trial).where(Trial.id == first).values(run_seconds=7200)))
    assert claimed() == [adas.experiment_id + 1]


def test_what_rests_is_neither_claimed_nor_completed(database: "Database") -> None:
    """Its place is for others meanwhile; people are told until when, and a worker that leaves when idle stays."""
    spec = ExperimentSpec.model_validate({"name": "rests", "base": {"dataset": "digits", "model": "small-cnn"}})
    plan = expand_grid(spec, max_trials=10)
    number = database.write(lambda session: submission.submit(session, Draft(spec, plan), ANYONE).id)
    until = now() + timedelta(seconds=200)
    database.write(lambda session: session.execute(update(Trial).values(rests_until=until)))
    claims = Claims()
    scheduler = Scheduler(Settings(), database, cast("Any", claims), "worker", None, most=4)
    node = Node("a", "a", "", 1, 0, 8)

    def said() -> tuple[str, int, str | None]:
        with database.read() as session:
            found = session.get_one(Experiment, number)
            return found.state, found.fence, found.waiting

    for _ in range(2):
        assert scheduler.share([node]), "there is something to do soon"
        reason = f"what is left of it rests until {until:%H:%M:%S} UTC, as its trials' `error` says"
        assert (list.__len__(claims), *said()) == (0, "queued", 0, reason)
    database.write(lambda session: session.execute(update(Trial).values(rests_until=now())))
    assert scheduler.share([node])
    assert (list.__len__(claims), *said()) == (1, "running", 1, None)


def test_halves_of_two_cards_that_another_worker_left_are_no_whole_one(
    database: "Database", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SHORT_SECONDS", 0.0)
    halves = {"cpus": 1, "gpus": 0.5}
    lease = database.write(
        partial(leases.claim, worker="other", process=None, experiment_id=grid_of(database, 2, resources=halves))
    )
    assert lease is not None
    with database.read() as session:
        trials = [trial.id for trial in unfinished_trials(session, lease)]
    for card, trial_id in enumerate(trials):
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        database.write(under(lease, HeldExperiment.place_trial, trial_id, f"a, GPU {card}"))
    node = Node("a", "a", "", 8, 2, 8)
    database.write(partial(queue_nodes.record, worker="other", seen=[node]))
    grid_of(database, 9, resources=halves | {"gpus": 1})
    half = grid_of(database, 9, resources=halves)
    hands = AllHands(database, "a")
    Scheduler(Settings(), database, cast("Any", hands), "worker", None, most=4).share([node])
    assert [driver.lease.experiment_id for driver in hands] == [half]


def test_whose_turn_it_is_out_of_turn_has_a_share(database: "Database", monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run begin nothing more, until there is room for it."""
    ours, large = grid_of(database, 30, priority=1), grid_of(database, 3, resources={"cpus": 4})
    hands, node = AllHands(database, "a"), [Node("a", "a", "", 4, 0, 8)]
    scheduler = Scheduler(Settings(), database, cast("Any", hands), "worker", None, most=4)
    scheduler.share(node)
    hands[0].begin()
    monkeypatch.setattr(queue_turns, "OVERDUE_SECONDS", 0.0)
    scheduler.share(node)
    assert [(driver.lease.experiment_id, driver.slots) for driver in hands] == [(ours, 4)], "it is not the first of its"
    monkeypatch.setattr(scheduler._turns, "first", lambda *_: large)
    scheduler.share(node)
    assert [(driver.lease.experiment_id, driver.slots) for driver in hands] == [(ours, 0), (large, 1)]
