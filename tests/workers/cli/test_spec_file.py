"""Specs in files: read as strictly as the API reads them, and refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from service.client import Client, InvalidError
from service.errors import UserError
from workers.cli.__main__ import app
from workers.cli.experiments import read_spec

Run = Callable[..., str]
SPEC: dict[str, Any] = {
    "name": "x",
    "base": {"dataset": "digits", "model": "small-cnn"},
    "grid": {"seed": [0, 1], "training.lr": [0.1]},
}
TEXT = "name: x\nbase: {dataset: digits, model: small-cnn}\n"
DEEP = b'{"base":' * 100_000 + b"1" + b"}" * 100_000

WRONG = [
    ("spec.yaml", TEXT.encode() + b"grid: {training.lr: [.inf]}\n", "grid.training.lr[0]: Infinity is not a JSON"),
    ("spec.yaml", TEXT.encode() + b"priority: -.inf\n", "priority: -Infinity is not a JSON number"),
    ("spec.yaml", TEXT.encode() + b"priority: 1e999\n", "priority: Infinity is not a JSON number"),
    ("spec.yaml", TEXT.encode() + b"name: y\n", "line 3, column 1: the key 'name' stands twice in one object"),
    ("spec.json", b'{"name": "x", "priority": NaN}', "priority: NaN is not a JSON number"),
    ("spec.json", b'{"grid": {"delta": [1.0, -Infinity]}}', "grid.delta[1]: -Infinity is not a JSON number"),
    ("spec.json", b'{"name": "x", "name": "y"}', "the key 'name' stands twice in one object"),
    ("spec.json", DEEP, "is nested deeper than 20 levels"),
    ("spec.json", b'{"name": "\\ud800"}', "holds '\\ud800', half of a character"),
    (
        "spec.json",
        b'{"priority": ' + b"1" * 5000 + b"}",
        "priority: a number of 5000 digits; write one of at most 4300",
    ),
    ("spec.json", b'{"name": "\xff"}', "is not JSON: 'utf-8' codec can't decode"),
    ("spec.json", b"", "is not JSON: Expecting value"),
]


@pytest.fixture
def run() -> Run:
    """Runs a command that must end with an error of one line, and that no service is asked for."""

    def run(*arguments: object, stdin: bytes | None = None) -> str:
        command = [*(str(argument) for argument in arguments), "--url", "http://127.0.0.1:9"]
        done = CliRunner().invoke(app, command, input=stdin)
        assert done.exit_code == 1, (done.output, done.exception)
        (line,) = done.stderr.splitlines()
        assert line.startswith("ttsv: ")
        assert len(line) < 300
        return line

    return run


def written(folder: Path, name: str, text: bytes) -> Path:
    path = folder / name
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(("name", "text", "said"), WRONG)
def test_a_wrong_file_is_refused_in_one_line(run: Run, tmp_path: Path, name: str, text: bytes, said: str) -> None:
    path = written(tmp_path, name, text)
    found = run("submit", path)
    assert f"ttsv: {path}: " in found
    assert said in found


@pytest.mark.parametrize(("name", "text", "said"), WRONG[:-1])
def test_the_api_says_the_same(sqlite_api: TestClient, name: str, text: bytes, said: str) -> None:
    if len(text) > 262_144:
        text = text[: 8 * 30_000]
    kind = "application/yaml" if name.endswith("yaml") else "application/json"
    response = sqlite_api.post("/v1/experiments", content=text, headers={"Content-Type": kind})
    assert response.status_code == 400
    assert said in response.json()["detail"]


def test_a_number_beyond_all_bounds(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, "spec.json", b'{"name": "x", "grid": {"training.lr": [0.1, 1e999]}}')
    assert "grid.training.lr[1]: Infinity is not a JSON number" in run("submit", path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spec.json", b"\xef\xbb\xbf" + json.dumps(SPEC).encode()),
        ("spec.json", json.dumps(SPEC).encode("utf-16")),
        ("spec", b"\xef\xbb\xbf" + json.dumps(SPEC).encode()),
        ("spec", json.dumps(SPEC).encode()),
        ("spec.YAML", json.dumps(SPEC).encode()),
        ("spec.txt", b"\xef\xbb\xbf" + TEXT.encode()),
        ("spec", TEXT.encode()),
        ("spec.yml", TEXT.encode()),
    ],
)
def test_what_is_right_is_read(tmp_path: Path, name: str, text: bytes) -> None:
    assert read_spec(written(tmp_path, name, text))["base"] == SPEC["base"]


def test_standard_input_is_read_as_a_file_is(run: Run) -> None:
    assert "ttsv: -: " in run("submit", "-", stdin=b'{"name": "x", "name": "y"}')
    assert "stands twice" in run("submit", "-", stdin=b"\xef\xbb\xbf" + b"a: 1\na: 2\n")


def test_a_list_is_no_spec(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a spec is an object"):
        read_spec(written(tmp_path, "spec.json", b"[1]"))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("extend", 2, "seed=NaN"), "seed: the value: NaN is not a JSON number; use null or a finite number"),
        (("extend", 2, "seed=1,-Infinity"), "seed: the value: -Infinity is not a JSON number"),
        (("extend", 2, "training.lr=[0.1, NaN]"), "training.lr: [1]: NaN is not a JSON number"),
        (("extend", 2, "training.lr=1e999"), "grid.training.lr[0]: Infinity is not a JSON number"),
        (("extend", 2, "seed=" + "1" * 5000), "seed: the value: a number of 5000 digits"),
        (("extend", 2, "seed=" + "[" * 100_000), "seed: the value is nested deeper than 20 levels"),
        (("extend", 2, 'seed="\\ud800"'), "seed: the value holds '\\ud800', half of a character"),
        (("reevaluate", 2, "attack=pgd", "attack_eps=Infinity"), "attack_eps: the value: Infinity is not a JSON"),
        (("reevaluate", 2, 'attack={"a": 1, "a": 2}'), "the key 'a' stands twice in one object"),
        (("clone", 2, "--name", "\udcff"), "400 Bad Request: the body holds '\\udcff', half of a character"),
    ],
)
def test_wrong_values_of_a_verb(run: Run, command: tuple[object, ...], said: str) -> None:
    assert said in run(*command)


def test_the_client_refuses_what_json_cannot_say(server: str) -> None:
    with Client(server) as client:
        with pytest.raises(InvalidError) as caught:
            client.submit(SPEC | {"grid": {"training.lr": (0.1, float("nan"))}})
        (error,) = caught.value.problem.errors
        assert (error.field, error.message) == (
            "grid.training.lr[1]",
            "NaN is not a JSON number; use null or a finite number",
        )
        circle: dict[str, Any] = {}
        circle["base"] = circle
        with pytest.raises(InvalidError, match="nested deeper than 20 levels"):
            client.submit(circle)
        assert list(client.experiments()) == []
