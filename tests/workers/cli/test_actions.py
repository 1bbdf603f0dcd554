"""The actions at the terminal, against a real server."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from service.client import Client
from service.schemas.experiments import NewExperimentOut
from workers.cli.__main__ import app

Run = Callable[..., Result]
SPEC: dict[str, Any] = {
    "name": "x",
    "base": {"dataset": "digits", "model": "small-cnn"},
    "grid": {"seed": [0, 1], "training.lr": [0.1]},
}


@pytest.fixture
def run(server: str) -> Run:
    """Runs a command; it must end with this code."""

    def run(*arguments: object, code: int = 0) -> Result:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"TTSV_URL": server})
        assert done.exit_code == code, done.output
        return done

    return run


@pytest.fixture
def experiment(server: str) -> int:
    with Client(server) as client:
        return client.submit(SPEC).id


def test_what_is_said(run: Run, experiment: int) -> None:
    said = [
        run(*command).stdout.strip()
        for command in (
            ("pause", experiment),
            ("resume", experiment),
            ("extend", experiment, "seed=2", "seed=3", "training.lr=0.01"),
            ("stop", experiment),
            ("retry", experiment, "--cancelled"),
            ("cancel", experiment),
            ("archive", experiment),
            ("unarchive", experiment),
            ("clone", experiment, "--name", "twin"),
        )
    ]
    assert said == [
        "experiment 1 is paused: 2 queued",
        "experiment 1 is queued: 2 queued",
        "experiment 1 is queued: 8 queued",
        "experiment 1 is stopped: 8 cancelled",
        "experiment 1 is queued: 8 queued",
        "experiment 1 is cancelled: 8 cancelled",
        "experiment 1 is cancelled, archived: 8 cancelled",
        "experiment 1 is cancelled: 8 cancelled",
        "experiment 2 is queued: 8 queued",
    ]


def test_warnings_are_said_of_what_is_made_of_an_experiment(run: Run, server: str) -> None:
    with Client(server) as client:
        client.submit({**SPEC, "base": {**SPEC["base"], "delta": 1.0}})
    for command in (("clone", 1), ("extend", 1, "seed=7")):
        assert run(*command).stderr.startswith("ttsv: warning: delta has an effect in no trial")


def test_values_with_commas_between_are_a_list(run: Run, experiment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()

    def reevaluate(client: Client, number: int, evaluation: dict[str, Any], *, name: str | None) -> NewExperimentOut:
        asked.update(evaluation)
        return client.clone(number, name=name)

    monkeypatch.setattr(Client, "reevaluate", reevaluate)
    run("reevaluate", experiment, "radii=0.1,2e-1", "attack=pgd", "attack_eps=0.25", "certified=true")
    run("reevaluate", experiment, "lipschitz=[1]", 'attack_norm="L2,Linf"')
    assert asked == {
        **{"radii": [0.1, 0.2], "attack": "pgd", "attack_eps": 0.25, "certified": True},
        **{"lipschitz": [1], "attack_norm": "L2,Linf"},
    }


def test_times_are_said_to_be_in_utc(run: Run, experiment: int) -> None:
    """As on the pages: who reads them may be anywhere."""
    (line,) = run("events", experiment).stdout.splitlines()
    assert re.match(r"[\d-]{10} [\d:]{8} UTC  anonymous: submitted", line)
    assert run("ls").stdout.splitlines()[0].endswith("\tcreated (UTC)")


def test_for_scripts(run: Run, experiment: int) -> None:
    assert json.loads(run("pause", experiment, "--json").stdout)["state"] == "paused"
    lines = run("events", experiment, "--json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["submitted", "paused"]
    assert "anonymous: paused (experiment 1)" in run("events").stdout


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("resume", 7), "404 Not Found: there is no experiment 7"),
        (("archive", 1), "409 Conflict: experiment 1 is queued: it can be archived while it is succeeded, "),
        (("reevaluate", 1, "attack=pgd"), "has no trial that succeeded"),
        (
            ("reevaluate", 1, "attack=pgd", "attack=autoattack"),
            "attack is given twice: an evaluation has one value",
        ),
        (("extend", 1, "seed"), "write PATH=VALUE"),
        (("extend", 1, "rank=4"), "grid.rank: is no axis of this experiment"),
    ],
)
def test_refusals(run: Run, experiment: int, command: tuple[object, ...], reason: str) -> None:
    assert reason in run(*command, code=1).stderr
