"""Singular values of a network's layers while it is trained: copies within a step, their spectra between epochs."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ttsv.constraints import Constraint
from ttsv.constraints.protocol import projects_after
from ttsv.results import SPECTRUM_SHARES, LayerSpectrum
from ttsv.runtime.headway import get_on
from ttsv.runtime.precision import full_precision
from ttsv.spectral.network import layer_input_sizes, layer_singular_values, spectral_layers
from ttsv.spectral.symbol import Size


def quantiles(values: Tensor, shares: Sequence[float] = SPECTRUM_SHARES) -> Tensor:
    """The quantiles of all values of a tensor (any shape, one at least) at shares in [0, 1]: `(len(shares),)`.

    Linear between neighbours, as `torch.quantile`, which takes no more than 16 million values.
    """
    ordered = values.flatten().sort().values
    places = torch.tensor(shares, dtype=torch.float64) * (ordered.numel() - 1)
    below = places.floor().long()
    weights = (places - below).to(values)
    low, high = ordered[below.to(values.device)], ordered[places.ceil().long().to(values.device)]
    return torch.lerp(low, high, weights)


class SpectraWatch:
    """Looks at the layers of a network in one epoch of `every`, the first and the last, and changes nothing in it.

    Within a step weights are copied, at most twice in an epoch, and no device is waited for; singular values are taken
    of the copies once the epoch's time is. No random number is drawn. `every` None: never.
    """

    def __init__(
        self, model: nn.Module, every: int | None, epochs: int, input_size: Size, *, in_channels: int | None = None
    ) -> None:
        self._model, self._every, self._epochs = model, every, epochs
        self._sizes: Mapping[str, tuple[int, ...]] = {}
        if every is not None:
            self._sizes = layer_input_sizes(model, input_size, in_channels=in_channels)
        self._last_projection = 0
        self._before: Mapping[str, nn.Module] | None = None
        self._after: Mapping[str, nn.Module] | None = None

    def looks(self, epoch: int) -> bool:
        """Whether the epoch, counted from 1, is one that is looked at."""
        return self._every is not None and (epoch in (1, self._epochs) or epoch % self._every == 0)

    def begin(self, epoch: int, constraint: Constraint, first: int, steps: int) -> None:
        """The epoch begins, with the step after `first` as the first of `steps`."""
        self._before = self._after = None
        self._last_projection = 0
        if self.looks(epoch):
            after = (step for step in range(first + steps, first, -1) if projects_after(constraint, step))
            self._last_projection = next(after, 0)

    def before_projection(self, step: int) -> None:
        """Copies the layers where the projection after this step (from 1) is the epoch's last."""
        if step == self._last_projection:
            self._before = self._copies()

    def after_projection(self, step: int) -> None:
        """Copies the layers where that projection was the epoch's last."""
        if step == self._last_projection:
            self._after = self._copies()

    def end(self, epoch: int) -> None:
        """The epoch's steps are done."""
        if self.looks(epoch) and self._after is None:
            self._after = self._copies()

    def take(self) -> tuple[LayerSpectrum, ...] | None:
        """The spectra of what was copied, which is forgotten; None where nothing was, or has no singular values."""
        before, after = self._before, self._after
        self._before = self._after = None
        times = [copies for copies in (after, before) if copies is not None]
        if not after or not _finite(times):  # of weights that are not: the training says so itself
            return None
        found = self._quantiles(times)
        olds = found[1] if before is not None else [None] * len(after)
        rows = zip(after, found[0], olds, strict=True)
        return tuple(LayerSpectrum(name=name, values=values, before=old) for name, values, old in rows)

    @torch.no_grad()
    def _copies(self) -> dict[str, nn.Module]:
        layers = spectral_layers(self._model)
        return {name: copy.deepcopy(layers[name]).eval() for name in self._sizes}

    @full_precision()
    def _quantiles(self, times: Sequence[Mapping[str, nn.Module]]) -> list[list[tuple[float, ...]]]:
        """By time and layer."""
        taken = []
        for layers in times:
            for name, layer in layers.items():
                taken.append(quantiles(layer_singular_values(layer, self._sizes[name])).double())
                get_on()
        rows = [tuple(row) for row in torch.stack(taken).tolist()]
        each = len(self._sizes)
        return [rows[index * each : (index + 1) * each] for index in range(len(times))]


def _finite(times: Sequence[Mapping[str, nn.Module]]) -> bool:
    """Whether all weights are."""
    owned = [value.isfinite().all() for layers in times for layer in layers.values() for value in layer.parameters()]
    return bool(torch.stack(owned).all())
