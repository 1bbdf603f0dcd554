"""Figures, drawn without a display."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from ttsv.errors import ConfigError

_POINTS = 1001
_LEGEND = 30


def plot_spectra(spectra: Mapping[str, Tensor], path: Path, title: str = "") -> None:
    """Draws each layer's singular values, descending, against the share of its values above them: PNG or SVG.

    One line per layer, its colour by the layer's place in the network, from at most 1001 quantiles. Raises
    `ConfigError` for another kind of file and `OSError` where the file cannot be written.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError("plot", str(path), "must end in .png or .svg")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps["viridis"](np.linspace(0, 0.95, max(2, len(spectra))))
    for colour, (name, values) in zip(colours, spectra.items(), strict=False):
        shares = np.linspace(0, 1, min(_POINTS, values.numel()))
        axes.plot(100 * shares, np.quantile(values.cpu().numpy(), 1 - shares), color=colour, label=name or "(model)")
    axes.set_xlabel("share of the layer's singular values, %")
    axes.set_ylabel("singular value")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if 0 < len(spectra) <= _LEGEND:
        figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
