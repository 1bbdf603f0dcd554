"""What is posted is such that a verdict can tell, and a record says how it was made."""

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Trial
from service.database.engine import Database
from service.experiments import transitions
from service.experiments.submission import Draft, submit, turns_of
from service.queue import leases
from service.queue.driver_reads import next_trial
from service.queue.trials import hold
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.chaos.__main__ import CALM, GRIDS, Grid, Poster, circumstances
from tests.chaos.verdict import judge

NODE = GRIDS["node"]


@pytest.mark.parametrize("number", [0, 2, 4])
def test_trials_that_are_added_have_their_turn_before_those_that_run(number: int) -> None:
    """In the order of any grid that was posted whole those that were lost come before others, rule or none."""
    spec = ExperimentSpec.model_validate(NODE.spec(number))
    planned = expand_grid(spec, max_trials=NODE.trials).trials
    turn = {trial.config.seed: at for trial, at in zip(planned, turns_of(planned, spec.order), strict=True)}
    first, added = NODE.seeds(number)
    assert sorted(first + added) == list(range(NODE.trials))
    assert max(turn[seed] for seed in added) < min(turn[seed] for seed in first)
    assert len(first) == 2 * NODE.cpus
    assert len(added) > 2 * NODE.cpus, "as many may begin before a lost one as there are places"


@pytest.mark.parametrize("rule", [True, False])
def test_a_verdict_sees_that_lost_trials_run_first(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """And that they do not, where the product's rule is taken away."""
    genuine = transitions.requeue_trial

    def requeue(trial: Trial, **how: Any) -> None:
        turn = trial.turn
        genuine(trial, **how)
        trial.turn = trial.turn if rule else turn

    monkeypatch.setattr(transitions, "requeue_trial", requeue)
    spec = ExperimentSpec.model_validate(NODE.spec(0))
    draft = Draft(spec, expand_grid(spec, max_trials=NODE.trials))
    database, places = Database(sqlite_url), 2 * NODE.cpus
    database.write(lambda session: submit(session, draft))
    lease = database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None

    def begin(session: Session, trial_id: int) -> None:
        with hold(session, lease) as held:
            held.start_trial(trial_id)
            held.place_trial(trial_id, "here")

    first, _ = NODE.seeds(0)
    with database.read() as session:
        running = list(session.scalars(select(Trial.id).where(Trial.seed.in_(first))))
    for trial_id in running:
        database.write(partial(begin, trial_id=trial_id))

    def lose(session: Session) -> None:
        with hold(session, lease) as held:
            held.lose_trial(running[0], "its node died", charged=False)

    database.write(lose)
    while True:
        with database.read() as session:
            following = next_trial(session, lease, ())
        assert following is not None
        database.write(partial(begin, trial_id=following.id))
        if following.id == running[0]:
            break
    with database.read() as session:
        faults = judge(session, tmp_path, {"chaos 0": NODE.trials}, tmp_path, places=places).faults
    database.close()
    assert any(f"trial {running[0]} was lost" in fault for fault in faults) == (not rule)


def test_every_other_grid_is_posted_whole() -> None:
    assert NODE.seeds(1) == (list(range(NODE.trials)), [])
    assert Grid().seeds(0) == (list(range(4)), [])


@pytest.mark.parametrize(("seconds", "trials"), [(150, 12), (90, 12), (89, 10), (30, 4), (5, 2), (-1, 2)])
def test_a_grid_has_what_takes_so_long(seconds: float, trials: int) -> None:
    assert CALM.within(seconds).trials == trials
    assert CALM.within(seconds).seeds(0)[0] == list(range(trials))


def test_what_was_sent_is_sent_again_however_little_time_is_left(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Idempotency-Key stands for one document."""
    poster, sent = Poster(mock.Mock(address="http://nobody"), CALM), list[Any]()

    def answer(_: str, document: dict[str, Any], key: str) -> Any:
        sent.append(document)
        return None if len(sent) < 2 else {"id": 1}

    monkeypatch.setattr(poster, "_answer", answer)
    database = Database(sqlite_url)
    assert not poster.post(database, 60)
    assert poster.post(database, 15)
    assert poster.post(database, 15)
    database.close()
    assert [len(document["grid"]["seed"]) for document in sent] == [8, 8, 2]
    assert poster.posted == {"chaos 0": 8, "chaos 1": 2}


def test_a_record_says_when_on_what_and_with_which_options_it_was_made() -> None:
    options = argparse.Namespace(seed=1, database="sqlite", record=True, every=None, calm=True, respite=9.0)
    found = circumstances(options, 10.0)
    assert found.keys() == {"date", "revision", "dirty", "options"}
    assert found["options"] == {"every": 10.0, "calm": True, "respite": 9.0}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    assert found["revision"] is None or re.fullmatch("[0-9a-f]{40}", found["revision"])
