"""torchvision's classifiers, untrained: its ResNets with any kind of layer, all others dense or decomposed."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ttsv.errors import ConfigError
from ttsv.layers import tensorize
from ttsv.models import ModelArguments
from ttsv.models.conv_shape import ConvShape, check_torchvision_layer
from ttsv.models.convolutions import ConvFactory, initialize, kaiming
from ttsv.spectral.network import evaluating


class ResNet(torchvision.models.ResNet):  # type: ignore[misc] # torchvision has no types
    """torchvision's ResNet of basic blocks with the convolutions of `shapes`.

    Takes pixels (batch, channels, size, size) in [0, 1], gives logits (batch, num_classes). Where the stem is a 3x3
    convolution (images below 64 pixels a side) no pooling follows it.
    """

    def __init__(self, shapes: Sequence[ConvShape], conv: ConvFactory, normalize: nn.Module, num_classes: int) -> None:
        first = [shape.name for shape in shapes if shape.name.endswith(".conv1")]
        blocks = [sum(name.startswith(f"layer{stage}.") for name in first) for stage in range(1, 5)]
        super().__init__(torchvision.models.resnet.BasicBlock, blocks, num_classes)
        self.normalize = normalize
        for shape in shapes:
            self.set_submodule(shape.name, conv(shape))
        if shapes[0].stride == 1:
            self.maxpool = nn.Identity()
        initialize(self, conv, kaiming)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of images."""
        logits: Tensor = super().forward(self.normalize(pixels))
        return logits


def check_classifier(architecture: str, layer: str) -> None:
    """Raises `ConfigError` for a name that torchvision does not have, and for layers other than dense and tt."""
    known = torchvision.models.list_models(module=torchvision.models)
    if architecture not in known:
        raise ConfigError("model", f"torchvision:{architecture}", f"torchvision has {', '.join(known)}")
    check_torchvision_layer(layer)


def classifier(spec: ModelArguments, *, architecture: str, normalize: nn.Module) -> nn.Module:
    """Builds the classifier that torchvision has under a name, `tensorize`d for "tt".

    Its first convolution is made anew for other than three channels. Raises `ConfigError` for an unknown name, for
    kinds of layer other than dense and tt, and for images that the network does not take.
    """
    check_classifier(architecture, spec.layer)
    # Auxiliary heads, which the other networks do not have, would give training several outputs.
    options = {"aux_logits": False} if architecture in ("googlenet", "inception_v3") else {}
    with warnings.catch_warnings(), _CountsWithValues() if architecture.startswith("regnet") else nullcontext():
        warnings.filterwarnings("ignore", message="The default weight initialization of .*")
        network: nn.Module = torchvision.models.get_model(
            architecture, weights=None, num_classes=spec.num_classes, **options
        )
    if spec.in_channels != 3:
        _take_channels(network, spec.in_channels)
    model = nn.Sequential(OrderedDict(normalize=normalize, network=network))
    try:
        with torch.no_grad(), evaluating(model):
            model(torch.zeros(1, spec.in_channels, spec.image_size, spec.image_size))
    except NotImplementedError:  # without weights, and a RuntimeError
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        fix = f"is not a size that torchvision's {architecture} takes: {error}"
        raise ConfigError("image_size", spec.image_size, fix) from error
    if spec.layer == "dense" or spec.rank is None:
        return model
    return tensorize(model, spec.rank, frames=spec.frames)  # type: ignore[arg-type] # checked there


class _CountsWithValues(TorchFunctionMode):
    """Gives values to what counts where weights have none: torchvision's RegNets work their widths out as tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Makes ranges, and tensors of numbers, on the processor."""
        place = {"device": "cpu"} if func in (torch.arange, torch.tensor) else {}
        return func(*args, **{**(kwargs or {}), **place})


def _take_channels(network: nn.Module, in_channels: int) -> None:
    """Replaces the first convolution by one from other channels."""
    name, first = next((name, module) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    conv = nn.Conv2d(
        in_channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type] # as long as the axes, which mypy cannot see
        stride=first.stride,  # type: ignore[arg-type]
        padding=first.padding,  # type: ignore[arg-type]
        dilation=first.dilation,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    network.set_submodule(name, conv)
