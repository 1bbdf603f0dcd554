"""YAML bodies: the same document as JSON, and nothing that YAML has beyond it."""

import json
import math
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from service.specs.documents import read_yaml
from workers.cli.__main__ import app

YAML = {"Content-Type": "application/yaml"}
SPEC = """\
# the small one
name: from yaml
base:
  dataset: digits
  model: small-cnn
  layer: tt
  training: {epochs: 3, lr: 1e-2}
grid:
  rank: [null, 4]
  seed: [0, 1]
tags: [demo]
"""

# Beyond U+FFFF JSON escapes two halves, which YAML does not put together.
_text = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(_text, _plain, max_size=4))
def test_json_is_yaml(value: dict[str, Any]) -> None:
    """What JSON writes is read as JSON reads it."""
    text = json.dumps(value)
    assert read_yaml(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1_000", "1_000"),
        ("010", 10),
        ("0o17", 15),
        ("0xff", 255),
        ("+5", 5),
        ("-0.5", -0.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1:30", "1:30"),
        ("no", "no"),
        ("On", "On"),
        ("True", True),
        ("tRue", "tRue"),
        ("~", None),
        ("NULL", None),
        ('"null"', "null"),
        ("'1'", "1"),
        ("|\n  1\n", "1\n"),
        ("[]", []),
        ("{a: }", {"a": None}),
        (".inf", math.inf),
        ("'2020-01-01'", "2020-01-01"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = read_yaml(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x 1\nb: *x", "line 1, column 4: anchors and aliases"),
        ("a: *x", "anchors and aliases"),
        ("- &x [1]\n- *x", "anchors and aliases"),
        ("<<: *x", "anchors and aliases"),
        ("a: !!python/object/apply:os.system [ls]", "the tag tag:yaml.org,2002:python/object/apply:os.system is not"),
        ("a: !!str 1", "the tag tag:yaml.org,2002:str"),
        ("a: !!binary aGk=", "the tag"),
        ("a: !secret 1", "the tag !secret"),
        ("a: 1\na: 2", "line 2, column 1: the key 'a' stands twice"),
        ("1: a", "a key must be a word"),
        ("null: a", "a key must be a word"),
        ("[1, 2]: a", "a key must be a word"),
        ("a: 2020-01-01", "2020-01-01 looks like a date"),
        ("a: 2020-01-01T10:00:00Z", "looks like a date"),
        ("a: 1\n---\nb: 2", "a second document"),
        ("", "empty"),
        ("# nothing", "empty"),
        ("a: [1", "line 2, column 1:"),
        ("a: 'x", "line"),
        ("a:\n\t- 1", "line 2"),
        ("a: \x07", "control characters|special characters"),
        ("[" * 30 + "]" * 30, "nested deeper than 20"),
        ("a: " + "1" * 5000, "digit"),
    ],
)
def test_what_goes_beyond_json_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said if "|" in said else re.escape(said)):
        read_yaml(text)


def test_a_spec(api: TestClient) -> None:
    created = api.post("/v1/experiments", content=SPEC, headers=YAML)
    assert created.status_code == 201, created.text
    answer = created.json()
    assert (answer["name"], answer["trial_count"], answer["spec"]["tags"]) == ("from yaml", 4, ["demo"])
    assert answer["spec"]["base"]["training"]["lr"] == 0.01
    plain = yaml.safe_load(SPEC)  # an older YAML, which takes 1e-2 for a word
    plain["base"]["training"]["lr"] = 0.01
    assert api.post("/v1/experiments", json=plain).json()["spec"] == answer["spec"]


@pytest.mark.parametrize("kind", ["application/x-yaml", "text/yaml; charset=utf-8", "Application/YAML"])
def test_older_names_of_the_type(sqlite_api: TestClient, kind: str) -> None:
    assert sqlite_api.post("/v1/experiments", content=SPEC, headers={"Content-Type": kind}).status_code == 201


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (SPEC.replace("rank: [null, 4]", "rank: [0, .nan]"), 400, "grid.rank[1]: NaN is not a JSON number"),
        (SPEC.replace("rank: [null, 4]", "rank: [0]"), 422, "grid.rank[0]: "),
        (SPEC.replace("name: from yaml", "name: 3"), 422, "name: "),
        (SPEC + "name: again\n", 400, "the key 'name' stands twice"),
        (SPEC + 'notes: "\\ud800"\n', 400, ""),
        (SPEC.encode("utf-16"), 400, "not YAML"),
        (b"\xff", 400, "not YAML"),
        ("[1, 2", 400, "not YAML"),
        ("just words", 422, "body"),
        ("- 1", 422, "body"),
    ],
)
def test_wrong_specs(sqlite_api: TestClient, body: str | bytes, status: int, said: str) -> None:
    response = sqlite_api.post("/v1/experiments", content=body, headers=YAML)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert said in response.json()["detail"]
    assert sqlite_api.get("/v1/experiments").json()["items"] == []


def _laughs() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "body", [_laughs(), "[" * 250_000, "{a: " * 60_000, "- " * 100_000, "? " * 100_000, "a: &" + "b" * 250_000]
)
def test_hostile_documents_are_refused_cheaply(sqlite_api: TestClient, body: str) -> None:
    tracemalloc.start()
    start = time.process_time()
    response = sqlite_api.post("/v1/experiments", content=body, headers=YAML)
    spent, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status_code == 400
    assert spent < 1
    assert peak < 20e6


def test_a_large_right_document_is_quick() -> None:
    text = "name: x\ngrid:\n  seed:\n" + "".join(f"    - {seed}\n" for seed in range(20_000))
    start = time.process_time()
    assert len(read_yaml(text)["grid"]["seed"]) == 20_000
    assert time.process_time() - start < 6


def test_the_command_reads_yaml_files(tmp_path: Path) -> None:
    """As far as it gets without a service: a wrong file is named, a right one is posted."""
    wrong = tmp_path / "spec.yaml"
    wrong.write_text("a: 1\na: 2\n")
    result = CliRunner().invoke(app, ["submit", str(wrong), "--url", "http://127.0.0.1:9"])
    assert result.exit_code != 0
    assert "stands twice" in result.output + result.stderr


def test_a_number_of_five_thousand_digits_is_refused_in_plain_words() -> None:
    with pytest.raises(ValueError, match=r"^line 2, column 11: a number of 5000 digits; write one of at most 1000$"):
        read_yaml("name: a\npriority: " + "1" * 5000)
