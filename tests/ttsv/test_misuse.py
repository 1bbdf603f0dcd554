"""Arguments of another kind are ValueErrors that name the argument, its value and what would be right."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ttsv.constraints import Clip, Divide, Orthogonal
from ttsv.layers import SOC, TTConv2d, densify, tensorize
from ttsv.layers.prior_art import Cayley, aoc, aol, bcop, spectral_normalized, svd_unfolded
from ttsv.spectral.bounds import conv_norm_bounds
from ttsv.spectral.clamping import clamp_conv
from ttsv.spectral.clipping import clip_conv, clip_matrix, clip_tt, divide_conv
from ttsv.spectral.network import model_spectra
from ttsv.spectral.singular_values import conv_singular_values, tt_singular_values
from ttsv.tt.decomposition import tt_error, tt_svd, tt_to_dense

KERNEL = torch.ones(4, 4, 3, 3)
FACTORS = torch.ones(4, 2), torch.ones(2, 2, 3, 3), torch.ones(2, 4)
DOUBLE = FACTORS[1].double()


def wrong(value: Any) -> Any:
    """A value that no type hint allows."""
    return value


Case = tuple[Callable[[], object], str]
CASES: dict[str, Case] = {
    "groups": (
        lambda: conv_singular_values(KERNEL, 4, groups=wrong(1.5)),
        r"groups = 1\.5: must be at least 1 and div",
    ),
    "groups text": (lambda: conv_norm_bounds(KERNEL, 4, groups=wrong("1")), "groups = '1': must be"),
    "groups truth": (lambda: conv_norm_bounds(KERNEL, 4, groups=True), "groups = True: must be"),
    "kernel": (lambda: conv_singular_values(wrong([[1.0]]), 4), r"kernel = 'list': must be a torch\.Tensor"),
    "size": (lambda: conv_singular_values(KERNEL, True), "input_size = True: must be a whole number"),
    "stride": (lambda: conv_singular_values(KERNEL, 4, stride=(1, True)), r"stride = \(1, True\): must be"),
    "delta": (lambda: clip_conv(KERNEL, wrong("1"), 4), "delta = '1': must be a finite number above 0"),
    "delta none": (lambda: clip_tt(*FACTORS, wrong(None), 4), "delta = None: must be a finite number"),
    "delta truth": (lambda: clip_matrix(torch.eye(2), True), "delta = True: must be a finite number"),
    "rounds": (lambda: clip_conv(KERNEL, 1.0, 4, rounds=wrong(1.5)), r"rounds = 1\.5: must be .* whole number"),
    "rescale": (lambda: clip_conv(KERNEL, 1.0, 4, rescale=wrong("no")), "rescale = 'no': must be True or False"),
    "matrix": (lambda: clip_matrix(wrong([[1.0]]), 1.0), r"weight = 'list': must be a torch\.Tensor"),
    "target": (lambda: divide_conv(KERNEL, wrong("1"), 4), "target = '1': must be a finite number"),
    "dtypes": (
        lambda: clip_tt(FACTORS[0], DOUBLE, FACTORS[2], 1.0, 4),
        r"k1\.dtype = torch\.float32: must be the core's",
    ),
    "k3": (
        lambda: tt_singular_values(FACTORS[0].double(), DOUBLE, FACTORS[2], 4),
        r"k3\.dtype = torch\.float32: must be the core's, torch\.float64",
    ),
    "bracket rounds": (lambda: clamp_conv(KERNEL, 0.1, 1.0, 4, rounds=wrong(1.5)), r"rounds = 1\.5: must be"),
    "floor": (
        lambda: clamp_conv(KERNEL, wrong("0"), 1.0, 4),
        r"floor = '0': must be a number from 0 to delta = 1\.0",
    ),
    "bracket delta": (lambda: clamp_conv(KERNEL, 0.0, wrong(None), 4), "delta = None: must be"),
    "channels": (lambda: TTConv2d(wrong(4.0), 4, 3, 2), r"in_channels = 4\.0: must be at least 1 and a whole number"),
    "channels text": (lambda: TTConv2d(4, wrong("4"), 3, 2), "out_channels = '4': must be"),
    "rank pair": (lambda: TTConv2d(4, 4, 3, wrong((2.0, 2))), r"rank = \(2\.0, 2\): must be a whole number"),
    "rank text": (lambda: tt_svd(KERNEL, wrong("22")), "rank = '22': must be a whole number"),
    "soc": (lambda: SOC(True, 4, 3), "in_channels = True: must be"),
    "correction": (
        lambda: SOC(4, 4, 3, correction=wrong("a")),
        "correction = 'a': must be a finite number above 0, or",
    ),
    "soc images": (
        lambda: SOC(4, 4, 3)(torch.ones(1, 3, 4, 4)),
        r"images\.shape = \(1, 3, 4, 4\): must have 4 channels",
    ),
    "skip": (lambda: tensorize(nn.Sequential(nn.Conv2d(4, 4, 3)), 2, skip="0"), "skip = '0': must be a list of names"),
    "skip number": (lambda: tensorize(nn.Conv2d(4, 4, 3), 2, skip=wrong(1)), "skip = 1: must be a list of names"),
    "tensorize": (lambda: tensorize(wrong(None), 2), r"model = 'NoneType': must be a torch\.nn\.Module"),
    "densify": (lambda: densify(wrong(3)), "model = 'int': must be"),
    "spectra": (lambda: model_spectra(wrong(KERNEL), 8), "model = 'Tensor': must be"),
    "small images": (
        lambda: model_spectra(nn.Sequential(nn.Conv2d(4, 4, 3, dilation=2, padding=1)), (2, 3)),
        r"input_size = \(2, 3\): must leave the kernel of layer '0' at least \(3, 3\) pixels, not \(2, 3\)",
    ),
    "small features": (
        lambda: model_spectra(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 2)), 5, linear=True),
        "input_size = 5: .* layer '2' takes 4 features, not 6",
    ),
    "in_channels": (lambda: model_spectra(nn.Conv2d(4, 4, 3), 8, in_channels=wrong("4")), "in_channels = '4': must be"),
    "other channels": (lambda: Clip(1.0).bind(nn.Conv2d(4, 4, 3), 8, in_channels=3), "takes 4 channels, not 3"),
    "clip": (lambda: Clip(True), "delta = True: must be"),
    "clip rescale": (lambda: Clip(1.0, rescale=wrong("no")), "rescale = 'no': must be True or False"),
    "clip linear": (lambda: Clip(1.0, linear=wrong(3)), "linear = 3: must be True or False"),
    "clip unbound": (lambda: Clip(1.0).project(nn.Conv2d(4, 4, 3), 1), "model = 'Conv2d': .* call bind"),
    "divide": (lambda: Divide(1.0, power_iterations=True), "power_iterations = True: must be"),
    "divide eps": (lambda: Divide(batch_norm=1.0, batch_norm_eps=wrong("a")), "batch_norm_eps = 'a': must be"),
    "orthogonal": (lambda: Orthogonal(True), "lambda_ort = True: must be"),
    "meta": (
        lambda: conv_singular_values(KERNEL.to("meta"), 4),
        r"kernel\.device = 'meta': must be one that holds values",
    ),
    "sparse": (
        lambda: clip_conv(KERNEL.to_sparse(), 1.0, 4),
        r"kernel\.layout = torch\.sparse_coo: must be .* to_dense",
    ),
    "factors": (lambda: clip_tt(wrong(FACTORS[0].numpy()), *FACTORS[1:], 1.0, 4), "k1 = 'ndarray': must be a torch"),
    "factors list": (lambda: clip_tt(FACTORS[0], wrong([1.0]), FACTORS[2], 1.0, 4), "core = 'list': must be"),
    "factors none": (lambda: clip_tt(*FACTORS[:2], wrong(None), 1.0, 4), "k3 = 'NoneType': must be"),
    "merged frame": (lambda: tt_to_dense(KERNEL, *FACTORS[1:]), r"k1\.shape = \(4, 4, 3, 3\): must be \(c_in, r1\)"),
    "merged output": (lambda: tt_to_dense(*FACTORS[:2], KERNEL), r"k3\.shape = \(4, 4, 3, 3\): must be \(r2, c_out\)"),
    "merged core": (lambda: tt_to_dense(FACTORS[0], torch.ones(2, 2), FACTORS[2]), r"core\.shape = \(2, 2\): must be"),
    "error matrix": (lambda: tt_error(torch.ones(4, 4), *FACTORS), r"kernel\.shape = \(4, 4\): must be \(c_out, c_in"),
    "error shape": (lambda: tt_error(KERNEL[:3], *FACTORS), r"kernel = '\(3, 4, 3, 3\) in .*': must be the factors'"),
    "error half": (
        lambda: tt_error(KERNEL.half(), *FACTORS),
        r"kernel\.dtype = torch\.float16: must be torch\.float32 or",
    ),
    "error complex": (
        lambda: tt_error(KERNEL.to(torch.complex64), *FACTORS),
        r"kernel\.dtype = torch\.complex64: must be",
    ),
    "error nan": (lambda: tt_error(KERNEL * math.nan, *FACTORS), "kernel = '144 of 144 values not finite'"),
    "error factors": (lambda: tt_error(KERNEL, FACTORS[0] * math.nan, *FACTORS[1:]), "k1 = '8 of 8 values not finite'"),
    "terms": (lambda: SOC(4, 4, 3).lipschitz_bound(4, terms=-1), "terms = -1: must be at least 0"),
    "terms part": (lambda: SOC(4, 4, 3).lipschitz_bound(4, terms=wrong(1.5)), r"terms = 1\.5: must be"),
    "terms text": (lambda: SOC(4, 4, 3).lipschitz_bound(4, terms=wrong("2")), "terms = '2': must be"),
    "terms truth": (lambda: SOC(4, 4, 3).lipschitz_bound(4, terms=True), "terms = True: must be"),
    "numpy truth": (lambda: clip_conv(KERNEL, 1.0, 4, rounds=wrong(np.True_)), "rounds = .*True.*: must be"),
    "svd rank": (lambda: svd_unfolded(4, 4, 3, rank=wrong(1.5)), r"rank = 1\.5: must be"),
    "aol stride": (lambda: aol(4, 4, 1, 2), "kernel_size = 1: must be at least the stride, 2"),
}


@pytest.mark.parametrize("name", CASES)
def test_arguments_of_another_kind(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("make", [bcop, aoc, aol, Cayley, spectral_normalized, svd_unfolded])
@pytest.mark.parametrize("argument", ["in_channels", "out_channels", "kernel_size", "stride"])
@pytest.mark.parametrize("value", [0, 2.0, True])
def test_sizes_of_prior_art(make: Callable[..., nn.Module], argument: str, value: object) -> None:
    arguments = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "stride": 1} | {argument: value}
    with pytest.raises(ValueError, match=f"{argument} = {value}: must be at least 1 and a whole number"):
        make(**arguments)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    one, two = np.int64(1), np.int64(2)
    kernel = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(conv_singular_values(kernel, 4, groups=wrong(one)), conv_singular_values(kernel, 4))
    assert torch.equal(clip_conv(kernel, 1.0, 4, rounds=wrong(two)), clip_conv(kernel, 1.0, 4, rounds=2))
    assert TTConv2d(wrong(np.int32(4)), 4, 3, wrong(two)).core.shape == (2, 2, 3, 3)
    assert tt_svd(kernel, wrong((two, one))).core.shape == (1, 2, 3, 3)
