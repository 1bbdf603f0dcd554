"""Values of configurations and records as text for people: as few digits as leave different ones different."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from itertools import islice
from typing import Any

_SIGNIFICANT = 6
"""Digits that are printed as they are. A number with more was drawn, not typed: of all such ones in a column so few are
printed, `_FEWEST` at least, that none looks as another does, and no fraction as a whole number: 0.9999999 is not 1."""
_FEWEST = 3
_MOST_SIGNIFICANT = 17
"""Digits that tell any two numbers apart."""
_MOST_SHARED = 4
"""Decimals that all numbers of a column share. Where one needs more, each has its own: 0.1 is not 0.1000000; so it is
where that would add digits that nobody reads: 100000 is not 100000.0000 as 0.0001 stands below it."""
_MOST_DECIMALS = 8
"""More of them are written with an exponent, as are numbers with more digits than `_MOST_DIGITS`."""
_MOST_DIGITS = 15


def number_texts(values: Sequence[float]) -> list[str]:
    """Numbers as one column prints them: all with the same few decimals, or each as short as it is."""
    rounded = _told_apart(values)
    decimals = max((_decimals(value) for value in rounded), default=0)
    if decimals <= _MOST_SHARED and all(abs(value) < 10 ** (_SIGNIFICANT - decimals) for value in rounded):
        return [f"{value:.{decimals}f}" for value in rounded]
    return [_shortest(value) for value in rounded]


def _told_apart(values: Sequence[float]) -> list[float]:
    """Numbers with as few digits as tell them apart; those that somebody typed are as they were."""
    exact = [float(value) for value in values]
    if any(abs(value) >= 10**_SIGNIFICANT for value in exact):
        return exact
    typed = [float(f"{value:.{_SIGNIFICANT}g}") == value for value in exact]
    for digits in range(_FEWEST, _SIGNIFICANT + 1):
        rounded = [value if kept else float(f"{value:.{digits}g}") for value, kept in zip(exact, typed, strict=True)]
        whole = any(seen.is_integer() and not value.is_integer() for seen, value in zip(rounded, exact, strict=True))
        if len(set(rounded)) == len(set(exact)) and not whole:
            return rounded
    return exact


def _shortest(value: float) -> str:
    decimals = _decimals(value)
    if decimals <= _MOST_DECIMALS and abs(value) < 10**_MOST_DIGITS:
        return f"{value:.{decimals}f}"
    digits = len(Decimal(repr(value)).normalize().as_tuple().digits)
    return f"{value:.{digits - 1}e}"


def column_texts(values: Sequence[Any]) -> list[str]:
    """Values of a configuration as one column prints them: different ones never alike."""
    groups: dict[type, dict[int, Any]] = {}
    for index, value in enumerate(values):
        # Of a rank whole numbers are channels and fractions a share of them: neither has the other's digits.
        kind = type(value) if type(value) in (int, float) else list if _of_numbers(value) else str
        groups.setdefault(kind, {})[index] = value
    texts = {index: _plain(value) for index, value in groups.pop(str, {}).items()}
    for kind, mine in groups.items():
        say = _list_texts if kind is list else number_texts
        texts |= dict(zip(mine, say(list(mine.values())), strict=True))
    return [texts[index] for index in range(len(values))]


def value_text(value: Any) -> str:
    """One value of a configuration, by itself."""
    (text,) = column_texts([value])
    return text


def exact_text(value: Any) -> str:
    """One value of a configuration with all of its digits, as a name that no other value has."""
    if type(value) in (int, float):
        return _shortest(float(value))
    return json.dumps(value) if _of_numbers(value) else value_text(value)


def with_all_digits(value: Any, shown: str) -> str | None:
    """What a value is with all of its digits, where it is shown with fewer."""
    text = exact_text(value)
    return text if len(text) > len(shown) else None


def _decimals(value: float) -> int:
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


_WHOLE = 5
"""So long lists are shown whole; of longer ones two numbers, the last, and what else tells them from others."""


def _of_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(one) in (int, float) for one in value)


_List = tuple[float, ...]


def _list_texts(lists: Sequence[Sequence[float]]) -> list[str]:
    """Lists of numbers with few digits, long ones cut: more of both where different lists would look alike."""
    written = _written(dict.fromkeys(map(tuple, lists)))
    shown = {one: {0, 1, len(one) - 1} if len(one) > _WHOLE else set(range(len(one))) for one in written}
    texts = {one: _cut(numbers, shown[one]) for one, numbers in written.items()}
    more = 1
    while groups := _alike(texts):
        for group in groups:
            seen = set(islice((place for place in _differing(group) if place not in shown[group[0]]), more))
            for one in group:
                shown[one] = shown[one] | seen
                texts[one] = _cut(written[one], shown[one])
        more *= 2  # few rounds, however many lists there are
    return [texts[tuple(one)] for one in lists]


def _written(lists: Iterable[_List]) -> dict[_List, tuple[str, ...]]:
    """Of each list its numbers, those that alone tell it from another with as many digits as that takes."""
    written = {one: tuple(_rounded(number, _FEWEST) for number in one) for one in lists}
    digits = _FEWEST
    while groups := _alike(written):
        digits += 1
        for group in groups:
            places = set(_differing(group))
            for one in group:
                numbers = enumerate(zip(one, written[one], strict=True))
                written[one] = tuple(_rounded(number, digits) if at in places else old for at, (number, old) in numbers)
    return written


def _alike(texts: Mapping[_List, str | tuple[str, ...]]) -> list[list[_List]]:
    """The lists that look like another."""
    groups: dict[str | tuple[str, ...], list[_List]] = {}
    for one, text in texts.items():
        groups.setdefault(text, []).append(one)
    return [group for group in groups.values() if len(group) > 1]


def _differing(lists: Sequence[_List]) -> Iterator[int]:
    """The places at which lists of one length differ."""
    return (place for place, numbers in enumerate(zip(*lists, strict=True)) if len(set(numbers)) > 1)


def _cut(numbers: Sequence[str], shown: Set[int]) -> str:
    parts: list[str] = []
    for place, number in enumerate(numbers):
        if place in shown:
            parts.append(number)
        elif parts[-1] != "…":
            parts.append("…")
    return f"[{', '.join(parts)}]" + (f" ({len(numbers)})" if "…" in parts else "")


def _rounded(number: float, digits: int) -> str:
    """A number of a list: one that was drawn with so many digits, or more where it would be taken for a whole one."""
    if type(number) is int:
        return str(number)
    if abs(number) < 10**_SIGNIFICANT and float(f"{number:.{_SIGNIFICANT}g}") != number:
        for more in range(digits, _MOST_SIGNIFICANT):
            if not (rounded := float(f"{number:.{more}g}")).is_integer():
                return _shortest(rounded)
    return _shortest(number)


def _plain(cell: Any) -> str:
    if isinstance(cell, dict):
        return in_words(cell)
    return "-" if cell is None else cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def in_words(value: Any, digits: int = _SIGNIFICANT) -> str:
    """A value of a record in words: `pgd (eps 0.03, steps 10)`, its fractions with so many digits at most."""
    if isinstance(value, Mapping):
        parts = (
            f"{name} ({in_words(one, digits)})" if isinstance(one, Mapping) else f"{name} {in_words(one, digits)}"
            for name, one in value.items()
        )
        return ", ".join(parts) or "none"
    if value is None or isinstance(value, float):
        return "none" if value is None else f"{value:.{digits}g}"
    if _of_numbers(value):
        return value_text(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_words_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two values that differ in words, with as many digits as tell them apart."""
    if _of_numbers(one) and _of_numbers(other):
        first, second = column_texts([one, other])
        return first, second
    for digits in range(_SIGNIFICANT, _MOST_SIGNIFICANT):
        said = in_words(one, digits), in_words(other, digits)
        if said[0] != said[1]:
            return said
    return json.dumps(one, ensure_ascii=False), json.dumps(other, ensure_ascii=False)
