"""/v1/trials: lists over experiments, single trials, their results and the spectra of their layers."""

from typing import Any

from fastapi import APIRouter

from service import points, store
from service.api.access import Reader
from service.api.answers import result_out, trial_out, trial_page
from service.api.examples import page, shown
from service.api.filters import TrialSort, WhichTrials
from service.api.parts import UNCHANGED, Answer, Cursor, Db, FieldNames, Limit, TrialId
from service.api.problems import RESPONSES
from service.api.trial_examples import RESULT, SPECTRA, TRIAL, TRIAL_DETAIL
from service.errors import NotFoundError
from service.fields import Fields
from service.models import Result
from service.schemas import (
    ArtifactOut,
    EpochOut,
    ResultDetailOut,
    Selection,
    SelectionPage,
    SpectraOut,
    TrialDetailOut,
    TrialPage,
)
from service.store import TrialDetail

router = APIRouter(prefix="/v1/trials", tags=["trials"], responses=RESPONSES)

MAX_POINTS_SHOWN = 1000
"""A trial is shown with so many epochs; of more, with a selection (`points.thin`)."""


@router.get(
    "", operation_id="listAllTrials", responses=shown(page(TRIAL)) | UNCHANGED, response_model=TrialPage | SelectionPage
)
def index(
    answer: Answer,
    database: Db,
    which: WhichTrials,
    limit: Limit = 100,
    cursor: Cursor = None,
    sort: TrialSort = "-id",
    field_names: FieldNames = None,
) -> Any:
    """Trials of all experiments, newest first or in another order."""
    with database.read() as session:
        return trial_page(session, answer, which, limit=limit, cursor=cursor, sort=sort, field_names=field_names)


@router.get(
    "/{trial_id}",
    operation_id="getTrial",
    responses=shown(TRIAL_DETAIL) | UNCHANGED,
    response_model=TrialDetailOut | Selection,
)
def show(trial_id: TrialId, answer: Answer, who: Reader, database: Db, field_names: FieldNames = None) -> Any:
    """One trial with its epochs, its result, the protocol of the result and every layer's singular values.

    Of more than 1000 epochs it has 1000 that draw the same curves; `/metrics` has them all.
    """
    wanted = Fields(TrialDetailOut, field_names)
    with database.read() as session:
        found = store.trial_detail(session, trial_id, project_id=who.project_id)
        epochs = "epoch_metrics" in wanted
        drawn = points.sample(session, trial_id, points.METRICS, MAX_POINTS_SHOWN) if epochs else []
        plain = trial_out(found.trial, found.result)
    values = dict(plain) | {
        "epoch_metrics": [EpochOut.model_construct(**point) for point in drawn],
        "protocol": found.protocol,
        "layers": found.result.layers if found.result else None,
        "environment": found.result.environment if found.result else None,
        "artifacts": [ArtifactOut.of(artifact) for artifact in found.artifacts],
    }
    return answer(wanted.one(TrialDetailOut.model_construct(**values)))


@router.get(
    "/{trial_id}/result",
    operation_id="getTrialResult",
    responses=shown(RESULT) | UNCHANGED,
    response_model=ResultDetailOut | Selection,
)
def result(trial_id: TrialId, answer: Answer, who: Reader, database: Db, field_names: FieldNames = None) -> Any:
    """A succeeded trial's result with its protocol, what its evaluations recorded, and where it ran."""
    wanted = Fields(ResultDetailOut, field_names)
    with database.read() as session:
        detail = store.trial_detail(session, trial_id, project_id=who.project_id)
        found = _result(detail)
        values = dict(result_out(found)) | {
            "trial_id": trial_id,
            "protocol_record": detail.protocol or {},
            "evaluation": found.evaluation,
            "environment": found.environment,
            "created_at": found.created_at,
        }
    return answer(wanted.one(ResultDetailOut.model_construct(**values)))


@router.get(
    "/{trial_id}/spectra",
    operation_id="getTrialSpectra",
    responses=shown(SPECTRA) | UNCHANGED,
    response_model=SpectraOut,
)
def spectra(trial_id: TrialId, answer: Answer, who: Reader, database: Db) -> Any:
    """The singular values of a succeeded trial's layers: largest and smallest, and the largest before projection."""
    with database.read() as session:
        found = _result(store.trial_detail(session, trial_id, project_id=who.project_id))
        largest, layers = found.max_singular_value, found.layers
    return answer(SpectraOut.model_construct(trial_id=trial_id, max_singular_value=largest, layers=layers))


def _result(detail: TrialDetail) -> Result:
    if detail.result is None:
        raise NotFoundError(f"trial {detail.trial.id} has no result: it is {detail.trial.state.value}")
    return detail.result
