"""What a driver's threads do, without a cluster."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest
from sqlalchemy import update

from service.database import Trial, now
from service.experiments import actions
from service.queue import leases
from service.queue.trials import HeldExperiment
from service.settings import Settings
from service.storage import MARKER, Attempt, Folder
from service.upkeep.home import settle
from tests.held import under
from tests.results import made_result
from ttsv.results import CHECKPOINTS
from workers.driver.__main__ import Driver
from workers.driver.feed import Feed, Slots
from workers.driver.leftovers import Leftovers
from workers.driver.recorder import Recorder
from workers.driver.tuner import Passes
from workers.driver.verification import Verification
from workers.node.depot.home import Home
from workers.trial_process.messages import FailureReport, ResultReport

pytestmark = pytest.mark.here

if TYPE_CHECKING:
    from pathlib import Path

    from tests.workers.conftest import Lab


def test_what_ran_when_its_experiment_was_stopped_and_lost_its_worker_goes_on(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long Tune takes from pass to pass until it asks for a trial."""
    monkeypatch.setattr("workers.driver.__main__.LOOK_SECONDS", 0.02)
    experiment_id = lab.post([0, 1])
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    first = lab.trials(experiment_id)[0]
    lab.database.write(under(lease, HeldExperiment.start_trial, first.id))
    lab.database.write(lambda session: actions.stop(session, experiment_id))
    with lab.database.read() as session:
        (seen,) = leases.watch(session)
    assert lab.database.write(partial(leases.reap, seen=seen))
    lease = lab.database.write(lambda session: leases.claim(session, "next", None))
    assert lease is not None

    driver, slots = Driver.__new__(Driver), Slots()
    slots.set(2)
    driver._database, driver._lease, driver._feed, driver._attempts = lab.database, lease, None, Counter()
    threading.Thread(target=driver._await_stop, daemon=True).start()
    handed_out = []
    for _ in range(3):  # where a fourth pass starts no trial either a driver gives up
        driver._feed = Feed(driver._next_job, slots, lambda: None)
        time.sleep(0.2)
        handed_out.append(driver._feed.suggest("a"))
    assert [answer["job"]["trial_id"] for answer in handed_out if isinstance(answer, dict)][:1] == [first.id]


def test_a_trial_that_is_retried_before_its_checkpoints_could_go_keeps_the_new_ones(lab: Lab) -> None:
    """Its store does not answer for long; meanwhile it fails, begins anew under the same claim, and gives way."""
    experiment_id = lab.post([0])
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    is_back = threading.Event()

    class Away(Folder):
        def folders(self, path: str, *, partial: bool = False) -> list[str]:
            assert is_back.wait(60)
            return super().folders(path, partial=partial)

    driver, slots = Driver.__new__(Driver), Slots()
    recorder = Recorder(lab.database, lease, lambda: None, driver._ended, settled=driver._settled)
    recorder.open()
    driver._database, driver._lease, driver._recorder, driver._attempts = lab.database, lease, recorder, Counter()
    driver._leftovers = Leftovers(Away(lab.data_dir), lease.fence)
    feed = driver._feed = Feed(driver._next_job, slots, lambda: None)
    slots.set(1)

    def train(name: str) -> Path:
        answer = feed.suggest(name)
        assert isinstance(answer, dict)
        number, trial_id = answer["job"]["attempt"], answer["job"]["trial_id"]
        recorder.started(trial_id)
        folder = lab.data_dir / Attempt(lease.fence, number).folder(trial_id) / CHECKPOINTS
        folder.mkdir(parents=True)
        return folder

    trial = lab.trials(experiment_id)[0]
    first = train("a")
    recorder.reported(trial.id, FailureReport("error", "a bug"))
    assert recorder.flush(10)
    feed.on_trial_complete("a")
    lab.database.write(lambda session: actions.retry(session, experiment_id))
    second = train("b")
    recorder.gave_way(trial.id)
    assert recorder.flush(10)
    is_back.set()
    assert driver._leftovers.wait(10)
    assert (first.exists(), second.exists()) == (False, True)


def test_the_place_of_files_is_the_one_that_the_database_knows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is mounted there as a pass begins."""
    monkeypatch.setattr("workers.driver.tuner.node_here", lambda: "node-1")
    driver = Driver.__new__(Driver)
    driver._database, driver._settings = lab.database, Settings(data_dir=lab.data_dir)
    settle(lab.database, driver._settings)
    word = (lab.data_dir / MARKER).read_text()
    (lab.data_dir / MARKER).unlink()
    home = driver._home(lab.data_dir / "tune" / "1-1")
    assert (home.mark, home.here()) == (word, lab.data_dir)
    with pytest.raises(OSError, match="not mounted here"):
        home.require_kept()


class GivenBackError(Exception):
    """In place of the process's end."""


@pytest.mark.parametrize(
    ("rests", "slots", "searches", "says"),
    [
        (0.0, 2, False, None),
        (0.3, 2, False, None),
        (60.0, 2, True, None),
        (60.0, 2, False, "what is left of it rests, for 60 s at least"),
        (1.5, sys.maxsize, False, None),  # nobody would claim what a driver without a worker gives back
        (0.0, 0, False, "no slot is left for it"),
        (0.3, 0, False, "no slot is left for it"),
    ],
)
def test_a_driver_waits_for_what_rests_where_that_is_short(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, rests: float, slots: int, searches: bool, says: str | None
) -> None:
    """Else others have its memory, and its place among those that may run at a time."""
    monkeypatch.setattr("workers.driver.__main__.IDLE_SECONDS", 1.0)
    monkeypatch.setattr("workers.driver.__main__.LOOK_SECONDS", 0.05)
    lab.post([0])
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    until = now() + timedelta(seconds=rests)
    lab.database.write(lambda session: session.execute(update(Trial).values(rests_until=until)))

    def give_back(_driver: Driver, reason: str) -> None:
        raise GivenBackError(reason)

    monkeypatch.setattr(Driver, "_give_back", give_back)
    driver, given = Driver.__new__(Driver), Slots()
    given.set(slots)
    driver._database, driver._lease = lab.database, lease
    began = time.monotonic()
    if says is None:
        driver._await_turn(given, searches=searches)
        assert time.monotonic() - began > (0 if searches else rests - 0.1)
    else:
        with pytest.raises(GivenBackError, match=says):
            driver._await_turn(given, searches=searches)


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_result_that_is_looked_at_is_stored_before_the_experiment_is_given_back(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """To have it again may take an hour; but no longer than a worker that leaves can wait."""
    experiment_id = lab.post([0, 1])
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    begun, store = threading.Event(), MagicMock()

    def size(_path: str) -> int:
        begun.set()
        time.sleep(0.5)
        return 7

    store.size = size
    store.digest.return_value = None
    monkeypatch.setattr("workers.driver.verification.open_kept", lambda *_: store)
    monkeypatch.setattr("workers.driver.__main__.VERIFY_SECONDS", patience)
    monkeypatch.setattr("os._exit", MagicMock(side_effect=GivenBackError))

    recorder = Recorder(lab.database, lease, lost=lambda: None)
    recorder.open()
    driver, slots = Driver.__new__(Driver), Slots()
    driver._database, driver._lease, driver._recorder = lab.database, lease, recorder
    driver._passes, driver._attempts, driver._leftovers = Passes(MagicMock(), recorder), Counter(), MagicMock()
    driver._feed = Feed(driver._next_job, slots, lambda: None)
    looking = driver._passes._verification = Verification(Home(str(lab.data_dir), "node-1", "", ""), recorder)
    slots.set(2)
    assert isinstance(driver._feed.suggest("a"), dict)
    trial = lab.trials(experiment_id)[0]
    recorder.started(trial.id)
    file = {"kind": "model", "path": f"trials/{trial.id}/1/model.pt", "sha256": "0" * 64, "size": 7}
    looking.begin(trial.id, ResultReport(made_result(), [file]), "node-2")  # type: ignore[list-item]
    assert begun.wait(10)

    with pytest.raises(GivenBackError):
        driver._give_back("SIGTERM came")
    looking.close()
    assert driver._feed.suggest("b") == Feed.FINISHED
    assert [trial.state for trial in lab.trials(experiment_id)] == ["succeeded" if patience else "queued", "queued"]
    assert lab.experiment(experiment_id).state == "queued"
