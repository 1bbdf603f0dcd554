"""LipConvNet (Singla & Feizi, ICML 2021): convolutions and MinMax alone, 1-Lipschitz if its convolutions are."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from ttsv.layers import MinMax
from ttsv.models.conv_shape import ConvShape
from ttsv.models.convolutions import ConvFactory, initialize, xavier


class LipConvNet(nn.Module):
    """Five stages of convolutions, each followed by MinMax, and a 1x1 convolution to the logits.

    Takes pixels (batch, channels, size, size) in [0, 1], gives logits (batch, num_classes). With layers "soc", "bcop"
    and the like the network is 1-Lipschitz in normalised coordinates, as far as its layers are. With "dense" or "tt"
    it is the unconstrained network to compare with: plain strided convolutions, drawn by Glorot & Bengio's uniform
    rule as in the authors' code.
    """

    def __init__(self, shapes: Sequence[ConvShape], conv: ConvFactory, normalize: nn.Module, num_classes: int) -> None:
        super().__init__()
        *hidden, last = shapes
        self.normalize = normalize
        self.layer1, self.layer2, self.layer3, self.layer4, self.layer5 = (nn.Sequential() for _ in range(5))
        for shape in hidden:
            stage = self.get_submodule(shape.name.partition(".")[0])
            assert isinstance(stage, nn.Sequential)
            stage.append(LipBlock(conv(shape)))
        self.final_conv = conv(last)
        initialize(self, conv, xavier)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of images."""
        features = self.normalize(pixels)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4, self.layer5):
            features = stage(features)
        # More than one pixel is left of images larger than 32 x 32: stacked into channels, which keeps the norm.
        features = functional.pixel_unshuffle(features, features.shape[-1])
        logits: Tensor = self.final_conv(features).flatten(1)
        return logits


class LipBlock(nn.Module):
    """A convolution and MinMax."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.activation = MinMax()

    def forward(self, features: Tensor) -> Tensor:
        """Features (batch, channels, n, n) to those of n / stride pixels a side."""
        activated: Tensor = self.activation(self.conv(features))
        return activated
