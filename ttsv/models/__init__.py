"""Networks that take pixels in [0, 1]. Importing this package loads no torch; `create_model` does."""

from typing import TYPE_CHECKING, Any

from ttsv.models.shapes import ConvShape, layer_shapes, list_models

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ConvShape", "create_model", "layer_shapes", "list_models"]


def create_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    layer: str = "dense",
    rank: int | None = None,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[float, ...] = (0.5,),
    **options: Any,
) -> "nn.Module":
    """Builds a network that takes pixels in [0, 1]; the normalisation (mean, std per channel) is its first part.

    `layer="tt"` with a `rank` decomposes every convolution whose rank does not reach both channel counts.
    Raises `ConfigError` for an unknown name or layer and for values out of range.
    """
    from ttsv.models.build import build_model

    return build_model(
        name,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        layer=layer,
        rank=rank,
        mean=mean,
        std=std,
        **options,
    )
