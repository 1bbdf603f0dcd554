"""A trial whose files are kept in a store: what it finds again, and what is there at each of its words."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings
from service.storage import Folder, marked, remove_checkpoints
from tests.results import made_epoch, made_result
from ttsv.config.trial import TrialConfig
from ttsv.errors import DivergedError
from ttsv.results import EpochMetrics, StageProgress, TrialResult
from ttsv.trial import run_trial
from workers.node.depot.courier import Courier
from workers.node.depot.home import Home, light_beacon
from workers.trial_process.messages import (
    FETCHING,
    EpochReport,
    FailureReport,
    HinderedReport,
    Job,
    Report,
    ResultReport,
    StageReport,
    StartedReport,
)
from workers.trial_process.trainable import TrialTrainable
from workers.trial_process.workplace import _aside

CONFIG = TrialConfig(dataset="digits", model="small-cnn").to_dict()


def train(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics | StageProgress | TrialResult]:
    """Resumes behind the epoch its checkpoint names; what it computes follows from all epochs."""
    checkpoint = folder / "checkpoints" / "newest"
    checkpoint.parent.mkdir(exist_ok=True)
    done, state = 0, "0"
    if checkpoint.exists():
        number, state = checkpoint.read_text().split()
        done = int(number)
    for epoch in range(done + 1, 5):
        state = f"{state}-{epoch}"
        yield made_epoch(epoch)
        partial = checkpoint.with_suffix(".tmp")
        partial.write_text(f"{epoch} {state}")
        partial.replace(checkpoint)
    yield StageProgress(stage="attack", done=1, total=2)
    (folder / "model.safetensors").write_text(state)
    (folder / "model.json").write_text("{}")
    yield dataclasses.replace(made_result(), artifacts={"model": folder / "model.safetensors"})


@pytest.fixture
def home(tmp_path: Path) -> Home:
    settings = Settings(data_dir=tmp_path / "data", storage=str(tmp_path / "store"))
    marked(Folder(tmp_path / "store"))
    return light_beacon(settings, tmp_path / "data" / "tune" / "1-1", "node-1")


class Trial:
    """Attempts at one trial."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workers.trial_process.trainable.REPORT_SECONDS", 0)
        self.home, self.store = home, Folder(Path(home.storage or ""))
        self.trainable = TrialTrainable.__new__(TrialTrainable)  # Ray's constructor wants a running cluster
        self.couriers: list[Courier] = []

        def made(*arguments: Any) -> Courier:
            self.couriers.append(Courier(*arguments))
            return self.couriers[-1]

        monkeypatch.setattr("workers.trial_process.workplace.Courier", made)

    def begin(self, run: Any = train, **job: Any) -> None:
        fields: dict[str, Any] = {"trial_id": 1, "fence": 1, "stored_epochs": 0, "config": CONFIG} | job
        config = {"job": dataclasses.asdict(Job(**fields)), "run": run, "data_dir": self.home.data_dir}
        self.trainable.setup(config | {"home": self.home, "cpus": 1, "gpus": 0.0, "every_epoch": False})

    def step(self) -> Report:
        """The next report, but for those that files are fetched."""
        found = self.trainable.step()["report"]
        assert isinstance(found, Report)
        return self.step() if isinstance(found, StageReport) and found.stage.stage == FETCHING else found

    def rest(self) -> list[Report]:
        found = [self.step()]
        while not isinstance(found[-1], ResultReport | FailureReport | HinderedReport):
            found.append(self.step())
        return found

    def kill(self) -> None:
        """The process is gone with whatever its machine had, and carries nothing more."""
        for courier in self.couriers:
            courier.close()
        there = self.everything()
        self.trainable._reports = iter(())
        shutil.rmtree(Path(self.home.data_dir) / "scratch")
        assert there == self.everything()

    def there(self, folder: str) -> dict[str, str]:
        return {name: self.store.path(f"{folder}/{name}").read_text() for name in self.store.files(folder)}

    def everything(self) -> dict[str, str]:
        """What is in the store, by its SHA-256."""
        return {path: self.store.digest(f"trials/{path}") or "" for path in self.store.files("trials")}


@pytest.fixture
def trial(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    trial = Trial(home, monkeypatch)
    yield trial
    trial.trainable.cleanup()


def test_each_word_comes_after_the_files_it_tells_of(trial: Trial) -> None:
    trial.begin()
    assert isinstance(trial.step(), StartedReport)
    for epoch in range(1, 5):
        assert trial.step() == EpochReport([made_epoch(epoch)])
        found = trial.there("trials/1/1")
        assert len(found["epochs.jsonl"].split("\n")) == epoch + 1
        if epoch > 1:
            assert found["checkpoints/newest"].startswith(f"{epoch - 1} "), "the last epoch's, before this one is told"
    assert isinstance(trial.step(), StageReport)
    assert trial.there("trials/1/1")["checkpoints/newest"].startswith("4 ")
    final = trial.step()
    assert isinstance(final, ResultReport)
    (file,) = final.artifacts
    assert file["path"] == "trials/1/1/model.safetensors"
    assert trial.store.digest(file["path"]) == file["sha256"]
    found = trial.there("trials/1/1")
    assert found["model.safetensors"] == "0-1-2-3-4"
    assert found["trial.log"].rstrip().endswith("the trial succeeded: accuracy 0.5000")
    assert not (Path(trial.home.data_dir) / "trials").exists()
    assert not list((Path(trial.home.data_dir) / "scratch").iterdir()), "nothing is left here once the end is told"


def test_its_time_stands_still_while_what_it_had_is_fetched(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its limit of time a store that is slow, or away, would fail it for good."""
    trial.begin()
    for _ in range(3):
        trial.step()
    trial.kill()
    read, waits = Folder.read, list[bool]()
    reports: list[Any] = []

    def fetched(*arguments: Any) -> bytes:
        waits.append(isinstance(reports[-1], StageReport) and reports[-1].waits)
        return read(*arguments)

    monkeypatch.setattr(Folder, "read", fetched)
    trial.begin(stored_epochs=2, fence=2)
    while not isinstance(reports[-1] if reports else None, EpochReport):
        reports.append(trial.trainable.step()["report"])
    assert waits
    assert all(waits)
    assert not reports[-2].waits, "it trains"


@pytest.mark.parametrize("words", [2, 3, 4, 5])
@pytest.mark.parametrize("job", [{"attempt": 1}, {"fence": 2}])
def test_killed_and_gone_on_with_to_the_same(trial: Trial, words: int, job: dict[str, int]) -> None:
    trial.begin()
    told = [trial.step() for _ in range(words)]
    trial.kill()
    trial.begin(stored_epochs=words - 1, **job)
    rest = trial.rest()
    epochs = [point.epoch for report in told + rest if isinstance(report, EpochReport) for point in report.points]
    assert sorted(set(epochs)) == [1, 2, 3, 4]
    assert len(epochs) <= 5, "one epoch ran twice at most"
    final = rest[-1]
    assert isinstance(final, ResultReport)
    assert trial.store.path(final.artifacts[0]["path"]).read_text() == "0-1-2-3-4"
    assert trial.store.folders("trials/1") == [Path(final.artifacts[0]["path"]).parent.name]


def test_one_left_over_ends_and_spoils_nothing(trial: Trial, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.begin()
    for _ in range(3):
        trial.step()
    newer = Trial(home, monkeypatch)
    newer.begin(attempt=1, stored_epochs=2)
    rest = newer.rest()
    last = trial.rest()[-1]
    assert isinstance(last, HinderedReport)
    assert "goes on elsewhere" in last.message
    assert isinstance(rest[-1], ResultReport)
    assert trial.store.path(rest[-1].artifacts[0]["path"]).read_text() == "0-1-2-3-4"
    newer.trainable.cleanup()


def test_who_waits_for_a_store_that_is_away_is_not_silent(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog would take it for hung, and blame it."""
    monkeypatch.setattr("workers.trial_process.workplace.TOLD_SECONDS", 0.1)
    monkeypatch.setattr("workers.node.depot.courier._PAUSE_SECONDS", 0.1)
    write, back = Folder.write, time.monotonic() + 1

    def written(*arguments: Any) -> str:
        if time.monotonic() < back:
            raise OSError(errno.EIO, "the store is away")
        return write(*arguments)

    monkeypatch.setattr(Folder, "write", written)
    trial.begin()
    assert isinstance(trial.step(), StartedReport)
    told = trial.step()
    assert isinstance(told, StageReport)
    assert (told.stage.stage, told.further) == ("storing files", False)
    rest = trial.rest()
    assert isinstance(rest[-1], ResultReport)
    assert [one.points[0].epoch for one in rest if isinstance(one, EpochReport)] == [1, 2, 3, 4]


def test_where_the_store_is_not_mounted_a_trial_is_hindered_and_writes_nothing(trial: Trial) -> None:
    """Its mount point is an empty folder then, onto which it would train anew from its first epoch."""
    trial.begin()
    assert isinstance(trial.rest()[-1], ResultReport)
    store = Path(trial.home.storage or "")
    store.rename(store.with_name("aside"))
    store.mkdir()
    trial.begin(attempt=2)
    hindered = trial.rest()[-1]
    assert isinstance(hindered, HinderedReport)
    assert "not mounted here" in hindered.message
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("gives_way", [True, False])
def test_one_that_is_stopped_early_leaves_no_checkpoint_behind(trial: Trial, gives_way: bool) -> None:
    """They were removed as soon as its end was stored, which is before Tune ends it; one that gives way needs its own.

    A training saves the epoch that it told of last when it is closed.
    """

    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        checkpoint = folder / "checkpoints" / "newest"
        checkpoint.parent.mkdir()
        for epoch in range(1, 5):
            try:
                yield made_epoch(epoch)
            except GeneratorExit:
                checkpoint.write_text(str(epoch))
                raise
            checkpoint.write_text(str(epoch))

    trial.begin(run)
    for _ in range(3):
        trial.step()
    assert trial.there("trials/1/1")["checkpoints/newest"] == "1"
    if gives_way:
        trial.trainable.give_way()
        assert trial.there("trials/1/1")["checkpoints/newest"] == "2"
    else:
        remove_checkpoints(trial.store, 1, 1)
        trial.trainable.cleanup()
        assert sorted(trial.there("trials/1/1")) == ["epochs.jsonl", "trial.log"]
    assert not list((Path(trial.home.data_dir) / "scratch").iterdir())


def test_a_failure_leaves_its_log(trial: Trial) -> None:
    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        yield made_epoch(1)
        raise DivergedError("the loss is nan")

    trial.begin(run)
    assert isinstance(trial.rest()[-1], FailureReport)
    assert trial.there("trials/1/1")["trial.log"].rstrip().endswith("ERROR diverged: the loss is nan")
    assert not list((Path(trial.home.data_dir) / "scratch").iterdir())


def test_a_network_of_another_trial_is_brought(trial: Trial) -> None:
    trial.begin()
    final = trial.rest()[-1]
    assert isinstance(final, ResultReport)

    def evaluate(config: TrialConfig, *, data_dir: Path, folder: Path, source: Path) -> Iterator[TrialResult]:
        assert source.with_suffix(".json").read_text() == "{}"
        (folder / "table.csv").write_text(source.read_text())
        yield dataclasses.replace(made_result(), artifacts={"table": folder / "table.csv"})

    trial.begin(evaluate, trial_id=2, source=final.artifacts[0]["path"])
    assert isinstance(trial.rest()[-1], ResultReport)
    assert trial.there("trials/2/1")["table.csv"] == "0-1-2-3-4"
    older = Path(trial.home.data_dir) / "trials/9/1"
    older.mkdir(parents=True)
    (older / "model.safetensors").write_text("from before there was a store")
    (older / "model.json").write_text("{}")
    trial.begin(evaluate, trial_id=3, source="trials/9/1/model.safetensors")
    assert isinstance(trial.rest()[-1], ResultReport)
    assert trial.there("trials/3/1")["table.csv"] == "from before there was a store"
    trial.begin(evaluate, trial_id=4, source="trials/8/1/model.safetensors")
    failure = trial.rest()[-1]
    assert isinstance(failure, FailureReport)
    assert failure.failure == "bad_data"
    assert "run the trial that left it again" in failure.message


@pytest.mark.slow
def test_a_real_trial_killed_twice_ends_with_the_same_weights(trial: Trial) -> None:
    """What it had here is gone each time; it goes on from what was carried."""
    training = {"epochs": 4, "steps": 2, "batch_size": 32}
    config = TrialConfig.from_dict({"dataset": "digits", "model": "small-cnn", "training": training}).to_dict()
    networks = []
    for trial_id, kills in ((1, 0), (2, 2)):
        reached = 0
        for attempt in range(kills):
            trial.begin(run_trial, trial_id=trial_id, config=config, attempt=attempt, stored_epochs=reached)
            while reached < attempt + 2:
                report = trial.step()
                if isinstance(report, EpochReport):
                    assert report.points[0].epoch >= reached, "one epoch is done again at most"
                    reached = report.points[-1].epoch
            trial.kill()
        trial.begin(run_trial, trial_id=trial_id, config=config, attempt=kills, stored_epochs=reached)
        final = trial.rest()[-1]
        assert isinstance(final, ResultReport), final
        (model,) = (file for file in final.artifacts if file["kind"] == "model")
        networks.append(trial.store.path(model["path"]).read_bytes())
        assert trial.store.digest(model["path"]) == model["sha256"]
    assert networks[0] == networks[1]


def test_who_waits_for_another_to_bring_a_data_set_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog would take it for hung."""
    monkeypatch.setattr("workers.trial_process.workplace.TOLD_SECONDS", 0.01)
    came = threading.Event()
    stages = _aside(lambda told: came.wait(1), "digits")
    assert next(stages) == StageProgress(stage="data set digits", done=0, total=1)
    came.set()
    assert all(stage.done == 0 for stage in stages)
