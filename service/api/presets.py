"""/v1/presets: the paper's tables and figures as specs."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from service.api.experiments import DRY_RUN, DryRun, IdempotencyKey, dry_run, store_draft
from service.api.http.authentication import Reader, Submitter
from service.api.http.dependencies import Config, Db
from service.api.http.problems import RESPONSES
from service.api.openapi_examples.experiments import CREATED, PRESET_SPEC, PRESETS, shown
from service.experiments.submission import Draft
from service.paper.presets import PAPER, Protocol, Scale, preset_spec, presets
from service.schemas.experiments import ExperimentOut, PresetOut
from service.specs.grid import ExperimentSpec, expand_grid

router = APIRouter(prefix="/v1/presets", tags=["presets"], responses=RESPONSES)

Paper = Annotated[str, Path(max_length=64, examples=[PAPER])]
Name = Annotated[str, Path(max_length=64, examples=["table2"])]
HowMuch = Annotated[Scale, Query(description="full, or smoke: every path in minutes on a CPU, and no result.")]
Which = Annotated[Protocol, Query(description="What is followed where the paper's text and programs differ.")]


@router.get("", operation_id="listPresets", responses=shown(PRESETS), response_model=list[PresetOut])
def index(who: Reader) -> list[PresetOut]:
    """The tables and figures that can be asked for."""
    return [PresetOut.model_validate(preset) for preset in presets()]


@router.get("/{paper}/{name}", operation_id="getPreset", responses=shown(PRESET_SPEC), response_model=ExperimentSpec)
def show(paper: Paper, name: Name, who: Reader, scale: HowMuch = Scale.FULL, protocol: Which = Protocol.CODE) -> Any:
    """A preset as a spec, to be changed and posted."""
    return preset_spec(f"{paper}/{name}", scale=scale, protocol=protocol)


@router.post(
    "/{paper}/{name}",
    status_code=201,
    operation_id="createPresetExperiment",
    responses=shown(CREATED, 201) | DRY_RUN,
    response_model=ExperimentOut,
)
def create(
    paper: Paper,
    name: Name,
    response: Response,
    database: Db,
    settings: Config,
    who: Submitter,
    scale: HowMuch = Scale.FULL,
    protocol: Which = Protocol.CODE,
    dry: DryRun = False,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Posts a preset as it is."""
    spec = ExperimentSpec.model_validate(preset_spec(f"{paper}/{name}", scale=scale, protocol=protocol))
    draft = Draft(spec, expand_grid(spec, max_trials=settings.max_trials))
    if dry:
        return dry_run(draft, who, database)
    return store_draft(database, who, draft, response, idempotency_key, spec.model_dump(mode="json"))
