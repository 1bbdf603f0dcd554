"""Data sets: a catalogue of names and facts, and the code that fetches, checks and loads them.

Everything lies in `data_dir/datasets`: published files as torchvision lays them out below its root, the user's own
(`NAME.npz`, `NAME/`), `SET.sha256.json`, what each set was at its first use, and `cache/`, the copies that processes
share. Importing this package loads no torch; only `load_dataset` does.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ttsv.data.catalog import DATASETS, DatasetInfo, check_name, dataset_info

if TYPE_CHECKING:
    from ttsv.data.loading import Dataset
    from ttsv.data.shared import Listed
    from ttsv.data.source import Progress

__all__ = [
    "DATASETS",
    "DatasetInfo",
    "check_name",
    "dataset_info",
    "fetch_dataset",
    "list_datasets",
    "load_dataset",
    "verify_dataset",
]


def load_dataset(name: str, data_dir: Path) -> "Dataset":
    """The data set, checked and split.

    The first load on a machine checks and reads the set and makes a copy, which all processes share; later ones
    map that copy. The tensors are views of it: what is written to them alters neither the file nor what others see,
    and not what this process loads next, but it does alter this data set. Do not write to them.

    Raises `DataError` where a file is missing (with the command that fetches it), cut, altered or otherwise not what
    it was at its first use, and `ConfigError` for an unknown name.
    """
    from ttsv.data import loading

    return loading.load_dataset(name, data_dir)


def fetch_dataset(name: str, data_dir: Path, progress: "Progress | None" = None) -> None:
    """Downloads what of the data set is missing or wrong into `data_dir/datasets`, checks it and makes the shared copy.

    An archive that was put there is used. A download that is interrupted leaves nothing that could be taken for
    whole. `progress` is called with each downloaded file's name, the bytes that are here, and the bytes there will be
    (None where the server does not say). Raises `DataError` where that fails, `ConfigError` for an unknown name.
    """
    from ttsv.data import shared, sources

    folder = Path(data_dir) / "datasets"
    source = sources.source_of(name)
    with shared.locked(name, folder):
        source.fetch(folder, progress or (lambda file, done, total: None))
    shared.open_shared(name, folder)


def verify_dataset(name: str, data_dir: Path) -> str:
    """Checks every file against its published checksum, and everything against the first use; reads the whole set.

    Returns the SHA-256 of the set's content. Raises `DataError` naming the first file that is missing, cut or
    altered, `ConfigError` for an unknown name.
    """
    from ttsv.data import shared

    return shared.verify_shared(name, Path(data_dir) / "datasets")


def list_datasets(data_dir: Path) -> "list[Listed]":
    """Every set with a name of its own, and the user's own that lie in `data_dir/datasets`. Raises `DataError`."""
    from ttsv.data import shared

    return shared.list_shared(Path(data_dir) / "datasets")
