"""The page of a trial: curves, result, violations, spectra, files and the end of its log."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, RedirectResponse

from service.api.curves import MOST_TRIALS
from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Config, Cursor, Db, TrialId
from service.api.http.query_filters import ShownFields, TrialSort, WhichTrials
from service.dashboard.charts import LineChart, line_chart
from service.dashboard.experiments import configurations, exceeds_file
from service.dashboard.rendering import HEADERS, PageRoute, PageSize, Show, named_numbers
from service.dashboard.trial_tabs import absent, corruption_values, reliabilities, robustness, threshold, uses
from service.database import OPEN_TRIALS, TrialState
from service.errors import QueryError
from service.experiments import epoch_points, epoch_spectra, store
from service.experiments.listing import TrialFilter, list_trials, trials_by_id
from service.experiments.logs import tail, trial_log
from service.leaderboards.metrics import Metric
from service.queue import attempts
from service.schemas.trial_tables import Shown
from service.schemas.trials import ArtifactOut
from service.specs.columns import validated_on, validates_on_test
from ttsv.config.fields import TrialFields
from ttsv.results import SPECTRUM_SHARES, LayerFields

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_POINTS = 300
"""Of more epochs so many are drawn (`points.thin`)."""
_LOG_LINES = 200
_LAYERS = 200
TrialNumber = Annotated[int, Query(ge=1, le=MAX_ID)]
_COLUMNS = ("train_loss", "val_loss", "train_accuracy", "val_accuracy", "ort_loss", "lr")


@dataclass(frozen=True)
class LayerRange:
    """A layer's record, and where its singular values lie on a bar of a thousand."""

    record: LayerFields
    start: float
    width: float
    before: float | None


@router.get("/trials")
def index(
    show: Show,
    database: Db,
    which: WhichTrials,
    shown: ShownFields,
    limit: PageSize = 100,
    cursor: Cursor = None,
    sort: TrialSort = "-id",
) -> HTMLResponse:
    """Trials of all experiments: those of a cell, of a network, that failed ..."""
    with database.read() as session:
        found = list_trials(session, which, limit=limit, sort=sort, cursor=cursor)
        fields = configurations(found.rows, shown)
        more = exceeds_file(session, which, found, cursor)
    return show(
        "trials.html",
        trials=found.rows,
        fields=fields,
        next=found.next,
        more_than_in_file=more,
        sort=sort,
        states=list(TrialState),
    )


@router.get("/curves")
def many(
    show: Show,
    who: Reader,
    database: Db,
    trials: Annotated[str | None, Query(max_length=4000)] = None,
    trial: Annotated[list[TrialNumber] | None, Query(max_length=MOST_TRIALS)] = None,
) -> HTMLResponse:
    """The curves of chosen trials: of a list separated by commas, or of boxes that were checked."""
    problem = None
    try:
        chosen = list(dict.fromkeys([*named_numbers(trials, "trials"), *(trial or ())]))
    except QueryError as error:
        chosen, problem = [], str(error)
    with database.read() as session:
        rows = trials_by_id(session, chosen[:MOST_TRIALS], project_id=who.project_id)
        fields = configurations(rows, Shown())
    there = [row.id for row, _ in rows]
    left_out = [one for one in chosen[:MOST_TRIALS] if one not in there]
    if left_out:
        problem = f"there is no trial {', '.join(map(str, left_out))}"
    elif len(chosen) > MOST_TRIALS:
        problem = f"the first {MOST_TRIALS} of {len(chosen)} trials: more are not drawn at a time"
    return show(
        "curves.html",
        trials=rows,
        fields=fields,
        problem=problem,
        # What is wrong stays in the field, to be mended; who is there is drawn.
        chosen_trials=",".join(map(str, there)) if there or not trials else trials,
        curves_of=None,
        curves_on=validated_on(row.config for row, _ in rows),
    )


@router.get("/trials/{trial_id}")
def trial(trial_id: TrialId, show: Show, who: Reader, database: Db, settings: Config) -> HTMLResponse:
    """One trial."""
    with database.read() as session:
        found = store.trial_detail(session, trial_id, project_id=who.project_id)
        experiment = store.get_experiment(session, found.trial.experiment_id)
        epochs = epoch_points.sample(session, trial_id, _COLUMNS, _POINTS)
        artifacts = [ArtifactOut.of(artifact) for artifact in found.artifacts]
        name = experiment.name
        begun = attempts.listed(session, trial_id)
        sampled = attempts.listed(session, trial_id, resources=True)
        watched = epoch_spectra.history(session, trial_id, 2)
        silent = attempts.silences(session, [found.trial])
        session.expunge_all()
    result = found.result
    values = [(metric, getattr(result, metric.value)) for metric in Metric] if result else []
    path = trial_log(settings, trial_id)
    layers = result.layers if result else []
    return show(
        "trial.html",
        trial=found.trial,
        silence=silent.get(trial_id),
        experiment_name=name,
        open=found.trial.state in OPEN_TRIALS,
        delta=threshold(found.trial),
        charts=curves(epochs, found.trial.config),
        result=result,
        measurements=[(metric, value) for metric, value in values if value is not None],
        unmeasured=[metric for metric, value in values if value is None],
        protocol=found.protocol,
        layers=layer_ranges(layers[:_LAYERS]),
        layer_count=len(layers),
        watched=watched,
        shares=SPECTRUM_SHARES,
        unevaluated=absent(found.trial, result),
        robustness=robustness(result),
        uncorrupted=absent(found.trial, result, corruption_values(found.trial.dataset)),
        uncertified=absent(found.trial, result, "certified=true attack=autoattack"),
        unsearched=absent(found.trial, result, "lipschitz=both certified=true"),
        reliabilities=reliabilities(result),
        attempts=begun,
        uses=uses(sampled),
        artifacts=artifacts,
        log=tail(path, _LOG_LINES)[0].decode("utf-8", errors="replace") if path else None,
    )


@router.get("/trials/{trial_id}/summary")
def summary(trial_id: TrialId, show: Show, who: Reader, database: Db) -> HTMLResponse:
    """What stands above the tabs, alone: all that changes of a page while its trial trains, but pictures and log."""
    with database.read() as session:
        found = store.trial_detail(session, trial_id, project_id=who.project_id)
        silent = attempts.silences(session, [found.trial])
        session.expunge_all()
    return show("trial_changes.html", trial=found.trial, silence=silent.get(trial_id), result=found.result)


@router.get("/trials/{trial_id}/cell")
def cell(trial_id: TrialId, who: Reader, database: Db) -> RedirectResponse:
    """Leads to all seeds of a trial's cell, or to the trial where it is the only one."""
    with database.read() as session:
        found = store.get_trial(session, trial_id, project_id=who.project_id)
        which = TrialFilter(project_id=who.project_id, dataset=found.dataset, cell=found.cell)
        alone = len(list_trials(session, which, limit=2, with_config=False, with_result=False).rows) == 1
        query = urlencode({"dataset": found.dataset, "cell": found.cell})
    return RedirectResponse(f"/trials/{trial_id}" if alone else f"/trials?{query}", status_code=303, headers=HEADERS)


def curves(epochs: Sequence[epoch_points.Point], config: TrialFields) -> list[LineChart]:
    """What a trial's epochs draw."""
    images = "test" if validates_on_test(config) else "validation"
    xs = [float(point["epoch"]) for point in epochs]

    def column(name: str, factor: float = 1) -> list[float | None]:
        return [None if point[name] is None else factor * point[name] for point in epochs]

    charts = [
        line_chart(
            "Accuracy (%)",
            "epoch",
            xs,
            {"training": column("train_accuracy", 100), images: column("val_accuracy", 100)},
        ),
        line_chart("Loss (nats)", "epoch", xs, {"training": column("train_loss"), images: column("val_loss")}),
        line_chart("Orthogonal loss", "epoch", xs, {"orthogonal loss": column("ort_loss")}, log=True),
        line_chart("Learning rate", "epoch", xs, {"learning rate": column("lr")}),
    ]
    return [chart for chart in charts if chart is not None]


def layer_ranges(layers: Sequence[LayerFields]) -> list[LayerRange]:
    """Each layer's smallest to largest singular value, all on one scale."""
    tops = [(layer.get("largest"), layer.get("largest_before_projection")) for layer in layers]
    top = max((value or 0 for pair in tops for value in pair), default=0) or 1

    def place(value: float | None) -> float:
        return round(1000 * min(max(value or 0, 0), top) / top, 1)

    found = []
    for layer in layers:
        start, end = place(layer.get("smallest")), place(layer.get("largest"))
        before = layer.get("largest_before_projection")
        width = round(max(end - start, 4), 1)
        found.append(LayerRange(layer, min(start, 996), width, None if before is None else place(before)))
    return found
