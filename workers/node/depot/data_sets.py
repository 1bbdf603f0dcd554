"""Data sets of a node: the same as the head's, by SHA-256, or brought from there."""

import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from service.storage import copy_out, require_inside, trouble_of
from service.storage.store import DamagedFileError, Store
from ttsv.errors import DataError, TrialError

if TYPE_CHECKING:
    from ttsv.data.record import ContentRecord

logger = logging.getLogger(__name__)

FOLDER = "datasets"
"""Of data sets, in a data folder."""
_ASIDE = ".before-sync"
"""Folder, among data sets, of files in whose place those of the head came."""

Told = Callable[[str, int, int | None], None]
"""Called while files come: a file's name, the bytes that are here, and all its bytes."""


@dataclass(frozen=True)
class DataSetFile:
    """A file of a data set: its SHA-256 (hex) and its bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class DataSetFiles:
    """A data set as the head has it: the SHA-256 (hex) of its content, and its files by their paths in `datasets`."""

    name: str
    sha256: str
    files: Mapping[str, DataSetFile]


class OtherDataError(DataError):
    """This machine has another data set under the name than the head: no fault of the trial that meets it."""


class DataSetSource(Store, Protocol):
    """The head's folder, which says what data sets there are."""

    def data_set(self, name: str) -> DataSetFiles | str:
        """A data set as it is there; in words why there is none."""

    def data_sets(self) -> list[str]:
        """The names of those whose files are there."""


def known_data_sets(data_dir: Path) -> list[str]:
    """The names of data sets whose files are in a data folder, used or not; those of corrupted images among them."""
    from ttsv.data.catalog import FETCHED
    from ttsv.data.corruptions import PUBLISHED
    from ttsv.data.own import own_names

    folder = data_dir / FOLDER
    fetched = [name for name, files in FETCHED.items() if (folder / files).exists()]
    return [*fetched, *own_names(folder), *(name for name in PUBLISHED if (folder / name).is_dir())]


def describe_data_set(name: str, folder: Path) -> DataSetFiles | str:
    """A data set in `folder`, checked as at its first use; in words why there is none.

    `name`: a data set's, or that of a folder of corrupted images. Raises `OSError` where the disk is full or fails,
    which says nothing of the set.
    """
    from ttsv.data.corruptions import PUBLISHED
    from ttsv.data.record import ContentRecord
    from ttsv.data.shared import open_shared

    try:
        if name in PUBLISHED:
            sha256, digests = _corruptions(name, folder)
        else:
            sha256 = open_shared(name, folder).sha256
            record = ContentRecord.find(name, folder)
            digests = dict(record.files) if record is not None else {}
        files = {path: DataSetFile(digest, (folder / path).stat().st_size) for path, digest in digests.items()}
    except (TrialError, OSError) as error:
        if (trouble := trouble_of(error)) is not None:
            raise trouble from None
        return str(error)
    return DataSetFiles(name, sha256, files)


def _corruptions(name: str, folder: Path) -> tuple[str, dict[str, str]]:
    """The SHA-256 of a folder of corrupted images, and of its files, as at the first use. Raises `DataError`."""
    from ttsv.data.corruptions import PublishedCorruptions, content_of
    from ttsv.data.record import ContentRecord
    from ttsv.data.shared import locked

    files = PublishedCorruptions(folder / name).require_files()
    if ContentRecord.find(name, folder) is None:
        with locked(_dataset_of(name), folder):  # gigabytes, which one reads for all that ask
            if ContentRecord.find(name, folder) is None:
                return content_of(folder / name, files)
    record = ContentRecord.find(name, folder)
    assert record is not None
    return record.sha256, dict(record.files)


def bring_data_set(name: str, data_dir: Path, head: DataSetSource, told: Told) -> bool:
    """Has a data set here that is the same as the head's; whether files had to come. Others wait for it meanwhile.

    What an interrupted copy left is gone on with; every file is checked, then the content. A record of the first use
    that is cut or altered is made anew. Raises `DataError` where the head has none and this machine neither,
    `OtherDataError` where this machine has another one under the name, and `OSError`.
    """
    from ttsv.data.catalog import own_set
    from ttsv.data.corruptions import PUBLISHED
    from ttsv.data.record import ContentRecord
    from ttsv.data.shared import find_shared, locked, open_shared

    folder, corrupted = data_dir / FOLDER, name in PUBLISHED
    theirs = head.data_set(name)
    if isinstance(theirs, str):
        if ContentRecord.find(name, folder) is not None:
            return False
        host = socket.gethostname()
        put = "mend it on the head" if name in head.data_sets() else _put(name)
        fix = f"{put}, then `ttsv data sync {name}` on {host}, or try again"
        raise DataError(f"dataset = {name!r}: it is not on {host}, and the head gives none ({theirs}): {fix}")
    hashes = {path: file.sha256 for path, file in theirs.files.items()}
    record = _readable_record(name, folder)
    if record is not None and record.sha256 != theirs.sha256:
        if not (record.files.keys() <= hashes.keys() and _whole(theirs, folder, read=True)):
            # The path alone may be the head's, too: whoever reads this there must not remove the right set.
            host = socket.gethostname()
            raise OtherDataError(
                f"dataset = {name!r}: on {host} its content has SHA-256 {record.sha256}, on the head {theirs.sha256}: "
                f"results would not be comparable; on {host}, and not on the head, remove {record.path} and the set's "
                f"files, then run `ttsv data sync {name}` there"
            )
        logger.warning("%s is not that of the set's files, which are the head's: it is made anew", record.path)
        record = None
    whole = record is not None and record.files == hashes and _whole(theirs, folder, read=corrupted)
    # A copy that is not what was written is made anew of the files: of these more than the size has to be the head's.
    if whole and (corrupted or find_shared(name, folder, whole=True) is not None):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    failed: Exception | None = None
    with locked(_dataset_of(name), folder):  # which takes every error of the disk for one of the set
        try:
            came = _bring_files(theirs, folder, head, told, aside=record is None and own_set(name) is not None)
        except DamagedFileError as error:
            failed = DataError(
                f"dataset = {name!r}: the head's {error.filename} is damaged ({error.strerror}): put it back there "
                f"(`ttsv data verify {name}` says when it is right), then try again"
            )
        except OSError as error:
            failed = error
        else:
            if record is None or record.files != hashes:  # the same content may be packed anew
                ContentRecord.make(name, folder, theirs.sha256, hashes)
    # Raised only here, it comes of no error of the disk: for one of those a trial would be tried again and again.
    if failed is not None:
        raise failed
    if not corrupted:
        try:
            open_shared(name, folder)
        except DataError as error:  # every file is the head's: there are others besides, as a further image
            if trouble_of(error) is not None:
                raise
            raise OtherDataError(
                f"dataset = {name!r}: on {socket.gethostname()}, and not on the head: {error}"
            ) from error
    return came


def _readable_record(name: str, folder: Path) -> "ContentRecord | None":
    """The record of a set's first use; None where there is none, or one that is cut or altered."""
    from ttsv.data.record import ContentRecord

    try:
        return ContentRecord.find(name, folder)
    except DataError as error:
        logger.warning("the record of %s is made anew, as the head's: %s", name, error)
        return None


def bring_baseline(dataset: str, data_dir: Path, head: Store) -> None:
    """Has the baseline of a data set's corruption errors here as it is on the head, or none; others wait meanwhile.

    Raises `DataError` of an `OSError`.
    """
    from ttsv.data.download import file_digest
    from ttsv.data.shared import locked
    from ttsv.evaluation.baseline import baseline_path

    folder = data_dir / FOLDER
    place = baseline_path(folder, dataset)
    path = f"{FOLDER}/{place.name}"
    with locked(dataset, folder):
        if head.size(path) is None:
            place.unlink(missing_ok=True)
        elif head.digest(path) != file_digest(place, "sha256"):
            copy_out(head, path, place)


def _bring_files(wanted: DataSetFiles, folder: Path, head: DataSetSource, told: Told, *, aside: bool) -> bool:
    """Copies the files that are not here, or other ones; whether there were any. Raises `OSError`.

    With `aside` other ones are kept: of what was never used here nobody knows whether it is somebody's only copy.
    """
    from ttsv.data.download import file_digest

    came = False
    for path, file in wanted.files.items():
        place = folder / require_inside(path)
        if file_digest(place, "sha256") != file.sha256:

            def show(done: int, path: str = path, size: int = file.size) -> None:
                told(path, done, size)

            if aside and place.exists():
                kept = folder / _ASIDE / secrets.token_hex(4) / path
                kept.parent.mkdir(parents=True)
                place.rename(kept)
                logger.warning("%s is not the head's: it is in %s now, and the head's comes", place, kept)
            copy_out(head, f"{FOLDER}/{path}", place, sha256=file.sha256, resume=True, told=show)
            came = True
    return came


def _dataset_of(name: str) -> str:
    """The data set that a folder of corrupted images belongs to; a data set itself."""
    from ttsv.config.evaluation import PUBLISHED_CORRUPTIONS

    return next((dataset for dataset, folder in PUBLISHED_CORRUPTIONS.items() if folder == name), name)


def _whole(wanted: DataSetFiles, folder: Path, *, read: bool) -> bool:
    """Whether every file is here, by its size; or where they are `read`, by its SHA-256.

    What a data set holds is compared when it is first used, so before training, and corrupted images after it.
    """
    from ttsv.data.download import file_digest

    try:
        return all(
            (folder / path).stat().st_size == file.size
            and (not read or file_digest(folder / path, "sha256") == file.sha256)
            for path, file in wanted.files.items()
        )
    except FileNotFoundError:
        return False


def _put(name: str) -> str:
    """How a data set comes to the head: one of the user's own nobody publishes."""
    from ttsv.data.catalog import own_set
    from ttsv.data.source import fetch_command

    if (own := own_set(name)) is None:
        return f"have it on the head (`{fetch_command(name)}` there)"
    kind, stem = own
    return f"put {stem + '.npz' if kind == 'npz' else f'the folder {stem}'} into `{FOLDER}` of the head's data folder"
