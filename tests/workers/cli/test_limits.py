"""Numbers and names that no date, port or column can hold are refused where they are written."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from service.settings import Settings
from workers.cli.__main__ import app


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("--older-than", ("prune", "--older-than", "inf")),
        ("--older-than", ("prune", "--older-than", "1e9")),
        ("--days", ("keys", "create", "vision", "--owner", "me", "--days", "inf")),
        ("--days", ("keys", "create", "vision", "--owner", "me", "--days", "1e7")),
        ("--max-queued-trials", ("keys", "project", "vision", "--max-queued-trials", "9" * 30)),
        ("--max-gpu-hours", ("keys", "project", "vision", "--max-gpu-hours", "inf")),
        ("--port", ("serve", "--port", "99999")),
        ("--port", ("serve", "--port", "-1")),
    ],
)
def test_numbers(tmp_path: Path, option: str, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, command, env={"TTSV_DATA_DIR": str(tmp_path)})
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert f"Invalid value for '{option}'" in done.stderr


@pytest.mark.parametrize(
    ("says", "command"),
    [
        ("PROJECT: must have 1 to 100 characters, not 0", ("create", "", "--owner", "me")),
        ("PROJECT: must have 1 to 100 characters, not 101", ("project", "x" * 101)),
        ("--owner: must have 1 to 100 characters", ("create", "vision", "--owner", "")),
        ("PROJECT 'a\\nb': must have a character that is seen", ("project", "a\nb")),
        ("--owner ' ': must have a character that is seen", ("create", "vision", "--owner", " ")),
    ],
)
def test_names(tmp_path: Path, says: str, command: tuple[str, ...]) -> None:
    """As the API takes them: a list shows each on a line of its own."""
    done = CliRunner().invoke(app, ["keys", *command], env={"TTSV_DATA_DIR": str(tmp_path)})
    assert (done.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert says in done.stderr


@pytest.mark.parametrize("days", ["inf", "1e9"])
def test_the_age_that_workers_keep(monkeypatch: pytest.MonkeyPatch, days: str) -> None:
    monkeypatch.setenv("TTSV_RETENTION_DAYS", days)
    with pytest.raises(ValidationError, match="retention_days"):
        Settings()


def test_a_store_that_cannot_be(tmp_path: Path) -> None:
    """Its form is right, and what it asks for is unknown to the library that is to open it."""
    env = {"TTSV_DATA_DIR": str(tmp_path), "TTSV_STORAGE": "s3://bucket?region=a&colour=blue"}
    done = CliRunner().invoke(app, ["prune", "--best", "1"], env=env)
    assert (done.exit_code, done.stderr.startswith("ttsv: TTSV_STORAGE: ")) == (1, True)
