"""Training steps of the paper's networks, ours beside the authors' public code.

    python benchmarks/training.py [--authors PATH_OF_THEIR_CHECKOUT] [--device cuda]
    python benchmarks/training.py --quick

Both sides run in one process by turns, with the same batch and number of threads, on the same CIFAR-shaped synthetic
images. A figure is the median over rounds of a few steps each, after a warm-up of some rounds (the heap grows until all
that a step needs at once finds room). Ours is the whole engine
(`ttsv.training.loop.fit`: drawing the batch, augmentation, step, constraint, statistics; validation untimed); theirs is
the body of their loop on batches that lie ready in memory (their images come through PIL: that is left out). Without
--authors only ours runs. The full run takes some 15 minutes on a CPU; its record is `training` (CUDA: `training cuda`).
--quick takes single steps of toy networks, ours alone.

- steps: images per second, ours in float32 and in bf16, and the share of a step that drawing and augmenting take;
  ours of the TT networks over ours of the plain ones. On a CPU in batches of 16, and of 32 too.
- clip: what one clip of the whole network at rank 192 takes beside 100 steps.
- memory: peak resident size of a fresh process above what it held before the first step, in MiB (CUDA: peak of the
  device's allocator).
- inference: one SOC-TT layer beside one SOC layer of ours, n = 16, evaluation mode, over channels and ranks.
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from authors import checkout
from measuring import alternate, in_fresh_process, keep, parser, peak_mebibytes, ratio, resident_mebibytes
from ttsv.config.training import AugmentationConfig, TrainingConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import Clip, Constraint, Orthogonal
from ttsv.data import load_dataset
from ttsv.data.loading import Dataset
from ttsv.hardware.processor import computes_bf16, instruction_set
from ttsv.layers import SOC, SOCTT
from ttsv.models import create_model
from ttsv.runtime.determinism import random_state
from ttsv.runtime.devices import keep_freed_memory
from ttsv.training.feed import batches
from ttsv.training.loop import fit

HERE = Path(__file__)
IMAGES = {"cpu": "synthetic:3x32x32:10:400", "cuda": "synthetic:3x32x32:10:4000"}
STD = 0.2507


@dataclass(frozen=True)
class Case:
    """One network of the benchmark; `floors`: images per second over theirs, on a CPU and on a CUDA device."""

    model: str
    layer: str
    rank: int | None
    lambda_ort: float
    floors: tuple[float | None, float | None]

    @property
    def name(self) -> str:
        """As the record names it."""
        return f"{self.model} {self.layer}" + (f" rank {self.rank}" if self.rank else "")


CASES = (
    Case("wrn16-10", "dense", None, 0.0, (1.6, 2.5)),
    Case("wrn16-10", "tt", 192, 1e5, (2.0, 3.0)),
    Case("lipconvnet-5", "soc", None, 0.0, (None, None)),
    Case("lipconvnet-5", "soc-tt", 256, 5e3, (1.6, 3.0)),
)


TOYS = tuple(
    Case("single-conv", layer, rank, lambda_ort, (None, None))
    for layer, rank, lambda_ort in (("dense", None, 0.0), ("tt", 2, 1e5), ("soc", None, 0.0), ("soc-tt", 2, 5e3))
)
"""For runs that only show that the benchmark works."""


@dataclass(frozen=True)
class Load:
    """How much is measured: rounds of some steps each, after `warm_up` rounds."""

    device: torch.device
    batch: int
    steps: int
    rounds: int
    warm_up: int = 4


def main() -> int:
    shared = parser(__doc__, authors=True)
    shared.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    shared.add_argument("--threads", type=int, default=1)
    shared.add_argument("--peak", nargs=2, metavar=("SIDE", "CASE"), help=argparse.SUPPRESS)
    options = shared.parse_args()
    if options.quick and options.authors:
        shared.error("--quick takes toy networks, which the authors' code has not")
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as the workers do; it serves both sides
    cuda = options.device == "cuda"
    load = Load(torch.device(options.device), 128 if cuda else 16, 20 if cuda else 2, 5)
    cases: tuple[Case, ...] = CASES
    if options.quick:
        load, cases = replace(load, batch=2, steps=1, rounds=1, warm_up=0), TOYS
    if options.peak:  # for the process that asked, which reads nothing else
        side, place = options.peak
        print(json.dumps(_peak(side, cases[int(place)], options.authors, load)))
        return 0
    if len(precisions(options.device)) == 1:
        print(f"bf16 is left out: this processor ({instruction_set()}) has no instructions for it")
    record: dict[str, Any] = {"unit": "images per second", "batch": load.batch}
    if cuda:
        record["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        data = load_dataset(IMAGES[options.device], Path(folder))
        record["steps"] = {case.name: _steps(case, data, options.authors, load) for case in cases}
        if not cuda:
            twice = replace(load, batch=2 * load.batch)
            record["larger_batch"] = twice.batch
            record["steps of larger batches"] = {
                case.name: _steps(case, data, options.authors, twice) for case in cases if case.floors[cuda]
            }
        record["compressed over plain"] = _gains(cases, record["steps"], options.device)
        record["clip"] = _clip(cases[1], data, load)
    record["memory"] = _memories(options, cases)
    record["inference"] = _inference(load, (8,) if options.quick else (128, 256, 512, 1024))
    missed = [
        f"{case.name}: {found['ratio']:.2f} in float32, floor {floor}, {name}"
        for name in ("steps", "steps of larger batches")
        for case in cases
        if (floor := case.floors[cuda]) and (found := record.get(name, {}).get(case.name))
        if found["ratio"] and found["ratio"] < floor
    ]
    record["missed"] = missed
    print("\n".join(["missed:", *missed]) if missed else "no floor missed")
    if not options.quick:
        command = (
            f"python benchmarks/training.py{' --authors DIR' if options.authors else ''} --device {options.device}"
        )
        keep("training cuda" if cuda else "training", command, record)
    return 0


def _steps(case: Case, data: Dataset, authors: Path | None, load: Load) -> dict[str, Any]:
    """Images per second of both sides, by turns."""
    ours = {precision: our_rounds(case, data, load, precision) for precision in precisions(load.device.type)}
    theirs = their_rounds(case, data, authors, load) if authors else None
    seconds: dict[str, list[float]] = {name: [] for name in (*ours, "theirs")}
    for turn in range(load.rounds + load.warm_up):
        for name, side in [*ours.items(), ("theirs", theirs)]:
            if side is not None and (taken := next(side)) and turn >= load.warm_up:
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items() if taken}
    rates = {name: load.batch / taken for name, taken in medians.items()}
    feeding = _feeding(data, load) / medians["float32"]
    found = {
        "images_per_second": rates,
        "ratio": ratio(rates["float32"], rates["theirs"]) if authors else None,
        "ratio_bf16": ratio(rates["bf16"], rates["theirs"]) if authors and "bf16" in rates else None,
        "feeding_share": feeding,
    }
    shown = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
    gains = f"; {found['ratio']:.2f}x" if found["ratio"] else ""
    gains += f", bf16 {found['ratio_bf16']:.2f}x" if found["ratio_bf16"] else ""
    print(f"{case.name}, batch {load.batch}: images/s {shown}{gains}; feeding {feeding:.2%} of a step", flush=True)
    return found


def case_config(case: Case, load: Load, precision: str, *, rounds: int) -> TrialConfig:
    return TrialConfig(
        dataset=IMAGES[load.device.type],
        model=case.model,
        layer=case.layer,
        rank=case.rank,
        lambda_ort=case.lambda_ort,
        ort_normalizer="code",
        training=TrainingConfig(
            epochs=rounds,
            steps=load.steps,
            batch_size=load.batch,
            lr=0.01,
            schedule="constant",
            nesterov=case.model.startswith("wrn"),
            weight_decay=0.0 if case.layer == "soc-tt" else 1e-4,
            precision=precision,
        ),
        augmentation=AugmentationConfig(flip=True, pad=4, padding="symmetric"),
    )


def precisions(device: str) -> tuple[str, ...]:
    """Those that are measured: not bf16 on a processor that has no instructions for it, where it is far slower."""
    return ("float32",) if device == "cpu" and computes_bf16() is False else ("float32", "bf16")


def model_of(case: Case) -> nn.Module:
    with random_state(0, torch.device("cpu")):
        return create_model(case.model, num_classes=10, layer=case.layer, rank=case.rank, std=(STD,))


def _gains(cases: tuple[Case, ...], steps: dict[str, Any], device: str) -> dict[str, Any]:
    """What TT gains in our own training: images per second of each compressed network over those of the plain one."""
    found = {}
    for plain, compressed in (cases[:2], cases[2:]):
        speeds = [steps[case.name]["images_per_second"] for case in (compressed, plain)]
        found[compressed.name] = {
            name: speeds[0][name] / speeds[1][name] for name in precisions(device) if name in speeds[0]
        }
        shown = ", ".join(f"{gain:.2f}x in {precision}" for precision, gain in found[compressed.name].items())
        print(f"{compressed.name} over {plain.name}: {shown}", flush=True)
    return found


def our_rounds(
    case: Case, data: Dataset, load: Load, precision: str = "float32", *, config: TrialConfig | None = None
) -> Iterator[float]:
    """Seconds per step, round by round, of the whole engine, in a precision or as a configuration says."""
    config = config or case_config(case, load, precision, rounds=load.rounds + load.warm_up + 1)
    constraint: Constraint = Orthogonal(case.lambda_ort, normalizer="code")
    for metrics in fit(model_of(case), data, config, constraint, device=load.device):
        yield metrics.seconds / load.steps


def their_rounds(
    case: Case,
    data: Dataset,
    folder: Path | None,
    load: Load,
    *,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[float]:
    """Seconds per step, round by round, of their loop's body (`train.py`, `SOC/train_robust.py`).

    `around`: a context for each forward pass, such as autocast, which they have not.
    """
    step = _their_step(case, folder, load.device, around)
    images = (data.train.images.float() / 255 - 0.5) / 0.5
    while True:
        parts = [slice(place * load.batch, (place + 1) * load.batch) for place in range(load.steps)]
        ready = [(images[part].to(load.device), data.train.labels[part].to(load.device)) for part in parts]
        started = time.perf_counter()
        for pixels, labels in ready:
            step(pixels, labels)
        if load.device.type == "cuda":
            torch.cuda.synchronize()
        yield (time.perf_counter() - started) / load.steps


def _their_step(
    case: Case, folder: Path | None, device: torch.device, around: Callable[[], AbstractContextManager[object]]
) -> Callable[[Tensor, Tensor], None]:
    assert folder is not None
    with checkout(folder), random_state(0, torch.device("cpu")):
        regularizer = importlib.import_module("src.SOTT").orthogonal_loss
        if case.model == "wrn16-10":
            model = importlib.import_module("src.WideResNet").wide_resnet16_10(num_classes=10)
            if case.rank:
                importlib.import_module("src.tt_dec_layer").conv2tt(model, decomposition_rank=case.rank)
        else:
            kind = {"soc": ("skew", {}), "soc-tt": ("sott", {"decomposition_rank": case.rank})}[case.layer]
            robust_net = importlib.import_module("src.SOC.robust_net")
            model = robust_net.LipNet_n(kind[0], in_channels=32, num_blocks=1, num_classes=10, **kind[1])
    model = model.to(device).train()
    nesterov = case.model == "wrn16-10"
    decay = 0.0 if case.layer == "soc-tt" else 1e-4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=decay)
    criterion, seen = nn.CrossEntropyLoss(), [0.0]

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with around():
            logits = model(images)
        loss = criterion(logits.float(), labels)
        if case.rank:
            deviation, shapes = regularizer(model)
            seen.append((deviation / shapes).item())
            loss += (case.lambda_ort / shapes) * deviation
        loss.backward()
        optimizer.step()
        seen.append(loss.item())

    return step


def _feeding(data: Dataset, load: Load) -> float:
    """Seconds to draw and augment one batch."""
    train = data.train.to(load.device)
    config = case_config(CASES[0], load, "float32", rounds=1)
    count = len(train.labels) // load.batch * load.batch
    started, drawn = time.perf_counter(), 0
    for _ in range(10):
        drawn += sum(1 for _ in batches(train, config, 0, count))
    if load.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / drawn


def _clip(case: Case, data: Dataset, load: Load) -> dict[str, Any]:
    """One clip of the whole network beside 100 steps, weights as they are after some."""
    model = model_of(case)
    seconds = [
        m.seconds / load.steps
        for m in fit(model, data, case_config(case, load, "float32", rounds=2), Orthogonal(0.0), device=load.device)
    ]
    constraint = Clip(2.0)
    constraint.bind(model, 32, in_channels=3)
    taken: list[float] = []
    for step in range(2):
        constraint.project(model, step, force=True)
        taken.append(constraint.report().seconds - sum(taken))
    share = taken[-1] / (taken[-1] + 100 * seconds[-1])
    shown = f"first clip {taken[0]:.2f} s, the next {taken[1]:.2f} s"
    print(f"{case.name}: {shown}, {share:.1%} of training at one per 100 steps", flush=True)
    return {
        "first_seconds": taken[0],
        "next_seconds": taken[1],
        "step_seconds": seconds[-1],
        "share_of_training": share,
    }


def _memories(options: argparse.Namespace, cases: tuple[Case, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    shared = ["--device", options.device]
    shared += ["--authors", str(options.authors)] if options.authors else []
    shared += ["--quick"] if options.quick else []
    measured = precisions(options.device)
    sides = (*measured, "theirs") if options.authors else measured
    for place, case in enumerate(cases[:1] if options.quick else cases):
        peaks = {
            side: in_fresh_process(str(HERE), [*shared, "--peak", side, str(place)])
            for side in (sides[:1] if options.quick else sides)
        }
        found[case.name] = peaks
        print(f"{case.name}: peak MiB " + ", ".join(f"{side} {peak:.0f}" for side, peak in peaks.items()), flush=True)
    return found


def _peak(side: str, case: Case, authors: Path | None, load: Load) -> float:
    with tempfile.TemporaryDirectory() as folder:
        data = load_dataset(IMAGES[load.device.type], Path(folder))
        rounds = their_rounds(case, data, authors, load) if side == "theirs" else our_rounds(case, data, load, side)
        before = resident_mebibytes()
        next(rounds)
        if load.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return peak_mebibytes() - before


@torch.no_grad()
def _inference(load: Load, widths: tuple[int, ...]) -> dict[str, Any]:
    """Speed-up of SOC-TT over SOC by channels and rank (the paper's figure: up to 6 for c/4 and 3 for c/2)."""
    found: dict[str, Any] = {}
    for channels in widths:
        images = torch.randn(load.batch, channels, 16, 16, device=load.device)
        layers: list[nn.Module] = [SOC(channels, channels, 3)]
        layers += [SOCTT(channels, channels, 3, channels // share) for share in (4, 2)]
        sides = [_forward(layer.to(load.device).eval(), images) for layer in layers]
        alternate(sides, 1)
        seconds = [statistics.median(taken) for taken in alternate(sides, load.rounds) if taken]
        found[str(channels)] = {
            "c/4": seconds[0] / seconds[1],
            "c/2": seconds[0] / seconds[2],
            "soc_seconds": seconds[0],
        }
        print(
            f"SOC-TT, {channels} channels: {seconds[0] / seconds[1]:.1f}x at c/4, {seconds[0] / seconds[2]:.1f}x at c/2"
        )
    return found


def _forward(layer: nn.Module, images: Tensor) -> Callable[[], object]:
    def forward() -> None:
        layer(images)
        if images.is_cuda:
            torch.cuda.synchronize()

    return forward


if __name__ == "__main__":
    sys.exit(main())
