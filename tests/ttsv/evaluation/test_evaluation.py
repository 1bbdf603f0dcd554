"""One path for trials and `ttsv evaluate`: its numbers are those of the metrics called one by one."""

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyautoattack
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.examples import deep
from ttsv.certification.certificates import certificates, lipschitz_bound
from ttsv.config.evaluation import EvaluationConfig
from ttsv.config.trial import TrialConfig
from ttsv.data import load_dataset
from ttsv.data.catalog import DATASETS
from ttsv.data.corruptions import KINDS
from ttsv.data.generated_corruptions import GeneratedCorruptions
from ttsv.data.loading import Dataset, Split
from ttsv.errors import ConfigError, DataError, DivergedError, OutOfMemoryError
from ttsv.evaluation import EvaluationOptions, Measured, Subject, evaluate, measure
from ttsv.evaluation.artifacts import write_evaluation
from ttsv.evaluation.baseline import Baseline, baseline_path
from ttsv.evaluation.saved import load_saved
from ttsv.evaluation.stages import check_evaluation
from ttsv.metrics import cost
from ttsv.metrics.accuracy import predict, run_to_end
from ttsv.metrics.attacks.autoattack import autoattack
from ttsv.metrics.attacks.pgd import pgd
from ttsv.metrics.corruption import CorruptionRecord, corruption_accuracy
from ttsv.metrics.lipschitz import empirical_lipschitz
from ttsv.models import create_model
from ttsv.models.build import Normalize
from ttsv.results import StageProgress, TrialResult, protocol_fingerprint
from ttsv.training.checkpoint import load_network, save_model
from ttsv.trial import run_trial

HALF: dict[str, Any] = {"mean": [0.5], "std": [0.5]}
EVERYTHING: dict[str, Any] = {
    "attack": "both",
    "attack_images": 24,
    "attack_eps": 0.25,
    "batch_size": 8,
    "corruptions": "generated",
    "corruption_images": 2,
    "certified": True,
    "radii": [0.01, 0.5],
    "lipschitz": "both",
    "lipschitz_images": 12,
    "seed": 5,
}


class Shortened(pyautoattack.AutoAttack):  # type: ignore[misc] # the package is untyped
    """The authors' object with few iterations."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for attack in (self.apgd, self.apgd_targeted):
            attack.n_iter = attack.n_iter_orig = 5
            attack.n_restarts = 1
        self.fab.n_iter = 3
        self.square.n_queries = 15


@pytest.fixture(scope="module", autouse=True)
def shortened() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyautoattack, "AutoAttack", Shortened)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> tuple[list[Any], TrialResult]:
    """A short trial, everything measured: what it yielded, and its result."""
    config = TrialConfig.from_dict(
        {
            "dataset": "digits",
            "model": "small-cnn",
            "layer": "tt",
            "rank": 8,
            "training": {"epochs": 3},
            "evaluation": EVERYTHING,
        }
    )
    *steps, result = run_trial(config, data_dir=folder / "data", folder=folder / "trial", device="cpu")
    assert isinstance(result, TrialResult)
    return steps, result


@pytest.fixture(scope="module")
def digits(folder: Path) -> Dataset:
    return load_dataset("digits", folder / "data")


def small(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = create_model("small-cnn", num_classes=10, in_channels=1, image_size=8, **options).eval()
    return model


def run(model: nn.Module, data: Dataset, folder: Path, **fields: Any) -> Measured:
    return run_to_end(started(model, data, folder, **fields))


def started(
    model: nn.Module, data: Dataset, folder: Path, images: int | None = None, **fields: Any
) -> Generator[StageProgress, None, Measured]:
    options = EvaluationOptions(config=EvaluationConfig(**fields), folder=folder, images=images)
    return measure(Subject(model=model, data=data, **HALF), options)


# --- trials ---


@pytest.mark.slow
def test_columns_are_the_metrics_called_one_by_one(
    evaluated: tuple[list[Any], TrialResult], digits: Dataset, folder: Path
) -> None:
    _, result = evaluated
    model = load_saved(result.artifacts["model"], device=torch.device("cpu"))
    images, labels = digits.test
    logits = predict(model, images)
    probabilities = logits.double().softmax(1)
    one_hot = torch.nn.functional.one_hot(labels, 10)
    assert result.brier == pytest.approx(float((probabilities - one_hot).square().sum(1).mean()), abs=1e-12)
    order = logits.argsort(1, descending=True)[:, :5].tolist()
    hits = [label in row for label, row in zip(labels.tolist(), order, strict=True)]
    assert result.top5_accuracy == pytest.approx(np.mean(hits), abs=1e-12)
    assert result.temperature is not None
    scaled = (logits.double() / result.temperature).log_softmax(1)
    assert result.scaled_loss == pytest.approx(-float(scaled.gather(1, labels[:, None]).mean()), abs=1e-12)

    attacked = images[:24], labels[:24]
    threat: dict[str, Any] = {"eps": 0.25, "seed": 5, "batch_size": 8}
    strongest = autoattack(model, *attacked, **threat)
    assert result.robust_accuracy == strongest.robust_accuracy
    assert result.pgd_accuracy == pgd(model, *attacked, **threat).robust_accuracy
    assert result.robust_accuracy <= result.pgd_accuracy < 1
    assert result.attack_seconds is not None
    assert result.attack_seconds > 0

    bound = lipschitz_bound(model, 8)
    assert result.lipschitz_bound == float(bound)
    radii = certificates(model, images, labels, bound=bound).radii
    columns = [result.certified_36, result.certified_72, result.certified_108, result.certified_255]
    for value, radius in zip(columns, (36 / 255, 72 / 255, 108 / 255, 1), strict=True):
        assert value == float((radii > radius).double().mean())

    searched = images[:12], labels[:12]
    fgsm = empirical_lipschitz(model, *searched, space="normalised", seed=5)
    ascent = empirical_lipschitz(model, *searched, method="ascent", seed=5)
    assert (result.lipschitz_fgsm, result.lipschitz_ascent) == (fgsm.maximum, ascent.maximum)
    (made,) = (path for path in (folder / "data" / "datasets").glob("digits-corrupted-*") if path.is_dir())
    source = GeneratedCorruptions(images[:2], labels[:2], name="digits", folder=made.parent, classes=10, seed=5)
    assert source.open().folder == made
    assert result.corruption_accuracy == corruption_accuracy(model, source).mean
    assert result.mce is None
    assert result.merged_latency_seconds is not None
    assert result.merged_latency_seconds > 0
    assert result.valid
    assert result.violations == []


@pytest.mark.slow
def test_the_papers_assumption_is_made_of_soc_alone(digits: Dataset, tmp_path: Path) -> None:
    digits = replace(digits, test=Split(digits.test.images[:24], digits.test.labels[:24]))
    images, labels = digits.test
    radii = (36 / 255, 72 / 255, 108 / 255)
    names = [f"assumed_certified_{round(255 * radius)}" for radius in radii]
    for layer in ("soc", "soc-tt"):
        model = small(layer=layer, rank=None if layer == "soc" else 4)
        with torch.no_grad():
            model.get_parameter("head.weight").mul_(3000)
        measured = run(model, digits, tmp_path, certified=True)
        logits = predict(model, images).double()
        own = logits.gather(1, labels[:, None])
        gap = (own - logits.scatter(1, labels[:, None], -math.inf).amax(1, keepdim=True))[:, 0]
        shares = [float((gap / (math.sqrt(2) * 2) > radius).double().mean()) for radius in radii]  # 1 / std is 2
        assert shares[0] > 0
        assert [measured.columns[name] for name in names] == shares
        assert list(measured.results["certified"]["assumed_1_lipschitz"].values())[:3] == shares
        # Where a search finds that the premise is false, the record says so.
        few = replace(digits, test=Split(images[:5], labels[:5]))
        searched = run(model, few, tmp_path, certified=True, lipschitz="fgsm")
        (steepest,) = (one["maximum"] for one in searched.results["lipschitz"] if one["space"] == "normalised")
        assert searched.results["certified"]["assumption_refuted_by"] == steepest > 1
        assert measured.results["certified"]["assumption_refuted_by"] is None
    dense = run(small(), digits, tmp_path, certified=True)
    assert [dense.columns[name] for name in names] == [None] * 3
    assert "assumed_1_lipschitz" not in dense.results["certified"]


@pytest.mark.slow
def test_the_whole_record(evaluated: tuple[list[Any], TrialResult]) -> None:
    steps, result = evaluated
    record = result.evaluation
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(record["seconds"]) == {"accuracy", "pgd", "autoattack", "certified", "lipschitz", "corruptions"}
    attack = record["attacks"]["autoattack"]
    assert list(attack["counts"]) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    correct = round(attack["clean_accuracy"] * 24)
    assert sum(counts["broken"] for counts in attack["counts"].values()) == len(attack["adversarial_indices"])
    assert correct - len(attack["adversarial_indices"]) == round(24 * attack["robust_accuracy"])
    assert list(record["certified"]["accuracy"]) == ["0.01", "0.5"]
    assert record["certified"]["factors"][0]["name"]
    assert {(one["space"], one["method"]) for one in record["lipschitz"]} == {
        (space, method) for space in ("pixels", "normalised") for method in ("fgsm", "ascent")
    }
    assert all(sum(one["histogram"]["counts"]) == 12 for one in record["lipschitz"])
    bounds = {one["space"]: one["bound"] for one in record["lipschitz"]}
    assert bounds == {"pixels": result.lipschitz_bound, "normalised": pytest.approx(record["certified"]["bound"] / 2)}
    assert all(one["maximum"] <= one["bound"] for one in record["lipschitz"])
    assert set(record["corruptions"]["table"]) == set(KINDS)
    stages = [step.stage for step in steps if isinstance(step, StageProgress)]
    assert list(dict.fromkeys(stages)) == [
        "pgd",
        "autoattack",
        *attack["counts"],
        "certified",
        "lipschitz",
        "corruptions",
        "making corruptions",
    ]


@pytest.mark.slow
def test_the_protocol_says_what_decides_and_nothing_else(evaluated: tuple[list[Any], TrialResult]) -> None:
    _, result = evaluated
    protocol = result.protocol
    assert protocol["images"] == {
        "accuracy": 359,
        "calibration": 359,
        "temperature": 143,
        "pgd": 24,
        "autoattack": 24,
        "certified": 359,
        "lipschitz": 12,
        "corruptions": 2,
    }
    threat = protocol["attacks"]["autoattack"]
    assert {name: threat[name] for name in ("attack", "version", "package", "norm", "eps", "space", "seed")} == {
        "attack": "AutoAttack",
        "version": "standard",
        "package": "pyautoattack",
        "norm": "L2",
        "eps": 0.25,
        "space": "pixels in [0, 1]",
        "seed": 5,
    }
    assert protocol["attacks"]["pgd"]["attack"] == "PGD"
    assert protocol["corruptions"]["corruptions"] == "generated"
    assert protocol["corruptions"]["enlarged"].startswith("each pixel as 4 x 4")
    assert protocol["corruptions"]["packages"]["imagecorruptions-imaug"]
    text = json.dumps(protocol)
    for name in ("git_revision", "device", "torch", "threads", "radii"):
        assert f'"{name}"' not in text


def test_an_attack_without_room_is_told_of_and_not_made_smaller(digits: Dataset, tmp_path: Path) -> None:
    class Crowded(nn.Flatten):
        def forward(self, images: Tensor) -> Tensor:
            if len(images) == 4:  # of the attack, and no other stage
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(images)

    model = nn.Sequential(Crowded(), nn.Linear(64, 10))
    with pytest.raises(OutOfMemoryError, match=r"attack 256 images at once.*evaluation\.batch_size, another protocol"):
        run(model, digits, tmp_path, attack="pgd", attack_images=4)


def test_the_fingerprint_follows_the_threat_and_the_batches(digits: Dataset, tmp_path: Path) -> None:
    def fingerprint(**fields: Any) -> str:
        options = {"attack": "pgd", "attack_images": 4} | fields
        return protocol_fingerprint(run(small(), digits, tmp_path, **options).protocol)

    plain = fingerprint()
    assert fingerprint(batch_size=None) == fingerprint(batch_size=256) == plain
    others: list[dict[str, Any]] = [
        {"batch_size": 3},
        {"attack_eps": 0.1},
        {"attack_norm": "Linf"},
        {"attack_images": 5},
        {"seed": 1},
        {"certified": True},
    ]
    assert len({plain, *(fingerprint(**other) for other in others)}) == 1 + len(others)


@pytest.mark.slow
def test_artifacts(evaluated: tuple[list[Any], TrialResult], digits: Dataset) -> None:
    _, result = evaluated
    assert set(result.artifacts) == {
        "model",
        "evaluation",
        "confusion",
        "predictions",
        "reliability-plot",
        "lipschitz-plot",
        "corruption-plot",
        "spectra",
        "spectra-plot",
    }
    for kind, path in result.artifacts.items():
        assert path.is_file()
        assert kind.endswith("-plot") == (path.suffix == ".svg")
        assert path.suffix != ".svg" or "<svg" in path.read_text()
    kept = load_file(result.artifacts["predictions"])
    labels = digits.test.labels
    assert torch.equal(kept["labels"], labels)
    correct = kept["predictions"] == labels
    assert float(correct.double().mean()) == result.accuracy
    assert torch.equal(kept["margins"] > 0, correct)
    robust, by = kept["robust_autoattack"], kept["broken_by_autoattack"]
    assert len(robust) == len(by) == 24
    assert float(robust.double().mean()) == result.robust_accuracy
    assert torch.equal(by >= 0, correct[:24] & ~robust)
    counts = result.evaluation["attacks"]["autoattack"]["counts"]
    assert [int((by == number).sum()) for number in range(4)] == [one["broken"] for one in counts.values()]
    assert kept["lipschitz_ascent_pixels"].max() == result.lipschitz_ascent
    assert len(kept["certified_radii"]) == 359
    spectra = json.loads(result.artifacts["spectra"].read_text())["layers"]
    records = {layer["name"]: layer for layer in result.layers}
    for layer in spectra:
        record = records[layer["name"]]
        assert layer["index"][0] == 0
        assert layer["index"][-1] == layer["count"] - 1
        assert len(layer["index"]) == len(layer["values"]) == min(257, layer["count"])
        assert layer["values"] == sorted(layer["values"], reverse=True)
        assert layer["values"][0] == pytest.approx(record["largest"], rel=1e-5)
        assert layer["values"][-1] == pytest.approx(record["smallest"], rel=1e-4, abs=1e-6)
    matrix = np.array(json.loads(result.artifacts["confusion"].read_text())["matrix"])
    brute = np.zeros((10, 10), dtype=int)
    for label, prediction in zip(labels.tolist(), kept["predictions"].tolist(), strict=True):
        brute[label, prediction] += 1
    assert (matrix == brute).all()
    written = json.loads(result.artifacts["evaluation"].read_text())
    assert written["results"] == result.evaluation
    assert written["protocol"] == result.protocol


def test_a_plain_trial_measures_nothing_that_takes_long(digits: Dataset, tmp_path: Path) -> None:
    measured = run(small(), digits, tmp_path)
    unasked = ("robust", "pgd", "attack", "corruption", "mce", "lipschitz", "certified", "assumed")
    for name, value in measured.columns.items():
        assert (value is None) == name.startswith(unasked), name
    assert set(measured.results) == {
        "images",
        "accuracy",
        "top5_accuracy",
        "loss",
        "calibration",
        "checks",
        "seconds",
    }
    assert list(started(small(), digits, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [deep(torch.float64), torch.float16], ids=str)
def test_every_metric_takes_networks_of_other_precisions(digits: Dataset, tmp_path: Path, dtype: torch.dtype) -> None:
    few = replace(digits, test=Split(*(part[:4] for part in digits.test)))
    fields: dict[str, Any] = {"attack": "pgd", "certified": True, "lipschitz": "both", "corruptions": "generated"}
    measured = run(small().to(dtype), few, tmp_path, **fields)
    single = run(small(), few, tmp_path, **fields)
    assert measured.violations == []
    assert measured.columns["loss"] == pytest.approx(single.columns["loss"], rel=1e-2)
    assert measured.columns["lipschitz_bound"] == pytest.approx(single.columns["lipschitz_bound"], rel=1e-2)
    assert measured.protocol["precision"] == str(dtype).removeprefix("torch.")
    assert single.protocol["precision"] == "float32"


# --- published corruptions and the baseline ---


@pytest.fixture(scope="module")
def cifar() -> Dataset:
    """A handful of noise under CIFAR-10's name, which it takes gigabytes to have."""
    generator = torch.Generator().manual_seed(1)
    part = Split(
        torch.randint(256, (8, 3, 32, 32), generator=generator, dtype=torch.uint8),
        torch.randint(10, (8,), generator=generator),
    )
    info = DATASETS["cifar10"]
    return Dataset(info=info, train=part, validation=part, test=part, sha256="0" * 64, split={})


def write_corruptions(folder: Path, data: Dataset, count: int = 4) -> Path:
    """Noise in the publisher's layout, under the labels of the first test images."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.save(folder / "labels.npy", np.tile(data.test.labels[:count].numpy().astype(np.uint8), 5))
    for kind in KINDS:
        np.save(folder / f"{kind}.npy", rng.integers(0, 256, (5 * count, 32, 32, 3), dtype=np.uint8))
    return folder


def colour(classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(800, classes)).eval()


def test_published_corruptions(cifar: Dataset, tmp_path: Path) -> None:
    folder = write_corruptions(tmp_path / "CIFAR-10-C", cifar)
    measured = run(colour(), cifar, tmp_path, corruptions="published")
    direct = corruption_accuracy(colour(), folder)
    assert measured.columns["corruption_accuracy"] == direct.mean
    protocol = measured.protocol["corruptions"]
    assert protocol["corruptions"] == "published"
    assert measured.protocol["images"]["corruptions"] == 4
    # The SHA-256 of the files is in the fingerprint: other files are another protocol.
    np.save(folder / "fog.npy", np.load(folder / "fog.npy") // 2)
    for record in tmp_path.glob("CIFAR-10-C.sha256.json"):
        record.unlink()
    other = run(colour(), cifar, tmp_path, corruptions="published").protocol["corruptions"]
    assert other["sha256"] != protocol["sha256"]
    other_set = replace(cifar, test=Split(cifar.test.images, cifar.test.labels.flip(0)))
    with pytest.raises(DataError, match=r"labels\.npy has the label \d for image \d, whose label in the test set is"):
        run(colour(), other_set, tmp_path, corruptions="published")
    limited = run_to_end(started(colour(), cifar, tmp_path, 3, corruptions="published", corruption_images=4))
    assert limited.protocol["images"] | {"accuracy": 3, "corruptions": 3} == limited.protocol["images"]
    fewer = run(colour(), cifar, tmp_path, corruptions="published", corruption_images=2)
    assert fewer.protocol["images"]["corruptions"] == 2
    first = {kind: np.load(folder / f"{kind}.npy")[:2] for kind in KINDS}
    labels = torch.from_numpy(np.load(folder / "labels.npy")[:2].astype(np.int64))
    for kind, images in first.items():
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        expected = float((colour()(pixels).argmax(1) == labels).double().mean())
        assert fewer.results["corruptions"]["table"][kind][0] == expected


def test_mean_corruption_error_is_relative_to_the_stored_baseline(cifar: Dataset, tmp_path: Path) -> None:
    write_corruptions(tmp_path / "CIFAR-10-C", cifar, count=6)
    record = corruption_accuracy(colour(), tmp_path / "CIFAR-10-C")
    halved = {kind: [1 - (1 - value) / 2 for value in row] for kind, row in record.table.items()}
    half = CorruptionRecord(mean=0.0, table=halved, protocol=record.protocol, seconds=0.0)
    assert Baseline.find(tmp_path, "cifar10") is None
    before = run(colour(), cifar, tmp_path, corruptions="published")
    Baseline.store(tmp_path, "cifar10", half, "a better network")
    measured = run(colour(), cifar, tmp_path, corruptions="published")
    assert measured.columns["mce"] == pytest.approx(2, rel=1e-12)
    assert protocol_fingerprint(measured.protocol) == protocol_fingerprint(before.protocol), "of mCE alone"
    stored = next(tmp_path.glob("*baseline.json")).read_bytes()
    assert measured.results["corruptions"]["baseline_sha256"] == hashlib.sha256(stored).hexdigest()
    fewer = run(colour(), cifar, tmp_path, corruptions="published", corruption_images=2)
    assert fewer.columns["mce"] is None
    assert "must be measured on the same images" in fewer.results["corruptions"]["why_no_mce"]
    next(tmp_path.glob("*baseline.json")).write_text("{")
    with pytest.raises(DataError, match="cut or altered"):
        run(colour(), cifar, tmp_path, corruptions="published")


# --- what is refused, before a network is trained where it can be known ---


def test_missing_corruption_files_are_named_before_training(cifar: Dataset, tmp_path: Path) -> None:
    config = EvaluationConfig(corruptions="published")
    with pytest.raises(DataError, match=r"CIFAR-10-C/labels\.npy is missing: unpack"):
        check_evaluation(config, cifar, tmp_path)
    folder = write_corruptions(tmp_path / "CIFAR-10-C", cifar)
    check_evaluation(config, cifar, tmp_path)
    (folder / "snow.npy").unlink()
    with pytest.raises(DataError, match=r"snow\.npy is missing"):
        check_evaluation(config, cifar, tmp_path)


@pytest.mark.parametrize("corruptions", ["published", "generated"])
def test_a_damaged_baseline_is_said_before_training(corruptions: str, cifar: Dataset, tmp_path: Path) -> None:
    write_corruptions(tmp_path / "CIFAR-10-C", cifar)
    baseline_path(tmp_path, "cifar10").write_text("{")
    with pytest.raises(DataError, match=r"cut or altered .*: remove it, and store the baseline again"):
        check_evaluation(EvaluationConfig(corruptions=corruptions), cifar, tmp_path)
    baseline_path(tmp_path, "cifar10").unlink()
    baseline_path(tmp_path, "cifar10").mkdir()  # which nobody can read, as a file without permission
    with pytest.raises(DataError, match=r"cannot be read: .*; let who runs trials read it"):
        check_evaluation(EvaluationConfig(corruptions=corruptions), cifar, tmp_path)
    check_evaluation(EvaluationConfig(), cifar, tmp_path)  # which has no corruption error


def test_a_size_that_square_attack_cannot_tile_is_refused_before_training(cifar: Dataset, tmp_path: Path) -> None:
    odd = replace(cifar, test=Split(cifar.test.images[..., :13, :14], cifar.test.labels))
    with pytest.raises(ConfigError, match="Square Attack cannot start"):
        check_evaluation(EvaluationConfig(attack="autoattack"), odd, tmp_path)
    check_evaluation(EvaluationConfig(attack="autoattack", attack_norm="Linf"), odd, tmp_path)


@pytest.mark.parametrize("shift", [0.1, -0.1, math.nan])
def test_images_that_are_not_pixels_never_reach_a_network(digits: Dataset, tmp_path: Path, shift: float) -> None:
    images = digits.test.images[:5].clone()
    images[3, 0, 2, 2] = (1 if shift > 0 else 0) + shift
    wrong = replace(digits, test=Split(images, digits.test.labels[:5]))
    with pytest.raises(DataError, match=r"every pixel in \[0, 1\]"):
        run(small(), wrong, tmp_path)


def test_validation_images_are_pixels_too(digits: Dataset, tmp_path: Path) -> None:
    images = digits.validation.images[:5].float() / 255
    images[3, 0, 2, 2] = 1.5
    wrong = replace(digits, validation=Split(images, digits.validation.labels[:5]))
    with pytest.raises(DataError, match=r"every pixel in \[0, 1\]"):
        run(small(), wrong, tmp_path)


def test_a_constant_network_is_written_with_a_median_radius_of_none(digits: Dataset, tmp_path: Path) -> None:
    model = nn.Sequential(Normalize((0.5,), (0.5,)), nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        model[2].get_parameter("weight").zero_()
        model[2].get_parameter("bias").copy_(torch.arange(10.0))
    chosen = digits.test.labels == 9
    nines = replace(digits, test=Split(digits.test.images[chosen], digits.test.labels[chosen]))
    measured = run(model, nines, tmp_path, certified=True, lipschitz="both")
    assert measured.columns["lipschitz_bound"] == measured.columns["lipschitz_ascent"] == 0
    assert measured.columns["certified_255"] == 1
    assert measured.results["certified"]["median_radius"] is None
    files = write_evaluation(tmp_path, measured, measured.results)
    assert json.loads(files["evaluation"].read_text())["certified"]["median_radius"] is None
    assert load_file(files["predictions"])["certified_radii"].isinf().all()


def test_images_of_every_data_set_are_pixels(digits: Dataset, folder: Path) -> None:
    for name in ("digits", "synthetic:3x16x16:4:80", "synthetic:1x16:4:80"):
        data = load_dataset(name, folder / "data")
        for part in (data.train, data.validation, data.test):
            assert part.images.dtype == torch.uint8 or (part.images.min() >= 0 and part.images.max() <= 1)


def test_other_classes_and_logits_that_are_not_finite(digits: Dataset, tmp_path: Path) -> None:
    torch.manual_seed(0)
    seven = create_model("small-cnn", num_classes=7, in_channels=1, image_size=8)
    with pytest.raises(ConfigError, match="must give 10 classes, as digits has"):
        run(seven, digits, tmp_path)
    broken = small()
    with torch.no_grad():
        broken.get_parameter("head.bias")[3] = math.inf
    with pytest.raises(DivergedError, match="logits are not finite"):
        run(broken, digits, tmp_path)


class Swish(nn.Module):
    """An activation without a rule."""

    def forward(self, images: Tensor) -> Tensor:
        return images * images.sigmoid()


def test_a_network_without_a_bound_gets_no_certificate_and_the_record_says_why(digits: Dataset, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), Swish(), nn.Flatten(), nn.Linear(144, 10)).eval()
    measured = run(model, digits, tmp_path, certified=True)
    assert measured.columns["lipschitz_bound"] is None
    assert measured.columns["certified_36"] is None
    assert measured.results["certified"]["bound"] is None
    assert measured.results["certified"]["why"]
    # Its other numbers may be compared with those of networks that have one.
    assert measured.protocol == run(small(), digits, tmp_path, certified=True).protocol


# --- saved networks ---


Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A network saved as trials do."""

    def save(**changes: Any) -> Path:
        arguments: dict[str, Any] = {"name": "small-cnn", "num_classes": 10, "in_channels": 1, "image_size": 8, **HALF}
        torch.manual_seed(0)
        model = create_model(**arguments | changes)
        return save_model(tmp_path, model, arguments | changes)

    return save


@pytest.mark.slow
def test_a_saved_network_goes_the_same_path(evaluated: tuple[list[Any], TrialResult], folder: Path) -> None:
    _, result = evaluated
    config = EvaluationConfig(**EVERYTHING)
    found = run_to_end(evaluate(result.artifacts["model"], "digits", folder / "data", config))
    assert json.dumps(found.record, allow_nan=False)
    for name, value in found.measured.columns.items():
        assert name == "attack_seconds" or value == getattr(result, name), name
    assert found.record["violations"] == []
    assert found.record["protocol"] == result.protocol
    assert found.record["protocol_fingerprint"] == protocol_fingerprint(result.protocol)


@pytest.mark.slow
def test_a_saved_network_that_test_images_had_a_say_in_has_another_protocol(
    evaluated: tuple[list[Any], TrialResult], folder: Path, tmp_path: Path, saved: Saved
) -> None:
    path = evaluated[1].artifacts["model"]
    told = json.loads(path.with_name("model.json").read_bytes())
    chosen = {"validation": "test", "select": "best"}
    told["config"]["training"] |= chosen
    for name, content in (("model.safetensors", path.read_bytes()), ("model.json", json.dumps(told).encode())):
        (tmp_path / name).write_bytes(content)
    clean, looked = (
        run_to_end(evaluate(one, "digits", folder / "data", images=5)).record for one in (path, tmp_path / path.name)
    )
    assert clean["results"]["accuracy"] == looked["results"]["accuracy"]
    assert clean["protocol_fingerprint"] != looked["protocol_fingerprint"]
    assert looked["protocol"]["weights"] == "best epoch on the test images"
    assert looked["protocol"]["split"]["trained"] == "train and validation"
    unknown = run_to_end(evaluate(saved(), "digits", folder / "data", images=5)).record
    assert unknown["protocol"]["weights"] == "trained in ways that are not known"
    assert unknown["protocol_fingerprint"] not in (clean["protocol_fingerprint"], looked["protocol_fingerprint"])


@pytest.mark.slow
def test_an_interrupted_attack_goes_on_by_default(
    evaluated: tuple[list[Any], TrialResult], folder: Path, tmp_path: Path
) -> None:
    path = evaluated[1].artifacts["model"]
    config = EvaluationConfig(attack="autoattack", attack_eps=0.25, batch_size=2, seed=3)
    evaluate_few = partial(evaluate, path, "digits", folder / "data", config, images=4)
    whole = run_to_end(evaluate_few())
    states = folder / "data" / "attacks"
    assert list(states.iterdir()) == []
    steps = evaluate_few()
    first = next(step for step in steps if step.stage == "apgd-ce")
    steps.close()
    (state,) = states.iterdir()
    # That of another attack on the same network is another file.
    other = EvaluationConfig(attack="autoattack", attack_eps=0.01, batch_size=2, seed=3)
    run_to_end(evaluate(path, "digits", folder / "data", other, images=4))
    assert list(states.iterdir()) == [state]
    again = evaluate_few()
    following = next(step for step in again if step.stage != "autoattack")
    assert (first.done, following.stage, following.done) == (1, "apgd-ce", 2)
    resumed = run_to_end(again)
    assert list(states.iterdir()) == []
    ours, theirs = (found.measured.evidence.attacks["autoattack"] for found in (resumed, whole))
    assert torch.equal(ours.robust, theirs.robust)
    assert torch.equal(ours.adversarial_images, theirs.adversarial_images)
    # One that is damaged is no reason to fail: nobody has asked for it.
    steps = evaluate_few()
    next(step for step in steps if step.stage == "apgd-ce")
    steps.close()
    state.write_bytes(b"nothing")
    assert (
        run_to_end(evaluate_few()).record["results"]["attacks"]["autoattack"]["robust_accuracy"]
        == theirs.robust_accuracy
    )
    # One that was asked for stays.
    run_to_end(evaluate_few(state=tmp_path / "mine"))
    assert (tmp_path / "mine").is_file()


@pytest.mark.slow
def test_the_cost_of_training_is_as_the_trial_noted_it(evaluated: tuple[list[Any], TrialResult], folder: Path) -> None:
    _, result = evaluated
    found = run_to_end(evaluate(result.artifacts["model"], "digits", folder / "data", images=5, cost=True))
    assert found.record["results"]["cost"]["training"] == {
        "train_seconds": result.train_seconds,
        "constraint_seconds": result.constraint_seconds,
        "step_seconds": result.step_seconds,
        "constraint_step_seconds": result.constraint_step_seconds,
    }
    assert result.step_seconds > 0


def test_costs_are_recorded_where_they_are_asked_for(saved: Saved, folder: Path) -> None:
    path = saved(layer="tt", rank=8)
    found = run_to_end(evaluate(path, "digits", folder / "data", images=5, cost=True))
    model, record = load_network(path.parent / "model.safetensors").model, found.record["results"]["cost"]
    assert record["parameters"] == cost.parameters(model)
    assert record["compression"] == cost.compression(model) > 1
    assert record["multiply_accumulates"] == cost.multiply_accumulates(model, 8)
    assert [(one["merged"], one["count"]) for one in record["inference"]] == [
        (merged, count) for merged in (False, True) for count in (1, 128)
    ]
    assert record["evaluation_seconds"] > 0
    assert set(record["training"].values()) == {None}
    assert found.record["protocol_fingerprint"] == protocol_fingerprint(found.record["protocol"])
    assert json.loads(json.dumps(found.record)) == found.record
    assert "cost" not in run_to_end(evaluate(path, "digits", folder / "data", images=5)).record["results"]


def test_the_first_so_many_images(saved: Saved, digits: Dataset, folder: Path) -> None:
    path = saved()
    found = run_to_end(evaluate(path, "digits", folder / "data", images=50))
    model = load_network(path.parent / "model.safetensors").model
    expected = predict(model, digits.test.images[:50]).argmax(1) == digits.test.labels[:50]
    assert found.record["results"]["accuracy"] == float(expected.double().mean())
    assert found.record["protocol"]["images"]["accuracy"] == 50


def test_refusals(saved: Saved, folder: Path, tmp_path: Path) -> None:
    def message(path: Path, dataset: str = "digits", **options: Any) -> str:
        with pytest.raises((ConfigError, DataError)) as error:
            run_to_end(evaluate(path, dataset, folder / "data", **options))
        return str(error.value)

    path = saved()
    assert "images = 0: must be at least 1" in message(path, images=0)
    assert "must be a data set whose in_channels is 1" in message(path, "synthetic")
    assert "give the model.safetensors" in message(tmp_path / "weights.pt")
    assert "device = 'tpu'" in message(path, device="tpu")
    published = EvaluationConfig(corruptions="published")
    assert "must be generated for digits" in message(path, config=published)
    assert "num_classes is 7" in message(saved(num_classes=7))


def test_logits_that_are_not_finite(tmp_path: Path, folder: Path) -> None:
    arguments: dict[str, Any] = {"name": "small-cnn", "num_classes": 10, "in_channels": 1, "image_size": 8, **HALF}
    model = create_model(**arguments)
    with torch.no_grad():
        model.get_parameter("head.bias")[3] = float("inf")
    path = save_model(tmp_path, model, arguments)
    with pytest.raises(DataError, match=r"model\.safetensors: the network's logits are not finite"):
        run_to_end(evaluate(path, "digits", folder / "data"))
