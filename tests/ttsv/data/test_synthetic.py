import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lazily import lazily
from ttsv.data import load_dataset
from ttsv.data.catalog import SyntheticShape, dataset_info
from ttsv.data.synthetic import Synthetic, smooth_patterns

linear = lazily("sklearn.linear_model")


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("synthetic:3x32x32:10:2000", "c00e083154682abff357d11297d5e371cf479d55a7c00f24ff2469455d8fc57f"),
        ("synthetic:2x16:3:60", "d0ed5f5b39cb1d238568d866575d7687192b6701a937d223b30f910498f248bf"),
        ("synthetic:1x8x8x8:4:80", "cbcaf652f3fb51c0e16fd6235e1226e571308b337760e26a2f579e3e89f628e8"),
    ],
)
def test_content_never_changes(name: str, sha256: str, tmp_path: Path) -> None:
    data, info = load_dataset(name, tmp_path), dataset_info(name)
    assert data.info == info
    assert data.sha256 == sha256
    for part in (data.train, data.validation, data.test):
        assert part.images.shape[1:] == (info.channels, *[info.image_size] * info.dims)
        assert set(part.labels.tolist()) == set(range(info.classes))


def test_short_name_is_the_same_set(tmp_path: Path) -> None:
    assert load_dataset("synthetic", tmp_path).sha256 == load_dataset("synthetic:3x32x32:10:2000", tmp_path).sha256


def test_images_are_made_in_any_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Synthetic(SyntheticShape(3, 5, 2, 4, 97))
    whole = hashlib.sha256(source.read(tmp_path).images.data).hexdigest()
    for values in (1, 300, 1000):
        monkeypatch.setattr("ttsv.data.synthetic._CHUNK", values)
        assert hashlib.sha256(source.read(tmp_path).images.data).hexdigest() == whole


def test_it_can_be_learned(tmp_path: Path) -> None:
    data = load_dataset("synthetic:3x8x8:10:1000", tmp_path)
    train, test = (part.images.flatten(1).numpy() / 255 for part in (data.train, data.test))
    accuracy = (
        linear.RidgeClassifier(alpha=10).fit(train, data.train.labels.numpy()).score(test, data.test.labels.numpy())
    )
    assert accuracy > 0.8
    # One pixel alone does not tell the classes apart.
    pixel = (
        linear.RidgeClassifier()
        .fit(train[:, :1], data.train.labels.numpy())
        .score(test[:, :1], data.test.labels.numpy())
    )
    assert pixel < 0.4


@given(size=st.integers(1, 20), dims=st.integers(1, 3), seed=st.integers(0, 100))
def test_patterns_are_straight_between_their_knots(size: int, dims: int, seed: int) -> None:
    shape = SyntheticShape(2, size, dims, 3, 30)
    patterns = smooth_patterns(np.random.RandomState(seed), shape)
    assert patterns.shape == (3, 2, *[size] * dims)
    knots = min(4, size)
    expected = np.random.RandomState(seed).randint(0, 256, (3, 2, *[knots] * dims), dtype=np.uint8).astype(float)
    places = np.linspace(0, knots - 1, size)
    for axis in range(2, 2 + dims):
        expected = np.apply_along_axis(lambda line: np.interp(places, np.arange(len(line)), line), axis, expected)
    assert np.abs(patterns - expected).max() <= dims  # rounded down once per axis
