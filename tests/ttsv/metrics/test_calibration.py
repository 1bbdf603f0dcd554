import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lazily import lazily
from ttsv.errors import ConfigError
from ttsv.metrics.accuracy import cross_entropy
from ttsv.metrics.calibration import (
    TEMPERATURES,
    CalibrationValues,
    adaptive_calibration_error,
    brier_score,
    calibration_record,
    expected_calibration_error,
    fit_temperature,
    maximum_calibration_error,
    negative_log_likelihood,
    reliability_diagram,
)

optimize = lazily("scipy.optimize")
metrics = lazily("sklearn.metrics")

Image = tuple[float, bool]
"""Confidence, and whether the class is right."""


def images_of(rows: list[list[float]], labels: list[int]) -> list[Image]:
    found = []
    for row, label in zip(rows, labels, strict=True):
        exponentials = [math.exp(value - max(row)) for value in row]
        found.append((max(exponentials) / math.fsum(exponentials), row.index(max(row)) == label))
    return found


def brute_force_bins(images: list[Image], bins: int) -> list[list[Image]]:
    return [[image for image in images if i / bins < image[0] <= (i + 1) / bins] for i in range(bins)]


def gap(members: list[Image]) -> float:
    return abs(sum(right for _, right in members) - math.fsum(c for c, _ in members)) / len(members)


def brute_force_adaptive(images: list[Image], bins: int) -> float:
    """Runs of the sorted images, one at a time; equal confidences share what is right among them."""
    shared = []
    for confidence, _ in sorted(images):
        tie = [right for other, right in images if other == confidence]
        shared.append((confidence, sum(tie) / len(tie)))
    error, start = 0.0, 0
    for index in range(bins):
        end = start + len(images) // bins + (index < len(images) % bins)
        error += abs(math.fsum(right - confidence for confidence, right in shared[start:end]))
        start = end
    assert start == len(images)
    return error / len(images)


@st.composite
def predictions(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    classes = draw(st.integers(2, 6))
    rows = draw(
        st.lists(st.lists(st.floats(-30, 30), min_size=classes, max_size=classes), min_size=1, max_size=40),
    )
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=len(rows), max_size=len(rows)))
    return rows, labels


@given(predictions(), st.integers(1, 20))
def test_measures_are_their_definitions(drawn: tuple[list[list[float]], list[int]], bins: int) -> None:
    rows, labels = drawn
    logits, target = torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)
    confidences = logits.softmax(1).amax(1)
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    distance = (confidences[:, None] - edges).abs()
    others = (confidences[:, None] - confidences).abs()
    # A rounding from an edge, or from each other, loops and tensors may bin differently; no definition has the case.
    if ((distance < 1e-12) & (distance > 0)).any() or ((others < 1e-12) & (others > 0)).any():
        return
    images = [(c.item(), right) for c, (_, right) in zip(confidences, images_of(rows, labels), strict=True)]
    filled = [members for members in brute_force_bins(images, bins) if members]
    expected = sum(len(members) / len(images) * gap(members) for members in filled)
    assert expected_calibration_error(logits, target, bins) == pytest.approx(expected, abs=1e-7)
    assert maximum_calibration_error(logits, target, bins) == pytest.approx(max(map(gap, filled)), abs=1e-7)
    adaptive = adaptive_calibration_error(logits, target, bins)
    assert adaptive == pytest.approx(brute_force_adaptive(images, bins), abs=1e-7)
    assert 0 <= adaptive <= 1 + 1e-12


@given(predictions(), st.integers(1, 20))
def test_reliability_diagram_is_its_definition(drawn: tuple[list[list[float]], list[int]], bins: int) -> None:
    rows, labels = drawn
    logits, target = torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)
    found = reliability_diagram(logits, target, bins)
    confidences = logits.softmax(1).amax(1).tolist()
    images = [(c, right) for c, (_, right) in zip(confidences, images_of(rows, labels), strict=True)]
    members = brute_force_bins(images, bins)
    assert found.edges == [i / bins for i in range(bins + 1)]
    assert found.count == [len(bin_) for bin_ in members]
    for bin_, confidence, accuracy in zip(members, found.confidence, found.accuracy, strict=True):
        if bin_:
            assert confidence == pytest.approx(math.fsum(c for c, _ in bin_) / len(bin_), abs=1e-7)
            assert accuracy == sum(right for _, right in bin_) / len(bin_)
        else:
            assert confidence is None
            assert accuracy is None


@given(predictions())
def test_proper_scores_are_their_definitions(drawn: tuple[list[list[float]], list[int]]) -> None:
    rows, labels = drawn
    logits, target = torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)
    likelihood, score = [], []
    for row, label in zip(rows, labels, strict=True):
        total = math.fsum(math.exp(value - max(row)) for value in row)
        likelihood.append(math.log(total) - (row[label] - max(row)))
        score.append(sum((math.exp(v - max(row)) / total - (k == label)) ** 2 for k, v in enumerate(row)))
    mean_likelihood, mean_score = (math.fsum(values) / len(rows) for values in (likelihood, score))
    assert negative_log_likelihood(logits, target) == pytest.approx(mean_likelihood, abs=1e-7)
    assert brier_score(logits, target) == pytest.approx(mean_score, abs=1e-7)
    assert 0 <= brier_score(logits, target) <= 2


def trained_like(count: int, classes: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Logits that are `scale` times those under which the labels were drawn: the best temperature is about `scale`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return scale * logits, labels


def test_proper_scores_agree_with_scikit_learn() -> None:
    logits, labels = trained_like(200, 5, 1.5, 0)
    probabilities, classes = logits.softmax(1).numpy(), np.arange(5)
    expected = metrics.log_loss(labels.numpy(), probabilities, labels=classes)
    assert negative_log_likelihood(logits, labels) == pytest.approx(expected, abs=1e-12)
    expected = metrics.brier_score_loss(labels.numpy(), probabilities, labels=classes, scale_by_half=False)
    assert brier_score(logits, labels) == pytest.approx(expected, abs=1e-12)


def test_adaptive_error_does_not_depend_on_the_order_of_images() -> None:
    # Of 30 images of one confidence the first half is right; by that order the runs would be all right and all wrong.
    logits = torch.tensor([[1.0, 0.0]]).repeat(30, 1)
    labels = torch.tensor([0] * 15 + [1] * 15)
    confidence = 1 / (1 + math.exp(-1))
    assert adaptive_calibration_error(logits, labels, bins=3) == pytest.approx(confidence - 0.5, abs=1e-12)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert adaptive_calibration_error(logits, labels[order], bins=3) == pytest.approx(confidence - 0.5, abs=1e-12)


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
def test_temperature_has_the_least_likelihood_loss(scale: float) -> None:
    logits, labels = trained_like(2000, 10, scale, 1)
    found = fit_temperature(logits, labels)
    # The best 1/T by another minimiser, over the definition.
    best = optimize.minimize_scalar(
        lambda log_t: cross_entropy(logits / math.exp(log_t), labels),
        bounds=(-4, 4),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert found == pytest.approx(math.exp(best.x), rel=1e-5)
    assert found == pytest.approx(scale, rel=0.1)


def test_temperature_at_its_bounds() -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    assert fit_temperature(logits, torch.tensor([0, 1])) == TEMPERATURES[0]  # all right: the surer, the better
    assert fit_temperature(logits, torch.tensor([1, 0])) == TEMPERATURES[1]  # all wrong: the less sure, the better
    assert fit_temperature(torch.full((4, 3), 7.3), torch.tensor([0, 1, 2, 0])) == 1


def test_record_scales_by_the_temperature_of_the_validation_logits_alone() -> None:
    logits, labels = trained_like(500, 4, 3.0, 2)
    validation_logits, validation_labels = trained_like(400, 4, 2.0, 3)
    record = calibration_record(
        logits, labels, validation_logits=validation_logits, validation_labels=validation_labels, bins=7
    )
    temperature = fit_temperature(validation_logits, validation_labels)
    assert (record.bins, record.images, record.validation_images) == (7, 500, 400)
    assert record.temperature == temperature
    assert temperature != pytest.approx(fit_temperature(logits, labels), rel=0.1)
    assert record.raw == values(logits, labels, 7)
    assert record.scaled == values(logits / temperature, labels, 7)
    assert record.scaled.ece < record.raw.ece
    plain = asdict(record)
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.filterwarnings("error")
def test_logits_with_a_gradient_are_as_good() -> None:
    logits, labels = trained_like(50, 4, 1.0, 0)
    with_gradient = logits.clone().requires_grad_()
    assert values(with_gradient, labels, 15) == values(logits, labels, 15)
    assert fit_temperature(with_gradient, labels) == fit_temperature(logits, labels)


def test_labels_of_bytes_are_no_mask() -> None:
    logits, labels = trained_like(40, 4, 2.0, 5)
    pairs: dict[str, Any] = {"validation_logits": logits[:20], "validation_labels": labels[:20]}
    small = pairs | {"validation_labels": labels[:20].byte()}
    assert calibration_record(logits, labels.byte(), **small) == calibration_record(logits, labels, **pairs)


def values(logits: Tensor, labels: Tensor, bins: int) -> CalibrationValues:
    return CalibrationValues(
        ece=expected_calibration_error(logits, labels, bins),
        mce=maximum_calibration_error(logits, labels, bins),
        adaptive_ece=adaptive_calibration_error(logits, labels, bins),
        nll=negative_log_likelihood(logits, labels),
        brier=brier_score(logits, labels),
        reliability=reliability_diagram(logits, labels, bins),
    )


def test_record_without_validation_logits() -> None:
    logits, labels = trained_like(50, 4, 1.0, 4)
    record = calibration_record(logits, labels)
    assert (record.bins, record.validation_images, record.temperature, record.scaled) == (15, 0, None, None)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"logits": torch.zeros(0, 3), "labels": torch.zeros(0, dtype=torch.long)}, "logits"),
        ({"logits": torch.zeros(3)}, "logits"),
        ({"logits": torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, 0.0]])}, "logits"),
        ({"labels": torch.tensor([0, 3])}, "labels"),
        ({"labels": torch.tensor([0, -1])}, "labels"),
        ({"labels": torch.tensor([0.0, 1.0])}, "labels"),
        ({"labels": torch.tensor([False, True])}, "labels"),
        ({"labels": torch.tensor([0])}, "labels"),
        ({"bins": 0}, "bins"),
        ({"bins": 2.5}, "bins"),
        ({"bins": True}, "bins"),
        ({"bins": "3"}, "bins"),
        ({"validation_logits": torch.zeros(2, 3)}, "validation_labels"),
        ({"validation_labels": torch.tensor([0])}, "validation_logits"),
        ({"validation_logits": torch.zeros(1, 4), "validation_labels": torch.tensor([0])}, "validation_logits"),
        ({"validation_logits": torch.zeros(1, 3), "validation_labels": torch.tensor([3])}, "validation_labels"),
        (
            {"validation_logits": torch.full((1, 3), math.inf), "validation_labels": torch.tensor([0])},
            "validation_logits",
        ),
    ],
)
def test_refusals_name_the_argument(changed: dict[str, Any], field: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 3), "labels": torch.tensor([0, 1])} | changed
    with pytest.raises(ConfigError) as caught:
        calibration_record(**arguments)
    assert caught.value.field == field
