import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.examples import examples
from ttsv.layers import TTConv2d, tensorize
from ttsv.spectral.network import layer_singular_values, model_spectra
from ttsv.spectral.singular_values import conv_norm, conv_singular_values, tt_singular_values, values_by_gram
from ttsv.spectral.symbol import PeriodicConv

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense


@examples(300)
@given(data=st.data())
def test_singular_values_are_those_of_the_dense_operator(dense: "Dense", data: st.DataObject) -> None:
    case = data.draw(dense.drawn_convolutions())
    values = conv_singular_values(case.kernel, case.input_size, **case.options)
    outputs = [n // s for n, s in zip(case.input_size, case.stride, strict=True)]
    block = min(case.kernel.shape[0] // case.groups, case.kernel.shape[1] * math.prod(case.stride))
    assert values.shape == (math.prod(outputs), case.groups * block)
    assert (values[:, :-1] >= values[:, 1:]).all()
    truth = dense.periodic_values(case)
    found = values.flatten().sort(descending=True).values
    assert (found - truth).abs().max() <= 1e-10 * truth[0]
    assert conv_norm(case.kernel, case.input_size, **case.options) == pytest.approx(truth[0].item(), rel=1e-12)


@pytest.mark.parametrize("size", [(4, 6), (5, 3)])
def test_rows_are_frequencies_in_row_major_order(dense: "Dense", size: tuple[int, int]) -> None:
    kernel = dense.gaussian(3, 2, 3, 3)
    symbol = np.fft.fft2(kernel.numpy(), size).transpose(2, 3, 0, 1)
    expected = np.linalg.svd(symbol, compute_uv=False).reshape(-1, 2)
    np.testing.assert_allclose(conv_singular_values(kernel, size).numpy(), expected, rtol=1e-12, atol=1e-13)


def test_examples_of_the_api(dense: "Dense") -> None:
    values = conv_singular_values(dense.sine(3, 2, 3, 3), (4, 6), stride=(2, 1))
    assert values.shape == (12, 3)
    assert values.max().item() == pytest.approx(8.147816, abs=1e-6)
    assert values.sum().item() == pytest.approx(59.253529, abs=1e-6)
    folded = conv_singular_values(dense.sine(3, 2, 3, 3), (2, 2))
    assert folded.numel() == 8
    assert folded.max().item() == pytest.approx(10.542015, abs=1e-6)
    assert folded.min().item() == pytest.approx(0.027822, abs=1e-6)
    tt = tt_singular_values(dense.sine(4, 2), dense.sine(2, 2, 3, 3), dense.sine(2, 3), (4, 4), stride=2)
    assert tt.shape == (4, 2)
    assert tt.max().item() == pytest.approx(4.440897, abs=1e-6)
    assert tt.min().item() == pytest.approx(0.226990, abs=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("c_out", "groups"), [(5, 1), (2, 1), (10, 2), (4, 2)])
def test_float32_stays_float32(dense: "Dense", c_out: int, groups: int, stride: int) -> None:
    kernel = dense.gaussian(c_out, 4, 3, 3).float()
    values = conv_singular_values(kernel, 8, stride=stride, groups=groups)
    exact = conv_singular_values(kernel.double(), 8, stride=stride, groups=groups)
    assert values.dtype == torch.float32
    assert (values - exact).abs().max() <= 2e-6 * exact.max()
    differentiable = conv_singular_values(kernel.requires_grad_(), 8, stride=stride, groups=groups)
    assert (differentiable - exact).abs().max() <= 2e-6 * exact.max()


def test_small_values_of_oblong_float32_blocks(dense: "Dense") -> None:
    """Gram matrices in float32 would lose them: 3e-4 of the largest."""
    left, right = (torch.linalg.qr(dense.gaussian(n, 8, seed=n)).Q for n in (20, 8))
    weight = (left * torch.logspace(0, -6, 8, dtype=torch.float64)) @ right.T
    values = conv_singular_values(weight[:, :, None].float(), 3)
    assert (values[0] - torch.logspace(0, -6, 8)).abs().max() <= 2e-7


@examples(100)
@given(data=st.data())
def test_values_of_float32_kernels_by_gram_matrices(dense: "Dense", data: st.DataObject) -> None:
    """As on CUDA, square blocks too: no further from the truth than float32 keeps apart."""
    case = data.draw(dense.drawn_convolutions())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ttsv.spectral.singular_values._gains_by_gram", lambda *_: True)
        values = conv_singular_values(case.kernel.float(), case.input_size, **case.options)
    exact = conv_singular_values(case.kernel.float().double(), case.input_size, **case.options)
    assert values.dtype == torch.float32
    assert (values - exact).abs().max() <= 2e-7 * exact.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(6, 6), (9, 6), (6, 9)])
def test_values_of_blocks_by_gram_matrices(dense: "Dense", shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = torch.logspace(0, -10, 6, dtype=torch.float64)
    drawn = [dense.gaussian(n, 6, seed=n) for n in shape]
    if dtype.is_complex:
        drawn = [torch.complex(part, dense.gaussian(n, 6, seed=n + 1)) for n, part in zip(shape, drawn, strict=True)]
    parts = [torch.linalg.qr(part).Q for part in drawn]
    blocks = ((parts[0] * values) @ parts[1].mH).to(dtype)[None]
    found, exact = values_by_gram(blocks)[0], torch.linalg.svdvals(blocks.to(parts[0].dtype))[0]
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 5e-8
    # Relative to the largest, not to themselves: the docstring's promise ends here.
    assert exact[-1] < 5e-8
    assert torch.linalg.svdvals(blocks)[0, 1:].sub(exact[1:]).abs().max() <= 1e-6


def test_gradient_is_that_of_finite_differences(dense: "Dense") -> None:
    kernel = dense.gaussian(2, 3, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda k: conv_singular_values(k, (4, 3), stride=(2, 1), dilation=(1, 2)).square().sum(1).log(), kernel
    )
    factors = [dense.gaussian(*shape).requires_grad_() for shape in ((4, 2), (3, 2, 3), (3, 5))]
    assert torch.autograd.gradcheck(lambda *tt: tt_singular_values(tt[0], tt[1], tt[2], 6, stride=2).sum(1), factors)


def test_batches_of_frequencies_change_nothing(dense: "Dense", monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = dense.gaussian(3, 2, 3, 3)
    whole = conv_singular_values(kernel, (6, 5)), conv_norm(kernel, (6, 5))
    monkeypatch.setattr("ttsv.spectral.symbol._BLOCK_BYTES", 3 * 3 * 2 * 16)
    monkeypatch.setattr("ttsv.spectral.gram._PART_BYTES", 3 * 3 * 2 * 16)
    assert len(list(PeriodicConv.of(kernel, (6, 5)).batches(kernel, torch.arange(30)))) == 10
    torch.testing.assert_close(conv_singular_values(kernel, (6, 5)), whole[0], rtol=1e-13, atol=1e-13)
    assert conv_norm(kernel, (6, 5)) == pytest.approx(whole[1], rel=1e-13)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_norm_of_very_small_and_very_large_weights(dense: "Dense", scale: float) -> None:
    kernel = dense.gaussian(3, 2, 3)
    assert conv_norm(kernel * scale, 5) == pytest.approx(conv_norm(kernel, 5) * scale, rel=1e-12)
    assert conv_norm(torch.zeros(3, 2, 3), 5) == 0


@examples(40)
@given(data=st.data())
def test_tt_values_are_the_nonzero_ones_of_the_whole_operator(dense: "Dense", data: st.DataObject) -> None:
    core = data.draw(dense.drawn_convolutions(grouped=False))
    r2, r1 = core.kernel.shape[:2]
    k1 = dense.gaussian(r1 + data.draw(st.integers(0, 2)), r1, seed=1)
    k3 = dense.gaussian(r2, r2 + data.draw(st.integers(0, 2)), seed=2)
    values = tt_singular_values(k1, core.kernel, k3, core.input_size, stride=core.stride, dilation=core.dilation)
    values = values.flatten()
    kernel = torch.einsum("bo,ba...,ia->oi...", k3, core.kernel, k1)
    whole = dense.convolution(kernel, core.input_size, core.stride, core.dilation, 1)
    truth = dense.periodic_values(whole)
    assert (values.sort(descending=True).values - truth[: len(values)]).abs().max() <= 1e-10 * truth[0]
    assert (truth[len(values) :] <= 1e-12 * truth[0]).all()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Conv2d(3, 3, 3)
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout()
        self.down = nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2)
        self.tt = TTConv2d(8, 8, 3, 4, stride=2, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.stem(images)).relu()
        logits: Tensor = self.head(self.tt(self.down(self.drop(hidden))).mean((2, 3)))
        return logits


def test_model_spectra_at_the_sizes_that_layers_see() -> None:
    model = Net().double()
    model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spectra = model_spectra(model, (8, 10), linear=True)
    assert list(spectra) == ["stem", "down", "tt", "head"]
    torch.testing.assert_close(spectra["stem"], conv_singular_values(model.stem.weight, (8, 10)).detach())
    down = conv_singular_values(model.down.weight, (8, 10), stride=2, groups=2)
    torch.testing.assert_close(spectra["down"], down.detach())
    # The TT layer sees 4 x 5, which its stride does not divide.
    tt = conv_singular_values(model.tt.dense_kernel(), (4, 6), stride=2)[:, :4]
    torch.testing.assert_close(spectra["tt"], tt.detach())
    torch.testing.assert_close(spectra["head"][0], torch.linalg.svdvals(model.head.weight).detach())
    assert not any(values.requires_grad for values in spectra.values())
    assert model.training
    assert model.drop.training
    assert not model.norm.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not model.stem._forward_pre_hooks


def test_model_spectra_of_one_layer_and_of_one_used_twice(dense: "Dense") -> None:
    conv = nn.Conv1d(2, 2, 3, padding=1, dtype=torch.float64)
    assert list(model_spectra(conv, 6)) == [""]
    twice = nn.Sequential(nn.MaxPool1d(2), conv, nn.Upsample(scale_factor=4), conv, nn.MaxPool1d(4), conv)
    assert list(model_spectra(twice, 8)) == ["1"]
    assert model_spectra(twice, 8)["1"].shape == (16, 2)
    assert model_spectra(tensorize(conv, 1), 6)[""].shape == (6, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": (5, 4), "stride": 2}, "stride = 2: must divide input_size = (5, 4)"),
        ({"input_size": (4, 4, 4)}, "input_size = (4, 4, 4): must be a whole number of at least 1, or 2 of them"),
        ({"input_size": 0}, "input_size = 0"),
        ({"input_size": 4, "stride": 0}, "stride = 0"),
        ({"input_size": 4, "dilation": (1, 0)}, "dilation = (1, 0)"),
        ({"input_size": 4.5}, "input_size = 4.5"),
        ({"input_size": 4, "groups": 2}, "groups = 2: must be at least 1 and divide c_out = 3"),
    ],
)
def test_errors_name_argument_value_and_fix(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="must") as error:
        conv_singular_values(torch.ones(3, 2, 3, 3), **arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (torch.ones(3, 2), r"kernel\.shape = \(3, 2\): must be \(c_out"),
        (torch.ones(3, 2, 1, 1, 1, 1), r"kernel\.shape"),
        (torch.ones(3, 0, 3), r"kernel\.shape"),
        (torch.ones(3, 2, 3).half(), r"kernel\.dtype = torch\.float16"),
        (torch.ones(3, 2, 3, dtype=torch.int64), r"kernel\.dtype"),
        (torch.tensor([[[1.0, math.nan, math.inf]]]), "kernel = '2 of 3 values not finite'"),
    ],
)
def test_kernels_that_cannot_be(kernel: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conv_singular_values(kernel, 4)


def test_factors_that_do_not_fit(dense: "Dense") -> None:
    k1, core, k3 = dense.sine(4, 2), dense.sine(2, 2, 3), dense.sine(2, 3)
    with pytest.raises(ValueError, match=r"k1\.shape = \(4, 1\): must be \(c_in, r1\) with r1 = 2"):
        tt_singular_values(k1[:, :1], core, k3, 4)
    with pytest.raises(ValueError, match=r"k1\.shape = \(1, 2\)"):
        tt_singular_values(k1[:1], core, k3, 4)
    with pytest.raises(ValueError, match=r"k3\.shape = \(2, 1\): must be \(r2, c_out\)"):
        tt_singular_values(k1, core, k3[:, :1], 4)
    with pytest.raises(ValueError, match="core = "):
        tt_singular_values(k1, core * math.inf, k3, 4)


def test_what_has_no_spectrum() -> None:
    with pytest.raises(ValueError, match="must have a convolution"):
        model_spectra(nn.Linear(3, 2), 4)
    with pytest.raises(TypeError, match="ReLU is no spectral layer"):
        layer_singular_values(nn.ReLU(), 4)
