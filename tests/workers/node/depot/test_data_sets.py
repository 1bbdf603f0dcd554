"""Data sets of a node: the head's, brought once and checked, or refused in words."""

import errno
import json
import os
import pickle
import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from service.storage import Folder, trouble_of
from ttsv.data import load_dataset, shared
from ttsv.errors import DataError
from workers.node.depot import data_sets
from workers.node.depot.data_sets import (
    DataSetFiles,
    OtherDataError,
    bring_baseline,
    bring_data_set,
    describe_data_set,
    known_data_sets,
)


class Head(Folder):
    """The head's folder, without Ray; it counts what is read, and may break off."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes_read = 0
        self.breaks_after: int | None = None

    def read(self, path: str, offset: int, count: int) -> bytes:
        if self.breaks_after is not None and self.bytes_read >= self.breaks_after:
            raise ConnectionError("the node is gone")
        piece = super().read(path, offset, count)
        self.bytes_read += len(piece)
        return piece

    def data_set(self, name: str) -> DataSetFiles | str:
        return describe_data_set(name, self.root / "datasets")

    def data_sets(self) -> list[str]:
        return known_data_sets(self.root)


def save(data_dir: Path, seed: int = 0, count: int = 3000) -> int:
    (data_dir / "datasets").mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(seed).integers(0, 256, (count, 3, 20, 20), np.uint8)
    np.savez(data_dir / "datasets" / "mine.npz", x_train=images, y_train=np.arange(count) % 3)
    return (data_dir / "datasets" / "mine.npz").stat().st_size


def flipped(data: bytes, at: int) -> bytes:
    """What a disk makes of it that loses a bit."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def quiet(file: str, done: int, total: int | None) -> None:
    pass


@pytest.fixture
def head(tmp_path: Path) -> Head:
    save(tmp_path / "head")
    return Head(tmp_path / "head")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return tmp_path / "node"


def test_brought_once_and_the_same(head: Head, node: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    assert bring_data_set("npz:mine", node, head, lambda *one: told.append(one))
    size = (head.root / "datasets/mine.npz").stat().st_size
    assert told[-1] == ("mine.npz", size, size)
    assert head.bytes_read == size
    assert not bring_data_set("npz:mine", node, head, quiet)
    assert head.bytes_read == size
    there, here = (load_dataset("npz:mine", place) for place in (head.root, node))
    assert there.sha256 == here.sha256
    assert head.data_sets() == ["npz:mine"]


def test_what_an_interruption_left_is_not_brought_again(head: Head, node: Path) -> None:
    head.breaks_after = 2 * 2**20
    with pytest.raises(ConnectionError):
        bring_data_set("npz:mine", node, head, quiet)
    assert not (node / "datasets/mine.npz").exists()
    head.breaks_after = None
    assert bring_data_set("npz:mine", node, head, quiet)
    assert head.bytes_read == (head.root / "datasets/mine.npz").stat().st_size


def test_a_file_damaged_here_is_brought_again(head: Head, node: Path) -> None:
    bring_data_set("npz:mine", node, head, quiet)
    with (node / "datasets/mine.npz").open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    assert bring_data_set("npz:mine", node, head, quiet)
    assert (node / "datasets/mine.npz").read_bytes() == (head.root / "datasets/mine.npz").read_bytes()


def test_another_set_of_this_name_is_refused(head: Head, node: Path) -> None:
    save(node, seed=1)
    load_dataset("npz:mine", node)
    with pytest.raises(OtherDataError) as caught:
        bring_data_set("npz:mine", node, head, quiet)
    host, record = socket.gethostname(), node / "datasets/npz-mine.sha256.json"
    assert str(caught.value).startswith(f"dataset = 'npz:mine': on {host} its content has SHA-256 ")
    words = f"on {host}, and not on the head, remove {record} and the set's files, then run `ttsv data sync npz:mine`"
    assert words in str(caught.value), "whoever reads it on the head removes nothing there"


def test_a_file_damaged_here_is_brought_again_once_its_copy_is_damaged_too(
    head: Head, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a disk, which leaves size and times as they were: the trial that needs a copy would find the file wrong."""
    bring_data_set("npz:mine", node, head, quiet)
    file = node / "datasets/mine.npz"
    (copy,) = (node / "datasets/cache").glob("*/images.npy")
    stamps = {path: shared._stamp(path) for path in (file, copy)}
    stamp = shared._stamp
    monkeypatch.setattr(shared, "_stamp", lambda path: stamps.get(path) or stamp(path))
    for path in (file, copy):
        path.chmod(0o644)
        path.write_bytes(flipped(path.read_bytes(), 5000))
    assert bring_data_set("npz:mine", node, head, quiet)
    assert load_dataset("npz:mine", node).sha256 == load_dataset("npz:mine", head.root).sha256
    assert file.read_bytes() == (head.root / "datasets/mine.npz").read_bytes()


@pytest.mark.parametrize("where", ["whole", "content", "file", "name"])
@pytest.mark.parametrize("copied", [True, False])
def test_a_record_damaged_here_is_made_anew(head: Head, node: Path, where: str, copied: bool) -> None:
    """The head says what the files are, and they are that; whether they have been read since, or the copy is gone."""
    bring_data_set("npz:mine", node, head, quiet)
    place, read = node / "datasets/npz-mine.sha256.json", head.bytes_read
    record = place.read_bytes()
    (digest,) = json.loads(record)["files"].values()
    what = {
        "whole": b"{",
        "content": json.loads(record)["sha256"].encode(),
        "file": digest.encode(),
        "name": b"mine.npz",
    }
    place.write_bytes(flipped(record, record.index(what[where])))
    if not copied:
        shutil.rmtree(node / "datasets/cache")
    assert not bring_data_set("npz:mine", node, head, quiet)
    assert place.read_bytes() == record
    assert head.bytes_read == read
    assert load_dataset("npz:mine", node).sha256 == load_dataset("npz:mine", head.root).sha256


def test_a_set_used_here_that_has_more_than_the_heads_keeps_its_record(head: Head, node: Path) -> None:
    from PIL import Image

    pets = head.root / "datasets/pets/train"
    for number in range(20):
        folder = pets / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(folder / f"{number}.png")
    shutil.copytree(head.root / "datasets/pets", node / "datasets/pets")
    Image.fromarray(np.full((4, 4), 99, np.uint8)).save(node / "datasets/pets/train/a/more.png")
    load_dataset("folder:pets", node)
    record = (node / "datasets/folder-pets.sha256.json").read_bytes()
    with pytest.raises(OtherDataError, match="its content has SHA-256"):
        bring_data_set("folder:pets", node, head, quiet)
    assert (node / "datasets/folder-pets.sha256.json").read_bytes() == record


def test_the_same_content_in_other_files_is_brought_and_goes_on(head: Head, node: Path) -> None:
    """It was packed anew on the head, where its record was made anew, too."""
    bring_data_set("npz:mine", node, head, quiet)
    path = head.root / "datasets/mine.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez_compressed(path, **arrays)
    (head.root / "datasets/npz-mine.sha256.json").unlink()
    assert bring_data_set("npz:mine", node, head, quiet)
    assert (node / "datasets/mine.npz").read_bytes() == path.read_bytes()
    assert load_dataset("npz:mine", node).sha256 == load_dataset("npz:mine", head.root).sha256
    assert not bring_data_set("npz:mine", node, head, quiet)


def test_a_set_that_is_here_but_was_never_used_is_compared(head: Head, node: Path) -> None:
    save(node, seed=1)
    before = (node / "datasets/mine.npz").read_bytes()
    assert bring_data_set("npz:mine", node, head, quiet), "another file of the name was never used for anything"
    (kept,) = (node / "datasets/.before-sync").rglob("*.npz")
    assert kept.read_bytes() == before, "it may be its owner's only copy"
    assert load_dataset("npz:mine", node).sha256 == load_dataset("npz:mine", head.root).sha256


def test_one_that_nobody_has(head: Head, node: Path) -> None:
    words = (
        f"dataset = 'cifar10': it is not on {socket.gethostname()}, and the head gives none .*`ttsv data fetch cifar10`"
    )
    with pytest.raises(DataError, match=words):
        bring_data_set("cifar10", node, head, quiet)


@pytest.mark.parametrize(("name", "what"), [("npz:nosuch", "nosuch.npz"), ("folder:nosuch", "the folder nosuch")])
def test_one_of_the_users_own_that_nobody_has_is_put_there_and_not_downloaded(
    head: Head, node: Path, name: str, what: str
) -> None:
    with pytest.raises(DataError, match=f"put {what} into `datasets` of the head's data folder, then") as caught:
        bring_data_set(name, node, head, quiet)
    assert "data fetch" not in str(caught.value)


def test_one_that_is_no_set_is_mended_where_it_is(head: Head, node: Path) -> None:
    np.savez(head.root / "datasets/mine.npz", x_train=np.zeros((30, 1, 4, 4)), y_train=np.arange(30) % 3)
    words = r"gives none \(.* type float64; .*\): mend it on the head, then `ttsv data sync npz:mine` on"
    with pytest.raises(DataError, match=words) as caught:
        bring_data_set("npz:mine", node, head, quiet)
    assert "put mine.npz" not in str(caught.value)


def test_what_the_head_has_is_told_before_its_first_use(head: Head, node: Path) -> None:
    datasets = head.root / "datasets"
    (datasets / "pets" / "train" / "cat").mkdir(parents=True)
    (datasets / "cifar-10-batches-py").mkdir()
    load_dataset("digits", head.root)
    assert head.data_sets() == ["cifar10", "npz:mine", "folder:pets"], "those that need no files are left out"
    assert not (datasets / "npz-mine.sha256.json").exists()
    assert bring_data_set("npz:mine", node, head, quiet)
    assert (datasets / "npz-mine.sha256.json").read_bytes() == (node / "datasets/npz-mine.sha256.json").read_bytes()


def test_one_that_this_machine_alone_has(head: Head, node: Path) -> None:
    save(node)
    (node / "datasets/mine.npz").rename(node / "datasets/other.npz")
    load_dataset("npz:other", node)
    assert not bring_data_set("npz:other", node, head, quiet)


def test_embedded_sets_need_no_files(head: Head, node: Path) -> None:
    assert not bring_data_set("digits", node, head, quiet)
    assert head.bytes_read == 0
    record = node / "datasets" / "digits.sha256.json"
    was = record.read_text()
    record.write_text(was.replace('"sha256": "', '"sha256": "0'))
    assert not bring_data_set("digits", node, head, quiet)
    assert record.read_text() == was


def test_another_content_of_an_embedded_set_is_refused(head: Head, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no files to be compared: what is read here is."""
    load_dataset("digits", node)
    monkeypatch.setattr(head, "data_set", lambda name: DataSetFiles(name, "0" * 64, {}))
    for _ in range(2):
        with pytest.raises(OtherDataError, match=r"dataset = 'digits': .* the content has SHA-256 "):
            bring_data_set("digits", node, head, quiet)


def test_folders_of_images(head: Head, node: Path) -> None:
    from PIL import Image

    for label in "ab":
        (head.root / "datasets/pets/train" / label).mkdir(parents=True)
        for number in range(20):
            pixels = np.full((4, 4), 10 * number, np.uint8)
            Image.fromarray(pixels).save(head.root / f"datasets/pets/train/{label}/{number}.png")
    assert bring_data_set("folder:pets", node, head, quiet)
    assert load_dataset("folder:pets", node).sha256 == load_dataset("folder:pets", head.root).sha256
    Image.fromarray(pixels).save(node / f"datasets/pets/train/{label}/more.png")
    with pytest.raises(
        OtherDataError, match=r"on .*, and not on the head: .*more\.png is new since the set's first use"
    ):
        bring_data_set("folder:pets", node, head, quiet)


def test_corrupted_images(head: Head, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttsv.data.corruptions import PUBLISHED

    folder = head.root / "datasets" / "CIFAR-10-C"
    folder.mkdir()
    for name in PUBLISHED["CIFAR-10-C"].md5:
        np.save(folder / name, np.frombuffer(os.urandom(100), np.uint8))
    assert bring_data_set("CIFAR-10-C", node, head, quiet)
    assert {path.name for path in (node / "datasets/CIFAR-10-C").iterdir()} == set(PUBLISHED["CIFAR-10-C"].md5)
    record = (head.root / "datasets/CIFAR-10-C.sha256.json").read_text()
    assert record == (node / "datasets/CIFAR-10-C.sha256.json").read_text(), "as at the first use of either"
    read = head.bytes_read
    assert not bring_data_set("CIFAR-10-C", node, head, quiet)
    for key in ("sha256", "snow.npy"):
        damaged = node / "datasets/CIFAR-10-C.sha256.json"
        damaged.write_bytes(flipped(record.encode(), record.index(f'{key}": "') + len(key) + 4))
        assert not bring_data_set("CIFAR-10-C", node, head, quiet)
        assert damaged.read_text() == record
    assert head.bytes_read == read
    spoilt = node / "datasets/CIFAR-10-C/snow.npy"
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
    assert bring_data_set("CIFAR-10-C", node, head, quiet), "trials would be refused it, once they have trained"
    assert head.bytes_read == read + spoilt.stat().st_size
    assert spoilt.read_bytes() == (folder / "snow.npy").read_bytes()
    assert head.data_sets() == ["npz:mine", "CIFAR-10-C"]


def test_the_baseline_of_corruption_errors_is_the_heads(head: Head, node: Path) -> None:
    name = "datasets/npz-mine-corruption-baseline.json"
    for text in ("first", "second"):
        (head.root / name).write_text(text)
        for _ in range(2):
            bring_baseline("npz:mine", node, head)
            assert (node / name).read_text() == text
    (head.root / name).unlink()
    bring_baseline("npz:mine", node, head)
    assert not (node / name).exists()


def test_two_trials_that_begin_at_once_bring_a_baseline_one_after_the_other(head: Head, node: Path) -> None:
    (head.root / "datasets/npz-mine-corruption-baseline.json").write_text("first")
    genuine, others = head.read, list[threading.Thread]()

    def read(path: str, offset: int, count: int) -> bytes:
        if not others:
            others.append(threading.Thread(target=bring_baseline, args=("npz:mine", node, Head(head.root))))
            others[0].start()
            others[0].join(0.3)
        return genuine(path, offset, count)

    head.read = read  # type: ignore[method-assign]
    bring_baseline("npz:mine", node, head)
    others[0].join()
    assert (node / "datasets/npz-mine-corruption-baseline.json").read_text() == "first"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_head_whose_disk_is_in_trouble_is_no_head_without_the_set(
    head: Head, node: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A trial waits then, where it would fail for data that nobody has."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ttsv.data.shared._copy", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        bring_data_set("npz:mine", node, head, quiet)
    assert caught.value.errno == number
    assert pickle.loads(pickle.dumps(caught.value)).errno == number, "it comes from another process"


def test_a_file_damaged_on_the_head_is_said_to_be(head: Head, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that took it for a disk in trouble would try again for ever, and others' sets would not come either."""
    theirs = head.data_set("npz:mine")
    monkeypatch.setattr(head, "data_set", lambda name: theirs)  # which sees size and times, and a copy that is whole
    with (head.root / "datasets/mine.npz").open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    with pytest.raises(DataError, match=r"dataset = 'npz:mine': the head's datasets/mine\.npz is damaged") as caught:
        bring_data_set("npz:mine", node, head, quiet)
    assert trouble_of(caught.value) is None
    assert not (node / "datasets/mine.npz").exists()


def test_paths_of_a_head_lead_nowhere_else(head: Head, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = head.data_set("npz:mine")
    assert isinstance(theirs, DataSetFiles)
    monkeypatch.setattr(
        head, "data_set", lambda name: DataSetFiles(name, theirs.sha256, {"../../x": theirs.files["mine.npz"]})
    )
    with pytest.raises(PermissionError):
        bring_data_set("npz:mine", node, head, quiet)
    assert data_sets.FOLDER == "datasets"
