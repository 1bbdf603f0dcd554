"""JSON documents read strictly: no key twice, no NaN, no half of a character, nothing nested deep or endless.

The API reads bodies with it, the client what it is about to send, and `ttsv` the files that people write.
"""

import json
import math
import sys
from typing import Any

from service.errors import FieldProblem

MAX_DEPTH = 20


class DocumentError(ValueError):
    """A document that is not let in. `problem` is the field that is to blame, where there is one; "" is all of it."""

    def __init__(self, message: str, problem: FieldProblem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class NotJsonError(DocumentError):
    """What does not look like JSON at all."""


def read_json(document: str | bytes, what: str = "the document") -> Any:
    """The value of a document. Numbers beyond all bounds, as 1e999, are infinite: they are JSON.

    Raises `DocumentError` saying what is wrong with it; `what` it is called there.
    """
    try:
        value = json.loads(document, parse_int=_whole, parse_constant=_constant, object_pairs_hook=_refuse_repeated)
    except RecursionError:
        raise _too_deep(what) from None
    except _RepeatedKeyError as error:
        raise DocumentError(f"{what} is not JSON: {error}", FieldProblem(error.key, str(error))) from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError among them
        raise NotJsonError(f"{what} is not JSON: {error}") from None
    _refuse(value, what)
    return value


def refuse_beyond_json(value: Any, what: str = "the document") -> None:
    """Raises `DocumentError` if a value cannot be said in JSON that `read_json` reads: NaN and the infinities too."""
    _refuse(value, what, finite=True)


def _refuse(value: Any, what: str, *, finite: bool = False) -> None:
    if _deeper_than(value, MAX_DEPTH):
        raise _too_deep(what)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DocumentError(
            f"{what} holds {half}, half of a character; write both halves or the character itself"
        ) from None
    if found := _no_number(value, finite):
        path, fix = found
        raise DocumentError(f"{path or what}: {fix}", FieldProblem(path, fix))


def _too_deep(what: str) -> DocumentError:
    return DocumentError(f"{what} is nested deeper than {MAX_DEPTH} levels")


class _NoNumber(str):
    """What Python reads as a number although it is none, or takes too long to: what would be right."""


def _constant(name: str) -> _NoNumber:
    """NaN, Infinity or -Infinity, which JSON does not have."""
    return _NoNumber(f"{name} is not a JSON number; use null or a finite number")


def _whole(digits: str) -> int | _NoNumber:
    most = sys.get_int_max_str_digits()  # Python's own guard: the time grows with the square of the digits
    if most and len(digits.lstrip("-")) > most:
        return _NoNumber(f"a number of {len(digits.lstrip('-'))} digits; write one of at most {most}")
    return int(digits)


def _no_number(value: Any, finite: bool, path: str = "") -> tuple[str, str] | None:
    """The path of the first of them, and what would be right."""
    if isinstance(value, _NoNumber):
        return path, str(value)
    if finite and isinstance(value, float) and not math.isfinite(value):
        return path, str(_constant(json.dumps(value)))
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    return next((found for at, inner in parts if (found := _no_number(inner, finite, at))), None)


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} stands twice in one object")
        self.key = key


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return found


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
