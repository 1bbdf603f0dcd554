"""From a source's arrays to tensors with a fixed training, validation and test split."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttsv.data.catalog import DATASETS, DatasetInfo
from ttsv.data.sources import SOURCES, Arrays, Source
from ttsv.errors import ConfigError, DataError

SPLIT_SEED = 0
"""The split is part of the protocol: it never depends on a trial's seed."""
TEST_SHARE = 0.2
"""Of the images, where the publisher made no test set."""
VALIDATION_SHARE = 0.1
"""Of the images that are not test images."""


class Split(NamedTuple):
    """Images (count, channels, size, size), uint8 or float32 in [0, 1]; labels (count,), int64."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Split":
        """The same split on a device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A checked data set. `sha256` is that of its content (see `content_sha256`), before it is split.

    `split` (JSON-ready) says how the three parts were made and how many images each has. Nothing may be chosen
    by looking at `test`.
    """

    info: DatasetInfo
    train: Split
    validation: Split
    test: Split
    sha256: str
    split: dict[str, Any]


def as_pixels(images: Tensor) -> Tensor:
    """Float32 pixels in [0, 1]: uint8 over 255, float32 as it is."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def load_dataset(name: str, data_dir: Path) -> Dataset:
    """What `ttsv.data.load_dataset` documents."""
    return _load(name, Path(data_dir).resolve())


def fetch_dataset(name: str, data_dir: Path) -> None:
    """What `ttsv.data.fetch_dataset` documents."""
    source = _source(name)
    folder = _folder(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    source.fetch(folder)


def verify_dataset(name: str, data_dir: Path) -> str:
    """What `ttsv.data.verify_dataset` documents."""
    return content_sha256(_read(name, data_dir))


def content_sha256(arrays: Arrays) -> str:
    """SHA-256 (hex) of images and labels in the publisher's order.

    Hashed are, for images then labels: the type and shape as `uint8 (60000, 3, 32, 32)` in ASCII with a line
    end, then the elements in C order, little endian.
    """
    digest = hashlib.sha256()
    for array in (arrays.images, arrays.labels):
        digest.update(f"{array.dtype.name} {array.shape}\n".encode("ascii"))
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def stratified(labels: NDArray[np.int64], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two ascending lists of indices into `labels` (count,): the rest, and `share` of each class, rounded.

    Drawn by NumPy's RandomState, whose stream is frozen: the split outlives versions of every library.
    """
    random = np.random.RandomState(seed)
    drawn = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        drawn[random.permutation(members)[: round(share * len(members))]] = True
    return np.flatnonzero(~drawn), np.flatnonzero(drawn)


@functools.lru_cache(maxsize=2)  # a worker runs many trials of one set in one process
def _load(name: str, data_dir: Path) -> Dataset:
    arrays = _read(name, data_dir)
    labels = arrays.labels
    if arrays.train_count is None:
        rest, test = stratified(labels, TEST_SHARE, SPLIT_SEED)
        test_split = f"stratified, {TEST_SHARE:g} of each class"
    else:
        rest, test = np.split(np.arange(len(labels)), [arrays.train_count])
        test_split = "published"
    kept, held = stratified(labels[rest], VALIDATION_SHARE, SPLIT_SEED)

    def part(indices: NDArray[np.int64]) -> Split:
        return Split(torch.from_numpy(arrays.images[indices]), torch.from_numpy(labels[indices]))

    return Dataset(
        info=DATASETS[name],
        train=part(rest[kept]),
        validation=part(rest[held]),
        test=part(test),
        sha256=content_sha256(arrays),
        split={
            "test": test_split,
            "validation": f"stratified, {VALIDATION_SHARE:g} of each class of the rest",
            "seed": SPLIT_SEED,
            "images": {"train": len(kept), "validation": len(held), "test": len(test)},
        },
    )


def _read(name: str, data_dir: Path) -> Arrays:
    arrays = _source(name).read(_folder(data_dir))
    info = DATASETS[name]
    expected = (len(arrays.labels), info.channels, info.image_size, info.image_size)
    if arrays.images.shape != expected or len(arrays.labels) == 0:
        raise DataError(f"data set {name!r}: images of shape {arrays.images.shape}, expected {expected}")
    if arrays.labels.min() < 0 or arrays.labels.max() >= info.classes:
        raise DataError(f"data set {name!r}: labels outside 0 to {info.classes - 1}")
    return arrays


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ConfigError("dataset", name, f"must be one of {', '.join(SOURCES)}")
    return SOURCES[name]


def _folder(data_dir: Path) -> Path:
    return Path(data_dir) / "datasets"
