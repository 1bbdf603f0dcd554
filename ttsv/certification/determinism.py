"""Random numbers that a network draws.

A network that does is no function of its input, and has no Lipschitz constant. Its draws are seen below torch's
functions, where operators run; tensors without data that get there can be seen as well.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its subclassing untyped
    """Calls `drawn` with the name of every operator of torch that draws random numbers, whatever its generator.

    And `shapes`, if given, with that of every operator that takes a tensor without data.
    """

    def __init__(self, drawn: Callable[[str], None], shapes: Callable[[str], None] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch leaves it
        self.drawn, self.shapes = drawn, shapes

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = f"{operator.overloadpacket.__name__}()"
        if torch.Tag.nondeterministic_seeded in operator.tags:
            self.drawn(name)
        if self.shapes is not None and _without_data((args, kwargs)):
            self.shapes(name)
        return operator(*args, **(kwargs or {}))


@contextmanager
def watched_for_random_numbers(
    drawn: Callable[[str], None], shapes: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Inside, `drawn` is called with a name for whatever draws random numbers: at once for torch's operators.

    At the end for Python's and numpy's global ones; a generator object of theirs is not seen. `shapes` likewise, at
    once, for operators that take a tensor of torch's meta device.
    """
    python, legacy = random.getstate(), _numpy_state()
    with _Watch(drawn, shapes):
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


def _without_data(arguments: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(arguments))


def _numpy_state() -> tuple[bytes, int]:
    _, keys, place, *_ = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes(), int(place)
