"""Training by both programs, ours and the authors', from the same weights on the same batches, step by step.

    python benchmarks/trajectories.py --authors DIR [--steps N] [--quick]

Both train the same layers: WRN-10-1 (narrow) and WRN-10-4 (wide), dense, TT with lambda_ort, clipped, divided; and two
stacked SOC or SOC-TT layers of few and of many channels, in float64 and in float32. Printed is, for every step, the
difference of the losses, and after the last that of all weights, relative to their norm. Where a correction is
documented (docs/traps.md) the two differ, and a second run in which neither side has that choice shows that it is the
only reason:

- clip of TT layers: they skip the QR where lambda_ort > 0 (their argument `orthogonal`), and swap the channels of
  strided layers, so the run without has QR on both sides, in two layers without strides and without momentum, which
  would keep to factors whose signs QR turns;
- division: two power iterations from fresh noise each step against one from a kept vector; without: exact norms;
- SOC: estimates of four norms against two; without: all iterated to convergence at every step.

Their functions compute some things in float32 whatever the weights are (norms of vectors, a cast to complex64), so a
run in float64 need not agree to more than 1e-7 there. Nothing of theirs is copied: it is imported from DIR.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from authors import checkout
from measuring import keep, parser
from ttsv.config.trial import TrainingConfig
from ttsv.constraints import Clip, Compose, Constraint, Divide, Orthogonal
from ttsv.layers import SOC, SOCTT, MinMax, TTConv2d
from ttsv.models import create_model
from ttsv.training.optimizers import backward_and_step, make_optimizer

DELTA, EVERY, BATCH_NORM, LR, DECAY, RANK, CONVERGED = 0.5, 2, 2.0, 0.01, 1e-4, 4, 300
"""Of both sides: the bound of norms, steps between clips, batch norm's bound, SGD, TT ranks, iterations to converge."""
EXACT: dict[str, Any] = {"power_iterations": "exact", "operator": "periodic"}
OURS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "tt": lambda i, o, s: TTConv2d(i, o, 3, RANK, s, 1),
    "soc": lambda i, o, s: SOC(i, o, 3, s),
    "soc-tt": lambda i, o, s: SOCTT(i, o, 3, RANK, s),
}


@dataclass(frozen=True)
class Case:
    """One pair of trainings.

    `corrected`: both as they are; else what differs by the `correction` is taken from both.
    """

    name: str
    layer: str
    width: int
    method: str = "none"
    corrected: bool = True
    correction: str = ""

    @property
    def lambda_ort(self) -> float:
        """The weight of the orthogonal loss, where there are frames."""
        return 1e3 if self.layer in ("tt", "soc-tt") else 0.0

    @property
    def momentum(self) -> float:
        """None where both factorize by QR: its signs, of which the product knows nothing, turn factors under it."""
        return 0.0 if self.layer == "tt" and not self.corrected else 0.9

    @property
    def stacked(self) -> bool:
        """Whether the network is two layers, not a WRN."""
        return self.layer.startswith("soc") or (self.layer == "tt" and not self.corrected)


def cases() -> list[Case]:
    """Narrow and wide, each method; those with a documented correction twice."""
    found: list[Case] = []
    for size, width, channels in (("narrow", 1, 6), ("wide", 4, 64)):
        found += [Case(f"{size} dense", "dense", width), Case(f"{size} TT, lambda_ort", "tt", width)]
        found.append(Case(f"{size} dense, clip", "dense", width, "clip"))
        tt = Case(f"{size} TT, clip", "tt", width, "clip", correction="QR and strided layers")
        divided = Case(f"{size} dense, division", "dense", width, "divide", correction="the power iteration")
        found += [tt, replace(tt, width=channels, corrected=False), divided, replace(divided, corrected=False)]
        for layer in ("soc", "soc-tt"):
            skew = Case(f"{size} {layer.upper()}", layer, channels, correction="the power iteration")
            found += [skew, replace(skew, corrected=False)]
    return found


def main() -> int:
    shared = parser(__doc__, authors=True)
    shared.add_argument("--steps", type=int, default=10)
    options = shared.parse_args()
    torch.set_num_threads(1)
    if options.authors is None:
        said = (
            "missing: --authors DIR, a checkout of WhiteTeaDragon/practical_svd_conv; there is nothing to compare with"
        )
        print(said)
        if not options.quick:
            return 2
    steps = 2 if options.quick else options.steps
    record: dict[str, Any] = {"unit": "relative difference of all weights after the last step", "steps": steps}
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        chosen = [case for case in cases() if case.name.startswith("narrow")] if options.quick else cases()
        record[name] = {}
        for case in chosen:
            losses, weights = compare(case, dtype, steps, options.authors)
            kind = "" if not case.correction else f" ({'with' if case.corrected else 'without'}: {case.correction})"
            shown = " ".join(f"{loss:.1e}" for loss in losses)
            print(f"{name} {case.name}{kind}: losses differ by {shown}; weights by {weights:.1e}", flush=True)
            record[name][case.name + kind] = weights
    if not options.quick:
        keep("trajectories", f"python benchmarks/trajectories.py --authors DIR --steps {steps}", record)
    return 0


Step = Callable[[Tensor, Tensor], float]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, what is made without a type has this one: theirs makes arrays so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare(case: Case, dtype: torch.dtype, steps: int, folder: Path | None) -> tuple[list[float], float]:
    """Differences of the losses, step by step, and of all weights after the last, relative; without DIR to our own."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((steps, 8, 3, 32, 32), generator=generator, dtype=dtype)
    labels = torch.randint(0, 10, (steps, 8), generator=generator)
    with default_dtype(dtype):
        ours, step = our_side(case)
        if folder is None:
            theirs, their_step = our_side(case)
        else:
            with checkout(folder):
                theirs, their_step = their_side(case, ours)
        losses = [abs(step(*batch) - their_step(*batch)) for batch in zip(images, labels, strict=True)]
    mine, other = weights(ours), weights(theirs)
    assert mine.keys() == other.keys()
    scale = torch.cat([value.flatten() for value in mine.values()]).norm()
    moved = torch.cat([(value - other[name]).flatten() for name, value in mine.items()]).norm()
    return losses, (moved / scale).item()


class Stack(nn.Module):
    """Two convolutions with MinMax between them and a linear head."""

    def __init__(self, make: Callable[[int, int, int], nn.Module], channels: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = make(3, channels, stride), make(channels, channels, 1)
        self.head = nn.Linear(channels, 10)
        self.activation = MinMax()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of (batch, 3, n, n)."""
        features = self.second(self.activation(self.first(images)))
        logits: Tensor = self.head(functional.avg_pool2d(features, features.shape[-1]).flatten(1))
        return logits


def our_side(case: Case) -> tuple[nn.Module, Step]:
    """Our network and training step."""
    torch.manual_seed(1)
    if case.stacked:
        model: nn.Module = Stack(OURS[case.layer], case.width, 2 if case.layer.startswith("soc") else 1)
    else:
        rank = RANK if case.layer == "tt" else None
        model = create_model(f"wrn10-{case.width}", num_classes=10, layer=case.layer, rank=rank, mean=[0.0], std=[1.0])
    parts: list[Constraint] = [Orthogonal(case.lambda_ort, normalizer="code")]
    if case.method == "clip":
        parts.append(Clip(DELTA, every=EVERY, rescale=False))
    if case.method == "divide":
        taken: dict[str, Any] = {"power_iterations": 2} if case.corrected else EXACT
        parts.append(Divide(DELTA, DELTA, BATCH_NORM, batch_norm_eps=1e-6, **taken))
    constraint = Compose(*parts)
    constraint.bind(model, 32, in_channels=3)
    optimizer = make_optimizer(
        model, TrainingConfig(lr=LR, momentum=case.momentum, nesterov=case.momentum > 0, weight_decay=DECAY)
    )
    optimizer.zero_grad()
    model.train()
    done = 0

    def step(images: Tensor, labels: Tensor) -> float:
        nonlocal done
        if not case.corrected:
            for layer in model.modules():
                if isinstance(layer, SOC):
                    layer.refresh(CONVERGED)
        loss = functional.cross_entropy(model(images), labels)
        backward_and_step(loss + constraint.penalty(model), optimizer)
        done += 1
        constraint.project(model, done)
        return loss.item()

    return model, step


def their_side(case: Case, ours: nn.Module) -> tuple[nn.Module, Step]:
    """Their network with our weights, and the body of their loops (`train.py`, `SOC/train_robust.py`)."""
    tt, utils = (importlib.import_module(f"src.{name}") for name in ("tt_dec_layer", "utils"))
    sott, wide = (importlib.import_module(f"src.{name}") for name in ("SOTT", "WideResNet"))
    skew = importlib.import_module("src.SOC.skew_symmetric_conv")
    if case.stacked:
        theirs: dict[str, Callable[[int, int, int], nn.Module]] = {
            "tt": lambda i, o, s: tt.ConvDecomposed2D_t(i, o, 3, RANK, stride=(s, s), padding=(1, 1)),
            "soc": lambda i, o, s: skew.SOC(i, o, 3, s),
            "soc-tt": lambda i, o, s: sott.SOTT(i, o, 3, RANK, s, 1),
        }
        model: nn.Module = Stack(theirs[case.layer], case.width, 2 if case.layer.startswith("soc") else 1)
    else:
        model = wide.wide_resnet(10, case.width, 0, 10, conv_shortcut=False)
        if case.layer == "tt":
            tt.conv2tt(model, decomposition_rank=RANK)
    give_weights(ours, model)
    sizes = output_sizes(model)
    if not case.corrected:
        for part in model.modules():
            layer: Any = part
            if hasattr(layer, "update_iters"):
                layer.init_iters = layer.update_iters = CONVERGED
    momentum = case.momentum
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, nesterov=momentum > 0, weight_decay=DECAY)
    mode = {"clip": "clip", "divide": "divide-by-largest" if case.corrected else "divide-by-exact-largest"}
    linear = DELTA if case.method == "divide" else None
    done = 0

    def step(images: Tensor, labels: Tensor) -> float:
        nonlocal done
        done += 1
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        seen = loss.item()
        if case.lambda_ort:
            deviation, shapes = sott.orthogonal_loss(model)
            loss = loss + (case.lambda_ort / shapes) * deviation
        torch.autograd.backward(loss)
        optimizer.step()
        with torch.no_grad():
            if case.method == "divide":
                utils.clip_batch_norm(model, BATCH_NORM)
            if case.method == "divide" or (case.method == "clip" and done % EVERY == 0):
                # Their clip multiplies by complex64: it computes in float32 whatever the weights are.
                with default_dtype(torch.float32 if case.method == "clip" else torch.get_default_dtype()):
                    utils.constrain_conv(
                        model,
                        mode=mode[case.method],
                        conv_clip_assign_value=DELTA,
                        linear_clip_assign_value=linear,
                        orthogonal=bool(case.lambda_ort) and case.corrected,
                        outputs=sizes,
                    )
        return seen

    model.train()
    return model, step


def output_sizes(model: nn.Module) -> list[list[int]]:
    """Sizes of what each of their convolutions gives for 32 x 32 pixels, in the order in which they are clipped."""
    found: dict[str, list[int]] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) or hasattr(m, "K2")}

    def note(name: str) -> Callable[..., None]:
        return lambda _layer, _inputs, output: found.update({name: list(output.shape[2:])})

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, 32, 32))
    for handle in handles:
        handle.remove()
    return [found[name] for name in layers]


@torch.no_grad()
def give_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Writes our weights into their layers of the same names; batch norm is the same from the start."""
    for name, part in theirs.named_modules():
        layer: Any = part
        kinds = nn.Conv2d | nn.Linear
        if not (isinstance(part, kinds) or hasattr(layer, "K2") or hasattr(layer, "random_conv_filter")):
            continue
        own: Any = ours.get_submodule(name)
        if hasattr(layer, "K2"):
            if layer.K1 is not None:
                layer.K1.copy_(own.k1)
                layer.K3.copy_(own.k3)
            core = own.core if hasattr(own, "core") else own.weight
            layer.K2.copy_(core.weight if isinstance(core, SOC) else core.permute(1, 2, 3, 0))
        elif isinstance(part, kinds):
            layer.weight.copy_(own.weight)
        else:
            layer.random_conv_filter.copy_(own.weight)
        if getattr(layer, "bias", None) is not None:
            layer.bias.copy_(own.bias)


@torch.no_grad()
def weights(model: nn.Module) -> dict[str, Tensor]:
    """Kernels of either side by the layers' names, a TT layer's merged, which QR leaves as it is."""
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        part: Any = layer
        if isinstance(layer, TTConv2d):
            found[name] = layer.dense_kernel()
        elif isinstance(layer, SOCTT):
            found[name] = torch.cat([part.k1.flatten(), part.core.weight.flatten(), part.k3.flatten()])
        elif type(layer).__name__ == "SOTT":
            found[name] = torch.cat([value.flatten() for value in (part.K1, part.K2, part.K3)])
        elif hasattr(layer, "K2"):
            found[name] = part.K2.permute(3, 0, 1, 2)
            if part.K1 is not None:
                found[name] = torch.einsum("ia,akjb,bo->oikj", part.K1, part.K2, part.K3)
        elif hasattr(layer, "random_conv_filter"):
            found[name] = part.random_conv_filter
        elif isinstance(layer, nn.Conv2d | nn.Linear | SOC) and not name.endswith(".core"):
            found[name] = part.weight
    return {name: value.detach().clone() for name, value in found.items()}


if __name__ == "__main__":
    sys.exit(main())
