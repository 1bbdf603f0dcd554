"""What a few passes through a network can say against a bound: a net below the rules of `lipschitz_rules`."""

import math

import torch
from torch import Tensor, nn

from ttsv.errors import ConfigError

_STEP = 1e-3
"""Length of a step along a gradient: short beside what bends a network, long beside what float64 rounds."""


def require_unrefuted(model: nn.Module, image: Tensor, bound: float) -> None:
    """Raises `ConfigError` for a network that is no function of one image, or that refutes the bound.

    `model` in float64 and evaluation mode; `image (1, channels, ...)` gives the shape. Two random images show whether
    the network draws random numbers unseen by the trace, and whether images of a batch touch each other; what it
    does between them, and along one gradient at each, must stay below the bound.
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
    # What is computed in another order differs by what the largest values round, wherever they cancel.
    rounding = 1e-9 + 1e-6 * alone.nan_to_num().norm().item()
    if pair.shape != alone.shape or not torch.allclose(pair, alone, rtol=0, atol=rounding, equal_nan=True):
        raise ConfigError(
            "model", name, "gives an image another output beside another image: it mixes those of a batch"
        )
    ends = [(images[0], images[1]), *((at, at + _STEP * _uphill(model, at, generator)) for at in images)]
    steepest = max(_quotient(model, *two) for two in ends)
    if not 0 <= bound < math.inf or steepest > bound * (1 + 1e-5):
        raise ConfigError(
            "model", name, f"has the slope {steepest:.6g} or more, its bound came out as {bound:.6g}: please report it"
        )


def _quotient(model: nn.Module, image: Tensor, other: Tensor) -> float:
    """How far the output moves over how far the image does."""
    first, second = model(image.clone()).double(), model(other.clone()).double()
    # Of an output that is far from 0 the difference keeps few digits.
    moved = (first - second).norm() - 1e-9 * first.norm()
    quotient: float = (moved / (image - other).norm()).item()
    return quotient


def _uphill(model: nn.Module, image: Tensor, generator: torch.Generator) -> Tensor:
    """The unit direction in which autograd says that a random sum of the outputs grows; any where it says nothing.

    What it says need not be true, of a function with a backward of its own: only values count.
    """
    drawn = torch.rand(image.shape, generator=generator, dtype=torch.float64).to(image.device)
    leaf = image.clone().requires_grad_()
    try:
        with torch.enable_grad():
            output = model(leaf.clone())
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        (gradient,) = torch.autograd.grad(output, leaf, direction, materialize_grads=True)
    except RuntimeError:
        gradient = drawn
    chosen = gradient if 0 < gradient.norm() < math.inf else drawn
    unit: Tensor = chosen / chosen.norm()
    return unit
