import json
import math
from dataclasses import replace
from typing import Any, Literal, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples
from ttsv.constraints import Clip, Compose, Divide
from ttsv.constraints.operators import Operator
from ttsv.errors import ConfigError, DivergedError
from ttsv.layers import FrameKind, TTConv, TTConv2d
from ttsv.spectral.network import model_spectra
from ttsv.training.checkpoint import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

SIZES = {"0": (9, 7), "2": (9, 7), "3": (5, 4), "4": (5, 4), "5": (5, 4)}


def network(scale: float = 4.0, dtype: torch.dtype = torch.float64, **tt: Any) -> nn.Sequential:
    """Convolutions padded by zeros, unevenly and in a circle, strided, grouped, dilated, TT; a vector at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        TTConv2d(6, 9, 3, 5, stride=2, padding=1, **tt),
        nn.Conv2d(9, 6, 3, padding=1, groups=3, padding_mode="circular"),
        nn.Conv2d(6, 4, (3, 2), padding="same", dilation=(2, 1)),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).to(dtype)
    for name, parameter in model.named_parameters():
        if not name.startswith("1.") and not name.endswith(("k1", "k3", "original")):
            parameter.data.mul_(scale)
    return model


def applied_norm(layer: nn.Module, channels: int, size: tuple[int, ...]) -> float:
    dims = channels * math.prod(size)
    images = torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *size)
    with torch.no_grad():
        outputs = layer(images) - layer(torch.zeros_like(images))
    norm: float = torch.linalg.matrix_norm(outputs.flatten(1), 2).item()
    return norm


def applied_norms(model: nn.Module) -> dict[str, float]:
    """Norms of what the layers apply, by dense matrices."""
    norms = {}
    for name, size in SIZES.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Conv2d | TTConv)
        norms[name] = applied_norm(layer, layer.in_channels, size)
    return norms | {"7": torch.linalg.matrix_norm(model.get_parameter("7.weight").detach(), 2).item()}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("frames", ["free", "orthonormal"])
def test_exact_division_bounds_every_norm_that_is_applied(frames: str) -> None:
    model = network(frames=frames)
    with torch.no_grad():
        if frames == "free":
            model.get_parameter("2.k1").mul_(2)
    before, kept = applied_norms(model), copies(model)
    divide = Divide(0.9, 0.4, power_iterations="exact")
    divide.bind(model, (9, 7))
    divide.project(model, 1)
    after = applied_norms(model)
    report = divide.report()
    assert set(report.layers) == set(before)
    for name, norms in report.layers.items():
        target = 0.4 if name == "7" else 0.9
        assert before[name] > target
        assert after[name] <= target
        assert after[name] > 0.85 * target
        assert before[name] <= norms.before * (1 + 1e-12)
        assert after[name] <= norms.after * (1 + 1e-12) <= target * (1 + 1e-12)
    # A division: every kernel keeps its direction, biases are not touched, nor are frames held orthonormal.
    merged = network(frames=frames)
    merged.load_state_dict(kept)
    kept["2.kernel"], found = merged[2].dense_kernel().detach(), copies(model)  # type: ignore[operator]
    found["2.kernel"] = model[2].dense_kernel().detach()  # type: ignore[operator]
    for name, tensor in found.items():
        if frames == "free" and name in ("2.k1", "2.core", "2.k3"):
            continue
        if name.endswith(("weight", "core", "kernel")) and not name.startswith("1."):
            factor = (tensor / kept[name]).flatten()
            torch.testing.assert_close(factor, factor[:1].expand_as(factor))
            assert factor[0] < 1
        else:
            assert torch.equal(tensor, kept[name])


def test_what_is_small_enough_stays() -> None:
    model = network(0.1)
    kept = copies(model)
    divide = Divide(20.0, 20.0, 20.0, power_iterations="exact")
    divide.bind(model, (9, 7))
    divide.project(model, 1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    norms = divide.report().layers["0"]
    assert norms.before == norms.after


def test_the_periodic_norm() -> None:
    model = network()
    divide = Divide(0.9, power_iterations="exact", operator="periodic")
    divide.bind(model, (9, 7))
    divide.project(model, 1)
    for name, values in model_spectra(model, (9, 7)).items():
        assert values.max().item() == pytest.approx(0.9)
        assert divide.report().layers[name].measure == "periodic norm"
    assert list(divide.report().layers) == list(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["zero-padded", "periodic"])
def test_power_iterations_reach_the_norm_from_below_and_stay_warm(operator: Any) -> None:
    model = network()
    if operator == "periodic":
        norms = {name: values.max().item() for name, values in model_spectra(model, (9, 7), linear=True).items()}
    else:
        norms = applied_norms(model)
    divide = Divide(1e6, 1e6, power_iterations=1, operator=operator)
    divide.bind(model, (9, 7))
    first: dict[str, float] = {}
    for step in range(1, 301):
        divide.project(model, step)
        report = divide.report()
        first = first or {name: layer.before for name, layer in report.layers.items()}
        assert all(layer.before <= norms[name] * (1 + 1e-12) for name, layer in report.layers.items())
        assert all(layer.before == layer.after for layer in report.layers.values())
    assert min(first[name] / norms[name] for name in norms) < 0.9
    for name, layer in report.layers.items():
        assert layer.before == pytest.approx(norms[name], rel=1e-3)
        assert layer.measure == "power iteration, 1 a projection, from below"
    twice = Divide(1e6, 1e6, power_iterations=2, operator=operator)
    twice.bind(model, (9, 7))
    twice.project(model, 1)
    assert all(layer.before >= first[name] for name, layer in twice.report().layers.items())


@pytest.mark.slow
def test_division_by_an_estimate_overshoots_and_the_forced_report_says_so() -> None:
    model = network()
    divide = Divide(0.9, 0.4)
    divide.bind(model, (9, 7))
    divide.project(model, 1, force=True)
    after = applied_norms(model)
    report = divide.report().layers
    assert after["0"] > 0.9
    for name, norms in report.items():
        assert norms.after >= after[name] * (1 - 1e-12)
        assert norms.after <= after[name] * 1.1
        assert norms.measure.startswith("before: power iteration")
    for step in range(2, 400):
        divide.project(model, step)
    after = applied_norms(model)
    assert all(after[name] <= (0.4 if name == "7" else 0.9) * (1 + 1e-3) for name in after)


def test_batch_norm() -> None:
    model = network()
    norm = model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_var is not None
    with torch.no_grad():
        norm.running_var.copy_(torch.linspace(0.0, 2.0, 6))
        norm.weight.copy_(torch.linspace(-3.0, 1.0, 6))
    weight, variance = norm.weight.detach().clone(), norm.running_var.clone()
    constant = max(abs(w) / math.sqrt(v + 1e-5) for w, v in zip(weight.tolist(), variance.tolist(), strict=True))
    divide = Divide(batch_norm=5.0)
    divide.bind(model, (9, 7))
    kept = copies(model)
    divide.project(model, 1)
    torch.testing.assert_close(norm.weight.detach(), weight * 5.0 / constant)
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items() if name != "1.weight")
    report = divide.report().layers
    assert list(report) == ["1"]
    assert report["1"].before == pytest.approx(constant)
    assert report["1"].after == 5.0
    norm.eval()
    images = torch.randn(3, 6, 2, 2, dtype=torch.float64)
    stretched = (norm(images) - norm(torch.zeros_like(images))).abs() / images.abs()
    assert stretched.max().item() == pytest.approx(5.0)
    authors = Divide(batch_norm=5.0, batch_norm_eps=1e-6)
    authors.bind(model, (9, 7))
    authors.project(model, 1)
    assert authors.report().layers["1"].before == pytest.approx(5.0 * math.sqrt(1e-5 / 1e-6))


def test_only_every_so_many_steps() -> None:
    model = network()
    divide = Divide(0.9, every=10)
    divide.bind(model, (9, 7))
    kept = copies(model)
    divide.project(model, 9)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    divide.project(model, 10)
    divide.project(model, 11, force=True)
    assert divide.report().projections == 2
    assert divide.report().seconds > 0


def test_a_resumed_division_goes_on_to_the_same_numbers(tmp_path: Any) -> None:
    """The vectors pass through a checkpoint's files."""
    whole, resumed = network(dtype=torch.float32), network(dtype=torch.float32)
    unbroken = Compose(Divide(0.9, 0.4, 0.5), Clip(0.8, every=4))
    unbroken.bind(whole, (9, 7))
    for step in range(1, 9):
        unbroken.project(whole, step)
    first, second = (Compose(Divide(0.9, 0.4, 0.5), Clip(0.8, every=4)) for _ in range(2))
    first.bind(resumed, (9, 7))
    for step in range(1, 5):
        first.project(resumed, step)
    checkpoints = Checkpoints(tmp_path, {})
    checkpoints.save(1, {"constraint": first.state_dict()})
    state = checkpoints.latest()
    assert state is not None
    second.bind(resumed, (9, 7))
    second.load_state_dict(state["constraint"])
    for step in range(5, 9):
        second.project(resumed, step)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    assert second.report().layers == unbroken.report().layers
    json.dumps({**first.state_dict()["parts"][0], "vectors": None})


def test_a_layer_of_zeros() -> None:
    conv = nn.Conv2d(2, 2, 3)
    nn.init.zeros_(conv.weight)
    kinds: tuple[int | Literal["exact"], ...] = (1, "exact")
    for iterations in kinds:
        divide = Divide(1.0, power_iterations=iterations)
        divide.bind(conv, 5)
        divide.project(conv, 1)
        assert divide.report().layers[""].after == 0
        assert not conv.weight.any()


def test_training_under_division_stays_near_its_targets() -> None:
    torch.manual_seed(0)
    model = network(1.0, torch.float32)
    divide = Divide(0.8, 0.8, 2.0, power_iterations=1)
    divide.bind(model, (9, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = torch.randn(16, 2, 9, 7), torch.randint(5, (16,))
    for step in range(1, 61):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        divide.project(model, step)
        assert divide.report().layers["2"].before < 2  # momentum: the frames would run away from the core
    divide.project(model, 61, force=True)
    report = divide.report().layers
    norms = applied_norms(model.double())
    assert all(norm <= 0.8 * 1.2 for norm in norms.values())
    assert all(report[name].after >= norm * (1 - 1e-6) for name, norm in norms.items())
    assert report["1"].after <= 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "conv = None: one of conv, linear and batch_norm at least must be given"),
        ({"conv": 0.0}, r"conv = 0\.0: must be a finite number above 0, or None"),
        ({"linear": math.nan}, "linear = nan"),
        ({"batch_norm": -1.0}, r"batch_norm = -1\.0"),
        ({"conv": 1.0, "power_iterations": 0}, "power_iterations = 0: must be at least 1 and a whole number"),
        ({"conv": 1.0, "power_iterations": "all"}, "power_iterations = 'all'"),
        ({"conv": 1.0, "every": 0}, "every = 0"),
        ({"conv": 1.0, "operator": "full"}, "operator = 'full'"),
        ({"batch_norm": 1.0, "batch_norm_eps": 0.0}, r"batch_norm_eps = 0\.0"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Divide(**arguments)


def test_misuse() -> None:
    with pytest.raises(ConfigError, match=r"model = .*: must be .* call bind\(model, input_size\)"):
        Divide(1.0).project(network(), 1)
    for norm in (nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2, track_running_stats=False)):
        model = nn.Sequential(nn.Conv2d(2, 2, 3), norm)
        Divide(1.0).bind(model, 5)
        with pytest.raises(ValueError, match=r"model\.1 = .*: must have weights and running statistics"):
            Divide(1.0, batch_norm=1.0).bind(model, 5)
    divide = Divide(1.0, batch_norm=1.0)
    model = network()
    divide.bind(model, (9, 7))
    with pytest.raises(ValueError, match="must have the layers it was bound with; missing: 0, 2, 3, 4, 5"):
        divide.project(nn.Linear(2, 2), 1)
    with torch.no_grad():
        model.get_parameter("1.weight")[0] = math.nan
    with pytest.raises(DivergedError, match="layer '1' has non-finite weights at step 7"):
        divide.project(model, 7)
    with torch.no_grad():
        model.get_parameter("4.weight")[0] = math.inf
    with pytest.raises(DivergedError, match="layer '4' has non-finite weights at step 8"):
        divide.project(model, 8)


def test_binding_again_starts_from_new_vectors() -> None:
    norms = []
    for other in (False, True):
        divide = Divide(1e-3, power_iterations=2)
        for model in (nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))[not other :]:
            torch.manual_seed(int(model.in_channels))
            nn.init.normal_(model.weight)
            divide.bind(model, 5)
            divide.project(model, 1)
        norms.append(divide.report().layers[""].before)
    assert norms[0] == norms[1]


def test_a_vector_in_the_null_space_of_the_next_weight_is_replaced() -> None:
    layer = nn.Linear(2, 2, bias=False)
    divide = Divide(linear=10.0, power_iterations=20)
    divide.bind(layer_after(layer), 4)
    for place, value in ((0, 2.0), (1, 3.0)):
        layer.weight.data.zero_()
        layer.weight.data[place, place] = value
        divide.project(layer_after(layer), 1)
        assert divide.report().layers["1"].before == pytest.approx(value)


def layer_after(layer: nn.Linear) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 1, 3), layer)


# --- divisions that run ahead, as on a GPU ---


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its subclassing untyped
    """Counts what a GPU would be waited for."""

    asking = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.asking
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        listed = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.count += 1
            return listed(tensor)

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Tensor, "tolist", tolist)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patch.undo()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]


def plain_network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = network(dtype=dtype)
    return nn.Sequential(model[0], model[1], nn.Conv2d(6, 9, 3, stride=2, padding=1, dtype=dtype), *model[3:])


@examples(10)
@given(
    dtype=st.sampled_from((torch.float64, torch.float32)),
    frames=st.sampled_from(("free", "orthonormal", None)),
    targets=st.tuples(st.floats(0.3, 20), st.floats(0.2, 5), st.none() | st.floats(0.2, 2)),
    iterations=st.integers(1, 3),
    operator=st.sampled_from(("periodic", "zero-padded")),
)
def test_a_division_that_runs_ahead_gives_the_same_numbers(
    dtype: torch.dtype,
    frames: FrameKind | None,
    targets: tuple[float, float, float | None],
    iterations: int,
    operator: Operator,
) -> None:
    reports, models = [], []
    for ahead in (False, True):
        model = plain_network(dtype) if frames is None else network(dtype=dtype, frames=frames)
        divide = Divide(*targets, power_iterations=iterations, operator=operator)
        divide.bind(model, (9, 7))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ttsv.constraints.divide.runs_ahead", lambda _, ahead=ahead: ahead)
            for step in range(1, 4):
                divide.project(model, step)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.125)
            divide.project(model, 4)
            state = divide.state_dict()
        reports.append(replace(divide.report(), seconds=0.0))
        models.append({**copies(model), **state["vectors"]})
    close = 1e-11 if dtype == torch.float64 else 1e-4  # sums may take another order
    assert [report.projections for report in reports] == [4, 4]
    assert reports[0].layers.keys() == reports[1].layers.keys()
    for name, norms in reports[0].layers.items():
        other = reports[1].layers[name]
        assert (other.measure, other.smallest) == (norms.measure, norms.smallest)
        assert (other.before, other.after) == pytest.approx((norms.before, norms.after), rel=close)
    assert models[0].keys() == models[1].keys()
    for name, expected in models[0].items():
        assert (models[1][name] - expected).abs().max() <= close * expected.abs().max()


@pytest.mark.parametrize(("frames", "most"), [(None, 0), ("orthonormal", 0), ("free", 1)])
def test_a_division_that_runs_ahead_hardly_waits(
    monkeypatch: pytest.MonkeyPatch, frames: FrameKind | None, most: int
) -> None:
    model = plain_network() if frames is None else network(dtype=torch.float32, frames=frames)
    divide = Divide(0.9, 0.4, 0.5)
    divide.bind(model, (9, 7))
    with Waits() as waits:
        divide.project(model, 1)
    assert waits.count > 10  # it asks, and the mode hears it
    monkeypatch.setattr("ttsv.constraints.divide.runs_ahead", lambda _: True)
    divide.project(model, 2)
    with Waits() as waits:
        divide.project(model, 3)
    assert waits.count == most
    assert divide.report().layers["0"].before > 0


def test_a_division_that_runs_ahead_leaves_zeros_and_the_null_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttsv.constraints.divide.runs_ahead", lambda _: True)
    layer = nn.Linear(2, 2, bias=False)
    divide = Divide(linear=1.0)
    divide.bind(layer_after(layer), 4)
    cases = (2.0, 0.0, [2.0]), (0.0, 0.0, [0.0]), (0.0, 3.0, [3.0]), (2.0, 0.0, [0.0, 2.0])
    for first, second, found in cases:
        for expected in found:
            layer.weight.data = torch.tensor([[first, 0.0], [0.0, second]])
            divide.project(layer_after(layer), 1)
            assert divide.report().layers["1"].before == pytest.approx(expected)
            assert layer.weight.max().item() == pytest.approx(1 if expected > 1 else max(first, second))


def test_a_new_report_replaces_one_that_was_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_network(torch.float64)
    divide = Divide(0.9, 0.4, 0.5)
    divide.bind(model, (9, 7))
    monkeypatch.setattr("ttsv.constraints.divide.runs_ahead", lambda _: True)
    divide.project(model, 1)
    divide.project(model, 2, force=True)
    assert divide.report().layers["0"].measure.startswith("before")
    divide.project(model, 3)
    other = Divide(0.9, 0.4, 0.5)
    other.load_state_dict(json.loads(json.dumps({**divide.state_dict(), "vectors": {}})))
    assert other.report() == divide.report()
    divide.project(model, 4)
    divide.load_state_dict(other.state_dict())
    assert divide.report() == other.report()
