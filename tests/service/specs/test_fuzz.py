"""Anything posted near the schema is stored or refused: never an error of the service."""

import copy
import json
from typing import Any
from urllib.parse import quote

from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from ttsv.config.trial import field_infos

JSON = {"Content-Type": "application/json"}
SPEC: dict[str, Any] = {
    "spec_version": 1,
    "name": "drawn",
    "base": {
        "dataset": "digits",
        "model": "small-cnn",
        "training": {"epochs": 2, "schedule": "multistep", "milestones": [1]},
        "clipping": {"every": 5},
    },
    "grid": {"rank": [None, 4], "layer": ["tt"], "lambda_ort": [0.0, 1.0], "seed": [0, 1]},
    "resources": {"cpus": 1, "gpus": 0.5},
    "max_concurrent_trials": 2,
    "order": "random",
    "preempt": True,
    "hung_after": 60.0,
    "priority": 0,
    "notes": "",
}

bounded = examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture])

characters = st.characters(codec=None) | st.sampled_from("\0\ud800\udfff\x7f\u2028")
texts = st.text(characters, max_size=8) | st.sampled_from(["digits", "tt", "clip", "x" * 300, *field_infos()])
numbers = (
    st.integers()
    | st.sampled_from([0, -1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**400, -(10**400)])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([5e-324, 1e308, -0.0])
)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in inner for place in places(child, (*path, key)))]


@st.composite
def changed_specs(draw: st.DrawFn) -> Any:
    """A right spec with up to three things replaced, added or removed."""
    spec: Any = copy.deepcopy(SPEC)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(spec)))
        if not path:
            continue
        holder = spec
        for key in path[:-1]:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "replace", "add", "remove"]))
        if action == "remove":
            del holder[path[-1]]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(texts)] = draw(values)
        else:
            holder[path[-1]] = draw(values)
    return spec


def check(response: Any) -> None:
    """Stored, or refused with a problem that says what is wrong."""
    assert response.status_code < 500, response.text
    if response.status_code == 201:
        assert response.json()["trial_count"] >= 1
        return
    assert response.status_code in (400, 413, 415, 422)
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["detail"]
    assert body["errors"] or response.status_code != 422


@bounded
@given(spec=changed_specs())
def test_specs(api: TestClient, spec: object) -> None:
    response = api.post("/v1/experiments", content=json.dumps(spec), headers=JSON)
    check(response)
    if response.status_code == 201:
        stored = response.json()
        del stored["warnings"]  # said once
        assert api.get(response.headers["location"]).json() == stored
        assert api.get(f"{response.headers['location']}/trials?limit=1000").status_code == 200


@bounded
@given(path=st.sampled_from(list(field_infos())), value=values, axis=st.booleans())
def test_every_field(api: TestClient, path: str, value: object, axis: bool) -> None:
    spec: dict[str, Any] = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt"}, "grid": {}}
    spec["base"].pop(path, None)
    part, _, name = path.rpartition(".")
    if axis:
        spec["grid"][path] = [value]
    else:
        spec["base"] |= {part: {name: value}} if part else {name: value}
    check(api.post("/v1/experiments", content=json.dumps(spec), headers=JSON))


@bounded
@given(body=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_bodies(sqlite_api: TestClient, body: bytes) -> None:
    check(sqlite_api.post("/v1/experiments", content=body, headers=JSON))


@bounded
@given(
    path=st.sampled_from(["/v1/experiments", "/v1/experiments/{}", "/v1/experiments/{}/trials", "/v1/leaderboards/{}"]),
    place=st.text(max_size=5) | numbers.map(str),
    query=st.dictionaries(
        st.sampled_from(["limit", "cursor", "state", "metric", "experiment"]), st.text(max_size=5) | numbers.map(str)
    ),
)
def test_questions(sqlite_api: TestClient, path: str, place: str, query: dict[str, str]) -> None:
    response = sqlite_api.get(path.format(quote(place, safe="")), params=query)
    assert response.status_code < 500, response.text
