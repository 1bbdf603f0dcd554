"""How experiments and trials are shown: the rows of the database as the API's answers."""

from collections.abc import Sequence
from typing import Any

from fastapi import Response
from sqlalchemy.orm import Session

from service.api.http.dependencies import Reply
from service.database import Experiment, ExperimentState, Result, Trial
from service.experiments import store
from service.experiments.listing import TrialFilter, list_trials, tags_of
from service.schemas.experiments import ExperimentOut, ExperimentProgress, ResultOut, TrialOut, TrialPage
from service.schemas.field_selection import Fields

_EVERYTHING = Fields(ExperimentOut)


def experiment_out(session: Session, experiment: Experiment) -> ExperimentOut:
    """An experiment with its progress and tags, as they stand in this transaction."""
    session.flush()
    (out,) = experiments_out(session, [experiment])
    return out


def experiments_out(
    session: Session, experiments: Sequence[Experiment], wanted: Fields = _EVERYTHING
) -> list[ExperimentOut]:
    """Experiments as the API shows them; what is not wanted is not looked for, and is missing in the answers."""
    ids = [experiment.id for experiment in experiments]
    progress = store.progress(session, ids) if "progress" in wanted else {}
    tags = tags_of(session, ids) if "tags" in wanted else {}
    plain = [name for name in ExperimentOut.model_fields if name not in ("progress", "tags") and name in wanted]
    answers = []
    for experiment in experiments:
        values: dict[str, Any] = {name: getattr(experiment, name) for name in plain}
        if "progress" in wanted:
            values["progress"] = progress_out(experiment, progress[experiment.id])
        if "tags" in wanted:
            values["tags"] = tags[experiment.id]
        answers.append(ExperimentOut.model_construct(set(values), **values))
    return answers


def progress_out(experiment: Experiment, progress: store.Progress) -> ExperimentProgress:
    """Progress with the time left."""
    return ExperimentProgress(**vars(progress), seconds_left=_seconds_left(experiment, progress))


def trial_out(trial: Trial, result: Result | None, wanted: Fields | None = None) -> TrialOut:
    """A trial as the API shows it; what is not wanted is missing in the answer."""
    names = [name for name in TrialOut.model_fields if name != "result" and (wanted is None or name in wanted)]
    values: dict[str, Any] = {name: getattr(trial, name) for name in names}
    if wanted is None or "result" in wanted:
        values["result"] = result_out(result) if result else None
    return TrialOut.model_construct(set(values), **values)


def trial_page(
    session: Session,
    answer: Reply,
    which: TrialFilter,
    *,
    limit: int,
    cursor: str | None,
    sort: str,
    field_names: str | None,
) -> Response:
    """A page of trials with what was asked for; raises `QueryError`."""
    wanted = Fields(TrialOut, field_names)
    found = list_trials(
        session,
        which,
        limit=limit,
        sort=sort,
        cursor=cursor,
        with_config="config" in wanted,
        with_result="result" in wanted,
    )
    items = [trial_out(trial, result, wanted) for trial, result in found.rows]
    return answer(wanted.page(TrialPage, items, found.next), following=found.next)


def result_out(result: Result) -> ResultOut:
    """A result as the API shows it."""
    return ResultOut.model_construct(**{name: getattr(result, name) for name in ResultOut.model_fields})


def _seconds_left(experiment: Experiment, progress: store.Progress) -> float | None:
    """From the last progress on, at the pace since the last claim: what is stored says it, so the ETag stands still.

    None until a twentieth of its work is done, as starting takes time too.
    """
    claimed, progressed = experiment.claimed_at, experiment.progressed_at
    done = progress.epochs_done - experiment.epochs_at_claim
    wanted = (progress.epochs - experiment.epochs_at_claim) / 20
    if experiment.state != ExperimentState.RUNNING or claimed is None or progressed is None or done < max(1, wanted):
        return None
    return max(0.0, (progressed - claimed).total_seconds()) * (progress.epochs - progress.epochs_done) / done
