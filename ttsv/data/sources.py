"""What a source of a data set is, and which one each name has.

A source checks the publisher's checksums before anything is unpickled or parsed. scikit-learn, torchvision and Pillow
take a second or two to import, so each is imported where it is used.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ttsv.data.catalog import check_name, own_set, synthetic_shape

Progress = Callable[[str, int, int | None], None]
"""Called while a file is downloaded: its name, the bytes that are here, and all bytes where the server says so."""


class Arrays(NamedTuple):
    """Images (count, channels, size...), uint8 or float32 in [0, 1], and labels (count,), int64 from 0.

    The first `train_count` are the publisher's training images, the others its test images; None where the
    publisher made no such split. `classes`: how many there are, where the source knows more than the labels show.
    """

    images: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    train_count: int | None
    classes: int | None = None


class Source(Protocol):
    """One data set. `folder` is `data_dir/datasets`, laid out as torchvision lays out its root."""

    @property
    def version(self) -> str:
        """What the content depends on besides the files; another one has it read again."""

    def fetch(self, folder: Path, progress: Progress) -> None:
        """Downloads what is missing or wrong. Raises `DataError`."""

    def files(self, folder: Path) -> list[Path]:
        """The files that are read, each found as published, and folders of whose files all are read.

        Raises `DataError` naming one that is missing, cut or altered.
        """

    def read(self, folder: Path) -> Arrays:
        """The content of `files`, which were checked. Raises `DataError` naming a file that cannot be read."""


class Digits:
    """scikit-learn's 1,797 digits of 8x8 pixels with 17 grey levels, installed with it."""

    @property
    def version(self) -> str:
        """Of the library that carries them."""
        from importlib.metadata import version

        return f"scikit-learn {version('scikit-learn')}"

    def fetch(self, folder: Path, progress: Progress) -> None:
        """Nothing to do."""

    def files(self, folder: Path) -> list[Path]:
        """None."""
        return []

    def read(self, folder: Path) -> Arrays:
        """Grey levels 0 to 16 over 16, exact in float32."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = (bunch.images[:, None] / 16).astype(np.float32)
        return Arrays(images, bunch.target.astype(np.int64), None)


def source_of(name: str) -> Source:
    """The source of any name that `ttsv.data.catalog` knows; raises `ConfigError` for others."""
    from ttsv.data.own import ImageFolder, Npz
    from ttsv.data.published import Cifar, FashionMnist, Svhn
    from ttsv.data.synthetic import Synthetic

    check_name(name)
    if own := own_set(name):
        kind, own_name = own
        return Npz(own_name) if kind == "npz" else ImageFolder(own_name)
    if shape := synthetic_shape(name):
        return Synthetic(shape)
    sources: dict[str, Source] = {
        "digits": Digits(),
        "cifar10": Cifar("cifar10", "CIFAR10"),
        "cifar100": Cifar("cifar100", "CIFAR100"),
        "svhn": Svhn(),
        "fashion-mnist": FashionMnist(),
    }
    return sources[name]


def fetch_command(name: str) -> str:
    """The command line that fetches a data set."""
    return f"ttsv data fetch {name}"
