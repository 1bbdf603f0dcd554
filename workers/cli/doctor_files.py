"""What `ttsv doctor` looks at of files: the disk and its file system, the store of trials' files, data sets."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from workers.cli.findings import BACKUP, RESTORE, Check, Finding, size

if TYPE_CHECKING:
    from service.settings import Settings
    from ttsv.data.record import ContentRecord

_LITTLE_BYTES = 5 * 2**30
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "gpfs",
    "lustre",
    "glusterfs",
    "fuse.sshfs",
    "fuse.s3fs",
)
"""How the names of file systems begin whose locks SQLite cannot rely on."""
_disk, _data = map(Check, ("disk", "data"))


def look_at_disk(settings: "Settings") -> list[Finding]:
    """The data folder: that it can be written, its room, whether its file system suits SQLite; and the files' store."""
    folder = settings.data_dir
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        place = quote(str(there))
        return [
            _disk.wrong(f"{there} is in the way of the data folder {folder}: it is a file", f"mv {place} {place}.old")
        ]
    if not os.access(there, os.W_OK | os.X_OK):
        says = (
            f"{there} cannot be written" if there == folder else f"{folder} cannot be made: {there} cannot be written"
        )
        return [_disk.wrong(says, f"sudo install --directory --owner $USER {quote(str(folder))}")]
    free = f"free in {folder}" if there == folder else f"free in {folder}, which will be made"
    return [*_network(settings), *_link(settings), *_store(settings), _room(there, free)]


def _room(there: Path, free: str) -> Finding:
    """The room of the file system of a folder, as bytes and as files; `free` says of which folder it is."""
    from service.settings import LEAST_FREE_BYTES

    usage, system = shutil.disk_usage(there), os.statvfs(there)
    says = f"{size(usage.free)} of {size(usage.total)} {free}"
    mend = f"du --human-readable --max-depth 1 {quote(str(there))}  # what takes the room"
    if usage.free < LEAST_FREE_BYTES:
        return _disk.wrong(f"{says}: at least {size(LEAST_FREE_BYTES)} are wanted", mend)
    if usage.free < _LITTLE_BYTES:
        return _disk.warning(says, mend)
    if system.f_files and not system.f_favail:
        return _disk.wrong(f"{says}, and no file can be made there: its file system has as many as it can", mend)
    return _disk.ok(says)


def _link(settings: "Settings") -> Iterator[Finding]:
    from service.storage.attempts import TRIALS
    from service.upkeep.home import link_problem

    if (problem := link_problem(settings)) is not None:
        trials = settings.data_dir / TRIALS
        there = quote(str(trials.resolve()))
        here = quote(str(trials))
        yield _disk.wrong(problem, f"rm {here} && mkdir {here} && mount --bind {there} {here}  # everything stopped")


def _network(settings: "Settings") -> Iterator[Finding]:
    """SQLite needs locks that hold, which the file systems of networks do not promise."""
    from sqlalchemy import make_url

    url = make_url(settings.database_url or f"sqlite:///{settings.data_dir / 'ttsv.db'}")
    if url.get_backend_name() != "sqlite" or not url.database:
        return
    file = Path(url.database).resolve()
    kind = _file_system(file)
    if kind.startswith(_NETWORK):
        says = f"{file} lies on {kind}, whose locks SQLite cannot rely on: use a local disk, or PostgreSQL"
        mend = "export TTSV_DATABASE_URL=sqlite:////var/lib/ttsv/ttsv.db"
        if file.exists():
            mend = f"{BACKUP} && {mend} && {RESTORE}  # service and workers stopped; docs/backup.md"
        yield _disk.wrong(says, mend)


def _store(settings: "Settings") -> Iterator[Finding]:
    """Whether the files of trials can be kept where TTSV_STORAGE says."""
    from service.storage import bucket_problem, without_secrets

    if settings.storage is None:
        return
    place = without_secrets(settings.storage)
    shown = f"the store of TTSV_STORAGE, {place},"
    if "://" in settings.storage:
        if (problem := bucket_problem(settings.storage)) is not None:
            yield _disk.wrong(
                f"{shown} {problem}", "env | grep -o '^AWS_[A-Z_]*'  # are the keys there? Does its host answer?"
            )
            return
    elif not (folder := Path(settings.storage)).exists():
        yield _disk.warning(f"{shown} is not there and will be made: is it to be mounted?", f"findmnt {quote(place)}")
        return
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield _disk.wrong(f"{shown} cannot be written", f"sudo chown $USER {quote(place)}")
        return
    else:
        yield _room(folder, f"free in {shown.removesuffix(',')}")
        return
    yield _disk.ok(f"{shown} is there")


def _file_system(path: Path) -> str:
    """The type of the file system that a path lies on; empty where it is not known."""
    import psutil

    above = {str(folder) for folder in path.parents}
    mounts = [part for part in psutil.disk_partitions(all=True) if part.mountpoint in above]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


def look_at_data(settings: "Settings", *, deep: bool) -> list[Finding]:
    """The data sets of the data folder, by size and times; `deep` reads them and compares checksums."""
    from ttsv.data.catalog import DATASETS, dataset_info
    from ttsv.data.corruptions import PUBLISHED
    from ttsv.data.own import own_names
    from ttsv.data.source import fetch_command

    folder = settings.data_dir / "datasets"
    findings, missing = [_corruptions(name, folder) for name in PUBLISHED if deep and (folder / name).is_dir()], []
    for name in [*DATASETS, *own_names(folder)]:
        finding = _data_set(name, folder, deep=deep)
        info = dataset_info(name)
        if finding is not None:
            findings.append(finding)
        elif info is not None and not info.embedded:
            missing.append(name)
    if missing:
        findings.append(_data.ok(f"not here: {', '.join(missing)} (where trials need them: {fetch_command('NAME')})"))
    return findings


def _corruptions(name: str, folder: Path) -> Finding:
    """What is to be said of a folder of published corruptions, all of which is read."""
    from ttsv.data import verify_dataset
    from ttsv.errors import DataError

    try:
        sha256 = verify_dataset(name, folder.parent)
    except DataError as error:
        return _data.wrong(f"{name}: {error}", f"ttsv data verify {name}  # once its files are the publisher's again")
    return _data.ok(f"{name}: every file has its checksum (content SHA-256 {sha256[:12]})")


def _data_set(name: str, folder: Path, *, deep: bool) -> Finding | None:
    """What is to be said of a data set; None where nobody used it yet."""
    from ttsv.data import verify_dataset
    from ttsv.data.record import ContentRecord, file_name
    from ttsv.data.shared import find_shared
    from ttsv.errors import DataError

    verify = f"ttsv data verify {quote(name)}"
    try:
        record = ContentRecord.find(name, folder)
    except DataError as error:
        cut = quote(str(folder / f"{file_name(name)}.sha256.json"))
        return _data.wrong(f"{name}: {error}", f"rm {cut} && {verify}  # or put it back from a backup")
    if record is None:
        return None
    try:
        if deep:
            sha256 = verify_dataset(name, folder.parent)
            return _data.ok(f"{name}: every file has its checksum (content SHA-256 {sha256[:12]})")
        if (copy := find_shared(name, folder)) is not None:
            return _data.ok(f"{name}: as at its first use, by size and times (content SHA-256 {copy.sha256[:12]})")
    except DataError as error:
        # What is wrong with the set's own files has it refused, whatever its copy is.
        copies = f"{quote(str(folder / 'cache'))}/{record.sha256}-*"
        mend = f"rm --recursive --force {copies} && {verify}  # makes the copy anew"
        return _refused(name, folder, record) or _data.wrong(f"{name}: {error}", mend)
    says = f"{name}: its copy is gone, or its files have other times than at its first use"
    return _refused(name, folder, record) or _data.warning(says, f"{verify}  # makes the copy anew")


def _refused(name: str, folder: Path, record: "ContentRecord") -> Finding | None:
    """Why trials are refused a set whose files are not those of its first use; None where they are: all are read."""
    from ttsv.data.catalog import dataset_info
    from ttsv.data.record import file_hashes
    from ttsv.data.source import fetch_command
    from ttsv.data.sources import source_of
    from ttsv.errors import DataError

    try:
        record.require_files(file_hashes(source_of(name).files(folder), folder), folder)
    except DataError as error:
        mend = fetch_command(name)
        if dataset_info(name) is None:
            hashes = list(record.files.values())
            was = hashes[0] if len(hashes) == 1 else f"in {record.path}"
            accept = f"rm {quote(str(record.path))}"
            mend = f"{accept}  # if what is there now is meant; else put back what was, of the SHA-256 {was}"
        return _data.wrong(f"{name}: trials are refused it: {error}", mend)
    return None
