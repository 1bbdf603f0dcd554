"""Values of the library that must not change: spectra, bounds, clips, divisions, layers, networks, projections, data.

`golden_values.json` holds each value as the code gave it before its modules moved, in float64. What rounding may change
from one processor to another is let pass, and nothing else; a value that changes on purpose is written anew by
`python -m tests.ttsv.test_golden_values`.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttsv.constraints import Clip, Compose, Divide, Orthogonal
from ttsv.data import load_dataset
from ttsv.layers import SOC, SOCTT, MinMax, TTConv1d, TTConv2d, TTConv3d, densify, orthogonal_loss, tensorize
from ttsv.metrics import compression, empirical_lipschitz, expected_calibration_error
from ttsv.models import create_model, layer_shapes
from ttsv.spectral import (
    clamp_conv,
    clamp_matrix,
    clip_conv,
    clip_matrix,
    clip_tt,
    conv_norm,
    conv_norm_bounds,
    conv_singular_values,
    divide_conv,
    model_spectra,
    tt_singular_values,
)
from ttsv.tt import orthogonalize, tt_error, tt_svd, tt_to_dense

GOLDEN = Path(__file__).parent / "golden_values.json"
TOLERANCE = 1e-12
ITERATED = 1e-9
"""Relative difference of what iterations lead to, whose rounding adds up."""

Values = list[float | int | str]


def sines(*shape: int) -> Tensor:
    """`sin(1), sin(2), ...` in float64: as good as random, and the same everywhere."""
    return torch.sin(torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)).reshape(shape)


def chirps(*shape: int) -> Tensor:
    """`sin(1), sin(4), sin(9), ...` in float64: of full rank, where `sines` have rank 2 however they are unfolded.

    What acts on singular vectors of a value that is 0 needs it: every processor's LAPACK chooses those as it likes.
    """
    return torch.sin(torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).square()).reshape(shape)


def digest(*tensors: Tensor) -> Values:
    """Sum, norm and a weighted sum of each tensor: a change of any element, or of two, changes one of them."""
    found: Values = []
    for tensor in tensors:
        flat = tensor.detach().double().flatten()
        found += [
            flat.sum().item(),
            flat.norm().item(),
            (flat * torch.cos(torch.arange(len(flat)).double())).sum().item(),
        ]
    return found


@contextmanager
def reproducible(seed: int = 0) -> Iterator[None]:
    """Inside, new weights are float64 and drawn from the seed, on one thread."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)


def small_net() -> nn.Module:
    """Every kind of layer that a projection writes, with norms above 1."""
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        TTConv2d(8, 12, 3, (4, 5), padding=1),
        TTConv2d(12, 6, 3, 4, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Flatten(),
        nn.Linear(4 * 64, 5),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(2 * chirps(*parameter.shape) / math.sqrt(parameter[0].numel()))
    return model


def projected(constraint: Any, times: int = 1, **bind: Any) -> Values:
    """Weights, penalty, report and state after some projections, the last one forced."""
    model = small_net()
    constraint.bind(model, 8, **bind)
    found: Values = digest(torch.as_tensor(constraint.penalty(model)))[:1]
    for step in range(1, times + 1):
        constraint.project(model, step)
    constraint.project(model, times + 1, force=True)
    report = constraint.report()
    for name, norms in report.layers.items():
        found += [name, norms.before, norms.after, norms.measure, -1.0 if norms.smallest is None else norms.smallest]
    found += [report.projections, *digest(*model.parameters())]
    return found + digest(*constraint.state_dict().get("vectors", {}).values())


def built(name: str, *, seen: tuple[int, ...] = (), **arguments: Any) -> Values:
    """A network's weights as they are drawn, its logits for one image, its compression."""
    arguments = {"num_classes": 10} | arguments
    model = create_model(name, **arguments).eval()
    found: Values = [sum(p.numel() for p in model.parameters()), compression(model)]
    found += digest(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    if seen:
        with torch.no_grad():
            found += digest(model(sines(*seen).abs().to(next(model.parameters()).dtype)))
    return found


def trained(layer: nn.Module, *shape: int) -> Values:
    """Output and gradients of a layer."""
    images = sines(*shape).to(next(layer.parameters()).dtype).requires_grad_()
    outputs = layer(images)
    outputs.square().sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert images.grad is not None
    return digest(outputs, images.grad, *gradients)


def whole_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), MinMax(), SOC(8, 8, 3), nn.Conv2d(8, 6, 3, stride=2, padding=1))


def prior_art(name: str, *arguments: Any, **options: Any) -> Values:
    """float32 only."""
    from ttsv.layers import prior_art as module

    torch.set_default_dtype(torch.float32)
    layer = getattr(module, name)(*arguments, **options).eval()
    spectra = model_spectra(nn.Sequential(layer), 8)
    return [*trained(layer, 2, arguments[0], 8, 8), *digest(*spectra.values())]


K = sines(3, 2, 3, 3)
WIDE = sines(4, 3, 3, 3)
FLAT = sines(5, 4, 3)
CUBE = sines(3, 2, 2, 3, 2)
GROUPED = sines(6, 2, 3, 3)
LARGE = sines(100, 100, 3, 3) / 20
FRAMES = sines(4, 2), sines(2, 2, 3, 3), sines(2, 3)


def clipped(**options: Any) -> Values:
    return digest(clip_conv(K, 1.5, (4, 4), **options))


def calibrated() -> Values:
    logits, labels = 3 * sines(40, 4), torch.arange(40) % 4
    return [expected_calibration_error(logits, labels), expected_calibration_error(logits, labels, 5)]


def content(name: str, folder: Path) -> Values:
    data = load_dataset(name, folder)
    return [data.sha256, *digest(data.train.images, data.validation.labels, data.test.images)]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def estimated() -> Values:
    model = create_model("small-cnn", num_classes=4, in_channels=1, image_size=8)
    found = empirical_lipschitz(model, sines(3, 1, 8, 8).abs(), torch.arange(3))
    return [float(value) for value in found.values]


CASES: dict[str, Callable[[], Values]] = {
    "spectrum 2d": lambda: digest(conv_singular_values(K, (4, 6), stride=(2, 1))),
    "spectrum folded": lambda: digest(conv_singular_values(K, (2, 2))),
    "spectrum 1d": lambda: digest(conv_singular_values(FLAT, 9, dilation=2)),
    "spectrum 3d": lambda: digest(conv_singular_values(CUBE, (3, 4, 2))),
    "spectrum groups": lambda: digest(conv_singular_values(GROUPED, 6, stride=2, groups=3)),
    "spectrum float32": lambda: digest(conv_singular_values(sines(12, 2, 3, 3).float(), 6)),
    "spectrum tt": lambda: digest(tt_singular_values(*FRAMES, (4, 4), stride=2)),
    "norm": lambda: [conv_norm(K, n) for n in (2, 3, 4, 8)],
    "norm groups": lambda: [conv_norm(GROUPED, (6, 4), stride=2, groups=3), conv_norm(FLAT, 9, dilation=2)],
    "bounds zeros": lambda: [*conv_norm_bounds(K, 6), *conv_norm_bounds(K, 6, stride=2, padding=0)],
    "bounds large": lambda: [*conv_norm_bounds(sines(16, 16, 3, 3), 16)],
    "bounds circular": lambda: [
        *conv_norm_bounds(K, 6, padding_mode="circular"),
        *conv_norm_bounds(FLAT, 2, padding_mode="circular"),
    ],
    "bounds groups": lambda: [*conv_norm_bounds(GROUPED, 6, groups=3, dilation=2)],
    "clip": clipped,
    "clip rounds": lambda: clipped(rounds=5, rescale=True),
    "clip eigh": lambda: clipped(rounds=3, algorithm="eigh"),
    "clip krylov": lambda: digest(clip_conv(LARGE, 1.0, 4, rounds=2, algorithm="krylov", rescale=True)),
    "clip krylov small": lambda: clipped(rounds=3, algorithm="krylov"),
    "clip sign": lambda: clipped(rounds=3, algorithm="sign", rescale=True),
    "clip strided": lambda: digest(clip_conv(WIDE, 0.7, (6, 4), stride=2, rounds=2)),
    "clip dilated": lambda: digest(clip_conv(WIDE, 0.7, (7, 5), dilation=2, rounds=2, rescale=True)),
    "clip groups": lambda: digest(clip_conv(GROUPED, 0.7, (6, 4), groups=3, rounds=2, rescale=True)),
    "clip folded": lambda: digest(clip_conv(K, 0.5, 2, rounds=3, rescale=True)),
    "clip 1d": lambda: digest(clip_conv(FLAT, 0.5, 9, rounds=3, rescale=True)),
    "clip 3d": lambda: digest(clip_conv(CUBE, 0.5, (3, 4, 2), rounds=3, rescale=True)),
    "clip many values": lambda: digest(clip_conv(sines(24, 20, 3, 3), 0.5, 5, rounds=2)),
    "clip by svd": lambda: digest(clip_conv(K, 1e-4, 4, rounds=2)),
    "clip nothing": lambda: digest(clip_conv(K, 1e3, 4, rounds=2, rescale=True)),
    "clip matrix": lambda: digest(clip_matrix(sines(5, 7), 0.4)),
    "clip tt": lambda: digest(*clip_tt(*FRAMES, 1.5, 4, rounds=2, rescale=True)),
    "clip tt strided": lambda: digest(*clip_tt(*FRAMES, 1.5, 4, stride=2, dilation=1)),
    "divide": lambda: digest(divide_conv(K, 1.5, 4), divide_conv(GROUPED, 0.5, 6, stride=2, groups=3)),
    "divide nothing": lambda: digest(divide_conv(K, 1e3, 4)),
    "clamp": lambda: digest(clamp_conv(K, 0.5, 1.5, 4, rounds=3), clamp_conv(GROUPED, 0.5, 0.9, 6, stride=2, groups=3)),
    "clamp matrix": lambda: digest(clamp_matrix(chirps(5, 7), 0.3, 0.4)),
    "tt": lambda: [*digest(*orthogonalize(*FRAMES), tt_to_dense(*FRAMES)), tt_error(tt_to_dense(*FRAMES), *FRAMES)],
    "tt svd": lambda: [*digest(*tt_svd(chirps(8, 6, 3, 3), (3, 4))), tt_error(WIDE, *tt_svd(WIDE, 2))],
    "TTConv1d": lambda: trained(TTConv1d(6, 8, 3, 2, padding=1), 2, 6, 9),
    "TTConv2d": lambda: trained(
        TTConv2d(6, 8, 3, (2, 3), stride=2, padding="valid", padding_mode="circular"), 2, 6, 9, 9
    ),
    "TTConv2d orthonormal": lambda: trained(TTConv2d(6, 8, 3, 3, frames="orthonormal"), 2, 6, 9, 9),
    "TTConv3d": lambda: trained(TTConv3d(4, 8, 2, 2, dilation=2), 2, 4, 5, 5, 5),
    "SOC": lambda: trained(SOC(4, 9, 3, 2), 2, 4, 12, 12),
    "SOC small": lambda: trained(SOC(4, 9, 3), 2, 4, 3, 3),
    "SOC bound": lambda: [SOC(4, 9, 3, 2).lipschitz_bound(8), SOC(4, 4, 1).lipschitz_bound(4, terms=3)],
    "SOCTT": lambda: trained(SOCTT(8, 9, 3, 4, 2, frames="orthonormal"), 2, 8, 12, 12),
    "bcop": lambda: prior_art("bcop", 4, 8, 3, 2),
    "aoc": lambda: prior_art("aoc", 4, 8, 3, 2),
    "aol": lambda: prior_art("aol", 4, 8, 3, padding_mode="circular"),
    "cayley": lambda: prior_art("Cayley", 4, 8, 3, 2),
    "spectral norm": lambda: prior_art("spectral_normalized", 4, 8, 3, 2),
    "unfolded": lambda: prior_art("svd_unfolded", 4, 8, 3, rank=5),
    "MinMax": lambda: digest(MinMax()(sines(2, 6, 3, 3))),
    "orthogonal loss": lambda: digest(
        *filter(None, (orthogonal_loss(small_net(), kind) for kind in ("paper", "code")))
    ),
    "spectra": lambda: digest(*model_spectra(small_net(), 8, linear=True).values()),
    "spectra of SOC": lambda: digest(*model_spectra(whole_model(), 8).values()),
    "tensorize": lambda: digest(*tensorize(whole_model(), 3).state_dict().values()),
    "densify": lambda: digest(*densify(tensorize(small_net(), 0.5, frames="orthonormal")).state_dict().values()),
    "Clip": lambda: projected(Clip(1.0, rounds=2, linear=True)),
    "Clip unscaled": lambda: projected(Clip(1.0, every=1, rescale=False), 3),
    "Clip zero-padded": lambda: projected(Clip(1.0, operator="zero-padded")),
    "Clip floor": lambda: projected(Clip(1.0, floor=0.2, rounds=3, linear=True)),
    "Clip floor zero-padded": lambda: projected(Clip(1.0, floor=0.2, operator="zero-padded", rescale=False)),
    "Divide": lambda: projected(Divide(1.0, 0.5, 0.8, batch_norm_eps=1e-6), 3),
    "Divide exact": lambda: projected(Divide(1.0, 0.5, power_iterations="exact")),
    "Divide exact periodic": lambda: projected(Divide(1.0, power_iterations="exact", operator="periodic")),
    "Divide periodic": lambda: projected(Divide(1.0, power_iterations=3, operator="periodic", every=2), 4),
    "Compose": lambda: projected(Compose(Orthogonal(0.5, normalizer="code"), Divide(2.0), Clip(1.0))),
    "small-cnn": lambda: built("small-cnn", in_channels=1, image_size=8, seen=(2, 1, 8, 8)),
    "small-cnn1d tt": lambda: built("small-cnn1d", in_channels=2, image_size=8, layer="tt", rank=8, seen=(2, 2, 8)),
    "small-cnn3d": lambda: built("small-cnn3d", in_channels=2, image_size=8, seen=(2, 2, 8, 8, 8)),
    "single-conv": lambda: built("single-conv", in_channels=4, image_size=8, seen=(2, 4, 8, 8)),
    "wrn10-1 tt": lambda: built("wrn10-1", layer="tt", rank=0.25, frames="orthonormal", seen=(2, 3, 32, 32)),
    "vgg11 tt": lambda: built(
        "vgg11", layer="tt", rank=16, seen=(1, 3, 32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3)
    ),
    "resnet18 tt": lambda: built("resnet18", layer="tt", rank=16, seen=(1, 3, 32, 32)),
    "lipconvnet-5": lambda: built("lipconvnet-5", width=4, seen=(2, 3, 32, 32)),
    "lipconvnet-5 soc": lambda: built("lipconvnet-5", width=4, layer="soc", seen=(2, 3, 32, 32)),
    "lipconvnet-5 soc-tt": lambda: built("lipconvnet-5", width=4, layer="soc-tt", rank=3, seen=(2, 3, 32, 32)),
    "lipconvnet-5 cayley": lambda: built("lipconvnet-5", width=4, layer="cayley-tt", rank=0.5, seen=(2, 3, 32, 32)),
    "shapes": lambda: [_hash(str(layer_shapes(name))) for name in ("wrn16-4", "vgg16", "lipconvnet-10", "resnet34")],
    "torchvision tt": lambda: built(
        "torchvision:squeezenet1_1", image_size=64, in_channels=1, layer="tt", rank=4, seen=(1, 1, 64, 64)
    ),
    "calibration": calibrated,
    "empirical Lipschitz": estimated,
}
IN_SINGLE = {"bcop", "aoc", "aol", "spectral norm", "unfolded", "cayley"}
LEARNT = {
    name
    for name in CASES
    if name.startswith(("SOC", "spectra of SOC", "tensorize", "lipconv", "Clip", "Divide", "Compose"))
}


def tolerance(name: str) -> float:
    """Relative to the largest value of a case."""
    if name in IN_SINGLE:
        return 1e-3
    return ITERATED if name in LEARNT or name.startswith(("empirical", "clip krylov", "clip sign")) else TOLERANCE


def values(name: str) -> Values:
    with reproducible():
        return CASES[name]()


def compare(found: Values, expected: Values, relative: float) -> None:
    """Words alike, numbers to within a share of the largest."""
    assert len(found) == len(expected)
    numbers = [abs(value) for value in expected if not isinstance(value, str)]
    allowed = relative * max([1.0, *numbers])
    for number, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, str):
            assert number == wanted
        else:
            assert isinstance(number, float | int)
            assert abs(number - wanted) <= allowed


@pytest.mark.parametrize("name", CASES)
def test_a_value_is_what_it_was(name: str) -> None:
    """Every case gives the recorded values."""
    compare(values(name), json.loads(GOLDEN.read_text())[name], tolerance(name))


@pytest.mark.parametrize("name", ["digits", "synthetic:2x6x6:3:90"])
def test_a_data_set_is_what_it_was(name: str, tmp_path: Path) -> None:
    """The content, byte by byte, and how it is split."""
    compare(content(name, tmp_path), json.loads(GOLDEN.read_text())[f"data {name}"], TOLERANCE)


if __name__ == "__main__":
    import tempfile

    recorded = {name: values(name) for name in CASES}
    for data_set in ("digits", "synthetic:2x6x6:3:90"):
        recorded[f"data {data_set}"] = content(data_set, Path(tempfile.mkdtemp()))
    lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in recorded]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
