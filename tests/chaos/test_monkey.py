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

from tests.chaos import images, notes
from tests.chaos.monkey import DATA_SECONDS, MACHINERY, RESPITE_SECONDS, TRIALS, Monkey
from tests.chaos.program import PROCESS, checkpoints
from tests.chaos.site import Site
from ttsv.config.trial import TrialConfig
from ttsv.data import load_dataset
from ttsv.data.shared import find_shared
from ttsv.errors import DataError
from ttsv.runtime.faults import FAULTS, ONCE, POINTS, read

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


@pytest.fixture
def data(site: Site) -> Path:
    """The site's data folder, with the set in it."""
    images.make(site.data)
    return site.data


@pytest.mark.parametrize("seed", range(40))
def test_of_a_data_set_in_which_a_bit_was_changed_the_right_one_is_seen_or_none(
    site: Site, data: Path, seed: int
) -> None:
    """Wherever the bit is: what is made of the set is made anew, and only what the user made is left to be mended."""
    choose = random.Random(seed)
    for _ in range(3):
        spoilt = site.spoil_data(choose)
        assert spoilt is not None
        assert spoilt.stands()
        refused = ""
        try:
            assert images.seen(load_dataset(images.NAME, data)) == images.right(images.NAME)
        except DataError as error:
            refused = str(error)
        assert not refused or (spoilt.for_a_person and str(spoilt.folder / spoilt.file) in refused)
        assert spoilt.stands() == spoilt.for_a_person
        assert spoilt.put_right()
        assert images.seen(load_dataset(images.NAME, data)) == images.right(images.NAME)


def test_each_file_of_the_set_is_met_with_new_times_and_old(site: Site, data: Path) -> None:
    choose, met = random.Random(0), set()
    for _ in range(60):
        spoilt = site.spoil_data(choose)
        assert spoilt is not None
        met.add((spoilt.file.rpartition("/")[2], spoilt.dated))
        spoilt.put_right()
        load_dataset(images.NAME, data)
    stamped = {(file, dated) for file in ("chaos.npz", "images.npy", "labels.npy") for dated in (True, False)}
    assert met == stamped | {("npz-chaos.json", True), ("npz-chaos.sha256.json", True)}


def test_what_a_disk_changed_is_seen_by_who_does_not_look(data: Path) -> None:
    """Else nothing would be tried: times alone tell nothing of it."""
    folder, choose = data / "datasets", random.Random(0)
    while (spoilt := images.spoil(images.HEAD, folder, choose)) is None or spoilt.dated or spoilt.file == images.SOURCE:
        assert spoilt is not None
        spoilt.put_right()
        load_dataset(images.NAME, data)
    assert find_shared(images.NAME, folder) is not None
    assert find_shared(images.NAME, folder, whole=True) is None


def test_the_monkey_puts_right_what_only_a_person_can(
    site: Site, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 1000.0
    monkeypatch.setattr("tests.chaos.monkey.time", SimpleNamespace(monotonic=lambda: clock, strftime=str))
    monkey = Monkey(site, 0, 60.0)
    monkeypatch.setattr(monkey._random, "choice", lambda found: "data" if "data" in found else found[0])
    monkeypatch.setattr(monkey._random, "random", lambda: 0.3)
    monkey._hinder()
    (spoilt,) = monkey.wrong_data()
    assert (spoilt.file, spoilt.dated) == (images.SOURCE, True)
    with pytest.raises(DataError) as caught:
        load_dataset(images.NAME, data)
    monkey.refused(str(caught.value))
    monkey.refused(str(caught.value))
    monkey.look_at_data()
    assert spoilt.stands()
    clock += DATA_SECONDS + 1
    monkey.look_at_data()
    assert not spoilt.stands()
    assert monkey.wrong_data() == []
    assert images.seen(load_dataset(images.NAME, data)) == images.right(images.NAME)
    assert notes.read_data(site.notes) == {"changed": 1, "noticed": 1}
    assert monkey.done["data changed"] == 1


def test_no_file_is_changed_that_is_wrong_as_it_is(site: Site, data: Path) -> None:
    choose, standing = random.Random(0), list[images.Spoilt]()
    while (spoilt := site.spoil_data(choose, standing)) is not None:
        standing.append(spoilt)
    files = [one.file for one in standing]
    assert len(files) == len(set(files))
    assert images.NOTE in files, "without a note that is whole nothing is changed any more"
    assert all(one.stands() for one in standing)


@pytest.mark.parametrize("faults", [False, True])
def test_whoever_comes_first_to_a_fault_point_is_killed_where_that_is_asked_for(faults: bool) -> None:
    site = Site("sqlite", faults=faults)
    try:
        armed = read(site._environment.get(FAULTS, ""))
        assert {name: deed.action for name, deed in armed.items()} == (dict.fromkeys(POINTS, "kill") if faults else {})
        assert site.fired() == []
        folder = Path(site._environment[ONCE])
        folder.mkdir()
        (folder / "after_claim").touch()
        assert site.fired() == ["after_claim"]
    finally:
        site.close()
