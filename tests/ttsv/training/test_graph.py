"""Steps as CUDA graphs: bit-equal to steps that are run, on a pretended card in every run and on a real one."""

import os
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tests.examples import deep
from tests.pretended import PretendedCards
from ttsv.config.trial import TrialConfig
from ttsv.errors import BrokenContextError
from ttsv.results import EpochMetrics, TrialResult
from ttsv.runtime.determinism import CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACE
from ttsv.training import graph
from ttsv.training.graph import GraphedStep
from ttsv.trial import run_trial

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards

# cuBLAS reads it once, when the first of these tests uses it.
os.environ.setdefault(CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACE)

CARD = torch.device("cuda", 0)
BASE: dict[str, Any] = {"dataset": "synthetic:3x8x8:4:80", "model": "small-cnn", "rank": 6, "lambda_ort": 0.1}
TRAINING: dict[str, Any] = {"epochs": 3, "steps": 4, "batch_size": 8, "lr": 0.01, "deterministic": True}
LATER = 3 * 4 - 3
"""Steps after those that have to be run first."""


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A place for each step that is replayed, of which it has the number of images."""
    seen: list[int] = []
    real = graph._Captured.replay

    def replay(captured: graph._Captured, images: Tensor, labels: Tensor) -> Tensor:
        seen.append(len(images))
        return real(captured, images, labels)

    monkeypatch.setattr(graph._Captured, "replay", replay)
    return seen


def epochs_of(card: "Cards", folder: Path, training: dict[str, Any], **changes: Any) -> list[EpochMetrics]:
    config = TrialConfig.from_dict({**BASE, **changes, "training": TRAINING | training})
    run = run_trial(config, data_dir=folder / "data", folder=folder / "trial", device=str(card.device))
    found = [next(run) for _ in range(config.training.epochs)]
    run.close()
    assert all(isinstance(epoch, EpochMetrics) for epoch in found)
    return found  # type: ignore[return-value]


def numbers(epochs: list[EpochMetrics]) -> list[tuple[float, ...]]:
    return [(epoch.train_loss, epoch.train_accuracy, epoch.val_loss, epoch.val_accuracy) for epoch in epochs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "training"),
    [
        ({"layer": "tt"}, {}),
        pytest.param({"layer": "dense"}, {"clip_gradient": 1.0}, marks=pytest.mark.deep),
        pytest.param({"layer": "soc"}, {}, marks=pytest.mark.deep),  # as with another schedule, below
        pytest.param({"layer": "soc-tt"}, {"precision": "bf16", "ema": 0.9}, marks=pytest.mark.deep),
        pytest.param({"layer": "bcop"}, {}, marks=pytest.mark.deep),
        ({"layer": "tt"}, {"optimizer": "adamw", "precision": "bf16"}),
        ({"layer": "tt", "constraint": "clip", "delta": 1.0, "clipping": {"every": 2}}, {}),
        pytest.param({"constraint": "divide", "division": {"conv": 1.0}}, {}, marks=pytest.mark.deep),
    ],
    ids=lambda value: "-".join(f"{name}={one}" for name, one in value.items()) or "as it is",
)
def test_a_graph_changes_no_number(
    card: "Cards", tmp_path: Path, replays: list[int], changes: dict[str, Any], training: dict[str, Any]
) -> None:
    """Nor where a step replaces what it goes on from, as SOC and BCOP do with the vectors of their power iterations."""
    ours = epochs_of(card, tmp_path / "graph", training, **changes)
    assert replays == [8] * LATER
    run = epochs_of(card, tmp_path / "run", training | {"cuda_graph": False}, **changes)
    assert len(replays) == LATER
    assert numbers(ours) == numbers(run)
    if not card.real:  # whose clock counts what was looked at
        assert [epoch.constraint_seconds for epoch in ours] == [epoch.constraint_seconds for epoch in run]


@pytest.mark.slow
def test_batches_of_other_sizes_are_run(card: "Cards", tmp_path: Path, replays: list[int]) -> None:
    """The last one of an epoch: 56 images are twice 20, and 16."""
    training = {"steps": None, "batch_size": 20}
    ours = epochs_of(card, tmp_path / "graph", training, layer="tt")
    assert replays == [20] * (3 * 2 - 3)
    assert numbers(ours) == numbers(epochs_of(card, tmp_path / "run", training | {"cuda_graph": False}, layer="tt"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", deep("bf16")])
def test_steps_of_another_kind_are_run(card: "Cards", tmp_path: Path, replays: list[int], precision: str) -> None:
    """The authors' schedule takes 50 steps of SOC's power iteration in the first step."""
    training = {"soc_iterations": "code", "precision": precision}
    ours = epochs_of(card, tmp_path / "graph", training, layer="soc")
    assert len(replays) == LATER - 1
    run = epochs_of(card, tmp_path / "run", training | {"cuda_graph": False}, layer="soc")
    assert numbers(ours) == numbers(run)


def test_fp16_is_run(card: "Cards", tmp_path: Path, replays: list[int]) -> None:
    epochs_of(card, tmp_path, {"precision": "fp16"}, layer="tt")
    assert replays == []


class Counting(nn.Module):
    """Sums the images that it has seen: in a buffer that is replaced, and in a parameter that is written to."""

    seen: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, device=device))
        self.written = nn.Parameter(torch.zeros(3, device=device))
        self.calls, self.waits_at = 0, set[int]()

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + images.sum(0)
        if self.calls in self.waits_at:
            self.seen.sum().item()
        with torch.no_grad():
            self.written.add_(images.sum(0))
        return self.seen * labels.sum()


def test_what_is_replaced_between_two_steps_is_taken_up(card: "Cards") -> None:
    model = Counting(card.device)
    step = partial(GraphedStep(model, lambda: None), model.step)
    images, labels = torch.ones(2, 3).to(card.device), torch.ones(2).to(card.device)
    for count in range(1, 7):
        assert step(images * count, labels).tolist() == [2 * count * (count + 1)] * 3
    assert model.calls == 4
    model.seen, model.written.data = torch.ones(3).to(card.device), torch.ones(3).to(card.device)
    for _ in range(2):
        step(images, labels)
    assert (model.seen.tolist(), model.written.tolist()) == ([5.0] * 3, [5.0] * 3)
    step(images[:1], labels[:1])  # is run
    step(images, labels)
    assert (model.seen.tolist(), model.written.tolist()) == ([8.0] * 3, [8.0] * 3)
    assert model.calls == 5


class Trading(nn.Module):
    """Two numbers that change places at each step, by which the second grows."""

    now: Tensor
    before: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("now", torch.ones((), device=device))
        self.register_buffer("before", torch.zeros((), device=device))

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.now, self.before = self.now + self.before, self.now
        return self.now + images.sum()


def test_what_changes_places_is_read_before_it_is_written(card: "Cards") -> None:
    model = Trading(card.device)
    step = partial(GraphedStep(model, lambda: None), model.step)
    images, labels = torch.zeros(2, 3).to(card.device), torch.ones(2).to(card.device)
    assert [step(images, labels).item() for _ in range(8)] == [1, 2, 3, 5, 8, 13, 21, 34]


class Remembering(nn.Module):
    """Keeps its images for the next step, as many as there are."""

    last: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 3, device=device), persistent=False)
        self.register_buffer("none", None)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        found, self.last = self.last.sum(), images + 0
        return found


def test_a_step_that_comes_upon_other_shapes_is_run(card: "Cards", replays: list[int]) -> None:
    model = Remembering(card.device)
    step = partial(GraphedStep(model, lambda: None), model.step)
    images, labels = torch.ones(2, 3).to(card.device), torch.ones(2).to(card.device)
    for _ in range(5):
        step(images, labels)
    assert replays == [2, 2]
    assert step(images[:1], labels[:1]).item() == 6
    assert [step(images * count, labels).item() for count in (2, 3, 4)] == [3, 12, 18]
    assert replays == [2] * 4


def test_what_waits_for_the_card_is_run(card: "Cards", caplog: pytest.LogCaptureFixture) -> None:
    model = Counting(card.device)
    model.waits_at = {3}
    assert runs(card.device, model, 6) == [[4.0 * count] * 3 for count in range(1, 7)]
    assert model.calls == 6
    (record,) = caplog.records
    assert "each waits for the GPU: called a synchronizing CUDA operation" in record.message


def test_a_graph_leaves_room_for_a_step_that_is_run(caplog: pytest.LogCaptureFixture) -> None:
    """As the last batch of an epoch is: a graph keeps what its steps take."""
    with PretendedCards(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "max_memory_allocated", lambda *_: torch.cuda.memory_allocated(0) + 1000)
        for left, calls in ((999, 7), (9999, 4)):
            patched.setattr(torch.cuda, "mem_get_info", lambda *_, left=left: (left, 1 << 34))
            model = Counting(CARD)
            assert runs(CARD, model, 6) == [[4.0 * count] * 3 for count in range(1, 7)]
            assert model.calls == calls  # what was captured and is not kept among them
    (record,) = caplog.records
    assert "too little for a step that is run" in record.message


def test_what_is_said_of_other_things_is_not_lost(card: "Cards", caplog: pytest.LogCaptureFixture) -> None:
    model = Counting(card.device)
    plain = model.step

    def step(images: Tensor, labels: Tensor) -> Tensor:
        warnings.warn(f"step {model.calls}", stacklevel=1)
        return plain(images, labels)

    model.step = step  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs(card.device, model, 6)
    said = [str(one.message) for one in caught if "debug mode" not in str(one.message)]
    assert said == [f"step {count}" for count in range(4)]
    assert caplog.records == []


def runs(device: torch.device, model: Counting, count: int) -> list[list[float]]:
    """What some steps find."""
    step = partial(GraphedStep(model, lambda: None), model.step)
    images, labels = torch.ones(2, 3).to(device), torch.ones(2).to(device)
    return [step(images, labels).tolist() for _ in range(count)]


class TestWithoutCapture:
    """A wait that comes with the capture: on a real card it ends the process's use of it, so it is only pretended."""

    def test_it_is_run(self, caplog: pytest.LogCaptureFixture) -> None:
        """And has left nothing in the model."""
        with PretendedCards():
            model = Counting(CARD)
            model.waits_at = {4}
            assert runs(CARD, model, 6) == [[4.0 * count] * 3 for count in range(1, 7)]
            assert model.written.tolist() == [12.0] * 3
        (record,) = caplog.records
        assert "could not be captured: CUDA error: operation not permitted" in record.message

    def test_it_leaves_no_gradients_and_random_numbers_go_on(self) -> None:
        with PretendedCards():
            model = nn.Linear(3, 1, bias=False, device=CARD)
            calls = list[Tensor]()

            def step(images: Tensor, labels: Tensor) -> Tensor:
                nn.functional.dropout(images)
                model(images).sum().backward()
                calls.append(images)
                if len(calls) == 4:
                    images.sum().item()
                (gradient,), model.weight.grad = (one.grad for one in model.parameters()), None
                assert gradient is not None
                return gradient

            graphed = GraphedStep(model, lambda: None)
            images, labels = torch.ones(2, 3).to(CARD), torch.ones(2).to(CARD)
            found = [graphed(step, images, labels).max().item() for _ in range(5)]
        assert len(calls) == 6
        assert found == [2.0] * 5

    def test_a_process_that_lost_the_card_says_so(self) -> None:
        with PretendedCards() as cards, pytest.MonkeyPatch.context() as patched:
            model = Counting(CARD)

            def gone(*_: Any, **__: Any) -> Tensor:
                raise RuntimeError("CUDA error: invalid argument")

            def wait(why: str) -> None:
                if cards.capture is not None:
                    patched.setattr(torch, "zeros", gone)
                real(why)

            real = cards.sync
            patched.setattr(cards, "sync", wait)
            model.waits_at = {4}
            with pytest.raises(BrokenContextError, match=r"not permitted.*: set training.cuda_graph to false"):
                runs(CARD, model, 4)


@pytest.mark.slow
def test_the_peak_of_memory_is_that_of_a_step(card: "Cards", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the first epoch, in which cuDNN tries its ways."""
    peaks, now = list[int](), [100]
    if not card.real:  # each time that it is forgotten, it was 10 less
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: now[0])
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: now.__setitem__(0, now[0] - 10))
    cases: list[dict[str, Any]] = [{}, {"cuda_graph": False, "epochs": 2}, {"cuda_graph": False, "epochs": 1}]
    for place, training in enumerate(cases):
        now[0] = 100
        config = TrialConfig.from_dict({**BASE, "layer": "tt", "training": TRAINING | training})
        run = run_trial(config, data_dir=tmp_path / "data", folder=tmp_path / str(place), device=str(card.device))
        *_, result = run
        assert isinstance(result, TrialResult)
        assert result.peak_memory is not None
        peaks.append(result.peak_memory)
    if not card.real:
        assert peaks == [80, 80, 90]


@pytest.mark.slow
def test_the_peak_of_memory_is_not_that_of_who_trained_nothing(card: "Cards", tmp_path: Path) -> None:
    """What an attempt takes that only evaluates says nothing of the next trial."""
    epochs_of(card, tmp_path, {}, layer="tt")
    config = TrialConfig.from_dict({**BASE, "layer": "tt", "training": TRAINING})
    (result,) = run_trial(config, data_dir=tmp_path / "data", folder=tmp_path / "trial", device=str(card.device))
    assert isinstance(result, TrialResult)
    assert (result.valid, result.peak_memory) == (True, None)
