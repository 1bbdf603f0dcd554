"""Requests about trials: their configurations, results, epochs, spectra, logs and files."""

from collections.abc import Sequence

from service.client.calls import Call, Paged, Text, by_cursor, by_number, covers, parsed, query, text
from service.schemas.experiments import (
    ArtifactList,
    ArtifactOut,
    EpochOut,
    MetricsPage,
    ResultDetailOut,
    SpectraOut,
    TrialDetailOut,
    TrialOut,
    TrialPage,
)

_MAX_TAIL = 100_000


@covers("listTrials", "listAllTrials")
def trials(
    experiment_id: int | None = None,
    *,
    state: str | Sequence[str] | None = None,
    dataset: str | None = None,
    model: str | None = None,
    layer: str | None = None,
    constraint: str | None = None,
    rank: float | str | None = None,
    seed: int | None = None,
    cell: str | None = None,
    failure: str | None = None,
    sort: str | None = None,
    page_size: int = 1000,
) -> Paged[TrialOut]:
    """An experiment's trials in the grid's order, or those of all experiments; pages are fetched as they are needed.

    The others choose among them: `rank` is a number or `none`, `failure` the class of what went wrong.
    """
    params = query(
        state=state,
        dataset=dataset,
        model=model,
        layer=layer,
        constraint=constraint,
        rank=rank,
        seed=seed,
        cell=cell,
        failure=failure,
        sort=sort,
        limit=page_size,
    )
    path = "/v1/trials" if experiment_id is None else f"/v1/experiments/{experiment_id}/trials"
    return Paged(Call("GET", path, parsed(TrialPage), params=params), lambda page: page.items, by_cursor)


@covers("getTrial")
def trial(trial_id: int) -> Call[TrialDetailOut]:
    """One trial with its epochs, protocol, layers and files."""
    return Call("GET", f"/v1/trials/{trial_id}", parsed(TrialDetailOut))


@covers("getTrialResult")
def result(trial_id: int) -> Call[ResultDetailOut]:
    """A succeeded trial's result with its protocol, what its evaluations recorded, and where it ran."""
    return Call("GET", f"/v1/trials/{trial_id}/result", parsed(ResultDetailOut))


@covers("getTrialSpectra")
def spectra(trial_id: int) -> Call[SpectraOut]:
    """The singular values of a succeeded trial's layers."""
    return Call("GET", f"/v1/trials/{trial_id}/spectra", parsed(SpectraOut))


@covers("listTrialMetrics")
def epochs(trial_id: int, *, after: int = 0, points: int | None = None) -> Paged[EpochOut]:
    """A trial's epochs past `after`, in order; with `points` so many of them that draw the same curves."""
    params = query(after=after, points=points, limit=1000)
    first = Call("GET", f"/v1/trials/{trial_id}/metrics", parsed(MetricsPage), params=params)
    return Paged(first, lambda page: page.items, by_number)


@covers("listTrialArtifacts")
def artifacts(trial_id: int) -> Call[list[ArtifactOut]]:
    """The files that a trial left, with sizes and SHA-256; `download` fetches them."""
    return Call("GET", f"/v1/trials/{trial_id}/artifacts", lambda answer: parsed(ArtifactList)(answer).items)


@covers("getTrialLog")
def trial_log(trial_id: int, *, tail: int = 1000) -> Call[str]:
    """The last lines of the log of a trial's newest attempt."""
    return Call("GET", f"/v1/trials/{trial_id}/logs", text, params=query(tail=min(tail, _MAX_TAIL)))


@covers("getExperimentLog")
def experiment_log(experiment_id: int, *, tail: int = 1000) -> Call[str]:
    """The last lines of the log of the process that ran an experiment last."""
    return Call("GET", f"/v1/experiments/{experiment_id}/logs", text, params=query(tail=min(tail, _MAX_TAIL)))


@covers("getTrialLog")
def follow_trial_log(trial_id: int, *, tail: int = 1000) -> Text:
    """A trial's log as it is written, through all attempts, until the trial is final."""
    return Text(f"/v1/trials/{trial_id}/logs", query(tail=min(tail, _MAX_TAIL), follow=True))


@covers("getExperimentLog")
def follow_experiment_log(experiment_id: int, *, tail: int = 1000) -> Text:
    """An experiment's log as it is written, until the experiment is final."""
    return Text(f"/v1/experiments/{experiment_id}/logs", query(tail=min(tail, _MAX_TAIL), follow=True))
