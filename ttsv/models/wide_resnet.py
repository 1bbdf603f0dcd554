"""Wide residual networks as Gouk et al. (Machine Learning 2021) and the paper have them: no convolutional shortcuts."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from ttsv.models.conv_shape import ConvShape
from ttsv.models.convolutions import ConvFactory, initialize, kaiming


class WideResNet(nn.Module):
    """A convolution, three stages of pre-activation blocks, batch norm, ReLU, global average pooling, a linear head.

    Takes pixels (batch, channels, size, size) in [0, 1], gives logits (batch, num_classes). Without dropout, dense
    convolutions drawn by He et al.'s rule for the outputs' fan, as in the authors' code.
    """

    def __init__(self, shapes: Sequence[ConvShape], conv: ConvFactory, normalize: nn.Module, num_classes: int) -> None:
        super().__init__()
        stem, *rest = shapes
        self.normalize = normalize
        self.conv1 = conv(stem)
        self.layer1, self.layer2, self.layer3 = (nn.Sequential() for _ in range(3))
        for first, second in zip(rest[::2], rest[1::2], strict=True):
            blocks = self.get_submodule(first.name.partition(".")[0])
            assert isinstance(blocks, nn.Sequential)
            blocks.append(WideBlock(first, second, conv))
        self.bn1 = nn.BatchNorm2d(shapes[-1].out_channels)
        self.fc = nn.Linear(shapes[-1].out_channels, num_classes)
        initialize(self, conv, kaiming)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of images."""
        features = self.conv1(self.normalize(pixels))
        features = self.layer3(self.layer2(self.layer1(features)))
        features = functional.relu(self.bn1(features), inplace=True)
        logits: Tensor = self.fc(features.mean((2, 3)))
        return logits


class WideBlock(nn.Module):
    """Batch norm, ReLU and convolution, twice, plus the block's raw input.

    Where the block changes the shape, its input is average-pooled by the stride and gets zero channels on both sides
    (of an odd number the extra one last).
    """

    def __init__(self, first: ConvShape, second: ConvShape, conv: ConvFactory) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(first.in_channels)
        self.conv1 = conv(first)
        self.bn2 = nn.BatchNorm2d(second.in_channels)
        self.conv2 = conv(second)
        self.stride = first.stride
        self.extra_channels = second.out_channels - first.in_channels

    def forward(self, features: Tensor) -> Tensor:
        """Features (batch, channels, n, n) to those of n / stride pixels a side."""
        shortcut = features if self.stride == 1 else functional.avg_pool2d(features, self.stride)
        if self.extra_channels:
            before = self.extra_channels // 2
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, before, self.extra_channels - before))
        residual = self.conv1(functional.relu(self.bn1(features), inplace=True))
        residual = self.conv2(functional.relu(self.bn2(residual), inplace=True))
        total: Tensor = residual.add_(shortcut)
        return total
