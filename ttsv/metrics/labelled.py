"""What metrics ask of labelled images and of logits."""

import torch
from torch import Tensor

from ttsv.errors import DataError


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
