"""The pages of experiments: the list, and one with its trials, its events and what can be done with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Config, Cursor, Db, ExperimentId, OneId
from service.api.http.query_filters import (
    ExperimentSort,
    ShownFields,
    TrialSort,
    WhichExperiments,
    WhichTrials,
)
from service.api.http.responses import experiments_out
from service.api.matrices import AskedMatrix
from service.dashboard.matrix_view import SEEDS, MatrixView, matrix_view
from service.dashboard.rendering import PageRoute, PageSize, Show
from service.database import OPEN_EXPERIMENTS, Experiment, ExperimentState, Trial, TrialState
from service.database.pagination import Page
from service.experiments import store
from service.experiments.events import list_events
from service.experiments.listing import TrialFilter, experiments_by_id, list_experiments, list_trials, trials_by_id
from service.experiments.logs import experiment_log, tail
from service.leaderboards.matrix import matrix
from service.leaderboards.metrics import Metric
from service.leaderboards.sheets import configuration_sheet
from service.leaderboards.text_tables import Sheet
from service.schemas.experiments import ExperimentOut, ExperimentProgress
from service.schemas.field_selection import Fields
from service.schemas.trial_tables import Shown
from service.specs.columns import FieldColumn

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LISTED = Fields(ExperimentOut, ",".join(name for name in ExperimentOut.model_fields if name != "spec"))
_EVENTS = 50
_MOST_ROWS = 200
"""Trials whose rows are written anew at a time: a page has no more."""
_LOG_LINES = 200
_MOST_TAKEN = 1000
"""Trials that a file of a list has at most (`trial_downloads` of macros.html)."""
_MOST_FIELDS = 8
"""Fields that a table of trials has as columns unless they are chosen: with its measures they fill a page."""
_MOST_SPEC = 20_000
"""Characters of a spec that are shown on the page; the API has all of it."""


@dataclass(frozen=True)
class Action:
    """A verb that the experiment's state allows. `confirm` is asked first where it cannot be undone."""

    verb: str
    label: str
    meaning: str
    confirm: str | None = None


@dataclass(frozen=True)
class Share:
    """The part of a bar that trials of one state take: its beginning and width in a thousand."""

    state: TrialState
    count: int
    start: float
    width: float


@router.get("/")
def index(
    show: Show,
    database: Db,
    which: WhichExperiments,
    limit: PageSize = 50,
    cursor: Cursor = None,
    sort: ExperimentSort = "-id",
) -> HTMLResponse:
    """Experiments, newest first or in another order."""
    with database.read() as session:
        found = list_experiments(session, which, limit=limit, sort=sort, cursor=cursor, with_spec=False)
        experiments = experiments_out(session, found.rows, _LISTED)
        newest = store.newest_experiment(session, project_id=which.project_id)
    return show(
        "experiments.html",
        newest=newest,
        experiments=[(experiment, shares(experiment.progress)) for experiment in experiments],
        next=found.next,
        sort=sort,
        states=list(ExperimentState),
    )


@router.get("/changes")
def listed(
    show: Show,
    who: Reader,
    database: Db,
    experiment: Annotated[list[OneId] | None, Query(max_length=_MOST_ROWS)] = None,
) -> HTMLResponse:
    """The rows of some experiments, as the list has them."""
    with database.read() as session:
        rows = experiments_by_id(session, experiment or (), project_id=who.project_id)
        found = experiments_out(session, rows, _LISTED)
    return show("experiments_changes.html", experiments=[(one, shares(one.progress)) for one in found])


@router.get("/experiments/{experiment_id}")
def experiment(
    experiment_id: ExperimentId,
    show: Show,
    database: Db,
    settings: Config,
    which: WhichTrials,
    shown: ShownFields,
    asked: Annotated[AskedMatrix, Depends()],
    limit: PageSize = 100,
    cursor: Cursor = None,
    sort: TrialSort = "number",
) -> HTMLResponse:
    """One experiment."""
    with database.read() as session:
        row = store.get_experiment(session, experiment_id, project_id=which.project_id)
        here = replace(which, experiment_id=experiment_id)
        trials = list_trials(session, here, limit=limit, sort=sort, cursor=cursor)
        filtered = replace(which, project_id=None, states=tuple(which.states)) != TrialFilter()
        more = exceeds_file(session, here, trials, cursor) if filtered else row.trial_count > _MOST_TAKEN
        fields = configurations(trials.rows, shown)
        events = list_events(session, experiment_id=experiment_id, limit=_EVENTS, newest_first=True)
        view = matrix_view(matrix(session, asked.question(experiment_id)), asked, experiment_id)
        summary = _summary(session, row)
    path = experiment_log(settings.data_dir, experiment_id)
    # Conditions hold for the matrix as for the list; all else is asked of the list alone.
    of_list = replace(which, project_id=None, states=tuple(which.states), where=()) != TrialFilter()
    listing = of_list or cursor is not None or sort != "number" or shown != Shown()
    return show(
        "experiment.html",
        **summary,
        **_matrix_values(view),
        trials=trials.rows,
        fields=fields,
        next=trials.next,
        more_than_in_file=more,
        sort=sort,
        states=list(TrialState),
        filtered=filtered,
        first_tab="trials" if listing or view.too_fine else "matrix",
        events=events,
        newest_event=view.matrix.newest_event,
        log=tail(path, _LOG_LINES)[0].decode("utf-8", errors="replace") if path else None,
    )


@router.get("/experiments/{experiment_id}/matrix")
def matrix_panel(
    experiment_id: ExperimentId, show: Show, who: Reader, database: Db, asked: Annotated[AskedMatrix, Depends()]
) -> HTMLResponse:
    """The matrix alone: what its form exchanges."""
    with database.read() as session:
        store.get_experiment(session, experiment_id, project_id=who.project_id)
        view = matrix_view(matrix(session, asked.question(experiment_id)), asked, experiment_id)
    return show("matrix.html", home=f"/experiments/{experiment_id}", **_matrix_values(view))


@router.get("/experiments/{experiment_id}/changes")
def changes(
    experiment_id: ExperimentId,
    show: Show,
    who: Reader,
    database: Db,
    shown: ShownFields,
    after: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    trials: Annotated[list[OneId] | None, Query(max_length=_MOST_ROWS)] = None,
) -> HTMLResponse:
    """The parts of a page that changed: the summary, later events, the rows of some trials."""
    with database.read() as session:
        row = store.get_experiment(session, experiment_id, project_id=who.project_id)
        events = list_events(session, experiment_id=experiment_id, limit=_EVENTS, after=after)
        rows = trials_by_id(session, trials or (), experiment_id=experiment_id)
        fields = configurations(rows, shown)
        summary = _summary(session, row)
    return show("changes.html", **summary, trials=rows, fields=fields, events=list(reversed(events)))


def _summary(session: Session, row: Experiment) -> dict[str, object]:
    """What stands above the tabs, and the spec."""
    (found,) = experiments_out(session, [row])
    return {
        "experiment": found,
        "home": f"/experiments/{found.id}",
        "open": found.state in OPEN_EXPERIMENTS,
        "shares": shares(found.progress),
        "curves_on": found.progress.validated_on,
        "actions": actions(row, found.progress),
        "most_spec": _MOST_SPEC,
    }


def _matrix_values(view: MatrixView) -> dict[str, object]:
    return {"view": view, "metrics": list(Metric), "seed_ways": SEEDS}


@dataclass(frozen=True)
class Configurations:
    """The fields of trials that a page has as columns: `fields` by path, separated by commas, and as a `sheet`.

    `more` fields differ besides, and `decided` ones that follow from them; `every` names them all.
    """

    sheet: Sheet
    fields: str
    more: list[FieldColumn]
    decided: list[FieldColumn]
    every: str


def configurations(trials: Sequence[tuple[Trial, Any]], shown: Shown) -> Configurations:
    """The fields in which trials differ, or those that are asked for, and what they share."""
    configs = [trial.config for trial, _ in trials]
    whole = shown.columns(configs)
    shape, more = (whole, []) if shown.chosen else whole.first(_MOST_FIELDS)
    every = ",".join(one.name for one in (*whole.fields, *whole.decided))
    fields = ",".join(one.field for one in shape.fields)
    return Configurations(configuration_sheet(shape, configs), fields, more, whole.decided, every)


def exceeds_file(session: Session, which: TrialFilter, found: Page[Any], cursor: str | None) -> bool:
    """Whether a file of a list has not all of its trials; `found` is a page of it, after `cursor`."""
    if found.next is None and cursor is None:
        return False
    return list_trials(session, which, limit=_MOST_TAKEN, with_config=False, with_result=False).next is not None


def shares(progress: ExperimentProgress) -> list[Share]:
    """A bar of all trials by state, the finished ones first."""
    order = (
        TrialState.SUCCEEDED,
        TrialState.EARLY_STOPPED,
        TrialState.RUNNING,
        TrialState.FAILED,
        TrialState.DIVERGED,
        TrialState.CANCELLED,
        TrialState.QUEUED,
    )
    total = sum(progress.trials.values())
    found, start = [], 0.0
    for state in order:
        if count := progress.trials[state]:
            width = 1000 * count / total
            found.append(Share(state, count, round(start, 2), round(width, 2)))
            start += width
    return found


def actions(experiment: Experiment, progress: ExperimentProgress) -> list[Action]:
    """The verbs of `service.experiments.actions` that would change something now."""
    state, found = experiment.state, []
    if state in OPEN_EXPERIMENTS:
        if state == ExperimentState.PAUSED:
            found.append(Action("resume", "Resume", "put it back into the queue"))
        else:
            found.append(Action("pause", "Pause", "take it off the queue; running trials go on from checkpoints later"))
        if not experiment.stopping or state == ExperimentState.PAUSED:
            found.append(
                Action("stop", "Stop", "let running trials finish and drop the others", "Drop all trials that wait?")
            )
        kill = "Kill the running trials and drop those that wait?"
        found.append(Action("cancel", "Cancel", "kill running trials and drop the others", kill))
    failed = progress.trials[TrialState.FAILED]
    stopping = experiment.stopping and state in OPEN_EXPERIMENTS
    if failed and experiment.archived_at is None and not stopping:
        found.append(Action("retry", f"Retry {failed} failed", "run the failed trials again, and only those"))
    if experiment.archived_at is not None:
        found.append(Action("unarchive", "Take out of the archive", "show it in lists and leaderboards again"))
    elif state not in OPEN_EXPERIMENTS:
        found.append(Action("archive", "Archive", "leave it out of lists and leaderboards; nothing is deleted"))
    return found
