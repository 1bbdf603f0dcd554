"""/v1/presets: the paper's tables and figures as specs."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from service.api.dry_run import DRY_RUN
from service.api.http.authentication import Reader
from service.api.http.examples import Example, shown
from service.api.http.problems import RESPONSES
from service.api.openapi_examples.experiments import CREATED, SPEC
from service.api.submission import SpecSubmission
from service.paper.presets import PAPER, Scale, preset_spec, presets
from service.paper.recipes import Protocol
from service.schemas.experiments import NewExperimentOut, PresetOut
from service.specs.spec import ExperimentSpec

router = APIRouter(prefix="/v1/presets", tags=["presets"], responses=RESPONSES)

Paper = Annotated[str, Path(max_length=64, description="The paper's key.", examples=[PAPER])]
Name = Annotated[str, Path(max_length=64, description="Which of its tables or figures.", examples=["table2"])]
HowMuch = Annotated[Scale, Query(description="full, or smoke: every path in minutes on a CPU, and no result.")]
Which = Annotated[Protocol, Query(description="What is followed where the paper's text and programs differ.")]


PRESETS: list[Example] = [
    {"name": "senderovich2022/table2", "title": "Clipping and division in WRN-16-10 on CIFAR-10"},
]

PRESET_SPEC: Example = SPEC | {
    "name": "senderovich2022/figure-speedup (smoke, code)",
    "notes": "Time of the exact spectrum of a TT layer, n = 16.",
    "base": {"model": "single-conv", "layer": "tt", "training": {"epochs": 2, "steps": 2, "batch_size": 8}},
    "variants": [{"dataset": "synthetic:16x16x16:10:100"}, {"dataset": "synthetic:24x16x16:10:100"}],
    "grid": {"rank": [None, 0.25]},
}


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
    responses=shown(CREATED | {"warnings": []}, 201, "Location") | DRY_RUN,
    response_model=NewExperimentOut,
)
def create(
    paper: Paper,
    name: Name,
    posted: Annotated[SpecSubmission, Depends()],
    scale: HowMuch = Scale.FULL,
    protocol: Which = Protocol.CODE,
) -> Any:
    """Posts a preset as it is."""
    return posted.post(ExperimentSpec.model_validate(preset_spec(f"{paper}/{name}", scale=scale, protocol=protocol)))
