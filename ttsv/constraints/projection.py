"""What constraints that write weights have in common: the layers they are bound to, and when they project."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ttsv.checks import check_count
from ttsv.constraints.operators import MATRIX, MEASURES, Operator, check_operator
from ttsv.constraints.protocol import LayerNorms, Unconstrained
from ttsv.errors import ConfigError, DivergedError
from ttsv.spectral.network import spectral_layers


class Projection(Unconstrained, ABC):
    """Base of `Clip` and `Divide`: writes weights after every `every`-th optimizer step, layer by layer.

    `operator` says of which operator norms are; `_sizes` are the layers to write and the sizes of their inputs, which
    `bind` records.
    """

    def __init__(self, every: int, operator: Operator) -> None:
        super().__init__()
        check_count("every", every)
        check_operator(operator)
        self.every = every
        self.operator: Operator = operator
        self._sizes: Mapping[str, tuple[int, ...]] | None = None

    def projects_after(self, step: int) -> bool:
        """Tells whether the step is one after which it projects."""
        return step % self.every == 0

    @torch.no_grad()
    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        """Projects where `step` is a multiple of `every`, or `force`.

        Raises `ConfigError` for a model that lacks a layer which the constraint was bound to, and `DivergedError` for
        weights that are not finite.
        """
        if self._sizes is None:
            fix = "must be what the constraint was bound to first: call bind(model, input_size) before project"
            raise ConfigError("model", type(model).__name__, fix)
        if not force and not self.projects_after(step):
            return
        start = time.perf_counter()
        layers = spectral_layers(model, linear=not all(self._sizes.values()))
        if missing := self._sizes.keys() - layers.keys():
            fix = f"must have the layers it was bound with; missing: {', '.join(sorted(missing))}"
            raise ConfigError("model", type(model).__name__, fix)
        norms = self._project_all(model, {name: layers[name] for name in self._sizes}, step, force)
        self._add_to_report(norms, time.perf_counter() - start)

    def settle(self, model: nn.Module, step: int, *, changed: bool, project: bool) -> str | None:
        """Projects once more, unless the last step has just done so or `project` is False; says what was done.

        A second projection in a row is no repetition of the first: truncation leaves what another clip would change.
        """
        behind = step % self.every
        past = f"the last projection was {behind} step{'s' * (behind != 1)} before the evaluation"
        if behind == step:
            past = "there was no projection before the evaluation"
        if not changed and not behind:
            past = "the last projection was that of the last step, and what it left was evaluated"
        elif project:
            self.project(model, step, force=True)
            return f"projected for the evaluation: {'what was averaged' if changed else past}"
        elif changed:
            past = "what was averaged was evaluated without a projection"
        self._measure_again(model)
        return past

    @torch.no_grad()
    def settle_statistics(self, model: nn.Module, step: int) -> None:
        """Projects what else the constraint controls than layers with singular values, by its new statistics."""
        start = time.perf_counter()
        norms = self._project_others(model, step)
        if norms:
            self._add_to_report({**self.report().layers, **norms}, time.perf_counter() - start)

    def _measure_again(self, model: nn.Module) -> None:
        """Measures the norms of weights that no projection comes after, where projections only estimate them."""

    def _project_all(
        self, model: nn.Module, layers: Mapping[str, nn.Module], step: int, force: bool
    ) -> dict[str, LayerNorms]:
        """Writes the weights of the layers it is bound to, and what else it controls."""
        require_finite(layers, step)
        norms = self._project_layers(layers, force)
        return norms | self._project_others(model, step)

    def _project_layers(self, layers: Mapping[str, nn.Module], force: bool) -> dict[str, LayerNorms]:
        """Writes the weights of the layers, one after the other."""
        sizes = self._sizes or {}
        return {name: self._project_layer(name, layer, sizes[name], force) for name, layer in layers.items()}

    @abstractmethod
    def _project_layer(self, name: str, layer: nn.Module, seen: tuple[int, ...], force: bool) -> LayerNorms:
        """Writes the weight of one layer that sees images of `seen` pixels (a linear layer: `()`)."""

    def _project_others(self, model: nn.Module, step: int) -> dict[str, LayerNorms]:
        """Writes what else the constraint controls, by name."""
        return {}

    def _measure(self, layer: nn.Module) -> str:
        """What the norms of a layer are."""
        return MATRIX if isinstance(layer, nn.Linear) else MEASURES[self.operator]


def require_finite(layers: Mapping[str, nn.Module], step: int) -> None:
    """Raises `DivergedError` for the first layer with a weight that is not finite; waits for the device once."""
    if name := first_not_finite([(name, part) for name, layer in layers.items() for part in layer.parameters()]):
        raise diverged(name, step)


def first_not_finite(owned: Sequence[tuple[str, Tensor]]) -> str | None:
    """Returns the owner of the first tensor with a number that is not finite; waits for the device once for none."""
    tensors = [tensor.detach() for _, tensor in owned if tensor.numel()]
    if math.isfinite(get_total_norm(tensors, math.inf)):
        return None
    return next(name for name, tensor in owned if not tensor.isfinite().all())


def diverged(name: str, step: int) -> DivergedError:
    """The error for a layer whose weights are not finite at a step."""
    return DivergedError(f"layer {name!r} has non-finite weights at step {step}: lower the learning rate")
