"""From a network's name and shapes to its modules, of which the first takes pixels to normalised coordinates."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ttsv.checks import check_choice, check_counts, check_number
from ttsv.errors import ConfigError
from ttsv.layers.framed import check_frames
from ttsv.models import ModelArguments
from ttsv.models.conv_shape import LAYERS, ConvShape
from ttsv.models.convolutions import ConvFactory
from ttsv.models.lipconvnet import LipConvNet
from ttsv.models.registry import find
from ttsv.models.shapes import SMALLEST_STD, largest_rank, layer_shapes
from ttsv.models.small_cnn import SingleConv, SmallCNN
from ttsv.models.vgg import VGG
from ttsv.models.wide_resnet import WideResNet
from ttsv.runtime.failures import SINGLE_VALUE
from ttsv.tt.ranks import absolute_rank


class Normalize(nn.Module):
    """`(x - mean) / std` per channel, for images (batch, channels, n_1, ..., n_dims) with pixels in [0, 1].

    `mean`, `std`: one value for all channels or one per channel; std above 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], dims: int = 2) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(tuple(mean)).reshape(-1, *(1,) * dims))
        self.register_buffer("std", torch.tensor(tuple(std)).reshape(-1, *(1,) * dims))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes one value for all channels, as earlier checkpoints have it, where this has one per channel."""
        for name, own in self.named_buffers():
            given = state_dict.get(prefix + name)
            if given is not None and given.ndim == own.ndim and len(given) == 1:
                state_dict[prefix + name] = given.expand_as(own)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised images, of the same shape."""
        return (pixels - self.mean) / self.std


Builder = Callable[[Sequence[ConvShape], ConvFactory, nn.Module, int], nn.Module]


def _resnet(shapes: Sequence[ConvShape], conv: ConvFactory, normalize: nn.Module, num_classes: int) -> nn.Module:
    from ttsv.models.torchvision_models import ResNet  # importing torchvision takes seconds

    return ResNet(shapes, conv, normalize, num_classes)


BUILDERS: dict[str, Builder] = {
    "single-conv": SingleConv,
    "small-cnn": SmallCNN,
    "small-cnn1d": SmallCNN,
    "small-cnn3d": SmallCNN,
    "wrn{6n+4}-{k}": WideResNet,
    "vgg11-19": VGG,
    "lipconvnet-{5n}": LipConvNet,
    "resnet18-34": _resnet,
}
"""Pattern of a family -> what builds its networks from their shapes, a maker of convolutions, the normalisation and
the class count."""


def build_model(spec: ModelArguments, options: Mapping[str, Any]) -> nn.Module:
    """Builds the network of some arguments and options of its own, as `ttsv.models.create_model` documents."""
    check_choice("layer", spec.layer, LAYERS)
    check_frames(spec.frames)
    sizes = {"num_classes": spec.num_classes, "in_channels": spec.in_channels, "image_size": spec.image_size}
    check_counts(**sizes)
    if spec.rank is not None:
        absolute_rank(spec.rank, 1)
    family, numbers = find(spec.name)
    if family.pattern not in BUILDERS:
        from ttsv.models.torchvision_models import classifier

        for option, value in options.items():
            raise ConfigError(option, value, f"is no option of {spec.name}")
        return classifier(spec, architecture=str(numbers["architecture"]), normalize=_normalization(spec, 2))
    shapes = layer_shapes(spec.name, **sizes, **options)
    normalize = _normalization(spec, shapes[0].dims)
    conv = ConvFactory(spec.layer, largest_rank(shapes, spec.rank), spec.frames)  # type: ignore[arg-type] # checked above
    return BUILDERS[family.pattern](shapes, conv, normalize, spec.num_classes)


def check_buildable(arguments: ModelArguments, *, alone: bool = False) -> None:
    """Raises `ConfigError` where `create_model` does, without making weights.

    `alone`: also where the network cannot be trained on one image at a time, as a batch norm sees one pixel of it.
    What cannot be told without weights passes.
    """
    error = _build_error(arguments, alone)
    if error is not None:
        raise ConfigError(error.field, error.value, error.fix)


@lru_cache(maxsize=1024)
def _build_error(arguments: ModelArguments, alone: bool) -> ConfigError | None:
    pixels = (arguments.image_size,) * 2
    with _one_at_a_time, torch.device("meta"), torch.no_grad():
        try:
            model = build_model(arguments, {})
            if alone:
                model.train()(torch.zeros(1, arguments.in_channels, *pixels))
        except ConfigError as error:
            return error
        except NotImplementedError:
            pass
        except ValueError as error:
            if SINGLE_VALUE not in str(error):
                raise
            return ConfigError("training.batch_size", 1, "batch norm finds no variance in a single value")
    return None


_one_at_a_time = threading.Lock()
"""What torchvision warns of is hidden meanwhile, which concerns the whole process."""


def _normalization(spec: ModelArguments, dims: int) -> Normalize:
    """Raises `ConfigError` for other than finite numbers, or a spread too small."""
    for field, values in (("mean", spec.mean), ("std", spec.std)):
        fix = f"must be a list of one finite number, or of one per channel ({spec.in_channels})"
        if not isinstance(values, Sequence) or len(values) not in (1, spec.in_channels):
            raise ConfigError(field, values, fix)
        for value in values:
            check_number(field, value, fix)
            if not math.isfinite(value):
                raise ConfigError(field, values, fix)
    if min(spec.std) < SMALLEST_STD:
        raise ConfigError("std", spec.std, f"must be at least {SMALLEST_STD:g}")
    return Normalize(spec.mean, spec.std, dims)
