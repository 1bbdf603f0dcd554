"""The pages of experiments: the list, and one with its trials, its events and what can be done with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from service.api.http.dependencies import Config, Cursor, Db, ExperimentId
from service.api.http.query_filters import (
    ExperimentSort,
    ShownFields,
    TrialSort,
    WhichExperiments,
    WhichTrials,
)
from service.api.http.responses import experiments_out
from service.dashboard.rendering import PageRoute, PageSize, Show
from service.database import OPEN_EXPERIMENTS, Experiment, ExperimentState, Trial, TrialState
from service.experiments import store
from service.experiments.events import list_events
from service.experiments.listing import TrialFilter, list_experiments, list_trials
from service.experiments.logs import experiment_log, tail
from service.leaderboards.sheets import configuration_sheet
from service.leaderboards.text_tables import Sheet
from service.schemas.experiments import ExperimentOut, ExperimentProgress
from service.schemas.field_selection import Fields
from service.schemas.trial_tables import Shown

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LISTED = Fields(ExperimentOut, ",".join(name for name in ExperimentOut.model_fields if name != "spec"))
_EVENTS = 50
_LOG_LINES = 200
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
    return show(
        "experiments.html",
        experiments=[(experiment, shares(experiment.progress)) for experiment in experiments],
        next=found.next,
        sort=sort,
        states=list(ExperimentState),
    )


@router.get("/experiments/{experiment_id}")
def experiment(
    experiment_id: ExperimentId,
    show: Show,
    database: Db,
    settings: Config,
    which: WhichTrials,
    shown: ShownFields,
    limit: PageSize = 100,
    cursor: Cursor = None,
    sort: TrialSort = "number",
) -> HTMLResponse:
    """One experiment."""
    with database.read() as session:
        row = store.get_experiment(session, experiment_id, project_id=which.project_id)
        (found,) = experiments_out(session, [row])
        here = replace(which, experiment_id=experiment_id)
        trials = list_trials(session, here, limit=limit, sort=sort, cursor=cursor)
        fields = configurations(trials.rows, shown)
        events = list_events(session, experiment_id=experiment_id, limit=_EVENTS, newest_first=True)
        doable = actions(row, found.progress)
    path = experiment_log(settings.data_dir, experiment_id)
    return show(
        "experiment.html",
        experiment=found,
        open=found.state in OPEN_EXPERIMENTS,
        shares=shares(found.progress),
        actions=doable,
        trials=trials.rows,
        fields=fields,
        next=trials.next,
        sort=sort,
        states=list(TrialState),
        filtered=replace(which, project_id=None, states=tuple(which.states)) != TrialFilter(),
        events=events,
        newest_event=events[0].id if events else 0,
        log=tail(path, _LOG_LINES)[0].decode("utf-8", errors="replace") if path else None,
        most_spec=_MOST_SPEC,
    )


def configurations(trials: Sequence[tuple[Trial, Any]], shown: Shown) -> Sheet:
    """The fields in which trials differ, or those that are asked for, and what they share."""
    configs = [trial.config for trial, _ in trials]
    return configuration_sheet(shown.columns(configs), configs)


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
