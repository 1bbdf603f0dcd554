"""The head's data folder as a store on another node: each call goes to the depot, and again where that died."""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError, RayTaskError

from service.errors import UserError
from service.storage.store import CHUNK, TRIES
from ttsv.errors import TrialError
from workers.node.depot.data_sets import DataSetFiles
from workers.node.depot.home import Home
from workers.node.depot.server import find_depot
from workers.node.notes import Notes
from workers.node.probe import no_ray_at

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 120.0
"""How long a call may take: a process may have to start for it, and a large file to be checked."""
DATA_SET_SECONDS = 1500.0
"""How long the head may take to read a data set that it never used."""
PATIENCE_SECONDS = 300.0
_PAUSE_SECONDS = 1.0
_IN_FLIGHT = 3
"""Pieces of a file that are under way at once: Ray keeps them in little memory, and many trials send."""
_STDERR = 2


class AwayError(TrialError):
    """The files of a trial cannot go where they belong."""

    failure = "infrastructure"


class RemoteFolder:
    """A store (`service.storage.store.Store`) that is the data folder of `home`, on its node.

    A call that is not answered is made again, each of them changing nothing the second time, for so long; then an
    `OSError` (EIO) is raised.
    """

    chunk = CHUNK

    def __init__(self, home: Home) -> None:
        self.home = home
        self._depot: Any = None

    def check(self) -> None:
        """Raises `AwayError` where Ray's node of the driver has another folder at the path, and `OSError`."""
        if not self._ask("sees", self.home):
            raise AwayError(
                f"Ray's node of the driver does not see the driver's data folder {self.home.data_dir}: run the worker "
                "on a machine of the cluster, or name a store that all nodes reach (TTSV_STORAGE)"
            )

    def files(self, folder: str) -> dict[str, int]:
        """As `Store.files`."""
        found: dict[str, int] = self._ask("call", "files", folder)
        return found

    def folders(self, folder: str, *, partial: bool = False) -> list[str]:
        """As `Store.folders`; never those that are unfinished."""
        found: list[str] = self._ask("call", "folders", folder)
        return found

    def size(self, path: str) -> int | None:
        """As `Store.size`."""
        found: int | None = self._ask("call", "size", path)
        return found

    def read(self, path: str, offset: int, count: int) -> bytes:
        """As `Store.read`."""
        found: bytes = self._ask("call", "read", path, offset, count)
        return found

    def write(self, path: str, source: BinaryIO, size: int) -> str:
        """As `Store.write`; what arrived otherwise than it was sent is sent again."""
        start = source.tell()
        for left in reversed(range(TRIES)):
            source.seek(start)
            part, digest = secrets.token_hex(8), hashlib.sha256()
            try:
                self._send(part, source, size, digest)
                self._ask("call", "finish", part, path, size, digest.hexdigest())
                return digest.hexdigest()
            except OSError as error:
                self._drop(part)
                if error.errno != errno.EIO or not left:
                    raise
                logger.warning("%s is sent again: %s", path, error)
        raise AssertionError("the last try returns or raises")

    def digest(self, path: str) -> str | None:
        """As `Store.digest`."""
        found: str | None = self._ask("call", "digest", path)
        return found

    def copy(self, source: str, target: str) -> None:
        """As `Store.copy`."""
        self._ask("call", "copy", source, target)

    def make(self, folder: str) -> None:
        """As `Store.make`."""
        self._ask("call", "make", folder)

    def remove(self, path: str) -> None:
        """As `Store.remove`."""
        self._ask("call", "remove", path)

    def data_set(self, name: str) -> DataSetFiles | str:
        """A data set as it is there; in words why there is none."""
        found: DataSetFiles | str = self._ask("data_set", name, seconds=DATA_SET_SECONDS)
        return found

    def data_sets(self) -> list[str]:
        """The names of those whose files are there."""
        found: list[str] = self._ask("data_sets", seconds=DATA_SET_SECONDS)
        return found

    def _send(self, part: str, source: BinaryIO, size: int, digest: Any) -> None:
        under_way: deque[tuple[Any, int, bytes]] = deque()
        done = 0
        while done < size or not done or under_way:
            if len(under_way) >= _IN_FLIGHT or (under_way and done >= size):
                self._arrived(part, *under_way.popleft())
                continue
            piece = source.read(min(CHUNK, size - done))
            if not piece and done < size:
                raise OSError(errno.EIO, f"the file became shorter while it was sent: {done} of {size} bytes")
            digest.update(piece)
            under_way.append((self._begin("call", "write_part", part, done, piece), done, piece))
            done += len(piece)
            if not size:
                self._arrived(part, *under_way.popleft())
                return

    def _arrived(self, part: str, answer: Any, offset: int, piece: bytes) -> None:
        try:
            if answer is not None:
                ray.get(answer, timeout=ANSWER_SECONDS)
                return
        except RayTaskError as error:
            raise _cause(error) from error
        except (RayError, GetTimeoutError) as error:
            logger.warning("a piece of a file is sent again: %s", error)
            self._depot = None
        self._ask("call", "write_part", part, offset, piece)

    def _drop(self, part: str) -> None:
        try:
            self._ask("call", "drop", part, patience=0.0)
        except OSError as error:
            logger.warning("what was sent of a file stays for some hours: %s", error)

    def _ask(self, method: str, *arguments: Any, patience: float | None = None, seconds: float | None = None) -> Any:
        deadline = time.monotonic() + (PATIENCE_SECONDS if patience is None else patience)
        while True:
            try:
                return ray.get(self._begin(method, *arguments, sure=True), timeout=seconds or ANSWER_SECONDS)
            except RayTaskError as error:
                raise _cause(error) from error
            except (RayError, GetTimeoutError, ValueError) as error:  # ValueError: of a name that is just given up
                self._depot = None
                if time.monotonic() > deadline:
                    raise OSError(errno.EIO, f"the depot of {self.home.data_dir} does not answer: {error}") from error
                logger.warning("the depot does not answer, trying again: %s", error)
                time.sleep(_PAUSE_SECONDS)

    def _begin(self, method: str, *arguments: Any, sure: bool = False) -> Any:
        """Ray's promise of an answer; None, unless `sure`, where the depot cannot even be asked."""
        try:
            if self._depot is None:
                self._depot = find_depot(self.home)
            return getattr(self._depot, method).remote(*arguments)
        except (RayError, ValueError):
            if sure:
                raise
            return None


def _cause(error: RayTaskError) -> Exception:
    """What the depot raised, as it raised it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def join_head(address: str) -> RemoteFolder:
    """The data folder of the worker whose cluster this machine, a node of it, has joined at an address (host:port).

    Ray has the cluster's token from the environment. Raises `UserError` where this machine is no node of it, or nobody
    tells where the folder is.
    """
    if (words := no_ray_at(address)) is not None:
        raise UserError(words)
    try:
        with _unsaid():
            note = Notes(address).heads.get("head")
        if note is None or note.data_dir is None or note.node is None:
            raise UserError(f"Ray answers at {address}, and no worker says there where its data folder is; start it")
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError:
        raise UserError(
            f"the token is not that of the cluster at {address}: copy the file `token` of the head's data folder"
        ) from None
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"this machine is no node of {address} ({reason}): start `ttsv node` here, and sync while it runs"
        ) from error
    return RemoteFolder(Home(note.data_dir, note.node, beacon="", token=""))


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """Keeps from standard error what Ray's own code writes there beside the error that it raises."""
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
