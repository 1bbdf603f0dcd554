"""Singular values clipped to a threshold, and kept above a floor."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ttsv.checks import check_flag
from ttsv.constraints.operators import (
    MATRIX,
    MEASURES,
    Operator,
    frames_norm,
    make_frames_orthonormal,
    matrix_norm,
    operator_norm,
    rescale_to_target,
    sizes_to_control,
)
from ttsv.constraints.projection import Projection
from ttsv.constraints.protocol import LayerNorms
from ttsv.errors import DivergedError
from ttsv.layers import TTConv, layer_kernel
from ttsv.precision import at_least_single
from ttsv.spectral.clamping import check_limits, clamp_kernel, clamp_matrix
from ttsv.spectral.clipping import ClipOptions, clip_kernel, clip_measured
from ttsv.spectral.geometry import Convolution, LayerGeometry, TransposedConvolution, layer_geometry
from ttsv.spectral.singular_values import periodic_singular_values
from ttsv.spectral.symbol import Size

_EPS = torch.finfo(torch.float64).eps


class Clip(Projection):
    """Clips the singular values of every convolution to `delta`, every `every` optimizer steps.

    `rounds` and `rescale` as in `ttsv.spectral.clip_conv`: with `rescale` every layer's norm is at most delta
    after a projection, without it truncation to the kernel's taps may leave more. Of which operator is said by
    `operator`: "periodic", at the size that a layer sees (where its stride does not divide that, at the smallest larger
    size that it divides), or "zero-padded", what the layer applies with its own padding. The clip itself works on the
    periodic one; the norm that is reported, and brought to delta by `rescale`, is of the operator named, for
    "zero-padded" a rigorous upper bound.

    `floor` raises small singular values too, as far as the taps allow: see `ttsv.spectral.clamp_conv` for
    what is left; the smallest value reached is reported. `linear=True` treats linear layers as well, to the same
    limits, exactly. A TT layer has its core treated between frames made orthonormal by QR, which are written back, or
    between frames held orthonormal; what these, as they are rounded, may add to the core's norm is part of what is
    reported and brought to delta. A transposed convolution is treated as the convolution whose adjoint it is. Weights
    in half precision are clipped in float32 and rounded; norms are those of the rounded ones. Layers that the model's
    forward pass does not reach in evaluation mode are left alone.
    """

    def __init__(
        self,
        delta: float,
        *,
        every: int = 100,
        rounds: int = 1,
        rescale: bool = True,
        operator: Operator = "periodic",
        floor: float | None = None,
        linear: bool = False,
    ) -> None:
        super().__init__(every, operator)
        check_limits(0.0 if floor is None else floor, delta)
        check_flag("linear", linear)
        self.options = ClipOptions(delta, rounds, rescale)
        self.floor = floor
        self.linear = linear

    @property
    def delta(self) -> float:
        """The threshold."""
        return self.options.delta

    def bind(self, model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> None:
        """Records the size that each layer sees, by a forward pass that changes nothing in the model.

        Raises `ConfigError` for a layer whose weight is parametrized or recomputed by a hook, which a projection could
        not write, for layers that share a weight, and, for "zero-padded", for padding other than zeros or circular or
        circular padding that changes the size.
        """
        self._sizes = sizes_to_control(model, input_size, self.operator, in_channels=in_channels, linear=self.linear)

    def _project_layer(self, name: str, layer: nn.Module, seen: tuple[int, ...], force: bool) -> LayerNorms:
        if isinstance(layer, nn.Linear):
            clipped, norms = self._clip_matrix(layer.weight)
            layer.weight.copy_(clipped)
            return norms
        assert isinstance(layer, TTConv | Convolution | TransposedConvolution)
        make_frames_orthonormal(layer)
        around, kernel = frames_norm(layer), layer_kernel(layer)
        if not kernel.isfinite().all():  # of finite factors the product may overflow
            raise DivergedError(f"layer {name!r}: frames times core are not finite: lower the learning rate")
        delta = self.options.delta
        options = self.options if around == 1 else replace(self.options, delta=delta / around * (1 - 4 * _EPS))
        clipped, norms = self._clip_kernel(kernel, layer_geometry(layer, seen), options)
        kernel.copy_(clipped)
        return replace(norms, before=norms.before * around, after=norms.after * around)

    def _clip_matrix(self, stored: Tensor) -> tuple[Tensor, LayerNorms]:
        weight, delta = at_least_single(stored), self.options.delta

        def norm(other: Tensor) -> float:
            return matrix_norm(other.to(stored.dtype))

        clipped = clamp_matrix(weight, self.floor or 0.0, delta)
        clipped, after = rescale_to_target(clipped, delta, norm, norm(clipped))
        smallest = None if self.floor is None else torch.linalg.svdvals(clipped)[-1].item()
        return clipped, LayerNorms(norm(weight), after, smallest, MATRIX)

    def _clip_kernel(self, stored: Tensor, geometry: LayerGeometry, options: ClipOptions) -> tuple[Tensor, LayerNorms]:
        kernel = at_least_single(stored)
        periodic = geometry.periodic_conv(kernel)
        if self.floor is None and self.operator == "periodic" and kernel.dtype == stored.dtype:
            measured = clip_measured(kernel, periodic, options)
            return measured.kernel, LayerNorms(measured.before, measured.after)

        def norm(other: Tensor) -> float:
            return operator_norm(other.to(stored.dtype), geometry, self.operator)

        if self.floor is None:
            clipped = clip_kernel(kernel, periodic, replace(options, rescale=False))
        else:
            clipped = clamp_kernel(kernel, periodic, min(self.floor, options.delta), options.delta, options.rounds)
        before, after = norm(kernel), norm(clipped)
        if options.rescale:
            clipped, after = rescale_to_target(clipped, options.delta, norm, after)
        smallest = None if self.floor is None else periodic_singular_values(clipped, periodic).min().item()
        return clipped, LayerNorms(before, after, smallest, MEASURES[self.operator])
