"""A process whose clock is wrong stores wrong moments, and the verdict knows by how much."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service.database import Event, Experiment, Trial
from service.database.engine import Database
from tests.chaos import clocks
from tests.chaos.fences import NOTES
from tests.chaos.site import Site
from tests.chaos.test_verdict import posted

ROOT = Path(__file__).parents[2]
CLAIMS = """
import sys
import time
from datetime import UTC, datetime

from service.database import now
from service.database.engine import Database
from service.queue import leases
from service.queue.trials import hold
from tests.chaos import clocks

clocks.put_off("driver 1 1")
database = Database(sys.argv[1])
lease = database.write(lambda session: leases.claim(session, "worker", None))


def start(session):
    with hold(session, lease) as held:
        held.start_trial(1)
        held.lose_trial(1, "gone")


database.write(start)
print(now().timestamp() - time.time())
"""


@pytest.mark.slow
def test_what_such_a_process_stores_is_off_unless_the_database_has_a_clock(database_url: str, tmp_path: Path) -> None:
    """Of moments that a default makes as well, and of those that it was given."""
    posted(database_url)
    wrong = {clocks.CLOCK: "3600", clocks.SEED: "7", NOTES: str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CLAIMS, database_url]
    done = subprocess.run(
        command, env=os.environ | wrong, cwd=ROOT, check=True, timeout=60, stdout=subprocess.PIPE, text=True
    )
    ahead = clocks.read(tmp_path)["driver 1 1"]
    assert abs(ahead) > 600, "with this seed"
    follows = database_url.startswith("postgres")
    assert float(done.stdout) == pytest.approx(-ahead if follows else 0, abs=5)
    database = Database(database_url)
    with database.read() as session:
        experiment, trial = session.get_one(Experiment, 1), session.get_one(Trial, 1)
        events = session.query(Event).where(Event.kind.in_(["claimed", "trial_lost"])).all()
        moments = [experiment.claimed_at, trial.started_at, *(event.at for event in events)]
    database.close()
    assert len(moments) == 4
    for moment in moments:
        assert moment is not None
        right = moment if follows else clocks.corrected(moment, ahead)
        assert abs(right - datetime.now(UTC)) < timedelta(minutes=2)


def test_clocks_are_drawn_ahead_and_behind_and_by_the_seed() -> None:
    found = [clocks.drawn("7", clocks.driver(1, fence), 3600) for fence in range(99)]
    assert found == [clocks.drawn("7", clocks.driver(1, fence), 3600) for fence in range(99)]
    assert found != [clocks.drawn("8", clocks.driver(1, fence), 3600) for fence in range(99)]
    assert -3600 < min(found) < -1800
    assert 1800 < max(found) < 3600
    assert clocks.spread({"one": 5.0, "other": 9.0}) == 9.0
    assert clocks.spread({"one": 5.0, "other": -9.0}) == 14.0


def test_a_process_that_is_started_again_has_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site("sqlite", clock=60, seed=3)
    started: list[str] = []
    monkeypatch.setattr("tests.chaos.site.spawn", lambda command, env, log, death: started.append(env[clocks.WHO]))
    site._launch("api")
    site.restarts["api"] += 1
    site._launch("api")
    site._children.clear()
    site.close()
    assert started == ["api 0", "api 1"]
