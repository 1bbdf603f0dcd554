import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ttsv.runtime.devices import measured_convolutions

ROOT = Path(__file__).parents[3]
STEPS = """
import resource, sys
import torch
from benchmarks.measuring import resident_mebibytes
from ttsv.runtime.devices import keep_freed_memory, return_freed_memory

def faults():
    for step in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = torch.zeros(25_000_000)  # larger than any block that glibc keeps by itself
        del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
assert keep_freed_memory()
print(faults())
kept = resident_mebibytes()
return_freed_memory()
print(round(kept - resident_mebibytes()))
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again() -> None:
    """Pages taken from the system by the last of twelve equal steps, of 24,000 that it writes to; MiB given back."""
    usual, faults, given_back = map(int, subprocess.check_output([sys.executable, "-c", STEPS], cwd=ROOT).split())
    assert faults < 1000 < usual
    assert given_back > 90


def test_convolutions_are_measured_on_gpus_alone_and_the_setting_is_given_back() -> None:
    assert not torch.backends.cudnn.benchmark
    for device, expected in (("cpu", False), ("cuda:1", True)):
        with measured_convolutions(torch.device(device)):
            assert torch.backends.cudnn.benchmark == expected
        assert not torch.backends.cudnn.benchmark
    with pytest.raises(ZeroDivisionError), measured_convolutions(torch.device("cuda")):
        raise ZeroDivisionError
    assert not torch.backends.cudnn.benchmark
