"""`ttsv export`: a CSV file, a folder of models, and a real MLflow store."""

import csv
import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update
from sqlalchemy.orm import Session
from typer.testing import CliRunner, Result

from service.client import Client
from service.database import Artifact, EpochPoint, Trial, now
from service.database.engine import Database
from service.experiments.actions import retry
from service.queue import leases
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.specs.states import TrialState
from tests.held import reported, unfinished_trials
from tests.machinery import Make
from workers.cli.__main__ import app

SPEC: dict[str, Any] = {
    "name": "=HYPERLINK('x')",
    "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt"},
    "grid": {"rank": [None, 4], "seed": [0, 1]},
}


@pytest.fixture
def stored(sqlite_url: str) -> Iterator[Database]:
    database = Database(sqlite_url)
    yield database
    database.close()


@pytest.fixture
def experiment(server: str, stored: Database, trial_result: Make, epoch_point: Make, tmp_path: Path) -> int:
    """Four trials: one succeeded and left a model, one diverged, one runs, one waits."""
    with Client(server) as client:
        experiment_id = client.submit(SPEC).id

    def work(session: Session) -> None:
        lease = leases.claim(session, "worker", None)
        assert lease is not None
        good, bad, running, _ = unfinished_trials(session, lease)
        with hold(session, lease) as held:
            for trial in (good, bad, running):
                held.start_trial(trial.id)
                for epoch in (1, 2):
                    held.add_epoch(trial.id, reported(epoch_point(epoch)))
            path = "trials/1/1/model.safetensors"
            (tmp_path / "data" / path).parent.mkdir(parents=True)
            (tmp_path / "data" / path).write_bytes(b"weights")
            file = ArtifactFile("model", path, hashlib.sha256(b"weights").hexdigest(), 7)
            held.finish_trial(good.id, trial_result(0.875), ProtocolRecord("p" * 64, {}), [file])
            held.fail_trial(bad.id, "diverged", "=1+1")

    stored.write(work)
    return experiment_id


@pytest.fixture
def export(server: str, experiment: int) -> Callable[..., Result]:
    def export(*arguments: object, code: int = 0) -> Result:
        command = ["export", str(experiment), *map(str, arguments)]
        done = CliRunner().invoke(app, command, env={"TTSV_URL": server})
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return export


def test_csv(export: Callable[..., Result], tmp_path: Path) -> None:
    assert "4 trials are in" in export("--csv", tmp_path / "out.csv").stdout
    text = (tmp_path / "out.csv").read_text()
    assert export("--csv", "-").stdout.replace("\r\n", "\n") == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["number"], row["state"], row["rank"], row["seed"], row["accuracy"]) for row in rows] == [
        ("0", "succeeded", "", "0", "0.875"),
        ("1", "diverged", "", "1", ""),
        ("2", "running", "4.0", "0", ""),
        ("3", "queued", "4.0", "1", ""),
    ]
    assert rows[1]["error"] == "'=1+1", "no formula"
    assert rows[0]["training.milestones"].startswith("[")


def test_models(export: Callable[..., Result], tmp_path: Path) -> None:
    assert "1 models are in" in export("--models", tmp_path / "models").stdout
    assert (tmp_path / "models" / "trial-1-model.safetensors").read_bytes() == b"weights"


def test_csv_that_is_printed_stands_alone(export: Callable[..., Result], tmp_path: Path) -> None:
    done = export("--csv", "-", "--models", tmp_path / "models")
    assert done.stdout == export("--csv", "-").stdout
    assert "1 models are in" in done.stderr


def test_models_that_are_not_there_are_counted(export: Callable[..., Result], stored: Database, tmp_path: Path) -> None:
    assert export("--models", tmp_path / "models").stderr == ""
    stored.write(lambda session: session.execute(update(Artifact).values(removed_at=now())))
    done = export("--models", tmp_path / "models")
    assert done.stdout.startswith("0 models are in")
    assert done.stderr == "ttsv: warning: 1 trials that succeeded have no model any more: it was pruned\n"
    first = update(Trial).where(Trial.number == 0).values(source_trial_id=4)
    stored.write(lambda session: session.execute(first))
    said = export("--models", tmp_path / "models").stderr
    assert said == "ttsv: note: 1 trials evaluate models of others, and left none\n"


def test_nowhere_is_a_wrong_command_line(export: Callable[..., Result]) -> None:
    assert "--csv FILE" in export(code=2).stderr


def test_mlflow_is_missing(export: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "pip install 'ttsv[mlflow]'" in export("--mlflow", "sqlite:///x.db", code=1).stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # by MLflow, of SQLAlchemy
def test_mlflow(
    export: Callable[..., Result], stored: Database, epoch_point: Make, trial_result: Make, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # MLflow puts files where it is
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert "4 runs made, 0 updated, 0 same" in export("--mlflow", uri).stdout
    store = MlflowClient(tracking_uri=uri)
    (target,) = [found for found in store.search_experiments() if found.name != "Default"]
    assert target.name.startswith("=HYPERLINK('x') (ttsv 1, ")

    def runs() -> list[Any]:
        found = store.search_runs([target.experiment_id], max_results=100)
        return sorted(found, key=lambda run: run.data.tags["ttsv.trial"])

    good, bad, running, queued = runs()
    assert [run.info.status for run in (good, bad, running, queued)] == ["FINISHED", "FAILED", "RUNNING", "SCHEDULED"]
    params = [(run.data.params["training.lr"], run.data.params["rank"]) for run in (good, queued)]
    assert params == [("0.05", "None"), ("0.05", "4")]
    expected = {name: value for name, value in trial_result(0.875).items() if isinstance(value, (int, float))}
    del expected["valid"]
    assert {name: good.data.metrics[name] for name in expected} == expected
    assert (good.data.tags["ttsv.protocol"], good.data.tags["ttsv.valid"]) == ("p" * 64, "true")
    assert (bad.data.tags["ttsv.state"], bad.data.tags["ttsv.error"]) == ("diverged", "=1+1")
    history = store.get_metric_history(running.info.run_id, "epoch/train_loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5)]
    assert "accuracy" not in running.data.metrics

    before = [(run.info.run_id, run.data.tags, run.data.metrics, run.info.end_time) for run in runs()]
    assert "0 runs made, 0 updated, 4 same" in export("--mlflow", uri).stdout
    assert [(run.info.run_id, run.data.tags, run.data.metrics, run.info.end_time) for run in runs()] == before

    # One trial goes on; a kind of file is asked for that was not before.
    def work(session: Session) -> None:
        session.execute(insert(EpochPoint), [epoch_point(3, trial_id=3)])
        lease = leases.Lease(1, 1)
        with hold(session, lease) as held:
            held.early_stop_trial(3)

    stored.write(work)
    assert "0 runs made, 2 updated, 2 same" in export("--mlflow", uri, "--attach", "model").stdout
    good, _, stopped, _ = runs()
    assert stopped.info.run_id == running.info.run_id
    assert (stopped.info.status, stopped.data.tags["ttsv.state"]) == ("KILLED", "early_stopped")
    history = store.get_metric_history(stopped.info.run_id, "epoch/train_loss")
    assert [point.step for point in history] == [1, 2, 3]
    (file,) = store.list_artifacts(good.info.run_id)
    assert (file.path, file.file_size) == ("trial-1-model.safetensors", 7)
    assert "4 same" in export("--mlflow", uri, "--attach", "model").stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # by MLflow, of SQLAlchemy
def test_mlflow_has_one_curve_of_a_trial_that_was_retried(
    export: Callable[..., Result], stored: Database, epoch_point: Make, trial_result: Make, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    export("--mlflow", uri)
    store = MlflowClient(tracking_uri=uri)
    (target,) = [found for found in store.search_experiments() if found.name != "Default"]

    def run() -> Any:
        found = store.search_runs([target.experiment_id])
        (mine,) = [one for one in found if one.data.tags["ttsv.trial_id"] == "2"]
        return mine

    def curve() -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in store.get_metric_history(run().info.run_id, "epoch/train_loss")]

    first = run()
    assert first.data.tags["ttsv.error"] == "=1+1"

    # It waits: of what it had trained everything is there still, and nothing is wrong with it any more.
    stored.write(lambda session: retry(session, 1, [TrialState.DIVERGED]))
    assert "0 runs made, 1 updated, 3 same" in export("--mlflow", uri).stdout
    assert (run().info.run_id, run().info.status) == (first.info.run_id, "SCHEDULED")
    assert "ttsv.error" not in run().data.tags
    assert curve() == [(1, 1.0), (2, 0.5)]

    def work(losses: list[float]) -> None:
        def train(session: Session) -> None:
            with hold(session, leases.Lease(1, 1)) as held:
                held.start_trial(2)
                for epoch, loss in enumerate(losses, 1):
                    held.add_epoch(2, reported(epoch_point(epoch, train_loss=loss)))

        stored.write(train)

    # The same numbers again are no other curve.
    work([1.0, 0.5, 0.25])
    assert "0 runs made, 1 updated, 3 same" in export("--mlflow", uri).stdout
    assert run().info.run_id == first.info.run_id
    assert curve() == [(1, 1.0), (2, 0.5), (3, 0.25)]

    work([0.75, 0.375, 0.125])

    def finish(session: Session) -> None:
        with hold(session, leases.Lease(1, 1)) as held:
            held.finish_trial(2, trial_result(0.75), ProtocolRecord("p" * 64, {}))

    stored.write(finish)
    assert "1 runs made, 0 updated, 3 same" in export("--mlflow", uri).stdout
    assert run().info.run_id != first.info.run_id
    assert (run().info.status, run().data.metrics["accuracy"]) == ("FINISHED", 0.75)
    assert curve() == [(1, 0.75), (2, 0.375), (3, 0.125)]
    assert "4 same" in export("--mlflow", uri).stdout
