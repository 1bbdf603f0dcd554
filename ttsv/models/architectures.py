"""The convolutions of every network that is built here, in the order of the forward pass. Torch-free."""

from functools import partial
from typing import Any

from ttsv.checks import check_count
from ttsv.errors import ConfigError
from ttsv.models.conv_shape import ConvShape
from ttsv.models.registry import network

VGG_STAGES: dict[int, tuple[int, ...]] = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
"""Depth -> convolutions before each of the five poolings (Simonyan & Zisserman, ICLR 2015, table 1)."""

RESNET_STAGES: dict[int, tuple[int, ...]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
"""Depth -> basic blocks of each stage (He et al., CVPR 2016, table 1)."""

CIFAR_STEM_BELOW = 64
"""Images with fewer pixels a side get the ResNets' stem for CIFAR."""


def _require_size(network: str, image_size: int, least: int, multiple: int) -> None:
    if image_size < least or image_size % multiple:
        sizes = f"a multiple of {multiple}" if multiple > 1 else f"at least {least}"
        raise ConfigError("image_size", image_size, f"must be {sizes} for {network}")


def _conv(
    name: str, channels: tuple[int, int], size: int, *, kernel_size: int = 3, stride: int = 1, **options: Any
) -> ConvShape:
    """A convolution from and to so many channels, padded so that an odd kernel keeps the size; `options` as there."""
    c_in, c_out = channels
    return ConvShape(
        name=name,
        in_channels=c_in,
        out_channels=c_out,
        kernel_size=kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        input_size=size,
        **options,
    )


def _small_cnn(network: str, dims: int, in_channels: int, image_size: int) -> list[ConvShape]:
    """Three convolutions with kernels of side 3; strides 1, 2, 2 take an 8x8 digit to 2x2."""
    _require_size(network, image_size, 4, 4)
    shapes: list[ConvShape] = []
    channels, size = in_channels, image_size
    for index, (width, stride) in enumerate(((32, 1), (64, 2), (64, 2)), start=1):
        shapes.append(_conv(f"conv{index}", (channels, width), size, stride=stride, dims=dims))
        channels, size = width, shapes[-1].output_size
    return shapes


for _name, _dims in (("small-cnn", 2), ("small-cnn1d", 1), ("small-cnn3d", 3)):
    network(_name)(partial(_small_cnn, _name, _dims))


@network("single-conv")
def _single_conv(*, in_channels: int, image_size: int) -> list[ConvShape]:
    """One 3x3 convolution with as many channels out as in: for the figures of the cost of a layer."""
    _require_size("single-conv", image_size, 1, 1)
    return [_conv("conv", (in_channels, in_channels), image_size)]


@network(
    "wrn{6n+4}-{k}",
    names=("wrn16-4", "wrn16-10", "wrn22-8", "wrn28-10", "wrn40-4"),
    expression=r"wrn(?P<depth>[1-9]\d{0,2})-(?P<factor>[1-9]\d{0,2})",
    where=lambda depth, factor: depth > 4 and depth % 6 == 4,
)
def _wide_resnet(*, depth: int, factor: int, in_channels: int, image_size: int) -> list[ConvShape]:
    """A stem of 16 channels and three stages of n blocks, two 3x3 convolutions each, with 16, 32 and 64 k channels."""
    _require_size(f"wrn{depth}-{factor}", image_size, 4, 4)
    shapes, channels, size = [_conv("conv1", (in_channels, 16), image_size)], 16, image_size
    for stage, first_stride in enumerate((1, 2, 2)):
        width = 16 * factor * 2**stage
        for block in range((depth - 4) // 6):
            stride = first_stride if block == 0 else 1
            name = f"layer{stage + 1}.{block}"
            shapes.append(_conv(f"{name}.conv1", (channels, width), size, stride=stride))
            size //= stride
            shapes.append(_conv(f"{name}.conv2", (width, width), size))
            channels = width
    return shapes


@network("vgg11-19", names=("vgg11", "vgg13", "vgg16", "vgg19"), expression=r"vgg(?P<depth>11|13|16|19)")
def _vgg(*, depth: int, in_channels: int, image_size: int) -> list[ConvShape]:
    """3x3 convolutions with biases, 64 to 512 channels wide; five poolings halve the image, odd sides rounded down."""
    _require_size(f"vgg{depth}", image_size, 32, 1)
    shapes, channels, size, place = [], in_channels, image_size, 0
    for width, convolutions in zip((64, 128, 256, 512, 512), VGG_STAGES[depth], strict=True):
        for _ in range(convolutions):
            shapes.append(_conv(f"features.{place}", (channels, width), size, bias=True))
            channels, place = width, place + 3  # batch norm and ReLU follow
        size, place = size // 2, place + 1
    return shapes


@network(
    "lipconvnet-{5n}",
    names=tuple(f"lipconvnet-{depth}" for depth in range(5, 45, 5)),
    expression=r"lipconvnet-(?P<depth>[1-9]\d{0,2})",
    where=lambda depth: depth % 5 == 0,
)
def _lipconvnet(*, depth: int, in_channels: int, image_size: int, num_classes: int, width: int = 32) -> list[ConvShape]:
    """Five stages whose last convolution halves the image and doubles the channels; then a 1x1 one to the classes.

    `width`: channels of the first stage, even (32 in the paper). Larger images than 32 x 32 leave more than one pixel
    after the stages: those are stacked into channels.
    """
    _require_size(f"lipconvnet-{depth}", image_size, 32, 32)
    check_count("width", width)
    if width % 2:
        raise ConfigError("width", width, "must be even and at least 2: MinMax pairs the halves of the channels")
    blocks = depth // 5
    shapes, channels, size = [], in_channels, image_size
    for stage in range(5):
        for block in range(blocks):
            last = block == blocks - 1
            name, kernel_size, stride = f"layer{stage + 1}.{block}.conv", 1 if last and stage == 4 else 3, 1 + last
            following = width * 2 ** (stage + last)
            shapes.append(_conv(name, (channels, following), size, kernel_size=kernel_size, stride=stride, bias=True))
            channels = following
        size //= 2
    shapes.append(_conv("final_conv", (channels * size**2, num_classes), 1, kernel_size=1, bias=True))
    return shapes


@network("resnet18-34", names=("resnet18", "resnet34"), expression=r"resnet(?P<depth>18|34)")
def _resnet(*, depth: int, in_channels: int, image_size: int) -> list[ConvShape]:
    """As torchvision has them: stem, four stages of basic blocks, 1x1 convolutions in the shortcuts that change shape.

    Below 64 pixels the stem is a 3x3 convolution without stride or pooling, else 7x7 with stride 2 and a pooling.
    """
    _require_size(f"resnet{depth}", image_size, 1, 1)
    small = image_size < CIFAR_STEM_BELOW
    kernel_size, stride = (3, 1) if small else (7, 2)
    shapes = [_conv("conv1", (in_channels, 64), image_size, kernel_size=kernel_size, stride=stride)]
    channels, size = 64, image_size if small else (shapes[0].output_size - 1) // 2 + 1
    for stage, blocks in enumerate(RESNET_STAGES[depth]):
        width = 64 * 2**stage
        for block in range(blocks):
            name, stride = f"layer{stage + 1}.{block}", 2 if stage and not block else 1
            shapes.append(_conv(f"{name}.conv1", (channels, width), size, stride=stride))
            shapes.append(_conv(f"{name}.conv2", (width, width), shapes[-1].output_size))
            if channels != width:
                shapes.append(_conv(f"{name}.downsample.0", (channels, width), size, kernel_size=1, stride=stride))
            channels, size = width, shapes[-1].output_size
    return shapes


@network("torchvision:{NAME}", names=(), expression=r"torchvision:(?P<architecture>\w{1,100})")
def _torchvision(*, architecture: str, in_channels: int, image_size: int) -> list[ConvShape]:
    """torchvision's own, which no list here describes."""
    fix = "has no list of shapes: its layers are known once it is built (see ttsv.metrics.cost)"
    raise ConfigError("model", f"torchvision:{architecture}", fix)
