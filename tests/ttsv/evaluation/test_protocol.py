import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ttsv.constraints import Clip, Divide
from ttsv.data import load_dataset
from ttsv.evaluation.evaluated import evaluate_network
from ttsv.evaluation.protocol import layer_records
from ttsv.evaluation.subject import EvaluationOptions, Subject
from ttsv.layers import SOC, tensorize
from ttsv.metrics.accuracy import run_to_end
from ttsv.models import create_model
from ttsv.spectral.network import model_spectra
from ttsv.training.record import LayerRecord


def plain(records: list[LayerRecord]) -> list[dict[str, Any]]:
    """The records as they come back from a file."""
    found: list[dict[str, Any]] = json.loads(json.dumps([asdict(record) for record in records]))
    return found


def test_records_of_a_divided_network_say_what_the_bounds_are_worth(tmp_path: Path) -> None:
    """Convolutions first, then what else was projected, with an empty input size."""
    data = load_dataset("digits", tmp_path)
    torch.manual_seed(0)
    model = create_model("small-cnn", num_classes=10, in_channels=1, image_size=8)
    divide = Divide(0.5, 0.25, 0.75)
    divide.bind(model, 8, in_channels=1)
    divide.project(model, 1, force=True)
    records = plain(layer_records(model, data, divide.report()))
    stored = Divide(0.5, 0.25, 0.75)
    stored.load_state_dict(json.loads(json.dumps(Divide.state_dict(divide), default=str, sort_keys=True)))
    assert [asdict(record) for record in layer_records(model, data, stored.report())] == records
    assert [asdict(LayerRecord.from_dict(record)) for record in records] == records
    assert [record["name"] for record in records] == ["conv1", "conv2", "conv3", "norm1", "norm2", "norm3", "head"]
    largest = model_spectra(model, 8)
    for record in records[:3]:
        assert record["kind"] == "Conv2d"
        assert record["input_size"] != []
        assert record["largest"] == pytest.approx(largest[record["name"]].max().item(), rel=1e-6)
        assert "rigorous upper bound" in record["projection"]["measure"]
        assert record["projection"]["before"] == record["largest_before_projection"]
    head, norm = records[6], records[3]
    assert (head["kind"], head["shape"], head["input_size"]) == ("Linear", {"weight": [10, 64]}, [])
    norm_now = torch.linalg.matrix_norm(model.get_parameter("head.weight").detach(), 2).item()
    assert head["largest"] == head["projection"]["after"] == pytest.approx(norm_now)
    assert head["largest_before_projection"] > 0.25
    assert norm["kind"] == "BatchNorm2d"
    assert norm["largest"] == 0.75
    assert norm["projection"]["measure"].startswith("batch norm's max")


def test_kinds_are_those_of_the_classes_without_their_parametrizations(tmp_path: Path) -> None:
    data = load_dataset("digits", tmp_path)
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(1, 4, 3, padding=1)),
        tensorize(nn.Conv2d(4, 6, 3, padding=1), 2, frames="orthonormal"),
    )
    records = plain(layer_records(model, data, Clip(1.0).report()))
    assert [record["kind"] for record in records] == ["Conv2d", "TTConv2d"]
    assert records[1]["shape"] == {"k1": [4, 2], "core": [2, 2, 3, 3], "k3": [2, 6]}
    assert all(record["projection"] is None for record in records)


def test_a_network_left_in_training_mode_is_looked_at_in_evaluation_mode(tmp_path: Path) -> None:
    """As training leaves it: spectra are of the network whose accuracy is measured, and looking changes no buffer."""
    data = load_dataset("digits", tmp_path)
    torch.manual_seed(0)
    normalized = parametrizations.spectral_norm(nn.Conv2d(1, 4, 3, padding=1))
    model = nn.Sequential(normalized, SOC(4, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(256, 10)).train()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    subject = Subject(model=model, data=data, mean=(0.0,), std=(1.0,))
    found = run_to_end(evaluate_network(subject, EvaluationOptions(folder=tmp_path, images=20, layers=True)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, True, False, True, True]
    assert found.layers is not None
    _, skew = found.layers.records
    assert skew.largest == pytest.approx(1, abs=1e-5)
    assert model_spectra(model, 8)["1"].max() > 1 + 1e-4, "the case must tell the two modes apart"


def test_a_floor_is_recorded(tmp_path: Path) -> None:
    data = load_dataset("digits", tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1))
    clip = Clip(1.0, floor=0.5, rounds=50)
    clip.bind(model, 8)
    clip.project(model, 0)
    (record,) = plain(layer_records(model, data, clip.report()))
    assert record["projection"]["smallest"] == pytest.approx(record["smallest"], rel=1e-5)
    assert record["smallest"] > 0.45
