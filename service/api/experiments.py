"""/v1/experiments."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from types import MappingProxyType
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
from service.errors import FieldProblem, QueryError, SpecError
from service.experiments import store
from service.experiments.estimate import Estimator
from service.experiments.listing import list_experiments
from service.experiments.memory import GIB, Advice, Memory, MemoryEstimator, advise, shares
from service.experiments.submission import Draft, submit
from service.queue import census, nodes
from service.schemas.answers import Selection, SelectionPage
from service.schemas.dry_runs import SHOWN, DryMemory, DryRange, DryRanges, DryRunOut, DryTotals, DryTrialOut
from service.schemas.experiments import ExperimentOut, ExperimentPage, NewExperimentOut
from service.schemas.field_selection import Fields
from service.schemas.trials import ColumnOut, TrialPage
from service.settings import Settings
from service.specs.columns import Columns, columns_of
from service.specs.grid import count_grid, expand_grid, search_base
from service.specs.patterns import PRINTABLE
from service.specs.planner import CellCount, GridCount, Plan, PlannedTrial, warnings
from service.specs.spec import ExperimentSpec
from ttsv.config.evaluation import PUBLISHED_CORRUPTIONS
from ttsv.config.fields import TrialFields
from ttsv.data.catalog import FETCHED, own_set

_Number = TypeVar("_Number", int, float)

_EXAMPLE = {
    "grid_points": 24,
    "trial_count": 20,
    "totals": {"steps": 5040, "seconds": None},
    "ranges": {
        "parameters": {"least": 2486, "largest": 75_018},
        "compression": {"least": 1.0, "largest": 35.5},
        "seconds": None,
    },
    "memory": {
        "gib": 0.2,
        "basis": "worked out of its layers, batch and training; nothing like it was measured on a GPU yet",
        "needed_gib": 0.72,
        "card_gib": 79.6,
        "gpus": 0.0091,
    },
    "reasons": ["nothing was measured yet from which the time could be told"],
    "notes": [
        "each of these trials needs up to about 0.7 GiB of a card: resources.gpus: 0.0091 would run 109 side by side "
        "on a card of 80 GiB, as far as memory goes"
    ],
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
            "memory_gib": 0.2,
            "memory_basis": "worked out of its layers, batch and training; nothing like it was measured on a GPU yet",
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

    def of(
        self, experiment_id: int, request: dict[str, JsonValue], make: Callable[..., Draft], **asked: Any
    ) -> dict[str, JsonValue]:
        """Submits what a function `draft_...` of `service.experiments.submission` makes of an experiment.

        A request that was answered before gets its answer whatever became of the experiment since, which may not let
        itself be drafted from any more.
        """
        with self.database.read() as session:
            known = store.answered(session, self.idempotency_key, request, project_id=self.who.project_id)
            if known is None:
                draft = make(session, experiment_id, who=self.who, max_trials=self.settings.max_trials, **asked)
        if known is None:
            return self.store(draft, request)
        if known["id"] != experiment_id:
            self.response.headers["Location"] = f"/v1/experiments/{known['id']}"
        return known

    def store(
        self, draft: Draft, request: dict[str, JsonValue], beside: Mapping[str, JsonValue] = MappingProxyType({})
    ) -> dict[str, JsonValue]:
        """Submits a draft; the experiment as plain data, and what is said `beside` it.

        `request` says what is asked, and of what. A new experiment's address becomes the header Location.
        """

        def work(session: Session) -> dict[str, JsonValue]:
            def stored() -> dict[str, JsonValue]:
                _refuse_absent(_absent_data(draft.spec, _cells(draft.plan), self.settings), self.settings)
                made = experiment_out(session, submit(session, draft, self.who)).model_dump(mode="json")
                return {**made, **beside}

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

    summary: Annotated[
        bool,
        Query(
            description="With dry_run: count the trials of large grids without listing one. `trials` is empty, and "
            "everything else is said of all of them."
        ),
    ] = False

    def post(self, spec: ExperimentSpec) -> Mapping[str, object] | JSONResponse:
        """The stored experiment with what has no effect in it, or what the spec would become.

        A request that was answered before gets that answer, what was said of its spec then included.
        """
        if self.summary and not self.dry_run:
            raise QueryError([FieldProblem("summary", "is said of a dry run: add dry_run=true, or remove it")])
        if self.dry_run:
            return JSONResponse(self.looked_at(spec).model_dump(mode="json"))
        request = spec.model_dump(mode="json")
        with self.database.read() as session:
            known = store.answered(session, self.idempotency_key, request, project_id=self.who.project_id)
        if known is not None:
            self.response.headers["Location"] = f"/v1/experiments/{known['id']}"
            return known
        draft = Draft(spec, expand_grid(spec, max_trials=self.settings.max_trials))
        said: list[JsonValue] = [*self._said(spec, draft.plan)]
        if shares(spec.resources.gpus):
            said += self._of_cards(spec, _cells(draft.plan))[1].warnings
        return self.store(draft, request, {"warnings": said})

    def looked_at(self, spec: ExperimentSpec) -> DryRunOut:
        """What the spec would become. Raises `SpecError`."""
        expand = count_grid if self.summary else expand_grid
        plan: Plan | GridCount = expand(spec, max_trials=self.settings.max_trials)
        said = self._said(spec, plan)
        _refuse_absent(_absent_data(spec, _cells(plan), self.settings), self.settings)
        return self._estimated(spec, plan, said)

    def _said(self, spec: ExperimentSpec, plan: Plan | GridCount) -> list[str]:
        """What has no effect, what is lacking, and what the processors that are there cannot do."""
        absent = _absent_data(spec, _cells(plan), self.settings)
        where = "this service's data folder has none; every node that runs a trial must have it"
        of_data = [f"dataset {name}: {place} is needed: {where}" for name, place in absent.items()]
        of_data += _absent_published(spec, _cells(plan), self.settings)
        of_data += _absent_corruptions(_cells(plan), self.settings)
        return [*warnings(spec, plan), *of_data, *self._of_processors(spec, plan)]

    def _of_processors(self, spec: ExperimentSpec, plan: Plan | GridCount) -> list[str]:
        """What the processors of the workers that are there cannot do, or need not; a later worker's may differ."""
        if not spec.resources.gpus:
            with self.database.read() as session:
                gpus = nodes.gpus_there(session)
            if gpus:
                idle = f"resources.gpus is 0: trials compute on CPUs alone, though the nodes have {gpus:g} GPUs"
                return [f"{idle}; reserve 1 or a fraction of one", *self._of_bf16(spec, plan)]
        return self._of_bf16(spec, plan)

    def _of_bf16(self, spec: ExperimentSpec, plan: Plan | GridCount) -> list[str]:
        count = sum(cell.trials for cell in _cells(plan) if cell.config.training.precision == "bf16")
        if not count or spec.resources.gpus:
            return []
        with self.database.read() as session:
            if not census.unfit_for_bf16(session):
                return []
        refused = (
            f"training.precision: {count} trial{'s' * (count > 1)} in bf16 will be refused by every worker that is "
            "there: their processors have no instructions for it; take float32, or a GPU (resources.gpus)"
        )
        return [refused]

    def _of_cards(self, spec: ExperimentSpec, cells: Sequence[CellCount]) -> tuple[list[Memory | None], Advice]:
        """What each takes of a card, and what is said of it."""
        with self.database.read() as session:
            estimator = MemoryEstimator(session, (cell.config for cell in cells), self.who.project_id)
            card = nodes.smallest_card(session)
        memories = [estimator.estimate(cell.config) for cell in cells]
        return memories, advise(memories, card, spec.resources.gpus)

    def _estimated(self, spec: ExperimentSpec, plan: Plan | GridCount, said: list[str]) -> DryRunOut:
        cells = _cells(plan)
        memories, advice = self._of_cards(spec, cells)
        with self.database.read() as session:
            estimator = Estimator(session, (cell.config for cell in cells), self.who.project_id)
        estimates = [estimator.estimate(cell.config) for cell in cells]
        trials = [
            DryTrialOut(
                number=number,
                fingerprint=planned.fingerprint,
                cell=planned.cell,
                config=planned.config.kept(),
                **asdict(estimate) | {"reasons": list(estimate.reasons)},
                memory_gib=None if memory is None else memory.most / GIB,
                memory_basis=None if memory is None else memory.basis,
            )
            for number, (planned, estimate, memory) in enumerate(zip(_listed(plan), estimates, memories, strict=False))
        ]
        counts = [cell.trials for cell in cells]
        configs = [] if isinstance(plan, GridCount) else _telling(plan.trials)
        shape = columns_of(configs, without_decided=True) if configs else Columns([], {})
        columns, decided = (
            [ColumnOut(field=one.field, name=one.name) for one in some] for some in (shape.fields, shape.decided)
        )
        return DryRunOut(
            grid_points=plan.points,
            trial_count=sum(counts),
            totals=DryTotals(
                steps=_total([estimate.steps for estimate in estimates], counts),
                seconds=_total([estimate.seconds for estimate in estimates], counts),
            ),
            ranges=DryRanges(
                parameters=_range(estimate.parameters for estimate in estimates),
                compression=_range(estimate.compression for estimate in estimates),
                seconds=_range(estimate.seconds for estimate in estimates),
            ),
            memory=_memory(advice),
            reasons=list(dict.fromkeys(reason for estimate in estimates for reason in estimate.reasons)),
            notes=list(advice.notes),
            warnings=[*said, *advice.warnings],
            trials=trials,
            columns=columns,
            decided=decided,
            common=shape.common,
        )


def _cells(plan: Plan | GridCount) -> list[CellCount]:
    """Configurations that stand for all trials: of a plan every trial, of a tally every cell."""
    return plan.cells if isinstance(plan, GridCount) else [CellCount(planned.config, 1) for planned in plan.trials]


def _telling(trials: Sequence[PlannedTrial]) -> list[TrialFields]:
    """Configurations that tell as much as those of all trials: one of every cell, and another seed if there is one."""
    cells = {trial.cell: trial for trial in reversed(trials)}
    others = (trial for trial in trials if trial.config.seed != trials[0].config.seed)
    return [trial.config.kept() for trial in (*reversed(cells.values()), *islice(others, 1))]


def _listed(plan: Plan | GridCount) -> Sequence[PlannedTrial]:
    return () if isinstance(plan, GridCount) else plan.trials[:SHOWN]


_PLACES = {"npz": "datasets/{}.npz", "folder": "datasets/{}/train"}
"""Kind of the user's own data sets -> where they lie in the data folder."""


def _absent_data(spec: ExperimentSpec, cells: Iterable[CellCount], settings: Settings) -> dict[str, str]:
    """The user's own data sets that are not in the data folder, and where they would lie in it."""
    places = {name: _PLACES[own[0]].format(own[1]) for name in _datasets(spec, cells) if (own := own_set(name))}
    return {name: place for name, place in sorted(places.items()) if not (settings.data_dir / place).exists()}


def _absent_published(spec: ExperimentSpec, cells: Iterable[CellCount], settings: Settings) -> list[str]:
    """What is said of published data sets that are not in the data folder: they may still be fetched."""
    return [
        f"dataset {name}: this service's data folder has none, without which its trials fail at the start; run "
        f"`ttsv data fetch {name}`, on every node that runs them"
        for name in sorted(_datasets(spec, cells) & FETCHED.keys())
        if not (settings.data_dir / "datasets" / FETCHED[name]).exists()
    ]


def _datasets(spec: ExperimentSpec, cells: Iterable[CellCount]) -> set[str]:
    """The data sets of all trials, those of a search that are still to be drawn included."""
    searched = spec.search.space.get("dataset", {}).get("choice", ()) if spec.search else ()
    given = {search_base(spec).get("dataset"), *searched, *(cell.config.dataset for cell in cells)}
    return {str(name) for name in given if name}


def _absent_corruptions(cells: Iterable[CellCount], settings: Settings) -> list[str]:
    """What is said of published corruptions that are not in the data folder: they may still be put there."""
    counts: Counter[str] = Counter()
    for cell in cells:
        if cell.config.evaluation.corruptions == "published":
            counts[cell.config.dataset] += cell.trials
    found = []
    for dataset, count in sorted(counts.items()):
        name = PUBLISHED_CORRUPTIONS[dataset]
        if not (settings.data_dir / "datasets" / name).is_dir():
            fails = "the trial fails" if count == 1 else f"{count} trials fail"
            why = f"this service's data folder has no datasets/{name}, without which {fails} at the start"
            fix = "unpack its publisher's archive there, on every node that runs them, or take generated ones"
            found.append(f"evaluation.corruptions: {why}; {fix}")
    return found


def _refuse_absent(absent: Mapping[str, str], settings: Settings) -> None:
    """Raises `SpecError` where the database is SQLite: service and workers are on one machine then."""
    if absent and settings.url.get_backend_name() == "sqlite":
        fix = "is not in the data folder; put it there, or name another data set"
        raise SpecError(
            [FieldProblem("dataset", f"{name} needs {place}, which {fix}") for name, place in absent.items()]
        )


def _total(values: Sequence[_Number | None], counts: Sequence[int]) -> _Number | None:
    """The sum of values, each counted so many times, where there are values and all of them are known."""
    known = [value * count for value, count in zip(values, counts, strict=True) if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None


def _memory(advice: Advice) -> DryMemory | None:
    if (largest := advice.largest) is None:
        return None
    return DryMemory(
        gib=largest.most / GIB,
        basis=largest.basis,
        needed_gib=largest.of_card / GIB,
        card_gib=None if advice.card is None else advice.card / GIB,
        gpus=advice.gpus,
    )


def _range(values: Iterable[float | None]) -> DryRange | None:
    """The least and the largest of the values that are known."""
    known = [value for value in values if value is not None]
    return DryRange(least=min(known), largest=max(known)) if known else None


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
