"""Checked fields: the machinery below `ttsv.config.trial`.

A field of a configuration says in its metadata what it means and which values it takes. From that one
statement come the check when a configuration is made, the error that names the field and the fix, and the
JSON schema.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

from ttsv.errors import ConfigError

if TYPE_CHECKING:
    Json: TypeAlias = "Sequence[Json] | Mapping[str, Json] | str | bool | int | float | None"
else:
    Json = Any  # what reads annotations, as pydantic does, takes what it finds there as it is
"""Any value of JSON, to be read. Who makes one may keep lists and dicts of any such values in it."""
JsonObject: TypeAlias = dict[str, Json]
"""An object of JSON that says what its maker chose: a record that is stored, and passed on as it is."""
Schema: TypeAlias = dict[str, Any]
"""A JSON schema, or a part of one."""
FieldValue: TypeAlias = bool | int | float | str | Sequence[int | float] | None
"""What a field of a configuration is: a list, in JSON, where the configuration itself has a tuple."""
FieldValues: TypeAlias = Mapping[str, FieldValue]
"""Fields by their names, or by their dotted paths (`training.lr`)."""
TrialFields: TypeAlias = Mapping[str, FieldValue | FieldValues]
"""A configuration as plain data: its fields by name, those of each part (`training`) by the part's."""


class Check(Protocol):
    """Tells what would be right for a wrong value (None for a right one), and the same as JSON schema."""

    def fix(self, value: Any) -> str | None: ...  # noqa: D102 - the class says it
    def schema(self) -> Schema: ...  # noqa: D102 - the class says it


@dataclass(frozen=True)
class OneOf:
    """The value is one of some names."""

    names: tuple[str, ...]

    def fix(self, value: Any) -> str | None:
        """What would be right, or None."""
        return None if value in self.names else f"must be one of {', '.join(self.names)}"

    def schema(self) -> Schema:
        """As JSON schema."""
        return {"enum": list(self.names)}


@dataclass(frozen=True)
class Number:
    """The value is finite, at least `low` (or above it) and at most `high`."""

    low: float
    high: float = math.inf
    above: bool = False

    def fix(self, value: float) -> str | None:
        """What would be right, or None."""
        # Whole numbers may be larger than any float, and are compared with floats as they are.
        finite = isinstance(value, int) or math.isfinite(value)
        if finite and (value > self.low if self.above else value >= self.low) and value <= self.high:
            return None
        lower = f"{'above' if self.above else 'at least'} {self.low:.15g}"
        if math.isfinite(self.high):
            return f"must be {lower} and at most {self.high:.15g}"
        if value == math.inf:
            return f"must be {lower} and below 1e301"
        return f"must be {lower}" if finite else f"must be finite and {lower}"

    def schema(self) -> Schema:
        """As JSON schema."""
        bounds = {"exclusiveMinimum" if self.above else "minimum": self.low}
        return bounds | ({"maximum": self.high} if math.isfinite(self.high) else {})


@dataclass(frozen=True)
class Ascending:
    """The value is an ascending list of epochs."""

    def fix(self, value: tuple[int, ...]) -> str | None:
        """What would be right, or None."""
        right = all(v >= 1 for v in value) and all(a < b for a, b in itertools.pairwise(value))
        return None if right else "must be ascending epochs, each at least 1"

    def schema(self) -> Schema:
        """As JSON schema (which cannot say "ascending")."""
        return {"items": {"type": "integer", "minimum": 1}}


@dataclass(frozen=True)
class Each:
    """Every value of a list passes a check."""

    check: Number

    def fix(self, value: tuple[float, ...]) -> str | None:
        """What would be right, or None."""
        return next((fix.replace("must be", "must each be", 1) for v in value if (fix := self.check.fix(v))), None)

    def schema(self) -> Schema:
        """As JSON schema."""
        return {"items": {"type": "number", **self.check.schema()}}


def field(default: Any, doc: str, check: Check | None = None) -> Any:
    """A field with a default, its meaning and its check."""
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check})


def required(doc: str, check: Check) -> Any:
    """A field without a default, its meaning and its check."""
    return dataclasses.field(metadata={"doc": doc, "check": check})


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One field: its dotted path (`training.lr`), the types it takes, its meaning and its check."""

    path: str
    types: tuple[type, ...]
    doc: str
    check: Check | None
    default: Any
    element: type | None = None
    """Of a list."""

    def parse(self, value: Any) -> Any:
        """The value as the field stores it (ints become floats, lists tuples); raises `ConfigError`.

        A field for whole numbers and fractions stores whole ones as ints, however they are written.
        """
        if {int, float} <= set(self.types):
            if type(value) is float and value.is_integer():
                value = int(value)
        elif float in self.types:
            value = _real(value)
        elif tuple in self.types and isinstance(value, list | tuple):
            value = tuple(map(_real, value) if self.element is float else value)
        if type(value) not in self.types or (type(value) is tuple and not all(type(v) is self.element for v in value)):
            raise ConfigError(self.path, value, self._right_kind(value))
        fix = self.check.fix(value) if self.check and value is not None else None
        if fix:
            raise ConfigError(self.path, value, fix + (", or null" if type(None) in self.types else ""))
        return value

    def _right_kind(self, value: Any) -> str:
        """What a value of another kind should have been, said so that it can be written down."""
        fix = "must be " + " or ".join(self._type_name(kind) for kind in self.types)
        if isinstance(self.check, OneOf) and str in self.types:
            fix = f"must be one of {', '.join(self.check.names)}"
            return fix + (': for none write "none"' if value in (None, False) and "none" in self.check.names else "")
        if tuple in self.types:
            numbers = (int, float) if self.element is float else (self.element,)
            empty = value is None and self.default == ()
            return fix + (f": [{value}]" if type(value) in numbers else ": [] is empty" if empty else "")
        quoted = isinstance(value, str) and {int, float} & set(self.types) and _is_numeric(value)
        return fix + (", without quotes" if quoted else "")

    def schema(self) -> Schema:
        """JSON schema of the field's values."""
        types = [_SCHEMA_NAMES[kind] for kind in self.types]
        schema: Schema = {"type": types[0] if len(types) == 1 else types, "description": self.doc}
        if self.default is not dataclasses.MISSING:
            schema["default"] = list(self.default) if isinstance(self.default, tuple) else self.default
        if self.element is not None:
            schema["items"] = {"type": _SCHEMA_NAMES[self.element]}
        return schema | (self.check.schema() if self.check else {})

    def _type_name(self, kind: type) -> str:
        if kind is tuple:
            return "a list of whole numbers" if self.element is int else "a list of numbers"
        return _TYPE_NAMES[kind]


def _is_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _real(value: Any) -> Any:
    """A number as a float; anything else as it is."""
    if type(value) not in (int, float):
        return value
    return math.inf if abs(value) >= 1e301 else float(value) + 0.0  # -0.0 is 0.0, with one fingerprint


_TYPE_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    type(None): "null",
}
_SCHEMA_NAMES: dict[type, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    tuple: "array",
    type(None): "null",
}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of the parts of a configuration: every field is parsed and checked when the part is made.

    Raises `ConfigError` naming the field by its path, its value and the fix.
    """

    path: ClassVar[str] = ""

    def __post_init__(self) -> None:
        layout, values = _layout(type(self)), vars(self)
        for name, default in layout.defaults.items():
            value = values[name]
            if value is default:  # most are, in each of the ten thousand trials of a grid
                continue
            field = layout.fields[name]
            if isinstance(field, FieldInfo):
                parsed = field.parse(value)
                if parsed is not value:
                    object.__setattr__(self, name, parsed)
            elif not isinstance(value, field):
                raise ConfigError(self.path + name, value, f"must be a {field.__name__}")


_Part = TypeVar("_Part", bound=Checked)


@dataclass(frozen=True)
class _Layout:
    """By name what each field of a configuration is, or the class of the nested part, and its default.

    `required` have none; `unlike_json` are the nested parts and the tuples.
    """

    fields: Mapping[str, FieldInfo | type[Checked]]
    defaults: Mapping[str, Any]
    required: tuple[FieldInfo, ...]
    unlike_json: tuple[str, ...]


_LAYOUTS: dict[type[Checked], _Layout] = {}


def _layout(cls: type[Checked]) -> _Layout:
    if (known := _LAYOUTS.get(cls)) is not None:
        return known
    hints = typing.get_type_hints(cls)
    found: dict[str, FieldInfo | type[Checked]] = {}
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if isinstance(hint, type) and issubclass(hint, Checked):
            found[f.name] = hint
            continue
        listed = typing.get_origin(hint) is tuple
        kinds = (tuple,) if listed else typing.get_args(hint) or (hint,)
        found[f.name] = FieldInfo(
            path=cls.path + f.name,
            types=kinds,
            doc=f.metadata["doc"],
            check=f.metadata["check"],
            default=f.default,
            element=typing.get_args(hint)[0] if listed else None,
        )
    infos = {name: info for name, info in found.items() if isinstance(info, FieldInfo)}
    _LAYOUTS[cls] = _Layout(
        fields=found,
        defaults={f.name: f.default for f in dataclasses.fields(cls)},
        required=tuple(info for info in infos.values() if info.default is dataclasses.MISSING),
        unlike_json=tuple(name for name in found if name not in infos or infos[name].element is not None),
    )
    return _LAYOUTS[cls]


def walk(cls: type[Checked]) -> dict[str, FieldInfo]:
    """Dotted path -> every field of a configuration and its parts."""
    found: dict[str, FieldInfo] = {}
    for part in _layout(cls).fields.values():
        found |= {part.path: part} if isinstance(part, FieldInfo) else walk(part)
    return found


def build(cls: type[_Part], data: Any) -> _Part:
    """Makes a configuration of nested plain data, defaults for what is left out. Raises `ConfigError`."""
    layout = _layout(cls)
    known = layout.fields
    if not isinstance(data, dict):
        raise ConfigError(cls.path.rstrip("."), data, f"must be an object with {', '.join(known)}")
    values: dict[str, object] = {}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"{cls.path}{name}", value, f"unknown; the fields here are {', '.join(known)}")
        field = known[name]
        values[name] = value if isinstance(field, FieldInfo) else build(field, value)
    for field in layout.required:
        if field.path.rpartition(".")[2] not in values:
            raise ConfigError(field.path, None, "is required")
    return cls(**values)


def changed(part: _Part, **values: Any) -> _Part:
    """`dataclasses.replace`, but the very part where nothing changes."""
    own = vars(part)
    # (Parts compare all their fields; most are the very default.)
    real = {name: value for name, value in values.items() if own[name] is not value and own[name] != value}
    return dataclasses.replace(part, **real) if real else part


def at_default(part: _Part, names: Iterable[str], **values: Any) -> _Part:
    """The part with the named fields at their defaults, and others at `values`."""
    own, defaults = vars(part), _layout(type(part)).defaults
    return changed(part, **{name: defaults[name] for name in names if own[name] is not defaults[name]} | values)


def plain(part: Checked) -> TrialFields:
    """Every field as nested plain data, JSON-ready."""
    found = dict(vars(part))  # in the order of the fields, which is that in which they were set
    for name in _layout(type(part)).unlike_json:
        value = found[name]
        found[name] = list(value) if type(value) is tuple else plain(value)
    return found


def differing(part: Checked) -> TrialFields:
    """The fields whose values are not their defaults, as nested plain data."""
    found: dict[str, Any] = {}  # as deep as the parts are
    own = vars(part)
    for name, default in _layout(type(part)).defaults.items():
        value = own[name]
        if value is default:
            continue
        if isinstance(value, Checked):
            if inner := differing(value):
                found[name] = inner
        elif value != default:
            found[name] = value
    return found


def digest(data: Mapping[str, object]) -> str:
    """SHA-256 (hex) of plain data, whatever the order of its keys."""
    return hashlib.sha256(_IN_ORDER.encode(data).encode()).hexdigest()


_IN_ORDER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
