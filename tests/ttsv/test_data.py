import hashlib
import io
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, CIFAR100

from ttsv.data import DATASETS, fetch_dataset, load_dataset, verify_dataset
from ttsv.data.loading import as_pixels, content_sha256, stratified
from ttsv.data.sources import SOURCES, Arrays
from ttsv.errors import ConfigError, DataError

CIFARS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
PER_FILE = 40


# --- archives in the publisher's format ---


def batch_pickle(images: NDArray[np.uint8], label_key: str, labels: list[int]) -> bytes:
    """A batch as the authors' Python 2 and NumPy wrote it: byte strings and an old dtype, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    pixels = images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + number(1) + number(len(images)) + number(3072) + b"\x86"
    array += b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    array += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array += b"\x89" + b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    label_list = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(label_key.encode()) + label_list + b"u."


class Archive:
    """A small CIFAR archive whose checksums torchvision is made to expect."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dataset: Any = CIFARS[name]
        self.folder = folder
        random = np.random.default_rng(7)
        classes = DATASETS[name].classes
        key = "labels" if name == "cifar10" else "fine_labels"
        files: dict[str, bytes] = {}
        self.images, self.labels = [], []
        for file, _ in self.dataset.train_list + self.dataset.test_list:
            images = random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
            labels = [(i * 7 + len(files)) % classes for i in range(PER_FILE)]
            files[file] = batch_pickle(images, key, labels)
            self.images.append(images)
            self.labels += labels
        names = [f"class {index}" for index in range(classes)]
        files[self.dataset.meta["filename"]] = pickle.dumps({self.dataset.meta["key"]: names}, protocol=2)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for file, content in files.items():
                entry = tarfile.TarInfo(f"{self.dataset.base_folder}/{file}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        self.content = buffer.getvalue()
        for attribute in ("train_list", "test_list"):
            expected = [[file, md5(files[file])] for file, _ in getattr(self.dataset, attribute)]
            monkeypatch.setattr(self.dataset, attribute, expected)
        meta = self.dataset.meta["filename"]
        monkeypatch.setattr(self.dataset, "meta", {**self.dataset.meta, "md5": md5(files[meta])})
        monkeypatch.setattr(self.dataset, "tgz_md5", md5(self.content))
        # A closed port stands for a machine without a network.
        monkeypatch.setattr(self.dataset, "url", "http://127.0.0.1:9/archive.tar.gz")

    @property
    def path(self) -> Path:
        return self.folder / "datasets" / str(self.dataset.filename)

    def put(self, content: bytes | None = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.content if content is None else content)

    def unpacked(self, file: str) -> Path:
        return self.folder / "datasets" / str(self.dataset.base_folder) / file


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture(params=sorted(CIFARS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def archive(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    return Archive(name, tmp_path, monkeypatch)


def refuse_to_unpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpickled(*_: object, **__: object) -> None:
        raise AssertionError("unpickled before the checksum was checked")

    monkeypatch.setattr(pickle, "load", unpickled)


def test_whole_archive_is_fetched_without_a_network_and_read(name: str, archive: Archive) -> None:
    archive.put()
    with pytest.raises(DataError, match=f"not unpacked: run `ttsv data fetch {name}`"):
        load_dataset(name, archive.folder)
    fetch_dataset(name, archive.folder)
    data = load_dataset(name, archive.folder)
    count = len(archive.images) * PER_FILE
    assert data.split["images"]["test"] == PER_FILE
    assert sum(data.split["images"].values()) == count
    expected = torch.from_numpy(archive.images[-1].reshape(-1, 3, 32, 32))
    assert data.test.images.dtype == torch.uint8
    assert torch.equal(data.test.images, expected)
    assert data.test.labels.tolist() == archive.labels[-PER_FILE:]
    given = Arrays(np.concatenate(archive.images).reshape(-1, 3, 32, 32), np.array(archive.labels), count - PER_FILE)
    assert verify_dataset(name, archive.folder) == data.sha256 == content_sha256(given)


def test_missing_set_names_the_command(name: str, tmp_path: Path) -> None:
    for call in (load_dataset, verify_dataset):
        with pytest.raises(DataError, match=f"`ttsv data fetch {name}`"):
            call(name, tmp_path)


@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_damaged_archive_is_named(name: str, archive: Archive, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(archive.content)
    content[len(content) // 2] ^= 1
    archive.put(archive.content[:-20] if damage == "cut" else bytes(content))
    refuse_to_unpickle(monkeypatch)
    with pytest.raises(DataError, match=rf"{archive.path} is cut or altered.*`ttsv data fetch {name}`"):
        load_dataset(name, archive.folder)
    with pytest.raises(DataError, match=rf"to {archive.path} failed.*put the whole archive"):
        fetch_dataset(name, archive.folder)


@pytest.mark.parametrize("damage", ["cut", "altered", "missing"])
@pytest.mark.parametrize("which", ["train", "test", "meta"])
def test_damaged_file_is_named_and_mended(
    name: str, archive: Archive, damage: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.put()
    fetch_dataset(name, archive.folder)
    dataset = archive.dataset
    files = {"train": dataset.train_list[0][0], "test": dataset.test_list[0][0], "meta": dataset.meta["filename"]}
    file = archive.unpacked(files[which])
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage == "cut" else content)
    with monkeypatch.context() as patch:
        refuse_to_unpickle(patch)
        match = f"{file} is " + ("missing" if damage == "missing" else "cut or altered")
        for call in (load_dataset, verify_dataset):
            with pytest.raises(DataError, match=match):
                call(name, archive.folder)
    fetch_dataset(name, archive.folder)
    load_dataset(name, archive.folder)


def test_labels_and_shapes_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((2, 1, 8, 8), dtype=np.uint8)

    def read(arrays: Arrays) -> None:
        class Broken:
            def fetch(self, folder: Path) -> None: ...

            def read(self, folder: Path) -> Arrays:
                return arrays

        monkeypatch.setitem(SOURCES, "digits", Broken())
        verify_dataset("digits", tmp_path)

    read(Arrays(images, np.array([0, 9]), None))
    with pytest.raises(DataError, match="labels outside 0 to 9"):
        read(Arrays(images, np.array([0, 10]), None))
    with pytest.raises(DataError, match="expected"):
        read(Arrays(images, np.array([0, 1, 2]), None))
    with pytest.raises(DataError, match="expected"):
        read(Arrays(images[:0], np.array([], dtype=np.int64), None))


# --- the digits and the split ---


def test_digits_are_whole_and_in_range(tmp_path: Path) -> None:
    data = load_dataset("digits", tmp_path)
    parts = (data.train, data.validation, data.test)
    pixels = torch.cat([part.images for part in parts])
    assert pixels.shape == (1797, 1, 8, 8)
    assert pixels.dtype == torch.float32
    assert [pixels.min().item(), pixels.max().item()] == [0, 1]
    original = load_digits()
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


def test_every_listed_set_has_a_source() -> None:
    assert SOURCES.keys() == DATASETS.keys()


def test_unknown_set(tmp_path: Path) -> None:
    for call in (load_dataset, fetch_dataset, verify_dataset):
        with pytest.raises(ConfigError, match="dataset = 'mnist'"):
            call("mnist", tmp_path)


def test_embedded_set_needs_no_fetch(tmp_path: Path) -> None:
    fetch_dataset("digits", tmp_path)
    assert verify_dataset("digits", tmp_path) == load_dataset("digits", tmp_path).sha256


def test_package_imports_no_torch() -> None:
    code = "import sys, ttsv.data, ttsv.models, ttsv.trial; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
