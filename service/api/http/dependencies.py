"""What routes share: the database of the running app, and how lists and resources are asked for and answered."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request, Response
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel

from service.database.engine import Database
from service.errors import FieldProblem, QueryError
from service.experiments.subscriptions import Watching
from service.schemas import field_selection
from service.settings import Settings
from service.specs.grid import PRINTABLE


def _database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _watching(request: Request) -> Watching:
    watching: Watching = request.app.state.watching
    return watching


Db = Annotated[Database, Depends(_database)]
Config = Annotated[Settings, Depends(_settings)]
Watched = Annotated[Watching, Depends(_watching)]

MAX_ID = 2**63 - 1


Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many items.")]
Cursor = Annotated[
    str | None, Query(max_length=1000, pattern=PRINTABLE, description="`next` of the page before, in the same order.")
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
ExperimentId = Annotated[int, Path(ge=1, le=MAX_ID)]
TrialId = Annotated[int, Path(ge=1, le=MAX_ID)]

UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "Not changed since the answer with this ETag"}}


class Reply:
    """How a GET answers: with an ETag of what it says, and with 304 and no body to who has it already."""

    def __init__(
        self,
        request: Request,
        if_none_match: Annotated[str | None, Header(description="ETags of answers that are known.")] = None,
    ) -> None:
        self.url = request.url
        self._known = if_none_match

    def __call__(
        self,
        answer: BaseModel | Mapping[str, Any],
        *,
        following: str | None = None,
        following_url: str | None = None,
        revision: int | None = None,
    ) -> Response:
        """The answer as JSON. `following` is the next page's cursor; `revision` enters the ETag, for `If-Match`."""
        if isinstance(answer, BaseModel):
            body = written(answer)
        else:
            body = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        tag = tag_of(body, revision)
        headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
        if following is not None:
            following_url = str(self.url.include_query_params(cursor=following))
        if following_url is not None:
            headers["Link"] = f'<{following_url}>; rel="next"'
        if self._known is not None and etag_matches(self._known, tag):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)


Answer = Annotated[Reply, Depends(Reply)]


def written(answer: BaseModel) -> bytes:
    """An answer as a GET writes it."""
    return answer.model_dump_json().encode()


def tag_of(body: bytes, revision: int | None = None) -> str:
    """The ETag of an answer that is written so."""
    digest = hashlib.sha256(body).hexdigest()[:32]
    return f'"{digest}"' if revision is None else f'"{revision}-{digest}"'


def etag_matches(if_none_match: str, tag: str) -> bool:
    """Whether the header names this ETag, weak or strong."""
    known = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return tag.removeprefix("W/") in known or known == ["*"]


def revision_matches(if_match: str | None, revision: int) -> bool:
    """Whether a change may be made: no `If-Match`, `*`, or the ETag of an answer that showed this revision.

    What workers do meanwhile makes other ETags but no other revision, so it stands in no one's way.
    """
    if if_match is None or if_match.strip() == "*":
        return True
    return any(re.fullmatch(rf'"{revision}(-[0-9a-f]+)?"', one.strip()) for one in if_match.split(","))


# A misspelt `dry_run` would queue trials.


def known_parameters_only(request: Request) -> None:
    """Raises `QueryError` for every query parameter that the request's route does not know."""
    known = _query_names(request.scope["route"].dependant)
    if unknown := [name for name in dict.fromkeys(request.query_params.keys()) if name not in known]:
        fix = (
            f"there is no such parameter here; there are {', '.join(sorted(known))}" if known else "takes no parameters"
        )
        raise QueryError([FieldProblem(name[:200], fix) for name in unknown[:20]])


def _query_names(dependant: Dependant) -> set[str]:
    return {field.alias for field in dependant.query_params}.union(*map(_query_names, dependant.dependencies))
