"""Small networks: one that trains in seconds on one CPU core, and one of a single convolution, to measure its cost."""

from collections.abc import Sequence

from torch import Tensor, nn

from ttsv.models.conv_shape import ConvShape
from ttsv.models.convolutions import ConvFactory

_BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class SmallCNN(nn.Module):
    """Convolution, batch norm and ReLU per shape, then global average pooling and a linear head.

    Takes pixels (batch, channels, size, ...) in [0, 1] along as many axes as the shapes have, gives logits
    (batch, num_classes). `conv` makes the convolution of a shape; it has no bias, which batch norm would cancel.
    """

    def __init__(self, shapes: Sequence[ConvShape], conv: ConvFactory, normalize: nn.Module, num_classes: int) -> None:
        super().__init__()
        batch_norm = _BATCH_NORM[shapes[0].dims]
        self.normalize = normalize
        self.conv1, self.conv2, self.conv3 = (conv(shape) for shape in shapes)
        self.norm1, self.norm2, self.norm3 = (batch_norm(shape.out_channels) for shape in shapes)
        self.head = nn.Linear(shapes[-1].out_channels, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of images."""
        features = self.normalize(pixels)
        features = self.norm1(self.conv1(features)).relu()
        features = self.norm2(self.conv2(features)).relu()
        features = self.norm3(self.conv3(features)).relu()
        logits: Tensor = self.head(features.mean(tuple(range(2, features.ndim))))
        return logits


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
