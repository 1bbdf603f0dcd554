"""What a NumPy archive of the user's own must hold, and what its headers say of it: nothing is loaded or unpickled.

Without NumPy, which the API need not have. The rules are of headers; `ttsv.data.own` asks the same ones of arrays.
"""

import ast
import errno
import lzma
import math
import re
import struct
import sys
import tokenize
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from ttsv.data.catalog import MAX_CLASSES
from ttsv.data.counted import Counted
from ttsv.errors import DataError

LAYOUTS = ("NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC")
BROKEN = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    OverflowError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What NumPy and zipfile raise over a file that is no archive of arrays, or no longer."""

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
"""As NumPy has it."""
_TYPE = re.compile(r"([<>=|]?)([a-zA-Z])(\d*)")
_KINDS = {"i": "int", "u": "uint", "f": "float"}
_WHOLE = {("i", 1): "b", ("i", 2): "h", ("i", 4): "i", ("i", 8): "q"}
_WHOLE |= {("u", size): letter.upper() for (_, size), letter in _WHOLE.items()}
"""Kind and bytes of whole numbers -> their letter in `array`."""
_OF_CHARACTER = 4
_OTHER_ORDER = ">" if sys.byteorder == "little" else "<"
_MOST_ENTRIES = 1000
_SHOWN = 20
_MOST_LABELS = 4_000_000
"""That are counted while somebody waits for an answer: in some tenths of a second."""
_CHUNK = 2**20


@dataclass(frozen=True)
class Header:
    """Shape and type of an array: `kind` is NumPy's letter, `size` the bytes of an item, `order` that of the bytes."""

    shape: tuple[int, ...]
    kind: str
    size: int
    order: str = ""

    @property
    def type(self) -> str:
        """As NumPy calls it."""
        return f"{_KINDS[self.kind]}{8 * self.size}" if self.kind in _KINDS else f"{self.kind}{self.size or ''}"


def parts_of(path: object, names: Collection[str]) -> list[str]:
    """`train`, and `test` where there is a test set. Raises `DataError` naming what the archive lacks."""
    missing = {"x_train", "y_train"} - set(names)
    if not missing and ("x_test" in names) != ("y_test" in names):
        missing = {"x_test", "y_test"} - set(names)
    if missing:
        has = ", ".join(sorted(names)[:_SHOWN]) or "nothing"
        raise DataError(f"{path} lacks {' and '.join(sorted(missing))}; it has {has}")
    return [part for part in ("train", "test") if f"x_{part}" in names]


def is_channels_last(layout: str | None) -> bool:
    """Whether images that are laid out so have channels last; without a layout they are second."""
    return layout is not None and layout.endswith("C")


def check_images(what: str, images: Header, layout: str | None) -> None:
    """Raises `DataError` where these are no images, or are not laid out so."""
    shape = images.shape
    if not 3 <= len(shape) <= 5:
        raise DataError(f"{what} has shape {shape}; it must be (images, channels, size) with 1 to 3 sizes")
    if not all(shape[1:]):
        raise DataError(f"{what} has shape {shape}: its images have no pixels")
    if layout is not None and (layout not in LAYOUTS or len(layout) != len(shape)):
        choices = ", ".join(known for known in LAYOUTS if len(known) == len(shape))
        raise DataError(f"{what}: layout {layout!r} must be one of {choices}")
    if (images.kind, images.size) not in (("u", 1), ("f", 4)):
        raise DataError(f"{what} is of type {images.type}; it must be uint8, or float32 in [0, 1]")


def check_labels(what: str, labels: Header, count: int) -> None:
    """Raises `DataError` where these are not the labels of so many images."""
    if (labels.kind, labels.size) not in _WHOLE or labels.shape != (count,):
        fix = f"it must be one whole number per image, ({count},)"
        raise DataError(f"{what} is {labels.type} of shape {labels.shape}; {fix}")


def check_alike(path: object, images: Sequence[Header]) -> None:
    """Raises `DataError` where test images are of another type or shape than training images."""
    if len({(one.kind, one.shape[1:]) for one in images}) > 1:
        raise DataError(f"{path}: x_test has another type or image shape than x_train")


def check_trained(path: object, tested: Collection[int], trained: Collection[int]) -> None:
    """Raises `DataError` for a label of test images that no training image has."""
    if unknown := set(tested) - set(trained):
        raise DataError(f"{path}: y_test has the label {min(unknown)}, which y_train has not")


def count_archive(path: Path) -> Counted | None:
    """What an archive holds, None where it has too many labels to count here.

    Raises `OSError` where it cannot be opened, and `DataError` for what is sure to fail once it is read.
    """
    if not path.is_file():  # to open a pipe would wait for whoever writes to it
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _counted(archive, path)
        except DataError:
            raise
        except BROKEN as error:
            raise DataError(f"{path} is no whole archive of plain arrays: {error or type(error).__name__}") from error


def _counted(archive: zipfile.ZipFile, path: Path) -> Counted | None:
    members = {member.removesuffix(".npy"): member for member in archive.namelist()}
    parts = parts_of(path, members)
    for member in islice(members.values(), _MOST_ENTRIES):  # all are read when the set is: none may be an object
        with archive.open(member) as file:
            _header(file, member)
    images, labels = ([_array(archive, members[f"{letter}_{part}"]) for part in parts] for letter in "xy")
    layout = _word(archive, members["layout"]) if "layout" in members else None
    for part, x, y in zip(parts, images, labels, strict=True):
        check_images(f"{path}: x_{part}", x, layout)
        check_labels(f"{path}: y_{part}", y, x.shape[0])
    check_alike(path, images)
    if sum(y.shape[0] for y in labels) > _MOST_LABELS:
        return None
    train, *tests = (_count(archive, members[f"y_{part}"], y) for part, y in zip(parts, labels, strict=True))
    for test in tests:
        check_trained(path, test, train)
    first, *rest = images[0].shape[1:]
    shape = (rest[-1], first, *rest[:-1]) if is_channels_last(layout) else (first, *rest)
    return Counted(shape, train, labels[1].shape[0] if tests else None)


def _array(archive: zipfile.ZipFile, member: str) -> Header:
    """Raises `ValueError` where the member is none, or holds less than it says."""
    with archive.open(member) as file:
        found = _header(file, member)
        if found is None:
            raise ValueError(f"{member} is no array")
        held, said = archive.getinfo(member).file_size - file.tell(), math.prod(found.shape) * found.size
    if held < said:
        raise ValueError(f"{member} says that it has {said} bytes, and has {held}")
    return found


def _header(file: IO[bytes], member: str) -> Header | None:
    """What an array begins with, None of what is none; the file is left where the items begin. Raises `ValueError`."""
    if file.read(len(_MAGIC)) != _MAGIC:
        return None
    major, _ = file.read(2)
    length = int.from_bytes(file.read(2 if major == 1 else 4), "little")
    wrong = ValueError(f"{member} does not begin as an array does")
    if not 1 <= major <= 3 or length > _LONGEST_HEADER:
        raise wrong
    text = file.read(length).decode("latin1" if major < 3 else "utf-8")
    try:
        said = ast.literal_eval(re.sub(r"(?<=\d)L\b", "", text).strip())  # of Python 2, which wrote long numbers so
    except (SyntaxError, RecursionError, MemoryError):
        raise wrong from None
    if not isinstance(said, dict) or said.keys() != {"descr", "fortran_order", "shape"}:
        raise wrong
    shape, descr = said["shape"], said["descr"]
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise wrong
    if re.search(r"'[<>=|]?O", repr(descr)):
        raise ValueError(f"{member} holds Python objects, which are not unpickled")
    known = _TYPE.fullmatch(descr) if isinstance(descr, str) else None
    if known is None:
        return Header(shape, "V", 0)
    return Header(shape, known[2], int(known[3] or 0) * (_OF_CHARACTER if known[2] == "U" else 1), known[1])


def _word(archive: zipfile.ZipFile, member: str) -> str:
    """The word that an entry is; what it is else."""
    with archive.open(member) as file:
        header = _header(file, member)
        if header is None or header.kind != "U" or header.shape:
            return f"({member})" if header is None else f"({header.type} of shape {header.shape})"
        word = file.read(min(header.size, _OF_CHARACTER * _SHOWN))
    return word.decode("utf-32-be" if header.order == ">" else "utf-32-le").rstrip("\0")


def _count(archive: zipfile.ZipFile, member: str, labels: Header) -> Counter[int]:
    """How often each label is there; of more labels than classes may be only the first."""
    counts = Counter[int]()
    with archive.open(member) as file:
        _header(file, member)
        left = labels.shape[0] * labels.size
        while left and len(counts) <= MAX_CLASSES:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise EOFError(f"{member} is cut")
            left -= len(chunk)
            items = array(_WHOLE[labels.kind, labels.size], chunk)
            if labels.order == _OTHER_ORDER:
                items.byteswap()
            counts.update(items)
    return counts
