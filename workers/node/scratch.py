"""This machine's data folder, and in it the folders in which trials write until their files are elsewhere."""

import contextlib
import errno
import fcntl
import os
import pwd
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODE_DATA = "TTSV_NODE_DATA_DIR"
"""The environment variable by which processes of Ray know the data folder of their machine."""
SCRATCH = "scratch"
"""Folder, in a machine's data folder, of the folders of trials at work."""


def node_data(path_on_head: str) -> Path:
    """The data folder of this machine: the one that it was told of, else one at the same path as on the head."""
    return Path(os.environ.get(NODE_DATA) or path_on_head)


def write_problem(folder: Path) -> str | None:
    """Who may not write into `folder`, and why; where it is not there, into the nearest one around it.

    None where that succeeds: nothing stays of it. None of a full disk, too, as that passes and trials wait for it.
    """
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):  # asked for it, root and file systems of networks say anything
            return None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return None
        return f"cannot be written by {_user()} ({error.strerror or error})"


def _user() -> str:
    number = os.geteuid()
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:  # of a container
        return f"uid {number}"


@contextmanager
def scratch_folder(data_dir: Path) -> Iterator[Path]:
    """A fresh folder until the block ends, in `data_dir/scratch` or, where nothing can be made there, the system's.

    A lock beside it is held for as long as this process lives: by it others see what nobody uses any more.
    """
    parent = _writable(data_dir)
    remove_abandoned(data_dir)
    name = secrets.token_hex(8)
    lock = parent / f"{name}.lock"
    folder = parent / name
    while True:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not _is_open(lock, held.fileno()):
                continue  # somebody took it for abandoned before it was locked
            folder.mkdir()
            try:
                yield folder
            finally:
                _remove(folder, lock)
            return


def remove_abandoned(data_dir: Path | None) -> None:
    """Removes folders whose processes are gone; among the system's temporary ones alone where `data_dir` is None."""
    for parent in (*([] if data_dir is None else [data_dir / SCRATCH]), _elsewhere()):
        for lock in parent.glob("*.lock"):
            with contextlib.suppress(OSError), lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock.with_suffix(""), lock)


def _remove(folder: Path, lock: Path) -> None:
    """Removes a folder, then its lock; the lock stays where files do, as without one nobody would look there again."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        lock.unlink(missing_ok=True)


def _writable(data_dir: Path) -> Path:
    folder = data_dir / SCRATCH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    elsewhere = _elsewhere()
    elsewhere.mkdir(mode=0o700, parents=True, exist_ok=True)
    return elsewhere


def _elsewhere() -> Path:
    return Path(tempfile.gettempdir()) / f"ttsv-{SCRATCH}-{os.getuid()}"


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
