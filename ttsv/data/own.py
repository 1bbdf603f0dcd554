"""The user's own sets: a NumPy archive, or a folder of images per class."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttsv.data.archive import (
    BROKEN,
    Header,
    check_alike,
    check_images,
    check_labels,
    check_trained,
    is_channels_last,
    parts_of,
)
from ttsv.data.catalog import own_set
from ttsv.data.pictures import ENDINGS, mode_and_size, whole_image
from ttsv.data.source import Arrays, Source
from ttsv.errors import DataError


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
            with path.open("rb") as file:
                with zipfile.ZipFile(file):  # NumPy takes what is none for pickled
                    file.seek(0)
                with np.load(file, allow_pickle=False) as archive:
                    entries = {entry: archive[entry] for entry in archive.files}
        except BROKEN as error:
            raise DataError(f"{path} is no whole archive of plain arrays: {_reason(error)}") from error
        parts = parts_of(path, entries)
        layout = str(entries["layout"]) if "layout" in entries else None
        images = [_images(f"{path}: x_{part}", entries[f"x_{part}"], layout) for part in parts]
        labels = [
            _labels(f"{path}: y_{part}", entries[f"y_{part}"], len(x)) for part, x in zip(parts, images, strict=True)
        ]
        check_alike(path, [_header(x) for x in images])
        for tested in labels[1:]:
            check_trained(path, np.unique(tested).tolist(), np.unique(labels[0]).tolist())
        return Arrays(np.concatenate(images), np.concatenate(labels), len(labels[0]) if len(parts) == 2 else None)

    def _path(self, folder: Path) -> Path:
        return folder / f"{self.name}.npz"


def _reason(error: Exception) -> str:
    """What is wrong with an archive, without NumPy's advice to load it unsafely."""
    said = str(error) or type(error).__name__
    return "it holds what is no plain array, and nothing is unpickled" if "pickle" in said else said


def _header(array: NDArray[Any]) -> Header:
    return Header(array.shape, array.dtype.kind, array.dtype.itemsize)


def _images(what: str, images: NDArray[Any], layout: str | None) -> NDArray[Any]:
    """The images with channels second, in native byte order; raises `DataError` where they are none."""
    check_images(what, _header(images), layout)
    if is_channels_last(layout):
        images = np.moveaxis(images, -1, 1)
    if images.dtype.kind == "f" and images.size and not (images.min() >= 0 and images.max() <= 1):
        raise DataError(f"{what} has values outside [0, 1]")
    return np.ascontiguousarray(images, dtype=images.dtype.newbyteorder("="))


def _labels(what: str, labels: NDArray[Any], count: int) -> NDArray[np.int64]:
    check_labels(what, _header(labels), count)
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
        from torchvision.datasets.folder import find_classes, make_dataset

        root = folder / self.name
        found = []
        try:
            names, classes = find_classes(root / "train")
            for part in ("train", "test"):
                if part == "train" or (root / part).is_dir():
                    if extra := set(find_classes(root / part)[0]) - set(names):
                        raise DataError(f"{root / part} has the class {min(extra)!r}, which {root / 'train'} has not")
                    samples = make_dataset(root / part, classes, ENDINGS, allow_empty=part == "test")
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

    mode, (width, height) = mode_and_size(paths, whole=True)
    images = np.empty((len(paths), height, width, len(mode)), dtype=np.uint8)
    for index, path in enumerate(paths):
        with whole_image(path), Image.open(path) as image:
            images[index] = np.asarray(image.convert(mode)).reshape(images.shape[1:])
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
