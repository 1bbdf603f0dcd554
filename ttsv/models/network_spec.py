"""What `ttsv.models.create_model` was asked for, as its builders take it. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttsv.errors import ConfigError
from ttsv.models.conv_shape import ConvShape
from ttsv.models.shapes import layer_shapes


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """The arguments of `create_model`, which documents them; `options` are the network's own."""

    name: str
    num_classes: int
    in_channels: int
    image_size: int
    layer: str
    rank: float | None
    frames: str
    mean: Sequence[float]
    std: Sequence[float]
    options: Mapping[str, Any]

    def shapes(self) -> list[ConvShape]:
        """The network's convolutions. Raises `ConfigError` as `layer_shapes` does."""
        return layer_shapes(
            self.name,
            in_channels=self.in_channels,
            image_size=self.image_size,
            num_classes=self.num_classes,
            **self.options,
        )

    def refuse_options(self) -> None:
        """Raises `ConfigError` where options were given to a network that has none."""
        for option, value in self.options.items():
            raise ConfigError(option, value, f"is no option of {self.name}")
