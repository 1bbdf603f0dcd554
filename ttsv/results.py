"""What a trial yields, as plain data: torch-free, so that those who only record results stay light."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKPOINTS = "checkpoints"
"""Folder, inside a trial's, of what a later attempt resumes from; once the trial's end is recorded it can go."""


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """What one epoch of training gave; `epoch` counts from 1. Losses are means over images, accuracies in [0, 1].

    `train_*` are means over the epoch's batches while the weights change, `train_loss` without the orthogonal loss;
    `val_*` are measured after the epoch on the validation split; `ort_loss` is the orthogonal loss after
    the epoch (eq. orthloss, unweighted, None without free frames); `lr` is the rate of the epoch's first step;
    `seconds` are those of its steps, `constraint_seconds` the part spent on the constraint (the last, forced
    projection is not among them).
    """

    epoch: int
    epochs: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    ort_loss: float | None
    lr: float
    seconds: float
    constraint_seconds: float


@dataclass(frozen=True, kw_only=True)
class StageProgress:
    """Where an evaluation is: `done` of `total` parts of a stage, `seconds_left` of it (None: unknown)."""

    stage: str
    done: int
    total: int
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a finished trial is worth, on the test split, with the protocol under which it was measured.

    `selected_epoch` is the one whose weights were evaluated. `multiply_accumulates` are those of one image.
    `step_seconds` is the mean time of an optimizer step, `constraint_step_seconds` the part of it that the constraint
    takes (its penalty's gradient excepted), both without the first epoch of several. `peak_memory` is the GPU's, in
    bytes, None on a CPU.

    `spectrum_seconds` is the time of the exact spectra of all convolutions and `spectrum_memory` the most, in bytes,
    that torch had allocated for them; `latency_seconds` and `batch_seconds` that
    of the inference of 1 and of 128 images, each TT layer merged or factored, whichever multiplies less; `merged_*` the
    same with frames merged into dense kernels once and for all, None for a network without TT layers.

    What the trial's `evaluation` asks for, else None. `robust_accuracy` is AutoAttack's alone, `pgd_accuracy` that of
    PGD, which proves little; `certified_*` are certified accuracies at L2 radii in pixels, of which the name says the
    255ths, `assumed_certified_*` the paper's, for an assumed Lipschitz constant of 1 in normalised coordinates;
    `lipschitz_bound` is the rigorous bound in pixels, `lipschitz_fgsm` the largest constant found by the paper's
    search, in normalised coordinates, `lipschitz_ascent` by gradient ascent, in pixels; `mce` is relative to the data
    set's stored baseline.

    `violations` say what cannot be true of right numbers; with one the result is not `valid`, and none of its
    numbers may be used. `evaluation` is the whole record, JSON-ready.

    `max_singular_value` is the largest over all convolutions, of the periodic operator at the size each layer sees.
    `layers` has one record per convolution (name, kind, shape, input size, largest and smallest singular value,
    largest before the last projection, what that projection reported) and, with an empty input size, one per other
    layer that was projected. `protocol` decides what may be compared; `environment` (versions, device,
    threads) does not. `artifacts` maps a kind ("model", see
    `ttsv.evaluation.artifacts` for others) to the file written under the trial's folder.
    """

    accuracy: float
    loss: float
    ece: float
    max_singular_value: float
    compression: float
    parameters: int
    multiply_accumulates: int
    train_seconds: float
    constraint_seconds: float
    step_seconds: float
    constraint_step_seconds: float
    eval_seconds: float
    spectrum_seconds: float
    latency_seconds: float
    batch_seconds: float
    peak_memory: int | None
    selected_epoch: int
    protocol: dict[str, Any]
    environment: dict[str, Any]
    layers: list[dict[str, Any]]
    spectrum_memory: int | None = None
    top5_accuracy: float | None = None
    max_calibration_error: float | None = None
    adaptive_ece: float | None = None
    brier: float | None = None
    temperature: float | None = None
    scaled_ece: float | None = None
    scaled_loss: float | None = None
    robust_accuracy: float | None = None
    pgd_accuracy: float | None = None
    attack_seconds: float | None = None
    corruption_accuracy: float | None = None
    mce: float | None = None
    lipschitz_bound: float | None = None
    certified_36: float | None = None
    certified_72: float | None = None
    certified_108: float | None = None
    certified_255: float | None = None
    assumed_certified_36: float | None = None
    assumed_certified_72: float | None = None
    assumed_certified_108: float | None = None
    lipschitz_fgsm: float | None = None
    lipschitz_ascent: float | None = None
    merged_latency_seconds: float | None = None
    merged_batch_seconds: float | None = None
    valid: bool = True
    violations: list[str] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)


def protocol_fingerprint(protocol: dict[str, Any]) -> str:
    """SHA-256 (hex) of a JSON-ready protocol, the same for any order of its keys: equal ones may be compared."""
    text = json.dumps(protocol, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
