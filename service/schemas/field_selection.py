"""`fields=id,progress.trials`: the parts of an answer that a request asks for."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from service.errors import FieldProblem, QueryError

MAX_LENGTH = 2000
MAX_DEPTH = 8

_Tree = dict[str, "_Tree"]
"""Name -> what is wanted of it; "" stands for all of it."""


class Fields:
    """What was asked for: every field of `model`, or those named in `text` (dotted paths, separated by commas).

    Raises `QueryError` for a name that the model does not have; what stands in a free-form part (`config`, `spec`) is
    not known before, and is left out where it is not there.
    """

    def __init__(self, model: type[BaseModel], text: str | None = None) -> None:
        self._tree: _Tree | None = None
        if text is None:
            return
        tree: _Tree = {}
        for path in text.split(","):
            names = path.strip().split(".")
            _check(model, names)
            branch = tree
            for name in names:
                branch = branch.setdefault(name, {})
            branch[""] = {}
        self._tree = tree

    @property
    def everything(self) -> bool:
        """Whether nothing was named."""
        return self._tree is None

    def __contains__(self, name: str) -> bool:
        return self._tree is None or name in self._tree

    def one(self, answer: BaseModel) -> Any:
        """The answer itself, or the parts of it that are wanted."""
        return answer if self._tree is None else _cut(answer.model_dump(mode="json"), self._tree)

    def page(self, kind: type[BaseModel], items: Sequence[BaseModel], following: str | int | None) -> Any:
        """A page (`items` and `next`) of answers."""
        if self._tree is None:
            return kind.model_construct(items=items, next=following)
        return {"items": [self.one(item) for item in items], "next": following}


def _cut(value: Any, tree: _Tree) -> Any:
    if "" in tree:
        return value
    if isinstance(value, list):
        return [_cut(item, tree) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {name: _cut(inner, tree[name]) for name, inner in value.items() if name in tree}


def _check(model: type[BaseModel], names: list[str]) -> None:
    kind: Any = model
    if len(names) > MAX_DEPTH:
        raise QueryError([FieldProblem("fields", f"at most {MAX_DEPTH} names deep")])
    for depth, name in enumerate(names):
        if not name:
            raise QueryError([FieldProblem("fields", "an empty name; separate names by single commas and dots")])
        if kind is None:
            continue
        if name not in kind.model_fields:
            where = ".".join(names[:depth])
            known = ", ".join(f"{where}.{field}" if where else field for field in kind.model_fields)
            raise QueryError([FieldProblem("fields", f"no such field as {'.'.join(names)[:100]!r}; there are {known}")])
        kind, free = _inner(kind.model_fields[name].annotation)
        if kind is None and not free and depth + 1 < len(names):
            raise QueryError([FieldProblem("fields", f"{'.'.join(names[: depth + 1])!r} has no parts")])


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that stands in a field, if one does, and whether it is a free-form object."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    free = getattr(annotation, "__origin__", None) is dict
    for argument in get_args(annotation):
        model, inner_free = _inner(argument)
        if model is not None:
            return model, False
        free = free or inner_free
    return None, free
