"""Exact singular values of periodic convolutions and their control: spectra, bounds of norms, clips, division.

The mathematics of the paper on kernels, and `network`, which finds the layers of a model that have a spectrum. Layers
come in as torch's own modules or as a `SpectralLayer`: of this library only `ttsv.tt`, runtime, checks and errors
may be imported.
"""

from ttsv.spectral.bounds import NormBounds, conv_norm_bounds
from ttsv.spectral.clamping import clamp_conv, clamp_matrix
from ttsv.spectral.clipping import clip_conv, clip_matrix, clip_tt, divide_conv
from ttsv.spectral.network import layer_singular_values, model_spectra
from ttsv.spectral.singular_values import conv_norm, conv_singular_values, tt_singular_values

__all__ = [
    "NormBounds",
    "clamp_conv",
    "clamp_matrix",
    "clip_conv",
    "clip_matrix",
    "clip_tt",
    "conv_norm",
    "conv_norm_bounds",
    "conv_singular_values",
    "divide_conv",
    "layer_singular_values",
    "model_spectra",
    "tt_singular_values",
]
