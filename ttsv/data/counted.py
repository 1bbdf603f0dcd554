"""What is counted of a data set of the user's own, and what that says of it. Without NumPy."""

from collections.abc import Mapping
from dataclasses import dataclass

from ttsv.data.catalog import MAX_CLASSES, DatasetInfo, drawn_parts
from ttsv.errors import DataError


@dataclass(frozen=True)
class Counted:
    """Channels and sizes of the images, how many of each label are there to train on, and how many to test.

    `train`: None where nobody counted them. `test`: None where the user made no such part. `classes`: where more is
    known than the labels show.
    """

    shape: tuple[int, ...]
    train: Mapping[int, int] | None
    test: int | None
    classes: int | None = None

    def info(self, name: str) -> DatasetInfo:
        """The facts of the set. Raises `DataError` where they are of none that can be trained on."""
        labels = self.train or (0,)
        count = 1 if self.train is None else sum(self.train.values())
        classes = class_count(name, (count, *self.shape), min(labels), max(labels), known=self.classes)
        parts = None if self.train is None else drawn_parts(self.train.values(), self.test)
        if parts is not None:
            check_parts(name, dict(zip(("train", "validation", "test"), parts, strict=True)))
        channels, size, *_ = self.shape
        return DatasetInfo(
            name=name,
            classes=classes,
            channels=channels,
            image_size=size,
            dims=len(self.shape) - 1,
            source=OWN,
            parts=parts,
            unused=tuple(label for label in range(max(labels)) if label not in labels) if self.train else (),
        )


OWN = "the user's own"
"""Where such a set is from."""


def class_count(name: str, shape: tuple[int, ...], low: int, high: int, *, known: int | None = None) -> int:
    """How many classes images of this shape have, by the least and the largest label and what is `known` besides.

    Raises `DataError` where there are none such.
    """
    count, _, *sizes = shape
    if not count or len(set(sizes)) != 1:
        fix = _channels_second(shape) or "they must be square"
        raise DataError(f"data set {name!r}: images of shape {shape} for {count} labels; {fix}")
    if known == 1 or high >= MAX_CLASSES:
        raise DataError(f"data set {name!r}: {known or high + 1} classes; there must be 2 to {MAX_CLASSES}")
    classes = known or max(high + 1, 2)
    if low < 0 or high >= classes:
        raise DataError(f"data set {name!r}: labels outside 0 to {classes - 1}")
    return classes


def _channels_second(shape: tuple[int, ...]) -> str | None:
    """How square images whose channels seem to be last are brought into order."""
    count, *sizes, last = shape
    if len(sizes) < 2 or len(set(sizes)) != 1 or last not in (1, 3):
        return None
    axes = (0, len(sizes) + 1, *range(1, len(sizes) + 1))
    return f"channels come second: {(count, last, *sizes)}; use x.transpose{axes}"


def check_parts(name: str, parts: Mapping[str, int]) -> None:
    """Raises `DataError` where a part has no image."""
    if not all(parts.values()):
        few = f"has too few images for its parts, {dict(parts)}"
        raise DataError(f"data set {name!r} {few}: ten of each class are enough")
