"""Data sets as tensors, in three fixed parts."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ttsv.data.catalog import DatasetInfo
from ttsv.data.shared import open_shared
from ttsv.data.split import SplitRecord


class Split(NamedTuple):
    """Images (count, channels, size...), uint8 or float32 in [0, 1]; labels (count,), int64."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Split":
        """The same split on a device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A checked data set. `sha256` is that of its content (`ttsv.data.content.content_sha256`), before it is split.

    `split` (JSON-ready) says how the three parts were made and how many images each has. Nothing may be chosen
    by looking at `test`.
    """

    info: DatasetInfo
    train: Split
    validation: Split
    test: Split
    sha256: str
    split: SplitRecord


def as_pixels(images: Tensor) -> Tensor:
    """Float32 pixels in [0, 1]: uint8 over 255, float32 as it is."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def load_dataset(name: str, data_dir: Path) -> Dataset:
    """Loads a data set, checked and split.

    The first load on a machine checks and reads the set and makes a copy, which all processes share; later ones
    compare that copy with its SHA-256 and map it, or make it anew where it was altered. The tensors are views of it:
    what is written to them alters neither the file nor what others see, and not what this process loads next, but it
    does alter this data set. Do not write to them.

    Raises `DataError` where a file is missing (with the command that fetches it), cut, altered or otherwise not what
    it was at its first use, and `ConfigError` for an unknown name.
    """
    shared = open_shared(name, Path(data_dir) / "datasets", whole=True)
    ends = np.cumsum(list(shared.split["images"].values()))
    # Split before they are tensors, so that each has a storage of its own: one part is saved without the others.
    parts = (map(torch.from_numpy, np.split(array, ends[:-1])) for array in (shared.images, shared.labels))
    train, validation, test = map(Split, *parts)
    return Dataset(
        info=shared.info, train=train, validation=validation, test=test, sha256=shared.sha256, split=shared.split
    )
