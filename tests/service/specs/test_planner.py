"""Fields of a spec that have no effect are named: an axis of one would be a mistake that nobody sees."""

from collections.abc import Mapping
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from service.paper.presets import Scale, preset_spec, presets
from service.paper.recipes import Protocol
from service.specs.grid import expand_grid
from service.specs.planner import warnings
from service.specs.spec import ExperimentSpec

BASE = {"dataset": "digits", "model": "small-cnn"}
AXES: dict[str, list[Any]] = {
    "layer": ["dense", "tt", "soc", "soc-tt"],
    "rank": [None, 4],
    "frames": ["free", "orthonormal"],
    "lambda_ort": [0.0, 1.0],
    "ort_normalizer": ["paper", "code"],
    "constraint": ["none", "clip", "divide"],
    "delta": [None, 1.0],
    "clipping.every": [100, 20],
    "division.conv": [None, 2.0],
    "division.every": [1, 5],
    "training.schedule": ["constant", "multistep"],
    "training.milestones": [[], [1]],
    "training.precision": ["float32", "bf16"],
    "training.convolutions": ["winograd", "direct"],
    "augmentation.padding": ["zeros", "symmetric"],
    "evaluation.certified": [False, True],
    "evaluation.radii": [[1.0], [2.0]],
}


def _warned(spec: Mapping[str, Any]) -> list[str]:
    parsed = ExperimentSpec.model_validate({"name": "idle", **spec})
    return warnings(parsed, expand_grid(parsed, max_trials=10_000))


def _without(path: str, spec: dict[str, Any]) -> set[str]:
    """The trials of the spec with the axis taken away, by fingerprint."""
    grid = {axis: values for axis, values in spec["grid"].items() if axis != path}
    return {trial.fingerprint for trial in _plan(spec | {"grid": grid})}


def _plan(spec: dict[str, Any]) -> list[Any]:
    return expand_grid(ExperimentSpec.model_validate({"name": "idle"} | spec), max_trials=10_000).trials


@given(st.dictionaries(st.sampled_from(list(AXES)), st.booleans(), max_size=6))
def test_warned_of_are_the_axes_whose_values_make_no_trial(both: dict[str, bool]) -> None:
    grid = {path: AXES[path] if whole else AXES[path][-1:] for path, whole in both.items()}
    spec = {"base": BASE, "grid": grid}
    warned = {warning.split()[0] for warning in _warned(spec)}
    trials = {trial.fingerprint for trial in _plan(spec)}
    assert warned == {f"grid.{path}" for path in grid if _without(path, spec) == trials}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"grid": {"delta": [0.5, 1.0]}}, ["grid.delta has an effect in no trial: it needs constraint: clip"]),
        ({"grid": {"delta": [0.5, 1.0], "constraint": ["none", "clip"]}}, []),
        ({"base": BASE | {"rank": 4}}, ["rank has an effect in no trial: it needs layer: tt or soc-tt"]),
        ({"base": BASE | {"constraint": "clip"}}, ["constraint has an effect in no trial: it needs a delta"]),
        ({"variants": [{"layer": "tt"}, {"rank": 3}]}, ["layer has an effect", "rank has an effect"]),
        ({"base": BASE | {"clipping": {"every": 7}}}, ["clipping.every has an effect in no trial"]),
        ({"base": BASE | {"training": {"milestones": [3]}}}, ["training.milestones has an effect in no trial"]),
        (
            {"base": BASE | {"training": {"schedule": "multistep", "epochs": 3, "milestones": [3, 9], "gamma": 0.5}}},
            [
                "training.gamma has an effect in no trial: it needs schedule: multistep, and a milestone before",
                "training.milestones has an effect in no trial: it needs schedule: multistep, and an epoch before",
            ],
        ),
        (
            {
                "base": BASE | {"training": {"schedule": "multistep", "milestones": [3]}},
                "grid": {"training.epochs": [3, 4]},
            },
            [],
        ),
        (
            {
                "base": BASE | {"training": {"schedule": "multistep", "milestones": [2, 3, 4, 9]}},
                "grid": {"training.epochs": [3, 4]},
            },
            ["training.milestones: 4, 9 has an effect in no trial: it needs more epochs"],
        ),
        (
            {"base": BASE | {"training": {"epochs": 3}}, "scheduler": {"type": "asha", "grace_epochs": 3}},
            ["scheduler.grace_epochs has an effect in no trial: it needs a trial of more epochs"],
        ),
        (
            {"base": BASE, "grid": {"training.epochs": [3, 4]}, "scheduler": {"type": "asha", "grace_epochs": 3}},
            [],
        ),
        (
            {
                "base": BASE | {"constraint": "clip", "delta": 1.0},
                "grid": {"clipping.operator": ["periodic", "zero-padded"], "clipping.rescale": [False]},
            },
            ["grid.clipping.operator has an effect in no trial: it needs constraint: clip, a delta, and rescale: true"],
        ),
        ({"base": BASE | {"mean": [0.5], "std": [0.5]}}, []),
        (
            {
                "search": {
                    "algorithm": "random",
                    "trials": 5,
                    "metric": "val_accuracy",
                    "space": {"delta": {"uniform": [0.5, 1.0]}},
                }
            },
            ["search.space.delta has an effect in none of the points tried: it needs constraint: clip"],
        ),
    ],
)
def test_the_place_and_the_fix_are_named(spec: dict[str, Any], expected: list[str]) -> None:
    found = _warned({"base": BASE} | spec)
    assert len(found) == len(expected)
    assert all(warning.startswith(start) for warning, start in zip(found, expected, strict=True)), found


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("name", [preset.name for preset in presets()])
def test_presets_have_none(name: str, scale: Scale, protocol: Protocol) -> None:
    assert _warned(preset_spec(name, scale=scale, protocol=protocol)) == []


def test_the_api_tells_whether_it_stores_or_not(api: TestClient) -> None:
    spec = {"name": "idle", "base": BASE, "grid": {"delta": [0.5, 1.0], "seed": [0, 1]}}
    dry = api.post("/v1/experiments?dry_run=true", json=spec).json()
    headers = {"Idempotency-Key": "once"}
    first, again = (api.post("/v1/experiments", json=spec, headers=headers).json() for _ in range(2))
    assert (dry["grid_points"], dry["trial_count"]) == (first["grid_points"], first["trial_count"]) == (4, 2)
    assert dry["warnings"] == first["warnings"] == ["grid.delta has an effect in no trial: it needs constraint: clip"]
    assert again == first
