"""The client has a method for every operation of the API."""

import inspect
from typing import Any, get_args, get_type_hints

import pytest

from service.client import Client

HEADERS = {"if-none-match", "last-event-id", "Range"}
"""What the client sends by itself, or has no use for."""
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
    ("streamExperiment", "trials"),  # of pages
    ("getTrialLog", "follow"),
    ("getExperimentLog", "follow"),
}
PAGING = {"limit", "cursor"}
OF_PAGES = {"streamExperiments"}
"""What a list on a page is kept fresh by; the client watches one experiment."""


def methods(client: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(client, name) for name in dir(client) if not name.startswith("_")}


def arguments(method: Any) -> set[str]:
    """Names of what can be given, those of a typed dictionary (`**question`) among them."""
    hints = get_type_hints(method)
    found: set[str] = set()
    for parameter in inspect.signature(method).parameters.values():
        found.add(parameter.name)
        for kind in get_args(hints.get(parameter.name)) if parameter.kind is inspect.Parameter.VAR_KEYWORD else ():
            found |= get_type_hints(kind).keys()
    return found


def operations(client: type) -> dict[str, list[str]]:
    """Operation -> the methods that are it."""
    found: dict[str, list[str]] = {}
    for name, method in methods(client).items():
        for operation in getattr(method, "operations", ()):
            found.setdefault(operation, []).append(name)
    return found


@pytest.fixture(scope="module")
def document(openapi: dict[str, Any]) -> dict[str, Any]:
    return openapi


def described(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {op["operationId"]: op for methods in document["paths"].values() for op in methods.values()}


def test_every_operation_has_a_method(document: dict[str, Any]) -> None:
    assert set(operations(Client)) == set(described(document)) - OF_PAGES


def test_every_parameter_can_be_given(document: dict[str, Any]) -> None:
    """By a parameter of one of the operation's methods."""
    missing = []
    for operation, found in described(document).items():
        if operation in OF_PAGES:
            continue
        given = set().union(*(arguments(methods(Client)[name]) for name in operations(Client)[operation]))
        for parameter in found.get("parameters", ()):
            name = NAMES.get(parameter["name"], parameter["name"])
            wanted = parameter["in"] != "path" and name not in PAGING | HEADERS
            if wanted and name not in given and (operation, name) not in ELSEWHERE:
                missing.append((operation, name))
    assert missing == []


def test_every_method_has_a_docstring() -> None:
    assert [name for name, method in methods(Client).items() if not method.__doc__] == []


@pytest.mark.parametrize(
    "method",
    ["leaderboard", "leaderboard_text", "table", "table_text", "compare", "compare_text", "trials", "experiments"],
)
def test_a_name_that_there_is_not_is_refused(method: str) -> None:
    """What type checkers see in a typed dictionary, Python itself does not look at."""
    given = {"format": "csv"} if method.endswith("text") else {}
    subject = ["digits"] if "board" in method or "table" in method else []
    with Client("http://127.0.0.1:9") as client, pytest.raises(TypeError, match="there is no 'metrik'"):
        getattr(client, method)(*subject, **given, metrik="loss")


def test_a_method_shows_its_signature() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert list(inspect.signature(client.retry).parameters) == ["experiment_id", "states"]
        assert client.retry.__doc__ == "Runs the trials of these states again: `failed`, `diverged`, `cancelled`."
