"""The facts of the user's own sets, as far as they are told without reading the images. Without NumPy and torch."""

from pathlib import Path

from ttsv.data.archive import count_archive
from ttsv.data.catalog import DatasetInfo, own_set
from ttsv.data.pictures import count_folder


def own_info(name: str, folder: Path) -> DatasetInfo | None:
    """The facts of a set of the user's own that lies in `folder`, `data_dir/datasets`; None where they take too long.

    Raises `OSError` where nothing is there, or it cannot be opened, and `DataError` for what is sure to fail once it is
    read.
    """
    own = own_set(name)
    assert own is not None, name
    counted = count_archive(folder / f"{own[1]}.npz") if own[0] == "npz" else count_folder(folder / own[1])
    return None if counted is None else counted.info(name)
