"""Whether what the service derives is what its rows make: counts, scores, attempts, and the time they took."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Attempt, Event, Result, Score, ScoreBoard, ScoreRank, Tally, Trial, TrialState
from service.experiments.events import EventKind
from service.leaderboards.corruption_baselines import BaselineProtocols
from service.leaderboards.counted_results import CELL_TRIALS, CellResults, MadeScore
from service.leaderboards.metrics import Metric, from_stored
from service.leaderboards.score_ranks import standing_of, tie_of
from service.queue.attempts import MOST_ATTEMPTS

BAD_DATA = "bad_data"
"""How a trial fails that is refused its data set, and that is retried once a file of it was put right."""
_FINAL = {EventKind.TRIAL_FINISHED, EventKind.TRIAL_EARLY_STOPPED, EventKind.TRIAL_FAILED}
_AGAIN = {EventKind.TRIAL_LOST, EventKind.TRIAL_YIELDED, EventKind.TRIAL_CROWDED}
_HANDOVERS = {EventKind.RELEASED, EventKind.REAPED}
_EXACT_SECONDS = 0.01
"""By so much a sum of seconds may be off that triggers and floating point have made."""


@dataclass(frozen=True)
class History:
    """What a succeeded trial's attempts and events say, and those of its experiment: each in their order."""

    trial: Trial
    attempts: Sequence[Attempt]
    events: Sequence[Event]
    """Of the whole experiment."""
    spread: float = 0.0
    """By how many seconds two clocks that such moments are of differ at most."""

    def faults(self) -> Iterator[str]:
        """What does not fit together."""
        yield from self._events()
        yield from self._numbers()
        yield from self._time()

    def _of(self, kinds: set[EventKind]) -> list[Event]:
        return [one for one in self.events if one.trial_id == self.trial.id and one.kind in kinds]

    def refusals(self) -> list[Event]:
        """The trial's ends by which it was refused its data, after each of which it was retried."""
        return [one for one in self._of({EventKind.TRIAL_FAILED}) if one.detail["failure"] == BAD_DATA]

    def _handovers(self) -> int:
        """How often the experiment was taken from its worker before the trial ended, which no event of it tells."""
        last = max((one.id for one in self._of(_FINAL)), default=0)
        return sum(one.kind in _HANDOVERS and one.id < last for one in self.events)

    def _events(self) -> Iterator[str]:
        trial, refused = self.trial, {one.id for one in self.refusals()}
        ends = [(one.kind, one.detail["attempt"]) for one in self._of(_FINAL) if one.id not in refused]
        if ends != [(EventKind.TRIAL_FINISHED, trial.attempts)]:
            yield f"its final events are {ends}, those of one that succeeded by its attempt {trial.attempts}"
        lost = {one.detail["attempt"] for one in self._of({EventKind.TRIAL_LOST})}
        if missing := set(range(1, trial.attempts)) - lost:
            yield f"nothing tells of how its attempts {sorted(missing)} of {trial.attempts} ended"
        if not 0 <= trial.deaths < max(1, trial.attempts):
            yield f"{trial.deaths} deaths are held against it, with {trial.attempts} attempts"

    def _numbers(self) -> Iterator[str]:
        trial, numbers = self.trial, [one.number for one in self.attempts]
        first = max(1, numbers[-1] - MOST_ATTEMPTS + 1) if numbers else 1
        if not numbers or numbers != list(range(first, numbers[-1] + 1)):
            yield f"its attempts are numbered {numbers}"
            return
        most = 1 + len(self._of(_AGAIN)) + len(self.refusals()) + self._handovers()
        if numbers[-1] > most:
            yield f"it has {numbers[-1]} attempts, and at most {most} that events tell of"
        if self.attempts[-1].started_at != trial.started_at:
            yield f"it began at {trial.started_at}, its last attempt at {self.attempts[-1].started_at}"
        if (fences := [one.fence for one in self.attempts]) != sorted(fences):
            yield f"its attempts ran under the fences {fences}"

    def _time(self) -> Iterator[str]:
        """All its attempts took at least what the last one did, and no longer than from the first claim to its end.

        What began and ended by one driver is of one clock; who takes an experiment away ends attempts by his own.
        """
        trial, handovers = self.trial, self._handovers()
        claims = [one.at for one in self.events if one.kind == EventKind.CLAIMED]
        if trial.started_at is None or trial.finished_at is None or not claims:
            yield "it succeeded without having begun and ended"
            return
        least = (trial.finished_at - trial.started_at).total_seconds()
        most = (trial.finished_at - claims[0]).total_seconds() + (1 + handovers) * self.spread
        if not self._of(_AGAIN) and not self.refusals() and not handovers:
            most = least
        if not least - _EXACT_SECONDS <= trial.run_seconds <= most + _EXACT_SECONDS:
            yield f"it took {trial.run_seconds} s, which its moments make {least} to {most}"


def tally_faults(session: Session) -> Iterator[str]:
    """Counts of trials by state that are not those of the trials."""
    trials: dict[tuple[int, TrialState], list[Trial]] = defaultdict(list)
    for trial in session.scalars(select(Trial)):
        trials[trial.experiment_id, trial.state].append(trial)
    best = select(Trial.experiment_id, func.max(Result.accuracy)).join(Result, Result.trial_id == Trial.id)
    accuracies: dict[int, float] = dict(session.execute(best.where(Result.valid).group_by(Trial.experiment_id)).all())
    tallies = {(one.experiment_id, one.state): one for one in session.scalars(select(Tally))}
    for key in sorted(trials.keys() | tallies.keys()):
        mine, tally = trials[key], tallies.get(key)
        wanted = (len(mine), sum(one.epoch for one in mine), sum(one.epochs for one in mine))
        seconds = math.fsum(one.run_seconds for one in mine)
        told = f"the tally of experiment {key[0]}'s {key[1].value} trials"
        if tally is None or (tally.trials, tally.epoch, tally.epochs) != wanted:
            yield f"{told} is not {wanted}: {tally and (tally.trials, tally.epoch, tally.epochs)}"
        elif abs(tally.run_seconds - seconds) > _EXACT_SECONDS:
            yield f"{told} has {tally.run_seconds} s, they took {seconds}"
        elif key[1] is TrialState.SUCCEEDED:
            values = [one.best_val_accuracy for one in mine if one.best_val_accuracy is not None]
            bests = max(values, default=None), accuracies.get(key[0])
            if (tally.best_val_accuracy, tally.best_accuracy) != bests:
                yield f"{told} has the best {tally.best_val_accuracy} and {tally.best_accuracy}, which are {bests}"
    kept, had = (
        dict(session.execute(select(of.experiment_id, func.max(of.best_val_accuracy)).group_by(of.experiment_id)).all())
        for of in (Tally, Trial)
    )
    for number in sorted(kept.keys() | had.keys()):
        if kept.get(number) != had.get(number):
            yield f"the tallies of experiment {number} have the best {kept.get(number)}, its trials {had.get(number)}"


def score_faults(session: Session) -> Iterator[str]:
    """Scores, and ranks of them, that are not those which are made anew of the results."""
    names, cells = BaselineProtocols(session.connection(), enter=False), dict[tuple[str, str], CellResults]()
    for row in session.execute(CELL_TRIALS.add_columns(Trial.dataset, Trial.cell)):
        cells.setdefault((row[-2], row[-1]), CellResults(names)).add(row)
    wanted = {
        (scope, dataset, protocol, cell): made
        for (dataset, cell), results in cells.items()
        for (scope, protocol), made in results.scores()
    }
    ranks: dict[int, dict[str, ScoreRank]] = defaultdict(dict)
    for rank in session.scalars(select(ScoreRank)):
        ranks[rank.score_id][rank.metric] = rank
    boards = select(Score, ScoreBoard).join(ScoreBoard, ScoreBoard.id == Score.board_id)
    kept = {(board.scope, board.dataset, board.protocol, score.cell): score for score, board in session.execute(boards)}
    for key in sorted(wanted.keys() | kept.keys()):
        made, score = wanted.get(key), kept.get(key)
        if made is None or score is None:
            yield f"the score of {key} is {'lost' if score is None else 'there, without a result'}"
        elif (score.trial_id, score.seeds, score.trials, from_stored(score.metrics)) != (
            *(made.trial_id, made.seeds, made.trials),
            made.measures,
        ):
            yield f"the score of {key} is not that of its results"
        elif {name: _rank(one) for name, one in ranks[score.id].items()} != _made_ranks(score, made):
            yield f"the ranks of the score of {key} are not those of its means"


def _rank(rank: ScoreRank) -> tuple[int, int, int, float, int, float | None]:
    return rank.board_id, rank.standing, rank.tie, rank.mean, rank.seeds, rank.std


def _made_ranks(score: Score, made: MadeScore) -> dict[str, tuple[int, int, int, float, int, float | None]]:
    return {
        name: (
            *(score.board_id, standing_of(Metric(name), complete=one.seeds == made.trials), tie_of(score.cell)),
            *(one.mean, one.seeds, one.std),
        )
        for name, one in made.measures.items()
    }
