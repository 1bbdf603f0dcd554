"""What a few passes through a network can say against a bound: a net below the rules of `lipschitz_rules`."""

import math

import torch
from torch import Tensor, nn

from ttsv.errors import ConfigError


def require_unrefuted(model: nn.Module, image: Tensor, bound: float) -> None:
    """Raises `ConfigError` for a network that is no function of one image, or that refutes the bound.

    `model` in float64 and evaluation mode; `image (1, channels, ...)` gives the shape. Two random images show whether
    the network draws random numbers unseen by the trace, and whether images of a batch touch each other; what it
    does between them, and one gradient at each, must stay below the bound.
    """
    generator = torch.Generator().manual_seed(0)
    name = type(model).__name__
    images = [torch.rand(image.shape, generator=generator, dtype=torch.float64).to(image.device) for _ in range(2)]
    try:
        # Copies: a network may write into what it is given.
        first, again, second = (model(pixels.clone()).double() for pixels in (images[0], images[0], images[1]))
    except RuntimeError as error:
        raise ConfigError("model", name, f"fails in float64: {error}") from error
    if not torch.allclose(first, again, rtol=1e-9, atol=1e-12, equal_nan=True):
        raise ConfigError("model", name, "gives one image two outputs: it draws random numbers in evaluation mode")
    alone = torch.cat([first, second]) if first.ndim else first
    try:
        pair = model(torch.cat(images)).double()
    except RuntimeError:  # for one image at a time: nothing to mix
        pair = alone
    if pair.shape != alone.shape or not torch.allclose(pair, alone, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise ConfigError(
            "model", name, "gives an image another output beside another image: it mixes those of a batch"
        )
    # Of an output that is far from 0 the difference keeps few digits.
    seen = (first - second).norm() - 1e-9 * first.norm()
    steepest = max((seen / (images[0] - images[1]).norm()).item(), *(_slope(model, at, generator) for at in images))
    if not 0 <= bound < math.inf or steepest > bound * (1 + 1e-5):
        raise ConfigError(
            "model", name, f"has the slope {steepest:.6g} or more, its bound came out as {bound:.6g}: please report it"
        )


def _slope(model: nn.Module, image: Tensor, generator: torch.Generator) -> float:
    """The gradient's length of the output along a random direction; 0 where autograd has none."""
    image = image.clone().requires_grad_()
    try:
        with torch.enable_grad():
            output = model(image.clone())
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        (gradient,) = torch.autograd.grad(output, image, direction / direction.norm(), materialize_grads=True)
    except RuntimeError:
        return 0.0
    slope: float = gradient.norm().item()
    return slope
