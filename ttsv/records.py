"""JSON-ready records of a trained network: its layers, and the protocol under which it was measured."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.config import TrialConfig
from ttsv.constraints import ConstraintReport
from ttsv.data.loading import Dataset
from ttsv.layers import Convolution, Framed, TTConv, layer_input_sizes, periodic_size, spectral_layers
from ttsv.spectrum import conv_norm, model_spectra
from ttsv.tt import orthogonalize


def layer_records(
    model: nn.Module, data: Dataset, report: ConstraintReport, spectra: Mapping[str, Tensor] | None = None
) -> list[dict[str, Any]]:
    """One JSON-ready record per convolution and other projected layer, as `TrialResult.layers` documents.

    `spectra`: those of `ttsv.spectrum.model_spectra` at the images' size, where they are known already.
    """
    size, channels = data.info.image_size, data.info.channels
    layers = spectral_layers(model)
    sizes = layer_input_sizes(model, size, in_channels=channels)
    records = []
    for name, values in (spectra or model_spectra(model, size, in_channels=channels)).items():
        layer, norms = layers[name], report.layers.get(name)
        records.append(
            {
                "name": name,
                "kind": parametrize.type_before_parametrizations(layer).__name__,
                "shape": _shapes(layer),
                "input_size": list(sizes[name]),
                "largest": _largest(layer, sizes[name], values),
                "smallest": values.min().item(),
                "largest_before_projection": None if norms is None else norms.before,
                "projection": None if norms is None else asdict(norms),
            }
        )
    for name, layer in model.named_modules():  # in the model's order: a report that was stored has none
        if name in report.layers and name not in sizes:
            norms = report.layers[name]
            records.append(
                {
                    "name": name,
                    "kind": type(layer).__name__,
                    "shape": {"weight": list(layer.get_parameter("weight").shape)},
                    "input_size": [],
                    "largest": norms.after,
                    "smallest": norms.smallest,
                    "largest_before_projection": norms.before,
                    "projection": asdict(norms),
                }
            )
    return records


def _shapes(layer: nn.Module) -> dict[str, list[int]]:
    """Shapes of a layer's factors by name; what a core of another kind is made from counts as the core."""
    if not isinstance(layer, Framed):
        return {"weight": list(layer.weight.shape)}  # type: ignore[arg-type] # every other one has it
    core = layer.core if isinstance(layer, TTConv) else layer.core.weight  # type: ignore[union-attr]
    return {"k1": list(layer.k1.shape), "core": list(core.shape), "k3": list(layer.k3.shape)}  # type: ignore[arg-type]


def _largest(layer: nn.Module, seen: tuple[int, ...], values: Tensor) -> float:
    """The largest singular value of a layer, where it has a kernel in float64: `values` are in the weights' type."""
    if not isinstance(layer, TTConv | Convolution):
        return float(values.max())
    with torch.no_grad():
        kernel = (
            layer.weight.double()
            if isinstance(layer, Convolution)
            else orthogonalize(layer.k1.double(), layer.core.double(), layer.k3.double()).core
        )
    groups = layer.groups if isinstance(layer, Convolution) else 1
    size = periodic_size(seen, layer.stride)
    return conv_norm(kernel, size, stride=layer.stride, dilation=layer.dilation, groups=groups)


def describe_protocol(config: TrialConfig, evaluation: dict[str, Any]) -> dict[str, Any]:
    """How a trial's result was measured, JSON-ready: results of equal protocols may be compared.

    `evaluation`: that of `ttsv.evaluation.protocol`, to which is added what was trained on, which epoch's weights
    were evaluated, and which operator singular values are those of.
    """
    by_test = config.training.validation == "test"
    measured = "test images" if by_test else "validation images"
    metrics = evaluation["metrics"] | {"singular_values": "periodic"}
    if by_test:
        metrics["temperature"] += ", which were trained on"
    return {
        **evaluation,
        "split": {**evaluation["split"], "trained": "train and validation" if by_test else "train"},
        "metrics": metrics,
        "weights": "last epoch" if config.training.select == "last" else f"best epoch on the {measured}",
    }
