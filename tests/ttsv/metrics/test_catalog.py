"""The catalogue says all of every metric, and results have its numbers."""

import dataclasses

import pytest
import torch

from tests.results import made_result
from ttsv.evaluation.evidence import Evidence
from ttsv.evaluation.summary import columns
from ttsv.metrics.calibration import calibration_record
from ttsv.metrics.catalog import CERTIFIED_RADII, METRICS, MetricInfo, in_column_order
from ttsv.results import TrialResult


@pytest.mark.parametrize("info", METRICS.values(), ids=lambda info: info.name)
def test_an_entry_says_what_it_is(info: MetricInfo) -> None:
    assert METRICS[info.name] is info
    assert info.name.isidentifier()
    assert len(info.name) <= 40  # as many characters as the order of leaderboards keeps
    assert info.heading
    assert info.group
    assert info.definition[0].isupper()
    assert info.definition.endswith(".")
    assert not set("|*`") & set(info.definition)  # it is shown on pages, too
    assert info.in_words.endswith(".")


def test_headings_tell_metrics_apart() -> None:
    assert len({info.title for info in METRICS.values()}) == len(METRICS)


def test_the_peak_of_memory_says_of_which_epochs_it_is() -> None:
    assert "several epochs without the first" in METRICS["peak_memory"].definition


@pytest.mark.parametrize(
    ("name", "title", "stored", "shown"),
    [
        ("ece", "ECE (%)", 0.125, 12.5),
        ("step_seconds", "step (ms)", 0.25, 250.0),
        ("train_seconds", "training (s)", 2.5, 2.5),
        ("peak_memory", "peak GPU memory (MiB)", 3 * 2**20, 3.0),
        ("parameters", "parameters (millions)", 2_500_000, 2.5),
        ("brier", "Brier score", 0.5, 0.5),
        ("certified_36", "certified at 36/255 (%)", 0.5, 50.0),
        ("certified_255", "certified at 1 (%)", 0.5, 50.0),
        ("assumed_certified_72", "p.r. at 72/255, L = 1 assumed (%)", 0.5, 50.0),
    ],
)
def test_people_read_units(name: str, title: str, stored: float, shown: float) -> None:
    assert METRICS[name].title == title
    assert stored * METRICS[name].factor == pytest.approx(shown, rel=1e-15)


def test_a_result_has_every_metric() -> None:
    fields = {field.name: field for field in dataclasses.fields(TrialResult)}
    assert fields.keys() > METRICS.keys()
    for name, info in METRICS.items():
        assert (fields[name].default is None) == (info.presence == "optional")
    result = made_result(brier=0.5)
    assert (result.accuracy, result.brier, result.temperature) == (0.5, 0.5, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.accuracy = 0.75
    with pytest.raises(TypeError, match="sharpness"):
        made_result(sharpness=0.5)


def test_an_evaluation_gives_metrics_and_what_its_stages_add() -> None:
    logits, labels = torch.eye(4), torch.arange(4)
    evidence = Evidence(
        images=torch.zeros(4, 1, 2, 2), labels=labels, logits=logits, calibration=calibration_record(logits, labels)
    )
    found = columns(evidence, None)
    assert found.keys() < METRICS.keys()
    assert found["accuracy"] == 1.0
    evidence.numbers["sharpness"] = 0.25
    assert columns(evidence, None) == found | {"sharpness": 0.25}


def test_new_columns_come_last() -> None:
    names = list(in_column_order(dict.fromkeys(["sharpness", *METRICS, "selected_epoch"])))
    assert names[:3] == ["accuracy", "loss", "ece"]
    assert names[16:19] == ["spectrum_memory", "selected_epoch", "top5_accuracy"]
    assert names[-2:] == ["merged_batch_seconds", "sharpness"]
    assert set(names) == {"sharpness", "selected_epoch", *METRICS}


def test_radii_are_those_of_the_names() -> None:
    assert CERTIFIED_RADII == {
        "certified_36": 36 / 255,
        "certified_72": 72 / 255,
        "certified_108": 108 / 255,
        "certified_255": 1.0,
    }
