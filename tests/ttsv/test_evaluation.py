import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ttsv.checkpoint import save_model
from ttsv.config import TrialConfig
from ttsv.data import load_dataset
from ttsv.errors import ConfigError, DataError
from ttsv.evaluation import evaluate, violations
from ttsv.metrics.accuracy import accuracy, predict
from ttsv.models import create_model
from ttsv.trial import run_trial


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The saved network of a short trial, and its accuracy."""
    folder = tmp_path_factory.mktemp("trained")
    config = TrialConfig.from_dict(
        {"dataset": "digits", "model": "small-cnn", "layer": "tt", "rank": 8, "training": {"epochs": 3}}
    )
    *_, result = run_trial(config, data_dir=folder / "data", folder=folder / "trial", device="cpu")
    return result.artifacts["model"], result.accuracy  # type: ignore[union-attr]


def test_every_metric_of_a_trials_network(trained: tuple[Path, float], tmp_path: Path) -> None:
    path, reached = trained
    steps: list[str] = []
    record = evaluate(path, "digits", tmp_path, progress=steps.append)
    assert json.dumps(record, allow_nan=False)
    assert steps == ["accuracy", "calibration", "certified", "lipschitz"]
    results = record["results"]
    assert results["accuracy"] == pytest.approx(reached)
    assert record["violations"] == []
    assert results["calibration"]["temperature"] > 0
    assert results["calibration"]["images"] == record["protocol"]["images"] == 359
    certified = results["certified"]
    values = list(certified["accuracy"].values())
    assert values == sorted(values, reverse=True)
    found = {(one["space"], one["method"]): one["maximum"] for one in results["lipschitz"]}
    assert len(found) == 4
    assert found["pixels", "fgsm"] == pytest.approx(2 * found["normalised", "fgsm"], rel=0.2)  # std is 1/2
    assert found["pixels", "fgsm"] <= found["pixels", "ascent"] * 1.001
    assert found["pixels", "ascent"] <= certified["bound"]
    assert sum(results["lipschitz"][0]["histogram"]["counts"]) == 359


def test_a_part_of_it(trained: tuple[Path, float], tmp_path: Path) -> None:
    path, _ = trained
    record = evaluate(path, "digits", tmp_path, metrics=["calibration"], images=50)
    assert set(record["results"]) == {"accuracy", "loss", "calibration"}
    data = load_dataset("digits", tmp_path)
    arguments = json.loads(path.with_name("model.json").read_bytes())["model"]
    model = create_model(**arguments)
    model.load_state_dict(load_file(path))
    assert record["results"]["accuracy"] == accuracy(predict(model, data.test.images[:50]), data.test.labels[:50])


def test_refusals(trained: tuple[Path, float], tmp_path: Path) -> None:
    path, _ = trained
    with pytest.raises(ConfigError, match="metrics = 'speed': must be one of calibration, certified, lipschitz"):
        evaluate(path, "digits", tmp_path, metrics=["speed"])
    with pytest.raises(ConfigError, match="images = 0: must be at least 1"):
        evaluate(path, "digits", tmp_path, images=0)
    with pytest.raises(ConfigError, match="must be a data set whose in_channels is 1"):
        evaluate(path, "synthetic", tmp_path)
    with pytest.raises(DataError, match=r"give the model\.safetensors"):
        evaluate(tmp_path / "weights.pt", "digits", tmp_path)


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"name": "small-cnn", "num_classes": 10, "in_channels": 1, "image_size": 8}
    arguments |= {"mean": [0.5], "std": [0.5]}
    model = create_model(**arguments)
    with torch.no_grad():
        model.get_parameter("head.bias")[3] = float("inf")
    path = save_model(tmp_path, model, arguments)
    with pytest.raises(DataError, match="logits are not finite"):
        evaluate(path, "digits", tmp_path)


def test_what_cannot_be_true_is_said() -> None:
    good: dict[str, Any] = {
        "accuracy": 0.5,
        "calibration": {"raw": {"ece": 0.1}},
        "certified": {"bound": 2.0, "accuracy": {"0.1": 0.5}},
        "lipschitz": [{"space": "pixels", "method": "fgsm", "maximum": 2.0}],
    }
    assert violations(good) == []
    assert violations({"accuracy": 0.5}) == []
    for change, said in (
        ({"accuracy": 0.4}, "above the accuracy"),
        ({"calibration": {"raw": {"ece": 1.5}}}, "outside"),
        ({"lipschitz": [{"space": "pixels", "method": "fgsm", "maximum": 2.1}]}, "above the bound"),
    ):
        (found,) = violations(good | change)
        assert said in found
