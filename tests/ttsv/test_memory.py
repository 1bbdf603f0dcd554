import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = """
import resource, sys
import torch
from benchmarks.measuring import resident_mebibytes
from ttsv.memory import keep_freed_memory, return_freed_memory

if {kept}:
    assert keep_freed_memory()
for step in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = torch.zeros(25_000_000)  # larger than any block that glibc keeps by itself
    del activations
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
kept = resident_mebibytes()
return_freed_memory()
print(round(kept - resident_mebibytes()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again() -> None:
    """Pages taken from the system by the last of twelve equal steps, of 24,000 that it writes to; MiB given back."""
    found = [
        list(map(int, subprocess.check_output([sys.executable, "-c", STEPS.format(kept=kept)], cwd=ROOT).split()))
        for kept in (True, False)
    ]
    (faults, given_back), (usual, _) = found
    assert faults < 1000 < usual
    assert given_back > 90


LARGE = """
import torch
from ttsv.memory import keep_freed_memory

if {kept}:
    assert keep_freed_memory() and keep_freed_memory()  # as for each trial of a process
activations = [torch.ones(2_500_000) for _ in range(10)]
with open("/proc/self/smaps_rollup") as usage:
    sizes = {{line.split()[0]: int(line.split()[1]) for line in usage if line.endswith("kB\\n")}}
print(sizes["AnonHugePages:"] // 1024)
"""


def large_pages_on_request() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[madvise]" in setting.read_text()


@pytest.mark.skipif(not large_pages_on_request(), reason="the system has no large pages, or takes them always")
def test_the_heap_lies_in_large_pages() -> None:
    """MiB of them, of 95 that are written to."""
    found = [
        int(subprocess.check_output([sys.executable, "-c", LARGE.format(kept=kept)], cwd=ROOT))
        for kept in (True, False)
    ]
    assert found[0] > 60
    assert found[1] < 10


LIMITED = """
import resource
from ttsv.memory import keep_freed_memory

resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
assert keep_freed_memory()
print(len(bytearray(64 << 20)) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_few_addresses_are_enough() -> None:
    assert int(subprocess.check_output([sys.executable, "-c", LIMITED], cwd=ROOT)) == 64
