import copy
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ttsv.constraints import Clip, Compose, Constraint, Divide, LayerNorms, Orthogonal, Unconstrained
from ttsv.constraints.protocol import NormsState
from ttsv.errors import ConfigError, DivergedError
from ttsv.layers import TTConv, TTConv2d, orthogonal_loss, tensorize
from ttsv.spectral.clipping import clip_conv, clip_tt
from ttsv.spectral.network import model_spectra

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Sees 7 x 7, 7 x 7 (stride 2, which does not divide it), 4 x 4 and 4 x 4 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        TTConv2d(12, 16, 3, 10, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.Conv2d(16, 8, 3, padding=2, dilation=2),
        nn.Flatten(),
        nn.Linear(128, 10),
    ).to(dtype)


def norms(model: nn.Module) -> dict[str, float]:
    return {name: values.max().item() for name, values in model_spectra(model, 7).items()}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("delta", [0.2, 0.7])
def test_a_forced_projection_leaves_every_norm_at_most_delta(delta: float, rounds: int) -> None:
    model = network()
    before = norms(model)
    clip = Clip(delta, rounds=rounds)
    clip.bind(model, 7)
    clip.project(model, 1, force=True)
    after = norms(model)
    report = clip.report()
    assert list(report.layers) == list(before) == ["0", "2", "4", "5"]
    for name, layer in report.layers.items():
        assert after[name] <= delta * (1 + 1e-5)
        assert layer.after == pytest.approx(after[name], rel=1e-5)
        assert layer.before == pytest.approx(before[name], rel=1e-5)
    assert max(before.values()) > delta
    assert report.projections == 1
    assert report.seconds > 0


def test_projection_is_the_clip_of_each_layer() -> None:
    model = network(torch.float64)
    expected = copies(model)
    clip = Clip(0.5, rounds=2, rescale=False)
    clip.bind(model, 7)
    clip.project(model, 100)
    found = model.state_dict()
    torch.testing.assert_close(found["0.weight"], clip_conv(expected["0.weight"], 0.5, 7, rounds=2))
    factors = expected["2.k1"], expected["2.core"], expected["2.k3"]
    for name, factor in zip(("k1", "core", "k3"), clip_tt(*factors, 0.5, 8, stride=2, rounds=2), strict=True):
        torch.testing.assert_close(found[f"2.{name}"], factor)
    torch.testing.assert_close(found["4.weight"], clip_conv(expected["4.weight"], 0.5, 4, groups=4, rounds=2))
    torch.testing.assert_close(found["5.weight"], clip_conv(expected["5.weight"], 0.5, 4, dilation=2, rounds=2))
    for name in ("0.bias", "2.bias", "7.weight", "1.running_mean", "1.num_batches_tracked"):
        assert torch.equal(found[name], expected[name])
    assert clip.report().layers["0"].after > 0.5


def test_parameters_are_written_in_place() -> None:
    model = network()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 1, 7, 7)).square().mean().backward()
    optimizer.step()
    momentum = copy.deepcopy([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])
    clip = Clip(0.1)
    clip.bind(model, 7)
    clip.project(model, 1, force=True)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.requires_grad
    for parameter, kept in zip(model.parameters(), momentum, strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], kept)


def test_frames_with_norms_of_their_own_are_taken_into_account(dense: "Dense") -> None:
    model = tensorize(nn.Conv2d(6, 6, 3, padding=1, dtype=torch.float64), 4)
    assert isinstance(model, TTConv)
    model.k1.data.copy_(3 * dense.gaussian(6, 4))
    clip = Clip(1.0)
    clip.bind(model, 7)
    clip.project(model, 0)
    assert norms(model)[""] <= 1 + 1e-12
    torch.testing.assert_close(model.k1.T @ model.k1, torch.eye(4, dtype=torch.float64))


def test_a_second_projection_changes_nothing() -> None:
    model = network(torch.float64)
    clip = Clip(0.5)
    clip.bind(model, 7)
    clip.project(model, 1, force=True)
    once = copies(model)
    clip.project(model, 1, force=True)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, once[name], rtol=1e-10, atol=1e-12)
    assert all(layer.before <= 0.5 * (1 + 1e-12) for layer in clip.report().layers.values())


@pytest.mark.parametrize("constraint", [Clip(1.0), Divide(1.0)])
def test_layers_that_share_a_weight_are_refused(constraint: Constraint) -> None:
    first, last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)
    model = nn.Sequential(first, nn.ReLU(), last)
    last.weight = first.weight
    with pytest.raises(ConfigError, match=r"model\.2 = 'Conv2d': must not share its weight with model\.0"):
        constraint.bind(model, 7)
    constraint.bind(nn.Sequential(first, nn.ReLU(), first), 7)  # one layer, used twice
    last.weight = nn.Parameter(first.weight.detach().clone())
    last.bias = first.bias
    constraint.bind(model, 7)


def test_only_every_so_many_steps() -> None:
    model = network()
    clip = Clip(0.1, every=3)
    clip.bind(model, 7)
    before = copies(model)
    for step in (1, 2):
        clip.project(model, step)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert clip.report().projections == 0
    for step in (3, 4, 5, 6):
        clip.project(model, step)
    assert clip.report().projections == 2


def test_bind_changes_nothing_and_takes_channels() -> None:
    model = network()
    before = copies(model)
    Clip(1.0).bind(model, (7, 7), in_channels=1)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ConfigError, match=r"input_size = 7: .* layer '0' takes 1 channels, not 3"):
        Clip(1.0).bind(model, 7, in_channels=3)


def test_orthogonal_penalty() -> None:
    model = network()
    assert isinstance(model[2], TTConv)
    with torch.no_grad():
        model[2].k1.mul_(1.5)
    loss = orthogonal_loss(model)
    assert loss is not None
    penalty = Orthogonal(3.0).penalty(model)
    assert isinstance(penalty, Tensor)
    torch.testing.assert_close(penalty, 3 * loss)
    code = Orthogonal(3.0, normalizer="code").penalty(model)
    torch.testing.assert_close(code, penalty)  # r1 = r2: the two normalizers agree
    assert Orthogonal(0.0).penalty(model) == 0.0
    assert Orthogonal(3.0).penalty(nn.Conv2d(1, 1, 3)) == 0.0


def test_compose_adds_and_chains() -> None:
    model = network()
    parts = Compose(Clip(0.8), Orthogonal(2.0), Clip(0.4, every=50), Unconstrained())
    before = norms(model)
    parts.bind(model, 7)
    assert parts.penalty(model) == Orthogonal(2.0).penalty(model)
    parts.project(model, 50)
    assert norms(model)["5"] <= 0.4 * (1 + 1e-5)
    parts.project(model, 100)
    report = parts.report()
    assert report.projections == 3
    assert report.layers["5"].after <= 0.4
    assert before["5"] > 0.8
    assert report.layers["5"].before <= 0.4 * (1 + 1e-5)
    assert Compose().penalty(model) == 0.0


def test_compose_reports_before_the_first_and_after_the_last() -> None:
    first, last = Unconstrained(), Unconstrained()
    for part, pair in ((first, (3.0, 2.0)), (last, (2.0, 1.0))):
        layers: dict[str, NormsState] = {"conv": {"before": pair[0], "after": pair[1]}}
        part.load_state_dict({"layers": layers, "seconds": 0.5, "projections": 1, "parts": []})
    report = Compose(first, last).report()
    assert report.layers == {"conv": LayerNorms(3.0, 1.0)}
    assert (report.seconds, report.projections) == (1.0, 2)


def test_state_survives_json() -> None:
    model = network()
    constraint: Constraint = Compose(Clip(0.5), Orthogonal(1.0))
    constraint.bind(model, 7)
    constraint.project(model, 100)
    saved = json.loads(json.dumps(constraint.state_dict()))
    resumed = Compose(Clip(0.5), Orthogonal(1.0))
    resumed.bind(model, 7)
    resumed.load_state_dict(saved)
    assert resumed.report() == constraint.report()
    resumed.project(model, 200)
    assert resumed.report().projections == 2
    with pytest.raises(ValueError, match=r"state\.parts = 2: must be 1"):
        Compose(Clip(0.5)).load_state_dict(saved)


def test_unconstrained_does_nothing() -> None:
    model = network()
    before = copies(model)
    nothing = Unconstrained()
    nothing.bind(model, 7)
    nothing.project(model, 100, force=True)
    assert nothing.penalty(model) == 0.0
    assert nothing.report().layers == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_diverged_weights_end_the_trial_by_name() -> None:
    model = network()
    clip = Clip(0.5)
    clip.bind(model, 7)
    with torch.no_grad():
        model.get_parameter("2.core")[0, 0, 0, 0] = math.nan
    with pytest.raises(DivergedError, match="layer '2' has non-finite weights at step 7"):
        clip.project(model, 7, force=True)


def test_a_product_of_finite_factors_that_overflows_is_divergence() -> None:
    model = network()
    clip = Clip(0.5)
    clip.bind(model, 7)
    with torch.no_grad():
        for factor in ("2.k1", "2.core", "2.k3"):
            model.get_parameter(factor).mul_(1e30)
    with pytest.raises(DivergedError, match="layer '2': frames times core are not finite"):
        clip.project(model, 7, force=True)


def test_misuse() -> None:
    with pytest.raises(ConfigError, match=r"model = .*: must be .* call bind\(model, input_size\)"):
        Clip(1.0).project(network(), 100)
    clip = Clip(1.0)
    clip.bind(nn.Sequential(nn.Conv2d(1, 1, 3)), 5)
    with pytest.raises(ValueError, match="must have the layers it was bound with; missing: 0"):
        clip.project(nn.Sequential(nn.Linear(2, 2)), 100)
    parametrized = parametrizations.spectral_norm(nn.Conv2d(2, 2, 3))
    with pytest.raises(ValueError, match="must not be parametrized"):
        Clip(1.0).bind(parametrized, 5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_recomputes_are_refused() -> None:
    for normed in (nn.utils.weight_norm(nn.Conv2d(2, 2, 3)), nn.utils.spectral_norm(nn.Conv2d(2, 2, 3))):
        for constraint in (Clip(1.0), Divide(1.0)):
            with pytest.raises(ConfigError, match="must not have a weight that a hook recomputes"):
                constraint.bind(normed, 5)
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.utils.weight_norm(nn.Linear(18, 2)))
    Clip(1.0).bind(model, 5)
    with pytest.raises(ConfigError, match=r"model\.2 = 'Linear': must not have a weight"):
        Clip(1.0, linear=True).bind(model, 5)


@pytest.mark.parametrize(
    ("padding", "stride", "size", "message"),
    [
        (0, 1, 8, r"model\.0\.padding = \(0, 0\): must leave \(8, 8\) outputs in circular mode"),
        (2, 1, 8, r"model\.0\.padding = \(2, 2\): must leave \(8, 8\) outputs"),
        (1, 2, 7, r"model\.0\.stride = \(2, 2\): must divide input_size = \(7, 7\)"),
    ],
)
def test_circular_padding_that_changes_the_size_is_refused(padding: int, stride: int, size: int, message: str) -> None:
    conv = nn.Conv2d(3, 4, 3, stride, padding, padding_mode="circular")
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    for constraint in (Clip(1.0, operator="zero-padded"), Divide(1.0, power_iterations="exact")):
        with pytest.raises(ConfigError, match=message):
            constraint.bind(model, size)
    for left_alone in (Clip(1.0), Divide(linear=1.0)):
        left_alone.bind(model, size)
        left_alone.project(model, 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip(1.0, rounds=2.5), r"rounds = 2\.5: must be at least 1 and a whole number"),  # type: ignore[arg-type]
        (lambda: Clip(1.0, every=1.5), r"every = 1\.5: must be"),  # type: ignore[arg-type]
        (lambda: Clip("1"), "delta = '1': must be a finite number above 0"),  # type: ignore[arg-type]
        (lambda: Clip(None), "delta = None: must be"),  # type: ignore[arg-type]
        (lambda: Clip(1.0, floor="a"), "floor = 'a': must be"),  # type: ignore[arg-type]
        (lambda: Divide("a"), "conv = 'a': must be a finite number above 0, or None"),  # type: ignore[arg-type]
        (lambda: Orthogonal("a"), "lambda_ort = 'a': must be"),  # type: ignore[arg-type]
        (lambda: Orthogonal(1.0, normalizer="z"), 'normalizer = \'z\': must be "paper" or "code"'),
        (lambda: Compose(1), "constraints = 1: must be constraints"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_arguments_out_of_range() -> None:
    for delta in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"delta = .*: must be a finite number above 0"):
            Clip(delta)
    with pytest.raises(ValueError, match="every = 0: must be at least 1"):
        Clip(1.0, every=0)
    with pytest.raises(ValueError, match="rounds = 0"):
        Clip(1.0, rounds=0)
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="lambda_ort = "):
            Orthogonal(weight)
