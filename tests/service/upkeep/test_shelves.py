"""Room for a backup is asked for where its bytes will be, on the disks that there are."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.errors import UserError
from service.settings import Settings
from service.upkeep import shelves
from service.upkeep.archive import FileEntry, Manifest, TableEntry
from service.upkeep.shelves import Shelf

MIB = 2**20
SHA = "0" * 64
SPARE = 256


def manifest() -> Manifest:
    """300 MiB of rows and secrets, and of trials 500 MiB in two files."""
    return Manifest(
        id="0" * 32,
        made_at="2026-11-25T14:00:00+00:00",
        package="1",
        database="sqlite",
        revision="1",
        counters={},
        tables=[TableEntry(name="trials", columns=["id"], rows=1, size=299 * MIB, sha256=SHA)],
        files=[
            FileEntry(path="key-secret", size=MIB, sha256=SHA),
            FileEntry(path="trials/1/1/model.safetensors", size=400 * MIB, sha256=SHA),
            FileEntry(path="trials/2/1/model.safetensors", size=100 * MIB, sha256=SHA),
        ],
        missing=[],
    )


class Disks:
    """How many MiB are free on the disks of folders, by the name of the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.free, self.tmp_path, self.apart = {"data": 0, "store": 0}, tmp_path, False
        genuine = Path.stat

        def stat(path: Path, **named: Any) -> Any:
            found = genuine(path, **named)
            return os.stat_result((*found[:2], hash(path.name) if self.apart else 1, *found[3:]))

        for name in self.free:
            (tmp_path / name).mkdir()
        monkeypatch.setattr(Path, "stat", stat)
        monkeypatch.setattr(
            shelves, "shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=self.free[path.name] * MIB))
        )

    def refuse_full(self, *, apart: bool, data: int, store: int) -> bool:
        self.apart, self.free = apart, {"data": data, "store": store}
        shelf = Shelf.of(Settings(data_dir=self.tmp_path / "data", storage=str(self.tmp_path / "store")))
        try:
            shelf.refuse_full(self.tmp_path / "data", manifest())
        except UserError:
            return True
        return False


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disks:
    return Disks(monkeypatch, tmp_path)


def test_on_one_disk_all_of_it_needs_room_together(disks: Disks) -> None:
    assert disks.refuse_full(apart=False, data=SPARE + 799, store=SPARE + 799)
    assert not disks.refuse_full(apart=False, data=SPARE + 800, store=SPARE + 800)


def test_on_two_disks_the_largest_file_of_a_trial_passes_through_the_data_folder(disks: Disks) -> None:
    assert disks.refuse_full(apart=True, data=SPARE + 699, store=SPARE + 500)
    assert disks.refuse_full(apart=True, data=SPARE + 700, store=SPARE + 499)
    assert not disks.refuse_full(apart=True, data=SPARE + 700, store=SPARE + 500)


def test_without_a_store_all_of_it_goes_into_the_data_folder(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    large = manifest().model_copy(update={"tables": [manifest().tables[0].model_copy(update={"size": free})]})
    with pytest.raises(UserError, match="make room"):
        Shelf.of(Settings(data_dir=tmp_path)).refuse_full(tmp_path, large)


@pytest.mark.parametrize("name", ["trials", "datasets/digits.sha256.json"])
def test_nothing_is_renamed_from_disk_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder, other = tmp_path / "data", tmp_path / "other"
    shelf = Shelf.of(Settings(data_dir=folder))
    (folder / name).parent.mkdir(parents=True)
    other.mkdir()
    shelf.refuse_apart(folder, [name])
    top = folder / name.partition("/")[0]
    genuine = shelves._mount

    def mounted(path: Path, *, follow: bool) -> tuple[int, str] | None:
        apart = path == top or (follow and path.resolve() == other)
        return (0, "another") if apart else genuine(path, follow=follow)

    monkeypatch.setattr(shelves, "_mount", mounted)
    top.mkdir(exist_ok=True)
    with pytest.raises(UserError, match=f"{top} is another disk, mounted there: .* Take {top.name} away for"):
        shelf.refuse_apart(folder, [name])
    top.rmdir()
    top.symlink_to(other)
    with pytest.raises(UserError, match=f"{top} is a link: "):
        shelf.refuse_apart(folder, [name])
    stored = Shelf.of(Settings(data_dir=tmp_path / "fresh", storage=str(folder)))
    (tmp_path / "fresh").mkdir()
    if name == "trials":
        with pytest.raises(UserError, match=f"{top} is a link: "):
            stored.refuse_apart(tmp_path / "fresh", [name])


def test_a_link_on_the_same_disk_is_no_other(tmp_path: Path) -> None:
    """Data sets may be linked there, one by one or all of them."""
    (tmp_path / "sets").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/datasets").symlink_to(tmp_path / "sets")
    (tmp_path / "sets/mine.npz").symlink_to("/proc/self/status")  # which is on another, and stays there
    shelf = Shelf.of(Settings(data_dir=tmp_path / "data"))
    shelf.refuse_apart(tmp_path / "data", ["datasets/mine.npz", "key-secret"])
    (tmp_path / "data/datasets").unlink()
    (tmp_path / "data/datasets").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="datasets is a link: "):
        shelf.refuse_apart(tmp_path / "data", ["datasets/mine.npz"])


def test_a_store_that_is_the_data_folder_is_no_other_place(tmp_path: Path) -> None:
    """Its trials would be moved aside twice, and there the second time they are not."""
    (tmp_path / "data/trials/1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    shelf = Shelf.of(Settings(data_dir=tmp_path / "data", storage=str(tmp_path / "link")))
    assert not shelf.filled()
    assert shelf.make_room("aside") == []
