"""What the benchmarks share: their options, timings by turns, peak memory of a fresh process, and their records."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ttsv.hardware.processor import instruction_set

_LOAD = os.getloadavg()
"""Of the machine before the benchmark."""
RECORDS = Path(__file__).with_name("records.jsonl")
"""One line for each benchmark, or each of its parts: what the documents quote."""


def parser(doc: str | None, *, authors: bool = False) -> argparse.ArgumentParser:
    """The options that benchmarks share; `doc` is the script's docstring."""
    shared = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared.add_argument("--quick", action="store_true", help="toy sizes, a few seconds; no record, no bound")
    if authors:
        given = os.environ.get("AUTHORS")
        shared.add_argument(
            "--authors",
            type=Path,
            default=Path(given) if given else None,
            help="a checkout of WhiteTeaDragon/practical_svd_conv; by default what the variable AUTHORS names",
        )
    return shared


def alternate(
    sides: Sequence[Callable[[], object] | None], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float] | None]:
    """Seconds of each side, on the wall unless another clock is given, by turns; warm up before."""
    seconds: list[list[float] | None] = [None if side is None else [] for side in sides]
    for _ in range(repeats):
        for side, taken in zip(sides, seconds, strict=True):
            if side is not None and taken is not None:
                start = clock()
                side()
                taken.append(clock() - start)
    return seconds


def median(seconds: list[float] | None) -> float | None:
    return None if seconds is None else statistics.median(seconds)


def ratio(theirs: float | None, ours: float) -> float | None:
    return None if theirs is None else theirs / ours


def peak_mebibytes(process: int | str = "self") -> float:
    """The highest resident size of a process so far; Linux only."""
    return _status(process, "VmHWM")


def resident_mebibytes(process: int | str = "self") -> float:
    """The resident size of a process; Linux only."""
    return _status(process, "VmRSS")


def _status(process: int | str, field: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(size) / 1024


def in_fresh_process(script: str, arguments: Sequence[str]) -> Any:
    """The JSON that a benchmark prints when run on its own with these arguments, on one thread."""
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)


def keep(name: str, command: str, figures: Mapping[str, Any], *, records: Path = RECORDS) -> None:
    """Replaces the record of this name, or adds it: one line of compact JSON with numbers of six digits.

    `command` is what the figures come of, as typed. Date, machine, load, threads and versions are added.
    """
    record = {"name": name, "command": command, **circumstances(), **figures}
    kept = read_records(records) | {name: rounded(record)}
    lines = [json.dumps(kept[key], separators=(",", ":")) for key in sorted(kept)]
    records.write_text("".join(f"{line}\n" for line in lines))


def read_records(records: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Every record by its name."""
    lines = records.read_text().splitlines() if records.is_file() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def rounded(value: Any) -> Any:
    """All numbers of a record in six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def circumstances() -> dict[str, Any]:
    """Date, machine, load, threads and versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {_processor()}, {os.cpu_count()} processors",
        "instructions": instruction_set(),
        "load": _LOAD,
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
