"""The regularization that keeps free frames near orthonormal (section 'Orthogonality Constraints')."""

from typing import Any

import torch
from torch import Tensor, nn

from ttsv.errors import ConfigError
from ttsv.layers.framed import Framed


def orthogonal_loss(model: nn.Module, normalizer: str = "paper") -> Tensor | None:
    """Returns the orthogonal loss (eq. orthloss), a differentiable 0-d tensor, or None without free frames.

    It is the sum over layers of `|k1^T k1 - I|_F^2 + |k3 k3^T - I|_F^2`, divided by the sum of `r1^2 + r2^2`
    ("paper"). The authors' code divides by the sum of `2 r2^2` ("code"); the lambda_ort that the paper prints
    belong to the code. Layers whose frames are held orthonormal have nothing to lose and are left out of both sums.
    """
    check_normalizer(normalizer)
    deviations: list[Tensor] = []
    entries = 0
    for layer in model.modules():
        if isinstance(layer, Framed) and layer.frames == "free":
            r1, r2 = layer.rank
            entries += r1 * r1 + r2 * r2 if normalizer == "paper" else 2 * r2 * r2
            deviations += [_Deviation.apply(frame)[0] for frame in (layer.k1, layer.k3.T)]
    return torch.stack(deviations).sum() / entries if deviations else None


def check_normalizer(normalizer: str) -> None:
    """Raises `ConfigError` for an unknown one."""
    if normalizer not in ("paper", "code"):
        raise ConfigError("normalizer", normalizer, 'must be "paper" or "code"')


class _Deviation(torch.autograd.Function):
    """`|k^T k - I|_F^2` of a matrix k, and `k^T k - I`, which is not differentiated.

    The gradient `4 k (k^T k - I)` takes one product, where autograd takes two.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(frame: Tensor) -> tuple[Tensor, Tensor]:
        excess = _excess(frame)
        return excess.square().sum(), excess

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        frame, excess = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated, and depends on the frame twice
            excess = _excess(frame)
        found: Tensor = frame @ (4 * gradient * excess).to(frame.dtype)
        return found


def _excess(frame: Tensor) -> Tensor:
    gram = frame.T @ frame
    return gram - torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
