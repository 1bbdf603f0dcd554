"""Where the user's own sets lie, and their facts as far as they are told without reading the images.

Without NumPy and torch.
"""

from pathlib import Path

from ttsv.data.archive import count_archive
from ttsv.data.catalog import DatasetInfo, own_set
from ttsv.data.pictures import count_folder

_PLACES = {"npz": "datasets/{}.npz", "folder": "datasets/{}/train"}
"""Kind of the user's own sets -> the file, or the folder of training images, within the data folder."""


def own_place(name: str) -> str:
    """Where in the data folder a set of the user's own must lie."""
    own = own_set(name)
    assert own is not None, name
    kind, stem = own
    return _PLACES[kind].format(stem)


def own_info(name: str, data_dir: Path) -> DatasetInfo | None:
    """The facts of a set of the user's own in this data folder; None where they take too long.

    Raises `OSError` where nothing is there, or it cannot be opened, and `DataError` for what is sure to fail once it is
    read.
    """
    path = data_dir / own_place(name)
    counted = count_archive(path) if path.suffix == ".npz" else count_folder(path.parent)
    return None if counted is None else counted.info(name)
