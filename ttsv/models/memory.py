"""Bytes that a network takes where it is trained, torch-free: its weights, and what the backward pass is left.

A forward pass is walked through as autograd sees it: of each operation what it keeps (the input of a convolution and
of a batch norm, the output of a ReLU, each power of a skew operator), each tensor once, in the precision it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ttsv.models import ModelArguments
from ttsv.models.conv_shape import SOC_TERMS, ConvShape, core_kind
from ttsv.models.counts import network_cost
from ttsv.models.registry import find
from ttsv.models.shapes import largest_rank, layer_shapes
from ttsv.tt.ranks import cheapest_merge

_SINGLE, _HALF, _INDEX = 4, 2, 8
"""Bytes of a float32, of a number in half precision, and of the place that a pooling took its maximum from."""
SOC_TRAINING_TERMS = 5
"""Powers of the skew operator that a SOC takes in training mode."""


@dataclass(frozen=True)
class NetworkMemory:
    """Bytes that a network takes in training, in float32 but for what `kept` and `step` say.

    `parameters` and `buffers` are its own; `largest` is the largest parameter. `kept`: what autograd has at the end of
    a forward pass, the parameters themselves aside. `step`: the most at any moment of forward and backward pass beside
    parameters, buffers and the parameters' gradients. `widest`: the input and output of the widest operation, which a
    pass without gradients has. `symbol`: the blocks of the convolution with the most, at all its frequencies.
    """

    parameters: int
    buffers: int
    largest: int
    kept: int
    step: int
    widest: int
    symbol: int


def network_memory(
    network: ModelArguments, batch_size: int, *, half: bool = False, evaluating: bool = False
) -> NetworkMemory | None:
    """What the network that `create_model` makes of these arguments takes; None where `network_cost` says why.

    `half`: the forward pass is under autocast, in bf16 or fp16. `evaluating`: of a pass in evaluation mode whose
    gradients are those of the images, as attacks take them. Raises `ConfigError` as `create_model` does.
    """
    family, _ = find(network.name)
    sizes = {
        "in_channels": network.in_channels,
        "image_size": network.image_size,
        "num_classes": network.num_classes,
    }
    cost = network_cost(network.name, layer=network.layer, rank=network.rank, **sizes)
    if cost.parameters is None:
        return None
    shapes = layer_shapes(network.name, **sizes)
    rank = largest_rank(shapes, network.rank)
    walk = _Walk(network.layer, rank, network.frames, batch_size, half=half, evaluating=evaluating)
    _WALKS[family.pattern](walk, shapes, network.num_classes)
    first = shapes[0]
    pixels = batch_size * first.in_channels * first.input_size**first.dims
    return NetworkMemory(
        parameters=cost.parameters * _SINGLE,
        buffers=walk.buffers,
        largest=walk.largest,
        kept=walk.kept,
        # Of the batch the pixels as bytes, and as the numbers that they are turned into before they are normalised.
        step=walk.most + pixels * (1 + _SINGLE),
        widest=walk.widest,
        symbol=walk.symbol,
    )


@dataclass
class _Tensor:
    """Numbers of a whole batch, so many bytes each; `kept` by autograd or not yet."""

    count: int
    width: int = _SINGLE
    kept: bool = False

    @property
    def bytes(self) -> int:
        return self.count * self.width


class _Walk:
    """A forward pass of one batch, operation by operation.

    `kept` so far; `most`, with what the operation at hand reads and writes, or the backward pass at the same place: the
    gradients of both. `beside`: what a shortcut holds meanwhile.
    """

    def __init__(
        self, layer: str, rank: int | None, frames: str, batch_size: int, *, half: bool, evaluating: bool
    ) -> None:
        self.layer, self.rank, self.frames, self.batch_size = layer, rank, frames, batch_size
        self.half, self.evaluating = half, evaluating
        self.kept = self.most = self.widest = self.buffers = self.largest = self.symbol = self.beside = 0

    def pixels(self, shapes: Sequence[ConvShape]) -> _Tensor:
        """The normalised images."""
        first = shapes[0]
        return self.tensor(first.in_channels, first.input_size, first.dims)

    def tensor(self, channels: int, side: int, dims: int, width: int = _SINGLE) -> _Tensor:
        return _Tensor(self.batch_size * channels * side**dims, width)

    def keep(self, tensor: _Tensor) -> None:
        if not tensor.kept:
            tensor.kept = True
            self.kept += tensor.bytes

    def _keep_weights(self, count: int) -> None:
        """What is made of weights for one pass."""
        self.kept += count * (_HALF if self.half else _SINGLE)

    def made(self, taken: _Tensor, result: _Tensor) -> _Tensor:
        """The result of an operation that has kept what it keeps."""
        both = taken.bytes + result.bytes
        self.most = max(self.most, self.kept + both + self.beside)
        self.widest = max(self.widest, both)
        return result

    def cast(self, tensor: _Tensor) -> _Tensor:
        """What autocast gives a convolution: a copy, where the numbers are not in half precision yet."""
        return self.made(tensor, _Tensor(tensor.count, _HALF)) if self.half and tensor.width != _HALF else tensor

    def normalize(self, taken: _Tensor, channels: int) -> _Tensor:
        """Batch norm."""
        self.buffers += 2 * channels * _SINGLE + _INDEX
        self.keep(taken)
        return self.made(taken, _Tensor(taken.count, taken.width))

    def relu(self, taken: _Tensor) -> _Tensor:
        """In place or not: what is kept is the result."""
        self.keep(taken)
        self.made(taken, taken)
        return taken

    def normalize_relu(self, taken: _Tensor, channels: int) -> _Tensor:
        return self.relu(self.normalize(taken, channels))

    def pool(self, taken: _Tensor, shrunk: int) -> _Tensor:
        """The largest of so many pixels."""
        self.keep(taken)
        count = taken.count // shrunk
        self.kept += count * _INDEX
        return self.made(taken, _Tensor(count, taken.width))

    def linear(self, inputs: int, outputs: int) -> _Tensor:
        """A linear layer on features of its own; its bias aside."""
        self.largest = max(self.largest, inputs * outputs * _SINGLE)
        self.keep(taken := _Tensor(self.batch_size * inputs, _HALF if self.half else _SINGLE))
        if self.half:
            self._keep_weights(inputs * outputs)
        return self.made(taken, _Tensor(self.batch_size * outputs, taken.width))

    def convolve(self, shape: ConvShape, taken: _Tensor) -> _Tensor:
        ranks = shape.ranks(self.rank) if self.layer.endswith("tt") else None
        soc = core_kind(self.layer) == "soc"
        c_in, c_out = ranks or (shape.in_channels, shape.out_channels)
        square = max(c_in * shape.stride**2, c_out) if soc else 0
        taps = shape.kernel_size**shape.dims
        kernel = (square**2 if soc else c_in * c_out) * taps
        self.largest = max(self.largest, kernel * _SINGLE)
        frequencies = (shape.output_size**shape.dims) // 2 + 1
        blocks = square**2 if soc else c_in * c_out * shape.stride**shape.dims
        self.symbol = max(self.symbol, 2 * _SINGLE * blocks * frequencies)
        if soc:
            return self._exponentiate(shape, taken, ranks, square, kernel)
        taken = self.cast(taken)
        self.keep(taken)
        width = _HALF if self.half else _SINGLE
        result = self.tensor(shape.out_channels, shape.output_size, shape.dims, width)
        if ranks is None:
            if self.half:
                self._keep_weights(kernel)
            return self.made(taken, result)
        pixels = (self.batch_size * shape.input_size**shape.dims, self.batch_size * shape.output_size**shape.dims)
        channels = shape.in_channels, shape.out_channels
        merge_in, merge_out = cheapest_merge(channels, ranks, taps, pixels)[1]
        self._frames(shape, ranks)
        rows, columns = (shape.out_channels if merge_out else c_out), (shape.in_channels if merge_in else c_in)
        if self.half or merge_in or merge_out:
            self._keep_weights(rows * columns * taps)
        if (
            merge_in or merge_out
        ) and not self.evaluating:  # the core as the product takes it, and what one frame made of it
            self._keep_weights(kernel + (min(rows * c_in, c_out * columns) * taps if merge_in and merge_out else 0))
        hidden = taken
        if not merge_in:
            hidden = self.made(hidden, self.tensor(c_in, shape.input_size, shape.dims, width))
            self.keep(hidden)
        if merge_out:
            return self.made(hidden, result)
        hidden = self.made(hidden, self.tensor(c_out, shape.output_size, shape.dims, width))
        self.keep(hidden)
        return self.made(hidden, result)

    def _frames(self, shape: ConvShape, ranks: tuple[int, int]) -> None:
        """What is made of the frames: copies in half precision, and what a frame held orthonormal is factored into."""
        r1, r2 = ranks
        entries = shape.in_channels * r1 + r2 * shape.out_channels
        self.largest = max(self.largest, shape.in_channels * r1 * _SINGLE, r2 * shape.out_channels * _SINGLE)
        if self.half or self.frames == "orthonormal":
            self._keep_weights(entries)
        if self.frames == "orthonormal" and not self.evaluating:
            self.kept += (entries + r1**2 + r2**2) * _SINGLE

    def _exponentiate(
        self, shape: ConvShape, taken: _Tensor, ranks: tuple[int, int] | None, square: int, kernel: int
    ) -> _Tensor:
        """The series of a SOC, between frames or not: every power but the last is the input of a convolution."""
        self.buffers += (shape.kernel_size + 1) * square * _SINGLE
        width = _HALF if self.half else _SINGLE
        c_in = shape.in_channels
        if ranks is not None:
            self._frames(shape, ranks)
            taken = self.cast(taken)
            self.keep(taken)
            c_in = ranks[0]
            taken = self.made(taken, self.tensor(c_in, shape.input_size, shape.dims, width))
        own = taken.width
        if not self.evaluating:
            self.kept += kernel * _SINGLE  # the skew part, which is scaled
        self._keep_weights(kernel)
        if shape.stride > 1 or square > c_in:  # by pixels laid into channels, or by channels of zeros
            taken = self.made(taken, self.tensor(square, shape.output_size, shape.dims, own))
        term = self.cast(taken)
        for _ in range(SOC_TERMS if self.evaluating else SOC_TRAINING_TERMS):
            self.keep(term)
            following = self.tensor(square, shape.output_size, shape.dims, width)
            # Beside it the sum so far, and the one to come.
            self.most = max(self.most, self.kept + 2 * following.count * own)
            term = self.made(term, following)
        total = self.tensor(square, shape.output_size, shape.dims, own)
        if ranks is not None:
            total = self.cast(total)
            self.keep(total)
            return self.made(total, self.tensor(shape.out_channels, shape.output_size, shape.dims, width))
        if not shape.bias:
            return total  # cut to the channels in use, in the memory of all
        return self.made(total, self.tensor(shape.out_channels, shape.output_size, shape.dims))


def _head(walk: _Walk, shapes: Sequence[ConvShape], num_classes: int) -> None:
    walk.linear(shapes[-1].out_channels, num_classes)


def _small(walk: _Walk, shapes: Sequence[ConvShape], num_classes: int) -> None:
    features = walk.pixels(shapes)
    for shape in shapes:
        features = walk.normalize_relu(walk.convolve(shape, features), shape.out_channels)
    _head(walk, shapes, num_classes)


def _single(walk: _Walk, shapes: Sequence[ConvShape], num_classes: int) -> None:
    walk.convolve(shapes[0], walk.pixels(shapes))
    _head(walk, shapes, num_classes)


def _wide(walk: _Walk, shapes: Sequence[ConvShape], num_classes: int) -> None:
    """Batch norm and ReLU before each convolution but the first; a block's input is kept by its first batch norm."""
    stem, *rest = shapes
    features = walk.convolve(stem, walk.pixels(shapes))
    for first, second in zip(rest[::2], rest[1::2], strict=True):
        residual = walk.convolve(first, walk.normalize_relu(features, first.in_channels))
        walk.beside = features.bytes
        features = walk.convolve(second, walk.normalize_relu(residual, second.in_channels))
        walk.beside = 0
    walk.normalize_relu(features, shapes[-1].out_channels)
    _head(walk, shapes, num_classes)


def _vgg(walk: _Walk, shapes: Sequence[ConvShape], num_classes: int) -> None:
    features = walk.pixels(shapes)
    for shape, following in zip(shapes, [*shapes[1:], None], strict=True):
        features = walk.normalize_relu(walk.convolve(shape, features), shape.out_channels)
        if following is None or following.input_size < shape.output_size:
            features = walk.pool(features, 4)
    inputs = shapes[-1].out_channels * (shapes[-1].output_size // 2) ** 2
    for outputs in (512, 512, num_classes):
        walk.linear(inputs, outputs)
        inputs = outputs


def _resnet(walk: _Walk, shapes: Sequence[ConvShape], num_classes: int) -> None:
    """Basic blocks: the sum with the shortcut goes through the last ReLU, which keeps it."""
    stem, *rest = shapes
    features = walk.normalize_relu(walk.convolve(stem, walk.pixels(shapes)), stem.out_channels)
    if stem.stride > 1:
        features = walk.pool(features, 4)
    named = {shape.name: shape for shape in rest}
    for first in (shape for shape in rest if shape.name.endswith(".conv1")):
        block = first.name.removesuffix("conv1")
        second, across = named[f"{block}conv2"], named.get(f"{block}downsample.0")
        walk.beside = features.bytes
        residual = walk.normalize_relu(walk.convolve(first, features), first.out_channels)
        total = walk.normalize(walk.convolve(second, residual), second.out_channels)
        if across is not None:
            walk.normalize(walk.convolve(across, features), across.out_channels)
        walk.beside = 0
        features = walk.relu(total)
    _head(walk, shapes, num_classes)


def _lipconvnet(walk: _Walk, shapes: Sequence[ConvShape], num_classes: int) -> None:
    """MinMax keeps what it is given, and makes as much anew."""
    *hidden, last = shapes
    features = walk.pixels(shapes)
    for shape in hidden:
        given = walk.convolve(shape, features)
        walk.keep(given)
        features = walk.made(given, _Tensor(given.count, given.width))
    walk.convolve(last, features)


_WALKS: dict[str, Callable[[_Walk, Sequence[ConvShape], int], None]] = {
    "single-conv": _single,
    "small-cnn": _small,
    "small-cnn1d": _small,
    "small-cnn3d": _small,
    "wrn{6n+4}-{k}": _wide,
    "vgg11-19": _vgg,
    "lipconvnet-{5n}": _lipconvnet,
    "resnet18-34": _resnet,
}
"""Pattern of a family -> its forward pass."""
