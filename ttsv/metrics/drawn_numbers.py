"""Random numbers that a network draws: one that does is no function of its input, and has no Lipschitz constant."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its subclassing untyped
    """Calls `drawn` with the name of every operator of torch that draws random numbers, whatever its generator."""

    def __init__(self, drawn: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = drawn

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in operator.tags:
            self.drawn(f"{operator.overloadpacket.__name__}()")
        return operator(*args, **(kwargs or {}))


@contextmanager
def watched_for_random_numbers(drawn: Callable[[str], None]) -> Iterator[None]:
    """Inside, `drawn` is called with a name for whatever draws random numbers: at once for torch's operators.

    At the end for Python's and numpy's global ones; a generator object of theirs is not seen.
    """
    python, legacy = random.getstate(), _numpy_state()
    with _Watch(drawn):
        yield
    if random.getstate() != python:
        drawn("Python's random")
    if _numpy_state() != legacy:
        drawn("numpy.random")


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, numbers may be drawn: by a rule, such as the start of an iteration, and not by the network."""
    with _disable_current_modes():
        yield


def _numpy_state() -> tuple[bytes, int]:
    _, keys, place, *_ = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes(), int(place)
