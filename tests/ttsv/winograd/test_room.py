"""The room can be removed: its folder and one line of the training loop."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAIN = """
import sys
from pathlib import Path

import pytest
import torch
import ttsv
from ttsv.config.trial import TrialConfig
from ttsv.config.training import TrainingConfig
from ttsv.constraints import Unconstrained
from ttsv.data import load_dataset
from ttsv.models import create_model
from ttsv.training.loop import fit

data = load_dataset("synthetic:1x8x8:2:40", Path("data"))
config = TrialConfig(
    dataset="synthetic:1x8x8:2:40", model="small-cnn", training=TrainingConfig(epochs=1, steps=2, batch_size=8)
)
model = create_model("small-cnn", num_classes=2, in_channels=1, image_size=8)
(epoch,) = fit(model, data, config, Unconstrained(), device=torch.device("cpu"))
assert config.training.convolutions == "winograd"
print(Path(ttsv.__file__).parent, epoch.train_loss > 0, "llvmlite" in sys.modules, "ttsv.winograd" in sys.modules)
"""


def entering() -> list[str]:
    """Every line of the packages outside the room that names it."""
    modules = [path for package in ("ttsv", "service", "workers") for path in (ROOT / package).rglob("*.py")]
    outside = [path for path in modules if not path.is_relative_to(ROOT / "ttsv" / "winograd")]
    return [line for path in outside for line in path.read_text().splitlines() if "ttsv.winograd" in line]


@pytest.mark.slow
def test_training_needs_neither_the_room_nor_the_line(tmp_path: Path) -> None:
    (line,) = entering()
    copy = tmp_path / "ttsv"
    shutil.copytree(ROOT / "ttsv", copy, ignore=shutil.ignore_patterns("__pycache__", "winograd"))
    loop = copy / "training" / "loop.py"
    loop.write_text(loop.read_text().replace(f"{line}\n", ""))
    assert not (copy / "winograd").exists()
    assert "ttsv.winograd" not in loop.read_text()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", TRAIN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(copy), "True", "False", "False"]
