"""What a processor can compute, and what is refused where it cannot."""

from pathlib import Path

import pytest

from ttsv.config.trial import TrialConfig
from ttsv.errors import ConfigError
from ttsv.hardware import processor
from ttsv.hardware.processor import computes_bf16, instruction_set
from ttsv.trial import run_trial

AVX2 = "fpu sse4_2 avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512_vnni"


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Flags":
    return Flags(monkeypatch, tmp_path / "cpuinfo")


class Flags:
    """Makes the processor one of these flags."""

    def __init__(self, patch: pytest.MonkeyPatch, path: Path) -> None:
        self.patch, self.path = patch, path
        patch.setattr(processor, "_flags", processor._flags.__wrapped__)
        patch.setattr(processor, "_CPU_INFO", path)

    def __call__(self, flags: str, name: str = "flags\t\t") -> None:
        self.path.write_text(f"processor\t: 0\nmodel name\t: some\n{name}: {flags}\nbugs\t: avx512_bf16\n")


@pytest.mark.parametrize(
    ("shown", "limit", "has", "name"),
    [
        (AVX2, "", False, "avx2"),
        (AVX512, "", False, "avx512f"),
        (f"{AVX512} avx512_bf16", "", True, "avx512_bf16"),
        (f"{AVX512} avx512_bf16", "AVX2", False, "avx512_bf16"),
        (f"{AVX512} avx512_bf16", "avx512_core_vnni", False, "avx512_bf16"),
        (f"{AVX512} avx512_bf16 amx_bf16 amx_tile", "AVX512_CORE_FP16", True, "amx_bf16"),
        (f"{AVX512} amx_bf16", "AVX512_CORE_FP16", False, "amx_bf16"),
        (f"{AVX2} avx_ne_convert", "", True, "avx2"),
        (f"{AVX512} avx512_bf16", "ALL", True, "avx512_bf16"),
    ],
)
def test_bf16_by_flags_and_limits(flags: Flags, shown: str, limit: str, has: bool, name: str) -> None:
    flags(shown)
    assert computes_bf16({"ONEDNN_MAX_CPU_ISA": limit} if limit else {}) is has
    assert computes_bf16({"DNNL_MAX_CPU_ISA": limit} if limit else {}) is has
    assert instruction_set({}) == name
    limited = f"{name}, oneDNN: {limit.upper()}" if limit not in ("", "ALL") else name
    assert instruction_set({"ONEDNN_MAX_CPU_ISA": limit}) == limited


def test_other_machines(flags: Flags) -> None:
    assert (computes_bf16({}), instruction_set({})) == (None, "unknown"), "no file"
    flags("fp asimd bf16", "Features\t")
    assert (computes_bf16({}), instruction_set({})) == (True, "bf16")
    flags("fp asimd", "Features\t")
    assert (computes_bf16({}), instruction_set({})) == (False, "asimd")


@pytest.mark.parametrize(
    ("precision", "shown", "refused"),
    [
        ("bf16", AVX2, "(avx2)"),
        ("bf16", f"{AVX512} avx512_bf16", ""),
        ("fp16", f"{AVX512} avx512_bf16", "(avx512_bf16)"),
    ],
)
def test_less_precision_is_refused_at_the_start_where_it_is_far_slower(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, shown: str, refused: str
) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ttsv.training.network.fit", lambda *_, **__: iter([]))
    flags(shown)
    training = {"precision": precision, "epochs": 1, "steps": 1}
    config = TrialConfig.from_dict({"dataset": "digits", "model": "small-cnn", "training": training})

    def started() -> None:
        next(run_trial(config, data_dir=tmp_path, folder=tmp_path / "t", device="cpu"))

    if refused:
        with pytest.raises(ConfigError, match=f"precision = '{precision}': must be float32 here") as caught:
            started()
        assert refused in str(caught.value)
        assert caught.value.failure == "bad_config"
    else:
        with pytest.raises(AttributeError):  # of what stands in for the training, which begins
            started()
