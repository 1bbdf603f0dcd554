"""The sets that torchvision publishes; addresses, file names and md5 sums are those its classes state."""

import gzip
import pickle
import tarfile
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ttsv.data.download import download, md5_is, require_md5
from ttsv.data.source import Arrays, Progress, Source, fetch_command
from ttsv.errors import DataError


class PublishedFile(NamedTuple):
    """A file as its publisher has it: where it belongs, its `md5` (hex), and the addresses that give it."""

    path: Path
    md5: str
    urls: tuple[str, ...] = ()


class Published(Source):
    """Base of the sets that torchvision publishes: `name` is theirs here, `torchvision_class` that of their class."""

    name: str
    torchvision_class: str

    @property
    def dataset(self) -> Any:
        """torchvision's class."""
        from torchvision import datasets

        return getattr(datasets, self.torchvision_class)

    def fetch(self, folder: Path, progress: Progress) -> None:
        """Downloads what is missing or wrong."""
        for file in self._published(folder):
            download(self.name, file.urls, file.path, file.md5, progress)

    def files(self, folder: Path) -> list[Path]:
        """The publisher's files, training and test."""
        published = self._published(folder)
        if not any(file.path.exists() for file in published):
            raise DataError(f"data set {self.name!r} is not in {folder}: run `{fetch_command(self.name)}`")
        for file in published:
            require_md5(self.name, file.path, file.md5)
        return [file.path for file in published]

    @abstractmethod
    def _published(self, folder: Path) -> list[PublishedFile]:
        """The publisher's files, with their checksums, whether they are there or not."""


class Cifar(Published):
    """CIFAR-10 or CIFAR-100 in its authors' archive.

    md5 sums: the class's `tgz_md5` (archive), `train_list`, `test_list` and `meta["md5"]` (the files in it).
    """

    def __init__(self, name: str, torchvision_class: str) -> None:
        self.name = name
        self.torchvision_class = torchvision_class

    def fetch(self, folder: Path, progress: Progress) -> None:
        """Unpacks the archive, downloaded first where it is missing or wrong. Each file is moved in whole."""
        from torchvision.datasets.utils import extract_archive

        published = self._published(folder)
        if all(md5_is(file.path, file.md5) for file in published):
            return
        archive = folder / self.dataset.filename
        download(self.name, [self.dataset.url], archive, self.dataset.tgz_md5, progress)
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=f".{self.name}-") as unpacked:
                extract_archive(archive, unpacked)
                inner = Path(unpacked) / self.dataset.base_folder
                if wrong := [file.path.name for file in published if not md5_is(inner / file.path.name, file.md5)]:
                    raise DataError(f"{archive} cannot be unpacked: not as published in it: {', '.join(wrong)}")
                for file in published:
                    file.path.parent.mkdir(exist_ok=True)
                    (inner / file.path.name).replace(file.path)
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise DataError(f"{archive} cannot be unpacked: {error}") from error

    def files(self, folder: Path) -> list[Path]:
        """The files that the archive holds."""
        archive = folder / self.dataset.filename
        if archive.exists() and not (folder / self.dataset.base_folder).is_dir():
            require_md5(self.name, archive, self.dataset.tgz_md5)
            raise DataError(f"{archive} is not unpacked: run `{fetch_command(self.name)}`")
        return super().files(folder)

    def read(self, folder: Path) -> Arrays:
        """The authors' order: training images, then test images."""
        with _as_described(folder / self.dataset.base_folder):
            parts = [self.dataset(folder, train=train) for train in (True, False)]
            images = np.concatenate([part.data for part in parts]).transpose(0, 3, 1, 2)
            labels = np.concatenate([part.targets for part in parts]).astype(np.int64, casting="safe")
            if images.dtype != np.uint8 or any(len(part.data) != len(part.targets) for part in parts):
                raise ValueError("images that are not bytes, or as many labels")
        return Arrays(np.ascontiguousarray(images), labels, len(parts[0].data))

    def _published(self, folder: Path) -> list[PublishedFile]:
        published = [*self.dataset.train_list, *self.dataset.test_list]
        published.append([self.dataset.meta["filename"], self.dataset.meta["md5"]])
        return [PublishedFile(folder / self.dataset.base_folder / file, md5) for file, md5 in published]


class Svhn(Published):
    """SVHN's cropped digits, training and test images (not the extra ones), in the authors' MATLAB files.

    md5 sums: those of torchvision's `SVHN.split_list`.
    """

    name = "svhn"
    torchvision_class = "SVHN"

    def read(self, folder: Path) -> Arrays:
        """The authors' order: training images, then test images; the digit 0, there of label 10, has label 0."""
        with _as_described(folder):
            parts = [self.dataset(folder, split=split) for split in ("train", "test")]
            images = np.concatenate([part.data for part in parts])
            labels = np.concatenate([part.labels for part in parts]).astype(np.int64, casting="safe")
        return Arrays(np.ascontiguousarray(images), labels, len(parts[0].labels))

    def _published(self, folder: Path) -> list[PublishedFile]:
        entries = (self.dataset.split_list[split] for split in ("train", "test"))
        return [PublishedFile(folder / file, md5, (url,)) for url, file, md5 in entries]


class FashionMnist(Published):
    """Fashion-MNIST in its authors' compressed IDX files. md5 sums: those of torchvision's `FashionMNIST.resources`."""

    name = "fashion-mnist"
    torchvision_class = "FashionMNIST"

    def read(self, folder: Path) -> Arrays:
        """The authors' order: training images, then test images."""
        images, labels, test_images, test_labels = (read_idx(file.path) for file in self._published(folder))
        return Arrays(
            np.concatenate([images, test_images])[:, None],
            np.concatenate([labels, test_labels]).astype(np.int64),
            len(labels),
        )

    def _published(self, folder: Path) -> list[PublishedFile]:
        raw = folder / self.dataset.__name__ / "raw"
        mirrors = self.dataset.mirrors
        return [
            PublishedFile(raw / file, md5, tuple(mirror + file for mirror in mirrors))
            for file, md5 in self.dataset.resources
        ]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The bytes of a compressed IDX file, as LeCun's MNIST page describes it. Raises `DataError`.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, each as a big-endian 32-bit
    number, then the elements in C order. (torchvision reads such a file only after it was unpacked, unchecked.)
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
        if content[:3] != b"\0\0\x08":
            raise ValueError("no IDX file of unsigned bytes")
        dims = content[3]
        shape = np.frombuffer(content, ">u4", dims, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


@contextmanager
def _as_described(path: Path) -> Iterator[None]:
    """Turns what torchvision raises over files that it cannot read into a `DataError` that says where they are."""
    try:
        yield
    except (OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} does not hold what its publisher describes: {error!r}") from error
