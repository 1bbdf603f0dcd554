"""Every kind of store gives back what was put into it, whole or not at all, and tells attempts apart."""

import errno
import hashlib
import io
import os
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import UserError
from service.settings import Settings
from service.storage import (
    MARKER,
    Attempt,
    Folder,
    Store,
    StoredFile,
    begin,
    bucket_problem,
    copy_out,
    logs_of,
    mark_of,
    marked,
    open_storage,
    opening,
    problem_of,
    remove_checkpoints,
    require_bucket,
    trouble_of,
)
from service.storage.attempts import attempts
from service.storage.objects import Objects
from service.storage.opening import require_writable
from service.storage.store import CHUNK
from ttsv.errors import DataError
from ttsv.runtime import faults

Make = Callable[[Path], Store]


def folder(root: Path) -> Store:
    return Folder(root)


def objects(root: Path) -> Store:
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    root.mkdir(exist_ok=True)
    return Objects(SubTreeFileSystem(str(root), LocalFileSystem()))


@pytest.fixture(params=["folder", "objects", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        options = request.getfixturevalue("s3_server")
        from pyarrow.fs import FileSystem

        bucket = f"bucket-{os.urandom(4).hex()}"
        filesystem, _ = FileSystem.from_uri(f"s3://{bucket}?{options}")
        filesystem.create_dir(bucket)
        return open_storage(f"s3://{bucket}/prefix?{options}")
    return {"folder": folder, "objects": objects}[request.param](tmp_path / "store")


def put(store: Store, path: str, content: bytes) -> None:
    assert store.write(path, io.BytesIO(content), len(content)) == hashlib.sha256(content).hexdigest()


class TestMark:
    def test_it_stays_and_is_of_one_store(self, store: Store, tmp_path: Path) -> None:
        assert mark_of(store) is None
        word = marked(store)
        assert marked(store) == word == mark_of(store)
        assert len(word) == 32
        assert marked(Folder(tmp_path / "another")) != word
        assert store.files("trials") == {}

    def test_all_who_mark_a_folder_at_once_get_the_same(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            words = set(pool.map(lambda _: marked(Folder(tmp_path / "new")), range(64)))
        assert len(words) == 1
        assert [path.name for path in (tmp_path / "new").iterdir()] == [MARKER]

    def test_it_is_on_the_disk_before_anybody_goes_by_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced = set[int]()
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
        marked(Folder(tmp_path / "new"))
        assert {(tmp_path / "new" / MARKER).stat().st_ino, (tmp_path / "new").stat().st_ino} <= synced

    @pytest.mark.parametrize("left", [b"", bytes(32)])
    def test_one_that_a_loss_of_power_left_empty_is_made_anew(self, tmp_path: Path, left: bytes) -> None:
        """Else no word that is drawn would ever be in it."""
        (tmp_path / MARKER).write_bytes(left)
        store = Folder(tmp_path)
        assert mark_of(store) is None
        assert marked(store) == mark_of(store) == (tmp_path / MARKER).read_text()
        assert [path.name for path in tmp_path.iterdir()] == [MARKER]


class TestFiles:
    def test_what_was_written_is_read_listed_and_removed(self, store: Store, tmp_path: Path) -> None:
        assert store.files("trials/7") == {}
        assert store.folders("trials") == []
        assert store.size("trials/7/1/model") is None
        with pytest.raises(FileNotFoundError):
            store.read("trials/7/1/model", 0, 1)
        content = os.urandom(3 * 2**20 + 5)
        put(store, "trials/7/1/model", content)
        put(store, "trials/7/1/checkpoints/000001.json", b"")
        put(store, "trials/7/1/model", content[::-1])
        assert store.size("trials/7/1/model") == len(content)
        assert store.read("trials/7/1/model", 2, 5) == content[::-1][2:7]
        assert store.read("trials/7/1/model", len(content) - 2, 5) == content[1::-1]
        assert store.read("trials/7/1/model", len(content) + 2, 5) == b""
        assert store.files("trials/7") == {"1/model": len(content), "1/checkpoints/000001.json": 0}
        assert store.folders("trials") == ["7"]
        copy_out(store, "trials/7/1/model", tmp_path / "here")
        assert (tmp_path / "here").read_bytes() == content[::-1]
        store.remove("trials/7/1/model")
        store.remove("trials/7/1/model")
        assert store.size("trials/7/1/model") is None
        store.remove("trials/7")
        store.remove("trials/7")
        assert store.files("trials") == {}

    @pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "trials/../../outside", "", "a\0b"])
    def test_nothing_outside_is_touched(self, store: Store, path: str) -> None:
        for ask in (store.files, store.folders, store.size, store.remove, lambda path: store.read(path, 0, 1)):
            with pytest.raises(PermissionError):
                ask(path)
        with pytest.raises(PermissionError):
            store.write(path, io.BytesIO(b"1"), 1)

    def test_a_source_that_ends_too_soon_leaves_what_was_there(self, store: Store) -> None:
        with pytest.raises(OSError, match="of 9 bytes"):
            store.write("trials/1/1/new", io.BytesIO(b"1234"), 9)
        assert store.files("trials") == {}

    def test_a_source_that_fails_leaves_no_part_of_a_file(self, store: Store) -> None:
        class Failing(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell() > 2**20:
                    raise OSError("the disk is gone")
                return super().read(size)

        with pytest.raises(OSError, match="the disk is gone"):
            store.write("trials/1/1/new", Failing(bytes(4 * 2**20)), 4 * 2**20)
        assert store.files("trials") == {}

    def test_as_a_file(self, store: Store) -> None:
        put(store, "trials/1/1/trial.log", b"one\ntwo\n")
        with StoredFile(store, "trials/1/1/trial.log").open() as file:
            assert file.readlines() == [b"one\n", b"two\n"]
            assert file.seek(-4, os.SEEK_END) == 4
            assert file.read() == b"two\n"
        with pytest.raises(FileNotFoundError):
            StoredFile(store, "trials/1/1/other.log").open()


class TestAttempts:
    def test_each_starts_with_the_newest_earlier_one(self, store: Store) -> None:
        order = [Attempt(2), Attempt(2, 1), Attempt(9), Attempt(9, 2), Attempt(9, 10), Attempt(10)]
        assert sorted(order, key=lambda one: (one.fence, one.number)) == sorted(order)
        for attempt in order:
            assert Attempt.parse(str(attempt)) == attempt
            path = begin(store, 7, attempt)
            assert path == f"trials/7/{attempt}"
            before = [name for name in store.files(path) if name.startswith("checkpoints/")]
            assert len(before) == order.index(attempt)
            put(store, f"{path}/checkpoints/{attempt}", b"1")
            assert attempts(store, 7) == [attempt]

    def test_one_that_goes_on_keeps_what_it_has(self, store: Store) -> None:
        path = begin(store, 7, Attempt(1))
        put(store, f"{path}/file", b"1")
        assert begin(store, 7, Attempt(1)) == path
        assert store.files(path) == {"file": 1}

    def test_one_left_over_takes_nothing_and_spoils_nothing(self, store: Store) -> None:
        put(store, f"{begin(store, 7, Attempt(5, 1))}/file", b"5")
        stale = begin(store, 7, Attempt(5))
        assert store.files(stale) == {}
        put(store, f"{stale}/file", b"a zombie's")
        assert store.read("trials/7/5.1/file", 0, 9) == b"5"
        put(store, f"{begin(store, 7, Attempt(6))}/more", b"6")
        assert attempts(store, 7) == [Attempt(6)]
        assert store.read("trials/7/6/file", 0, 9) == b"5"

    def test_names_of_others_are_no_attempts(self, store: Store) -> None:
        for name in ("x", "1.partial", "1.2.3", "-1", "1."):
            put(store, f"trials/7/{name}/file", b"1")
        assert attempts(store, 7) == []

    def test_a_copy_cut_short_is_never_taken_for_a_whole_one(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = begin(store, 7, Attempt(1))
        for number in range(4):
            put(store, f"{first}/checkpoints/{number}", b"1")
        if isinstance(store, Folder):
            monkeypatch.setattr(Path, "rename", _killed)
        else:
            monkeypatch.setattr(Objects, "_finish_copy", _killed)
        with pytest.raises(KeyboardInterrupt):
            begin(store, 7, Attempt(2))
        monkeypatch.undo()
        assert attempts(store, 7) == [Attempt(1)]
        assert len(store.folders("trials/7", partial=True)) == 2
        path = begin(store, 7, Attempt(2, 1))
        assert len(store.files(path)) == 4
        assert store.folders("trials/7", partial=True) == ["2.1"], "what the killed one had copied takes no room"
        remove_checkpoints(store, 7, fence=99)
        assert store.files("trials/7") == {}

    def test_a_copy_that_gets_no_name_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Folder(tmp_path)
        put(store, f"{begin(store, 7, Attempt(1))}/file", b"1")
        monkeypatch.setattr(faults, "_armed", faults.read("before_rename=raise"))
        with pytest.raises(OSError, match="fault point before_rename") as raised:
            begin(store, 7, Attempt(2))
        monkeypatch.undo()
        assert trouble_of(raised.value) is raised.value
        assert store.folders("trials/7", partial=True) == ["1"]
        assert store.files(begin(store, 7, Attempt(2))) == {"file": 1}

    def test_a_copy_that_is_made_twice_changes_nothing(self, store: Store) -> None:
        put(store, "trials/7/1/file", b"1")
        store.copy("trials/7/1", "trials/7/2")
        put(store, "trials/7/2/file", b"22")
        store.copy("trials/7/1", "trials/7/2")
        assert store.files("trials/7") == {"1/file": 1, "2/file": 2}

    def test_of_an_attempt_that_still_lives_a_later_moment_is_copied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its worker was frozen, say: while its folder is copied it writes checkpoints, and deletes older ones."""
        store = Folder(tmp_path / "store")
        first, copy, written = store.path(begin(store, 7, Attempt(1))), shutil.copy2, 0

        def live() -> None:
            nonlocal written
            written += 1
            with (first / "epochs.jsonl").open("a") as journal:
                journal.write(f"{written}\n")
            (first / "checkpoints").mkdir(exist_ok=True)
            (first / f"checkpoints/{written}").touch()
            (first / f"checkpoints/{written - 2}").unlink(missing_ok=True)

        def meanwhile(source: str, target: str) -> None:
            live()
            copy(source, target)

        live()
        live()
        monkeypatch.setattr(shutil, "copy2", meanwhile)
        second = store.path(begin(store, 7, Attempt(2)))
        newest = max((int(path.name) for path in (second / "checkpoints").iterdir()), default=0)
        assert newest <= int((second / "epochs.jsonl").read_text().split()[-1]), "an epoch that nobody would tell of"

    def test_a_copy_for_which_there_is_no_room_says_so_by_its_number(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Folder(tmp_path / "store")
        first = begin(store, 7, Attempt(1))
        for number in range(3):
            put(store, f"{first}/checkpoints/{number}", b"1")
        copy = shutil.copy2

        def full(source: str, target: str) -> None:
            if not source.endswith("/0"):
                raise OSError(errno.ENOSPC, "No space left on device", target)
            copy(source, target)

        monkeypatch.setattr(shutil, "copy2", full)
        with pytest.raises(OSError, match="No space left") as refused:
            begin(store, 7, Attempt(2))
        assert refused.value.errno == errno.ENOSPC, "not the tree's own error, which has none"
        assert store.folders("trials/7", partial=True) == store.folders("trials/7")
        monkeypatch.undo()
        assert len(store.files(begin(store, 7, Attempt(2)))) == 3

    def test_checkpoints_go_and_artifacts_stay(self, store: Store) -> None:
        path = begin(store, 7, Attempt(1))
        put(store, f"{path}/checkpoints/1", b"1")
        put(store, f"{path}/model", b"1")
        remove_checkpoints(store, 7, fence=99)
        remove_checkpoints(store, 8, fence=99)
        assert store.files("trials") == {"7/1/model": 1}

    def test_checkpoints_of_later_claims_stay(self, store: Store) -> None:
        """Who removes them may be left over, and the trial be retried: what it writes by now is not his."""
        for name in ("8", "9.2", "10", "11.1", "11.ab.partial"):
            put(store, f"trials/7/{name}/checkpoints/1", b"1")
        remove_checkpoints(store, 7, fence=10)
        assert store.files("trials/7") == {"11.1/checkpoints/1": 1, "11.ab.partial/checkpoints/1": 1}

    def test_checkpoints_of_later_attempts_of_the_same_claim_stay(self, store: Store) -> None:
        later = ("10.2", "10.2.12345678.partial", "10.3.ab.partial", "11")
        for name in ("9.5", "10", "10.1", "10.12345678.partial", "10.1.12345678.partial", *later):
            put(store, f"trials/7/{name}/checkpoints/1", b"1")
        remove_checkpoints(store, 7, fence=10, number=2)
        assert sorted(store.files("trials/7")) == sorted(f"{name}/checkpoints/1" for name in later)

    def test_one_left_over_that_moves_its_folder_on_meanwhile(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its copy is whole by now, and it removes what it copied, of which a later one has but a part."""
        put(store, f"{begin(store, 7, Attempt(1))}/checkpoints/1", b"1")
        put(store, "trials/7/1/checkpoints/2", b"1")
        owner, name = (shutil, "copy2") if isinstance(store, Folder) else (Objects, "_copy_file")
        copy = getattr(owner, name)

        def awake(*arguments: str) -> None:
            monkeypatch.setattr(owner, name, copy)
            copy(*arguments)
            begin(store, 7, Attempt(3))

        monkeypatch.setattr(owner, name, awake)
        path = begin(store, 7, Attempt(5))
        assert sorted(store.files(path)) == ["checkpoints/1", "checkpoints/2"]
        assert attempts(store, 7) == [Attempt(5)]

    def test_checkpoints_that_are_removed_while_they_are_copied(self, tmp_path: Path) -> None:
        """By a worker that is left over: what else there is is enough."""
        store = Folder(tmp_path / "store")
        first = begin(store, 7, Attempt(1))
        put(store, f"{first}/epochs.jsonl", b"1")
        put(store, f"{first}/checkpoints/1", b"1")
        copy = shutil.copystat

        def awake(source: str, target: str, *, follow_symlinks: bool = True) -> None:
            remove_checkpoints(store, 7, fence=1)
            copy(source, target, follow_symlinks=follow_symlinks)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(shutil, "copystat", awake)
            second = begin(store, 7, Attempt(2))
        assert store.files(second)["epochs.jsonl"] == 1

    def test_of_objects_that_an_owner_deletes_later_ones_are_copied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """He still lives, and has written two more checkpoints before the first of the old ones was copied."""
        store, copy = objects(tmp_path / "store"), Objects._copy_file
        first = begin(store, 7, Attempt(1))
        for number in (1, 2):
            put(store, f"{first}/checkpoints/{number}", b"1")

        def meanwhile(self: Objects, source: str, target: str) -> None:
            monkeypatch.setattr(Objects, "_copy_file", copy)
            for number in (3, 4):
                put(store, f"{first}/checkpoints/{number}", b"1")
                store.remove(f"{first}/checkpoints/{number - 2}")
            copy(self, source, target)

        monkeypatch.setattr(Objects, "_copy_file", meanwhile)
        assert sorted(store.files(begin(store, 7, Attempt(2)))) == ["checkpoints/3", "checkpoints/4"]

    def test_a_copy_is_on_the_disk_before_what_was_copied_goes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a machine that loses its power has neither."""
        store, synced, rename = Folder(tmp_path / "store"), set[int](), Path.rename
        first = begin(store, 7, Attempt(1))
        for name in ("checkpoints/1", "checkpoints/2", "epochs.jsonl"):
            put(store, f"{first}/{name}", b"1")
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))

        def renamed(self: Path, target: Path) -> Path:
            parts = [self, *self.rglob("*")]
            assert len(parts) == 5
            assert {part.stat().st_ino for part in parts} <= synced
            synced.clear()
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", renamed)
        begin(store, 7, Attempt(2))
        assert (tmp_path / "store/trials/7").stat().st_ino in synced

    def test_the_newest_log_is_first(self, store: Store) -> None:
        for name in ("9", "10", "9.1"):
            put(store, f"trials/7/{name}/trial.log", name.encode())
        put(store, "trials/7/11/model", b"1")
        assert [file.path for file in logs_of(store, 7)] == [
            f"trials/7/{name}/trial.log" for name in ("10", "9.1", "9")
        ]


def _killed(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_server_that_breaks_off_an_upload_keeps_what_was_there() -> None:
    """Nothing has come of it: the object is the one from before, a trial's journal for one."""

    class Broken:
        """As pyarrow's stream over a server that fails: closed, it has made nothing."""

        def __enter__(self) -> "Broken":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, piece: bytes) -> None:
            raise OSError("AWS Error SLOW_DOWN")

    class Server:
        def __init__(self) -> None:
            self.there = {"trials/1/1/epochs.jsonl": 100}

        def open_output_stream(self, name: str) -> Broken:
            return Broken()

        def get_file_info(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(is_file=name in self.there, size=self.there.get(name))

        def delete_file(self, name: str) -> None:
            del self.there[name]

    server = Server()
    with pytest.raises(OSError, match="SLOW_DOWN"):
        Objects(server).write("trials/1/1/epochs.jsonl", io.BytesIO(bytes(120)), 120)
    assert server.there == {"trials/1/1/epochs.jsonl": 100}


@pytest.mark.parametrize("there", [5, 2 * CHUNK])
@pytest.mark.parametrize("fails", [True, False])
def test_a_file_that_cannot_be_read_to_its_end_replaces_nothing(store: Store, there: int, fails: bool) -> None:
    """A node's disk fails, or the file is cut: what was carried of the trial before is what it goes on from."""

    class Failing(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            if fails and self.tell() >= there - 5:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(count)

    put(store, "trials/7/1/epochs.jsonl", b"two epochs")
    with pytest.raises(OSError, match="Input/output error" if fails else r"\d+ of \d+ bytes"):
        store.write("trials/7/1/epochs.jsonl", Failing(bytes(there)), there + 20)
    assert store.files("trials/7/1") == {"epochs.jsonl": 10}
    assert store.read("trials/7/1/epochs.jsonl", 0, 100) == b"two epochs"


def test_of_an_upload_that_fails_as_it_ends_what_is_there_stays() -> None:
    """The new object or the old one, which may be as large: either is whole."""

    class Full(io.BytesIO):
        def close(self) -> None:
            raise OSError("AWS Error QUOTA_EXCEEDED")

    server = MagicMock()
    server.open_output_stream.return_value = Full()
    server.get_file_info.return_value = SimpleNamespace(is_file=True, size=120)
    with pytest.raises(OSError, match="QUOTA_EXCEEDED"):
        Objects(server).write("trials/1/1/autoattack.safetensors", io.BytesIO(bytes(120)), 120)
    server.delete_file.assert_not_called()


class TestParts:
    """A file comes in pieces that may be lost, doubled, in another order, or wrong."""

    @settings(max_examples=40, deadline=None)
    @given(data=st.data(), size=st.integers(0, 300), chunk=st.integers(1, 64))
    def test_in_any_order_and_twice(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int, chunk: int
    ) -> None:
        store = Folder(tmp_path_factory.mktemp("parts"))
        content = bytes(index % 251 for index in range(size))
        pieces = [(at, content[at : at + chunk]) for at in range(0, size, chunk)] or [(0, b"")]
        sent = data.draw(st.permutations(pieces)) + data.draw(st.lists(st.sampled_from(pieces), max_size=4))
        for at, piece in sent:
            store.write_part("1a", at, piece)
        sha256 = hashlib.sha256(content).hexdigest()
        store.finish("1a", "trials/1/1/file", size, sha256)
        store.finish("1a", "trials/1/1/file", size, sha256)
        assert store.read("trials/1/1/file", 0, 1000) == content
        assert store.files("incoming") == {}

    @settings(max_examples=40, deadline=None)
    @given(data=st.data(), content=st.binary(min_size=1, max_size=200), chunk=st.integers(1, 64))
    def test_what_is_cut_altered_or_lost_never_gets_the_name(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, content: bytes, chunk: int
    ) -> None:
        store = Folder(tmp_path_factory.mktemp("parts"))
        put(store, "trials/1/1/file", b"the one before")
        pieces = [(at, content[at : at + chunk]) for at in range(0, len(content), chunk)]
        which = data.draw(st.integers(0, len(pieces) - 1))
        at, piece = pieces[which]
        how = data.draw(st.sampled_from(["lost", "cut", "altered", "longer"]))
        place = data.draw(st.integers(0, len(piece) - 1))
        if how == "lost":
            del pieces[which]
        elif how == "cut":
            pieces[which] = at, piece[:place]
        elif how == "altered":
            pieces[which] = at, piece[:place] + bytes([piece[place] ^ 1]) + piece[place + 1 :]
        else:
            pieces.append((len(content), b"x"))
        for at, piece in pieces:
            store.write_part("1a", at, piece)
        arrived = bytearray(len(content) + 1)
        for at, piece in pieces:
            arrived[at : at + len(piece)] = piece
        end = max((at + len(piece) for at, piece in pieces if piece), default=0)
        if bytes(arrived[:end]) == content:
            return  # zeros that were lost are zeros all the same
        with pytest.raises(OSError):  # noqa: PT011 - of a part that never came, or a wrong one
            store.finish("1a", "trials/1/1/file", len(content), hashlib.sha256(content).hexdigest())
        assert store.read("trials/1/1/file", 0, 100) == b"the one before"

    def test_onto_another_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Path.replace

        def across(self: Path, target: Path) -> Path:
            if self.parent.name == "incoming":
                raise OSError(errno.EXDEV, "another disk")
            return real(self, target)

        monkeypatch.setattr(Path, "replace", across)
        store = Folder(tmp_path)
        put(store, "trials/1/1/file", b"12345")
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]
        assert store.read("trials/1/1/file", 0, 9) == b"12345"

    def test_names_of_parts_lead_nowhere(self, tmp_path: Path) -> None:
        with pytest.raises(PermissionError):
            Folder(tmp_path).write_part("../x", 0, b"1")

    def test_parts_of_dead_writers_go_after_hours(self, tmp_path: Path) -> None:
        store = Folder(tmp_path)
        store.drop_abandoned()
        for name, age in (("old", 7 * 3600), ("new", 3600)):
            store.write_part(name, 0, b"1")
            when = (tmp_path / "incoming" / name).stat().st_mtime - age
            os.utime(tmp_path / "incoming" / name, (when, when))
        store.drop_abandoned()
        assert list(store.files("incoming")) == ["new"]


class TestCopies:
    def test_what_was_interrupted_is_gone_on_with(self, tmp_path: Path) -> None:
        class Counting(Folder):
            read_bytes = 0

            def read(self, path: str, offset: int, count: int) -> bytes:
                if self.read_bytes >= 2 * 2**20:
                    self.read_bytes = 0
                    raise ConnectionError
                piece = super().read(path, offset, count)
                self.read_bytes += len(piece)
                return piece

        store, content = Counting(tmp_path / "store"), os.urandom(5 * 2**20)
        put(store, "datasets/x", content)
        told: list[int] = []
        for _ in range(2):
            with pytest.raises(ConnectionError):
                copy_out(store, "datasets/x", tmp_path / "x", resume=True, told=told.append)
            assert not (tmp_path / "x").exists()
        copy_out(store, "datasets/x", tmp_path / "x", resume=True, told=told.append)
        assert told == [2**20 * number for number in range(1, 6)], "nothing came twice"
        assert (tmp_path / "x").read_bytes() == content
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x"]

    def test_a_wrong_beginning_is_thrown_away(self, tmp_path: Path) -> None:
        store = Folder(tmp_path / "store")
        put(store, "datasets/x", b"12345")
        (tmp_path / ".x.part").write_bytes(b"99")
        copy_out(store, "datasets/x", tmp_path / "x", sha256=hashlib.sha256(b"12345").hexdigest(), resume=True)
        assert (tmp_path / "x").read_bytes() == b"12345"

    def test_other_bytes_than_expected_are_refused(self, tmp_path: Path) -> None:
        store = Folder(tmp_path / "store")
        put(store, "datasets/x", b"12345")
        (tmp_path / "x").write_bytes(b"before")
        with pytest.raises(OSError, match="its SHA-256 is"):
            copy_out(store, "datasets/x", tmp_path / "x", sha256="0" * 64)
        assert (tmp_path / "x").read_bytes() == b"before"


class TestTrouble:
    """Whose fault it is that a file cannot be had: of the place, or of who asked for it."""

    @pytest.fixture
    def data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A data folder, in which `closed` and what is below may not be read; and nothing be written."""
        for folder in ("closed", "datasets", "trials/5"):
            (tmp_path / folder).mkdir(parents=True)
        for file in ("closed/x", "datasets/x", "trials/5/x"):
            (tmp_path / file).touch()
        genuine = os.path.lexists
        closed = tmp_path / "closed"
        monkeypatch.setattr(os.path, "lexists", lambda path: closed not in Path(path).parents and genuine(path))
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and Path(path) != closed)
        return tmp_path

    @pytest.mark.parametrize(
        ("number", "file", "wrapped", "trouble"),
        [
            (errno.EROFS, "datasets/x", True, True),
            (errno.ESHUTDOWN, "datasets/x", True, True),
            (errno.ENOTCONN, "trials/5/1", False, True),
            (errno.ETIMEDOUT, "trials/5/1", False, True),
            (errno.EACCES, "trials/5/1", False, True),
            (errno.EPERM, "trials/5/1", False, True),
            (errno.EACCES, "trials", False, True),
            (errno.EACCES, "closed/x", False, False),
            (errno.EACCES, "closed", True, False),
            (errno.EACCES, "datasets/cache/npz.lock", True, True),
            (errno.EACCES, "datasets/x", True, True),
            (errno.ENOENT, "trials/5/1", False, False),
        ],
    )
    def test_a_place_that_takes_nothing_is_in_trouble(
        self, data: Path, number: int, file: str, wrapped: bool, trouble: bool
    ) -> None:
        error = OSError(number, os.strerror(number), str(data / file))
        told: Exception = error
        if wrapped:
            told = DataError("as a loader says it")
            told.__cause__ = error
        assert trouble_of(told) is (error if trouble else None)

    def test_what_another_attempt_hid_is_trouble_and_a_network_of_another_trial_is_not(
        self, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        error = PermissionError(errno.EACCES, "Permission denied", str(data / "trials/5/x"))
        assert trouble_of(error) is error
        told = DataError("the network cannot be read")
        told.__context__ = error
        assert trouble_of(told) is None

    def test_a_path_that_we_refuse_ourselves_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(PermissionError) as refused:
            Folder(tmp_path).make("../trials/5/1")
        assert trouble_of(refused.value) is None


class TestNames:
    def test_what_is_set(self, tmp_path: Path) -> None:
        assert isinstance(open_storage(str(tmp_path)), Folder)
        assert Settings(storage="").storage is None
        assert Settings(storage="s3://bucket/prefix?region=x").storage == "s3://bucket/prefix?region=x"

    @pytest.mark.parametrize("place", ["relative/folder", "s3://", "ftp://host/folder", "gs://bucket", "s3:///prefix"])
    def test_what_is_neither_a_folder_nor_a_bucket_is_refused(self, place: str) -> None:
        assert problem_of(place)
        with pytest.raises(UserError, match="absolute path, or s3://"):
            open_storage(place)
        with pytest.raises(ValueError, match="absolute path, or s3://"):
            Settings(storage=place)

    def test_a_server_that_is_away_when_it_is_to_be_opened_is_trouble(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where the network is asked for a bucket's region."""
        from pyarrow import fs

        away = MagicMock(side_effect=OSError("When resolving region for bucket 'x': NETWORK_CONNECTION"))
        monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=away))
        with pytest.raises(OSError, match="resolving region") as refused:
            open_storage("s3://bucket/away")
        assert trouble_of(refused.value) is refused.value

    def test_a_bucket_must_be_there_though_to_its_store_it_is_merely_empty(self, s3_server: str) -> None:
        from pyarrow.fs import FileSystem

        bucket = f"bucket-{os.urandom(4).hex()}"
        place = f"s3://{bucket}/prefix?{s3_server}"
        assert open_storage(place).size("trials/any") is None
        with pytest.raises(FileNotFoundError, match=f"no such bucket: '{bucket}'"):
            require_bucket(place)
        assert bucket_problem(place) == f"cannot be read: [Errno 2] there is no such bucket: '{bucket}'"
        FileSystem.from_uri(place)[0].create_dir(bucket)
        require_bucket(place)
        assert bucket_problem(place) is None

    def test_a_key_that_may_only_read_a_bucket_is_told_of(
        self, s3_server: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pyarrow.fs import FileSystem

        bucket = f"bucket-{os.urandom(4).hex()}"
        place = f"s3://{bucket}/prefix?{s3_server}"
        filesystem, _ = FileSystem.from_uri(place)
        filesystem.create_dir(bucket)
        assert bucket_problem(place) is None
        assert open_storage(place).files("trials") == {}
        refuse = "raise OSError('ACCESS_DENIED during PutObject operation')"
        monkeypatch.setattr(opening, "_ASK", opening._ASK.replace("require_writable(place)", refuse))
        assert bucket_problem(place) == "cannot be written: ACCESS_DENIED during PutObject operation"

    def test_what_a_look_writes_into_a_bucket_does_not_stay(self, tmp_path: Path) -> None:
        from pyarrow.fs import LocalFileSystem

        written = list[str]()

        class Local:
            def open_output_stream(self, name: str) -> Any:
                written.append(name)
                return LocalFileSystem().open_output_stream(name)

            def delete_file(self, name: str) -> None:
                LocalFileSystem().delete_file(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "_file_system", lambda place: (Local(), str(tmp_path)))
            require_writable("s3://bucket")
        assert len(written) == 1
        assert list(tmp_path.iterdir()) == []

    def test_of_options_that_are_none_those_that_are_is_said(self) -> None:
        from pyarrow.fs import FileSystem

        with pytest.raises(UserError, match="'endpoint'; there are region, scheme, endpoint_override, ") as caught:
            open_storage("s3://KEY:HIDDEN@bucket/p?endpoint=minio:9000")
        assert "HIDDEN" not in str(caught.value)
        options = "&".join(f"{name}={'http' if name == 'scheme' else 'true'}" for name in opening._OPTIONS)
        FileSystem.from_uri(f"s3://bucket/p?{options}")

    def test_of_keys_nothing_is_said_where_there_is_none(self) -> None:
        for options in ("endpoint=minio:9000", "scheme=ftp&region=x", "region=a b"):
            with pytest.raises(UserError) as caught:
                open_storage(f"s3://bucket/p?{options}")
            assert "key" not in str(caught.value)

    @pytest.mark.parametrize("secret", ["12?cd=HIDDEN", "HIDDEN?cd", "12?HIDDEN"])
    def test_a_key_with_a_mark_that_begins_options_is_not_repeated(self, secret: str) -> None:
        with pytest.raises(UserError, match=r"write / as %2F in a key, and \? as %3F") as caught:
            open_storage(f"s3://AKIAKEY:{secret}@bucket/x?region=us-east-1")
        assert "HIDDEN" not in str(caught.value)

    @pytest.mark.parametrize("secret", ["ab/cdHIDDEN", "ab cdHIDDEN", "ab#cdHIDDEN"])
    def test_a_key_that_no_url_can_have_is_not_repeated(self, secret: str) -> None:
        with pytest.raises(UserError, match="write / as %2F in a key") as caught:
            opening.open_storage(f"s3://AKIAKEY:{secret}@bucket/x?region=us-east-1")
        assert "HIDDEN" not in str(caught.value)
        assert "bucket/x" in str(caught.value)
        assert caught.value.__cause__ is None

    def test_a_server_that_is_silent_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It takes connections and says nothing; pyarrow would wait and try again for a minute and a half."""
        monkeypatch.setattr(opening, "_ANSWER_SECONDS", 4.0)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            host, port = silent.getsockname()
            begun = time.monotonic()
            problem = bucket_problem(f"s3://key:word@bucket/x?endpoint_override={host}:{port}&scheme=http")
            assert problem == "does not answer within 4 s"
            assert time.monotonic() - begun < 10
