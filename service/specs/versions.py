"""Specs of earlier versions, brought to the newest: one pure function per step.

A version's meaning never changes once it was published; what changes it is a new version and one more step here.
"""

from collections.abc import Callable

from service.errors import FieldProblem, SpecError
from service.specs.validation_errors import shown

NEWEST = 2
"""The `spec_version` of a spec that does not say its own."""

_SINCE_2 = ("trials", "repeat", "scheduler", "search", "timeout_seconds", "tags")


def upgrade(document: dict[str, object]) -> dict[str, object]:
    """The same experiment as a spec of the newest version; a document without a version is of that one.

    The given document stays as it is. One of a version that there never was is handed back: it is refused as any wrong
    value. Raises `SpecError` for fields that came later than the version that the document says.
    """
    document = {"spec_version": NEWEST} | document
    version = document["spec_version"]
    while type(version) is int and version in _STEPS:
        document = _STEPS[version](document)
        version = document["spec_version"]
    return document


def checked_version(version: object) -> object:
    """The version of an upgraded document; raises ValueError if it is none that there is."""
    if type(version) is not int or version != NEWEST:
        raise ValueError(f"must be {' or '.join(map(str, [*_STEPS, NEWEST]))}, not {shown(version)}")
    return version


def _from_1(document: dict[str, object]) -> dict[str, object]:
    """Version 2 has more fields, none with another meaning; none of them was in version 1."""
    resources = document.get("resources")
    later = [name for name in _SINCE_2 if name in document]
    if isinstance(resources, dict) and "memory_gib" in resources:
        later.append("resources.memory_gib")
    if later:
        fix = f"unknown in version 1 of the spec; set spec_version to {NEWEST}, or remove it"
        raise SpecError([FieldProblem(name, fix) for name in later])
    return document | {"spec_version": 2}


_STEPS: dict[int, Callable[[dict[str, object]], dict[str, object]]] = {1: _from_1}
"""Version -> what makes the next one of it."""
