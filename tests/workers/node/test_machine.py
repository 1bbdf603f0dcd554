from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from workers.node.machine import local_cpus, local_gpus, usable_instructions


def test_what_this_machine_has() -> None:
    assert 1 <= local_cpus() <= (psutil.cpu_count() or 1)
    assert local_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "0,GPU-1234"}) == 2


class TestInstructions:
    @pytest.fixture(autouse=True)
    def _unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        usable_instructions.cache_clear()

    @pytest.mark.parametrize(
        ("shows", "code", "kept"), [(True, -signal.SIGILL, False), (True, 0, True), (False, 1, True)]
    )
    def test_those_that_are_trapped_are_left_out(
        self, monkeypatch: pytest.MonkeyPatch, shows: bool, code: int, kept: bool
    ) -> None:
        done: subprocess.CompletedProcess[bytes] = subprocess.CompletedProcess([], code)
        monkeypatch.setattr("workers.node.machine._shows_amx", lambda: shows)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        assert usable_instructions() == ({} if kept else {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"})

    def test_what_the_user_set_is_obeyed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        monkeypatch.setattr("workers.node.machine._shows_amx", lambda: True)
        monkeypatch.setattr(subprocess, "run", None)
        assert usable_instructions() == {}

    def test_products_in_bf16_run_here(self) -> None:
        product = (
            "import torch; matrix = torch.ones(64, 64, dtype=torch.bfloat16); print((matrix @ matrix)[0, 0].item())"
        )
        child = subprocess.run(
            [sys.executable, "-c", product],
            env={**os.environ, **usable_instructions()},
            capture_output=True,
            text=True,
            check=True,
        )
        assert child.stdout == "64.0\n"
