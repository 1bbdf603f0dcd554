"""Data sets: a catalogue of names and facts (torch-free) and the code that loads them.

Importing this package loads no torch; its functions do.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ttsv.data.catalog import DATASETS, DatasetInfo

if TYPE_CHECKING:
    from ttsv.data.loading import Dataset

__all__ = ["DATASETS", "DatasetInfo", "fetch_dataset", "load_dataset", "verify_dataset"]


def load_dataset(name: str, data_dir: Path) -> "Dataset":
    """The data set, checked and split: what is published is read from `data_dir/datasets`.

    Raises `DataError` where it is missing (with the command that fetches it), cut or altered, and `ConfigError`
    for an unknown name. The last two sets stay in memory: do not write to their tensors.
    """
    from ttsv.data import loading

    return loading.load_dataset(name, data_dir)


def fetch_dataset(name: str, data_dir: Path) -> None:
    """Downloads what of the data set is missing or wrong into `data_dir/datasets`; an archive there is used.

    Raises `DataError` where that fails, `ConfigError` for an unknown name.
    """
    from ttsv.data import loading

    loading.fetch_dataset(name, data_dir)


def verify_dataset(name: str, data_dir: Path) -> str:
    """Checks every file against its published checksum; returns the SHA-256 of the set's content.

    Raises `DataError` naming the first file that is missing, cut or altered, `ConfigError` for an unknown name.
    """
    from ttsv.data import loading

    return loading.verify_dataset(name, data_dir)
