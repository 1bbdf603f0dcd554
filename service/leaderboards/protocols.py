"""What sets two protocols apart, field by field."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from service.leaderboards.value_texts import in_words_apart
from ttsv.config.fields import Json

Record: TypeAlias = Mapping[str, Json]
"""How something was measured, part by part: a protocol as it is stored. A configuration is compared as one, too."""

_DATA = ("dataset", "split", "images", "preprocessing", "corruptions")
"""Parts of a protocol that follow from the data set."""


@dataclass(frozen=True)
class Difference:
    """One field (a dotted path) of two records; null: the record has no such field."""

    field: str
    here: Json
    there: Json

    @property
    def said(self) -> tuple[str, str]:
        """Both values in words."""
        return in_words_apart(self.here, self.there)

    def __str__(self) -> str:
        here, there = self.said
        return f"{self.field}: {here} here, {there} there"


def differences(here: Record, there: Record) -> list[Difference]:
    """The fields in which two records differ, in the order in which the records name them."""
    return list(_walk(here, there, ""))


def measured_otherwise(records: Mapping[str, Record]) -> list[str]:
    """In words: in what the protocols of several data sets (data set -> record) differ from the first's, data aside."""
    first, *rest = records or {"": {}}
    return [
        f"{dataset} was not measured as {first}: {difference}"
        for dataset in rest
        for difference in differences(records[dataset], records[first])
        if not difference.field.startswith(_DATA)
    ]


def _walk(here: Record, there: Record, path: str) -> Iterator[Difference]:
    for name in dict.fromkeys([*here, *there]):
        a, b = here.get(name), there.get(name)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _walk(a, b, f"{path}{name}.")
        else:
            yield Difference(f"{path}{name}", a, b)
