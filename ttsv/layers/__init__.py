"""Layers whose singular values can be controlled, and what turns a network's convolutions into them.

Prior art to compare with is in `ttsv.layers.prior_art`.
"""

from ttsv.layers.convert import densify, tensorize
from ttsv.layers.framed import Framed, FramedConv2d, FrameKind
from ttsv.layers.frames import orthogonal_loss
from ttsv.layers.minmax import MinMax
from ttsv.layers.orthogonal import OrthogonalConv2d
from ttsv.layers.soc import SOC, SOCTT
from ttsv.layers.spectral import Convolution, is_spectral, layer_input_sizes, periodic_size, spectral_layers
from ttsv.layers.stiefel import Stiefel
from ttsv.layers.tt_conv import TTConv, TTConv1d, TTConv2d, TTConv3d

__all__ = [
    "SOC",
    "SOCTT",
    "Convolution",
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
    "orthogonal_loss",
    "periodic_size",
    "spectral_layers",
    "tensorize",
]
