"""Where the files of trials belong, and whether this process sees the folder itself."""

from __future__ import annotations

import errno
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.storage import MARKER, mark_of, open_kept, trouble_of
from workers.node.scratch import node_data

if TYPE_CHECKING:  # who knows databases: a trial's process loads none
    from service.settings import Settings

_BEACON = "beacon"


@dataclass(frozen=True)
class Home:
    """The data folder of the driver and the API: its path there, and the node of Ray (id) that sees it.

    `beacon`: a file in it, by its relative path, that holds `token`, a word that was drawn just now; empty where nobody
    is to recognise it. `shared`: all nodes have it at this path. `storage`: the store, as `TTSV_STORAGE` names it, that
    keeps the trials' files instead. `mark`: the word of the folder that keeps them, where one does.
    """

    data_dir: str
    node_id: str
    beacon: str
    token: str
    shared: bool = False
    storage: str | None = None
    mark: str | None = None

    def require_store(self) -> None:
        """Raises `OSError` where the store is a folder that is not mounted here: its path may be there all the same."""
        if self.storage is not None:
            self.require_kept()

    def require_kept(self) -> None:
        """The same of whatever keeps the trials' files: to be asked where the driver's data folder is."""
        if self.mark is not None and mark_of(open_kept(Path(self.data_dir), self.storage)) != self.mark:
            where = self.storage or self.data_dir
            raise OSError(errno.ENODEV, f"not mounted here, or another folder is (see its {MARKER})", where)

    def seen(self, folder: Path) -> bool:
        """Whether a folder here is that very folder: another one, even a copy of it, does not know the word."""
        try:
            return self.knows(folder)
        except OSError:
            return False

    def knows(self, folder: Path) -> bool:
        """The same. Raises `OSError` where a disk or a share keeps it from being told."""
        try:
            return (folder / self.beacon).read_text() == self.token if self.beacon else folder.is_dir()
        except OSError as error:
            if trouble_of(error) is not None:
                raise
            return False

    def here(self) -> Path | None:
        """That folder as this machine sees it, None where it does not."""
        places = [node_data(self.data_dir)] + ([Path(self.data_dir)] if self.shared else [])
        return next(filter(self.seen, places), None)


def light_beacon(settings: Settings, folder: Path, node_id: str, mark: str | None = None) -> Home:
    """Draws a word and leaves it in `folder`, which is in the data folder and made where it is not there.

    `mark`: that of the place that keeps the trials' files, as the database has it; by default what there is now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    (folder / _BEACON).write_text(token)
    if "://" in (settings.storage or ""):
        mark = None  # a bucket is not unmounted, and its server may be silent for long
    elif mark is None:
        with suppress(OSError):
            mark = mark_of(open_kept(settings.data_dir, settings.storage))
    return Home(
        data_dir=str(settings.data_dir),
        node_id=node_id,
        beacon=(folder / _BEACON).relative_to(settings.data_dir).as_posix(),
        token=token,
        shared=settings.shared_data,
        storage=settings.storage,
        mark=mark,
    )
