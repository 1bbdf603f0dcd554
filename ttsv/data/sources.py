"""Where each data set's arrays come from: one source per name of the catalogue.

A source checks the publisher's checksums before anything is unpickled. scikit-learn and torchvision take a second
or two to import, so each is imported where it is used.
"""

import hashlib
import urllib.error
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ttsv.errors import DataError

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10


class Arrays(NamedTuple):
    """Images (count, channels, height, width), uint8 or float32 in [0, 1], and labels (count,), int64 from 0.

    The first `train_count` are the publisher's training images, the others its test images; None where the
    publisher made no such split.
    """

    images: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    train_count: int | None


class Source(Protocol):
    """One data set; `folder` is where published files lie."""

    def fetch(self, folder: Path) -> None:
        """Downloads what is missing or wrong. Raises `DataError`."""

    def read(self, folder: Path) -> Arrays:
        """Checks and reads. Raises `DataError` naming a file that is missing, cut or altered."""


class Digits:
    """scikit-learn's 1,797 digits of 8x8 pixels with 17 grey levels, installed with it."""

    def fetch(self, folder: Path) -> None:
        """Nothing to do."""

    def read(self, folder: Path) -> Arrays:
        """Grey levels 0 to 16 over 16, exact in float32."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = (bunch.images[:, None] / 16).astype(np.float32)
        return Arrays(images, bunch.target.astype(np.int64), None)


class Cifar:
    """CIFAR-10 or CIFAR-100 in its authors' archive; file names and md5 sums are those that torchvision states.

    `published` is the name of torchvision's class.
    """

    def __init__(self, name: str, published: str) -> None:
        self.name = name
        self.published = published

    @property
    def dataset(self) -> "type[CIFAR10]":
        """torchvision's class."""
        from torchvision import datasets

        found: type[CIFAR10] = getattr(datasets, self.published)
        return found

    def fetch(self, folder: Path) -> None:
        """Unpacks the archive, downloaded first where it is missing or wrong."""
        from torchvision.datasets.utils import download_and_extract_archive

        if all(_md5_is(path, md5) for path, md5 in self._files(folder)):
            return
        archive = folder / self.dataset.filename
        try:
            download_and_extract_archive(
                self.dataset.url, folder, filename=self.dataset.filename, md5=self.dataset.tgz_md5
            )
        except (urllib.error.URLError, OSError, RuntimeError) as error:
            raise DataError(
                f"data set {self.name!r}: fetching {self.dataset.url} to {archive} failed: {error}; run "
                f"`{fetch_command(self.name)}` with a network, or put the whole archive (md5 "
                f"{self.dataset.tgz_md5}) there and run it again"
            ) from error
        self._check(folder)

    def read(self, folder: Path) -> Arrays:
        """The authors' order: training images, then test images."""
        self._check(folder)
        parts = [self.dataset(folder, train=train) for train in (True, False)]
        images = np.concatenate([part.data for part in parts]).transpose(0, 3, 1, 2)
        labels = np.concatenate([part.targets for part in parts]).astype(np.int64)
        return Arrays(np.ascontiguousarray(images), labels, len(parts[0].data))

    def _files(self, folder: Path) -> list[tuple[Path, str]]:
        published = [*self.dataset.train_list, *self.dataset.test_list]
        published.append([self.dataset.meta["filename"], self.dataset.meta["md5"]])
        return [(folder / self.dataset.base_folder / file, md5) for file, md5 in published]

    def _check(self, folder: Path) -> None:
        archive = folder / self.dataset.filename
        unpacked = (folder / self.dataset.base_folder).is_dir()
        if not unpacked and not archive.exists():
            raise DataError(f"data set {self.name!r} is not in {folder}: run `{fetch_command(self.name)}`")
        if not unpacked and _md5_is(archive, self.dataset.tgz_md5):
            raise DataError(f"{archive} is not unpacked: run `{fetch_command(self.name)}`")
        for path, md5 in self._files(folder) if unpacked else [(archive, self.dataset.tgz_md5)]:
            if not path.exists():
                raise DataError(f"{path} is missing: run `{fetch_command(self.name)}`")
            if not _md5_is(path, md5):
                raise DataError(f"{path} is cut or altered (its md5 is not {md5}): run `{fetch_command(self.name)}`")


SOURCES: dict[str, Source] = {
    "digits": Digits(),
    "cifar10": Cifar("cifar10", "CIFAR10"),
    "cifar100": Cifar("cifar100", "CIFAR100"),
}
"""Name -> source of every data set of the catalogue."""


def fetch_command(name: str) -> str:
    """The command line that fetches a data set."""
    return f"ttsv data fetch {name}"


def _md5_is(path: Path, expected: str) -> bool:
    try:
        with path.open("rb") as file:
            # Guards against accidents, as published; it is no protection against a forger.
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return found == expected
