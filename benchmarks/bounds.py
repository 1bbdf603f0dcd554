"""Bounds of the norm of 10,000 drawn convolutions against their dense operators.

    python benchmarks/bounds.py [--cases 10000] [--quick]

1/2/3-d, strides and dilations of 1 to 3, one or two groups, normal, smooth, one-signed and sharp kernels, circular and
zero padding of any width; half of the zero-padded cases by the iteration that serves large operators. The operator is
built by torch's own convolution of a basis in float64. It fails if one bound does. The record `bounds` is of 10,000
cases or more; --quick takes 100.
Operators that vanish (padding leaves only zeros to read, or the kernel folds to nothing) are held to their bounds too
but left out of the ratios.
"""

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from measuring import keep, parser
from ttsv.spectral.bounds import conv_norm_bounds

CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
KINDS = ("circular", "zeros, decomposed", "zeros, iterated")
ROUNDING = 1e-14
"""The dense norm is good to a few roundings only."""


def main() -> int:
    shared = parser(__doc__)
    shared.add_argument("--cases", type=int, default=10000)
    options = shared.parse_args()
    cases = 100 if options.quick else options.cases
    torch.set_num_threads(1)
    draw = random.Random(0)
    start = time.perf_counter()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    broken, vanishing = [], 0
    for case in range(cases):
        kind = KINDS[0] if case % 2 else draw.choice(KINDS[1:])
        shape, lower, upper, truth, magnitude = _case(draw, kind)
        if not lower <= truth * (1 + ROUNDING) or not upper >= truth * (1 - ROUNDING):
            broken.append({"case": case, "kind": kind, "lower": lower, "upper": upper, "truth": truth, **shape})
        if truth > 1e-9 * magnitude:
            found[kind].append((lower / truth, upper / truth))
        else:
            vanishing += 1
    figures = {
        "unit": "bounds over the norm of the dense operator, drawn convolutions, seed 0",
        "seconds": time.perf_counter() - start,
        "cases": cases,
        "broken": broken,
        "vanishing": vanishing,
        **{kind: _summary(ratios) for kind, ratios in found.items() if ratios},
    }
    print(json.dumps(figures, indent=1))
    if cases >= 10000:
        keep("bounds", f"python benchmarks/bounds.py --cases {cases}", figures)
    return bool(broken)


def _summary(ratios: list[tuple[float, float]]) -> dict[str, float]:
    lower, upper = zip(*ratios, strict=True)
    return {
        "cases": len(ratios),
        "lower over truth, least": min(lower),
        "upper over truth, least less 1": min(upper) - 1,
        "upper over truth, median": statistics.median(upper),
        "upper over truth, largest": max(upper),
    }


def _case(draw: random.Random, kind: str) -> tuple[dict[str, Any], float, float, float, float]:
    d = draw.randint(1, 3)
    stride, dilation = (tuple(draw.randint(1, 3) for _ in range(d)) for _ in range(2))
    kernel_size = tuple(draw.randint(1, (5, 4, 3)[d - 1]) for _ in range(d))
    groups = draw.randint(1, 2)
    c_out, c_in = draw.randint(1, 4), draw.randint(1, 4)
    kernel = _kernel(draw, (groups * c_out, c_in, *kernel_size))
    if kind == "circular":
        size = tuple(s * draw.randint(1, (8, 4, 2)[d - 1]) for s in stride)
        pads = (0,) * d
        options: dict[str, Any] = {"padding_mode": "circular"}
    else:
        size = tuple(draw.randint(1, (12, 7, 4)[d - 1]) for _ in range(d))
        spans = [e * (k - 1) for e, k in zip(dilation, kernel_size, strict=True)]
        # From the least padding that leaves an output to more than the full convolution's.
        pads = tuple(max(0, -(-(r + 1 - n) // 2)) + draw.randint(0, r) for n, r in zip(size, spans, strict=True))
        options = {"padding": pads}
    shape: dict[str, Any] = {"size": size, "stride": stride, "dilation": dilation, "groups": groups}
    with mock.patch("ttsv.spectral.bounds._DENSE_ENTRIES", 0 if kind == "zeros, iterated" else 2**22):
        bounds = conv_norm_bounds(kernel, **_renamed(shape), **options)
    truth = torch.linalg.matrix_norm(_operator(kernel, pads, kind == "circular", **shape), 2).item()
    described = {"kernel": tuple(kernel.shape), "padding": pads, **shape}
    return described, bounds.lower, bounds.upper, truth, kernel.abs().max().item()


def _renamed(shape: dict[str, Any]) -> dict[str, Any]:
    return {"input_size" if name == "size" else name: value for name, value in shape.items()}


def _kernel(draw: random.Random, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(60))
    kernel = torch.randn(shape, generator=generator, dtype=torch.float64) * 10 ** draw.uniform(-6, 6)
    kind = draw.choice(("normal", "one-signed", "smooth", "sharp"))
    if kind == "one-signed":
        return kernel.abs()
    if kind == "normal":
        return kernel
    spatial = torch.ones((), dtype=torch.float64)
    for k in shape[2:]:
        row = torch.tensor([math.comb(k - 1, i) * (-1) ** (i * (kind == "sharp")) for i in range(k)]).double()
        spatial = spatial[..., None] * row
    return kernel.flatten(2)[..., 0].reshape(*shape[:2], *(1 for _ in shape[2:])) * spatial


def _operator(
    kernel: Tensor,
    pads: tuple[int, ...],
    circular: bool,
    *,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """The dense matrix (inputs, outputs); circular: axes are read modulo their sizes, then without padding."""
    channels = kernel.shape[1] * groups
    dims = channels * math.prod(size)
    images = torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *size)
    if circular:
        axes = zip(size, stride, dilation, kernel.shape[2:], strict=True)
        for axis, (n, s, e, k) in enumerate(axes, start=2):
            images = images.index_select(axis, torch.arange(n - s + e * (k - 1) + 1) % n)
    return CONVOLVE[len(size)](images, kernel, None, stride, pads, dilation, groups).flatten(1)


if __name__ == "__main__":
    sys.exit(main())
