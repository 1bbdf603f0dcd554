import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from ttsv.checkpoint import Checkpoints
from ttsv.config import TrainingConfig, TrialConfig
from ttsv.constraints import Clip, Compose, Constraint, Orthogonal, Unconstrained
from ttsv.data import DATASETS
from ttsv.data.loading import Dataset, Split
from ttsv.errors import DataError, DivergedError, OutOfMemoryError
from ttsv.layers import TTConv2d, orthogonal_loss
from ttsv.metrics.accuracy import predict
from ttsv.results import EpochMetrics
from ttsv.training import (
    Progress,
    Stopwatch,
    derived_seed,
    epoch_order,
    fit,
    known_failures,
    learning_rate,
    random_state,
)

CPU = torch.device("cpu")
COUNT, BATCH = 22, 8  # three steps, the last of 6 images
STEPS = 3


def noise(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.rand((count, 1, 8, 8), generator=generator)
    return Split(images, labels)


def dataset(images: Split | None = None) -> Dataset:
    return Dataset(
        info=DATASETS["digits"],
        train=images or noise(COUNT, 1),
        validation=noise(10, 2),
        test=noise(10, 3),
        sha256="",
        split={},
    )


def trial(seed: int = 0, **training: Any) -> TrialConfig:
    values = {"epochs": 2, "batch_size": BATCH, "lr": 0.1, "weight_decay": 0.01, **training}
    return TrialConfig(dataset="digits", model="small-cnn", seed=seed, training=TrainingConfig(**values))


def network(*, dropout: float = 0.0, rank: int | None = None) -> nn.Sequential:
    with random_state(7, CPU):
        # Without a bias: batch norm cancels it, and Adam makes large steps of the rounding in its gradient.
        conv: nn.Module = nn.Conv2d(1, 6, 3, stride=2, padding=1, bias=False)
        if rank is not None:
            conv = TTConv2d(1, 6, 3, rank, stride=2, padding=1, bias=False)
        layers = [conv, nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(96, 10)]
        return nn.Sequential(*layers)


def run(
    model: nn.Module,
    config: TrialConfig,
    constraint: Constraint | None = None,
    data: Dataset | None = None,
    checkpoints: Checkpoints | None = None,
) -> tuple[list[EpochMetrics], Progress]:
    """All epochs, and what `fit` returns."""
    training = fit(model, data or dataset(), config, constraint or Unconstrained(), device=CPU, checkpoints=checkpoints)
    found = []
    while True:
        try:
            found.append(next(training))
        except StopIteration as stop:
            return found, stop.value


def timeless(metrics: list[EpochMetrics]) -> list[EpochMetrics]:
    return [replace(m, seconds=0, constraint_seconds=0) for m in metrics]


def assert_equal_models(one: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


# --- the loop ---


class Recorder(Unconstrained):
    """Notes every call; a forced projection sets all logits to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def bind(self, model: nn.Module, input_size: Any, *, in_channels: int | None = None) -> None:
        self.calls.append(("bind", input_size, in_channels))

    def penalty(self, model: nn.Module) -> float:
        self.calls.append("penalty")
        return 0.0

    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        self.calls.append(("forced" if force else "project", step))
        if force:
            with torch.no_grad():
                for parameter in model[-1].parameters():  # type: ignore[index]
                    parameter.zero_()


def test_the_constraint_is_called_as_its_protocol_says() -> None:
    recorder = Recorder()
    metrics, _ = run(network(), trial(epochs=2), recorder)
    steps: list[object] = []
    for step in range(1, 2 * STEPS + 1):
        steps += ["penalty", ("project", step)]
    assert recorder.calls == [("bind", 8, 1), *steps, ("forced", 2 * STEPS)]
    # The last validation sees the projected weights, the one before does not.
    assert metrics[1].val_loss == pytest.approx(math.log(10))
    assert metrics[0].val_loss != pytest.approx(math.log(10))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("rank", [None, 2])
def test_the_loop_is_plain_training(optimizer: str, rank: int | None) -> None:
    """Beside a loop of torch's own optimizer and schedule, unfused."""
    config, data, lambda_ort = trial(seed=3, epochs=3, optimizer=optimizer), dataset(), 0.7
    ours, plain = network(rank=rank), network(rank=rank)
    metrics, _ = run(ours, config, Orthogonal(lambda_ort), data)

    settings = config.training
    make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if optimizer == "sgd":
        make = torch.optim.SGD
        options |= {"momentum": 0.9, "nesterov": True}
    torch_optimizer = make(plain.parameters(), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(torch_optimizer, 3 * STEPS)
    for epoch in range(3):
        plain.train()
        losses, right = [], 0
        for batch in torch.split(epoch_order(COUNT, 3, epoch), BATCH):
            logits = plain(data.train.images[batch])
            loss = functional.cross_entropy(logits, data.train.labels[batch])
            orthogonal = orthogonal_loss(plain)
            total = loss if orthogonal is None else loss + lambda_ort * orthogonal
            torch_optimizer.zero_grad()
            torch.autograd.backward(total)
            torch_optimizer.step()
            schedule.step()
            losses += [loss.item()] * len(batch)
            right += int((logits.argmax(1) == data.train.labels[batch]).sum())
        validation = predict(plain, data.validation.images)
        assert metrics[epoch].train_loss == pytest.approx(sum(losses) / COUNT, rel=1e-4)
        assert metrics[epoch].train_accuracy == pytest.approx(right / COUNT)
        expected = functional.cross_entropy(validation, data.validation.labels).item()
        assert metrics[epoch].val_loss == pytest.approx(expected, rel=1e-4)
        orthogonal = orthogonal_loss(plain)
        expected_loss = None if orthogonal is None else pytest.approx(orthogonal.item(), rel=1e-3)
        assert metrics[epoch].ort_loss == expected_loss
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_metrics_say_where_they_are() -> None:
    metrics, progress = run(network(), trial(epochs=3, schedule="multistep", milestones=[1], gamma=0.5))
    assert [m.epoch for m in metrics] == [1, 2, 3]
    assert [m.epochs for m in metrics] == [3, 3, 3]
    assert [m.lr for m in metrics] == [0.1, 0.05, 0.05]
    assert all(0 <= m.constraint_seconds <= m.seconds for m in metrics)
    assert progress.epoch == 3
    assert progress.train_seconds == pytest.approx(sum(m.seconds for m in metrics))
    assert progress.constraint_seconds == pytest.approx(sum(m.constraint_seconds for m in metrics))


def test_uint8_images_are_scaled() -> None:
    levels = (dataset().train.images * 255).byte()
    labels = dataset().train.labels
    ours, floats = network(), network()
    run(ours, trial(), data=dataset(Split(levels, labels)))
    run(floats, trial(), data=dataset(Split(levels / 255, labels)))
    assert_equal_models(ours, floats)


def test_no_value_is_read_in_the_loops_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each would wait for the device: their number must not grow with the steps."""
    reads = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            nonlocal reads
            reads += 1
            return original(*arguments)

        return read

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    counts = []
    for batch_size in (COUNT, 2):
        reads = 0
        run(network(rank=2), trial(epochs=1, batch_size=batch_size), Orthogonal(1.0))
        counts.append(reads)
    assert counts[0] == counts[1] > 0


# --- randomness ---


def test_random_numbers_follow_from_the_seed_alone() -> None:
    config = trial(seed=5)
    models = [network(dropout=0.5) for _ in range(3)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, _ = run(models[0], config)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    training = fit(models[1], dataset(), config, Unconstrained(), device=CPU)
    second = []
    for metrics in training:
        second.append(metrics)
        torch.rand(3)  # someone else draws meanwhile
    assert timeless(first) == timeless(second)
    assert_equal_models(models[0], models[1])
    other, _ = run(models[2], trial(seed=6))
    assert timeless(first) != timeless(other)


@given(count=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10_000))
def test_every_image_is_seen_once(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(order, epoch_order(count, seed, epoch))


def test_orders_and_seeds_differ() -> None:
    drawn = {(seed, epoch): tuple(epoch_order(40, seed, epoch).tolist()) for seed in range(9) for epoch in range(9)}
    assert len(set(drawn.values())) == len(drawn)
    assert derived_seed(1, "epoch", 11) != derived_seed(11, "epoch", 1) != derived_seed(11, "order", 1)


def test_derived_seeds_never_change() -> None:
    assert derived_seed(0, "weights") == -986524055897382514
    assert epoch_order(8, 0, 0).tolist() == [0, 7, 2, 5, 4, 6, 1, 3]


# --- schedules ---


def rates(epochs: int, steps: int, **training: Any) -> list[float]:
    config = TrainingConfig(epochs=epochs, lr=0.3, **training)
    return [learning_rate(config, step, steps) for step in range(epochs * steps)]


@given(epochs=st.integers(1, 8), steps=st.integers(1, 6))
def test_schedules_are_torchs(epochs: int, steps: int) -> None:
    milestones = [m for m in (2, 3, 5) if m < epochs]
    ours = {
        "constant": rates(epochs, steps, schedule="constant"),
        "cosine": rates(epochs, steps, schedule="cosine"),
        "multistep": rates(epochs, steps, schedule="multistep", milestones=milestones, gamma=0.2),
    }
    for name, found in ours.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        schedule: torch.optim.lr_scheduler.LRScheduler
        if name == "cosine":
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
        else:
            at = [m * steps for m in milestones] if name == "multistep" else []
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, at, gamma=0.2)
        for rate in found:
            assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
            optimizer.step()
            schedule.step()


# --- resuming ---


class Warm(Unconstrained):
    """A constraint with a memory, which its projection uses."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0.0

    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        self.steps += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 0.001 * self.steps)

    def state_dict(self) -> Any:
        return {"steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"].item()


def constraint_of(kind: str) -> Constraint:
    return Warm() if kind == "warm" else Compose(Orthogonal(0.5), Clip(0.8, every=2, rounds=2))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["warm", "clip"])
def test_a_broken_run_gives_the_unbroken_numbers(tmp_path: Path, optimizer: str, kind: str) -> None:
    config = trial(epochs=5, optimizer=optimizer)
    whole = network(dropout=0.3, rank=3)
    expected, _ = run(whole, config, constraint_of(kind))
    for stop in range(1, 6):
        checkpoints = Checkpoints(tmp_path / str(stop), {})
        model = network(dropout=0.3, rank=3)
        first = fit(model, dataset(), config, constraint_of(kind), device=CPU, checkpoints=checkpoints)
        found = [next(first) for _ in range(stop)]
        first.close()
        with torch.no_grad():  # what was in memory is lost
            for parameter in model.parameters():
                parameter.fill_(math.nan)
        model, constraint = network(dropout=0.3, rank=3), constraint_of(kind)
        rest, progress = run(model, config, constraint, checkpoints=checkpoints)
        assert timeless(found + rest) == timeless(expected)
        assert_equal_models(model, whole)
        assert progress.epoch == 5
        assert progress.train_seconds == pytest.approx(sum(m.seconds for m in found + rest))
        if kind == "clip":
            assert constraint.report().projections == 5 * STEPS // 2 + 1


def test_an_epoch_whose_checkpoint_was_lost_is_trained_again(tmp_path: Path) -> None:
    config = trial(epochs=4)
    expected, _ = run(network(), config)
    checkpoints = Checkpoints(tmp_path, {})
    first = fit(network(), dataset(), config, Unconstrained(), device=CPU, checkpoints=checkpoints)
    for _ in range(3):
        next(first)
    first.close()
    (tmp_path / "000003.safetensors").write_bytes(b"cut")
    rest, _ = run(network(), config, checkpoints=checkpoints)
    assert timeless(rest) == timeless(expected[2:])


# --- failures ---


def test_a_loss_that_is_not_finite() -> None:
    with pytest.raises(DivergedError, match=r"loss is (nan|inf) after epoch \d"):
        run(network(), trial(lr=1e30, epochs=3))


def test_a_weight_that_is_not_finite_under_a_constraint() -> None:
    images = noise(COUNT, 1)
    images.images[5] = math.nan
    with pytest.raises(DivergedError, match="non-finite weights at step"):
        run(network(), trial(batch_size=4), Clip(1.0, every=1), dataset(images))


def test_other_errors_over_weights_that_are_not_finite() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="anything"), known_failures(model):
        raise RuntimeError("anything")
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with pytest.raises(DivergedError, match="a weight is not finite"), known_failures(model):
        torch.linalg.svdvals(model.weight)
    with pytest.raises(DataError), known_failures(model):
        raise DataError("kept as it is")


class Hungry(nn.Sequential):
    """Asks for a petabyte, or says that a GPU had none left."""

    def __init__(self, *, gpu: bool) -> None:
        super().__init__(*network())
        self.gpu = gpu

    def forward(self, images: Tensor) -> Tensor:
        if self.gpu:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.parametrize("gpu", [False, True])
def test_out_of_memory(gpu: bool) -> None:
    with pytest.raises(OutOfMemoryError, match="does not fit the"):
        run(Hungry(gpu=gpu), trial())


def test_a_stopwatch_adds_up() -> None:
    watch = Stopwatch(CPU)
    assert watch.read() == 0
    for _ in range(2):
        with watch:
            sum(range(20_000))
    first = watch.read()
    assert first > 0
    assert watch.read() == 0
