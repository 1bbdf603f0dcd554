"""One copy of each data set per machine, mapped into the memory of every process that loads it.

A set is checked and read once; then it lies in `datasets/cache/`, its training, validation and test images one after
another, and is opened by mapping it. Beside the copy stands a note of what it was made of: while size and times of
those files, and of the copy's own, are unchanged, the set is not read again (`verify` reads and hashes everything). But
a disk that loses a bit leaves size and times as they were: who is to compute with the images has the copy's own bytes
compared with its SHA-256 first, a fraction of what one epoch takes, and a copy that is not what was written made anew.
"""

import fcntl
import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ttsv.data.archive import BROKEN
from ttsv.data.catalog import DATASETS, DatasetInfo, check_name, dataset_info
from ttsv.data.content import content_sha256, new_array
from ttsv.data.corruptions import PUBLISHED, PublishedCorruptions, content_of
from ttsv.data.counted import OWN, check_parts, class_count
from ttsv.data.download import file_digest
from ttsv.data.own import own_names
from ttsv.data.record import ContentRecord, file_hashes, file_name, write_json
from ttsv.data.source import Arrays, Progress
from ttsv.data.sources import source_of
from ttsv.data.split import SplitRecord, split_order
from ttsv.errors import DataError

logger = logging.getLogger(__name__)

FORMAT = 2
"""Of note and copy: raised with every change, which has all copies made anew."""
IMAGES, LABELS = "images.npy", "labels.npy"
_CHUNK = 4096
_SEAL = "note_sha256"
_LEFT = re.compile(r"[^.]+|json\.[0-9]+")
"""What stands behind a set's name where a folder, or a note, is in the making."""


@dataclass(frozen=True, kw_only=True)
class SharedCopy:
    """Training, validation and test images one after another (`split["images"]` has their numbers), and labels.

    The arrays are mapped privately: their pages are the machine's until one is written to, which copies it for this
    process alone. No process can alter the file or what another one sees.
    """

    info: DatasetInfo
    images: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    sha256: str
    split: SplitRecord


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a copy was made of, as JSON beside it: the source's `version`, the content's `sha256`, the copy's folder.

    `arrays`: SHA-256 of the copy's files; `stamps`: size and times of those and of the files that were read (`_stamp`),
    both by path in the data folder.
    """

    format: int
    version: str
    sha256: str
    copy: str
    arrays: dict[str, str]
    stamps: dict[str, list[int] | None]
    classes: int
    split: SplitRecord


def open_shared(name: str, folder: Path, *, whole: bool = False) -> SharedCopy:
    """The copy of a data set, made first where there is none; `folder` is `data_dir/datasets`.

    With `whole` it is read, and made anew where it is not what was written, though its size and times are. Any number
    of processes may do this at once. Raises `ConfigError` for an unknown name and `DataError`.
    """
    found = find_shared(name, folder, whole=whole)
    if found is None:
        _require_files(name, folder)
        with locked(name, folder):
            found = find_shared(name, folder, whole=whole)  # another process may have made it meanwhile
            if found is None:
                _make(name, folder)
                found = find_shared(name, folder)
    if found is None:
        raise DataError(f"data set {name!r}: its files in {folder} change while they are read; load it again")
    return found


def find_shared(name: str, folder: Path, *, whole: bool = False) -> SharedCopy | None:
    """The copy of a data set, if there is one and what it was made of is unchanged by size and times.

    With `whole` the copy itself must be what was written, by its SHA-256. Raises `ConfigError` for an unknown name, and
    `DataError`.
    """
    with _disk(name, folder):
        return _find(name, folder, whole)


def _find(name: str, folder: Path, whole: bool) -> SharedCopy | None:
    version = source_of(name).version
    note = _note(name, folder)
    record = ContentRecord.find(name, folder)
    if note is None or record is None or (note.version, note.sha256) != (version, record.sha256):
        return None
    if any(_stamp(folder / file) != stamp for file, stamp in note.stamps.items()):
        return None
    for file, sha256 in note.arrays.items() if whole else ():
        if file_digest(folder / file, "sha256") != sha256:
            logger.warning("%s is not what was written there: it is made anew", folder / file)
            return None
    place = _cache(folder) / note.copy
    try:
        images, labels = (np.load(place / file, mmap_mode="c") for file in (IMAGES, LABELS))
    except OSError:
        raise
    except BROKEN:  # its header, where nobody compared it
        return None
    _, channels, size, *_ = images.shape
    parts = note.split["images"]
    info = dataset_info(name) or DatasetInfo(
        name=name,
        classes=note.classes,
        channels=channels,
        image_size=size,
        dims=images.ndim - 2,
        source=OWN,
        parts=(parts["train"], parts["validation"], parts["test"]),
    )
    return SharedCopy(info=info, images=images, labels=labels, sha256=note.sha256, split=note.split)


class Listed(NamedTuple):
    """A data set by its name. `info`: None for the user's own before their first use; `sha256`: likewise, for all.

    `problem`: why one that was used cannot be looked at.
    """

    name: str
    info: DatasetInfo | None
    sha256: str | None
    problem: str | None = None


def list_datasets(data_dir: Path) -> list[Listed]:
    """Lists every set with a name of its own, and the user's that lie in `data_dir/datasets`.

    One that cannot be looked at hides none of the others.
    """
    found, folder = [], Path(data_dir) / "datasets"
    for name in [*DATASETS, *own_names(folder)]:
        try:
            copy = find_shared(name, folder)
        except DataError as error:
            found.append(Listed(name, dataset_info(name), None, str(error)))
            continue
        found.append(Listed(name, copy.info, copy.sha256) if copy else Listed(name, dataset_info(name), None))
    return found


def fetch_dataset(name: str, data_dir: Path, progress: Progress | None = None) -> None:
    """Downloads what of the data set is missing or wrong into `data_dir/datasets`, checks it and makes the shared copy.

    An archive that was put there is used. A download that is interrupted leaves nothing that could be taken for
    whole. `progress` is called with each downloaded file's name, the bytes that are here, and the bytes there will be
    (None where the server does not say). Raises `DataError` where that fails, `ConfigError` for an unknown name.
    """
    folder = Path(data_dir) / "datasets"
    source = source_of(name)
    with locked(name, folder):
        source.fetch(folder, progress or (lambda file, done, total: None))
    open_shared(name, folder)


def verify_dataset(name: str, data_dir: Path) -> str:
    """Checks every file against its published checksum, and everything against the first use; reads the whole set.

    `name` may be that of a folder of published corruptions, CIFAR-10-C or CIFAR-100-C. Returns the SHA-256 of the set's
    content. Raises `DataError` naming the first file that is missing, cut or
    altered, `ConfigError` for an unknown name.
    """
    folder = Path(data_dir) / "datasets"
    if name in PUBLISHED:
        return _verify_corruptions(name, folder)
    _require_files(name, folder)
    with locked(name, folder):
        note = _note(name, folder)
        for file, sha256 in (note.arrays if note else {}).items():
            path = folder / file
            if path.exists() and file_hashes([path], folder)[file] != sha256:
                raise DataError(f"{path} is cut or altered: remove {path.parent}, the next load makes it anew")
        return _make(name, folder)


def _verify_corruptions(name: str, folder: Path) -> str:
    with _disk(name, folder):
        source = PublishedCorruptions(folder / name)
        if not source.open().protocol["publishers_files"]:
            page = PUBLISHED[name].page
            raise DataError(f"{folder / name} has other files than the publisher's: download it again from {page}")
        record = ContentRecord.find(name, folder)
        return content_of(folder / name, source.require_files())[0] if record is None else record.sha256


@contextmanager
def locked(name: str, folder: Path) -> Iterator[None]:
    """Keeps other processes from making or fetching the same set. Raises as `find_shared`."""
    check_name(name)
    with _disk(name, folder):
        cache = _cache(folder)
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{file_name(name)}.lock"):
            for left in _leftovers(name, cache):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for every other process that has the lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _leftovers(name: str, cache: Path) -> list[Path]:
    """What a process that was killed left of a set: a folder, or a note that was being written.

    Names may have dots: what another process makes of `mine.small` meanwhile begins as what is of `mine` does.
    """
    own = f".{file_name(name)}."
    return [path for path in cache.glob(f"{own}*") if _LEFT.fullmatch(path.name.removeprefix(own))]


@contextmanager
def _disk(name: str, folder: Path) -> Iterator[None]:
    """What the disk refuses is a `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"data set {name!r}: {folder} cannot be used: {error}") from error


def _require_files(name: str, folder: Path) -> None:
    """Raises as `Source.files` where nothing was ever put into `folder`, before anything is made there."""
    if not folder.exists():
        source_of(name).files(folder)


def _make(name: str, folder: Path) -> str:
    """Checks and reads a set, makes record, copy and note; returns the content's SHA-256."""
    source = source_of(name)
    paths = source.files(folder)
    stamps = {str(path.relative_to(folder)): _stamp(path) for path in paths}
    files = file_hashes(paths, folder)
    record = ContentRecord.find(name, folder)
    if record is not None:
        record.require_files(files, folder)
    arrays = source.read(folder)
    classes = _classes(name, arrays)
    sha256 = content_sha256(arrays)
    if record is not None:
        record.require_content(name, sha256)
    place, split = _copy(name, arrays, sha256, _cache(folder))
    copies = [place / IMAGES, place / LABELS]
    note = Note(
        format=FORMAT,
        version=source.version,
        sha256=sha256,
        copy=place.name,
        arrays=file_hashes(copies, folder),
        stamps=stamps | {str(path.relative_to(folder)): _stamp(path) for path in copies},
        classes=classes,
        split=split,
    )
    if record is None:
        ContentRecord.make(name, folder, sha256, files)
    write_json(_note_path(name, folder), sealed(asdict(note)))
    return sha256


def _classes(name: str, arrays: Arrays) -> int:
    """The number of classes; raises `DataError` where images and labels are not those of such a set."""
    info, shape = dataset_info(name), arrays.images.shape
    count = len(arrays.labels)
    if info is not None and (shape != (count, info.channels, *[info.image_size] * info.dims) or count == 0):
        expected = (count, info.channels, *[info.image_size] * info.dims)
        raise DataError(f"data set {name!r}: images of shape {shape}, expected {expected}")
    if shape[0] != count:
        raise DataError(f"data set {name!r}: images of shape {shape} for {count} labels")
    low, high = (int(arrays.labels.min()), int(arrays.labels.max())) if count else (0, 0)
    return class_count(name, shape, low, high, known=info.classes if info else arrays.classes)


def _copy(name: str, arrays: Arrays, sha256: str, cache: Path) -> tuple[Path, SplitRecord]:
    """Where the set's copy is, made if there is none or a wrong one, and how it is split."""
    order, split = split_order(arrays.labels, arrays.train_count)
    parts = split["images"]
    if dataset_info(name) is None:
        check_parts(name, parts)
    place = cache / f"{sha256}-{'-'.join(map(str, parts.values()))}"
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{file_name(name)}.") as folder:
        made = Path(folder) / "copy"
        made.mkdir()
        _write(made / IMAGES, arrays.images, order)
        _write(made / LABELS, arrays.labels, order)
        with _locked(cache / f"{place.name}.lock"):  # a set of another name may have the same content
            digests = [[file_digest(one / file, "sha256") for file in (IMAGES, LABELS)] for one in (place, made)]
            if digests[0] != digests[1]:  # there is none yet, or one of other content under this name
                if place.exists():
                    place.rename(Path(folder) / "wrong")
                made.rename(place)
    return place, split


def _write(path: Path, array: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Writes `array[order]` to disk, piece by piece, as a file that nobody may write to."""
    target = new_array(path, array.dtype, array.shape)
    for start in range(0, len(order), _CHUNK):
        target[start : start + _CHUNK] = array[order[start : start + _CHUNK]]
    target.flush()
    path.chmod(0o444)


def _note(name: str, folder: Path) -> Note | None:
    """What stands beside a copy; None where there is none that this version understands, or it is not as written."""
    try:
        note = json.loads(_note_path(name, folder).read_bytes())
        told = {entry: value for entry, value in note.items() if entry != _SEAL}
        return Note(**told) if note == sealed(told) and told["format"] == FORMAT else None
    except (FileNotFoundError, ValueError, TypeError, AttributeError, KeyError):  # no JSON, or not these entries
        return None


def sealed(note: dict[str, Any]) -> dict[str, Any]:
    """The note with the SHA-256 of all that it says: how a set is split stands nowhere else."""
    return note | {_SEAL: hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()}


def _note_path(name: str, folder: Path) -> Path:
    return _cache(folder) / f"{file_name(name)}.json"


def _cache(folder: Path) -> Path:
    return folder / "cache"


def _stamp(path: Path) -> list[int] | None:
    """Size and times of a file, by which a change is noticed; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
