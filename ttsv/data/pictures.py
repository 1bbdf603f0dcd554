"""What a folder of the user's own images must hold, and what names and headers say of it. Without NumPy and torch."""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from ttsv.data.counted import Counted
from ttsv.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of files that are taken for images."""

_GREY, _COLOURED = ("1", "L"), ("RGB", "RGBA", "P", "LA", "CMYK", "YCbCr")
_MOST_FILES = 2000
"""That are looked at while somebody waits for an answer: for some tenths of a second."""


def mode_and_size(paths: Sequence[Path], *, whole: bool) -> tuple[str, tuple[int, int]]:
    """As what Pillow gives all images (`L` where all are grey, else `RGB`), and their width and height.

    `whole`: they are verified, and not only their headers read. Raises `DataError` naming a wrong one.
    """
    from PIL import Image

    modes, first = set(), None
    for path in paths:
        with whole_image(path), Image.open(path) as image:
            modes.add(image.mode)
            first = first or image.size
            if image.mode not in (*_GREY, *_COLOURED):
                raise DataError(f"{path} has pixels of kind {image.mode!r}: save it with 8 bits per channel")
            if image.size != first:
                raise DataError(f"{path} has size {image.size}, {paths[0]} has {first}: all must have one size")
            if whole:
                image.verify()  # of the formats with checksums; what was cut behind the last pixel is found only so
    assert first is not None
    return "L" if modes <= set(_GREY) else "RGB", first


@contextmanager
def whole_image(path: Path) -> Iterator[None]:
    """Turns what Pillow raises over a file into a `DataError` that names it."""
    from PIL import Image

    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no whole image: {error}") from error


def count_folder(root: Path) -> Counted | None:
    """What a folder holds, None where too many files would have to be looked at to know it, or Pillow is missing.

    Raises `OSError` where it cannot be listed, and `DataError` for what is sure to fail once it is read.
    """
    if importlib.util.find_spec("PIL") is None:
        return None
    names = _classes(root / "train")
    parts = [part for part in ("train", "test") if part == "train" or (root / part).is_dir()]
    if extra := {name for part in parts for name in _classes(root / part)} - set(names):
        raise DataError(f"{root / 'test'} has the class {min(extra)!r}, which {root / 'train'} has not")
    walked = (
        (part, label, path) for part in parts for label, name in enumerate(names) for path in _below(root / part / name)
    )
    seen = list(islice(walked, _MOST_FILES))
    images = [one for one in seen if one[2].suffix.lower() in ENDINGS and one[2].is_file()]
    all_seen = len(seen) < _MOST_FILES
    counts = {part: Counter(label for of, label, _ in images if of == part) for part in parts}
    if all_seen and (empty := set(range(len(names))) - counts["train"].keys()):
        raise DataError(f"{root / 'train' / names[min(empty)]} has no image ({', '.join(ENDINGS)})")
    if not images:
        return None
    mode, (width, height) = mode_and_size([path for _, _, path in images], whole=False)
    if not all_seen and mode == "L":
        return None
    shape = (3 if mode == "RGB" else 1, height, width)
    test = counts["test"].total() if "test" in parts else None
    return Counted(shape, counts["train"] if all_seen else None, test, len(names))


def _classes(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted; raises `DataError` where there is none."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        raise DataError(f"{folder}/CLASS/IMAGE is needed: it has no folder")
    return names


def _below(folder: Path) -> Iterator[Path]:
    """All that lies below a folder; links are followed, round and round where they lead back."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        yield from (Path(parent, name) for name in (*folders, *files))
