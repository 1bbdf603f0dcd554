import errno
import json
import multiprocessing
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttsv.data import fetch_dataset, list_datasets, load_dataset, shared, verify_dataset
from ttsv.data.content import content_sha256
from ttsv.data.download import file_digest
from ttsv.data.own import Npz
from ttsv.data.record import file_hashes, write_json
from ttsv.data.shared import sealed
from ttsv.data.source import Arrays
from ttsv.errors import DataError

NAME = "npz:mine"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`data_dir/datasets` with one set."""
    made = tmp_path / "datasets"
    made.mkdir()
    save(made, 0)
    return made


def save(folder: Path, seed: int, name: str = "mine", train: int = 50) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 5
    np.savez(
        folder / f"{name}.npz",
        x_train=images[:train],
        y_train=labels[:train],
        x_test=images[train:],
        y_test=labels[train:],
    )


def read(name: str, folder: Path) -> Arrays:
    return Npz(name).read(folder)


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "cache").iterdir() if path.is_dir())


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object) -> None:
        raise AssertionError("read or hashed again")

    monkeypatch.setattr(Npz, "files", called)
    monkeypatch.setattr(Npz, "read", called)
    monkeypatch.setattr(shared, "file_hashes", called)
    monkeypatch.setattr(shared, "content_sha256", called)


def flip(path: Path, offset: int, folder: Path) -> None:
    """Changes a bit as a disk does: size and times stay, so that the note has those that the file has now."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(0o444)
    state, note_path = path.stat(), folder / "cache" / "npz-mine.json"
    note = json.loads(note_path.read_text())
    del note["note_sha256"]
    note["stamps"][str(path.relative_to(folder))] = [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    write_json(note_path, sealed(note))


def test_second_load_reads_and_hashes_no_more_than_the_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_dataset(NAME, folder.parent)
    forbid_reading(monkeypatch)
    second = load_dataset(NAME, folder.parent)
    assert (second.info, second.sha256, second.split) == (first.info, first.sha256, first.split)
    for one, other in zip(
        (first.train, first.validation, first.test), (second.train, second.validation, second.test), strict=True
    ):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_tensors_are_views_of_one_file(folder: Path) -> None:
    data = load_dataset(NAME, folder.parent)
    (copy,) = copies(folder)
    arrays = read("mine", folder)
    assert copy.name == f"{content_sha256(arrays)}-45-5-10"
    images, labels = np.load(copy / "images.npy"), np.load(copy / "labels.npy")
    parts = (data.train, data.validation, data.test)
    assert np.array_equal(np.concatenate([part.images.numpy() for part in parts]), images)
    assert np.array_equal(np.concatenate([part.labels.numpy() for part in parts]), labels)
    pointers = [part.images.data_ptr() for part in parts]
    assert np.diff(pointers).tolist() == [45 * 192, 5 * 192]  # one mapping, nothing was copied
    with Path("/proc/self/maps").open() as maps:
        mapped = [line.split()[1] for line in maps if line.rstrip().endswith(str(copy / "images.npy"))]
    assert mapped
    assert all(access.endswith("p") for access in mapped)  # private: no way to the file


def test_a_stray_write_reaches_nobody_else(folder: Path) -> None:
    data = load_dataset(NAME, folder.parent)
    other = load_dataset(NAME, folder.parent)
    before = data.train.images.clone()
    data.train.images.zero_()
    data.train.labels.fill_(4)
    assert torch.equal(other.train.images, before)
    assert torch.equal(load_dataset(NAME, folder.parent).train.images, before)
    assert set(other.train.labels.tolist()) == {0, 1, 2, 3, 4}
    assert verify_dataset(NAME, folder.parent) == data.sha256
    for path in copies(folder)[0].iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_touched_files_are_checked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset(NAME, folder.parent)
    hashed: list[Path] = []

    def counted(paths: Any, base: Path) -> dict[str, str]:
        paths = list(paths)
        hashed.extend(paths)
        return file_hashes(paths, base)

    monkeypatch.setattr(shared, "file_hashes", counted)
    load_dataset(NAME, folder.parent)
    assert hashed == []
    os.utime(folder / "mine.npz")
    load_dataset(NAME, folder.parent)
    assert folder / "mine.npz" in hashed
    hashed.clear()
    load_dataset(NAME, folder.parent)
    assert hashed == []


def test_changed_content_is_refused_until_the_record_is_removed(folder: Path) -> None:
    first = load_dataset(NAME, folder.parent)
    status = (folder / "mine.npz").stat()
    save(folder, 1)
    os.utime(folder / "mine.npz", ns=(status.st_atime_ns, status.st_mtime_ns))  # of the same size and age
    for call in (load_dataset, verify_dataset, fetch_dataset):
        with pytest.raises(DataError, match=rf"{folder}/mine.npz has changed since .* remove {folder}/npz-mine.sha256"):
            call(NAME, folder.parent)
    (folder / "npz-mine.sha256.json").unlink()
    second = load_dataset(NAME, folder.parent)
    assert second.sha256 == content_sha256(read("mine", folder)) != first.sha256


def test_content_read_otherwise_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset(NAME, folder.parent)
    monkeypatch.setattr(Npz, "version", "2")
    real = Npz.read
    monkeypatch.setattr(Npz, "read", lambda self, base: real(self, base)._replace(labels=np.arange(60) % 4))
    with pytest.raises(DataError, match="data set 'npz:mine': the content has SHA-256"):
        load_dataset(NAME, folder.parent)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": "x"}'])
def test_damaged_record_is_named(folder: Path, content: str) -> None:
    load_dataset(NAME, folder.parent)
    record = folder / "npz-mine.sha256.json"
    record.write_text(content)
    for call in (load_dataset, verify_dataset):
        with pytest.raises(DataError, match=f"{record} is cut or altered .* remove it"):
            call(NAME, folder.parent)


def test_record_says_what_was_found(folder: Path) -> None:
    data = load_dataset(NAME, folder.parent)
    record = json.loads((folder / "npz-mine.sha256.json").read_text())
    assert record == {
        "dataset": NAME,
        "sha256": data.sha256,
        "files": file_hashes([folder / "mine.npz"], folder),
    }


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 0}', '{"format": 1}'])
def test_copy_without_a_whole_note_is_made_again(folder: Path, content: str) -> None:
    first = load_dataset(NAME, folder.parent)
    (folder / "cache" / "npz-mine.json").write_text(content)
    assert load_dataset(NAME, folder.parent).sha256 == first.sha256
    assert len(copies(folder)) == 1


@pytest.mark.parametrize("damage", ["cut", "altered", "gone"])
def test_damaged_copy_is_named_and_made_again(folder: Path, damage: str) -> None:
    first = load_dataset(NAME, folder.parent).train.images.clone()
    path = copies(folder)[0] / "images.npy"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:-1] if damage == "cut" else content)
        with pytest.raises(DataError, match=f"{path} is cut or altered: remove {path.parent}"):
            verify_dataset(NAME, folder.parent)
    assert torch.equal(load_dataset(NAME, folder.parent).train.images, first)
    verify_dataset(NAME, folder.parent)
    assert len(copies(folder)) == 1


@pytest.mark.parametrize("offset", [3, 60, -9])
@pytest.mark.parametrize("file", ["images.npy", "labels.npy"])
def test_a_bit_that_the_disk_lost_is_noticed_before_anything_computes_with_it(
    folder: Path, file: str, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the header, where it says the shape, or in what follows: nobody trains on it, and the copy is made anew."""
    first = load_dataset(NAME, folder.parent)
    images, labels = first.train.images.clone(), first.train.labels.clone()
    path = copies(folder)[0] / file
    whole = path.read_bytes()
    flip(path, offset, folder)
    assert path.read_bytes() != whole
    again = load_dataset(NAME, folder.parent)
    assert torch.equal(again.train.images, images)
    assert torch.equal(again.train.labels, labels)
    assert path.read_bytes() == whole
    assert f"{path} is not what was written there" in caplog.text
    caplog.clear()
    load_dataset(NAME, folder.parent)
    assert caplog.text == ""


def test_a_lost_bit_of_header_does_not_keep_the_sets_from_being_listed(folder: Path) -> None:
    load_dataset(NAME, folder.parent)
    flip(copies(folder)[0] / "images.npy", 3, folder)
    assert {one.name: one.sha256 for one in list_datasets(folder.parent)}[NAME] is None


def test_a_lost_bit_of_the_note_splits_the_set_no_other_way(folder: Path) -> None:
    """Wherever it is: the set is read as it was, or the note made anew."""
    first = load_dataset(NAME, folder.parent)
    note = folder / "cache" / "npz-mine.json"
    whole = note.read_bytes()
    for offset in range(len(whole)):
        content = bytearray(whole)
        content[offset] ^= 1
        note.write_bytes(content)
        found = shared.find_shared(NAME, folder)
        assert found is None or (found.split, found.sha256) == (first.split, first.sha256), offset
    assert load_dataset(NAME, folder.parent).split == first.split
    assert note.read_bytes() == whole


def test_a_disk_without_room_for_a_copy_is_said_and_ends_no_process(small_disk: Callable[[int], Path]) -> None:
    """A mapping that the disk has no room for kills who writes to it."""
    disk = small_disk(64)
    (disk / "datasets").mkdir()
    save(disk / "datasets", 0)
    filler = disk / "filler"
    filler.write_bytes(bytes(36864))
    with pytest.raises(DataError, match="No space left on device"):
        load_dataset(NAME, disk)
    filler.unlink()
    assert load_dataset(NAME, disk).info.name == NAME


def test_equal_content_has_one_copy_unless_it_is_split_otherwise(folder: Path) -> None:
    save(folder, 0, "same")
    save(folder, 0, "other", train=40)
    data = {name: load_dataset(f"npz:{name}", folder.parent) for name in ("mine", "same", "other")}
    assert len({entry.sha256 for entry in data.values()}) == 1
    assert [path.name[64:] for path in copies(folder)] == ["-35-5-20", "-45-5-10"]
    assert data["same"].info.name == "npz:same"
    load_dataset(NAME, folder.parent)


def test_two_names_of_one_content_may_be_used_first_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes the copy, the other finds it there: it is not put in the place of what others have opened."""
    save(folder, 0, "same")
    other = threading.Thread(target=load_dataset, args=("npz:same", folder.parent))

    def while_the_other_looks(path: Path, algorithm: str) -> str | None:
        found = file_digest(path, algorithm)
        if found is None and other.ident is None:  # there is no copy yet
            other.start()
            other.join(1)
        return found

    monkeypatch.setattr(shared, "file_digest", while_the_other_looks)
    load_dataset(NAME, folder.parent)
    other.join()
    assert [shared.find_shared(name, folder) is not None for name in (NAME, "npz:same")] == [True, True]


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    left = folder / "cache" / ".npz-mine.x1y2"
    left.mkdir(parents=True)
    (left / "images.npy").write_bytes(b"half")
    load_dataset(NAME, folder.parent)
    assert not left.exists()
    assert not [path for path in (folder / "cache").iterdir() if path.name.startswith(".")]


def test_what_is_in_the_making_of_another_set_stays(folder: Path) -> None:
    """Its name may begin as this one's does."""
    note = folder / "cache" / ".npz-mine.json.7"
    note.parent.mkdir()
    note.write_text("half")
    with shared.locked("npz:mine.small", folder):
        made = [note.with_name(f".npz-mine.small.{rest}") for rest in ("x1y2", "json.7")]
        made[0].mkdir()
        made[1].touch()
        load_dataset(NAME, folder.parent)
        assert ([path.exists() for path in made], note.exists()) == ([True, True], False)


def test_the_disk_refusing_is_bad_data(folder: Path) -> None:
    (folder / "cache").write_text("a file where a folder has to be")
    with pytest.raises(DataError, match=f"data set 'npz:mine': {folder} cannot be used"):
        load_dataset(NAME, folder.parent)


def _load(folder: str, start: Any, found: Any) -> None:
    start.wait(60)
    data = load_dataset(NAME, Path(folder))
    found.put((data.sha256, int(data.train.images.long().sum())))


def test_many_processes_at_once_make_one_copy(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, found = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_load, args=(str(folder.parent), start, found)) for _ in range(4)]
    for process in processes:
        process.start()
    results = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len(set(results)) == 1
    assert results[0][0] == content_sha256(read("mine", folder))
    assert len(copies(folder)) == 1


def test_what_a_full_disk_does_not_take_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "npz-mine.sha256.json"
    write_json(path, {"sha256": "first"})

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ttsv.data.content.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"sha256": "second"})
    assert json.loads(path.read_text()) == {"sha256": "first"}
    assert list(tmp_path.iterdir()) == [path]
