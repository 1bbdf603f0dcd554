"""Spectra and norms of WRN-16-10's convolutions, ours beside the authors' public code.

    python benchmarks/spectra.py [--authors PATH_OF_THEIR_CHECKOUT] [--quick]

Both sides run in one process by turns on one thread in float32 on the same weights (`benchmarks/networks.py`, the mix);
a layer's figure is the median of 3, the network's the sum over its layers. Without --authors only ours runs. The
record is `spectra`; --quick takes two toy layers once.

- spectrum: all singular values. Errors are the largest deviation from a float64 reference over the largest value.
- certified: lower and upper bound of the norm, float64 and rounding accounted for, beside their exact norm (the largest
  of all their values, which costs them what the spectrum does); `gap` is upper over lower less 1.

Theirs swaps the channels of strided layers: those are timed all the same, and their error says what comes out.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from authors import Authors
from measuring import alternate, keep, median, parser, ratio
from networks import TOY, WRN_16_10, Layer, weights
from references import reference_values
from ttsv.spectral.bounds import conv_norm_bounds
from ttsv.spectral.singular_values import conv_singular_values

FLOORS = {"spectrum ratio": 1.7, "certified ratio": 2.0}


def main() -> int:
    options = parser(__doc__, authors=True).parse_args()
    torch.set_num_threads(1)
    authors = Authors(options.authors) if options.authors else None
    network = TOY if options.quick else WRN_16_10
    totals: dict[str, dict[str, Any]] = {}
    for name, rank in network.ranks.items():
        totals[name] = _total([_measure(layer, authors, 1 if options.quick else 3) for layer in network.distinct(rank)])
        print(f"== {name}: {json.dumps(totals[name])}", flush=True)
    if options.quick:
        return 0
    command = f"python benchmarks/spectra.py{' --authors DIR' if authors else ''}"
    keep("spectra", command, {"unit": "seconds, all convolutions of WRN-16-10 at 32x32", **totals})
    ratios = [total[key] is None or total[key] >= floor for total in totals.values() for key, floor in FLOORS.items()]
    return int(not all(ratios) or any(total["gap"] > 0.01 for total in totals.values()))


def _measure(layer: Layer, authors: Authors | None, repeats: int) -> dict[str, Any]:
    kernel = weights(layer, "mix")

    def ours() -> Tensor:
        return conv_singular_values(kernel, layer.size, stride=layer.stride)

    def certified() -> object:
        return conv_norm_bounds(kernel, layer.size, stride=layer.stride, padding_mode="circular")

    theirs = authors.singular_values(kernel, layer.size, layer.stride) if authors else None
    seconds = [median(taken) for taken in alternate([ours, theirs, certified], repeats)]
    truth = reference_values(kernel, layer.size, layer.stride)
    bounds = conv_norm_bounds(kernel, layer.size, stride=layer.stride, padding_mode="circular")
    result = {
        "layer": layer.name,
        "times": layer.times,
        "ours": seconds[0],
        "theirs": seconds[1],
        "certified": seconds[2],
        "gap": bounds.upper / bounds.lower - 1,
        "norm": truth.max().item(),
        "error": _error(_half(ours(), layer), truth),
        "error of their norm": abs(theirs().max().item() / truth.max().item() - 1) if theirs else None,
    }
    print(json.dumps(result), flush=True)
    return result


def _half(values: Tensor, layer: Layer) -> Tensor:
    """The frequencies of the reference, which takes half of the last axis."""
    grid = layer.size // layer.stride
    return values.reshape(grid, grid, -1)[:, : grid // 2 + 1].flatten()


def _error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).abs().max() / truth.max()).item()


def _total(results: list[dict[str, Any]]) -> dict[str, Any]:
    ours = sum(result["times"] * result["ours"] for result in results)
    certified = sum(result["times"] * result["certified"] for result in results)
    known = all(result["theirs"] is not None for result in results)
    theirs = sum(result["times"] * result["theirs"] for result in results) if known else None
    return {
        "ours": ours,
        "theirs": theirs,
        "spectrum ratio": ratio(theirs, ours),
        "certified": certified,
        "certified ratio": ratio(theirs, certified),
        "gap": max(result["gap"] for result in results),
        "error": max(result["error"] for result in results),
    }


if __name__ == "__main__":
    sys.exit(main())
