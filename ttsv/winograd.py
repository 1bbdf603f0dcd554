"""3x3 convolutions by Winograd's minimal filtering F(4x4, 3x3): a quarter of the multiplications, to train on CPUs.

Each tile of 4x4 output pixels comes from 6x6 input pixels by 36 products per pair of channels in place of 144 (Lavin
and Gray, Fast algorithms for convolutional neural networks (2016)): `Y = A^T [(G g G^T) * (B^T d B)] A` with the
matrices of Toom and Cook for the points 0, 1, -1, 1/2, -2 and infinity, small ones with small rounding errors
(Barabasz et al., Error analysis and improving the accuracy of Winograd convolution (2020)): in float32 some ten times
those of torch's convolution, 1e-6 to 3e-6 of the result (bf16: 3e-3). For each of the 36 places the products are one of
matrices, channels by tiles; the transforms of both axes are products with `A (x) A` and its like. Blocks are as large
as stays in a processor's cache.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ttsv.errors import ConfigError

_POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)
_OUT, _IN, _TAPS = 4, 6, 3  # pixels of a tile, of what it depends on, and of the kernel, along each axis
_PLACES = _IN**2
_IMAGE_BLOCK, _KERNEL_BLOCK = 6 << 20, 8 << 20  # bytes of transformed images, and of kernels where they are many
_WORTH = 1.2


def _matrices() -> tuple[Tensor, Tensor, Tensor]:
    """A^T (4, 6), G (6, 3) and B^T (6, 6) in float64; the last point is at infinity.

    Row i of B^T has the coefficients of the product of `x - p_j` over the other points, row i of G the powers of p_i
    over that product's value at p_i.
    """
    points = torch.tensor(_POINTS, dtype=torch.float64)
    output, kernel, images = (points.new_zeros(rows, cols) for rows, cols in ((_OUT, _IN), (_IN, _TAPS), (_IN, _IN)))
    for i, point in enumerate(points):
        others = torch.cat([points[:i], points[i + 1 :]])
        output[:, i] = point ** torch.arange(_OUT)
        kernel[i] = point ** torch.arange(_TAPS) / (point - others).prod()
        images[i, : _IN - 1] = _coefficients(others)
    output[-1, -1] = kernel[-1, -1] = 1
    images[-1] = _coefficients(points)
    return output, kernel, images


def _coefficients(roots: Tensor) -> Tensor:
    """Of the product of `x - root`, from the constant one up."""
    found, zero = roots.new_ones(1), roots.new_zeros(1)
    for root in roots:
        found = torch.cat([zero, found]) - root * torch.cat([found, zero])
    return found


def _both_axes(matrix: Tensor) -> Tensor:
    return torch.kron(matrix, matrix).float()


_A, _G, _B = _matrices()
_OUTPUT, _KERNEL, _IMAGES = map(_both_axes, (_A, _G, _B))
_TURNED = _both_axes(_G.flip(1))
"""Of kernels turned by 180 degrees, which gradients of images are convolved with."""
_OUTPUT_T, _KERNEL_T = _OUTPUT.T.contiguous(), _KERNEL.T.contiguous()


class _Scratch:
    """Memory of one convolution's blocks, one after another: fresh pages from the system cost as much as a transform.

    By name: "pixels" of images, results or kernels, "tiles" of images or results, either used up before its next
    use; "transformed" images; "kernel", transformed.
    """

    def __init__(self) -> None:
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Uninitialised float32 of this shape; what was there under the name before is gone."""
        count = math.prod(shape)
        if name not in self._taken or self._taken[name].numel() < count:
            self._taken[name] = torch.empty(count, dtype=torch.float32, device="cpu")
        return self._taken[name][:count].view(shape)


def winograd_convolution(images: Tensor, kernel: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """`conv2d(images, kernel, padding=padding)` in float32 on a CPU, differentiable once.

    `images` (batch, c_in, height, width), `kernel` (c_out, c_in, 3, 3), `padding` of at most 2 pixels. Fastest where
    both lie channels last, as the result does. Raises `ConfigError` for other shapes, types and paddings.
    """
    if not _suited(images, kernel):
        given = f"{images.dtype} {tuple(images.shape)} and {kernel.dtype} {tuple(kernel.shape)}"
        raise ConfigError(
            "images, kernel",
            given,
            "must be float32 on a CPU, not under autocast, (batch, c_in, h, w) and (c_out, c_in, 3, 3)",
        )
    if not _padded(images, padding):
        raise ConfigError("padding", padding, "must be two numbers from 0 to 2 that leave room for the kernel")
    found: Tensor = _Convolution.apply(images, kernel, padding)
    return found


def winograd_pays(images: Tensor, kernel: Tensor, padding: tuple[int, int]) -> bool:
    """Whether `winograd_convolution` is worth its transforms (`benchmarks/convolutions.py`).

    Of images so large that the tiles of one take many times a block it is not: they would take too much memory.
    """
    grid = _Grid(images, padding)
    if not grid.tiles or grid.bytes_per_image(max(kernel.shape[:2])) > 4 * _IMAGE_BLOCK:
        return False
    return _worth(grid.tiles, grid.batch * math.prod(grid.size) / grid.tiles, *kernel.shape[:2])


def _worth(tiles: float, pixels: float, c_out: int, c_in: int) -> bool:
    """Counts multiplications per tile of so many pixels of results, as measured on processors with AVX-512.

    One of the small products takes as long as 1.25 of a plain convolution, and what is done to each transformed number
    of images, kernels and results as long as 74.
    """
    numbers = c_in + c_out + c_in * c_out / tiles
    return _WORTH * _PLACES * (1.25 * c_in * c_out + 74 * numbers) < pixels * _TAPS**2 * c_in * c_out


def winograd_may_pay(model: nn.Module) -> bool:
    """Whether a parameter of the model has the taps and so many channels that `winograd_pays` for enough images."""
    shapes = (tuple(parameter.shape) for parameter in model.parameters())
    return any(shape[2:] == (_TAPS, _TAPS) and _worth(math.inf, _OUT**2, *shape[:2]) for shape in shapes)


class WinogradConvolutions(TorchFunctionMode):
    """Computes 2-d float32 convolutions of 3x3 and stride 1 within it by `winograd_convolution`, where that pays."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Takes the place of `torch.conv2d`, which modules and `functional.conv2d` call."""
        if func is torch.conv2d and not kwargs:
            images, kernel = args[:2]
            bias, stride, padding, dilation, groups = args[2:] + _DEFAULTS[len(args) - 2 :]
            plain = (_pair(stride), _pair(dilation), groups) == ((1, 1), (1, 1), 1) and not isinstance(padding, str)
            plain &= bias is None or (bias.dtype == torch.float32 and bias.shape == kernel.shape[:1])
            sides = _pair(padding) if plain else (0, 0)
            if plain and _suited(images, kernel) and _padded(images, sides) and winograd_pays(images, kernel, sides):
                found = winograd_convolution(images, kernel, sides)
                return found if bias is None else found + bias[:, None, None]
        return func(*args, **(kwargs or {}))


_DEFAULTS = (None, 1, 0, 1, 1)
"""Of `torch.conv2d`: bias, stride, padding, dilation, groups."""


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    first, *rest = (value,) if isinstance(value, int) else value
    return first, (rest or [first])[0]


def _suited(images: Tensor, kernel: Tensor) -> bool:
    single = images.dtype == kernel.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    shapes = images.ndim == kernel.ndim == 4 and kernel.shape[1:] == (images.shape[1], _TAPS, _TAPS)
    return single and shapes and images.device.type == kernel.device.type == "cpu"


def _padded(images: Tensor, padding: tuple[int, ...]) -> bool:
    return all(0 <= p < _TAPS <= n + 2 * p for n, p in zip(images.shape[2:], padding, strict=True))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, kernel: Tensor, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(images, kernel)
        ctx.padding = padding
        return _convolve(images, kernel, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        images, kernel = ctx.saved_tensors
        of_images = of_kernel = None
        if ctx.needs_input_grad[0]:
            rest = tuple(_TAPS - 1 - p for p in ctx.padding)
            of_images = _convolve(gradient, kernel, rest, turned=True)
        if ctx.needs_input_grad[1]:
            of_kernel = _kernel_gradient(images, gradient, ctx.padding)
        return of_images, of_kernel, None


class _Grid:
    """The tiles that cover the results of a convolution: `rows` times `columns` for each image."""

    def __init__(self, images: Tensor, padding: tuple[int, ...]) -> None:
        self.images, self.padding, self.batch = images, padding, len(images)
        self.size = tuple(n + 2 * p - _TAPS + 1 for n, p in zip(images.shape[2:], padding, strict=True))
        self.rows, self.columns = (-(-n // _OUT) for n in self.size)
        self.tiles = self.batch * self.rows * self.columns
        self.covered = self.rows * _OUT, self.columns * _OUT

    def blocks(self, c_in: int, c_out: int) -> tuple[list[slice], list[slice]]:
        """Of images, and of the channels on the kernel's other side than theirs: one of the two lists is one long."""
        bytes_per_image = self.bytes_per_image(max(c_in, c_out))
        few_images = self.batch * bytes_per_image <= 2 * _IMAGE_BLOCK
        if few_images and 4 * _PLACES * c_in * c_out > 2 * _KERNEL_BLOCK:
            return [slice(0, self.batch)], _slices(c_out, _KERNEL_BLOCK // (4 * _PLACES * c_in))
        return _slices(self.batch, _IMAGE_BLOCK // bytes_per_image), [slice(0, c_out)]

    def bytes_per_image(self, channels: int) -> int:
        """Of one image's transformed tiles."""
        return 4 * _PLACES * self.rows * self.columns * channels

    def transformed(self, block: slice, scratch: _Scratch) -> Tensor:
        """`B^T d B` of the tiles of some images: (36, tiles, channels)."""
        images = self.images[block].permute(0, 2, 3, 1)
        count, height, width, channels = images.shape
        (top, left), (high, wide) = self.padding, self.covered
        padded = scratch.take("pixels", count, high + _TAPS - 1, wide + _TAPS - 1, channels)
        bottom, right = top + height, left + width
        for border in (padded[:, :top], padded[:, bottom:], padded[:, :, :left], padded[:, :, right:]):
            border.zero_()
        padded[:, top:bottom, left:right] = images
        windows = padded.unfold(1, _IN, _OUT).unfold(2, _IN, _OUT).permute(4, 5, 0, 1, 2, 3)
        tiles = scratch.take("tiles", *windows.shape).copy_(windows).view(_PLACES, -1)
        found = scratch.take("transformed", _PLACES, count * self.rows * self.columns, channels)
        torch.mm(_IMAGES, tiles, out=found.view(_PLACES, -1))
        return found

    def tiled(self, results: Tensor) -> Tensor:
        """A view (4, 4, batch, rows, columns, channels) of (batch, channels, 4 rows, 4 columns), channels last."""
        tiles = results.permute(0, 2, 3, 1).unfold(1, _OUT, _OUT).unfold(2, _OUT, _OUT)
        return tiles.permute(4, 5, 0, 1, 2, 3)


def _channels_last(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + max(1, size), count)) for start in range(0, count, max(1, size))]


def _convolve(images: Tensor, kernel: Tensor, padding: tuple[int, ...], *, turned: bool = False) -> Tensor:
    """The convolution; with `turned` that by the kernel's transpose, turned: gradients of images."""
    grid, scratch = _Grid(images, padding), _Scratch()
    c_in, c_out = kernel.shape[:2] if turned else (kernel.shape[1], kernel.shape[0])
    found = _channels_last(grid.batch, c_out, *grid.covered)
    image_blocks, channel_blocks = grid.blocks(c_in, c_out)
    for channels in channel_blocks:
        of_kernel = _transformed_kernel(kernel, channels, scratch, turned=turned)
        for part in image_blocks:
            if len(image_blocks) > 1 or channels.start == 0:
                of_images = grid.transformed(part, scratch)
            products = scratch.take("tiles", _PLACES, of_images.shape[1], of_kernel.shape[2])
            torch.bmm(of_images, of_kernel, out=products)
            block = grid.tiled(found[part, channels])
            pixels = scratch.take("pixels", *block.shape)
            torch.mm(_OUTPUT, products.view(_PLACES, -1), out=pixels.view(_OUT**2, -1))
            block.copy_(pixels)
    if grid.covered == grid.size:
        return found
    return found[:, :, : grid.size[0], : grid.size[1]].clone(memory_format=torch.channels_last)


def _transformed_kernel(kernel: Tensor, channels: slice, scratch: _Scratch, *, turned: bool) -> Tensor:
    """`G g G^T` for some channels of the result: (36, c_in, channels)."""
    part = (kernel[:, channels] if turned else kernel[channels]).permute(2, 3, 0, 1)
    taps = scratch.take("pixels", *part.shape).copy_(part)
    found = scratch.take("kernel", _PLACES, *part.shape[2:])
    torch.mm(_TURNED if turned else _KERNEL, taps.view(_TAPS**2, -1), out=found.view(_PLACES, -1))
    return found if turned else found.transpose(1, 2)


def _kernel_gradient(images: Tensor, gradient: Tensor, padding: tuple[int, ...]) -> Tensor:
    """`G^T [sum over tiles of (A dY A^T) * (B^T d B)] G`, (c_out, c_in, 3, 3) channels last."""
    grid, scratch = _Grid(images, padding), _Scratch()
    c_in, c_out = images.shape[1], gradient.shape[1]
    if not grid.tiles:
        return _channels_last(c_out, c_in, _TAPS, _TAPS).zero_()
    if grid.covered != grid.size:
        (height, width), (high, wide) = grid.size, grid.covered
        gradient = functional.pad(gradient, (0, wide - width, 0, high - height))
    found = _channels_last(c_out, c_in, _TAPS, _TAPS)
    image_blocks, channel_blocks = grid.blocks(c_in, c_out)
    for channels in channel_blocks:
        sums = scratch.take("kernel", _PLACES, channels.stop - channels.start, c_in)
        for part in image_blocks:
            if len(image_blocks) > 1 or channels.start == 0:
                of_images = grid.transformed(part, scratch)
            block = grid.tiled(gradient[part, channels])
            pixels = scratch.take("pixels", *block.shape).copy_(block)
            products = scratch.take("tiles", _PLACES, of_images.shape[1], sums.shape[1])
            torch.mm(_OUTPUT_T, pixels.view(_OUT**2, -1), out=products.view(_PLACES, -1))
            torch.baddbmm(sums, products.transpose(1, 2), of_images, beta=part.start > 0, out=sums)
        taps = scratch.take("pixels", _TAPS, _TAPS, *sums.shape[1:])
        torch.mm(_KERNEL_T, sums.view(_PLACES, -1), out=taps.view(_TAPS**2, -1))
        found[channels].copy_(taps.permute(2, 3, 0, 1))
    return found
