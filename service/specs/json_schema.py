"""What values the fields of a trial take in a spec: as JSON schemas, and what is wrong with one."""

from typing import Any, get_type_hints

from pydantic.json_schema import JsonSchemaValue

from service.specs.validation_errors import shown
from ttsv.config.fields import FieldInfo
from ttsv.config.trial import TrialConfig, field_infos
from ttsv.errors import ConfigError

LARGEST = 2**53 - 1
"""Beyond it, whoever reads JSON's numbers as doubles sees another number."""


def field_schema(info: FieldInfo) -> JsonSchemaValue:
    """A field's values."""
    schema = info.schema()
    if int in info.types:
        schema.setdefault("maximum", LARGEST)
    return schema


def value_schema(info: FieldInfo) -> JsonSchemaValue:
    """A field's values in a list of them, which says what the field means; they have no default."""
    return {key: value for key, value in field_schema(info).items() if key not in ("default", "description")}


def value_fix(info: FieldInfo, value: Any) -> str | None:
    """What would be right in place of a field's value, or None where it is."""
    too_large = int in info.types and type(value) is int and abs(value) > LARGEST
    try:
        info.parse((LARGEST if value > 0 else -LARGEST) if too_large else value)  # a field's own limit is said first
    except ConfigError as error:
        return f"{error.fix}, not {shown(value)}"
    return f"must be within ±{LARGEST}, not {shown(value)}" if too_large else None


def base_schema() -> JsonSchemaValue:
    """A partial trial: nested objects, no required fields."""
    schema: JsonSchemaValue = {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = get_type_hints(TrialConfig)
    for path, info in field_infos().items():
        part, _, name = path.rpartition(".")
        parent = schema
        if part:
            said = kinds[part].__doc__.partition("\n")[0]
            empty = {"type": "object", "description": said, "properties": {}, "additionalProperties": False}
            parent = schema["properties"].setdefault(part, empty)
        parent["properties"][name] = field_schema(info)
    return schema


def grid_schema() -> JsonSchemaValue:
    """The axes: each a non-empty list of one field's values."""
    axes = {
        path: {"type": "array", "description": info.doc, "minItems": 1, "items": value_schema(info)}
        for path, info in field_infos().items()
    }
    return {"type": "object", "properties": axes, "additionalProperties": False}
