"""3x3 convolutions by Winograd's minimal filtering F(4x4, 3x3): a quarter of the multiplications, to train on CPUs.

Each tile of 4x4 output pixels comes from 6x6 input pixels by 36 products per pair of channels in place of 144 (Lavin
and Gray, Fast algorithms for convolutional neural networks (2016)): `Y = A^T [(G g G^T) * (B^T d B)] A` with the
matrices of Toom and Cook for the points 0, 1, -1, 1/2, -2 and infinity, small ones with small rounding errors
(Barabasz et al., Error analysis and improving the accuracy of Winograd convolution (2020)): in float32 some ten times
those of torch's convolution, 1e-6 to 3e-6 of the largest of a tile's results (bf16: 3e-3). For each of the 36 places
the products are one of matrices, channels by tiles; gradients are those of the formula, so that both share `A dY A^T`.
Blocks are as large as stays in a processor's cache.

With a stride of 2 a tile is the sum of one of 2 taps, for the pixels at even places, and one of 1, for those between:
along both axes together 81 products, again in place of 144, as if they were one algorithm with larger matrices.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ttsv.errors import ConfigError
from ttsv.winograd.jit import compile_together
from ttsv.winograd.tiles import OUT, TAPS, Grid, kernel_tiles, minimal_filtering, transformed_kernel_tiles, window
from ttsv.winograd.transforms import TileProduct, TileTransform, own_products

_AT_ONCE = 128 * 36  # tiles times places where their products follow: they stay in a processor's second cache
_APART = 48
"""Numbers between the places' matrices: caches keep few lines whose addresses are a power of two apart."""
_FEW_CHANNELS = 2048  # pairs of them; for fewer what is done to each number counts


def winograd_convolution(images: Tensor, kernel: Tensor, padding: tuple[int, ...] = (0, 0), stride: int = 1) -> Tensor:
    """`conv2d(images, kernel, stride=stride, padding=padding)` in float32 on a CPU, differentiable once.

    `images` (batch, c_in, height, width), `kernel` (c_out, c_in, 3, 3). Fastest where both lie channels last, as the
    result does. Raises `ConfigError` for other shapes, types and paddings.
    """
    if not _suited(images, kernel):
        given = f"{images.dtype} {tuple(images.shape)} and {kernel.dtype} {tuple(kernel.shape)}"
        raise ConfigError(
            "images, kernel",
            given,
            "must be float32 on a CPU, not under autocast, (batch, c_in, h, w) and (c_out, c_in, 3, 3)",
        )
    if not _padded(images, padding):
        raise ConfigError("padding", padding, "must be two numbers from 0 up that leave room for the kernel")
    if stride not in (1, 2):
        raise ConfigError("stride", stride, "must be 1 or 2")
    found: Tensor = _Convolution.apply(images, kernel, Grid(images.shape, tuple(map(index, padding)), index(stride)))
    return found


def winograd_pays(images: Tensor, kernel: Tensor, padding: tuple[int, ...], stride: int = 1) -> bool:
    """Whether `winograd_convolution` is worth its transforms (`benchmarks/convolutions.py`)."""
    grid = Grid(images.shape, padding, stride)
    if not grid.tiles:
        return False
    return _worth(grid.places, grid.tiles, grid.batch * math.prod(grid.size) / grid.tiles, *kernel.shape[:2])


def _worth(places: int, tiles: float, pixels: float, c_out: int, c_in: int) -> bool:
    """Counts multiplications per tile of so many pixels of results, as measured on processors with AVX-512.

    One of the small products takes as long as 1.3 of a plain convolution by code of our own, and 1.6 by torch's. What
    is done to each transformed number of images, kernels and results takes as long as 10 or 15 on one thread, which it
    stays on: more where torch has several, as those are counted for the products.
    """
    if own_products():
        product, image, kernel, margin = 1.3, 10, 15, 1.1
    else:
        threads = torch.get_num_threads()
        product, image, kernel, margin = 1.6, 30 * threads, 30 * threads, 1.2
    if c_in * c_out <= _FEW_CHANNELS:
        return False
    taken = product * c_in * c_out + image * (c_in + c_out) + kernel * c_in * c_out / tiles
    return margin * places * taken < pixels * TAPS**2 * c_in * c_out


def winograd_may_pay(model: nn.Module) -> bool:
    """Whether a parameter of the model has the taps and so many channels that `winograd_pays` for enough images."""
    shapes = (tuple(parameter.shape) for parameter in model.parameters())
    return any(shape[2:] == (TAPS, TAPS) and _worth(window(1) ** 2, math.inf, OUT**2, *shape[:2]) for shape in shapes)


def faster_convolutions(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which the model's convolutions are Winograd's where they pay, and torch's where none may."""
    return WinogradConvolutions() if winograd_may_pay(model) else nullcontext()


class WinogradConvolutions(TorchFunctionMode):
    """Computes 2-d float32 convolutions of 3x3 and stride 1 or 2 within it by `winograd_convolution`, where that pays.

    Those with their settings in order, as modules of torch and this package ask for them, not by keyword.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Takes the place of `torch.conv2d`, which modules and `functional.conv2d` call."""
        if func is torch.conv2d and not kwargs:
            images, kernel = args[:2]
            bias, stride, padding, dilation, groups = args[2:] + _DEFAULTS[len(args) - 2 :]
            plain = _pair(stride) in ((1, 1), (2, 2)) and (_pair(dilation), groups) == ((1, 1), 1)
            plain &= not isinstance(padding, str)
            plain &= bias is None or (bias.dtype == torch.float32 and bias.shape == kernel.shape[:1])
            if plain and _suited(images, kernel) and _padded(images, sides := _pair(padding)):
                step = _pair(stride)[0]
                if winograd_pays(images, kernel, sides, step):
                    found = winograd_convolution(images, kernel, sides, step)
                    return found if bias is None else found + bias[:, None, None]
        return func(*args, **(kwargs or {}))


_DEFAULTS = (None, 1, 0, 1, 1)
"""Of `torch.conv2d`: bias, stride, padding, dilation, groups."""


def _pair(value: SupportsIndex | Sequence[int]) -> tuple[int, ...]:
    """Of a number for both axes, alone or in a list, or of two."""
    given = tuple(map(index, value)) if isinstance(value, Sequence) else (index(value),)
    return given * 2 if len(given) == 1 else given


def _suited(images: Tensor, kernel: Tensor) -> bool:
    plain = {type(images), type(kernel)} <= {Tensor, nn.Parameter}  # others may have no memory, or rules of their own
    single = images.dtype == kernel.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    shapes = images.ndim == kernel.ndim == 4 and kernel.shape[1:] == (images.shape[1], TAPS, TAPS)
    return plain and single and shapes and images.device.type == kernel.device.type == "cpu"


def _padded(images: Tensor, padding: tuple[int, ...]) -> bool:
    return len(padding) == 2 and all(
        p >= 0 and n + 2 * p >= TAPS for n, p in zip(images.shape[2:], padding, strict=True)
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, kernel: Tensor, grid: Grid) -> Tensor:
        ctx.save_for_backward(images, kernel)
        ctx.grid = grid
        found = _uninitialised(grid.batch, len(kernel), *grid.size)
        _convolve(grid, _channels_last(images), _channels_last(kernel), _channels_last(found))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of winograd_convolution cannot be differentiated again: leave WinogradConvolutions "
                "(training.convolutions: direct)"
            )
        saved = ctx.saved_tensors  # once: a checkpoint computes them anew
        wanted = zip(saved, ctx.needs_input_grad, strict=False)
        found = [_uninitialised(*tensor.shape) if needed else None for tensor, needed in wanted]
        given = map(_channels_last, (*saved, gradient))
        _gradients(ctx.grid, *given, *(None if tensor is None else _channels_last(tensor) for tensor in found))
        return found[0], found[1], None


class _Steps:
    """What the algorithm does to tiles, with the adjoints for the gradients."""

    def __init__(self, stride: int) -> None:
        output, kernel, images = minimal_filtering(stride)
        self.images = TileTransform(images, framed="source")
        self.images_adjoint = TileTransform(images.T, framed="target", add=True)
        self.kernel = TileTransform(kernel)
        self.kernel_transposed = TileTransform(kernel, apart=True)
        self.kernel_adjoint = TileTransform(kernel.T)
        self.output = TileTransform(output, framed="target")
        self.output_adjoint = TileTransform(output.T, framed="source")
        self.products, self.more_products = _products()
        compile_together(list(vars(self).values()))


_steps = functools.cache(_Steps)


@functools.cache
def _products() -> tuple[TileProduct, TileProduct]:
    return TileProduct(), TileProduct(add=True)


class _Scratch:
    """Memory of one convolution's blocks, one after another: fresh pages from the system cost as much as a transform.

    By name, so that each block takes the place of the last.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """Uninitialised float32 (places, rows, columns); what was there under the name before is gone."""
        apart = rows * columns + _APART
        if name not in self._taken or self._taken[name].numel() < self._places * apart:
            self._taken[name] = torch.empty(self._places * apart, dtype=torch.float32, device="cpu")
        return self._taken[name].as_strided((self._places, rows, columns), (apart, columns, 1))


def _uninitialised(*shape: int) -> Tensor:
    """Four axes whose second lies last in memory."""
    return torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)


def _channels_last(values: Tensor) -> Tensor:
    """The second axis last: a view where it lies so in memory."""
    return values.permute(0, 2, 3, 1).contiguous()


def _convolve(grid: Grid, images: Tensor, kernel: Tensor, found: Tensor) -> None:
    """Into `found` (batch, height, width, c_out); all with their channels last."""
    steps, scratch = _steps(grid.stride), _Scratch(grid.places)
    c_out, c_in = kernel.shape[0], kernel.shape[3]
    parts, channel_blocks = grid.blocks(c_in, c_out)
    if len(channel_blocks) == 1:
        parts = grid.split(grid.whole, _AT_ONCE // grid.places)
    for channels in channel_blocks:
        count = channels.stop - channels.start
        of_kernel = scratch.take("kernel", c_in, count)
        taps = kernel_tiles(kernel[channels].permute(3, 1, 2, 0))
        steps.kernel_transposed(taps, transformed_kernel_tiles(of_kernel), (c_in, 1, 1), count)
        for part in parts:
            counts = grid.counts(part)
            if len(parts) > 1 or channels.start == 0:
                of_images = scratch.take("images", math.prod(counts), c_in)
                steps.images(grid.of_images(images, part), grid.transformed(of_images), counts, c_in)
            products = scratch.take("products", math.prod(counts), count)
            steps.products(of_images, of_kernel, products)
            results = grid.of_results(found[..., channels], part)
            steps.output(grid.transformed(products), results, counts, count)


def _gradients(
    grid: Grid, images: Tensor, kernel: Tensor, gradient: Tensor, by_images: Tensor | None, by_kernel: Tensor | None
) -> None:
    """Into `by_images` and `by_kernel`, where they are wanted; all with their channels last."""
    steps, scratch = _steps(grid.stride), _Scratch(grid.places)
    c_out, c_in = kernel.shape[0], kernel.shape[3]
    parts, channel_blocks = grid.blocks(c_in, c_out)
    for channels in channel_blocks:
        count = channels.stop - channels.start
        if by_images is not None:
            of_kernel = scratch.take("kernel", count, c_in)
            steps.kernel(kernel_tiles(kernel[channels]), transformed_kernel_tiles(of_kernel), (count, 1, 1), c_in)
        sums = scratch.take("sums", count, c_in)
        for number, part in enumerate(parts):
            every = math.prod(grid.counts(part))
            of_results = scratch.take("results", every, count)
            of_images = scratch.take("images", every, c_in)
            start = 0
            for piece in grid.split(part, _AT_ONCE // grid.places) if len(channel_blocks) == 1 else [part]:
                counts = grid.counts(piece)
                tiles = slice(start, start + math.prod(counts))
                start = tiles.stop
                source = grid.of_results(gradient[..., channels], piece)
                steps.output_adjoint(source, grid.transformed(of_results[:, tiles]), counts, count)
                if by_images is not None:
                    products = scratch.take("products", math.prod(counts), c_in)
                    multiply = steps.more_products if channels.start else steps.products
                    multiply(of_results[:, tiles], of_kernel, products)
                    if channels.stop == c_out:
                        if piece.rows.start == 0:
                            # only now, and so near, as tiles that overlap are added to it
                            by_images[piece.images].zero_()
                        target = grid.of_images(by_images, piece)
                        steps.images_adjoint(grid.transformed(products), target, counts, c_in)
                if by_kernel is not None and channels.start == 0:
                    source = grid.of_images(images, piece)
                    steps.images(source, grid.transformed(of_images[:, tiles]), counts, c_in)
            if by_kernel is not None:
                multiply = steps.more_products if number else steps.products
                multiply(of_results.transpose(1, 2), of_images, sums)
        if by_kernel is not None:
            if not parts:
                sums.zero_()
            taps = kernel_tiles(by_kernel[channels])
            steps.kernel_adjoint(transformed_kernel_tiles(sums), taps, (count, 1, 1), c_in)
