"""What is wrong with a spec is said at once: its form, its fields, its data, and how they go together."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.errors import SpecError
from service.specs.grid import expand_grid
from service.specs.planner import PlannedTrial, Planner
from service.specs.spec import ExperimentSpec
from tests.service.api.test_own_data import POSTED
from ttsv.config.fields import FieldValues

BASE = {"dataset": "digits", "model": "small-cnn"}
STRIDED = {"model": "lipconvnet-5", "layer": "bcop", "constraint": "clip", "delta": 1}
CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"base": {"dataset": "npz:gone", "model": "torchvision:resnet1"}},
        {"model": "torchvision has", "dataset": "npz:gone needs"},
    ),
    (
        {"base": {"dataset": "npz:gone"} | STRIDED},
        {"constraint": "must be none", "dataset": "npz:gone needs"},
    ),
    (
        {"base": {"dataset": "npz:text", "evaluation": {"corruptions": "published"}} | STRIDED},
        {"constraint": "must be none", "dataset": "datasets/text.npz", "evaluation.corruptions": "must be generated"},
    ),
    (
        {"nam": "x", "repeat": "y", "base": {"model": "nonet", "training": {"lr": -1}, "dataset": "digits"}},
        {"nam": "unknown", "repeat": "whole number", "base.model": "must be one of", "base.training.lr": "above 0"},
    ),
    (
        {
            "base": BASE,
            "grid": {"layer": ["bcop", "sock", "aol"], "training.lr": [0, 1], "constraint": ["clip"], "delta": [1]},
        },
        {"grid.layer[1]": "must be one of", "grid.training.lr[0]": "must be", "constraint": "layers aol"},
    ),
    (
        {"base": BASE | {"evaluation": {"attack": "pgd", "attack_norm": "L1"}, "clipping": {"floor": 2}, "delta": 1}},
        {"evaluation.attack_norm": "for PGD", "clipping.floor": "at most delta"},
    ),
    (
        {
            "base": BASE,
            "variants": [{"layr": "tt"}, {"mean": [0, 0]}],
            "trials": [{"std": [1, 1], "training": {"x": 1}}],
        },
        {
            "variants[0].layr": "unknown",
            "mean": "one per channel",
            "std": "one per channel",
            "trials[0].training.x": "unknown",
        },
    ),
    (
        {"base": BASE, "grid": {"mean": [[0, 0], [0], [0, 0, 0]], "seed": [0, 1]}},
        {"mean": "not [0.0, 0.0] or [0.0, 0.0, 0.0]"},
    ),
]


@pytest.mark.parametrize(("spec", "said"), CASES)
def test_of_what_is_wrong_nothing_waits(sqlite_api: TestClient, spec: dict[str, Any], said: dict[str, str]) -> None:
    folder: Path = sqlite_api.app.state.settings.data_dir / "datasets"  # type: ignore[attr-defined]
    folder.mkdir()
    (folder / "text.npz").write_text("no images")
    answers = [sqlite_api.post(where, json={"name": "x"} | spec).json()["errors"] for where in POSTED]
    assert answers[0] == answers[1] == answers[2]
    found = {problem["field"]: problem["message"] for problem in answers[0]}
    assert found.keys() == said.keys()
    assert all(said[field] in message for field, message in found.items()), found


def test_of_ten_thousand_wrong_trials_a_part_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[FieldValues] = []
    plan = Planner.plan

    def watched(self: Planner, fields: FieldValues) -> PlannedTrial:
        looked.append(fields)
        return plan(self, fields)

    monkeypatch.setattr(Planner, "plan", watched)
    grid = {"training.lr": [(place + 1) / 10_000 for place in range(10_000)], "mean": [[0, 0]]}
    spec = ExperimentSpec.model_validate({"name": "x", "base": BASE, "grid": grid})
    with pytest.raises(SpecError, match="one per channel"):
        expand_grid(spec, max_trials=10_000)
    assert 1000 <= len(looked) < 5000
