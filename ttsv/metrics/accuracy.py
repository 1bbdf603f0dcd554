"""Accuracy and loss of a network on labelled images."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.data.loading import as_pixels


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
    """Share of the images whose largest logit is that of their label. `logits` (count, classes), labels (count,)."""
    return float((logits.argmax(1) == labels).double().mean())


def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy in nats, in float64. `logits` (count, classes), labels (count,)."""
    return float(functional.cross_entropy(logits.double(), labels))
