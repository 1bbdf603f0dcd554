"""How much normalisation can enlarge a difference of two images, in the L2 norm.

With statistics of its own, a batch norm is a constant factor per channel. With those of its input, D values x become
g(P x): P, an orthogonal projection, takes their mean away, and g(u) = u / s with s^2 = |u|^2 / D + eps. The Jacobian of
g is (1 - u u^T / (D s^2)) / s, symmetric, with the eigenvalues 1 / s and, along u, eps / s^3: both are above 0 and at
most 1 / sqrt(eps). So the norm is at most 1 / sqrt(eps), and is that where all values, two or more, are equal.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ttsv.certification.linear_maps import EPS, rounded_up
from ttsv.certification.reach import Affine, Reach
from ttsv.certification.trace import Rule, Trace, Traced


def _batch_norm(
    trace: Trace,
    _: Tensor,
    features: Traced,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Reach:
    if training or running_var is None:
        raise trace.refuse(
            "batch_norm()", "has no statistics of its own: with the batch's it has no Lipschitz constant"
        )
    gain = torch.ones_like(running_var) if weight is None else weight.detach().abs()
    scale = gain / (running_var + eps).sqrt() * (1 + 8 * EPS)
    return trace.scaled(features.reach, scale, "batch_norm", "|gamma| / sqrt(var + eps) per channel")


def _instance_norm(
    trace: Trace,
    result: Tensor,
    features: Traced,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Reach:
    if not use_input_stats:
        return _batch_norm(trace, result, features, running_mean, running_var, weight, bias, False, momentum, eps)
    return _normalized(trace, features.reach, weight, eps, "instance_norm")


def _group_norm(
    trace: Trace,
    _: Tensor,
    features: Traced,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Reach:
    return _normalized(trace, Reach(features.reach.total), weight, eps, "group_norm")


def _layer_norm(
    trace: Trace,
    _: Tensor,
    features: Traced,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Reach:
    if len(normalized_shape) >= features.ndim:
        raise trace.refuse("a layer_norm() over the first axis", "mixes the images of a batch")
    reach = _normalized(trace, Reach(features.reach.total), None, eps, "layer_norm")
    if weight is None:
        return reach
    # One factor per normalised value, which need not be one per channel.
    return trace.channelwise(reach, rounded_up(weight.abs().max().item()), "the largest |gamma|", "layer_norm")


def _normalized(trace: Trace, source: Reach | Affine, weight: Tensor | None, eps: float, kind: str) -> Reach:
    """The reach behind normalisation with the input's statistics, and behind a weight per channel."""
    if not eps > 0:
        raise trace.refuse(f"{kind}() with eps = {eps}", "has no Lipschitz constant: eps must be above 0")
    reach = trace.channelwise(source, rounded_up(1 / math.sqrt(eps)), "1 / sqrt(eps)", kind)
    return reach if weight is None else trace.scaled(reach, weight.detach().abs(), kind, "|gamma| per channel")


NORMALIZATIONS: dict[str, Rule] = {
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
}
"""Name of a function of torch -> its rule, with torch's arguments."""
