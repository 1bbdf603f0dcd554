"""Requests about experiments: posting, looking, and what can be done with them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import httpx2 as httpx
from pydantic import TypeAdapter

from service.client.calls import Call, Paged, by_cursor, by_number, covers, idempotent, parsed, query, segment
from service.schemas.experiments import DryRunOut, EventOut, EventPage, ExperimentOut, ExperimentPage, NewExperimentOut

_ROOT = "/v1/experiments"
_ALL_BUT_SPEC = ",".join(name for name in ExperimentOut.model_fields if name != "spec")
_Experiment = Call[ExperimentOut]


@covers("createExperiment")
def submit(spec: dict[str, Any], *, idempotency_key: str | None = None) -> Call[NewExperimentOut]:
    """Posts an experiment; sent again after a lost answer it is still stored once."""
    return Call("POST", _ROOT, parsed(NewExperimentOut), json=spec, headers=idempotent(idempotency_key))


@covers("createExperiment")
def dry_run(spec: dict[str, Any]) -> Call[DryRunOut]:
    """What a spec would become: its trials with sizes, steps and times. Nothing is stored."""
    return Call("POST", _ROOT, parsed(DryRunOut), params=query(dry_run=True), json=spec)


@covers("createPresetExperiment")
def submit_preset(
    name: str, *, scale: str = "full", protocol: str = "code", idempotency_key: str | None = None
) -> _Experiment:
    """Posts one of the paper's tables or figures by its name (`senderovich2022/table2`)."""
    params = query(scale=scale, protocol=protocol)
    path = f"/v1/presets/{_preset(name)}"
    return Call("POST", path, parsed(ExperimentOut), params=params, headers=idempotent(idempotency_key))


@covers("createPresetExperiment")
def dry_run_preset(name: str, *, scale: str = "full", protocol: str = "code") -> Call[DryRunOut]:
    """What a preset would become."""
    params = query(scale=scale, protocol=protocol, dry_run=True)
    return Call("POST", f"/v1/presets/{_preset(name)}", parsed(DryRunOut), params=params)


@covers("getExperiment")
def experiment(experiment_id: int) -> _Experiment:
    """One experiment with its progress."""
    return Call("GET", f"{_ROOT}/{experiment_id}", parsed(ExperimentOut))


@covers("listExperiments")
def experiments(
    *,
    state: str | Sequence[str] | None = None,
    tag: str | Sequence[str] | None = None,
    name: str | None = None,
    owner: str | None = None,
    created_after: datetime | str | None = None,
    created_before: datetime | str | None = None,
    archived: str | None = None,
    sort: str | None = None,
    specs: bool = True,
    page_size: int | None = None,
) -> Paged[ExperimentOut]:
    """All experiments, newest first or as `sort` says; pages are fetched as they are needed.

    `name` is part of a name, `tag` are tags that all must be there, `archived` is `false`, `true` or `any`. Without
    `specs` their `spec` is empty: quicker where grids are large.
    """
    params = query(
        state=state,
        tag=tag,
        name=name,
        owner=owner,
        created_after=created_after,
        created_before=created_before,
        archived=archived,
        sort=sort,
        limit=page_size,
        fields=None if specs else _ALL_BUT_SPEC,
    )
    read = parsed(ExperimentPage) if specs else _page_without_specs
    return Paged(Call("GET", _ROOT, read, params=params), lambda page: page.items, by_cursor)


@covers("pauseExperiment")
def pause(experiment_id: int) -> _Experiment:
    """Takes an experiment off the queue at once, until it is resumed."""
    return _verb(experiment_id, "pause")


@covers("resumeExperiment")
def resume(experiment_id: int) -> _Experiment:
    """Puts a paused experiment back into the queue."""
    return _verb(experiment_id, "resume")


@covers("stopExperiment")
def stop(experiment_id: int) -> _Experiment:
    """Drops the trials that wait and lets those that run finish."""
    return _verb(experiment_id, "stop")


@covers("cancelExperiment")
def cancel(experiment_id: int) -> _Experiment:
    """Cancels what is not final; running trials are killed."""
    return _verb(experiment_id, "cancel")


@covers("archiveExperiment")
def archive(experiment_id: int) -> _Experiment:
    """Leaves a final experiment out of lists and leaderboards."""
    return _verb(experiment_id, "archive")


@covers("unarchiveExperiment")
def unarchive(experiment_id: int) -> _Experiment:
    """Takes an experiment out of the archive."""
    return _verb(experiment_id, "unarchive")


@covers("retryExperiment")
def retry(experiment_id: int, states: Sequence[str] = ("failed",)) -> _Experiment:
    """Runs the trials of these states again: `failed`, `diverged`, `cancelled`."""
    return _verb(experiment_id, "retry", {"states": list(states)})


@covers("extendExperiment")
def extend(
    experiment_id: int,
    *,
    grid: dict[str, list[Any]] | None = None,
    variants: Sequence[dict[str, Any]] = (),
    trials: Sequence[dict[str, Any]] = (),
    repeat: int | None = None,
    idempotency_key: str | None = None,
) -> _Experiment:
    """Adds values to the grid's axes, variants, trials or seeds; what is there is not run again."""
    additions = {"grid": grid or {}, "variants": list(variants), "trials": list(trials), "repeat": repeat}
    return _verb(experiment_id, "extend", additions, idempotent(idempotency_key))


@covers("cloneExperiment")
def clone(experiment_id: int, *, name: str | None = None, idempotency_key: str | None = None) -> _Experiment:
    """Posts an experiment's spec once more, by default under the same name."""
    return _verb(experiment_id, "clone", {"name": name}, idempotent(idempotency_key))


@covers("reevaluateExperiment")
def reevaluate(
    experiment_id: int,
    evaluation: dict[str, Any],
    *,
    name: str | None = None,
    idempotency_key: str | None = None,
) -> _Experiment:
    """Posts an experiment that evaluates another's networks anew and trains nothing."""
    body = {"evaluation": evaluation, "name": name}
    return _verb(experiment_id, "re-evaluate", body, idempotent(idempotency_key))


@covers("updateExperiment")
def update(
    experiment_id: int,
    *,
    name: str | None = None,
    notes: str | None = None,
    tags: Sequence[str] | None = None,
    priority: int | None = None,
    revision: int | None = None,
) -> _Experiment:
    """Changes what is given; refused (`ChangedError`) if a `revision` is given and it is at another one."""
    body = {"name": name, "notes": notes, "tags": None if tags is None else list(tags), "priority": priority}
    return Call(
        "PATCH",
        f"{_ROOT}/{experiment_id}",
        parsed(ExperimentOut),
        json=body,
        headers={} if revision is None else {"If-Match": f'"{revision}"'},
        repeatable=revision is None,  # the change itself makes the next revision
    )


@covers("listExperimentEvents", "listEvents")
def events(
    experiment_id: int | None = None,
    *,
    kind: str | Sequence[str] | None = None,
    after: int | None = None,
    sort: str | None = None,
) -> Paged[EventOut]:
    """What happened to one experiment, or to any: after event `after`, oldest first (`sort` "-id": newest first).

    Pages are fetched as needed. `kind` is one of `service.experiments.events.EventKind`, or several.
    """
    path = "/v1/events" if experiment_id is None else f"{_ROOT}/{experiment_id}/events"
    first = Call("GET", path, parsed(EventPage), params=query(kind=kind, after=after, sort=sort, limit=1000))
    return Paged(first, lambda page: page.items, by_number)


def _verb(
    experiment_id: int, verb: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> _Experiment:
    return Call("POST", f"{_ROOT}/{experiment_id}/{verb}", parsed(ExperimentOut), json=body, headers=headers or {})


def _preset(name: str) -> str:
    return "/".join(segment(part) for part in name.split("/"))


def _page_without_specs(response: httpx.Response) -> ExperimentPage:
    page = response.json()
    items = TypeAdapter(list[ExperimentOut]).validate_python([item | {"spec": {}} for item in page["items"]])
    return ExperimentPage(items=items, next=page["next"])
