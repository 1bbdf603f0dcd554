"""What decides whether two evaluations may be compared, and the records of layers that are kept beside them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.config.evaluation import EvaluationConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import ConstraintReport, LayerNorms
from ttsv.data.loading import Dataset
from ttsv.evaluation.evidence import Evidence
from ttsv.evaluation.subject import Subject
from ttsv.layers import Framed, TTConv, layer_kernel
from ttsv.metrics.attacks.record import AttackRecord
from ttsv.metrics.corruption import CorruptionRecord
from ttsv.models import per_channel
from ttsv.results import TRAINING, AnyRecord
from ttsv.runtime.precision import own_dtype
from ttsv.spectral.geometry import Convolution, layer_geometry
from ttsv.spectral.network import layer_input_sizes, model_spectra, spectral_layers
from ttsv.spectral.norms import periodic_norm
from ttsv.training.record import LayerRecord, best_epoch
from ttsv.training.spectra import quantiles
from ttsv.tt.decomposition import orthogonalize

ECE_BINS = 15
LIPSCHITZ_RADIUS = 0.5
"""Of the search for empirical constants, in its space: the paper's."""
ASCENT_STEPS = 20


def evaluation_protocol(subject: Subject, evidence: Evidence, config: EvaluationConfig) -> AnyRecord:
    """The protocol of an evaluation's numbers, JSON-ready: results of equal protocols may be compared.

    It holds what changes what a number means: the images (data set, its SHA-256, split, how many for each metric),
    the preprocessing, the threat model, the attack's package and version, how certificates are made, where corrupted
    images come from, precision and seed; by the configuration that the network was trained by, what it was trained on,
    and which epoch's weights were evaluated: had the test images a say? What else was done in training is said in words
    and decides nothing (`ttsv.results.deciding`): networks are what is compared. Left out, and recorded beside it, is
    what only says where it was computed and leaves the meaning as it is: device, versions of other packages, git
    revision and dirty flag, threads. Radii are not in it either: every certified accuracy names its own; nor is the
    baseline of the mean corruption error, of which no other number knows: it is recorded with that error, and
    leaderboards compare errors to one baseline only.
    """
    data, count, trained = subject.data, len(evidence.labels), subject.trained
    mean, std = (per_channel(values, data.info.channels) for values in (subject.mean, subject.std))
    images: dict[str, int] = {"accuracy": count, "calibration": count, "temperature": len(data.validation.labels)}
    split: dict[str, object] = {**data.split, "evaluated": "test"}
    by_test = trained is not None and trained.training.validation == "test"
    metrics: dict[str, object] = {
        "accuracy": "top-1",
        "loss": "mean cross-entropy, nats",
        "ece": {"bins": ECE_BINS, "edges": "equal width, right-closed"},
        "temperature": "least loss on the validation images" + (", which were trained on" if by_test else ""),
    }
    if trained is not None:
        split["trained"] = "train and validation" if by_test else "train"
        metrics["singular_values"] = "periodic"
    protocol: dict[str, object] = {
        "dataset": data.info.name,
        "dataset_sha256": data.sha256,
        "split": split,
        "preprocessing": {"pixels": "[0, 1]", "mean": mean, "std": std},
        "metrics": metrics,
        "images": images,
        "precision": str(own_dtype(subject.model)).removeprefix("torch."),
    }
    if evidence.attacks:
        images |= {name: len(attack.robust) for name, attack in evidence.attacks.items()}
        protocol["attacks"] = {name: _attack(attack) for name, attack in evidence.attacks.items()}
    if evidence.bound is not None or evidence.no_bound is not None:  # a network without one is measured no otherwise
        protocol["certificates"] = "L2, pixels: product of rigorous bounds of every layer, float64"
    if config.certified:
        images["certified"] = count
    if evidence.lipschitz:
        images["lipschitz"] = len(evidence.lipschitz[0].values)
        protocol["lipschitz"] = {
            "radius": LIPSCHITZ_RADIUS,
            "norm": "L2",
            "methods": sorted({one.method for one in evidence.lipschitz}),
            "ascent_steps": ASCENT_STEPS,
            "seed": config.seed,
        }
    if evidence.corruption is not None:
        images["corruptions"] = evidence.corruption.protocol["images"]
        protocol["corruptions"] = _corruptions(evidence.corruption)
    protocol["weights"] = _weights(trained)
    if trained is not None and trained.dataset != data.info.name:
        protocol["trained_on"] = trained.dataset
    if subject.said:
        protocol[TRAINING] = dict(subject.said)
    return protocol


def _weights(trained: TrialConfig | None) -> str:
    if trained is None:
        return "trained in ways that are not known"
    if trained.training.select == "last":
        return "last epoch"
    return best_epoch(trained.training)


def _attack(attack: AttackRecord) -> dict[str, object]:
    return {name: value for name, value in attack.protocol().items() if name != "images"}


def _corruptions(record: CorruptionRecord) -> dict[str, object]:
    """Published files by one SHA-256 over theirs; generated ones by what they were made of, and with."""
    found = {name: value for name, value in record.protocol.items() if name not in ("files", "images")}
    if found["corruptions"] == "published":
        text = json.dumps(record.protocol["files"], sort_keys=True)
        found["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def layer_records(
    model: nn.Module, data: Dataset, report: ConstraintReport, spectra: Mapping[str, Tensor] | None = None
) -> list[LayerRecord]:
    """One record per convolution and other projected layer, as `TrialResult.layers` documents.

    `spectra`: those of `ttsv.spectral.model_spectra` at the images' size, where they are known already.
    """
    size, channels = data.info.image_size, data.info.channels
    layers = spectral_layers(model)
    sizes = layer_input_sizes(model, size, in_channels=channels)
    records = []
    for name, values in (spectra or model_spectra(model, size, in_channels=channels)).items():
        norms = report.layers.get(name)
        largest, smallest = _largest(layers[name], sizes[name], values), values.min().item()
        record = _layer_record(name, layers[name], sizes[name], largest, smallest, norms)
        records.append(replace(record, quantiles=quantiles(values.double()).tolist()))
    for name, layer in model.named_modules():  # in the model's order: a report that was stored has none
        if name in report.layers and name not in sizes:
            norms = report.layers[name]
            records.append(_layer_record(name, layer, (), norms.after, norms.smallest, norms))
    return records


def _layer_record(
    name: str, layer: nn.Module, seen: tuple[int, ...], largest: float, smallest: float | None, norms: LayerNorms | None
) -> LayerRecord:
    return LayerRecord(
        name=name,
        kind=parametrize.type_before_parametrizations(layer).__name__,
        shape=_shapes(layer),
        input_size=list(seen),
        largest=largest,
        smallest=smallest,
        largest_before_projection=None if norms is None else norms.before,
        projection=norms,
    )


def _shapes(layer: nn.Module) -> dict[str, list[int]]:
    """Shapes of a layer's factors by name; what a core of another kind is made from counts as the core."""
    names = ("k1", "core", "k3") if isinstance(layer, Framed) else ("weight",)
    factors = {name: getattr(layer, name) for name in names}
    return {name: list((f if isinstance(f, Tensor) else f.weight).shape) for name, f in factors.items()}


def _largest(layer: nn.Module, seen: tuple[int, ...], values: Tensor) -> float:
    """The largest singular value of a layer, where it has a kernel in float64: `values` are in the weights' type."""
    if not isinstance(layer, TTConv | Convolution):
        return float(values.max())
    with torch.no_grad():
        kernel = layer_kernel(layer).double()
        if isinstance(layer, TTConv):
            kernel = orthogonalize(layer.k1.double(), kernel, layer.k3.double()).core
    return periodic_norm(kernel, layer_geometry(layer, seen).periodic_conv(kernel))
