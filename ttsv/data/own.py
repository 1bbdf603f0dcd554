"""The user's own sets: a NumPy archive, or a folder of images per class."""

import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttsv.data.catalog import own_set
from ttsv.data.source import Arrays, Source
from ttsv.errors import DataError

LAYOUTS = ("NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC")
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What NumPy and zipfile raise over a file that is no archive of arrays, or no longer."""
_GREY, _COLOURED = ("1", "L"), ("RGB", "RGBA", "P", "LA", "CMYK", "YCbCr")


def own_names(folder: Path) -> list[str]:
    """The names of the user's own sets that lie in a folder; files and folders that cannot be named are left out."""
    archives = [f"npz:{path.stem}" for path in sorted(folder.glob("*.npz"))]
    folders = [f"folder:{path.parent.name}" for path in sorted(folder.glob("*/train")) if path.is_dir()]
    return [name for name in archives + folders if own_set(name)]


class Npz(Source):
    """`datasets/NAME.npz`: arrays `x_train` and `y_train`, and `x_test` and `y_test` where there is a test set.

    Images are uint8, or float32 in [0, 1], of one to three equal sizes; labels are whole numbers from 0. The optional
    entry `layout` says the images' axes, one of `LAYOUTS`; without it channels come second. Nothing is unpickled.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def files(self, folder: Path) -> list[Path]:
        """The archive."""
        path = self._path(folder)
        if not path.is_file():
            raise DataError(f"{path} is missing: save it there with numpy.savez(x_train=..., y_train=...)")
        return [path]

    def read(self, folder: Path) -> Arrays:
        """Training images, then test images, channels second."""
        path = self._path(folder)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                entries = {entry: archive[entry] for entry in archive.files}
        except _BROKEN as error:
            raise DataError(f"{path} is no whole archive of plain arrays: {error}") from error
        missing = {"x_train", "y_train"} - entries.keys()
        if not missing and ("x_test" in entries) != ("y_test" in entries):
            missing = {"x_test", "y_test"} - entries.keys()
        if missing:
            raise DataError(f"{path} lacks {' and '.join(sorted(missing))}; it has {', '.join(sorted(entries))}")
        layout = str(entries["layout"]) if "layout" in entries else None
        parts = [part for part in ("train", "test") if f"x_{part}" in entries]
        images = [_images(f"{path}: x_{part}", entries[f"x_{part}"], layout) for part in parts]
        labels = [
            _labels(f"{path}: y_{part}", entries[f"y_{part}"], len(x)) for part, x in zip(parts, images, strict=True)
        ]
        if any(x.dtype != images[0].dtype or x.shape[1:] != images[0].shape[1:] for x in images):
            raise DataError(f"{path}: x_test has another type or image shape than x_train")
        if len(labels) == 2 and len(unknown := np.setdiff1d(labels[1], labels[0])):
            raise DataError(f"{path}: y_test has the label {unknown[0]}, which y_train has not")
        return Arrays(np.concatenate(images), np.concatenate(labels), len(labels[0]) if len(parts) == 2 else None)

    def _path(self, folder: Path) -> Path:
        return folder / f"{self.name}.npz"


def _images(what: str, images: NDArray[Any], layout: str | None) -> NDArray[Any]:
    """The images with channels second, in native byte order; raises `DataError` where they are none."""
    if not 3 <= images.ndim <= 5:
        raise DataError(f"{what} has shape {images.shape}; it must be (images, channels, size) with 1 to 3 sizes")
    if not all(images.shape[1:]):
        raise DataError(f"{what} has shape {images.shape}: its images have no pixels")
    if layout is not None and (layout not in LAYOUTS or len(layout) != images.ndim):
        choices = ", ".join(known for known in LAYOUTS if len(known) == images.ndim)
        raise DataError(f"{what}: layout {layout!r} must be one of {choices}")
    if layout is not None and layout.endswith("C"):
        images = np.moveaxis(images, -1, 1)
    if images.dtype.newbyteorder("=") not in (np.uint8, np.float32):
        raise DataError(f"{what} is of type {images.dtype}; it must be uint8, or float32 in [0, 1]")
    if images.dtype.kind == "f" and images.size and not (images.min() >= 0 and images.max() <= 1):
        raise DataError(f"{what} has values outside [0, 1]")
    return np.ascontiguousarray(images, dtype=images.dtype.newbyteorder("="))


def _labels(what: str, labels: NDArray[Any], count: int) -> NDArray[np.int64]:
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        raise DataError(
            f"{what} is {labels.dtype} of shape {labels.shape}; it must be one whole number per image, ({count},)"
        )
    return labels.astype(np.int64)


class ImageFolder(Source):
    """`datasets/NAME/train/CLASS/IMAGE` and, where there is a test set, `datasets/NAME/test/CLASS/IMAGE`.

    Classes are numbered in the order of their names, as torchvision's ImageFolder numbers them. All images have one
    size and are square; they have one channel if all are grey, otherwise three.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def files(self, folder: Path) -> list[Path]:
        """Every image, and the folders: their lists of files belong to the content."""
        images = [path for part in self._samples(folder)[0] for path, _ in part]
        root = folder / self.name
        folders = {parent for path in images for parent in path.parents if parent.is_relative_to(root)}
        return [*sorted(folders | {path for path in (root / "test").glob("*") if path.is_dir()}), *images]

    def read(self, folder: Path) -> Arrays:
        """Training images, then test images, each in the order of classes and names; uint8."""
        parts, classes = self._samples(folder)
        samples = [sample for part in parts for sample in part]
        images = _decoded([path for path, _ in samples])
        labels = np.array([label for _, label in samples], dtype=np.int64)
        return Arrays(images, labels, len(parts[0]) if len(parts) == 2 else None, classes)

    def _samples(self, folder: Path) -> tuple[list[list[tuple[Path, int]]], int]:
        """Per part, path and label of every image; the number of classes."""
        from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

        root = folder / self.name
        found = []
        try:
            names, classes = find_classes(root / "train")
            for part in ("train", "test"):
                if part == "train" or (root / part).is_dir():
                    if extra := set(find_classes(root / part)[0]) - set(names):
                        raise DataError(f"{root / part} has the class {min(extra)!r}, which {root / 'train'} has not")
                    samples = make_dataset(root / part, classes, IMG_EXTENSIONS, allow_empty=part == "test")
                    found.append([(Path(path), label) for path, label in samples])
        except OSError as error:
            raise DataError(f"data set 'folder:{self.name}': {root}/train/CLASS/IMAGE is needed: {error}") from error
        seen: dict[Path, Path] = {}
        for path, _ in (sample for part in found for sample in part):
            if (other := seen.setdefault(path.resolve(), path)) is not path:
                raise DataError(f"{path} is {other} again, by a link: one image may not lie in two parts")
        return found, len(names)


def _decoded(paths: list[Path]) -> NDArray[np.uint8]:
    """The images (count, channels, height, width) of some files; raises `DataError` naming a wrong one."""
    from PIL import Image

    modes, first = set(), None
    for path in paths:
        with _whole_image(path), Image.open(path) as image:
            modes.add(image.mode)
            first = first or image.size
            if image.mode not in (*_GREY, *_COLOURED):
                raise DataError(f"{path} has pixels of kind {image.mode!r}: save it with 8 bits per channel")
            if image.size != first:
                raise DataError(f"{path} has size {image.size}, {paths[0]} has {first}: all must have one size")
            image.verify()  # of the formats with checksums; what was cut behind the last pixel is found only so
    mode = "L" if modes <= set(_GREY) else "RGB"
    assert first is not None
    images = np.empty((len(paths), first[1], first[0], len(mode)), dtype=np.uint8)
    for index, path in enumerate(paths):
        with _whole_image(path), Image.open(path) as image:
            images[index] = np.asarray(image.convert(mode)).reshape(images.shape[1:])
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


@contextmanager
def _whole_image(path: Path) -> Iterator[None]:
    """Turns what Pillow raises over a file into a `DataError` that names it."""
    from PIL import Image

    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no whole image: {error}") from error
