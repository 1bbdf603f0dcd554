import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ttsv.errors import ConfigError, DataError, DivergedError, TrialError
from ttsv.metrics import cost
from ttsv.metrics.accuracy import accuracy, confusion_matrix, cross_entropy, odds_against, predict, top_accuracy
from ttsv.metrics.calibration import expected_calibration_error
from ttsv.metrics.corruption import corruption_accuracy


def brute_force_ece(logits: list[list[float]], labels: list[int], bins: int) -> float:
    """Straight from the definition, one bin and one image at a time."""
    images = []
    for row, label in zip(logits, labels, strict=True):
        exponentials = [math.exp(value - max(row)) for value in row]
        confidence = max(exponentials) / math.fsum(exponentials)
        images.append((confidence, row.index(max(row)) == label))
    error = 0.0
    for index in range(bins):
        members = [(c, right) for c, right in images if index / bins < c <= (index + 1) / bins]
        if members:
            mean_confidence = math.fsum(c for c, _ in members) / len(members)
            mean_accuracy = sum(right for _, right in members) / len(members)
            error += len(members) / len(images) * abs(mean_accuracy - mean_confidence)
    return error


@st.composite
def predictions(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    classes = draw(st.integers(2, 6))
    # Quarters make ties and equal confidences common; the floats make confidences anywhere.
    logit = st.one_of(st.integers(-8, 8).map(lambda n: n / 4), st.floats(-30, 30))
    rows = draw(st.lists(st.lists(logit, min_size=classes, max_size=classes), min_size=1, max_size=30))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=len(rows), max_size=len(rows)))
    return rows, labels


@given(predictions(), st.integers(1, 20))
def test_ece_is_its_definition(drawn: tuple[list[list[float]], list[int]], bins: int) -> None:
    rows, labels = drawn
    logits = torch.tensor(rows, dtype=torch.float64)
    found = expected_calibration_error(logits, torch.tensor(labels), bins=bins)
    # Two confidences a rounding apart may fall on the two sides of an edge; the definition has no such case.
    confidences = logits.softmax(1).max(1).values
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    distance = (confidences[:, None] - edges).abs()
    near = (distance < 1e-12) & (distance > 0)
    if not near.any():
        assert found == pytest.approx(brute_force_ece(rows, labels, bins), abs=1e-7)
    assert 0 <= found <= 1 + 1e-12


def test_ece_bins_are_closed_on_the_right() -> None:
    # Confidences 1/2 and just above it, one right and one wrong: with two bins, in different ones.
    above = math.log(0.5000001 / 0.4999999)
    logits = torch.tensor([[0.0, 0.0], [above, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1])
    assert expected_calibration_error(logits, labels, bins=2) == pytest.approx(0.5, abs=1e-6)
    # In one bin the two errors cancel.
    assert expected_calibration_error(logits, labels, bins=1) == pytest.approx(0, abs=1e-6)
    # Five equal logits have confidence 1/5, the right edge 3/15 of the third of 15 bins, not the fourth.
    equal = torch.zeros(1, 5)
    wider = torch.tensor([[math.log(0.21 / 0.79 * 4), 0.0, 0.0, 0.0, 0.0]])
    both = torch.cat([equal, wider])
    assert expected_calibration_error(both, torch.tensor([0, 1])) == pytest.approx(0.5 * (0.8 + 0.21), abs=1e-6)


def test_ece_of_known_predictions() -> None:
    certain = torch.tensor([[1000.0, 0.0], [0.0, 1000.0]])
    assert expected_calibration_error(certain, torch.tensor([0, 1])) == 0
    assert expected_calibration_error(certain, torch.tensor([1, 0])) == 1
    assert expected_calibration_error(certain, torch.tensor([0, 0])) == 0.5


@pytest.mark.parametrize(
    ("logits", "labels", "bins"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), 15),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), 15),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long), 15),
        (torch.zeros(2, 1), torch.zeros(2, dtype=torch.long), 15),
        (torch.tensor([[0.0, math.inf]]), torch.tensor([0]), 15),
        (torch.tensor([[0.0, math.nan]]), torch.tensor([0]), 15),
        (torch.zeros(1, 2), torch.tensor([0]), 0),
    ],
)
def test_ece_refuses(logits: Tensor, labels: Tensor, bins: int) -> None:
    with pytest.raises(ValueError, match=r"logits|bins"):
        expected_calibration_error(logits, labels, bins)


def test_accuracy_and_loss() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    assert accuracy(logits, labels) == pytest.approx(2 / 3)
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1)) + math.log1p(math.exp(3))) / 3
    assert cross_entropy(logits, labels) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("measure", [accuracy, cross_entropy, top_accuracy, confusion_matrix])
@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (torch.tensor([[0.0, math.nan]]), torch.tensor([0]), DivergedError, "not finite"),
        (torch.tensor([[0.0, math.inf]]), torch.tensor([0]), DivergedError, "not finite"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), DataError, "labels from 0 to 3"),
        (torch.zeros(2, 3), torch.tensor([-100, 1]), DataError, "labels from -100"),
        (torch.zeros(2, 3), torch.tensor([[0], [1]]), DataError, "want"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), DataError, "whole numbers"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), DataError, "want"),
        (torch.zeros(2), torch.tensor([0, 1]), DataError, "want"),
        (torch.zeros(2, 1), torch.tensor([0, 0]), DataError, "c >= 2"),
    ],
)
def test_accuracy_and_loss_refuse(
    measure: Callable[[Tensor, Tensor], object],
    logits: Tensor,
    labels: Tensor,
    error: type[TrialError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        measure(logits, labels)


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=5), st.integers(1, 6))
def test_of_equal_logits_the_first_classes_are_the_largest(rows: list[list[int]], count: int) -> None:
    """As a stable sort has them, and as accuracy takes them: constant logits get nothing that depends on a library."""
    for label in range(7):
        logits = torch.tensor(rows, dtype=torch.bfloat16)
        labels = torch.full((len(rows),), label, dtype=torch.uint8)
        hits = [label in sorted(range(7), key=lambda column: -row[column])[:count] for row in rows]
        assert top_accuracy(logits, labels, count) == sum(hits) / len(rows)
        assert top_accuracy(logits, labels, 1) == accuracy(logits, labels)


@pytest.mark.parametrize("classes", [2, 7])
def test_odds_against_have_the_direction_of_the_cross_entropy(classes: int) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(20, classes, dtype=torch.float64)).requires_grad_()
    labels = torch.arange(20) % classes
    loss = nn.functional.cross_entropy(logits, labels, reduction="none")
    against = odds_against(logits, labels)
    torch.testing.assert_close(against.exp().log1p(), loss)
    expected, found = (torch.autograd.grad(value.sum(), logits)[0] for value in (loss, against))
    torch.testing.assert_close(nn.functional.normalize(found), nn.functional.normalize(expected))
    sure = torch.tensor([[1e4, 0.0]]).requires_grad_()
    assert torch.autograd.grad(odds_against(sure, torch.tensor([0])), sure)[0].tolist() == [[-1, 1]]


def test_top_accuracy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 100, generator=generator), torch.randint(100, (50,), generator=generator)
    logits[torch.arange(20), labels[:20]] += 3
    for count in (1, 3, 5):
        rows = zip(logits, labels, strict=True)
        hits = [sum(value > row[label] for value in row) < count for row, label in rows]
        assert top_accuracy(logits, labels, count) == sum(hits) / 50
        assert 0.1 < sum(hits) / 50 < 0.9
    assert top_accuracy(logits, labels) == top_accuracy(logits, labels, 5)
    assert top_accuracy(logits[:, :6], labels % 6) is not None
    assert top_accuracy(logits[:, :5], labels % 5) is None
    with pytest.raises(ConfigError, match="count = 0"):
        top_accuracy(logits, labels, 0)


def test_confusion_matrix() -> None:
    logits = torch.tensor([[2.0, 0, 1], [0, 3, 1], [1, 2, 0], [0, 0, 9]])
    found = confusion_matrix(logits, torch.tensor([0, 1, 0, 2]))
    assert found.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seen", [torch.uint8, torch.float64], ids=str)
def test_predict_feeds_the_network_in_its_own_precision(dtype: torch.dtype, seen: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4)).eval()
    images = torch.randint(0, 256, (10, 1, 2, 2), dtype=torch.uint8)
    expected = predict(model, images)
    found = predict(model.to(dtype), images if seen == torch.uint8 else images.to(seen) / 255)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("value", [1.01, -0.01, math.nan])
def test_predict_refuses_what_are_no_pixels(value: float) -> None:
    images = torch.full((3, 1, 2, 2), 0.5)
    images[1, 0, 1, 0] = value
    with pytest.raises(DataError, match=r"every pixel in \[0, 1\]"):
        predict(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), images)


def test_predict_refuses_no_images() -> None:
    with pytest.raises(DataError, match=r"images \(0, 1, 2, 2\): want at least one"):
        predict(nn.Linear(2, 2), torch.zeros(0, 1, 2, 2))


def test_predict_evaluates_in_batches_and_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[2].eval()  # a frozen part
    images = torch.randint(0, 256, (10, 1, 2, 2), dtype=torch.uint8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = predict(model, images, batch_size=4)
    assert [part.training for part in model] == [True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not logits.requires_grad
    model.eval()
    torch.testing.assert_close(logits, model(images / 255))
    predict(model, images)
    assert not model.training


def test_parameters_are_the_trainable_ones() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 4))
    assert cost.parameters(model) == 54 + 3 + 6 + 12 + 4
    model[2].requires_grad_(False)
    assert cost.parameters(model) == 54 + 3 + 6


def test_compression_leaves_out_all_but_convolution_weights() -> None:
    model = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), nn.Linear(6, 2))
    assert cost.compression(model) == 1
    assert cost.compression(nn.Linear(2, 2)) == 1


@pytest.mark.parametrize("changed", [{"images": 1.5}, {"images": True}, {"batch_size": "3"}])
def test_numbers_of_corrupted_images_are_whole(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changed))} = .*whole number"):
        corruption_accuracy(nn.Flatten(), "nowhere", **changed)
