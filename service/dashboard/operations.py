"""The API's operations as a page of their own: what /openapi.json says, for who reads it without Swagger UI."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_SHOWN = 3000
"""Characters of an example: the schema has all of it."""


@dataclass(frozen=True)
class Parameter:
    """What is asked along with a path: where it stands, and what it means."""

    name: str
    where: str
    required: bool
    about: str
    default: str | None


@dataclass(frozen=True)
class Operation:
    """A method of a path: what it does, takes and answers, each body with an example."""

    method: str
    path: str
    name: str
    summary: str
    more: list[str]
    scopes: list[str]
    parameters: list[Parameter]
    sent: list[tuple[str, str]]
    answered: list[tuple[str, str]]


def operations(document: Mapping[str, Any]) -> dict[str, list[Operation]]:
    """The operations of an OpenAPI document by their tags, in its order."""
    found: dict[str, list[Operation]] = {}
    for path, methods in document["paths"].items():
        for method, record in methods.items():
            found.setdefault(record["tags"][0], []).append(_operation(method, path, record))
    return found


def _operation(method: str, path: str, record: Mapping[str, Any]) -> Operation:
    paragraphs = [" ".join(part.split()) for part in record.get("description", "").split("\n\n")]
    answers = [(status, answer) for status, answer in record["responses"].items() if status.startswith("2")]
    return Operation(
        method=method.upper(),
        path=path,
        name=record["operationId"],
        summary=record["summary"],
        more=paragraphs[1:],
        scopes=sorted({scope for one in record.get("security", []) for scopes in one.values() for scope in scopes}),
        parameters=[_parameter(one) for one in record.get("parameters", [])],
        sent=list(_examples(record.get("requestBody", {}))),
        answered=[
            (f"{status}, {kind}", text) for status, answer in answers for kind, text in _examples(answer) if text
        ],
    )


def _parameter(record: Mapping[str, Any]) -> Parameter:
    default = record.get("schema", {}).get("default")
    return Parameter(
        name=record["name"],
        where=record["in"],
        required=bool(record.get("required")),
        about=" ".join(record.get("description", "").split()),
        default=None if default is None else json.dumps(default),
    )


def _examples(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each form of a body with an example of it, or nothing where there is none."""
    for kind, record in body.get("content", {}).items():
        given = [one["value"] for one in record.get("examples", {}).values() if "value" in one]
        example = record.get("example", given[0] if given else "")
        text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
        yield kind, text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}\n…"
