"""Layers whose singular values can be controlled, and what turns a network's convolutions into them.

Prior art to compare with is in `ttsv.layers.prior_art`.

Spectral, tt, runtime, checks and errors may be imported: no network and no data.
"""

from ttsv.layers.convert import densify, tensorize
from ttsv.layers.framed import Framed, FramedConv2d, FrameKind, Stiefel
from ttsv.layers.frames import orthogonal_loss
from ttsv.layers.orthogonal import MinMax, OrthogonalConv2d
from ttsv.layers.soc import SOC, SOCTT
from ttsv.layers.tt_conv import TTConv, TTConv1d, TTConv2d, TTConv3d, layer_kernel
from ttsv.spectral.network import is_spectral, layer_input_sizes, spectral_layers

__all__ = [
    "SOC",
    "SOCTT",
    "FrameKind",
    "Framed",
    "FramedConv2d",
    "MinMax",
    "OrthogonalConv2d",
    "Stiefel",
    "TTConv",
    "TTConv1d",
    "TTConv2d",
    "TTConv3d",
    "densify",
    "is_spectral",
    "layer_input_sizes",
    "layer_kernel",
    "orthogonal_loss",
    "spectral_layers",
    "tensorize",
]
