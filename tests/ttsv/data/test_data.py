import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lazily import lazily
from ttsv.data import DATASETS, fetch_dataset, list_datasets, load_dataset, verify_dataset
from ttsv.data import shared as shared_module
from ttsv.data.loading import as_pixels
from ttsv.data.source import Arrays
from ttsv.data.sources import Digits, source_of
from ttsv.data.split import split_order, stratified
from ttsv.errors import ConfigError, DataError

datasets = lazily("sklearn.datasets")


def test_labels_and_shapes_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((2, 1, 8, 8), dtype=np.uint8)

    def read(number: int, arrays: Arrays) -> None:
        class Broken(Digits):
            def read(self, folder: Path) -> Arrays:
                return arrays

        monkeypatch.setattr(shared_module, "source_of", lambda name: Broken())
        verify_dataset("digits", tmp_path / str(number))

    read(0, Arrays(images, np.array([0, 9]), None))
    with pytest.raises(DataError, match="labels outside 0 to 9"):
        read(1, Arrays(images, np.array([0, 10]), None))
    with pytest.raises(DataError, match="labels outside 0 to 9"):
        read(2, Arrays(images, np.array([0, -1]), None))
    with pytest.raises(DataError, match="expected"):
        read(3, Arrays(images, np.array([0, 1, 2]), None))
    with pytest.raises(DataError, match="expected"):
        read(4, Arrays(images[:0], np.array([], dtype=np.int64), None))


# --- the digits and the split ---


def test_digits_are_whole_and_in_range(tmp_path: Path) -> None:
    data = load_dataset("digits", tmp_path)
    parts = (data.train, data.validation, data.test)
    pixels = torch.cat([part.images for part in parts])
    assert pixels.shape == (1797, 1, 8, 8)
    assert pixels.dtype == torch.float32
    assert [pixels.min().item(), pixels.max().item()] == [0, 1]
    original = datasets.load_digits()
    assert sorted(map(bytes, pixels.mul(16).byte().flatten(1).numpy())) == sorted(
        map(bytes, original.data.astype(np.uint8))
    )
    assert data.split["images"] == {"train": 1295, "validation": 143, "test": 359}
    counts = torch.stack([part.labels.bincount(minlength=10) for part in parts]).double()
    shares = counts / counts.sum(0)
    assert (shares[2] - 0.2).abs().max() < 0.01
    assert (shares[1] - 0.08).abs().max() < 0.01


def test_digits_content_and_split_never_change(tmp_path: Path) -> None:
    data = load_dataset("digits", tmp_path)
    assert data.sha256 == "b4962e1929c4c377fdd20265c695ff630ffef36006df2db69774ab360db2235f"
    drawn = hashlib.sha256()
    for part in (data.train, data.validation, data.test):
        drawn.update(part.images.numpy().tobytes() + part.labels.numpy().tobytes())
    assert drawn.hexdigest() == "10ede3c023ebc5aad16df67056ea4ff351f41e584dbdfe48b9c7c5335c45ff64"


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=80),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_stratified_parts_the_indices(labels: list[int], share: float, seed: int) -> None:
    array = np.array(labels)
    rest, drawn = stratified(array, share, seed)
    assert sorted([*rest, *drawn]) == list(range(len(labels)))
    for label in set(labels):
        assert (array[drawn] == label).sum() == round(share * labels.count(label))
    again = stratified(array, share, seed)
    assert all(np.array_equal(a, b) for a, b in zip((rest, drawn), again, strict=True))


def test_pixels() -> None:
    levels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert as_pixels(levels).tolist() == pytest.approx([0, 0.2, 1])
    assert as_pixels(levels).dtype == torch.float32
    floats = torch.tensor([0.0, 0.5])
    assert as_pixels(floats) is floats


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    train_count=st.none() | st.integers(0, 60),
)
def test_order_has_every_image_once_part_by_part(labels: list[int], train_count: int | None) -> None:
    count = None if train_count is None else min(train_count, len(labels))
    order, split = split_order(np.array(labels), count)
    assert sorted(order) == list(range(len(labels)))
    parts = split["images"]
    assert list(parts) == ["train", "validation", "test"]
    bounds = np.cumsum([0, *parts.values()])
    chunks = [order[a:b] for a, b in itertools.pairwise(bounds)]
    assert bounds[-1] == len(labels)
    assert all((np.diff(chunk) > 0).all() for chunk in chunks)
    if count is not None:
        assert chunks[2].tolist() == list(range(count, len(labels)))


def test_every_listed_set_has_a_source(tmp_path: Path) -> None:
    for name, info in DATASETS.items():
        assert source_of(name).version
        assert len(info.mean) == len(info.std) == info.channels
    assert [listed.name for listed in list_datasets(tmp_path)] == list(DATASETS)


def test_unknown_set(tmp_path: Path) -> None:
    for call in (load_dataset, fetch_dataset, verify_dataset):
        with pytest.raises(ConfigError, match="dataset = 'mnist'"):
            call("mnist", tmp_path)


def test_embedded_set_needs_no_fetch(tmp_path: Path) -> None:
    fetch_dataset("digits", tmp_path)
    assert [listed.name for listed in list_datasets(tmp_path) if listed.sha256] == ["digits"]
    assert verify_dataset("digits", tmp_path) == load_dataset("digits", tmp_path).sha256


def test_package_imports_no_torch() -> None:
    code = "import sys, ttsv.data, ttsv.models, ttsv.trial; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
