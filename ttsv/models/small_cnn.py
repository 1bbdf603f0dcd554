"""A small convolutional network for small images: trains in seconds on one CPU core."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ttsv.models.shapes import ConvShape


class SmallCNN(nn.Module):
    """Convolution, batch norm and ReLU per shape, then global average pooling and a linear head.

    Takes pixels (batch, channels, size, size) in [0, 1], gives logits (batch, num_classes). `conv` makes the
    convolution of a shape; it has no bias, which batch norm would cancel.
    """

    def __init__(
        self,
        shapes: Sequence[ConvShape],
        conv: Callable[[ConvShape], nn.Module],
        normalize: nn.Module,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.conv1, self.conv2, self.conv3 = (conv(shape) for shape in shapes)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(shape.out_channels) for shape in shapes)
        self.head = nn.Linear(shapes[-1].out_channels, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of images."""
        features = self.normalize(pixels)
        features = self.norm1(self.conv1(features)).relu()
        features = self.norm2(self.conv2(features)).relu()
        features = self.norm3(self.conv3(features)).relu()
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits
