"""What this machine's processor can compute. Torch-free: workers ask before any trial does."""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_LEVELS = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
    "AVX512_CORE_BF16",
    "AVX512_CORE_FP16",
    "AVX512_CORE_AMX",
)
"""Values of ONEDNN_MAX_CPU_ISA, each with all that those before it have but for the two of AVX2_VNNI."""
_BF16 = {"avx_ne_convert": "AVX2_VNNI_2", "avx512_bf16": "AVX512_CORE_BF16", "amx_bf16": "AVX512_CORE_AMX"}
"""Flag of a processor that has instructions for bf16 -> the least level at which oneDNN uses them."""
_SHOWN = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "avx", "bf16", "asimd")
"""Flags by which an instruction set is named, the most first."""


def computes_bf16(environment: Mapping[str, str] = os.environ) -> bool | None:
    """Whether the processor has instructions for bf16 that `environment` lets oneDNN use; None where that is not known.

    Without them products in bf16 are put together from others: WRN-16-10 trained at 0.3 images a second on a processor
    with AVX2, and in float32 at 8.4.
    """
    flags = _flags()
    if flags is None:
        return None
    if "bf16" in flags:  # as ARM has it
        return True
    limit = _limit(environment)
    allowed = _LEVELS.index(limit) if limit else len(_LEVELS)
    return any(flag in flags and _LEVELS.index(level) <= allowed for flag, level in _BF16.items())


def instruction_set(environment: Mapping[str, str] = os.environ) -> str:
    """The widest instructions that the processor shows, such as "avx512_bf16" or "avx2"; "unknown" without a list.

    Where `environment` keeps oneDNN from some of them, it says to which: "amx_bf16, oneDNN: AVX2".
    """
    flags = _flags() or frozenset()
    shown = next((flag for flag in _SHOWN if flag in flags), "unknown")
    limit = _limit(environment)
    return f"{shown}, oneDNN: {limit}" if limit else shown


def _limit(environment: Mapping[str, str]) -> str:
    """To what oneDNN is kept; empty: to nothing."""
    limit = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "")).upper()
    return limit if limit in _LEVELS else ""


@cache
def _flags() -> frozenset[str] | None:
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", _CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return frozenset(found[1].split()) if found else None
