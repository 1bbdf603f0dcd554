"""How far a network's confidence is from its accuracy."""

import torch
from torch import Tensor


def expected_calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error (ECE), in [0, 1].

    Mean over images of the distance between accuracy and mean confidence (largest softmax probability) of the
    image's bin; `bins` bins of equal width, closed on the right: (0, 1/bins], ..., ((bins - 1)/bins, 1].
    Guo, Pleiss, Sun, Weinberger, On calibration of modern neural networks (2017), eq. 3. In float64.

    `logits` (count, classes), `labels` (count,). Raises ValueError for no images, other shapes, a non-finite
    logit or fewer than one bin.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.numel() == 0:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: want (n, c) and (n,), n, c >= 1"
        )
    if bins < 1:
        raise ValueError(f"bins = {bins}: must be at least 1")
    if not logits.isfinite().all():
        raise ValueError("logits must be finite")
    confidence = logits.double().softmax(1).amax(1)
    # Of the logits: softmax rounds close ones to a tie.
    gap = (logits.argmax(1) == labels).double() - confidence
    # i / bins rather than linspace: correctly rounded, so that a confidence of exactly 1/5 meets the edge 3/15.
    edges = torch.arange(1, bins, dtype=torch.float64, device=logits.device) / bins
    index = torch.bucketize(confidence, edges)
    sums = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, index, gap)
    return float(sums.abs().sum()) / len(labels)
