"""What arguments must be; each check raises `ConfigError`, naming the argument, its value and what would be right."""

import math
from numbers import Integral, Real
from typing import TypeGuard

from ttsv.errors import ConfigError


def is_whole(value: object, *, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number, also one of numpy's, of at least `least`; truth values are none."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """A whole number, also one of numpy's, of at least `least`; truth values are none."""
    if not is_whole(value, least=least):
        raise ConfigError(name, value, f"must be at least {least} and a whole number")


def check_counts(**values: object) -> None:
    """Whole numbers of at least 1, by name."""
    for name, value in values.items():
        check_count(name, value)


def check_number(name: str, value: object, fix: str) -> None:
    """A real number, which others could not be compared with; the range is not looked at."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(name, value, fix)


def check_positive(name: str, value: float, fix: str = "must be a finite number above 0") -> None:
    """A finite number above 0."""
    check_number(name, value, fix)
    if not 0 < value < math.inf:
        raise ConfigError(name, value, fix)


def check_flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(name, value, "must be True or False")
