"""The mark of a place that keeps files: a word in a file of its own, by which everybody knows that it is the same."""

import io
import os
import secrets
from pathlib import Path

from service.storage.folder import Folder
from service.storage.store import Store, sync_folder

MARKER = ".ttsv-cluster"
"""The file's name."""
_MOST_LETTERS = 64


def mark_of(store: Store) -> str | None:
    """The word of a store, None where it has none. Raises `OSError` where that cannot be told."""
    try:
        return store.read(MARKER, 0, _MOST_LETTERS).decode(errors="replace").strip("\0") or None
    except (FileNotFoundError, NotADirectoryError):
        return None


def marked(store: Store) -> str:
    """The word of a store, which is drawn where it has none. Raises `OSError`.

    Several may draw one at once: in a folder all get the same, in an object store all later ones do.
    """
    if (there := mark_of(store)) is not None:
        return there
    word = secrets.token_hex(16)
    if isinstance(store, Folder):
        _write_first(store.path(MARKER), word)
    else:
        store.write(MARKER, io.BytesIO(word.encode()), len(word))
    return mark_of(store) or word


def _write_first(marker: Path, word: str) -> None:
    """Writes the file as a whole, durably, unless somebody did meanwhile.

    One that is empty, as a loss of power leaves what was not on the disk, says nothing: it is replaced.
    """
    marker.parent.mkdir(parents=True, exist_ok=True)
    fresh = marker.with_name(f"{MARKER}-{secrets.token_hex(4)}")
    try:
        with fresh.open("w") as file:
            file.write(word)
            file.flush()
            os.fsync(file.fileno())
        try:
            marker.hardlink_to(fresh)
        except FileExistsError:
            if mark_of(Folder(marker.parent)) is None:
                fresh.replace(marker)
        sync_folder(marker.parent)
    finally:
        fresh.unlink(missing_ok=True)
