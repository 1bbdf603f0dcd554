"""/v1/experiments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Depends, Header, Query, Response
from fastapi.responses import JSONResponse
from pydantic import JsonValue
from sqlalchemy.orm import Session

from service.api.http.authentication import Reader, Submitter
from service.api.http.dependencies import Config, Cursor, Db, ExperimentId, FieldNames, Limit
from service.api.http.examples import Responses, kept, page, shown
from service.api.http.problems import RESPONSES
from service.api.http.query_filters import ExperimentSort, TrialSort, WhichExperiments
from service.api.http.responses import Answer, experiment_out, experiments_out
from service.api.openapi_examples.experiments import CREATED, EXPERIMENT, SPEC
from service.api.openapi_examples.trials import TRIAL
from service.api.trials import LISTED, TrialList
from service.errors import FieldProblem, SpecError
from service.experiments import store
from service.experiments.estimate import Estimator
from service.experiments.listing import list_experiments
from service.experiments.submission import Draft, submit
from service.queue import census, nodes
from service.schemas.experiments import (
    SHOWN,
    DryRunOut,
    DryTotals,
    DryTrialOut,
    ExperimentOut,
    ExperimentPage,
    NewExperimentOut,
    Selection,
    SelectionPage,
    TrialPage,
)
from service.schemas.field_selection import Fields
from service.settings import Settings
from service.specs.grid import expand_grid, search_base
from service.specs.planner import warnings
from service.specs.spec import PRINTABLE, ExperimentSpec
from ttsv.data.catalog import own_set

_Number = TypeVar("_Number", int, float)

_EXAMPLE = {
    "grid_points": 24,
    "trial_count": 20,
    "totals": {"steps": 5040, "seconds": None},
    "warnings": [],
    "trials": [
        {name: TRIAL[name] for name in ("fingerprint", "cell", "config")}
        | {
            "number": 0,
            "parameters": 2486,
            "compression": 35.5,
            "multiply_accumulates": 45_000,
            "steps": 252,
            "seconds": None,
            "basis": None,
            "reasons": ["nothing was measured yet from which the time could be told"],
        }
    ],
}

DRY_RUN: Responses = {
    200: {
        "model": DryRunOut,
        "description": "With dry_run: what would be stored.",
        "content": {"application/json": {"example": _EXAMPLE}},
    }
}


YAML_BODY = {
    "requestBody": {"content": {"application/yaml": {"schema": {"$ref": "#/components/schemas/ExperimentSpec"}}}}
}

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], responses=RESPONSES)


@dataclass(frozen=True)
class Submission:
    """Who wants to make or enlarge an experiment, and how the answer goes out: once per Idempotency-Key."""

    response: Response
    database: Db
    settings: Config
    who: Submitter
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=200,
            pattern=PRINTABLE,
            description="A word of one's own: the same request sent again with it gets the same answer, and stores "
            "nothing more.",
        ),
    ] = None

    def draft(self, make: Callable[..., Draft], experiment_id: int, **asked: Any) -> Draft:
        """What one of the functions `draft_...` of `service.experiments.submission` makes of an experiment."""
        with self.database.read() as session:
            return make(session, experiment_id, who=self.who, max_trials=self.settings.max_trials, **asked)

    def store(self, draft: Draft, request: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Submits a draft; the experiment as plain data.

        `request` says what is asked, and of what. A new experiment's address becomes the header Location.
        """

        def work(session: Session) -> dict[str, JsonValue]:
            def stored() -> dict[str, JsonValue]:
                _refuse_absent(_absent_data(draft, self.settings), self.settings)
                return experiment_out(session, submit(session, draft, self.who)).model_dump(mode="json")

            return store.answer_once(session, self.idempotency_key, request, stored, project_id=self.who.project_id)

        answer = self.database.write(work)
        if draft.before is None:
            self.response.headers["Location"] = f"/v1/experiments/{answer['id']}"
        return answer


@dataclass(frozen=True)
class SpecSubmission(Submission):
    """A spec that is posted, or only to be looked at."""

    dry_run: Annotated[
        bool, Query(description="Store nothing: answer (200) with the trials and what they would cost.")
    ] = False

    def post(self, spec: ExperimentSpec) -> Mapping[str, object] | JSONResponse:
        """The stored experiment with what has no effect in it, or what the spec would become."""
        draft = Draft(spec, expand_grid(spec, max_trials=self.settings.max_trials))
        absent = _absent_data(draft, self.settings)
        where = "this service's data folder has none; every node that runs a trial must have it"
        of_data = [f"dataset {name}: {place} is needed: {where}" for name, place in absent.items()]
        said = [*warnings(spec, draft.plan), *of_data, *self._of_processors(draft)]
        if self.dry_run:
            _refuse_absent(absent, self.settings)
            return self._estimated(draft, said)
        return self.store(draft, spec.model_dump(mode="json")) | {"warnings": said}

    def _of_processors(self, draft: Draft) -> list[str]:
        """What the processors of the workers that are there cannot do, or need not; a later worker's may differ."""
        if not draft.spec.resources.gpus:
            with self.database.read() as session:
                gpus = nodes.gpus_there(session)
            if gpus:
                idle = f"resources.gpus is 0: trials compute on CPUs alone, though the nodes have {gpus:g} GPUs"
                return [f"{idle}; reserve 1 or a fraction of one", *self._of_bf16(draft)]
        return self._of_bf16(draft)

    def _of_bf16(self, draft: Draft) -> list[str]:
        count = sum(planned.config.training.precision == "bf16" for planned in draft.plan.trials)
        if not count or draft.spec.resources.gpus:
            return []
        with self.database.read() as session:
            if not census.unfit_for_bf16(session):
                return []
        refused = (
            f"training.precision: {count} trial{'s' * (count > 1)} in bf16 will be refused by every worker that is "
            "there: their processors have no instructions for it; take float32, or a GPU (resources.gpus)"
        )
        return [refused]

    def _estimated(self, draft: Draft, said: list[str]) -> JSONResponse:
        plan = draft.plan
        with self.database.read() as session:
            estimator = Estimator(session, (planned.config for planned in plan.trials), self.who.project_id)
        estimates = [estimator.estimate(planned.config) for planned in plan.trials]
        trials = [
            DryTrialOut(
                number=number,
                fingerprint=planned.fingerprint,
                cell=planned.cell,
                config=planned.config.to_dict(),
                **asdict(estimate) | {"reasons": list(estimate.reasons)},
            )
            for number, (planned, estimate) in enumerate(zip(plan.trials[:SHOWN], estimates, strict=False))
        ]
        found = DryRunOut(
            grid_points=plan.points,
            trial_count=len(plan.trials),
            totals=DryTotals(
                steps=_total([estimate.steps for estimate in estimates]),
                seconds=_total([estimate.seconds for estimate in estimates]),
            ),
            warnings=said,
            trials=trials,
        )
        return JSONResponse(found.model_dump(mode="json"))


_PLACES = {"npz": "datasets/{}.npz", "folder": "datasets/{}/train"}
"""Kind of the user's own data sets -> where they lie in the data folder."""


def _absent_data(draft: Draft, settings: Settings) -> dict[str, str]:
    """The user's own data sets that are not in the data folder, and where they would lie in it."""
    searched = draft.spec.search.space.get("dataset", {}).get("choice", ()) if draft.spec.search else ()
    planned = (planned.config.dataset for planned in draft.plan.trials)
    given = {search_base(draft.spec).get("dataset"), *searched, *planned}
    places = {str(name): _PLACES[own[0]].format(own[1]) for name in given if name and (own := own_set(str(name)))}
    return {name: place for name, place in sorted(places.items()) if not (settings.data_dir / place).exists()}


def _refuse_absent(absent: Mapping[str, str], settings: Settings) -> None:
    """Raises `SpecError` where the database is SQLite: service and workers are on one machine then."""
    if absent and settings.url.get_backend_name() == "sqlite":
        fix = "is not in the data folder; put it there, or name another data set"
        raise SpecError(
            [FieldProblem("dataset", f"{name} needs {place}, which {fix}") for name, place in absent.items()]
        )


def _total(values: Sequence[_Number | None]) -> _Number | None:
    """The sum, where there are values and all of them are known."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None


@router.post(
    "",
    status_code=201,
    operation_id="createExperiment",
    responses=shown(CREATED | {"warnings": []}, 201, "Location") | DRY_RUN,
    response_model=NewExperimentOut,
    openapi_extra=YAML_BODY,
)
def create(
    spec: Annotated[ExperimentSpec, Body(openapi_examples={"quickstart": {"value": SPEC}})],
    posted: Annotated[SpecSubmission, Depends()],
) -> Any:
    """Stores the experiment and all its trials, or nothing. The spec may be sent as YAML, too.

    With an Idempotency-Key the same request can be sent again: it gets the same answer and stores nothing more.
    """
    return posted.post(spec)


@router.get(
    "",
    operation_id="listExperiments",
    responses=kept(page(EXPERIMENT), "Link"),
    response_model=ExperimentPage | SelectionPage,
)
def index(
    answer: Answer,
    database: Db,
    which: WhichExperiments,
    limit: Limit = 50,
    cursor: Cursor = None,
    sort: ExperimentSort = "-id",
    field_names: FieldNames = None,
) -> Any:
    """Experiments, newest first or in another order. `fields` without `spec` make a quick list of large grids.

    Pages hold everything once, whatever is added or changes state meanwhile.
    """
    wanted = Fields(ExperimentOut, field_names)
    with database.read() as session:
        found = list_experiments(session, which, limit=limit, sort=sort, cursor=cursor, with_spec="spec" in wanted)
        items = experiments_out(session, found.rows, wanted)
    return answer(wanted.page(ExperimentPage, items, found.next), following=found.next)


@router.get(
    "/{experiment_id}",
    operation_id="getExperiment",
    responses=kept(EXPERIMENT),
    response_model=ExperimentOut | Selection,
)
def show(experiment_id: ExperimentId, answer: Answer, who: Reader, database: Db, field_names: FieldNames = None) -> Any:
    """One experiment with its trials counted by state, and its progress.

    The ETag holds the revision: sent as If-Match with a change, it is refused if someone else made one meanwhile.
    """
    wanted = Fields(ExperimentOut, field_names)
    with database.read() as session:
        experiment = store.get_experiment(session, experiment_id, project_id=who.project_id)
        (found,) = experiments_out(session, [experiment], wanted)
        return answer(wanted.one(found), revision=experiment.revision)


@dataclass(frozen=True, kw_only=True)
class _TrialsInGrid(TrialList):
    """A list of an experiment's trials, in the grid's order unless another is asked for."""

    sort: TrialSort = "number"


@router.get(
    "/{experiment_id}/trials",
    operation_id="listTrials",
    responses=LISTED,
    response_model=TrialPage | SelectionPage,
)
def trials(experiment_id: ExperimentId, asked: Annotated[_TrialsInGrid, Depends()]) -> Any:
    """The experiment's trials in the grid's order or another, with the results of those that have one.

    As JSON, CSV, Markdown or LaTeX, by `format` or Accept, as `GET /v1/trials`.
    """
    return asked.page(experiment_id)
