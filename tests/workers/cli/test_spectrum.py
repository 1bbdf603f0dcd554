import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ttsv.evaluation.saved_spectra import saved_spectra
from ttsv.models import create_model
from ttsv.training.checkpoint import save_model
from workers.cli.__main__ import app

ARGUMENTS = {"name": "small-cnn", "num_classes": 5, "in_channels": 1, "image_size": 8, "layer": "tt", "rank": 16}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_model(tmp_path, create_model(**ARGUMENTS), ARGUMENTS)  # type: ignore[arg-type]


def test_the_command_prints_saves_and_plots(saved: Path, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "spectra.json", tmp_path / "spectra.svg"
    arguments = ["spectrum", str(saved), "--input-size", "12", "--json", str(numbers), "--plot", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    spectra = saved_spectra(saved, 12)
    rows = {line.split("│")[1].strip(): line for line in result.output.splitlines() if "│" in line}
    assert list(rows) == ["conv1", "conv2", "conv3", "head"]
    for layer in spectra.layers:
        cells = [cell.strip() for cell in rows[layer.name].split("│")[1:-1]]
        assert cells[1:4] == [layer.kind, "x".join(map(str, layer.input_size)) or "-", str(len(layer.values))]
        expected = [layer.largest, *layer.deciles[::-1], layer.smallest]
        assert [float(cell) for cell in cells[4:]] == pytest.approx(expected, rel=1e-3)
    assert json.loads(numbers.read_text()) == json.loads(json.dumps(spectra.to_json()))
    assert picture.read_text().startswith("<?xml")


def test_pixels_per_axis(saved: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "spectra.json"
    result = CliRunner().invoke(app, ["spectrum", str(saved), "--input-size", "12x6", "--json", str(numbers)])
    assert result.exit_code == 0, result.output
    written = json.loads(numbers.read_text())
    assert written["input_size"] == [12, 6]
    assert written == json.loads(json.dumps(saved_spectra(saved, (12, 6)).to_json()))


def test_what_the_user_can_mend_is_one_line(saved: Path, tmp_path: Path) -> None:
    commands = {
        (str(tmp_path / "none" / "model.safetensors"),): "holds no whole model",
        (str(saved), "--input-size", "12x"): "--input-size = '12x': must be pixels, a side or per axis, such as 32, ",
        (str(saved), "--input-size", "0"): "--input-size = '0': must be pixels",
        (str(saved), "--input-size", "8x8x8"): "input_size = (8, 8, 8): must be a whole number",
        (str(saved), "--plot", "spectra.pdf"): "must end in .png or .svg",
        (str(saved), "--json", str(tmp_path / "none" / "x.json")): "No such file or directory",
    }
    for arguments, message in commands.items():
        result = CliRunner().invoke(app, ["spectrum", *arguments])
        assert result.exit_code == 1
        assert message in result.stderr
        assert result.stderr.startswith("ttsv: ")
        assert result.stderr.count("\n") == 1
    saved.write_bytes(saved.read_bytes() + b"0")
    result = CliRunner().invoke(app, ["spectrum", str(saved)])
    assert "is cut or altered" in result.stderr


def test_a_file_that_is_there_stays_where_writing_fails(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, picture = tmp_path / "spectra.json", tmp_path / "spectra.svg"
    for file in (numbers, picture):
        file.write_text("old")

    def full(_: object, path: Path, *__: object) -> None:
        path.write_bytes(b"ha")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ttsv.evaluation.plots.plot_spectra", full)
    result = CliRunner().invoke(app, ["spectrum", str(saved), "--plot", str(picture)])
    assert (result.exit_code, picture.read_text()) == (1, "old")
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: full(_, path))
    result = CliRunner().invoke(app, ["spectrum", str(saved), "--json", str(numbers)])
    assert (result.exit_code, numbers.read_text()) == (1, "old")


def test_json_alone_is_printed(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["spectrum", str(saved), "--json", "-"])
    assert json.loads(result.stdout) == json.loads(json.dumps(saved_spectra(saved, None).to_json()))
    assert "conv1" in result.stderr
    assert not Path("-").exists()
