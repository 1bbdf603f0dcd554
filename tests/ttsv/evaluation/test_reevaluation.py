"""An evaluation that is cut short goes on; a network that was trained is evaluated anew, without training."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyautoattack
import pytest
import torch
from safetensors.torch import load_file

from ttsv.config.training import LOOKING_ON
from ttsv.config.trial import TrialConfig
from ttsv.errors import ConfigError, DataError
from ttsv.evaluation import evaluated
from ttsv.results import CHECKPOINTS, EpochMetrics, StageProgress, TrialResult, machine_name
from ttsv.trial import run_trial

ATTACKED: dict[str, Any] = {"attack": "autoattack", "attack_images": 20, "attack_eps": 0.2, "batch_size": 5}
BASE: dict[str, Any] = {
    "dataset": "digits",
    "model": "small-cnn",
    "layer": "tt",
    "rank": 6,
    "constraint": "clip",
    "delta": 1.5,
    "training": {"epochs": 2},
    "clipping": {"every": 15},
}

SHORTENED = """
import pyautoattack

class Shortened(pyautoattack.AutoAttack):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for attack in (self.apgd, self.apgd_targeted):
            attack.n_iter = attack.n_iter_orig = 3
            attack.n_restarts = 1
        self.fab.n_iter = 2
        self.square.n_queries = 5
"""


@pytest.fixture(scope="module", autouse=True)
def shortened() -> Iterator[None]:
    names: dict[str, Any] = {}
    exec(SHORTENED, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyautoattack, "AutoAttack", names["Shortened"])
        yield


def trial(evaluation: dict[str, Any] | None = None, **changes: Any) -> TrialConfig:
    return TrialConfig.from_dict({**BASE, **changes, "evaluation": evaluation or {}})


def start(config: TrialConfig, folder: Path, source: Path | None = None) -> Any:
    return run_trial(config, data_dir=folder.parent / "data", folder=folder, device="cpu", source=source)


def split(items: Any) -> tuple[list[Any], TrialResult]:
    *steps, result = items
    assert isinstance(result, TrialResult)
    return steps, result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


@pytest.fixture(scope="module")
def plain(folder: Path) -> TrialResult:
    """Trained, and evaluated as by default."""
    return split(start(trial(), folder / "plain"))[1]


@pytest.fixture(scope="module")
def attacked(folder: Path) -> TrialResult:
    """Trained and attacked without a break."""
    return split(start(trial(ATTACKED), folder / "attacked"))[1]


def kept(result: TrialResult) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(result.artifacts["predictions"])
    return found


def same_attack(one: TrialResult, other: TrialResult) -> None:
    for name in ("robust_autoattack", "broken_by_autoattack"):
        assert torch.equal(kept(one)[name], kept(other)[name])
    ours, theirs = (result.evaluation["attacks"]["autoattack"] for result in (one, other))
    for name in ("robust_accuracy", "adversarial_indices", "warnings", "largest_perturbation"):
        assert ours[name] == theirs[name]
    assert one.protocol == other.protocol


# --- resuming ---

KILLED = (
    SHORTENED
    + """
pyautoattack.AutoAttack = Shortened
import json, os, signal, sys
from pathlib import Path
from ttsv.config.training import LOOKING_ON
from ttsv.config.trial import TrialConfig
from ttsv.results import StageProgress
from ttsv.trial import run_trial
config, folder = TrialConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])
for item in run_trial(config, data_dir=folder.parent / "data", folder=folder, device="cpu"):
    if isinstance(item, StageProgress) and (item.stage, item.done) == ("apgd-t", 1):
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.deep
def test_a_trial_killed_while_attacked_goes_on_where_it_was(folder: Path, attacked: TrialResult) -> None:
    config = trial(ATTACKED)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    arguments = [sys.executable, "-c", KILLED, json.dumps(config.to_dict()), str(folder / "killed")]
    assert subprocess.run(arguments, env=environment, check=False).returncode == -signal.SIGKILL
    steps, result = split(start(config, folder / "killed"))
    assert not any(isinstance(step, EpochMetrics) for step in steps)  # nothing is trained again
    assert [(step.stage, step.done) for step in steps[:2]] == [("autoattack", 0), ("apgd-t", 2)]
    assert 0 < attacked.evaluation["attacks"]["autoattack"]["counts"]["apgd-ce"]["broken"] < 20
    same_attack(result, attacked)
    # A finished evaluation attacks nothing again.
    steps, again = split(start(config, folder / "killed"))
    assert [step.stage for step in steps] == ["autoattack"]
    same_attack(again, attacked)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "another attack"])
def test_a_state_that_is_of_no_use_is_replaced(folder: Path, attacked: TrialResult, damage: str) -> None:
    place = folder / damage
    shutil.copytree(folder / "attacked", place)
    (state,) = (place / CHECKPOINTS).glob("autoattack*")
    config = trial(ATTACKED)
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-9])
        steps, result = split(start(config, place))
        same_attack(result, attacked)
    else:
        steps, result = split(start(trial(ATTACKED | {"attack_eps": 0.1}), place))
        assert result.robust_accuracy is not None
        assert result.robust_accuracy >= (attacked.robust_accuracy or 0)
    assert [step.stage for step in steps if isinstance(step, StageProgress)][:2] == ["autoattack", "apgd-ce"]


# --- evaluating anew ---


@pytest.mark.slow
def test_a_stored_network_is_evaluated_without_training(
    folder: Path, plain: TrialResult, attacked: TrialResult
) -> None:
    model = plain.artifacts["model"]
    before = model.read_bytes(), model.with_name("model.json").read_bytes()
    steps, result = split(start(trial(ATTACKED), folder / "anew", source=model))
    assert steps
    assert not any(isinstance(step, EpochMetrics) for step in steps)
    same_attack(result, attacked)
    for name in ("accuracy", "loss", "ece", "brier", "compression", "parameters", "max_singular_value", "temperature"):
        assert getattr(result, name) == getattr(attacked, name)
    # What the training knew is kept, its times and what the constraint reported included.
    for name in ("train_seconds", "constraint_seconds", "step_seconds", "constraint_step_seconds", "selected_epoch"):
        assert getattr(result, name) == getattr(plain, name) > 0
    assert result.layers == plain.layers
    assert result.layers[0]["projection"] is not None
    assert (model.read_bytes(), model.with_name("model.json").read_bytes()) == before
    assert result.artifacts["model"].parent == folder / "anew"
    assert result.artifacts["model"].read_bytes() == before[0]
    # And again from what that left, elsewhere.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluated, "describe_environment", lambda _: {"device": "cuda", "device_name": "laptop"})
        _, third = split(start(trial({"certified": True}), folder / "third", source=result.artifacts["model"]))
    trained_on = [machine_name(plain.environment)]
    assert third.environment == {"device": "cuda", "device_name": "laptop", "trained_on": trained_on}
    assert third.train_seconds == plain.train_seconds
    assert third.lipschitz_bound is not None
    assert third.robust_accuracy is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank": 5}, "its rank is 6, wanted is 5"),
        ({"layer": "dense"}, "its layer is 'tt', wanted is 'dense'"),
        ({"model": "single-conv", "dataset": "synthetic:8x16x16:10:100"}, "wanted is"),
        ({"mean": [0.25]}, "its mean is"),
        ({"seed": 3}, "its seed is None, wanted is 3"),
        ({"delta": 2.0}, "its delta is 1.5, wanted is 2.0"),
        ({"training": {"epochs": 7}}, "its training is"),
    ],
    ids=str,
)
def test_another_trials_network_is_refused(
    folder: Path, plain: TrialResult, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError) as error:
        next(start(trial(ATTACKED, **changes), folder / "refused", source=plain.artifacts["model"]))
    assert named in str(error.value)
    assert "is another network than the trial's" in str(error.value)


def test_a_network_trained_on_other_data_is_refused(folder: Path, plain: TrialResult, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.json"):
        shutil.copy(plain.artifacts["model"].with_name(name), tmp_path)
    description = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(description | {"dataset_sha256": "0" * 64}))
    with pytest.raises(DataError, match="its dataset_sha256 is '000"):
        next(start(trial(ATTACKED), folder / "refused", source=tmp_path / "model.safetensors"))


def test_an_older_model_file_without_facts_is_taken(folder: Path, plain: TrialResult, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.json"):
        shutil.copy(plain.artifacts["model"].with_name(name), tmp_path)
    description = json.loads((tmp_path / "model.json").read_text())
    older = {name: description[name] for name in ("model", "sha256", "config")}
    del older["config"]["evaluation"]
    (tmp_path / "model.json").write_text(json.dumps(older))
    _, result = split(start(trial(), folder / "older", source=tmp_path / "model.safetensors"))
    assert result.accuracy == plain.accuracy
    assert (result.train_seconds, result.selected_epoch) == (0.0, 0)


def test_the_version_before_reads_a_model_file(plain: TrialResult) -> None:
    """It refuses a field that it does not know: what only looks on is not written where it is at its default."""
    description = json.loads(plain.artifacts["model"].with_name("model.json").read_text())
    assert not {*LOOKING_ON} & description["config"]["training"].keys()
    assert trial(training={**description["config"]["training"], "cuda_graph": False}).kept()["training"] == {
        **description["config"]["training"],
        "cuda_graph": False,
    }


def test_what_is_no_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.json is no description of a trained network"):
        next(start(trial(), folder / "refused", source=tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match="device"):
        next(run_trial(trial(), data_dir=folder, folder=folder / "refused", device="tpu", source=tmp_path))
