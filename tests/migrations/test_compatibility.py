"""Migrations under a running installation: what the version before says is understood before, meanwhile and after.

`docs/upgrade.md` has the rule: within a release migrations only add; what nothing uses any more goes a release later.
"""

import ast
import re
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import migrations
from service.database.engine import Database
from service.database.outages import is_away
from service.experiments.listing import TrialFilter, list_trials
from service.leaderboards import field_index
from service.leaderboards.conditions import condition
from service.specs.columns import known_field
from service.upkeep.migrate import alembic_config, migrate, newest
from tests.migrations.statements import END, HERE, Statement, recorded

RECORDED = sorted({path.stem.split("_")[1] for path in HERE.glob("statements_*.jsonl")})
"""Revisions of versions that may still be at work when this one's migrations run."""
VERSIONS = Path(migrations.__file__).parent / "versions"
FIRST_CHECKED = "0013"


@pytest.fixture
def empty(empty_url: str) -> Iterator[Database]:
    database = Database(empty_url)
    yield database
    database.close()


def at(database: Database, revision: str) -> list[Statement]:
    """Brings a new database to a revision; what the version of then says to it."""
    migrate(database) if revision == newest() else _upgrade(database, revision)
    return recorded(revision, database.engine.dialect.name)


def _upgrade(database: Database, revision: str) -> None:
    from service.database import tallies

    with database.writer.begin() as connection:
        command.upgrade(alembic_config(connection), revision)
        tallies.install(connection)


def say(database: Database, statements: list[Statement]) -> None:
    """Gives statements to the driver as they are, each in a transaction of its own."""
    with database.engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        if connection.dialect.name == "postgresql":  # SQLite's is so already
            driver.autocommit = True
        cursor = driver.cursor()
        for statement in statements:
            if statement.sql == END:
                continue
            parameters = [row if isinstance(row, dict) else tuple(row) for row in statement.parameters]
            if statement.many:
                cursor.executemany(statement.sql, parameters)
            else:
                cursor.execute(statement.sql, *parameters)
            if cursor.description is not None:
                cursor.fetchall()
        if connection.dialect.name == "postgresql":
            driver.autocommit = False


def outcome(database: Database) -> list[list[tuple[Any, ...]]]:
    """What a whole life leaves, in words that every version has."""
    queries = (
        "SELECT id, name, state, fence, trial_count FROM experiments ORDER BY id",
        "SELECT id, state, epoch, attempts, failure FROM trials ORDER BY id",
        "SELECT trial_id, epoch FROM epoch_points ORDER BY trial_id, epoch",
        "SELECT trial_id, accuracy FROM results ORDER BY trial_id",
        "SELECT kind, count(*) FROM events GROUP BY kind ORDER BY kind",
        "SELECT experiment_id, state, trials FROM tallies WHERE trials > 0 ORDER BY experiment_id, state",
        "SELECT metric, mean, seeds FROM score_ranks ORDER BY metric, mean",
    )
    with database.engine.connect() as connection:
        return [[tuple(row) for row in connection.execute(text(query))] for query in queries]


class TestOldVersion:
    @pytest.mark.parametrize("revision", RECORDED)
    @pytest.mark.parametrize("share", [0, 0.3, 0.6], ids=["after", "early", "late"])
    def test_it_lives_on_whenever_the_migrations_come(self, empty: Database, revision: str, share: float) -> None:
        statements = at(empty, revision)
        before = statements.index(Statement(END), round(share * len(statements)))
        say(empty, statements[:before])
        migrate(empty)
        say(empty, statements[before:])
        states = dict(outcome(empty)[4])
        assert {"submitted", "claimed", "reaped", "paused", "trial_finished", "archived", "closed"} <= states.keys()
        experiments, trials, points, results, *_ = outcome(empty)
        assert (len(experiments), len(trials), len(points), len(results)) == (3, 10, 8, 2)
        # Trials that it made are listed by their fields, before and after they are in the index of fields.
        wanted = TrialFilter(where=(condition("seed>=0", field_named=known_field),))
        for _ in range(2):
            with empty.read() as session:
                assert len(list_trials(session, wanted, limit=100, sort="lr").rows) == 10
            migrate(empty)
        with empty.read() as session:
            assert field_index.is_whole(session)

    @pytest.mark.parametrize("revision", RECORDED)
    def test_the_migrations_change_nothing_of_what_it_says(self, empty: Database, revision: str) -> None:
        """The same life, half of it before them: the same outcome as all of it before."""
        statements = at(empty, revision)
        say(empty, statements)
        whole = outcome(empty)
        migrate(empty)
        assert outcome(empty) == whole

    @pytest.mark.parametrize("revision", RECORDED)
    def test_who_writes_meanwhile_waits_and_goes_on(self, empty: Database, revision: str) -> None:
        statements = at(empty, revision)
        claimed = next(i for i, one in enumerate(statements) if "epoch_points" in one.sql)
        say(empty, statements[: claimed + 1])
        beats = [one for one in statements if re.match(r"UPDATE experiments SET heartbeat", one.sql)][:1]
        points = [one for one in statements if "INSERT INTO epoch_points" in one.sql][:1]
        assert beats
        assert points
        over, done = threading.Event(), [0]
        errors: list[Exception] = []

        def work() -> None:
            while not over.is_set():
                try:
                    say(empty, [*beats, *points])
                    done[0] += 1
                except DBAPIError as error:
                    if not is_away(error):
                        errors.append(error)
                except Exception as error:
                    if "deadlock" not in str(error) and "locked" not in str(error):
                        errors.append(error)

        writer = threading.Thread(target=work)
        writer.start()
        try:
            while done[0] < 5 and not errors:
                time.sleep(0.01)
            migrate(empty)
            after = done[0]
            deadline = time.monotonic() + 30
            while done[0] < after + 5 and not errors and time.monotonic() < deadline:
                time.sleep(0.01)
            assert done[0] >= after + 5
        finally:
            over.set()
            writer.join()
        assert not errors


ADDING = frozenset({"add_column", "create_table", "create_index", "f", "get_bind", "batch_alter_table"})
"""What a migration may do at any time."""


def taken_away(source: str) -> list[str]:
    """What a migration does that a version before it may not survive, with its lines."""
    tree = ast.parse(source)
    (upgrade,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "upgrade"]
    made = {_first(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node) == "create_table"}
    helpers = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in ("downgrade",)]
    found = []
    for node in (node for helper in (upgrade, *helpers) for node in ast.walk(helper)):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith(("op.", "batch.", "connection.")):
            continue
        name, line = _name(node), f"line {node.lineno}"
        if name == "execute":
            words = ast.unparse(node).upper()
            if re.search(r"\b(DROP|RENAME|ALTER|NOT NULL|TRUNCATE)\b", words):
                found.append(f"{line}: {name} of SQL that takes away")
        elif name == "add_column":
            column = ast.unparse(node)
            if "nullable=False" in column and "server_default" not in column:
                found.append(f"{line}: a column that must have a value, without a default")
        elif name == "create_index" and "unique=True" in ast.unparse(node) and _table(node) not in made:
            found.append(f"{line}: an index that refuses what is allowed now")
        elif name not in ADDING:
            found.append(f"{line}: {name}")
    return sorted(set(found))


def _name(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _first(node: ast.Call) -> str:
    return ast.unparse(node.args[0]) if node.args else ""


def _table(node: ast.Call) -> str:
    return ast.unparse(node.args[1]) if len(node.args) > 1 else ""


def contract(source: str) -> str | None:
    """The release whose code is the first that does without what a migration takes away: `contracts = "0.2"`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "contracts":
            return str(ast.literal_eval(node.value))
    return None


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


class TestRule:
    @pytest.mark.parametrize(
        "path",
        [path for path in sorted(VERSIONS.glob("[0-9]*.py")) if path.stem[:4] >= FIRST_CHECKED],
        ids=lambda path: path.stem,
    )
    def test_migrations_only_add_within_a_release(self, path: Path) -> None:
        source = path.read_text()
        found, release = taken_away(source), contract(source)
        if release is None:
            assert not found, f"{path.name} takes away what workers of the version before may use: {found}"
        else:
            assert found, f"{path.name} takes nothing away: it is no contract"
            assert numbers(release) < numbers(version("ttsv")), (
                f"{path.name} waits for release {release} to be the one before: workers of today still use that"
            )

    @pytest.mark.parametrize(
        ("line", "word"),
        [
            ('op.drop_column("trials", "node")', "drop_column"),
            ('op.drop_table("trials")', "drop_table"),
            ('op.drop_index("ix_trials_queue", "trials")', "drop_index"),
            ('op.rename_table("trials", "runs")', "rename_table"),
            ('op.alter_column("trials", "node", nullable=False)', "alter_column"),
            ('op.alter_column("trials", "node", new_column_name="place")', "alter_column"),
            ('op.create_unique_constraint("u", "trials", ["cell"])', "create_unique_constraint"),
            ('op.create_check_constraint("c", "trials", "epoch > 0")', "create_check_constraint"),
            ('op.create_index("i", "trials", ["cell"], unique=True)', "refuses"),
            ('op.add_column("trials", sa.Column("x", sa.Integer(), nullable=False))', "without a default"),
            ('op.execute("ALTER TABLE trials DROP COLUMN node")', "takes away"),
            ('op.execute("alter table trials rename to runs")', "takes away"),
            ('_helper()\n\ndef _helper():\n    op.drop_column("trials", "node")', "drop_column"),
        ],
    )
    def test_what_takes_away_is_found(self, line: str, word: str) -> None:
        (found,) = taken_away(f"def upgrade():\n    {line}\n\ndef downgrade():\n    pass\n")
        assert word in found

    @pytest.mark.parametrize(
        "line",
        [
            'op.add_column("trials", sa.Column("x", sa.Integer(), nullable=True))',
            'op.add_column("trials", sa.Column("x", sa.Integer(), nullable=False, server_default="0"))',
            'op.create_table("new", sa.Column("id", sa.Integer(), nullable=False))',
            'op.create_index("i", "trials", ["cell"])',
            'op.execute("UPDATE trials SET deaths = 0")',
        ],
    )
    def test_what_adds_is_allowed(self, line: str) -> None:
        assert taken_away(f'def upgrade():\n    {line}\n\ndef downgrade():\n    op.drop_column("t", "x")\n') == []

    def test_contracts_name_their_release(self) -> None:
        assert contract('contracts = "0.2"\n') == "0.2"
        assert contract("revision = '0013'\n") is None
        assert numbers("0.2") < numbers("0.10.1") < numbers("1.0")

    def test_there_is_a_record_of_the_version_before(self) -> None:
        assert RECORDED
        assert RECORDED[-1] < newest() or RECORDED[-1] == newest()
