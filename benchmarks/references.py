"""Clips and singular values in float64, independent of the library: what errors are measured against."""

import torch
from torch import Tensor


def polyphase(kernel: Tensor, size: int, stride: int) -> Tensor:
    """Half the symbol (n/s, n/(2s) + 1, c_out, s^2 c_in) by FFT in the kernel's dtype, independent of the library's."""
    c_out, c_in, k, _ = kernel.shape
    image = kernel.new_zeros(c_out, c_in, size, size)
    image[..., :k, :k] = kernel
    grid = size // stride
    components = image.reshape(c_out, c_in, grid, stride, grid, stride).permute(0, 3, 5, 1, 2, 4)
    blocks: Tensor = torch.fft.rfft2(components.reshape(c_out, -1, grid, grid)).permute(2, 3, 0, 1)
    return blocks


def reference_clip(kernel: Tensor, delta: float, size: int, stride: int) -> Tensor:
    """One clip in float64 by singular value decompositions, truncated to the kernel's taps."""
    c_out, c_in, k, _ = kernel.shape
    grid = size // stride
    blocks = polyphase(kernel.double(), size, stride)
    changes = torch.empty_like(blocks)
    for row in range(len(blocks)):
        left, values, right = torch.linalg.svd(blocks[row], full_matrices=False)
        changes[row] = (left * (values - delta).clamp_min(0).unsqueeze(-2)) @ right
    taps = torch.fft.irfft2(changes.permute(2, 3, 0, 1), s=(grid, grid))
    image = taps.reshape(c_out, stride, stride, c_in, grid, grid).permute(0, 3, 4, 1, 5, 2)
    clipped: Tensor = kernel.double() - image.reshape(c_out, c_in, size, size)[..., :k, :k]
    return clipped


def reference_values(kernel: Tensor, size: int, stride: int) -> Tensor:
    """Singular values at half of the frequencies in float64, in one row."""
    values: Tensor = torch.linalg.svdvals(polyphase(kernel.double(), size, stride))
    return values.flatten()
