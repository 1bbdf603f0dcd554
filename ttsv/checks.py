"""What arguments must be; each check raises `ConfigError`, naming the argument, its value and what would be right."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeGuard

from ttsv.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


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


def check_seed(seed: object) -> None:
    """A seed that `torch.manual_seed` takes."""
    if not is_whole(seed, least=-(2**63)) or seed >= 2**64:
        raise ConfigError("seed", seed, "must be a whole number from -2**63 to 2**64 - 1")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """One of some names."""
    if value not in choices:
        raise ConfigError(name, value, f"must be one of {', '.join(choices)}")


def check_flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(name, value, "must be True or False")


def check_kernel(kernel: "Tensor", groups: int = 1, name: str = "kernel") -> None:
    """Raises `ConfigError` unless `kernel` can be one of a convolution: `(c_out, c_in / groups, k_1, ..., k_d)`."""
    check_tensor(kernel, name)
    if kernel.ndim not in (3, 4, 5) or 0 in kernel.shape:
        fix = "must be (c_out, c_in / groups, k_1, ..., k_d) with d = 1, 2 or 3 and no empty axis"
        raise ConfigError(f"{name}.shape", tuple(kernel.shape), fix)
    check_values(kernel, name)
    if not is_whole(groups) or kernel.shape[0] % groups:
        raise ConfigError("groups", groups, f"must be at least 1 and divide c_out = {kernel.shape[0]}")


def check_matrix(weight: "Tensor", name: str = "weight") -> None:
    """Raises `ConfigError` unless `weight` is a matrix of values that can be decomposed."""
    check_tensor(weight, name)
    if weight.ndim != 2 or 0 in weight.shape:
        raise ConfigError(f"{name}.shape", tuple(weight.shape), "must be (rows, columns), neither empty")
    check_values(weight, name)


def check_tensor(weight: object, name: str) -> None:
    """Raises `ConfigError` for anything but a dense tensor that holds values."""
    import torch  # here, as much of what is checked concerns no tensor and stays torch-free

    if not isinstance(weight, torch.Tensor):
        raise ConfigError(name, type(weight).__name__, "must be a torch.Tensor")
    if weight.layout != torch.strided:
        raise ConfigError(f"{name}.layout", weight.layout, "must be torch.strided: call to_dense()")
    if weight.is_meta:
        raise ConfigError(f"{name}.device", str(weight.device), "must be one that holds values, such as cpu")


def check_values(weight: "Tensor", name: str) -> None:
    """Raises `ConfigError` unless the tensor is float32 or float64 and finite."""
    import torch

    check_tensor(weight, name)
    if weight.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"{name}.dtype", weight.dtype, "must be torch.float32 or torch.float64")
    finite = weight.detach().isfinite()
    if not finite.all():
        raise ConfigError(name, f"{int((~finite).sum())} of {weight.numel()} values not finite", "must be finite")


def tiles_fit(height: int, width: int) -> bool:
    """Whether AutoAttack's Square Attack can start under L2 and L1: it lays tiles of a fifth of the height.

    There are height // tile by width // tile of them from an offset of half of height % 5, and those that would reach
    past the border do not fit, unless they are of one pixel.
    """
    tile = height // 5
    offset = (height - 5 * tile) // 2
    return tile > 0 and (tile == 1 or all(offset + n // tile * tile <= n for n in (height, width)))
