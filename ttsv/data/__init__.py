"""Data sets: a catalogue of names and facts, and the code that fetches, checks and loads them.

Everything lies in `data_dir/datasets`: published files as torchvision lays them out below its root, the user's own
(`NAME.npz`, `NAME/`), `SET.sha256.json`, what each set was at its first use, and `cache/`, the copies that processes
share. Importing this package loads no torch: what is asked of it does.

Runtime, checks and errors may be imported, and nothing that knows of networks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ttsv.data.catalog import DATASETS, DatasetInfo, check_name, dataset_info

if TYPE_CHECKING:
    from ttsv.data.loading import load_dataset
    from ttsv.data.shared import fetch_dataset, list_datasets, verify_dataset

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

_HOMES = {"fetch_dataset": "shared", "list_datasets": "shared", "load_dataset": "loading", "verify_dataset": "shared"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
