"""Searches: Ray Tune's searchers, each of whose trials gets its row before it runs."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.sample import Domain as TuneDomain

from service.database import TrialState
from service.queue.driver_reads import Tried
from service.specs.planner import PlannedTrial, Planner
from service.specs.search import Domain, Search, domains
from ttsv.config.fields import FieldValue, FieldValues
from ttsv.errors import ConfigError
from workers.driver.feed import Feed, NextJob, Slots
from workers.trial_process.messages import EpochReport, Job, ResultReport

logger = logging.getLogger(__name__)

_MOST_REPEATS = 200
"""Points in a row that were drawn before, or whose fields do not go together: then the space has no more."""
_MOST_REPEATS_OF_OPTUNA = 20
"""Points in a row that were tried before, as it settles on the best ones: to ask it takes longer than to draw one."""

_FINAL_WITH_VALUE = (TrialState.SUCCEEDED, TrialState.EARLY_STOPPED)


@dataclass(frozen=True)
class _Candidate:
    """A point, the trial that tries it, and the name under which Optuna is told the outcome, if it suggested that."""

    trial: PlannedTrial
    point: FieldValues
    name: str | None = None


class SearchTrials(Feed):
    """Gives Tune the trials of a search: first those that an earlier driver left open, then new ones.

    `add` stores a planned trial with its point and gives the job that runs it; nothing is handed out before.
    `exhausted`: all `trials` that are asked for were made, or the space has no other point, and `end` has stored that.
    """

    def __init__(
        self,
        search: Search,
        base: FieldValues,
        trials: int,
        history: Sequence[Tried],
        add: Callable[[PlannedTrial, FieldValues], Job],
        end: Callable[[], None],
        next_job: NextJob,
        slots: Slots,
        over: Callable[[], None],
    ) -> None:
        super().__init__(next_job, slots, over, metric=search.metric, direction=search.direction)
        self._search, self._base, self._add, self._end = search, base, add, end
        self._planner = Planner("search")
        self._space = domains(search.space)
        self._tried = {tried.fingerprint for tried in history}
        self._wanted = trials - len(history)
        self._random = _Random(self._space, search.seed)
        self._drawn: set[str] = set()
        """So far, and by this one: what an earlier driver tried is no repeat at first, as it was none for that one."""
        self._optuna = _Optuna(self._space, search, len(history)) if search.algorithm == "optuna" else None
        self._points = {tried.trial_id: tried.point for tried in history}
        for tried in history:
            if tried.state in _FINAL_WITH_VALUE and tried.value is not None and tried.point:
                self._remember(tried.point, tried.value)
        self._names: dict[str, str] = {}
        self._told: set[int] = set()
        self._values = {tried.trial_id: tried.value for tried in history if tried.value is not None}
        """The newest of each trial: one whose process ends in its evaluation trains no epoch in the next."""
        self._waiting: _Candidate | None = None
        self.exhausted = self._wanted <= 0

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Keeps the newest value."""
        super().on_trial_result(trial_id, result)
        if self.metric in result and (number := self._at_work.get(trial_id)) is not None:
            self._values[number] = result[self.metric]

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tells the algorithm what its point was worth: nothing where the trial failed or its process died."""
        self.on_trial_result(trial_id, result or {})
        number = self._at_work.get(trial_id, 0)  # none where Tune says so again
        value = self._values.get(number)
        if error or not isinstance((result or {}).get("report"), EpochReport | ResultReport):
            value = None
        if self._optuna is not None and trial_id in self._names:
            self._optuna.tell(self._names.pop(trial_id), value)
        elif value is not None and number not in self._told and (point := self._points.get(number)):
            self._remember(point, value)
        if value is not None:
            self._told.add(number)  # its end may be refused, and come again
        super().on_trial_complete(trial_id, result, error)

    def withdraw(self, trial_id: str) -> None:
        """Tells the algorithm that its point was worth nothing yet: once it is it is told as others are."""
        if self._optuna is not None and trial_id in self._names:
            self._optuna.tell(self._names.pop(trial_id), None)
        super().withdraw(trial_id)

    def _remember(self, point: FieldValues, value: float) -> None:
        if self._optuna is None:
            return
        try:
            self._optuna.remember(point, value)
        except ValueError as error:
            logger.warning("the search does without an earlier point: %s", error)

    def _unsure_job(self, trial_id: str) -> Job | None:
        """The point whose storing failed, before all else: were it stored, its trial would be handed out twice."""
        return None if self._waiting is None else self._new_job(trial_id)

    def _new_job(self, trial_id: str) -> Job | None:
        """Stores the next point that is new; None where there is none."""
        if self.exhausted:
            return None
        if self._waiting is None:
            self._waiting = self._new_point()
        if self._waiting is None:
            logger.warning("the search ends %d trials early: its space has no other point", self._wanted)
            self._end()
            self.exhausted = True
            return None
        new = self._waiting
        job = self._add(new.trial, new.point)
        self._waiting = None
        self._tried.add(new.trial.fingerprint)
        self._points[job.trial_id] = new.point
        if new.name is not None:
            self._names[trial_id] = new.name
        self._wanted -= 1
        self.exhausted = self._wanted <= 0
        return job

    def _new_point(self) -> _Candidate | None:
        """One that Optuna suggests; where it is not asked, or only repeats itself, one that is drawn, if any is new."""
        return self._learned_point() or self._drawn_point()

    def _learned_point(self) -> _Candidate | None:
        if self._optuna is None:
            return None
        for _ in range(_MOST_REPEATS_OF_OPTUNA):
            name, point = self._optuna.next()
            planned = self._planned(point)
            if planned is not None and planned.fingerprint not in self._tried:
                return _Candidate(planned, point, name)
            self._optuna.tell(name, None)
        return None

    def _drawn_point(self) -> _Candidate | None:
        repeats = 0
        while repeats < _MOST_REPEATS:
            point = self._random.next()
            planned = self._planned(point)
            repeats += 1
            if planned is None:
                continue
            if planned.fingerprint not in self._drawn:
                self._drawn.add(planned.fingerprint)
                repeats = 0
            if planned.fingerprint not in self._tried:
                return _Candidate(planned, point)
        return None

    def _planned(self, point: FieldValues) -> PlannedTrial | None:
        """The trial that tries a point; None where its fields do not go together."""
        try:
            return self._planner.plan({**self._base, **point})
        except ConfigError as error:
            logger.warning("a point of the space cannot be tried: %s", error)
            return None


class _Random:
    """Independent points from Tune's own distributions.

    The i-th point follows from the seed and i alone: made anew, it comes across the points that were tried, which are
    passed over, and then goes on as if it had never ended.
    """

    def __init__(self, space: dict[str, Domain], seed: int) -> None:
        self._space = {path: _tune_domain(domain) for path, domain in space.items()}
        self._domains, self._seed, self._count = space, seed, 0

    def next(self) -> FieldValues:
        """A point."""
        state = np.random.RandomState([self._seed, self._count])
        self._count += 1
        drawn = {path: domain.sample(random_state=state) for path, domain in self._space.items()}
        return _plain(drawn, self._domains)


class _Optuna:
    """Optuna through Tune's `OptunaSearch`.

    Made anew it draws with another seed: with the first one it would begin with the points it began with before.
    """

    def __init__(self, space: dict[str, Domain], search: Search, tried: int) -> None:
        self._domains, self._metric, self._count = space, search.metric, 0
        converted = OptunaSearch.convert_search_space({path: _tune_domain(d) for path, d in space.items()})
        self._searcher = OptunaSearch(
            space=converted, metric=search.metric, mode=search.direction, seed=(search.seed + tried) % 2**32
        )

    def next(self) -> tuple[str, FieldValues]:
        """A name and a point."""
        self._count += 1
        name = str(self._count)
        drawn = self._searcher.suggest(name)
        assert drawn is not None
        return name, _plain(drawn, self._domains)

    def tell(self, name: str, value: float | None) -> None:
        """What the point was worth; None where its trial gave nothing."""
        result = None if value is None else {self._metric: value}
        self._searcher.on_trial_complete(name, result, error=value is None)

    def remember(self, point: FieldValues, value: float) -> None:
        """A point that it did not suggest, or not here."""
        drawn = {
            path: _place(domain, point[path]) if domain.kind == "choice" else point[path]
            for path, domain in self._domains.items()
        }
        self._searcher.add_evaluated_point(drawn, value)


def _tune_domain(domain: Domain) -> TuneDomain:
    """As Tune has it. Of a choice the place in the list is drawn: its values may be lists."""
    made: TuneDomain
    match domain.kind:
        case "choice":
            made = tune.choice(list(range(len(domain.values))))
        case "int":
            made = tune.randint(domain.values[0], domain.values[1] + 1)
        case "loguniform":
            made = tune.loguniform(*map(float, domain.values))
        case _:
            made = tune.uniform(*map(float, domain.values))
    return made


def _plain(drawn: Mapping[str, float], space: dict[str, Domain]) -> FieldValues:
    """Values as JSON has them."""

    def value(path: str, domain: Domain) -> FieldValue:
        if domain.kind == "choice":
            chosen: FieldValue = domain.values[int(drawn[path])]
            return chosen
        return int(drawn[path]) if domain.kind == "int" else float(drawn[path])

    return {path: value(path, domain) for path, domain in space.items()}


def _place(domain: Domain, value: Any) -> int:
    """Where a value stands in a choice; by its text, as 1 and True, or 1 and 1.0, are equal to Python."""
    return [json.dumps(choice) for choice in domain.values].index(json.dumps(value))
