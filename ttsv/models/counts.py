"""Trainable parameters and multiply-accumulates of whole networks, torch-free: what a dry run says before any is built.

Each network is its convolutions (`ttsv.models.shapes`) and what stands between and behind them: batch norms and linear
layers, which are listed here by the pattern of the family.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ttsv.models.conv_shape import ConvShape, core_kind
from ttsv.models.registry import find
from ttsv.models.shapes import largest_rank, layer_shapes, shape_compression

COUNTED_KINDS = ("dense", "soc")
"""Cores whose parameters are what `ConvShape.weights` counts; of the others that is only the kernel that they make."""


@dataclass(frozen=True)
class Cost:
    """What a network costs: `parameters` that are trained, `multiply_accumulates` of one image, `compression`.

    As `ttsv.metrics.cost` has them of the network itself. None: known only once it is built, for `reason`.
    """

    parameters: int | None = None
    multiply_accumulates: int | None = None
    compression: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class _Rest:
    """Channels that are normalised, each with a scale and a shift, and linear layers (inputs, outputs) with biases."""

    normalized: int
    linear: tuple[tuple[int, int], ...]


@lru_cache(maxsize=65_536)  # a dry run asks three times of each network
def network_cost(
    name: str, *, layer: str, rank: float | None, in_channels: int, image_size: int, num_classes: int
) -> Cost:
    """The cost of the network that `create_model` makes of the same arguments. Raises `ConfigError` as it does."""
    family, _ = find(name)
    if family.pattern not in _RESTS:
        return Cost(reason=f"the layers of {name} are known once it is built")
    shapes = layer_shapes(name, in_channels=in_channels, image_size=image_size, num_classes=num_classes)
    compression = shape_compression(shapes, rank, layer)
    if core_kind(layer) not in COUNTED_KINDS:
        return Cost(compression=compression, reason=f"the parameters of {layer} layers are known once they are built")
    largest = largest_rank(shapes, rank)
    rest = _RESTS[family.pattern](shapes, num_classes)
    weights = sum(shape.weights(largest, layer) for shape in shapes)
    biases = sum(shape.out_channels for shape in shapes if shape.bias)
    linear = sum(inputs * outputs for inputs, outputs in rest.linear)
    return Cost(
        parameters=weights + biases + 2 * rest.normalized + linear + sum(outputs for _, outputs in rest.linear),
        multiply_accumulates=sum(shape.macs(largest, layer) for shape in shapes) + linear,
        compression=compression,
    )


def has_linear_layers(name: str, shapes: Sequence[ConvShape], num_classes: int) -> bool:
    """Whether the network of these convolutions has linear layers besides; of torchvision's nothing is known here."""
    return bool(_RESTS[find(name)[0].pattern](shapes, num_classes).linear)


def normalizes_single_pixels(name: str, shapes: Sequence[ConvShape], num_classes: int) -> bool:
    """Whether a batch norm of the network sees one pixel of each image; of torchvision's nothing is known here."""
    normalized = _RESTS[find(name)[0].pattern](shapes, num_classes).normalized
    return normalized > 0 and any(shape.output_size == 1 for shape in shapes)


def _pooled(shapes: Sequence[ConvShape], num_classes: int) -> _Rest:
    """A batch norm behind every convolution, one linear layer behind the pooling."""
    return _Rest(sum(shape.out_channels for shape in shapes), ((shapes[-1].out_channels, num_classes),))


def _single(shapes: Sequence[ConvShape], num_classes: int) -> _Rest:
    return _Rest(0, ((shapes[-1].out_channels, num_classes),))


def _wide(shapes: Sequence[ConvShape], num_classes: int) -> _Rest:
    """A batch norm before every convolution but the first, and one behind the last."""
    width = shapes[-1].out_channels
    return _Rest(sum(shape.in_channels for shape in shapes[1:]) + width, ((width, num_classes),))


def _vgg(shapes: Sequence[ConvShape], num_classes: int) -> _Rest:
    features = shapes[-1].out_channels * (shapes[-1].output_size // 2) ** 2
    return _Rest(sum(shape.out_channels for shape in shapes), ((features, 512), (512, 512), (512, num_classes)))


def _nothing(shapes: Sequence[ConvShape], num_classes: int) -> _Rest:
    return _Rest(0, ())


_RESTS: dict[str, Callable[[Sequence[ConvShape], int], _Rest]] = {
    "single-conv": _single,
    "small-cnn": _pooled,
    "small-cnn1d": _pooled,
    "small-cnn3d": _pooled,
    "wrn{6n+4}-{k}": _wide,
    "vgg11-19": _vgg,
    "lipconvnet-{5n}": _nothing,
    "resnet18-34": _pooled,
}
"""Pattern of a family -> what its networks are made of besides their convolutions."""
