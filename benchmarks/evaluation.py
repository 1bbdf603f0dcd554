"""Evaluation of a network, ours beside the authors' script (`src/robust_metrics.py`).

    python benchmarks/evaluation.py [--authors PATH_OF_THEIR_CHECKOUT] [--model small-cnn] [--quick]

Both sides evaluate one network on the same images, by turns, on one thread; figures are medians, of two turns or, of
AutoAttack, of five, in seconds of the processor: both sides are one process there, and what else the machine does is
left out. The network is trained for two epochs on synthetic images, whose test part stands for CIFAR-10's; corruption
files of noise are made in the published format. Without --authors only ours runs. The full run takes about four minutes
on an idle processor with AVX-512, ten with AVX2; its record is `evaluation`. --quick takes few images once, and an
attack so strong that its first part ends it.

- everything else: accuracy, ECE and the corruptions. Theirs is the body of their script's ECE loop and their
  `get_accs`, which reads every file through PIL image by image in four loader processes; ours is the path of
  every trial (`ttsv.evaluation.measure`), whose calibration has more measures and which checks every file's SHA-256.
- autoattack: their `get_accs` calls the official code, ours drives it batch by batch with a state and progress.

Both attack the network that takes pixels of [0, 1], as AutoAttack means it: theirs, fed normalised images, would have
another problem to solve (and clamp its images to [0, 1]), and a time of that says nothing. Packages that their script
imports and that are not installed are stood in for: `autoattack` by `pyautoattack`, the same code; `robustbench`'s
loading of a test set by what it does.
"""

import contextlib
import importlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from authors import checkout
from measuring import alternate, keep, median, parser, ratio
from ttsv.config.evaluation import EvaluationConfig
from ttsv.config.trial import TrialConfig
from ttsv.data import load_dataset
from ttsv.data.catalog import DATASETS
from ttsv.data.corruptions import KINDS
from ttsv.data.loading import Dataset, Split
from ttsv.evaluation import EvaluationOptions, Subject, load_saved, measure
from ttsv.metrics.accuracy import run_to_end
from ttsv.metrics.attacks.autoattack import autoattack
from ttsv.results import TrialResult
from ttsv.trial import run_trial

FLOORS = {"everything else": 2.0, "autoattack": 0.97}
"""Theirs over ours; the median of turns of equal work is within 3 %."""
TURNS = 5
"""Of AutoAttack."""
TRAINED_ON = "synthetic:3x32x32:10:2000"
TRAINED_ON_QUICKLY = "synthetic:3x32x32:10:200"
PIXELS: dict[str, Any] = {"mean": [0.0], "std": [1.0]}
"""Of what is in front of the network: nothing, as its own normalisation is a part of it."""


def main() -> int:
    shared = parser(__doc__, authors=True)
    shared.add_argument("--model", default="small-cnn")
    options = shared.parse_args()
    torch.set_num_threads(1)
    count, attacked, repeats, eps = (10, 2, 1, 50.0) if options.quick else (200, 3, 2, 0.5)
    record: dict[str, Any] = {
        "unit": "seconds; of the processor for autoattack",
        "model": options.model,
        "images": {"everything else": count, "autoattack": attacked},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = _trained(options.model, count, folder, quick=options.quick)
        _write_corruptions(folder / "CIFAR-10-C", data.test.labels)
        theirs = Theirs(options.authors, model, data.test, folder) if options.authors else None
        record["everything else"] = _everything_else(model, data, folder, theirs, repeats)
        record["autoattack"] = _autoattack(model, Split(*(part[:attacked] for part in data.test)), theirs, repeats, eps)
    for part in FLOORS:
        print(f"== {part}: {json.dumps(record[part])}", flush=True)
    if not options.quick:
        keep("evaluation", f"python benchmarks/evaluation.py{' --authors DIR' if options.authors else ''}", record)
    holds = all((record[part]["ratio"] or floor) >= floor for part, floor in FLOORS.items())
    return 0 if holds or options.quick else 1


def _trained(name: str, count: int, folder: Path, *, quick: bool) -> tuple[nn.Module, Dataset]:
    """A trained network, and its test images as bytes under CIFAR-10's name."""
    dataset, epochs = (TRAINED_ON_QUICKLY, 1) if quick else (TRAINED_ON, 2)
    config = TrialConfig.from_dict({"dataset": dataset, "model": name, "training": {"epochs": epochs}})
    *_, result = run_trial(config, data_dir=folder / "data", folder=folder / "trial", device="cpu")
    assert isinstance(result, TrialResult)
    test = load_dataset(dataset, folder / "data").test
    pixels = test.images if test.images.dtype == torch.uint8 else (test.images * 255).round().byte()
    part = Split(pixels[:count].clone(), test.labels[:count].clone())
    data = Dataset(info=DATASETS["cifar10"], train=part, validation=part, test=part, sha256="made", split={})
    return load_saved(result.artifacts["model"], device=torch.device("cpu")), data


def _write_corruptions(folder: Path, labels: Tensor) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    count = len(labels)
    np.save(folder / "labels.npy", np.tile(labels.numpy().astype(np.uint8), 5))
    for kind in KINDS:
        np.save(folder / f"{kind}.npy", rng.integers(0, 256, (5 * count, 32, 32, 3), dtype=np.uint8))


class Theirs:
    """Their script's functions on a network of ours, their test set made of the same images."""

    def __init__(self, folder: Path, model: nn.Module, test: Split, place: Path) -> None:
        for name, contents in self._stand_ins(model).items():
            module = ModuleType(name)
            vars(module).update(contents)
            sys.modules[name] = module
        with checkout(folder):
            self._script: Any = importlib.import_module("src.robust_metrics")
        self._model, self._test, self._place = model, test, place
        vars(self._script)["create_cifar10_testset"] = self._testset

    @staticmethod
    def _stand_ins(model: nn.Module) -> dict[str, dict[str, Any]]:
        from pyautoattack import AutoAttack

        def load_dataset(dataset: Any) -> tuple[Tensor, Tensor]:
            batches = list(DataLoader(dataset, batch_size=100, shuffle=False, num_workers=0))
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            return images, labels

        class Official(AutoAttack):  # type: ignore[misc] # the package is untyped
            """`pyautoattack`'s, which has no log file; it prints the robust accuracy instead."""

            def __init__(self, attacked: nn.Module, *, log_path: str, **options: Any) -> None:
                super().__init__(attacked, seed=0, **options)

            def run_standard_evaluation(self, images: Tensor, labels: Tensor) -> None:
                adversarial, _ = super().run_standard_evaluation(images, labels)
                with torch.no_grad():
                    print(float((model(adversarial).argmax(1) == labels).double().mean()))

        return {
            "autoattack": {"AutoAttack": Official},
            "robustbench": {},
            "robustbench.data": {"_load_dataset": load_dataset},
            "wget": {},
            "src.measure_provable_robust": {"load_checkpoint": lambda _path, _info: model},
        }

    def _testset(self, *_arguments: Any, **_options: Any) -> Any:
        """torchvision's CIFAR-10 with these images in place of a download, as tensors of [0, 1]."""
        dataset = object.__new__(torchvision.datasets.CIFAR10)
        dataset.data = self._test.images.permute(0, 2, 3, 1).numpy()
        dataset.targets = self._test.labels.tolist()
        dataset.transform, dataset.target_transform = torchvision.transforms.ToTensor(), None
        return dataset

    def everything_else(self) -> float:
        """The body of their ECE loop, then their corruptions; returns the ECE."""
        logits_list, labels_list = [], []
        with torch.no_grad():
            for images, labels in DataLoader(self._testset(), batch_size=128, shuffle=False, num_workers=0):
                logits_list.append(self._model(images))
                labels_list.append(labels)
        found: float = self._script._ECELoss()(torch.cat(logits_list), torch.cat(labels_list)).item()
        self._accuracies(corruptions=True, attacks=False)
        return found

    def autoattack(self, images: int) -> float:
        """Their attack on the first so many; returns the robust accuracy."""
        whole = self._test
        self._test = Split(*(part[:images] for part in whole))
        try:
            return float(self._accuracies(corruptions=False, attacks=True).split()[-1])
        finally:
            self._test = whole

    def _accuracies(self, *, corruptions: bool, attacks: bool) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()), _without_normalisation():
            self._script.get_accs(
                "network_of_ours.pth",
                corruptions,
                attacks,
                str(self._place),
                str(self._place / "cifar-c-res"),
                str(self._place / "autoattacks-res"),
                str(self._place / "CIFAR-10-C"),
                "cifar10",
                True,
            )
        return printed.getvalue()


@contextmanager
def _without_normalisation() -> Iterator[None]:
    """Theirs is off inside: it is a part of the network here."""
    real = torchvision.transforms.Normalize
    torchvision.transforms.Normalize = lambda _mean, _std: nn.Identity()
    try:
        yield
    finally:
        torchvision.transforms.Normalize = real


def _everything_else(
    model: nn.Module, data: Dataset, folder: Path, theirs: Theirs | None, repeats: int
) -> dict[str, Any]:
    config = EvaluationConfig(corruptions="published")
    eces: dict[str, float] = {}

    def ours() -> None:
        subject = Subject(model=model, data=data, **PIXELS)
        measured = run_to_end(measure(subject, EvaluationOptions(config=config, folder=folder)))
        eces["ours"] = measured.results["calibration"]["raw"]["ece"]

    def others() -> None:
        assert theirs
        eces["theirs"] = theirs.everything_else()

    return _timed(ours, others if theirs else None, repeats) | {"ECE": eces}


def _autoattack(model: nn.Module, test: Split, theirs: Theirs | None, repeats: int, eps: float) -> dict[str, Any]:
    robust: dict[str, Any] = {}

    def ours() -> None:
        robust["ours"] = autoattack(
            model, *test, eps=eps, batch_size=250
        ).robust_accuracy  # theirs, the package's default

    def others() -> None:
        assert theirs
        robust["theirs"] = theirs.autoattack(len(test.labels))

    turns = TURNS if repeats > 1 else 1
    return _timed(ours, others if theirs else None, turns, time.process_time) | {"robust accuracy": robust}


def _timed(
    ours: Callable[[], object],
    theirs: Callable[[], object] | None,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    taken = alternate([ours, theirs], repeats, clock)
    own, other = median(taken[0]), median(taken[1])
    assert own is not None
    return {"ours": own, "theirs": other, "ratio": ratio(other, own)}


if __name__ == "__main__":
    started = time.perf_counter()
    code = main()
    print(f"{time.perf_counter() - started:.0f} s")
    sys.exit(code)
