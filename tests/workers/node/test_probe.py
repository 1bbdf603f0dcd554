"""The comparison with the head, with stand-ins for Ray's key-value store."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from service.queue.cluster import Machine, Versions
from service.storage import MARKER
from workers.node import probe
from workers.node.notes import Folder, HeadNote, NodeNote
from workers.node.probe import Outcome, Verdict, compare_clocks, judge
from workers.node.scratch import NODE_DATA

VERSIONS = Versions(package="0.1.0+abc", python="3.11.9", ray="2.60.0", torch="2.9.1")
NOTE = NodeNote("n", "here", Machine(VERSIONS, (), 1.0, 1.0, None))


class Shelf:
    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def put(self, name: str, note: Any) -> None:
        self.notes[name] = note

    def get(self, name: str) -> Any:
        return self.notes.get(name)

    def names(self) -> list[str]:
        return list(self.notes)


class Ticking(Shelf):
    """The head's note, written anew for every look."""

    def __init__(self, head: HeadNote | None, *, behind: float = 0.0) -> None:
        super().__init__()
        self.head, self.behind = head, behind

    def get(self, name: str) -> Any:
        return self.head and dataclasses.replace(self.head, time=time.time() - self.behind)


class Board:
    def __init__(self, head: HeadNote | None = None, *, behind: float = 0.0) -> None:
        self.heads, self.nodes, self.refused = Ticking(head, behind=behind), Shelf(), Shelf()


@pytest.fixture
def head() -> Any:
    """An address that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def judged(monkeypatch: pytest.MonkeyPatch, address: str, board: Any, note: NodeNote = NOTE) -> probe.Verdict:
    monkeypatch.setattr(probe, "Notes", lambda _: board)
    monkeypatch.setattr(probe, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(probe, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(compare_clocks, "__defaults__", (time.time, 0.1))
    return judge(address, note)


def test_one_that_fits_is_introduced(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    board = Board(HeadNote("head", VERSIONS, 0, data_dir="/srv/ttsv"))
    assert judged(monkeypatch, head, board) == Verdict(Outcome.FITS, data_dir="/srv/ttsv")
    assert board.nodes.notes["n"].problem is None
    assert abs(board.nodes.notes["n"].machine.clock_seconds) < 1
    assert board.refused.notes == {}


def test_one_that_does_not_is_refused_with_all_reasons(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    there = HeadNote("head", dataclasses.replace(VERSIONS, python="3.12.0"), 0, Folder("/nowhere", "x"))
    board = Board(there, behind=60)
    verdict = judged(monkeypatch, head, board)
    assert verdict.outcome is Outcome.REFUSED
    for word in ("Python is 3.11.9 here and 3.12.0", "60 s ahead", "/nowhere"):
        assert word in verdict.words
    assert board.nodes.notes == {}
    assert board.refused.notes["n"].problem == verdict.words


def test_what_may_pass_refuses_no_member(monkeypatch: pytest.MonkeyPatch, head: str, tmp_path: Path) -> None:
    """The head's own machine may be starting: its clock is not set yet, and what it shares is not mounted."""
    for there, behind in (
        (HeadNote("head", VERSIONS, 0), 60),
        (HeadNote("head", VERSIONS, 0, Folder(str(tmp_path), "x")), 0),
    ):
        assert judged(monkeypatch, head, Board(there, behind=behind)).outcome is Outcome.HINDERED


def test_one_without_a_way_to_the_store_is_refused(monkeypatch: pytest.MonkeyPatch, head: str, tmp_path: Path) -> None:
    note = HeadNote("head", VERSIONS, 0, storage=Folder(str(tmp_path / "store"), "x"))
    refused = judged(monkeypatch, head, Board(note))
    assert (refused.outcome, "the head's store" in refused.words) == (Outcome.HINDERED, True)
    other = dataclasses.replace(note, versions=dataclasses.replace(VERSIONS, python="3.12.0"))
    assert judged(monkeypatch, head, Board(other)).outcome is Outcome.REFUSED
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".ttsv-cluster").write_text("another's")
    assert judged(monkeypatch, head, Board(note)).outcome is Outcome.HINDERED
    (tmp_path / "store" / ".ttsv-cluster").write_text("x")
    assert judged(monkeypatch, head, Board(note)).outcome is Outcome.FITS


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders in which this user may make no file."""
    refused: set[Path] = set()
    genuine = tempfile.TemporaryFile

    def make(**options: Any) -> Any:
        if options["dir"] in refused:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return genuine(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", make)
    monkeypatch.delenv(NODE_DATA, raising=False)
    return refused


class TestWriting:
    """One that can write nothing would be free first, again and again, and lose every trial."""

    def test_its_data_folder(
        self, monkeypatch: pytest.MonkeyPatch, head: str, tmp_path: Path, refusing: set[Path]
    ) -> None:
        board = Board(HeadNote("head", VERSIONS, 0, data_dir=str(tmp_path / "data")))
        assert judged(monkeypatch, head, board).outcome is Outcome.FITS
        assert list(tmp_path.iterdir()) == []
        refusing.add(tmp_path)
        refused = judged(monkeypatch, head, board)
        assert refused.outcome is Outcome.HINDERED
        assert f"the data folder {tmp_path / 'data'} cannot be written by " in refused.words
        assert f"(uid {os.geteuid()}) (Read-only file system)" in refused.words
        assert "set TTSV_DATA_DIR to a folder of this machine" in refused.words
        monkeypatch.setenv(NODE_DATA, str(tmp_path / "own"))
        (tmp_path / "own").mkdir()
        assert judged(monkeypatch, head, board).outcome is Outcome.FITS

    def test_the_heads_data_folder_where_it_must_be_seen(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusing: set[Path]
    ) -> None:
        shared, own = tmp_path / "shared", tmp_path / "own"
        note = HeadNote("head", VERSIONS, 0, Folder(str(shared), "x"), str(shared))
        for folder in (shared, own):
            folder.mkdir()
        refusing.add(shared)
        assert probe.folder_problems(note) == [], "it is not seen, which is said already"
        (shared / MARKER).write_text("x")
        (problem,) = probe.folder_problems(note)
        assert str(shared) in problem
        assert "TTSV_DATA_DIR" not in problem, "it must be that folder"
        monkeypatch.setenv(NODE_DATA, str(own))
        assert str(shared) in probe.folder_problems(note)[0], "another folder is not written"
        (own / MARKER).write_text("x")
        assert probe.folder_problems(note) == []

    def test_a_folder_as_the_store(self, tmp_path: Path, refusing: set[Path]) -> None:
        note = HeadNote("head", VERSIONS, 0, storage=Folder(str(tmp_path), "x"))
        (tmp_path / MARKER).write_text("x")
        assert probe.store_problems(note) == []
        refusing.add(tmp_path)
        (problem,) = probe.store_problems(note)
        assert f"the head's store {tmp_path} cannot be written by " in problem


def test_what_is_said_of_a_bucket_keeps_its_secrets() -> None:
    url = "s3://name:secret@bucket/prefix?shape=round&secret_key=hidden"
    (problem,) = probe.store_problems(HeadNote("head", VERSIONS, 0, storage=Folder(url, "")))
    assert problem.startswith("the head's store bucket/prefix cannot be read: TTSV_STORAGE: Unexpected query parameter")
    assert "this machine's AWS_ACCESS_KEY_ID" in problem
    assert "hidden" not in problem


def test_one_that_has_joined_keeps_its_note_with_the_problem(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    board = Board(HeadNote("head", VERSIONS, 0), behind=60)
    board.nodes.put("n", NOTE)
    assert judged(monkeypatch, head, board).outcome is Outcome.HINDERED
    assert "60 s ahead" in board.nodes.notes["n"].problem
    assert board.refused.notes == {}


def test_a_head_without_a_worker(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    verdict = judged(monkeypatch, head, Board())
    assert verdict.outcome is Outcome.UNANSWERED
    assert "no worker writes there" in verdict.words


def test_nothing_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    verdict = judged(monkeypatch, f"127.0.0.1:{port}", None)
    assert verdict.outcome is Outcome.UNANSWERED
    assert "refused" in verdict.words


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"-ERR unknown command\r\n", b"HTTP/1.1 400 Bad", b""])
def test_another_program_than_ray_at_the_address(said: bytes) -> None:
    """Ray would be waited for most of a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.recv(100)
                line.sendall(said)

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        words = probe.no_ray_at(f"127.0.0.1:{port}")
        assert words == f"what listens at 127.0.0.1:{port} is not Ray: which port has the head?"


def test_notes_of_another_kind(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    def unreadable(name: str) -> None:
        raise ValueError("1 validation error for HeadNote")

    board = Board(HeadNote("head", VERSIONS, 0))
    monkeypatch.setattr(board.heads, "get", unreadable)
    verdict = judged(monkeypatch, head, board)
    assert (verdict.outcome, "install the same version" in verdict.words) == (Outcome.REFUSED, True)


class TestClocks:
    def test_a_slow_look_is_no_wrong_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "_LOOK_SECONDS", 0.001)
        notes = iter([HeadNote("h", VERSIONS, at) for at in (100.0, 101.0, 102.0, 103.0)])
        clock = iter([121.0, 102.2])  # the first answer came twenty seconds late
        newest, ahead = compare_clocks(lambda: next(notes), lambda: next(clock))
        assert newest is not None
        assert newest.time == 102.0
        assert ahead == pytest.approx(0.2)

    def test_a_wrong_clock_stays_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "_LOOK_SECONDS", 0.001)
        notes = iter([HeadNote("h", VERSIONS, at) for at in (100.0, 101.0, 102.0, 103.0)])
        clock = iter([71.1, 72.3, 73.05])
        assert compare_clocks(lambda: next(notes), lambda: next(clock))[1] == pytest.approx(-29.7)

    def test_a_note_that_nobody_writes_is_no_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "_LOOK_SECONDS", 0.001)
        assert compare_clocks(lambda: HeadNote("h", VERSIONS, 100.0), patience=0.05) == (None, None)
