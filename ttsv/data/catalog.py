"""Which data sets there are and how many images a trial trains on, as plain data.

Torch-free, so that the service can refuse an unknown name. Besides the sets of `DATASETS`, a trial can name three
kinds: `synthetic:SHAPE:CLASSES:IMAGES`, made of noise; `npz:NAME` and `folder:NAME`, the user's own, whose facts are
known only once they are loaded.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ttsv.errors import ConfigError

USUAL_NORMALIZATION = 0.5
"""Mean and std of every channel of every data set, where nothing else is asked for."""


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts of one data set.

    `channels`, `dims` (spatial dimensions, 1 to 3) and `image_size` (the same along each) are those of the tensors
    the loader gives, pixels in [0, 1]. `mean` and `std`, one per channel, are the default normalisation, which is
    part of the model. `embedded`: needs no file. `parts`: training, held-out and test images of the user's own sets; of
    others `part_images` has them. `unused`: of the user's own sets the labels, where they were counted, of which there
    is no training image though there is of larger ones.
    """

    name: str
    classes: int
    channels: int
    image_size: int
    dims: int = 2
    embedded: bool = False
    source: str = ""
    parts: tuple[int, int, int] | None = None
    unused: tuple[int, ...] = field(default=(), compare=False)

    @property
    def mean(self) -> tuple[float, ...]:
        """With `std` the normalisation of Gouk et al. and of the paper's WRN and VGG: pixels to [-1, 1]."""
        return (USUAL_NORMALIZATION,) * self.channels

    @property
    def std(self) -> tuple[float, ...]:
        """As `mean`."""
        return self.mean


_KRIZHEVSKY = "Krizhevsky, Learning multiple layers of features from tiny images (2009), through torchvision"
_NETZER = "Netzer et al., Reading digits in natural images with unsupervised feature learning (2011), cropped digits"
_XIAO = "Xiao, Rasul, Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking (2017), through torchvision"
_MADE = "made here: a smooth pattern per class under noise"
_DEFAULT_SYNTHETIC = "synthetic:3x32x32:10:2000"

_DIGITS = "scikit-learn's bundled digits (UCI optical recognition of handwritten digits, test part)"

_INFOS = (
    DatasetInfo(name="digits", classes=10, channels=1, image_size=8, source=_DIGITS, embedded=True),
    DatasetInfo(name="cifar10", classes=10, channels=3, image_size=32, source=_KRIZHEVSKY),
    DatasetInfo(name="cifar100", classes=100, channels=3, image_size=32, source=_KRIZHEVSKY),
    DatasetInfo(name="svhn", classes=10, channels=3, image_size=32, source=f"{_NETZER}, through torchvision"),
    DatasetInfo(name="fashion-mnist", classes=10, channels=1, image_size=28, source=_XIAO),
    DatasetInfo(
        name="synthetic",
        classes=10,
        channels=3,
        image_size=32,
        source=f"{_MADE}; short for {_DEFAULT_SYNTHETIC}",
        embedded=True,
    ),
)

DATASETS: dict[str, DatasetInfo] = {info.name: info for info in _INFOS}
"""Name -> facts of every data set that has a name of its own."""

FETCHED = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "svhn": "train_32x32.mat",
    "fashion-mnist": "FashionMNIST",
}
"""Published data set -> what of it lies in `data_dir/datasets` once it was fetched."""

MAX_SYNTHETIC_BYTES = 2**30
MAX_CLASSES = 10_000
IMAGES_PER_CLASS = 10
"""At least so many of a synthetic set, so that every part of the split has every class."""

_NUMBER = "[1-9][0-9]{0,8}"
_SYNTHETIC = re.compile(rf"synthetic:({_NUMBER}(?:x{_NUMBER}){{1,3}}):({_NUMBER}):({_NUMBER})")
_OWN = re.compile(r"(npz|folder):([A-Za-z0-9][A-Za-z0-9._-]{0,49})")
_CHOICES = (
    f"must be one of {', '.join(DATASETS)}; or synthetic:CHANNELSxSIZE[xSIZE[xSIZE]]:CLASSES:IMAGES (such as "
    f"{_DEFAULT_SYNTHETIC}); or npz:NAME or folder:NAME (your own, in the data folder's datasets/NAME.npz or "
    "datasets/NAME/; NAME is a letter or digit, then up to 49 letters, digits, dots, dashes and underscores)"
)


@dataclass(frozen=True)
class SyntheticShape:
    """What the name of a synthetic set says: images (images, channels, size...), `dims` sizes, of `classes` classes."""

    channels: int
    size: int
    dims: int
    classes: int
    images: int


def check_name(name: str) -> None:
    """Raises `ConfigError` for what cannot name a data set. Whether the user's own exists is seen when it is loaded."""
    if fix := DatasetName().fix(name):
        raise ConfigError("dataset", name, fix)


def dataset_info(name: str) -> DatasetInfo | None:
    """Returns the facts that follow from a name; None for `npz:` and `folder:` sets. Raises as `check_name`."""
    check_name(name)
    if name in DATASETS:
        return DATASETS[name]
    shape = synthetic_shape(name)
    if shape is None:
        return None
    return DatasetInfo(
        name=name,
        classes=shape.classes,
        channels=shape.channels,
        image_size=shape.size,
        dims=shape.dims,
        source=_MADE,
        embedded=True,
    )


def own_set(name: str) -> tuple[str, str] | None:
    """Kind (`npz` or `folder`) and NAME of a name of the user's own set; None for other names."""
    match = _OWN.fullmatch(name)
    return None if match is None else (match[1], match[2])


def synthetic_shape(name: str) -> SyntheticShape | None:
    """What the name of a synthetic set says; None for other names."""
    match = _SYNTHETIC.fullmatch(_DEFAULT_SYNTHETIC if name == "synthetic" else name)
    if match is None:
        return None
    channels, *sizes = map(int, match[1].split("x"))
    size = sizes[0] if len(set(sizes)) == 1 else 0
    return SyntheticShape(channels, size, len(sizes), int(match[2]), int(match[3]))


@dataclass(frozen=True)
class DatasetName:
    """The value names a data set (a `ttsv.config.fields.Check`)."""

    def fix(self, value: Any) -> str | None:
        """What would be right, or None."""
        if not isinstance(value, str):
            return _CHOICES
        if value in DATASETS or own_set(value):
            return None
        shape = synthetic_shape(value)
        if shape is not None:
            return _synthetic_fix(shape)
        near = difflib.get_close_matches(value.lower(), DATASETS, 1)
        return _CHOICES + "".join(f"; the nearest is {name}" for name in near)

    def schema(self) -> dict[str, Any]:
        """As JSON schema (which cannot say how large a synthetic set may be)."""
        patterns = [_SYNTHETIC.pattern, _OWN.pattern]
        return {"anyOf": [{"enum": list(DATASETS)}, *({"pattern": f"^{pattern}$"} for pattern in patterns)]}


def _synthetic_fix(shape: SyntheticShape) -> str | None:
    if not shape.size:
        return "must have the same SIZE along every axis: images are square"
    if not 2 <= shape.classes <= MAX_CLASSES:
        return f"must have 2 to {MAX_CLASSES} classes"
    if shape.images < IMAGES_PER_CLASS * shape.classes:
        return f"must have at least {IMAGES_PER_CLASS} images per class, {IMAGES_PER_CLASS * shape.classes}"
    size = math.prod((shape.images, shape.channels, *[shape.size] * shape.dims))
    if size > MAX_SYNTHETIC_BYTES:
        return f"must have at most {MAX_SYNTHETIC_BYTES} values in all images, not {size}"
    return None


# How many images a trial trains on: what `ttsv.data.split` does to the labels, worked out from how many each class has.

TEST_SHARE = 0.2
"""Of the images, where the publisher made no test set."""
VALIDATION_SHARE = 0.1
"""Of the images that are not test images."""

_CLASS_COUNTS: dict[str, tuple[list[int], bool]] = {
    "cifar10": ([5000] * 10, True),
    "cifar100": ([500] * 100, True),
    "fashion-mnist": ([6000] * 10, True),
    "svhn": ([4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659], True),
    "digits": ([178, 182, 177, 183, 181, 182, 181, 179, 174, 180], False),
}
"""Images of each class, and whether they are the publisher's training images (else test images are drawn of them)."""


_PUBLISHED_TEST = {"cifar10": 10_000, "cifar100": 10_000, "fashion-mnist": 10_000, "svhn": 26_032}
"""Images of the test sets that publishers made."""


def training_images(name: str, validation: str = "held-out", info: DatasetInfo | None = None) -> int | None:
    """Images of a pass over the training images; None where they are known only once they are read.

    `validation`: with "test" those are trained on that are held out else. `info`: the facts of a set of the user's own.
    """
    parts = part_images(name) if info is None or info.parts is None else info.parts
    if parts is None:
        return None
    train, held_out, _ = parts
    return train + held_out if validation == "test" else train


@cache
def part_images(name: str) -> tuple[int, int, int] | None:
    """Training, held-out and test images of a data set; None where they are known only once they are read."""
    if (shape := synthetic_shape(name)) is not None:
        whole, rest = divmod(shape.images, shape.classes)
        counts, published = [whole + (label < rest) for label in range(shape.classes)], False
    elif name in _CLASS_COUNTS:
        counts, published = _CLASS_COUNTS[name]
    else:
        return None
    return drawn_parts(counts, _PUBLISHED_TEST[name] if published else None)


def drawn_parts(counts: Iterable[int], test: int | None) -> tuple[int, int, int]:
    """Training, held-out and test images, of so many of each class; `test`: None where those are drawn of these."""
    rest = list(counts)
    if test is None:
        drawn = [round(TEST_SHARE * count) for count in rest]
        rest, test = [count - of_class for count, of_class in zip(rest, drawn, strict=True)], sum(drawn)
    held_out = sum(round(VALIDATION_SHARE * count) for count in rest)
    return sum(rest) - held_out, held_out, test
