"""What a worker knows of its cluster's nodes, by a child that looks: no Ray is imported in the worker's process."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from service.queue.cluster import Node, nodes_from_json
from service.storage import Folder, marked
from workers.node.notes import STORAGE, STORAGE_MARKER
from workers.node.processes import spawn, stop

logger = logging.getLogger(__name__)

OBSERVER = (sys.executable, "-m", "workers.node.observer")
PAUSE_SECONDS = 5.0
"""Between two starts of the child, at least."""
SILENT_SECONDS = 120.0
"""A child that says nothing for so long is ended, as it stands still: it speaks every second, or ends."""


class Observation:
    """The child and the newest line that it wrote. Call it from the main thread: the child dies with its starter.

    `shared`: further nodes must see the data folder; a marker in it tells them that it is the same. `storage`: as
    `TTSV_STORAGE` names it; nodes must reach it.
    """

    def __init__(self, data_dir: Path, *, shared: bool = False, storage: str | None = None) -> None:
        self._data_dir, self._shared, self._storage = data_dir, shared, storage
        self._log = data_dir / "logs" / f"nodes-{os.getpid()}.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._start_after = 0.0
        self._nodes: tuple[Node, ...] | None = None
        self._heard_at = 0.0
        self._headless_since: float | None = None
        self._marks: dict[Path, str] = {}

    def nodes(self, address: str, env: Mapping[str, str]) -> tuple[Node, ...] | None:
        """The nodes as they were last seen, None before; starts the child if there is none.

        `address` is that of the cluster's head, `env` what connects to it beyond our environment.
        """
        if self._child is not None and self._child.poll() is not None:
            logger.warning("the observer of the cluster's nodes ended; starting another (see %s)", self._log)
            self._child = None
        if self._child is not None and time.monotonic() - self._heard_at > SILENT_SECONDS:
            logger.warning("the observer of the cluster's nodes says nothing; ending it")
            stop(self._child, grace=0)
            self._child = None
        if self._child is None and time.monotonic() >= self._start_after:
            try:
                self._start(address, env)
            except OSError as error:  # such as for want of room on the disk; the drivers at work need no observer
                logger.error("the observer of the cluster's nodes cannot be started, trying again: %s", error)
        return self._nodes

    def headless_seconds(self) -> float:
        """For how long the cluster has had no head, or one that answers nobody."""
        since = self._headless_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        """Ends the child and forgets what it saw."""
        if self._child is not None:
            stop(self._child, grace=0)
        self._child, self._nodes, self._start_after, self._headless_since = None, None, 0.0, None

    def _start(self, address: str, env: Mapping[str, str]) -> None:
        self._heard_at = time.monotonic()
        self._start_after = self._heard_at + PAUSE_SECONDS
        marker = [self._mark(self._data_dir)] if self._shared else []
        reader, writer = os.pipe()
        command = [*OBSERVER, address, str(writer), str(self._data_dir), *marker]
        try:
            self._child = spawn(
                command, env={**env, **self._store()}, log=self._log, death=signal.SIGKILL, pass_fds=[writer]
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            threading.Thread(target=self._read, args=(reader, self._child), name="nodes", daemon=True).start()
        except RuntimeError as error:  # the machine has none for now
            os.close(reader)
            stop(self._child, grace=0)
            self._child = None
            raise OSError(errno.EAGAIN, f"no thread can read what it says: {error}") from error

    def _store(self) -> dict[str, str]:
        """What tells the child of the store; in its environment, as a bucket's URL may hold a secret."""
        if self._storage is None:
            return {}
        if "://" in self._storage:
            return {STORAGE: self._storage}
        try:
            return {STORAGE: self._storage, STORAGE_MARKER: self._mark(Path(self._storage))}
        except OSError as error:
            logger.error("the store of trials' files cannot be used (TTSV_STORAGE): %s", error)
            return {}

    def _mark(self, folder: Path) -> str:
        """The word of a folder as it was at first: where it is not mounted later another would be drawn."""
        if folder not in self._marks:
            self._marks[folder] = marked(Folder(folder))
        return self._marks[folder]

    def _read(self, reader: int, child: subprocess.Popen[bytes]) -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                try:
                    nodes = nodes_from_json(line)
                except ValueError:  # cut off by the child's end
                    continue
                if self._child is child:
                    self._hear(nodes)

    def _hear(self, nodes: tuple[Node, ...]) -> None:
        self._heard_at = time.monotonic()
        if any(node.head and node.alive for node in nodes):
            self._headless_since = None
        elif self._headless_since is None:
            self._headless_since = self._heard_at
        if nodes:  # else the head does not answer, and its nodes are what they were
            self._nodes = nodes
