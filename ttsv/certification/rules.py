"""How each function and layer changes a bound of the Lipschitz constant (L2), in evaluation mode.

A function's rule has the arguments of torch's function behind the trace and the result's shape. See
`ttsv.certification.trace`; the rules are those of Gouk et al., Machine Learning 2021, section 3, and their kind.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ttsv.certification.layers import WEIGHTED
from ttsv.certification.linear_maps import EPS, rounded_up
from ttsv.certification.normalization import NORMALIZATIONS
from ttsv.certification.pooling import POOLINGS, most_frequent
from ttsv.certification.reach import SHORTEST_STEP, Affine, Reach
from ttsv.certification.trace import Rule, Trace, Traced

_CURVES: dict[str, float] = {
    **dict.fromkeys(("relu", "relu6", "hardtanh", "clamp", "clip", "abs", "neg", "tanh"), 1.0),
    "sigmoid": 0.25,
    "hardsigmoid": 0.16667,
    "hardswish": 1.5,
    "selu": 1.7581,
    "silu": 1.0999,
    "mish": 1.0885,
    "gelu": 1.1292,
}
"""Elementwise functions without parameters that matter -> their steepest slope, rounded up."""

_IN_ORDER = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "detach")
"""Functions that keep all values, in row-major order."""

_REARRANGEMENTS = (
    *("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"),
    *("flip", "fliplr", "flipud", "rot90", "roll"),
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
)
"""Functions that put each value in at most one place of each result."""

_COPIES = ("__getitem__", "index_select", "gather", "expand", "broadcast_to", "repeat", "tile", "repeat_interleave")
"""Functions that take some values, some of them perhaps several times: methods of tensors of the same name do."""


def _elementwise(slope: float) -> Rule:
    def rule(trace: Trace, result: Tensor, features: Traced, *_: Any, **__: Any) -> Reach:
        if result.shape != features.shape:
            raise trace.refuse(
                f"an option that makes {tuple(result.shape)} of {tuple(features.shape)}", "repeats values: expand it"
            )
        return trace.channelwise(features.reach, slope, f"slopes of at most {slope:.4g}")

    return rule


def _softplus(trace: Trace, _: Tensor, features: Traced, beta: float = 1.0, threshold: float = 20.0) -> Reach:
    # torch goes over to the identity at x = threshold / beta by a jump. A value moves by no more than its argument or,
    # across the jump, by no more than that: the norm of all by no more than the root of the sum of both squares.
    jump = math.log1p(math.exp(-threshold)) / abs(beta) * math.sqrt(features.numel())
    total = rounded_up(math.hypot(features.reach.total, jump / SHORTEST_STEP))
    how = f"slopes of at most 1, and a jump of {jump:.2g} in all at its threshold"
    return Reach(trace.record("elementwise", [features.reach], total, how))


def _at_least_1(slope: float) -> float:
    """As `max()`, except that what is not a number stays so, and is refused: no order of arguments hides it."""
    return 1.0 if slope <= 1 else slope


def _leaky_relu(trace: Trace, _: Tensor, features: Traced, negative_slope: float = 0.01) -> Reach:
    return trace.channelwise(features.reach, _at_least_1(abs(negative_slope)), "the steeper of its two slopes")


def _elu(trace: Trace, _: Tensor, features: Traced, alpha: float = 1.0) -> Reach:
    return trace.channelwise(features.reach, _at_least_1(abs(alpha)), "the steeper of its two sides")


def _prelu(trace: Trace, _: Tensor, features: Traced, weight: Tensor) -> Reach:
    return trace.channelwise(features.reach, _at_least_1(weight.abs().max().item()), "the steepest of its slopes")


def _dropout(trace: Trace, _: Tensor, features: Traced, p: float = 0.5, training: bool = True) -> Reach | Affine:
    if training:
        raise trace.refuse("dropout()", "stays active in evaluation mode: the network is random")
    return features.reach


def _rearranged(trace: Trace, _: Tensor, features: Traced, *__: Any, **___: Any) -> Reach:
    return Reach(features.reach.total)


def _reshaped(trace: Trace, result: Tensor, features: Traced, *_: Any, **__: Any) -> Reach | Affine:
    """Where the first two axes stay, channels are still channels; each of many becomes several of flattened ones."""
    reach = features.reach
    if result.shape[:2] == features.shape[:2]:
        return reach
    if min(result.ndim, features.ndim) < 2 or result.shape[0] != features.shape[0] or reach.scale is None:
        return Reach(reach.total)
    count, rest = divmod(result.shape[1], features.shape[1])
    return Reach(reach.total) if rest else Reach(reach.base, reach.scale.repeat_interleave(count))


def _taken(name: str) -> Rule:
    """For functions each of whose values is one of their argument's, `name` of which finds out where each is taken."""

    def rule(trace: Trace, _: Tensor, features: Traced, *args: Any, **kwargs: Any) -> Reach:
        places = torch.arange(features.numel(), device=trace.device).view(features.shape)
        most = most_frequent(getattr(places, name)(*args, **kwargs).flatten())
        if most == 1:
            return Reach(features.reach.total)
        total = rounded_up(features.reach.total * math.sqrt(most))
        how = f"the root of {most}, the times that a value is taken"
        return Reach(trace.record("copies", [features.reach], total, how))

    return rule


def _expanded_as(trace: Trace, result: Tensor, features: Tensor, other: Tensor) -> Reach | Affine:
    """Of the second tensor the shape alone counts, which depends on no pixel."""
    return _taken("expand")(trace, result, features, *result.shape) if isinstance(features, Traced) else Reach(0.0)


def _sorted(
    trace: Trace, _: Tensor, features: Traced, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> Reach:
    """Of two vectors, sorting both makes the sum of products of their values no smaller (rearrangement inequality).

    So it brings no two of them further apart.
    """
    how = "no two vectors are further apart when both are sorted"
    return trace.channelwise(_along(trace, features, dim, "sort"), 1.0, how, "sort")


def _softmax(trace: Trace, _: Tensor, features: Traced, dim: int | None = None, *__: Any, **___: Any) -> Reach:
    """The Jacobian is diag(p) - p p^T, where p are the probabilities: symmetric and positive.

    In the direction v its quadratic form is the variance of the values v under p, by Popoviciu's inequality at most
    (max v - min v)^2 / 4, hence |v|^2 / 2: reached at p = (1/2, 1/2).
    """
    return trace.channelwise(_along(trace, features, dim, "softmax"), 0.5, "half: no variance is larger", "softmax")


def _multiplied(trace: Trace, result: Tensor, first: Any, second: Any) -> Reach:
    features, factor = (first, second) if isinstance(first, Traced) else (second, first)
    return _times(trace, result, features, torch.as_tensor(factor, dtype=torch.float64))


def _divided(
    trace: Trace, result: Tensor, features: Traced, divisor: Any, *, rounding_mode: str | None = None
) -> Reach:
    if rounding_mode is not None:
        raise trace.refuse("a division with rounding", "has no bound")
    return _times(trace, result, features, 1 / torch.as_tensor(divisor, dtype=torch.float64))


def _times(trace: Trace, result: Tensor, features: Traced, factor: Tensor) -> Reach:
    magnitude = factor.detach().abs().to(trace.device) * (1 + 2 * EPS)
    if result.shape == features.shape and features.ndim > 1:
        channels = features.shape[1]
        aligned = magnitude.reshape(*(1,) * (features.ndim - magnitude.ndim), *magnitude.shape)
        if math.prod(aligned.shape) == aligned.shape[1]:
            scale = aligned.flatten().expand(channels)
            return trace.scaled(features.reach, scale, "product", "a constant factor per channel")
    largest = magnitude.max().item() * _repeated(result, features)
    total = rounded_up(features.reach.total * largest)
    return Reach(trace.record("product", [features.reach], total, "the largest constant factor"))


def _repeated(result: Tensor, features: Tensor) -> float:
    """What broadcasting a tensor to a larger one does to its norm."""
    return math.sqrt(result.numel() / features.numel())


def _added(trace: Trace, result: Tensor, first: Any, second: Any, *, alpha: float = 1) -> Reach | Affine:
    terms = [(term, factor) for term, factor in ((first, 1.0), (second, abs(alpha))) if isinstance(term, Traced)]
    if len(terms) == 1:
        ((term, factor),) = terms
        if factor == 1 and result.shape == term.shape:
            return Reach(term.reach.base, term.reach.scale) if isinstance(term.reach, Reach) else term.reach
    total = sum(term.reach.total * factor * _repeated(result, term) for term, factor in terms)
    reach = Reach(rounded_up(total))
    trace.record("sum", [term.reach for term, _ in terms], reach.total, "sum of the bounds of its terms")
    return reach


def _concatenated(trace: Trace, _: Tensor, tensors: Sequence[Tensor], *__: Any, **___: Any) -> Reach:
    sources = [tensor.reach for tensor in tensors if isinstance(tensor, Traced)]
    # hypot() neither over- nor underflows; the sum of squares would.
    total = rounded_up(math.hypot(*(source.total for source in sources)))
    return Reach(trace.record("concatenation", sources, total, "root of the sum of squares of its parts' bounds"))


def _along(trace: Trace, features: Traced, dim: Any, kind: str) -> Reach | Affine:
    """The reach before something that acts along axes; one bound for all channels if theirs is among them.

    Where `dim` is None or names none, these are all, as torch has it. Raises `ConfigError` where the axis of the images
    is.
    """
    axes = [dim] if isinstance(dim, int) else dim or range(features.ndim)
    places = {axis % features.ndim for axis in axes}
    if 0 in places:
        raise trace.refuse(f"a {kind} over the first axis", "mixes the images of a batch")
    return Reach(features.reach.total) if 1 in places else features.reach


def _reduced(power: float, kind: str) -> Rule:
    """Sums, means and maxima over axes: of m values each, `m^power` times the norm."""

    def rule(trace: Trace, result: Tensor, features: Traced, dim: Any = None, keepdim: bool = False) -> Reach:
        source = _along(trace, features, dim, kind)
        count = features.numel() // result.numel()
        return trace.channelwise(source, rounded_up(count**power), f"of {count} values each", kind)

    return rule


JOINS: dict[str, Rule] = {
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _concatenated),
    **dict.fromkeys(("add", "sub", "__add__", "__radd__", "__sub__", "__rsub__"), _added),
    "expand_as": _expanded_as,
}
"""As `FUNCTIONS`, for those of which several arguments may depend on the input."""

FUNCTIONS: dict[str, Rule] = {
    **{name: _elementwise(slope) for name, slope in _CURVES.items()},
    **dict.fromkeys(_IN_ORDER, _reshaped),
    **dict.fromkeys(_REARRANGEMENTS, _rearranged),
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), _dropout
    ),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _multiplied),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _divided),
    **{name: _taken(name) for name in _COPIES},
    "softmax": _softmax,
    "sort": _sorted,
    "mean": _reduced(-0.5, "mean"),
    "sum": _reduced(0.5, "sum over axes"),
    "amax": _reduced(0.0, "maximum"),
    "amin": _reduced(0.0, "maximum"),
    "softplus": _softplus,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "prelu": _prelu,
    **NORMALIZATIONS,
    **POOLINGS,
    **WEIGHTED,
}
"""Name of a function or method of torch, without the underscore of its in-place form -> its rule."""
