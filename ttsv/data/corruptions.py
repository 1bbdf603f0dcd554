"""Corrupted test images (Hendrycks, Dietterich, 2019): the files of CIFAR-10-C and CIFAR-100-C, and their layout.

A folder holds `KIND.npy` for each of 19 kinds: uint8 (5 n, height, width, channels), the n test images at
severity 1, then at 2, to 5; and `labels.npy`, (5 n,).
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ttsv.data.content import ContentRecord, file_hashes
from ttsv.errors import DataError

KINDS = (
    "brightness",
    "contrast",
    "defocus_blur",
    "elastic_transform",
    "fog",
    "frost",
    "gaussian_blur",
    "gaussian_noise",
    "glass_blur",
    "impulse_noise",
    "jpeg_compression",
    "motion_blur",
    "pixelate",
    "saturate",
    "shot_noise",
    "snow",
    "spatter",
    "speckle_noise",
    "zoom_blur",
)
SEVERITIES = (1, 2, 3, 4, 5)
LABELS = "labels.npy"

PUBLISHED = {
    "CIFAR-10-C": (10, "https://zenodo.org/records/2535967"),
    "CIFAR-100-C": (100, "https://zenodo.org/records/3555552"),
}
"""Classes and publisher's page of each archive, by the name of its folder. The page states the md5 of the tar alone."""


@dataclass(frozen=True, kw_only=True)
class CorruptedSet:
    """A checked folder. `labels` (5 n,), int64; `classes`: how many the data set has, where that is known.

    `protocol` (JSON-ready) says what the images are, with the SHA-256 (hex) of each file by its name.
    """

    folder: Path
    labels: NDArray[np.int64]
    classes: int | None
    protocol: dict[str, Any]

    def images(self, kind: str) -> NDArray[np.uint8]:
        """(5 n, height, width, channels), mapped and not read. Raises `DataError`."""
        return _map(self.folder / f"{kind}.npy", self.folder)


class CorruptionSource(Protocol):
    """Where corrupted images come from."""

    def open(self) -> CorruptedSet:
        """The images, made first where they must be. Raises `DataError` naming what is missing, cut or altered."""


@dataclass(frozen=True)
class PublishedCorruptions:
    """CIFAR-10-C or CIFAR-100-C as its archive unpacks: all 19 kinds of 32 x 32 colour images.

    `classes` is known for folders of the archives' own names, CIFAR-10-C and CIFAR-100-C.
    """

    folder: Path
    classes: int | None = None

    def open(self) -> CorruptedSet:
        """Checks every file: there, whole, of the published layout, and with the SHA-256 of its first use."""
        folder = Path(self.folder)
        known, _ = PUBLISHED.get(folder.name, (None, ""))
        return open_corrupted(
            folder,
            shape=(32, 32, 3),
            classes=self.classes or known,
            protocol={"corruptions": "published"},
        )

    def require_files(self) -> None:
        """Raises `DataError` naming the first file that is missing; nothing is read."""
        for path in _paths(Path(self.folder)):
            if not path.is_file():
                raise DataError(f"{path} is missing: {_mend(Path(self.folder))}")


def open_corrupted(
    folder: Path, *, shape: tuple[int, ...], classes: int | None, protocol: dict[str, Any]
) -> CorruptedSet:
    """Opens a folder of images of this shape, every file checked. Raises `DataError`.

    At first use `FOLDER.sha256.json` is written beside the folder with the files' SHA-256, with which
    they are compared ever after.
    """
    paths = _paths(folder)
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is missing: {_mend(folder)}")
    labels = _map(paths[0], folder)
    count = len(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or count == 0 or count % len(SEVERITIES):
        found = f"{labels.dtype} {labels.shape}"
        raise DataError(f"{paths[0]} holds {found}, not the labels of five severities: {_mend(folder)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (classes is not None and high >= classes):
        raise DataError(f"{paths[0]} has labels from {low} to {high}, not of {classes} classes: {_mend(folder)}")
    for path in paths[1:]:
        images = _map(path, folder)
        if images.dtype != np.uint8 or images.shape != (count, *shape):
            found = f"{images.dtype} {images.shape}"
            raise DataError(f"{path} holds {found}, not uint8 {(count, *shape)}: {_mend(folder)}")
    return CorruptedSet(
        folder=folder,
        labels=np.array(labels, dtype=np.int64),
        classes=classes,
        protocol=protocol
        | {
            "kinds": list(KINDS),
            "severities": list(SEVERITIES),
            "images": count // len(SEVERITIES),
            "files": _unchanged(folder, paths),
        },
    )


def _paths(folder: Path) -> list[Path]:
    return [folder / LABELS, *(folder / f"{kind}.npy" for kind in KINDS)]


def _unchanged(folder: Path, paths: list[Path]) -> dict[str, str]:
    """SHA-256 of each file by name, as at the first use. Raises `DataError`."""
    folder = folder.resolve()  # for a name, where it was given as `.`
    beside = folder.parent
    hashes = file_hashes([folder / path.name for path in paths], beside)
    record = ContentRecord.find(folder.name, beside)
    if record is not None:
        record.require_files(hashes, beside)
    elif os.access(beside, os.W_OK):  # else nobody can alter them here; the hashes are in every result
        total = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
        ContentRecord.make(folder.name, beside, total, hashes)
    return {Path(name).name: sha256 for name, sha256 in hashes.items()}


def _map(path: Path, folder: Path) -> NDArray[Any]:
    """The array of a .npy file: nothing else is opened, and nothing unpickled."""
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is cut or altered ({error}): {_mend(folder)}") from error
    return array


def _mend(folder: Path) -> str:
    pages = {folder.name: PUBLISHED[folder.name]} if folder.name in PUBLISHED else PUBLISHED
    archives = " or ".join(f"{name}.tar of {page}" for name, (_, page) in pages.items())
    return f"unpack {archives} again, or remove {folder} if its images were generated"
