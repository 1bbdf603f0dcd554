"""What all tables share: types of columns, names of constraints."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pydantic import JsonValue
from sqlalchemy import JSON, BigInteger, DateTime, Enum, Integer, MetaData, TypeDecorator
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase

from service.specs.states import ExperimentState, NodeState, TrialState

Id = BigInteger().with_variant(Integer, "sqlite")  # only an INTEGER primary key counts up by itself in SQLite
Json = JSON(none_as_null=True)  # not JSONB, which forgets the order of keys: a grid's axes have one


class Timestamp(TypeDecorator[datetime]):
    """An instant in UTC; SQLite forgets the zone, so it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuses a time without a zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Gives the zone back."""
        return value and (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC))


def _states(states: type[StrEnum], name: str) -> Enum:
    def values(kind: type[StrEnum]) -> list[str]:
        return [state.value for state in kind]

    return Enum(states, native_enum=False, length=16, values_callable=values, create_constraint=True, name=name)


class Base(DeclarativeBase):
    """Base of all tables; constraints have names, so that migrations can find them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy
        datetime: Timestamp,
        dict[str, Any]: Json,
        dict[str, JsonValue]: Json,
        list[str]: Json,
        ExperimentState: _states(ExperimentState, "state"),
        TrialState: _states(TrialState, "state"),
        NodeState: _states(NodeState, "state"),
    }
