"""A driver that hangs while its lease is renewed."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

import pytest

from service.queue import leases
from workers.driver import hanging
from workers.driver.callback import TuneCallback
from workers.driver.feed import Feed, Slots
from workers.driver.tuner import Passes

if TYPE_CHECKING:
    from tests.workers.conftest import Lab

TURNS = """
import time
from workers.driver import hanging
hanging.HUNG_SECONDS, hanging._LOOK_SECONDS = 1, 0.05
with hanging.ended_if_hung():
    for _ in range(15):
        hanging.turn()
        time.sleep(0.1)
    with hanging.unlimited():
        time.sleep(1.1)
time.sleep(1.1)
print("lives", flush=True)
with hanging.ended_if_hung():
    time.sleep(60)
"""

HANGS = """
import sys, time
from workers.driver import __main__ as driver, hanging

class Disk:
    def find_spec(self, name, *_):
        while name == "workers.driver.feed":
            time.sleep(0.1)  # a disk that is gone

hanging.HUNG_SECONDS = 1
sys.meta_path.insert(0, Disk())
driver.main()
"""


def _ended(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_process_lives_while_its_loop_turns() -> None:
    ended = _ended(TURNS)
    assert (ended.returncode, ended.stdout) == (1, "lives\n"), ended.stderr
    assert 'File "<string>", line 14 in <module>' in ended.stderr


@pytest.mark.slow
def test_a_driver_that_hangs_in_an_import_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its lease by then, and renews it."""
    experiment_id = lab.post([0])
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    monkeypatch.setenv("TTSV_DATA_DIR", str(lab.data_dir))
    ended = _ended(HANGS, "--experiment", str(experiment_id), "--fence", str(lease.fence))
    assert ended.returncode == 1
    assert "in find_spec" in ended.stderr
    assert lab.experiment(experiment_id).heartbeat > 0


def test_a_pass_may_last_while_tunes_loop_turns_or_waits_for_the_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    callback = TuneCallback(MagicMock(), MagicMock(), MagicMock())
    slots, seen = Slots(), list[float]()
    slots.set(1)
    feed = Feed(lambda _: seen.append(hanging._left), slots, lambda: None)

    def fit() -> None:
        hanging._left = 7
        callback.on_step_begin(0, [])
        seen.append(hanging._left)
        feed.suggest("a")
        seen.append(hanging._left)

    monkeypatch.setattr(Passes, "_tuner", lambda *_: SimpleNamespace(fit=fit))
    spec = SimpleNamespace(timeout_seconds=None, hung_after=None)
    work: Any = SimpleNamespace(spec=spec, data_dir=tmp_path, home=SimpleNamespace(data_dir="", storage=None))
    Passes(lambda *_, **__: iter(()), cast("Any", None)).run(work)
    assert [*seen, hanging._left] == [300, math.inf, 300, math.inf]
