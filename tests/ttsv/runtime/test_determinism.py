import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretended import PretendedCards
from ttsv.config.trial import TrialConfig
from ttsv.errors import ConfigError
from ttsv.evaluation import evaluated
from ttsv.results import TrialResult
from ttsv.runtime.determinism import CUBLAS_WORKSPACE, deterministic_algorithms, require_determinism
from ttsv.trial import run_trial


def test_deterministic_algorithms_are_chosen_inside_and_given_back() -> None:
    def chosen() -> tuple[bool, ...]:
        cudnn = torch.backends.cudnn
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark

    before = chosen()
    with deterministic_algorithms(False):
        assert chosen() == before

    def fail() -> None:
        with deterministic_algorithms():
            assert chosen() == (True, True, False)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert chosen() == before


def test_what_was_not_said_before_the_gpu_was_used_is_said_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS reads the environment once."""
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    require_determinism(torch.device("cpu"))
    assert CUBLAS_WORKSPACE not in os.environ
    with PretendedCards(), pytest.raises(ConfigError, match=f"{CUBLAS_WORKSPACE}=:4096:8 in the environment, before"):
        require_determinism(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    require_determinism(torch.device("cuda"))
    assert os.environ[CUBLAS_WORKSPACE] == ":4096:8"
    with PretendedCards():
        require_determinism(torch.device("cuda"))


@pytest.mark.parametrize("wanted", [False, True])
def test_a_deterministic_training_is_so_throughout(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    original = torch.autograd.backward

    def spy(*arguments: Any) -> None:
        seen.add((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))
        original(*arguments)

    monkeypatch.setattr(torch.autograd, "backward", spy)
    monkeypatch.setattr(evaluated, "write_plots", lambda *_, **__: {})
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":4096:8")
    training = {"epochs": 1, "steps": 2, "deterministic": wanted}
    config = TrialConfig.from_dict({"dataset": "synthetic:1x8x8:4:80", "model": "small-cnn", "training": training})
    with PretendedCards():
        *_, result = run_trial(config, data_dir=tmp_path / "data", folder=tmp_path / "trial", device="cuda")
    assert seen == {(wanted, wanted)}
    assert isinstance(result, TrialResult)
    said = result.protocol.get("training", {}).get("deterministic", "")
    assert said.startswith(f"deterministic algorithms of torch {torch.__version__} on a pretended card") == wanted
