"""The verdict on a chaos run sees what is lost, doubled or changed, and nothing where all is well."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import ColumnElement, Insert, delete, insert, select, update
from sqlalchemy.orm import Session

from service import database as tables
from service.database import EpochPoint, Event, Experiment, Result, Score, ScoreRank, Tally, Trial
from service.database.base import Base
from service.database.engine import Database
from service.experiments.submission import Draft, submit
from service.queue import leases
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.storage import Attempt, Folder, begin
from tests.chaos import images, notes
from tests.chaos.fences import NOTES
from tests.chaos.program import checkpoints, run_trial
from tests.chaos.verdict import Verdict, judge
from ttsv.config.trial import TrialConfig
from ttsv.data import shared
from ttsv.results import CHECKPOINTS, EpochMetrics, TrialResult
from workers.driver.recorder import Recorder
from workers.trial_process.messages import EpochReport, ResultReport, StartedReport
from workers.trial_process.trial_folder import manifest

EPOCHS = 4
BASE: dict[str, Any] = {
    "dataset": images.NAME,
    "model": "small-cnn",
    "training": {"epochs": EPOCHS, "lr": 1e-9},
}


@dataclass
class Played:
    """An experiment `chaos` of two trials that has run to its end."""

    database: Database
    data: Path

    def judged(self, work: Callable[[Session], object] = lambda session: None) -> Verdict:
        """The verdict after a change."""
        self.database.write(work)
        with self.database.read() as session:
            return judge(session, self.data, {"chaos": 2}, self.data / "notes", places=1)

    def folder(self) -> Path:
        return self.data / "trials" / "1" / "1"


def posted(url: str) -> None:
    """Stores the experiment `chaos` of two trials."""
    database = Database(url)
    spec = ExperimentSpec.model_validate({"name": "chaos", "base": BASE, "grid": {"seed": [0, 1]}})
    draft = Draft(spec, expand_grid(spec, max_trials=9))
    database.write(lambda session: submit(session, draft))
    database.close()


@pytest.fixture
def played(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    played = play(sqlite_url, tmp_path)
    yield played
    played.database.close()


def play(url: str, data: Path) -> Played:
    """Runs the experiment to its end, on what the data folder has as data set, or puts one there."""
    posted(url)
    if not (data / "datasets").exists():
        images.make(data)
    database = Database(url)
    lease = database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    recorder = Recorder(database, lease, lost=lambda: None)
    recorder.open()
    for seed in (0, 1):
        recorder.started(seed + 1)
        recorder.reported(seed + 1, StartedReport("here", []))
        config = TrialConfig.from_dict({**BASE, "seed": seed})
        folder = data / begin(Folder(data), seed + 1, Attempt(lease.fence))
        for report in run_trial(config, data_dir=data, folder=folder):
            if isinstance(report, EpochMetrics):
                recorder.reported(seed + 1, EpochReport([report]))
            elif isinstance(report, TrialResult):
                recorder.reported(seed + 1, ResultReport(report, manifest(report.artifacts, data)))
    recorder.flush()
    database.write(lambda session: leases.complete(session, lease))
    return Played(database, data)


def _again(table: type[Base], rows: ColumnElement[bool], *but: str) -> Insert:
    """Has rows twice, but for the columns that tell them apart."""
    names = [column.key for column in table.__table__.columns if column.key not in but]
    return insert(table).from_select(names, select(*(getattr(table, name) for name in names)).where(rows))


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
        *(
            (update(EpochPoint).where(EpochPoint.epoch == 2).values({name: 0.25}), "not the chain")
            for name in ("train_accuracy", "val_loss", "val_accuracy", "ort_loss", "lr", "seconds")
        ),
        (delete(Result).where(Result.trial_id == 2), "its results are not the chain's: []"),
        *(
            (update(Result).where(Result.trial_id == 2).values({name: value}), "its results are not the chain's")
            for name, value in {"accuracy": 0.5, "loss": 0.5, "ece": 0.5, "parameters": 9, "brier": 0.5}.items()
        ),
        (update(Result).where(Result.trial_id == 2).values(environment={}), "its results are not the chain's"),
        (update(Result).where(Result.trial_id == 2).values(valid=False), "its results are not the chain's"),
        (update(Result).where(Result.trial_id == 2).values(fence=2), "its result has fence 2, its last attempt 1"),
        (update(Trial).where(Trial.id == 2).values(best_val_accuracy=1), "its best is 1.0, which is 0."),
        (update(Trial).where(Trial.id == 2).values(epoch=1), "it is at epoch 1"),
        (_again(Event, Event.kind == "trial_finished", "id"), "its final events are [('trial_finished', 1), ("),
        (delete(Event).where(Event.kind == "trial_finished"), "its final events are [], those"),
        *(
            (update(Tally).values({name: column + 5}), "the tally of experiment 1's succeeded trials")
            for name, column in {
                "trials": Tally.trials,
                "epoch": Tally.epoch,
                "epochs": Tally.epochs,
                "run_seconds": Tally.run_seconds,
                "best_accuracy": Tally.best_accuracy,
                "best_val_accuracy": Tally.best_val_accuracy,
            }.items()
        ),
        (
            insert(Tally).values(
                experiment_id=1, state="failed", trials=0, epoch=0, epochs=0, run_seconds=0, best_val_accuracy=1
            ),
            "the tallies of experiment 1 have the best 1.0, its trials 0.",
        ),
        (delete(Tally), "the tally of experiment 1's succeeded trials is not (2, 8, 8): None"),
        (delete(Score), "is lost"),
        (update(Score).values(seeds=3), "is not that of its results"),
        (update(Score).values(metrics={}), "is not that of its results"),
        (update(ScoreRank).where(ScoreRank.metric == "loss").values(mean=0.5), "are not those of its means"),
        (delete(ScoreRank), "are not those of its means"),
        (update(Trial).where(Trial.id == 1).values(attempts=8), "final events are [('trial_finished', 1)], those"),
        (update(Trial).where(Trial.id == 1).values(attempts=8), "attempts [1, 2, 3, 4, 5, 6, 7] of 8 ended"),
        (update(Trial).where(Trial.id == 1).values(attempts=8), "7 deaths were held against trials, 0 of"),
        (update(Trial).where(Trial.id == 1).values(deaths=9), "9 deaths are held against it, with 1 attempts"),
        (update(Trial).where(Trial.id == 1).values(deaths=9), "9 deaths were held against trials, 0 of"),
        (update(Trial).where(Trial.id == 1).values(run_seconds=3600), "it took 3600.0 s, which its moments make"),
        (update(Trial).where(Trial.id == 1).values(run_seconds=-9), "it took -9.0 s, which its moments make"),
        (delete(tables.Attempt).where(tables.Attempt.trial_id == 1), "its attempts are numbered []"),
        (update(tables.Attempt).values(number=3), "its attempts are numbered [3]"),
        (update(tables.Attempt).values(started_at=datetime(2026, 1, 1, tzinfo=UTC)), "its last attempt at 2026-01-01"),
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


def test_no_checkpoint_is_ahead_of_what_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process frozen between the two, whose files another takes over, would else leave a hole in the chain."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    images.make(tmp_path)
    config = TrialConfig.from_dict(BASE)
    told = run_trial(config, data_dir=tmp_path, folder=tmp_path)
    for epoch in range(1, EPOCHS + 1):
        assert getattr(next(told), "epoch", None) == epoch
        kept = checkpoints(config, tmp_path).latest() or {"epoch": 0}
        assert kept["epoch"] == epoch - 1


def test_epochs_done_again_by_one_process_more_than_once(played: Played) -> None:
    """The epoch that was lost with its process may be done again, and what was trained beside it tells nothing."""
    attempts = [played.folder(), *(played.folder().with_name(name) for name in ("1.1", "3"))]
    notes.note_start(attempts[1], EPOCHS - 1, spoilt=False)
    notes.note_epoch(attempts[0], EPOCHS)
    notes.note_epoch(attempts[1], EPOCHS)
    assert (played.judged().redone, played.judged().runs) == (1, 3)
    assert played.judged().faults == []
    notes.note_start(attempts[2], EPOCHS - 2, spoilt=False)
    assert played.judged().redone == 3
    (fault,) = played.judged().faults
    assert fault.endswith(f"attempt 3 went on after epoch {EPOCHS - 2}, the one before had done {EPOCHS}")


def test_a_trial_may_be_ahead_of_a_store_that_is_away(played: Played) -> None:
    notes.note_epoch(played.folder(), EPOCHS)
    notes.note_start(played.folder().with_name("3"), EPOCHS - 3, spoilt=False)
    told = [notes.read(played.data / "notes", ahead)[1].faults for ahead in (1, 2)]
    assert [len(faults) for faults in told] == [1, 0]


@pytest.mark.parametrize(
    ("spoilt", "done", "fault"),
    [
        (True, EPOCHS - 1, None),
        (True, EPOCHS - 2, None),
        (True, EPOCHS - 3, "attempt 3 went on after epoch 1"),
        (False, EPOCHS - 1, "attempt 3 went on from a checkpoint that was changed, and did not notice"),
    ],
)
def test_checkpoints_that_were_changed(played: Played, spoilt: bool, done: int, fault: str | None) -> None:
    notes.note_mutation(played.data / "notes", played.folder(), EPOCHS)
    notes.note_start(played.folder().with_name("3"), done, spoilt=spoilt)
    verdict = played.judged()
    assert (verdict.mutated, verdict.noticed) == (1, spoilt)
    assert [text for text in verdict.faults if fault is None or fault not in text] == []
    assert len(verdict.faults) == (fault is not None)


@pytest.mark.parametrize("file", ["images.npy", "labels.npy"])
def test_trials_that_train_on_other_data(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """One bit of what was read makes other links of every epoch; so it is where the product does not look."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    images.make(tmp_path)
    folder = tmp_path / "datasets"
    (path,) = folder.glob(f"cache/*/{file}")
    content = bytearray(path.read_bytes())
    content[-7] ^= 16
    path.chmod(0o644)
    path.write_bytes(content)
    images.keep_times(folder, str(path.relative_to(folder)))
    monkeypatch.setattr("ttsv.data.loading.open_shared", lambda name, place, *, whole: shared.open_shared(name, place))
    played = play(sqlite_url, tmp_path)
    faults = played.judged().faults
    played.database.close()
    for words in ("attempt 1 trained on other data than npz:chaos is", "its epochs are not the chain"):
        assert sum(words in fault for fault in faults) == 2, faults


def test_a_process_that_went_on_with_other_data(played: Played) -> None:
    """Though nothing of it was stored."""
    notes.note_seen(played.folder().with_name("3"), "0" * 64)
    (fault,) = played.judged().faults
    assert fault.endswith("attempt 3 trained on other data than npz:chaos is")


@pytest.mark.parametrize("changed", [True, False])
def test_trials_that_are_refused_changed_data_and_retried(played: Played, changed: bool) -> None:
    if changed:
        notes.note_data(played.data / "notes", "changed", "chaos.npz of the head")
        notes.note_data(played.data / "notes", "noticed", "chaos.npz of the head")

    def work(session: Session) -> None:
        end = session.scalars(select(Event).where(Event.trial_id == 1)).one()
        kept = {column.key: getattr(end, column.key) for column in Event.__table__.columns if column.key != "id"}
        session.delete(end)
        session.add(Event(**kept | {"kind": "trial_failed", "detail": {"attempt": 1, "failure": "bad_data"}}))
        session.flush()
        session.add(Event(**kept))

    verdict = played.judged(work)
    assert (verdict.data_changed, verdict.data_noticed, verdict.data_refused) == (changed, changed, 1)
    expected = [] if changed else ["1 times a trial was refused its data, which nobody had changed"]
    assert verdict.faults == expected


def test_a_trial_that_failed_otherwise_before_it_succeeded(played: Played) -> None:
    def work(session: Session) -> None:
        end = session.scalars(select(Event).where(Event.trial_id == 1)).one()
        kept = {column.key: getattr(end, column.key) for column in Event.__table__.columns if column.key != "id"}
        session.add(Event(**kept | {"kind": "trial_failed", "detail": {"attempt": 1, "failure": "error"}}))

    (fault,) = played.judged(work).faults
    assert "its final events are [('trial_finished', 1), ('trial_failed', 1)]" in fault


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(("new", "fault"), [(1, None), (2, "trials [3, 4] of experiment 1 had not begun before")])
def test_lost_trials_that_run_again_after_those_that_never_began(
    played: Played, new: int, fault: str | None, again: bool
) -> None:
    """But for those, as many as there are places, that were on their way already; or that still wait in the end."""
    # In the second case it is after all that was played, or that would be the next start.
    moment = datetime(2026, 1, 1, tzinfo=UTC) if again else datetime.now(UTC) + timedelta(hours=1)

    def work(session: Session) -> None:
        for number in range(new):
            known = session.get(Trial, 2)
            assert known is not None
            columns = {column.key: getattr(known, column.key) for column in Trial.__table__.columns}
            session.add(Trial(**columns | {"id": 3 + number, "number": 10 + number, "fingerprint": str(number)}))
        session.flush()
        lost = {"experiment_id": 1, "trial_id": 1, "at": moment, "actor": "worker", "detail": {"attempt": 1}}
        session.add(Event(kind="trial_lost", **lost))
        starts = {1: [-9, 9] if again else [-9], 2: [-9], **{3 + number: [1 + number] for number in range(new)}}
        for trial, seconds in starts.items():
            for number, second in enumerate(seconds):
                at = moment + timedelta(seconds=second)
                session.add(tables.Attempt(trial_id=trial, number=number, fence=1, started_at=at, place="here"))

    verdict = played.judged(work)
    assert verdict.lost == again
    assert [text for text in verdict.faults if "had not begun" in text] == [
        text for text in verdict.faults if fault is not None and fault in text
    ]
    assert any(fault in text for text in verdict.faults) if fault else True


@pytest.mark.parametrize(("noted", "lost"), [(False, 0), (True, 1)])
def test_moments_of_a_driver_whose_clock_is_behind(played: Played, noted: bool, lost: int) -> None:
    """The second one is, by an hour: by its clock the trial ran again long before it was lost."""
    moment = datetime.now(UTC)
    if noted:
        (played.data / "notes" / "clocks").write_text('{"who": "driver 1 3", "ahead": -3600}\n')

    def work(session: Session) -> None:
        told = {"experiment_id": 1, "trial_id": 1, "at": moment, "actor": "worker", "detail": {"attempt": 1}}
        session.add(Event(kind="trial_lost", **told))
        again = moment - timedelta(seconds=3590)
        session.add(tables.Attempt(trial_id=1, number=2, fence=3, started_at=again, place="here"))

    assert played.judged(work).lost == lost


@pytest.mark.parametrize(("seconds", "well"), [(3700.0, True), (9000.0, False)])
def test_seconds_of_a_trial_whose_experiment_was_taken_away_are_of_two_clocks(
    played: Played, seconds: float, well: bool
) -> None:
    (played.data / "notes" / "clocks").write_text('{"who": "worker 0", "ahead": 3600}\n')

    def work(session: Session) -> None:
        end = session.scalars(select(Event).where(Event.trial_id == 1)).one()
        kept = {column.key: getattr(end, column.key) for column in Event.__table__.columns if column.key != "id"}
        session.delete(end)
        session.add(Event(experiment_id=1, actor="worker", kind="reaped", detail={}))
        session.flush()
        session.add(Event(**kept))
        session.get_one(Trial, 1).run_seconds = seconds

    assert any("it took" in told for told in played.judged(work).faults) != well


def test_the_program_goes_on_from_a_checkpoint_and_from_none_that_was_changed(tmp_path: Path) -> None:
    images.make(tmp_path)
    config = TrialConfig.from_dict({**BASE, "seed": 3})

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
    for _ in range(3):
        next(run)
    state = checkpoints(config, cut).latest()
    assert state is not None
    assert state["epoch"] == 2
    spoilt = tmp_path / "spoilt"
    shutil.copytree(cut, spoilt)
    assert links(cut) == expected[2:]
    chain = spoilt / CHECKPOINTS / "000002.json"
    chain.write_text(chain.read_text().replace("2", "1", 1))
    assert links(spoilt) == expected[1:]
