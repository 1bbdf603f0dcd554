"""Which source each name of a data set has.

A source checks the publisher's checksums before anything is unpickled or parsed. scikit-learn, torchvision and Pillow
take a second or two to import, so each is imported where it is used.
"""

from pathlib import Path

import numpy as np

from ttsv.data.catalog import check_name, own_set, synthetic_shape
from ttsv.data.own import ImageFolder, Npz
from ttsv.data.published import Cifar, FashionMnist, Svhn
from ttsv.data.source import Arrays, Source
from ttsv.data.synthetic import Synthetic


class Digits(Source):
    """scikit-learn's 1,797 digits of 8x8 pixels with 17 grey levels, installed with it."""

    @property
    def version(self) -> str:
        """Of the library that carries them."""
        from importlib.metadata import version

        return f"scikit-learn {version('scikit-learn')}"

    def read(self, folder: Path) -> Arrays:
        """Grey levels 0 to 16 over 16, exact in float32."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = (bunch.images[:, None] / 16).astype(np.float32)
        return Arrays(images, bunch.target.astype(np.int64), None)


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
