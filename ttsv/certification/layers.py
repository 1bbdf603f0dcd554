"""Rules for the layers that hold a network's weights, see `ttsv.certification.rules`."""

import math
from collections.abc import Sequence
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.certification.linear_maps import EPS, Adjoint, Convolution, Matrix, TTConvolution, rounded_up
from ttsv.certification.reach import Affine, Reach
from ttsv.certification.trace import ModuleRule, Rule, Trace, Traced
from ttsv.errors import ConfigError
from ttsv.layers import SOC, MinMax, OrthogonalConv2d, TTConv
from ttsv.spectral.symbol import Size, as_tuple, padding_sides


def _convolved(axes: int) -> Rule:
    def rule(
        trace: Trace,
        _: Tensor,
        features: Traced,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> Affine:
        if features.ndim != axes + 2:
            raise trace.refuse(f"conv{axes}d() of {features.ndim} axes", "has no rule: keep the axis of the images")
        kernel, e = _copied(weight), as_tuple("dilation", dilation, axes)
        pads = padding if isinstance(padding, str) else as_tuple("padding", padding, axes, least=0)
        sides = padding_sides(pads, kernel.shape[2:], e)
        steps = as_tuple("stride", stride, axes)
        linear = Convolution(kernel, tuple(features.shape[2:]), steps, sides, e, groups)
        return trace.mapped("convolution", linear, features.reach)

    return rule


def _transposed(axes: int) -> Rule:
    def rule(
        trace: Trace,
        result: Tensor,
        features: Traced,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> Affine:
        if features.ndim != axes + 2:
            raise trace.refuse(
                f"conv_transpose{axes}d() of {features.ndim} axes", "has no rule: keep the axis of the images"
            )
        steps, e = as_tuple("stride", stride, axes), as_tuple("dilation", dilation, axes)
        pads = as_tuple("padding", padding, axes, least=0)
        sides = tuple(zip(pads, pads, strict=True))
        convolution = Convolution(_copied(weight), tuple(result.shape[2:]), steps, sides, e, groups)
        return trace.mapped("transposed convolution", Adjoint(convolution), features.reach)

    return rule


def _linear(trace: Trace, _: Tensor, features: Traced, weight: Tensor, bias: Tensor | None = None) -> Reach | Affine:
    matrix = Matrix(_copied(weight))
    if features.ndim == 2:
        return trace.mapped("linear", matrix, features.reach)
    # The matrix acts on the last axis, which is not that of the channels.
    return Reach(trace.mapped("linear", matrix, Reach(features.reach.total)).total)


def _copied(weight: Tensor) -> Tensor:
    """As it is now: its norm is computed later, when the network may have changed it."""
    return weight.detach().to(torch.float64, copy=True)


WEIGHTED: dict[str, Rule] = {
    **{f"conv{axes}d": _convolved(axes) for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": _transposed(axes) for axes in (1, 2, 3)},
    "linear": _linear,
}
"""Name of a function of torch -> its rule, with torch's arguments."""


def _layer(trace: Trace, layer: Any, features: Traced) -> tuple[Sequence[int], Affine]:
    """A convolution of torch, whose padding is part of its operator, or a TT convolution."""
    size = features.shape[2:]
    if isinstance(layer, TTConv):
        core = Convolution.of_layer(layer, _copied(layer.core), size)
        linear: TTConvolution | Convolution = TTConvolution(_copied(layer.k1), core, _copied(layer.k3))
        channels, outputs = layer.k3.shape[1], core.output_size
    else:
        linear = Convolution.of_layer(layer, _copied(layer.weight), size)
        channels, outputs = len(layer.weight), linear.output_size
    if len(size) != len(outputs):
        raise trace.refuse(f"a convolution of {features.ndim} axes", "has no rule: keep the axis of the images")
    affine = trace.mapped("convolution", linear, features.reach)
    return (features.shape[0], channels, *outputs), affine


def _pixels(trace: Trace, layer: OrthogonalConv2d, features: Traced) -> tuple[int, ...]:
    """The size of images (batch, channels, height, width)."""
    if features.ndim != 4:  # the layer may take one image alone, but its result would have another shape
        raise trace.refuse(
            f"{type(layer).__name__} of {features.ndim} axes", "has no rule: keep the axis of the images"
        )
    return tuple(features.shape[2:])


def _soc(trace: Trace, layer: SOC, features: Traced) -> tuple[Sequence[int], Reach]:
    if layer.training:
        raise trace.refuse("a SOC layer in training mode", "changes with every pass: leave it in evaluation mode")
    size, source = _pixels(trace, layer, features), features.reach
    total = rounded_up(source.total * layer.lipschitz_bound(size))
    trace.record("soc", [source], total, f"series of {layer.eval_terms} powers at a bound of its operator's norm")
    height, width = (n // layer.stride for n in size)
    return (features.shape[0], layer.out_channels, height, width), Reach(total)


def _cayley(trace: Trace, layer: OrthogonalConv2d, features: Traced) -> tuple[Sequence[int], Reach]:
    size, source = _pixels(trace, layer, features), features.reach
    sides = layer.out_channels + layer.stride**2 * layer.in_channels
    # What LAPACK and the Fourier transforms may round away.
    norm = layer.singular_values(size).max().item() * (1 + 64 * (sides + math.prod(size)) * EPS)
    total = trace.record("cayley", [source], rounded_up(source.total * norm), "largest norm over its frequencies")
    height, width = (n // layer.stride for n in size)
    return (features.shape[0], layer.out_channels, height, width), Reach(total)


def _minmax(trace: Trace, _: MinMax, features: Traced) -> tuple[Sequence[int], Reach]:
    # Of two pairs of numbers, sorting makes none further from the other.
    total = trace.record("minmax", [features.reach], features.reach.total, "1-Lipschitz")
    return features.shape, Reach(total)


_MODULES: dict[type[nn.Module], ModuleRule] = {
    nn.Conv1d: _layer,
    nn.Conv2d: _layer,
    nn.Conv3d: _layer,
    TTConv: _layer,
    SOC: _soc,
    MinMax: _minmax,
}


def _methods(kind: type[nn.Module]) -> set[str]:
    """What a layer's class and its bases say of how it computes, by name."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    found = {name for base in bases for name, value in vars(base).items() if hasattr(value, "__get__")}
    return {name for name in found if not name.startswith("__")}


def module_rule(module: nn.Module) -> ModuleRule | None:
    """The rule of a layer that is met as a whole, or None for one whose functions are followed.

    A subclass that has a method of its own is followed too. Raises `ConfigError` for a layer that was given one, such
    as another `forward`, after it was made: its class does not say what it computes.
    """
    original = parametrize.type_before_parametrizations(module)
    rules = _MODULES
    if isinstance(module, OrthogonalConv2d):
        from ttsv.layers.prior_art import Cayley  # importing the library behind it takes seconds

        rules = {**_MODULES, Cayley: _cayley}
    for kind, rule in rules.items():
        own = _methods(kind)
        if isinstance(module, kind) and all(
            getattr_static(original, name) is getattr_static(kind, name) for name in own
        ):
            if replaced := own & vars(module).keys():
                what = f"{original.__name__} with its own {min(replaced)}()"
                raise ConfigError("model", what, "has no rule for its Lipschitz constant")
            return rule
    return None
