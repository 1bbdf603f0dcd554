"""JSON schemas of the parts of a spec that follow from the fields of a trial."""

from typing import Any

from ttsv.config.fields import FieldInfo
from ttsv.config.trial import field_infos

LARGEST = 2**53 - 1
"""Beyond it, whoever reads JSON's numbers as doubles sees another number."""


def field_schema(info: FieldInfo) -> dict[str, Any]:
    """A field's values."""
    schema = info.schema()
    if int in info.types:
        schema.setdefault("maximum", LARGEST)
    return schema


def value_schema(info: FieldInfo) -> dict[str, Any]:
    """A field's values where it has no default."""
    return {key: value for key, value in field_schema(info).items() if key != "default"}


def base_schema() -> dict[str, Any]:
    """A partial trial: nested objects, no required fields."""
    schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    for path, info in field_infos().items():
        part, _, name = path.rpartition(".")
        parent = schema
        if part:
            empty = {"type": "object", "properties": {}, "additionalProperties": False}
            parent = schema["properties"].setdefault(part, empty)
        parent["properties"][name] = field_schema(info)
    return schema


def grid_schema() -> dict[str, Any]:
    """The axes: each a non-empty list of one field's values."""
    axes = {path: {"type": "array", "minItems": 1, "items": value_schema(info)} for path, info in field_infos().items()}
    return {"type": "object", "properties": axes, "additionalProperties": False}
