"""Whether anything was lost, doubled or changed: the database and the files against the chains they must hold.

What the service derives of its rows is judged as well (`tests.chaos.derived`).
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Artifact, Attempt, EpochPoint, Event, Experiment, Result, Trial, TrialState
from service.database.engine import is_postgres
from service.experiments.events import EventKind
from tests.chaos import clocks, images, notes
from tests.chaos.derived import History, score_faults, tally_faults
from tests.chaos.fences import read as read_refusals
from tests.chaos.notes import Lives
from tests.chaos.program import epoch_of, first_link, next_link, result_of
from ttsv.config.trial import TrialConfig
from ttsv.metrics.catalog import METRICS
from ttsv.results import protocol_fingerprint


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
    data_changed: int = 0
    """Files of the data set, or made of it, that were changed."""
    data_noticed: int = 0
    """Those of them that were made anew or brought anew, or for which a trial was refused the set."""
    data_refused: int = 0
    """Times that a trial ended so, and was run again once the file was put right."""
    lost: int = 0
    """Times that a trial's process was lost, after which it ran again."""
    charged: int = 0
    """Times that this was held against the trial."""
    refused: dict[str, int] = field(default_factory=dict)
    """Writes that the fence refused, by the thread that tried."""
    faults: list[str] = field(default_factory=list)

    def blame(self, trial: Trial, what: str) -> None:
        """Notes a fault of a trial."""
        self.faults.append(f"trial {trial.id} of experiment {trial.experiment_id} (seed {trial.seed}): {what}")


def chain(seed: int, decay: float, epochs: int, dataset: str) -> list[str]:
    """The links after each epoch of an undisturbed trial."""
    links, link = [], first_link(seed, decay)
    for epoch in range(1, epochs + 1):
        link = next_link(link, epoch, images.right(dataset))
        links.append(link)
    return links


_POINT = tuple(column.key for column in EpochPoint.__table__.columns if column.key != "trial_id")
_RESULT = (*METRICS, "selected_epoch", "valid", "violations", "evaluation", "layers", "environment")


def _columns(row: object, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(row, name) for name in names}


def judge(
    session: Session,
    data: Path,
    experiments: Mapping[str, int],
    noted_in: Path,
    *,
    killed: int = 0,
    places: int | None = None,
    ahead: int = 0,
) -> Verdict:
    """Looks at everything. `experiments` is what was posted: name -> how many trials it must have.

    `noted_in` is the folder of what workers, drivers and trials noted themselves. `killed`: how many processes of
    trials were killed by themselves, as only their deaths are held against trials. `places`: on how many trials run at
    once, where lost trials must have run again before new ones began. `ahead`: by how many epochs they may have been
    ahead of their store.
    """
    verdict, noted, data_set = Verdict(), notes.read(noted_in, ahead), notes.read_data(noted_in)
    refusals = read_refusals(noted_in)
    wrong = {} if is_postgres(session) else clocks.read(noted_in)  # all go by its clock, whatever theirs is
    spread = clocks.FOLLOWED_SECONDS if is_postgres(session) else clocks.spread(wrong)
    verdict.refused, verdict.faults = refusals.by_thread, list(refusals.stale)
    verdict.data_changed, verdict.data_noticed = data_set["changed"], data_set["noticed"]
    found = session.execute(select(Experiment.name, Experiment.id, Experiment.state).order_by(Experiment.id)).all()
    for name, count in sorted((Counter(row.name for row in found) - Counter(experiments.keys())).items()):
        verdict.faults.append(f"experiment {name!r} is there {count} times too often")
    for name in sorted(experiments.keys() - {row.name for row in found}):
        verdict.faults.append(f"experiment {name!r} is lost")
    points, attempts = defaultdict[int, list[EpochPoint]](list), defaultdict[int, list[Attempt]](list)
    for point in session.scalars(select(EpochPoint).order_by(EpochPoint.epoch)):
        points[point.trial_id].append(point)
    for attempt in session.scalars(select(Attempt).order_by(Attempt.number, Attempt.id)):
        attempts[attempt.trial_id].append(attempt)
    for row in found:
        trials = session.scalars(select(Trial).where(Trial.experiment_id == row.id).order_by(Trial.number)).all()
        if len(trials) != experiments.get(row.name, len(trials)):
            verdict.faults.append(f"experiment {row.name!r} has {len(trials)} trials, not {experiments[row.name]}")
        if row.state.value != "succeeded":
            verdict.faults.append(f"experiment {row.name!r} is {row.state.value}")
        events = session.scalars(select(Event).where(Event.experiment_id == row.id).order_by(Event.id)).all()
        for trial in trials:
            history = History(trial, attempts[trial.id], events, spread)
            _judge_trial(session, data, history, points[trial.id], verdict)
            _judge_lives(trial, noted.get(trial.id, Lives()), verdict)
        _judge_order(events, {trial.id: attempts[trial.id] for trial in trials}, wrong, places, verdict)
    if verdict.charged > killed:
        verdict.faults.append(
            f"{verdict.charged} deaths were held against trials, {killed} of their processes were killed by themselves"
        )
    if verdict.data_refused and not verdict.data_changed:
        verdict.faults.append(f"{verdict.data_refused} times a trial was refused its data, which nobody had changed")
    verdict.faults += [*tally_faults(session), *score_faults(session)]
    return verdict


def _judge_trial(
    session: Session, data: Path, history: History, points: Sequence[EpochPoint], verdict: Verdict
) -> None:
    trial = history.trial
    verdict.trials += 1
    verdict.attempts += trial.attempts
    verdict.charged += max(trial.attempts - 1, trial.deaths, 0)
    verdict.epochs += trial.epochs
    if trial.state != TrialState.SUCCEEDED:
        verdict.blame(trial, f"{trial.state.value} ({trial.failure}: {trial.error})")
        return
    verdict.data_refused += len(history.refusals())
    for fault in history.faults():
        verdict.blame(trial, fault)
    links = chain(trial.seed, TrialConfig.from_dict(trial.config).training.weight_decay, trial.epochs, trial.dataset)
    told = [epoch_of(link, epoch, trial.epochs) for epoch, link in enumerate(links, 1)]
    if [_columns(point, _POINT) for point in points] != [_columns(one, _POINT) for one in told]:
        verdict.blame(trial, f"its epochs are not the chain: {[_columns(point, _POINT) for point in points]}")
    best = max((one.val_accuracy for one in told), default=None)
    if (trial.epoch, trial.best_val_accuracy) != (trial.epochs, best):
        verdict.blame(trial, f"it is at epoch {trial.epoch} and its best is {trial.best_val_accuracy}, which is {best}")
    results = session.scalars(select(Result).where(Result.trial_id == trial.id)).all()
    wanted = result_of(links[-1], trial.epochs, {})
    if [_columns(result, _RESULT) for result in results] != [_columns(wanted, _RESULT)]:
        verdict.blame(trial, f"its results are not the chain's: {[_columns(result, _RESULT) for result in results]}")
    for result in results:
        if result.protocol != protocol_fingerprint(wanted.protocol):
            verdict.blame(trial, f"its result is one of protocol {result.protocol}")
        if history.attempts and result.fence != history.attempts[-1].fence:
            verdict.blame(trial, f"its result has fence {result.fence}, its last attempt {history.attempts[-1].fence}")
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
    """A process that takes over redoes no more than the epoch whose checkpoint was not yet whole; all see one set."""
    verdict.runs += lives.runs
    verdict.redone += lives.redone
    verdict.mutated += lives.mutated
    verdict.noticed += lives.spoilt
    for attempt, seen in lives.seen:
        if seen != images.right(trial.dataset):
            verdict.blame(trial, f"attempt {attempt} trained on other data than {trial.dataset} is")
    for fault in lives.faults:
        verdict.blame(trial, fault)


def _judge_order(
    events: Sequence[Event],
    attempts: Mapping[int, Sequence[Attempt]],
    wrong: Mapping[str, float],
    places: int | None,
    verdict: Verdict,
) -> None:
    """Of trials that never began only as many may begin before a lost one as were on their way when it was lost.

    `wrong` is by how many seconds clocks were ahead: what one driver says is by another's clock at another moment.
    """

    def when(moment: datetime, experiment_id: int | None, fence: int) -> datetime:
        return clocks.corrected(moment, wrong.get(clocks.driver(experiment_id, fence), 0.0))

    experiment_id = events[0].experiment_id if events else None
    begun = {
        trial_id: sorted(when(one.started_at, experiment_id, one.fence) for one in mine)
        for trial_id, mine in attempts.items()
        if mine
    }
    fence = 0
    for event in events:
        if event.kind == EventKind.CLAIMED:
            fence = event.detail["fence"]
        if event.kind != EventKind.TRIAL_LOST:
            continue
        trial_id, moment = event.trial_id, when(event.at, experiment_id, fence)
        assert trial_id is not None
        again = next((start for start in begun.get(trial_id, ()) if start > moment), None)
        verdict.lost += again is not None
        until = again or datetime.max.replace(tzinfo=UTC)  # it may have waited for others to the end
        new = [other for other, starts in begun.items() if other != trial_id and moment < starts[0] < until]
        if places is not None and len(new) > places:
            ran = "never ran again" if again is None else f"ran again at {again:%H:%M:%S}"
            verdict.faults.append(
                f"trial {trial_id} was lost at {moment:%H:%M:%S} and {ran}; trials {new} of experiment "
                f"{experiment_id} had not begun before, and began meanwhile"
            )
