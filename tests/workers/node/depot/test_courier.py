"""What a trial writes is carried in its order, whole, and again where the store fails."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from service.storage import Attempt, Folder, begin
from workers.node.depot import courier as couriers
from workers.node.depot.courier import Courier
from workers.node.scratch import remove_abandoned, scratch_folder

HERE = Attempt(3)


class Watched(Folder):
    """Notes what is written and removed, and fails as it is told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.done: list[str] = []
        self.at_work = self.most_at_work = 0
        self.fail: Callable[[str], None] = lambda path: None

    def write(self, path: str, source: BinaryIO, size: int) -> str:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            self.fail(path)
            sha256 = super().write(path, source, size)
        finally:
            self.at_work -= 1
        self.done.append(path.removeprefix("trials/7/3/"))
        return sha256

    def remove(self, path: str) -> None:
        super().remove(path)
        self.done.append(f"-{path.removeprefix('trials/7/3/')}")


class Bench:
    def __init__(self, folder: Path) -> None:
        self.store = Watched(folder / "store")
        self.folder = folder / "scratch"
        (self.folder / "checkpoints").mkdir(parents=True)
        begin(self.store, 7, HERE)
        self.clock = time.time()

    def put(self, name: str, text: str) -> None:
        """As training does: whole, and each a second later than the one before."""
        path = self.folder / name
        path.with_name(f"{path.name}.tmp").write_text(text)
        self.clock += 1
        os.utime(path.with_name(f"{path.name}.tmp"), (self.clock, self.clock))
        path.with_name(f"{path.name}.tmp").replace(path)

    def courier(self, **known: list[str]) -> Courier:
        return Courier(self.folder, self.store, 7, HERE, **known)

    @property
    def there(self) -> dict[str, str]:
        folder = self.store.root / "trials/7/3"
        return {name: (folder / name).read_text() for name in self.store.files("trials/7/3")}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def running(bench: Bench) -> Iterator[Courier]:
    courier = bench.courier()
    courier.start()
    yield courier
    courier.close()


def test_sync_waits_until_all_is_there(bench: Bench, running: Courier) -> None:
    for number in range(20):
        bench.put("checkpoints/000001.json", str(number))
        running.sync()
        assert bench.there == {"checkpoints/000001.json": str(number)}
    assert bench.store.most_at_work == 1


def test_what_is_written_in_the_background_is_carried_unasked(bench: Bench, running: Courier) -> None:
    bench.put("checkpoints/000001.json", "1")
    deadline = time.monotonic() + 10
    while not bench.there:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_in_the_order_of_writing_the_journal_ahead_and_what_is_removed_last(bench: Bench) -> None:
    bench.put("checkpoints/000001.safetensors", "1")
    bench.put("checkpoints/000001.json", "1")
    courier = bench.courier()
    courier._round(waited_for=True)
    bench.store.done.clear()
    bench.put("checkpoints/000002.safetensors", "2")
    bench.put("checkpoints/000002.json", "2")
    bench.put("trial.log", "2")
    bench.put("epochs.jsonl", "2")
    for name in ("000001.safetensors", "000001.json"):
        (bench.folder / "checkpoints" / name).unlink()
    courier._round(waited_for=True)
    assert bench.store.done[:4] == [
        "epochs.jsonl",
        "checkpoints/000002.safetensors",
        "checkpoints/000002.json",
        "trial.log",
    ]
    assert sorted(bench.store.done[4:]) == ["-checkpoints/000001.json", "-checkpoints/000001.safetensors"]


def test_nothing_is_newer_than_what_was_written_before_it(bench: Bench) -> None:
    """While a round sends, the trial writes on: the journal that comes first must not miss the checkpoint's epoch."""
    bench.put("epochs.jsonl", "1")
    bench.put("state", "1")

    def write_on(path: str) -> None:
        if path.endswith("epochs.jsonl"):
            bench.put("epochs.jsonl", "1 2")
            bench.put("state", "2")

    bench.store.fail = write_on
    bench.courier()._round(waited_for=True)
    assert int(bench.there["state"]) <= int(bench.there["epochs.jsonl"][-1])


def test_unfinished_files_stay_here(bench: Bench) -> None:
    for name in ("a.tmp", "b.partial", ".c", "checkpoints/d.tmp"):
        (bench.folder / name).write_text("1")
    bench.courier()._round(waited_for=True)
    assert bench.there == {}


def test_what_came_from_there_is_not_sent_back(bench: Bench) -> None:
    bench.put("checkpoints/000001.json", "1")
    bench.put("new", "1")
    bench.courier(known=["checkpoints/000001.json"])._round(waited_for=True)
    assert bench.store.done == ["new"]


def test_a_log_alone_is_carried_now_and_then(bench: Bench) -> None:
    courier = bench.courier()
    bench.put("trial.log", "1")
    courier._round(waited_for=False)
    bench.put("trial.log", "2")
    courier._round(waited_for=False)
    assert bench.there == {"trial.log": "1"}
    courier._round(waited_for=True)
    assert bench.there == {"trial.log": "2"}


def test_a_file_that_shrinks_while_it_is_sent_comes_in_the_next_round(bench: Bench) -> None:
    (bench.folder / "table.csv").write_text("12345")
    courier = bench.courier()
    cut: list[str] = []

    def cut_once(path: str) -> None:
        if not cut:
            cut.append(path)
            (bench.folder / "table.csv").write_text("1")

    bench.store.fail = cut_once
    courier._round(waited_for=True)
    assert bench.there == {}
    courier._round(waited_for=True)
    assert bench.there == {"table.csv": "1"}


def test_a_full_disk_is_waited_for(bench: Bench, running: Courier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(couriers, "_PAUSE_SECONDS", 0.01)
    failures = iter(range(5))

    def full(path: str) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "no space left")

    bench.store.fail = full
    bench.put("checkpoints/000001.json", "1")
    running.sync()
    assert bench.there == {"checkpoints/000001.json": "1"}


def test_a_disk_that_stays_full_ends_the_trial(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(couriers, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(couriers, "PATIENCE_SECONDS", 0.1)

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    bench.store.fail = full
    courier = bench.courier()
    courier.start()
    bench.put("checkpoints/000001.json", "1")
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            courier.sync()
    with pytest.raises(OSError, match="no space left"):
        courier.finish()
    courier.close()


def test_the_last_round_does_not_wait_for_a_store_that_fails(bench: Bench, running: Courier) -> None:
    def away(path: str) -> None:
        raise OSError(errno.EIO, "away")

    bench.store.fail = away
    bench.put("checkpoints/000001.json", "1")
    began = time.monotonic()
    with pytest.raises(OSError, match="away"):
        running.finish()
    assert time.monotonic() - began < 5


def test_a_process_left_over_writes_nothing_more(bench: Bench, running: Courier) -> None:
    bench.put("checkpoints/000001.json", "1")
    running.sync()
    begin(bench.store, 7, Attempt(3, 1))
    bench.put("checkpoints/000002.json", "2")
    with pytest.raises(OSError, match="goes on elsewhere") as caught:
        running.sync()
    assert caught.value.errno == errno.ESTALE
    assert bench.there == {}
    assert bench.store.files("trials/7/3.1") == {"checkpoints/000001.json": 1}


def test_a_scratch_folder_that_somebody_removes_takes_nothing_with_it(bench: Bench, running: Courier) -> None:
    bench.put("checkpoints/000001.json", "1")
    running.sync()
    bench.folder.rename(bench.folder.with_name("gone"))
    with pytest.raises(OSError, match="the scratch folder was removed"):
        running.sync()
    assert bench.there == {"checkpoints/000001.json": "1"}


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_what_a_disk_does_not_show_stays_there(bench: Bench, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """The trial dies with its machine's disk, and goes on elsewhere from what was carried before."""
    bench.put("epochs.jsonl", "1")
    bench.put("checkpoints/000001.json", "1")
    courier = bench.courier()
    courier._round(waited_for=True)
    scandir, whole = os.scandir, bench.there

    def fail(path: str) -> object:
        if Path(path) == bench.folder / inner:
            raise OSError(errno.EIO, "Input/output error", path)
        return scandir(path)

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", fail)
        with pytest.raises(OSError, match="Input/output error"):
            courier._round(waited_for=True)
    assert bench.there == whole == {"checkpoints/000001.json": "1", "epochs.jsonl": "1"}
    shutil.rmtree(bench.folder / "checkpoints")
    courier._round(waited_for=True)
    assert bench.there == {"epochs.jsonl": "1"}


class TestScratch:
    def test_a_folder_until_the_end(self, tmp_path: Path) -> None:
        with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
            assert first != second
            (first / "file").touch()
            remove_abandoned(tmp_path)
            assert (first / "file").exists(), "others see that it is used"
        assert not list((tmp_path / "scratch").iterdir())

    def test_those_of_the_dead_go(self, tmp_path: Path) -> None:
        parent = tmp_path / "scratch"
        (parent / "1a" / "deep").mkdir(parents=True)
        (parent / "1a.lock").touch()
        with scratch_folder(tmp_path) as folder:
            assert sorted(path.name for path in parent.iterdir()) == [folder.name, f"{folder.name}.lock"]

    def test_many_at_once(self, tmp_path: Path) -> None:
        found: list[bool] = []

        def work() -> None:
            for _ in range(20):
                with scratch_folder(tmp_path) as folder:
                    (folder / "file").touch()
                    found.append((folder / "file").exists())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 80
        assert not list((tmp_path / "scratch").iterdir())

    def test_elsewhere_where_nothing_can_be_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        (tmp_path / "tmp").mkdir()
        (tmp_path / "data").touch()
        with scratch_folder(tmp_path / "data") as folder:
            assert folder.is_relative_to(tmp_path / "tmp")
        shutil.rmtree(tmp_path / "tmp")
