"""One 3x3 convolution, forward and backward, by Winograd's algorithm beside torch's own: where `winograd_pays`.

    python benchmarks/convolutions.py [--quick] [--threads 1]

Both sides by turns in one process, float32, channels last, strides 1 and 2, padding 1; the fastest of some rounds.
--quick takes few shapes and writes no record. The full run takes some 4 minutes and writes convolutions.json.

- ratio: torch's seconds over Winograd's. `taken`: whether training takes Winograd's.
- error: of Winograd's result, of its gradients by images and by the kernel, relative to float64 in the Frobenius norm.
"""

import argparse
import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import alternate, circumstances
from ttsv.winograd.convolution import winograd_convolution, winograd_pays

BATCHES = (1, 4, 16, 64)
CHANNELS = ((64, 64), (96, 96), (128, 128), (160, 160), (192, 192), (320, 320), (640, 640), (64, 256), (160, 640))
SIZES = (32, 16, 8, 4)
LARGEST = 16 * 32**2 * 160**2
"""Multiplications per tap of the largest case: a layer of WRN-16-10 for 16 images."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [
        (batch, channels, size, stride)
        for stride, batch, channels, size in product((1, 2), BATCHES, CHANNELS, SIZES)
        if batch * size**2 * channels[0] * channels[1] <= LARGEST
    ]
    if options.quick:
        cases = cases[:: len(cases) // 6]
    record: dict[str, Any] = circumstances(f"python benchmarks/convolutions.py --threads {options.threads}")
    record |= {"what": "seconds of a 3x3 convolution and its gradients, torch's and Winograd's"}
    record["cases"] = [_case(*case, rounds=3 if options.quick else 7) for case in cases]
    wrong = [case for case in record["cases"] if case["taken"] and case["ratio"] < 1]
    gains = [case["ratio"] for case in record["cases"] if case["taken"]]
    print(f"taken in {len(gains)} of {len(cases)} cases, {min(gains):.2f} to {max(gains):.2f}x; slower in {len(wrong)}")
    if not options.quick:
        Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


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
