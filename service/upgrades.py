"""Specs of earlier versions, brought to the newest: one pure function per step.

A version's meaning never changes once it was published; what changes it is a new version and one more step here.
"""

from collections.abc import Callable
from typing import Any

NEWEST = 2
"""The `spec_version` of a spec that does not say its own."""

_SINCE_2 = ("trials", "repeat", "scheduler", "search", "timeout_seconds", "tags")


def upgrade(document: dict[str, Any]) -> dict[str, Any]:
    """The same experiment as a spec of the newest version; a document without a version is of that one.

    The given document stays as it is. One of a version that there never was is handed back: it is refused as any wrong
    value. Raises `ValueError` for fields that came later than the version that the document says.
    """
    document = {"spec_version": NEWEST} | document
    version = document["spec_version"]
    while type(version) is int and version in _STEPS:
        document = _STEPS[version](document)
        version = document["spec_version"]
    return document


def _from_1(document: dict[str, Any]) -> dict[str, Any]:
    """Version 2 has more fields, none with another meaning; none of them was in version 1."""
    resources = document.get("resources")
    later = [name for name in _SINCE_2 if name in document]
    if isinstance(resources, dict) and "memory_gib" in resources:
        later.append("resources.memory_gib")
    if later:
        raise ValueError(f"{', '.join(later)}: unknown in version 1 of the spec; set spec_version to {NEWEST}")
    return document | {"spec_version": 2}


_STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""Version -> what makes the next one of it."""
