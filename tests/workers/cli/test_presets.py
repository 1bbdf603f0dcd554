import json

from typer.testing import CliRunner

from service.paper.presets import presets
from workers.cli.__main__ import app


def test_presets_are_listed_and_shown() -> None:
    listed = CliRunner().invoke(app, ["presets", "ls"], env={"COLUMNS": "150"})
    assert listed.exit_code == 0
    assert all(preset.name in listed.stdout for preset in presets())
    shown = CliRunner().invoke(app, ["presets", "show", presets()[0].name, "--scale", "smoke"])
    assert json.loads(shown.stdout)["name"] == f"{presets()[0].name} (smoke, code)"


def test_an_unknown_preset_is_said(server: str) -> None:
    for name, near in {
        "table1": "table1",
        "table-1": "table1",
        "senderovich2022/Table-2": "table2",
        "other/figure-speed": "figure-speedup",
    }.items():
        for arguments in (["show", name], ["submit", name, "--url", server]):
            done = CliRunner().invoke(app, ["presets", *arguments])
            assert done.exit_code == 1
            said = (
                f"there is no preset {name!r}; the nearest is senderovich2022/{near}; there are senderovich2022/table1"
            )
            assert said in done.stderr


def test_one_is_posted(server: str) -> None:
    arguments = ["presets", "submit", presets()[0].name, "--scale", "smoke", "--quiet", "--url", server]
    assert CliRunner().invoke(app, arguments).stdout == "1\n"


def test_what_a_preset_lacks_is_said(server: str) -> None:
    done = CliRunner().invoke(app, ["presets", "submit", "senderovich2022/table2", "--quiet", "--url", server])
    assert done.stdout == "1\n", done.stderr
    assert "ttsv: warning: evaluation.corruptions: this service's data folder has no datasets/CIFAR-" in done.stderr
