"""Changes in the text of a document, JSON or YAML: what is not changed stays as it was written, comments too.

The places of values in the text are the YAML parser's, which reads JSON as well. Whatever comes of a change is read
again: where that is not what was asked for (the text is written in a way that is not foreseen here) all of the text is
written anew, and says the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from service.errors import FieldProblem, SpecError
from service.specs.documents import (
    LOADER,
    DocumentError,
    read_json,
    read_yaml,
    refuse_beyond_json,
    write_yaml,
    yaml_in_line,
)
from ttsv.config.fields import Json, JsonObject

WHAT = "the text"


@dataclass(frozen=True)
class Edit:
    """A value is set at a path of keys, with the objects on the way; or taken away, with those that it leaves empty."""

    path: tuple[str, ...]
    value: Json = None
    remove: bool = False


def is_json(text: str) -> bool:
    """Whether a document is to be read as JSON: else it is YAML."""
    return text.lstrip().startswith("{")


def read_text(text: str) -> JsonObject:
    """The object that a text says. Raises `DocumentError` saying what is wrong with it."""
    if is_json(text):
        value = read_json(text, WHAT)
    else:
        try:
            value = read_yaml(text)
        except ValueError as error:
            raise DocumentError(f"{WHAT} is not YAML that can be read: {error}") from None
    refuse_beyond_json(value, WHAT)
    if not isinstance(value, dict):
        raise DocumentError(f"{WHAT} must be an object, {{name: value, ...}}")
    return value


def edited(text: str, edits: Sequence[Edit]) -> tuple[str, JsonObject]:
    """The changed text, and what it says.

    Raises `DocumentError` for a text that cannot be read, `SpecError` where something other than an object is in the
    way.
    """
    value = read_text(text)
    for edit in edits:
        changed = _removed(value, edit.path) if edit.remove else _set(value, edit, edit.path)
        if not _same(changed, value):
            text, value = _rewritten(text, edit, changed), changed
    return text, value


def _set(value: Mapping[str, Json], edit: Edit, path: Sequence[str]) -> JsonObject:
    name, *rest = path
    if not rest:
        return {**value, name: edit.value}
    inner = value.get(name)
    if inner is not None and not isinstance(inner, dict):
        where = ".".join(edit.path[: len(edit.path) - len(rest)])
        raise SpecError([FieldProblem(where, "must be an object, {name: value, ...}")])
    return {**value, name: _set(inner or {}, edit, rest)}


def _removed(value: Mapping[str, Json], path: Sequence[str]) -> JsonObject:
    name, *rest = path
    inner = value.get(name)
    if name not in value or (rest and not isinstance(inner, dict)):
        return dict(value)
    left = _removed(inner, rest) if rest and isinstance(inner, dict) else {}
    if rest and left == inner:
        return dict(value)
    others = {key: one for key, one in value.items() if key != name}
    return {key: left if key == name else one for key, one in value.items()} if left else others


def _same(one: Json, other: Json) -> bool:
    """Whether two values are written the same: 1, 1.0 and true are three."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _rewritten(text: str, edit: Edit, wanted: JsonObject) -> str:
    try:
        root = yaml.compose(text, Loader=LOADER)
        found = _Patch(text, is_json(text)).made(root, edit)
        if found is not None and _same(read_text(found), wanted):
            return found
    except (yaml.YAMLError, DocumentError):
        pass
    return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n" if is_json(text) else write_yaml(wanted)


def _is_block(node: yaml.Node) -> bool:
    """Whether it is a text of several lines below its key."""
    return isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")


@dataclass(frozen=True)
class _Patch:
    """How a text is changed at one place."""

    text: str
    json: bool

    def made(self, root: Any, edit: Edit) -> str | None:
        """The changed text; None where it is not seen how."""
        way: list[tuple[yaml.MappingNode, int]] = []
        node, rest = root, list(edit.path)
        while rest and isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value]
            if rest[0] not in names:
                break
            way.append((node, names.index(rest.pop(0))))
            node = node.value[way[-1][1]][1]
        if edit.remove:
            return None if rest else self._without(way)
        value = edit.value
        for name in reversed(rest if not isinstance(node, yaml.MappingNode) else rest[1:]):
            value = {name: value}
        if rest and isinstance(node, yaml.MappingNode):
            return self._with(node, rest[0], value)
        parent, index = way[-1]
        return self._exchanged(parent.value[index][0], node, value)

    def _exchanged(self, key: yaml.Node, old: yaml.Node, value: Any) -> str:
        in_place = old.flow_style if isinstance(old, yaml.CollectionNode) else not _is_block(old)
        if in_place and old.start_mark.index < old.end_mark.index:
            return self._between(old.start_mark.index, old.end_mark.index, self._line(value))
        return self._between(key.end_mark.index, max(self._end(old), key.end_mark.index), f": {self._line(value)}")

    def _with(self, node: yaml.MappingNode, name: str, value: Any) -> str:
        """With one more key, the last of an object."""
        if not node.value:
            return self._between(node.start_mark.index, node.end_mark.index, f"{{{self._entry(name, value)}}}")
        first, (last, inner) = node.value[0][0], node.value[-1]
        end = max(self._end(inner), last.end_mark.index)
        if node.flow_style:
            apart = last.start_mark.line > node.start_mark.line
            between = f",\n{' ' * last.start_mark.column}" if apart else ", "
            return self._between(end, end, between + self._entry(name, value))
        line = self._line_end(end)
        return self._between(line, line, "\n" + self._block(name, value, first.start_mark.column))

    def _without(self, way: list[tuple[yaml.MappingNode, int]]) -> str | None:
        """Without an entry, and without the objects that it leaves empty."""
        while len(way) > 1 and len(way[-1][0].value) == 1:
            way = way[:-1]
        node, index = way[-1]
        if len(node.value) == 1:
            return None
        key, value = node.value[index]
        end = max(self._end(value), key.end_mark.index)
        if not node.flow_style:
            return self._between(self._line_start(key.start_mark.index), self._line_end(end) + 1, "")
        if index == 0:
            return self._between(key.start_mark.index, node.value[1][0].start_mark.index, "")
        return self._between(self._end(node.value[index - 1][1]), end, "")

    def _end(self, node: yaml.Node) -> int:
        """Where a value ends: the parser says of a block where the next one begins."""
        if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
            last = node.value[-1]
            return max(map(self._end, last)) if isinstance(last, tuple) else self._end(last)
        end: int = node.end_mark.index
        return len(self.text[:end].rstrip()) if _is_block(node) else end

    def _between(self, start: int, end: int, new: str) -> str:
        return self.text[:start] + new + self.text[end:]

    def _line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def _line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def _line(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if self.json else yaml_in_line(value)

    def _entry(self, name: str, value: Any) -> str:
        return f"{self._line(name)}: {self._line(value)}"

    def _block(self, name: str, value: Any, indent: int) -> str:
        """An entry of a block, objects in it as blocks."""
        head = " " * indent + self._line(name) + ":"
        if not isinstance(value, dict) or not value:
            return f"{head} {self._line(value)}"
        return "\n".join([head, *(self._block(key, inner, indent + 2) for key, inner in value.items())])
