"""Rules over drawn shapes and options: against the norms of dense Jacobians in float64, and where they are reached."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from ttsv.certification import lipschitz_bound
from ttsv.errors import ConfigError
from ttsv.runtime.precision import in_float64


class Applied(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


def jacobian(model: nn.Module, image: Tensor) -> Tensor:
    """The matrix (outputs, pixels) of the model in float64 at one image (channels, ...)."""
    exact = in_float64(model)
    rows: Tensor = torch.func.jacrev(lambda pixels: exact(pixels[None]).flatten())(image.double()).flatten(1)
    return rows


def linear_norm(model: nn.Module, shape: Sequence[int]) -> float:
    """Of a linear model, from what it makes of each pixel: torch's gradients are not those of its values everywhere."""
    exact, pixels = in_float64(model), torch.eye(math.prod(shape), dtype=torch.float64)
    with torch.no_grad():
        rest = exact(torch.zeros(1, *shape, dtype=torch.float64))
        matrix = torch.stack([(exact(pixel.reshape(1, *shape)) - rest).flatten() for pixel in pixels])
    norm: float = torch.linalg.matrix_norm(matrix, 2).item()
    return norm


def norm_at(model: nn.Module, image: Tensor) -> float:
    norm: float = torch.linalg.matrix_norm(jacobian(model, image), 2).item()
    return norm


def randomized(layer: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def bounded(model: nn.Module, shape: Sequence[int]) -> float:
    return lipschitz_bound(model, tuple(shape[1:]), in_channels=shape[0]).value


TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SEEDS = st.integers(0, 2**16)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), axes=st.integers(1, 3), seed=SEEDS)
def test_transposed_convolutions(data: st.DataObject, axes: int, seed: int) -> None:
    def drawn(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(low, high)) for _ in range(axes))

    stride, dilation, kernel, size = drawn(1, 3), drawn(1, 3), drawn(1, 3), drawn(1, 6 - axes)
    padding = drawn(0, 2)
    output_padding = tuple(data.draw(st.integers(0, max(s, e) - 1)) for s, e in zip(stride, dilation, strict=True))
    extents = zip(size, stride, padding, dilation, kernel, output_padding, strict=True)
    assume(all((n - 1) * s - 2 * p + e * (k - 1) + 1 + o > 0 for n, s, p, e, k, o in extents))
    groups, c_in, c_out = (data.draw(st.integers(1, 2)) for _ in range(3))
    options: dict[str, Any] = {"stride": stride, "padding": padding, "output_padding": output_padding}
    options |= {"dilation": dilation, "groups": groups}
    layer = randomized(TRANSPOSED[axes](groups * c_in, groups * c_out, kernel, **options), seed).double()
    shape = (groups * c_in, *size)
    scales = torch.rand(groups * c_in, *(1,) * axes, dtype=torch.float64) * 3
    behind = torch.rand(groups * c_out, *(1,) * axes, dtype=torch.float64) * 3
    scaled = Applied(lambda x: layer(x * scales) * behind)
    truth, bound = linear_norm(layer, shape), bounded(layer, shape)
    assert truth * (1 - 1e-12) <= bound
    assert linear_norm(scaled, shape) * (1 - 1e-12) <= bounded(scaled, shape)
    if all(o < s for o, s in zip(output_padding, stride, strict=True)):
        assert bound <= truth * (1 + 1e-8)
        # One scale per channel is taken into the map, before and behind it.
        assert bounded(scaled, shape) <= linear_norm(scaled, shape) * (1 + 1e-8) + 1e-12


def test_a_transposed_convolution_is_cut_as_its_output_size_says() -> None:
    layer = randomized(nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), 0).double()
    model = Applied(lambda x: layer(x, output_size=(10, 9)))
    assert bounded(model, (2, 5, 5)) == pytest.approx(linear_norm(model, (2, 5, 5)), rel=1e-8)


INTERPOLATIONS = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), axes=st.integers(1, 3))
def test_interpolation_is_exact(data: st.DataObject, axes: int) -> None:
    mode = data.draw(st.sampled_from(INTERPOLATIONS[axes]))
    size = tuple(data.draw(st.integers(1, 6 - axes)) for _ in range(axes))
    options: dict[str, Any] = {"mode": mode}
    if mode.endswith(("linear", "cubic")):
        options["align_corners"] = data.draw(st.sampled_from([None, False, True]))
    if data.draw(st.booleans()):
        options["size"] = data.draw(st.one_of(st.integers(1, 8), st.tuples(*(st.integers(1, 8) for _ in size))))
    else:
        factor = st.floats(0.3, 3.3)
        factors = data.draw(st.one_of(st.just(2), factor, st.tuples(*(factor for _ in size))))
        used = factors if isinstance(factors, tuple) else (factors,) * axes
        assume(all(int(n * f) >= 1 for n, f in zip(size, used, strict=True)))
        options["scale_factor"] = factors
        if mode != "area":
            options["recompute_scale_factor"] = data.draw(st.sampled_from([None, True]))
    model = Applied(lambda x: functional.interpolate(x, **options))
    truth = linear_norm(model, (2, *size))
    assert truth * (1 - 1e-12) <= bounded(model, (2, *size)) <= truth * (1 + 1e-9)


def test_interpolation_keeps_the_scales_of_channels() -> None:
    scale = torch.tensor([1e3, 1.0], dtype=torch.float64).reshape(2, 1, 1)
    model = Applied(lambda x: functional.interpolate(x * scale, scale_factor=2) / scale)
    assert bounded(model, (2, 3, 3)) == pytest.approx(2, rel=1e-9)
    assert bounded(nn.Upsample(scale_factor=2, mode="nearest"), (1, 4, 4)) == pytest.approx(2, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=SEEDS)
def test_softmax(data: st.DataObject, seed: int) -> None:
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(3))
    axis = data.draw(st.sampled_from([1, 2, 3, -1, -2, -3]))
    scale = torch.rand(shape[0], 1, 1, dtype=torch.float64) * 5
    generator = torch.Generator().manual_seed(seed)
    for function in (lambda x: x.softmax(axis), lambda x: functional.softmax(x * scale, dim=axis) / (1 + scale)):
        model = Applied(function)
        bound = bounded(model, shape)
        for spread in (0.0, 1.0, 30.0):
            image = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
            assert norm_at(model, image) <= bound * (1 + 1e-12)


def test_the_bound_of_softmax_is_reached() -> None:
    """Where two of all values share the probability."""
    image = torch.tensor([0.0, -80.0, 0.0, -90.0]).reshape(1, 4, 1)
    for model in (nn.Softmax(dim=2), Applied(lambda x: torch.softmax(x, 2))):
        assert norm_at(model, image) == pytest.approx(0.5, rel=1e-12)
        assert 0.5 <= bounded(model, (1, 4, 1)) <= 0.5 * (1 + 1e-12)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=SEEDS, eps=st.sampled_from([1e-5, 1e-2, 1.0, 30.0]))
def test_normalisation_by_the_inputs_statistics(data: st.DataObject, seed: int, eps: float) -> None:
    groups, per_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    shape = (groups * per_group, data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3)))
    affine = data.draw(st.booleans())
    layers = [
        nn.LayerNorm(shape[data.draw(st.integers(0, 2)) :], eps=eps, elementwise_affine=affine),
        nn.GroupNorm(groups, shape[0], eps=eps, affine=affine),
        nn.InstanceNorm2d(shape[0], eps=eps, affine=affine),
    ]
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[0], 1, 1, generator=generator, dtype=torch.float64) * 4 + 0.1
    for layer in layers:
        randomized(layer, seed)
        for model in (layer, nn.Sequential(Applied(lambda x: x * scale), layer, Applied(lambda x: x / scale))):
            bound = bounded(model, shape)
            for spread in (0.0, 1e-4, 0.1, 1.0, 100.0):
                flat = torch.rand(shape[0], 1, 1, generator=generator, dtype=torch.float64)
                image = flat + spread * torch.randn(shape, generator=generator, dtype=torch.float64)
                assert norm_at(model, image) <= bound * (1 + 1e-9)
        # Between images as far apart as one likes, too.
        first, second = (
            spread * torch.randn((1, *shape), generator=generator, dtype=torch.float64) for spread in (0.01, 10)
        )
        exact = in_float64(layer)
        assert (exact(first) - exact(second)).norm() <= bounded(layer, shape) * (first - second).norm()


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.LayerNorm((4, 2, 3)), 1e-5**-0.5),
        (nn.LayerNorm(3, eps=0.25), 2.0),
        (nn.GroupNorm(2, 4), 1e-5**-0.5),
        (nn.GroupNorm(4, 4, eps=4.0), 0.5),
        (nn.InstanceNorm2d(4, eps=1e-3), 1e-3**-0.5),
    ],
    ids=repr,
)
def test_the_bound_of_normalisation_is_reached_where_all_values_are_equal(layer: nn.Module, expected: float) -> None:
    bound = bounded(layer, (4, 2, 3))
    assert bound == pytest.approx(expected, rel=1e-9)
    assert norm_at(layer, torch.full((4, 2, 3), 0.3)) == pytest.approx(bound, rel=1e-9)
    # One weight that is larger than the others, of one channel or value, counts.
    with torch.no_grad():
        if layer._parameters["weight"] is None:
            layer.register_parameter("weight", nn.Parameter(torch.ones(4)))
        layer.get_parameter("weight").flatten()[-1] = -7
    weighted = bounded(layer, (4, 2, 3))
    assert weighted == pytest.approx(7 * expected, rel=1e-9)
    truth = norm_at(layer, torch.full((4, 2, 3), 0.3))
    assert weighted / math.sqrt(2) <= truth <= weighted


def test_the_weight_of_a_group_norm_is_taken_into_the_layer_behind() -> None:
    norm, conv = nn.GroupNorm(2, 4, eps=1.0), nn.Conv2d(4, 4, 1, bias=False)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([100.0, 1.0, -10.0, 0.0]))
        conv.weight.copy_(torch.diag(torch.tensor([0.01, 1.0, 0.1, 50.0]))[:, :, None, None])
    assert bounded(nn.Sequential(norm, conv), (4, 2, 2)) == pytest.approx(1, rel=1e-6)


def test_instance_norm_with_statistics_of_its_own_is_a_factor_per_channel() -> None:
    layer = nn.InstanceNorm2d(2, track_running_stats=True, affine=True)
    with torch.no_grad():
        layer.get_buffer("running_var").copy_(torch.tensor([4.0, 0.25]))
        layer.weight.copy_(torch.tensor([1.0, -3.0]))
    truth = norm_at(layer, torch.rand(2, 3, 3))
    assert truth == pytest.approx(6, rel=1e-4)
    assert truth <= bounded(layer, (2, 3, 3)) <= truth * (1 + 1e-9)
    # In training mode, where the model is asked for it, by the images' own.
    model = Applied(lambda x: functional.instance_norm(x, torch.zeros(2), torch.ones(2), eps=1.0))
    assert bounded(model, (2, 3, 3)) == pytest.approx(1, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_copies_are_counted(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(3))
    axis = data.draw(st.integers(1, 3))
    places = data.draw(st.lists(st.integers(-shape[axis - 1], shape[axis - 1] - 1), min_size=1, max_size=6))
    times = data.draw(st.tuples(*(st.integers(1, 3) for _ in range(3))))
    index: tuple[Any, ...] = (slice(None),) * axis + (places,)
    most = max(sum((place - other) % shape[axis - 1] == 0 for other in places) for place in places)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[index],
        lambda x: x[index].clone().flip(axis)[(*index[:axis], slice(None, None, 2))],
        lambda x: x.index_select(axis, torch.tensor(places) % shape[axis - 1]),
        lambda x: x.repeat(1, *times),
        lambda x: x[:, :1].expand(-1, times[0], -1, -1),
        lambda x: x.repeat_interleave(times[0], axis),
    ]
    for function in functions:
        model = Applied(function)
        truth = linear_norm(model, shape)
        assert truth * (1 - 1e-12) <= bounded(model, shape) <= truth * (1 + 1e-9) * math.sqrt(most)
    once = linear_norm(Applied(functions[0]), shape)
    assert bounded(Applied(functions[0]), shape) == pytest.approx(once, rel=1e-9)


def test_what_writes_into_a_copy_that_is_none_is_refused() -> None:
    def written(x: Tensor) -> Tensor:
        y = x * 1
        z = y.expand(1, 1, 3, 3)
        z.mul_(5)
        return y

    with pytest.raises(ConfigError, match="used elsewhere"):
        bounded(Applied(written), (1, 3, 3))
    # Of an index list it is one.
    assert bounded(Applied(lambda x: x[:, [0, 0]].mul_(3) + x), (1, 2, 2)) == pytest.approx(
        (3 + 1) * math.sqrt(2), rel=1e-9
    )


@pytest.mark.parametrize("axis", [1, 2, 3, -1, -3])
@pytest.mark.parametrize("descending", [False, True])
def test_sorting_brings_nothing_further_apart(axis: int, descending: bool) -> None:
    """Between any two images, with scales of channels before it, which count apart where it does not mix channels."""
    scale = torch.tensor([4.0, 0.5, 1.0], dtype=torch.float64).reshape(3, 1, 1)
    generator = torch.Generator().manual_seed(0)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: (x * scale).sort(axis, descending=descending).values,
        lambda x: torch.sort(x * scale, stable=True, dim=axis, descending=descending)[0] / scale,
    ]
    for function, apart in zip(functions, (4.0, 1.0 if axis in (2, 3, -1) else 8.0), strict=True):
        model, bound = Applied(function), bounded(Applied(function), (3, 4, 2))
        assert bound == pytest.approx(apart, rel=1e-12)
        for spread in (1e-3, 1.0, 1e3):
            first = torch.rand(1, 3, 4, 2, generator=generator, dtype=torch.float64)
            second = first + spread * torch.randn(1, 3, 4, 2, generator=generator, dtype=torch.float64)
            assert (model(first) - model(second)).norm() <= bound * (first - second).norm() * (1 + 1e-12)


def test_sorting_over_the_images_is_refused_and_so_are_the_places() -> None:
    with pytest.raises(ConfigError, match="mixes the images of a batch"):
        bounded(Applied(lambda x: x.sort(0).values), (1, 2, 2))
    with pytest.raises(ConfigError):
        bounded(Applied(lambda x: x.sort(2).indices.double()), (1, 2, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, **axis: x.sort(**axis).values,
        lambda x, **axis: torch.sort(x, stable=True, **axis)[0],
        lambda x, **axis: x.softmax(**axis),
        lambda x, **axis: torch.softmax(x, **axis),
        lambda x, **axis: x.mean(**axis)[:, None],
        lambda x, **axis: torch.sum(x, **axis)[:, None],
        lambda x, **axis: x.amax(**axis)[:, None],
        lambda x, **axis: torch.cat([x, x], **axis)[:, 1:4],
    ],
    ids=["sort", "torch.sort", "softmax", "torch.softmax", "mean", "sum", "amax", "cat"],
)
def test_an_axis_by_numpys_name_is_the_same_axis(function: Callable[..., Tensor]) -> None:
    """torch takes `axis` for `dim`: along channels it mixes their scales, which the layer behind must not take in."""
    scale = torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64).reshape(3, 1, 1)

    def between(**axis: int) -> nn.Module:
        return Applied(lambda x: function(x * scale, **axis) * scale.flip(0))

    image = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(0))
    bound = bounded(between(axis=1), (3, 2, 2))
    assert bound == bounded(between(dim=1), (3, 2, 2))
    assert max(norm_at(between(axis=1), image * size) for size in (1e-3, 1.0, -1.0)) <= bound


def test_of_expand_as_the_second_tensor_is_a_shape() -> None:
    gate = Applied(lambda x: x.mean((2, 3), keepdim=True).expand_as(x))
    assert bounded(gate, (2, 3, 5)) == pytest.approx(1, rel=1e-12)
    assert linear_norm(gate, (2, 3, 5)) == pytest.approx(1, rel=1e-12)
    doubled = Applied(lambda x: x[:, :1].expand_as(torch.zeros(1, 2, 3, 5)))
    assert bounded(doubled, (1, 3, 5)) == pytest.approx(math.sqrt(2), rel=1e-12)
    constant = Applied(lambda x: torch.ones(1, 1, 1, 1, dtype=x.dtype).expand_as(x))
    assert bounded(constant, (2, 3, 5)) == 0


MASK = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :, MASK],
        lambda x: x[:, [True, False]],
        lambda x: x[..., MASK.numpy(), :],
        lambda x: x[torch.ones(1, 2, 3, 5, dtype=torch.bool)],
    ],
    ids=["tensor", "list", "numpy", "whole"],
)
def test_boolean_masks_are_refused_in_words(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"an index by a boolean mask in the model itself.*list of the places"):
        bounded(Applied(function), (2, 3, 5))
