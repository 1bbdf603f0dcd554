"""JSON and YAML documents read strictly: no key twice, no NaN, no half of a character, nothing nested deep or endless.

The API reads bodies with it, the client what it is about to send, and `ttsv` the files that people write. YAML says
what JSON could say, read by the core schema of YAML 1.2, and nothing more: no anchors and aliases, which let a line
stand for a billion, no tags, no second document. Numbers are those of YAML 1.2 (`1e-3` is one, `no` is a word). What
looks like a date is refused: it would be a word to some and a date to others.
"""

import json
import math
import re
import sys
from typing import Any

import yaml

from service.errors import FieldProblem
from ttsv.config.fields import Json, JsonObject

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


def _refuse_repeated(pairs: list[tuple[str, Json]]) -> JsonObject:
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


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Of PyYAML; libyaml where it is there: ten times faster."""
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_MOST_DIGITS = 1000
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = {".nan": math.nan, ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?")


def read_yaml(text: str) -> Any:
    """The one value of a document, as JSON has them; NaN and the infinities are floats here.

    Raises `ValueError` saying where and what. Of a document that is refused, as one nested deeper than `MAX_DEPTH`
    levels, nothing more is read.
    """
    try:
        return _Reader(text).document()
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ValueError(_where(getattr(error, "problem_mark", None)) + str(problem)) from None


def yaml_as_json(document: bytes, what: str = "the document") -> bytes:
    """The JSON that says the same, for `read_json` to read: it may hold NaN and the infinities still.

    Raises `DocumentError` saying what is wrong with it; `what` it is called there.
    """
    try:
        return json.dumps(read_yaml(document.decode("utf-8-sig"))).encode()
    except ValueError as error:  # UnicodeDecodeError among them
        raise DocumentError(f"{what} is not YAML that can be read: {error}") from None


class _Dumper(yaml.SafeDumper):
    """Writes what `read_yaml` reads: a word that would be read as something else stands in quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always: aliases are not read."""
        return True

    def represent(self, data: Any) -> None:
        """The document itself is a block: an object in braces would be taken for JSON."""
        node = self.represent_data(data)
        if isinstance(node, yaml.CollectionNode) and node.value:
            node.flow_style = self.default_flow_style is True
        self.serialize(node)


def _word(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    lines = all(map(str.isprintable, text.split("\n")))
    style = "|" if lines and "\n" in text else None if lines and _is_plain(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_plain(text: str) -> bool:
    try:
        return _scalar(yaml.ScalarEvent(None, None, (True, False), text), "") is text
    except ValueError:
        return False


_Dumper.add_representer(str, _word)


def write_yaml(value: Any) -> str:
    """The document of plain data: blocks, the innermost lists and objects in one line each."""
    # (Its types know no default_flow_style of None: blocks outside, lines inside.)
    block: Any = None
    return yaml.dump(value, Dumper=_Dumper, width=100, sort_keys=False, allow_unicode=True, default_flow_style=block)


def yaml_in_line(value: Any) -> str:
    """A value as it stands within a line of YAML, in a list or an object too."""
    listed = yaml.dump(
        [value], Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**9
    )
    return listed.strip()[1:-1]


class _Reader:
    """Makes values of the parser's events, which come one at a time: nothing is built of what is refused."""

    def __init__(self, text: str) -> None:
        self._events = yaml.parse(text, Loader=LOADER)

    def document(self) -> Any:
        next(self._events)  # of the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise ValueError("the document is empty")
        value = self._value(next(self._events), 0)
        next(self._events)  # the document's end
        if not isinstance(following := next(self._events), yaml.StreamEndEvent):
            raise ValueError(_where(following.start_mark) + "a second document begins; send one")
        return value

    def _value(self, event: yaml.Event, depth: int) -> Json:
        where = _where(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError(where + "anchors and aliases (& and *) are not read; write the value out")
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(where + f"the tag {tag} is not read; write a plain value")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event, where)
        if depth > MAX_DEPTH:
            raise ValueError(where + f"the document is nested deeper than {MAX_DEPTH} levels")
        return self._mapping(depth) if isinstance(event, yaml.MappingStartEvent) else self._sequence(depth)

    def _sequence(self, depth: int) -> list[Json]:
        found: list[Json] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            found.append(self._value(event, depth + 1))
        return found

    def _mapping(self, depth: int) -> JsonObject:
        found: JsonObject = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            where = _where(event.start_mark)
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                raise ValueError(where + "a key must be a word; put it into quotes if it is one")
            if key in found:
                raise ValueError(where + f"the key {key!r} stands twice in one object")
            found[key] = self._value(next(self._events), depth + 1)
        return found


def _scalar(event: yaml.ScalarEvent, where: str) -> Json:
    text: str = event.value
    if not event.implicit[0]:  # quoted, or a block
        return text
    if text.lower() in _WORDS and text in (text.lower(), text.upper(), text.capitalize()):
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            raise ValueError(where + f"a number of {len(text)} digits; write one of at most {_MOST_DIGITS}")
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    if text.lower() in _NOT_FINITE:
        return _NOT_FINITE[text.lower()]
    if _DATE.fullmatch(text):
        raise ValueError(where + f"{text} looks like a date; put it into quotes if it is a word")
    return text


def _where(mark: Any) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
