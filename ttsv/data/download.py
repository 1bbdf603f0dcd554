"""Published files: their checksums, and how they come here whole or not at all."""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from ttsv.data.source import Progress, fetch_command
from ttsv.errors import DataError

TIMEOUT = 60.0
"""Seconds without a byte after which a download is given up."""
_CHUNK = 2**18


def download(name: str, urls: Sequence[str], path: Path, md5: str, progress: Progress) -> None:
    """Downloads the file from the first of `urls` that gives it whole, unless it is at `path` as published.

    It is written beside `path` under another name and renamed once its md5 was found right: what has the name
    is whole, wherever the download was interrupted. Raises `DataError`.
    """
    if md5_is(path, md5):
        return
    part = path.with_name(path.name + ".part")
    problems = []
    for url in urls:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            found = _retrieve(url, part, progress)
            if found == md5:
                part.replace(path)
                return
            problems.append(f"{url} gave a file with md5 {found}")
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            problems.append(f"{url}: {error}")
        finally:
            part.unlink(missing_ok=True)
    there = f"{path}, which is there, is cut or altered, and " if path.exists() else ""
    raise DataError(
        f"data set {name!r}: {there}fetching {urls[0]} to {path} failed: {'; '.join(problems)}; run "
        f"`{fetch_command(name)}` with a network, or put the whole file (md5 {md5}) there and run it again"
    )


def require_md5(name: str, path: Path, md5: str) -> None:
    """Raises `DataError` where a file is missing or not as published."""
    if not path.exists():
        raise DataError(f"{path} is missing: run `{fetch_command(name)}`")
    if not md5_is(path, md5):
        raise DataError(f"{path} is cut or altered (its md5 is not {md5}): run `{fetch_command(name)}`")


def md5_is(path: Path, expected: str) -> bool:
    """Whether a file is here and as published: a guard against accidents, no protection against a forger."""
    return file_digest(path, "md5") == expected


def file_digest(path: Path, algorithm: str) -> str | None:
    """A file's checksum (hex); None where there is no such file. Raises `DataError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _retrieve(url: str, path: Path, progress: Progress) -> str:
    """Writes what a URL gives to a file; returns its md5 (hex)."""
    digest = hashlib.md5(usedforsecurity=False)
    request = urllib.request.Request(url, headers={"User-Agent": "ttsv"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, path.open("wb") as file:
        length = response.length
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            progress(path.name.removesuffix(".part"), file.tell(), length)
    return digest.hexdigest()
