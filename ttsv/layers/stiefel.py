"""Matrices held orthonormal through training: a parametrization by the QR factorization."""

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.precision import at_least_single
from ttsv.tt import positive_qr


class Stiefel(nn.Module):
    """Parametrizes a matrix as the orthonormal factor of another: orthonormal columns if tall, rows if wide.

    For `torch.nn.utils.parametrize`: what the optimizer moves is a free matrix W of the same shape, what the layer
    reads is Q of `W = Q R` with R's diagonal positive, orthonormal to the dtype's rounding wherever W is. The loss
    does not depend on R, so its gradient never shrinks W, and weight decay, which would move a matrix
    parametrized around its starting point (`torch.nn.utils.parametrizations.orthogonal`; its Householder map even
    reads 0 once decay has touched the diagonal that stores signs), only changes the length of the steps.
    """

    def forward(self, free: Tensor) -> Tensor:
        """The orthonormal factor of the free matrix, of its shape; differentiable where that has full rank.

        In half precision factored in float32, then rounded.
        """
        matrix = at_least_single(free)
        frame = positive_qr(matrix.T)[0].T if free.shape[0] < free.shape[1] else positive_qr(matrix)[0]
        return frame.to(free.dtype)

    def right_inverse(self, matrix: Tensor) -> Tensor:
        """The free matrix that stands for an orthonormal one: itself. Others are orthonormalized when read."""
        return matrix


def hold_orthonormal(layer: nn.Module, name: str) -> None:
    """Parametrizes the matrix `name` of a layer by `Stiefel`, once."""
    if not is_held_orthonormal(layer, name):
        parametrize.register_parametrization(layer, name, Stiefel())


def is_held_orthonormal(layer: nn.Module, name: str) -> bool:
    """Whether the matrix `name` of a layer is what `Stiefel` makes of its parameter."""
    if not parametrize.is_parametrized(layer, name):
        return False
    maps = layer.get_submodule(f"parametrizations.{name}")
    return isinstance(maps, parametrize.ParametrizationList) and isinstance(maps[-1], Stiefel)
