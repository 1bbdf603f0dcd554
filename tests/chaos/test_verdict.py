"""The verdict on a chaos run sees what is lost, doubled or changed, and nothing where all is well."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, update
from sqlalchemy.orm import Session

from service.database import EpochPoint, Experiment, Result, Trial
from service.database.engine import Database
from service.experiments.submission import Draft, submit
from service.queue import leases
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.storage import Attempt, Folder, begin
from tests.chaos.program import STARTS, TRAINED, read_checkpoint, run_trial
from tests.chaos.verdict import Verdict, judge
from ttsv.config.trial import TrialConfig
from ttsv.results import CHECKPOINTS, EpochMetrics, TrialResult
from workers.driver.recorder import Recorder
from workers.trial_process.messages import EpochReport, ResultReport
from workers.trial_process.trial_folder import manifest

EPOCHS = 4


@dataclass
class Played:
    """An experiment `chaos` of two trials that has run to its end."""

    database: Database
    data: Path

    def judged(self, work: Callable[[Session], object] = lambda session: None) -> Verdict:
        """The verdict after a change."""
        self.database.write(work)
        with self.database.read() as session:
            return judge(session, self.data, {"chaos": 2})

    def folder(self) -> Path:
        return self.data / "trials" / "1" / "1"


@pytest.fixture
def played(sqlite_url: str, tmp_path: Path) -> Iterator[Played]:
    database = Database(sqlite_url)
    training = {"epochs": EPOCHS, "lr": 1e-9}
    base = {"dataset": "digits", "model": "small-cnn", "training": training}
    spec = ExperimentSpec.model_validate({"name": "chaos", "base": base, "grid": {"seed": [0, 1]}})
    draft = Draft(spec, expand_grid(spec, max_trials=9))
    database.write(lambda session: submit(session, draft))
    lease = database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    recorder = Recorder(database, lease, lost=lambda: None)
    recorder.open()
    for seed in (0, 1):
        recorder.started(seed + 1)
        config = TrialConfig.from_dict({**base, "seed": seed})
        folder = tmp_path / begin(Folder(tmp_path), seed + 1, Attempt(lease.fence))
        for report in run_trial(config, data_dir=tmp_path, folder=folder):
            if isinstance(report, EpochMetrics):
                recorder.reported(seed + 1, EpochReport([report]))
            elif isinstance(report, TrialResult):
                recorder.reported(seed + 1, ResultReport(report, manifest(report.artifacts, tmp_path)))
    recorder.flush()
    database.write(lambda session: leases.complete(session, lease))
    yield Played(database, tmp_path)
    database.close()


def test_nothing_where_all_is_well(played: Played) -> None:
    verdict = played.judged()
    assert verdict.faults == []
    assert (verdict.trials, verdict.epochs, verdict.runs, verdict.redone) == (2, 2 * EPOCHS, 2, 0)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (delete(EpochPoint).where(EpochPoint.trial_id == 1, EpochPoint.epoch == 2), "not the chain"),
        (update(EpochPoint).where(EpochPoint.epoch == 2).values(train_loss=0.25), "not the chain"),
        (update(EpochPoint).where(EpochPoint.epoch == EPOCHS).values(epoch=EPOCHS + 1), "not the chain"),
        (delete(Result).where(Result.trial_id == 2), "its results are []"),
        (update(Result).where(Result.trial_id == 2).values(accuracy=0.5), "its results are [0.5]"),
        (update(Trial).where(Trial.id == 2).values(state="failed"), "failed"),
        (update(Experiment).values(state="running"), "is running"),
        (update(Experiment).values(name="another"), "experiment 'chaos' is lost"),
        (
            insert(Experiment).from_select(
                ["name", "spec", "state", "grid_points", "trial_count"],
                Experiment.__table__.select().with_only_columns(
                    *(Experiment.__table__.c[name] for name in ("name", "spec", "state", "grid_points", "trial_count"))
                ),
            ),
            "experiment 'chaos' is there 1 times too often",
        ),
    ],
)
def test_rows_that_are_not_as_they_must_be(played: Played, change: object, fault: str) -> None:
    verdict = played.judged(lambda session: session.execute(change))  # type: ignore[call-overload]
    assert any(fault in told for told in verdict.faults), verdict.faults


@pytest.mark.parametrize("text", [None, "0" * 64])
def test_files_that_are_not_as_they_must_be(played: Played, text: str | None) -> None:
    model = played.folder() / "model"
    if text is None:
        model.unlink()
    else:
        model.write_text(text)
    assert played.judged().faults == [
        "trial 1 of experiment 1 (seed 0): trials/1/1/model is not the file of the manifest"
    ]


def test_epochs_done_again_by_one_process_more_than_once(played: Played) -> None:
    (played.folder() / STARTS).write_text("0\n2\n")
    (played.folder() / TRAINED).write_text("1\n2\n3\n3\n4\n")
    assert played.judged().redone == 1
    assert played.judged().faults == []
    (played.folder() / TRAINED).write_text("1\n2\n3\n2\n3\n4\n")
    (fault,) = played.judged().faults
    assert "2 processes trained" in fault


def test_the_program_goes_on_from_a_checkpoint_and_from_none_that_was_changed(tmp_path: Path) -> None:
    config = TrialConfig.from_dict(
        {"dataset": "digits", "model": "small-cnn", "training": {"epochs": EPOCHS, "lr": 1e-9}, "seed": 3}
    )

    def links(folder: Path) -> list[float]:
        run = run_trial(config, data_dir=tmp_path, folder=folder)
        return [report.train_loss for report in run if isinstance(report, EpochMetrics)]

    whole = tmp_path / "whole"
    whole.mkdir()
    expected = links(whole)
    assert len(set(expected)) == EPOCHS
    cut = tmp_path / "cut"
    cut.mkdir()
    run = run_trial(config, data_dir=tmp_path, folder=cut)
    for _ in range(2):
        next(run)
    checkpoint = read_checkpoint(cut)
    assert checkpoint is not None
    assert checkpoint[0] == 2
    spoilt = tmp_path / "spoilt"
    shutil.copytree(cut, spoilt)
    assert links(cut) == expected[2:]
    chain = spoilt / CHECKPOINTS / "chain"
    chain.write_text(chain.read_text().replace("2", "1", 1))
    assert links(spoilt) == expected
