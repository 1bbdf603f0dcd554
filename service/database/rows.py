"""Rows that are written by the names of their columns: those of many tables at once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, TypeAlias, cast

from pydantic_core import to_json
from sqlalchemy import JSON, Connection, Table, Text, Update, bindparam, column, func, select, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase

Insert: TypeAlias = postgresql.Insert | sqlite.Insert

_KEY = "key_"
"""Before the name of a primary key's column: the row that is changed."""


class Way(Enum):
    """What to do with a row, and with one that has its primary key already."""

    ADD = auto()
    ADD_MISSING = auto()
    REPLACE = auto()
    CHANGE = auto()
    """Sets what is named of a row that is there."""


@dataclass(frozen=True)
class Rows:
    """Rows of one table, which all name the same columns: defaults of the code are not looked for.

    Raises `ValueError` where one names others: what the first row does not name would be lost.
    """

    entity: type[DeclarativeBase]
    rows: Sequence[Mapping[str, Any]]
    way: Way = Way.ADD

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.keys() != self.rows[0].keys():
                others = ", ".join(sorted(row.keys() ^ self.rows[0].keys()))
                raise ValueError(f"{self.entity.__tablename__}: some rows name {others}, and some do not")

    @property
    def shape(self) -> "_Shape":
        """What their statement is made of."""
        return cast("Table", self.entity.__table__), self.way, tuple(self.rows[0])


_Shape: TypeAlias = tuple[Table, Way, tuple[str, ...]]


def write_rows(connection: Connection, *writes: Rows) -> None:
    """Writes rows of different tables; on SQLite in this order.

    PostgreSQL gets all in one statement, each table's as one JSON document: every parameter costs the driver more than
    the server needs for it, and every statement a round trip.
    """
    writes = tuple(one for one in writes if one.rows)
    if connection.dialect.name != "postgresql":
        for one in writes:
            connection.execute(_on_sqlite(one.shape), _with_keys(one) if one.way is Way.CHANGE else one.rows)
    elif writes:
        documents = {one.entity.__tablename__: _document(one.rows) for one in writes}
        connection.execute(_on_postgres(tuple(one.shape for one in writes)), documents)


def _document(rows: Sequence[Mapping[str, Any]]) -> str:
    """JSON, in which numbers that JSON does not have are words that PostgreSQL knows."""
    made = to_json(rows)
    if b"NaN" in made or b"Infinity" in made:
        made = to_json([{name: _finite(value) for name, value in row.items()} for row in rows])
    return made.decode()


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _with_keys(one: Rows) -> list[dict[str, Any]]:
    keys = {key.name for key in cast("Table", one.entity.__table__).primary_key}
    return [{_KEY + name if name in keys else name: value for name, value in row.items()} for row in one.rows]


# Statements are made once: making one takes longer than executing it.


@lru_cache
def _on_sqlite(shape: _Shape) -> Insert | Update:
    table, way, _ = shape
    if way is Way.CHANGE:
        return update(table).where(*(key == bindparam(_KEY + key.name) for key in table.primary_key))
    return _resolved(sqlite.insert(table), shape)


@lru_cache
def _on_postgres(shapes: tuple[_Shape, ...]) -> Insert | Update:
    *first, last = map(_from_document, shapes)
    return last.add_cte(*(each.cte(f"written_{number}") for number, each in enumerate(first)))


def _from_document(shape: _Shape) -> Insert | Update:
    table, way, names = shape
    columns = [column(name, table.c[name].type) for name in names]
    document = sql_cast(bindparam(table.name, type_=Text), JSON)
    given = func.json_to_recordset(document).table_valued(*columns).render_derived(f"new_{table.name}", with_types=True)
    if way is not Way.CHANGE:
        insert = postgresql.insert(table).from_select(names, select(*given.c), include_defaults=False)
        return _resolved(insert, shape)
    keys = {key.name for key in table.primary_key}
    change = update(table).where(*(table.c[name] == given.c[name] for name in keys))
    return change.values({name: given.c[name] for name in names if name not in keys})


def _resolved(insert: Insert, shape: _Shape) -> Insert:
    """The same where rows are there already."""
    table, way, names = shape
    if way is Way.ADD_MISSING:
        return insert.on_conflict_do_nothing()
    if way is Way.REPLACE:
        news = {name: insert.excluded[name] for name in names if not table.c[name].primary_key}
        return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=news)
    return insert
