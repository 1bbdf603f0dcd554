"""What a source of a data set is, and what it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


class Source(ABC):
    """One data set. `folder` is `data_dir/datasets`, laid out as torchvision lays out its root."""

    @property
    def version(self) -> str:
        """What the content depends on besides the files; another one has it read again."""
        return "1"

    def fetch(self, folder: Path, progress: Progress) -> None:  # noqa: B027 - most sets are there, or the user's to put
        """Downloads what is missing or wrong, of a set that somebody publishes. Raises `DataError`."""

    def files(self, folder: Path) -> list[Path]:
        """The files that are read, each found as published, and folders of whose files all are read.

        Raises `DataError` naming one that is missing, cut or altered.
        """
        return []

    @abstractmethod
    def read(self, folder: Path) -> Arrays:
        """The content of `files`, which were checked. Raises `DataError` naming a file that cannot be read."""


def fetch_command(name: str) -> str:
    """The command line that fetches a data set."""
    return f"ttsv data fetch {name}"
