"""What a network may do behind the back of the trace of its bound: followed where it is seen, else refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from ttsv.certification.certificates import certificates, lipschitz_bound
from ttsv.certification.layers import module_rule
from ttsv.certification.rules import FUNCTIONS, JOINS
from ttsv.certification.trace import Trace
from ttsv.errors import ConfigError
from ttsv.layers import SOC, TTConv2d
from ttsv.metrics.lipschitz import empirical_lipschitz
from ttsv.runtime.precision import in_float64


class Bare(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


class Applied(Bare):
    """The same behind a sum whose bound is loose: no few passes refute what follows."""

    def forward(self, images: Tensor) -> Tensor:
        return self.function(9 * images - 8 * images)


def slope(model: nn.Module, shape: tuple[int, ...]) -> float:
    """The norm of the Jacobian, as autograd has it, of the model in float64 at a drawn image."""
    exact = in_float64(model)
    image = torch.rand((1, *shape), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.func.jacrev(lambda pixels: exact(pixels).flatten())(image)
    norm: float = torch.linalg.matrix_norm(jacobian.flatten(1), 2).item()
    return norm


def without_subclass(images: Tensor) -> Tensor:
    """Five times the images, ten of which are written while torch tells no subclass of it."""
    with torch._C.DisableTorchFunctionSubclass():
        images.mul_(10)
    return images * 0.5


def mapped(images: Tensor) -> Tensor:
    """The same from within a transformation of functions."""
    torch.vmap(lambda image: image.mul_(10))(images)
    return images * 0.5


@pytest.mark.parametrize("function", [without_subclass, mapped])
def test_what_gets_past_torchs_functions_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"mul_\(\).*past torch's functions"):
        lipschitz_bound(Applied(function), 2, in_channels=1)


def relu(images: Tensor) -> Tensor:
    """Somebody's own, under the name of torch's, and dispatched like torch's."""
    if has_torch_function_unary(images):
        result: Tensor = handle_torch_function(relu, (images,), images)
        return result
    return 10 * torch.relu(images)


def test_a_function_with_a_borrowed_name_has_no_rule() -> None:
    with pytest.raises(ConfigError, match=r"relu\(\).*no rule"):
        lipschitz_bound(Applied(relu), 2, in_channels=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0),
        lambda x: x + x.roll(1, 0),
        lambda x: x - x.transpose(0, 1).mean(1, keepdim=True).transpose(0, 1),
        lambda x: x if len(x) == 1 else 2 * x,
        lambda x: torch.stack([x, x]).mean(1),
    ],
    ids=["flip", "roll", "mean", "number of images", "stack"],
)
def test_a_network_that_mixes_the_images_of_a_batch_has_no_bound(function: Callable[[Tensor], Tensor]) -> None:
    """Of one image each is harmless; of several the certificate of one would hang on the others."""
    with pytest.raises(ConfigError, match="another output beside another image"):
        lipschitz_bound(Applied(function), 2, in_channels=1)


def test_rounding_among_large_outputs_is_no_mixing() -> None:
    model = Bare(lambda x: torch.cat([x.flatten(1) + 1e-5 * len(x), x.flatten(1) + 1e6], 1))
    assert lipschitz_bound(model, 2, in_channels=1).value == pytest.approx(math.sqrt(2), rel=1e-9)


def test_a_network_for_one_image_at_a_time_has_a_bound() -> None:
    model = Applied(lambda x: torch.cat([x, torch.ones(1, 1, 2, 2)], 1))
    assert lipschitz_bound(model, 2, in_channels=1).value == pytest.approx(17, rel=1e-9)


def test_a_network_that_fails_in_float64_is_refused() -> None:
    weight = torch.ones(3, 4)  # which no conversion of the model sees
    with pytest.raises(ConfigError, match="fails in float64"):
        lipschitz_bound(Applied(lambda x: functional.linear(x.flatten(1), weight)), 2, in_channels=1)
    # Without a weight of its own, too, a network is tried in float64.
    found = lipschitz_bound(Applied(lambda x: functional.linear(x.flatten(1), weight.double())), 2, in_channels=1)
    assert found.value == pytest.approx(17 * math.sqrt(12), rel=1e-6)


class FalseGradient(torch.autograd.Function):
    """The identity, with a backward that says ten times as much."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        return images * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 10


def test_a_gradient_that_is_false_refutes_no_bound() -> None:
    image = torch.rand(1, 1, 2, 2, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(FalseGradient.apply(image).sum(), image)
    assert gradient.norm().item() == pytest.approx(20)
    model = Applied(lambda x: FalseGradient.apply(FalseGradient.apply(x)))
    assert lipschitz_bound(model, 2, in_channels=1).value == pytest.approx(17, rel=1e-9)


class Overwriting(nn.Module):
    """Halves its input where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.mul_(0.5).flatten(1))
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_may_write_into_its_input(dtype: torch.dtype) -> None:
    """The certificate is of the images that were given, which stay as they are."""
    torch.manual_seed(0)
    model = Overwriting().to(dtype)
    images = torch.rand(5, 1, 2, 2, dtype=dtype)
    kept = images.clone()
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).to(dtype)
    with torch.no_grad():
        plain[1].get_parameter("weight").copy_(model.head.weight / 2)
        plain[1].get_parameter("bias").copy_(model.head.bias)
    labels = plain(images).argmax(1)
    found, expected = certificates(model, images, labels), certificates(plain, images, labels)
    torch.testing.assert_close(found.radii, expected.radii, rtol=1e-4, atol=1e-6)
    largest = empirical_lipschitz(model, images, labels).maximum
    assert largest == pytest.approx(empirical_lipschitz(plain, images, labels).maximum, rel=1e-4)
    assert torch.equal(images, kept)


@pytest.mark.parametrize(
    "layer", [nn.LeakyReLU(math.nan), nn.ELU(math.nan), nn.PReLU(init=math.nan)], ids=["leaky_relu", "elu", "prelu"]
)
def test_slopes_that_are_no_number_have_no_bound(layer: nn.Module) -> None:
    """Images that are positive everywhere do not show them."""
    with pytest.raises(ConfigError, match="finite"):
        lipschitz_bound(layer, 2, in_channels=1)


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 20.0), (1e-3, 20.0), (1.0, 3.0), (-0.1, 18.0)])
def test_the_jump_of_softplus_is_in_its_bound(beta: float, threshold: float) -> None:
    """All pixels cross it together, by steps of one length and shorter ones."""
    edge = threshold / beta
    model = Bare(lambda x: functional.softplus(x + (edge - 0.5), beta=beta, threshold=threshold))
    bound = lipschitz_bound(model, (3, 5), in_channels=2).value
    ratios = []
    for length in (1e-9, 1e-7, 1e-5, 1e-3, 1e-1):
        step = length / math.sqrt(30)
        for share in (0.01, 0.5, 0.99):
            below = torch.full((1, 2, 3, 5), 0.5 - share * step, dtype=torch.float64)
            moved = (model(below + step) - model(below)).norm().item()
            ratios.append(moved / (bound * max(length, 1e-5)))
    assert max(ratios) <= 1 + 1e-6
    # A jump that is seen makes most of the bound, where all values jump.
    jump = math.log1p(math.exp(-threshold)) / abs(beta)
    assert jump < 1e-8 or max(ratios) > 0.7
    assert bound >= math.hypot(1, jump * math.sqrt(30) / 1e-5)


def test_a_radius_below_the_shortest_step_is_none() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        model[1].get_parameter("weight").copy_(torch.tensor([[1.0], [-1.0]]))
        model[1].get_parameter("bias").zero_()
    images = torch.tensor([5e-6, 2e-5, 0.1], dtype=torch.float64).reshape(3, 1, 1)
    found = certificates(model, images, torch.zeros(3, dtype=torch.long))
    assert found.correct.all()
    assert found.radii.tolist() == [0, pytest.approx(2e-5, rel=1e-6), pytest.approx(0.1, rel=1e-6)]


def tt_padded_as_made() -> nn.Module:
    layer = TTConv2d(2, 3, 3, 2, padding=1, padding_mode="replicate")
    nn.init.constant_(layer.core, 0.3)
    nn.init.constant_(layer.k1, 1.0)
    nn.init.constant_(layer.k3, 1.0)
    layer.padding = (0, 0)  # at which it does not look
    return layer


def same_padding_of_a_new_weight() -> nn.Module:
    layer = nn.Conv2d(2, 2, 1, padding="same")
    layer.weight = nn.Parameter(torch.full((2, 2, 5, 5), 0.1))  # torch pads for this one
    return layer


class Tripled(TTConv2d):
    """Computes another thing than its factors say, by a method that `forward` calls."""

    def _convolve(self, images: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        return 3 * super()._convolve(images, kernel, bias)


@pytest.mark.parametrize(
    "make",
    [tt_padded_as_made, same_padding_of_a_new_weight, lambda: Tripled(2, 3, 3, 2, padding=1)],
    ids=["tt", "same", "subclass"],
)
def test_layers_are_taken_as_they_compute(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer = make()
    # Behind a loose sum, so that the few passes that every bound must stand do not refute a wrong one.
    model = nn.Sequential(Applied(lambda x: x / 16), layer)
    assert slope(layer, (2, 8, 8)) <= lipschitz_bound(layer, 8).value
    assert lipschitz_bound(model, 8, in_channels=2).value > 17 / 16 * slope(layer, (2, 8, 8)) * (1 - 1e-12)


def test_a_subclass_without_methods_of_its_own_keeps_its_rule() -> None:
    class Named(TTConv2d):
        """Another name."""

        label = "first"

    assert module_rule(Named(2, 3, 3, 2)) is module_rule(TTConv2d(2, 3, 3, 2)) is not None
    assert module_rule(Tripled(2, 3, 3, 2)) is None


def test_soc_in_training_mode_is_refused() -> None:
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.soc = SOC(2, 2, 3, train_terms=1)

        def forward(self, images: Tensor) -> Any:
            return self.soc.train()(images)

    with pytest.raises(ConfigError, match="SOC layer in training mode in soc"):
        lipschitz_bound(Training(), 4)


def test_the_device_is_that_of_the_model() -> None:
    """What has no data lies nowhere; the network asks where its input will lie."""

    model = Bare(lambda x: torch.cat([x, x], 1) if x.is_cuda and x.device.type == "cuda" else x)
    for device, expected in (("cuda", math.sqrt(2)), ("cpu", 1.0)):
        found = Trace(FUNCTIONS, JOINS, module_rule, torch.device(device)).run(model, (1, 1, 2, 2))
        assert found.reach.total == pytest.approx(expected)


def test_functions_without_a_rule_are_named() -> None:
    for function, name in (
        (lambda x: x.log_softmax(1), "log_softmax"),
        (lambda x: torch.where(x > 0, x, -x), "gt"),
        (lambda x: functional.grid_sample(x, torch.zeros(1, 2, 2, 2, dtype=x.dtype)), "grid_sample"),
        (lambda x: x.round(), "round"),
        (lambda x: torch.einsum("bchw->bc", x), "einsum"),
        (lambda x: functional.rms_norm(x, (2,)), "rms_norm"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}\(\)"):
            lipschitz_bound(Applied(function), 2, in_channels=1)
