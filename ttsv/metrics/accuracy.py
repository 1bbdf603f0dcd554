"""Accuracy, loss and confusion of a network on labelled images."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.checks import check_count
from ttsv.data.loading import as_pixels
from ttsv.errors import ConfigError, DataError, DivergedError
from ttsv.layers.spectral import evaluating
from ttsv.metrics.float64 import own_dtype
from ttsv.metrics.labelled import check_logits, check_pixels


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, *, batch_size: int = 256) -> Tensor:
    """Logits (count, classes) of the model in evaluation mode, in its own precision; it stays as it is.

    `images` (count, channels, height, width), at least one: uint8, or floats in [0, 1], on the model's device. The
    model sees them in its own dtype (`own_dtype`). Raises `DataError` for no images, and for what are no pixels.
    """
    check_count("batch_size", batch_size)
    if len(images) == 0:
        raise DataError(f"images {tuple(images.shape)}: want at least one")
    check_pixels(images)
    dtype = own_dtype(model)
    with evaluating(model):
        return torch.cat([model(as_pixels(batch).to(dtype)) for batch in torch.split(images, int(batch_size))])


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the images whose largest logit is that of their label. `logits` (count, classes), labels (count,).

    Raises `DivergedError` for logits that are not finite, `DataError` for no images, other shapes or labels that are no
    classes.
    """
    _require(logits, labels)
    return float((logits.argmax(1) == labels).double().mean())


@torch.no_grad()
def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy in nats, in float64. `logits` (count, classes), labels (count,). Errors as for `accuracy`."""
    _require(logits, labels)
    return float(functional.cross_entropy(logits.double(), labels.long()))


def top_accuracy(logits: Tensor, labels: Tensor, count: int = 5) -> float | None:
    """Share of the images whose label is among the `count` largest logits; None where there are no more classes.

    Arguments and errors as for `accuracy`; `ConfigError` for a count below 1.
    """
    if count < 1:
        raise ConfigError("count", count, "must be at least 1")
    _require(logits, labels)
    if logits.shape[1] <= count:
        return None
    return float((logits.topk(count, 1).indices == labels[:, None]).any(1).double().mean())


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
