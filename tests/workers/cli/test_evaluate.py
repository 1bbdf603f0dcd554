"""`ttsv evaluate`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from ttsv.metrics.corruption import CorruptionRecord
from ttsv.models import create_model
from ttsv.results import protocol_fingerprint
from ttsv.training.checkpoint import save_model
from workers.cli.__main__ import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved network, `model.safetensors`, and the data folder, `data`."""
    place = tmp_path_factory.mktemp("evaluate")
    arguments: dict[str, Any] = {"name": "small-cnn", "num_classes": 10, "in_channels": 1, "image_size": 8}
    arguments |= {"mean": [0.5], "std": [0.5]}
    torch.manual_seed(0)
    save_model(place, create_model(**arguments), arguments)
    return place


def run(folder: Path, *options: str) -> Result:
    env = {"TTSV_DATA_DIR": str(folder / "data"), "COLUMNS": "120"}
    command = ["evaluate", str(folder / "model.safetensors"), "--data", "digits", "--device", "cpu", *options]
    return CliRunner().invoke(app, command, env=env)


@pytest.mark.slow
def test_a_saved_network_is_evaluated(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    out = tmp_path / "new" / "out"
    done = run(folder, "--images", "20", "--json", str(file), "--plots", str(tmp_path / "plots"), "--out", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(file.read_text())
    assert record["protocol_fingerprint"] == protocol_fingerprint(record["protocol"])
    assert record["protocol_fingerprint"][:12] in done.stdout
    assert json.loads((out / "evaluation.json").read_text()) == record
    assert all(factor["bound"] > 0 for factor in record["results"]["certified"]["factors"])
    kept = load_file(out / "predictions.safetensors")
    assert {name for name, value in kept.items() if len(value) == 20} == set(kept)
    assert set(kept) >= {"margins", "certified_radii", "certified_margins", "lipschitz_ascent_pixels"}
    assert float((kept["predictions"] == kept["labels"]).double().mean()) == record["results"]["accuracy"]
    matrix = torch.tensor(json.loads((out / "confusion.json").read_text())["matrix"])
    assert int(matrix.sum()) == 20
    assert int(matrix.trace()) == round(20 * record["results"]["accuracy"])
    assert {path.name for path in out.iterdir()} >= {"reliability.png", "lipschitz.svg", "spectra.png"}
    said = " ".join(done.stdout.split())
    for check in record["results"]["checks"]:
        assert f"checked: {check}" in said
    assert "(ascent, normalised) are at most the bound (20 images)" in said
    assert record["protocol"]["images"]["accuracy"] == 20
    assert f"{record['results']['accuracy']:.2%}" in done.stdout
    assert f"{record['results']['certified']['bound']:.4g}" in done.stdout
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        f"{name}.{kind}" for name in ("reliability", "lipschitz", "spectra") for kind in ("svg", "png")
    }
    assert (tmp_path / "plots" / "spectra.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_attacks_and_corruptions(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    few = ("--images", "6", "--metrics", "pgd,corruption", "--corruption-images", "1", "--norm", "Linf", "--eps", "0.1")
    done = run(folder, *few, "--json", str(file), "--save-baseline")
    assert done.exit_code == 0, done.output
    record = json.loads(file.read_text())
    attack = record["results"]["attacks"]["pgd"]
    assert (attack["attack"], attack["norm"], attack["eps"], attack["images"]) == ("PGD", "Linf", 0.1, 6)
    assert f"accuracy under PGD, Linf 0.1, 6 images │ {attack['robust_accuracy']:.2%}" in " ".join(done.stdout.split())
    assert "AutoAttack" not in done.stdout
    assert record["protocol"]["corruptions"]["corruptions"] == "generated"
    stored = json.loads((folder / "data" / "datasets" / "digits-corruption-baseline.json").read_text())
    assert CorruptionRecord(**stored["corruptions"]).table == record["results"]["corruptions"]["table"]
    again = run(folder, *few)
    assert "mean corruption error" in again.stdout


def test_costs(folder: Path) -> None:
    done = run(folder, "--images", "3", "--metrics", " calibration, cost")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    for text in ("parameters", "compression │ 1 ", "multiply-accumulates", "inference of 128 at once", "peak memory"):
        assert text in said


def test_autoattack_keeps_a_state_that_was_asked_for(folder: Path, tmp_path: Path) -> None:
    """On an image that the untrained network gets wrong there is nothing to attack."""
    options = ("--images", "1", "--metrics", "autoattack,pgd", "--eps", "1e-9", "--attack-images", "1")
    file = tmp_path / "record.json"
    done = run(folder, *options, "--json", str(file))
    assert done.exit_code == 0, done.output
    assert set(json.loads(file.read_text())["results"]["attacks"]) == {"pgd", "autoattack"}
    assert list((folder / "data" / "attacks").iterdir()) == []
    state = tmp_path / "state"
    assert run(folder, *options, "--state", str(state)).exit_code == 0
    assert state.is_file()
    state.write_bytes(b"nothing")
    refused = run(folder, *options, "--state", str(state))
    assert refused.exit_code == 1
    assert "is no whole state of an attack" in refused.stderr


def test_an_interrupted_evaluation_says_how_to_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr("ttsv.evaluation.stages.autoattack_steps", interrupted)
    stopped = run(folder, "--images", "2", "--metrics", "autoattack")
    assert stopped.exit_code == 130
    assert "the same command goes on with AutoAttack where it was" in stopped.stderr


def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttsv.evaluation.evaluated.measure", None)
    (tmp_path / "file").write_text("no folder")
    refused = run(folder, "--save-baseline")
    assert "name corruption among the metrics" in refused.stderr
    for option in ("--out", "--plots", "--json"):
        refused = run(folder, option, str(tmp_path / "file" / "x"))
        assert refused.exit_code == 1
        assert str(tmp_path / "file") in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--metrics", "speed"), "must be one of calibration, certified, lipschitz, autoattack, pgd, corruption, cost"),
        (("--radii", "0.5,0"), "evaluation.radii"),
        (("--radii", "far"), "must be numbers with commas between"),
        (("--metrics", "pgd", "--eps", "0"), "attack_eps = 0.0: must be above 0"),
        (("--metrics", "pgd", "--norm", "L1"), "must be L2 or Linf for PGD"),
        (("--metrics", "autoattack", "--version", "best"), "must be one of standard, plus, rand"),
        (("--metrics", "corruption", "--corruptions", "published"), "must be generated for digits"),
        (("--device", "tpu"), "must be auto, cpu, cuda or cuda:N"),
        (("--data", "synthetic"), "must be a data set whose"),
    ],
    ids=str,
)
def test_refusals(folder: Path, options: tuple[str, ...], message: str) -> None:
    refused = run(folder, "--images", "2", *options)
    assert refused.exit_code == 1
    assert message in " ".join(refused.stderr.split())


@pytest.mark.parametrize("option", ["--json", "--state"])
def test_a_folder_is_no_file_which_is_said_before_hours_go_into_it(folder: Path, tmp_path: Path, option: str) -> None:
    done = run(folder, "--metrics", "autoattack", option, str(tmp_path))
    assert (done.exit_code, done.stderr) == (1, f"ttsv: {option} {tmp_path}: is a folder; name a file\n")


def test_json_alone_is_printed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(folder, "--metrics", "calibration", "--images", "5", "--json", "-")
    assert "accuracy" in json.loads(done.stdout)["results"]
    assert "checked: " in done.stderr
    assert not Path("-").exists()
