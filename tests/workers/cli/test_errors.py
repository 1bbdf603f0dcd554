"""What a command says where it fails."""

import pytest
import typer

from workers.cli.errors import plain_errors


def test_what_the_machine_refuses_is_said_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    @plain_errors
    def command() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(typer.Exit) as end:
        command()
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "ttsv: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("error", [BrokenPipeError(), ZeroDivisionError()], ids=repr)
def test_what_is_no_failure_of_the_users_goes_on(error: Exception) -> None:
    """A reader that has enough is click's to end quietly, a bug is the programmer's to see."""

    @plain_errors
    def command() -> None:
        raise error

    with pytest.raises(type(error)):
        command()
