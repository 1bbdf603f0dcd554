"""Certified robustness: a bound of a network's Lipschitz constant, and what no attack of a radius then can change.

A bound is proved by following the network (`ttsv.certification.trace`) and then tried: two drawn images, and a step
along a gradient at each, must not refute it. A certificate is a margin over a bound. Both are about the network that
the weights define in exact arithmetic, see `ttsv.certification`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ttsv.certification.determinism import watched_for_random_numbers
from ttsv.certification.layers import module_rule
from ttsv.certification.linear_maps import EPS, rounded_up
from ttsv.certification.reach import SHORTEST_STEP, Affine, Factor
from ttsv.certification.rules import FUNCTIONS, JOINS
from ttsv.certification.trace import Trace, Traced
from ttsv.checks import check_count, check_positive
from ttsv.config.evaluation import RADII
from ttsv.errors import ConfigError
from ttsv.layers import SOC, FramedConv2d
from ttsv.metrics.accuracy import check_labelled, check_logits, predict
from ttsv.runtime.precision import in_float64
from ttsv.spectral.network import spectral_layers, zero_input
from ttsv.spectral.symbol import Size

_STEP = 1e-3
"""Length of a step along a gradient: short beside what bends a network, long beside what float64 rounds."""

Radii = Sequence[float] | NDArray[np.floating] | Tensor
"""One after another, or in one axis."""


@dataclass(frozen=True, kw_only=True)
class LipschitzBound:
    """A rigorous upper bound `value` of the L2 Lipschitz constant of a network, from pixels to its output.

    `factors` lists every step in the order in which its bound was computed. `pairs` (classes, classes), float64 on the
    CPU, bounds the difference of two logits: by `sqrt(2) value` or, where the network ends in a linear map, by the
    bound before that times the distance of its two rows if it is smaller. It is None where the output is no vector.
    `pairs_by` says "head" where any pair is better for the linear map, else "whole".
    """

    value: float
    factors: tuple[Factor, ...]
    pairs: Tensor | None = field(repr=False, compare=False)
    pairs_by: str

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """What is proved of each image, on the CPU: `radii`, `margins`, `rounding` (count,), float64, `correct` bool.

    No change of the pixels with an L2 norm below its entry of `radii` makes another class win; that is 0 where the
    image is not classified as labelled, and for what would be less than 1e-5. An entry of `margins` is the label's
    logit less the largest other one, in float64, less that of `rounding`. The radii come from `bound`.
    """

    radii: Tensor
    margins: Tensor
    rounding: Tensor
    correct: Tensor
    bound: LipschitzBound


def lipschitz_bound(model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> LipschitzBound:
    """Proves an upper bound of the network's L2 Lipschitz constant in evaluation mode, with respect to pixels.

    For images `(batch, in_channels, *input_size)`; `in_channels` defaults to those of the first convolution. The
    network is followed function by function: layers multiply by an upper bound of their norm (`ttsv.spectral.bounds`,
    for the padding, stride, dilation and groups they have; a TT layer by that of its merged kernel), residual sums add,
    concatenation takes the root of the sum of squares. Scales of batch norm and of the normalisation go into the
    convolution or linear layer before them or, past activations and poolings, behind them: that never enlarges the
    norm. The model stays as it is. All in float64, rounding of the bound included.

    Two images that are nearer to each other than 1e-5 are taken to be so far apart. That makes a difference for
    softplus alone, which torch computes with a jump: no constant holds for steps of any length.

    Raises `ConfigError` for a layer or function without a rule, which is named, for a network that draws random
    numbers in evaluation mode or mixes the images of a batch, and where there is no finite bound, or one that two
    images or a step along a gradient refute.
    """
    with watched_for_random_numbers(_drawn):
        copied = in_float64(model)
    image = zero_input(copied, input_size, in_channels=in_channels)
    trace = Trace(FUNCTIONS, JOINS, module_rule, image.device)
    with torch.no_grad():
        output = trace.run(copied, image.shape)
        value = output.reach.total
        pairs, by = _pair_bounds(output, value)
        _require_unrefuted(in_float64(model), image, value)
    return LipschitzBound(value=value, factors=tuple(trace.factors), pairs=pairs, pairs_by=by)


def certificates(
    model: nn.Module, images: Tensor, labels: Tensor, *, bound: LipschitzBound | None = None, batch_size: int = 100
) -> Certificates:
    """Certifies the L2 radius, in pixels, within which each image's label is certain to win.

    `images` (count, channels, ...) uint8 or floats in [0, 1], `labels` (count,), on any device. `bound`
    defaults to `lipschitz_bound` at the images' size. The radius is the least over the other classes of their margin
    over the bound of the two logits' difference.

    Logits are those of float64. For what float32 rounds, which is no part of the bound, each margin is reduced by
    twice the largest deviation, on that image, of the logits that the model gives in its own precision, and at least
    by 1e-12 of the largest logit; an image that the model itself misclassifies gets radius 0.

    Raises `DataError` for images, labels or logits that cannot be used, `ConfigError` as `lipschitz_bound` does.
    """
    check_labelled(images, labels)
    check_count("batch_size", batch_size)
    if bound is None:
        bound = lipschitz_bound(model, images.shape[2:], in_channels=images.shape[1])
    own = predict(model, images, batch_size=batch_size).cpu()
    # Asked for by name: a network without weights, or with plain tensors for some, would see float32.
    exact = predict(in_float64(model), images, batch_size=batch_size, dtype=torch.float64).cpu()
    labels = labels.cpu().long()
    check_logits(exact, labels)
    check_logits(own, labels)
    if bound.pairs is None or bound.pairs.shape[0] != exact.shape[1]:
        raise ConfigError("bound", bound.pairs_by, f"must be that of a network with {exact.shape[1]} logits")
    rounding = torch.maximum(2 * (own.double() - exact).abs().amax(1), 1e-12 * exact.abs().amax(1))
    gaps = _margins(exact, labels) - rounding[:, None]
    correct = (own.argmax(1) == labels) & (exact.argmax(1) == labels)
    quotients = gaps / bound.pairs[labels]
    # Without a bound above 0 the difference is constant: any margin holds everywhere, none gives nothing.
    quotients = torch.where(gaps > 0, quotients, 0.0).scatter(1, labels[:, None], math.inf)
    radii = torch.where(correct, quotients.amin(1) * (1 - 4 * EPS), 0.0)
    radii = torch.where(radii < SHORTEST_STEP, 0.0, radii)
    return Certificates(radii=radii, margins=gaps.amin(1), rounding=rounding, correct=correct, bound=bound)


def certified_accuracy(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radii: Radii = RADII,
    *,
    bound: LipschitzBound | None = None,
    batch_size: int = 100,
) -> dict[float, float]:
    """Returns radius (L2, in pixels) -> share of the images with a certificate for more than it.

    Arguments are as those of `certificates`.

    Raises `ConfigError` for no radii, and one that is not a finite number above 0.
    """
    distances = _distances(radii)
    found = certificates(model, images, labels, bound=bound, batch_size=batch_size)
    return shares_beyond(found.radii, distances)


def assumed_certified_accuracy(logits: Tensor, labels: Tensor, radii: Radii, lipschitz: float) -> dict[float, float]:
    """Returns radius (L2, in pixels) -> share of the images that an *assumed* constant would certify: no proof.

    The paper's p.r. (provable robustness): predicted correctly and `margin / (sqrt(2) lipschitz) > radius`, where
    `lipschitz` is that with respect to pixels, see `assumed_lipschitz`. `logits` (count, classes), `labels` (count,).
    Raises `ConfigError` and `DataError`.
    """
    distances = _distances(radii)
    check_positive("lipschitz", lipschitz)
    check_logits(logits, labels)
    gaps = _margins(logits.double(), labels.long()).amin(1)
    return shares_beyond(gaps / (math.sqrt(2) * lipschitz), distances)


def assumed_lipschitz(model: nn.Module, std: Sequence[float]) -> float | None:
    """Returns the Lipschitz constant, with respect to pixels, that the paper takes for granted: 1 / min(std).

    That is 1 in coordinates normalised by `std`, and is assumed of networks of which every convolution is SOC or
    SOC-TT (table 1). None for others: nobody takes them for 1-Lipschitz.
    """
    layers = spectral_layers(model).values()
    cores = [layer.core if isinstance(layer, FramedConv2d) else layer for layer in layers]
    return 1 / min(std) if cores and all(isinstance(core, SOC) for core in cores) else None


def _drawn(what: str) -> None:
    raise ConfigError(
        "model", f"{what} in a parametrization", "draws random numbers: the weights are other ones each time"
    )


def _pair_bounds(output: Traced, value: float) -> tuple[Tensor | None, str]:
    """`LipschitzBound.pairs` and `pairs_by`."""
    if output.ndim != 2:
        return None, "whole"
    classes, reach = output.shape[1], output.reach
    whole = torch.full((classes, classes), rounded_up(math.sqrt(2) * value), dtype=torch.float64)
    if not isinstance(reach, Affine) or (matrix := reach.linear.matrix()) is None:
        return whole, "whole"
    largest = 1.0
    if reach.source.scale is not None:
        largest = reach.source.scale.max().item()
        # A kernel over several pixels has, of each channel, one column per pixel.
        matrix = matrix * reach.source.scale.repeat_interleave(matrix.shape[1] // len(reach.source.scale))
    distances = torch.cdist(matrix, matrix, compute_mode="donot_use_mm_for_euclid_dist")
    # Of a merged matrix, the products that made it; of others, the subtraction and the norm.
    slack = 8 * (matrix.shape[1] + 8) * EPS * reach.linear.magnitude() * largest
    pairs = ((distances * (1 + (matrix.shape[1] + 8) * EPS) + slack) * rounded_up(reach.source.base)).cpu()
    return torch.minimum(pairs, whole), "head" if (pairs < whole).any() else "whole"


def _require_unrefuted(model: nn.Module, image: Tensor, bound: float) -> None:
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
    steepest = _quotient(first, second, images[0], images[1])
    for at, output in zip(images, (first, second), strict=True):
        further = at + _STEP * _uphill(model, at, generator)
        steepest = max(steepest, _quotient(output, model(further.clone()).double(), at, further))
    if not 0 <= bound < math.inf or steepest > bound * (1 + 1e-5):
        raise ConfigError(
            "model", name, f"has the slope {steepest:.6g} or more, its bound came out as {bound:.6g}: please report it"
        )


def _quotient(first: Tensor, second: Tensor, image: Tensor, other: Tensor) -> float:
    """How far the output moves, from one to the other, over how far the image does."""
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
        (gradient,) = torch.autograd.grad(output, leaf, direction)
    except RuntimeError:
        gradient = drawn
    chosen = gradient if 0 < gradient.norm() < math.inf else drawn
    unit: Tensor = chosen / chosen.norm()
    return unit


def _margins(logits: Tensor, labels: Tensor) -> Tensor:
    """(count, classes): the label's logit less each other one; infinite for the label itself."""
    own = logits.gather(1, labels[:, None])
    return (own - logits).scatter(1, labels[:, None], math.inf)


def _distances(radii: Radii) -> Sequence[float]:
    """The radii as a sequence. Raises `ConfigError` for none, and for what is no finite number above 0."""
    found = radii.tolist() if isinstance(radii, np.ndarray | Tensor) and radii.ndim == 1 else radii
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ConfigError("radii", radii, "must be one L2 distance at least, in pixels of [0, 1]")
    for radius in found:
        check_positive("radii", radius, "must be finite numbers above 0: L2 distances in pixels of [0, 1]")
    return found


def shares_beyond(certified: Tensor, radii: Sequence[float]) -> dict[float, float]:
    """Radius -> share of the images whose certified radius (count,) is larger."""
    return {radius: (certified > radius).double().mean().item() for radius in radii}
