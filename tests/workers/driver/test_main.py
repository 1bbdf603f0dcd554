"""What a driver's threads do, without a cluster."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from service.experiments import actions
from service.queue import leases
from service.queue.trials import HeldExperiment
from tests.held import under
from workers.driver.__main__ import Driver
from workers.driver.feed import Feed, Slots

pytestmark = pytest.mark.here

if TYPE_CHECKING:
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
