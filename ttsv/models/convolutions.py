"""From a convolution's shape to its module, for every kind of layer."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ttsv.layers import SOC, SOCTT, FramedConv2d, FrameKind, TTConv, TTConv1d, TTConv2d, TTConv3d
from ttsv.models.conv_shape import ConvShape, core_kind
from ttsv.spectral.geometry import Convolution

_DENSE: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TT: dict[int, Callable[..., nn.Module]] = {1: TTConv1d, 2: TTConv2d, 3: TTConv3d}
_PRIOR_ART = {"bcop": "bcop", "aoc": "aoc", "aol": "aol", "cayley": "Cayley"}
"""Kind of layer -> its maker in `ttsv.layers.prior_art`, which is imported when one is asked for."""


@dataclass(frozen=True)
class ConvFactory:
    """Makes the convolutions of one network: a kind of layer, its largest TT rank and its kind of frames.

    Without a rank a kind between frames is that kind without them ("tt" is dense).
    """

    layer: str
    rank: int | None
    frames: FrameKind

    @property
    def framed(self) -> bool:
        """Whether the network is one of layers between frames."""
        return self.layer.endswith("tt") and self.rank is not None

    def __call__(self, shape: ConvShape) -> nn.Module:
        """The convolution of a shape. Raises `ConfigError` where the kind of layer has none such."""
        shape.check_layer(self.layer, self.rank)
        kind = core_kind(self.layer)
        ranks = shape.ranks(self.rank) if self.layer.endswith("tt") else None
        if kind == "dense":
            return self._sliding(shape, ranks)
        c_in, c_out, k, s, bias = shape.in_channels, shape.out_channels, shape.kernel_size, shape.stride, shape.bias
        if kind == "soc":
            if ranks is not None:
                return SOCTT(c_in, c_out, k, ranks, s, bias, frames=self.frames)
            # Undecomposed layers of a SOC-TT network are scaled as its cores are, 1x1 included.
            return SOC(c_in, c_out, k, s, bias, correction=0.7 if self.framed else None)
        make: Callable[..., nn.Module] = getattr(importlib.import_module("ttsv.layers.prior_art"), _PRIOR_ART[kind])
        if ranks is None:
            return make(c_in, c_out, k, s, bias)
        return FramedConv2d(c_in, c_out, ranks, lambda r1, r2: make(r1, r2, k, s, bias=False), bias, frames=self.frames)

    def _sliding(self, shape: ConvShape, ranks: tuple[int, int] | None) -> nn.Module:
        """Torch's convolution, or with ranks a TT layer."""
        channels = shape.in_channels, shape.out_channels, shape.kernel_size
        options = {"stride": shape.stride, "padding": shape.padding, "bias": shape.bias}
        if ranks is None:
            return _DENSE[shape.dims](*channels, **options)
        return _TT[shape.dims](*channels, ranks, **options, frames=self.frames)


def orthogonal_core_(core: torch.Tensor) -> None:
    """Draws a core `(r2, r1, k_1, ..., k_d)` whose unfolding (r1, r2 k_1 ... k_d) has orthonormal rows or columns.

    The authors' initialisation of TT layers, with their orthonormal frames.
    """
    if core.is_meta:
        return
    drawn = nn.init.orthogonal_(torch.empty_like(core.detach().transpose(0, 1)).flatten(1))
    with torch.no_grad():
        core.copy_(drawn.reshape_as(core.transpose(0, 1)).transpose(0, 1))


def initialize(model: nn.Module, conv: ConvFactory, draw: Callable[[Convolution], None]) -> None:
    """Draws the convolutions of a network: plain ones by `draw`.

    In a network of TT layers every kernel is drawn as the authors do, by `orthogonal_core_`, that of an undecomposed
    layer too. Layers of other kinds keep what they drew when they were made.
    """
    for module in model.modules():
        if isinstance(module, TTConv):
            orthogonal_core_(module.core)
        elif type(module) in _DENSE.values():
            assert isinstance(module, Convolution)
            if conv.framed and conv.layer == "tt":
                orthogonal_core_(module.weight)
            else:
                draw(module)


def kaiming(conv: Convolution) -> None:
    """He et al.'s normal weights for the outputs' fan, as ResNets have them."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


def xavier(layer: Convolution | nn.Linear) -> None:
    """Glorot & Bengio's uniform weights."""
    nn.init.xavier_uniform_(layer.weight)
