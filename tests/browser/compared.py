"""What comparisons are tried on: a grid, another experiment over the same ranks measured otherwise, and spectra."""

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from service.database import Artifact, EpochPoint, Experiment, Protocol, Result, Trial, TrialState
from service.database.engine import Database
from service.experiments.submission import Draft, submit
from service.leaderboards import cell_scores
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests import grids
from tests.results import made_result

OTHER_PROTOCOL = "6e" * 32
RECORD: dict[str, Any] = {"dataset": "cifar10", "split": "test", "images": {"accuracy": 10_000}}
OTHER_RECORD = RECORD | {"split": "validation", "attacks": {"pgd": {"eps": 0.03}}}
LAYERS = {"features.0": 27, "features.4": 192, "features.8": 4608}
HOSTILE = "<b onclick=alert(1)>\u05e9\u05dc\u05d5\u05dd</b>{{7*7}} " + "long" * 30


def fill(database: Database, data_dir: Path) -> None:
    """Experiment 1 is a grid of 100 trials; 2 is over its ranks 8 and 16 without clipping; 3 has a name that harms."""
    with database.read() as session:
        empty = session.scalar(select(Experiment.id).limit(1)) is None
    if empty:
        grids.fill(database, 100, epochs=40)
    database.write(_more)
    database.write(lambda session: _spectra(session, data_dir))


def _more(session: Session) -> None:
    protocol = session.get(Protocol, grids.PROTOCOL)
    assert protocol is not None
    protocol.record = RECORD
    session.add(Protocol(fingerprint=OTHER_PROTOCOL, record=OTHER_RECORD))
    session.flush()
    base = {"dataset": "cifar10", "model": "vgg11", "layer": "tt", "training": {"epochs": 40}, "lambda_ort": 0.1}
    rng = random.Random(2)
    for name, constraint, under in (
        ("Without clipping", {"constraint": "none"}, grids.PROTOCOL),
        (HOSTILE, {"constraint": "clip", "delta": 2.0}, OTHER_PROTOCOL),
    ):
        spec = ExperimentSpec(name=name, base=base | constraint, grid={"rank": [8, 16], "seed": [0, 1, 2]})
        made = submit(session, Draft(spec, expand_grid(spec, max_trials=100)))
        session.flush()
        for trial in session.scalars(select(Trial).where(Trial.experiment_id == made.id)):
            accuracy = rng.gauss(0.74 if trial.rank == 8 else 0.83, 0.006)
            trial.state, trial.epoch, trial.best_val_accuracy = TrialState.SUCCEEDED, 40, accuracy
            plain = {k: v for k, v in vars(made_result()).items() if k in Result.__table__.columns}
            more: dict[str, Any] = {"accuracy": accuracy, "environment": {}, "layers": [], "protocol": under}
            more |= {"max_singular_value": 1.0 + rng.random(), "compression": 4.0, "ece": rng.gauss(0.05, 0.005)}
            session.add(Result(**plain | more | {"trial_id": trial.id, "fence": 1}))
            rows = [grids.epoch_of(trial.id, epoch, 40, accuracy, rng) for epoch in range(1, 41)]
            session.execute(insert(EpochPoint), rows)
    session.flush()
    cell_scores.refresh_all(session)


def _spectra(session: Session, data_dir: Path) -> None:
    """The spectra of all networks that were trained, as trials leave them."""
    for trial, result in session.execute(select(Trial, Result).join(Result, Result.trial_id == Trial.id)):
        rng = random.Random(trial.id)
        top = trial.delta if trial.constraint == "clip" and trial.delta else 2.6
        layers: list[dict[str, Any]] = []
        for place, (name, count) in enumerate(LAYERS.items()):
            index = sorted({round(k * (count - 1) / min(256, count - 1)) for k in range(min(257, count))})
            decay = (0.6 + 0.1 * place + 0.05 * rng.random()) * (8 / float(trial.rank or 64)) ** 0.2
            values = [min(top, 2.6 * math.exp(-3 * decay * i / count)) for i in index]
            layers.append({"name": name, "count": count, "index": index, "values": values})
        text = json.dumps({"layers": layers}).encode()
        path = f"trials/{trial.id}/1/spectra.json"
        (data_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (data_dir / path).write_bytes(text)
        digest = hashlib.sha256(text).hexdigest()
        session.add(Artifact(trial_id=trial.id, kind="spectra", path=path, sha256=digest, size=len(text)))
        result.layers = [
            {
                "name": one["name"],
                "kind": "TTConv2d",
                "shape": {},
                "input_size": [8, 8],
                "largest": one["values"][0],
                "smallest": one["values"][-1],
                "largest_before_projection": None,
                "projection": None,
            }
            for one in layers
        ]
