"""VGG with batch normalisation, for small images (Simonyan & Zisserman, ICLR 2015, as in Gouk et al., 2021)."""

from collections.abc import Sequence

from torch import Tensor, nn

from ttsv.models.conv_shape import ConvShape
from ttsv.models.convolutions import ConvFactory, initialize, xavier
from ttsv.spectral.geometry import Convolution


class VGG(nn.Module):
    """Convolutions with biases, each with batch norm (eps 1e-3) and ReLU, five poolings, three linear layers.

    Takes pixels (batch, channels, size, size) in [0, 1], gives logits (batch, num_classes). Of 512 channels at 1/32 of
    the size the head makes 512, 512 and the classes, with ReLU between and no dropout. Glorot & Bengio's uniform
    weights and biases of zero, as in the authors' code.
    """

    def __init__(self, shapes: Sequence[ConvShape], conv: ConvFactory, normalize: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.normalize = normalize
        self.features = nn.Sequential()
        for shape, following in zip(shapes, [*shapes[1:], None], strict=True):
            self.features.extend([conv(shape), nn.BatchNorm2d(shape.out_channels, eps=1e-3), nn.ReLU(inplace=True)])
            if following is None or following.input_size < shape.output_size:
                self.features.append(nn.MaxPool2d(2))
        width, side = shapes[-1].out_channels, shapes[-1].output_size // 2
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(width * side * side, 512),
            nn.ReLU(inplace=True),
            nn.Linear(512, 512),
            nn.ReLU(inplace=True),
            nn.Linear(512, num_classes),
        )
        initialize(self, conv, _xavier_without_bias)
        for layer in self.classifier:
            if isinstance(layer, nn.Linear):
                _xavier_without_bias(layer)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of images."""
        logits: Tensor = self.classifier(self.features(self.normalize(pixels)))
        return logits


def _xavier_without_bias(layer: Convolution | nn.Linear) -> None:
    xavier(layer)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
