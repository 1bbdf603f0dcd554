"""Clips of WRN-16-10's convolutions, ours beside the authors' public code.

    python benchmarks/clipping.py [--authors PATH_OF_THEIR_CHECKOUT] [--quick]
    python benchmarks/clipping.py --device cuda [--quick]

Both sides run in one process by turns on one thread in float32 on the same weights (`benchmarks/networks.py`); a
layer's figure is the median of 3 (Kaiming weights: of 1), the network's the sum over its layers. Without --authors only
ours runs. The full run takes some 20 minutes with theirs, `--parts algorithms` some 10 of them; each part has a record,
`clipping mix` and so on. --quick takes two toy layers once.

- single: one round. Errors are the largest deviation from a float64 reference over its largest entry. Theirs swaps
  the channels of strided layers: those are timed all the same, and their error says what comes out.
- bounded (mix only): 10 rounds and a rescale, beside their single clip, which bounds nothing; one repeat.
- training: WRN-16-10 trained by 100 real steps, clipped, four times, and trained by 100 more
  (`benchmarks/in_training.py`: synthetic images; batches of 8, for which a CPU takes some 20 minutes, --batch 128 as
  published); then one clip of each layer as those steps left it, by one round and a rescale, beside their single clip:
  "steady". How far each kernel moved and the fraction of frequencies that needed work stand beside.
- memory: peak resident size of a fresh process above what it held before the clip, in MiB.
- large: one clip of a 256-256 layer at 224 pixels.
- algorithms: each algorithm of `ttsv.spectral.norms` on each shape, mix and Kaiming weights, ours alone. With --device
  cuda this is all, in the record `clipping cuda`; it fails where the chosen ones miss 1 s (dense) or 0.3 s (rank 192)
  for the whole network. Where another than the chosen one is faster there, change the table in
  `ttsv/spectral/norms.py`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algorithms import compare, reaches_goals
from authors import Authors
from in_training import Course, Moved, moved_kernels
from measuring import (
    alternate,
    in_fresh_process,
    keep,
    median,
    parser,
    peak_mebibytes,
    ratio,
    resident_mebibytes,
)
from networks import DELTA, TOY, WRN_16_10, Layer, Network, weights
from references import reference_clip
from ttsv.spectral.clipping import clip_conv
from ttsv.spectral.singular_values import conv_norm, conv_singular_values

HERE = Path(__file__)
FLOORS = {"dense": 3.5, "rank 192": 3.0}
PARTS = ("mix", "kaiming", "training", "memory", "algorithms")
UNIT = "seconds of one clip of all convolutions of WRN-16-10 at 32x32, float32"
LARGE = Layer(256, 256, 224, 1, 1)


def main() -> int:
    shared = parser(__doc__, authors=True)
    shared.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    shared.add_argument("--batch", type=int, default=Course.batch, help="images a step of the part `training`")
    shared.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    shared.add_argument("--peak", nargs=2, metavar=("SIDE", "LAYER"), help=argparse.SUPPRESS)
    options = shared.parse_args()
    network = TOY if options.quick else WRN_16_10
    device = torch.device(options.device)
    if device.type != "cpu":
        return _on_device(network, device, quick=options.quick)
    torch.set_num_threads(1)
    authors = Authors(options.authors) if options.authors else None
    _warm_up(authors)
    if options.peak:
        side, place = options.peak
        print(json.dumps(_peak(side, _layers(network)[place], authors)))
        return 0
    holds = True
    for part in options.parts:
        if part == "algorithms":
            found = compare(network, device)
        elif part == "memory":
            found = _memories(network, options.authors, quick=options.quick)
        elif part == "training":
            course = Course("small-cnn", steps=2, clips=2, batch=2) if options.quick else Course(batch=options.batch)
            found = _training(network, authors, course)
        else:
            found = _totals(network, part, authors, 3 if part == "mix" and not options.quick else 1)
        if not options.quick:
            command = f"python benchmarks/clipping.py{' --authors DIR' if authors else ''} --parts {part}"
            keep(f"clipping {part}", command, {"unit": UNIT, "delta": DELTA, **found})
            holds = holds and (part != "mix" or authors is None or _holds(found))
    return int(not holds)


def _on_device(network: Network, device: torch.device, *, quick: bool) -> int:
    """The algorithms on a CUDA device; 1 where they miss the goals."""
    found = compare(network, device)
    if quick:
        return 0
    about = {"unit": UNIT, "delta": DELTA, "device": torch.cuda.get_device_name(device)}
    keep(f"clipping {device.type}", f"python benchmarks/clipping.py --device {device.type}", {**about, **found})
    return int(not reaches_goals(found))


def _totals(network: Network, kind: str, authors: Authors | None, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rank in network.ranks.items():
        found[name] = _total([_measure(layer, kind, authors, repeats) for layer in network.distinct(rank)])
        print(f"== {kind}, {name}: {json.dumps(found[name])}", flush=True)
    return found


def _layers(network: Network) -> dict[str, Layer]:
    """The layers whose clips' memory is measured, by name."""
    large = () if network is TOY else (LARGE,)
    return {layer.name: layer for layer in (*network.distinct(None)[-5:], *large)}


def _memories(network: Network, authors: Path | None, *, quick: bool) -> dict[str, Any]:
    """Peak MiB and seconds of one clip of each layer, each in a fresh process."""
    found: dict[str, Any] = {}
    for name in list(_layers(network))[-1 if quick else 0 :]:
        sides = ("ours", "theirs") if authors and name != LARGE.name else ("ours",)
        shared = [*(["--authors", str(authors)] if authors else []), *(["--quick"] if quick else [])]
        found[name] = {side: in_fresh_process(str(HERE), [*shared, "--peak", side, name]) for side in sides}
        print(f"memory, {name}: {json.dumps(found[name])}", flush=True)
    return found


def _holds(totals: dict[str, Any]) -> bool:
    return all(
        totals[name]["theirs over ours"] >= floor and totals[name]["error"] < 1e-5 for name, floor in FLOORS.items()
    )


def _measure(layer: Layer, kind: str, authors: Authors | None, repeats: int) -> dict[str, Any]:
    """Seconds and errors of one layer; bounded clips too of the mix."""
    kernel = weights(layer, kind)
    ours = _ours(kernel, layer)
    theirs = authors.clip(kernel, DELTA, layer.size, layer.stride) if authors else None
    seconds = [median(taken) for taken in alternate([ours, theirs], repeats)]
    truth = reference_clip(kernel, DELTA, layer.size, layer.stride)
    result = {
        "layer": layer.name,
        "times": layer.times,
        "ours": seconds[0],
        "theirs": seconds[1],
        "error": _error(ours(), truth),
        "their error": _error(authors.as_ours(theirs()), truth) if authors and theirs else None,
    }
    if kind == "mix":
        bounded = _ours(kernel, layer, rounds=10, rescale=True)
        result |= {
            "bounded": median(alternate([bounded], 1)[0]),
            "bounded norm": conv_norm(bounded(), layer.size, stride=layer.stride),
        }
    print(json.dumps(result), flush=True)
    return result


def _training(network: Network, authors: Authors | None, course: Course) -> dict[str, Any]:
    """Seconds of the clip of each layer in training, by network."""
    found: dict[str, Any] = {"course": asdict(course)}
    for name, rank in network.ranks.items():
        results = [_steady(moved, authors) for moved in moved_kernels(rank, course)]
        found[name] = _total(results) | {
            key: [min(result[key] for result in results), max(result[key] for result in results)]
            for key in ("relative change", "fraction of frequencies above delta")
        }
        print(f"== training, {name}: {json.dumps(found[name])}", flush=True)
    return found


def _steady(moved: Moved, authors: Authors | None) -> dict[str, Any]:
    kernel, size, stride = moved.kernel, moved.size, moved.stride
    layer = Layer(kernel.shape[1], kernel.shape[0], size, stride, 1)
    theirs = authors.clip(kernel, DELTA, size, stride) if authors else None
    seconds = [median(taken) for taken in alternate([_ours(kernel, layer, rescale=True), theirs], 1)]
    values = conv_singular_values(kernel, size, stride=stride)
    result = {
        "layer": f"{moved.name}, {layer.name}",
        "times": 1,
        "steady": seconds[0],
        "theirs": seconds[1],
        "relative change": moved.change,
        "norm": values.max().item(),
        "fraction of frequencies above delta": (values[:, 0] > DELTA).double().mean().item(),
    }
    print(json.dumps(result), flush=True)
    return result


def _ours(kernel: Tensor, layer: Layer, *, rounds: int = 1, rescale: bool = False) -> Callable[[], Tensor]:
    def clip() -> Tensor:
        return clip_conv(kernel, DELTA, layer.size, stride=layer.stride, rounds=rounds, rescale=rescale)

    return clip


def _error(found: Tensor, truth: Tensor) -> float:
    error: float = ((found.double() - truth).abs().max() / truth.abs().max()).item()
    return error


def _total(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the network's layers, and how many times longer the authors' single clip takes than each of ours."""
    sums: dict[str, float | None] = {}
    for key in ("theirs", "ours", "bounded", "steady"):
        if all(result.get(key) is not None for result in results):
            sums[key] = sum(result["times"] * result[key] for result in results)
    theirs = sums.get("theirs")
    ratios = {
        f"theirs over {key}": ratio(theirs, seconds) for key, seconds in sums.items() if seconds and key != "theirs"
    }
    errors = [result["error"] for result in results if "error" in result]
    return {**sums, **ratios, **({"error": max(errors)} if errors else {})}


def _warm_up(authors: Authors | None) -> None:
    small = weights(Layer(16, 16, 8, 1, 1), "mix")
    clip_conv(small, 0.5, 8)
    if authors:
        authors.clip(small, 0.5, 8, 1)()


def _peak(side: str, layer: Layer, authors: Authors | None) -> dict[str, float]:
    kernel = weights(layer, "mix")
    clip = _ours(kernel, layer)
    if side == "theirs":
        assert authors is not None
        clip = authors.clip(kernel, DELTA, layer.size, layer.stride)
    before = resident_mebibytes()
    start = time.perf_counter()
    clip()
    return {"MiB": peak_mebibytes() - before, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    sys.exit(main())
