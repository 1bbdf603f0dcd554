"""The logs that trials and drivers write under the data folder: found by id, read from the end in bounded pieces."""

import logging
import os
import re
from pathlib import Path

from service.settings import Settings
from service.storage import Folder, StoredFile, logs_of, open_storage

logger = logging.getLogger(__name__)

Log = Path | StoredFile
"""What is read of a log, wherever it is."""
MAX_TAIL_BYTES = 4 * 2**20
"""So much of a log's end is looked at, whatever number of lines is asked for."""
_BLOCK = 64 * 2**10


def trial_log(settings: Settings, trial_id: int) -> Log | None:
    """The log of the trial's newest attempt that has one, in the data folder or else in the store."""
    data_dir = settings.data_dir
    here = [data_dir / found.path for found in logs_of(Folder(data_dir), trial_id)]
    if (path := next((path for path in here if _is_ours(data_dir, path)), None)) or settings.storage is None:
        return path
    try:
        return next(iter(logs_of(open_storage(settings.storage), trial_id)), None)
    except OSError as error:
        logger.warning("the store of trials' files (TTSV_STORAGE) does not answer: %s", error)
        return None


def experiment_log(data_dir: Path, experiment_id: int) -> Path | None:
    """The log of the driver that ran the experiment last: that of the largest fence."""
    name = re.compile(rf"experiment-{experiment_id}-(\d{{1,18}})\.log")
    try:
        found = [match for entry in (data_dir / "logs").iterdir() if (match := name.fullmatch(entry.name))]
    except (FileNotFoundError, NotADirectoryError):
        return None
    newest_first = sorted(found, key=lambda match: int(match[1]), reverse=True)
    return next((path for one in newest_first if _is_ours(data_dir, path := data_dir / "logs" / one[0])), None)


def tail(path: Log, lines: int) -> tuple[bytes, int]:
    """The last `lines` lines, within the last `MAX_TAIL_BYTES`, and where the file ended."""
    with path.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        text = b""
        # The last line's own end is none to stop at, hence one more.
        while start > 0 and end - start < MAX_TAIL_BYTES and text.count(b"\n") <= lines:
            size = min(_BLOCK, start)
            start -= size
            file.seek(start)
            text = file.read(size) + text
    kept = text.splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(kept), end


def read_from(path: Log, offset: int) -> bytes:
    """What stands in the file from a place on, at most 64 KiB; nothing if the file is gone."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_BLOCK)
    except FileNotFoundError:
        return b""


def read_before(path: Log, offset: int, size: int) -> bytes:
    """The last bytes of the file before a place; fewer, or others, if it is shorter, and nothing if it is gone."""
    start = max(0, offset - size)
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(offset - start)
    except FileNotFoundError:
        return b""


def _is_ours(data_dir: Path, path: Path) -> bool:
    """A plain file in the data folder, whatever links stand in between."""
    return path.is_file() and path.resolve().is_relative_to(data_dir.resolve())
