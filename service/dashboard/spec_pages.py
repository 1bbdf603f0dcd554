"""The pages on which experiments begin: presets, and the form that makes a spec, looks at it and posts it."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse

from service.access.security import Scope
from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Config, Db
from service.api.http.problems import MAX_ERRORS, summary
from service.api.submission import SpecSubmission
from service.dashboard.rendering import HEADERS, PageRoute, Show
from service.dashboard.spec_form import IN_THE_TEXT, spec_form
from service.errors import FieldProblem, ScopeError, SpecError
from service.experiments import store
from service.paper.presets import PAPER, Scale, preset_spec, presets
from service.paper.recipes import Protocol
from service.paper.reference import preset_table
from service.schemas.dry_runs import DryRunOut
from service.specs.documents import DocumentError, write_yaml
from service.specs.editing import Edit, edited, read_text
from service.specs.posted import read_posted
from service.specs.spec import ExperimentSpec

router = APIRouter(route_class=PageRoute, include_in_schema=False)

FORM = "/submit"
_KEY = re.compile(r"[0-9a-f]{32}")
"""What a form that was looked at is posted under."""
START = {
    "spec_version": 2,
    "name": "my first grid",
    "base": {
        "dataset": "digits",
        "model": "small-cnn",
        "layer": "tt",
        "constraint": "clip",
        "training": {"epochs": 12},
    },
    "grid": {"rank": [4, 16], "delta": [None, 1.0], "seed": [0, 1]},
}
"""What the form begins with: eight small trials, minutes on a CPU."""
_ALWAYS_SAID = ("spec_version", "name")
_MOST_EDITS = 200


@router.get("/presets")
def every(show: Show) -> HTMLResponse:
    """The paper's tables and figures."""
    listed = [(preset, table.name if (table := preset_table(preset)) else "") for preset in presets()]
    return show("presets.html", presets=listed, paper=PAPER)


@router.get(FORM)
def form(
    show: Show,
    database: Db,
    who: Reader,
    preset: Annotated[str | None, Query(max_length=130)] = None,
    scale: Scale = Scale.SMOKE,
    protocol: Protocol = Protocol.CODE,
    experiment: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
) -> HTMLResponse:
    """A spec to be looked at, changed and posted: an example, a preset, or that of an experiment."""
    spec: Mapping[str, object] = START
    origin = "An example to begin with."
    if preset is not None:
        spec = preset_spec(preset, scale=scale, protocol=protocol)
        origin = f"The preset {preset}, scale {scale.value}."
    elif experiment is not None:
        with database.read() as session:
            found = store.get_experiment(session, experiment, project_id=who.project_id)
            spec, origin = without_defaults(found.spec), f"The spec of experiment {experiment}."
    return _shown(show, _Looked(write_yaml(spec)), origin, preset, scale)


def without_defaults(spec: Mapping[str, object]) -> dict[str, object]:
    """A stored spec without the keys that say what is meant without them."""
    default = ExperimentSpec(name="x").model_dump(mode="json")
    return {key: value for key, value in spec.items() if key in _ALWAYS_SAID or value != default.get(key)}


@dataclass(frozen=True)
class _Looked:
    """A text, and what came of looking at it where no script runs."""

    text: str
    found: DryRunOut | None = None
    problems: Sequence[FieldProblem] = ()


def _shown(
    show: Show, looked: _Looked, origin: str, preset: str | None = None, scale: Scale = Scale.SMOKE
) -> HTMLResponse:
    answer = show(
        "submit.html",
        looked=looked,
        origin=origin,
        groups=spec_form(),
        in_the_text=IN_THE_TEXT,
        presets=presets(),
        preset=preset,
        scale=scale.value,
        scales=[one.value for one in Scale],
        key=secrets.token_hex(16),  # as `_KEY`
    )
    answer.status_code = 422 if looked.problems else 200
    return answer


@router.post(FORM)
async def sent(request: Request, show: Show, database: Db, settings: Config, who: Reader) -> Response:
    """What a browser without scripts sends: a text to be looked at, or one that was looked at to be posted."""
    try:
        fields = parse_qs((await request.body()).decode("utf-8", errors="replace"), max_num_fields=10)
    except ValueError:
        fields = {}
    given = {name: values[0] for name, values in fields.items()}
    text = given.get("spec", "")
    post = given.get("do") == "post"
    if post and not who.may(Scope.SUBMIT):
        raise ScopeError("your key may read and not submit")
    key = given.get("key", "")
    once = key if _KEY.fullmatch(key) else None  # PostgreSQL takes not every text, and the page sends no other
    asked = SpecSubmission(Response(), database, settings, who, once, dry_run=not post, summary=not post)
    return await run_in_threadpool(_answered, show, asked, text)


def _answered(show: Show, asked: SpecSubmission, text: str) -> Response:
    origin = "As it was sent."
    try:
        spec = read_posted(read_text(text))
        if asked.dry_run:
            return _shown(show, _Looked(text, asked.looked_at(spec)), origin)
        asked.post(spec)
    except DocumentError as error:
        return _shown(show, _Looked(text, problems=[error.problem or FieldProblem("spec", str(error))]), origin)
    except SpecError as error:
        return _shown(show, _Looked(text, problems=error.problems), origin)
    address = asked.response.headers["Location"].removeprefix("/v1")
    return RedirectResponse(address, status_code=303, headers=HEADERS)


class _Change(BaseModel):
    """A value at a path of keys, or that there is none."""

    model_config = ConfigDict(extra="forbid")

    path: list[str] = Field(min_length=1, max_length=10)
    value: Any = None
    remove: bool = False


class _Text(BaseModel):
    """A spec as it is written."""

    model_config = ConfigDict(extra="forbid")

    text: str


class _Look(_Text):
    """A spec to be looked at; `listed`: with its trials, one by one."""

    listed: bool = False


class _Edits(_Text):
    """A spec, and what is to be changed in it."""

    edits: list[_Change] = Field(default=[], max_length=_MOST_EDITS)


def _refused(problems: Sequence[FieldProblem]) -> dict[str, object]:
    """While somebody writes, that the text is wrong is an answer (200): browsers note each 422 as a page's error."""
    return {"refused": {"detail": summary(problems), "errors": [asdict(problem) for problem in problems[:MAX_ERRORS]]}}


@router.post(f"{FORM}/look")
def looked_at(
    asked: Annotated[_Look, Body()], database: Db, settings: Config, who: Reader
) -> dict[str, object] | DryRunOut:
    """What a dry run of the text says, or what is wrong in it as `refused`."""
    submission = SpecSubmission(Response(), database, settings, who, None, dry_run=True, summary=not asked.listed)
    try:
        return submission.looked_at(read_posted(read_text(asked.text)))
    except DocumentError as error:
        return _refused([error.problem or FieldProblem("spec", str(error))])
    except SpecError as error:
        return _refused(error.problems)


@router.post(f"{FORM}/text")
def text_with(asked: Annotated[_Edits, Body()], who: Reader) -> dict[str, object]:
    """A text with some values changed, and what it says, or what is wrong in it: so form and text stay in step."""
    edits = [Edit(tuple(one.path), one.value, one.remove) for one in asked.edits]
    try:
        text, document = edited(asked.text, edits)
    except DocumentError as error:
        return _refused([FieldProblem("text", str(error))])
    except SpecError as error:
        return _refused(error.problems)
    return {"text": text, "document": document}
