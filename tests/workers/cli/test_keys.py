"""`ttsv keys`: what people of a project weigh, straight in the database."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from service.database.engine import Database
from service.upkeep.migrate import changing_schema, make_schema
from service.upkeep.rows import revision_of
from workers.cli.__main__ import app

Keys = Callable[..., Result]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Runs `ttsv keys` on a data folder of its own."""

    def run(*command: str) -> Result:
        return CliRunner().invoke(app, ["keys", *command], env={"TTSV_DATA_DIR": str(tmp_path / "data")})

    return run


def test_people_have_weights_and_one_at_first(keys: Keys) -> None:
    for owner in ("grace", "ada"):
        assert keys("create", "vision", "--owner", owner).exit_code == 0
    weighed = keys("person", "vision", "grace", "--weight", "2.5")
    assert (weighed.exit_code, weighed.stdout) == (0, "grace of project vision: weight 2.5\n")
    listed = keys("people", "vision")
    assert [line.split() for line in listed.stdout.splitlines() if "ada" in line or "grace" in line] == [
        ["ada", "1"],
        ["grace", "2.5"],
    ]


@pytest.mark.parametrize(("project", "owner"), [("[vision] team", "ada [gpu]"), ("a:fire:b", "x[/y]")])
def test_names_in_a_terminal_are_no_markup(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, project: str, owner: str
) -> None:
    assert keys("create", project, "--owner", owner).exit_code == 0
    monkeypatch.setenv("FORCE_COLOR", "1")
    listed, people = keys("ls"), keys("people", project)
    assert (listed.exit_code, people.exit_code) == (0, 0), (listed.exception, people.exception)
    assert project in listed.stdout
    assert owner in listed.stdout
    assert owner in people.stdout


@pytest.mark.parametrize(
    ("code", "says", "command"),
    [
        (1, "PROJECT 'visoin': there is none; `ttsv keys ls` has", ("person", "visoin", "ada", "--weight", "2")),
        (1, "PROJECT 'visoin': there is none; `ttsv keys ls` has", ("people", "visoin")),
        (1, "project 'vision' has no key of 'adda': make one, or", ("person", "vision", "adda", "--weight", "2")),
        (2, "Invalid value for '--weight'", ("person", "vision", "ada", "--weight", "0")),
        (2, "Invalid value for '--weight'", ("person", "vision", "ada", "--weight", "nan")),
        (2, "Invalid value for '--weight'", ("person", "vision", "ada", "--weight", "1001")),
        (2, "Missing option '--weight'", ("person", "vision", "ada")),
        (1, "there is a project 'vision' already", ("create", "Vision", "--owner", "ada")),
        (1, "there is a project 'vision' already", ("project", "Vision")),
    ],
)
def test_what_is_wrong_is_named(keys: Keys, code: int, says: str, command: tuple[str, ...]) -> None:
    keys("create", "vision", "--owner", "ada")
    done = keys(*command)
    assert (done.exit_code, says in done.stderr) == (code, True), done.stderr
    assert ["ada", "1"] in [line.split() for line in keys("people", "vision").stdout.splitlines()]


def test_no_second_secret_is_made_beside_that_of_the_keys_there_are(keys: Keys, tmp_path: Path) -> None:
    """As on a worker's machine, whose data folder is another: the key would open nothing where the API runs."""
    secret = tmp_path / "data" / "key-secret"
    assert keys("create", "vision", "--owner", "ada").exit_code == 0
    secret.rename(tmp_path / "away")
    refused = keys("create", "vision", "--owner", "grace")
    assert (refused.exit_code, refused.stdout, secret.exists()) == (1, "", False)
    assert f"{secret}, under which they are hashed, is not there" in refused.stderr
    assert "Run it there" in refused.stderr
    (ada,) = [line.split()[0] for line in keys("ls").stdout.splitlines() if "ada" in line]
    assert keys("revoke", ada).exit_code == 0  # as whoever lost it must: it opens nothing any more
    assert keys("create", "vision", "--owner", "grace").exit_code == 0


@pytest.mark.parametrize("command", [("create", "vision", "--owner", "ada"), ("project", "vision")])
def test_a_database_of_an_older_version_is_left_as_it_is(keys: Keys, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Its workers and API may be at work: `ttsv migrate` is for whoever knows that."""
    with closing(Database(f"sqlite:///{tmp_path / 'data' / 'ttsv.db'}")) as database:
        with changing_schema(database) as connection:
            make_schema(connection, "0021", ())
        done = keys(*command)
        assert (done.exit_code, "at 0021, this code needs" in done.stderr) == (1, True), done.stderr
        assert done.stderr.endswith("run `ttsv migrate`\n")
        with database.engine.connect() as connection:
            assert revision_of(connection) == "0021"


@pytest.mark.parametrize("command", [("people", "vision"), ("person", "vision", "ada", "--weight", "2")])
def test_where_there_is_no_database_none_is_made(keys: Keys, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert keys(*command).exit_code == 1
    assert list(tmp_path.iterdir()) == []
