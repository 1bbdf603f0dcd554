"""Who could run what on a worker's cluster now, why others wait, and that none of it grows with the queue."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest
from sqlalchemy import event, func, insert, literal, select, text, update
from sqlalchemy.orm import Session

from service.access.security import ANYONE, Principal
from service.database import Event, Experiment, ExperimentState, Person, Project, Tally, Trial, TrialState, now
from service.database.engine import Database
from service.experiments import actions, submission
from service.experiments.submission import Draft
from service.experiments.transitions import BEHIND, MOST_OF_A_PERSON
from service.queue import driver_reads, leases
from service.queue.contenders import Contender, Specs, Terms, contenders, give_up_unfit, say_why, used_lately
from service.queue.leases import Lease
from service.queue.shares import Amount
from service.queue.trials import HeldExperiment
from service.specs.grid import expand_grid
from service.specs.spec import Changes, ExperimentSpec
from tests.held import under, unfinished_trials
from tests.machinery import Claim, Finish, Table

Post = Callable[..., int]

BOB = replace(ANYONE, name="bob")
BASE: dict[str, Any] = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 3}}


@pytest.fixture
def post(database: Database) -> Post:
    """Stores an experiment of so many seeds with whatever its spec says."""

    def post(seeds: int = 3, who: Principal = ANYONE, **fields: Any) -> int:
        grid = {"seed": list(range(seeds))} if seeds else {}
        spec = ExperimentSpec.model_validate({"name": "posted", "base": BASE, "grid": grid} | fields)
        plan = expand_grid(spec, max_trials=10_000)
        return database.write(lambda session: submission.submit(session, Draft(spec, plan), who).id)

    return post


def found(database: Database, *ours: int, specs: Specs | None = None) -> dict[int, Contender]:
    with database.read() as session:
        return {one.demand.experiment_id: one for one in contenders(session, ours, specs or Specs())}


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    """The statements that are sent meanwhile."""
    sent: list[str] = []

    def note(*args: Any) -> None:
        sent.append(args[2])

    engines = {database.engine, database.writer}
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    yield sent
    for engine in engines:
        event.remove(engine, "before_cursor_execute", note)


class TestAlone:
    """Trials that are to have a card of their own."""

    HALF: ClassVar[dict[str, Any]] = {"resources": {"cpus": 1, "gpus": 0.5}}

    def crowd(self, database: Database, lease: Lease, count: int) -> list[int]:
        with database.read() as session:
            trials = [trial.id for trial in unfinished_trials(session, lease)[:count]]
        for trial_id in trials:
            database.write(under(lease, HeldExperiment.start_trial, trial_id))
            database.write(under(lease, HeldExperiment.crowd_trial, trial_id, "no room"))
        return trials

    def test_they_are_counted_whether_they_wait_or_run(self, post: Post, claim: Claim, database: Database) -> None:
        number = post(5, **self.HALF)
        lease = claim()
        first, *_ = self.crowd(database, lease, 2)
        demand = found(database, number)[number].demand
        assert (demand.alone, demand.running, demand.running_alone, demand.trials) == (2, 0, 0, 5)
        database.write(under(lease, HeldExperiment.start_trial, first))
        demand = found(database, number)[number].demand
        assert (demand.alone, demand.running, demand.running_alone) == (2, 1, 1)
        database.write(lambda session: leases.release(session, lease, drained=False))
        assert found(database)[number].demand.alone == 2, "whoever claims it next knows"

    def test_the_experiments_limit_holds(self, post: Post, claim: Claim, database: Database) -> None:
        number = post(5, max_concurrent_trials=1, **self.HALF)
        self.crowd(database, claim(), 2)
        demand = found(database, number)[number].demand
        assert (demand.alone, demand.trials) == (1, 1)

    def test_one_that_began_between_two_statements_is_no_more_than_run(
        self, post: Post, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each statement sees a moment of its own; less than none would else be said to run beside it."""
        number = post(5, **self.HALF)
        counts = {number: Counter({TrialState.RUNNING: 1})}
        monkeypatch.setattr("service.queue.contenders._alone", lambda _session, _experiments: counts)
        demand = found(database)[number].demand
        assert (demand.running, demand.running_alone, demand.alone) == (0, 0, 1)

    def test_of_trials_that_wait_no_others_are_looked_at(self, post: Post, database: Database) -> None:
        post(2_000, **self.HALF)
        if database.engine.dialect.name != "sqlite":
            pytest.skip("the plan is SQLite's; PostgreSQL's depends on its statistics")
        with statements(database) as sent:
            found(database)
        (query,) = [text for text in sent if "turn <" in text]
        with database.read() as session:
            plan = session.connection().exec_driver_sql(
                f"EXPLAIN QUERY PLAN {query}", (1, "queued", "running", 0, "oom", *["2026-11-28 12:00:00.000000"] * 2)
            )
            assert "ix_trials_queue (experiment_id=? AND state=? AND turn<?)" in str(plan.all())


class TestResting:
    """Trials that may not begin again yet: whoever has them uses no place meanwhile."""

    HALF: ClassVar[dict[str, Any]] = {"resources": {"cpus": 1, "gpus": 0.5}}

    def lose(self, database: Database, lease: Lease, number: int, *, times: int = 1) -> None:
        """Has the trial of that number lose its process, and rest."""
        with database.read() as session:
            trial_id = next(trial.id for trial in unfinished_trials(session, lease) if trial.number == number)
        for _ in range(times):
            database.write(under(lease, HeldExperiment.start_trial, trial_id))
            database.write(under(lease, HeldExperiment.lose_trial, trial_id, "gone", longest_rest=300.0))

    def test_they_are_not_asked_for_until_they_may_begin(
        self, post: Post, claim: Claim, database: Database, table: Table
    ) -> None:
        number, other = post(3), post(2)
        lease = claim()
        self.lose(database, lease, 0)
        self.lose(database, lease, 1, times=3)
        one = found(database, number)[number]
        assert (one.demand.trials, one.demand.running) == (1, 0)
        assert one.rests_until == table(Trial)[0].rests_until, "the first of them"
        assert (found(database)[other].demand.trials, found(database)[other].rests_until) == (2, None)
        rested = update(Trial).where(Trial.number == 0).values(rests_until=now())
        database.write(lambda session: session.execute(rested))
        assert found(database, number)[number].demand.trials == 2
        database.write(lambda session: leases.release(session, lease, drained=True))
        assert found(database)[number].demand.trials == 2, "whoever claims it next knows"

    def test_one_that_is_to_be_alone_waits_for_no_card_meanwhile(
        self, post: Post, claim: Claim, database: Database
    ) -> None:
        number = post(3, **self.HALF)
        lease = claim()
        with database.read() as session:
            trial_id = unfinished_trials(session, lease)[0].id
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        database.write(under(lease, HeldExperiment.crowd_trial, trial_id, "no room"))
        assert found(database, number)[number].demand.alone == 1
        self.lose(database, lease, 0)
        demand = found(database, number)[number].demand
        assert (demand.trials, demand.alone) == (2, 0)

    def test_only_they_are_looked_at(self, post: Post, database: Database) -> None:
        post(2_000)
        if database.engine.dialect.name != "sqlite":
            pytest.skip("the plan is SQLite's; PostgreSQL's depends on its statistics")
        with statements(database) as sent:
            found(database)
        (query,) = [text for text in sent if "trials.experiment_id, trials.rests_until" in text]
        with database.read() as session:
            asked = "2026-11-28 12:00:00.000000", "2026-11-28 12:05:00.000000", "queued"
            plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", asked)
            assert "ix_trials_rests_until (rests_until>? AND rests_until<?)" in str(plan.all())


class TestDemands:
    def test_of_what_waits_and_of_ours(self, post: Post, claim: Claim, database: Database) -> None:
        ours, others, waiting, paused, over = (post() for _ in range(5))
        assert claim("ours").experiment_id == ours
        assert claim("others").experiment_id == others
        database.write(lambda session: actions.pause(session, paused))
        database.write(lambda session: actions.cancel(session, over))
        assert {number: one.claimed for number, one in found(database, ours).items()} == {ours: True, waiting: False}
        assert set(found(database)) == {waiting}
        assert set(found(database, ours, others, paused, over)) == {ours, others, waiting}

    def test_what_runs_and_what_waits(
        self, post: Post, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        number, other = post(seeds=5), post(seeds=2)
        assert {key: (one.demand.trials, one.demand.running) for key, one in found(database).items()} == {
            number: (5, 0),
            other: (2, 0),
        }
        lease = claim()
        first, second, third, fourth, *_ = (trial.id for trial in table(Trial))
        finish(lease, first)
        for trial_id in (second, third, fourth):
            database.write(under(lease, HeldExperiment.start_trial, trial_id))
        database.write(under(lease, HeldExperiment.fail_trial, second, "oom", "too large"))
        demand = found(database, number)[number].demand
        assert (demand.trials, demand.running) == (3, 2)
        database.write(under(lease, HeldExperiment.yield_trial, fourth))
        demand = found(database, number)[number].demand
        assert (demand.trials, demand.running) == (3, 1)
        database.write(lambda session: actions.stop(session, number))
        demand = found(database, number)[number].demand
        assert (demand.trials, demand.running) == (1, 1)
        finish(lease, third)
        assert found(database, number)[number].demand.trials == 0
        assert (found(database)[other].demand.trials, found(database)[other].demand.running) == (2, 0)

    def test_one_that_is_changed_between_two_statements_is_left_out(self, post: Post, database: Database) -> None:
        """Its terms would not be those of the revision that was read; the others are there."""
        changed, other = post(), post()

        class Late(Specs):
            def of(self, session: Session, revisions: Collection[tuple[int, int]]) -> Mapping[tuple[int, int], Terms]:
                found = super().of(session, revisions)
                return {key: terms for key, terms in found.items() if key[0] != changed}

        assert set(found(database, specs=Late())) == {other}

    def test_needs_limits_priority_and_giving_way(self, post: Post, database: Database) -> None:
        plain = post()
        special = post(
            seeds=9,
            resources={"cpus": 3, "gpus": 0.5, "memory_gib": 2.5},
            max_concurrent_trials=2,
            priority=7,
            preempt=True,
        )
        one, two = found(database)[plain], found(database)[special]
        assert (one.demand.needs, one.demand.trials, one.demand.priority, one.preempt) == (Amount(1), 3, 0, False)
        assert two.demand.needs == Amount(3, 0.5, 2.5)
        assert (two.demand.trials, two.demand.priority, two.preempt) == (2, 7, True)
        assert (two.waiting, two.unfit_since, two.claimed) == (None, None, False)

    def test_a_limit_that_is_changed_counts_at_once(self, post: Post, claim: Claim, database: Database) -> None:
        number, specs = post(seeds=9, max_concurrent_trials=2), Specs()
        claim()
        for most, trials in ((None, 2), (5, 5), (1, 1), (10_000, 9)):
            if most is not None:
                changes: Changes = {"max_concurrent_trials": most}
                database.write(partial(actions.change, experiment_id=number, fields=changes))
            assert found(database, number, specs=specs)[number].demand.trials == trials
        database.write(lambda s: actions.change(s, number, {"priority": 3}))
        assert found(database, number, specs=specs)[number].demand.priority == 3

    def test_what_was_used_lately_is_that_of_the_newest_events(
        self,
        post: Post,
        claim: Claim,
        database: Database,
        table: Table,
        finish: Finish,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Each trial once, since it last ended, with all that its attempts took; of those that never ran nothing."""
        adas, bobs = post(2, replace(ANYONE, name="ada"), resources={"cpus": 3}), post(3, BOB)
        for _ in range(2):
            lease = claim()
            with database.read() as session:
                finished, lost, *_ = (trial.id for trial in unfinished_trials(session, lease))
            for trial in (finished, lost):
                database.write(under(lease, HeldExperiment.start_trial, trial))
                database.write(under(lease, HeldExperiment.lose_trial, trial, "killed", charged=False))
            finish(lease, finished)

        def date_back(session: Session) -> None:
            for number, seconds in ((adas, 3600), (bobs, 7200)):
                ran = Trial.experiment_id == number, Trial.started_at.is_not(None)
                session.execute(update(Trial).where(*ran).values(run_seconds=seconds))
            session.execute(update(Event).where(Event.experiment_id == adas).values(at=now() - timedelta(hours=2)))

        database.write(date_back)
        with database.read() as session:
            spent = used_lately(session, Specs())
            monkeypatch.setattr("service.queue.contenders.MOST_RECALLED", 1)
            newest = used_lately(session, Specs())
        found = sorted((one.group.owner, one.needs.cpus, one.seconds, round(one.ago / 600)) for one in spent)
        assert found == [("ada", 3.0, 3600.0, 12)] * 2 + [("bob", 1.0, 7200.0, 0)] * 2
        assert [one.group.owner for one in newest] == ["bob"]

    @pytest.mark.parametrize("again", [False, True])
    def test_so_is_that_of_trials_whose_worker_stopped(
        self, post: Post, claim: Claim, database: Database, again: bool
    ) -> None:
        """They have no event of their own, as long as they take longer than a worker lives."""
        post(2)
        lease = claim()
        with database.read() as session:
            first, _ = (trial.id for trial in unfinished_trials(session, lease))
        database.write(under(lease, HeldExperiment.start_trial, first))
        if again:
            database.write(under(lease, HeldExperiment.yield_trial, first))
            database.write(under(lease, HeldExperiment.start_trial, first))
        database.write(partial(leases.release, lease=lease, drained=True))
        ran = update(Trial).where(Trial.id == first).values(run_seconds=14400)
        database.write(lambda session: session.execute(ran))

        def recalled() -> list[tuple[float, int]]:
            with database.read() as session:
                return [(one.seconds, round(one.ago / 600)) for one in used_lately(session, Specs())]

        assert recalled() == [(14400, 0)]
        database.write(under(claim(), HeldExperiment.start_trial, first))
        assert recalled() == [(14400, 0)], "it runs again"

    def test_a_search_wants_trials_that_are_not_there_yet(
        self, post: Post, claim: Claim, database: Database, table: Table
    ) -> None:
        search = {"algorithm": "random", "trials": 6, "space": {"seed": {"int": [0, 99]}}}
        number, limited = post(0, search=search), post(0, search=search, max_concurrent_trials=4)
        assert {key: one.demand.trials for key, one in found(database).items()} == {number: 6, limited: 4}
        lease = claim()
        planned = expand_grid(ExperimentSpec(name="one", base=BASE), max_trials=1).trials[0]
        trial_id = database.write(under(lease, HeldExperiment.add_trial, planned))
        assert found(database, number)[number].demand.trials == 6
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        database.write(under(lease, HeldExperiment.fail_trial, trial_id, "oom", "too large"))
        assert found(database, number)[number].demand.trials == 5
        again = database.write(
            under(
                lease,
                HeldExperiment.add_trial,
                expand_grid(ExperimentSpec(name="one", base=BASE | {"seed": 1}), max_trials=1).trials[0],
            )
        )
        database.write(under(lease, HeldExperiment.start_trial, again))
        database.write(lambda session: actions.stop(session, number))
        assert found(database, number)[number].demand.trials == 1  # what runs, and no other

    def test_a_search_that_has_made_its_trials_wants_no_more(
        self, post: Post, claim: Claim, database: Database
    ) -> None:
        search = {"algorithm": "random", "trials": 1, "space": {"seed": {"int": [0, 99]}}}
        number = post(0, search=search)
        planned = expand_grid(ExperimentSpec(name="one", base=BASE), max_trials=1).trials[0]
        database.write(under(claim(), HeldExperiment.add_trial, planned))
        assert found(database, number)[number].demand.trials == 1

    def test_nor_does_one_whose_space_has_no_other_point(self, post: Post, claim: Claim, database: Database) -> None:
        """Else it would keep places empty for as long as its last trial runs."""
        number = post(0, search={"algorithm": "random", "trials": 50, "space": {"seed": {"int": [0, 1]}}})
        planned, lease = expand_grid(ExperimentSpec(name="one", base=BASE), max_trials=1).trials[0], claim()
        database.write(under(lease, HeldExperiment.add_trial, planned))
        assert found(database, number)[number].demand.trials == 50
        database.write(under(lease, HeldExperiment.end_search))
        assert found(database, number)[number].demand.trials == 1

    def test_whose_it_is_and_what_they_and_their_project_weigh(self, post: Post, database: Database) -> None:
        whose = [(None, None, 1.0, 1.0), (None, "ada", 1.0, 1.0), (5, None, 2.5, 1.0)]  # an admin's have no project
        whose += [(5, "ada", 2.5, 3.0), (5, "bob", 2.5, 1.0), (6, "ada", 1.0, 0.5), (6, "bob", 1.0, 1.0)]
        numbers = [post() for _ in whose]

        def share(session: Session) -> None:
            session.add_all([Project(id=5, name="vision", weight=2.5), Project(id=6, name="speech")])
            session.flush()
            weights = {(5, "ada"): 3.0, (6, "ada"): 0.5, (6, "cid"): 9.0}
            session.add_all(Person(project_id=at, owner=name, weight=each) for (at, name), each in weights.items())
            for number, (project, owner, *_) in zip(numbers, whose, strict=True):
                experiment = session.get_one(Experiment, number)
                experiment.project_id, experiment.owner = project, owner

        database.write(share)
        demands = [one.demand for one in found(database).values()]
        assert [(one.project_id, one.owner, one.weight, one.person_weight) for one in demands] == whose


class TestWaiting:
    def test_why_and_since_when(self, post: Post, database: Database, table: Table) -> None:
        first, second = post(), post()

        def say(reasons: dict[int, str | None], *unfit: int) -> list[tuple[str | None, Any]]:
            database.write(lambda session: say_why(session, reasons, unfit))
            return [(one.waiting, one.unfit_since) for one in found(database).values()]

        (one, other) = say({first: "needs 3 GPUs on one node; the largest has 2"}, first)
        assert one[0] == "needs 3 GPUs on one node; the largest has 2"
        assert abs((now() - one[1]).total_seconds()) < 60
        assert other == (None, None)
        since = one[1]
        (one, other) = say({first: "needs 3 GPUs on one node; the largest has 1", second: "others come first"}, first)
        assert one == ("needs 3 GPUs on one node; the largest has 1", since)  # since it was first seen
        assert other == ("others come first", None)
        assert say({first: None, second: None}) == [(None, None)] * 2
        assert table(Event)[-1].kind == "submitted"  # nobody is told every second

    def test_revisions_and_fences_stay(self, post: Post, claim: Claim, database: Database, table: Table) -> None:
        number = post()
        lease = claim()
        database.write(lambda session: say_why(session, {number: "its driver died 2 times"}, ()))
        (experiment,) = table(Experiment)
        assert (experiment.fence, experiment.revision, experiment.waiting) == (1, 0, "its driver died 2 times")
        database.write(lambda session: leases.renew(session, lease))

    @pytest.mark.parametrize("end", ["cancel", "stop", "pause", "give up", "complete"])
    def test_what_is_over_or_paused_waits_for_nothing(
        self, post: Post, claim: Claim, database: Database, table: Table, finish: Finish, end: str
    ) -> None:
        """Else what is resumed or retried after a while would be given up before it was looked at."""
        number = post(seeds=1)
        lease = claim() if end == "complete" else None
        database.write(lambda session: say_why(session, {number: "needs 3 GPUs on one node"}, {number}))
        if lease is not None:
            finish(lease, table(Trial)[0].id)
        ends: dict[str, Callable[[Session], object]] = {
            "cancel": lambda session: actions.cancel(session, number),
            "stop": lambda session: actions.stop(session, number),
            "pause": lambda session: actions.pause(session, number),
            "give up": lambda session: give_up_unfit(session, number, "worker", "never fitted"),
            "complete": lambda session: lease is not None and leases.complete(session, lease),
        }
        database.write(ends[end])
        (experiment,) = table(Experiment)
        assert experiment.state != ExperimentState.QUEUED
        assert (experiment.waiting, experiment.unfit_since) == (None, None)
        database.write(lambda session: say_why(session, {number: "too late"}, {number}))
        assert table(Experiment)[0].waiting is None


class TestLine:
    """Of what no worker looks at yet it is said that it waits for others."""

    @pytest.fixture
    def waiting(self, database: Database) -> Callable[[], list[int]]:
        """The experiments that wait for others of the same person's."""

        def waiting() -> list[int]:
            with database.read() as session:
                behind = select(Experiment.id).where(Experiment.waiting == BEHIND).order_by(Experiment.id)
                assert {*session.scalars(behind)}.isdisjoint(found(database))
                return list(session.scalars(behind))

        return waiting

    @pytest.mark.parametrize("owner", [None, "ada"])
    def test_it_is_said_of_what_is_posted(
        self, owner: str | None, post: Post, database: Database, waiting: Callable[[], list[int]]
    ) -> None:
        """Other people's do not count, nor what has a higher priority than they."""
        who = ANYONE if owner is None else replace(ANYONE, name=owner)
        numbers = [post(1, who) for _ in range(MOST_OF_A_PERSON + 2)]
        post(1, BOB)
        post(1, who, priority=1)
        assert waiting() == numbers[MOST_OF_A_PERSON:]
        database.write(partial(actions.cancel, experiment_id=numbers[-1]))
        assert waiting() == [numbers[-2]]

    def test_it_is_said_of_what_comes_back(
        self, post: Post, claim: Claim, database: Database, waiting: Callable[[], list[int]]
    ) -> None:
        claimed, paused, ended = post(1), post(1), post(1)
        lease = claim()
        database.write(partial(actions.cancel, experiment_id=ended))
        database.write(partial(actions.pause, experiment_id=paused))
        for _ in range(MOST_OF_A_PERSON):
            post(1, priority=1)
        assert waiting() == []
        database.write(partial(actions.resume, experiment_id=paused))
        assert waiting() == [paused]
        database.write(partial(actions.retry, experiment_id=ended, states=[TrialState.CANCELLED]))
        assert waiting() == [paused, ended]
        database.write(lambda session: leases.release(session, lease, drained=False))
        assert waiting() == [claimed, paused, ended]

    def test_it_is_said_again_once_a_worker_is_there(
        self, post: Post, database: Database, waiting: Callable[[], list[int]]
    ) -> None:
        """The last one that left had all wait for a worker."""
        numbers = [post(1) for _ in range(MOST_OF_A_PERSON + 2)]
        others = [post(1, BOB) for _ in range(MOST_OF_A_PERSON + 1)]
        database.write(partial(leases.part, worker="a"))
        assert waiting() == []
        database.write(partial(leases.greet, worker="a", cpus=4, gpus=0))
        assert waiting() == [*numbers[MOST_OF_A_PERSON:], others[-1]]


class TestGivingUp:
    def test_fails_what_waits_and_says_why(
        self, post: Post, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        number, other = post(seeds=3), post(seeds=1)
        lease = claim()
        done, begun, last, _ = (trial.id for trial in table(Trial))
        finish(lease, done)
        database.write(under(lease, HeldExperiment.start_trial, begun))
        database.write(lambda session: leases.release(session, lease, drained=True))
        database.write(lambda session: give_up_unfit(session, number, "small", "needs 3 GPUs"))
        bad, good = table(Experiment)
        assert (bad.state, bad.error, bad.worker) == (ExperimentState.FAILED, "needs 3 GPUs", None)
        assert bad.finished_at is not None
        assert bad.fence == lease.fence + 1
        assert (good.id, good.state) == (other, ExperimentState.QUEUED)
        assert [(trial.state, trial.failure, trial.error) for trial in table(Trial)] == [
            (TrialState.SUCCEEDED, None, None),
            (TrialState.FAILED, "infrastructure", "needs 3 GPUs"),
            (TrialState.FAILED, "infrastructure", "needs 3 GPUs"),
            (TrialState.QUEUED, None, None),
        ]
        assert [trial.id for trial in table(Trial) if trial.finished_at is not None] == [done, begun, last]
        said = table(Event)[-1]
        assert (said.kind, said.actor, said.experiment_id) == ("closed", "small", number)
        database.write(lambda session: actions.retry(session, number))
        assert found(database)[number].demand.trials == 2

    def test_of_several_the_one_that_is_named(self, post: Post, database: Database, table: Table) -> None:
        post()
        number = post()
        database.write(lambda session: give_up_unfit(session, number, "small", "needs 3 GPUs"))
        assert [one.state for one in table(Experiment)] == [ExperimentState.QUEUED, ExperimentState.FAILED]

    def test_a_search_says_so_though_it_has_no_trial_yet(self, post: Post, database: Database, table: Table) -> None:
        search = {"algorithm": "random", "trials": 6, "space": {"seed": {"int": [0, 99]}}}
        number = post(0, search=search, resources={"memory_gib": 1e5})
        database.write(lambda session: give_up_unfit(session, number, "small", "needs 100000 GiB of memory"))
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.error) == (ExperimentState.FAILED, "needs 100000 GiB of memory")
        assert table(Trial) == []

    @pytest.mark.parametrize("state", [state for state in ExperimentState if state != ExperimentState.QUEUED])
    def test_nothing_else(self, post: Post, database: Database, table: Table, state: ExperimentState) -> None:
        number = post(seeds=1)

        def change(session: Session) -> None:
            session.get_one(Experiment, number).state = state

        database.write(change)
        database.write(lambda session: give_up_unfit(session, number, "small", "needs 3 GPUs"))
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.error, experiment.fence) == (state, None, 0)
        assert table(Trial)[0].state == TrialState.QUEUED


class TestMany:
    """Thousands of experiments that wait: of each person's the first are looked at, and nobody is forgotten."""

    @pytest.fixture
    def many(self, database: Database, post: Post) -> Callable[..., None]:
        """Stores so many more like the one that was posted, with what else is said of them."""

        def many(count: int, **fields: Any) -> None:
            def work(session: Session) -> None:
                spec = session.scalars(select(Experiment.spec).limit(1)).one()
                row = {
                    "name": "more",
                    "spec": spec,
                    "grid_points": 1,
                    "trial_count": 1,
                    "project_id": None,
                    "owner": None,
                }
                first = session.scalar(select(func.max(Experiment.id))) or 0
                session.execute(insert(Experiment), [row | fields for _ in range(count)])
                counted = select(Experiment.id, literal("queued"), literal(1), literal(0), literal(3), literal(0.0))
                columns = ["experiment_id", "state", "trials", "epoch", "epochs", "run_seconds"]
                session.execute(insert(Tally).from_select(columns, counted.where(Experiment.id > first)))

            database.write(work)

        return many

    @pytest.fixture
    def projects(self, database: Database) -> list[int]:
        def work(session: Session) -> list[int]:
            session.add_all(made := [Project(name=name) for name in ("a", "b")])
            session.flush()
            return [project.id for project in made]

        return database.write(work)

    def test_of_each_person_in_each_project_the_first(
        self, post: Post, database: Database, many: Callable[..., None], projects: list[int]
    ) -> None:
        number = post()
        people: list[tuple[int | None, str | None]] = [(None, None), (None, "zoe"), (None, "ada"), (None, "bob")]
        people += [(projects[0], None), (projects[0], "bob"), (projects[0], "ada")]
        people += [(projects[1], "zoe"), (projects[1], "bob")]
        for project, owner in people:
            many(50, project_id=project, owner=owner)
        many(1, project_id=projects[1], owner="late")
        many(2, project_id=projects[0], owner="bob", priority=7)
        seen: dict[tuple[int | None, str | None], list[int]] = {}
        with database.read() as session:
            chosen = contenders(session, (), Specs(), most=10)
        for one in chosen:
            seen.setdefault((one.demand.project_id, one.demand.owner), []).append(one.demand.experiment_id)
        assert {who: len(ids) for who, ids in seen.items()} == {**dict.fromkeys(people, 10), (projects[1], "late"): 1}
        assert seen[None, None][0] == number
        bobs = [one for one in chosen if (one.demand.project_id, one.demand.owner) == (projects[0], "bob")]
        assert [one.demand.priority for one in bobs].count(7) == 2
        assert sorted(one.demand.experiment_id for one in bobs if not one.demand.priority) == list(
            range(min(one.demand.experiment_id for one in bobs), min(one.demand.experiment_id for one in bobs) + 8)
        )

    def test_ours_are_seen_however_many_wait(
        self, post: Post, claim: Claim, database: Database, many: Callable[..., None]
    ) -> None:
        ours = post()
        assert claim().experiment_id == ours
        many(200, priority=5)
        with database.read() as session:
            chosen = {one.demand.experiment_id: one.claimed for one in contenders(session, [ours], Specs(), most=4)}
        assert chosen.pop(ours)
        assert len(chosen) == 4

    def test_ten_thousand_are_not_read(
        self, post: Post, database: Database, many: Callable[..., None], projects: list[int]
    ) -> None:
        """SQLite's plan says so of every table that is read; PostgreSQL counts the rows that it touches."""
        post()
        for owner in ("ada", "bob"):
            many(5_000, project_id=projects[0], owner=owner)
        weighing = [{"project_id": projects[0], "owner": f"person {n}", "weight": 2.0} for n in range(5_000)]
        database.write(lambda session: session.execute(insert(Person), weighing))
        with database.engine.connect() as connection:
            connection.exec_driver_sql("ANALYZE")
            connection.commit()
        asked: list[tuple[str, Any]] = []
        event.listen(database.engine, "before_cursor_execute", lambda *args: asked.append((args[2], args[3])))
        chosen = found(database)
        assert len(chosen) == 1 + 2 * MOST_OF_A_PERSON
        for query, values in [one for one in asked if "experiments" in one[0]]:
            with database.engine.connect() as connection:
                if database.engine.dialect.name == "sqlite":
                    plan = str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).all())
                    assert "SCAN experiments" not in plan
                    assert "SCAN people" not in plan
                    assert "USING INDEX ix_experiments_state_priority_id" not in plan
                else:
                    (told,) = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}", values).one()
                    assert max(_touched(told[0]["Plan"])) < 1_000, told


def _touched(plan: dict[str, Any]) -> list[float]:
    """Rows of each step of a plan, those that were read and thrown away too."""
    mine = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    return [mine, *(rows for part in plan.get("Plans", ()) for rows in _touched(part))]


class TestCost:
    """Ten thousand trials that wait cost no more than one."""

    def test_of_trials_contenders_read_those_alone_that_rest(
        self, post: Post, claim: Claim, database: Database
    ) -> None:
        specs, numbers = Specs(), [post(seeds=seeds) for seeds in (1, 40, 3)]
        claim()
        for expected in (2, 1):  # the specs are read once
            with statements(database) as sent:
                found(database, numbers[0], specs=specs)
            selects = [statement for statement in sent if "SELECT" in statement and "rests_until >" not in statement]
            assert len(selects) == expected
            assert not any("FROM trials" in statement for statement in selects)
            assert not any("JOIN trials" in statement for statement in selects)
        database.write(lambda s: actions.change(s, numbers[1], {"priority": 1}))
        with statements(database) as sent:
            found(database, numbers[0], specs=specs)
        assert sum("spec" in statement for statement in sent) == 1  # only the one that changed

    def test_specs_of_what_is_over_are_forgotten_once_there_are_many(
        self, post: Post, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those far behind in the queue, which are looked at now and then, are not."""
        monkeypatch.setattr("service.queue.contenders._MOST_KNOWN", 2)
        specs, numbers = Specs(), [post(seeds=1) for _ in range(3)]
        found(database, specs=specs)
        database.write(lambda session: actions.cancel(session, numbers[0]))
        found(database, specs=specs)
        assert {number for number, _ in specs._terms} == {*numbers}
        numbers.append(post(seeds=1))
        assert found(database, specs=specs).keys() == {*numbers[1:]}
        assert {number for number, _ in specs._terms} == {*numbers[1:]}

    def test_the_next_trial_is_found_by_the_index(
        self, post: Post, claim: Claim, database: Database, table: Table
    ) -> None:
        post(seeds=1)
        post(seeds=1)
        (row, _) = table(Trial)
        columns = {column.key: getattr(row, column.key) for column in Trial.__table__.columns if column.key != "id"}
        rows = [
            columns | {"number": number, "fingerprint": f"f{number}", "turn": number % 7, "config": {}}
            for number in range(1, 10_000)
        ]
        database.write(lambda session: session.execute(insert(Trial), rows))
        with database.writer.begin() as connection:
            connection.execute(text("ANALYZE"))
        lease = claim()
        with statements(database) as sent, database.read() as session:
            begun = now()
            first = driver_reads.next_trial(session, lease, ())
            assert first is not None
            other = driver_reads.next_trial(session, lease, [first.id])
            assert now() - begun < timedelta(seconds=1)
        assert (first.number, other and other.number) == (0, 7)
        (query, _) = [statement for statement in sent if "FROM trials" in statement]
        assert "LIMIT" in query
        explain = "EXPLAIN QUERY PLAN " if database.engine.dialect.name == "sqlite" else "EXPLAIN "
        literal = (
            "SELECT * FROM trials WHERE EXISTS (SELECT * FROM experiments WHERE id = 1 AND fence = 1 AND state ="
            " 'running') AND experiment_id = 1 AND state = 'queued' AND id NOT IN (1, 2)"
            " AND (rests_until IS NULL OR rests_until <= '2026-11-28' OR rests_until > '2026-11-29')"
            " ORDER BY turn, number LIMIT 1"
        )
        with database.read() as session:
            plan = "\n".join(str(tuple(row)) for row in session.execute(text(explain + literal)))
        assert "ix_trials_queue" in plan
        assert not any(word in plan for word in ("Sort", "TEMP B-TREE", "Seq Scan on trials"))
