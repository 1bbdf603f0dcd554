import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.examples import examples
from ttsv.layers import (
    SOC,
    SOCTT,
    Framed,
    FramedConv2d,
    FrameKind,
    Stiefel,
    TTConv,
    TTConv1d,
    TTConv2d,
    TTConv3d,
    densify,
    orthogonal_loss,
    tensorize,
)

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense

TT: dict[int, type[TTConv]] = {1: TTConv1d, 2: TTConv2d, 3: TTConv3d}


def deviation(layer: nn.Module) -> float:
    """Largest entry of `k1^T k1 - I` and `k3 k3^T - I`."""
    assert isinstance(layer, Framed)
    return max(
        (gram - torch.eye(len(gram))).abs().max().item() for gram in (layer.k1.T @ layer.k1, layer.k3 @ layer.k3.T)
    )


def network(frames: FrameKind, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        TTConv2d(3, 24, 3, 16, stride=2, padding=1, frames=frames),
        nn.ReLU(),
        SOCTT(24, 40, 3, 12, stride=2, frames=frames),
        FramedConv2d(40, 8, (12, 6), lambda a, b: nn.Conv2d(a, b, 3, padding=1, bias=False), frames=frames),
        nn.Flatten(),
        nn.Linear(8 * 4, 4),
    ).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_frames_stay_orthonormal_in_training(dtype: torch.dtype, tolerance: float, optimizer: str) -> None:
    """Large steps, momentum and a weight decay that shrinks the free matrices by a third."""
    model = network("orthonormal", dtype)
    start = {name: layer.k1.clone() for name, layer in model.named_modules() if isinstance(layer, Framed)}
    moves: torch.optim.Optimizer
    if optimizer == "sgd":
        moves = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    else:
        moves = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    images, labels = torch.randn(32, 3, 8, 8, dtype=dtype), torch.randint(4, (32,))
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(images), labels)
        moves.zero_grad()
        torch.autograd.backward(loss)
        moves.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert list(start) == ["0", "2", "3"]
    for name, before in start.items():
        layer = model.get_submodule(name)
        assert deviation(layer) < tolerance
        assert isinstance(layer, Framed)
        assert (layer.k1 - before).abs().max() > 0.02


def test_wide_and_tall_matrices_of_a_networks_size() -> None:
    torch.manual_seed(0)
    for shape in ((640, 320), (320, 640), (512, 512)):
        matrix = Stiefel()(torch.randn(shape))
        exact = matrix.double()  # a float32 product would add its own rounding to the frame's
        gram = exact.T @ exact if shape[0] >= shape[1] else exact @ exact.T
        # 11 units in the last place were seen at these sizes, with two threads; 6 with one.
        assert (gram - torch.eye(len(gram), dtype=torch.float64)).abs().max() < 3e-6
        torch.testing.assert_close(Stiefel()(matrix), matrix, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (4, 1)])
def test_gradients_of_the_parametrization(shape: tuple[int, int], dense: "Dense") -> None:
    free = dense.gaussian(*shape).requires_grad_()
    assert torch.autograd.gradcheck(Stiefel(), (free,))
    weights = dense.gaussian(*shape, seed=1)
    (gradient,) = torch.autograd.grad((Stiefel()(free) * weights).sum(), [free])
    matrix = free if shape[0] >= shape[1] else free.T
    gradient = gradient if shape[0] >= shape[1] else gradient.T
    # No step along W R for any triangular R: the optimizer moves the frame, never the length of what stands for it.
    assert torch.triu(matrix.T @ gradient).abs().max() < 1e-12


@st.composite
def drawn_frames(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    c_in, c_out = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return c_in, c_out, draw(st.integers(1, c_in)), draw(st.integers(1, c_out)), draw(st.integers(0, 2**31))


def operator(layer: nn.Module, channels: int, size: tuple[int, ...]) -> Tensor:
    dims = channels * math.prod(size)
    with torch.no_grad():
        outputs: Tensor = layer(torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *size))
    return outputs.flatten(1).T


def assert_same_nonzero_values(whole: Tensor, core: Tensor) -> None:
    values, expected = torch.linalg.svdvals(whole), torch.linalg.svdvals(core)
    kept = min(len(values), len(expected))
    torch.testing.assert_close(values[:kept], expected[:kept], rtol=1e-10, atol=1e-12)
    assert values[kept:].sum() < 1e-10
    assert expected[kept:].sum() < 1e-10


@examples(60)
@given(
    drawn_frames(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from(("zeros", "circular", "valid")),
)
def test_theorem_1_for_dense_cores(
    drawn: tuple[int, int, int, int, int], d: int, k: int, stride: int, dilation: int, padding: str
) -> None:
    """Between orthonormal frames a core keeps its singular values; the others are 0."""
    c_in, c_out, r1, r2, seed = drawn
    torch.manual_seed(seed)
    size = ((5,), (5, 6), (5, 5, 5))[d - 1] if k == 3 and dilation == 2 else ((4,), (4, 3), (3, 4, 3))[d - 1]
    pixels = 0 if padding == "valid" else dilation * (k - 1) // 2
    arguments: dict[str, Any] = {
        "stride": stride,
        "dilation": dilation,
        "padding": pixels,
        "padding_mode": "circular" if padding == "circular" else "zeros",
        "bias": False,
        "dtype": torch.float64,
    }
    if d == 3:
        c_in, c_out, r1, r2 = min(c_in, 2), min(c_out, 2), min(r1, 2, c_in), min(r2, 2, c_out)
    layer = TT[d](c_in, c_out, k, (r1, r2), frames="orthonormal", **arguments)
    core = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1](r1, r2, k, **arguments)
    core.load_state_dict({"weight": layer.core})
    assert_same_nonzero_values(operator(layer, c_in, size), operator(core, r1, size))


@examples(40)
@given(drawn_frames(), st.sampled_from((1, 3)), st.integers(1, 2))
def test_theorem_1_for_skew_orthogonal_cores(drawn: tuple[int, int, int, int, int], k: int, stride: int) -> None:
    c_in, c_out, r1, r2, seed = drawn
    torch.manual_seed(seed)
    layer = SOCTT(c_in, c_out, k, (r1, r2), stride, bias=False, frames="orthonormal", dtype=torch.float64).eval()
    assert_same_nonzero_values(operator(layer, c_in, (4, 2)), operator(layer.core, r1, (4, 2)))


def test_framed_core_is_three_modules_in_a_row() -> None:
    torch.manual_seed(0)
    layer = FramedConv2d(5, 7, (2, 3), lambda a, b: nn.Conv2d(a, b, 3, padding=1, bias=False), dtype=torch.float64)
    layer.core.double()
    images = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    hidden = layer.core(torch.einsum("nihw,ia->nahw", images, layer.k1))
    assert layer.bias is not None
    expected = torch.einsum("nbhw,bo->nohw", hidden, layer.k3) + layer.bias[:, None, None]
    torch.testing.assert_close(layer(images), expected)
    assert repr(layer).startswith("FramedConv2d(\n  5, 7, rank=(2, 3)\n")
    assert "rank=(2, 2), bias=False" in repr(FramedConv2d(4, 4, 2, SOC_CORE, bias=False))
    assert "frames='orthonormal'" in repr(FramedConv2d(4, 4, 2, SOC_CORE, frames="orthonormal"))


SOC_CORE: Callable[[int, int], nn.Module] = lambda r1, r2: SOC(r1, r2, 3, bias=False)  # noqa: E731


def test_a_layer_starts_the_same_whatever_its_frames() -> None:
    layers = []
    kinds: tuple[FrameKind, ...] = ("free", "orthonormal")
    for frames in kinds:
        torch.manual_seed(0)
        layers.append(TTConv2d(6, 8, 3, 4, frames=frames, dtype=torch.float64))
    free, held = layers
    for name in ("k1", "core", "k3", "bias"):
        torch.testing.assert_close(getattr(held, name), getattr(free, name))
    assert (free.frames, held.frames) == ("free", "orthonormal")
    assert "frames='orthonormal'" in repr(held)
    assert "frames" not in repr(free)
    before = held.k1.clone()
    held.reset_parameters()
    assert not torch.equal(held.k1, before)
    assert deviation(held.double()) < 1e-12
    held.hold_frames()
    assert len(held.parametrizations) == 2  # type: ignore[arg-type]
    assert sum(p.numel() for p in held.parameters()) == sum(p.numel() for p in free.parameters())


def test_trained_layers_take_up_orthonormal_frames() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 8, 3, padding=1, dtype=torch.float64)
    layer = TTConv2d.from_dense(conv, 8, frames="orthonormal")
    images = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(images), conv(images))
    assert deviation(layer) < 1e-13
    with pytest.raises(ValueError, match="frames = 'stiff': must be one of free, orthonormal"):
        TTConv2d.from_dense(conv, 8, frames="stiff")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frames = 'stiff'"):
        tensorize(conv, 4, frames="stiff")  # type: ignore[arg-type]


def test_models_with_orthonormal_frames_convert_copy_and_load() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2)).double()
    images = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    tt = tensorize(model, 6, frames="orthonormal")
    assert [layer.frames for layer in tt.modules() if isinstance(layer, TTConv)] == ["orthonormal"] * 2
    torch.testing.assert_close(tt(images), tensorize(model, 6)(images))
    back = densify(tt)
    assert [type(layer) for layer in back] == [nn.Conv2d, nn.ReLU, nn.Conv2d]  # type: ignore[attr-defined]
    torch.testing.assert_close(back(images), tt(images))
    torch.testing.assert_close(copy.deepcopy(tt)(images), tt(images))
    other = tensorize(
        nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2)), 6, frames="orthonormal"
    )
    other.double().load_state_dict(tt.state_dict())
    assert torch.equal(other(images), tt(images))


def test_orthogonal_loss_and_its_derivatives() -> None:
    """The gradient has a formula of its own: against differences, twice, by torch.func and in mixed precision."""
    layer = TTConv2d(6, 8, 3, (4, 5)).double()
    torch.manual_seed(0)
    with torch.no_grad():
        layer.k1.normal_()
        layer.k3.normal_()

    def loss(k1: Tensor, k3: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(Loss(), {"layer.k1": k1, "layer.k3": k3}, ())
        return found

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> Tensor:
            found = orthogonal_loss(self)
            assert found is not None
            return found

    frames = tuple(frame.detach().clone().requires_grad_() for frame in (layer.k1, layer.k3))
    assert torch.autograd.gradcheck(loss, frames)
    assert torch.autograd.gradgradcheck(loss, frames)
    expected = torch.autograd.grad(loss(*frames), frames)
    for found, exact in zip(torch.func.grad(loss, (0, 1))(*frames), expected, strict=True):
        torch.testing.assert_close(found, exact)
    single = TTConv2d(6, 8, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = orthogonal_loss(single)
    assert mixed is not None
    torch.autograd.backward(mixed)
    assert single.k1.grad is not None


def test_orthogonal_loss_counts_free_frames_only() -> None:
    torch.manual_seed(0)
    free = TTConv2d(6, 8, 3, 4)
    with torch.no_grad():
        free.k1.mul_(1.5)
    held = TTConv2d(6, 8, 3, 4, frames="orthonormal")
    alone, together = orthogonal_loss(free), orthogonal_loss(nn.ModuleList([held, free]))
    assert alone is not None
    assert together is not None
    assert alone.item() == pytest.approx(4 * 1.25**2 / (2 * 4**2))
    assert together.item() == alone.item()
    assert orthogonal_loss(held) is None
    core = SOCTT(6, 8, 3, 4)
    with torch.no_grad():
        core.k1.mul_(1.5)
    framed = orthogonal_loss(core)
    assert framed is not None
    assert framed.item() == pytest.approx(alone.item())
