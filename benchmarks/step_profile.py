"""Where the time of a training step goes, ours beside the authors' public code, and what torch.compile makes of ours.

    python benchmarks/step_profile.py --authors PATH_OF_THEIR_CHECKOUT [--quick]

One thread, CPU, WRN-16-10 dense and of rank 192 as `training.py` has them. --quick takes the former alone and writes
no record. The full run takes some 5 minutes and writes step_profile.json.

- shares: of the processor's time in torch's own profiler, by operator.
- of_products: operations per second of a step of ours in float32 (forward and backward, counted by torch as those of
  plain convolutions) over those of the product of two matrices of 2048 rows, which is what the processor can do at
  best: above 1 where Winograd's algorithm saves operations.
- compiled: seconds of forward and backward pass of ours over those of the same compiled by inductor, by turns.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import alternate, circumstances, median
from benchmarks.training import CASES, IMAGES, Case, Load, model_of, our_rounds, their_rounds
from ttsv.data import load_dataset

GROUPS = {
    "convolutions": ("mkldnn_convolution", "convolution_backward"),
    "batch norm": ("native_batch_norm", "batch_norm_backward"),
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm"),
    "optimizer": ("_fused_sgd", "_foreach"),
}
"""Operators by parts of their names; all others are "other"."""
LOAD = Load(torch.device("cpu"), batch=16, steps=2, rounds=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, required=True, help="a checkout of WhiteTeaDragon/practical_svd_conv")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = circumstances("python benchmarks/step_profile.py --authors DIR")
    record |= {"what": "shares of a training step's time by operator; torch.compile beside eager", "batch": LOAD.batch}
    with tempfile.TemporaryDirectory() as folder:
        data = load_dataset(IMAGES["cpu"], Path(folder))
        for case in CASES[: 1 if options.quick else 2]:
            sides = {
                "ours": our_rounds(case, data, LOAD, "float32"),
                "ours bf16": our_rounds(case, data, LOAD, "bf16"),
                "theirs": their_rounds(case, data, options.authors, LOAD),
            }
            shares = {name: _shares(partial(next, rounds)) for name, rounds in sides.items()}
            compiled = {precision: _compiled(case, precision) for precision in ("float32", "bf16")}
            step = min(islice(our_rounds(case, data, LOAD, "float32"), 3))
            reached = _operations(case) / step / _products_per_second()
            record[case.name] = {"shares": shares, "of_products": reached, "compiled": compiled}
            print(f"{case.name}: {reached:.0%} of the operations per second of a product of matrices")
            for name, parts in shares.items():
                print(f"  {name}: " + ", ".join(f"{part} {share:.0%}" for part, share in parts.items()))
            print("  compiled: " + ", ".join(f"{name} {gain:.2f}x" for name, gain in compiled.items()), flush=True)
    if not options.quick:
        Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _shares(step: Callable[[], object]) -> dict[str, float]:
    """Shares of the operators' own time, the second round's."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    taken: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        group = next((group for group, parts in GROUPS.items() if any(part in event.key for part in parts)), "other")
        taken[group] += event.self_cpu_time_total
    total = sum(taken.values())
    return {group: taken[group] / total for group in (*GROUPS, "other")}


def _products_per_second() -> float:
    """Operations per second of a large matrix product in float32, the fastest of five."""
    size = 2048
    left, right = torch.randn(2, size, size)
    (seconds,) = alternate([lambda: left @ right], 5)
    assert seconds is not None
    return 2 * size**3 / min(seconds)


def _operations(case: Case) -> int:
    """Operations of convolutions and matrix products in one step."""
    images = torch.rand(LOAD.batch, 3, 32, 32)
    model = model_of(case).train()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(model(images).sum())
    return int(counter.get_total_flops())


def _compiled(case: Case, precision: str) -> float:
    """Seconds of forward and backward pass as they are over those compiled."""
    model = model_of(case).train().to(memory_format=torch.channels_last)
    images = torch.rand(LOAD.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(LOAD.batch) % 10

    def side(module: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(module(images), labels)
            torch.autograd.backward(loss)
            model.zero_grad()

        return run

    sides = [side(model), side(torch.compile(model))]
    alternate(sides, 2)
    plain, compiled = (median(seconds) for seconds in alternate(sides, 5))
    assert plain is not None
    assert compiled is not None
    return plain / compiled


if __name__ == "__main__":
    sys.exit(main())
