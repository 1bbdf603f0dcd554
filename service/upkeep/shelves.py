"""Where the files of a backup go: the data folder, and of trials the folder or bucket that `TTSV_STORAGE` names."""

import errno
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from service.errors import UserError
from service.settings import Settings
from service.storage import Objects, open_storage, without_secrets
from service.upkeep.archive import FileEntry, Manifest
from service.upkeep.moves import Move, Moves, ObjectsMove
from service.upkeep.places import removed

STAGE, TRIALS = "restore.partial", "trials"
_SPARE_BYTES = 256 * 2**20


class Shelf:
    """Where the files of trials go: the data folder, like all else."""

    @staticmethod
    def of(settings: Settings) -> "Shelf":
        """That of the settings."""
        if settings.storage is None:
            return Shelf()
        store = open_storage(settings.storage)
        if isinstance(store, Objects):
            return _ObjectsShelf(store, without_secrets(settings.storage))
        folder = Path(settings.storage)
        return Shelf() if folder.resolve() == settings.data_dir.resolve() else _FolderShelf(folder)

    def filled(self) -> bool:
        """Whether there is anything of trials beside the data folder."""
        return False

    def refuse_full(self, data_dir: Path, manifest: Manifest) -> None:
        """Raises `UserError` where a disk has too little room."""
        _refuse_full(data_dir, manifest.size)

    def refuse_apart(self, data_dir: Path, names: Collection[str]) -> None:
        """Raises `UserError` where what has these names in the data folder, or trials beside it, cannot be renamed."""
        _refuse_apart(data_dir, names)

    def clear(self) -> None:
        """Removes what a restore has prepared beside the data folder."""

    def make_room(self, aside: str) -> Moves:
        """What moves aside what is there, into a folder of this name."""
        return []

    def where(self, aside: str) -> str:
        """That folder, in words."""
        return aside

    def put(self, file: FileEntry, staged: Path) -> None:
        """Takes a file of a trial that was written to `staged`."""

    def moves(self) -> Moves:
        """What puts that in its place."""
        return []


class _FolderShelf(Shelf):
    """The folder that `TTSV_STORAGE` names."""

    def __init__(self, root: Path) -> None:
        self._root, self._stage = root, root / STAGE

    def filled(self) -> bool:
        return is_something(self._root / TRIALS)

    def refuse_full(self, data_dir: Path, manifest: Manifest) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        if self._root.stat().st_dev == data_dir.stat().st_dev:
            _refuse_full(self._root, manifest.size)
            return
        _refuse_full(self._root, _bytes_of_trials(manifest))
        _refuse_full(data_dir, _bytes_passing(manifest))

    def refuse_apart(self, data_dir: Path, names: Collection[str]) -> None:
        super().refuse_apart(data_dir, names)
        if self._root.exists():
            _refuse_apart(self._root, [TRIALS])

    def clear(self) -> None:
        removed(self._stage)

    def make_room(self, aside: str) -> Moves:
        return [Move(self._root / TRIALS, self._root / aside / TRIALS)] if self.filled() else []

    def where(self, aside: str) -> str:
        return str(self._root / aside)

    def put(self, file: FileEntry, staged: Path) -> None:
        target = self._stage / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(staged, target)

    def moves(self) -> Moves:
        trials = self._stage / TRIALS
        return [Move(trials, self._root / TRIALS)] if trials.exists() else []


class _ObjectsShelf(Shelf):
    """The bucket that `TTSV_STORAGE` names."""

    def __init__(self, store: Objects, place: str) -> None:
        self._store, self._place = store, place

    def filled(self) -> bool:
        return bool(self._store.folders(TRIALS, partial=True))

    def refuse_full(self, data_dir: Path, manifest: Manifest) -> None:
        _refuse_full(data_dir, _bytes_passing(manifest))

    def clear(self) -> None:
        self._store.remove(STAGE)

    def make_room(self, aside: str) -> Moves:
        return [ObjectsMove(self._store, self._place, TRIALS, f"{aside}/{TRIALS}")] if self.filled() else []

    def where(self, aside: str) -> str:
        return f"{aside} of the store"

    def put(self, file: FileEntry, staged: Path) -> None:
        with staged.open("rb") as source:
            sent = self._store.write(f"{STAGE}/{file.path}", source, file.size)
        if sent != file.sha256:
            raise OSError(errno.EIO, "other bytes were sent to the store than are in the backup", file.path)
        staged.unlink()

    def moves(self) -> Moves:
        return [ObjectsMove(self._store, self._place, f"{STAGE}/{TRIALS}", TRIALS)]


def _of_trials(manifest: Manifest) -> list[int]:
    """Bytes of each file of a trial."""
    return [file.size for file in manifest.files if file.path.startswith(f"{TRIALS}/")]


def _bytes_of_trials(manifest: Manifest) -> int:
    return sum(_of_trials(manifest))


def _bytes_passing(manifest: Manifest) -> int:
    """What the data folder holds at most where files of trials pass through it one by one."""
    return manifest.size - _bytes_of_trials(manifest) + max(_of_trials(manifest), default=0)


def is_something(path: Path) -> bool:
    """Whether there is a file, or a folder that is not empty."""
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return os.path.lexists(path)


def _refuse_apart(folder: Path, names: Iterable[str]) -> None:
    """Raises `UserError` where what has these names in a folder cannot be renamed there: it lies on another disk.

    Nor may the folder of all trials be a link: what is restored would not be on the disk that it leads to.
    """
    here = _mount(folder, follow=True)
    for path in [folder / name for name in names]:
        for there, follow in ((path.parent, True), (path, False)):
            is_link = there == folder / TRIALS and there.is_symlink()
            if is_link or (os.path.lexists(there) and _mount(there, follow=follow) != here):
                what = "a link" if there.is_symlink() else "another disk, mounted there"
                raise UserError(
                    f"{there} is {what}: a restore renames what is in {folder}, but not from disk to disk. "
                    f"Take {there.name} away for the restore, and move what was restored onto that disk afterwards; "
                    f"or mount the disk on {folder} itself"
                )


def _mount(path: Path, *, follow: bool) -> tuple[int, str] | None:
    """The disk that something lies on and, as Linux tells it, which mount: the same disk may be mounted there twice.

    None for a link that leads nowhere.
    """
    try:
        descriptor = os.open(path, os.O_PATH | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        return None
    try:
        disk, said = os.fstat(descriptor).st_dev, Path(f"/proc/self/fdinfo/{descriptor}")
        lines = said.read_text().splitlines() if said.exists() else []
        return disk, next((line for line in lines if line.startswith("mnt_id:")), "")
    finally:
        os.close(descriptor)


def _refuse_full(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + _SPARE_BYTES:
        need = size // 2**20
        raise UserError(f"{folder} has {free // 2**20} MiB free, the backup needs {need}: make room, then try again")
