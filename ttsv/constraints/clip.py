"""Singular values clipped to a threshold, and kept above a floor."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ttsv.checks import check_count, check_flag
from ttsv.constraints.operators import (
    MATRIX,
    MEASURES,
    Operator,
    bound_layers,
    check_operator,
    frames_norm,
    make_frames_orthonormal,
    matrix_norm,
    operator_norm,
    shrunk,
    sizes_to_control,
    unbound,
)
from ttsv.constraints.protocol import LayerNorms, Unconstrained
from ttsv.errors import DivergedError
from ttsv.layers import (
    Convolution,
    LayerGeometry,
    TransposedConvolution,
    TTConv,
    layer_geometry,
    layer_kernel,
)
from ttsv.precision import at_least_single
from ttsv.spectral.clamping import bracket_conv, bracket_matrix, check_bracket
from ttsv.spectral.clipping import clip_conv, clip_conv_measured, clip_matrix
from ttsv.spectral.singular_values import conv_singular_values
from ttsv.spectral.symbol import Size

_EPS = torch.finfo(torch.float64).eps


class Clip(Unconstrained):
    """Clips the singular values of every convolution to `delta`, every `every` optimizer steps.

    `rounds` and `rescale` as in `ttsv.spectral.clip_conv`: with `rescale` every layer's norm is at most delta
    after a projection, without it truncation to the kernel's taps may leave more. Of which operator is said by
    `operator`: "periodic", at the size that a layer sees (where its stride does not divide that, at the smallest larger
    size that it divides), or "zero-padded", what the layer applies with its own padding. The clip itself works on the
    periodic one; the norm that is reported, and brought to delta by `rescale`, is of the operator named, for
    "zero-padded" a rigorous upper bound.

    `floor` raises small singular values too, as far as the taps allow: see `ttsv.spectral.bracket_conv` for
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
        super().__init__()
        check_bracket(0.0 if floor is None else floor, delta)
        check_count("every", every)
        check_count("rounds", rounds)
        check_flag("rescale", rescale)
        check_flag("linear", linear)
        check_operator(operator)
        self.delta = delta
        self.every = every
        self.rounds = rounds
        self.rescale = rescale
        self.operator: Operator = operator
        self.floor = floor
        self.linear = linear
        self._sizes: Mapping[str, tuple[int, ...]] | None = None

    def bind(self, model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> None:
        """Records the size that each layer sees, by a forward pass that changes nothing in the model.

        Raises `ConfigError` for a layer whose weight is parametrized or recomputed by a hook, which a projection could
        not write, for layers that share a weight, and, for "zero-padded", for padding other than zeros or circular or
        circular padding that changes the size.
        """
        self._sizes = sizes_to_control(model, input_size, self.operator, in_channels=in_channels, linear=self.linear)

    @torch.no_grad()
    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        """Clips where `step` is a multiple of `every`, or `force`. Raises `DivergedError` for non-finite weights."""
        if self._sizes is None:
            raise unbound(model)
        if not force and step % self.every:
            return
        start = time.perf_counter()
        layers = bound_layers(model, self._sizes, step, linear=self.linear)
        norms = {name: self._clip(name, layer, self._sizes[name]) for name, layer in layers.items()}
        self._add_to_report(norms, time.perf_counter() - start)

    def _clip(self, name: str, layer: nn.Module, seen: tuple[int, ...]) -> LayerNorms:
        if isinstance(layer, nn.Linear):
            clipped, norms = self._clip_matrix(layer.weight)
            layer.weight.copy_(clipped)
            return norms
        assert isinstance(layer, TTConv | Convolution | TransposedConvolution)
        make_frames_orthonormal(layer)
        around, kernel = frames_norm(layer), layer_kernel(layer)
        if not kernel.isfinite().all():  # of finite factors the product may overflow
            raise DivergedError(f"layer {name!r}: frames times core are not finite: lower the learning rate")
        limit = self.delta if around == 1 else self.delta / around * (1 - 4 * _EPS)
        clipped, norms = self._clip_kernel(kernel, limit, layer_geometry(layer, seen))
        kernel.copy_(clipped)
        return replace(norms, before=norms.before * around, after=norms.after * around)

    def _clip_matrix(self, stored: Tensor) -> tuple[Tensor, LayerNorms]:
        weight = at_least_single(stored)
        if self.floor is None:
            clipped = clip_matrix(weight, self.delta)
        else:
            clipped = bracket_matrix(weight, self.floor, self.delta)

        def norm(other: Tensor) -> float:
            return matrix_norm(other.to(stored.dtype))

        clipped, after = shrunk(clipped, self.delta, norm, norm(clipped))
        smallest = None if self.floor is None else torch.linalg.svdvals(clipped)[-1].item()
        return clipped, LayerNorms(norm(weight), after, smallest, MATRIX)

    def _clip_kernel(self, stored: Tensor, limit: float, geometry: LayerGeometry) -> tuple[Tensor, LayerNorms]:
        kernel, size, steps = at_least_single(stored), geometry.periodic_size, geometry.steps
        if self.floor is None and self.operator == "periodic" and kernel.dtype == stored.dtype:
            measured = clip_conv_measured(kernel, limit, size, rounds=self.rounds, rescale=self.rescale, **steps)
            return measured.kernel, LayerNorms(measured.before, measured.after)

        def norm(other: Tensor) -> float:
            return operator_norm(other.to(stored.dtype), geometry, self.operator)

        if self.floor is None:
            clipped = clip_conv(kernel, limit, size, rounds=self.rounds, **steps)
        else:
            clipped = bracket_conv(kernel, min(self.floor, limit), limit, size, rounds=self.rounds, **steps)
        before, after = norm(kernel), norm(clipped)
        if self.rescale:
            clipped, after = shrunk(clipped, limit, norm, after)
        smallest = None
        if self.floor is not None:
            smallest = conv_singular_values(clipped, size, **steps).min().item()
        return clipped, LayerNorms(before, after, smallest, MEASURES[self.operator])
