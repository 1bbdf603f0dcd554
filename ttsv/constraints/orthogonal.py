"""Frames kept near orthonormal by a term of the loss."""

from torch import Tensor, nn

from ttsv.checks import check_number
from ttsv.constraints.protocol import Unconstrained
from ttsv.errors import ConfigError
from ttsv.layers import orthogonal_loss
from ttsv.layers.frames import check_normalizer


class Orthogonal(Unconstrained):
    """Keeps the frames of TT layers near orthonormal: the penalty `lambda_ort` times the orthogonal loss.

    `normalizer`: "paper" (eq. orthloss) or "code", to which the published lambda_ort belong (see
    `ttsv.layers.orthogonal_loss`). Without free frames the penalty is 0.0.
    """

    def __init__(self, lambda_ort: float, *, normalizer: str = "paper") -> None:
        super().__init__()
        fix = "must be a finite number of at least 0"
        check_number("lambda_ort", lambda_ort, fix)
        if not 0 <= lambda_ort < float("inf"):
            raise ConfigError("lambda_ort", lambda_ort, fix)
        check_normalizer(normalizer)
        self.lambda_ort = lambda_ort
        self.normalizer = normalizer

    def penalty(self, model: nn.Module) -> Tensor | float:
        """`lambda_ort` times the orthogonal loss."""
        loss = orthogonal_loss(model, self.normalizer) if self.lambda_ort else None
        return 0.0 if loss is None else self.lambda_ort * loss
