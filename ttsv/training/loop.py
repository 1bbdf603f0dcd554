"""Training: the loop, from the first step to the weights that are chosen, and what it needs."""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import NotRequired, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from ttsv.certification.certificates import assumed_certified_accuracy, assumed_lipschitz
from ttsv.config.evaluation import RADII
from ttsv.config.training import TrainingConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import Constraint, ConstraintState
from ttsv.constraints.protocol import settle, settle_statistics
from ttsv.data.loading import Dataset, Split, as_pixels
from ttsv.errors import ConfigError, DivergedError
from ttsv.layers import SOC, orthogonal_loss
from ttsv.layers.soc import soc_iterations
from ttsv.metrics.accuracy import accuracy, cross_entropy, predict
from ttsv.results import EpochMetrics, machine_name
from ttsv.runtime.determinism import derived_seed, deterministic_algorithms, random_state
from ttsv.runtime.devices import measured_convolutions
from ttsv.runtime.failures import known_failures
from ttsv.runtime.headway import get_on
from ttsv.runtime.precision import full_precision, training_precision
from ttsv.runtime.provenance import describe_device
from ttsv.training.checkpoint import Checkpoints, load_weights, restore_weights
from ttsv.training.feed import batches, place, whole
from ttsv.training.graph import GraphedStep
from ttsv.training.optimizers import backward_and_step, learning_rate, make_optimizer, moments, restore_moments, set_lr
from ttsv.training.spectra import SpectraWatch
from ttsv.training.stopwatch import Stopwatch

_AUTOCAST = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """How far a training is.

    `epoch`: epochs done. `train_seconds` and, of these, `constraint_seconds` are those of all epochs; `first_*`
    those of the first one, in which memory is laid out and kernels are chosen. `best_epoch` (0: none yet) had the
    highest accuracy on the validation images, `best_accuracy`, or certified accuracy, as `training.best_by` says.
    `selected_epoch`: the one whose weights the trained model has. `projection`: what a constraint did to those before
    they were evaluated, in words. `best_weights`: those of the best epoch once all are done, where they are kept beside
    the last one's. `peak_memory`: bytes that were allocated on a GPU at most, by the process that finished it; without
    its first epoch of several, in which cuDNN tries ways that it does not take. None where it found all epochs done.
    `machines`: on which its epochs were trained, and so its seconds are of.
    """

    epoch: int = 0
    train_seconds: float = 0.0
    constraint_seconds: float = 0.0
    first_seconds: float = 0.0
    first_constraint_seconds: float = 0.0
    best_epoch: int = 0
    best_accuracy: float = -1.0
    selected_epoch: int = 0
    projection: str | None = None
    best_weights: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)
    peak_memory: int | None = field(default=None, compare=False)
    machines: tuple[str, ...] = field(default=(), compare=False)

    def add(self, metrics: EpochMetrics) -> None:
        """Counts one more epoch."""
        if self.epoch == 0:
            self.first_seconds, self.first_constraint_seconds = metrics.seconds, metrics.constraint_seconds
        self.epoch = self.selected_epoch = metrics.epoch
        self.train_seconds += metrics.seconds
        self.constraint_seconds += metrics.constraint_seconds

    def per_step(self, steps: int) -> tuple[float, float]:
        """Seconds per step, whole and of the constraint, at `steps` per epoch; without the first epoch of several."""
        if self.epoch < 2:
            return self.train_seconds / steps, self.constraint_seconds / steps
        steps *= self.epoch - 1
        warm_constraint = self.constraint_seconds - self.first_constraint_seconds
        return (self.train_seconds - self.first_seconds) / steps, warm_constraint / steps


def fit(
    model: nn.Module,
    data: Dataset,
    config: TrialConfig,
    constraint: Constraint,
    *,
    device: torch.device,
    checkpoints: Checkpoints | None = None,
) -> Generator[EpochMetrics, None, Progress]:
    """Trains the model in place: yields each epoch's metrics, returns the whole progress.

    Trained on are `data.train`, and `data.validation` too where the trial validates on the test images. With
    `checkpoints`, goes on after the newest epoch found there, to the same numbers bit for bit (on a CPU, with as many
    threads), and saves each epoch once its metrics are taken: while the next one is trained, but each is on disk before
    the metrics of the next are yielded, and the last before this returns or is closed. An epoch whose metrics the
    caller could not take, and so throws an error in here, is not saved. Where this raises, one may be under way still:
    `checkpoints` as a context waits for it. What is random follows from the seed and the epoch alone; the process's own
    random state is neither read nor changed. The constraint is bound before the optimizer is made, applied after each
    step and once more to the weights that are evaluated in the end, unless the step that left them has just been
    followed by a projection, or `training.final_projection` is off. Images of two dimensions are computed channels
    last. A split that does not leave a GPU enough memory stays in the machine's, see `ttsv.training.feed`.

    Raises `DivergedError` and `OutOfMemoryError`.
    """
    training = config.training
    with known_failures(), _arithmetic(training, device):
        train, validation = (place(split, device) for split in training_splits(data, training))
        model.to(device)
        if data.info.dims == 2:
            model.to(memory_format=torch.channels_last)
        constraint.bind(model, data.info.image_size, in_channels=data.info.channels)
        every, size = training.spectra_every, data.info.image_size
        watch = SpectraWatch(model, every, training.epochs, size, in_channels=data.info.channels)
        run = _Run(model, training, constraint, device)
        if training.canonical().best_by == "certified":
            run.lipschitz = _assumed_lipschitz(model, config.std or data.info.std)
        progress = run.restore(checkpoints)
    steps = steps_per_epoch(len(train.labels), training)
    count = min(steps * training.batch_size, len(train.labels))
    begun = progress.epoch
    if begun < training.epochs:
        progress.machines = tuple(dict.fromkeys((*progress.machines, machine_name(describe_device(device)))))
    while progress.epoch < training.epochs:
        started, first = time.perf_counter(), progress.epoch * steps
        totals = torch.zeros(2, device=device)  # summed loss, correct predictions
        seed = derived_seed(config.seed, "epoch", progress.epoch)
        with known_failures(model), random_state(seed, device), _arithmetic(training, device):
            model.train()
            watch.begin(progress.epoch + 1, constraint, first, steps)
            for step, (images, labels) in enumerate(batches(train, config, progress.epoch, count), start=first):
                set_lr(run.optimizer, learning_rate(training, step, steps))
                for layer in run.skew:
                    layer.iterations = soc_iterations(training.soc_iterations, step)
                totals += run.train(images, labels)
                watch.before_projection(step + 1)
                with run.constraint_time:
                    constraint.project(model, step + 1)
                watch.after_projection(step + 1)
                run.average()
                get_on()
            train_loss, train_accuracy = (totals / count).tolist()
            seconds, constraint_seconds = time.perf_counter() - started, run.constraint_time.read()
            if device.type == "cuda" and progress.epoch == begun and progress.epoch + 1 < training.epochs:
                torch.cuda.reset_peak_memory_stats(device)
            watch.end(progress.epoch + 1)
            if progress.epoch + 1 == training.epochs:
                run.finish(train, training.epochs * steps)
            elif run.averaged is not None:
                _refresh(run.evaluated)
            logits = predict(run.evaluated, validation.images, batch_size=training.batch_size)
            with torch.no_grad():  # else it keeps nodes of autograd, which steps of another stream would go on with
                ort_loss = orthogonal_loss(run.evaluated)
        metrics = EpochMetrics(
            epoch=progress.epoch + 1,
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
        with known_failures(model):
            metrics = replace(metrics, spectra=watch.take())
        run.note(metrics, run.score(logits, validation.labels))
        if checkpoints is not None:
            checkpoints.wait()
        try:
            yield metrics
        except GeneratorExit:  # the caller stops here: it has this epoch
            if checkpoints is not None:
                checkpoints.save(progress.epoch, run.state())
            raise
        if checkpoints is not None:
            checkpoints.start(progress.epoch, run.state())
    if training.select == "best" and progress.best_epoch != progress.epoch:
        seed = derived_seed(config.seed, "selected")
        with known_failures(model), random_state(seed, device), _arithmetic(training, device):
            run.finish(train, progress.best_epoch * steps, best=True)
        progress.selected_epoch = progress.best_epoch
    if training.keep_best:
        progress.best_weights = run.best
    if device.type == "cuda" and progress.epoch > begun:
        captured = 0 if run.graph is None else run.graph.peak  # of what is captured, replays allocate nothing
        progress.peak_memory = max(captured, torch.cuda.max_memory_allocated(device))
    if checkpoints is not None:
        checkpoints.wait()
    return progress


@contextmanager
def _arithmetic(training: TrainingConfig, device: torch.device) -> Iterator[None]:
    """All of a training but its steps is in full float32; of those `_Run.precision` says in what they are.

    How a GPU convolves is chosen by measuring, here and not by who trains: a benchmark trains as trials do.
    """
    with measured_convolutions(device), full_precision(), deterministic_algorithms(training.deterministic):
        yield


def training_splits(data: Dataset, training: TrainingConfig) -> tuple[Split, Split]:
    """The images that are trained on, and those that each epoch is measured on."""
    if training.validation == "held-out":
        return data.train, data.validation
    return Split(*map(torch.cat, zip(data.train, data.validation, strict=True))), data.test


def _assumed_lipschitz(model: nn.Module, std: Sequence[float]) -> float:
    """The constant that certified accuracy is taken by. Raises `ConfigError` for a network of which none is assumed."""
    found = assumed_lipschitz(model, std)
    if found is None:
        fix = "must be accuracy: a Lipschitz constant is assumed of networks whose convolutions are all SOC or SOC-TT"
        raise ConfigError("training.best_by", "certified", fix)
    return found


def steps_per_epoch(count: int, training: TrainingConfig) -> int:
    """Optimizer steps of one epoch over `count` images; the last batch may be smaller."""
    whole = math.ceil(count / training.batch_size)
    return whole if training.steps is None else min(training.steps, whole)


class _RunState(TypedDict):
    """What a checkpoint holds: states as torch has them, and `asdict` of the progress."""

    model: dict[str, Tensor]
    optimizer: Mapping[str, object]
    scaler: dict[str, float]
    averaged: dict[str, Tensor] | None
    best: dict[str, Tensor] | None
    best_constraint: NotRequired[ConstraintState | None]
    constraint: ConstraintState
    progress: dict[str, float]
    machines: NotRequired[list[str]]


class _Run:
    """What changes while a model is trained, beside its weights: all of it is in the checkpoint."""

    def __init__(
        self, model: nn.Module, training: TrainingConfig, constraint: Constraint, device: torch.device
    ) -> None:
        self.model, self.training, self.constraint, self.device = model, training, constraint, device
        self.optimizer = make_optimizer(model, training)
        self.optimizer.zero_grad()  # of what was done with the model before
        self.scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        self.averaged: AveragedModel | None = None
        if training.ema is not None:
            self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(training.ema))  # type: ignore[no-untyped-call]
        self.evaluated = model if self.averaged is None else self.averaged.module
        self.best: dict[str, Tensor] | None = None
        self.best_constraint: ConstraintState | None = None
        self.lipschitz: float | None = None
        self.convolutions = self._convolutions()
        self.skew = [layer for layer in model.modules() if isinstance(layer, SOC)]
        self.progress = Progress()
        self.constraint_time = Stopwatch(device)
        self.graph: GraphedStep | None = None
        # The scaler of fp16 decides after each backward pass whether to step.
        if device.type == "cuda" and training.cuda_graph and training.precision != "fp16":
            self.graph = GraphedStep(model, self.constraint_time.again)

    def precision(self) -> AbstractContextManager[None]:
        """What products and convolutions of float32 are computed in, forward and backward."""
        return training_precision(tf32=self.training.tf32)

    def autocast(self) -> torch.autocast:
        """The precision of the forward pass."""
        dtype = _AUTOCAST[self.training.precision]
        # On a GPU no cast is kept for the next use of a weight: a CUDA graph has to make it anew.
        kept = self.device.type != "cuda"
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None, cache_enabled=kept)

    def _convolutions(self) -> AbstractContextManager[object]:
        """How those of the forward pass, and of its gradients, are computed: by torch where no faster way is known."""
        if (self.device.type, self.training.precision, self.training.convolutions) != ("cpu", "float32", "winograd"):
            return nullcontext()
        faster_convolutions: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
        from ttsv.winograd import faster_convolutions  # noqa: F811 - delete this line and the room, and torch remains

        return faster_convolutions(self.model)

    def train(self, images: Tensor, labels: Tensor) -> Tensor:
        """Trains by one batch: returns its summed loss and the count of correct predictions, until the next call."""
        if self.graph is None:
            return self._train(images, labels)
        return self.graph(self._train, images, labels, kind=tuple(layer.iterations for layer in self.skew))

    def _train(self, images: Tensor, labels: Tensor) -> Tensor:
        with self.precision(), self.autocast(), self.convolutions:
            logits = self.model(as_pixels(images)).float()
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.training.label_smoothing)
        with self.constraint_time:
            penalty = self.constraint.penalty(self.model)
        with self.precision():
            self._step(loss + penalty)
        return torch.stack([loss.detach() * len(labels), (logits.argmax(1) == labels).sum()])

    def _step(self, loss: Tensor) -> None:
        """One step of the optimizer down the loss. Leaves no gradients, which would lie beside the next activations."""
        if self.training.clip_gradient is None and not self.scaler.is_enabled():
            backward_and_step(loss, self.optimizer)
            return
        torch.autograd.backward(self.scaler.scale(loss))
        if self.training.clip_gradient is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip_gradient)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def average(self) -> None:
        """Takes the weights into their moving average, and the buffers as they are.

        As `AveragedModel.update_parameters` does, which also copies its count to the device, and waits, at each step.
        """
        if self.averaged is None:
            return
        kept, new = (list[Tensor](one.parameters()) for one in (self.averaged.module, self.model))
        count = int(self.averaged.n_averaged)
        with torch.no_grad():
            if count == 0:
                torch._foreach_copy_(kept, new)
            else:
                assert self.averaged.multi_avg_fn is not None
                self.averaged.multi_avg_fn(kept, new, count)
            for own, other in zip(self.averaged.module.buffers(), self.model.buffers(), strict=True):
                own.copy_(other)
        self.averaged.n_averaged += 1

    def finish(self, train: Split, steps: int, *, best: bool = False) -> None:
        """Turns the model into what is evaluated: the averaged or the best weights, constrained, recalibrated.

        `steps`: how many had been taken when the weights were left.
        """
        for layer in self.skew:
            layer.iterations = 1
        if best:
            assert self.best is not None
            load_weights(self.model, self.best)
            if self.best_constraint is not None:
                self.constraint.load_state_dict(self.best_constraint)
        elif self.averaged is not None:
            self.model.load_state_dict(self.averaged.module.state_dict())
            _refresh(self.model)
        self.evaluated = self.model
        changed, project = self.averaged is not None, self.training.final_projection
        self.progress.projection = settle(self.constraint, self.model, steps, changed=changed, project=project)
        if self.training.recalibrate:
            update_bn(map(as_pixels, whole(train, self.training.batch_size)), self.model)
            if project:
                settle_statistics(self.constraint, self.model, steps)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """By what an epoch is the best: accuracy or, with the Lipschitz constant assumed, certified accuracy."""
        if self.lipschitz is None:
            return accuracy(logits, labels)
        return assumed_certified_accuracy(logits, labels, RADII[:1], self.lipschitz)[RADII[0]]

    def note(self, metrics: EpochMetrics, score: float) -> None:
        """Counts an epoch, and keeps its weights where they are the best so far, by its score, and wanted."""
        self.progress.add(metrics)
        if score > self.progress.best_accuracy:
            self.progress.best_epoch, self.progress.best_accuracy = metrics.epoch, score
            if self.training.select == "best" or self.training.keep_best:
                self.best = {name: value.clone() for name, value in self.evaluated.state_dict().items()}
                self.best_constraint = self.constraint.state_dict()

    def state(self) -> _RunState:
        """Everything that training on needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": moments(self.optimizer),
            "scaler": self.scaler.state_dict(),
            "averaged": None if self.averaged is None else self.averaged.state_dict(),
            "best": self.best,
            "best_constraint": self.best_constraint,
            "constraint": self.constraint.state_dict(),
            "progress": {name: value for name, value in asdict(self.progress).items() if name != "machines"},
            "machines": list(self.progress.machines),  # beside it, where a version of before passes it over
        }

    def restore(self, checkpoints: Checkpoints | None) -> Progress:
        """Takes up the newest saved state, if there is one."""
        state = checkpoints.latest() if checkpoints is not None else None
        if state is not None:
            restore_weights(self.model, state["model"])
            restore_moments(self.optimizer, state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            if self.averaged is not None:
                restore_weights(self.averaged, state["averaged"])
            self.best = state["best"]
            self.best_constraint = state.get("best_constraint")
            self.constraint.load_state_dict(state["constraint"])
            self.progress = Progress(**state["progress"], machines=tuple(state.get("machines", [machine_name({})])))
        return self.progress


def _refresh(averaged: nn.Module) -> None:
    """Has SOC layers scale averaged kernels by norms of their own: what they are left is of the last step's kernels."""
    for layer in averaged.modules():
        if isinstance(layer, SOC):
            layer.refresh()


def _require_finite(metrics: EpochMetrics) -> None:
    for name in ("train_loss", "val_loss", "ort_loss"):
        value = getattr(metrics, name)
        if value is not None and not math.isfinite(value):
            raise DivergedError(f"{name} is {value} after epoch {metrics.epoch}")
