"""Training: the loop on one screen, and what it needs."""

import hashlib
import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.checkpoint import Checkpoints
from ttsv.config import TrainingConfig, TrialConfig
from ttsv.constraints import Constraint
from ttsv.data.loading import Dataset, as_pixels
from ttsv.errors import DivergedError, OutOfMemoryError, TrialError
from ttsv.layers import orthogonal_loss
from ttsv.metrics.accuracy import accuracy, cross_entropy, predict
from ttsv.results import EpochMetrics


@dataclass
class Progress:
    """How far a training is: epochs done, and the seconds spent on them and, of these, on the constraint."""

    epoch: int = 0
    train_seconds: float = 0.0
    constraint_seconds: float = 0.0


def fit(
    model: nn.Module,
    data: Dataset,
    config: TrialConfig,
    constraint: Constraint,
    *,
    device: torch.device,
    checkpoints: Checkpoints | None = None,
) -> Generator[EpochMetrics, None, Progress]:
    """Trains the model in place on `data.train`: yields each epoch's metrics, returns the whole progress.

    With `checkpoints`, goes on after the newest epoch found there, to the same numbers bit for bit (on a CPU, with
    as many threads), and saves each epoch once its metrics are taken. What is random follows from the seed and the
    epoch alone; the process's own random state is neither read nor changed. The constraint is bound before
    the optimizer is made, applied after each step and, forced, after the last one.

    Raises `DivergedError` and `OutOfMemoryError`.
    """
    training = config.training
    with known_failures():
        train, validation = data.train.to(device), data.validation.to(device)
        constraint.bind(model.to(device), data.info.image_size, in_channels=data.info.channels)
        optimizer = make_optimizer(model, training)
        progress = _restore(checkpoints, model, optimizer, constraint)
    count = len(train.labels)
    steps = math.ceil(count / training.batch_size)
    constraint_time = Stopwatch(device)
    while progress.epoch < training.epochs:
        started, first = time.perf_counter(), progress.epoch * steps
        totals = torch.zeros(2, device=device)  # summed loss, correct predictions
        with known_failures(model), random_state(derived_seed(config.seed, "epoch", progress.epoch), device):
            model.train()
            order = epoch_order(count, config.seed, progress.epoch).to(device)
            for step, batch in enumerate(torch.split(order, training.batch_size), start=first):
                set_lr(optimizer, learning_rate(training, step, steps))
                labels = train.labels[batch]
                logits = model(as_pixels(train.images[batch]))
                loss = functional.cross_entropy(logits, labels)
                with constraint_time:
                    penalty = constraint.penalty(model)
                optimizer.zero_grad()
                torch.autograd.backward(loss + penalty)
                optimizer.step()
                with constraint_time:
                    constraint.project(model, step + 1)
                totals += torch.stack([loss.detach() * len(batch), (logits.argmax(1) == labels).sum()])
            progress.epoch += 1
            if progress.epoch == training.epochs:
                with constraint_time:
                    constraint.project(model, progress.epoch * steps, force=True)
            train_loss, train_accuracy = (totals / count).tolist()
            seconds, constraint_seconds = time.perf_counter() - started, constraint_time.read()
            logits = predict(model, validation.images)
            ort_loss = orthogonal_loss(model)
        metrics = EpochMetrics(
            epoch=progress.epoch,
            epochs=training.epochs,
            train_loss=train_loss,
            train_accuracy=train_accuracy,
            val_loss=cross_entropy(logits, validation.labels),
            val_accuracy=accuracy(logits, validation.labels),
            ort_loss=None if ort_loss is None else ort_loss.item(),
            lr=learning_rate(training, first, steps),
            seconds=seconds,
            constraint_seconds=constraint_seconds,
        )
        _require_finite(metrics)
        progress.train_seconds += seconds
        progress.constraint_seconds += constraint_seconds
        try:
            yield metrics
        finally:  # also where the caller stops here: it has this epoch
            if checkpoints is not None:
                checkpoints.save(progress.epoch, _state(model, optimizer, constraint, progress))
    return progress


def learning_rate(training: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of optimizer step `step`, counted from 0 over the whole training.

    `constant`: lr. `cosine`: lr (1 + cos(pi step / steps)) / 2, Loshchilov and Hutter, SGDR (2017), without
    restarts. `multistep`: lr gamma^m after m milestones, in epochs.
    """
    if training.schedule == "cosine":
        done = step / (training.epochs * steps_per_epoch)
        return training.lr * (1 + math.cos(math.pi * done)) / 2
    if training.schedule == "multistep":
        passed = sum(step >= milestone * steps_per_epoch for milestone in training.milestones)
        return training.lr * training.gamma**passed
    return training.lr


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of a training configuration over all of the model's parameters."""
    if training.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=training.lr, weight_decay=training.weight_decay, fused=True)
    return torch.optim.SGD(
        model.parameters(),
        lr=training.lr,
        momentum=training.momentum,
        nesterov=training.momentum > 0,
        weight_decay=training.weight_decay,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def derived_seed(seed: int, *purpose: str | int) -> int:
    """A seed (64 bits) for one purpose: independent streams from one trial's seed."""
    return int.from_bytes(hashlib.sha256(repr((seed, *purpose)).encode()).digest()[:8], "little", signed=True)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of `count` images in an epoch: it follows from trial seed and epoch, on any device."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
    return torch.randperm(count, generator=generator)


@contextmanager
def random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's random numbers follow from the seed; afterwards they go on as if nothing had been."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def known_failures(model: nn.Module | None = None) -> Iterator[None]:
    """Turns what torch raises for lack of memory, or over a weight that is not finite, into a `TrialError`."""
    try:
        yield
    except TrialError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(f"the trial does not fit the device: {error}") from error
    except (RuntimeError, ValueError) as error:
        if "DefaultCPUAllocator" in str(error):
            raise OutOfMemoryError(f"the trial does not fit the machine's memory: {error}") from error
        if model is not None and not all(p.isfinite().all() for p in model.parameters()):
            raise DivergedError(f"a weight is not finite: {error}") from error
        raise


class Stopwatch:
    """Adds up the seconds spent in `with stopwatch:`, on a GPU in device time and without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []
        self._entered = 0.0

    def __enter__(self) -> None:
        if self._cuda:
            self._record()
        else:
            self._entered = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if self._cuda:
            self._record()
        else:
            self._seconds += time.perf_counter() - self._entered

    def read(self) -> float:
        """The seconds since the last reading; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            self._seconds = sum(start.elapsed_time(end) for start, end in pairs) / 1000
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, constraint: Constraint, progress: Progress
) -> dict[str, Any]:
    moments = optimizer.state_dict()["state"]
    return {
        "model": model.state_dict(),
        "optimizer": {str(index): values for index, values in moments.items()},
        "constraint": constraint.state_dict(),
        "progress": asdict(progress),
    }


def _restore(
    checkpoints: Checkpoints | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    constraint: Constraint,
) -> Progress:
    state = checkpoints.latest() if checkpoints is not None else None
    if state is None:
        return Progress()
    model.load_state_dict(state["model"])
    moments = {int(index): values for index, values in state["optimizer"].items()}
    # The groups (rates and the like) follow from the configuration and the step.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    constraint.load_state_dict(state["constraint"])
    return Progress(**state["progress"])


def _require_finite(metrics: EpochMetrics) -> None:
    for name in ("train_loss", "val_loss", "ort_loss"):
        value = getattr(metrics, name)
        if value is not None and not math.isfinite(value):
            raise DivergedError(f"{name} is {value} after epoch {metrics.epoch}")
