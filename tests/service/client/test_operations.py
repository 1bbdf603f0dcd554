"""The clients have a method for every operation of the API, and one set of them."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncClient, Client
from service.main import create_app
from service.settings import Settings

HEADERS = {"if-none-match", "last-event-id", "Range"}
"""What the clients send by themselves, or have no use for."""
NAMES = {"experiment": "experiment_id", "idempotency-key": "idempotency_key", "if-match": "revision"}
ELSEWHERE = {
    ("listExperiments", "fields"),  # specs
    ("getExperiment", "fields"),
    ("listTrials", "fields"),
    ("listAllTrials", "fields"),
    ("getTrial", "fields"),
    ("getTrialResult", "fields"),
    ("listTrialMetrics", "fields"),
    ("listEvents", "fields"),
    ("listExperimentEvents", "fields"),
    ("createExperiment", "dry_run"),  # a method of its own
    ("createPresetExperiment", "dry_run"),
    ("getTrialLog", "follow"),
    ("getExperimentLog", "follow"),
}
PAGING = {"limit", "cursor"}


def methods(client: type) -> dict[str, Any]:
    found = {name: inspect.getattr_static(client, name) for name in dir(client) if not name.startswith("_")}
    return {name: getattr(value, "_make", value) for name, value in found.items()}


def operations(client: type) -> dict[str, list[str]]:
    """Operation -> the methods that are it."""
    found: dict[str, list[str]] = {}
    for name, method in methods(client).items():
        for operation in getattr(method, "operations", ()):
            found.setdefault(operation, []).append(name)
    return found


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("data")
    found: dict[str, Any] = create_app(Settings(data_dir=folder)).openapi()
    return found


def described(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {op["operationId"]: op for methods in document["paths"].values() for op in methods.values()}


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_operation_has_a_method(document: dict[str, Any], client: type) -> None:
    assert set(operations(client)) == set(described(document))


def test_every_parameter_can_be_given(document: dict[str, Any]) -> None:
    """By a parameter of one of the operation's methods."""
    missing = []
    for operation, found in described(document).items():
        given = {
            parameter
            for name in operations(Client)[operation]
            for parameter in inspect.signature(methods(Client)[name]).parameters
        }
        for parameter in found.get("parameters", ()):
            name = NAMES.get(parameter["name"], parameter["name"])
            wanted = parameter["in"] != "path" and name not in PAGING | HEADERS
            if wanted and name not in given and (operation, name) not in ELSEWHERE:
                missing.append((operation, name))
    assert missing == []


def test_both_clients_have_the_same_methods() -> None:
    sync, asynchronous = methods(Client), methods(AsyncClient)
    assert set(sync) == set(asynchronous)
    for name in sync:
        mine, other = inspect.signature(sync[name]), inspect.signature(asynchronous[name])
        assert mine.parameters == other.parameters, name
        assert sync[name].__doc__ == asynchronous[name].__doc__, name
        assert sync[name].__doc__


def test_a_method_shows_its_signature() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert list(inspect.signature(client.retry).parameters) == ["experiment_id", "states"]
        assert client.retry.__doc__ == "Runs the trials of these states again: `failed`, `diverged`, `cancelled`."
