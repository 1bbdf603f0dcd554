"""Accuracy and loss of a network on labelled images."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.data.loading import as_pixels
from ttsv.errors import DataError, DivergedError
from ttsv.metrics.labelled import check_logits


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, *, batch_size: int = 256) -> Tensor:
    """Logits (count, classes) of the model in evaluation mode; its training flag is put back afterwards.

    `images` (count, channels, height, width): uint8, or floats in [0, 1], on the model's device.
    """
    training = model.training
    model.eval()
    try:
        return torch.cat([model(as_pixels(batch)) for batch in torch.split(images, batch_size)])
    finally:
        model.train(training)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the images whose largest logit is that of their label. `logits` (count, classes), labels (count,).

    Raises `DivergedError` for logits that are not finite, `DataError` for no images, other shapes or labels that are no
    classes.
    """
    _require(logits, labels)
    return float((logits.argmax(1) == labels).double().mean())


def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy in nats, in float64. `logits` (count, classes), labels (count,). Errors as for `accuracy`."""
    _require(logits, labels)
    return float(functional.cross_entropy(logits.double(), labels.long()))


def _require(logits: Tensor, labels: Tensor) -> None:
    # Before the shapes: in a training that diverges, this is how it ends.
    if not logits.isfinite().all():
        raise DivergedError("the network's logits are not finite")
    if labels.is_floating_point():
        raise DataError(f"labels of {labels.dtype}: want whole numbers")
    check_logits(logits, labels)
