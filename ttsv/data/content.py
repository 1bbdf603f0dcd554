"""A data set's content: its checksum, and the files of arrays that are filled with it."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ttsv.data.source import Arrays


def content_sha256(arrays: Arrays) -> str:
    """SHA-256 (hex) of images and labels in the publisher's order.

    Hashed are, for images then labels: the type and shape as `uint8 (60000, 3, 32, 32)` in ASCII with a line
    end, then the elements in C order, little endian.
    """
    digest = hashlib.sha256()
    for array in (arrays.images, arrays.labels):
        digest.update(f"{array.dtype.name} {array.shape}\n".encode("ascii"))
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def new_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> "np.memmap[Any, Any]":
    """A file of an array of zeros, mapped to be filled. Raises `OSError` where the disk has no room for all of it.

    Else what is written to the mapping would find none, which ends the process.
    """
    array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if sys.platform != "darwin":  # which has no such call
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array
