"""A data set of any shape, made of noise: for load, speed and tests where no published set is at hand."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttsv.data.catalog import SyntheticShape
from ttsv.data.source import Arrays, Source

SEED = 0
KNOTS = 4
"""Of each class's pattern along each axis."""
_CHUNK = 2**24
"""Values drawn at a time."""


class Synthetic(Source):
    """Images that are the mean of a smooth pattern, one per class, and of uniform noise, one per pixel; uint8.

    Labels run through the classes in turn. Everything is drawn by NumPy's RandomState, whose stream is frozen, and
    computed in whole numbers: the same name gives the same bytes on any machine, with any version.
    """

    def __init__(self, shape: SyntheticShape) -> None:
        self.shape = shape

    def read(self, folder: Path) -> Arrays:
        """Makes them."""
        shape = self.shape
        random = np.random.RandomState(SEED)
        patterns = smooth_patterns(random, shape)
        labels = np.arange(shape.images, dtype=np.int64) % shape.classes
        images = np.empty((shape.images, *patterns.shape[1:]), dtype=np.uint8)
        # NumPy draws four bytes at a time: of four images at a time, none is lost between two calls.
        step = 4 * max(1, _CHUNK // (4 * patterns[0].size))
        for start in range(0, shape.images, step):
            part = labels[start : start + step]
            noise = random.randint(0, 256, (len(part), *patterns.shape[1:]), dtype=np.uint8)
            images[start : start + step] = (noise >> 1) + (patterns[part] >> 1)
        return Arrays(images, labels, None, shape.classes)


def smooth_patterns(random: np.random.RandomState, shape: SyntheticShape) -> NDArray[np.uint8]:
    """One pattern per class, (classes, channels, size...): random knots with straight lines between them."""
    knots = min(KNOTS, shape.size)
    patterns = random.randint(0, 256, (shape.classes, shape.channels, *[knots] * shape.dims), dtype=np.uint8)
    span = max(shape.size - 1, 1)
    lower, rest = np.divmod(np.arange(shape.size) * (knots - 1), span)
    upper = np.minimum(lower + 1, knots - 1)
    for axis in range(2, 2 + shape.dims):
        weights = rest.reshape([-1 if other == axis else 1 for other in range(2 + shape.dims)])
        below, above = (patterns.take(indices, axis).astype(np.int64) for indices in (lower, upper))
        patterns = ((below * (span - weights) + above * weights) // span).astype(np.uint8)
    return patterns
