"""One experiment, trial or file at a time, and how far experiments are; `listing` has the lists.

Functions take a Session; callers commit.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pydantic import JsonValue
from sqlalchemy import Text, cast, delete, func, select, text
from sqlalchemy.orm import Session, defer

from service.database import (
    OPEN_TRIALS,
    Artifact,
    Event,
    Experiment,
    IdempotencyKey,
    Protocol,
    Result,
    Tally,
    Trial,
    TrialState,
    Worker,
    now,
)
from service.database.engine import is_postgres
from service.errors import GoneError, IdempotencyError, NotFoundError
from service.leaderboards.conditions import of_trials
from service.specs.columns import both, default_of
from ttsv.results import TRAINING

KEPT_ANSWERS = timedelta(days=30)
"""So long a request that is sent again gets the answer that it got first."""


@dataclass
class Progress:
    """How far an experiment is: trials by state, epochs done and planned, the best accuracies so far.

    `validated_on` says of which images `best_val_accuracy` is: as `training.validation`, or "both".
    """

    trials: dict[TrialState, int] = field(default_factory=lambda: dict.fromkeys(TrialState, 0))
    epochs_done: int = 0
    epochs: int = 0
    best_accuracy: float | None = None
    best_val_accuracy: float | None = None
    validated_on: str | None = None

    def add(self, tally: Tally) -> None:
        """Adds the trials of one state. Of those that ended early no more epochs are planned than were done."""
        succeeded = tally.state == TrialState.SUCCEEDED
        self.trials[tally.state] += tally.trials
        self.epochs_done += tally.epochs if succeeded else tally.epoch
        self.epochs += tally.epochs if succeeded or tally.state in OPEN_TRIALS else tally.epoch
        self.best_accuracy = _larger(self.best_accuracy, tally.best_accuracy)
        self.best_val_accuracy = _larger(self.best_val_accuracy, tally.best_val_accuracy)


def _larger(a: float | None, b: float | None) -> float | None:
    return max((value for value in (a, b) if value is not None), default=None)


@dataclass(frozen=True)
class TrialDetail:
    """A trial with everything known of it but its epochs."""

    trial: Trial
    result: Result | None
    protocol: dict[str, JsonValue] | None
    artifacts: Sequence[Artifact]


def answer_once(
    session: Session,
    key: str | None,
    body: JsonValue,
    answer: Callable[[], dict[str, JsonValue]],
    *,
    project_id: int | None = None,
) -> dict[str, JsonValue]:
    """`answer()`, or what was answered to the same key before; raises `IdempotencyError` if the body differs.

    Keys of different projects never meet: nobody gets another's answer.
    """
    if key is None:
        return answer()
    mine = _key_of(key, project_id)
    if is_postgres(session):
        # Two first requests at once: the second waits here for the first one's commit. (SQLite has one writer.)
        session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": mine})
    if (known := answered(session, key, body, project_id=project_id)) is not None:
        return known
    response = answer()
    session.add(IdempotencyKey(key=mine, body_sha256=_digest_of(body), response=response))
    return response


def answered(
    session: Session, key: str | None, body: JsonValue, *, project_id: int | None = None
) -> dict[str, JsonValue] | None:
    """What `answer_once` answered to the key before, or None; raises `IdempotencyError` if the body differs."""
    known = None if key is None else session.get(IdempotencyKey, _key_of(key, project_id))
    if known is None:
        return None
    if known.body_sha256 != _digest_of(body):
        raise IdempotencyError(f"Idempotency-Key {key!r} was used before with another body; use a new key")
    return known.response


def forget_answers(session: Session, experiment_id: int | None = None) -> None:
    """Forgets what was answered with an experiment; without one, what nobody asks for again, as it is so old."""
    old = IdempotencyKey.created_at < now() - KEPT_ANSWERS
    about = IdempotencyKey.response["id"].as_integer() == experiment_id
    session.execute(delete(IdempotencyKey).where(old if experiment_id is None else about))


def _key_of(key: str, project_id: int | None) -> str:
    """The key as it is stored."""
    return key if project_id is None else f"project {project_id}: {hashlib.sha256(key.encode()).hexdigest()}"


def _digest_of(body: JsonValue) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def get_experiment(
    session: Session, experiment_id: int, *, project_id: int | None = None, locked: bool = False
) -> Experiment:
    """The experiment, of this project if one is given; raises `NotFoundError`.

    `locked` locks its row until the transaction ends. What the session loaded of it before is read again then.
    """
    lock = {"key_share": True} if locked else None
    experiment = session.get(Experiment, experiment_id, with_for_update=lock, populate_existing=locked)
    foreign = experiment is not None and project_id is not None and experiment.project_id != project_id
    if experiment is None or foreign or experiment.deleted_at is not None:
        raise NotFoundError(f"there is no experiment {experiment_id}")
    return experiment


def get_experiments(session: Session, experiment_ids: Sequence[int]) -> Sequence[Experiment]:
    """Those that are there of several experiments, without their specs."""
    there = Experiment.id.in_(experiment_ids), Experiment.deleted_at.is_(None)
    return session.scalars(select(Experiment).where(*there).options(defer(Experiment.spec, raiseload=True))).all()


def newest_events(session: Session, experiment_ids: Sequence[int]) -> dict[int, int]:
    """The number of the newest event of each experiment that has one."""
    query = select(Event.experiment_id, func.max(Event.id)).where(Event.experiment_id.in_(experiment_ids))
    rows = session.execute(query.group_by(Event.experiment_id))
    return {experiment_id: newest for experiment_id, newest in rows if experiment_id is not None}


def newest_experiment(session: Session, *, project_id: int | None = None) -> int:
    """The number of the newest experiment, of this project if one is given; 0 where there is none."""
    query = select(func.max(Experiment.id))
    if project_id is not None:
        query = query.where(Experiment.project_id == project_id)
    return session.scalar(query) or 0


def running_trials(session: Session, experiment_ids: Sequence[int]) -> dict[int, frozenset[int]]:
    """The trials of each experiment that run now."""
    found: dict[int, set[int]] = {i: set() for i in experiment_ids}
    here = Trial.experiment_id.in_(experiment_ids), Trial.state == TrialState.RUNNING
    for experiment_id, trial_id in session.execute(select(Trial.experiment_id, Trial.id).where(*here)):
        found[experiment_id].add(trial_id)
    return {experiment_id: frozenset(trials) for experiment_id, trials in found.items()}


def progress(session: Session, experiment_ids: Sequence[int]) -> dict[int, Progress]:
    """Progress of several experiments: the database keeps the counts, so no trial is read."""
    found = {i: Progress() for i in experiment_ids}
    query = select(Tally).where(Tally.experiment_id.in_(experiment_ids))
    for tally in session.scalars(query.execution_options(populate_existing=True)):  # triggers change them unseen
        found[tally.experiment_id].add(tally)
    begun = [experiment_id for experiment_id, of in found.items() if any(of.trials.values())]
    for experiment_id, images in _validated_on(session, begun):
        found[experiment_id].validated_on = both(found[experiment_id].validated_on, images)
    return found


def _validated_on(session: Session, experiment_ids: Sequence[int]) -> list[tuple[int, str]]:
    """On which images the trials of each experiment validate.

    Their spec says so, where it does not speak of it or does so in `base` alone. Only of others all trials are read.
    """
    document, word = cast(Experiment.spec, Text), "validation"
    mentioned = func.length(document) - func.length(func.replace(document, word, ""))
    base = Experiment.spec[("base", "training", word)].as_string()
    found, unclear = [], []
    for experiment_id, letters, images in session.execute(
        select(Experiment.id, mentioned, base).where(Experiment.id.in_(experiment_ids))
    ):
        if letters == 0:
            found.append((experiment_id, str(default_of(f"training.{word}"))))
        elif letters == len(word) and images is not None:
            found.append((experiment_id, images))
        else:
            unclear.append(experiment_id)
    if unclear:
        query = select(Trial.experiment_id, of_trials(f"training.{word}")).distinct()
        found += [(row[0], row[1]) for row in session.execute(query.where(Trial.experiment_id.in_(unclear)))]
    return found


def get_trial(session: Session, trial_id: int, *, project_id: int | None = None) -> Trial:
    """The trial, of this project's experiments if one is given; raises `NotFoundError`."""
    query = select(Trial).join(Experiment).where(Trial.id == trial_id, Experiment.deleted_at.is_(None))
    if project_id is not None:
        query = query.where(Experiment.project_id == project_id)
    trial = session.scalar(query)
    if trial is None:
        raise NotFoundError(f"there is no trial {trial_id}")
    return trial


def trial_detail(session: Session, trial_id: int, *, project_id: int | None = None) -> TrialDetail:
    """A trial with its result and artifacts; raises `NotFoundError`."""
    trial = get_trial(session, trial_id, project_id=project_id)
    result = session.get(Result, trial_id)
    protocol = session.get(Protocol, result.protocol) if result else None
    record = None
    if result is not None and protocol is not None:
        # What is said of a trial's own training is no part of the record that many trials share.
        said = (result.evaluation or {}).get(TRAINING)
        record = protocol.record | ({TRAINING: said} if said else {})
    return TrialDetail(trial, result, record, artifacts_of(session, trial_id))


def artifacts_of(session: Session, trial_id: int) -> Sequence[Artifact]:
    """The files in a trial's manifest, by kind, but for those that were removed."""
    there = Artifact.trial_id == trial_id, Artifact.removed_at.is_(None)
    return session.scalars(select(Artifact).where(*there).order_by(Artifact.kind)).all()


def get_artifact(session: Session, artifact_id: int, *, project_id: int | None = None) -> Artifact:
    """A file of some trial's manifest, of this project's if one is given.

    Raises `NotFoundError`, and `GoneError` for one that was removed.
    """
    there = Artifact.id == artifact_id, Experiment.deleted_at.is_(None)
    query = select(Artifact, Experiment.id).join(Trial, Trial.id == Artifact.trial_id).join(Experiment).where(*there)
    if project_id is not None:
        query = query.where(Experiment.project_id == project_id)
    found = session.execute(query).one_or_none()
    if found is None:
        raise NotFoundError(f"there is no artifact {artifact_id}")
    artifact, experiment = found
    if artifact.removed_at is not None:
        raise GoneError(
            f"artifact {artifact_id} ({artifact.kind} of trial {artifact.trial_id}) was removed on "
            f"{artifact.removed_at:%Y-%m-%d} to make room; `ttsv clone {experiment}` trains all of its experiment again"
        )
    return artifact


def last_worker_sign(session: Session) -> datetime | None:
    """When any worker was last heard of."""
    return session.scalar(select(func.max(Worker.seen_at)))


def database_head(session: Session) -> str | None:
    """The migration the database stands at; raises `sqlalchemy.exc.DBAPIError` where it was never migrated."""
    head: str | None = session.scalar(text("SELECT version_num FROM alembic_version"))
    return head
