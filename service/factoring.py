"""A list of trial configurations as one `base` and what each trial lays over it: pure functions."""

from collections.abc import Sequence
from typing import Any


def factored(configs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(base, trials): the fields that all configurations share, and the others of each. Objects are shared by part."""
    base: dict[str, Any] = {}
    trials: list[dict[str, Any]] = [{} for _ in configs]
    for name in configs[0]:
        values = [config[name] for config in configs]
        if all(isinstance(value, dict) for value in values):
            shared, rests = factored(values)
            if shared:
                base[name] = shared
            for trial, rest in zip(trials, rests, strict=True):
                if rest:
                    trial[name] = rest
        elif all(value == values[0] and type(value) is type(values[0]) for value in values):
            base[name] = values[0]
        else:
            for trial, value in zip(trials, values, strict=True):
                trial[name] = value
    return base, trials
