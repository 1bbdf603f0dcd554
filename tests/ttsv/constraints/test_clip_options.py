import copy
import math
import weakref
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.constraints import Clip, Compose, Constraint, Divide, LayerNorms
from ttsv.constraints.operators import rescale_to_target
from ttsv.layers import SOCTT, FrameKind, TTConv, TTConv2d, layer_kernel, tensorize
from ttsv.spectral import norms as measures
from ttsv.spectral.clamping import clamp_conv
from ttsv.spectral.clipping import Clipped, clip_conv, clip_matrix, clip_stack
from ttsv.spectral.geometry import layer_geometry
from ttsv.spectral.network import layer_input_sizes, model_spectra, spectral_layers
from ttsv.spectral.norms import largest_eigenvalues, stored_norm
from ttsv.spectral.singular_values import conv_singular_values
from ttsv.spectral.symbol import PeriodicConv

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def network(dtype: torch.dtype = torch.float64, **tt: Any) -> nn.Sequential:
    """Sees 9 x 7; 9 x 7 (stride 2); 5 x 4; 5 x 4 (dilated, padded by one side more); 5 x 4; and a vector."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        TTConv2d(6, 9, 3, 5, stride=2, padding=1, **tt),
        nn.Conv2d(9, 6, 3, padding=1, groups=3, padding_mode="circular"),
        nn.Conv2d(6, 4, (3, 2), padding="same", dilation=(2, 1)),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(4 * 3 * 2, 5),
    ).to(dtype)


SIZES = {"0": (9, 7), "1": (9, 7), "2": (5, 4), "3": (5, 4), "4": (5, 4)}


def applied_norm(layer: nn.Module, channels: int, size: tuple[int, int]) -> float:
    """Norm of what the layer applies, by a dense matrix in float64."""
    dims = channels * math.prod(size)
    images = torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *size)
    with torch.no_grad():
        outputs = layer(images) - layer(torch.zeros_like(images))
    norm: float = torch.linalg.matrix_norm(outputs.flatten(1), 2).item()
    return norm


def applied_norms(model: nn.Sequential) -> dict[str, float]:
    model = nn.Sequential(*model).double()
    return {name: applied_norm(layer := model[int(name)], layer.in_channels, size) for name, size in SIZES.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("frames", ["free", "orthonormal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("floor", [None, 0.1])
def test_zero_padded_norms_end_at_most_delta(dtype: torch.dtype, frames: str, floor: float | None) -> None:
    """The operators that the network applies, even kernels with uneven padding and circular padding among them."""
    model = network(dtype, frames=frames)
    for parameter in model.parameters():
        if not any(parameter is frame for frame in (model[1].k1, model[1].k3)) and frames == "free":
            parameter.data.mul_(2)
    clip = Clip(0.5, operator="zero-padded", rounds=2, floor=floor)
    clip.bind(model, (9, 7))
    before = applied_norms(network(dtype, frames=frames))
    clip.project(model, 100)
    after = applied_norms(model)
    report = clip.report()
    assert list(report.layers) == list(SIZES)
    slack = 1e-6 if dtype == torch.float32 else 1e-12
    for name, norms in report.layers.items():
        assert after[name] <= norms.after * (1 + slack)
        assert norms.after <= 0.5
        assert before[name] <= norms.before * (1 + slack)
        assert "rigorous upper bound" in norms.measure
        assert (norms.smallest is None) == (floor is None)
    assert max(before.values()) > 0.5
    assert max(after.values()) > 0.4  # not shrunk far beyond need


def test_the_periodic_clip_alone_does_not_bound_what_is_applied(dense: "Dense") -> None:
    """The kernel of the notes: 9 periodic, 11.66 zero-padded."""
    line = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64)
    norms = {}
    for operator in ("periodic", "zero-padded"):
        conv = nn.Conv2d(1, 1, 3, padding=1, bias=False, dtype=torch.float64)
        conv.load_state_dict({"weight": torch.outer(line, line)[None, None]})
        clip = Clip(9.0, operator=operator)
        clip.bind(conv, 3)
        clip.project(conv, 1, force=True)
        norms[operator] = applied_norm(conv, 1, (3, 3))
    assert norms["periodic"] > 11.6
    assert norms["zero-padded"] == pytest.approx(9.0)


@pytest.mark.parametrize("floor", [None, 0.2])
def test_without_rescaling_the_zero_padded_norm_is_only_reported(dense: "Dense", floor: float | None) -> None:
    geometry: dict[str, Any] = {"stride": 2, "dilation": 2, "groups": 2}
    conv = nn.Conv2d(4, 6, 3, padding=1, dtype=torch.float64, **geometry)
    kernel = dense.gaussian(6, 2, 3, 3)
    conv.load_state_dict({"weight": kernel, "bias": torch.zeros(6)})
    clip = Clip(0.5, operator="zero-padded", rescale=False, rounds=3, floor=floor)
    clip.bind(conv, 7)
    clip.project(conv, 1, force=True)
    if floor is None:
        expected = clip_conv(kernel, 0.5, 8, rounds=3, **geometry)
    else:
        expected = clamp_conv(kernel, floor, 0.5, 8, rounds=3, **geometry)
    torch.testing.assert_close(conv.weight.detach(), expected)
    norms = clip.report().layers[""]
    assert norms.after == pytest.approx(applied_norm(conv, 4, (7, 7)))
    if floor is not None:
        assert norms.smallest == pytest.approx(conv_singular_values(expected, 8, **geometry).min().item())


def test_linear_layers() -> None:
    model = network()
    weight = model.get_parameter("6.weight").detach().clone()
    clip = Clip(0.3, linear=True)
    clip.bind(model, (9, 7))
    clip.project(model, 100)
    torch.testing.assert_close(model.get_parameter("6.weight").detach(), clip_matrix(weight, 0.3))
    norms = clip.report().layers["6"]
    assert norms.before == pytest.approx(torch.linalg.matrix_norm(weight, 2).item())
    assert norms.after == pytest.approx(0.3)
    assert norms.measure == "matrix norm"
    least = torch.linalg.svdvals(weight).min().item()
    clip = Clip(2.0, linear=True, floor=1.1 * least)
    clip.bind(model, (9, 7))
    model[6].load_state_dict({"weight": weight, "bias": model.get_parameter("6.bias").detach()})
    clip.project(model, 100)
    assert torch.linalg.svdvals(model.get_parameter("6.weight").detach()).min().item() == pytest.approx(1.1 * least)
    assert clip.report().layers["6"].smallest == pytest.approx(1.1 * least)


def test_floor() -> None:
    model = network(frames="orthonormal")
    start = {name: values.min().item() for name, values in model_spectra(model, (9, 7)).items()}
    clip = Clip(1.0, floor=0.3, rounds=100, rescale=False)
    clip.bind(model, (9, 7))
    clip.project(model, 100)
    end = {name: values.min().item() for name, values in model_spectra(model, (9, 7)).items()}
    report = clip.report()
    for name, norms in report.layers.items():
        assert norms.smallest == pytest.approx(end[name], abs=1e-10)
        assert end[name] > min(start[name], 0.29)
    assert min(start.values()) < 0.1
    saved = clip.state_dict()
    resumed = Clip(1.0, floor=0.3)
    resumed.load_state_dict(saved)
    assert resumed.report() == report


def test_frames_held_orthonormal_are_left_as_they_are() -> None:
    model = network(frames="orthonormal")
    layer = model[1]
    assert isinstance(layer, TTConv)
    frames = [layer.k1.clone(), layer.k3.clone()]
    core = layer.core.detach().clone()
    parameters = dict(model.named_parameters())
    clip = Clip(0.2)
    clip.bind(model, (9, 7))
    clip.project(model, 100)
    assert torch.equal(layer.k1, frames[0])
    assert torch.equal(layer.k3, frames[1])
    torch.testing.assert_close(layer.core.detach(), clip_conv(core, 0.2, (10, 8), stride=2, rescale=True))
    assert model_spectra(model, (9, 7))["1"].max() <= 0.2 * (1 + 1e-12)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    images = torch.randn(1, 2, 9, 7, dtype=torch.float64)
    torch.autograd.backward(model(images).sum())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_other_parametrizations_of_tt_layers_are_refused() -> None:
    class Twice(nn.Module):
        def forward(self, tensor: Tensor) -> Tensor:
            return 2 * tensor

    for names in (["core"], ["k1"], ["k1", "k3"]):
        layer = tensorize(nn.Conv2d(4, 4, 3), 2, frames="orthonormal" if names == ["core"] else "free")
        for name in names:
            parametrize.register_parametrization(layer, name, Twice())
        with pytest.raises(ValueError, match=r"model\. = 'TTConv2d': must not be parametrized"):
            Clip(1.0).bind(layer, 5)


def test_skew_orthogonal_layers_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), SOCTT(4, 4, 3, 2))
    before = {name: tensor.clone() for name, tensor in model[1].state_dict().items()}
    clip = Clip(0.1)
    clip.bind(model.eval(), 4)
    clip.project(model, 100)
    assert list(clip.report().layers) == ["0"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model[1].state_dict().items())


def test_compose_keeps_what_the_last_part_says() -> None:
    first, last = Clip(1.0), Clip(1.0)
    for part, norms in ((first, LayerNorms(3.0, 2.0)), (last, LayerNorms(2.0, 1.0, 0.5, "matrix norm"))):
        part._report = type(part._report)({"conv": norms}, 0.5, 1)
    assert Compose(first, last).report().layers == {"conv": LayerNorms(3.0, 1.0, 0.5, "matrix norm")}


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"floor = 2\.0: must be at least 0 and at most delta = 1\.0"):
        Clip(1.0, floor=2.0)
    with pytest.raises(ValueError, match="operator = 'full': must be one of periodic, zero-padded"):
        Clip(1.0, operator="full")  # type: ignore[arg-type]
    reflecting = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(ValueError, match=r"model\.0\.padding_mode = 'reflect': must be zeros or circular"):
        Clip(1.0, operator="zero-padded").bind(reflecting, 5)
    Clip(1.0).bind(reflecting, 5)


def test_tensors_of_the_spectrum_match_the_report(dense: "Dense") -> None:
    conv = nn.Conv1d(3, 5, 3, padding=1, dtype=torch.float64)
    conv.load_state_dict({"weight": dense.gaussian(5, 3, 3), "bias": torch.zeros(5)})
    clip = Clip(1.0, floor=0.5, rounds=20)
    clip.bind(conv, 8)
    clip.project(conv, 0)
    values = conv_singular_values(conv.weight.detach(), 8)
    norms = clip.report().layers[""]
    assert norms.after == pytest.approx(values.max().item())
    assert norms.smallest == pytest.approx(values.min().item())
    assert norms.measure == "periodic norm"


def test_norms_of_single_precision_kernels_end_at_most_delta_with_a_floor() -> None:
    conv = nn.Conv2d(32, 32, 1)
    nn.init.constant_(conv.weight, 0.1)
    clip = Clip(0.7, floor=0.1, rounds=2, every=1)
    clip.bind(conv, 16)
    clip.project(conv, 1)
    norm = torch.linalg.svdvals(conv.weight.detach().double()[..., 0, 0])[0].item()
    assert norm <= 0.7
    assert clip.report().layers[""].after == pytest.approx(norm, rel=1e-12)


def test_shrinking_goes_on_until_the_stored_kernel_is_small_enough() -> None:
    """With a norm that is told what to say after each multiplication."""
    told = iter([0.6, 0.5])
    kernel, norm = rescale_to_target(torch.ones(1, 1, 3), 0.5, lambda _: next(told), 2.0)
    assert norm == 0.5
    torch.testing.assert_close(kernel, torch.full((1, 1, 3), 0.25 * 0.5 / 0.6))
    assert rescale_to_target(kernel, 0.5, lambda _: next(told), 0.5) == (kernel, 0.5)


def test_shrinking_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a norm stays a little above the target, as that of subnormal numbers does, each try takes off more."""
    tries = 0

    def barely_too_large(kernel: torch.Tensor, *_: object) -> float:
        nonlocal tries
        tries += 1
        assert tries < 100
        return 1 + 1e-15 if kernel.max() > 0.5 else 0.5

    ones = torch.ones(1, 1, 3, dtype=torch.float64)
    kernel, norm = rescale_to_target(ones, 1.0, barely_too_large, 1 + 1e-15)
    assert norm == 0.5
    assert kernel.max() <= 0.5
    tries = 0
    monkeypatch.setattr(measures, "stored_norm", barely_too_large)
    kernel, norm = measures.rescale_to_norm(ones, 1.0, PeriodicConv.of(ones, 5))
    assert norm == 0.5
    assert kernel.max() <= 0.5


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", [1e-37, 1e-38, 1e-39, 1e-40, 1e-42, 1e-44, 1e-45])
@pytest.mark.parametrize("size", [8, 2])
def test_norms_at_the_least_numbers_there_are_end(target: float, size: int) -> None:
    """Of subnormal numbers a factor a little below 1 is rounded away."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * size**2, 4))
        constraints: list[Constraint] = [
            Clip(target, operator="zero-padded", linear=True),
            Clip(target, linear=True),
            Divide(conv=target, linear=target, power_iterations="exact"),
        ]
        for constraint in constraints:
            trained = copy.deepcopy(model)
            constraint.bind(trained, size, in_channels=3)
            constraint.project(trained, 0, force=True)
            assert all(norms.after <= target for norms in constraint.report().layers.values())
            # Of a small image the taps that fold onto one pixel may cancel.
            for layer in trained[2:] if size == 2 else trained[::2]:
                assert layer.get_parameter("weight").double().flatten(1).norm(2, dim=1).max() <= target * (1 + 1e-6)


def test_what_a_circular_layer_applies_is_the_periodic_operator(dense: "Dense") -> None:
    conv = nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular", dtype=torch.float64)
    conv.load_state_dict({"weight": dense.gaussian(3, 2, 4), "bias": torch.zeros(3)})
    clip = Clip(1.0, operator="zero-padded")
    clip.bind(conv, 7)
    clip.project(conv, 0)
    values = conv_singular_values(conv.weight.detach(), 7)
    norms = clip.report().layers[""]
    assert values.max() <= norms.after <= 1
    assert values.max().item() == pytest.approx(1)


def stage(dtype: torch.dtype, frames: FrameKind) -> nn.Sequential:
    """Layers of which some have one shape; of those one is smaller than delta, and one sees a smaller image."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        *(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)),
        *(TTConv2d(6, 6, 3, 4, padding=1, frames=frames) for _ in range(3)),
        nn.Conv2d(6, 6, 3, padding=1, stride=2),
        nn.Conv2d(6, 6, 3, padding=1),
    ).to(dtype)
    for place, name in enumerate(("0", "1", "2", "3", "7", "8")):
        model.get_parameter(f"{name}.weight").data.mul_(1 + place)
    for name in "456":
        model.get_parameter(f"{name}.core").data.mul_(4)
    model.get_parameter("2.weight").data.mul_(1e-3)
    return model


@pytest.mark.parametrize("frames", ["free", "orthonormal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_of_one_shape_are_clipped_together_to_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, frames: FrameKind
) -> None:
    found = []
    for together in (False, True):
        monkeypatch.setattr("ttsv.constraints.clip.gains_by_stacks", lambda _, together=together: together)
        model, clip = stage(dtype, frames), Clip(0.7, every=1, rounds=2)
        clip.bind(model, 8)
        stacks = Mock(wraps=clip_stack)
        monkeypatch.setattr("ttsv.constraints.clip.clip_stack", stacks)
        clip.project(model, 1)
        sizes = [len(call.args[0]) for call in stacks.call_args_list]
        assert [size for size in sizes if size > 1] == ([3, 3] if together else [])
        assert sum(sizes) == len(clip.report().layers)
        found.append((model, clip.report().layers))
    (alone, expected), (stacked, norms) = found
    close = 1e-10 if dtype == torch.float64 else 3e-6
    assert list(norms) == list(expected)
    for name in expected:
        assert (norms[name].before, norms[name].after) == pytest.approx(
            (expected[name].before, expected[name].after), rel=close
        )
        assert norms[name].after <= 0.7
    for one, other in zip(alone.state_dict().values(), stacked.state_dict().values(), strict=True):
        assert (one - other).abs().max() <= close * one.abs().max()


@pytest.mark.parametrize("options", [{"floor": 0.1}, {"operator": "zero-padded"}])
def test_other_clips_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr("ttsv.constraints.clip.gains_by_stacks", lambda _: True)
    monkeypatch.setattr("ttsv.constraints.clip.clip_stack", None)
    model, clip = stage(torch.float64, "free"), Clip(0.7, every=1, **options)
    clip.bind(model, 8)
    clip.project(model, 1)
    assert all(norms.after <= 0.7 for norms in clip.report().layers.values())
    half, clip = stage(torch.bfloat16, "free"), Clip(0.7, every=1)
    clip.bind(half, 8)
    clip.project(half, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms_are_those_of_the_projection_whenever_they_are_asked_for(dtype: torch.dtype) -> None:
    """Steps that come between change nothing in them, nor does a state that is saved and loaded."""
    model, clip = stage(dtype, "free"), Clip(0.7, every=1)
    clip.bind(model, 8)
    clip.project(model, 1)
    with torch.no_grad():
        stored = {name: layer_kernel(layer).clone() for name, layer in spectral_layers(model).items()}  # type: ignore[arg-type]
        for parameter in model.parameters():
            parameter.mul_(3)
    report = clip.report()
    assert list(report.layers) == list(stored)
    assert (report.projections, clip.report()) == (1, report)
    sizes = layer_input_sizes(model, 8)
    for name, layer in spectral_layers(model).items():
        norm = stored_norm(stored[name], layer_geometry(layer, sizes[name]).periodic_counterpart)  # type: ignore[arg-type]
        assert report.layers[name].after == pytest.approx(norm, rel=1e-5)
    other = Clip(0.7, every=1)
    other.bind(model, 8)
    other.project(model, 2)
    other.load_state_dict(clip.state_dict())
    assert other.report() == report


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_norms_before_are_right_where_taps_that_fold_cancel(share: float) -> None:
    """In Gram matrices of float32 such taps leave little of a norm that is a small part of theirs."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 3, padding=1)
    taps = torch.randn(8, 8, 3, 1) * torch.tensor([1.0, 0, -1]) + 1e-4 * torch.randn(8, 8, 3, 3)
    conv.load_state_dict({"weight": taps, "bias": torch.zeros(8)})
    norm = conv_singular_values(taps.double(), 2).max().item()
    clip = Clip(share * norm, every=1)
    clip.bind(conv, 2, in_channels=8)
    clip.project(conv, 1)
    assert clip.report().layers[""].before == pytest.approx(norm, rel=1e-7)
    after = conv_singular_values(conv.weight.detach().double(), 2).max().item()
    assert clip.report().layers[""].after == pytest.approx(after, rel=1e-7)


def test_kernels_of_a_projection_are_let_go_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clip = stage(torch.float32, "free"), Clip(0.7, every=1)
    clip.bind(model, 8)
    kept, held = list["weakref.ref[Tensor]"](), list[int]()

    def noted(*args: Any) -> list[Clipped]:
        held.append(sum(one() is not None for one in kept))
        return clip_stack(*args)

    monkeypatch.setattr("ttsv.constraints.clip.clip_stack", noted)
    clip.project(model, 1)
    kept += [weakref.ref(one.kernel) for unread in clip._unread for one in unread.clips]
    assert kept
    held.clear()
    clip.project(model, 2)
    assert set(held) == {0}


def test_a_clip_of_nothing_measures_no_norm_until_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clip = stage(torch.float32, "free"), Clip(1e3, every=1)
    clip.bind(model, 8)
    clip.project(model, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # No bound by row and column sums, and nothing so small that float64 measures it: Gram matrices are tested.
    delta = 1.01 * max(norms.after for norms in clip.report().layers.values())
    monkeypatch.setattr("ttsv.spectral.norms._CHEAP_WORK", 0)
    looked = Mock(wraps=largest_eigenvalues)
    monkeypatch.setattr("ttsv.spectral.norms.largest_eigenvalues", looked)
    clip = Clip(delta, every=1)
    clip.bind(model, 8)
    clip.project(model, 1)
    assert looked.call_count == 0
    assert max(norms.after for norms in clip.report().layers.values()) == pytest.approx(delta / 1.01, rel=1e-5)
    assert looked.call_count > 0
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=1e-5, atol=1e-6)
