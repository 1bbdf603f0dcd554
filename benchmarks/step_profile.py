"""Where the time of a training step goes, ours beside the authors' public code, and what torch.compile makes of ours.

    python benchmarks/step_profile.py [--authors PATH_OF_THEIR_CHECKOUT]
    python benchmarks/step_profile.py --quick

One thread, CPU, WRN-16-10 dense and of rank 192 as `training.py` has them. Without --authors only ours runs. The full
run takes some 5 minutes; its record is `step_profile`. --quick takes a toy network, ours alone, and compiles nothing.

- shares: of the processor's time in torch's own profiler, by operator.
- of_products: operations per second of a step of ours in float32 (forward and backward, counted by torch as those of
  plain convolutions) over those of the product of two matrices of 2048 rows, which is what the processor can do at
  best: above 1 where Winograd's algorithm saves operations.
- compiled: seconds of forward and backward pass of ours over those of the same compiled by inductor, by turns.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from measuring import alternate, keep, median, parser
from training import CASES, IMAGES, TOYS, Case, Load, model_of, our_rounds, precisions, their_rounds
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
    shared = parser(__doc__, authors=True)
    options = shared.parse_args()
    if options.quick and options.authors:
        shared.error("--quick takes a toy network, which the authors' code has not")
    torch.set_num_threads(1)
    load, cases = (replace(LOAD, batch=2, steps=1, warm_up=0), TOYS[:1]) if options.quick else (LOAD, CASES[:2])
    record: dict[str, Any] = {"unit": "shares of the time; torch.compile over eager", "batch": load.batch}
    with tempfile.TemporaryDirectory() as folder:
        data = load_dataset(IMAGES["cpu"], Path(folder))
        for case in cases:
            sides = {
                "ours": our_rounds(case, data, load, "float32"),
                **({"ours bf16": our_rounds(case, data, load, "bf16")} if "bf16" in precisions("cpu") else {}),
            }
            if options.authors:
                sides["theirs"] = their_rounds(case, data, options.authors, load)
            shares = {name: _shares(partial(next, rounds)) for name, rounds in sides.items()}
            backend = "eager" if options.quick else "inductor"
            compiled = {precision: _compiled(case, load, precision, backend) for precision in precisions("cpu")}
            step = min(islice(our_rounds(case, data, load, "float32"), 3))
            reached = _operations(case, load) / step / _products_per_second(64 if options.quick else 2048)
            record[case.name] = {"shares": shares, "of_products": reached, "compiled": compiled}
            print(f"{case.name}: {reached:.0%} of the operations per second of a product of matrices")
            for name, parts in shares.items():
                print(f"  {name}: " + ", ".join(f"{part} {share:.0%}" for part, share in parts.items()))
            print("  compiled: " + ", ".join(f"{name} {gain:.2f}x" for name, gain in compiled.items()), flush=True)
    if not options.quick:
        command = f"python benchmarks/step_profile.py{' --authors DIR' if options.authors else ''}"
        keep("step_profile", command, record)
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


def _products_per_second(size: int) -> float:
    """Operations per second of a product of two square matrices in float32, the fastest of five."""
    left, right = torch.randn(2, size, size)
    (seconds,) = alternate([lambda: left @ right], 5)
    assert seconds is not None
    return 2 * size**3 / min(seconds)


def _operations(case: Case, load: Load) -> int:
    """Operations of convolutions and matrix products in one step."""
    images = torch.rand(load.batch, 3, 32, 32)
    model = model_of(case).train()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(model(images).sum())
    return int(counter.get_total_flops())


def _compiled(case: Case, load: Load, precision: str, backend: str) -> float:
    """Seconds of forward and backward pass as they are over those compiled."""
    model = model_of(case).train().to(memory_format=torch.channels_last)
    images = torch.rand(load.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(load.batch) % 10

    def side(module: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(module(images), labels)
            torch.autograd.backward(loss)
            model.zero_grad()

        return run

    sides = [side(model), side(torch.compile(model, backend=backend))]
    alternate(sides, 2)
    plain, compiled = (median(seconds) for seconds in alternate(sides, 5))
    assert plain is not None
    assert compiled is not None
    return plain / compiled


if __name__ == "__main__":
    sys.exit(main())
