"""Layers divided by what their norms exceed (Gouk, Frank, Pfahringer & Cree, Machine Learning 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttsv.checks import check_count, check_positive
from ttsv.constraints.operators import (
    Operator,
    make_frames_orthonormal,
    matrix_norm,
    operator_norm,
    rescale_to_target,
    sizes_to_control,
)
from ttsv.constraints.power import power_step, start_of
from ttsv.constraints.projection import Projection, diverged
from ttsv.constraints.protocol import ConstraintReport, ConstraintState, LayerNorms
from ttsv.errors import ConfigError
from ttsv.layers import TTConv, layer_kernel
from ttsv.runtime.precision import at_least_single
from ttsv.spectral.geometry import Convolution, TransposedConvolution, layer_geometry
from ttsv.spectral.network import spectral_layers
from ttsv.spectral.symbol import Size
from ttsv.tt.decomposition import orthogonalize

BATCH_NORM = "batch norm's max |gamma| / sqrt(var + eps)"


class Divide(Projection):
    """Divides each weight by `max(1, norm / target)` after every `every`-th optimizer step.

    `conv`, `linear`, `batch_norm`: the targets for the norms of convolutions (TT layers included, by their cores),
    linear layers and batch normalisation, `max |gamma / sqrt(var + eps)|` with the running variance; None leaves a
    kind alone. `batch_norm_eps` stands in for the layers' own eps (the paper's authors use 1e-6).

    `power_iterations`: so many steps of a power iteration on the operator (`operator` as for `Clip`; "zero-padded",
    what the layer applies, is the published way), each from the vector that the step before left, which is kept
    in the state. The estimate is never above the norm, so what is divided by it may keep a norm above the target:
    by 10 to 20 % where the vector is new or follows another of several singular values close together, as a rule by
    less than 0.1 % after some hundred steps. "exact": divides by a rigorous upper bound ("periodic": the norm
    itself), at its price, and the result's norm is at most the target.

    A TT layer that exceeds its target has its core divided, between free frames after QR, which is written back:
    were the core alone to pay for frames that grow, the two would drift apart without end.

    On other devices than the CPU a power iteration runs ahead: it decides there what is divided, and nothing is waited
    for but, where there are TT layers with free frames, once for all of them. Estimates are read when somebody asks for
    the report, and weights that are not finite show in the loss of the epoch. The numbers are the same, but for a
    vector in the null space: a division that meets one divides nothing, and the next starts from noise.

    The report gives the estimates before and after. Those of a forced projection, and of weights that are made ready
    for evaluation, have as `after` the norm really reached, measured as `measure` says.
    """

    def __init__(
        self,
        conv: float | None = None,
        linear: float | None = None,
        batch_norm: float | None = None,
        *,
        power_iterations: int | Literal["exact"] = 1,
        operator: Operator = "zero-padded",
        every: int = 1,
        batch_norm_eps: float | None = None,
    ) -> None:
        super().__init__(every, operator)
        targets = {"conv": conv, "linear": linear, "batch_norm": batch_norm}
        for name, target in targets.items():
            if target is not None:
                check_positive(name, target, "must be a finite number above 0, or None")
        if not any(targets.values()):
            raise ConfigError("conv", None, "one of conv, linear and batch_norm at least must be given")
        if power_iterations != "exact":
            check_count("power_iterations", power_iterations)
        if batch_norm_eps is not None:
            check_positive("batch_norm_eps", batch_norm_eps, "must be a finite number above 0, or None")
        self.conv = conv
        self.linear = linear
        self.batch_norm = batch_norm
        self.power_iterations: int | Literal["exact"] = power_iterations
        self.batch_norm_eps = batch_norm_eps
        self._vectors: dict[str, Tensor] = {}
        self._noise: dict[str, Tensor] = {}
        self._unread: _Unread | None = None

    def bind(self, model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> None:
        """Records the size that each layer sees, by a forward pass that changes nothing in the model.

        Vectors of power iterations on a model bound before are dropped.

        Raises `ConfigError` for what a division could not write or bound: parametrized weights and those that a hook
        recomputes, batch normalisation without weights or without running statistics, and, unless `operator` is
        "periodic", padding other than zeros or circular or circular padding that changes the size.
        """
        linear = self.linear is not None
        sizes: dict[str, tuple[int, ...]] = {}
        if linear or self.conv is not None:
            sizes = sizes_to_control(
                model,
                input_size,
                self.operator,
                in_channels=in_channels,
                linear=linear,
                convolutions=self.conv is not None,
            )
        if self.batch_norm is not None:
            for name, layer in _batch_norms(model).items():
                if not layer.affine or layer.running_var is None:
                    raise ConfigError(f"model.{name}", repr(layer), "must have weights and running statistics")
        self._sizes, self._vectors, self._noise = sizes, {}, {}

    def _project_others(self, model: nn.Module, step: int) -> dict[str, LayerNorms]:
        if self.batch_norm is None:
            return {}
        return {
            name: self._divide_batch_norm(name, layer, self.batch_norm, step)
            for name, layer in _batch_norms(model).items()
        }

    def report(self) -> ConstraintReport:
        """Returns what the last projection achieved; waits for it, where it ran ahead."""
        if self._unread is not None:
            self._report, self._unread = replace(self._report, layers=self._unread.read()), None
        return super().report()

    def state_dict(self) -> ConstraintState:
        """Returns the report, and the power iterations' vectors by layer."""
        self.report()
        return {**super().state_dict(), "vectors": dict(self._vectors)}

    def load_state_dict(self, state: ConstraintState) -> None:
        """Takes up the saved report and vectors."""
        self._unread = None
        super().load_state_dict(state)
        self._vectors = dict(state.get("vectors", {}))

    def _project_all(
        self, model: nn.Module, layers: Mapping[str, nn.Module], step: int, force: bool
    ) -> dict[str, LayerNorms]:
        if force or self.power_iterations == "exact" or not runs_ahead(next(model.parameters()).device):
            self._unread = None
            return super()._project_all(model, layers, step, force)
        self._unread = self._divide_ahead(model, layers, self.power_iterations)
        return self._report.layers

    def _divide_ahead(self, model: nn.Module, layers: Mapping[str, nn.Module], iterations: int) -> "_Unread":
        """Divides by power iterations, and leaves to be read what they found."""
        norms: dict[str, Tensor] = {}
        targets: dict[str, float] = {}
        for name, layer in layers.items():
            seen, target = (self._sizes or {})[name], self._target(layer)
            if name not in self._noise:
                self._noise[name] = start_of(layer, seen, self.operator)
            vector, noise = self._vectors.get(name), self._noise[name]
            found = power_step(layer, seen, self.operator, iterations, vector, noise=noise)
            norms[name], targets[name], self._vectors[name] = found.norm.double(), target, found.vector
        free = [name for name, layer in layers.items() if isinstance(layer, TTConv) and layer.frames == "free"]
        if free:  # QR is too much for layers that keep their weights
            over = torch.stack([norms[name] > targets[name] for name in free]).tolist()
            make_frames_orthonormal(layers[name] for name, exceeds in zip(free, over, strict=True) if exceeds)
        for name, layer in layers.items():
            _divide_by(_weight(layer), norms[name], targets[name])
        measures = dict.fromkeys(norms, self._estimated)
        if self.batch_norm is not None:
            for name, normalization in _batch_norms(model).items():
                norms[name], targets[name] = self._batch_norm_factor(normalization).double(), self.batch_norm
                measures[name] = BATCH_NORM
                _divide_by(normalization.weight, norms[name], self.batch_norm)
        return _Unread(torch.stack(list(norms.values())), targets, measures)

    def _target(self, layer: nn.Module) -> float:
        target = self.linear if isinstance(layer, nn.Linear) else self.conv
        assert target is not None
        return target

    def _project_layer(self, name: str, layer: nn.Module, seen: tuple[int, ...], force: bool) -> LayerNorms:
        target, weight = self._target(layer), _weight(layer)
        if self.power_iterations == "exact":
            before = self._norm(weight, layer, seen)
            if before > target:
                make_frames_orthonormal([layer])
            divided, after = rescale_to_target(
                at_least_single(weight), target, lambda other: self._norm(other, layer, seen), before
            )
            weight.copy_(divided)
            return LayerNorms(before, after, measure=self._measure(layer))
        vector = self._vectors.get(name)
        step = power_step(layer, seen, self.operator, self.power_iterations, vector)
        before, self._vectors[name] = step.norm.item(), step.vector
        if before > target:
            make_frames_orthonormal([layer])
            weight.mul_(target / before)
        found = LayerNorms(before, min(before, target), measure=self._estimated)
        return self._measured(found, layer, seen) if force else found

    @property
    def _estimated(self) -> str:
        return f"power iteration, {self.power_iterations} a projection, from below"

    def _measured(self, norms: LayerNorms, layer: nn.Module, seen: tuple[int, ...]) -> LayerNorms:
        """Returns what was estimated before a division, and the norm that a layer has."""
        measure = f"before: {self._estimated}; after: {self._measure(layer)}"
        return LayerNorms(norms.before, self._norm(_weight(layer), layer, seen), measure=measure)

    @torch.no_grad()
    def _measure_again(self, model: nn.Module) -> None:
        layers = spectral_layers(model, linear=True)
        norms = dict(self.report().layers)
        for name, seen in (self._sizes or {}).items():
            if name in norms and self.power_iterations != "exact":
                norms[name] = self._measured(norms[name], layers[name], seen)
        self._report = replace(self._report, layers=norms)

    def _norm(self, weight: Tensor, layer: nn.Module, seen: tuple[int, ...]) -> float:
        """Returns the layer's norm with another weight (a TT layer's core), as it is stored."""
        if isinstance(layer, nn.Linear):
            return matrix_norm(weight.to(layer.weight.dtype))
        assert isinstance(layer, TTConv | Convolution | TransposedConvolution)
        weight = weight.to(layer_kernel(layer).dtype)
        if isinstance(layer, TTConv):
            weight = orthogonalize(layer.k1.double(), weight.double(), layer.k3.double()).core
        return operator_norm(weight, layer_geometry(layer, seen), self.operator)

    def _divide_batch_norm(self, name: str, layer: _BatchNorm, target: float, step: int) -> LayerNorms:
        before = self._batch_norm_factor(layer).item()
        if not before < float("inf"):
            raise diverged(name, step)
        if before > target:
            layer.weight.mul_(target / before)
        return LayerNorms(before, min(before, target), measure=BATCH_NORM)

    def _batch_norm_factor(self, layer: _BatchNorm) -> Tensor:
        """The most by which a layer stretches a channel, 0-d."""
        assert layer.running_var is not None
        eps = layer.eps if self.batch_norm_eps is None else self.batch_norm_eps
        return (layer.weight.abs() / (layer.running_var + eps).sqrt()).max()


@dataclass(frozen=True)
class _Unread:
    """Norms before a division on their device, in the order of their targets, and what they are."""

    norms: Tensor
    targets: Mapping[str, float]
    measures: Mapping[str, str]

    def read(self) -> dict[str, LayerNorms]:
        """The norms before and after, by layer; waits for the device."""
        found = zip(self.targets.items(), self.norms.tolist(), strict=True)
        return {
            name: LayerNorms(before, min(before, target), measure=self.measures[name])
            for (name, target), before in found
        }


def runs_ahead(device: torch.device) -> bool:
    """Whether waiting for a device costs what it could do meanwhile."""
    return device.type != "cpu"


def _divide_by(weight: Tensor, norm: Tensor, target: float) -> None:
    """Divides a weight by what its norm, 0-d and float64, exceeds the target by; decided where they are."""
    factor = torch.where(norm > target, target / norm, 1)
    weight.copy_(at_least_single(weight) * factor)


def _weight(layer: nn.Module) -> Tensor:
    """What is divided of a layer."""
    assert isinstance(layer, TTConv | Convolution | TransposedConvolution | nn.Linear)
    return layer.weight if isinstance(layer, nn.Linear) else layer_kernel(layer)


def _batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
