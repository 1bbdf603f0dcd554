"""Spectra over training: stored with their epoch, once, served thinned, and absent of trials that do not ask."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from service.client import Client
from service.database import EpochPoint, EpochSpectra, Trial
from service.database.engine import Database
from service.experiments import epoch_spectra
from service.experiments.submission import trial_columns
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.held import under, unfinished_trials
from tests.results import made_epoch
from ttsv.results import SPECTRUM_SHARES, LayerSpectrum

VALUES = (0.123456789, 0.2, 0.3, 0.4, 0.5, 0.6, 1 / 3)


def spectra(scale: float = 1.0, *, before: bool = True) -> tuple[LayerSpectrum, ...]:
    values = tuple(scale * value for value in VALUES)
    found = tuple(2 * value for value in values) if before else None
    return tuple(LayerSpectrum(name=name, values=values, before=found) for name in ("conv1", "conv2"))


@pytest.fixture
def running(database: Database, submit: Callable[..., int], claim: Callable[..., Lease]) -> tuple[Lease, int]:
    """A lease, and a trial that runs under it."""
    submit(seeds=1)
    lease = claim()
    with database.read() as session:
        (trial,) = unfinished_trials(session, lease)
    database.write(under(lease, HeldExperiment.start_trial, trial.id))
    return lease, trial.id


def report(database: Database, running: tuple[Lease, int], epoch: int, found: Any) -> None:
    lease, trial_id = running
    database.write(under(lease, HeldExperiment.add_epoch, trial_id, replace(made_epoch(epoch), spectra=found)))


def test_an_epoch_keeps_them_and_said_again_replaces_them(
    api: TestClient, database: Database, running: tuple[Lease, int]
) -> None:
    report(database, running, 1, spectra(7.0))
    report(database, running, 1, spectra())  # by another attempt, whose checkpoint was older
    report(database, running, 2, None)
    report(database, running, 3, spectra(before=False))
    trial_id = running[1]
    answer = api.get(f"/v1/trials/{trial_id}/spectra/epochs")
    assert answer.status_code == 200
    found = answer.json()
    assert (found["trial_id"], found["epochs"], found["shares"]) == (trial_id, [1, 3], list(SPECTRUM_SHARES))
    assert [layer["name"] for layer in found["layers"]] == ["conv1", "conv2"]
    first, third = found["layers"][1]["values"]
    assert first == third == [0.123457, 0.2, 0.3, 0.4, 0.5, 0.6, 0.333333]
    assert found["layers"][1]["before"] == [
        [0.246914, 0.4, 0.6, 0.8, 1.0, 1.2, 0.666667],
        None,
    ]
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(EpochPoint)) == 3
        assert session.scalar(select(func.count()).select_from(EpochSpectra)) == 2


def test_of_many_so_many_are_served_as_are_asked_for(
    api: TestClient, database: Database, running: tuple[Lease, int]
) -> None:
    _, trial_id = running

    def add(session: Any) -> None:
        for epoch in range(1, 102):
            layers = epoch_spectra.stored(spectra(float(epoch)))
            session.add(EpochSpectra(trial_id=trial_id, epoch=epoch, layers=layers))

    database.write(add)
    found = api.get(f"/v1/trials/{trial_id}/spectra/epochs?points=5").json()
    assert found["epochs"] == [1, 26, 51, 76, 101]
    assert [round(values[1]) for values in found["layers"][0]["values"]] == [0, 5, 10, 15, 20]
    assert len(api.get(f"/v1/trials/{trial_id}/spectra/epochs").json()["epochs"]) == 101
    assert api.get(f"/v1/trials/{trial_id}/spectra/epochs?points=1").status_code == 422


def test_a_trial_without_them_has_none(api: TestClient, running: tuple[Lease, int]) -> None:
    found = api.get(f"/v1/trials/{running[1]}/spectra/epochs").json()
    assert (found["epochs"], found["layers"]) == ([], [])
    assert api.get("/v1/trials/999/spectra/epochs").status_code == 404


def test_they_go_with_their_trial(database: Database, running: tuple[Lease, int]) -> None:
    report(database, running, 1, spectra())

    def remove(session: Any) -> None:
        session.delete(session.get(Trial, running[1]))

    database.write(remove)
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(EpochSpectra)) == 0


def test_the_client_has_them(server: str) -> None:
    with Client(server) as client:
        made = client.submit({"name": "a", "base": {"dataset": "digits", "model": "small-cnn"}})
        (trial,) = client.trials(made.id)
        assert client.spectra_of_epochs(trial.id).epochs == []


@pytest.mark.parametrize(("field", "default", "other"), [("spectra_every", None, 5), ("cuda_graph", True, False)])
def test_who_only_looks_on_makes_no_other_trial(field: str, default: object, other: object) -> None:
    base = {"dataset": "digits", "model": "small-cnn"}
    plan = expand_grid(ExperimentSpec(name="a", base=base, grid={f"training.{field}": [default, other]}), max_trials=9)
    alone = expand_grid(ExperimentSpec(name="b", base=base), max_trials=9)
    watched = expand_grid(ExperimentSpec(name="c", base=base | {"training": {field: other}}), max_trials=9)
    assert (len(plan.trials), plan.points, plan.idle) == (1, 2, ())
    assert getattr(watched.trials[0].config.training, field) == other  # it is run as it was asked for
    # Of who does not look on nothing is stored that a worker of the version before would not know.
    stored, bare = (trial_columns(one.trials[0])["config"]["training"] for one in (watched, alone))
    assert isinstance(stored, dict)
    assert isinstance(bare, dict)
    assert stored[field] == other
    assert field not in bare
    for one in (plan, watched):
        assert (one.trials[0].fingerprint, one.trials[0].cell) == (alone.trials[0].fingerprint, alone.trials[0].cell)
