"""What a command says where it fails."""

from typing import Self

import pytest
import typer
from pydantic import BaseModel, model_validator
from typer.testing import CliRunner

from workers.cli.__main__ import app
from workers.cli.errors import plain_errors


def test_what_the_machine_refuses_is_said_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    @plain_errors
    def command() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(typer.Exit) as end:
        command()
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "ttsv: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", [("presets", "ls"), ("doctor", "--json")], ids=" ".join)
def test_a_full_disk_behind_standard_output_is_said(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the commands, too, that ask no service."""
    echo = typer.echo

    def full(message: str, *, err: bool = False) -> None:
        if not err:
            raise OSError(28, "No space left on device")
        echo(message, err=err)

    monkeypatch.setattr(typer, "echo", full)
    monkeypatch.setattr("workers.cli.doctor.examine", lambda deep: [])
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.output) == (1, "ttsv: [Errno 28] No space left on device\n"), done.exception


@pytest.mark.parametrize("error", [BrokenPipeError(), ZeroDivisionError()], ids=repr)
def test_what_is_no_failure_of_the_users_goes_on(error: Exception) -> None:
    """A reader that has enough is click's to end quietly, a bug is the programmer's to see."""

    @plain_errors
    def command() -> None:
        raise error

    with pytest.raises(type(error)):
        command()


def test_settings_that_do_not_go_together_belong_to_no_variable(capsys: pytest.CaptureFixture[str]) -> None:
    class Both(BaseModel):
        @model_validator(mode="after")
        def _refuse(self) -> Self:
            raise ValueError("neither goes with the other")

    @plain_errors
    def command() -> None:
        Both()

    with pytest.raises(typer.Exit):
        command()
    assert capsys.readouterr().err == "ttsv: Value error, neither goes with the other\n"
