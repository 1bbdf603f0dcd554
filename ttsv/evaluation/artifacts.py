"""What an evaluation leaves as files, each under the kind by which it is asked for."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ttsv.data.loading import as_pixels
from ttsv.evaluation.plots import plot_corruptions, plot_lipschitz, plot_reliability, plot_spectra
from ttsv.evaluation.stages import Measured
from ttsv.metrics.accuracy import confusion_matrix
from ttsv.results import AnyRecord

MOST_SINGULAR_VALUES = 257
"""Of a layer with more so many are kept as a file, evenly by their index."""
_DIGITS = 7


def write_evaluation(folder: Path, measured: Measured, record: AnyRecord) -> dict[str, Path]:
    """Writes the files of an evaluation but its plots; kind -> file.

    `evaluation`: `record` (JSON-ready, None for what is infinite, which JSON has no number for: it becomes null) as
    JSON; `confusion`: the confusion matrix as JSON (a row per label, a column per class); `predictions`:
    `Evidence.per_image` as safetensors; `violations`, only where there are some: the offending images, their places,
    labels, predictions, and what an attack made of them, as safetensors with the texts in the header.
    """
    evidence = measured.evidence
    matrix = confusion_matrix(evidence.logits, evidence.labels)
    files = {name: folder / f"{name}.json" for name in ("evaluation", "confusion")}
    files["evaluation"].write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    files["confusion"].write_text(json.dumps({"matrix": matrix.tolist()}) + "\n")
    files["predictions"] = folder / "predictions.safetensors"
    save_file({name: value.contiguous() for name, value in evidence.per_image().items()}, files["predictions"])
    if measured.violations:
        files["violations"] = folder / "violations.safetensors"
        texts = {str(number): violation.text for number, violation in enumerate(measured.violations)}
        save_file(_offending(measured), files["violations"], metadata=texts)
    return files


def write_spectra(folder: Path, spectra: Mapping[str, Tensor]) -> dict[str, Path]:
    """Writes the singular values of layers as JSON, to be drawn again and laid over others; kind (`spectra`) -> file.

    Of each layer its name, `count` of them, and of at most `MOST_SINGULAR_VALUES` their `index`, from 0 for the largest
    to the last, and `values`.
    """
    layers = []
    for name, values in spectra.items():
        ordered = values.double().flatten().sort(descending=True).values.cpu()
        index = np.unique(np.linspace(0, len(ordered) - 1, min(MOST_SINGULAR_VALUES, len(ordered))).round().astype(int))
        kept = [float(f"{value:.{_DIGITS}g}") for value in ordered[index].tolist()]
        layers.append({"name": name, "count": len(ordered), "index": index.tolist(), "values": kept})
    file = folder / "spectra.json"
    file.write_text(json.dumps({"layers": layers}, allow_nan=False) + "\n")
    return {"spectra": file}


def write_plots(
    folder: Path, measured: Measured, spectra: Mapping[str, Tensor], *, title: str, suffix: str = ".svg"
) -> dict[str, Path]:
    """Draws what there are data for; kind (`reliability-plot` ...) -> file, PNG or SVG by `suffix`."""
    evidence, files = measured.evidence, {}

    def place(name: str) -> Path:
        files[f"{name}-plot"] = folder / f"{name}{suffix}"
        return files[f"{name}-plot"]

    calibration = evidence.calibration
    diagrams = {"raw": calibration.raw.reliability}
    if calibration.scaled is not None:
        diagrams[f"at temperature {calibration.temperature:.3f}"] = calibration.scaled.reliability
    plot_reliability(diagrams, place("reliability"), title)
    if evidence.lipschitz:
        bound = None if evidence.bound is None else evidence.bound.value
        plot_lipschitz(evidence.lipschitz, place("lipschitz"), bound=bound, title=title)
    if evidence.corruption is not None:
        plot_corruptions(evidence.corruption.table, place("corruption"), title)
    if spectra:
        plot_spectra(spectra, place("spectra"), title)
    return files


def _offending(measured: Measured) -> dict[str, Tensor]:
    """Per violation NUMBER: `NUMBER.places` and, of these images, pixels, labels, predictions and what was found."""
    evidence = measured.evidence
    tensors: dict[str, Tensor] = {}
    for number, violation in enumerate(measured.violations):
        places = torch.tensor(violation.images, dtype=torch.int64)
        chosen = {
            "places": places,
            "images": as_pixels(evidence.images.cpu()[places]),
            "labels": evidence.labels.cpu()[places],
            "predictions": evidence.logits.argmax(1).cpu()[places],
        }
        if violation.found is not None:
            chosen["adversarial"] = violation.found
        tensors |= {f"{number}.{name}": value.contiguous() for name, value in chosen.items()}
    return tensors
