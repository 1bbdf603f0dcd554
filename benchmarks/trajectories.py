"""Training by both programs, ours and the authors', from the same weights on the same batches, step by step.

    python benchmarks/trajectories.py --authors DIR [--steps N] [--seed S] [--quick]
        [--depth D] [--widths N W] [--channels N W] [--rank R]

Both train the same layers: WRN-D-N (WRN-10-1, narrow) and WRN-D-W (WRN-10-4, wide), dense, TT with lambda_ort, clipped,
divided; and two stacked SOC or SOC-TT layers of few and of many channels, in float64 and in float32. Printed is, for
every step, the difference of the losses, and after the last that of all weights, relative to their norm.

Where they differ for a reason (docs/traps.md), the same case is run again with a switch for every reason: ours then
does as theirs does. With all switches on nothing may remain but rounding, which shows that there is no other reason;
where there are two, each is switched alone, too.

- "no QR": theirs clips the cores of TT layers between the frames that lambda_ort > 0 leaves, without QR;
- "swapped strides": its polyphase blocks of strided TT layers have input and output channels exchanged;
- "noise": its division takes two power iterations and a half from fresh noise in every step (drawn from one seed on
  both sides), which of strided layers leave out the last row and column of pixels;
- "four norms": its SOC follows four norms from four noises, 50 steps at the first pass and at every 200th, one in
  others, and takes the smallest; the lengths of their vectors are computed in float32 whatever the weights are;
- "theirs in float64": their clip casts singular values to complex64, so it computes in float32 whatever the weights
  are. No other algorithm has the same rounding errors, so this switch is on their side: their program runs with
  complex128 in that place. There is nothing to switch where all is in float32.

Nothing of theirs is copied: it is imported from DIR.
"""

import importlib
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from authors import checkout
from measuring import keep, parser
from ttsv.config.training import TrainingConfig
from ttsv.constraints import Clip, Compose, Constraint, Divide, Orthogonal
from ttsv.constraints.power import power_step
from ttsv.constraints.protocol import LayerNorms
from ttsv.layers import SOC, SOCTT, MinMax, TTConv2d
from ttsv.layers.soc import soc_iterations
from ttsv.models import create_model
from ttsv.spectral.clipping import clip_conv
from ttsv.training.optimizers import backward_and_step, make_optimizer

DELTA, EVERY, BATCH_NORM, LR, DECAY = 0.5, 2, 2.0, 0.01, 1e-4
"""Of both sides: the bound of norms, steps between clips, batch norm's bound, SGD."""
STACKED = ("soc", "soc-tt")
RECORDED = {"seed": 0, "depth": 10, "widths": (1, 4), "channels": (6, 64), "rank": 4}
"""The options' defaults, of which there is a record."""


class Switch(StrEnum):
    """A reason for which the programs differ, taken away."""

    NO_QR = "no QR"
    SWAPPED = "swapped strides"
    NOISE = "noise"
    FOUR_NORMS = "four norms"
    DOUBLE = "theirs in float64"


@dataclass(frozen=True)
class Case:
    """One pair of trainings, with the switches that are on."""

    layer: str
    width: int
    method: str = "none"
    on: tuple[Switch, ...] = ()
    depth: int = 10
    rank: int = 4

    @property
    def lambda_ort(self) -> float:
        """The weight of the orthogonal loss, where there are frames."""
        return 1e3 if self.layer in ("tt", "soc-tt") else 0.0

    @property
    def stacked(self) -> bool:
        """Whether the network is two layers, not a WRN."""
        return self.layer in STACKED

    def __str__(self) -> str:
        """As it is printed and recorded."""
        method = {"none": ", lambda_ort" if self.layer == "tt" else "", "clip": ", clip", "divide": ", division"}
        layer = self.layer if self.layer == "dense" else self.layer.upper()
        return f"{layer}{method[self.method]}{' as theirs: ' if self.on else ''}{', '.join(self.on)}"


def cases(width: int, channels: int, dtype: torch.dtype) -> list[Case]:
    """Each method of one size, as they are and with switches."""
    double = (Switch.DOUBLE,) if dtype is torch.float64 else ()
    found = [Case("dense", width), Case("tt", width), Case("dense", width, "clip")]
    found += [Case("dense", width, "clip", double)] if double else []
    switches: list[tuple[Switch, ...]] = [(), (Switch.NO_QR,), (Switch.SWAPPED,), (Switch.NO_QR, Switch.SWAPPED)]
    found += [Case("tt", width, "clip", on + (double if on else ())) for on in switches]
    found += [Case("dense", width, "divide", on) for on in ((), (Switch.NOISE,))]
    return found + [Case(layer, channels, on=on) for layer in STACKED for on in ((), (Switch.FOUR_NORMS,))]


def main() -> int:
    shared = parser(__doc__, authors=True)
    shared.add_argument("--steps", type=int, default=4)
    shared.add_argument("--seed", type=int, help="of weights, images and noise")
    shared.add_argument("--depth", type=int, help="of the two WRNs: 10, 16, 22 and so on")
    shared.add_argument("--widths", type=int, nargs=2, help="of the two WRNs")
    shared.add_argument("--channels", type=int, nargs=2, help="of the two stacks of SOC layers, even")
    shared.add_argument("--rank", type=int, help="of TT and SOC-TT layers, below all of these")
    shared.set_defaults(**RECORDED)
    options = shared.parse_args()
    torch.set_num_threads(1)
    if options.authors is None and not options.quick:
        print("left out: needs --authors DIR, a checkout of WhiteTeaDragon/practical_svd_conv to compare with")
        return 0
    steps = 2 if options.quick else options.steps
    record: dict[str, Any] = {"unit": "relative difference of all weights after the last step", "steps": steps}
    sizes = dict(zip(("narrow", "wide"), zip(options.widths, options.channels, strict=True), strict=True))
    for dtype in (torch.float64,) if options.quick else (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        record[name] = {}
        for size, (width, channels) in sizes.items():
            record[name][size] = {}
            for case in cases(width, channels, dtype) if size == "narrow" or not options.quick else ():
                case = replace(case, depth=options.depth, rank=options.rank)
                losses, weights = compare(case, dtype, steps, options.seed, options.authors)
                shown = " ".join(f"{loss:.1e}" for loss in losses)
                print(f"{name} {size} {case}: losses differ by {shown}; weights by {weights:.1e}", flush=True)
                record[name][size][str(case)] = float(f"{weights:.2g}")
    asked = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items()}
    if not options.quick and RECORDED.items() <= asked.items():
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


def compare(case: Case, dtype: torch.dtype, steps: int, seed: int, folder: Path | None) -> tuple[list[float], float]:
    """Differences of the losses, step by step, and of all weights after the last, relative; without DIR to our own."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand((steps, 8, 3, 32, 32), generator=generator, dtype=dtype)
    labels = torch.randint(0, 10, (steps, 8), generator=generator)
    with default_dtype(dtype):
        ours, step = our_side(case, seed)
        if folder is None:
            theirs, their_step = our_side(case, seed)
        else:
            with checkout(folder):
                theirs, their_step = their_side(case, ours, seed)
        losses = [abs(step(*batch) - their_step(*batch)) for batch in zip(images, labels, strict=True)]
    mine, other = weights(ours), weights(theirs)
    assert mine.keys() == other.keys()
    scale = torch.cat([value.flatten() for value in mine.values()]).norm()
    moved = torch.cat([(value - other[name]).flatten() for name, value in mine.items()]).norm()
    return losses, (moved / scale).item()


class ClipAsTheirs(Clip):
    """A clip of TT layers that goes their way where a switch says so."""

    def __init__(self, switches: Collection[Switch]) -> None:
        super().__init__(DELTA, every=EVERY, rescale=False)
        self._switches = switches

    def _stacks(self, layers: Mapping[str, nn.Module]) -> list[list[str]]:
        return []  # each layer goes through `_project_layer`

    def _make_frames_orthonormal(self, layers: Mapping[str, nn.Module]) -> dict[str, float]:
        return {} if Switch.NO_QR in self._switches else super()._make_frames_orthonormal(layers)

    def _project_layer(self, name: str, layer: nn.Module, seen: tuple[int, ...], force: bool) -> LayerNorms:
        if not isinstance(layer, TTConv2d):
            return super()._project_layer(name, layer, seen, force)
        swapped = Switch.SWAPPED in self._switches
        core = layer.core.detach().transpose(0, 1) if swapped else layer.core.detach()
        clipped = clip_conv(core, DELTA, seen, stride=layer.stride, rescale=False)
        layer.core.copy_(clipped.transpose(0, 1) if swapped else clipped)
        return LayerNorms(math.nan, math.nan)


class DivideAsTheirs(Divide):
    """A division by what two power iterations from fresh noise find, and half a step more."""

    def _project_layer(self, name: str, layer: nn.Module, seen: tuple[int, ...], force: bool) -> LayerNorms:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        shape = (1, layer.in_channels, *seen) if isinstance(layer, nn.Conv2d) else (layer.in_features, 1)
        vector = torch.normal(size=shape, mean=0, std=1)
        if isinstance(layer, nn.Linear):
            vector = power_step(layer, seen, "zero-padded", 2, vector.T).vector
            image = vector @ layer.weight.T
        else:
            for _ in range(2):
                vector = power_step(layer, seen, "zero-padded", 1, vector).vector
                # Their transposed convolution gives the smallest image of this many outputs: of 32 pixels 31 at stride
                # 2, as if nothing came from the last row and column.
                for axis in (2, 3):
                    unread = (vector.shape[axis] - layer.kernel_size[0] + 2 * int(layer.padding[0])) % layer.stride[0]
                    vector.narrow(axis, vector.shape[axis] - unread, unread).zero_()
            image = functional.conv2d(vector, layer.weight, stride=layer.stride, padding=layer.padding)
        norm = (image.norm() / vector.norm()).item()
        layer.weight.div_(max(1.0, norm / DELTA))
        return LayerNorms(norm, min(norm, DELTA))


class FourNorms(SOC):
    """A SOC layer that follows the norms of all four unfoldings, from vectors of noise, and divides by the smallest."""

    vectors: list[tuple[Tensor, Tensor]]
    passes: int

    AXES = (((1, 3), (0, 2)), ((1, 2), (0, 3)), ((1, 2, 3), (0,)), ((0, 2, 3), (1,)))
    """Over which axes of the kernel a vector of the one side and of the other is summed, for each unfolding."""

    @classmethod
    def become(cls, layer: SOC) -> None:
        """Makes one of a layer that is there, within whatever it is part of."""
        layer.__class__ = cls
        assert isinstance(layer, cls)
        shape, layer.passes, layer.vectors = layer.weight.shape, 0, []
        for axes in cls.AXES:
            # A vector has the axes that the other one is summed over.
            sides = [[n if axis in own else 1 for axis, n in enumerate(shape)] for own in axes]
            layer.vectors.append((_unit(torch.randn(sides[0])), _unit(torch.randn(sides[1]))))

    @torch.no_grad()
    def _iterate(self, skew: Tensor, iterations: int) -> None:
        for _ in range(soc_iterations("code", self.passes)):
            for index, (first, second) in enumerate(self.AXES):
                right, _ = self.vectors[index]
                left = _unit((skew * right).sum(first, keepdim=True))
                self.vectors[index] = _unit((skew * left).sum(second, keepdim=True)), left
        self.passes += 1

    def _scaled(self, skew: Tensor) -> Tensor:
        norms = torch.stack([(skew * right * left).sum() for right, left in self.vectors])
        return skew * self.correction / norms.min()


def _unit(vector: Tensor) -> Tensor:
    """The vector over its length, which is computed in float32."""
    return vector / max(vector.float().square().sum().sqrt().item(), 1e-12)


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


def our_side(case: Case, seed: int) -> tuple[nn.Module, Step]:
    """Our network and training step."""
    torch.manual_seed(seed + 1)
    if case.stacked:
        kinds: dict[str, Callable[[int, int, int], nn.Module]] = {
            "soc": lambda i, o, s: SOC(i, o, 3, s),
            "soc-tt": lambda i, o, s: SOCTT(i, o, 3, case.rank, s),
        }
        model: nn.Module = Stack(kinds[case.layer], case.width, 2)
    else:
        name, rank = f"wrn{case.depth}-{case.width}", case.rank if case.layer == "tt" else None
        model = create_model(name, num_classes=10, layer=case.layer, rank=rank, mean=[0.0], std=[1.0])
    if Switch.FOUR_NORMS in case.on:
        for layer in [layer for layer in model.modules() if isinstance(layer, SOC)]:
            FourNorms.become(layer)
    parts: list[Constraint] = [Orthogonal(case.lambda_ort, normalizer="code")]
    if case.method == "clip":
        imitated = {Switch.NO_QR, Switch.SWAPPED} & set(case.on)
        parts.append(ClipAsTheirs(imitated) if imitated else Clip(DELTA, every=EVERY, rescale=False))
    if case.method == "divide":
        kind = DivideAsTheirs if Switch.NOISE in case.on else Divide
        parts.append(kind(DELTA, DELTA, BATCH_NORM, batch_norm_eps=1e-6, power_iterations=2))
    constraint = Compose(*parts)
    constraint.bind(model, 32, in_channels=3)
    optimizer = make_optimizer(model, TrainingConfig(lr=LR, momentum=0.9, nesterov=True, weight_decay=DECAY))
    optimizer.zero_grad()
    model.train()
    done = 0

    def step(images: Tensor, labels: Tensor) -> float:
        nonlocal done
        loss = functional.cross_entropy(model(images), labels)
        backward_and_step(loss + constraint.penalty(model), optimizer)
        done += 1
        torch.manual_seed(seed + done)
        constraint.project(model, done)
        return loss.item()

    return model, step


class InDouble(ModuleType):
    """torch, in which complex64 is complex128."""

    complex64 = torch.complex128

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def their_side(case: Case, ours: nn.Module, seed: int) -> tuple[nn.Module, Step]:
    """Their network with our weights, and the body of their loops (`train.py`, `SOC/train_robust.py`)."""
    tt, utils = (importlib.import_module(f"src.{name}") for name in ("tt_dec_layer", "utils"))
    sott, wide = (importlib.import_module(f"src.{name}") for name in ("SOTT", "WideResNet"))
    skew = importlib.import_module("src.SOC.skew_symmetric_conv")
    double = Switch.DOUBLE in case.on
    vars(utils)["torch"] = InDouble("torch") if double else torch
    if case.stacked:
        theirs: dict[str, Callable[[int, int, int], nn.Module]] = {
            "soc": lambda i, o, s: skew.SOC(i, o, 3, s),
            "soc-tt": lambda i, o, s: sott.SOTT(i, o, 3, case.rank, s, 1),
        }
        model: nn.Module = Stack(theirs[case.layer], case.width, 2)
    else:
        model = wide.wide_resnet(case.depth, case.width, 0, 10, conv_shortcut=False)
        if case.layer == "tt":
            tt.conv2tt(model, decomposition_rank=case.rank)
    give_weights(ours, model)
    sizes = output_sizes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=DECAY)
    mode = {"clip": "clip", "divide": "divide-by-largest"}
    linear = DELTA if case.method == "divide" else None
    own = torch.get_default_dtype()
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
        torch.manual_seed(seed + done)
        with torch.no_grad():
            if case.method == "divide":
                utils.clip_batch_norm(model, BATCH_NORM)
            if case.method == "divide" or (case.method == "clip" and done % EVERY == 0):
                # Their clip multiplies by complex64: unless that is switched off, all of it has to be in float32.
                with default_dtype(torch.float32 if case.method == "clip" and not double else own):
                    utils.constrain_conv(
                        model,
                        mode=mode[case.method],
                        conv_clip_assign_value=DELTA,
                        linear_clip_assign_value=linear,
                        orthogonal=bool(case.lambda_ort),
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
        norms = own.core if hasattr(own, "core") else own
        if isinstance(norms, FourNorms):
            for number, (right, left) in enumerate(norms.vectors, start=1):
                getattr(layer, f"u{number}").copy_(right)
                getattr(layer, f"v{number}").copy_(left)


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
