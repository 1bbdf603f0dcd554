"""A grid as it looks halfway: results with their spread over seeds, holes, failures, epochs; in bulk, for the pages.

    python -m tests.grids sqlite:////tmp/grid/ttsv.db 10000

migrates the database and prints the id of the experiment; `--end 1 --seconds 60` in place of the number of trials
ends one of experiment 1 each second for a minute.
"""

import argparse
import math
import random
import time
from functools import partial
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from service.database import (
    EpochPoint,
    Event,
    Experiment,
    ExperimentState,
    Protocol,
    Result,
    Trial,
    TrialState,
    now,
)
from service.database.engine import Database
from service.experiments.events import EventKind, of_trial
from service.experiments.submission import Draft, submit
from service.leaderboards import cell_scores
from service.queue import nodes
from service.queue.cluster import Gpu, Machine, Node, Versions
from service.specs.grid import Plan, expand_grid
from service.specs.spec import ExperimentSpec
from service.specs.states import NodeState
from service.upkeep.migrate import migrate
from tests.results import made_result

PROTOCOL = "5f" * 32
AXES: dict[int, dict[str, list[Any]]] = {
    100: {"rank": [2, 4, 8, 16, 32], "lambda_ort": [0.0, 0.01, 0.1, 1.0], "seed": [*range(5)]},
    1000: {
        "rank": [2, 4, 6, 8, 12, 16, 24, 32, 48, 64],
        "lambda_ort": [0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
        "training.momentum": [0.0, 0.9],
        "seed": [*range(5)],
    },
    10_000: {
        "rank": [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80],
        "lambda_ort": [0.0, *(10 ** (k / 4) for k in range(-12, 7))],
        "training.lr": [0.01, 0.02, 0.05, 0.1, 0.2],
        "seed": [*range(5)],
    },
}
_LIKELY_FINAL = 0.82
_RUNNING = 24


def plan_of(spec: ExperimentSpec) -> Plan:
    """The trials of a spec, however many."""
    return expand_grid(spec, max_trials=10_000)


def fill(
    database: Database, trials: int, *, epochs: int = 40, curves: int = 1000, name: str = "Rank against lambda, VGG"
) -> int:
    """Enters an experiment of 100, 1,000 or 10,000 trials, of which `curves` have epochs; its id."""
    base = {
        "dataset": "cifar10",
        "model": "vgg11",
        "layer": "tt",
        "delta": 1.0,
        "constraint": "clip",
        "training": {"epochs": epochs},
    }
    spec = ExperimentSpec(name=name, tags=["pages"], base=base, grid=AXES[trials])
    plan = expand_grid(spec, max_trials=20_000)
    made: int = database.write(lambda session: submit(session, Draft(spec, plan)).id)
    database.write(lambda session: _run(session, made, epochs, curves))
    return made


def _run(session: Session, experiment_id: int, epochs: int, curves: int) -> None:
    rng = random.Random(1)
    moment = now()
    if session.get(Protocol, PROTOCOL) is None:
        session.execute(
            insert(Protocol), [{"fingerprint": PROTOCOL, "record": {"dataset": "cifar10", "split": "test"}}]
        )
    query = (
        select(Trial.id, Trial.number, Trial.config).where(Trial.experiment_id == experiment_id).order_by(Trial.number)
    )
    rows = session.execute(query).all()
    first_open = int(len(rows) * _LIKELY_FINAL)
    changes: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    plain = {
        name: value
        for name, value in vars(made_result()).items()
        if name in Result.__table__.columns and name not in ("protocol", "environment", "layers")
    }
    for trial_id, number, config in rows:
        whole: Any = config
        rank, ort, lr = whole["rank"] or 64, whole["lambda_ort"], whole["training"]["lr"]
        quality = (
            0.55 + 0.38 * (1 - math.exp(-rank / 10)) - 0.025 * (math.log10(ort + 1e-3) + 1) ** 2 - 0.4 * abs(lr - 0.05)
        )
        accuracy = min(max(rng.gauss(quality, 0.006), 0.1), 0.99)
        state, done = TrialState.SUCCEEDED, epochs
        failure: str | None = None
        error: str | None = None
        if number >= first_open + _RUNNING:
            state, done = TrialState.QUEUED, 0
        elif number >= first_open:
            state, done = TrialState.RUNNING, 1 + number % max(1, epochs - 1)
        elif ort >= 1 and rng.random() < 0.3:
            state, done, failure = TrialState.DIVERGED, rng.randrange(1, 6), "diverged"
            error = "the loss is not finite"
        elif rng.random() < 0.02:
            state, done, failure, error = TrialState.FAILED, 3, "error", "RuntimeError: out of memory"
        changes.append(
            {
                "id": trial_id,
                "state": state,
                "epoch": done,
                "failure": failure,
                "error": error,
                "attempts": int(state is not TrialState.QUEUED),
                "started_at": None if state is TrialState.QUEUED else moment,
                "finished_at": moment if state not in (TrialState.QUEUED, TrialState.RUNNING) else None,
                "best_val_accuracy": accuracy + 0.01 if done else None,
                "run_seconds": 12.5 * done,
                "node": "gpu1, GPU 0" if done else None,
            }
        )
        if state is TrialState.SUCCEEDED:
            measured = {
                "accuracy": accuracy,
                "ece": abs(rng.gauss(0.04, 0.01)),
                "max_singular_value": 1.0 + 0.001 * rng.random(),
                "compression": 64 / rank,
                "loss": 1.2 - accuracy,
                "robust_accuracy": accuracy * 0.6 + rng.gauss(0, 0.01),
                "parameters": 10_000 * int(rank),
            }
            results.append(
                plain
                | measured
                | {"trial_id": trial_id, "protocol": PROTOCOL, "fence": 1, "layers": [], "environment": {"torch": "2"}}
            )
            detail = {"number": number, "attempt": 1}
            events.append(
                {"experiment_id": experiment_id, "trial_id": trial_id, "at": moment, "actor": "gpu1", "detail": detail}
                | {"kind": "trial_finished"}
            )
        if number < curves or state is TrialState.RUNNING:
            points += [epoch_of(trial_id, epoch, epochs, accuracy, rng) for epoch in range(1, done + 1)]
    session.execute(update(Trial), changes)
    session.execute(insert(Result), results)
    session.execute(insert(Event), events)
    if points:
        session.execute(insert(EpochPoint), points)
    experiment = session.get(Experiment, experiment_id)
    assert experiment is not None
    experiment.state, experiment.started_at = ExperimentState.RUNNING, moment
    session.flush()
    cell_scores.refresh_all(session)


def machines(session: Session) -> None:
    """Says that there are a head without GPUs and a node with two, on which trials run, and one that was refused.

    Those trials have begun just now: who fills a database long before would find that they say nothing.
    """
    versions = Versions("0.1.0", "3.11.9", "2.60.0", "2.9.1")
    h100 = Gpu("NVIDIA H100 80GB HBM3", 79.6)
    seen = [
        Node("a" * 56, "head1", "10.0.0.2", 16, 0, 60.0, head=True, machine=Machine(versions, (), 62.0, 500.0, True)),
        Node("b" * 56, "gpu1", "10.0.0.3", 32, 2, 250.0, machine=Machine(versions, (h100, h100), 256.0, 900.0, True)),
        Node("c" * 56, "old1", "", 0, 0, 0, state=NodeState.REFUSED, problem="torch 2.8.0 here, 2.9.1 at the head"),
    ]
    nodes.record(session, "head1-4711", seen)
    session.execute(update(Trial).where(Trial.state == TrialState.RUNNING).values(started_at=now()))


def finish(session: Session, trial_id: int, accuracy: float, **changes: Any) -> None:
    """Ends a running trial as its driver would: state, result and event in one transaction."""
    trial = session.get(Trial, trial_id)
    assert trial is not None
    trial.state, trial.epoch, trial.finished_at = TrialState.SUCCEEDED, trial.epochs, now()
    plain = {name: value for name, value in vars(made_result()).items() if name in Result.__table__.columns}
    values = plain | {"layers": [], "environment": {}, "accuracy": accuracy} | changes
    session.add(Result(**values | {"trial_id": trial_id, "protocol": PROTOCOL, "fence": 1}))
    session.add(Event(**of_trial(EventKind.TRIAL_FINISHED, "gpu1", trial)))
    session.flush()
    cell_scores.refresh_cells(session, [(trial.dataset, trial.cell)])


def epoch_of(trial_id: int, epoch: int, epochs: int, accuracy: float, rng: random.Random) -> dict[str, Any]:
    """An epoch of a trial that rises to an accuracy, as the database has it."""
    risen = 1 - math.exp(-4 * epoch / epochs)
    return {
        "trial_id": trial_id,
        "epoch": epoch,
        "train_loss": 2.3 * (1 - risen) + 0.05 + abs(rng.gauss(0, 0.02)),
        "train_accuracy": min(1.0, accuracy * risen + 0.05),
        "val_loss": 2.3 * (1 - risen) + 0.3 + abs(rng.gauss(0, 0.05)),
        "val_accuracy": max(0.0, accuracy * risen + rng.gauss(0, 0.01)),
        "ort_loss": 10 ** (-4 * risen) * (1 + 0.2 * rng.random()),
        "lr": 0.05 * (1 + math.cos(math.pi * epoch / epochs)) / 2,
        "seconds": 12.0,
        "constraint_seconds": 1.0,
    }


def end_some(database: Database, experiment_id: int, seconds: float) -> None:
    """Ends a trial each second, those that run first."""
    wanted = (
        select(Trial.id)
        .where(Trial.experiment_id == experiment_id, Trial.state.in_((TrialState.RUNNING, TrialState.QUEUED)))
        .order_by(Trial.number)
        .limit(math.ceil(seconds))
    )
    with database.read() as session:
        open_trials = list(session.scalars(wanted))
    for trial_id in open_trials:
        database.write(partial(finish, trial_id=trial_id, accuracy=0.8))
        time.sleep(1)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("trials", type=int, nargs="?", choices=[*AXES])
    parser.add_argument("--end", type=int)
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args()
    opened = Database(asked.url)
    if asked.end is not None:
        end_some(opened, asked.end, asked.seconds)
    else:
        migrate(opened)
        print(fill(opened, asked.trials))
        opened.write(machines)
    opened.close()


if __name__ == "__main__":
    _main()
