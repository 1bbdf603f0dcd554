"""The one path on which networks are evaluated, stage by stage."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from ttsv.certification.certificates import assumed_lipschitz, certificates, lipschitz_bound
from ttsv.config.evaluation import ATTACK_BATCH, PUBLISHED_CORRUPTIONS, EvaluationConfig
from ttsv.data.corruptions import SEVERITIES, CorruptionSource, PublishedCorruptions
from ttsv.data.generated_corruptions import GeneratedCorruptions
from ttsv.data.loading import Dataset, Split
from ttsv.errors import ConfigError, DataError, DivergedError, OutOfMemoryError
from ttsv.evaluation.baseline import Baseline
from ttsv.evaluation.evidence import Evidence
from ttsv.evaluation.protocol import ASCENT_STEPS, ECE_BINS, LIPSCHITZ_RADIUS, evaluation_protocol
from ttsv.evaluation.sanity import Violation, find_violations
from ttsv.evaluation.subject import EvaluationOptions, Subject
from ttsv.evaluation.summary import columns, results
from ttsv.metrics.accuracy import check_labelled, predict
from ttsv.metrics.attacks.autoattack import autoattack_steps
from ttsv.metrics.attacks.pgd import pgd_steps
from ttsv.metrics.attacks.record import AttackProgress, AttackRecord, Threat, require_tiles
from ttsv.metrics.calibration import CalibrationRecord, calibration_record
from ttsv.metrics.corruption import CorruptionProgress, CorruptionRecord, corruption_steps
from ttsv.metrics.lipschitz import Space, empirical_lipschitz
from ttsv.results import TRAINING, AnyRecord, StageProgress
from ttsv.training.feed import place

Stages = Generator[StageProgress, None, Any]
Step = TypeVar("Step")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The numbers of one evaluation, and what they were made from.

    `columns`: the typed numbers of `ttsv.results.TrialResult`, by its names, None for what was not asked for.
    `results` is the whole record, JSON-ready, `protocol` how it was measured, `evidence` what it was made from.
    """

    columns: dict[str, float | None]
    results: AnyRecord
    protocol: AnyRecord
    violations: list[Violation]
    evidence: Evidence


def check_evaluation(config: EvaluationConfig, data: Dataset, folder: Path) -> None:
    """Raises `ConfigError` or `DataError` for what is sure to fail: before a network is trained, not after.

    `folder`: that of the data sets.
    """
    config.check_dataset(data.info.name, data.info)
    if "autoattack" in config.attacks and config.attack_version != "rand" and config.attack_norm != "Linf":
        require_tiles(data.test.images, config.attack_norm)
    if config.corruptions == "published":
        PublishedCorruptions(folder / PUBLISHED_CORRUPTIONS[data.info.name]).require_files()
    if config.corruptions != "none":
        Baseline.find(folder, data.info.name)


def measure(subject: Subject, options: EvaluationOptions) -> Generator[StageProgress, None, Measured]:
    """Evaluates a network on the test images: yields where it is and returns everything.

    The network stays where and as it is. Images that leave its device too little memory stay in the machine's, see
    `ttsv.training.feed`, and go there in batches; the numbers are the same. Accuracy, loss and calibration are always
    measured, the rest is the configuration's to ask for. A network that has no finite bound, or a layer without a rule,
    gets no certificates, and the record says why. Only stages that take long are yielded.

    Raises `DataError` for test or validation images that are not pixels in [0, 1], `DivergedError` for logits that
    are not finite, and `ConfigError` for a network whose classes are not the data set's, or what a metric cannot be
    measured of.
    """
    model, data, config = subject.model, subject.data, options.config
    test = place(Split(*(part[: options.images] for part in data.test)), subject.device)
    check_labelled(test.images, test.labels)
    seconds: dict[str, float] = {}
    with _timed(seconds, "accuracy"):
        logits = _logits(model, test.images, data)
        calibration = _calibration(subject, logits, test.labels)
    evidence = Evidence(images=test.images, labels=test.labels, logits=logits, calibration=calibration, seconds=seconds)
    for name in config.attacks:
        # On the processor, as all pixels are made float32 at once: batches go to the network's device.
        attacked = Split(test.images[: config.attack_images].cpu(), test.labels[: config.attack_images])
        with _timed(seconds, name), _room_for_batches(config):
            evidence.attacks[name] = yield from _attack(name, model, attacked, options)
    if config.certified:
        evidence.assumed_lipschitz = assumed_lipschitz(model, subject.std)
    if config.certified or config.lipschitz_methods:
        yield from _bound(model, evidence, config)
    if config.lipschitz_methods:
        yield from _lipschitz(model, evidence, config)
    if config.corruptions != "none":
        with _timed(seconds, "corruptions"):
            evidence.corruption = yield from _corrupt(subject, test, options)
    baseline = Baseline.find(options.folder, data.info.name) if evidence.corruption else None
    said = {TRAINING: dict(subject.said)} if subject.said else {}
    return Measured(
        columns=columns(evidence, baseline),
        results=results(evidence, config, baseline) | said,
        protocol=evaluation_protocol(subject, evidence, config),
        violations=find_violations(evidence),
        evidence=evidence,
    )


def _logits(model: nn.Module, images: Tensor, data: Dataset) -> Tensor:
    logits = predict(model, images)
    if logits.ndim != 2 or logits.shape[1] != data.info.classes:
        fix = f"must give {data.info.classes} classes, as {data.info.name} has"
        raise ConfigError("model", f"{tuple(logits.shape)} logits", fix)
    if not logits.isfinite().all():
        raise DivergedError("the network's logits are not finite")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _calibration(subject: Subject, logits: Tensor, labels: Tensor) -> CalibrationRecord:
    validation = place(subject.data.validation, subject.device)
    if not len(validation.labels):
        return calibration_record(logits, labels, bins=ECE_BINS)
    check_labelled(*validation)
    held = _logits(subject.model, validation.images, subject.data)
    return calibration_record(
        logits, labels, validation_logits=held, validation_labels=validation.labels, bins=ECE_BINS
    )


def _attack(
    name: str, model: nn.Module, attacked: Split, options: EvaluationOptions
) -> Generator[StageProgress, None, AttackRecord]:
    yield StageProgress(stage=name, done=0, total=1)
    config, state = options.config, options.state
    threat = Threat(norm=config.attack_norm, eps=config.attack_eps, seed=config.seed, batch_size=config.batch_size)
    if name == "pgd":
        return (yield from _stages(pgd_steps(model, *attacked, threat), _attack_stage))
    attack = partial(autoattack_steps, model, *attacked, threat, version=config.attack_version, state_path=state)
    try:
        return (yield from _stages(attack(), _attack_stage))
    except (DataError, ConfigError) as error:
        about_state = isinstance(error, DataError) or error.field == "state_path"
        if not (options.renew_state and about_state and state is not None):
            raise
        state.unlink()
    return (yield from _stages(attack(), _attack_stage))


def _attack_stage(step: AttackProgress) -> StageProgress:
    return StageProgress(stage=step.attack, done=step.batch, total=step.batches, seconds_left=step.seconds_left)


def _bound(model: nn.Module, evidence: Evidence, config: EvaluationConfig) -> Stages:
    """The Lipschitz bound and, if asked for, certificates from it."""
    yield StageProgress(stage="certified", done=0, total=1)
    images, labels = evidence.images, evidence.labels
    with _timed(evidence.seconds, "certified"):
        try:
            evidence.bound = lipschitz_bound(model, tuple(images.shape[2:]), in_channels=images.shape[1])
        except ConfigError as error:
            evidence.no_bound = str(error)
            return
        if config.certified:
            evidence.certificates = certificates(model, images, labels, bound=evidence.bound)


def _lipschitz(model: nn.Module, evidence: Evidence, config: EvaluationConfig) -> Stages:
    """Empirical constants by every method asked for, in both spaces."""
    pairs = [(space, method) for space in get_args(Space) for method in config.lipschitz_methods]
    chosen = Split(*(part[: config.lipschitz_images] for part in (evidence.images, evidence.labels)))
    with _timed(evidence.seconds, "lipschitz"):
        for done, (space, method) in enumerate(pairs):
            yield StageProgress(stage="lipschitz", done=done, total=len(pairs))
            found = empirical_lipschitz(
                model,
                *chosen,
                radius=LIPSCHITZ_RADIUS,
                space=space,
                method=method,  # type: ignore[arg-type] # a str that the configuration has checked
                steps=ASCENT_STEPS,
                seed=config.seed,
            )
            evidence.lipschitz.append(found)


def _corrupt(
    subject: Subject, test: Split, options: EvaluationOptions
) -> Generator[StageProgress, None, CorruptionRecord]:
    yield StageProgress(stage="corruptions", done=0, total=1)
    data, config, folder = subject.data, options.config, options.folder
    source: CorruptionSource
    if config.corruptions == "published":
        name = PUBLISHED_CORRUPTIONS[data.info.name]
        source = PublishedCorruptions(folder / name, classes=data.info.classes, labels=data.test.labels.cpu().numpy())
    else:
        source = GeneratedCorruptions(
            *(part[: config.corruption_images] for part in test),
            name=data.info.name,
            folder=folder,
            classes=data.info.classes,
            seed=config.seed,
        )
        for _kind, done, total in source.make():
            yield StageProgress(stage="making corruptions", done=done, total=total)
    count = len(test.labels)
    steps = corruption_steps(subject.model, source, images=min(count, config.corruption_images or count))
    return (yield from _stages(steps, _corruption_stage))


def _corruption_stage(step: CorruptionProgress) -> StageProgress | None:
    if step.severity != SEVERITIES[-1]:
        return None
    done, total = (pairs // len(SEVERITIES) for pairs in (step.done, step.total))
    return StageProgress(stage="corruptions", done=done, total=total, seconds_left=step.seconds_left)


def _stages(
    steps: Generator[Step, None, Result], stage: Callable[[Step], StageProgress | None]
) -> Generator[StageProgress, None, Result]:
    """Runs a stepwise metric to its end and returns its result; yields what `stage` makes of each step but None."""
    while True:
        try:
            shown = stage(next(steps))
        except StopIteration as end:
            result: Result = end.value
            return result
        if shown is not None:
            yield shown


@contextmanager
def _room_for_batches(config: EvaluationConfig) -> Iterator[None]:
    """Says of memory that an attack does not find that its batches are not made smaller: that would be another one."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = f"no room to attack {config.batch_size or ATTACK_BATCH} images at once"
        raise OutOfMemoryError(f"{fix}: choose a smaller evaluation.batch_size, another protocol ({error})") from error


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = time.perf_counter() - started
