"""Skew orthogonal convolutions (Singla & Feizi, ICML 2021), alone and between the frames of a TT layer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.checks import check_count, check_counts, check_positive
from ttsv.errors import ConfigError
from ttsv.layers.framed import FramedConv2d, FrameKind
from ttsv.layers.orthogonal import OrthogonalConv2d, framed_blocks, space_to_depth_size
from ttsv.layers.skew import exponential_series, series_norm_bound, skew_part, unfolding_across, unfolding_aside
from ttsv.runtime.precision import at_least_single, without_autocast
from ttsv.spectral.bounds import conv_norm_bounds, matrix_norm_bound
from ttsv.spectral.singular_values import block_singular_values
from ttsv.spectral.symbol import PeriodicConv, Size

_EPS = torch.finfo(torch.float64).eps
_START_ITERATIONS = 50
_CODE_PERIOD = 200
_GOOD_ENOUGH = 1.005
"""Bounds of the series above this are worth a tighter bound of the operator's norm, which costs much more."""


class SOC(OrthogonalConv2d):
    """The exponential of a skew convolution: orthogonal up to the series' end, 1-Lipschitz where channels differ.

    `exp(A) x = x + A x + A^2 x / 2 + ...` up to `train_terms` or, in evaluation mode, `eval_terms` powers of A, the
    zero-padded convolution with the kernel `scaled_kernel()`. A stride s is space-to-depth (both sides of the
    input are multiples of s). The kernel is square with `max(s^2 c_in, c_out)` channels: inputs get channels of
    zeros, outputs lose the last ones.

    Parameters `weight (c, c, k, k)`, k odd, and `bias (c_out)`. The skew part of the weight is scaled by
    `correction` over the smallest of the norms of its four unfoldings, which for a skew kernel are equal in pairs.
    `correction=None` is 0.7, or 1 for k = 1, as published. Those norms are estimated from below by one step of a
    power iteration per forward pass in training, warm from the one before (buffers `across`, `aside`), or as many as
    `iterations` says; after writing weights by hand call `refresh()`. Nothing is assumed of them: see
    `lipschitz_bound`.
    Raises `ConfigError`.
    """

    across: Tensor
    aside: Tensor
    _printed = ("kernel_size", "stride", "correction", "train_terms", "eval_terms")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        bias: bool = True,
        *,
        correction: float | None = None,
        train_terms: int = 5,
        eval_terms: int = 12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride)
        check_counts(train_terms=train_terms, eval_terms=eval_terms)
        if kernel_size % 2 == 0:
            raise ConfigError("kernel_size", kernel_size, "must be odd: no skew kernel has an even side")
        if correction is not None:
            check_positive("correction", correction, "must be a finite number above 0, or None")
        self.correction = correction or (1.0 if kernel_size == 1 else 0.7)
        self.train_terms = train_terms
        self.eval_terms = eval_terms
        self.iterations = 1
        channels, k = max(stride * stride * in_channels, out_channels), kernel_size
        self.weight = nn.Parameter(torch.empty(channels, channels, k, k, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.register_buffer("across", torch.empty(k * channels, device=device, dtype=dtype))
        self.register_buffer("aside", torch.empty(channels, device=device, dtype=dtype))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws a normal weight of variance `1 / c` and a uniform bias, as published, and refreshes the norms."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(len(self.weight)))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(self.out_channels), 1 / math.sqrt(self.out_channels))
        nn.init.normal_(self.across)
        nn.init.normal_(self.aside)
        self.refresh()

    @torch.no_grad()
    def refresh(self, iterations: int = _START_ITERATIONS) -> None:
        """Steps of the power iterations towards the norms of the weight's unfoldings."""
        self._iterate(self.skew_kernel(), iterations)

    @property
    def terms(self) -> int:
        """Powers of the operator that the series takes in the module's present mode."""
        return self.train_terms if self.training else self.eval_terms

    def skew_kernel(self) -> Tensor:
        """Returns the weight's skew part `(c, c, k, k)`: its zero-padded convolution A has `A^T = -A`."""
        return skew_part(self.weight)

    def scaled_kernel(self) -> Tensor:
        """Returns the kernel of the operator that is exponentiated; differentiable, the estimated norm included."""
        return self._scaled(self.skew_kernel())

    def forward(self, images: Tensor) -> Tensor:
        """Takes images `(batch, c_in, s h, s w)` to images `(batch, c_out, h, w)`."""
        s = self.stride
        if images.shape[-3] != self.in_channels:
            raise ConfigError("images.shape", tuple(images.shape), f"must have {self.in_channels} channels")
        with without_autocast(images.device.type):  # the norm that bounds the layer is no place to save
            skew = self.skew_kernel()
            if self.training:
                self._iterate(skew.detach(), self.iterations)
            kernel = self._scaled(skew)
        if s > 1:
            space_to_depth_size(images.shape[-2:], s)
            images = functional.pixel_unshuffle(images, s)
        missing = len(kernel) - images.shape[-3]
        term = functional.pad(images, (0, 0, 0, 0, 0, missing)) if missing > 0 else images
        total = exponential_series(term, kernel, self.terms)[..., : self.out_channels, :, :]
        return total if self.bias is None else total + self.bias[:, None, None]

    def lipschitz_bound(self, input_size: Size, *, terms: int | None = None) -> float:
        """Returns a rigorous upper bound of the layer's Lipschitz constant for images of `input_size` pixels.

        Of the series of `terms` powers (default: those of evaluation) of the zero-padded operator with the kernel
        as it is now: `series_norm_bound` at an upper bound of that operator's own norm, k times the smaller norm of
        the unfoldings (then mostly within 0.5 % of the truth for 5 terms, 1e-9 for 12) or, where that says too
        little, `conv_norm_bounds`. float64, rounding of the bound included; the rounding of a forward pass in float32
        is not part of it.
        """
        size = self._core_size(input_size)
        kernel = self.scaled_kernel().detach().double()
        terms = self.eval_terms if terms is None else terms
        check_count("terms", terms, least=0)
        norm = self.kernel_size * min(map(matrix_norm_bound, _unfoldings(kernel)))
        bound = series_norm_bound(norm, terms)
        if bound > _GOOD_ENOUGH:
            bound = min(bound, series_norm_bound(conv_norm_bounds(kernel, size).upper, terms))
        # The margin covers a float64 forward pass, each power of which rounds sums of c k^2 products.
        return bound * (1 + 4 * (math.sqrt(kernel[0].numel()) + 8) * (terms + 1) * _EPS)

    @torch.no_grad()
    def singular_values(self, input_size: Size, *, frames: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Returns all singular values of the layer in its present mode, its padding taken as periodic.

        As `OrthogonalConv2d` has it: of the series of each block of the symbol, cut to the channels in use.
        """
        kernel = at_least_single(self.scaled_kernel())
        geometry = PeriodicConv.of(kernel, self._core_size(input_size))
        frequencies = geometry.frequencies(kernel.device)
        columns = self.stride * self.stride * self.in_channels
        parts = []
        for index in geometry.batches(kernel, frequencies.index):
            skew = self._centred(geometry.symbol(kernel, index)[:, 0], index, geometry.output_size)
            total = term = torch.eye(len(kernel), dtype=skew.dtype, device=skew.device).expand_as(skew)
            for power in range(1, self.terms + 1):
                term = term @ skew / power
                total = total + term
            blocks = total[:, : self.out_channels, :columns]
            parts.append(block_singular_values(framed_blocks(blocks, frames)))
        return torch.cat(parts)[frequencies.position]

    def _centred(self, blocks: Tensor, index: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Blocks of the symbol, which counts taps from 0, for taps counted from the middle: skew-Hermitian ones."""
        places = torch.unravel_index(index, grid)
        turns = torch.stack([place.double() / n for place, n in zip(places, grid, strict=True)]).sum(0)
        angles = (-2 * math.pi * (self.kernel_size // 2) * turns)[:, None, None]
        centred: Tensor = blocks * torch.polar(torch.ones_like(angles), angles).to(blocks.dtype)
        return centred

    @torch.no_grad()
    def _iterate(self, skew: Tensor, iterations: int) -> None:
        for _ in range(iterations):
            # New tensors: a graph of an earlier forward pass may hold the old ones.
            self.across = _unit(unfolding_across(skew, unfolding_across(skew, self.across), transposed=True))
            self.aside = _unit(unfolding_aside(skew, unfolding_aside(skew, self.aside), transposed=True))

    def _scaled(self, skew: Tensor) -> Tensor:
        across = torch.linalg.vector_norm(unfolding_across(skew, self.across))
        aside = torch.linalg.vector_norm(unfolding_aside(skew, self.aside))
        norm = torch.minimum(across, aside).clamp_min(torch.finfo(skew.dtype).tiny)
        return skew * (self.correction / norm)

    def _core_size(self, input_size: Size) -> tuple[int, ...]:
        """Pixels after space-to-depth."""
        return space_to_depth_size(input_size, self.stride)


class SOCTT(FramedConv2d):
    """A TT convolution whose core is a `SOC`: frame, skew orthogonal convolution of the bottleneck, frame.

    `rank`: an int (each side `min(channels, rank)`) or a pair (r1, r2); the core goes from r1 to r2 channels and
    takes the stride. `correction` is 0.7 for every kernel size, 1x1 included, as in the published experiments
    (`SOC` takes 1 there: give None for that). `frames="orthonormal"` makes the layer 1-Lipschitz up to the end of the
    series. Raises `ConfigError`.
    """

    core: SOC

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        rank: int | Sequence[int],
        stride: int = 1,
        bias: bool = True,
        *,
        frames: FrameKind = "free",
        correction: float | None = 0.7,
        train_terms: int = 5,
        eval_terms: int = 12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        def core(r1: int, r2: int) -> SOC:
            return SOC(
                r1,
                r2,
                kernel_size,
                stride,
                bias=False,
                correction=correction,
                train_terms=train_terms,
                eval_terms=eval_terms,
                device=device,
                dtype=dtype,
            )

        super().__init__(in_channels, out_channels, rank, core, bias, frames=frames, device=device, dtype=dtype)

    def lipschitz_bound(self, input_size: Size, *, terms: int | None = None) -> float:
        """Returns a rigorous upper bound: the frames' norms, as they are, times `SOC.lipschitz_bound` of the core."""
        bound = self.core.lipschitz_bound(input_size, terms=terms)
        for frame in (self.k1, self.k3):
            bound *= matrix_norm_bound(frame)
        return bound


def soc_iterations(schedule: str, step: int) -> int:
    """Returns how many steps of their power iterations SOC layers take in a training step, counted from 0.

    `schedule`: "one", or "code", the authors' programs: 50 at the first and at every 200th step, else one.
    """
    return _START_ITERATIONS if schedule == "code" and step % _CODE_PERIOD == 0 else 1


def _unfoldings(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Two of the four unfoldings of `kernel (c, c, k, k)`, `(k c, k c)` and `(c, c k k)`.

    The other two have, for a skew kernel, the same entries up to signs and the order of rows and columns.
    """
    c, _, k, _ = kernel.shape
    return kernel.permute(2, 0, 3, 1).reshape(k * c, k * c), kernel.flatten(1)


def _unit(vector: Tensor) -> Tensor:
    unit: Tensor = vector / torch.linalg.vector_norm(vector).clamp_min(torch.finfo(vector.dtype).tiny)
    return unit
