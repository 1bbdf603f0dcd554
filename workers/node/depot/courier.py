"""Carries what a trial writes in its scratch folder to the store while the trial goes on."""

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from service.storage import Attempt, Store
from service.storage.attempts import LOG, attempts

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
LOG_SECONDS = 5.0
"""So often a log that grows is carried, if nothing else is."""
PATIENCE_SECONDS = 600.0
"""How long a store may fail, a full disk among the reasons, before the trial ends for it; it waits meanwhile."""
_PAUSE_SECONDS = 2.0
FIRST = ("epochs.jsonl",)
"""Goes before all else: an epoch must not be missed behind a checkpoint."""
_UNFINISHED = (".tmp", ".partial", ".part")

Version = tuple[int, int, int]
"""Of a file: its inode, size and time of change."""


class Courier:
    """A thread that carries new and changed files, one round at a time; a round begins when something changed.

    In each round the files are as they were at one moment, as far as it matters: none is newer than another that was
    written before it. They are carried in the order in which they were written, those of `FIRST` ahead, and what was
    removed here is removed there last. So what is there at any time is what a crash here would have left.
    """

    def __init__(self, folder: Path, store: Store, trial_id: int, attempt: Attempt, known: Sequence[str] = ()) -> None:
        self._folder, self._store, self._trial_id, self._attempt = folder, store, trial_id, attempt
        self._there: dict[str, Version] = {}
        for path in known:
            if (version := _version_of(folder / path)) is not None:
                self._there[path] = version
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._failed: Exception | None = None
        self._over = False
        self._log_after = 0.0
        self._patience = PATIENCE_SECONDS
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        """Starts to carry."""
        self._thread.start()

    def sync(self) -> None:
        """Waits until all is there that is here now. Raises what the thread met: then nothing is carried any more."""
        for _ in self.syncing(math.inf):
            pass

    def syncing(self, seconds: float) -> Iterator[None]:
        """The same, and comes back meanwhile, whenever so much time went by."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
        while not self._synced(mine, None if math.isinf(seconds) else seconds):
            yield

    def _synced(self, mine: int, seconds: float | None) -> bool:
        with self._changed:
            over = self._changed.wait_for(lambda: self._done >= mine or self._failed is not None or self._over, seconds)
            if self._failed is not None:
                raise self._failed
            return over

    def finish(self) -> None:
        """Carries what is left, as far as that goes without waiting for a store that fails."""
        with self._changed:
            self._patience = 0.0
            self._changed.notify_all()
        self.sync()

    def close(self) -> None:
        """Ends the thread after the round that it is in."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        fails_since: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._asked > self._done, LOOK_SECONDS)
                if self._over:
                    return
                asked, waited_for = self._asked, self._asked > self._done
            try:
                self._round(waited_for)
            except Exception as error:
                fails_since = fails_since or time.monotonic()
                with self._changed:
                    lasting = not isinstance(error, OSError) or error.errno == errno.ESTALE
                    if lasting or time.monotonic() - fails_since >= self._patience or self._over:
                        self._failed = error
                        self._changed.notify_all()
                        return
                    logger.warning("files wait to be stored: %s", error)
                    self._changed.wait_for(lambda: self._over or not self._patience, _PAUSE_SECONDS)
                continue
            fails_since = None
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _round(self, waited_for: bool) -> None:
        if not self._folder.is_dir():
            raise OSError(errno.ESTALE, "the scratch folder was removed", str(self._folder))
        found = _listing(self._folder)
        changed = [path for path, version in found.items() if self._there.get(path) != version]
        gone = self._there.keys() - found.keys()
        if not changed and not gone:
            return
        if changed == [LOG] and not gone and not waited_for and time.monotonic() < self._log_after:
            return
        if any(other > self._attempt for other in attempts(self._store, self._trial_id)):
            raise OSError(errno.ESTALE, f"trial {self._trial_id} goes on elsewhere, and this process is left over")
        target = self._attempt.folder(self._trial_id)
        # From the oldest to the newest, the journal ahead; opened the other way round, so that each is at least as new
        # as it was when those behind it were written.
        order = sorted(changed, key=lambda path: (path not in FIRST, found[path][2], path.endswith(".json")))
        with ExitStack() as stack:
            opened: list[tuple[str, BinaryIO]] = []
            for path in reversed(order):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    opened.append((path, stack.enter_context((self._folder / path).open("rb"))))
            for path, file in reversed(opened):
                status = os.fstat(file.fileno())
                try:
                    self._store.write(f"{target}/{path}", file, status.st_size)
                except OSError:
                    if os.fstat(file.fileno()).st_size >= status.st_size:
                        raise
                    continue  # it is being written anew: in the next round
                self._there[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
        for path in sorted(gone):
            self._store.remove(f"{target}/{path}")
            del self._there[path]
        self._log_after = time.monotonic() + LOG_SECONDS


def _listing(folder: Path) -> dict[str, Version]:
    """The files that are worth carrying, by their paths in the folder. Raises `OSError` where it cannot be read.

    What is not seen for that is not gone: else a disk that fails here would take from the store what is safe there.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == str(folder):  # a folder in it may go
            raise error

    found = {}
    for parent, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.suffix not in _UNFINISHED and (version := _version_of(path)):
                found[path.relative_to(folder).as_posix()] = version
    return found


def _version_of(path: Path) -> Version | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
