"""The fields that tell configurations apart: columns of a table of trials or cells, and what all of its rows share."""

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any

from service.errors import FieldProblem, QueryError
from ttsv.config.fields import FieldValue, FieldValues, Json, TrialFields
from ttsv.config.trial import field_infos
from ttsv.metrics.catalog import METRICS

_ALWAYS_SAID = ("model", "layer")
"""Fields that are worth saying whatever their value is."""
_ASKED_FIRST = {
    path: rank
    for rank, path in enumerate(
        ("seed", "dataset", "model", "layer", "rank", "lambda_ort", "constraint", "delta", "training.lr")
    )
}
"""Fields by which people know a trial: the last to be left out of a table."""
_OTHERWISE = {
    "architecture": "model",
    "batch": "training.batch_size",
    "clip": "delta",
    "depth": "model",
    "lambda": "lambda_ort",
    "learning_rate": "lr",
    "network": "model",
    "penalty": "lambda_ort",
    "scheduler": "schedule",
    "sigma": "delta",
    "threshold": "delta",
    "wd": "weight_decay",
    "width": "model",
}
"""What other programs call a field, or where it has a part of its meaning: names that no spelling leads to."""
_CHANCE = 0.2
"""A field is said to decide another where that would hold by chance no more often."""


@dataclass(frozen=True)
class FieldColumn:
    """A field of a trial as a column: its dotted path, and the shortest name that no other field has."""

    field: str
    name: str


@dataclass(frozen=True)
class Columns:
    """The fields in which configurations differ, in the order of a trial's, and by path what all of them share.

    `decided` differ too, but follow from one of the fields: who knows these knows them.
    """

    fields: list[FieldColumn]
    common: FieldValues
    decided: list[FieldColumn] = field(default_factory=list)

    def of(self, config: TrialFields) -> FieldValues:
        """A configuration's values in all fields that differ, by path."""
        return {column.field: value_of(config, column.field) for column in (*self.fields, *self.decided)}

    def first(self, count: int) -> "tuple[Columns, list[FieldColumn]]":
        """The same with no more fields than so many, those that people ask for first, and the others."""
        by_rank = sorted(self.fields, key=lambda one: _ASKED_FIRST.get(one.field, len(_ASKED_FIRST)))
        kept = set(by_rank[:count])
        others = [one for one in self.fields if one not in kept]
        return replace(self, fields=[one for one in self.fields if one in kept]), others

    @property
    def notable_paths(self) -> list[str]:
        """What is shared, by path, without what is as everywhere: fields at their defaults."""
        return [
            path
            for path, value in self.common.items()
            if path in _ALWAYS_SAID or (path not in ("dataset", "seed") and value != default_of(path))
        ]

    @property
    def notable(self) -> FieldValues:
        """The same by short name, with the values."""
        return {short_name(path): self.common[path] for path in self.notable_paths}


def columns_of(
    configs: Sequence[TrialFields],
    *,
    chosen: Sequence[str] = (),
    hidden: Sequence[str] = (),
    without_decided: bool = False,
) -> Columns:
    """The columns of a table of such configurations: `chosen` fields or, without any, those that differ.

    `hidden` fields are neither columns nor shared. A field that an older configuration lacks is at its default.
    `without_decided`: fields that another one decides are columns where they are chosen, and else only named.
    """
    differing, common = _compared(configs)
    fields = [path for path in chosen or differing if path not in hidden]
    decided = _decided({path: differing[path] for path in fields}) if without_decided and not chosen else set()
    shared = {path: value for path, value in common.items() if path not in hidden and path not in fields}
    columns = [FieldColumn(path, short_name(path)) for path in fields]
    return Columns(
        [one for one in columns if one.field not in decided], shared, [one for one in columns if one.field in decided]
    )


def value_of(config: TrialFields, path: str) -> FieldValue:
    """The field at a dotted path, lists for tuples; its default where the configuration lacks it."""
    found: Any = config
    for part in path.split("."):
        # (Whether something is a `Mapping` takes long to ask: a board has thousands of values.)
        if not (type(found) is dict or isinstance(found, Mapping)) or part not in found:
            return default_of(path)
        found = found[part]
    return list(found) if type(found) is tuple else found


def validates_on_test(config: TrialFields) -> bool:
    """Whether what a trial says of each epoch is of test images: nobody may choose by it."""
    return value_of(config, "training.validation") == "test"


def both(known: str | None, images: str) -> str:
    """What is said of trials that validate on some images beside others: where these are not the same, "both"."""
    return images if known in (None, images) else "both"


def validated_on(configs: Iterable[TrialFields]) -> str | None:
    """On which images trials validate: as `training.validation`, or "both"; None of none."""
    found: str | None = None
    for config in configs:
        found = both(found, str(value_of(config, "training.validation")))
    return found


def told(config: TrialFields) -> FieldValues:
    """The fields of a cell that are not at their defaults, by path: all that is needed to know the others."""
    found: dict[str, FieldValue] = {}
    for name, part in config.items():
        usual = _at_defaults().get(name)
        if part == usual and name not in _ALWAYS_SAID:
            continue  # as most parts are
        inner = {f"{name}.{last}": value for last, value in part.items()} if isinstance(part, Mapping) else {name: part}
        for path, value in inner.items():
            plain = list(value) if type(value) is tuple else value
            if plain != default_of(path) or path in _ALWAYS_SAID:
                found[path] = plain
    return {path: value for path, value in found.items() if path not in ("seed", "dataset")}


def flat(record: Mapping[str, Json], path: str = "") -> list[tuple[str, Json]]:
    """A nested record as dotted paths with their values, in its order."""
    found: list[tuple[str, Json]] = []
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{path}{name}.")
        else:
            found.append((f"{path}{name}", value))
    return found


@cache
def short_name(path: str) -> str:
    """`lr` for `training.lr`; the whole path where several fields end alike (`clipping.every`)."""
    last = path.rpartition(".")[2]
    return last if last in _last_parts() and _last_parts()[last] == path else path


def known_field(name: str, where: str, *, also: Iterable[str] = ()) -> str:
    """The path of the field with a short or whole name.

    Raises `QueryError`, said of `where`, with the nearest name, or what can be done with a metric. `also` are names
    that are understood there, too.
    """
    infos = field_infos()
    if name in infos:
        return name
    if name in _last_parts():
        return _last_parts()[name]
    if name in METRICS:
        raise QueryError([FieldProblem(where, f"{name} is a metric, not a field of a trial: {_of_metric(name)}")])
    if several := _ending_in(name):
        raise QueryError([FieldProblem(where, f"{name} may be {' or '.join(several)}: write which")])
    names = [*infos, *_last_parts(), *METRICS, *also]
    called = _OTHERWISE.get(name.rpartition(".")[2].lower())
    near = called or next(
        iter(difflib.get_close_matches(name, names, 1, 0.5) or difflib.get_close_matches(name.lower(), names, 1, 0.0))
    )
    said = f"there is no field {name[:100]!r}; the nearest is {near}"
    if near in METRICS and near not in also:
        said += f", a metric: {_of_metric(near)}"
    raise QueryError([FieldProblem(where, said)])


def _of_metric(name: str) -> str:
    """What can be asked of a metric, where a field was to be named."""
    return f"rank a leaderboard by it (metric={name}), show it (metrics={name}), or sort trials by it (sort=-{name})"


def nearest_said(name: str, here: Mapping[str, str] = MappingProxyType({})) -> str:
    """Which field a name that is none may mean, by path: one that is spelt like it, or called so elsewhere.

    `here` are the names that are understood where it stands, with what each is as a whole: of names that are spelt like
    it these come first.
    """
    last = name.rpartition(".")[2].lower()
    last = _OTHERWISE.get(last, last)
    near = [last] if last in field_infos() else _ending_in(last)
    for names in (here, {**_last_parts(), **{path: path for path in field_infos()}}):
        near = near or [names[one] for one in difflib.get_close_matches(last, names, 1, 0.7)]
    return f"the nearest is {' or '.join(near)}; " if near else ""


def known_fields(names: Iterable[str], where: str) -> tuple[str, ...]:
    """The paths of several fields, each once. Raises `QueryError`."""
    return tuple(dict.fromkeys(known_field(name, where) for name in names))


def cell_field(name: str, where: str) -> str:
    """The path of a field that the trials of a cell share. Raises `QueryError`."""
    field = known_field(name, where)
    if field in ("seed", "dataset"):
        why = "rows are means over seeds" if field == "seed" else "a leaderboard is of one"
        raise QueryError([FieldProblem(where, f"{field} tells no rows apart: {why}")])
    return field


def _ending_in(last: str) -> list[str]:
    """The paths of all fields whose last part is so called."""
    return [path for path in field_infos() if path.rpartition(".")[2] == last]


@cache
def _last_parts() -> dict[str, str]:
    """Short name -> path: of the last parts of paths those that one field has, or that are a field themselves."""
    infos = field_infos()
    counts = Counter(path.rpartition(".")[2] for path in infos)
    return {last: path for path in infos if counts[last := path.rpartition(".")[2]] == 1 or last == path}


def _compared(configs: Sequence[TrialFields]) -> tuple[dict[str, Sequence[Any]], FieldValues]:
    """By path the values of fields in which configurations differ, and what they share."""
    differing: dict[str, Sequence[Any]] = {}
    common: dict[str, FieldValue] = {}
    for name, parts in _turned(configs):
        if _alike(parts):
            parts = parts[:1]
        for path, values in _columns(name, parts):
            # (Where all are alike, as in most columns, one is looked at, not each.)
            listed = values[:1] if _alike(values) else values
            if tuple in map(type, listed):
                listed = [list(one) if type(one) is tuple else one for one in listed]
            if _alike(listed):
                common[path] = listed[0]
            else:
                differing[path] = listed
    return {path: differing[path] for path in in_order(differing)}, {path: common[path] for path in in_order(common)}


def _decided(differing: Mapping[str, Sequence[Any]]) -> set[str]:
    """The fields whose values follow in every row from those of one field that is kept.

    That is no coincidence: where each row has a learning rate of its own, this decides nothing. The fields that people
    ask for are the last to go, and only for one another; of the others those with fewer values are the first. As each
    follows from one that was kept when it went, what is kept at the end tells apart all rows that differ.
    """
    paths = [path for path in differing if path != "seed"]
    if len(paths) < 2:
        return set()
    # Of trials that differ in their seeds alone one tells as much as all.
    cells = set(zip(*(_numbered(differing[path]) for path in paths), strict=True))
    columns = dict(zip(paths, zip(*cells, strict=True), strict=True))
    counts = {path: Counter(values) for path, values in columns.items()}
    rank = {path: _ASKED_FIRST.get(path, -1) for path in paths}
    decided: set[str] = set()
    late_first = paths[::-1]
    for path in sorted(late_first, key=lambda path: (rank[path] >= 0, len(counts[path]), -rank[path])):
        # How often two rows have the same value, whatever another field says.
        alike = sum(count * count for count in counts[path].values()) / len(cells) ** 2
        for other in paths:
            repeated = len(cells) - len(counts[other])
            if other == path or other in decided or alike**repeated > _CHANCE:
                continue
            if rank[path] >= 0 > rank[other]:
                continue  # nobody looks for the model among the epochs
            if _follows(columns[path], columns[other]):
                decided.add(path)
                break
    return decided


def _follows(values: Sequence[int], others: Sequence[int]) -> bool:
    """Whether equal ones of the others have equal values."""
    seen: dict[int, int] = {}
    return all(seen.setdefault(other, value) == value for value, other in zip(values, others, strict=True))


def _numbered(values: Sequence[Any]) -> list[int]:
    """A number for each value, equal ones' the same."""
    keys = [json.dumps(one) if type(one) in (list, dict) else one for one in values]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _alike(values: Sequence[Any]) -> bool:
    """Whether all are equal. (A list counts several times as fast as a loop compares: there are some ten thousand.)"""
    return values.count(values[0]) == len(values)


def _turned(configs: Sequence[TrialFields]) -> Iterable[tuple[str, Sequence[Any]]]:
    """By name what mappings have by it, None where they lack it."""
    if configs and _alike(list(map(list, configs))):
        # As it is but for older configurations: turned over in one step.
        return zip(configs[0], zip(*[config.values() for config in configs], strict=True), strict=True)
    names = dict.fromkeys(chain.from_iterable(configs))
    return [(name, [config.get(name) for config in configs]) for name in names]


def _columns(name: str, parts: Sequence[Any]) -> list[tuple[str, Sequence[Any]]]:
    """The paths of a part that configurations have by this name, and of each path all values."""
    if set(map(type, parts)) == {dict} and _alike(list(map(list, parts))):
        return [(f"{name}.{inner}", values) for inner, values in _turned(parts)]
    return [(path, _within(parts, path.partition(".")[2], default_of(path))) for path in _paths(name, parts)]


def _within(parts: Iterable[Any], inner: str, default: Any) -> list[Any]:
    """Of each part that is a value by itself that, of each that has several fields the one that is meant."""
    if inner:
        return [part.get(inner, default) if type(part) is dict else default for part in parts]
    return [default if part is None else part for part in parts]


def _paths(name: str, parts: Sequence[Any]) -> Iterator[str]:
    """The paths of a part that configurations have by this name: its own fields, if it has any."""
    nested = [part for part in parts if isinstance(part, Mapping)]
    if not nested:
        yield name
    for inner in dict.fromkeys(chain.from_iterable(nested)):
        yield f"{name}.{inner}"


def in_order(paths: Iterable[str]) -> list[str]:
    """Paths in the order of a trial's fields; what is none of them comes last."""
    order = _places()
    return sorted(paths, key=lambda path: order.get(path, len(order)))


@cache
def _places() -> dict[str, int]:
    return {path: index for index, path in enumerate(field_infos())}


@cache
def _defaults() -> FieldValues:
    found = {path: info.default for path, info in field_infos().items() if info.default is not MISSING}
    return {path: list(value) if isinstance(value, tuple) else value for path, value in found.items()}


@cache
def _at_defaults() -> dict[str, Json]:
    """The parts of a configuration that has every field at its default, as a trial keeps them."""
    found: dict[str, Any] = {}
    for path, value in _defaults().items():
        part, _, name = path.rpartition(".")
        (found.setdefault(part, {}) if part else found)[name] = value
    return found


def default_of(path: str) -> FieldValue:
    """A field's default, lists for tuples; None where it has none."""
    return _defaults().get(path)
