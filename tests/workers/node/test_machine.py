from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from service.queue.cluster import Gpu
from ttsv.runtime.code import code_version
from workers.node import machine
from workers.node.machine import (
    describe,
    local_cpus,
    local_gpus,
    memory_bytes,
    usable_instructions,
    versions,
)


def test_a_process_without_our_settings_knows_the_images_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TTSV_REVISION", "TTSV_FAULTS", "TTSV_FAULTS_ONCE", "TTSV_DATABASE_URL", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "x")
    kept = machine.without_settings()
    assert {"TTSV_REVISION", "TTSV_FAULTS", "TTSV_FAULTS_ONCE"} <= kept.keys()
    assert kept.keys().isdisjoint({"TTSV_DATABASE_URL", "RAY_ADDRESS"})


def test_what_this_machine_has() -> None:
    assert 1 <= local_cpus() <= (psutil.cpu_count() or 1)
    assert local_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "0,GPU-1234"}) == ["0", "GPU-1234"]


@pytest.mark.parametrize(
    ("files", "cpus", "memory"),
    [
        ({}, 64, 2**40),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, 64, 2**40),
        ({"cpu.max": "350000 100000\n", "memory.max": "6442450944\n"}, 3, 6 * 2**30),
        ({"cpu.max": "50000 100000\n"}, 1, 2**40),
        (
            {
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            64,
            2**40,
        ),
        (
            {
                "cpu/cpu.cfs_quota_us": "200000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "6442450944\n",
            },
            2,
            6 * 2**30,
        ),
    ],
    ids=["none", "unlimited", "limited", "half a CPU", "unlimited, version 1", "limited, version 1"],
)
def test_limits_of_a_container_are_kept_by_either_version_of_control_groups(
    files: dict[str, str], cpus: int, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "ours").write_text("0::/\n")
    assert _limits(tmp_path, monkeypatch) == (cpus, memory)


@pytest.mark.parametrize(
    ("ours", "files"),
    [
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0\n",
            {
                "system.slice/slurmstepd.scope/job_7/memory.max": "8589934592\n",
                "system.slice/slurmstepd.scope/job_7/cpu.max": "400000 100000\n",
                "system.slice/slurmstepd.scope/job_7/step_batch/memory.max": "6442450944\n",
                "system.slice/slurmstepd.scope/job_7/step_batch/cpu.max": "300000 100000\n",
                "system.slice/slurmstepd.scope/job_7/step_batch/user/task_0/memory.max": "max\n",
                "system.slice/slurmstepd.scope/job_8/memory.max": "1073741824\n",
            },
        ),
        (
            "9:pids:/slurm\n5:memory:/slurm/uid_1000/job_7/step_batch\n4:cpu,cpuacct:/slurm/job_7\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slurm/uid_1000/job_7/memory.limit_in_bytes": "6442450944\n",
                "memory/slurm/uid_1000/job_7/step_batch/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slurm/uid_1000/job_8/memory.limit_in_bytes": "1073741824\n",
                "cpu/slurm/job_7/cpu.cfs_quota_us": "300000\n",
                "cpu/slurm/job_7/cpu.cfs_period_us": "100000\n",
            },
        ),
        # A container that shows the machine's names, and a process whose group lies outside of what it sees.
        ("0::/docker/4f\n", {"memory.max": "6442450944\n", "cpu.max": "300000 100000\n"}),
        ("0::/../4f\n", {"memory.max": "6442450944\n", "cpu.max": "300000 100000\n", "4f/memory.max": "1\n"}),
    ],
    ids=["version 2", "version 1", "other names", "outside"],
)
def test_the_least_limit_around_a_batch_job_is_kept(
    ours: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "ours").write_text(ours)
    assert _limits(tmp_path, monkeypatch) == (3, 6 * 2**30)


def _limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Processors and bytes of a machine with 64 and a tebibyte, whose control groups lie in this folder."""
    monkeypatch.setattr(machine, "_CONTROL_GROUPS", folder)
    monkeypatch.setattr(machine, "_OUR_GROUPS", folder / "ours")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(64)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40))
    return local_cpus(), memory_bytes()


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

    @pytest.mark.slow
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


class TestDescription:
    def test_of_this_machine(self, tmp_path: Path) -> None:
        found = describe(tmp_path)
        assert found.versions == versions()
        assert found.versions.python == platform.python_version()
        assert found.versions.package == code_version()
        assert "+" not in found.versions.torch
        assert 0.5 < found.memory_gib < 10_000
        assert found.free_disk_gib > 0
        assert found.clock_seconds is None

    @pytest.mark.parametrize(
        ("visible", "models"),
        [
            (None, ["H100", "L4", "A100"]),
            ("2,0", ["A100", "H100"]),
            ("GPU-2222", ["L4"]),
            ("", []),
            ("-1", []),
            ("7", []),
        ],
    )
    def test_gpus_in_the_order_of_their_numbers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, models: list[str]
    ) -> None:
        script = tmp_path / "nvidia-smi"
        rows = "GPU-1111-a, H100, 81559\nGPU-2222-b, L4, 23034\nGPU-3333-c, A100, 40960\n"
        script.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        found = describe(tmp_path, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}).gpus
        assert [gpu.name for gpu in found] == models
        assert Gpu("H100", 79.6) in found or "H100" not in models

    def test_a_gpu_without_memory_of_its_own_is_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text("#!/bin/sh\nprintf 'GPU-1111-a, NVIDIA GB10, [N/A]\nGPU-2222-b, L4, 23034\n'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert describe(tmp_path).gpus == (Gpu("NVIDIA GB10", 0.0), Gpu("L4", 22.5))

    def test_a_driver_that_is_broken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert describe(tmp_path).gpus == ()
        assert "nvidia-smi does not say which GPUs there are" in caplog.text

    def test_a_driver_that_does_not_answer_is_not_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "_DRIVER_SECONDS", 0.1)
        monkeypatch.setattr(machine, "_DRIVER", tmp_path)
        (tmp_path / "0000:01:00.0").mkdir()
        (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-1111-a\n")
        script = tmp_path / "nvidia-smi"
        script.write_text("#!/bin/sh\nexec sleep 60\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert describe(tmp_path).gpus == (Gpu("NVIDIA H100", 0.0),)

    def test_cards_that_the_driver_cannot_name_are_not_offered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """All of those have one name, of which CUDA knows none."""
        monkeypatch.setattr(machine, "_DRIVER", tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        unknown = "GPU-????????-????-????-????-????????????"
        for number, uuid in enumerate([unknown, "GPU-1111-a", unknown]):
            (tmp_path / f"0000:0{number}:00.0").mkdir()
            said = f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n"
            (tmp_path / f"0000:0{number}:00.0" / "information").write_text(said)
        assert local_gpus({}) == ["GPU-1111-a"]
        assert "no UUID of 2 of 3 cards, which no trial is given" in caplog.text
        assert machine.card_devices() == {"GPU-1111-a": Path("/dev/nvidia1")}


def test_processes_without_credentials_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "TTSV_DATABASE_PASSWORD", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PGTZ", "UTC")
    left = machine.without_settings()
    assert "secret" not in left.values()
    assert left["PGTZ"] == "UTC"
