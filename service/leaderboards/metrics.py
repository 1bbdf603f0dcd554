"""Result columns that leaderboards rank by and show: their direction, how people read them, their spread over seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Metric(StrEnum):
    """Numeric result columns, in the order in which tables show them."""

    ACCURACY = "accuracy"
    TOP5_ACCURACY = "top5_accuracy"
    ROBUST_ACCURACY = "robust_accuracy"
    PGD_ACCURACY = "pgd_accuracy"
    CORRUPTION_ACCURACY = "corruption_accuracy"
    MCE = "mce"
    ECE = "ece"
    MAX_CALIBRATION_ERROR = "max_calibration_error"
    ADAPTIVE_ECE = "adaptive_ece"
    SCALED_ECE = "scaled_ece"
    TEMPERATURE = "temperature"
    BRIER = "brier"
    LOSS = "loss"
    SCALED_LOSS = "scaled_loss"
    CERTIFIED_36 = "certified_36"
    CERTIFIED_72 = "certified_72"
    CERTIFIED_108 = "certified_108"
    CERTIFIED_255 = "certified_255"
    ASSUMED_CERTIFIED_36 = "assumed_certified_36"
    ASSUMED_CERTIFIED_72 = "assumed_certified_72"
    ASSUMED_CERTIFIED_108 = "assumed_certified_108"
    LIPSCHITZ_BOUND = "lipschitz_bound"
    LIPSCHITZ_FGSM = "lipschitz_fgsm"
    LIPSCHITZ_ASCENT = "lipschitz_ascent"
    MAX_SINGULAR_VALUE = "max_singular_value"
    COMPRESSION = "compression"
    PARAMETERS = "parameters"
    MULTIPLY_ACCUMULATES = "multiply_accumulates"
    TRAIN_SECONDS = "train_seconds"
    CONSTRAINT_SECONDS = "constraint_seconds"
    STEP_SECONDS = "step_seconds"
    CONSTRAINT_STEP_SECONDS = "constraint_step_seconds"
    EVAL_SECONDS = "eval_seconds"
    ATTACK_SECONDS = "attack_seconds"
    SPECTRUM_SECONDS = "spectrum_seconds"
    LATENCY_SECONDS = "latency_seconds"
    BATCH_SECONDS = "batch_seconds"
    MERGED_LATENCY_SECONDS = "merged_latency_seconds"
    MERGED_BATCH_SECONDS = "merged_batch_seconds"
    PEAK_MEMORY = "peak_memory"
    SPECTRUM_MEMORY = "spectrum_memory"

    @property
    def more_is_better(self) -> bool:
        """Whether the row with the largest value comes first."""
        return self in _MORE_IS_BETTER

    @property
    def has_best(self) -> bool:
        """Whether the first row is the best one. A temperature is best at 1: above, a network boasts."""
        return self is not Metric.TEMPERATURE

    @property
    def reading(self) -> "Reading":
        """How people read it."""
        return _READINGS[self]


@dataclass(frozen=True)
class Reading:
    """A heading, and the factor, decimals and unit in which a table prints the values (unit empty: a bare number)."""

    heading: str
    unit: str = ""
    factor: float = 1.0
    decimals: int = 3

    @property
    def title(self) -> str:
        """The heading with its unit."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading


HEADLINE = (
    Metric.ACCURACY,
    Metric.ROBUST_ACCURACY,
    Metric.PGD_ACCURACY,
    Metric.CORRUPTION_ACCURACY,
    Metric.ECE,
    Metric.CERTIFIED_36,
    Metric.MAX_SINGULAR_VALUE,
    Metric.COMPRESSION,
    Metric.TRAIN_SECONDS,
)
"""What tables for people show unless other columns are asked for."""

_MORE_IS_BETTER = frozenset(
    {
        Metric.ACCURACY,
        Metric.TOP5_ACCURACY,
        Metric.ROBUST_ACCURACY,
        Metric.PGD_ACCURACY,
        Metric.CORRUPTION_ACCURACY,
        Metric.CERTIFIED_36,
        Metric.CERTIFIED_72,
        Metric.CERTIFIED_108,
        Metric.CERTIFIED_255,
        Metric.ASSUMED_CERTIFIED_36,
        Metric.ASSUMED_CERTIFIED_72,
        Metric.ASSUMED_CERTIFIED_108,
        Metric.COMPRESSION,
    }
)


def _percent(heading: str) -> Reading:
    return Reading(heading, "%", 100, 2)


def _milliseconds(heading: str) -> Reading:
    return Reading(heading, "ms", 1000, 2)


_READINGS = {
    Metric.ACCURACY: _percent("accuracy"),
    Metric.TOP5_ACCURACY: _percent("top-5 accuracy"),
    Metric.ROBUST_ACCURACY: _percent("AutoAttack accuracy"),
    Metric.PGD_ACCURACY: _percent("PGD accuracy"),
    Metric.CORRUPTION_ACCURACY: _percent("corruption accuracy"),
    Metric.MCE: _percent("mCE"),
    Metric.ECE: _percent("ECE"),
    Metric.MAX_CALIBRATION_ERROR: _percent("maximum calibration error"),
    Metric.ADAPTIVE_ECE: _percent("adaptive ECE"),
    Metric.SCALED_ECE: _percent("ECE after temperature scaling"),
    Metric.TEMPERATURE: Reading("temperature"),
    Metric.BRIER: Reading("Brier score", decimals=4),
    Metric.LOSS: Reading("loss", "nats", decimals=4),
    Metric.SCALED_LOSS: Reading("loss after temperature scaling", "nats", decimals=4),
    Metric.CERTIFIED_36: _percent("certified at 36/255"),
    Metric.CERTIFIED_72: _percent("certified at 72/255"),
    Metric.CERTIFIED_108: _percent("certified at 108/255"),
    Metric.CERTIFIED_255: _percent("certified at 1"),
    Metric.ASSUMED_CERTIFIED_36: _percent("p.r. at 36/255, L = 1 assumed"),
    Metric.ASSUMED_CERTIFIED_72: _percent("p.r. at 72/255, L = 1 assumed"),
    Metric.ASSUMED_CERTIFIED_108: _percent("p.r. at 108/255, L = 1 assumed"),
    Metric.LIPSCHITZ_BOUND: Reading("Lipschitz bound", decimals=4),
    Metric.LIPSCHITZ_FGSM: Reading("empirical Lipschitz constant, normalised"),
    Metric.LIPSCHITZ_ASCENT: Reading("empirical Lipschitz constant, pixels"),
    Metric.MAX_SINGULAR_VALUE: Reading("largest singular value"),
    Metric.COMPRESSION: Reading("compression", decimals=1),
    Metric.PARAMETERS: Reading("parameters", "millions", 1e-6, 3),
    Metric.MULTIPLY_ACCUMULATES: Reading("multiply-accumulates", "millions", 1e-6, 1),
    Metric.TRAIN_SECONDS: Reading("training", "s", 1, 1),
    Metric.CONSTRAINT_SECONDS: Reading("constraint", "s", 1, 2),
    Metric.STEP_SECONDS: _milliseconds("step"),
    Metric.CONSTRAINT_STEP_SECONDS: _milliseconds("constraint per step"),
    Metric.EVAL_SECONDS: Reading("evaluation", "s", 1, 2),
    Metric.ATTACK_SECONDS: Reading("attacks", "s", 1, 1),
    Metric.SPECTRUM_SECONDS: _milliseconds("spectrum"),
    Metric.LATENCY_SECONDS: _milliseconds("inference of 1 image"),
    Metric.BATCH_SECONDS: _milliseconds("inference of 128 images"),
    Metric.MERGED_LATENCY_SECONDS: _milliseconds("inference of 1 image, merged"),
    Metric.MERGED_BATCH_SECONDS: _milliseconds("inference of 128 images, merged"),
    Metric.PEAK_MEMORY: Reading("peak GPU memory", "MiB", 2**-20, 0),
    Metric.SPECTRUM_MEMORY: Reading("memory of the spectrum", "MiB", 2**-20, 1),
}


Measures = dict[str, list[float]]
"""Metric -> [seeds, mean, sample deviation (null for one seed), least, largest]; metrics without a value are absent."""


def measures(values: Iterable[Sequence[float | None]], metrics: Sequence[Metric] = tuple(Metric)) -> Measures:
    """Mean and spread of metrics over rows of values in their order."""
    found: Measures = {}
    for name, column in zip(metrics, zip(*values, strict=True), strict=True):
        known = [float(value) for value in column if value is not None]
        if known:
            found[name.value] = spread(known)
    return found


def spread(values: Sequence[float]) -> list[float]:
    """[count, mean, sample deviation or None, least, largest], in two exact sums: a small spread keeps its digits."""
    count = len(values)
    if count == 1:
        # A list, as JSON keeps it; only its third is ever null, and all who read that ask first.
        return [1, values[0], None, values[0], values[0]]  # type: ignore[list-item]
    # Correctly rounded sums, and a mean that is never outside of its values: equal values do not deviate.
    least, largest = min(values), max(values)
    mean = min(max(math.fsum(values) / count, least), largest)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return [count, mean, std, least, largest]
