"""Power iteration on a layer's operator, warm from the vector that an earlier step left."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttsv.constraints.operators import Operator
from ttsv.layers import TTConv, layer_kernel
from ttsv.runtime.precision import at_least_single
from ttsv.spectral.geometry import CONVOLVE, Convolution, TransposedConvolution, layer_geometry
from ttsv.spectral.symbol import pad


@dataclass(frozen=True)
class PowerStep:
    """`norm`: a lower bound of a layer's norm, 0-d; `vector (1, c_in, *size)`: what to go on from."""

    norm: Tensor
    vector: Tensor


def power_step(
    layer: nn.Module,
    seen: Sequence[int],
    operator: Operator,
    iterations: int,
    vector: Tensor | None,
    *,
    noise: Tensor | None = None,
) -> PowerStep:
    """Steps `x -> A^T A x / |A^T A x|` from `vector`, or from noise (always the same) without one.

    The norm is `|A^T A x| / |A x|` of the last, never above the layer's up to rounding. A vector in the layer's null
    space is replaced by noise; a layer of zeros has the norm 0. Whether it is one is asked of the device, and waited
    for, unless `noise` is given (`start_of`): then such a step says 0, and the next one goes on from that.
    """
    apply, shape = _linear_map(layer, seen, operator)
    like = at_least_single(next(layer.parameters()).detach())
    fresh = vector is None
    if vector is None:
        vector = _drawn(shape) if noise is None else noise
    vector = vector.to(like)
    norm = like.new_zeros(())
    for _ in range(iterations):
        with torch.enable_grad():
            point = vector.detach().requires_grad_()
            image = apply(point)
            (back,) = torch.autograd.grad(image, point, image.detach())
        length, longer = torch.linalg.vector_norm(image.detach()), torch.linalg.vector_norm(back)
        if noise is not None:
            lives = longer > 0
            norm, vector = torch.where(lives, longer / length, 0), torch.where(lives, back / longer, noise)
            continue
        if not longer > 0:
            return PowerStep(norm.zero_(), vector) if fresh else power_step(layer, seen, operator, iterations, None)
        norm, vector = longer / length, back / longer
    return PowerStep(norm, vector)


def start_of(layer: nn.Module, seen: Sequence[int], operator: Operator) -> Tensor:
    """The noise that power iterations on a layer start from, on its device."""
    return _drawn(_linear_map(layer, seen, operator)[1]).to(at_least_single(next(layer.parameters()).detach()))


def _drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _linear_map(
    layer: nn.Module, seen: Sequence[int], operator: Operator
) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]]:
    """The layer without its bias, or the convolution whose adjoint it is, and the shape of one input."""
    if isinstance(layer, nn.Linear):
        weight = at_least_single(layer.weight.detach())
        return lambda rows: rows @ weight.T, (1, layer.in_features)
    assert isinstance(layer, TTConv | Convolution | TransposedConvolution)
    geometry, kernel = layer_geometry(layer, seen), at_least_single(layer_kernel(layer).detach())
    sides, size = geometry.sides, geometry.input_size
    circular = operator == "periodic" or geometry.padding_mode == "circular"
    if operator == "periodic":
        size = geometry.periodic_size
        axes = zip(geometry.stride, geometry.dilation, geometry.kernel_size, strict=True)
        sides = tuple((0, e * (k - 1) + 1 - s) for s, e, k in axes)
    frames = None
    if isinstance(layer, TTConv):
        frames = at_least_single(layer.k1.detach()), at_least_single(layer.k3.detach())
    channels = kernel.shape[1] * geometry.groups if frames is None else layer.in_channels
    convolve = CONVOLVE[kernel.ndim - 2]

    def apply(images: Tensor) -> Tensor:
        if frames is not None:
            images = torch.einsum("ni...,ia->na...", images, frames[0])
        images = _pad_circular(images, sides) if circular else pad(images, sides)
        images = convolve(images, kernel, None, geometry.stride, 0, geometry.dilation, geometry.groups)
        return images if frames is None else torch.einsum("nb...,bo->no...", images, frames[1])

    return apply, (1, channels, *size)


def _pad_circular(images: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """Images continued periodically, by any number of pixels (also negative: a stride may leave some unread)."""
    for axis, (before, after) in enumerate(sides, start=2):
        n = images.shape[axis]
        images = images.index_select(axis, torch.arange(-before, n + after, device=images.device) % n)
    return images
