"""What routes share: the database of the running app, and the parameters by which lists and resources are named."""

from typing import Annotated

from fastapi import Depends, Path, Query, Request
from fastapi.dependencies.models import Dependant
from pydantic import Field

from service.database.engine import Database
from service.errors import FieldProblem, QueryError
from service.experiments.subscriptions import Subscriptions
from service.schemas import field_selection
from service.settings import Settings
from service.specs.patterns import PRINTABLE


def _database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _subscriptions(request: Request) -> Subscriptions:
    subscriptions: Subscriptions = request.app.state.subscriptions
    return subscriptions


Db = Annotated[Database, Depends(_database)]
Config = Annotated[Settings, Depends(_settings)]
Subscribed = Annotated[Subscriptions, Depends(_subscriptions)]

MAX_ID = 2**63 - 1

MOST = 1000
"""Items of a page."""
Limit = Annotated[int, Query(ge=1, le=MOST, description="At most so many items.")]
LONGEST_CURSOR = 2000
"""A name of 200 characters, each of four bytes, takes 1,100 of them."""

Cursor = Annotated[
    str | None,
    Query(max_length=LONGEST_CURSOR, pattern=PRINTABLE, description="`next` of the page before, in the same order."),
]
FieldNames = Annotated[
    str | None,
    Query(
        alias="fields",
        max_length=field_selection.MAX_LENGTH,
        pattern=PRINTABLE,
        description="Only these parts: names separated by commas, dotted for what is inside (`progress.trials`).",
        examples=["id,state"],
    ),
]
OneId = Annotated[int, Field(ge=1, le=MAX_ID)]
"""Of several experiments or trials that a parameter names: no database has a larger number."""
ExperimentId = Annotated[int, Path(ge=1, le=MAX_ID, description="The experiment's number.")]
TrialId = Annotated[int, Path(ge=1, le=MAX_ID, description="The trial's number, of all experiments.")]


def known_parameters_only(request: Request) -> None:
    """Raises `QueryError` for every query parameter that the route does not know: a misspelt `dry_run` would queue."""
    known = _query_names(request.scope["route"].dependant)
    if unknown := [name for name in dict.fromkeys(request.query_params.keys()) if name not in known]:
        fix = (
            f"there is no such parameter here; there are {', '.join(sorted(known))}" if known else "takes no parameters"
        )
        raise QueryError([FieldProblem(name[:200], fix) for name in unknown[:20]])


def _query_names(dependant: Dependant) -> set[str]:
    return {field.alias for field in dependant.query_params}.union(*map(_query_names, dependant.dependencies))
