"""The spectra of a network that a trial saved: read, summarised, written."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn.utils import parametrize

from ttsv.errors import ConfigError
from ttsv.evaluation.saved import load_described
from ttsv.spectral.network import layer_input_sizes, model_spectra, spectral_layers
from ttsv.spectral.symbol import Size


@dataclass(frozen=True, kw_only=True)
class LayerSpectrum:
    """All singular values of one layer, descending, in float64; `input_size` is what it sees (linear: empty)."""

    name: str
    kind: str
    input_size: tuple[int, ...]
    values: Tensor

    @property
    def largest(self) -> float:
        """The operator's norm."""
        return float(self.values[0])

    @property
    def smallest(self) -> float:
        """The smallest singular value, zeros included (for TT layers: of the core between its frames)."""
        return float(self.values[-1])

    @property
    def deciles(self) -> list[float]:
        """Nine values, ascending, that tenths of the spectrum lie below (interpolated linearly)."""
        found: list[float] = np.quantile(self.values.numpy(), np.arange(1, 10) / 10).tolist()
        return found


@dataclass(frozen=True, kw_only=True)
class SavedSpectra:
    """The spectra of a saved network's layers, in its order, for images of `input_size` pixels, a side or per axis.

    Those of the periodic operators, as `ttsv.spectral.model_spectra` documents; linear layers included.
    """

    path: Path
    input_size: Size
    layers: list[LayerSpectrum]

    def to_json(self) -> dict[str, object]:
        """Everything, JSON-ready."""
        layers = [
            {
                **{key: value for key, value in asdict(layer).items() if key != "values"},
                "count": len(layer.values),
                "largest": layer.largest,
                "smallest": layer.smallest,
                "deciles": layer.deciles,
                "values": layer.values.tolist(),
            }
            for layer in self.layers
        ]
        return {"model": str(self.path), "input_size": self.input_size, "operator": "periodic", "layers": layers}


def saved_spectra(path: Path, input_size: Size | None = None) -> SavedSpectra:
    """The spectra of the network in `path`, a `model.safetensors` that a trial left.

    `input_size` (pixels, a side or per axis) is that of the images the network was built for unless given. Raises
    `DataError` for a file that is missing, cut or altered and `ConfigError` for a size that the network cannot take.
    """
    saved = load_described(path)
    model, channels = saved.model, saved.arguments.in_channels
    size = saved.arguments.image_size if input_size is None else input_size
    try:
        sizes = layer_input_sizes(model, size, in_channels=channels, linear=True)
    except RuntimeError as error:
        raise ConfigError("input_size", size, f"is not a size that the network takes: {error}") from error
    spectra = model_spectra(model, size, in_channels=channels, linear=True)
    layers = spectral_layers(model, linear=True)
    found = [
        LayerSpectrum(
            name=name,
            kind=parametrize.type_before_parametrizations(layers[name]).__name__,
            input_size=sizes[name],
            values=values.double().flatten().sort(descending=True).values,
        )
        for name, values in spectra.items()
    ]
    return SavedSpectra(path=path, input_size=size, layers=found)
