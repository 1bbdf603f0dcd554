"""The exponential series of a skew orthogonal convolution: tap by tap beside torch's convolutions.

    python benchmarks/series.py [--quick]

One thread, float32, 5 terms, 3x3 taps; series and its gradients (images and kernel), both ways in one process by turns,
median of 5, for the sizes at which LipConvNet-5 has them. The record is `series`; --quick takes a toy size once.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from measuring import alternate, keep, median, parser
from ttsv.layers.skew import by_convolutions, exponential_series, skew_part

SHAPES = ((1024, 2), (512, 4))
"""Channels and pixels a side: those that `ttsv.layers.skew` takes tap by tap."""
TERMS = 5


def main() -> int:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    cases = [(2, 32, 2)] if options.quick else [(batch, *shape) for batch in (16, 128) for shape in SHAPES]
    shapes = []
    for batch, channels, size in cases:
        found = measured(batch, channels, size, 1 if options.quick else 5)
        shapes.append(found)
        sides = f"tap by tap {found['taps']:.3f} s, by convolutions {found['convolutions']:.3f} s"
        print(f"batch {batch}, {channels} channels, {size}x{size}: {sides}: {found['ratio']:.2f}x", flush=True)
    if not options.quick:
        keep("series", "python benchmarks/series.py", {"unit": "seconds with gradients", "shapes": shapes})
    return 0


def measured(batch: int, channels: int, size: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layout = torch.channels_last
    images = torch.randn(batch, channels, size, size).contiguous(memory_format=layout).requires_grad_()
    taps = skew_part(0.01 * torch.randn(channels, channels, 3, 3))
    # Each way gets the kernel in the layout that suits it.
    kernels = [taps.requires_grad_(), taps.detach().contiguous(memory_format=layout).requires_grad_()]
    direction = torch.randn_like(images)

    def way(kernel: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(exponential_series(images, kernel, TERMS), (images, kernel), direction)

    def convolutions() -> object:
        with by_convolutions():
            return way(kernels[1])()

    sides = [way(kernels[0]), convolutions]
    alternate(sides, 1)
    ours, theirs = (median(seconds) for seconds in alternate(sides, repeats))
    assert ours is not None
    assert theirs is not None
    return {
        "batch": batch,
        "channels": channels,
        "size": size,
        "taps": ours,
        "convolutions": theirs,
        "ratio": theirs / ours,
    }


if __name__ == "__main__":
    sys.exit(main())
