"""Restoring a backup: whole or not at all, whatever ends it on the way.

Everything is verified, then prepared aside; what changes anything is a list of renames that is written down first
(`restore.json` in the data folder), and the end of one transaction. A restore that was cut short is either taken back
or finished by the next one, and no service starts before. What was there is moved aside, never deleted.

A trial that ran when the backup was made waits again, with its checkpoint. Whoever still works for the installation
that the backup is of can write nothing: fences jump, and ids go on after a gap, so that no claim of his is one of ours.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service.database import now
from service.errors import UserError
from service.settings import Settings
from service.upkeep.archive import Manifest, Reader
from service.upkeep.backup import Say, steps
from service.upkeep.moves import JOURNAL, Journal, Move, Moves
from service.upkeep.places import removed
from service.upkeep.shelves import STAGE, TRIALS, Shelf, is_something
from service.upkeep.target import Target


@dataclass(frozen=True)
class Restored:
    """What a restore did: the backup's manifest, experiments that wait again, and where what was there is now.

    `aside_in_store`: where in the store what that had of trials.
    """

    manifest: Manifest
    requeued: int
    aside: Path | None
    aside_in_store: str | None = None


def refuse_half_restored(settings: Settings) -> None:
    """Raises `UserError` where a restore was cut short between its first change and its last."""
    if (settings.data_dir / JOURNAL).exists():
        raise UserError(
            f"a restore into {settings.data_dir} was cut short: run `ttsv restore FILE` again, which takes it back or "
            "ends it first"
        )


def restore(settings: Settings, file: Path, *, force: bool = False, say: Say = lambda _progress: None) -> Restored:
    """Puts a backup in the place of database and data folder, which must be empty unless `force`.

    Raises `UserError` where the backup is not whole, the place is taken, in use or on several disks, or a disk has no
    room.
    """
    data_dir = settings.data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    with Reader(file) as backup, _alone(data_dir):
        manifest = backup.manifest
        target = Target.of(settings)
        with contextlib.closing(target):
            _recover(settings, target)
            target.refuse_in_use()
            present, shelf = _present(data_dir, manifest), Shelf.of(settings)
            shelf.refuse_apart(data_dir, [*present, *_tops(manifest)])
            if not force and (present or shelf.filled() or target.filled()):
                there = [*(["the database"] if target.filled() else []), *present]
                there += ["the store (TTSV_STORAGE)"] if shelf.filled() else []
                raise UserError(
                    f"{', '.join(there)}: is there already; --force moves what is there aside and restores over it"
                )
            shelf.refuse_full(data_dir, manifest)
            backup.verify(steps(say, "verifying", manifest.size))
            aside = data_dir / f"before-restore-{now():%Y%m%d-%H%M%S-%f}"  # another may have ended in this second
            stage = data_dir / STAGE
            removed(stage)
            shelf.clear()
            try:
                moves = [*(Move(data_dir / name, aside / name) for name in present), *shelf.make_room(aside.name)]
                aside_in_store = shelf.where(aside.name) if shelf.filled() else None
                moves += _extract(backup, data_dir, stage, shelf, say)
                requeued = target.fill(backup, moves, aside, say)
            finally:
                if not (data_dir / JOURNAL).exists():
                    removed(stage)
                    shelf.clear()
    kept = aside if aside.exists() else None
    return Restored(manifest, requeued, kept, aside_in_store)


@contextlib.contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    """Keeps other restores out. Raises `UserError` where one is at work."""
    descriptor = os.open(data_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another restore into {data_dir} is at work: wait for it") from None
        yield
    finally:
        os.close(descriptor)


def _tops(manifest: Manifest) -> list[str]:
    """What is renamed as one: a folder of trials, one file or folder of a data set."""
    tops = ("/".join(path.split("/")[: 2 if path.startswith("datasets/") else 1]) for path in _paths(manifest))
    return list(dict.fromkeys(tops))


def _paths(manifest: Manifest) -> Iterator[str]:
    return (file.path for file in manifest.files)


def _present(data_dir: Path, manifest: Manifest) -> list[str]:
    """What is in the way: the files that trials left here, the secret of keys, and data sets that the backup has."""
    names = dict.fromkeys(["trials", "key-secret", *_tops(manifest)])
    return [name for name in names if is_something(data_dir / name)]


def _extract(backup: Reader, data_dir: Path, stage: Path, shelf: Shelf, say: Say) -> Moves:
    """Writes the files aside; the renames that put them in their places."""
    stage.mkdir(mode=0o700)
    step = steps(say, "files", sum(file.size for file in backup.manifest.files))
    for file in backup.manifest.files:
        path = stage / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        backup.extract(file, path, step)
        if file.path.startswith(f"{TRIALS}/"):
            shelf.put(file, path)
    os.sync()
    further = shelf.moves()
    names = [name for name in _tops(backup.manifest) if not (further and name == TRIALS)]
    return [*(Move(stage / name, data_dir / name) for name in names), *further]


def _recover(settings: Settings, target: Target) -> None:
    """Ends or takes back what an earlier restore left half done."""
    if (journal := Journal.read(settings)) is not None:
        target.settle(journal)
