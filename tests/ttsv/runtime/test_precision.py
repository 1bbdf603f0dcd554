"""float32 products stay float32 where singular values are found, whatever training allows."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from ttsv.config.trial import TrialConfig
from ttsv.constraints import Clip
from ttsv.constraints.compose import Orthogonal
from ttsv.constraints.projection import Projection
from ttsv.evaluation import evaluated, stages
from ttsv.metrics import cost
from ttsv.results import TrialResult
from ttsv.runtime.precision import full_precision, training_precision
from ttsv.spectral.clamping import clamp_conv
from ttsv.spectral.clipping import ClipOptions, clip_conv, clip_matrix, clip_stack, clip_tt, measured
from ttsv.spectral.singular_values import conv_norm, conv_singular_values
from ttsv.spectral.symbol import PeriodicConv
from ttsv.training import loop
from ttsv.trial import run_trial

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense


BACKENDS: Any = torch.backends
SETTINGS: tuple[Any, ...] = (
    BACKENDS.cuda.matmul,
    BACKENDS.cudnn.conv,
    BACKENDS.cudnn.rnn,
    BACKENDS.mkldnn.matmul,
    BACKENDS.mkldnn.conv,
    BACKENDS.mkldnn.rnn,
)
EXACT = ("ieee",) * 6


def settings() -> tuple[str, ...]:
    return tuple(setting.fp32_precision for setting in SETTINGS)


@pytest.fixture
def relaxed() -> Iterator[tuple[str, ...]]:
    """What somebody may have set."""
    before, loose = settings(), ("tf32", "tf32", "tf32", "bf16", "bf16", "bf16")
    for setting, precision in zip(SETTINGS, loose, strict=True):
        setting.fp32_precision = precision
    yield loose
    for setting, precision in zip(SETTINGS, before, strict=True):
        setting.fp32_precision = precision


def test_settings_are_restored_after_errors_and_when_nested(relaxed: tuple[str, ...]) -> None:
    with full_precision():
        with pytest.raises(KeyError), full_precision():
            raise KeyError
        assert settings() == EXACT
    assert settings() == relaxed


@pytest.mark.parametrize(
    "measure",
    [
        lambda kernel: clip_conv(kernel, 1.0, 4),
        lambda kernel: clip_stack([kernel], PeriodicConv.of(kernel, 4), [1.0], ClipOptions(1.0, rescale=True)),
        lambda kernel: measured(
            clip_stack([kernel], PeriodicConv.of(kernel, 4), [1.0], ClipOptions(1.0)), PeriodicConv.of(kernel, 4)
        ),
        lambda kernel: clip_tt(torch.eye(6), kernel, torch.eye(6), 1.0, 4),
        lambda kernel: clip_matrix(kernel[..., 0], 1.0),
        lambda kernel: clamp_conv(kernel, 0.1, 1.0, 4),
        lambda kernel: conv_singular_values(kernel, 4),
        lambda kernel: conv_norm(kernel, 4),
    ],
)
def test_decompositions_and_products_are_exact(
    dense: "Dense", relaxed: tuple[str, ...], measure: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("eigh", "svd", "svdvals", "cholesky_ex", "qr"):
        original = getattr(torch.linalg, name)

        def spy(*arguments: Any, original: Any = original, **options: Any) -> Any:
            seen.append(settings())
            return original(*arguments, **options)

        monkeypatch.setattr(torch.linalg, name, spy)
    measure(dense.gaussian(6, 6, 3, dtype=torch.float32))
    assert set(seen) == {EXACT}
    assert settings() == relaxed


@pytest.mark.parametrize("tf32", [False, True])
def test_only_the_steps_of_a_training_are_in_tensorfloat_32(
    tf32: bool, relaxed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where it is asked for, whatever the process had before, which gets it back."""
    seen: dict[str, set[tuple[str, ...]]] = {}

    def spy(target: Any, name: str, phase: str) -> None:
        original = getattr(target, name)

        def called(*arguments: Any, **options: Any) -> Any:
            seen.setdefault(phase, set()).add(settings())
            return original(*arguments, **options)

        monkeypatch.setattr(target, name, called)

    spy(loop, "as_pixels", "forward")
    spy(torch.autograd, "backward", "backward")
    spy(Projection, "project", "projection")
    spy(Orthogonal, "penalty", "penalty")
    spy(loop, "predict", "validation")
    spy(loop, "orthogonal_loss", "orthogonal loss")
    spy(stages, "predict", "evaluation")
    spy(evaluated, "model_spectra", "spectra")
    spy(cost, "inference_times", "latency")
    monkeypatch.setattr(evaluated, "write_plots", lambda *_, **__: {})
    config = TrialConfig.from_dict(
        {
            "dataset": "synthetic:1x8x8:4:80",
            "model": "small-cnn",
            "layer": "tt",
            "rank": 4,
            "lambda_ort": 0.1,
            "constraint": "clip",
            "delta": 1.0,
            "clipping": {"every": 1},
            "training": {"epochs": 1, "steps": 2, "tf32": tf32, "ema": 0.5, "convolutions": "direct"},
        }
    )
    *_, result = run_trial(config, data_dir=tmp_path / "data", folder=tmp_path / "trial", device="cpu")
    step = ("tf32",) * 3 + ("ieee",) * 3 if tf32 else EXACT
    exact = ("projection", "penalty", "validation", "orthogonal loss", "evaluation", "spectra", "latency")
    assert seen == {"forward": {step}, "backward": {step}} | {phase: {EXACT} for phase in exact}
    assert settings() == relaxed
    assert isinstance(result, TrialResult)
    said = "allowed; this device has none: steps in float32"
    assert result.protocol.get("training", {}).get("tf32") == (said if tf32 else None)


def test_a_compiler_that_asks_the_older_setting_is_answered() -> None:
    """Torch raises where the older and the newer setting of products differ, as it would within a compiled step."""
    products = torch.backends.cuda.matmul
    for tf32 in (False, True):
        with full_precision():
            with training_precision(tf32=tf32):
                assert (products.allow_tf32, torch.get_float32_matmul_precision()) == (
                    tf32,
                    "high" if tf32 else "highest",
                )
                with full_precision():
                    assert settings() == EXACT
            assert (products.allow_tf32, torch.get_float32_matmul_precision()) == (False, "highest")
    assert (products.allow_tf32, torch.get_float32_matmul_precision()) == (False, "highest")


def test_what_somebody_has_allowed_is_given_back_whole() -> None:
    products = torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision("high")
        with full_precision(), training_precision(tf32=True):
            assert products.allow_tf32
        assert (products.allow_tf32, products.fp32_precision) == (True, "tf32")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not products.allow_tf32


def test_clips_and_what_they_report_are_the_same_inside_autocast() -> None:
    torch.manual_seed(0)
    given = nn.Conv2d(64, 64, 3, padding=1)
    found = []
    for inside in (False, True):
        conv = copy.deepcopy(given)
        for delta in (0.5, 5.0):  # which clips, and which leaves all as it is and measures a norm for the report
            clip = Clip(delta, every=1)
            clip.bind(conv, 16, in_channels=64)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                clip.project(conv, 1)
                found.append((conv.weight.detach().clone(), clip.report().layers))
    for (weight, norms), (other, inside_norms) in zip(found[:2], found[2:], strict=True):
        assert torch.equal(weight, other)
        assert norms == inside_norms
