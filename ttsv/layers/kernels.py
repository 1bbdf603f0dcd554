"""Kernels that are made anew in every forward pass, by torch's parametrizations."""

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.precision import without_autocast


def make_without_autocast(conv: nn.Module) -> None:
    """Lets mixed precision be for the convolution alone: in bf16 iterations towards orthogonality may diverge."""
    for module in conv.modules():
        if type(module) is parametrize.ParametrizationList:
            module.__class__ = _WithoutAutocast


class _WithoutAutocast(parametrize.ParametrizationList):
    def forward(self) -> Tensor:
        """The kernel, in its parameters' own type."""
        with without_autocast(next(self.parameters()).device.type):
            found: Tensor = super().forward()
        return found
