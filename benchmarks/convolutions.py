"""One 3x3 convolution, forward and backward, by Winograd's algorithm beside torch's own: where `winograd_pays`.

    python benchmarks/convolutions.py [--quick] [--threads 1]

Both sides by turns in one process, float32, channels last, strides 1 and 2, padding 1; the fastest of some rounds.
The full run takes some 4 minutes; its record `convolutions` has the range of the cases, by stride, which it prints.
--quick takes two toy shapes.

- ratio: torch's seconds over Winograd's. `taken`: whether training takes Winograd's.
- error: of Winograd's result, of its gradients by images and by the kernel, relative to float64 in the Frobenius norm.
"""

import json
import statistics
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from measuring import alternate, keep, parser
from ttsv.winograd.convolution import winograd_convolution, winograd_pays

BATCHES = (1, 4, 16, 64)
CHANNELS = ((64, 64), (96, 96), (128, 128), (160, 160), (192, 192), (320, 320), (640, 640), (64, 256), (160, 640))
SIZES = (32, 16, 8, 4)
LARGEST = 16 * 32**2 * 160**2
"""Multiplications per tap of the largest case: a layer of WRN-16-10 for 16 images."""


TOYS = ((1, (16, 16), 8, 1),)


def main() -> int:
    shared = parser(__doc__)
    shared.add_argument("--threads", type=int, default=1)
    options = shared.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [
        (batch, channels, size, stride)
        for stride, batch, channels, size in product((1, 2), BATCHES, CHANNELS, SIZES)
        if batch * size**2 * channels[0] * channels[1] <= LARGEST
    ]
    cases = [_case(*case, rounds=3 if options.quick else 7) for case in (TOYS if options.quick else shapes)]
    strides = {f"stride {stride}": _summary([case for case in cases if case["stride"] == stride]) for stride in (1, 2)}
    for stride, found in strides.items():
        print(f"{stride}: {json.dumps(found)}")
    if not options.quick:
        command = f"python benchmarks/convolutions.py --threads {options.threads}"
        keep("convolutions", command, {"unit": "torch's seconds over Winograd's, with gradients", **strides})
    return 0


def _summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """How many cases training takes, their ratios, and the largest errors of result and gradients."""
    taken = [case["ratio"] for case in cases if case["taken"]]
    return {
        "cases": len(cases),
        "taken": len(taken),
        "slower": sum(gain < 1 for gain in taken),
        "ratios": [min(taken), statistics.median(taken), max(taken)] if taken else None,
        "errors": [max(errors) for errors in zip(*(case["error"] for case in cases), strict=True)],
    }


def _case(batch: int, channels: tuple[int, int], size: int, stride: int, *, rounds: int) -> dict[str, Any]:
    c_in, c_out = channels
    generator = torch.Generator().manual_seed(0)
    result = size // stride
    shapes = (batch, c_in, size, size), (c_out, c_in, 3, 3), (batch, c_out, result, result)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    images, kernel, downstream = (tensor.contiguous(memory_format=torch.channels_last) for tensor in tensors)

    def fast(images: Tensor, kernel: Tensor) -> Tensor:
        return winograd_convolution(images, kernel, (1, 1), stride)

    def plain(images: Tensor, kernel: Tensor) -> Tensor:
        return functional.conv2d(images, kernel, stride=stride, padding=1)

    sides = [_with_gradients(convolve, images, kernel, downstream) for convolve in (plain, fast)]
    alternate(sides, 2)
    seconds = [min(taken) for taken in alternate(sides, rounds) if taken]
    exact = _with_gradients(plain, images.double(), kernel.double(), downstream.double())()
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(sides[1](), exact, strict=True)]
    found = {
        "batch": batch,
        "channels": channels,
        "size": size,
        "stride": stride,
        "seconds": {"torch": seconds[0], "winograd": seconds[1]},
        "ratio": seconds[0] / seconds[1],
        "taken": winograd_pays(images, kernel, (1, 1), stride),
        "error": errors,
    }
    print(
        f"{batch} images of {size}x{size}, {c_in} to {c_out} channels, stride {stride}: "
        f"torch {1e3 * seconds[0]:.1f} ms, winograd {1e3 * seconds[1]:.1f} ms, "
        f"{found['ratio']:.2f}x{', taken' if found['taken'] else ''}; "
        f"errors {', '.join(f'{error:.1e}' for error in errors)}",
        flush=True,
    )
    return found


def _with_gradients(
    convolve: Callable[[Tensor, Tensor], Tensor], images: Tensor, kernel: Tensor, downstream: Tensor
) -> Callable[[], list[Tensor]]:
    images, kernel = (tensor.detach().requires_grad_() for tensor in (images, kernel))

    def run() -> list[Tensor]:
        result = convolve(images, kernel)
        return [result.detach(), *torch.autograd.grad(result, (images, kernel), downstream)]

    return run


if __name__ == "__main__":
    sys.exit(main())
