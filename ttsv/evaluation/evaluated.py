"""The one orchestration of an evaluation: it measures, takes cost and spectra, says how and where, and writes files."""

import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ttsv.constraints import ConstraintReport
from ttsv.data.loading import as_pixels
from ttsv.evaluation.artifacts import write_evaluation, write_plots, write_spectra
from ttsv.evaluation.protocol import layer_records
from ttsv.evaluation.stages import Measured, measure
from ttsv.evaluation.subject import EvaluationOptions, Subject
from ttsv.metrics import cost
from ttsv.results import AnyRecord, StageProgress, protocol_fingerprint
from ttsv.runtime.failures import known_failures
from ttsv.runtime.precision import full_precision
from ttsv.runtime.provenance import EnvironmentFields, describe_environment
from ttsv.runtime.work_time import WorkTime, timed
from ttsv.spectral.network import evaluating, model_spectra
from ttsv.spectral.symbol import forget_tables
from ttsv.training.record import LayerRecord


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """What a network and its evaluation cost: seconds, bytes; operations of one image."""

    parameters: int
    compression: float
    multiply_accumulates: int
    inference: list[cost.InferenceTime]
    evaluation_seconds: float
    peak_memory: int
    peak_memory_of: str


@dataclass(frozen=True, kw_only=True)
class LayerSpectra:
    """The spectra of all convolutions by name, what they took, and the records of the layers that are kept."""

    values: Mapping[str, Tensor]
    seconds: float
    memory: int
    records: tuple[LayerRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """An evaluated network: what was measured of it, where, and at what cost.

    `environment` says where. `cost` and `layers` are None where they were not taken. `saved`, of a saved network: what
    its record begins with. `training`: what its record of the cost says of its training.
    """

    subject: Subject
    measured: Measured
    environment: EnvironmentFields
    cost: NetworkCost | None
    layers: LayerSpectra | None
    saved: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, float | None] | None = None

    @property
    def violations(self) -> list[str]:
        """What cannot be true of right numbers."""
        return [violation.text for violation in self.measured.violations]

    @property
    def record(self) -> AnyRecord:
        """The evaluation, JSON-ready.

        `protocol` says how it was measured, of a saved network its fingerprint too, `results` what came out.
        """
        protocol, results = self.measured.protocol, self.measured.results
        if self.cost is not None and self.training is not None:
            results = {**results, "cost": asdict(self.cost) | {"training": dict(self.training)}}
        return {
            **self.saved,
            "protocol": protocol,
            **({"protocol_fingerprint": protocol_fingerprint(protocol)} if self.saved else {}),
            "results": results,
            "violations": self.violations,
            "environment": self.environment,
        }

    @cached_property
    def spectra(self) -> Mapping[str, Tensor]:
        """The spectra of all convolutions by name."""
        return _spectra(self.subject) if self.layers is None else self.layers.values

    def write(self, folder: Path, *, title: str, suffix: str = ".svg") -> dict[str, Path]:
        """Writes all that is kept as files, see `ttsv.evaluation.artifacts`; kind -> file."""
        files = write_evaluation(folder, self.measured, self.record)
        if self.spectra:
            files |= write_spectra(folder, self.spectra)
        return files | self.draw(folder, title=title, suffix=suffix)

    def draw(self, folder: Path, *, title: str, suffix: str = ".svg") -> dict[str, Path]:
        """Draws the plots alone; kind -> file."""
        return write_plots(folder, self.measured, self.spectra, title=title, suffix=suffix)


def evaluate_network(subject: Subject, options: EvaluationOptions) -> Generator[StageProgress, None, Evaluated]:
    """Evaluates a network: yields where it is and returns everything, nothing of it written yet.

    In evaluation mode, spectra and cost too: a network that has just been trained is in training mode, in which SOC
    layers take fewer terms and some parametrizations change at every look. Each module is left in the mode it was in.

    Raises what `measure` does, and what `ttsv.runtime.failures.known_failures` makes of failures of the machine.
    """
    place = subject.device
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    spent = WorkTime()
    with known_failures(subject.model), full_precision(), evaluating(subject.model):
        measured = yield from timed(measure(subject, options), spent)
        if options.cost:
            yield StageProgress(stage="cost", done=0, total=1)
        priced = _cost(subject, spent.seconds) if options.cost or options.layers else None
        layers = _layers(subject) if options.layers else None
    environment = describe_environment(place)
    return Evaluated(subject=subject, measured=measured, environment=environment, cost=priced, layers=layers)


def _cost(subject: Subject, seconds: float) -> NetworkCost:
    model, data, place = subject.model, subject.data, subject.device
    return NetworkCost(
        parameters=cost.parameters(model),
        compression=cost.compression(model),
        multiply_accumulates=cost.multiply_accumulates(model, data.info.image_size, in_channels=data.info.channels),
        inference=cost.inference_times(model, as_pixels(data.test.images[:128].to(place))),
        evaluation_seconds=seconds,
        peak_memory=cost.peak_memory(place),
        peak_memory_of="allocations on the GPU" if place.type == "cuda" else "the process",
    )


def _layers(subject: Subject) -> LayerSpectra:
    def clocked() -> tuple[Mapping[str, Tensor], float]:
        started = time.perf_counter()
        values = _spectra(subject)
        if subject.device.type == "cuda":
            torch.cuda.synchronize(subject.device)
        return values, time.perf_counter() - started

    forget_tables()  # whose memory is counted where they are made: here, whatever came before
    (values, seconds), memory = cost.peak_allocation(clocked, subject.device)
    records = layer_records(subject.model, subject.data, subject.report or ConstraintReport(), values)
    return LayerSpectra(values=values, seconds=seconds, memory=memory, records=tuple(records))


def _spectra(subject: Subject) -> Mapping[str, Tensor]:
    info = subject.data.info
    with evaluating(subject.model):
        return model_spectra(subject.model, info.image_size, in_channels=info.channels)
