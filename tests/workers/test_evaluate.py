import json
from pathlib import Path

from typer.testing import CliRunner

from ttsv.checkpoint import save_model
from ttsv.models import create_model
from workers.cli import app


def test_a_saved_network_is_evaluated(tmp_path: Path) -> None:
    arguments = {"name": "small-cnn", "num_classes": 10, "in_channels": 1, "image_size": 8, "mean": [0.5], "std": [0.5]}
    path = save_model(tmp_path, create_model(**arguments), arguments)  # type: ignore[arg-type]
    file = tmp_path / "record.json"
    env = {"TTSV_DATA_DIR": str(tmp_path / "data"), "COLUMNS": "120"}
    command = ["evaluate", str(path), "--data", "digits", "--images", "20", "--json", str(file)]
    done = CliRunner().invoke(app, command, env=env)
    assert done.exit_code == 0, done.output
    record = json.loads(file.read_text())
    assert record["protocol"]["images"] == 20
    assert f"{record['results']['accuracy']:.2%}" in done.stdout
    assert f"{record['results']['certified']['bound']:.4g}" in done.stdout
    refused = CliRunner().invoke(app, ["evaluate", str(path), "--data", "synthetic"], env=env)
    assert refused.exit_code == 1
    assert "must be a data set whose" in refused.stderr
