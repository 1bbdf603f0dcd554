"""A chaos run sees a fence that is missing: what a worker writes that woke up too late is noted, and a fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import fences

ROOT = Path(__file__).parents[2]
LATE = """
import sys
from functools import partial

from tests.chaos import fences

if sys.argv[2] == "unfenced":
    fences.weaken()
fences.watch()

from service.database.engine import Database
from service.errors import LeaseLostError
from service.queue import leases
from service.queue.trials import hold

database = Database(sys.argv[1])
slow = database.write(lambda session: leases.claim(session, "slow", None))
database.write(lambda session: leases.renew(session, slow))
with database.read() as session:
    (seen,) = leases.watch(session)
assert database.write(lambda session: leases.reap(session, seen))
database.write(lambda session: leases.claim(session, "quick", None))


def held(session):
    with hold(session, slow) as held:
        held.start_trial(1)


for write in (partial(leases.renew, lease=slow), held, partial(leases.release, lease=slow, drained=True)):
    try:
        database.write(write)
    except LeaseLostError:
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("fence", ["fenced", "unfenced"])
def test_who_writes_under_an_old_fence_is_noted(fence: str, sqlite_url: str, tmp_path: Path) -> None:
    """Where there is none, but for what the second look into a held experiment still refuses."""
    from tests.chaos.test_verdict import posted

    posted(sqlite_url)
    env = {**os.environ, fences.NOTES: str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", LATE, sqlite_url, fence], env=env, cwd=ROOT, check=True, timeout=60)
    found = fences.read(tmp_path)
    if fence == "fenced":
        assert found == fences.Refusals({"MainThread": 3}, [])
    else:
        assert found.by_thread == {}, "the lock itself lets it pass"
        renewed, released = found.stale
        assert renewed.startswith("experiment 1: thread MainThread of process ")
        assert renewed.endswith(" wrote under fence 1 what was under fence 3 by then")
        assert released.endswith(" wrote under fence 1 what was under fence 3 by then")


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_a_run_of_zombies_without_the_fence_ends_with_faults(tmp_path: Path) -> None:
    command = ["--database", "sqlite", "--only", "freeze", "--count", "3", "--seed", "31", "--unfenced"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert ended.returncode == 1, ended.stdout
    assert "FAULT: experiment" in ended.stdout
    assert "wrote under fence" in ended.stdout
