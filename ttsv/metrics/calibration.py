"""How far a network's confidence is from its accuracy.

Confidence is the largest softmax probability, in float64. Maintained libraries bin otherwise: torchmetrics' calibration
error closes its bins on the left and gives a confidence of exactly 1 a bin of its own.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ttsv.checks import check_count
from ttsv.errors import ConfigError
from ttsv.metrics.accuracy import cross_entropy

TEMPERATURES = (1e-2, 1e2)
"""Within these a temperature is sought: on images that are all classified correctly the best one is 0."""
_HALVINGS = 60


@dataclass(frozen=True)
class ReliabilityDiagram:
    """One entry per bin, JSON-ready. An empty bin has count 0 and None for both its means.

    Bin i holds the images of confidence in (edges[i], edges[i + 1]]: equal width, closed on the right.
    """

    edges: list[float]
    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]


@dataclass(frozen=True)
class CalibrationValues:
    """The measures of this module for one set of logits, each by its short name, JSON-ready."""

    ece: float
    mce: float
    adaptive_ece: float
    nll: float
    brier: float
    reliability: ReliabilityDiagram


@dataclass(frozen=True)
class CalibrationRecord:
    """`raw` values, and `scaled` ones where validation logits were given to fit `temperature` on. JSON-ready.

    `bins` is the number of bins (of equal width; for the adaptive error, of equal counts), `images` how many were
    measured, `validation_images` how many the temperature was fitted on.
    """

    bins: int
    images: int
    raw: CalibrationValues
    validation_images: int = 0
    temperature: float | None = None
    scaled: CalibrationValues | None = None


@torch.no_grad()
def expected_calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Returns the expected calibration error (ECE), in [0, 1].

    It is the mean over images of the distance between accuracy and mean confidence (largest softmax probability) of the
    image's bin; `bins` bins of equal width, closed on the right: (0, 1/bins], ..., ((bins - 1)/bins, 1].
    Guo, Pleiss, Sun, Weinberger, On calibration of modern neural networks (2017), eq. 3. In float64.

    `logits` (count, classes), `labels` (count,). Raises `ConfigError` for no images, other shapes, a non-finite
    logit, a label that is no class or fewer than one bin.
    """
    binned = _binned(logits, labels, bins)
    return float((binned.correct - binned.confidence).abs().sum()) / len(labels)


@torch.no_grad()
def maximum_calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Returns the maximum calibration error (MCE), in [0, 1]: a bin's largest distance of accuracy and confidence.

    Bins, arguments and errors as for `expected_calibration_error`; empty bins do not count. Guo et al. (2017), eq. 5.
    """
    binned = _binned(logits, labels, bins)
    return float(((binned.correct - binned.confidence).abs() / binned.images.clamp(min=1)).max())


@torch.no_grad()
def adaptive_calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Returns the ECE over bins of equal counts, in [0, 1].

    The images in the order of their confidence are cut into `bins` runs whose lengths differ by at most one, the longer
    ones first; with fewer images than bins, each is a bin. Images of equal confidence have no order: each counts
    as correct to the share that is correct among them. Nguyen, O'Connor, Posterior calibration and exploratory
    analysis for natural language processing models (2015). Arguments and errors as for `expected_calibration_error`.
    """
    _require(logits, labels, bins)
    confidence, correct = _confidence(logits, labels)
    values, tie, ties = torch.unique(confidence, return_inverse=True, return_counts=True)  # ascending
    share = torch.zeros_like(values).index_add_(0, tie, correct) / ties
    gaps = (share - values).repeat_interleave(ties)
    return sum(abs(float(part.sum())) for part in torch.tensor_split(gaps, bins)) / len(labels)


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> float:
    """Returns the mean of -log of the label's probability, in nats. Errors as for `expected_calibration_error`."""
    _require(logits, labels)
    return cross_entropy(logits, labels)


@torch.no_grad()
def brier_score(logits: Tensor, labels: Tensor) -> float:
    """Returns the mean over images of the squared distance of the probabilities to the label's unit vector, in [0, 2].

    The sum runs over all classes, as in Brier, Verification of forecasts expressed in terms of probability (1950),
    eq. 2. Errors as for `expected_calibration_error`.
    """
    _require(logits, labels)
    distance = logits.double().softmax(1)
    distance[torch.arange(len(labels), device=labels.device), labels.long()] -= 1
    return float(distance.square().sum(1).mean())


@torch.no_grad()
def reliability_diagram(logits: Tensor, labels: Tensor, bins: int = 15) -> ReliabilityDiagram:
    """Returns count, confidence and accuracy of each bin; arguments and errors as for `expected_calibration_error`."""
    binned = _binned(logits, labels, bins)
    count = [int(n) for n in binned.images]

    def means(sums: Tensor) -> list[float | None]:
        return [value / n if n else None for value, n in zip(sums.tolist(), count, strict=True)]

    return ReliabilityDiagram(
        edges=[i / bins for i in range(bins + 1)],
        count=count,
        confidence=means(binned.confidence),
        accuracy=means(binned.correct),
    )


@torch.no_grad()
def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Returns the temperature T in `TEMPERATURES` by which logits are divided for the least negative log-likelihood.

    To be fitted on validation images: the test images have no say in it. Guo et al. (2017), section 4.2. The
    likelihood is convex in 1/T, so that halving its logarithm finds the one zero of the derivative, in float64; 1
    where no temperature matters (all logits of each image equal). Errors as for `expected_calibration_error`.
    """
    _require(logits, labels)
    centred = logits.double() - logits.double().amax(1, keepdim=True)
    mean_label = centred.gather(1, labels[:, None].long()).mean()

    def slope(inverse: float) -> float:
        """Derivative of the negative log-likelihood by 1/T; it grows with 1/T."""
        return float(((centred * inverse).softmax(1) * centred).sum(1).mean() - mean_label)

    low, high = sorted(-math.log(t) for t in TEMPERATURES)
    at_low, at_high = slope(math.exp(low)), slope(math.exp(high))
    if at_low == at_high == 0:
        return 1.0
    if at_low >= 0 or at_high <= 0:
        return TEMPERATURES[1] if at_low >= 0 else TEMPERATURES[0]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def calibration_record(
    logits: Tensor,
    labels: Tensor,
    *,
    validation_logits: Tensor | None = None,
    validation_labels: Tensor | None = None,
    bins: int = 15,
) -> CalibrationRecord:
    """Returns every measure of this module, and the same after temperature scaling where validation logits are given.

    Arguments and errors as for `expected_calibration_error`, for both pairs of logits and labels; `ConfigError` also
    where one of the validation arguments comes without the other or has other classes.
    """
    record = CalibrationRecord(bins=bins, images=len(labels), raw=_values(logits, labels, bins))
    if validation_logits is None and validation_labels is None:
        return record
    if validation_logits is None or validation_labels is None:
        missing = "validation_labels" if validation_labels is None else "validation_logits"
        raise ConfigError(missing, None, "must be given with the other of the two, or neither")
    _require(validation_logits, validation_labels, prefix="validation_")
    if validation_logits.shape[1] != logits.shape[1]:
        raise ConfigError("validation_logits", tuple(validation_logits.shape), f"must have {logits.shape[1]} classes")
    temperature = fit_temperature(validation_logits, validation_labels)
    scaled = _values(logits.double() / temperature, labels, bins)
    return replace(record, validation_images=len(validation_labels), temperature=temperature, scaled=scaled)


def _values(logits: Tensor, labels: Tensor, bins: int) -> CalibrationValues:
    return CalibrationValues(
        ece=expected_calibration_error(logits, labels, bins),
        mce=maximum_calibration_error(logits, labels, bins),
        adaptive_ece=adaptive_calibration_error(logits, labels, bins),
        nll=negative_log_likelihood(logits, labels),
        brier=brier_score(logits, labels),
        reliability=reliability_diagram(logits, labels, bins),
    )


class _Binned(NamedTuple):
    """Per bin of equal width: the number of images, of correct ones, and the sum of their confidences, in float64."""

    images: Tensor
    correct: Tensor
    confidence: Tensor


def _binned(logits: Tensor, labels: Tensor, bins: int) -> _Binned:
    _require(logits, labels, bins)
    confidence, correct = _confidence(logits, labels)
    # i / bins rather than linspace: correctly rounded, so that a confidence of exactly 1/5 meets the edge 3/15.
    edges = torch.arange(1, bins, dtype=torch.float64, device=logits.device) / bins
    index = torch.bucketize(confidence, edges)
    zeros = torch.zeros(bins, dtype=torch.float64, device=logits.device)
    sums = (zeros.index_add(0, index, value) for value in (torch.ones_like(correct), correct, confidence))
    return _Binned(*sums)


def _confidence(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Largest probability of each image, and 1 or 0 for correct or wrong, both (count,) in float64."""
    # Correctness of the logits: softmax rounds close ones to a tie.
    return logits.double().softmax(1).amax(1), (logits.argmax(1) == labels).double()


def _require(logits: Tensor, labels: Tensor, bins: int = 1, *, prefix: str = "") -> None:
    """Raises `ConfigError` naming the argument that cannot be used."""
    if logits.ndim != 2 or len(logits) == 0 or logits.shape[1] < 2:
        fix = "must be (images, classes), one image and two classes at least"
        raise ConfigError(f"{prefix}logits", tuple(logits.shape), fix)
    if labels.shape != logits.shape[:1]:
        raise ConfigError(f"{prefix}labels", tuple(labels.shape), f"must be ({len(logits)},), as many as logits")
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.min() < 0 or labels.max() >= logits.shape[1]:
        found = f"{labels.dtype} from {labels.min()} to {labels.max()}"
        raise ConfigError(f"{prefix}labels", found, f"must be integers from 0 to {logits.shape[1] - 1}")
    check_count("bins", bins)
    if not logits.isfinite().all():
        raise ConfigError(f"{prefix}logits", "non-finite", "must be finite")
