"""/v1/trials."""

from typing import Annotated

from fastapi import APIRouter, Path

from service import store
from service.api.examples import TRIAL_DETAIL, shown
from service.api.experiments import trial_out
from service.api.parts import MAX_ID, Db
from service.api.problems import RESPONSES
from service.schemas import ArtifactOut, EpochOut, TrialDetailOut

router = APIRouter(prefix="/v1/trials", tags=["trials"], responses=RESPONSES)


@router.get("/{trial_id}", operation_id="getTrial", responses=shown(TRIAL_DETAIL), response_model=TrialDetailOut)
def show(trial_id: Annotated[int, Path(ge=1, le=MAX_ID)], database: Db) -> TrialDetailOut:
    """One trial with its epochs, its result, the protocol of the result and every layer's singular values."""
    with database.read() as session:
        found = store.get_trial(session, trial_id)
        plain = trial_out(found.trial, found.result)
        return TrialDetailOut(
            **plain.model_dump(),
            epoch_metrics=[EpochOut.model_validate(point) for point in found.points],
            protocol=found.protocol,
            layers=found.result.layers if found.result else None,
            environment=found.result.environment if found.result else None,
            artifacts=[ArtifactOut.model_validate(artifact) for artifact in found.artifacts],
        )
