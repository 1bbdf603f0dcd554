"""The folders in which trials work: none that holds files is without the lock by which others find it."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from workers.node.scratch import SCRATCH, remove_abandoned, scratch_folder, write_problem


@pytest.fixture(autouse=True)
def _own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that lets no file go, as a network's where another process has it open."""

    def stays(*_: Any, ignore_errors: bool) -> None:
        assert ignore_errors

    monkeypatch.setattr(shutil, "rmtree", stays)


def names(data_dir: Path) -> list[str]:
    return sorted(path.suffix for path in (data_dir / SCRATCH).iterdir())


@pytest.mark.usefixtures("stubborn")
def test_files_that_stay_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch_folder(tmp_path) as folder:
        (folder / "file").write_text("x")
        remove_abandoned(tmp_path)
    assert names(tmp_path) == ["", ".lock"]
    remove_abandoned(tmp_path)
    assert names(tmp_path) == ["", ".lock"]
    monkeypatch.undo()
    remove_abandoned(tmp_path)
    assert names(tmp_path) == []


def test_whoever_is_at_work_keeps_them(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        (folder / "file").write_text("x")
        remove_abandoned(tmp_path)
        assert (folder / "file").exists()
        assert names(tmp_path) == ["", ".lock"]
    assert names(tmp_path) == []


def test_who_cannot_write_a_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not there it would be made, and nothing is left of the look."""
    assert write_problem(tmp_path / "not" / "there") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    problem = write_problem(tmp_path / "file" / "data")
    assert problem is not None
    assert "(Not a directory)" in problem
    for number, told in ((errno.EACCES, True), (errno.ENOSPC, False), (errno.EDQUOT, False)):

        def refuse(number: int = number, **_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
        assert (write_problem(tmp_path) is not None) == told
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (tmp_path / "gone").open())
    assert write_problem(tmp_path) == f"cannot be written by uid {os.geteuid()} (No such file or directory)"
