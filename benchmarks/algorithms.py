"""The algorithms of a clip by turns on one device, by shape: what the table in `ttsv/spectral/norms.py` rests on."""

import json
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from measuring import median
from networks import DELTA, Layer, Network, weights
from references import reference_clip
from ttsv.spectral.clipping import clip_conv
from ttsv.spectral.norms import Algorithm, clip_algorithm

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
GOALS = {"dense": 1.0, "rank 192": 0.3}
"""Seconds of one clip of the whole network on a CUDA device."""


def compare(network: Network, device: torch.device) -> dict[str, Any]:
    """Seconds, errors and, on CUDA, peak MiB of every algorithm: per layer shape, and summed over each network.

    On a CPU blocks of more than 320 rows are left out: minutes, for what the others show.
    """
    found: dict[str, Any] = {}
    for kind in ("mix", "kaiming"):
        for name, rank in network.ranks.items():
            layers = network.distinct(rank)
            if device.type == "cpu":
                layers = [layer for layer in layers if _side(layer) <= 320]
            results = [_measure(layer, kind, device, 1 if device.type == "cpu" else 3) for layer in layers]
            total = {key: _sum(results, key) for key in (*ALGORITHMS, "chosen")}
            error = max(result["error"][result["chosen"]] for result in results)
            found[f"{kind}, {name}"] = {"total": total, "error": error}
            print(f"== {kind}, {name}: {json.dumps(total)}", flush=True)
    return found


def reaches_goals(found: dict[str, Any]) -> bool:
    """Whether the chosen algorithms clip whole networks in `GOALS` with errors under 1e-4, whatever the weights."""
    networks = [(found[f"{kind}, {name}"], goal) for kind in ("mix", "kaiming") for name, goal in GOALS.items()]
    return all(network["total"]["chosen"] <= goal and network["error"] < 1e-4 for network, goal in networks)


def _measure(layer: Layer, kind: str, device: torch.device, repeats: int) -> dict[str, Any]:
    kernel = weights(layer, kind)
    truth = reference_clip(kernel, DELTA, layer.size, layer.stride)
    side = _side(layer)
    result: dict[str, Any] = {"layer": layer.name, "times": layer.times, "side": side}
    result |= {"chosen": clip_algorithm(side, device), "seconds": {}, "error": {}}
    for algorithm in ALGORITHMS:
        clip = _clip(kernel.to(device), layer, algorithm)
        if device.type == "cuda":
            clip()  # the first call loads kernels
        before = _peak(device)
        found, seconds = clip(), [_seconds(clip, device) for _ in range(repeats)]
        result["seconds"][algorithm] = median(seconds)
        result["error"][algorithm] = ((found.double().cpu() - truth).abs().max() / truth.abs().max()).item()
        if before is not None:
            result.setdefault("MiB", {})[algorithm] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    print(json.dumps(result), flush=True)
    return result


def _side(layer: Layer) -> int:
    """Rows of its Gram matrices."""
    return min(layer.c_out, layer.c_in * layer.stride**2)


def _clip(kernel: Tensor, layer: Layer, algorithm: Algorithm) -> Callable[[], Tensor]:
    return lambda: clip_conv(kernel, DELTA, layer.size, stride=layer.stride, algorithm=algorithm)


def _seconds(clip: Callable[[], Tensor], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    clip()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int | None:
    """Bytes held on a CUDA device, whose peak is measured from here on."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _sum(results: list[dict[str, Any]], key: str) -> float:
    seconds: list[float] = [
        result["times"] * result["seconds"][result["chosen"] if key == "chosen" else key] for result in results
    ]
    return sum(seconds)
