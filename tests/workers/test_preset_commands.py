import json

import pytest
from typer.testing import CliRunner

from service.presets import presets
from workers.cli import app


def test_presets_are_listed_and_shown() -> None:
    listed = CliRunner().invoke(app, ["presets", "ls"], env={"COLUMNS": "150"})
    assert listed.exit_code == 0
    assert all(preset.name in listed.stdout for preset in presets())
    shown = CliRunner().invoke(app, ["presets", "show", presets()[0].name, "--scale", "smoke"])
    assert json.loads(shown.stdout)["name"] == f"{presets()[0].name} (smoke, code)"


@pytest.mark.parametrize("arguments", [["show", "table1"], ["submit", "table1"]])
def test_an_unknown_preset_is_said(arguments: list[str]) -> None:
    options = ["--url", "http://127.0.0.1:9"] if arguments[0] == "submit" else []
    done = CliRunner().invoke(app, ["presets", *arguments, *options])
    assert done.exit_code == 1
    assert "senderovich2022/table1" in done.stderr or "does not answer" in done.stderr
