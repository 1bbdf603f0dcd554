"""Control of all singular values, the small ones too: projection onto {floor <= sigma <= delta}."""

import torch
from torch import Tensor

from ttsv.checks import check_count, check_matrix, check_number, check_positive
from ttsv.errors import ConfigError
from ttsv.runtime.precision import full_precision
from ttsv.spectral.symbol import PeriodicConv, Size


def clamp_conv(
    kernel: Tensor,
    floor: float,
    delta: float,
    input_size: Size,
    *,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
    rounds: int = 1,
) -> Tensor:
    """Returns a new kernel whose periodic convolution has singular values from `floor` to `delta`, as its taps allow.

    `kernel (c_out, c_in / groups, k_1, ..., k_d)` and sizes as for `ttsv.spectral.clip_conv`. One round raises
    each singular value below the floor to it, lowers each above delta to it (the nearest operator with such values, by
    singular value decompositions of all blocks) and goes back to the kernel's own taps; `rounds` alternate. What counts
    are the `min(c_out, prod(s_i) c_in)` values per frequency.

    Truncation to the taps moves values back across both limits, and the operators between them are no convex set:
    nothing is guaranteed, so measure. What was left for floor 0.5 and delta 1 with Gaussian weights of variance
    `1 / (9 c_in)`, c_in = 16, 3 x 3 taps, 16 x 16 pixels, smallest and largest value before and after 1, 10 and 100
    rounds: c_out = 32, (0.37, 2.38), (0.31, 1.29), (0.44, 1.03), (0.498, 1.001); c_out = 20, (0.08, 2.06),
    (0.06, 1.28), (0.38, 1.06), (0.497, 1.005); c_out = 16, (0.002, 1.97), (0.007, 1.30), (0.07, 1.07),
    (0.16, 1.06). Square blocks are the hard case: over a plane of frequencies the zeros of a complex determinant are
    points that only vanish in pairs. Rescaling to delta lowers the smallest value by the same factor.

    The result has the kernel's shape, dtype and device and no gradient history. Raises `ConfigError`.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    return clamp_kernel(kernel, geometry, floor, delta, rounds)


@full_precision()
def clamp_kernel(kernel: Tensor, geometry: PeriodicConv, floor: float, delta: float, rounds: int) -> Tensor:
    """Returns what `clamp_conv` does, for a kernel of this geometry (`PeriodicConv.of`)."""
    check_limits(floor, delta)
    check_count("rounds", rounds)
    kernel = kernel.detach().clone()
    frequencies = geometry.frequencies(kernel.device)
    order = torch.arange(len(frequencies.index), device=kernel.device)
    for _ in range(rounds):
        change = torch.zeros_like(kernel)
        for part in geometry.batches(kernel, order):
            index = frequencies.index[part]
            blocks = clamping_change(geometry.symbol(kernel, index), floor, delta)
            change += geometry.taps(blocks, index, frequencies.count[part])
        kernel = kernel + change
    return kernel


@full_precision()
def clamp_matrix(weight: Tensor, floor: float, delta: float) -> Tensor:
    """Returns the nearest matrix (Frobenius norm) to `weight (rows, columns)` with values from `floor` to `delta`."""
    check_matrix(weight)
    check_limits(floor, delta)
    left, values, right = torch.linalg.svd(weight.detach(), full_matrices=False)
    clamped = values.clamp(float(floor), float(delta))
    if torch.equal(clamped, values):
        return weight.detach().clone()
    # Not a change that is added: where delta is far below the norm, the sum would keep few of its digits.
    nearest: Tensor = (left * clamped) @ right
    return nearest


def check_limits(floor: float, delta: float) -> None:
    """Raises `ConfigError` unless `0 <= floor <= delta`, delta finite and above 0."""
    check_positive("delta", delta)
    check_number("floor", floor, f"must be a number from 0 to delta = {delta}")
    if not 0 <= floor <= delta:
        raise ConfigError("floor", floor, f"must be at least 0 and at most delta = {delta}")


def clamping_change(blocks: Tensor, floor: float, delta: float) -> Tensor:
    """What is to be added to each block (..., rows, columns) for singular values from `floor` to `delta`."""
    left, values, right = torch.linalg.svd(blocks, full_matrices=False)
    change: Tensor = (left * (values.clamp(floor, delta) - values).unsqueeze(-2)) @ right
    return change
