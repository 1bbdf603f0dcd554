"""Figures, drawn without a display: PNG or SVG, by the file's ending.

Each function raises `ConfigError` for another kind of file and `OSError` where the file cannot be written.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ttsv.errors import ConfigError
from ttsv.metrics.calibration import ReliabilityDiagram
from ttsv.metrics.lipschitz import EmpiricalLipschitz

_POINTS = 1001
_LEGEND = 30
_BINS = 50


def plot_spectra(spectra: Mapping[str, Tensor], path: Path, title: str = "") -> None:
    """Draws each layer's singular values, descending, against the share of its values above them.

    One line per layer, its colour by the layer's place in the network, from at most 1001 quantiles.
    """
    with _drawn(path, title) as axes:
        colours = colormaps["viridis"](np.linspace(0, 0.95, max(2, len(spectra))))
        for colour, (name, values) in zip(colours, spectra.items(), strict=False):
            shares = np.linspace(0, 1, min(_POINTS, values.numel()))
            quantiles = np.quantile(values.cpu().numpy(), 1 - shares)
            axes.plot(100 * shares, quantiles, color=colour, label=name or "(model)")
        axes.set(xlabel="share of the layer's singular values, %", ylabel="singular value")
        axes.set_ylim(bottom=0)
        if 0 < len(spectra) <= _LEGEND:
            size = min(8, 190 / len(spectra))
            legend = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, fontsize=size)
            beside = legend.get_window_extent().width / axes.figure.bbox.width
            left, bottom, width, height = axes.get_position().bounds
            axes.set_position((left, bottom, max(width / 3, (width - beside) / 1.01), height))


def plot_reliability(diagrams: Mapping[str, ReliabilityDiagram], path: Path, title: str = "") -> None:
    """Draws the accuracy of each bin of confidence: on the diagonal the network is calibrated. One line per diagram."""
    with _drawn(path, title) as axes:
        axes.plot([0, 100], [0, 100], color="grey", linestyle="--", label="calibrated")
        for name, diagram in diagrams.items():
            points = zip(diagram.confidence, diagram.accuracy, strict=True)
            filled = [(100 * x, 100 * y) for x, y in points if x is not None and y is not None]
            axes.plot(*zip(*filled, strict=True), marker="o", label=name)
        axes.set(xlabel="mean confidence of the bin, %", ylabel="accuracy of the bin, %", xlim=(0, 100), ylim=(0, 100))
        axes.legend()


def plot_lipschitz(
    constants: Sequence[EmpiricalLipschitz], path: Path, *, bound: float | None = None, title: str = ""
) -> None:
    """Draws a histogram over images for each search; `bound`, in pixels, is named in words, in each search's space."""
    with _drawn(path, title) as axes:
        for one in constants:
            label = f"{one.method}, {one.space}: largest {one.maximum:.4g}"
            if bound is not None:
                label += f", certified {bound * one.longest_unit:.4g}"
            # Not by `hist`, which fails where values are too near each other for its bins.
            axes.stairs(*one.histogram(_BINS), label=label)
        axes.set(xlabel="empirical Lipschitz constant", ylabel="images")
        axes.legend()


def plot_corruptions(table: Mapping[str, Sequence[float]], path: Path, title: str = "") -> None:
    """Draws a bar per kind of corruption, the mean of its accuracies over severities, least to largest as a line."""
    with _drawn(path, title, below=0.3) as axes:
        means = [100 * float(np.mean(row)) for row in table.values()]
        rows = zip(means, table.values(), strict=True)
        spread = [[mean - 100 * min(row), 100 * max(row) - mean] for mean, row in rows]
        axes.bar([kind.replace("_", " ") for kind in table], means, yerr=np.array(spread).T.clip(min=0), capsize=2)
        axes.axhline(float(np.mean(means)), color="grey", linestyle="--", label=f"mean {np.mean(means):.1f} %")
        axes.set(ylabel="accuracy, %", ylim=(0, 100))
        axes.tick_params(axis="x", rotation=90)
        axes.legend()


@contextmanager
def _drawn(path: Path, title: str, *, below: float = 0.11) -> Iterator[Axes]:
    """Gives axes to draw on, which are saved afterwards; `below` them is so much of the figure's height.

    Margins are given, as to have them found takes as long as to draw.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError("plot", str(path), "must end in .png or .svg")
    figure = Figure(figsize=(8, 5))
    axes = figure.add_axes((0.12, below, 0.85, 0.93 - below))
    axes.set_title(title)
    axes.grid(alpha=0.3)
    yield axes
    figure.savefig(path, dpi=150)
