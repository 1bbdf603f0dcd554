"""Specs as people write them: JSON or YAML, in a file or from standard input."""

import json
import sys
from pathlib import Path
from typing import Any

from service.errors import UserError
from service.yaml_document import read_yaml


def read_spec(path: Path) -> dict[str, Any]:
    """The spec in a file; `-` is standard input. Raises `UserError` with the file's name and what is wrong."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        is_yaml = path.suffix in (".yaml", ".yml") or (str(path) == "-" and not text.lstrip().startswith("{"))
        spec = read_yaml(text) if is_yaml else json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(spec, dict):
        raise UserError(f"{path}: a spec is an object of names and values")
    return spec
