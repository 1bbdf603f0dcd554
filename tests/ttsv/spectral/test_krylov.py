"""Gram matrices from lags, and the few eigenpairs above a level, against whole decompositions."""

import math
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import deep, examples
from ttsv.spectral.clipping import clip_conv
from ttsv.spectral.gram import Grams
from ttsv.spectral.krylov import LeadingPairs
from ttsv.spectral.norms import Algorithm
from ttsv.spectral.symbol import PeriodicConv

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards, Dense


@examples(200)
@given(data=st.data())
def test_gram_matrices_are_those_of_the_blocks(dense: "Dense", data: st.DataObject) -> None:
    case = data.draw(dense.drawn_convolutions())
    geometry = PeriodicConv.of(case.kernel, case.input_size, **case.options)
    index = torch.arange(math.prod(geometry.output_size))
    blocks = geometry.symbol(case.kernel, index).flatten(0, 1)
    expected = blocks @ blocks.mH if blocks.shape[1] <= blocks.shape[2] else blocks.mH @ blocks
    # Taps may cancel in a block, their rounding does not: it is relative to what the block would be without signs.
    sums = geometry.symbol(case.kernel.abs(), index[:1]).flatten(0, 1).abs()
    scale = (sums @ sums.mT if blocks.shape[1] <= blocks.shape[2] else sums.mT @ sums).max()
    for precise in (False, True):
        grams = Grams(case.kernel, geometry, precise=precise)
        assert (grams.at(index) - expected).abs().max() <= 1e-13 * scale
        if grams.mean is not None:
            mean = expected.reshape(len(index), grams.groups, grams.side, -1).mean(0)
            folded = any(
                e * (k - 1) >= n for e, k, n in zip(case.dilation, geometry.kernel_size, case.input_size, strict=True)
            )
            assert folded or (grams.mean - mean).abs().max() <= 1e-13 * scale


def low_rank(dense: "Dense", c_out: int, c_in: int, level: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Noise with singular values up to `level` and four terms of rank 1 that are smooth in frequency."""
    noise = dense.gaussian(c_out, c_in, 3, 3) * (level / (3 * (math.sqrt(c_out) + math.sqrt(c_in))))
    window = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    left, right = (dense.gaussian(c, 4, seed=seed) / math.sqrt(c) for c, seed in ((c_out, 1), (c_in, 2)))
    sizes = torch.tensor([5.0, 4.0, 3.0, 2.2], dtype=torch.float64)
    return (noise + torch.einsum("j,oj,ij,a,b->oiab", sizes, left, right, window, window)).to(dtype)


def by_svd(kernel: Tensor, delta: float, size: int, stride: int) -> Tensor:
    """One clip in float64 by decomposing the blocks of `ttsv.spectral.symbol`."""
    kernel = kernel.double()
    geometry = PeriodicConv.of(kernel, size, stride=stride)
    frequencies = geometry.frequencies(kernel.device)
    left, values, right = torch.linalg.svd(geometry.symbol(kernel, frequencies.index), full_matrices=False)
    excess = (left * (values - delta).clamp_min(0).unsqueeze(-2)) @ right
    return kernel - geometry.taps(excess, frequencies.index, frequencies.count)


@pytest.mark.parametrize(
    ("c_out", "c_in", "stride", "dtype", "tolerance"),
    [
        (100, 100, 1, torch.float32, 2e-6),
        (130, 100, 1, torch.float32, 2e-6),
        (100, 120, 1, torch.float32, 2e-6),
        (112, 100, 2, torch.float32, 2e-6),
        (100, 100, 1, torch.float64, 1e-9),
        deep(130, 100, 1, torch.float64, 1e-9),
        deep(100, 120, 1, torch.float64, 1e-9),
        (112, 100, 2, torch.float64, 1e-9),
    ],
)
@pytest.mark.parametrize("level", [1.0, deep(1.9), 4.0])
def test_clips_with_few_values_above_delta(
    dense: "Dense", c_out: int, c_in: int, stride: int, level: float, dtype: torch.dtype, tolerance: float
) -> None:
    """From a clear gap below delta = 2, through none, to very many values above it."""
    kernel = low_rank(dense, c_out, c_in, level, dtype)
    found = clip_conv(kernel, 2.0, 8, stride=stride)
    expected = by_svd(kernel, 2.0, 8, stride)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_few_pairs_are_found_by_iterating_and_are_all_there(dense: "Dense") -> None:
    kernel = low_rank(dense, 100, 100, 1.0)
    geometry = PeriodicConv.of(kernel, 8)
    grams = Grams(kernel, geometry)
    matrices = grams.at(geometry.frequencies(kernel.device).index)
    leading = LeadingPairs()
    leading.prepare(grams.mean)
    values, vectors = torch.linalg.eigh(matrices)
    expected = (vectors * (values - 4).clamp_min(0).unsqueeze(-2)) @ vectors.mH
    found = torch.zeros_like(matrices)
    columns = set()
    for pairs in leading.above(matrices, 4.0):
        columns.add(pairs.values.shape[1])
        found[pairs.which] = (pairs.vectors * (pairs.values - 4).clamp_min(0).unsqueeze(-2)) @ pairs.vectors.mH
    assert leading.iterates
    assert max(columns) <= 4
    assert (found - expected).abs().max() <= 1e-8


def test_a_matrix_with_too_many_values_is_decomposed_and_so_are_those_after_it(dense: "Dense") -> None:
    kernel = low_rank(dense, 100, 100, 4.0)
    geometry = PeriodicConv.of(kernel, 4)
    grams = Grams(kernel, geometry)
    leading = LeadingPairs()
    leading.prepare(grams.mean)
    matrices = grams.at(geometry.frequencies(kernel.device).index)
    for _ in range(2):
        (pairs,) = leading.above(matrices, 4.0)
        assert not leading.iterates
        count = int((pairs.values > 4).sum())
        assert count == int((torch.linalg.eigvalsh(matrices) > 4).sum()) > 0


def test_a_value_that_the_start_misses_is_caught_by_the_factorization(dense: "Dense") -> None:
    """The mean knows nothing of the last matrix, whose leading vector is orthogonal to all the others'."""
    side = 100
    frame = torch.linalg.qr(dense.gaussian(side, side)).Q
    spectrum = torch.linspace(0.1, 1.0, side, dtype=torch.float64)
    hidden = spectrum.clone()
    hidden[0] = 9.0
    matrices = torch.stack([(frame * values) @ frame.T for values in (spectrum, spectrum, hidden)]).to(torch.complex128)
    leading = LeadingPairs()
    leading.prepare(matrices[:1].real)
    found = {
        int(which): pairs.values[place].max().item()
        for pairs in leading.above(matrices, 4.0)
        for place, which in enumerate(pairs.which)
    }
    assert found == {2: pytest.approx(9.0)}


@cache
def clipped(level: float, dtype: torch.dtype, stride: int, dense: "Dense") -> Tensor:
    """By the processor, in float64; one for all algorithms."""
    return clip_conv(low_rank(dense, 120, 100, level, dtype).double(), 2.0, 6, stride=stride, rescale=True)


@pytest.mark.parametrize("level", [1.0, 4.0])
@pytest.mark.parametrize(
    ("algorithm", "stride"),
    # Each takes the matrices as they come: a stride makes these wider, and that goes by whichever is chosen.
    [(None, 1), (None, 2), ("eigh", 1), ("krylov", 1), ("sign", 1), *map(deep, ("eigh", "krylov", "sign"), (2, 2, 2))],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
def test_clips_on_a_device_are_those_of_the_processor(
    dense: "Dense",
    card: "Cards",
    dtype: torch.dtype,
    tolerance: float,
    algorithm: Algorithm | None,
    stride: int,
    level: float,
) -> None:
    """With TensorFloat-32 allowed outside, which would be off by 1e-3."""
    kernel = low_rank(dense, 120, 100, level, dtype)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        found = clip_conv(kernel.cuda(), 2.0, 6, stride=stride, rescale=True, algorithm=algorithm)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    expected = clipped(level, dtype, stride, dense)
    assert found.is_cuda
    assert (found.cpu() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.slow
def test_a_device_is_not_waited_for_once_per_frequency(dense: "Dense", card: "Cards") -> None:
    kernel = low_rank(dense, 100, 100, 4.0, torch.float32).cuda()
    for size in (4, 8):  # tables are copied to the card once
        clip_conv(kernel, 2.0, size)
    few, many = (card.synchronizations(lambda n=n: clip_conv(kernel, 2.0, n)) for n in (4, 8))  # type: ignore[misc]
    assert few == many > 0
