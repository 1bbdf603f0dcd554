"""Whether anything was lost, doubled or changed: the database and the files against the chains they must hold."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Artifact, Attempt, EpochPoint, Event, Experiment, Result, Trial, TrialState
from service.experiments.events import EventKind
from tests.chaos.fences import read as read_refusals
from tests.chaos.notes import Lives
from tests.chaos.notes import read as read_lives
from tests.chaos.program import first_link, next_link, reported
from ttsv.config.trial import TrialConfig


@dataclass
class Verdict:
    """What was found: sentences of `faults` (none where all is well), and what the mishaps cost."""

    trials: int = 0
    epochs: int = 0
    attempts: int = 0
    runs: int = 0
    redone: int = 0
    mutated: int = 0
    """Checkpoints that were changed."""
    noticed: int = 0
    """Those of them that a process met, and fell back from."""
    lost: int = 0
    """Times that a trial's process was lost, after which it ran again."""
    refused: dict[str, int] = field(default_factory=dict)
    """Writes that the fence refused, by the thread that tried."""
    faults: list[str] = field(default_factory=list)

    def blame(self, trial: Trial, what: str) -> None:
        """Notes a fault of a trial."""
        self.faults.append(f"trial {trial.id} of experiment {trial.experiment_id} (seed {trial.seed}): {what}")


def chain(seed: int, decay: float, epochs: int) -> list[str]:
    """The links after each epoch of an undisturbed trial."""
    links, link = [], first_link(seed, decay)
    for epoch in range(1, epochs + 1):
        link = next_link(link, epoch)
        links.append(link)
    return links


def judge(
    session: Session,
    data: Path,
    experiments: Mapping[str, int],
    notes: Path,
    *,
    places: int | None = None,
    ahead: int = 0,
) -> Verdict:
    """Looks at everything. `experiments` is what was posted: name -> how many trials it must have.

    `notes` is the folder of what workers, drivers and trials noted themselves. `places`: on how many trials run at
    once, where lost trials must have run again before new ones began. `ahead`: by how many epochs they may have been
    ahead of their store.
    """
    verdict, noted = Verdict(), read_lives(notes, ahead)
    refusals = read_refusals(notes)
    verdict.refused, verdict.faults = refusals.by_thread, list(refusals.stale)
    found = session.execute(select(Experiment.name, Experiment.id, Experiment.state).order_by(Experiment.id)).all()
    for name, count in sorted((Counter(row.name for row in found) - Counter(experiments.keys())).items()):
        verdict.faults.append(f"experiment {name!r} is there {count} times too often")
    for name in sorted(experiments.keys() - {row.name for row in found}):
        verdict.faults.append(f"experiment {name!r} is lost")
    points: dict[int, list[tuple[int, float | None]]] = defaultdict(list)
    for point in session.execute(select(EpochPoint.trial_id, EpochPoint.epoch, EpochPoint.train_loss)):
        points[point.trial_id].append((point.epoch, point.train_loss))
    for row in found:
        trials = session.scalars(select(Trial).where(Trial.experiment_id == row.id).order_by(Trial.number)).all()
        if len(trials) != experiments.get(row.name, len(trials)):
            verdict.faults.append(f"experiment {row.name!r} has {len(trials)} trials, not {experiments[row.name]}")
        if row.state.value != "succeeded":
            verdict.faults.append(f"experiment {row.name!r} is {row.state.value}")
        for trial in trials:
            _judge_trial(session, data, trial, sorted(points[trial.id]), verdict)
            _judge_lives(trial, noted.get(trial.id, Lives()), verdict)
        _judge_order(session, row.id, places, verdict)
    return verdict


def _judge_trial(
    session: Session, data: Path, trial: Trial, points: Sequence[tuple[int, float | None]], verdict: Verdict
) -> None:
    verdict.trials += 1
    verdict.attempts += trial.attempts
    verdict.epochs += trial.epochs
    if trial.state != TrialState.SUCCEEDED:
        verdict.blame(trial, f"{trial.state.value} ({trial.failure}: {trial.error})")
        return
    links = chain(trial.seed, TrialConfig.from_dict(trial.config).training.weight_decay, trial.epochs)
    if points != [(epoch, reported(link)) for epoch, link in enumerate(links, 1)]:
        verdict.blame(trial, f"its epochs are not the chain: {points}")
    results = session.scalars(select(Result).where(Result.trial_id == trial.id)).all()
    if [result.accuracy for result in results] != [reported(links[-1])]:
        verdict.blame(trial, f"its results are {[result.accuracy for result in results]}, not {reported(links[-1])}")
    artifacts = session.scalars(select(Artifact).where(Artifact.trial_id == trial.id)).all()
    if sorted(artifact.kind for artifact in artifacts if artifact.kind == "model") != ["model"]:
        verdict.blame(trial, f"its files are {[artifact.path for artifact in artifacts]}")
    for artifact in artifacts:
        path = data / artifact.path
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != artifact.sha256:
            verdict.blame(trial, f"{artifact.path} is not the file of the manifest")
        elif artifact.kind == "model" and path.read_text() != links[-1]:
            verdict.blame(trial, f"{artifact.path} ends in another link")


def _judge_lives(trial: Trial, lives: Lives, verdict: Verdict) -> None:
    """A process that takes over redoes no more than the epoch whose checkpoint was not yet whole."""
    verdict.runs += lives.runs
    verdict.redone += lives.redone
    verdict.mutated += lives.mutated
    verdict.noticed += lives.spoilt
    for fault in lives.faults:
        verdict.blame(trial, fault)


def _judge_order(session: Session, experiment_id: int, places: int | None, verdict: Verdict) -> None:
    """Of trials that never began only as many may begin before a lost one as were on their way when it was lost."""
    begun: dict[int, list[datetime]] = defaultdict(list)
    query = select(Attempt.trial_id, Attempt.started_at).join(Trial).where(Trial.experiment_id == experiment_id)
    for row in session.execute(query.order_by(Attempt.started_at)):
        begun[row.trial_id].append(row.started_at)
    lost = select(Event.trial_id, Event.at).where(
        Event.experiment_id == experiment_id, Event.kind == EventKind.TRIAL_LOST.value
    )
    for trial_id, moment in session.execute(lost.order_by(Event.id)):
        assert trial_id is not None
        again = next((start for start in begun[trial_id] if start > moment), None)
        if again is None:
            continue
        verdict.lost += 1
        new = [other for other, starts in begun.items() if other != trial_id and moment < starts[0] < again]
        if places is not None and len(new) > places:
            verdict.faults.append(
                f"trial {trial_id} was lost at {moment:%H:%M:%S} and ran again at {again:%H:%M:%S}; trials {new} of "
                f"experiment {experiment_id} had not begun before, and began meanwhile"
            )
