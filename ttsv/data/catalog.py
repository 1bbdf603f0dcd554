"""Which data sets there are, as plain data: torch-free, so that the service can refuse an unknown name."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts of one data set.

    `channels` and `image_size` (side of the square image) are those of the tensors the loader gives, pixels in
    [0, 1]. `mean` and `std` (one per channel, of the training images) are the default normalisation, which is
    part of the model. `embedded`: needs no download.
    """

    name: str
    classes: int
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    embedded: bool = False
    source: str = ""


_INFOS = (
    DatasetInfo(
        name="digits",
        classes=10,
        channels=1,
        image_size=8,
        mean=(0.5,),
        std=(0.5,),
        embedded=True,
        source="scikit-learn's bundled digits (UCI optical recognition of handwritten digits, test part)",
    ),
    DatasetInfo(
        name="cifar10",
        classes=10,
        channels=3,
        image_size=32,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        source="Krizhevsky, Learning multiple layers of features from tiny images (2009), through torchvision",
    ),
    DatasetInfo(
        name="cifar100",
        classes=100,
        channels=3,
        image_size=32,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        source="Krizhevsky, Learning multiple layers of features from tiny images (2009), through torchvision",
    ),
)

DATASETS: dict[str, DatasetInfo] = {info.name: info for info in _INFOS}
"""Name -> facts of every data set that can be named in a trial."""
