"""The network of a trial: built as its configuration says, and trained."""

from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ttsv.config.trial import TrialConfig
from ttsv.constraints import ConstraintReport, make_constraint
from ttsv.data.loading import Dataset
from ttsv.errors import ConfigError
from ttsv.hardware.processor import computes_bf16, instruction_set
from ttsv.models import ModelArguments, create_model, per_channel
from ttsv.results import CHECKPOINTS, EpochMetrics
from ttsv.runtime.determinism import derived_seed, random_state
from ttsv.runtime.failures import known_failures
from ttsv.training.checkpoint import Checkpoints
from ttsv.training.loop import Progress, fit, steps_per_epoch, training_splits
from ttsv.training.record import TrainingFacts, best_epoch


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """A trained network, what it was built of, and what is known of its training.

    `report`: what the constraint achieved where the network was trained just now; None where it comes from an earlier
    trial, whose facts have that in their records of the layers. `best_weights`: those of the best epoch, where they are
    kept beside the last one's; `best_epoch` is its number.
    """

    model: nn.Module
    arguments: ModelArguments
    facts: TrainingFacts
    report: ConstraintReport | None = None
    best_weights: Mapping[str, Tensor] | None = None
    best_epoch: int = 0


def model_arguments(config: TrialConfig, data: Dataset) -> ModelArguments:
    """What the trial's network is built of; its normalisation has a value for each channel, however it was written."""
    return ModelArguments(
        name=config.model,
        num_classes=data.info.classes,
        in_channels=data.info.channels,
        image_size=data.info.image_size,
        layer=config.layer,
        rank=config.rank,
        frames=config.frames,
        mean=per_channel(config.mean or data.info.mean, data.info.channels),
        std=per_channel(config.std or data.info.std, data.info.channels),
    )


def train_network(
    config: TrialConfig, data: Dataset, *, folder: Path, device: torch.device, alias: str | None = None
) -> Generator[EpochMetrics, None, TrainedNetwork]:
    """Trains the network of a canonical configuration: yields every epoch. Checkpoints are in the trial's `folder`.

    `alias`: a fingerprint by which an earlier version knew the same trial, whose checkpoints are gone on from, too.
    Raises `ConfigError` for fp16 on a processor, and for bf16 on one that has no instructions for it.
    """
    _check_precision(config, device)
    arguments, constraint = model_arguments(config, data), make_constraint(config)
    with known_failures(), random_state(derived_seed(config.seed, "weights"), device):
        model = create_model(**asdict(arguments))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    identity = {"format": 1, "trial": config.fingerprint(), "data": data.sha256, "split": data.split}
    aliases = [identity | {"trial": alias}] if alias else []
    with Checkpoints(folder / CHECKPOINTS, identity, aliases) as checkpoints:
        progress = yield from fit(model, data, config, constraint, device=device, checkpoints=checkpoints)
    steps = steps_per_epoch(len(training_splits(data, config.training)[0].labels), config.training)
    step_seconds, constraint_step_seconds = progress.per_step(steps)
    facts = TrainingFacts(
        train_seconds=progress.train_seconds,
        constraint_seconds=progress.constraint_seconds,
        step_seconds=step_seconds,
        constraint_step_seconds=constraint_step_seconds,
        peak_memory=progress.peak_memory,
        selected_epoch=progress.selected_epoch,
        said=_said(config, progress, device),
        trained_on=progress.machines,
    )
    return TrainedNetwork(
        model=model,
        arguments=arguments,
        facts=facts,
        report=constraint.report(),
        best_weights=progress.best_weights,
        best_epoch=progress.best_epoch,
    )


def _where(device: torch.device) -> str:
    """The device, and with what of CUDA's it computes: of another version the same bits are not to be expected."""
    if device.type != "cuda":
        return "the CPU"
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN {cudnn}"


def _check_precision(config: TrialConfig, device: torch.device) -> None:
    """Less precision is for speed, and a trial says what it was computed in: it is refused rather than changed."""
    precision = config.training.precision
    if device.type != "cpu" or precision == "float32" or (precision == "bf16" and computes_bf16() is not False):
        return
    lacking = "has no instructions for bf16"
    if precision == "fp16":
        lacking = "gets no fast gradients of convolutions in fp16 from torch, as none does"
    fix = (
        f"must be float32 here: this processor ({instruction_set()}) {lacking}: a step would take many times as "
        "long; or train on a GPU (resources.gpus)"
    )
    raise ConfigError("training.precision", precision, fix)


def _said(config: TrialConfig, progress: Progress, device: torch.device) -> dict[str, str]:
    """What a protocol says of the training, by subject, in words."""
    said = {}
    if config.training.tf32:
        has = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        said["tf32"] = "steps in TensorFloat-32" if has else "allowed; this device has none: steps in float32"
    if config.training.deterministic:
        said["deterministic"] = f"deterministic algorithms of torch {torch.__version__} on {_where(device)}"
    if config.training.soc_iterations == "code":
        said["soc_iterations"] = "50 steps of the power iteration at the first and every 200th step, else one"
    if progress.projection is not None:
        said["projection"] = progress.projection
    if progress.best_weights is not None:
        said["kept"] = f"epoch {progress.best_epoch} too, the {best_epoch(config.training)}"
    return said
