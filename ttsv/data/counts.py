"""How many images a trial trains on, as far as that follows from a data set's name. Needs neither torch nor NumPy.

What `ttsv.data.split` does to the labels, worked out from how many each class has.
"""

from ttsv.data.catalog import synthetic_shape

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


def training_images(name: str, validation: str = "held-out") -> int | None:
    """Images of a pass over the training images; None where they are known only once they are read.

    `validation`: with "test" those are trained on that are held out else.
    """
    if (shape := synthetic_shape(name)) is not None:
        whole, rest = divmod(shape.images, shape.classes)
        counts, published = [whole + (label < rest) for label in range(shape.classes)], False
    elif name in _CLASS_COUNTS:
        counts, published = _CLASS_COUNTS[name]
    else:
        return None
    if not published:
        counts = [count - round(TEST_SHARE * count) for count in counts]
    if validation == "test":
        return sum(counts)
    return sum(count - round(VALIDATION_SHARE * count) for count in counts)
