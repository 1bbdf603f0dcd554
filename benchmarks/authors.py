"""The paper's public code (WhiteTeaDragon/practical_svd_conv) beside ours: loaded from a checkout, nothing copied.

Its clip and its singular values import packages (wandb, torchsummary, einops) that they do not call on the shapes of
the benchmarks; stand-ins take their place where they are not installed.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@contextmanager
def checkout(folder: Path) -> Iterator[None]:
    """Inside, their package `src` can be imported. Raises `SystemExit` for a folder that is no checkout."""
    if not (folder / "src" / "utils.py").is_file():
        raise SystemExit(f"--authors {folder}: has no src/utils.py; give a checkout of practical_svd_conv")
    for name in ("wandb", "torchsummary", "einops"):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            stand_in = ModuleType(name)
            stand_in.rearrange = None  # type: ignore[attr-defined]
            sys.modules[name] = stand_in
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


class Authors:
    """Clip and singular values of a kernel `(c_out, c_in, k, k)` by the authors' functions, layout changes untimed."""

    def __init__(self, folder: Path) -> None:
        with checkout(folder):
            self._utils: Any = importlib.import_module("src.utils")

    def clip(self, kernel: Tensor, delta: float, size: int, stride: int) -> Callable[[], Tensor]:
        """Their clip as `constrain_conv` calls it, ready to be timed; its result has their layout (k, k, in, out)."""
        theirs = kernel.permute(2, 3, 1, 0).contiguous()
        return lambda: self._utils.Clip_AssignOperatorNorm(theirs, (size, size), delta, (stride, stride))

    def singular_values(self, kernel: Tensor, size: int, stride: int) -> Callable[[], Tensor]:
        """All singular values by their preparation and `svdvals`, as in their exact division."""
        theirs = kernel.permute(2, 3, 1, 0).contiguous()

        def values() -> Tensor:
            found: Tensor = torch.linalg.svdvals(self._utils.get_ready_for_svd(theirs, (size, size), (stride,) * 2)[-1])
            return found

        return values

    @staticmethod
    def as_ours(kernel: Tensor) -> Tensor:
        """Their layout (k, k, c_in, c_out) as ours (c_out, c_in, k, k)."""
        return kernel.permute(3, 2, 0, 1)
