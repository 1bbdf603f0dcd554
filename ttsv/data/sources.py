"""Which source each name of a data set has.

A source checks the publisher's checksums before anything is unpickled or parsed. torchvision and Pillow take a second
or two to import, so each is imported where it is used; scikit-learn, of which one file is wanted, is not imported.
"""

import importlib.util
from pathlib import Path

import numpy as np

from ttsv.data.catalog import check_name, own_set, synthetic_shape
from ttsv.data.own import ImageFolder, Npz
from ttsv.data.published import Cifar, FashionMnist, Svhn
from ttsv.data.source import Arrays, Source
from ttsv.data.synthetic import Synthetic
from ttsv.errors import DataError


class Digits(Source):
    """scikit-learn's 1,797 digits of 8x8 pixels with 17 grey levels, installed with it."""

    @property
    def version(self) -> str:
        """Of the library that carries them."""
        from importlib.metadata import version

        return f"scikit-learn {version('scikit-learn')}"

    def read(self, folder: Path) -> Arrays:
        """Grey levels 0 to 16 over 16, exact in float32. Raises `DataError` where scikit-learn has no such file."""
        path = _DIGITS if (found := _folder_of("sklearn")) is None else found / _DIGITS
        try:
            table = np.loadtxt(path, delimiter=",")  # 64 grey levels a row and the digit; gzip by the file's ending
        except OSError as error:
            raise DataError(f"scikit-learn's digits are not at {path}: {error}; install it anew") from error
        images = (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
        return Arrays(images, table[:, -1].astype(np.int64), None)


_DIGITS = Path("datasets/data/digits.csv.gz")


def _folder_of(package: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def source_of(name: str) -> Source:
    """The source of any name that `ttsv.data.catalog` knows; raises `ConfigError` for others."""
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
