"""Experiments: posting, looking, following, and what can be done with them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

import httpx2 as httpx

from service.client.connection import Connection, checked, covers, idempotent, of_paper, pause, query
from service.client.errors import UnreachableError, not_understood, refusal
from service.client.streams import Feed
from service.schemas.answers import SelectionPage
from service.schemas.dry_runs import DryRunOut
from service.schemas.experiments import (
    DeletionOut,
    EventOut,
    EventPage,
    ExperimentOut,
    ExperimentPage,
    ExperimentUpdate,
    NewExperimentOut,
)
from service.schemas.leaderboards import MatrixOut
from service.specs.states import OPEN_EXPERIMENTS
from ttsv.config.fields import FieldValue, FieldValues

_ROOT = "/v1/experiments"
_ALL_BUT_SPEC = ",".join(name for name in ExperimentOut.model_fields if name != "spec")


class MatrixQuestion(TypedDict, total=False):
    """What may be asked of an experiment's matrix; what is None is left to the service.

    `x` and `y` are fields, by default two that vary; `seeds` is how the results of a place's seeds make its value
    (`mean`, `median`, `min`, `max`, `std`); `where` are conditions on fields, all of which must hold; of `trials` only
    the places are given.
    """

    metric: str | None
    x: str | None
    y: str | None
    seeds: str | None
    where: str | Sequence[str] | None
    trials: Sequence[int] | None


class ExperimentQuestion(TypedDict, total=False):
    """Which experiments are wanted, and by what they are sorted.

    `name` is part of a name, `tag` are tags that all must be there, `archived` is `false`, `true` or `any`.
    """

    state: str | Sequence[str] | None
    tag: str | Sequence[str] | None
    name: str | None
    owner: str | None
    created_after: datetime | str | None
    created_before: datetime | str | None
    archived: str | None
    sort: str | None


class Experiments(Connection):
    """Posts experiments, asks about them and changes them."""

    @covers("createExperiment")
    def submit(self, spec: Mapping[str, object], *, idempotency_key: str | None = None) -> NewExperimentOut:
        """Posts an experiment; sent again after a lost answer it is still stored once."""
        return self._post(NewExperimentOut, _ROOT, spec, headers=idempotent(idempotency_key))

    @covers("createExperiment")
    def dry_run(self, spec: Mapping[str, object], *, summary: bool = False) -> DryRunOut:
        """What a spec would become: its trials with sizes, steps and times. Nothing is stored.

        `summary`: the trials are counted, and none is listed.
        """
        return self._post(DryRunOut, _ROOT, spec, params=query(dry_run=True, summary=summary or None))

    @covers("createPresetExperiment")
    def submit_preset(
        self, name: str, *, scale: str = "full", protocol: str = "code", idempotency_key: str | None = None
    ) -> NewExperimentOut:
        """Posts one of the paper's tables or figures by its name (`senderovich2022/table2`)."""
        params = query(scale=scale, protocol=protocol)
        return self._post(NewExperimentOut, _preset(name), params=params, headers=idempotent(idempotency_key))

    @covers("createPresetExperiment")
    def dry_run_preset(
        self, name: str, *, scale: str = "full", protocol: str = "code", summary: bool = False
    ) -> DryRunOut:
        """What a preset would become; `summary`, as of `dry_run`."""
        params = query(scale=scale, protocol=protocol, dry_run=True, summary=summary or None)
        return self._post(DryRunOut, _preset(name), params=params)

    @covers("getExperiment")
    def experiment(self, experiment_id: int) -> ExperimentOut:
        """One experiment with its progress."""
        return self._get(ExperimentOut, f"{_ROOT}/{experiment_id}")

    @covers("listExperiments")
    def experiments(
        self, *, specs: bool = True, page_size: int | None = None, **question: Unpack[ExperimentQuestion]
    ) -> Iterator[ExperimentOut]:
        """All experiments, newest first or as `sort` says; pages are fetched as they are needed.

        Without `specs` their `spec` is empty: quicker where grids are large.
        """
        asked = checked(ExperimentQuestion, question) | {"limit": page_size}
        if specs:
            return self._pages(ExperimentPage.model_validate_json, _ROOT, **asked)
        found = self._pages(SelectionPage.model_validate_json, _ROOT, **asked, fields=_ALL_BUT_SPEC)
        return (ExperimentOut.model_validate(item | {"spec": {}}) for item in found)

    @covers("getExperimentMatrix")
    def matrix(self, experiment_id: int, **question: Unpack[MatrixQuestion]) -> MatrixOut:
        """A metric over two fields of an experiment, by column: a place for each cell, a facet for all else."""
        asked = checked(MatrixQuestion, question)
        if (trials := question.get("trials")) is not None:
            asked["trials"] = ",".join(map(str, trials))
        return self._get(MatrixOut, f"{_ROOT}/{experiment_id}/matrix", **asked)

    @covers("pauseExperiment")
    def pause(self, experiment_id: int) -> ExperimentOut:
        """Takes an experiment off the queue at once, until it is resumed."""
        return self._act(experiment_id, "pause")

    @covers("resumeExperiment")
    def resume(self, experiment_id: int) -> ExperimentOut:
        """Puts a paused experiment back into the queue."""
        return self._act(experiment_id, "resume")

    @covers("stopExperiment")
    def stop(self, experiment_id: int) -> ExperimentOut:
        """Drops the trials that wait and lets those that run finish."""
        return self._act(experiment_id, "stop")

    @covers("cancelExperiment")
    def cancel(self, experiment_id: int) -> ExperimentOut:
        """Cancels what is not final; running trials are killed."""
        return self._act(experiment_id, "cancel")

    @covers("archiveExperiment")
    def archive(self, experiment_id: int) -> ExperimentOut:
        """Leaves a final experiment out of lists and leaderboards."""
        return self._act(experiment_id, "archive")

    @covers("unarchiveExperiment")
    def unarchive(self, experiment_id: int) -> ExperimentOut:
        """Takes an experiment out of the archive."""
        return self._act(experiment_id, "unarchive")

    @covers("deleteExperiment")
    def delete(self, experiment_id: int, *, dry_run: bool = False, force: bool = False) -> DeletionOut:
        """Deletes a final experiment with all that is of it; `dry_run` says what would go."""
        asked = query(dry_run=dry_run or None, force=force or None)
        return self._answer(DeletionOut, "DELETE", f"{_ROOT}/{experiment_id}", params=asked)

    @covers("retryExperiment")
    def retry(self, experiment_id: int, states: Sequence[str] = ("failed",)) -> ExperimentOut:
        """Runs the trials of these states again: `failed`, `diverged`, `cancelled`."""
        return self._act(experiment_id, "retry", {"states": list(states)})

    @covers("extendExperiment")
    def extend(
        self,
        experiment_id: int,
        *,
        grid: Mapping[str, Sequence[FieldValue]] | None = None,
        variants: Sequence[Mapping[str, object]] = (),
        trials: Sequence[Mapping[str, object]] = (),
        repeat: int | None = None,
        idempotency_key: str | None = None,
    ) -> NewExperimentOut:
        """Adds values to the grid's axes, variants, trials or seeds; what is there is not run again."""
        additions = {"grid": grid or {}, "variants": list(variants), "trials": list(trials), "repeat": repeat}
        return self._draft(experiment_id, "extend", additions, idempotency_key=idempotency_key)

    @covers("cloneExperiment")
    def clone(
        self, experiment_id: int, *, name: str | None = None, idempotency_key: str | None = None
    ) -> NewExperimentOut:
        """Posts an experiment's spec once more, by default as `NAME (clone)`."""
        return self._draft(experiment_id, "clone", {"name": name}, idempotency_key=idempotency_key)

    @covers("reevaluateExperiment")
    def reevaluate(
        self,
        experiment_id: int,
        evaluation: FieldValues,
        *,
        name: str | None = None,
        idempotency_key: str | None = None,
    ) -> NewExperimentOut:
        """Posts an experiment, by default `NAME (re-evaluated)`, that evaluates networks anew and trains nothing."""
        body = {"evaluation": evaluation, "name": name}
        return self._draft(experiment_id, "re-evaluate", body, idempotency_key=idempotency_key)

    @covers("updateExperiment")
    def update(
        self,
        experiment_id: int,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
        priority: int | None = None,
        max_concurrent_trials: int | None = None,
        revision: int | None = None,
    ) -> ExperimentOut:
        """Changes what is given; refused (`ChangedError`) if a `revision` is given and it is at another one."""
        body: dict[str, object] = {"name": name, "notes": notes, "tags": None if tags is None else list(tags)}
        body |= {"priority": priority, "max_concurrent_trials": max_concurrent_trials}
        return self._answer(
            ExperimentOut,
            "PATCH",
            f"{_ROOT}/{experiment_id}",
            json=body,
            headers={} if revision is None else {"If-Match": f'"{revision}"'},
            repeatable=revision is None,  # the change itself makes the next revision
        )

    @covers("listExperimentEvents", "listEvents")
    def events(
        self,
        experiment_id: int | None = None,
        *,
        kind: str | Sequence[str] | None = None,
        after: int | None = None,
        sort: str | None = None,
    ) -> Iterator[EventOut]:
        """What happened to one experiment, or to any: after event `after`, oldest first (`sort` "-id": newest first).

        Pages are fetched as needed. `kind` is one of `service.experiments.events.EventKind`, or several.
        """
        path = "/v1/events" if experiment_id is None else f"{_ROOT}/{experiment_id}/events"
        return self._pages(EventPage.model_validate_json, path, "after", kind=kind, after=after, sort=sort, limit=1000)

    @covers("streamExperiment")
    def follow(
        self, experiment_id: int, *, after: int = 0, events: bool = True
    ) -> Iterator[ExperimentUpdate | EventOut]:
        """An experiment's progress whenever it changes and, with `events`, each event past number `after` once.

        Ends when the experiment is final. A stream that breaks or ends before that is taken up where it was, `retries`
        times in a row.
        """
        feed = Feed(after)
        path, params = f"{_ROOT}/{experiment_id}/stream", query(events=events)
        failures = 0
        while not feed.ended:
            try:
                with self._stream(path, params=params, headers=feed.headers) as answer:
                    if not answer.is_success:
                        raise refusal(answer)
                    feed.begin()
                    if answer.status_code == 204:  # final, and all events known: its last word is its own
                        last = ExperimentUpdate.model_validate(self.experiment(experiment_id))
                        feed.ended = True
                        yield last
                    for line in answer.iter_lines():
                        if (item := feed.take(line)) is not None:
                            failures = 0
                            yield item
            except httpx.TransportError as error:
                if failures >= self._retries:
                    raise self._no_answer(error) from error
            except UnreachableError:
                if failures >= self._retries:
                    raise
            else:
                if not feed.ended and failures >= self._retries:
                    # Something between us answers and lets none of it through: it would do so for ever.
                    raise not_understood(self.url, ValueError("a stream that ends without a word"))
            if not feed.ended:
                time.sleep(pause(failures))
                failures += 1

    def watch(self, experiment_id: int, *, every: float = 1.0) -> Iterator[ExperimentOut]:
        """The experiment whenever it changes, until it is final; the last one given is.

        By server-sent events; where these do not come through it is asked for `every` so many seconds.
        """
        shown = self.experiment(experiment_id)
        yield shown
        try:
            for update in self.follow(experiment_id, events=False):
                # The last word is the experiment's own.
                if isinstance(update, ExperimentUpdate) and update.state in OPEN_EXPERIMENTS:
                    changes = {name: getattr(update, name) for name in ("state", "error", "waiting", "progress")}
                    count = sum(update.progress.trials.values())  # a search, or who extends the grid, adds to them
                    changed = shown.model_copy(update=changes | {"trial_count": count})
                    if changed != shown:
                        shown = changed
                        yield shown
        except UnreachableError:  # something between us lets no streams through, perhaps; else asking says so
            pass
        while shown.state in OPEN_EXPERIMENTS:
            found = self.experiment(experiment_id)
            if found != shown:
                shown = found
                yield shown
            if shown.state in OPEN_EXPERIMENTS:
                time.sleep(every)

    def _act(
        self, experiment_id: int, action: str, body: Mapping[str, object] | None = None, **options: Any
    ) -> ExperimentOut:
        return self._post(ExperimentOut, f"{_ROOT}/{experiment_id}/{action}", body, **options)

    def _draft(
        self, experiment_id: int, action: str, body: Mapping[str, object], *, idempotency_key: str | None
    ) -> NewExperimentOut:
        path = f"{_ROOT}/{experiment_id}/{action}"
        return self._post(NewExperimentOut, path, body, headers=idempotent(idempotency_key))


def _preset(name: str) -> str:
    return f"/v1/presets/{of_paper(name)}"
