"""Singular values clipped to a threshold, and kept above a floor."""

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ttsv.checks import check_flag
from ttsv.constraints.operators import (
    MATRIX,
    MEASURES,
    Operator,
    frames_norms,
    make_frames_orthonormal,
    matrix_norm,
    operator_norm,
    rescale_to_target,
    sizes_to_control,
)
from ttsv.constraints.projection import Projection, first_not_finite
from ttsv.constraints.protocol import ConstraintReport, ConstraintState, LayerNorms
from ttsv.errors import DivergedError
from ttsv.layers import TTConv, layer_kernel
from ttsv.runtime.precision import at_least_single
from ttsv.spectral.clamping import check_limits, clamp_kernel, clamp_matrix
from ttsv.spectral.clipping import ClipOptions, Clipped, clip_kernel, clip_stack, measured
from ttsv.spectral.geometry import Convolution, LayerGeometry, TransposedConvolution, layer_geometry
from ttsv.spectral.singular_values import periodic_singular_values
from ttsv.spectral.symbol import PeriodicConv, Size

_EPS = torch.finfo(torch.float64).eps


def gains_by_stacks(device: torch.device) -> bool:
    """Whether layers of one shape take less time together: where calls cost more than what lies in a cache saves."""
    return device.type != "cpu"


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
        self._around: dict[str, float] = {}
        self._unread: list[_Unread] = []

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

    def report(self) -> ConstraintReport:
        """Returns what the last projection achieved; what was not measured then is measured now."""
        if self._unread:
            start = time.perf_counter()
            norms = dict(self._report.layers)
            for unread in self._unread:
                norms |= unread.read()
            self._unread = []
            names = [*(self._sizes or ()), *norms]
            layers = {name: norms[name] for name in dict.fromkeys(names) if name in norms}
            self._report = replace(
                self._report, layers=layers, seconds=self._report.seconds + time.perf_counter() - start
            )
        return super().report()

    def state_dict(self) -> ConstraintState:
        """Returns the report as plain data."""
        self.report()
        return super().state_dict()

    def load_state_dict(self, state: ConstraintState) -> None:
        """Takes up the saved report."""
        self._unread = []
        super().load_state_dict(state)

    def _project_layers(self, layers: Mapping[str, nn.Module], force: bool) -> dict[str, LayerNorms]:
        self._around = self._make_frames_orthonormal(layers)
        stacks = self._stacks(layers)
        self._unread = []  # lets go of the last projection's kernels before there are new ones
        self._unread = [self._clip_stack({name: layers[name] for name in names}) for names in stacks]
        clipped = {name for names in stacks for name in names}
        return super()._project_layers({name: layers[name] for name in layers if name not in clipped}, force)

    def _stacks(self, layers: Mapping[str, nn.Module]) -> list[list[str]]:
        """Names of layers that are clipped as they are stored: those of one geometry together, on devices that gain."""
        if self.floor is not None or self.operator != "periodic":
            return []
        found: dict[Hashable, list[str]] = {}
        for name, layer in layers.items():
            if isinstance(layer, TTConv | Convolution | TransposedConvolution):
                kernel, periodic = layer_kernel(layer), layer_geometry(layer, self._seen(name)).periodic_counterpart
                if at_least_single(kernel) is kernel:
                    together = gains_by_stacks(kernel.device) and not periodic.folds
                    key = (kernel.shape, kernel.dtype, kernel.device, periodic) if together else name
                    found.setdefault(key, []).append(name)
        return list(found.values())

    def _clip_stack(self, layers: Mapping[str, nn.Module]) -> "_Unread":
        kernels, deltas = {}, {}
        for name, layer in layers.items():
            assert isinstance(layer, TTConv | Convolution | TransposedConvolution)
            kernels[name], deltas[name] = layer_kernel(layer), self._core_delta(name)
            geometry = layer_geometry(layer, self._seen(name)).periodic_counterpart
        clips = clip_stack(list(kernels.values()), geometry, list(deltas.values()), self.options)
        for kernel, clip in zip(kernels.values(), clips, strict=True):
            kernel.copy_(clip.kernel)
        return _Unread({name: self._around.get(name, 1.0) for name in layers}, clips, geometry)

    def _seen(self, name: str) -> tuple[int, ...]:
        assert self._sizes is not None, "bound before it projects"
        return self._sizes[name]

    def _core_delta(self, name: str) -> float:
        """The threshold of what a layer has between its frames, as these are stored."""
        around = self._around.get(name, 1.0)
        return self.options.delta if around == 1 else self.options.delta / around * (1 - 4 * _EPS)

    def _make_frames_orthonormal(self, layers: Mapping[str, nn.Module]) -> dict[str, float]:
        """Prepares TT layers, and returns by what their frames, as they are stored, may raise their cores' norms."""
        framed = {name: layer for name, layer in layers.items() if isinstance(layer, TTConv)}
        if not framed:
            return {}
        make_frames_orthonormal(framed.values())
        if name := first_not_finite([(name, layer.core) for name, layer in framed.items()]):
            # Of finite factors the product may overflow.
            raise DivergedError(f"layer {name!r}: frames times core are not finite: lower the learning rate")
        return frames_norms(framed)

    def _project_layer(self, name: str, layer: nn.Module, seen: tuple[int, ...], force: bool) -> LayerNorms:
        if isinstance(layer, nn.Linear):
            clipped, norms = self._clip_matrix(layer.weight)
            layer.weight.copy_(clipped)
            return norms
        assert isinstance(layer, TTConv | Convolution | TransposedConvolution)
        around, kernel = self._around.get(name, 1.0), layer_kernel(layer)
        options = replace(self.options, delta=self._core_delta(name))
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


@dataclass(frozen=True)
class _Unread:
    """What was clipped together, whose norms are measured when they are asked for: `around` is by name, see `Clip`.

    Until the next projection it keeps the clipped kernels, as steps change those of the layers.
    """

    around: Mapping[str, float]
    clips: Sequence[Clipped]
    geometry: PeriodicConv

    @torch.no_grad()
    def read(self) -> dict[str, LayerNorms]:
        """The norms of the layers, by name."""
        norms = measured(self.clips, self.geometry)
        return {
            name: LayerNorms(before * around, after * around)
            for (name, around), (before, after) in zip(self.around.items(), norms, strict=True)
        }
