"""What the worker reads of its observer, with stand-ins for it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from service.queue.cluster import Node, nodes_as_json
from service.specs.states import NodeState
from service.storage import MARKER
from tests.workers.conftest import wait_for
from workers.node.processes import spawn
from workers.worker import observation
from workers.worker.observation import Observation

NODE = Node("a" * 56, "one", "10.0.0.1", cpus=4, gpus=1, memory_gib=10)


def open_pipes() -> set[str]:
    """Of this process, each by its own number."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that by which they are listed
            found.add(str(descriptor.readlink()))
    return {one for one in found if one.startswith("pipe:")}


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Observation]:
    seen = Observation(tmp_path)
    yield seen
    seen.stop()


def runs(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    start = "import os, sys, time; fd = int(sys.argv[2]); "
    monkeypatch.setattr(observation, "OBSERVER", (sys.executable, "-c", start + code))


def look(seen: Observation) -> tuple[Node, ...] | None:
    return seen.nodes("head:1", os.environ)


def test_nothing_is_known_before_it_spoke(seen: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "time.sleep(60)")
    assert look(seen) is None
    child = seen._child
    assert look(seen) is None
    assert child is not None
    assert seen._child is child
    seen.stop()
    assert child.returncode is not None


def test_the_newest_line_counts(seen: Observation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, both = nodes_as_json([NODE]), nodes_as_json([NODE, NODE])
    code = (
        f"os.write(fd, {one!r} + b'\\n'); os.write(fd, b'a broken line\\n'); os.write(fd, {both!r} + b'\\n');"
        "print(sys.argv); time.sleep(60)"
    )
    runs(monkeypatch, code)
    assert wait_for(lambda: (nodes := look(seen)) and len(nodes) == 2 and nodes, 20) == (NODE, NODE)
    log = tmp_path / "logs" / f"nodes-{os.getpid()}.log"
    assert "'head:1'" in wait_for(log.read_text, 5)
    assert log.read_text().count(str(tmp_path)) == 1, "no folder is to be seen by the nodes"
    seen.stop()
    assert seen._nodes is None, "the next cluster has other nodes"


def test_one_that_ends_is_started_again_after_a_pause(
    seen: Observation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(observation, "PAUSE_SECONDS", 0.3)
    runs(monkeypatch, f"os.write(fd, {nodes_as_json([NODE])!r} + b'\\n'); print('started')")

    def starts() -> bool:
        look(seen)
        log = tmp_path / "logs" / f"nodes-{os.getpid()}.log"
        return log.is_file() and log.read_text().count("started") >= 2

    wait_for(starts, 20)
    assert "the observer of the cluster's nodes ended" in caplog.text
    assert look(seen) == (NODE,), "what was seen last counts until more is seen"


def test_a_cluster_is_headless_from_the_first_line_without_a_head_that_lives(
    seen: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen last of the nodes counts meanwhile; a head that is back is one."""
    head = dataclasses.replace(NODE, head=True)
    gone = dataclasses.replace(head, state=NodeState.LEFT)
    lines = [nodes_as_json(nodes).decode() for nodes in ([head], [gone], [], [head])]
    runs(monkeypatch, f"lines = {lines!r}; [(os.write(fd, (line + chr(10)).encode()), input()) for line in lines]")
    reader, writer = os.pipe()
    monkeypatch.setattr(observation, "spawn", partial(spawn, stdin=reader))
    assert seen.headless_seconds() == 0
    wait_for(lambda: look(seen) == (head,), 20)
    assert seen.headless_seconds() == 0
    os.write(writer, b"\n")
    wait_for(lambda: seen.headless_seconds() > 0.05, 20)
    assert look(seen) == (gone,)
    os.write(writer, b"\n")
    wait_for(lambda: seen.headless_seconds() > 0.2, 20)
    assert look(seen) == (gone,)
    os.write(writer, b"\n")
    wait_for(lambda: look(seen) == (head,), 20)
    assert seen.headless_seconds() == 0
    os.close(writer)
    os.close(reader)


def test_one_that_stands_still_is_ended(
    seen: Observation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observation, "PAUSE_SECONDS", 0.0)
    runs(monkeypatch, f"os.write(fd, {nodes_as_json([NODE])!r} + b'\\n'); time.sleep(60)")
    wait_for(lambda: look(seen), 20)
    frozen = seen._child
    assert frozen is not None
    frozen.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(observation, "SILENT_SECONDS", 0.0)
    look(seen)
    assert frozen.returncode is not None
    assert "the observer of the cluster's nodes says nothing" in caplog.text


@pytest.mark.parametrize("call", ["spawn", "marker"])
def test_a_machine_that_cannot_start_it_now_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The worker goes on, with its drivers; neither descriptors nor files are left of the tries."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(observation, "PAUSE_SECONDS", 0.0)
    runs(monkeypatch, f"os.write(fd, {nodes_as_json([NODE])!r} + b'\\n'); time.sleep(60)")
    seen = Observation(tmp_path, shared=True)
    with monkeypatch.context() as full:
        if call == "spawn":
            full.setattr(observation, "spawn", refuse)
        else:
            full.setattr(Path, "hardlink_to", refuse)
        open_before = open_pipes()
        for _ in range(3):
            assert look(seen) is None
        assert open_pipes() <= open_before
        assert not list(tmp_path.glob(f"{MARKER}-*"))
    assert "cannot be started, trying again: [Errno 28] No space left on device" in caplog.text
    assert wait_for(lambda: look(seen), 20) == (NODE,)
    seen.stop()


def test_a_shared_folder_is_marked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "print(sys.argv[4], flush=True); time.sleep(60)")
    log = tmp_path / "logs" / f"nodes-{os.getpid()}.log"
    for count in (1, 2):
        seen = Observation(tmp_path, shared=True)
        look(seen)
        wait_for(lambda: log.is_file() and len(log.read_text().split()) == count, 20)  # noqa: B023
        seen.stop()
    first, second = log.read_text().split()
    assert first == second == (tmp_path / MARKER).read_text()
    assert len(first) == 32


def test_a_child_that_is_started_while_a_store_is_not_mounted_names_the_one_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nodes that have it would be told to mount another, and nothing be where the mount belongs but a new mark."""
    runs(monkeypatch, "print(os.environ['TTSV_STORAGE_MARKER'], flush=True); time.sleep(60)")
    store, log = tmp_path / "store", tmp_path / "logs" / f"nodes-{os.getpid()}.log"
    seen = Observation(tmp_path, storage=str(store))
    for count in (1, 2):
        look(seen)
        wait_for(lambda: log.is_file() and len(log.read_text().split()) == count, 20)  # noqa: B023
        seen.stop()
        if count == 1:
            store.rename(tmp_path / "elsewhere")
            store.mkdir()
    first, second = log.read_text().split()
    assert first == second == (tmp_path / "elsewhere" / MARKER).read_text()
    assert not list(store.iterdir())


@pytest.mark.parametrize("kind", ["folder", "bucket", "unusable"])
def test_the_store_is_told_of_but_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    names = "os.environ.get('TTSV_STORAGE'), os.environ.get('TTSV_STORAGE_MARKER')"
    runs(monkeypatch, f"print({names}, 'secret' in str(sys.argv), flush=True); time.sleep(60)")
    (tmp_path / "file").touch()
    places = {"folder": str(tmp_path / "store"), "bucket": "s3://x:secret@bucket", "unusable": str(tmp_path / "file/x")}
    seen = Observation(tmp_path, storage=places[kind])
    look(seen)
    log = tmp_path / "logs" / f"nodes-{os.getpid()}.log"
    said = wait_for(lambda: log.is_file() and log.read_text().split(), 20)
    seen.stop()
    marker = (tmp_path / "store" / MARKER).read_text() if kind == "folder" else "None"
    assert said == ["None" if kind == "unusable" else places[kind], marker, "False"]
    assert ("cannot be used (TTSV_STORAGE)" in caplog.text) == (kind == "unusable")


def test_a_late_line_of_the_cluster_before_is_dropped(seen: Observation, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "time.sleep(60)")
    look(seen)
    before = seen._child
    assert before is not None
    seen.stop()
    reader, writer = os.pipe()
    os.write(writer, nodes_as_json([NODE]) + b"\n")
    os.close(writer)
    seen._read(reader, before)
    assert seen._nodes is None


def test_a_machine_that_has_no_thread_for_it_now_ends_no_worker(
    seen: Observation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(observation, "PAUSE_SECONDS", 0.0)
    runs(monkeypatch, f"os.write(fd, {nodes_as_json([NODE])!r} + b'\\n'); time.sleep(60)")
    open_before = open_pipes()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert look(seen) is None
    assert "cannot be started, trying again: [Errno 11] no thread can read" in caplog.text
    assert open_pipes() <= open_before, "those of earlier tests may be closed by now"
    assert wait_for(lambda: look(seen), 20) == (NODE,)
