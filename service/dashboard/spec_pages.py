"""The pages on which experiments begin: presets, and the form that takes a spec."""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Db
from service.dashboard.rendering import PageRoute, Show
from service.dashboard.wording import document
from service.experiments import store
from service.paper.presets import PAPER, Protocol, Scale, preset_spec, presets
from service.paper.reference import preset_table
from service.specs.spec import ExperimentSpec

router = APIRouter(route_class=PageRoute, include_in_schema=False)

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


@router.get("/presets")
def every(show: Show) -> HTMLResponse:
    """The paper's tables and figures."""
    tables = {preset.name: preset_table(preset) for preset in presets()}
    addresses = {name: f"/tables/{PAPER}/{table.name}" for name, table in tables.items() if table}
    return show("presets.html", presets=[(preset, addresses.get(preset.name)) for preset in presets()])


@router.get("/submit")
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
    spec, origin = START, "An example to begin with."
    if preset is not None:
        spec = preset_spec(preset, scale=scale, protocol=protocol)
        origin = f"The preset {preset}, scale {scale.value}."
    elif experiment is not None:
        with database.read() as session:
            found = store.get_experiment(session, experiment, project_id=who.project_id)
            spec, origin = found.spec, f"The spec of experiment {experiment}."
    return show("submit.html", text=document(spec), origin=origin, fields=list(ExperimentSpec.model_fields))
