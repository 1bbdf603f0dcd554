"""What goes wrong goes wrong as it is said to."""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from tests.chaos import notes
from tests.chaos.monkey import MACHINERY, RESPITE_SECONDS, TRIALS, Monkey
from tests.chaos.program import PROCESS, checkpoints
from tests.chaos.site import Site
from ttsv.config.trial import TrialConfig

KINDS = [*TRIALS, *MACHINERY]
CONFIG = TrialConfig.from_dict({"dataset": "digits", "model": "small-cnn", "training": {"epochs": 9}})


@pytest.fixture
def site() -> Iterator[Site]:
    """One of which nothing was started."""
    site = Site("sqlite")
    yield site
    site.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


class Fake:
    """A site of which trials and drivers are away for fifteen seconds after anything was killed that they need."""

    postgres, disks = object(), dict[str, Path]()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = self._down = 0.0
        self.killed: list[str] = []
        monkeypatch.setattr("tests.chaos.monkey.time", SimpleNamespace(monotonic=lambda: self.clock, strftime=str))

    def play(self, monkey: Monkey, kills: int) -> None:
        while monkey.met() < kills:
            monkey.turn(cast(Any, None))
            self.clock += 0.1

    def victims(self, kind: str) -> list[int]:
        return [] if kind in ("trial", "driver") and self.clock < self._down else [KINDS.index(kind)]

    def is_frozen(self, pid: int) -> bool:
        return False

    def spoil(self, pid: int, choose: random.Random) -> bool:
        return False

    def kill(self, pid: int) -> None:
        self.killed.append(KINDS[pid])
        if KINDS[pid] in MACHINERY:
            self._down = self.clock + 15


@pytest.mark.parametrize("seed", range(5))
def test_each_kind_is_met_once_before_any_comes_again(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With pauses longer than a respite none need be passed over."""
    fake = Fake(monkeypatch)
    monkey = Monkey(cast(Any, fake), seed, 60.0, "kill", respite=0.0)
    assert monkey.unmet() == sorted(KINDS)
    fake.play(monkey, len(KINDS))
    assert sorted(fake.killed) == sorted(KINDS)
    assert monkey.unmet() == []
    others = Fake(monkeypatch)
    others.play(Monkey(cast(Any, others), seed + 100, 60.0, "kill", respite=0.0), len(KINDS))
    assert others.killed != fake.killed


def test_who_needs_no_respite_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """While what was met of late is left alone others may come again: everything else would wait for it."""
    fake = Fake(monkeypatch)
    monkey = Monkey(cast(Any, fake), 0, 1.0, "kill", respite=300.0)
    fake.play(monkey, 20)
    assert sum(kind in MACHINERY for kind in fake.killed) == 1
    assert monkey.unmet()


def test_trials_and_drivers_are_met_as_well_at_a_kill_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though none is there for the fifteen seconds after anything that all of them need was killed."""
    fake = Fake(monkeypatch)
    monkey = Monkey(cast(Any, fake), 0, 1.0, "kill")
    fake.play(monkey, 200)
    kinds = Counter({name.removeprefix("kill "): count for name, count in monkey.done.items()})
    assert kinds.keys() - MACHINERY.keys() == {"trial", "driver", "api"}
    assert kinds["trial"] >= 20
    assert kinds["driver"] >= 20
    assert sum(kinds[kind] for kind in MACHINERY) <= fake.clock / RESPITE_SECONDS + 1


def test_each_process_stands_still_once(site: Site, process: subprocess.Popen[bytes]) -> None:
    assert site.freeze([process.pid]) == [process.pid]
    assert site.freeze([process.pid], 0.0) == []
    assert site.is_frozen(process.pid)
    assert comes_to(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    site.thaw([process.pid])
    assert not site.is_frozen(process.pid)
    assert comes_to(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED)


def comes_to(condition: Callable[[], bool]) -> bool:
    """A signal is delivered when the process is next looked at, which may take a moment."""
    deadline = time.monotonic() + 5
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("seed", range(5))
def test_a_checkpoint_that_was_changed_is_the_newest_and_is_not_taken(
    site: Site, process: subprocess.Popen[bytes], seed: int
) -> None:
    folder = site.data / "trials" / "7" / "3"
    folder.mkdir(parents=True)
    (folder / PROCESS).write_text(str(process.pid))
    kept = checkpoints(CONFIG, folder)
    kept.save(4, {"epoch": 4, "link": "four"})
    kept.save(5, {"epoch": 5, "link": "five"})
    assert site.spoil(process.pid, random.Random(seed))
    assert process.wait(10) == -9
    assert (checkpoints(CONFIG, folder).latest() or {})["epoch"] == 4
    assert notes.read(site.notes)[7].mutated == 1


def test_one_checkpoint_alone_stays_as_it_is(site: Site, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = site.data / "trials" / "7" / "3"
    folder.mkdir(parents=True)
    (folder / PROCESS).write_text(str(process.pid))
    checkpoints(CONFIG, folder).save(5, {"epoch": 5, "link": "five"})
    assert not site.spoil(process.pid, random.Random(0))
    assert process.wait(10) == -9
    assert (checkpoints(CONFIG, folder).latest() or {})["epoch"] == 5
    assert notes.read(site.notes) == {}
