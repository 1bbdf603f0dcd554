import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from ttsv.errors import ConfigError, DataError
from ttsv.evaluation import load_saved
from ttsv.evaluation.plots import plot_lipschitz, plot_spectra
from ttsv.evaluation.saved_spectra import saved_spectra
from ttsv.metrics.lipschitz import EmpiricalLipschitz
from ttsv.models import ModelArguments, create_model
from ttsv.spectral.network import model_spectra
from ttsv.training.checkpoint import SavedNetwork, load_network, save_model

ARGUMENTS = {"name": "small-cnn", "num_classes": 5, "in_channels": 1, "image_size": 8, "layer": "tt", "rank": 16}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_model(tmp_path, create_model(**ARGUMENTS), ARGUMENTS)  # type: ignore[arg-type]


def test_every_layer_of_a_saved_network(saved: Path) -> None:
    spectra = saved_spectra(saved)
    expected = model_spectra(load_network(saved.parent / "model.safetensors").model, 8, in_channels=1, linear=True)
    assert [layer.name for layer in spectra.layers] == list(expected) == ["conv1", "conv2", "conv3", "head"]
    assert [layer.kind for layer in spectra.layers] == ["TTConv2d"] * 3 + ["Linear"]
    assert [layer.input_size for layer in spectra.layers] == [(8, 8), (8, 8), (4, 4), ()]
    for layer in spectra.layers:
        values = expected[layer.name].double().flatten()
        assert torch.equal(layer.values, values.sort(descending=True).values)
        assert (layer.largest, layer.smallest) == (values.max().item(), values.min().item())
        assert layer.deciles == pytest.approx([np.percentile(values, 10 * tenth) for tenth in range(1, 10)])
    record = json.loads(json.dumps(spectra.to_json()))
    assert record["operator"] == "periodic"
    assert record["input_size"] == 8
    assert record["layers"][0]["count"] == len(record["layers"][0]["values"]) == 64
    assert record["layers"][0].keys() == {
        "name", "kind", "input_size", "count", "largest", "smallest", "deciles", "values",
    }  # fmt: skip


def test_another_input_size(saved: Path) -> None:
    spectra = saved_spectra(saved, 12)
    assert spectra.input_size == 12
    assert [layer.input_size for layer in spectra.layers] == [(12, 12), (12, 12), (6, 6), ()]
    with pytest.raises(ConfigError, match="input_size = 0: must be a whole number of at least 1"):
        saved_spectra(saved, 0)


def test_files_missing_cut_or_altered(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no whole model"):
        saved_spectra(tmp_path / "none" / "model.safetensors")
    with pytest.raises(DataError, match=r"give the model\.safetensors that a trial left"):
        saved_spectra(tmp_path)
    description = json.loads((tmp_path / "model.json").read_text())
    for change in ({"rank": 8}, {"depth": 3}, {"image_size": 7}):
        altered = {**description, "model": {**description["model"], **change}}
        (tmp_path / "model.json").write_text(json.dumps(altered))
        with pytest.raises((DataError, ConfigError)):
            saved_spectra(saved)
    (tmp_path / "model.json").write_text(json.dumps(description))
    saved_spectra(saved)
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(DataError, match="is cut or altered"):
        saved_spectra(saved)


def test_the_file_of_weights_is_enough_under_any_name(saved: Path, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere" / "trial-7-model.safetensors"
    alone.parent.mkdir()
    alone.write_bytes(saved.read_bytes())
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(load_saved(alone)(images), load_saved(saved)(images))
    whole = saved.read_bytes()
    altered = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (whole[:-1], altered, whole[:40], whole.replace(b'rank\\": 16', b'rank\\": 15')):
        assert damaged != whole
        alone.write_bytes(damaged)
        with pytest.raises((DataError, ConfigError)):
            load_saved(alone)
    save_file(load_file(saved), alone)  # without a word on how it is built
    with pytest.raises(DataError, match="does not say itself how its network is built"):
        load_saved(alone)
    # As all were once: with a description beside.
    described = json.loads(saved.with_suffix(".json").read_text())
    described["sha256"] = hashlib.sha256(alone.read_bytes()).hexdigest()
    alone.with_suffix(".json").write_text(json.dumps(described))
    assert torch.equal(load_saved(alone)(images), load_saved(saved)(images))


def test_a_size_that_the_network_cannot_take(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 5), nn.Conv2d(1, 1, 5))
    network = SavedNetwork(model=model, arguments=ModelArguments(**ARGUMENTS))  # type: ignore[arg-type]
    monkeypatch.setattr("ttsv.evaluation.saved.load_network", lambda path: network)
    with pytest.raises(ConfigError, match="input_size = 8: must leave the kernel of layer '1'"):
        saved_spectra(saved)
    assert len(saved_spectra(saved, 9).layers) == 2
    wide = saved_spectra(saved, (9, 12))
    assert [layer.input_size for layer in wide.layers] == [(9, 12), (5, 8)]
    assert wide.to_json()["input_size"] == (9, 12)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_plots(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"spectra{suffix}"
    spectra = {"conv": torch.linspace(2, 0, 50_000), "one value": torch.tensor([1.0]), "": torch.zeros(2, 3)}
    plot_spectra(spectra, path, "a title")
    content = path.read_bytes()
    assert content.startswith(magic)
    assert len(content) < 300_000
    if suffix == ".svg":
        assert b"a title" in content or content.count(b"<path") > 3
    plot_spectra({f"layer {i}": torch.rand(10) for i in range(40)}, path)
    plot_spectra({}, path)


@pytest.mark.parametrize("names", [("c",), ("a" * 60,), tuple(f"features.{i}.conv" for i in range(30))])
def test_names_of_layers_are_not_cut_off(tmp_path: Path, names: tuple[str, ...]) -> None:
    plot_spectra(dict.fromkeys(names, torch.tensor([1_000_000.0, 1.0])), tmp_path / "spectra.png", "a title")
    with Image.open(tmp_path / "spectra.png") as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels.min() < 50
    assert min(edge.min() for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])) == 255


@pytest.mark.parametrize("values", [[0.0], [4.0, 4.0 + 1e-15], [1.0, 1.5, 3.0]])
def test_constants_however_near_each_other_are_drawn(tmp_path: Path, values: list[float]) -> None:
    found = torch.tensor(values, dtype=torch.float64)
    one = EmpiricalLipschitz(
        values=found,
        maximum=max(values),
        space="pixels",
        method="fgsm",
        norm="L2",
        radius=0.5,
        longest_unit=1.0,
    )
    plot_lipschitz([one], tmp_path / "lipschitz.png", bound=5.0)
    assert (tmp_path / "lipschitz.png").stat().st_size > 1000


def test_plots_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plot = '.*spectra\.pdf': must end in \.png or \.svg"):
        plot_spectra({}, tmp_path / "spectra.pdf")
    with pytest.raises(OSError, match="No such file or directory"):
        plot_spectra({}, tmp_path / "none" / "spectra.png")
