"""The migrations make what the models say, on SQLite and Postgres."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import ClauseElement, Connection, MetaData, Table, insert, inspect, select, text
from sqlalchemy.orm import Session

import migrations
from service.database import (
    Base,
    Experiment,
    FieldIndex,
    Project,
    Protocol,
    Result,
    Score,
    ScoreBoard,
    ScoreRank,
    Trial,
    TrialState,
    engine,
)
from service.database.engine import Database
from service.leaderboards import field_index
from service.leaderboards.score_ranks import tie_of
from service.queue import driver_reads, leases
from service.queue.contenders import Specs, contenders
from service.upkeep.migrate import alembic_config, changing_schema, lacking_metrics, migrate, newest
from tests.results import made_result
from ttsv.config.trial import TrialConfig
from ttsv.results import protocol_fingerprint


@pytest.fixture
def empty(empty_url: str) -> Iterator[Database]:
    database = Database(empty_url)
    yield database
    database.close()


def described(connection: Connection) -> dict[str, Any]:
    """Every table with all that matters about it, in a form to be compared."""
    inspector = inspect(connection)

    def words(item: Any) -> Any:
        """SQL as its text: two objects of the same text are not equal."""
        if isinstance(item, dict):
            return {name: words(part) for name, part in item.items()}
        return str(item) if isinstance(item, ClauseElement) else item

    def plain(items: list[Any]) -> list[str]:
        return sorted(str(sorted(words(item).items(), key=str)) for item in items)

    return {
        name: {
            "columns": sorted(
                (c["name"], str(c["type"]), c["nullable"], str(c["default"])) for c in inspector.get_columns(name)
            ),
            "key": inspector.get_pk_constraint(name),
            "foreign": plain(inspector.get_foreign_keys(name)),
            "unique": plain(inspector.get_unique_constraints(name)),
            "check": plain(inspector.get_check_constraints(name)),
            "index": plain(inspector.get_indexes(name)),
        }
        for name in inspector.get_table_names()
        if name != "alembic_version"
    }


def tables(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(inspect(connection).get_table_names())


def _is_of(connection: Connection) -> Any:
    """Leaves out what only the other database has: Alembic does not ask `ddl_if`."""

    def belongs(_object: Any, name: str | None, *_about: Any) -> bool:
        return name != "ix_scores_fields" or connection.dialect.name == "sqlite"

    return belongs


class TestUpgrade:
    def test_alembic_finds_no_difference_to_the_models(self, empty: Database) -> None:
        migrate(empty)
        with empty.engine.connect() as connection:
            options = {"compare_type": True, "compare_server_default": True, "include_object": _is_of(connection)}
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, Base.metadata) == []
            assert context.get_current_revision() == newest()

    @pytest.mark.slow
    def test_it_is_what_the_models_would_create(self, empty: Database) -> None:
        """Checks and defaults too, which that comparison leaves out."""
        with empty.writer.begin() as connection:
            Base.metadata.create_all(connection)
            expected = described(connection)
            Base.metadata.drop_all(connection)
        migrate(empty)
        with empty.engine.connect() as connection:
            assert described(connection) == expected
            assert {c for table in expected.values() for c in table["check"]}

    def test_down_and_up_again(self, empty: Database) -> None:
        migrate(empty)
        with empty.engine.connect() as connection:
            before = described(connection)
        with empty.writer.begin() as connection:
            command.downgrade(alembic_config(connection), "base")
        assert tables(empty) - {"sqlite_sequence"} == {"alembic_version"}
        migrate(empty)
        with empty.engine.connect() as connection:
            assert described(connection) == before

    def test_twice_changes_nothing(self, empty: Database) -> None:
        migrate(empty)
        with empty.writer.begin() as connection:
            connection.execute(text("INSERT INTO protocols (fingerprint, record) VALUES ('a', '{}')"))
        migrate(empty)
        with empty.engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM protocols")) == 1

    def test_one_may_take_as_long_as_its_tables_need(self, postgres_url: str) -> None:
        """But it waits for nobody's lock for longer than others for its own: they would wait behind it."""
        names = ("statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout")
        with closing(Database(postgres_url)) as database, changing_schema(database) as connection:
            assert [connection.scalar(text(f"SHOW {name}")) for name in names] == ["0", "0", "10s"]

    def test_from_four_at_once(self, empty: Database, empty_url: str) -> None:
        errors: list[BaseException] = []
        barrier = threading.Barrier(4)

        def run() -> None:
            database = Database(empty_url)
            barrier.wait()
            try:
                migrate(database)
            except BaseException as error:
                errors.append(error)
            database.close()

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        with empty.engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM alembic_version")) == 1
        assert set(Base.metadata.tables) <= tables(empty)

    def test_a_new_files_journal_is_changed_again_while_it_is_locked(self) -> None:
        """As SQLite refuses, now and then and at once, all but one who change it together."""
        answers: list[str | None] = ["database is locked", "database is locked", None, "disk I/O error"]

        def change() -> None:
            if (answer := answers.pop(0)) is not None:
                raise engine.sqlite_driver.OperationalError(answer)

        engine._patiently(change)
        assert answers == ["disk I/O error"]
        with pytest.raises(engine.sqlite_driver.OperationalError, match="disk"):
            engine._patiently(change)

    def test_a_migration_offers_a_way_back(self) -> None:
        folder = Path(migrations.__file__).parent / "versions"
        for file in folder.glob("[0-9]*.py"):
            source = file.read_text()
            assert "def upgrade() -> None:" in source
            assert "def downgrade() -> None:" in source


NEXT = '''"""A column more, and one constraint that SQLite can only change by copying the table"""

import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "{last}"


def upgrade():
    with op.batch_alter_table("experiments") as table:
        table.alter_column("name", type_=sa.String(300), existing_type=sa.String(200), existing_nullable=False)
    {more}
'''


class TestNext:
    """What the migrations that follow rely on."""

    @pytest.fixture
    def add(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        """Puts one more migration into a copy of ours."""

        last = newest()

        def add(more: str) -> None:
            folder = tmp_path / "migrations"
            shutil.copytree(Path(migrations.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
            (folder / "versions" / "next.py").write_text(NEXT.format(more=more, last=last))
            monkeypatch.setattr(migrations, "__file__", str(folder / "__init__.py"))

        return add

    def fill(self, database: Database) -> None:
        with database.writer.begin() as connection:
            Base.metadata.tables["protocols"]
            connection.execute(
                Base.metadata.tables["experiments"].insert(),
                {"id": 1, "name": "old", "spec": {}, "grid_points": 1, "trial_count": 1},
            )
            connection.execute(
                Base.metadata.tables["trials"].insert(),
                {
                    "experiment_id": 1,
                    "number": 0,
                    "fingerprint": "f",
                    "cell": "c",
                    "config": {},
                    "dataset": "digits",
                    "model": "small-cnn",
                    "layer": "dense",
                    "lambda_ort": 0.0,
                    "constraint": "none",
                    "seed": 0,
                    "epochs": 1,
                },
            )

    def test_changing_a_table_keeps_the_rows_that_refer_to_it(self, empty: Database, add: Any) -> None:
        """SQLite copies the table and drops the old one, which would delete every trial by cascade."""
        migrate(empty)
        self.fill(empty)
        add("")
        migrate(empty)
        with empty.engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM trials")) == 1
            assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "next"
            if connection.dialect.name == "sqlite":
                assert connection.scalar(text("PRAGMA foreign_keys")) == 1

    def test_a_migration_that_fails_leaves_nothing(self, empty: Database, add: Any) -> None:
        migrate(empty)
        self.fill(empty)
        with empty.engine.connect() as connection:
            before = described(connection)
        add("raise RuntimeError('half way')")
        with pytest.raises(RuntimeError, match="half way"):
            migrate(empty)
        with empty.engine.connect() as connection:
            assert described(connection) == before
            assert connection.scalar(text("SELECT count(*) FROM trials")) == 1
            assert connection.scalar(text("SELECT version_num FROM alembic_version")) == newest()
            if connection.dialect.name == "sqlite":
                assert connection.scalar(text("PRAGMA foreign_keys")) == 1


class TestSecond:
    """0002 on a database that the first release filled."""

    FILL = (
        "INSERT INTO experiments (id, name, spec, state, priority, grid_points, trial_count, created_at,"
        " epochs_at_claim, fence, heartbeat, fruitless_claims)"
        " VALUES (7, 'old', '{}', 'succeeded', 0, 1, 1, '2026-11-21 03:30:31', 0, 1, 4, 0)",
        "INSERT INTO trials (id, experiment_id, number, fingerprint, cell, config, dataset, model, layer, lambda_ort,"
        ' "constraint", seed, epochs, epoch, state, attempts)'
        " VALUES (9, 7, 0, 'f', 'c', '{}', 'digits', 'small-cnn', 'dense', 0, 'none', 0, 1, 1, 'succeeded', 1)",
        "INSERT INTO protocols (fingerprint, record) VALUES ('p', '{}')",
        "INSERT INTO results (trial_id, protocol, fence, accuracy, loss, ece, max_singular_value, compression,"
        " parameters, multiply_accumulates, train_seconds, constraint_seconds, step_seconds, constraint_step_seconds,"
        " eval_seconds, spectrum_seconds, latency_seconds, batch_seconds, selected_epoch, layers, environment,"
        " created_at)"
        " VALUES (9, 'p', 1, 0.5, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, '[]', '{}', '2026-11-21 03:30:31')",
    )

    def test_everything_stays_there_and_back(self, empty: Database) -> None:
        with empty.writer.begin() as connection:
            command.upgrade(alembic_config(connection), "0001")
            for statement in self.FILL:
                connection.execute(text(statement))
        migrate(empty)
        with Session(empty.engine) as session:
            trial = session.get_one(Trial, 9)
            assert (trial.run_seconds, trial.source_trial_id) == (0, None)
            experiment = session.get_one(Experiment, 7)
            assert (experiment.name, experiment.revision, experiment.stopping) == ("old", 0, False)
            result = session.get_one(Result, 9)
            assert (result.accuracy, result.robust_accuracy, result.valid) == (0.5, None, True)
        driver: Any = None
        with empty.writer.connect() as connection:
            if connection.dialect.name == "sqlite":
                driver = connection.connection.driver_connection
                driver.execute("PRAGMA foreign_keys=OFF")
            with connection.begin():
                command.downgrade(alembic_config(connection), "0001")
        with empty.engine.connect() as connection:
            assert connection.scalar(text("SELECT accuracy FROM results WHERE trial_id = 9")) == 0.5


class TestFifth:
    """0005 on scores that have no order of ties."""

    OLD = (
        *TestSecond.FILL,
        "INSERT INTO score_boards (id, scope, dataset, protocol) VALUES (5, 0, 'digits', 'p')",
        'INSERT INTO scores (id, board_id, cell, trial_id, model, layer, "constraint", seeds, metrics)'
        " VALUES (3, 5, 'c', 9, 'small-cnn', 'dense', 'none', 1, '{}')",
        "INSERT INTO score_ranks (score_id, metric, board_id, mean) VALUES (3, 'accuracy', 5, 0.5)",
    )

    def test_scores_are_made_anew_from_the_results(self, empty: Database) -> None:
        with empty.writer.begin() as connection:
            command.upgrade(alembic_config(connection), "0004")
            for statement in self.OLD:
                connection.execute(text(statement))
        migrate(empty)
        with Session(empty.engine) as session:
            (score,) = session.scalars(select(Score))
            ranks = {rank.metric: (rank.score_id, rank.mean, rank.tie) for rank in session.scalars(select(ScoreRank))}
            assert (score.cell, ranks["accuracy"]) == ("c", (score.id, 0.5, tie_of("c")))
            assert session.get_one(Experiment, 7).progressed_at is None


class TestNinth:
    """0009 on a queue that the version before filled, there and back."""

    FILL = (
        *TestSecond.FILL[:2],
        "INSERT INTO projects (id, name, created_at) VALUES (2, 'vision', '2026-11-21 03:30:31')",
        "UPDATE experiments SET state = 'queued', fruitless_claims = 2, project_id = 2",
        "UPDATE trials SET state = 'queued', attempts = 3",
    )

    def test_what_waits_goes_on_and_what_was_counted_against_it_is_forgotten(self, empty: Database) -> None:
        with empty.writer.begin() as connection:
            command.upgrade(alembic_config(connection), "0008")
            before = described(connection)
            for statement in self.FILL:
                connection.execute(text(statement))
        migrate(empty)
        with Session(empty.engine) as session:
            trial, experiment = session.get_one(Trial, 9), session.get_one(Experiment, 7)
            assert (trial.turn, trial.deaths, trial.node, trial.attempts) == (0, 0, None, 3)
            assert (experiment.waiting, experiment.unfit_since) == (None, None)
            assert session.get_one(Project, 2).weight == 1
            (one,) = contenders(session, (), Specs())
            assert (one.demand.experiment_id, one.demand.trials, one.demand.weight) == (7, 1, 1.0)
            lease = leases.claim(session, "worker", None, 7)
            assert lease is not None
            found = driver_reads.next_trial(session, lease, ())
            assert (found and found.id) == 9
            session.rollback()
        driver: Any = None
        with empty.writer.connect() as connection:
            if connection.dialect.name == "sqlite":
                driver = connection.connection.driver_connection
                driver.execute("PRAGMA foreign_keys=OFF")
            with connection.begin():
                command.downgrade(alembic_config(connection), "0008")
                assert connection.scalar(text("SELECT attempts FROM trials WHERE id = 9")) == 3
                assert connection.scalar(text("SELECT fruitless_claims FROM experiments WHERE id = 7")) == 0
                after = described(connection)
        for tables in (before, after):  # a column that is added where there are rows needs a default
            columns = tables["experiments"]["columns"]
            tables["experiments"]["columns"] = [c[:3] if c[0] == "fruitless_claims" else c for c in columns]
        assert after == before


class TestEleventh:
    """0011 on results whose protocol names the baseline of their mean corruption error."""

    def test_accuracies_share_a_board_and_errors_keep_theirs(self, empty: Database) -> None:
        own = {"split": "test", "corruptions": {"corruptions": "published"}}
        whole = {"split": "test", "corruptions": {"corruptions": "published", "mce_baseline": "x"}}
        with empty.writer.begin() as connection:
            command.upgrade(alembic_config(connection), "0001")
            for statement in TestSecond.FILL:
                connection.execute(text(statement))
        migrate(empty)
        with empty.writer.begin() as connection:
            command.downgrade(alembic_config(connection), "0010")
            put = text("INSERT INTO protocols (fingerprint, record) VALUES (:name, :record)")
            connection.execute(put, {"name": protocol_fingerprint(whole), "record": json.dumps(whole)})
            change = text("UPDATE results SET protocol = :name, mce = 0.5, evaluation = :record")
            evaluation = {"corruptions": {"baseline_sha256": "x"}}
            connection.execute(change, {"name": protocol_fingerprint(whole), "record": json.dumps(evaluation)})
        migrate(empty)
        with Session(empty.engine) as session:
            assert session.get_one(Result, 9).protocol == protocol_fingerprint(own)
            assert session.get_one(Protocol, protocol_fingerprint(own)).record == own
            boards = select(ScoreBoard.protocol, ScoreRank.metric).join(ScoreRank, ScoreRank.board_id == ScoreBoard.id)
            ranked = {tuple(row) for row in session.execute(boards.where(ScoreRank.metric.in_(["accuracy", "mce"])))}
        assert ranked == {
            (protocol_fingerprint(own), "accuracy"),
            (protocol_fingerprint(whole), "accuracy"),
            (protocol_fingerprint(whole), "mce"),
        }
        with empty.writer.begin() as connection:
            command.downgrade(alembic_config(connection), "0010")
            assert connection.scalar(text("SELECT protocol FROM results")) == protocol_fingerprint(whole)


class TestTwelfth:
    """0012 on ranks that have means alone."""

    SCORES = (
        "INSERT INTO score_boards (id, scope, dataset, protocol) VALUES (5, 0, 'digits', 'p')",
        'INSERT INTO scores (id, board_id, cell, trial_id, model, layer, "constraint", seeds, trials, fields, metrics)'
        " VALUES (3, 5, 'c', 9, 'small-cnn', 'dense', 'none', 3, 3, '{}',"
        """ '{"accuracy":[3,0.5,0.30000000000000004,0.1,0.9],"loss":[1,2.5,null,2.5,2.5]}')""",
        "INSERT INTO score_ranks (score_id, metric, board_id, standing, mean, tie)"
        " VALUES (3, 'accuracy', 5, 1, 0.5, 7), (3, 'loss', 5, 0, 2.5, 7)",
    )

    def test_ranks_take_their_spreads_from_the_scores(self, empty: Database) -> None:
        with empty.writer.connect() as connection:
            if connection.dialect.name == "sqlite":  # as `migrate` does: tables are copied
                driver: Any = connection.connection.driver_connection
                driver.execute("PRAGMA foreign_keys=OFF")
            with connection.begin():
                command.upgrade(alembic_config(connection), "0001")
                for statement in TestSecond.FILL:
                    connection.execute(text(statement))
                command.upgrade(alembic_config(connection), "0011")
                for statement in self.SCORES:
                    connection.exec_driver_sql(statement)
        migrate(empty)
        with empty.engine.connect() as connection:
            query = "SELECT metric, standing, mean, tie, seeds, std FROM score_ranks ORDER BY metric"
            ranks = [tuple(row) for row in connection.execute(text(query))]
        # All of three have an accuracy, one has a loss.
        assert ranks == [("accuracy", 1, 0.5, 7, 3, 0.30000000000000004), ("loss", 1, 2.5, 7, 1, None)]


class TestEighteenth:
    """0018 on trials and protocols that the version before made of what was written in other ways."""

    COLOUR: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "succeeded"),
        ({"mean": [0.5], "std": [0.5]}, "succeeded"),
        ({"mean": [0.5, 0.5, 0.5]}, "running"),
        ({"mean": [0.25, 0.25, 0.25]}, "failed"),
        ({"training": {"schedule": "multistep", "milestones": [3, 20], "gamma": 0.5}}, "succeeded"),
        ({"training": {"schedule": "multistep", "milestones": [20], "gamma": 0.5}}, "succeeded"),
        (
            {"constraint": "clip", "delta": 1.0, "clipping": {"rescale": False, "operator": "zero-padded"}},
            "succeeded",
        ),
    )

    def test_what_was_stored_is_in_the_cells_and_on_the_boards_of_what_comes(self, empty: Database) -> None:
        trials = [
            TrialConfig.from_dict({"dataset": dataset, "model": "small-cnn", **fields})
            for dataset in ("cifar10", "npz:own")
            for fields, _ in self.COLOUR
        ]
        states = [state for _, state in self.COLOUR] * 2
        migrate(empty)
        with empty.writer.begin() as connection, Session(connection) as session:
            command.downgrade(alembic_config(connection), "0017")
            for number, (trial, state) in enumerate(zip(trials, states, strict=True), 1):
                self.store(session, number, trial, state, experiment=number)
            for number, trial in ((87, trials[1]), (88, trials[2])):  # both of them other ways to write one
                self.store(session, number, trial, "failed", experiment=98)
            self.store(session, 89, trials[0], "succeeded", experiment=99)
            self.store(session, 90, trials[1], "succeeded", experiment=99)  # beside the canonical one: it stays
            session.commit()
        migrate(empty)
        with Session(empty.engine) as session:
            for number, (trial, state) in enumerate(zip(trials, states, strict=True), 1):
                row = session.get_one(Trial, number)
                assert (row.fingerprint, row.cell) == (trial.fingerprint(), trial.cell())
                kept = trial if state == "running" else trial.canonical()
                assert TrialConfig.from_dict(dict(row.config)) == kept
                in_index = session.get_one(FieldIndex, number).fields
                assert ("mean" in in_index) == bool(kept.mean)
                assert in_index.get("training.schedule", "cosine") == kept.training.schedule
            own = trials[0].fingerprint()
            assert [session.get_one(Trial, number).fingerprint for number in (87, 88, 89, 90)] == [
                *(own, trials[2].written_fingerprint()),
                *(own, trials[1].written_fingerprint()),
            ]
            results = session.execute(select(Result.trial_id, Protocol.record).join(Protocol)).all()
            assert {trial_id for trial_id, _ in results} == {1, 2, 5, 6, 7, 8, 9, 12, 13, 14, 89, 90}
            said: list[Any] = [record["preprocessing"] for _, record in results]
            assert {len(one[name]) for one in said for name in ("mean", "std")} == {3}
            boards = session.scalars(select(ScoreBoard.dataset).where(ScoreBoard.scope == 0)).all()
            assert sorted(boards) == ["cifar10", "npz:own"]
            assert field_index.is_whole(session)

    def store(self, session: Session, number: int, trial: TrialConfig, state: str, experiment: int = 1) -> None:
        """A trial as the version before stored it, with a result and its protocol where it succeeded."""
        if session.get(Experiment, experiment) is None:
            session.add(Experiment(id=experiment, name="old", spec={}, grid_points=1, trial_count=1))
            session.flush()
        config = dict(trial.kept())
        columns = {name: getattr(trial, name) for name in ("dataset", "model", "layer", "rank", "lambda_ort", "seed")}
        columns |= {"constraint": trial.constraint, "delta": trial.delta, "epochs": trial.training.epochs}
        fingerprint = trial.written_fingerprint()
        where = {"id": number, "experiment_id": experiment, "number": number, "state": TrialState(state)}
        then = Table("trials", MetaData(), autoload_with=session.connection())  # which lacks what came later
        fresh = {column.key: column.default.arg for column in Trial.__table__.columns if column.default is not None}
        row = fresh | where | columns | {"fingerprint": fingerprint, "cell": fingerprint, "config": config}
        session.execute(insert(then), {name: value for name, value in row.items() if name in then.columns})
        field_index.enter(session, [{**columns, "trial_id": number, **where, "cell": fingerprint, "config": config}])
        if state != "succeeded":
            return
        mean, std = ([*(one or (0.5, 0.5, 0.5))] for one in (trial.mean, trial.std))
        record = {
            "dataset": trial.dataset,
            "dataset_sha256": trial.dataset,
            "preprocessing": {"mean": mean, "std": std},
        }
        protocol = protocol_fingerprint(record)
        if session.get(Protocol, protocol) is None:
            session.add(Protocol(fingerprint=protocol, record=record))
            session.flush()
        plain = {name: value for name, value in vars(made_result()).items() if name in Result.__table__.columns}
        session.add(Result(**plain | {"trial_id": number, "protocol": protocol, "fence": 1}))

    def test_channels_are_seen_in_the_first_layer_where_nothing_else_says_them(self, empty: Database) -> None:
        trial = TrialConfig.from_dict({"dataset": "npz:own", "model": "small-cnn", "mean": [0.5], "std": [0.5]})
        migrate(empty)
        with empty.writer.begin() as connection, Session(connection) as session:
            command.downgrade(alembic_config(connection), "0017")
            self.store(session, 1, trial, "succeeded")
            session.flush()
            layer = {"name": "conv1", "kind": "TTConv2d", "shape": {"k1": [3, 2], "core": [2, 2, 3, 3], "k3": [2, 8]}}
            session.get_one(Result, 1).layers = [layer]  # type: ignore[list-item] # as much of it as is looked at
            session.commit()
        migrate(empty)
        with Session(empty.engine) as session:
            record = session.get_one(Protocol, session.get_one(Result, 1).protocol).record
            assert record["preprocessing"] == {"mean": [0.5] * 3, "std": [0.5] * 3}


class TestNewMetric:
    """A database that is older than the newest entries of the catalogue of metrics."""

    def test_what_is_new_becomes_an_empty_column(self, empty: Database) -> None:
        migrate(empty)
        with empty.writer.begin() as connection:
            before = described(connection)
            for statement in TestSecond.FILL:
                connection.execute(text(statement.replace(", fruitless_claims)", ")").replace(", 4, 0)", ", 4)")))
            for name in ("adaptive_ece", "spectrum_memory"):
                connection.execute(text(f"ALTER TABLE results DROP COLUMN {name}"))
            assert lacking_metrics(connection) == ["adaptive_ece", "spectrum_memory"]
        migrate(empty)
        with empty.writer.begin() as connection:
            assert lacking_metrics(connection) == []
            assert described(connection) == before
            assert (
                compare_metadata(
                    MigrationContext.configure(connection, opts={"include_object": _is_of(connection)}), Base.metadata
                )
                == []
            )
            connection.execute(text("UPDATE results SET spectrum_memory = 20000000000, adaptive_ece = 0.25"))
        migrate(empty)
        with Session(empty.engine) as session:
            result = session.get_one(Result, 9)
            assert (result.accuracy, result.adaptive_ece, result.spectrum_memory) == (0.5, 0.25, 20_000_000_000)

    def test_what_every_result_must_have_needs_a_migration(self, empty: Database) -> None:
        migrate(empty)
        with empty.writer.begin() as connection:
            connection.execute(text("ALTER TABLE results DROP COLUMN adaptive_ece"))
            connection.execute(text("ALTER TABLE results DROP COLUMN compression"))
        with pytest.raises(ValueError, match="older results have no compression"):
            migrate(empty)
        with empty.engine.connect() as connection:
            assert lacking_metrics(connection) == ["adaptive_ece", "compression"]
