import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.examples import deep
from ttsv.config.trial import TrialConfig
from ttsv.data import load_dataset
from ttsv.data.catalog import training_images
from ttsv.errors import ConfigError, DataError, TrialError
from ttsv.evaluation import evaluate
from ttsv.layers import TTConv2d
from ttsv.metrics import cost
from ttsv.metrics.accuracy import accuracy, predict, run_to_end
from ttsv.models import layer_shapes
from ttsv.models.conv_shape import LAYERS
from ttsv.models.shapes import shape_compression
from ttsv.results import EpochMetrics, TrialResult, protocol_fingerprint
from ttsv.spectral.network import model_spectra, spectral_layers
from ttsv.spectral.singular_values import conv_singular_values
from ttsv.training.checkpoint import load_network
from ttsv.training.network import TrainedNetwork, train_network
from ttsv.trial import run_trial

QUICKSTART = json.loads((Path(__file__).parents[2] / "examples" / "quickstart.json").read_text())

BASE: dict[str, Any] = {
    "dataset": "digits",
    "model": "small-cnn",
    "layer": "tt",
    "rank": 6,
    "lambda_ort": 1.0,
    "constraint": "clip",
    "delta": 1.5,
    "training": {"epochs": 3},
    "clipping": {"every": 15, "rounds": 2},
}


def trial(**changes: Any) -> TrialConfig:
    return TrialConfig.from_dict({**BASE, **changes})


def run(config: TrialConfig, folder: Path) -> tuple[list[EpochMetrics], TrialResult]:
    *epochs, result = run_trial(config, data_dir=folder / "data", folder=folder / "trial", device="cpu")
    assert all(isinstance(epoch, EpochMetrics) for epoch in epochs)  # nothing that takes long is evaluated
    assert isinstance(result, TrialResult)
    return epochs, result  # type: ignore[return-value]


def timeless(epochs: list[EpochMetrics], result: TrialResult) -> tuple[list[EpochMetrics], TrialResult]:
    times = [name for name in TrialResult.__dataclass_fields__ if name.endswith("seconds")]
    none: dict[str, Any] = dict.fromkeys(times, 0.0) | {"artifacts": {}}
    none["evaluation"] = {name: value for name, value in result.evaluation.items() if name != "seconds"}
    return [replace(e, seconds=0, constraint_seconds=0) for e in epochs], replace(result, **none)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_drawn_and_little_timed() -> Iterator[None]:
    """Nobody looks at these trials' plots and times, which take longer than their training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ttsv.evaluation.evaluated.write_plots", lambda *_, **__: {})
        patch.setattr("ttsv.metrics.cost.inference_seconds", partial(cost.inference_seconds, budget=0.0))
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[EpochMetrics], TrialResult]:
    return run(trial(), tmp_path_factory.mktemp("unbroken"))


# --- what a trial gives ---


def test_the_result_holds_for_the_saved_model(unbroken: tuple[list[EpochMetrics], TrialResult]) -> None:
    epochs, result = unbroken
    assert [epoch.epoch for epoch in epochs] == [1, 2, 3]
    path = result.artifacts["model"]
    assert path.name == "model.safetensors"
    model = load_network(path.parent / "model.safetensors").model
    data = load_dataset("digits", path.parent)
    logits = predict(model, data.test.images)
    assert result.accuracy == accuracy(logits, data.test.labels)
    validation = predict(model, data.validation.images)
    assert epochs[-1].val_accuracy == accuracy(validation, data.validation.labels)
    assert 0 <= result.ece <= 1
    assert result.parameters == cost.parameters(model)
    shapes = layer_shapes("small-cnn", in_channels=1, image_size=8)
    assert result.compression == shape_compression(shapes, 6) == cost.compression(model)

    assert [layer["name"] for layer in result.layers] == [shape.name for shape in shapes]
    layers = spectral_layers(model)
    for record, shape in zip(result.layers, shapes, strict=True):
        layer = layers[record["name"]]
        assert isinstance(layer, TTConv2d)
        kernel = layer.dense_kernel().detach().double()
        values = conv_singular_values(kernel, shape.input_size, stride=shape.stride)
        assert record["largest"] == pytest.approx(values.max().item(), rel=1e-4)
        assert record["largest"] <= 1.5 * (1 + 1e-5)
        assert (record["largest_before_projection"] or 0) >= record["largest"] * (1 - 1e-4)
        assert record["kind"] == "TTConv2d"
        assert record["shape"]["core"] == list(layer.core.shape)
        assert record["input_size"] == [shape.input_size] * 2
    assert result.max_singular_value == max(layer["largest"] for layer in result.layers)
    # The forced projection leaves exactly orthonormal frames.
    assert epochs[-1].ort_loss is not None
    assert epochs[-1].ort_loss < 1e-10


def test_the_record_is_json_ready(unbroken: tuple[list[EpochMetrics], TrialResult]) -> None:
    _, result = unbroken
    for part in (result.protocol, result.environment, result.layers, result.evaluation):
        assert json.loads(json.dumps(part, allow_nan=False)) == part
    assert result.protocol == {
        "dataset": "digits",
        "dataset_sha256": "b4962e1929c4c377fdd20265c695ff630ffef36006df2db69774ab360db2235f",
        "split": {
            "evaluated": "test",
            "trained": "train",
            "test": "stratified, 0.2 of each class",
            "validation": "stratified, 0.1 of each class of the rest",
            "seed": 0,
            "images": {"train": 1295, "validation": 143, "test": 359},
        },
        "preprocessing": {"pixels": "[0, 1]", "mean": [0.5], "std": [0.5]},
        "metrics": {
            "accuracy": "top-1",
            "loss": "mean cross-entropy, nats",
            "ece": {"bins": 15, "edges": "equal width, right-closed"},
            "temperature": "least loss on the validation images",
            "singular_values": "periodic",
        },
        "images": {"accuracy": 359, "calibration": 359, "temperature": 143},
        "weights": "last epoch",
        "precision": "float32",
        "training": {
            "projection": "projected for the evaluation: the last projection was 3 steps before the evaluation"
        },
    }
    assert result.evaluation["training"] == result.protocol["training"]
    environment = result.environment
    assert environment["torch"] == torch.__version__
    assert environment["device"] == "cpu"
    assert environment["threads"] == torch.get_num_threads()
    assert {"git_revision", "git_dirty", "python", "numpy", "platform", "device_name"} <= environment.keys()


RECORDED = {
    # As they were when a protocol said nothing of the training yet, and named no batch size of attacks.
    "last": "348425df13ff78f123f187ab8d2ec4bfee59399a09ebe88ff5122d95a7cf1a40",
    "best": "cdc06e2a49c13734fa5c1261f4a160ea4ec95b8cfd61158f5f784532043e6600",
}


@pytest.mark.parametrize(
    ("changes", "recorded", "said"),
    [
        ({}, "last", None),
        ({"training": {"select": "best", "validation": "test"}}, "best", None),
        ({"constraint": "divide", "division": {"conv": 1.0}}, "last", "the last projection was that of the last step"),
        ({"constraint": "clip", "delta": 1.0}, "last", "projected for the evaluation: there was no projection before"),
        ({"constraint": "clip", "delta": 1.0, "training": {"final_projection": False}}, "last", "there was no"),
        ({"constraint": "clip", "delta": 1.0, "clipping": {"every": 2}}, "last", "the last projection was that of"),
        ({"constraint": "clip", "delta": 1.0, "clipping": {"every": 3}}, "last", "projected for the evaluation: the l"),
    ],
)
def test_protocols_keep_their_fingerprints_and_say_what_was_done(
    tmp_path: Path, changes: dict[str, Any], recorded: str, said: str | None
) -> None:
    """What was done to the network that is compared decides nothing: clipped and free networks rank together."""
    training = {"epochs": 2, "steps": 2, "batch_size": 8, **changes.get("training", {})}
    base = {"dataset": "synthetic:3x16x16:4:80", "model": "small-cnn"}
    _, result = run(TrialConfig.from_dict({**base, **changes, "training": training}), tmp_path)
    assert protocol_fingerprint(result.protocol) == RECORDED[recorded]
    found = result.protocol.get("training", {}).get("projection")
    assert found == said if said is None else found.startswith(said)


@pytest.mark.slow
def test_the_best_epochs_network_is_kept_beside_the_last_one(tmp_path: Path) -> None:
    """As a model of its own that says which epoch it is, also where it is evaluated; what ranks is the last epoch's."""
    base: dict[str, Any] = {"dataset": "synthetic:1x8x8:4:200", "model": "small-cnn", "layer": "soc"}
    training = {"epochs": 3, "steps": 2, "batch_size": 8, "lr": 0.05, "keep_best": True, "best_by": "certified"}
    epochs, result = run(TrialConfig.from_dict({**base, "training": training}), tmp_path)
    path = result.artifacts["best-model"]
    assert path.name == "best.safetensors", "another name than that of the network which was evaluated"
    kept = load_network(path)
    best = kept.training["selected_epoch"]
    assert (result.selected_epoch, result.protocol["weights"]) == (3, "last epoch")
    words = "best epoch on the validation images by certified accuracy (assumed, radius 36/255)"
    assert result.protocol["training"] == {"kept": f"epoch {best} too, the {words}"}
    data = load_dataset(base["dataset"], tmp_path)
    logits = predict(kept.model, data.validation.images)
    assert accuracy(logits, data.validation.labels) == epochs[best - 1].val_accuracy
    again = run_to_end(evaluate(path, base["dataset"], tmp_path)).measured.protocol
    assert (again["weights"], again.get("training")) == (words, None)
    other = training | {"keep_best": False, "epochs": 1}
    _, plain = run(TrialConfig.from_dict({**base, "training": other}), tmp_path / "other")
    assert protocol_fingerprint(plain.protocol) == protocol_fingerprint(result.protocol)
    assert "best-model" not in plain.artifacts


def test_protocol_fingerprint() -> None:
    protocol = {"dataset": "digits", "split": {"seed": 0, "evaluated": "test"}, "std": [0.5]}
    turned = {"std": [0.5], "split": {"evaluated": "test", "seed": 0}, "dataset": "digits"}
    assert protocol_fingerprint(protocol) == protocol_fingerprint(turned)
    assert protocol_fingerprint(protocol) == "80a2cbef913789f14cd618babb311e58a996faef4da9571b021e898d86f9c955"
    assert protocol_fingerprint({**protocol, "dataset": "cifar10"}) != protocol_fingerprint(protocol)
    with pytest.raises(ValueError, match="JSON"):
        protocol_fingerprint({"eps": float("nan")})


@pytest.mark.slow
def test_a_dense_trial(tmp_path: Path) -> None:
    config = trial(layer="dense", constraint="none", training={"epochs": 1})
    epochs, result = run(config, tmp_path)
    assert epochs[0].ort_loss is None
    assert result.compression == 1
    assert [layer["kind"] for layer in result.layers] == ["Conv2d"] * 3
    assert all(layer["largest_before_projection"] is None for layer in result.layers)
    # A rank, a weight of the orthogonal loss or a delta that mean nothing change nothing.
    same = run(config.canonical(), tmp_path / "canonical")
    assert timeless(*same) == timeless(epochs, result)


def test_all_singular_values_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take minutes of wide networks; their seconds and their memory are those of the same pass."""
    taken = Mock(wraps=model_spectra)
    for room in ("evaluated", "protocol"):
        monkeypatch.setattr(f"ttsv.evaluation.{room}.model_spectra", taken)
    result = run(trial(constraint="none", training={"epochs": 1, "steps": 1}), tmp_path)[1]
    assert taken.call_count == 1
    assert result.spectrum_seconds > 0
    assert result.spectrum_memory > 0


# --- repeating and resuming ---


@pytest.mark.slow
def test_trials_of_one_process_do_not_touch_each_other(
    tmp_path: Path, unbroken: tuple[list[EpochMetrics], TrialResult]
) -> None:
    before = torch.get_rng_state()
    run(trial(seed=9, rank=3, delta=0.5, training={"epochs": 1}), tmp_path / "other")
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert timeless(*run(trial(), tmp_path / "again")) == timeless(*unbroken)
    seeded = run_trial(trial(seed=1), data_dir=tmp_path / "data", folder=tmp_path / "seed", device="cpu")
    first = next(seeded)
    seeded.close()
    assert isinstance(first, EpochMetrics)
    assert timeless([first], unbroken[1])[0] != timeless(*unbroken)[0][:1]


@pytest.mark.slow
def test_the_seed_draws_the_weights(tmp_path: Path) -> None:
    """At a rate of 1e-30 the trained weights are the initial ones."""
    kernels = []
    for index, (seed, batch_size) in enumerate([(0, 64), (0, 500), (1, 64)]):
        still = {"epochs": 1, "lr": 1e-30, "batch_size": batch_size}
        run(trial(seed=seed, constraint="none", training=still), tmp_path / str(index))
        model = load_network(tmp_path / str(index) / "trial" / "model.safetensors").model
        kernels.append([p.detach() for name, p in model.named_parameters() if name.startswith("conv")])
    assert all(map(torch.equal, kernels[0], kernels[1]))
    # The one-by-one frame of the first layer is 1 or -1.
    assert not any(torch.equal(a, b) for a, b in zip(kernels[0], kernels[2], strict=True) if a.numel() > 1)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, deep(2), 3])
def test_a_stopped_trial_goes_on(tmp_path: Path, unbroken: tuple[list[EpochMetrics], TrialResult], stop: int) -> None:
    first = run_trial(trial(), data_dir=tmp_path / "data", folder=tmp_path / "trial", device="cpu")
    for _ in range(stop):
        next(first)
    first.close()
    rest, result = run(trial(), tmp_path)
    epochs, expected = timeless(*unbroken)
    assert timeless(rest, result) == (epochs[stop:], expected)
    assert result.artifacts["model"].read_bytes() == unbroken[1].artifacts["model"].read_bytes()
    # A finished trial gives its result again.
    assert timeless(*run(trial(), tmp_path)) == ([], expected)


@pytest.mark.deep
def test_networks_that_ask_for_the_versions_of_their_weights_go_on_and_are_read_again(tmp_path: Path) -> None:
    """Torchvision's MNASNets: the averaged and the best weights are loaded, those of a checkpoint and of a file."""
    training = {"epochs": 2, "steps": 1, "batch_size": 8, "lr": 1e-3, "ema": 0.5, "select": "best"}
    base: dict[str, Any] = {"dataset": "synthetic:3x32x32:4:40", "model": "torchvision:mnasnet0_5"}
    config = TrialConfig.from_dict({**base, "training": training})
    first = run_trial(config, data_dir=tmp_path / "data", folder=tmp_path / "trial", device="cpu")
    next(first)
    first.close()
    epochs, result = run(config, tmp_path)
    assert [one.epoch for one in epochs] == [2]
    load_network(result.artifacts["model"])
    kept = TrialConfig.from_dict({**base, "training": training | {"select": "last", "keep_best": True}})
    load_network(run(kept, tmp_path / "kept")[1].artifacts["best-model"])


KILLED = """
import os, signal, sys
from pathlib import Path
from ttsv.config.trial import TrialConfig
from ttsv.results import EpochMetrics, TrialResult, protocol_fingerprint
from ttsv.trial import run_trial
import json
config, folder, last = TrialConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
for epoch in run_trial(config, data_dir=folder / "data", folder=folder / "trial", device="cpu"):
    if epoch.epoch == last:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.deep
def test_a_killed_trial_goes_on(tmp_path: Path, unbroken: tuple[list[EpochMetrics], TrialResult]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    arguments = [sys.executable, "-c", KILLED, json.dumps(BASE), str(tmp_path), "2"]
    killed = subprocess.run(arguments, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    rest, result = run(trial(), tmp_path)
    epochs, expected = timeless(*unbroken)
    # Killed while epoch 2 was handed over: its checkpoint was not written yet, so it comes once more.
    assert timeless(rest, result) == (epochs[1:], expected)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, deep(2)])
@pytest.mark.parametrize(
    "layer", [deep(layer) if layer == "bcop" or layer.endswith("-tt") else layer for layer in LAYERS]
)
def test_every_kind_of_layer_goes_on_bit_for_bit(tmp_path: Path, layer: str, stop: int) -> None:
    """BCOP and AOC replace their power iterations' vectors in every step, by others in memory's order."""
    config = TrialConfig.from_dict(
        {
            "dataset": "synthetic:1x8x8:4:80",
            "model": "small-cnn",
            "layer": layer,
            "rank": 16,
            "training": {"epochs": 2, "steps": 2, "batch_size": 8, "lr": 0.01},
        }
    )
    data = load_dataset(config.dataset, tmp_path)

    def training(folder: Path) -> Generator[EpochMetrics, None, TrainedNetwork]:
        return train_network(config.canonical(), data, folder=folder, device=torch.device("cpu"))

    def weights(folder: Path) -> dict[str, bytes]:
        state = run_to_end(training(folder)).model.state_dict()
        return {name: tensor.numpy().tobytes() for name, tensor in state.items()}

    first = training(tmp_path / "stopped")
    for _ in range(stop):
        next(first)
    first.close()
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


COLOUR: dict[str, Any] = {
    "dataset": "synthetic:3x8x8:2:40",
    "model": "small-cnn",
    "constraint": "none",
    "training": {"epochs": 2, "ema": 0.5, "keep_best": True},
}


def test_one_normalisation_is_one_protocol_and_one_network_however_it_is_written(tmp_path: Path) -> None:
    """A network of before may have one value for all channels: it is evaluated anew as what it is."""
    _, usual = run(TrialConfig.from_dict(COLOUR), tmp_path / "usual")
    with _of_before():
        epochs, before = run(TrialConfig.from_dict({**COLOUR, "mean": [0.5], "std": [0.5]}), tmp_path / "before")
    assert len(epochs) == 2
    assert protocol_fingerprint(before.protocol) == protocol_fingerprint(usual.protocol)
    model = before.artifacts["model"]
    assert json.loads(model.with_suffix(".json").read_text())["model"]["mean"] == [0.5]
    again = run_trial(
        TrialConfig.from_dict(COLOUR), data_dir=tmp_path, folder=tmp_path / "again", device="cpu", source=model
    )
    *_, result = again
    assert isinstance(result, TrialResult)
    assert (result.loss, result.protocol) == (usual.loss, usual.protocol)


def test_a_trial_that_an_earlier_version_began_goes_on(tmp_path: Path) -> None:
    """That version's canonical form had the normalisation as it was written, and its network one value of it."""
    config = TrialConfig.from_dict({**COLOUR, "mean": [0.5], "std": [0.5, 0.5, 0.5]})
    _, whole = run(config, tmp_path / "whole")
    with _of_before():
        first = run_trial(config, data_dir=tmp_path / "data", folder=tmp_path / "trial", device="cpu")
        next(first)
        first.close()
    epochs, result = run(config, tmp_path)
    assert [epoch.epoch for epoch in epochs] == [2]
    assert result.loss == whole.loss


@contextmanager
def _of_before() -> Iterator[None]:
    """Trials keep the normalisation as it is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialConfig, "with_short_normalization", lambda self: self)
        patch.setattr("ttsv.training.network.per_channel", lambda values, _: list(values))
        yield


@pytest.mark.slow
def test_the_work_of_another_trial_is_not_taken_up(
    tmp_path: Path, unbroken: tuple[list[EpochMetrics], TrialResult]
) -> None:
    run(trial(seed=4, training={"epochs": 1}), tmp_path)
    assert timeless(*run(trial(), tmp_path)) == timeless(*unbroken)


# --- bad input ---


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "cuda:-1", ""])
def test_a_device_that_is_not_here(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError) as error:
        next(iter(run_trial(trial(), data_dir=tmp_path, folder=tmp_path / "trial", device=device)))
    assert error.value.field == "device"


def test_missing_data_is_said_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="`ttsv data fetch cifar10`"):
        next(iter(run_trial(trial(dataset="cifar10"), data_dir=tmp_path, folder=tmp_path / "trial")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", [(8,), (8, 8, 8)])
@pytest.mark.parametrize("model", ["small-cnn", "torchvision:resnet18"])
def test_a_network_for_images_of_other_dimensions(tmp_path: Path, model: str, sizes: tuple[int, ...]) -> None:
    """Of the user's own sets the dimensions are known once they are read."""
    (tmp_path / "data" / "datasets").mkdir(parents=True)
    images = np.zeros((40, 3, *sizes), np.uint8)
    np.savez(tmp_path / "data" / "datasets" / "mine.npz", x_train=images, y_train=np.arange(40) % 2)
    config = TrialConfig.from_dict({"dataset": "npz:mine", "model": model})
    with pytest.raises(ConfigError, match=f"model = '{model}': must be a network for images of {len(sizes)} dim"):
        run(config, tmp_path)


def test_a_batch_of_one_image_that_batch_norm_cannot_take(tmp_path: Path) -> None:
    """Of the user's own sets it is known once they are read how many images the last batch has."""
    (tmp_path / "data" / "datasets").mkdir(parents=True)
    images = np.zeros((40, 1, 4, 4), np.uint8)
    np.savez(tmp_path / "data" / "datasets" / "mine.npz", x_train=images, y_train=np.arange(40) % 2)
    assert training_images("synthetic:1x4x4:2:40") == 28
    training = {"epochs": 1, "batch_size": 27}
    config = TrialConfig.from_dict({"dataset": "npz:mine", "model": "small-cnn", "training": training})
    with pytest.raises(ConfigError, match="must leave no image alone in a batch") as error:
        run(config, tmp_path)
    assert error.value.field == "training.batch_size"


def test_divergence_is_a_failure_class(tmp_path: Path) -> None:
    with pytest.raises(TrialError) as error:
        run(trial(constraint="none", training={"epochs": 2, "lr": 1e20}), tmp_path)
    assert error.value.failure == "diverged"


# --- the quickstart ---


def test_every_trial_of_the_quickstart_is_valid() -> None:
    grid = QUICKSTART["grid"]
    drawn = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    trials = [TrialConfig.from_dict({**QUICKSTART["base"], **values}) for values in drawn]
    assert len({config.fingerprint() for config in trials}) == 20
    assert len({config.cell() for config in trials}) == 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *map(deep, range(1, 5))])
def test_the_dense_quickstart_reaches_97_percent(tmp_path: Path, seed: int) -> None:
    config = TrialConfig.from_dict({**QUICKSTART["base"], "rank": None, "seed": seed})
    _, result = run(config, tmp_path)
    assert result.accuracy >= 0.97
