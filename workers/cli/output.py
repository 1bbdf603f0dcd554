"""Files that commands write where the user says: whole, or as they were."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to, with the same suffix, which takes its place at the end.

    Whoever is interrupted or fails leaves what was there. What is no plain file, such as a pipe, is written itself.
    Raises `OSError` that names `file`.
    """
    if file.exists() and not file.is_file():
        yield file
        return
    target = file.resolve()
    part = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        yield part
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        if error.filename == str(part):
            error.filename = str(file)
        raise
    finally:
        with suppress(OSError):  # what ended the writing is said
            part.unlink()


def write_text(file: Path, text: str) -> None:
    """Writes a text file whole, as UTF-8; `-` is standard output. Raises `OSError`."""
    if is_standard_output(file):
        typer.echo(text, nl=False)
        return
    with written_whole(file) as part:
        part.write_text(text, encoding="utf-8", newline="")


def is_standard_output(file: Path | None) -> bool:
    """Whether a file that was named is `-`."""
    return str(file) == "-"
