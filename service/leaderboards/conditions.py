"""Conditions on the fields of cells, as people write them (`training.lr<=0.1`), and as a database checks them.

What a database sorts trials by, where no column has it, is read from their configurations in the same way.
"""

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Integer, String, case, cast, false, func, literal, not_, select, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.functions import FunctionElement

from service.database import FieldIndex, Result, Score, Trial
from service.errors import FieldProblem, QueryError
from service.specs.columns import cell_field, default_of
from service.specs.patterns import NO_NUL, WORDS
from ttsv.config.fields import OneOf
from ttsv.config.trial import field_infos

_FORM = re.compile(r"\s*([\w.]+)\s*(<=|>=|!=|==|=|<|>|\bnot\s+in\b|\bin\b)\s*(.*?)\s*", re.DOTALL | re.IGNORECASE)
_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_HOW = "write a field, a comparison and a value: lr<=0.1, layer=tt, rank in (192, 256), delta!=none"
_JOINT = re.compile(r"\s+(?:and|&&?)\s+|\s*[,;]\s*", re.IGNORECASE)
"""What people write between two conditions, as between two words of a text."""
_MOST_VALUES = 1000
COLUMNS = ("model", "layer", "constraint", "rank")
"""Fields that scores and trials have columns for."""
_OF_TRIALS = (*COLUMNS, "dataset", "seed", "lambda_ort", "delta")
"""Those that trials have columns for, and their index."""
MEASURED: Mapping[str, InstrumentedAttribute[Any]] = {
    column.key: getattr(Result, column.key)
    for column in Result.__table__.columns
    if column.type.python_type in (int, float) and column.key not in ("trial_id", "fence")
}
"""What a trial's result says, in numbers: lists of trials are sorted and filtered by it, too."""
Kept = type[Trial] | type[FieldIndex]
"""Where a trial's fields are read."""


@dataclass(frozen=True)
class Condition:
    """That a field, by its path, compares so with one of several values; of orders there is one value, a number."""

    field: str
    comparison: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        said = ["none" if value is None else str(value) for value in self.values]
        listed = f"({', '.join(said)})" if "in" in self.comparison else said[0]
        return f"{self.field} {self.comparison} {listed}"

    def holds(self, value: Any) -> bool:
        """Whether a cell with this value is meant."""
        value = _array_text(value) if isinstance(value, list | tuple) else value
        if self.comparison in _ORDERS:
            return value is not None and bool(_ORDERS[self.comparison](value, self.values[0]))
        return (value in self.values) == (self.comparison in ("=", "in"))

    @property
    def on_column(self) -> bool:
        """Whether scores and trials have a column for the field."""
        return self.field in COLUMNS

    def of(self, kept: Kept | type[Score]) -> ColumnElement[bool]:
        """The same of a trial, or of a score by one of its columns; a field that is not there is at its default."""
        if self.field in MEASURED:
            return self._of_results(Trial.id if kept is Trial else FieldIndex.trial_id)
        if self.field in (COLUMNS if kept is Score else _OF_TRIALS):
            return self._compare(getattr(kept, self.field), None)
        assert kept is not Score, "scores are asked by `holds`: one statement reads their fields and tells who is meant"
        value, default = _value(kept, self.field), default_of(self.field)
        if _null_is_default(self.field):
            return self._compare(value, default)
        return case((_kind(kept, self.field).is_(None), literal(self.holds(default))), else_=self._compare(value, None))

    def _of_results(self, trial_id: InstrumentedAttribute[int]) -> ColumnElement[bool]:
        """That a trial's result is so; one that is invalid, or not there, has no value."""
        found = self._compare(MEASURED[self.field], None)
        lacking = self.holds(None)
        results = select(Result.trial_id).where(Result.valid, not_(found) if lacking else found)
        return trial_id.not_in(results) if lacking else trial_id.in_(results)

    def _compare(self, value: Any, at_null: Any) -> ColumnElement[bool]:
        """The same of what a database computes, once: a document is read for it. Its NULL means `at_null`."""
        said = true() if self.holds(at_null) else false()
        if self.comparison in _ORDERS:
            return func.coalesce(_ORDERS[self.comparison](value, self.values[0]), said)
        known = [one for one in self.values if one is not None]
        if not known:  # nothing but none
            return case((value.is_(None), said), else_=not_(said) if at_null is None else said)
        found: ColumnElement[bool] = value.in_(known)
        return func.coalesce(found if self.comparison in ("=", "in") else not_(found), said)


class _JsonKind(FunctionElement[str]):
    """The type of what stands at a path of a document: SQL's NULL where nothing does, `null` where JSON's does."""

    type = String()
    inherit_cache = True


@compiles(_JsonKind, "sqlite")
def _of_sqlite(element: _JsonKind, compiler: Any, **how: Any) -> str:
    document, path, _ = (compiler.process(clause, **how) for clause in element.clauses)
    return f"json_type({document}, '$' || {path})"


@compiles(_JsonKind, "postgresql")
def _of_postgres(element: _JsonKind, compiler: Any, **how: Any) -> str:
    document, _, path = (compiler.process(clause, **how) for clause in element.clauses)
    return f"json_typeof({document} #> CAST({path} AS text[]))"


def _array(path: tuple[str, ...]) -> str:
    """PostgreSQL's way to write an array."""
    return "{" + ",".join(f'"{part}"' for part in path) + "}"


def _array_text(values: Sequence[Any]) -> str:
    """A list as documents keep it."""
    return json.dumps(values, separators=(",", ":"))


def of_trials(field: str, kept: Kept = Trial) -> InstrumentedAttribute[Any] | ColumnElement[Any]:
    """A field of trials, by its path, as a database sorts by it: truth as 0 and 1, lists as documents keep them."""
    if field in _OF_TRIALS:
        column: InstrumentedAttribute[Any] = getattr(kept, field)
        return column
    value: Any
    value, default = _value(kept, field), default_of(field)
    if bool in field_infos()[field].types:
        value = cast(value, Integer)
    if default is None:
        missing: ColumnElement[Any] = value
        return missing  # as is what is not there
    default = _array_text(default) if isinstance(default, list) else default
    found: ColumnElement[Any] = (
        func.coalesce(value, literal(default, value.type))
        if _null_is_default(field)
        else case((_kind(kept, field).is_(None), literal(default, value.type)), else_=value)
    )
    return found


def as_stored(field: str) -> tuple[InstrumentedAttribute[Any] | ColumnElement[Any], ColumnElement[Any]]:
    """A field of trials, by its path, as their configurations have it, and its kind: none for what is not there."""
    if field in _OF_TRIALS:
        return getattr(Trial, field), literal("column")
    document, path = _place(Trial, field)
    return document[path[0] if len(path) == 1 else path], _kind(Trial, field)


def _null_is_default(field: str) -> bool:
    """Whether a field is at its default wherever its document has nothing there, or null: none is its default, or no
    value of it. (To ask for the kind of what is there reads a document once more.)
    """
    return default_of(field) is None or type(None) not in field_infos()[field].types


def _place(kept: Kept | type[Score], field: str) -> tuple[InstrumentedAttribute[Any], tuple[str, ...]]:
    """The document in which a field stands that has no column, and where: what the index has of it is flat."""
    return (Trial.config, tuple(field.split("."))) if kept is Trial else (FieldIndex.fields, (field,))


def _kind(kept: Kept | type[Score], field: str) -> _JsonKind:
    """The type of a field in the documents of trials."""
    document, path = _place(kept, field)
    return _JsonKind(document, literal("".join(f'."{part}"' for part in path)), literal(_array(path)))


def _value(kept: Kept | type[Score], field: str) -> Any:
    document, path = _place(kept, field)
    found = document[path[0] if len(path) == 1 else path]
    types = field_infos()[field].types
    if bool in types:
        return found.as_boolean()
    return found.as_float() if _is_number(field) else found.as_string()


def _is_number(field: str) -> bool:
    return field in MEASURED or bool({int, float} & set(field_infos()[field].types))


def condition(text: str, where: str = "where", *, field_named: Callable[[str, str], str] | None = None) -> Condition:
    """One condition as people write it. Raises `QueryError` with what is wrong, said of the parameter `where`.

    `field_named` gives the path of the field with a name, by default that of a field that a cell's trials share; or the
    name of what was `MEASURED`, where that may choose.
    """
    if not re.search(NO_NUL, text):
        raise QueryError([FieldProblem(where, WORDS[NO_NUL])])
    parts = _FORM.fullmatch(text)
    if parts is None or not parts[3]:
        raise QueryError([FieldProblem(where, f"{text[:100]!r} is no condition: {_HOW}")])
    if len(several := _joined(parts)) > 1:
        given = "&".join(f"{where}={one}" for one in several), " ".join(f"--{where} '{one}'" for one in several)
        fix = f"give each condition by itself: {given[0]}, or {given[1]} in a terminal"
        raise QueryError([FieldProblem(where, f"{text[:100]!r} has {len(several)} conditions; {fix}")])
    field = (field_named or _field_of_cells)(parts[1], where)
    comparison = " ".join(parts[2].lower().split()).replace("==", "=")
    if "in" in comparison:
        listed = re.fullmatch(r"\((.*)\)|\[(.*)\]", parts[3], re.DOTALL)
        if listed is None:
            raise QueryError(
                [FieldProblem(where, f"{text[:100]!r}: list the values in brackets, as in rank in (2, 4)")]
            )
        texts = _split(listed[1] if listed[1] is not None else listed[2])
    else:
        texts = [parts[3]]
    if len(texts) > _MOST_VALUES:
        raise QueryError([FieldProblem(where, f"at most {_MOST_VALUES} values")])
    values = tuple(_parsed(field, one, where) for one in texts)
    if comparison in _ORDERS and (values[0] is None or not _is_number(field)):
        raise QueryError([FieldProblem(where, f"{field} {comparison} {texts[0][:60]}: only numbers have an order")])
    return Condition(field, comparison, values)


def _field_of_cells(name: str, where: str) -> str:
    """`cell_field`, with what can be done instead of choosing rows by what was measured; raises `QueryError`."""
    if name in MEASURED:
        fix = (
            f"{name} is measured: rows chosen by it would be the lucky ones; rank by it (metric={name}), or choose "
            f"among trials by it (GET /v1/trials?where={name}...)"
        )
        raise QueryError([FieldProblem(where, fix)])
    return cell_field(name, where)


def _joined(parts: re.Match[str]) -> list[str]:
    """The conditions that somebody joined in one text: of one, the text alone.

    Words are no condition, unless on a field that is known; nor is what stands in quotation marks or brackets.
    """
    text, begin, found = parts[0].strip(), 0, list[str]()
    names = {name.rpartition(".")[2] for name in (*field_infos(), *MEASURED)}
    for joint in _JOINT.finditer(text) if parts[3][0] not in "\"'" else ():
        before, follows = text[begin : joint.start()], _FORM.fullmatch(text, joint.end())
        is_whole = bool(_FORM.fullmatch(before)) and before.count("(") == before.count(")")
        if is_whole and follows is not None and follows[1].rpartition(".")[2] in names:
            found.append(before)
            begin = joint.end()
    return [*found, text[begin:]]


def _split(text: str) -> list[str]:
    """At commas that stand in no brackets: a value may be a list itself."""
    return [one.strip() for one in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text) if one.strip()]


def _parsed(field: str, text: str, where: str) -> Any:
    """A value as scores and trials keep it; raises `QueryError`."""
    types: tuple[type, ...] = (float, type(None)) if field in MEASURED else field_infos()[field].types
    text = text.strip("\"'")
    if text.lower() in ("none", "null") and (type(None) in types or str not in types):
        return None
    try:
        if bool in types:
            return {"true": True, "false": False}[text.lower()]
        if _is_number(field):
            if not math.isfinite(number := float(text)):
                raise ValueError
            return number
        if tuple in types:
            listed, element = json.loads(text), field_infos()[field].element or str
            if type(listed) is not list or (values := [element(one) for one in listed]) != listed:
                raise ValueError
            return _array_text(values)
    # (Of brackets too deep, and of a number beyond all, too: nothing that is written there is an error of ours.)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        kind = "true or false" if bool in types else "a number" if _is_number(field) else "a list"
        raise QueryError([FieldProblem(where, f"{field}: {text[:60]!r} is not {kind}")]) from None
    check = field_infos()[field].check  # (What was measured is a number.)
    if isinstance(check, OneOf) and text not in check.names:
        near = difflib.get_close_matches(text.lower(), check.names, 1, 0.0)
        fix = f"{field}: {text[:60]!r} is none of its values; the nearest is {near[0]}"
        raise QueryError([FieldProblem(where, fix)])
    return text
