"""What does not fit, in words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.queue.cluster import Machine, Versions
from service.storage import MARKER
from workers.node import notes
from workers.node.notes import Complaint, Folder, HeadNote, NodeNote, complain, misfits

SAME = Versions(package="0.1.0+abc", python="3.11.9", ray="2.60.0", torch="2.9.1")
HEAD = HeadNote("head", SAME, 1000.0)


def test_the_same_fits() -> None:
    assert misfits(HEAD, SAME) == []
    assert misfits(HEAD, SAME, clock_seconds=4.9) == []
    assert misfits(HEAD, SAME, clock_seconds=-4.9, sees_folder=False) == [], "the head has no folder to be seen"


@pytest.mark.parametrize(
    ("field", "here", "words"),
    [
        ("package", "0.2.0+def", "ttsv is 0.2.0+def here and 0.1.0+abc on the head: install the same on both"),
        ("package", "0.1.0+def", "the code differs"),
        ("python", "3.12.1", "Python is 3.12.1 here and 3.11.9 on the head"),
        ("ray", "2.59.0", "Ray is 2.59.0 here and 2.60.0 on the head"),
        ("torch", "none", "torch is none here and 2.9.1 on the head"),
    ],
)
def test_another_version(field: str, here: str, words: str) -> None:
    (found,) = misfits(HEAD, dataclasses.replace(SAME, **{field: here}))
    assert words in found


@pytest.mark.parametrize(
    ("seconds", "words"), [(5.5, "6 s ahead of the head's"), (-3600.0, "3600 s behind the head's")]
)
def test_a_clock_that_is_off(seconds: float, words: str) -> None:
    (found,) = misfits(HEAD, SAME, clock_seconds=seconds)
    assert words in found
    assert "NTP" in found


def test_everything_that_is_wrong_is_said() -> None:
    head = dataclasses.replace(HEAD, folder=Folder("/shared", "x"))
    found = misfits(head, Versions("0+a", "3", "2", "1"), clock_seconds=60, sees_folder=False)
    assert len(found) == 6
    assert "data folder /shared is not here" in found[-1]


def test_a_folder_is_known_by_its_marker(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), "marked")
    assert not folder.seen()
    (tmp_path / MARKER).write_text("another")
    assert not folder.seen()
    (tmp_path / MARKER).write_text("marked")
    assert folder.seen()


def test_a_node_says_what_is_wrong_with_it_unless_it_says_something_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several nodes on a machine the one on which the process is."""
    note = NodeNote("gpu2-7-abc", "gpu2", Machine(SAME, (), 1.0, 1.0, None))
    left = {note.name: note, "gpu2-8-def": note}
    told = dict[str, Complaint]()
    shelves = (SimpleNamespace(get=kept.get, put=kept.__setitem__) for kept in (left, told))
    board = SimpleNamespace(**dict(zip(("nodes", "complaints"), shelves, strict=True)))
    monkeypatch.setattr(notes, "Notes", lambda address: {"head:6379": board}[address])
    there = [{"NodeID": name[:6], "NodeName": name} for name in ("gpu2-8-def", note.name, "gpu3-by-hand")]
    monkeypatch.setattr("ray.nodes", lambda: there)
    for node_id, words in (("gpu2-7", "another set"), ("gpu2-7", "and one more"), ("gpu3-b", "it has no note")):
        context = SimpleNamespace(gcs_address="head:6379", get_node_id=lambda node_id=node_id: node_id)
        monkeypatch.setattr("ray.get_runtime_context", lambda context=context: context)
        complain(words)
    assert left == {note.name: dataclasses.replace(note, problem="another set"), "gpu2-8-def": note}
    assert told == {"gpu3-b": Complaint("it has no note")}, "the observer is told"
