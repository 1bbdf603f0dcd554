"""Corrupted test images (Hendrycks, Dietterich, 2019): the files of CIFAR-10-C and CIFAR-100-C, and their layout.

A folder holds `KIND.npy` for each of 19 kinds: uint8 (5 n, height, width, channels), the n test images at
severity 1, then at 2, to 5; and `labels.npy`, (5 n,).
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from ttsv.data.download import md5_is
from ttsv.data.record import ContentRecord, file_hashes
from ttsv.errors import ConfigError, DataError

SEVERITIES = (1, 2, 3, 4, 5)
LABELS = "labels.npy"


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A published set: its publisher's `page`, and the `md5` (hex) of each file by its name."""

    classes: int
    page: str
    md5: Mapping[str, str]


# The publisher's pages state the md5 of the archives alone. Those of the files in them are as torch-uncertainty
# (`datasets/classification/cifar/cifar_c.py`) and MIT's responsible-ai-toolbox list them, which agree in all.
_MD5 = {
    "labels": ("c439b113295ed5254878798ffe28fd54", "bb4026e9ce52996b95f439544568cdb2"),
    "brightness": ("0a81ef75e0b523c3383219c330a85d48", "f22d7195aecd6abb541e27fca230c171"),
    "contrast": ("3c8262171c51307f916c30a3308235a8", "322bb385f1d05154ee197ca16535f71e"),
    "defocus_blur": ("7d1322666342a0702b1957e92f6254bc", "d923e3d9c585a27f0956e2f2ad832564"),
    "elastic_transform": ("9421657c6cd452429cf6ce96cc412b5f", "a0792bd6581f6810878be71acedfc65a"),
    "fog": ("7b397314b5670f825465fbcd1f6e9ccd", "4efc7ebd5e82b028bdbe13048e3ea564"),
    "frost": ("31f6ab3bce1d9934abfb0cc13656f141", "3a39c6823bdfaa0bf8b12fe7004b8117"),
    "gaussian_blur": ("c33370155bc9b055fb4a89113d3c559d", "5204ba0d557839772ef5a4196a052c3e"),
    "gaussian_noise": ("ecaf8b9a2399ffeda7680934c33405fd", "ecc4d366eac432bdf25c024086f5e97d"),
    "glass_blur": ("7361fb4019269e02dbf6925f083e8629", "0bf384f38e5ccbf8dd479d9059b913e1"),
    "impulse_noise": ("2090e01c83519ec51427e65116af6b1a", "3b3c210ddfa0b5cb918ff4537a429fef"),
    "jpeg_compression": ("2b9cc4c864e0193bb64db8d7728f8187", "c851b7f1324e1d2ffddeb76920576d11"),
    "motion_blur": ("fffa5f852ff7ad299cfe8a7643f090f4", "732a7e2e54152ff97c742d4c388c5516"),
    "pixelate": ("0f14f7e2db14288304e1de10df16832f", "96c00c60f144539e14cffb02ddbd0640"),
    "saturate": ("1cfae0964219c5102abbb883e538cc56", "c0697e9fdd646916a61e9c312c77bf6b"),
    "shot_noise": ("3a7239bb118894f013d9bf1984be7f11", "b0a1fa6e1e465a747c1b204b1914048a"),
    "snow": ("bb238de8555123da9c282dea23bd6e55", "0237be164583af146b7b144e73b43465"),
    "spatter": ("8a5a3903a7f8f65b59501a6093b4311e", "12ccf41d62564d36e1f6a6ada5022728"),
    "speckle_noise": ("ef00b87611792b00df09c0b0237a1e30", "e3f215b1a0f9fd9fd6f0d1cf94a7ce99"),
    "zoom_blur": ("6ea8e63f1c5cdee1517533840641641b", "0204613400c034a81c4830d5df81cb82"),
}
"""Of each file, by its name: that of CIFAR-10-C and that of CIFAR-100-C."""

PUBLISHED = {
    f"CIFAR-{classes}-C": Archive(
        classes=classes,
        page=f"https://zenodo.org/records/{record}",
        md5={f"{name}.npy": sums[column] for name, sums in _MD5.items()},
    )
    for column, (classes, record) in enumerate(((10, 2535967), (100, 3555552)))
}
"""By the name of the folder that the archive unpacks to."""

KINDS = tuple(name for name in _MD5 if name != "labels")


class CorruptionProtocol(TypedDict, total=False):
    """What corrupted images are, JSON-ready: `corruptions` is "published" or "generated".

    `images` of each kind and severity, `files`: SHA-256 (hex) of each by its name. `publishers_files`: whether those
    published are the publisher's own. The others say what generated ones were made of, and how.
    """

    corruptions: str
    kinds: list[str]
    severities: list[int]
    images: int
    files: dict[str, str]
    publishers_files: bool
    name: str
    packages: dict[str, str]
    seed: int
    enlarged: str | None
    grey: str | None
    source_sha256: str


@dataclass(frozen=True, kw_only=True)
class CorruptedSet:
    """A checked folder. `labels` (5 n,), int64; `classes`: how many the data set has, where that is known.

    `most_classes`: of a folder of another name than its archive's, how many the published set that it must be has.
    """

    folder: Path
    labels: NDArray[np.int64]
    classes: int | None
    protocol: CorruptionProtocol
    most_classes: int | None = None

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

    `classes` is known for folders of the archives' own names, CIFAR-10-C and CIFAR-100-C. `labels` (images,): those of
    the test images that were corrupted, where they are at hand.
    """

    folder: Path
    classes: int | None = None
    labels: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def open(self) -> CorruptedSet:
        """Checks every file: there, whole, of the published layout, and with the SHA-256 of its first use.

        The protocol says whether every file is the publisher's own, by its md5: others of the same layout are others.
        Raises `ConfigError` for `classes` that are not those of the archive of this name.
        """
        folder = Path(self.folder)
        archive = PUBLISHED.get(folder.name)
        if archive and self.classes not in (None, archive.classes):
            raise ConfigError("classes", self.classes, f"must be {archive.classes}, those of {folder.name}")
        opened = open_corrupted(
            folder,
            shape=(32, 32, 3),
            classes=archive.classes if archive else self.classes,
            labels=self.labels,
            protocol={"corruptions": "published"},
        )
        counts = [known.classes for known in PUBLISHED.values() if known.classes > opened.labels.max()]
        own = any(all(md5_is(folder / name, md5) for name, md5 in known.md5.items()) for known in PUBLISHED.values())
        protocol = opened.protocol | {"publishers_files": own}
        return replace(opened, most_classes=min(counts, default=None), protocol=protocol)

    def require_files(self) -> list[Path]:
        """The files, of which nothing is read. Raises `DataError` naming the first that is missing."""
        return _paths(Path(self.folder))


def open_corrupted(
    folder: Path,
    *,
    shape: tuple[int, ...],
    classes: int | None,
    protocol: CorruptionProtocol,
    labels: NDArray[np.int64] | None = None,
) -> CorruptedSet:
    """Opens a folder of images of this shape, every file checked. Raises `DataError`.

    The labels must be the same at all severities, and begin as `labels` (images,), those of the test images, do.
    At first use `FOLDER.sha256.json` is written beside the folder with the files' SHA-256, with which
    they are compared ever after.
    """
    paths = _paths(folder)
    found = _labels(paths[0], folder, classes, labels)
    count = len(found)
    for path in paths[1:]:
        images = _map(path, folder)
        if images.dtype != np.uint8 or images.shape != (count, *shape):
            held = f"{images.dtype} {images.shape}"
            raise DataError(f"{path} holds {held}, not uint8 {(count, *shape)}: {_remedy(folder)}")
    return CorruptedSet(
        folder=folder,
        labels=found,
        classes=classes,
        protocol=protocol
        | {
            "kinds": list(KINDS),
            "severities": list(SEVERITIES),
            "images": count // len(SEVERITIES),
            "files": {Path(name).name: sha256 for name, sha256 in content_of(folder, paths)[1].items()},
        },
    )


def _labels(path: Path, folder: Path, classes: int | None, expected: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The labels in a file. Raises `DataError` where they cannot be those of the images."""

    def refuse(what: str) -> DataError:
        return DataError(f"{path} {what}: {_remedy(folder)}")

    held = _map(path, folder)
    if held.ndim != 1 or held.dtype.kind not in "iu" or len(held) == 0 or len(held) % len(SEVERITIES):
        raise refuse(f"holds {held.dtype} {held.shape}, not the labels of five severities")
    labels = np.array(held, dtype=np.int64)
    if labels.min() < 0 or (classes is not None and labels.max() >= classes):
        raise refuse(f"has labels from {labels.min()} to {labels.max()}, not of {classes} classes")
    first, *others = labels.reshape(len(SEVERITIES), -1)
    for severity, block in zip(SEVERITIES[1:], others, strict=True):
        if (differing := np.flatnonzero(block != first)).size:
            place = differing[0]
            text = f"label {block[place]} for image {place} at severity {severity}, {first[place]} at severity 1"
            raise refuse(f"has the {text}")
    if expected is not None:
        if len(first) > len(expected):
            raise refuse(f"has labels of {len(first)} images, the test set has {len(expected)}")
        if (differing := np.flatnonzero(expected[: len(first)] != first)).size:
            place = differing[0]
            text = f"label {first[place]} for image {place}, whose label in the test set is {expected[place]}"
            raise refuse(f"has the {text}")
    return labels


def _paths(folder: Path) -> list[Path]:
    """The files of a folder, the labels first. Raises `DataError` naming the first that is missing."""
    paths = [folder / LABELS, *(folder / f"{kind}.npy" for kind in KINDS)]
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(f"{missing[0]} is missing: {_remedy(folder)}")
    return paths


def content_of(folder: Path, paths: Sequence[Path]) -> tuple[str, dict[str, str]]:
    """SHA-256 (hex) of a folder's content, and of each of its files by its path from beside it, as at the first use.

    They are noted there then. Raises `DataError` naming the first that has changed.
    """
    folder = folder.resolve()  # for a name, where it was given as `.`
    beside = folder.parent
    hashes = file_hashes([folder / path.name for path in paths], beside)
    total = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    record = ContentRecord.find(folder.name, beside)
    if record is not None:
        record.require_files(hashes, beside)
    elif os.access(beside, os.W_OK):  # else nobody can alter them here; the hashes are in every result
        ContentRecord.make(folder.name, beside, total, hashes)
    return total, hashes


def _map(path: Path, folder: Path) -> NDArray[Any]:
    """The array of a .npy file: nothing else is opened, and nothing unpickled."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is cut or altered ({error}): {_remedy(folder)}") from error
    if path.stat().st_size != array.offset + array.nbytes:
        raise DataError(f"{path} is altered, it has bytes behind its array: {_remedy(folder)}")
    return array


def _remedy(folder: Path) -> str:
    """What mends a folder whose files are not as published."""
    pages = {folder.name: PUBLISHED[folder.name]} if folder.name in PUBLISHED else PUBLISHED
    archives = " or ".join(f"{name}.tar of {archive.page}" for name, archive in pages.items())
    return f"unpack {archives} again, or remove {folder} if its images were generated"
