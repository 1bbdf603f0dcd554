"""float32 products stay float32 where singular values are found, whatever training allows."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ttsv.precision import full_precision
from ttsv.spectral.clamping import clamp_conv
from ttsv.spectral.clipping import ClipOptions, clip_conv, clip_matrix, clip_measured, clip_tt
from ttsv.spectral.singular_values import conv_norm, conv_singular_values
from ttsv.spectral.symbol import PeriodicConv

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense


CUDA: Any = torch.backends.cuda.matmul
CPU: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def settings() -> tuple[str, str]:
    return CUDA.fp32_precision, CPU.fp32_precision


@pytest.fixture
def relaxed() -> Iterator[tuple[str, str]]:
    """What a training run may have set."""
    before = settings()
    CUDA.fp32_precision, CPU.fp32_precision = "tf32", "bf16"
    yield "tf32", "bf16"
    CUDA.fp32_precision, CPU.fp32_precision = before


def test_settings_are_restored_after_errors_and_when_nested(relaxed: tuple[str, str]) -> None:
    with full_precision():
        with pytest.raises(KeyError), full_precision():
            raise KeyError
        assert settings() == ("ieee", "ieee")
    assert settings() == relaxed


@pytest.mark.parametrize(
    "measure",
    [
        lambda kernel: clip_conv(kernel, 1.0, 4),
        lambda kernel: clip_measured(kernel, PeriodicConv.of(kernel, 4), ClipOptions(1.0)),
        lambda kernel: clip_tt(torch.eye(6), kernel, torch.eye(6), 1.0, 4),
        lambda kernel: clip_matrix(kernel[..., 0], 1.0),
        lambda kernel: clamp_conv(kernel, 0.1, 1.0, 4),
        lambda kernel: conv_singular_values(kernel, 4),
        lambda kernel: conv_norm(kernel, 4),
    ],
)
def test_decompositions_and_products_are_exact(
    dense: "Dense", relaxed: tuple[str, str], measure: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("eigh", "svd", "svdvals", "cholesky_ex", "qr"):
        original = getattr(torch.linalg, name)

        def spy(*arguments: Any, original: Any = original, **options: Any) -> Any:
            seen.append(settings())
            return original(*arguments, **options)

        monkeypatch.setattr(torch.linalg, name, spy)
    measure(dense.gaussian(6, 6, 3, dtype=torch.float32))
    assert set(seen) == {("ieee", "ieee")}
    assert settings() == relaxed
