"""Which images are trained on, which select a model, and which only its result is measured on."""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from ttsv.data.catalog import TEST_SHARE, VALIDATION_SHARE

SPLIT_SEED = 0
"""The split is part of the protocol: it never depends on a trial's seed."""


class SplitRecord(TypedDict, total=False):
    """How training, validation and test images were chosen, JSON-ready; `images`: how many each part has."""

    test: str
    validation: str
    seed: int
    images: dict[str, int]


def split_order(labels: NDArray[np.int64], train_count: int | None) -> tuple[NDArray[np.int64], SplitRecord]:
    """The order (count,) in which training, validation and test images follow one another, and how it was made.

    `labels` (count,) in the publisher's order, the first `train_count` of training images (None: there is no such
    split, and test images are drawn too). Within a part the publisher's order is kept.
    """
    if train_count is None:
        rest, test = stratified(labels, TEST_SHARE, SPLIT_SEED)
        test_split = f"stratified, {TEST_SHARE:g} of each class"
    else:
        rest, test = np.split(np.arange(len(labels)), [train_count])
        test_split = "published"
    kept, held = stratified(labels[rest], VALIDATION_SHARE, SPLIT_SEED)
    return np.concatenate([rest[kept], rest[held], test]), {
        "test": test_split,
        "validation": f"stratified, {VALIDATION_SHARE:g} of each class of the rest",
        "seed": SPLIT_SEED,
        "images": {"train": len(kept), "validation": len(held), "test": len(test)},
    }


def stratified(labels: NDArray[np.int64], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two ascending lists of indices into `labels` (count,): the rest, and `share` of each class, rounded.

    Drawn by NumPy's RandomState, whose stream is frozen: the split outlives versions of every library.
    """
    random = np.random.RandomState(seed)
    drawn = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        drawn[random.permutation(members)[: round(share * len(members))]] = True
    return np.flatnonzero(~drawn), np.flatnonzero(drawn)
