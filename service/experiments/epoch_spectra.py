"""SQL of epoch spectra: what singular values the layers of a trial's network had while it trained.

Functions take a Session; callers commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import EpochSpectra
from service.database.experiments import StoredSpectra
from ttsv.results import LayerSpectrum

_DIGITS = 6

Quantiles = list[float]
"""At `ttsv.results.SPECTRUM_SHARES`."""


@dataclass(frozen=True)
class LayerHistory:
    """A layer's quantiles by epoch; None where an epoch has none."""

    name: str
    values: list[Quantiles | None]
    before: list[Quantiles | None]


@dataclass(frozen=True)
class SpectraHistory:
    """The layers of a network over the epochs that are kept."""

    epochs: list[int]
    layers: list[LayerHistory]


def stored(spectra: Sequence[LayerSpectrum]) -> StoredSpectra:
    """Layers' quantiles by column, as the database keeps them: to six digits."""
    return {
        "names": [layer.name for layer in spectra],
        "values": [_short(layer.values) for layer in spectra],
        "before": [None if layer.before is None else _short(layer.before) for layer in spectra],
    }


def history(session: Session, trial_id: int, points: int) -> SpectraHistory:
    """At most `points` (2 or more) epochs of those that are kept, evenly chosen: the first and the last among them."""
    mine = EpochSpectra.trial_id == trial_id
    epochs = list(session.scalars(select(EpochSpectra.epoch).where(mine).order_by(EpochSpectra.epoch)))
    if len(epochs) > points:
        last = len(epochs) - 1
        epochs = [epochs[round(index * last / (points - 1))] for index in range(points)]
    query = select(EpochSpectra.layers).where(mine, EpochSpectra.epoch.in_(epochs)).order_by(EpochSpectra.epoch)
    found = list(session.scalars(query))
    names = list(dict.fromkeys(name for one in found for name in one["names"]))
    by_name = [dict(zip(one["names"], zip(one["values"], one["before"], strict=True), strict=True)) for one in found]
    layers = []
    for name in names:
        pairs = [one.get(name, (None, None)) for one in by_name]
        layers.append(LayerHistory(name, [values for values, _ in pairs], [before for _, before in pairs]))
    return SpectraHistory(epochs, layers)


def _short(values: Sequence[float]) -> Quantiles:
    return [float(f"{value:.{_DIGITS}g}") for value in values]
