"""Pages of a list in any order: a page begins after the row with which the one before ended (keyset pagination).

Rows that come or go meanwhile move nothing. Among equal values the row's id decides, in the same direction; rows
without a value come last in both.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_
from sqlalchemy.orm import InstrumentedAttribute, Session

from service.database.base import Timestamp
from service.errors import FieldProblem, QueryError

_Row = TypeVar("_Row")

Column = InstrumentedAttribute[Any]
Sorted = InstrumentedAttribute[Any] | ColumnElement[Any]
"""A column, or what a database computes of one."""
Orders = Mapping[str, Column]
"""The names a list can be sorted by, each with its column."""

_MAX_ID = 2**63 - 1


@dataclass(frozen=True)
class Page(Generic[_Row]):
    """Rows of a list, and the cursor of those that follow."""

    rows: list[_Row]
    next: str | None


@dataclass(frozen=True)
class Order:
    """How a list is sorted: `name` as a request has it (`-accuracy`), `column`, and `identity` to break ties."""

    name: str
    column: Sorted
    identity: Column
    nullable: bool = False

    @property
    def descending(self) -> bool:
        """Largest first."""
        return self.name.startswith("-")

    def page(self, session: Session, query: Select[Any], cursor: str | None, limit: int) -> Page[Any]:
        """At most `limit` of the query's rows after the cursor, each with two more columns, of use here alone.

        Raises `QueryError` for a cursor of another list.
        """
        if cursor is not None:
            query = query.where(self._after(*self._position(cursor)))
        direction = [c.desc() if self.descending else c.asc() for c in dict.fromkeys((self.column, self.identity))]
        nulls_last = [self.column.is_(None)] if self.nullable else []
        query = (
            query.add_columns(self.column.label(None), self.identity).order_by(*nulls_last, *direction).limit(limit + 1)
        )
        found = session.execute(query).all()
        rows = list(found[:limit])
        return Page(rows, self._cursor(*rows[-1][-2:]) if len(found) > limit else None)

    def _cursor(self, value: Any, identity: Any) -> str:
        """Where a page ended, for the next one: opaque to clients."""
        return encoded([self.name, value.isoformat() if isinstance(value, datetime) else value, identity])

    def _after(self, value: Any, identity: Any) -> ColumnElement[bool]:
        further: ColumnElement[bool] = self.identity < identity if self.descending else self.identity > identity
        if value is None:
            return and_(self.column.is_(None), further)
        if self.column is self.identity:
            return further
        beyond = self.column < value if self.descending else self.column > value
        # Said twice, so that an index over the column can be used.
        reached = self.column <= value if self.descending else self.column >= value
        after = and_(reached, or_(beyond, further))
        return or_(after, self.column.is_(None)) if self.nullable else after

    def _position(self, cursor: str) -> tuple[Any, Any]:
        try:
            name, value, identity = decoded(cursor)
            if not isinstance(name, str) or (isinstance(identity, int) and identity < 0):
                raise ValueError
            if name == self.name:
                return _parsed(self.column, value, self.nullable), _parsed(self.identity, identity)
        except (ValueError, TypeError, RecursionError):  # binascii.Error and UnicodeError among them
            raise _refused("not a cursor; take `next` of the page before") from None
        fix = f"take `next` of a page with sort={self.name}, or leave it out"
        raise _refused(f"belongs to sort={ascii(name)[1:-1][:64]}; {fix}")


def encoded(position: Sequence[Any]) -> str:
    """A cursor: opaque to clients, and safe in an address."""
    text = json.dumps(position, ensure_ascii=False, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decoded(cursor: str) -> Any:
    """What `encoded` made a cursor of, or anything else that JSON can say. Raises ValueError and RecursionError."""
    return json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))


def _parsed(column: Sorted, plain: Any, nullable: bool = False) -> Any:
    """What stands in a cursor, as the column has it; raises ValueError."""
    if plain is None and nullable:
        return None
    if isinstance(column.type, Timestamp):
        value = datetime.fromisoformat(plain)
        if value.tzinfo is None or not 1970 <= value.year <= 9000:
            raise ValueError
        return value
    kind: type = column.type.python_type
    if issubclass(kind, StrEnum):
        return kind(plain)
    if kind is float and type(plain) is int:
        plain = float(plain)
    if type(plain) is not kind:
        raise ValueError
    if isinstance(plain, str):
        plain.encode()  # half a character
        if "\x00" in plain:
            raise ValueError
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError
    if isinstance(plain, int) and abs(plain) > _MAX_ID:
        raise ValueError
    return plain


def order(orders: Orders, name: str, identity: Column) -> Order:
    """The order a request asks for (`name`, or `-name` for the largest first); raises `QueryError`."""
    column = orders.get(name.removeprefix("-"))
    if column is None:
        known = ", ".join(orders)
        raise QueryError([FieldProblem("sort", f"unknown; sort by one of {known}, with - before it largest first")])
    nullable = column.class_ is not identity.class_ or column.property.columns[0].nullable
    return Order(name, column, identity, nullable)


def _refused(message: str) -> QueryError:
    return QueryError([FieldProblem("cursor", message)])
