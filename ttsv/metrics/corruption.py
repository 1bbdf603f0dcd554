"""Accuracy on corrupted images: by kind and severity, and its mean."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from ttsv.checks import check_count
from ttsv.data.corruptions import (
    KINDS,
    SEVERITIES,
    CorruptedSet,
    CorruptionProtocol,
    CorruptionSource,
    PublishedCorruptions,
)
from ttsv.errors import ConfigError
from ttsv.metrics.accuracy import accuracy, predict, run_to_end


@dataclass(frozen=True, kw_only=True)
class CorruptionProgress:
    """The kind and severity evaluated last, and how many of all their pairs are done; times in seconds."""

    kind: str
    severity: int
    done: int
    total: int
    seconds: float
    seconds_left: float


@dataclass(frozen=True)
class CorruptionRecord:
    """Accuracies in [0, 1], JSON-ready: `CorruptionRecord(**asdict(record))` is the same record.

    `table`: kind -> accuracy at severities 1 to 5; `mean`: over all kinds and severities, which weigh the same.
    """

    mean: float
    table: dict[str, list[float]]
    protocol: CorruptionProtocol
    seconds: float


def corruption_accuracy(
    model: nn.Module,
    source: CorruptionSource | Path | str,
    *,
    images: int | None = None,
    batch_size: int | None = None,
    progress: Callable[[CorruptionProgress], None] | None = None,
) -> CorruptionRecord:
    """Measures the accuracy of a model that takes pixels in [0, 1] under 19 kinds of corruption at 5 severities.

    `source`: the folder of CIFAR-10-C or CIFAR-100-C, or another source, such as `GeneratedCorruptions`; `images`:
    only so many of each kind and severity, the first (None: all). They go to the device of the model's parameters as
    bytes, one severity of a kind at a time, and through the model `batch_size` at a time: None for 100 on the CPU,
    where the memory of larger results would be new for each layer, and 1000 elsewhere. `seconds` of the record do not
    include the checks of the files. `progress` is called after each severity of each kind, or, of few images, after all
    severities of a kind, which go through the model together.

    Raises `DataError` naming a file that is missing, cut or altered, and `ConfigError` for other classes than the
    model's or a logit that is not finite.
    """
    return run_to_end(corruption_steps(model, source, images=images, batch_size=batch_size), progress)


def corruption_steps(
    model: nn.Module, source: CorruptionSource | Path | str, *, images: int | None = None, batch_size: int | None = None
) -> Generator[CorruptionProgress, None, CorruptionRecord]:
    """Does as `corruption_accuracy`, severity by severity: yields where it is and returns the record."""
    for name, number in (("images", images), ("batch_size", batch_size)):
        if number is not None:
            check_count(name, number)
    opened = (PublishedCorruptions(Path(source)) if isinstance(source, str | Path) else source).open()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    size = int(batch_size or (100 if device.type == "cpu" else 1000))
    total, count = len(KINDS) * len(SEVERITIES), len(opened.labels) // len(SEVERITIES)
    used = int(min(count, images or count))
    labels = torch.stack([part[:used] for part in torch.split(torch.from_numpy(opened.labels).to(device), count)])
    table: dict[str, list[float]] = {}
    seconds = 0.0
    # A pass through some networks costs much before its first image: few images go through it together.
    step = len(SEVERITIES) if used < size else 1
    with parametrize.cached():
        for kind in KINDS:
            mapped, table[kind] = opened.images(kind), []
            for first in range(0, len(SEVERITIES), step):
                started = time.perf_counter()
                rows = [np.array(mapped[n * count : n * count + used]) for n in range(first, first + step)]
                # Contiguous, which some models' `view` needs.
                pixels = torch.from_numpy(np.concatenate(rows)).to(device).permute(0, 3, 1, 2).contiguous()
                logits = predict(model, pixels, batch_size=size)
                _require(logits, int(labels.max()), opened)
                parts = zip(torch.split(logits, used), labels[first : first + step], strict=True)
                table[kind] += [accuracy(part, target) for part, target in parts]
                seconds += time.perf_counter() - started
                done = sum(map(len, table.values()))
                yield CorruptionProgress(
                    kind=kind,
                    severity=SEVERITIES[first + step - 1],
                    done=done,
                    total=total,
                    seconds=seconds,
                    seconds_left=seconds / done * (total - done),
                )
    return CorruptionRecord(
        mean=float(np.mean(list(table.values()))),
        table=table,
        protocol=opened.protocol | {"images": used},
        seconds=seconds,
    )


def mce(record: CorruptionRecord, baseline: CorruptionRecord) -> float:
    """Returns the mean corruption error: 1 for a network that errs as the baseline does, below for a better one.

    It is the mean over kinds of the errors' sum over severities, divided by the baseline's: Hendrycks, Dietterich,
    Benchmarking neural network robustness to common corruptions and perturbations (2019), section 4.1. Raises
    `ConfigError` for a baseline of another protocol, whose images were others, or one without errors of a kind.
    """
    if record.protocol != baseline.protocol:
        differing = sorted(
            name
            for name in record.protocol.keys() | baseline.protocol.keys()
            if record.protocol.get(name) != baseline.protocol.get(name)
        )
        raise ConfigError("baseline", f"another {', '.join(differing)}", "must be measured on the same images")
    ratios = []
    for kind, row in record.table.items():
        errors, baseline_errors = (sum(1 - value for value in values) for values in (row, baseline.table[kind]))
        if baseline_errors == 0:
            raise ConfigError("baseline", kind, "is a kind of which the baseline gets every image right: take another")
        ratios.append(errors / baseline_errors)
    return sum(ratios) / len(ratios)


def _require(logits: torch.Tensor, largest: int, opened: CorruptedSet) -> None:
    """Raises `ConfigError` where the logits are no prediction of labels up to the largest."""
    if not logits.isfinite().all():
        raise ConfigError("model", "non-finite", "must give finite logits for every image")
    least, most = opened.classes or largest + 1, opened.classes or opened.most_classes
    found = logits.shape[1] if logits.ndim == 2 else 0
    if found < max(least, largest + 1) or (most is not None and found > most):
        expected = str(least) if least == most else f"more than {largest}" if most is None else f"{least} to {most}"
        raise ConfigError("model", f"{tuple(logits.shape)} logits", f"must give {expected} classes, as the images have")
