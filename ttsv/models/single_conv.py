"""One convolution and little else: to measure what a layer costs, as a trial like any other."""

from collections.abc import Sequence

from torch import Tensor, nn

from ttsv.models.conv_shape import ConvShape
from ttsv.models.convolutions import ConvFactory


class SingleConv(nn.Module):
    """A 3x3 convolution that keeps channels and size, global average pooling and a linear head.

    Takes pixels (batch, channels, size, size) in [0, 1], gives logits (batch, num_classes).
    """

    def __init__(self, shapes: Sequence[ConvShape], conv: ConvFactory, normalize: nn.Module, num_classes: int) -> None:
        super().__init__()
        (shape,) = shapes
        self.normalize = normalize
        self.conv = conv(shape)
        self.head = nn.Linear(shape.out_channels, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of images."""
        logits: Tensor = self.head(self.conv(self.normalize(pixels)).mean((2, 3)))
        return logits
