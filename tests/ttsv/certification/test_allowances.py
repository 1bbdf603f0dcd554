"""What certificates take off for rounding, and what the check of a bound lets pass: neither less nor more."""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.certification import certificates, certified_accuracy, linear_maps, lipschitz_bound, pooling
from ttsv.certification.layers import module_rule
from ttsv.certification.linear_maps import Convolution, TTConvolution
from ttsv.certification.reach import SHORTEST_STEP, Reach
from ttsv.certification.rules import FUNCTIONS, JOINS
from ttsv.certification.trace import Trace, Traced
from ttsv.errors import ConfigError
from ttsv.runtime.precision import in_float64
from ttsv.spectral.bounds import NormBounds


class Applied(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


def classifier(seed: int, dtype: torch.dtype, classes: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, classes)).to(dtype)


def test_a_margin_leaves_room_for_the_rounding_of_two_logits() -> None:
    """The label's logit may have been rounded down and the other one up: in its own precision no margin is smaller."""
    images = torch.rand(400, 1, 3, 3)
    shortfall = 0.0
    for seed in range(5):
        model = classifier(seed, torch.float32)
        with torch.no_grad():
            own = model(images).double()
            exact = in_float64(model)(images.double())
        labels = exact.argmax(1)
        found = certificates(model, images, labels, batch_size=len(images))  # in the same batch, rounded alike
        deviation = (own - exact).abs().amax(1)
        torch.testing.assert_close(found.rounding, 2 * deviation.clamp_min(5e-13 * exact.abs().amax(1)))
        gaps = (own.gather(1, labels[:, None]) - own.gather(1, 1 - labels[:, None]))[:, 0]
        exact_gaps = (exact.gather(1, labels[:, None]) - exact.gather(1, 1 - labels[:, None]))[:, 0]
        assert (found.margins <= gaps).all()
        shortfall = max(shortfall, ((exact_gaps - gaps) / deviation.clamp_min(1e-300)).max().item())
    # Both logits of some image are rounded so: once the largest deviation would not do.
    assert shortfall > 1.5


def test_logits_of_float64_are_taken_to_be_rounded_too() -> None:
    model, images = classifier(0, torch.float64), torch.rand(50, 1, 3, 3, dtype=torch.float64)
    logits = model(images).detach()
    found = certificates(model, images, logits.argmax(1))
    torch.testing.assert_close(found.rounding, 1e-12 * logits.abs().amax(1), rtol=1e-15, atol=0)
    gaps = logits.amax(1) - logits.amin(1)
    torch.testing.assert_close(found.margins, gaps - found.rounding, rtol=1e-15, atol=0)


def test_the_division_of_a_margin_by_a_bound_is_rounded_down() -> None:
    model, images = classifier(1, torch.float32), torch.rand(300, 1, 3, 3)
    found = certificates(model, images, model(images).argmax(1))
    assert found.bound.pairs is not None
    bound = Fraction(found.bound.pairs[0, 1].item())
    radii = [Fraction(radius) for radius in found.radii.tolist()]
    exact = [Fraction(margin) / bound for margin in found.margins.tolist()]
    assert sum(radius > 0 for radius in radii) > 200
    assert all(radius <= distance for radius, distance in zip(radii, exact, strict=True) if radius)
    assert all(radius >= distance * (1 - Fraction(1, 10**14)) for radius, distance in zip(radii, exact, strict=True))


def test_an_image_at_a_radius_is_not_beyond_it() -> None:
    model, images = classifier(2, torch.float32), torch.rand(1, 1, 3, 3)
    labels = model(images).argmax(1)
    radius = certificates(model, images, labels).radii.item()
    below = math.nextafter(radius, 0)
    assert certified_accuracy(model, images, labels, (radius, below)) == {radius: 0.0, below: 1.0}


def test_both_precisions_must_be_right() -> None:
    """float32 sees a tie and takes the first class; the second is ahead."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        model[1].get_parameter("weight").copy_(torch.tensor([[0.0], [1e-9]]))
        model[1].get_parameter("bias").copy_(torch.ones(2))
    image = torch.ones(1, 1, 1)
    assert model(image).argmax() == 0
    for label in (0, 1):
        found = certificates(model, image, torch.tensor([label]), bound=lipschitz_bound(model, (1,)))
        assert (found.correct.item(), found.radii.item()) == (False, 0.0)


def test_two_logits_part_with_the_root_of_two_where_no_layer_is_last() -> None:
    """They move against each other: the bound is reached, and so is the radius."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.LeakyReLU(1.0)).double()
    with torch.no_grad():
        model[1].get_parameter("weight").copy_(torch.tensor([[3.0], [-3.0]]))
        model[1].get_parameter("bias").zero_()
    images = torch.linspace(0.1, 1, 10, dtype=torch.float64).reshape(10, 1, 1)
    found = certificates(model, images, torch.zeros(10, dtype=torch.long))
    assert found.bound.pairs_by == "whole"
    assert found.bound.pairs is not None
    assert found.bound.pairs[0, 1].item() == pytest.approx(6, rel=1e-9)
    torch.testing.assert_close(found.radii, images.flatten(), rtol=1e-9, atol=0)
    assert (found.radii <= images.flatten()).all()


@pytest.mark.parametrize("merged", [False, True], ids=["linear", "of one pixel"])
def test_distances_of_rows_are_rounded_up(merged: bool) -> None:
    """Against the distances in rational numbers, of rows that nearly cancel too."""
    for seed in range(20):
        torch.manual_seed(seed)
        head = nn.Conv2d(2, 6, 3, bias=False) if merged else nn.Linear(18, 6, bias=False)
        model = nn.Sequential(head, nn.Flatten()) if merged else nn.Sequential(nn.Flatten(), head)
        model = model.double()
        with torch.no_grad():
            head.weight[1] = head.weight[0] * (1 + 1e-9 * torch.rand_like(head.weight[0]))
        found = lipschitz_bound(model, 3, in_channels=2)
        assert found.pairs is not None
        rows = [[Fraction(value) for value in row] for row in head.weight.detach().flatten(1).tolist()]
        for i, one in enumerate(rows):
            for j, other in enumerate(rows):
                square = sum(((a - b) ** 2 for a, b in zip(one, other, strict=True)), Fraction(0))
                pair = Fraction(found.pairs[i, j].item())
                assert pair**2 >= square
                assert float(pair) <= math.sqrt(square) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(("share", "refused"), [(1 - 1e-4, True), (1 - 1e-7, False)])
def test_a_bound_that_is_a_little_too_small_is_not_given(
    share: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what rounding may add to a slope, 1e-5, and no more."""
    monkeypatch.setitem(FUNCTIONS, "relu", lambda trace, _, features: Reach(features.reach.total * share))
    if refused:
        with pytest.raises(ConfigError, match="report"):
            lipschitz_bound(nn.ReLU(), 2, in_channels=1)
    else:
        assert lipschitz_bound(nn.ReLU(), 2, in_channels=1).value == share


def test_a_gradient_finds_the_direction_that_no_two_images_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of many pixels moves by far the most where all move together."""
    monkeypatch.setitem(FUNCTIONS, "sum", lambda trace, _, features, dim: Reach(features.reach.total * 8))
    model = Applied(lambda x: x.sum((1, 2, 3)))  # the true constant is 16
    with pytest.raises(ConfigError, match=r"has the slope 1[56].* or more, its bound came out as 8"):
        lipschitz_bound(model, 16, in_channels=1)


def test_what_a_large_output_rounds_is_no_slope() -> None:
    assert lipschitz_bound(Applied(lambda x: x + 1e10), 2, in_channels=1).value == 1


def test_a_little_noise_is_seen() -> None:
    """From a generator that is not watched."""
    generator = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="two outputs"):
        lipschitz_bound(Applied(lambda x: x + 1e-6 * generator.random()), 2, in_channels=1)


def test_a_little_of_another_image_is_seen() -> None:
    with pytest.raises(ConfigError, match="mixes those of a batch"):
        lipschitz_bound(Applied(lambda x: x + 1e-4 * x.flip(0)), 2, in_channels=1)


def test_a_tie_of_a_constant_network_is_no_certificate() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    found = certificates(model, torch.rand(1, 1, 2, 2, dtype=torch.float64), torch.tensor([0]))
    assert found.bound.value == 0
    assert (found.correct.item(), found.margins.item(), found.radii.item()) == (True, 0.0, 0.0)


def test_scales_of_channels_are_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tap's two products are rounded the same way, and nearly all taps cancel: eight roundings would not do.

    The bound of the scaled kernel has no slack of its own here; it is the sum of all taps, the gain of an even image.
    """
    taps, before, behind = coherently_rounded(2**14 - 1, seed=0)
    kernel = torch.tensor(taps, dtype=torch.float64)[None, None]
    scaled = kernel * before * behind
    gains = torch.fft.fft(scaled.flatten()).abs()
    assert gains.argmax() == 0  # hence the norm is the sum's
    monkeypatch.setattr(
        linear_maps,
        "conv_norm_bounds",
        lambda given, *_, **__: NormBounds(0, abs(math.fsum(given.flatten().tolist()))),
    )
    half = (len(taps) - 1) // 2
    linear = Convolution(kernel, (len(taps),), (1,), ((half, half),), (1,), 1, "circular")
    factors = torch.tensor([before], dtype=torch.float64), torch.tensor([behind], dtype=torch.float64)
    exact = abs(sum(map(Fraction, taps), Fraction(0)) * Fraction(before) * Fraction(behind))
    found = Fraction(linear.norm(*factors))
    assert exact <= found <= exact * (1 + Fraction(1, 10**13))
    # As if each of both were the only one, and without one there is nothing to round.
    for one in ((factors[0], None), (None, factors[1])):
        product = abs(sum(map(Fraction, taps), Fraction(0)) * Fraction(before if one[1] is None else behind))
        assert product <= Fraction(linear.norm(*one)) <= product * (1 + Fraction(1, 10**13))
    assert linear.norm() == abs(math.fsum(taps))


def coherently_rounded(count: int, seed: int) -> tuple[list[float], float, float]:
    """Taps whose products with two factors are rounded towards 0 where they are positive, away from it elsewhere."""
    generator = np.random.default_rng(seed)
    before, behind = 1.1, 1.3
    tried = 1 + generator.random(60 * count) / 4
    off = (tried * before) * behind / (tried.astype(np.longdouble) * np.longdouble(before) * np.longdouble(behind)) - 1
    order = np.argsort(off.astype(float))
    sign = generator.permutation(np.arange(count) < count / 2 + 2 * math.sqrt(count))
    positive = int(sign.sum())
    taps = np.empty(count)
    taps[sign], taps[~sign] = tried[order[:positive]], -tried[order[positive - count :]]
    return taps.tolist(), before, behind


@pytest.mark.parametrize("larger", ["k1", "k3"])
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
def test_what_frames_round_away_counts(larger: str, mode: str) -> None:
    """Two nearly parallel vectors of a frame, whose difference the core takes: 1e-11 is left of numbers around 1."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        wide, narrow = (5, 2) if larger == "k1" else (2, 5)
        k1 = torch.randn(wide, 2, generator=generator, dtype=torch.float64)
        k3 = torch.randn(2, narrow, generator=generator, dtype=torch.float64)
        core = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
        k1[:, 1] = k1[:, 0] + 1e-6 * k1[:, 1]
        k3[1] = k3[0] + 1e-6 * k3[1]
        # On one pixel, which replication shows to each of three taps: one of them is not 0.
        taps = torch.zeros(2, 2, 3, dtype=torch.float64)
        taps[:, :, 1] = core
        convolution = Convolution(taps, (1,), (1,), ((1, 1),), (1,), 1, mode)
        found = Fraction(TTConvolution(k1, convolution, k3).norm())
        inputs = [Fraction(a) - Fraction(b) for a, b in k1.tolist()]
        outputs = [Fraction(a) - Fraction(b) for a, b in zip(*k3.tolist(), strict=True)]
        square = sum(v**2 for v in inputs) * sum(v**2 for v in outputs)  # of a matrix of rank 1
        assert found**2 >= square
        sizes = (k1.norm() * k3.norm() * 2).item()
        # For zeros; replicated padding is bounded by its own norm times that of the convolution, root 3 here.
        assert found <= Fraction(math.sqrt(3 * square)) * 2 + Fraction(1e3 * linear_maps.EPS * sizes)


def drawn(generator: np.random.Generator, count: int = 1) -> list[float]:
    return [float(value) for value in 0.3 + 2 * generator.random(count)]


def per_channel(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)


Rounded = tuple[Callable[[Tensor], Tensor], Fraction]
"""A function of images (2, 3, 5), and the square of what its rule says."""


def batch_normed(generator: np.random.Generator) -> Rounded:
    variances, weights = ([*drawn(generator, 2)] for _ in range(2))
    mean, (var, weight) = torch.zeros(2).double(), (torch.tensor(v, dtype=torch.float64) for v in (variances, weights))
    square = max(Fraction(w) ** 2 / (Fraction(v) + Fraction(1e-5)) for v, w in zip(variances, weights, strict=True))
    return lambda x: functional.batch_norm(x, mean, var, weight), square


def normed(kind: str, generator: np.random.Generator) -> Rounded:
    (eps,), weights = drawn(generator), drawn(generator, 2)
    weight = torch.tensor(weights, dtype=torch.float64)
    square = Fraction(max(weights)) ** 2 / Fraction(eps)
    if kind == "layer":
        each = weight[:, None, None].expand(2, 3, 5)
        return lambda x: functional.layer_norm(x, (2, 3, 5), each, eps=eps), square
    return lambda x: functional.group_norm(x, 2, weight, eps=eps), square


def times(generator: np.random.Generator, make: Callable[[float, float], Rounded]) -> Rounded:
    first, second = drawn(generator, 2)
    return make(first, second)


def constant(function: Callable[[Tensor], Tensor], square: Fraction | int) -> Callable[[np.random.Generator], Rounded]:
    return lambda _: (function, Fraction(square))


def of_channels(generator: np.random.Generator) -> Rounded:
    one, other = drawn(generator, 2), drawn(generator, 2)
    square = max(Fraction(a) * Fraction(b) for a, b in zip(one, other, strict=True)) ** 2
    return lambda x: x * per_channel(one) * per_channel(other), square


ROUNDED: dict[str, Callable[[np.random.Generator], Rounded]] = {
    "product": lambda g: times(g, lambda a, _: (lambda x: x * a, Fraction(a) ** 2)),
    "quotient": lambda g: times(g, lambda a, _: (lambda x: x / a, 1 / Fraction(a) ** 2)),
    "factors of channels": of_channels,
    "broadcast": lambda g: times(
        g, lambda a, b: (lambda x: x[:, :1] * per_channel([a, b, a]), 3 * Fraction(max(a, b)) ** 2)
    ),
    "sum": lambda g: times(g, lambda a, b: (lambda x: x * a + x * b, (Fraction(a) + Fraction(b)) ** 2)),
    "weighted sum": lambda g: times(g, lambda a, _: (lambda x: torch.add(x, x, alpha=a), (1 + Fraction(a)) ** 2)),
    "concatenation": lambda g: times(
        g, lambda a, b: (lambda x: torch.cat([x * a, x * b], 1), Fraction(a) ** 2 + Fraction(b) ** 2)
    ),
    "slopes": lambda g: times(g, lambda a, _: (lambda x: functional.leaky_relu(x, 1 + a), Fraction(1 + a) ** 2)),
    "mean": constant(lambda x: x.mean((2, 3)), Fraction(1, 15)),
    "total": constant(lambda x: x.sum((2, 3)), 15),
    "copies": constant(lambda x: x[:, [0, 1, 0, 0]], 3),
    "max pooling": constant(lambda x: functional.max_pool2d(x, (1, 3), 1), 3),
    "adaptive max pooling": constant(lambda x: functional.adaptive_max_pool2d(x, (3, 2)), 2),
    "average pooling": constant(lambda x: functional.avg_pool2d(x, (3, 1)), Fraction(1, 3)),
    "average pooling by a divisor": constant(
        lambda x: functional.avg_pool2d(x, (3, 1), divisor_override=7), Fraction(3, 49)
    ),
    "adaptive average pooling": constant(lambda x: functional.adaptive_avg_pool2d(x, (1, 5)), Fraction(1, 3)),
    "interpolation": constant(lambda x: functional.interpolate(x, scale_factor=(1, 3)), 3),
    "padding": constant(lambda x: functional.pad(x, (2, 2, 0, 0), "replicate"), 3),
    "batch norm": batch_normed,
    "group norm": lambda g: normed("group", g),
    "layer norm": lambda g: normed("layer", g),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_each_rule_rounds_up(name: str) -> None:
    """Alone, and behind a factor, so that the product of two steps is rounded too: against rational numbers."""
    generator = np.random.default_rng(0)
    for number in range(12):
        factor = drawn(generator)[0] if number % 2 else 1.0
        function, square = ROUNDED[name](generator)
        model = Applied((lambda x: function(x * factor)) if number % 2 else function)  # noqa: B023
        exact = square * Fraction(factor) ** 2
        found = Fraction(lipschitz_bound(model, (3, 5), in_channels=2).value)
        assert exact <= found**2 <= exact * (1 + Fraction(1, 10**12))


@pytest.mark.parametrize("name", ROUNDED)
def test_each_rule_rounds_up_what_it_makes_of_a_bound(name: str) -> None:
    """Of tensors that have moved by some number already; what is rounded later, as the bound is read, hides nothing."""
    generator = np.random.default_rng(1)
    for _ in range(20):
        base = drawn(generator)[0]
        trace = Trace(FUNCTIONS, JOINS, module_rule, torch.device("cpu"))
        pixels = trace.wrap(torch.empty(1, 2, 3, 5, dtype=torch.float64, device="meta"), Reach(base))
        function, square = ROUNDED[name](generator)
        found = function(pixels)
        assert isinstance(found, Traced)
        scale = [1.0] if found.reach.scale is None else found.reach.scale.tolist()
        assert square * Fraction(base) ** 2 <= (Fraction(found.reach.base) * max(map(Fraction, scale))) ** 2


def test_what_is_read_of_a_bound_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    monkeypatch.setattr(Convolution, "norm", lambda self, before, behind: 1.1)
    linear = Convolution(torch.ones(1, 1, 1), (1,), (1,), ((0, 0),), (1,))
    trace = Trace(FUNCTIONS, JOINS, module_rule, torch.device("cpu"))
    for _ in range(20):
        base, *scale = drawn(generator, 3)
        reach = Reach(base, torch.tensor(scale, dtype=torch.float64))
        assert Fraction(base) * Fraction(max(scale)) <= Fraction(reach.total)
        assert Fraction(base) * Fraction(1.1) <= Fraction(trace.mapped("convolution", linear, Reach(base)).total)


def test_norms_of_pooling_are_rounded_up_by_themselves() -> None:
    for count in range(2, 40):
        row = torch.full((1, count), 1 / 3, dtype=torch.float64)
        assert count * Fraction(1 / 3) ** 2 <= Fraction(pooling._norm(row)) ** 2
        assert count * Fraction(pooling.adaptive_average_pooling_norm((count,), (1,))) ** 2 >= 1
        # All windows see the one pixel.
        assert count <= Fraction(pooling.adaptive_max_pooling_bound((1,), (count,))) ** 2
        assert count <= Fraction(linear_maps.padding_norm((2,), ((count - 1, 0),), "replicate")) ** 2


def test_the_jump_of_softplus_is_rounded_up() -> None:
    """30 values may move by it, over the shortest step, beside what their arguments do."""
    generator = np.random.default_rng(0)
    for _ in range(10):
        factor, threshold, beta = drawn(generator, 3)
        with localcontext(prec=50):
            jump = Fraction((1 + (-Decimal(threshold)).exp()).ln()) / Fraction(beta)
        exact = Fraction(factor) ** 2 + 30 * (jump / Fraction(SHORTEST_STEP)) ** 2
        model = Applied(lambda x: functional.softplus(x * factor, beta, threshold))  # noqa: B023
        found = Fraction(lipschitz_bound(model, (3, 5), in_channels=2).value)
        assert exact <= found**2 <= exact * (1 + Fraction(1, 10**12))
