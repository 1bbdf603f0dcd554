"""Accuracy, loss and confusion of a network on labelled images; what all metrics ask of images and logits."""

import math
from collections.abc import Callable, Generator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.checks import check_count
from ttsv.data.loading import as_pixels
from ttsv.errors import DataError, DivergedError
from ttsv.runtime.headway import get_on
from ttsv.runtime.precision import own_dtype
from ttsv.spectral.network import evaluating


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, *, batch_size: int = 256, dtype: torch.dtype | None = None) -> Tensor:
    """Returns logits (count, classes) of the model in evaluation mode, in its own precision; it stays as it is.

    `images` (count, channels, height, width), at least one: uint8, or floats in [0, 1]. The
    model sees them on its own device and in its own dtype (`own_dtype`), unless another `dtype` is given. Raises
    `DataError` for no images, and for what are no pixels.
    """
    check_count("batch_size", batch_size)
    if len(images) == 0:
        raise DataError(f"images {tuple(images.shape)}: want at least one")
    check_pixels(images)
    dtype = own_dtype(model) if dtype is None else dtype
    device = next((parameter.device for parameter in model.parameters()), images.device)
    parts = (part.to(device) for part in torch.split(images, int(batch_size)))
    with evaluating(model):
        logits = []
        for part in parts:
            logits.append(model(as_pixels(part).to(dtype, copy=True)))  # a network may write into what it is given
            get_on()
        return torch.cat(logits)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Returns the share of images whose largest logit, of (count, classes), is that of their label, of (count,).

    Raises `DivergedError` for logits that are not finite, `DataError` for no images, other shapes or labels that are no
    classes.
    """
    _require(logits, labels)
    return float((logits.argmax(1) == labels).double().mean())


@torch.no_grad()
def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """Returns the mean cross-entropy in nats, in float64, of logits (count, classes). Errors as for `accuracy`."""
    _require(logits, labels)
    return float(functional.cross_entropy(logits.double(), labels.long()))


def odds_against(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-odds (count,) against each label, which grow where the cross-entropy does.

    The gradients of an image have one direction: the cross-entropy's is that of the log-odds times the other classes'
    probability. That is lost where a network is sure: in float32 the label's own part from logits some 17 apart on, and
    all of it from some 100. `logits` (count, classes), of two classes at least.
    """
    column = labels[:, None].long()
    against: Tensor = logits.scatter(1, column, -math.inf).logsumexp(1) - logits.gather(1, column)[:, 0]
    return against


def top_accuracy(logits: Tensor, labels: Tensor, count: int = 5) -> float | None:
    """Returns the share of images whose label is among the `count` largest logits; None for no more classes than those.

    Of equal logits those of the first classes count as larger, as for `accuracy`, whose arguments and errors are these;
    `ConfigError` for a count below 1.
    """
    check_count("count", count)
    _require(logits, labels)
    if logits.shape[1] <= count:
        return None
    column = labels[:, None].long()
    own, classes = logits.gather(1, column), torch.arange(logits.shape[1], device=logits.device)
    # Not by topk(), which takes any of equal logits: those of a constant network, or many in bfloat16.
    ahead = (logits > own) | ((logits == own) & (classes < column))
    return float((ahead.sum(1) < count).double().mean())


def confusion_matrix(logits: Tensor, labels: Tensor) -> Tensor:
    """(classes, classes), int64: how many images of each label (row) have their largest logit in each class (column).

    Arguments and errors as for `accuracy`.
    """
    _require(logits, labels)
    classes = logits.shape[1]
    pairs = labels.long() * classes + logits.argmax(1)
    return torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def _require(logits: Tensor, labels: Tensor) -> None:
    # Before the shapes: in a training that diverges, this is how it ends.
    if not logits.isfinite().all():
        raise DivergedError("the network's logits are not finite")
    check_logits(logits, labels)


def check_labelled(images: Tensor, labels: Tensor) -> None:
    """Raises `DataError` unless these are images `(count, channels, ...)` with pixels in [0, 1] and labels (count,)."""
    if images.ndim < 2 or labels.shape != images.shape[:1] or images.numel() == 0:
        raise DataError(
            f"images {tuple(images.shape)} and labels {tuple(labels.shape)}: want (n, channels, ...) and (n,), n >= 1"
        )
    _check_whole(labels)
    check_pixels(images)


def check_pixels(images: Tensor) -> None:
    """Raises `DataError` unless these are uint8, or floats in [0, 1]: the normalisation is part of a network."""
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point() or not ((images >= 0) & (images <= 1)).all():
        raise DataError(f"images of {images.dtype}: want uint8, or floats with every pixel in [0, 1]")


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Raises `DataError` unless these are finite logits `(count, classes)` and whole labels (count,) of the classes.

    At least two classes: of a single logit every image is right, whatever the network.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or len(logits) == 0 or logits.shape[1] < 2:
        raise DataError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: want (n, c) and (n,), n >= 1, c >= 2"
        )
    _check_whole(labels)
    if not logits.isfinite().all():
        raise DataError(
            f"{int((~logits.isfinite()).any(1).sum())} of {len(logits)} images have logits that are not finite"
        )
    if not ((labels >= 0) & (labels < logits.shape[1])).all():
        raise DataError(f"labels from {int(labels.min())} to {int(labels.max())}: want 0 to {logits.shape[1] - 1}")


def _check_whole(labels: Tensor) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels of {labels.dtype}: want whole numbers")


Step = TypeVar("Step")
Result = TypeVar("Result")


def run_to_end(steps: Generator[Step, None, Result], progress: Callable[[Step], None] | None = None) -> Result:
    """Runs a stepwise computation to its end and returns its result; `progress` is called with every step."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        if progress:
            progress(step)
