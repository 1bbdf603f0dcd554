"""The registry of networks: families of names, each with its convolutions as plain data. Torch-free."""

import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ttsv.errors import ConfigError
from ttsv.models.conv_shape import ConvShape

ShapeList = Callable[..., list[ConvShape]]
"""Of `in_channels`, `image_size`, what stands in the name, and the family's own options."""

Numbers: TypeAlias = dict[str, int | str]
"""What stands in a name, such as the depth, by its group of the expression."""


@dataclass(frozen=True)
class Family:
    """Networks that differ in the numbers of their name.

    `pattern`: how the name is written, as people read it, with braces around what may be more than `names`, the
    well-known ones, have.
    """

    pattern: str
    names: tuple[str, ...]
    expression: re.Pattern[str]
    where: Callable[..., bool]
    shapes: ShapeList

    def parse(self, name: str) -> Numbers | None:
        """What stands in a name, or None where it is none of this family's."""
        match = self.expression.fullmatch(name)
        if match is None:
            return None
        found: Numbers = {key: int(text) if text.isdecimal() else text for key, text in match.groupdict().items()}
        return found if self.where(**found) else None

    @property
    def options(self) -> tuple[str, ...]:
        """What `layer_shapes` takes for these networks, the name's numbers aside."""
        return tuple(key for key in inspect.signature(self.shapes).parameters if key not in self.expression.groupindex)


_FAMILIES: dict[str, Family] = {}


def network(
    pattern: str,
    *,
    names: tuple[str, ...] | None = None,
    expression: str | None = None,
    where: Callable[..., bool] = lambda **_: True,
) -> Callable[[ShapeList], ShapeList]:
    """Registers a function of `in_channels`, `image_size` and options as the networks of a pattern.

    `expression`: the regular expression of the whole name (default: the pattern itself, one network), whose named
    groups are passed on, numbers as ints; it bounds their digits, as every check of a name lists its layers. `where`
    says which of them there are; `names` the well-known ones.
    """

    def register(function: ShapeList) -> ShapeList:
        if pattern in _FAMILIES:
            raise ValueError(f"network {pattern!r} is registered twice")
        compiled = re.compile(re.escape(pattern) if expression is None else expression)
        listed = (pattern,) if names is None else names
        _FAMILIES[pattern] = Family(pattern, listed, compiled, where, function)
        name_fix.cache_clear()
        return function

    return register


def families() -> tuple[Family, ...]:
    """Every family, in the order of registration."""
    return tuple(_FAMILIES.values())


@lru_cache  # each of ten thousand trials of a grid asks it of one of few names
def name_fix(name: str) -> str | None:
    """What would be right for a name that no network has, or None for one that a network has."""
    if any(family.parse(name) is not None for family in families()):
        return None
    names = ", ".join(name for family in families() for name in family.names)
    patterns = [family.pattern for family in families() if "{" in family.pattern]
    return f"must be one of {names}, or like {', '.join(patterns)}"


def name_patterns() -> tuple[str, ...]:
    """Regular expressions (without named groups): a name that is not well known matches one of them, in whole."""
    return tuple(re.sub(r"\?P<\w+>", "", family.expression.pattern) for family in families() if "{" in family.pattern)


@lru_cache
def has_torchvision() -> bool:
    """Whether torchvision, which knows its own networks, is installed: where only the API runs it need not be."""
    return importlib.util.find_spec("torchvision") is not None


def find(name: str) -> tuple[Family, Numbers]:
    """The family of a network, and what stands in its name. Raises `ConfigError` for an unknown name."""
    for family in families() if isinstance(name, str) else ():
        found = family.parse(name)
        if found is not None:
            return family, found
    raise ConfigError("model", name, str(name_fix(str(name))))
