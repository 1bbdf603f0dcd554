"""The form of a spec, made of its JSON schema: what the API serves says which fields there are, and what they take."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from service.specs.spec import ExperimentSpec
from ttsv.config.fields import Schema
from ttsv.config.trial import field_infos

IN_THE_TEXT = ("variants", "trials", "search")
"""Keys of a spec that the form has no fields for: they are written in the text, and stay when the form changes."""
_OF_PEOPLE = ("name", "notes", "tags")
_LONG = 1000
"""Texts that may have so many characters are given several lines."""
_LARGEST = 2**53 - 1


@dataclass(frozen=True)
class FormField:
    """One field: `path` is dotted, of a trial's fields as a grid has them.

    `kind`: choice (of `choices`), number, text (with `choices` as suggestions), list, words, or long. `varies`: it is a
    trial's, and may have several values. `when`: the scheduler that has the field.
    """

    path: str
    kind: str
    about: str
    default: str
    choices: tuple[Any, ...] = ()
    nullable: bool = False
    required: bool = False
    varies: bool = False
    when: str = ""

    @property
    def name(self) -> str:
        """The last part of its path; of the scheduler's and the resources' all of it."""
        return self.path.rpartition(".")[2] if self.varies else self.path


@dataclass(frozen=True)
class FormGroup:
    """Fields that belong together; those of an open one are to be seen at once."""

    title: str
    fields: tuple[FormField, ...]
    open: bool = False


@cache
def spec_form() -> tuple[FormGroup, ...]:
    """All fields of a spec but those of `IN_THE_TEXT`."""
    schema = ExperimentSpec.model_json_schema()
    properties, definitions = schema["properties"], schema["$defs"]
    required = schema["required"]
    own = [
        replace(field, required=field.path in required)
        for name, one in properties.items()
        if name not in ("spec_version", "base", "grid", *IN_THE_TEXT)
        for field in _fields(name, one, definitions)
    ]
    trial: dict[str, list[FormField]] = {"": []}
    infos = field_infos()
    for name, one in properties["base"]["properties"].items():
        for field in _fields(name, one, definitions):
            needed = "default" not in infos[field.path].schema()
            part = field.path.rpartition(".")[0]
            trial.setdefault(part, []).append(replace(field, varies=True, required=needed))
    return (
        FormGroup("Experiment", tuple(field for field in own if field.path in _OF_PEOPLE), open=True),
        FormGroup("Network and constraint", tuple(trial.pop("")), open=True),
        *(FormGroup(part.capitalize(), tuple(fields), part == "training") for part, fields in trial.items()),
        FormGroup("Running", tuple(field for field in own if field.path not in _OF_PEOPLE)),
    )


def _fields(path: str, schema: Schema, definitions: Mapping[str, Schema]) -> Iterator[FormField]:
    """The fields of a property: its own, or those of the object that it is."""
    schema = _resolved(schema, definitions)
    if "discriminator" in schema:  # one of several objects: which, and what each has
        kinds: Mapping[str, str] = schema["discriminator"]["mapping"]
        default = str(schema["default"]["type"])
        about = schema.get("description", "")
        yield FormField(f"{path}.type", "choice", about, default, tuple(kinds))
        for kind, reference in kinds.items():
            for name, one in _resolved({"$ref": reference}, definitions)["properties"].items():
                if name != "type":
                    yield from (replace(field, when=kind) for field in _fields(f"{path}.{name}", one, definitions))
    elif "properties" in schema:
        for name, one in schema["properties"].items():
            yield from _fields(f"{path}.{name}", one, definitions)
    else:
        yield _field(path, schema)


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        return {**named, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _field(path: str, schema: Schema) -> FormField:
    ways = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    given = schema.get("type", [way.get("type") for way in ways])
    types = [given] if isinstance(given, str) else list(given)
    nullable = "null" in types or len(ways) < len(schema.get("anyOf", ()))
    whole = {**ways[0], **schema} if len(ways) == 1 else schema
    choices = tuple(whole.get("enum", ())) or tuple(name for way in ways for name in way.get("enum", ()))
    if "enum" in whole:
        kind = "choice"
    elif "boolean" in types:
        kind, choices = "choice", (True, False)
    elif "array" in types:
        kind = "words" if schema["items"].get("type") == "string" else "list"
    elif "string" in types:
        kind = "long" if whole.get("maxLength", 0) > _LONG else "text"
    else:
        kind = "number"
    about = "; ".join(filter(None, (str(schema.get("description", "")).rstrip("."), _limits(whole))))
    default = "" if "default" not in schema else _said(schema["default"])
    return FormField(path, kind, about, default, choices, nullable)


def _said(value: Any) -> str:
    """A value as it is typed."""
    return value if isinstance(value, str) else json.dumps(value)


def _limits(schema: Schema) -> str:
    """What a number may be."""
    words: Sequence[tuple[str, str]] = (
        ("exclusiveMinimum", "above {:g}"),
        ("minimum", "at least {:g}"),
        ("exclusiveMaximum", "below {:g}"),
    )
    found = [text.format(schema[key]) for key, text in words if key in schema]
    if "maximum" in schema and schema["maximum"] < _LARGEST:
        found.append(f"at most {schema['maximum']:,.15g}".replace(",", "\u202f"))
    return ", ".join(found)
