"""Specs as people write them: JSON or YAML, in a file or from standard input."""

import sys
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from service.errors import UserError
from service.specs.documents import read_json, yaml_as_json

_WHAT = "the spec"


def read_spec(path: Path) -> dict[str, Any]:
    """The spec in a file, read as the API reads it; `-` is standard input.

    Raises `UserError` with the file's name and what is wrong.
    """
    try:
        document = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        spec = read_json(yaml_as_json(document, _WHAT) if _is_yaml(path, document) else document, _WHAT)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(spec, dict):
        raise UserError(f"{path}: a spec is an object of names and values")
    return spec


def _is_yaml(path: Path, document: bytes) -> bool:
    """By the file's name, where it says so; else all that is no JSON object is YAML."""
    suffix = path.suffix.lower()
    if suffix in (".json", ".yaml", ".yml"):
        return suffix != ".json"
    return not document.removeprefix(BOM_UTF8).lstrip().startswith(b"{")
