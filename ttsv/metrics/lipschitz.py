"""Empirical Lipschitz constants: how much an attack finds that a network's output moves. Lower bounds, no proof."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ttsv.checks import check_choice, check_count, check_counts, check_positive, check_seed
from ttsv.data.loading import as_pixels
from ttsv.errors import ConfigError, DataError
from ttsv.metrics.accuracy import check_labelled, check_logits, odds_against
from ttsv.models.build import Normalize
from ttsv.runtime.headway import get_on
from ttsv.runtime.precision import in_float64, own_dtype
from ttsv.spectral.network import evaluating

Space = Literal["pixels", "normalised"]
Method = Literal["fgsm", "ascent"]
Norm = Literal["L2", "Linf"]

_SHORTEST = 0.01
"""Steps shorter than this share of the radius are not tried: what float32 rounds would steer them."""

_ROUNDED = 1e-12
"""Share of the logits that float64 may have rounded: of two that are close the difference is no more exact."""


@dataclass(frozen=True, kw_only=True)
class EmpiricalLipschitz:
    """Per image `|f(x') - f(x)| / |x' - x|`, L2 norms of logits and of images in `space`: `values` (count,), float64.

    `values` are on the CPU, their largest is `maximum`. The paper's values are those of the normalised space.
    `longest_unit`: the most that a step of length 1 in the space is in pixels, 1 or the largest std; a Lipschitz bound
    with respect to pixels, times this, holds in the space.
    """

    values: Tensor
    maximum: float
    space: Space
    method: Method
    norm: Norm
    radius: float
    longest_unit: float

    def histogram(self, bins: int = 30) -> tuple[list[int], list[float]]:
        """How many values fall into each of `bins` equal bins, and the `bins + 1` edges between least and largest.

        Where these are too near each other for so many edges to differ, the outermost are about each of them.
        """
        check_count("bins", bins)
        values = self.values.double().numpy()
        ends = values.min(), values.max()
        room = bins * np.spacing(abs(ends[1]))
        if ends[1] - ends[0] < room:
            ends = ends[0] - max(0.5, room), ends[1] + max(0.5, room)
        counts, edges = np.histogram(values, bins, ends)
        return counts.tolist(), edges.tolist()


def empirical_lipschitz(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    radius: float = 0.5,
    space: Space = "pixels",
    method: Method = "fgsm",
    norm: Norm = "L2",
    steps: int = 20,
    clamp: bool = False,
    seed: int = 0,
    batch_size: int = 100,
    precision: Literal["model", "float64"] = "model",
) -> EmpiricalLipschitz:
    """Searches empirical Lipschitz constants of a network in evaluation mode, one per image; it stays as it is.

    `images` (count, channels, ...) uint8 or floats in [0, 1] and `labels` (count,), these on the model's device.

    `method="fgsm"`: x' is one step along the gradient of the cross-entropy, as in the paper (section "Empirical
    Lipschitz constant", radius 0.5). The paper does not name the step's norm: `norm="L2"` (default) is a step of L2
    length `radius` along the gradient, `norm="Linf"` one of `radius` along each coordinate's sign, which is
    `sqrt(coordinates)` times as long. Where the gradient is 0 the step is drawn from `seed`.

    `method="ascent"`: from the L2 step of FGSM, `steps` steps of gradient ascent on the ratio itself within the ball of
    L2 radius `radius`; each turns to the gradient, like a power iteration for the Jacobian, and lengthens or shortens
    as the ratio asks. The best of all that were seen counts, hence no less than FGSM finds.

    `space`: where the distance is taken and the steps are made: "pixels", or "normalised", the coordinates behind the
    model's `ttsv.models.build.Normalize`. `clamp`: keep x' among images, within [0, 1]; off by default, because
    a Lipschitz constant is about all inputs (an image that cannot move then has the value 0).

    `precision`: of the search. The ratio of the points found is always computed in float64, on the weights as they
    are, less what that rounds, so that it is at most `ttsv.certification.certificates.lipschitz_bound` (times
    `longest_unit`).

    Raises `ConfigError` for options out of range, and for a normalised space of a model without one `Normalize`;
    `DataError` for images, labels or logits that cannot be used.
    """
    for name, value, known in (("space", space, Space), ("method", method, Method), ("norm", norm, Norm)):
        check_choice(name, value, get_args(known))
    check_positive("radius", radius)
    check_counts(steps=steps, batch_size=batch_size)
    check_seed(seed)
    if method == "ascent" and norm != "L2":
        raise ConfigError("norm", norm, "must be L2 for gradient ascent")
    if precision not in ("model", "float64"):
        raise ConfigError("precision", precision, "must be model or float64")
    check_labelled(images, labels)
    exact = in_float64(model)
    searched = exact if precision == "float64" else model
    scale = _pixels_per_unit(exact, space)
    generator = torch.Generator().manual_seed(int(seed))
    values = []
    with evaluating(model):
        for batch, own in zip(*(torch.split(part, int(batch_size)) for part in (images, labels)), strict=True):
            pixels = as_pixels(batch.to(own.device)).to(own_dtype(searched))
            search = _Search(searched, pixels, scale, clamp)
            start = search.reachable(_fgsm(search, own, radius, norm, generator))
            moved = start if method == "fgsm" else _ascend(search, start, radius, int(steps))
            measured = _Search(exact, pixels.double(), scale, clamp)
            values.append(measured.ratio(moved.double(), _ROUNDED).cpu())
    found = torch.cat(values)
    if not found.isfinite().all():
        raise DataError(f"{int((~found.isfinite()).sum())} of {len(found)} images have ratios that are not finite")
    return EmpiricalLipschitz(
        values=found,
        maximum=found.max().item(),
        space=space,
        method=method,
        norm=norm,
        radius=radius,
        longest_unit=scale.max().item(),
    )


class _Search:
    """A network around images: `x' = x + scale step`, with steps in the coordinates of the space."""

    def __init__(self, model: nn.Module, pixels: Tensor, scale: Tensor, clamp: bool) -> None:
        self.model, self.pixels, self.clamp = model, pixels, clamp
        self.scale = scale.to(pixels)
        with torch.no_grad():
            self.logits: Tensor = model(pixels.clone())  # which it may write into

    def moved(self, steps: Tensor) -> Tensor:
        """The logits after steps (count, channels, ...)."""
        get_on()
        logits: Tensor = self.model(self.pixels + self.scale * steps)
        return logits

    def reachable(self, steps: Tensor) -> Tensor:
        """The steps, cut where they would leave [0, 1] if that is asked for."""
        if not self.clamp:
            return steps
        return ((self.pixels + self.scale * steps).clamp(0, 1) - self.pixels) / self.scale

    @torch.no_grad()
    def ratio(self, steps: Tensor, rounded: float = 0.0) -> Tensor:
        """(count,): how far the logits move, less a share of them, over the length of the step; 0 for no step."""
        # Rounding the sum x + step changes the step: its length is taken of what is left in the sum.
        taken = ((self.pixels + self.scale * steps) - self.pixels) / self.scale
        moved = self.moved(steps)
        change, length = _lengths(moved - self.logits), _lengths(taken)
        change = (change - rounded * (_lengths(moved) + _lengths(self.logits))).clamp_min(0)
        return torch.where(length > 0, change / length.clamp_min(torch.finfo(length.dtype).tiny), 0.0)


def _fgsm(search: _Search, labels: Tensor, radius: float, norm: Norm, generator: torch.Generator) -> Tensor:
    """The step along the cross-entropy's gradient, see `empirical_lipschitz`."""
    steps = torch.zeros_like(search.pixels).requires_grad_()
    with torch.enable_grad():
        logits = search.moved(steps)
        check_logits(logits, labels)
        # The direction is the cross-entropy's, which loses it where the network is sure.
        gradient = _gradient(odds_against(logits, labels).sum(), steps)
    # Drawn for every image, so that an image's step does not depend on the others' gradients.
    drawn = torch.randn(gradient.shape, generator=generator, dtype=torch.float64).to(gradient)
    gradient = torch.where(_column(_lengths(gradient), gradient) > 0, gradient, drawn)
    return radius * (gradient.sign() if norm == "Linf" else _unit(gradient))


def _gradient(value: Tensor, steps: Tensor) -> Tensor:
    """The gradient of a value by the steps; zeros where autograd sees no way from them to it."""
    if not value.requires_grad:
        return torch.zeros_like(steps)
    (gradient,) = torch.autograd.grad(value, steps, materialize_grads=True)
    return gradient


def _ascend(search: _Search, start: Tensor, radius: float, count: int) -> Tensor:
    """The best steps seen on the way of gradient ascent from `start`, see `empirical_lipschitz`."""
    best, most = start, search.ratio(start)
    lengths = _lengths(start).clamp(_SHORTEST * radius, radius)
    # From a step of no length there is no way: the sphere's own direction is as good as any.
    steps = torch.where(_column(_lengths(start), start) > 0, start, torch.ones_like(start))
    steps = search.reachable(_unit(steps) * _column(lengths, steps))
    for _ in range(count):
        steps = steps.detach().requires_grad_()
        with torch.enable_grad():
            change = search.moved(steps) - search.logits
            gradient = _gradient(change.square().sum() / 2, steps)
        # The slope of log |change| - log |step| along the step.
        square = _lengths(change.detach()).square().clamp_min(torch.finfo(change.dtype).tiny)
        slope = (gradient * steps.detach()).flatten(1).sum(1) / square - 1
        lengths = (lengths * (slope.clamp(-1, 1) / 2).exp()).clamp(_SHORTEST * radius, radius)
        flat = _column(_lengths(gradient), gradient) == 0
        direction = torch.where(flat, steps.detach(), gradient)
        steps = search.reachable(_unit(direction) * _column(lengths, direction))
        reached = search.ratio(steps)
        best = torch.where(_column(reached > most, best), steps, best)
        most = torch.maximum(reached, most)
    return best


def _pixels_per_unit(model: nn.Module, space: Space) -> Tensor:
    """What one unit of the space is in pixels: a scalar, or one value per channel."""
    if space == "pixels":
        return torch.ones(())
    found = [module for module in model.modules() if isinstance(module, Normalize)]
    if len(found) != 1:
        fix = f"needs a model with one Normalize as its first part; {type(model).__name__} has {len(found)}"
        raise ConfigError("space", space, fix)
    return found[0].std


def _lengths(tensors: Tensor) -> Tensor:
    """L2 norms (count,)."""
    lengths: Tensor = torch.linalg.vector_norm(tensors.flatten(1), dim=1)
    return lengths


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Values (count,) with axes of one to go with images."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _unit(tensors: Tensor) -> Tensor:
    """Tensors of length 1."""
    largest = tensors.flatten(1).abs().amax(1).clamp_min(torch.finfo(tensors.dtype).tiny)
    scaled = tensors / _column(largest, tensors)
    return scaled / _column(_lengths(scaled).clamp_min(torch.finfo(tensors.dtype).tiny), scaled)
