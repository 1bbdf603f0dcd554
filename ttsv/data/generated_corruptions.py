"""Corruptions of any image data set, by a maintained library: another protocol than the published files."""

import fcntl
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ttsv.checks import check_count
from ttsv.data.content import content_sha256, new_array
from ttsv.data.corruptions import KINDS, LABELS, SEVERITIES, CorruptedSet, CorruptionProtocol, open_corrupted
from ttsv.data.loading import as_pixels
from ttsv.data.source import Arrays
from ttsv.errors import ConfigError
from ttsv.runtime.determinism import derived_seed
from ttsv.runtime.headway import get_on

LIBRARY = "imagecorruptions-imaug"
SMALLEST = 32
"""Pixels that the library wants along each side."""
_PACKAGES = (LIBRARY, "numba", "numpy", "opencv-python", "pillow", "scikit-image", "scipy")
_SEEDED = ("glass_blur", "impulse_noise")
"""Kinds that do not draw from numpy's global random numbers, and take a seed instead."""
_LOCK = ".lock"
_WAIT_SECONDS = 2.0
"""So often it is looked whether another process has made the images meanwhile."""
_LUMA = (0.299, 0.587, 0.114)

Progress = Callable[[str, int, int], None]
"""Called while images are corrupted: the kind to come, the number of kinds done, and of all."""


class GeneratedCorruptions:
    """The 19 kinds at 5 severities, made of test images once and kept in `folder/NAME-corrupted-KEY`.

    `images` (n, channels, height, width), uint8 or floats in [0, 1] (rounded to 8 bits), of 1 or 3 channels;
    `labels` (n,); `name` of the data set, `classes` as many as it has. Every image's random numbers follow from
    `seed`, kind, severity and its number alone. Images of fewer than 32 pixels are corrupted with each pixel as a
    square of k x k, and brought back by the mean of each square, which weakens noise by k. Grey images are corrupted
    in three channels and brought back by luma (ITU-R 601). The protocol says so. `progress` is called before each kind.
    Raises `ConfigError` for images that this does not hold for.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        name: str,
        folder: Path,
        classes: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        if images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
            raise ConfigError("images", tuple(images.shape), "must be (count, 1 or 3 channels, height, width)")
        if labels.shape != images.shape[:1]:
            raise ConfigError("labels", tuple(labels.shape), f"must be ({len(images)},), one per image")
        check_count("seed", seed, least=0)
        pixels = as_pixels(images).cpu()
        if not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ConfigError("images", f"{pixels.min():g} to {pixels.max():g}", "must be pixels in [0, 1]")
        self.images = (pixels * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = labels.cpu().long().numpy()
        self.name = name
        self.folder = Path(folder)
        self.classes = classes
        self.seed = int(seed)
        self.progress = progress

    def open(self) -> CorruptedSet:
        """The images, made where they are not in the folder yet. Raises `DataError` where they were altered there."""
        for kind, done, total in self.make():
            if self.progress:
                self.progress(kind, done, total)
        return open_corrupted(self._place(), shape=self.images.shape[1:], classes=self.classes, protocol=self._protocol)

    def make(self) -> Generator[tuple[str, int, int]]:
        """Makes the images where they are not in the folder yet; yields what `progress` is told, before each kind.

        Also now and then while another process makes the same ones. What one left that was killed is removed.
        """
        place = self._place()
        if place.exists():
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with (place.parent / f".{place.name}{_LOCK}").open("w") as lock:
            while not _is_ours(lock):
                yield KINDS[0], 0, len(KINDS)
                get_on()
                time.sleep(_WAIT_SECONDS)
            if place.exists():
                return
            for left in place.parent.glob(f".{place.name}.*"):
                if left.is_dir():
                    shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as folder:
                made = Path(folder) / "made"
                yield from self._make(made)
                made.rename(place)

    def _make(self, folder: Path) -> Iterator[tuple[str, int, int]]:
        folder.mkdir()
        shape = (len(SEVERITIES) * len(self.images), *self.images.shape[1:])
        labels = new_array(folder / LABELS, self.labels.dtype, shape[:1])
        labels[:] = np.tile(self.labels, len(SEVERITIES))
        labels.flush()
        for done, kind in enumerate(KINDS):
            yield kind, done, len(KINDS)
            target = new_array(folder / f"{kind}.npy", np.uint8, shape)
            for row, (severity, number) in enumerate(np.ndindex(len(SEVERITIES), len(self.images))):
                seed = derived_seed(self.seed, "corruption", kind, SEVERITIES[severity], number) % 2**32
                target[row] = corrupted(self.images[number], kind, SEVERITIES[severity], seed)
                get_on()
            target.flush()

    def _place(self) -> Path:
        key = hashlib.sha256(json.dumps(self._protocol, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"{self.name.replace(':', '-')}-corrupted-{key}"

    @cached_property
    def _protocol(self) -> CorruptionProtocol:
        factor = _factor(self.images.shape[1:3])
        enlarged = f"each pixel as {factor} x {factor}, then the mean of these" if factor > 1 else None
        return {
            "corruptions": "generated",
            "name": self.name,
            "packages": {package: version(package) for package in _PACKAGES},
            "seed": self.seed,
            "enlarged": enlarged,
            "grey": "three equal channels, then luma" if self.images.shape[3] == 1 else None,
            "source_sha256": content_sha256(Arrays(self.images, self.labels, None)),
        }


def corrupted(image: NDArray[np.uint8], kind: str, severity: int, seed: int) -> NDArray[np.uint8]:
    """One image (height, width, 1 or 3 channels) corrupted, of the same shape; `seed` in [0, 2**32)."""
    from imagecorruptions import corrupt

    factor = _factor(image.shape[:2])
    large = image.repeat(factor, axis=0).repeat(factor, axis=1)
    options = {"seed": seed} if kind in _SEEDED else {}
    with _numpy_seed(seed):
        found = corrupt(large, severity=severity, corruption_name=kind, **options).astype(np.float64)
    if image.shape[2] == 1:
        found = (found @ _LUMA)[..., None]
    height, width, channels = image.shape
    squares = found.reshape(height, factor, width, factor, channels)
    result: NDArray[np.uint8] = np.rint(squares.mean(axis=(1, 3))).astype(np.uint8)
    return result


def _is_ours(lock: TextIO) -> bool:
    """Whether no other process has the lock; then this one does, until it closes the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _factor(size: tuple[int, ...]) -> int:
    return -(-SMALLEST // min(min(size), SMALLEST))


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Inside, numpy's global random numbers, which the library draws from, follow from the seed."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
