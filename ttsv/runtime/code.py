"""Which code runs here, to its last line: equal versions of a checkout, an image or a wheel may differ. Torch-free."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_CODE = ("ttsv", "service", "workers")
"""Packages that a trial's process runs: `service` keeps its files."""


def code_version() -> str:
    """The package's version with a digest of its code after it: `0.1.0+3fa9c2d41b77`. May raise `OSError`."""
    return f"{package_version('ttsv')}+{code_digest()}"


@cache
def code_digest() -> str:
    """12 hex digits of the SHA-256 of the code as it lies here: equal versions of a checkout may differ in it.

    Of a package that is not there, as where the library is used alone, nothing is in it. May raise `OSError`.
    """
    digest = hashlib.sha256()
    for name in _CODE:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts):
            digest.update(f"{name}/{file.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def package_version(package: str) -> str:
    """The version of a package as it is installed; `none` of one that is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
