"""What Pydantic finds wrong with a request, in the words of who wrote it: the field, what would be right, the value."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from service.errors import FieldProblem, SpecError
from service.specs.patterns import WORDS

_OBJECT = "must be an object, {{name: value, ...}}"
_WORDS = {
    "missing": "is required",
    "extra_forbidden": "unknown field; remove it, or see /docs for the fields there are",
    "union_tag_not_found": "is required; /docs lists what it can be",
    "union_tag_invalid": "must be one of {expected_tags}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}
"""Kind of error -> what would be right."""
_SAY_NO_VALUE = {"missing", "extra_forbidden", "union_tag_not_found", "too_short", "too_long", "string_too_long"}
_MOST_SHOWN = 60


def wrong_fields(errors: Iterable[ErrorDetails], body: Any) -> list[FieldProblem]:
    """The problems behind a `ValidationError`'s errors; `body` is what was sent, "body" their paths' first part.

    Each is there once, though several parts of a page may read the same parameter.
    """
    return list(dict.fromkeys(field for error in errors for field in _fields(error, body)))


def shown(value: Any) -> str:
    """A value as JSON has it, long ones cut."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _fields(error: ErrorDetails, body: Any) -> list[FieldProblem]:
    path, context = _path(error["loc"], body), error.get("ctx", {})
    if isinstance(cause := context.get("error"), SpecError):  # it knows its fields itself
        prefix = "" if path == "body" else f"{path}."
        return [FieldProblem(prefix + problem.field, problem.message) for problem in cause.problems]
    kind, value = str(error["type"]), error.get("input")
    if kind.startswith("union_tag"):
        name = context["discriminator"].strip("'")
        path, value = f"{path}.{name}", context.get("tag")
    words = _WORDS.get(kind)
    if words is None:
        return [FieldProblem(path, str(error["msg"]).removeprefix("Value error, "))]
    # Limits of numbers with a point come as such, and are written as they were set: 0, not 0.0.
    told = {name: int(one) if type(one) is float and one.is_integer() else one for name, one in context.items()}
    message = WORDS.get(context.get("pattern", ""), words.format(**told))
    if kind not in _SAY_NO_VALUE:
        message += f", not {shown(value)}"
    if kind == "enum" and isinstance(value, str):
        names = re.findall(r"'([^']*)'", str(told["expected"]))
        near = difflib.get_close_matches(value.lower(), names, 1)  # before a list that may be long
        message = "".join(f"the nearest is {name}; " for name in near) + message
    return [FieldProblem(path, message)]


def _path(loc: Sequence[str | int], body: Any) -> str:
    """("body", "grid", "rank", 0) -> grid.rank[0]; without the kinds (`type`) that Pydantic puts between the names."""
    if loc[0] == "header":
        return "-".join(word.capitalize() for word in str(loc[1]).split("-")).replace("-Id", "-ID")
    path, here = "", body if loc[0] == "body" else None
    for part in loc[1:]:
        if isinstance(here, dict) and part == here.get("type") and part not in here:
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
        here = _inside(here, part)
    return path or str(loc[0])


def _inside(value: Any, part: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(part)
    return value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None
