import copy
import errno
import importlib.metadata
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyautoattack
import pytest
import torch
from pyautoattack.square import SquareAttack
from torch import Tensor, nn
from torch.nn import functional

from tests.examples import deep
from tests.lazily import lazily
from ttsv.errors import ConfigError, DataError
from ttsv.metrics.attacks.autoattack import autoattack
from ttsv.metrics.attacks.pgd import pgd
from ttsv.metrics.attacks.record import AttackProgress, AttackRecord, perturbation
from ttsv.metrics.attacks.state import model_fingerprint

datasets = lazily("sklearn.datasets")

Attack = Callable[..., AttackRecord]


class Shortened(pyautoattack.AutoAttack):  # type: ignore[misc] # the package is untyped
    """The authors' object with few iterations, for both sides of a comparison."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for attack in (self.apgd, self.apgd_targeted):
            attack.n_iter = attack.n_iter_orig = 5
            attack.n_restarts = min(2, attack.n_restarts)
        self.fab.n_iter = 3
        self.fab.n_restarts = min(2, self.fab.n_restarts)
        self.square.n_queries = 15


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyautoattack, "AutoAttack", Shortened)


@cache
def digits() -> tuple[Tensor, Tensor]:
    found = datasets.load_digits()
    return torch.tensor(found.images[:, None] / 16, dtype=torch.float32), torch.tensor(found.target)


def some_digits(count: int = 16) -> tuple[Tensor, Tensor]:
    """Of those that no model was trained on."""
    images, labels = digits()
    return images[1600 : 1600 + count], labels[1600 : 1600 + count]


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 10),
    )


def pooled() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


@cache
def trained(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        images, labels = digits()
        for _ in range(100):
            chosen = torch.randint(0, 1500, (128,))
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()


def official(
    model: nn.Module, images: Tensor, labels: Tensor, *, batch_size: int, targets: int | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Adversarial images and their classes by the authors' evaluation, run directly."""
    attack = pyautoattack.AutoAttack(model, **settings)
    if targets is not None:
        attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = targets
    with torch.random.fork_rng():
        torch.manual_seed(settings["seed"])
        found: tuple[Tensor, Tensor] = attack.run_standard_evaluation(images, labels, batch_size=batch_size)
    return found


def assert_equal_to_official(
    record: AttackRecord, images: Tensor, labels: Tensor, found: tuple[Tensor, Tensor]
) -> None:
    adversarial, classes = found
    assert torch.equal(record.robust, classes == labels)
    assert record.robust_accuracy == (classes == labels).double().mean()
    mine = images.clone()
    mine[record.adversarial_indices] = record.adversarial_images
    assert torch.equal(mine, adversarial)
    assert torch.equal(record.adversarial_classes, classes[record.adversarial_indices])


def assert_same(one: AttackRecord, other: AttackRecord) -> None:
    assert torch.equal(one.robust, other.robust)
    assert torch.equal(one.adversarial_indices, other.adversarial_indices)
    assert torch.equal(one.adversarial_images, other.adversarial_images)
    assert torch.equal(one.adversarial_classes, other.adversarial_classes)
    assert one.warnings == other.warnings
    assert one.protocol() == other.protocol()
    for name, counts in one.counts.items():
        assert (counts.attacked, counts.broken) == (other.counts[name].attacked, other.counts[name].broken)


@pytest.mark.slow
@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize(
    ("build", "version", "norm", "eps"),
    [
        deep(linear, "standard", "L2", 0.5),  # as with all iterations, below
        (linear, "plus", "Linf", 0.06),
        (linear, "rand", "L1", 1.5),
        (strided, "standard", "Linf", 0.06),
        (strided, "plus", "L2", 0.5),
        (strided, "standard", "L1", 1.5),
        deep(pooled, "standard", "L2", 0.5),
        deep(pooled, "standard", "Linf", 0.06),
        deep(pooled, "plus", "L1", 1.5),
        (pooled, "rand", "L2", 0.5),
    ],
)
def test_equal_to_the_official_code(build: Callable[[], nn.Module], version: str, norm: str, eps: float) -> None:
    model, (images, labels) = trained(build), some_digits()
    settings: dict[str, Any] = {"version": version, "norm": norm, "eps": eps, "seed": 3, "batch_size": 7}
    record = autoattack(model, images, labels, **settings)
    assert_equal_to_official(record, images, labels, official(model, images, labels, **settings))
    assert 0 < record.robust_accuracy < record.clean_accuracy < 1, "a comparison in which each kind of image occurs"


class FewQueries(pyautoattack.AutoAttack):  # type: ignore[misc] # the package is untyped
    """The authors' object with all iterations, but a tenth of Square's queries, and few targets.

    Its windows shrink by their share; towards each target the schedules are the same.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.square.n_queries = 500
        self.apgd_targeted.n_target_classes = self.fab.n_target_classes = 3


@pytest.mark.slow
def test_equal_to_the_official_code_at_every_stage_of_its_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules of steps and windows, which few iterations never reach, are theirs."""
    monkeypatch.setattr(pyautoattack, "AutoAttack", FewQueries)
    model, (images, labels) = trained(linear), some_digits(8)
    settings: dict[str, Any] = {"norm": "L2", "eps": 0.5, "seed": 1, "batch_size": 16}
    record = autoattack(model, images, labels, **settings)
    assert_equal_to_official(record, images, labels, official(model, images, labels, **settings))


@pytest.mark.deep
@pytest.mark.parametrize("build", [linear, strided, pooled])
def test_equal_to_the_official_code_at_full_strength(build: Callable[[], nn.Module]) -> None:
    model, (images, labels) = trained(build), some_digits(40)
    settings: dict[str, Any] = {"norm": "L2", "eps": 0.5, "seed": 1, "batch_size": 16}
    record = autoattack(model, images, labels, **settings)
    assert_equal_to_official(record, images, labels, official(model, images, labels, **settings))


@pytest.mark.usefixtures("shortened")
def test_fewer_classes_than_targets() -> None:
    images, labels = digits()
    few = labels < 5
    head = nn.Linear(10, 5, bias=False)
    model = nn.Sequential(trained(linear), head)
    with torch.no_grad():
        head.weight.copy_(torch.eye(5, 10))
    images, labels = images[few][:20], labels[few][:20]
    settings: dict[str, Any] = {"norm": "L2", "eps": 0.4, "seed": 0, "batch_size": 20}
    record = autoattack(model, images, labels, **settings)
    assert record.targets == {"apgd-t": 4, "fab-t": 4}
    assert_equal_to_official(record, images, labels, official(model, images, labels, targets=4, **settings))


class Noisy(nn.Module):
    """Randomised in evaluation too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits + torch.randn_like(logits)


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("version", ["standard", "rand"])
def test_a_randomised_network(version: str, tmp_path: Path) -> None:
    model, (images, labels) = Noisy(trained(linear)), some_digits()
    settings: dict[str, Any] = {"version": version, "norm": "L2", "eps": 0.3, "seed": 5, "batch_size": 9}
    record = autoattack(model, images, labels, **settings)
    assert_equal_to_official(record, images, labels, official(model, images, labels, **settings))
    assert any("randomized" in message for message in record.warnings) == (version == "standard")
    assert_same(record, interrupted(model, images, labels, state_path=tmp_path / "state", **settings))


class Killed(Exception):
    pass


def interrupted(*arguments: Any, **settings: Any) -> AttackRecord:
    """The same attack by processes each of which is killed after one batch."""

    def kill(progress: AttackProgress) -> None:
        raise Killed

    for _ in range(100):
        try:
            return autoattack(*arguments, progress=kill, **settings)
        except Killed:
            continue
    raise AssertionError("it gets nowhere")


@pytest.mark.slow
@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize(
    ("version", "norm", "eps"), [("standard", "L2", 0.5), ("plus", "Linf", 0.06), ("standard", "L1", 1.5)]
)
def test_killed_after_each_batch(version: str, norm: str, eps: float, tmp_path: Path) -> None:
    model, (images, labels) = trained(pooled), some_digits()
    settings: dict[str, Any] = {"version": version, "norm": norm, "eps": eps, "batch_size": 7}
    whole = autoattack(model, images, labels, **settings)
    assert_same(whole, interrupted(model, images, labels, state_path=tmp_path / "state", **settings))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.usefixtures("shortened")
def test_a_finished_state_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (images, labels) = trained(linear), some_digits()
    whole = autoattack(model, images, labels, state_path=tmp_path / "state")
    monkeypatch.delattr(nn.Linear, "forward")
    again = autoattack(model, images, labels, state_path=str(tmp_path / "state"))
    assert_same(whole, again)
    assert again.seconds == whole.seconds


@pytest.mark.usefixtures("shortened")
def test_the_state_of_another_attack_is_refused(tmp_path: Path) -> None:
    path, (images, labels) = tmp_path / "state", some_digits()
    arguments: dict[str, Any] = {"model": trained(linear), "images": images, "labels": labels, "batch_size": 16}
    autoattack(**arguments, state_path=path)
    others: list[dict[str, Any]] = [
        {"model": trained(strided)},
        {"images": 1 - images},
        {"labels": labels.flip(0)},
        {"batch_size": 8},
        {"eps": 0.4},
        {"norm": "Linf"},
        {"version": "rand"},
        {"seed": 1},
    ]
    for other in others:
        with pytest.raises(ConfigError, match=f"another {next(iter(other))}") as caught:
            autoattack(**(arguments | other), state_path=path)
        assert caught.value.field == "state_path"
    with pytest.raises(ConfigError, match="another batch_size, 16"):
        autoattack(**(arguments | {"batch_size": None}), state_path=path)
    found = autoattack(**(arguments | {"batch_size": None}), state_path=tmp_path / "default").batch_size
    autoattack(**(arguments | {"batch_size": np.int64(found)}), state_path=tmp_path / "default")


def sloped(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), activation, nn.Linear(16, 10))


@pytest.mark.usefixtures("shortened")
def test_the_state_of_another_network_of_the_same_weights_is_refused(tmp_path: Path) -> None:
    path, (images, labels) = tmp_path / "state", some_digits(4)
    autoattack(sloped(nn.ReLU()), images, labels, state_path=path)
    autoattack(sloped(nn.ReLU()), images, labels, state_path=path)  # goes on with the same
    for other in (nn.LeakyReLU(-3.0), nn.Tanh()):
        with pytest.raises(ConfigError, match="another model"):
            autoattack(sloped(other), images, labels, state_path=path)


def test_the_folder_of_the_state_is_there_before_the_attack(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder that is there") as caught:
        autoattack(trained(linear), *some_digits(4), state_path=tmp_path / "none" / "state")
    assert caught.value.field == "state_path"


class Scaled(nn.Module):
    """Its factor is neither a weight nor shown; the buffer is not saved."""

    def __init__(self, factor: float, shift: float) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("shift", torch.tensor(shift), persistent=False)


def test_fingerprints_of_models() -> None:
    found = [
        Scaled(1.0, 0.0),
        Scaled(2.0, 0.0),
        Scaled(1.0, 1.0),
        Scaled(1.0, 0.0).eval(),
        nn.Sequential(Scaled(1.0, 0.0)),
        nn.Linear(2, 1),
        nn.Linear(2, 1),
        nn.Flatten(1),
        nn.Flatten(2),
    ]
    assert len({model_fingerprint(model) for model in found}) == len(found)
    for model in found:
        assert model_fingerprint(copy.deepcopy(model)) == model_fingerprint(model)


FINGERPRINT = """
import torch
from ttsv.metrics.attacks.state import model_fingerprint
from ttsv.models import create_model
with torch.random.fork_rng():
    torch.manual_seed(0)
    model = create_model("small-cnn", layer="tt", rank=4, num_classes=10, in_channels=1, image_size=8)
found = model_fingerprint(model)
"""
IMPORTED = """
import sys, ttsv.metrics.attacks.autoattack, ttsv.metrics.calibration, ttsv.metrics.corruption
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def elsewhere() -> tuple[set[str], str]:
    """What another process has imported for attacks and corruptions, and the fingerprint that it finds."""
    # Whose strings and sets have other hashes: this process has drawn its own, or was given 0.
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    program = [sys.executable, "-c", f"{IMPORTED}{FINGERPRINT}print(found)"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    imported, found = done.stdout.splitlines()
    return set(imported.split()), found


@pytest.mark.slow
def test_the_fingerprint_of_a_model_is_that_of_every_process(elsewhere: tuple[set[str], str]) -> None:
    here: dict[str, Any] = {}
    exec(FINGERPRINT, here)
    assert elsewhere[1] == here["found"]


@pytest.mark.usefixtures("shortened")
def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    path, (images, labels) = tmp_path / "state", some_digits()
    attack = partial(autoattack, trained(linear), images, labels, state_path=path)
    attack()
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[-1] ^= 1
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1], bytes(altered)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="remove it"):
            attack()


@pytest.mark.usefixtures("shortened")
def test_a_disk_that_gives_no_state_says_nothing_of_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (images, labels) = tmp_path / "state", some_digits()
    attack = partial(autoattack, trained(linear), images, labels, state_path=path)
    attack()

    def read(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(OSError, match="Input/output error"):
        attack()


@pytest.mark.usefixtures("shortened")
def test_counts_and_progress() -> None:
    model, (images, labels) = trained(strided), some_digits()
    seen: list[AttackProgress] = []
    record = autoattack(model, images, labels, eps=0.3, batch_size=5, progress=seen.append)
    assert list(record.counts) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    standing = round(record.clean_accuracy * len(images))
    for name, counts in record.counts.items():
        steps = [step for step in seen if step.attack == name]
        assert counts.attacked == standing, "of what is left, all and nothing else"
        assert [step.batch for step in steps] == list(range(1, math.ceil(standing / 5) + 1))
        assert {step.batches for step in steps} == {len(steps)}
        standing -= counts.broken
        assert steps[-1].robust == standing
    assert standing == record.robust.sum()
    assert len(record.adversarial_indices) == sum(counts.broken for counts in record.counts.values())
    assert all(step.seconds_left > 0 for step in seen[:-1])
    assert seen[-1].seconds_left == 0
    assert record.seconds == seen[-1].seconds == pytest.approx(sum(c.seconds for c in record.counts.values()))


@pytest.mark.usefixtures("shortened")
def test_nothing_is_attacked_where_nothing_is_right() -> None:
    images, _ = some_digits(6)
    wrong = (trained(linear)(images).argmax(1) + 1) % 10
    record = autoattack(trained(linear), images, wrong)
    assert (record.clean_accuracy, record.robust_accuracy, record.largest_perturbation) == (0, 0, 0)
    assert all(counts.attacked == 0 for counts in record.counts.values())
    assert record.adversarial_images.shape == (0, 1, 8, 8)


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("norm", ["L2", "Linf", "L1"])
def test_adversarial_images_are_within_the_ball_and_misclassified(norm: str) -> None:
    eps = {"L2": 0.7, "Linf": 0.1, "L1": 3.0}[norm]
    model, (images, labels) = trained(pooled), some_digits()
    attacks: list[Attack] = [autoattack] if norm == "L1" else [autoattack, pgd]
    for attack in attacks:
        record = attack(model, images, labels, norm=norm, eps=eps)
        assert len(record.adversarial_indices) > 0
        found = model(record.adversarial_images).argmax(1)
        assert torch.equal(found, record.adversarial_classes)
        assert (found != labels[record.adversarial_indices]).all()
        assert 0 <= record.adversarial_images.amin() <= record.adversarial_images.amax() <= 1
        changes = perturbation(record.adversarial_images, images[record.adversarial_indices], norm)
        assert changes.max() == record.largest_perturbation <= eps * (1 + 1e-6)
        clean = model(images).argmax(1) == labels
        assert not (record.robust & ~clean).any()
        assert torch.equal(record.adversarial_indices, (clean & ~record.robust).nonzero()[:, 0])


@torch.no_grad()
def radii(model: nn.Module, images: Tensor, labels: Tensor, norm: str) -> Tensor:
    """Of a linear classifier: exact distances to its decision boundary, in all of space; below 0 where wrong."""
    weight = model[1].weight.double()  # type: ignore[index]
    logits = model(images).double()
    dual = {"L2": 2.0, "Linf": 1.0, "L1": math.inf}[norm]
    distances = []
    for label, row in zip(labels.tolist(), logits, strict=True):
        others = [k for k in range(len(row)) if k != label]
        norms = torch.linalg.vector_norm(weight[label] - weight[others], dual, dim=1)
        distances.append(((row[label] - row[others]) / norms).min())
    return torch.stack(distances)


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("norm", ["L2", "Linf"])
def test_exact_radii_of_a_linear_network(norm: str) -> None:
    model = trained(linear)
    images = 0.5 + 0.05 * (digits()[0][:40] - 0.5)  # far from 0 and 1: no image in the ball is out of the pixels
    labels = model(images).argmax(1)
    exact = radii(model, images, labels, norm)
    eps = float(exact.quantile(0.4))
    clear = (exact / eps - 1).abs() > 0.1  # nearer to the radius so few iterations may not be enough
    assert clear.sum() >= 30
    record = autoattack(model, images, labels, norm=norm, eps=eps)
    assert torch.equal(record.robust[clear], (exact > eps)[clear])
    assert record.robust[exact > eps * (1 + 1e-6)].all()
    quick = pgd(model, images, labels, norm=norm, eps=eps)
    assert quick.robust[exact > eps * (1 + 1e-6)].all()
    assert not quick.robust[exact < eps / 2].any()


@pytest.mark.parametrize("norm", ["L2", "Linf"])
def test_pgd_is_no_weaker_where_the_network_is_sure(norm: str) -> None:
    model = copy.deepcopy(trained(linear))
    images = 0.5 + 0.05 * (digits()[0][:40] - 0.5)
    labels = model(images).argmax(1)
    exact = radii(model, images, labels, norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e4)  # the same classes with the same boundaries
    found = pgd(model, images, labels, norm=norm, eps=float(exact.quantile(0.4)))
    assert not found.robust[exact < exact.quantile(0.4) / 2].any()
    assert (exact < exact.quantile(0.4) / 2).any()


class Constant(nn.Module):
    """Does not look at the image, and hands out its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.arange(10.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.logits.expand(len(images), -1)


@pytest.mark.usefixtures("shortened")
def test_a_constant_network_is_robust_where_it_is_right() -> None:
    images, labels = some_digits()
    model = Constant()
    for attack in (autoattack, pgd):
        record = attack(model, images, labels)
        assert torch.equal(record.robust, labels == 9)
        assert torch.equal(model.logits, torch.arange(10.0)), "attacks write to the logits that they are given"
    assert any("zero gradient" in message for message in autoattack(model, images, labels).warnings)


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("norm", ["L2", "Linf", "L1"])
def test_a_network_of_equal_logits_withstands_where_it_is_right(norm: str) -> None:
    images, labels = some_digits()
    model = Constant()
    with torch.no_grad():
        model.logits.zero_()
    assert torch.equal(autoattack(model, images, labels, norm=norm).robust, labels == 0)


class Dynamic(nn.Module):
    """Adapts itself to each image by a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        with torch.enable_grad():
            at = images.detach().clone().requires_grad_()
            torch.autograd.grad(self.model(at).sum(), at)
        logits: Tensor = self.model(images)
        return logits


@pytest.mark.usefixtures("shortened")
def test_warnings_are_those_of_the_network_itself() -> None:
    images, labels = some_digits(4)
    trace = sys.gettrace()
    dynamic = autoattack(Dynamic(trained(linear)), images, labels)
    assert any("dynamic defense" in message for message in dynamic.warnings)
    probabilities = autoattack(nn.Sequential(trained(linear), nn.Softmax(1)), images, labels)
    assert any("probability distribution" in message for message in probabilities.warnings)
    # The authors' count of such calls is never set back, and would make every later network a dynamic one.
    assert not any("dynamic" in message for message in probabilities.warnings)
    assert autoattack(trained(linear), images, labels).warnings == ()
    assert sys.gettrace() is trace


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("attack", [autoattack, pgd])
def test_everything_is_left_as_it_was(attack: Attack) -> None:
    model = copy.deepcopy(trained(pooled)).train()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    images, labels = some_digits()
    given = images.clone()
    record = attack(model, images, labels, seed=1)
    assert record.clean_accuracy == (copy.deepcopy(model).eval()(images).argmax(1) == labels).double().mean()
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * (len(list(model.parameters())) - 1)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(images, given)
    assert_same(record, attack(model, images, labels, seed=1))


@pytest.mark.usefixtures("shortened")
class WritesIntoItsImages(nn.Module):
    """Another network behind a normalisation in place."""

    def __init__(self, network: nn.Module, *, writes: bool) -> None:
        super().__init__()
        self.network, self.writes = network, writes

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.sub_(0.1).mul_(1.1) if self.writes else (images - 0.1) * 1.1)
        return logits


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("attack", [pgd, autoattack])
def test_a_network_that_writes_into_its_images_is_attacked_as_any_other(attack: Attack) -> None:
    images, labels = some_digits()
    given = images.clone()
    networks = (WritesIntoItsImages(trained(linear), writes=writes) for writes in (True, False))
    found, expected = (attack(network, given, labels, eps=0.35) for network in networks)
    assert torch.equal(given, images)
    assert 0 < found.robust_accuracy < found.clean_accuracy
    assert_same(found, expected)


@pytest.mark.usefixtures("shortened")
def test_types_of_images_and_weights() -> None:
    images, labels = some_digits(8)
    levels = (images * 255).round().to(torch.uint8)
    model = trained(linear)
    expected = autoattack(model, levels / 255, labels)
    assert_same(expected, autoattack(model, levels, labels.int()))
    double = autoattack(copy.deepcopy(model).double(), (levels / 255).double(), labels)
    assert torch.equal(double.robust, expected.robust)


@pytest.mark.usefixtures("shortened")
def test_batch_size_is_fixed_and_recorded() -> None:
    """Whatever the images' size and count, and the memory that is free."""
    images, labels = digits()
    model = Constant()
    assert autoattack(model, images[:200], labels[:200], version="rand").batch_size == 256
    assert pgd(model, images[:5], labels[:5]).batch_size == 256
    large = functional.interpolate(images[:2], 256)
    assert pgd(model, large, labels[:2], steps=1).batch_size == 256
    assert pgd(model, images[:200], labels[:200], batch_size=150).batch_size == 150


@pytest.mark.usefixtures("shortened")
def test_a_neighbour_that_takes_memory_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that finds no room for a batch of 100 images is not attacked in smaller ones, but is told of.

    The same seed gives other numbers in other batches.
    """
    images, labels = (part[:120] for part in digits())
    model = trained(linear)
    whole = autoattack(model, images, labels, eps=0.3)
    assert_same(whole, autoattack(model, images, labels, eps=0.3, batch_size=256))
    halves = autoattack(model, images, labels, eps=0.3, batch_size=60)
    assert not torch.equal(whole.robust, halves.robust) or not all(
        map(torch.equal, whole.adversarial_images, halves.adversarial_images)
    )

    def crowded(images: Tensor) -> Tensor:
        if len(images) > 50:
            raise torch.OutOfMemoryError("no room beside a neighbour")
        logits: Tensor = linear_forward(images)
        return logits

    crowd = copy.deepcopy(model)
    linear_forward = crowd.forward
    monkeypatch.setattr(crowd, "forward", crowded)
    with pytest.raises(torch.OutOfMemoryError):
        autoattack(crowd, images, labels, eps=0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("shortened")
def test_sizes_that_square_attack_cannot_tile() -> None:
    labels = torch.tensor([9])
    for size in (2, 4, 5, 8, 9, 12, 13, 14, 15, 19, 24, 28, 32):
        images = torch.full((1, 3, size, size), 0.5)
        attack = SquareAttack(Constant(), norm="L2", n_queries=1, eps=0.5, seed=0, resc_schedule=False)
        attack.predict = lambda x: torch.arange(10.0).repeat(len(x), 1)
        try:
            attack.perturb(images, labels)
            fits = True
        except (RuntimeError, ZeroDivisionError):
            fits = False
        if fits:
            autoattack(Constant(), images, labels)
        else:
            with pytest.raises(ConfigError) as caught:
                autoattack(Constant(), images, labels)
            assert caught.value.field == "images"
        assert fits == (size not in (2, 4, 12, 14, 19, 24))


class NotFinite(nn.Module):
    """Nowhere finite."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = trained(linear)(images)
        return logits.index_fill(1, torch.tensor(3), self.value)


class BreaksOffData(nn.Module):
    """Finite on the images, not beside them."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = trained(linear)(images)
        off = (images.flatten(1) - images.flatten(1).mul(16).round() / 16).abs().amax(1, keepdim=True) > 1e-6
        return torch.where(off, torch.nan, logits)


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("attack", [autoattack, pgd])
@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"eps": 0.0}, "eps"),
        ({"eps": -1.0}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"eps": math.inf}, "eps"),
        ({"norm": "l2"}, "norm"),
        ({"eps": True}, "eps"),
        ({"eps": "0.5"}, "eps"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"images": torch.full((4, 1, 8, 8), 1.01)}, "images"),
        ({"images": torch.full((4, 1, 8, 8), -0.01)}, "images"),
        ({"images": torch.full((4, 1, 8, 8), math.nan)}, "images"),
        ({"images": torch.zeros(4, 64)}, "images"),
        ({"images": torch.zeros(0, 1, 8, 8), "labels": torch.zeros(0, dtype=torch.long)}, "images"),
        ({"labels": torch.tensor([0, 1, 2])}, "labels"),
        ({"labels": torch.tensor([0, 1, 2, 10])}, "labels"),
        ({"labels": torch.tensor([0, 1, 2, -1])}, "labels"),
        ({"labels": torch.tensor([0.0, 1, 2, 3])}, "labels"),
        ({"model": NotFinite(math.nan)}, "model"),
        ({"model": NotFinite(math.inf)}, "model"),
        ({"model": BreaksOffData()}, "model"),
        ({"model": nn.Flatten(0)}, "model"),
    ],
)
def test_refusals_name_the_argument(attack: Attack, changed: dict[str, Any], field: str) -> None:
    images, _ = some_digits(4)
    arguments = {"model": trained(linear), "images": images, "labels": trained(linear)(images).argmax(1)} | changed
    with pytest.raises(ConfigError) as caught:
        attack(**arguments)
    assert caught.value.field == field


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize(("version", "classes"), [("standard", 3), ("plus", 2), ("rand", 2), ("custom", 10)])
def test_versions_that_cannot_be_run(version: str, classes: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    with pytest.raises(ConfigError) as caught:
        autoattack(model, *some_digits(1), version=version) if classes == 10 else autoattack(
            model, some_digits(1)[0], torch.tensor([0]), version=version
        )
    assert caught.value.field == "version"


def test_pgd_refuses() -> None:
    one_logit = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    with pytest.raises(ConfigError, match="two classes at least"):
        pgd(one_logit, some_digits(1)[0], torch.tensor([0]))
    for changed in ({"norm": "L1"}, {"steps": 0}):
        with pytest.raises(ConfigError) as caught:
            pgd(trained(linear), *some_digits(1), **changed)
        assert caught.value.field == next(iter(changed))


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **_: iter(()))
    record = pgd(trained(linear), *some_digits(1), steps=1)
    assert (record.package, record.package_version) == ("ttsv", "none")


def test_pgd_is_named_so() -> None:
    record = pgd(trained(linear), *some_digits(4))
    assert record.attack == record.protocol()["attack"] == "PGD"
    assert "auto" not in str(record.protocol()).lower()


@pytest.mark.slow
def test_attack_and_corruption_packages_are_imported_where_they_are_used(elsewhere: tuple[set[str], str]) -> None:
    imported, _ = elsewhere
    assert "ttsv.metrics.attacks.autoattack" in imported
    assert not imported & {"pyautoattack", "imagecorruptions", "cv2", "skimage", "numba"}
