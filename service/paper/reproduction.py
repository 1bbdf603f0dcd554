"""The paper's tables made anew from results: what was printed and what was measured here, side by side."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from service.database import Experiment, Protocol, Result, Trial
from service.leaderboards.boards import Printed, Spread, spreads
from service.leaderboards.counted_results import EVERYONE, METRIC_COLUMNS, Counted, newest
from service.leaderboards.filters import Filters
from service.leaderboards.metrics import Measures, Metric, measures
from service.leaderboards.protocols import differences, measured_otherwise
from service.paper import reference
from service.paper.reference import HEADLINE, RATIOS, SAVING, SPEEDUP, Headline, Label, PaperTable, PrintedRow, headline
from ttsv.config.fields import TrialFields
from ttsv.results import machine_name

_OF_TRAINING = frozenset({Metric.STEP_SECONDS, Metric.CONSTRAINT_STEP_SECONDS})
"""Times that a trial takes as it trains; all others it takes as it is evaluated."""


@dataclass(frozen=True)
class TableRow:
    """One row: as printed, and as measured. `status` is "complete", or what is missing.

    `speedup` is the time of the uncompressed network's row over that of this one, `memory_saving` the memory. `notes`:
    in what the two differ, what all rows share aside. `paper` is empty beside small stand-ins.
    """

    labels: Mapping[str, Label]
    status: str
    cell: str | None
    seeds: int
    trials: int
    metrics: dict[str, Spread]
    paper: dict[str, Printed]
    notes: list[str]
    speedup: float | None = None
    memory_saving: float | None = None


@dataclass(frozen=True)
class Reproduction:
    """A table with our numbers. `protocols`: data set -> the protocol of all its numbers, where anything was measured.

    `other_protocols` have results too. `beside`: as `PaperTable` has it.
    """

    name: str
    title: str
    labels: list[str]
    columns: list[str]
    protocols: dict[str, str]
    other_protocols: list[str]
    rows: list[TableRow]
    beside: str
    notes: list[str] = field(default_factory=list)


@dataclass
class _Cell:
    """A cell that belongs to a printed row: its trials by state, and its results by protocol."""

    trial_id: int
    states: dict[str, int] = field(default_factory=dict)
    protocols: set[str] = field(default_factory=set)
    fingerprints: set[str] = field(default_factory=set)


def reproduce(
    session: Session,
    table: PaperTable,
    *,
    experiment_id: int | None = None,
    smoke: bool = False,
    protocol: str | None = None,
    scope: int = EVERYONE,
) -> Reproduction:
    """The table from all results (`experiment_id`: of one experiment) under `protocol`, by default the one that fills
    most of a data set's rows.

    Of several cells that belong to a row, the one whose configuration is nearest to the paper's counts. `smoke`: from
    the small stand-ins of `service.paper.presets`, which show that every path works and measure nothing: no value of
    the paper stands beside them.
    """
    targets = [row.smoke if smoke else row.config for row in table.rows]
    filters = Filters(experiment_id=experiment_id)
    found = _cells(session, targets, filters, scope)
    configs = _configs(session, [cell.trial_id for cells in found.values() for cell in cells.values()])
    distances = {
        name: _distance(configs[cell.trial_id], target)
        for target in targets
        for name, cell in found.get(headline(target), {}).items()
    }
    protocols, others = _protocols(found, targets, protocol)
    chosen: list[tuple[str, _Cell] | None] = []
    for target in targets:
        cells = found.get(headline(target), {})
        mine = [(name, cell) for name, cell in cells.items() if protocols.get(_dataset(target)) in cell.protocols]
        mine.sort(key=lambda item: (distances[item[0]], -item[1].trial_id))
        chosen.append(mine[0] if mine else None)
    results = _results(session, [item[0] for item in chosen if item], protocols, filters, scope)
    measured = {cell: measures(counted.values for counted in mine) for cell, mine in results.items()}
    records = {dataset: session.get_one(Protocol, name).record for dataset, name in protocols.items()}
    rows = []
    for row, target, item in zip(table.rows, targets, chosen, strict=True):
        said: list[str] = []
        if item is not None and not smoke:
            said = reference.notes(table, row, configs[item[1].trial_id], records[_dataset(target)])
        printed = replace(row, values={}) if smoke else row
        rows.append(_row(table, printed, found.get(headline(target), {}), item, measured, said))
    rows = _with_ratios(table, rows)
    rows, notes = _shared(rows)
    if table.ratios:
        notes = [*table.ratio_notes, *_machines(session, table, itertools.chain(*results.values())), *notes]
    if table.note is not None:
        notes = [table.note, *notes]
    if smoke:
        notes = ["scale smoke: small networks on synthetic images, which measure nothing", *notes]
    labels, columns = list(table.labels), list(table.columns)
    notes = [*notes, *measured_otherwise(records)]
    return Reproduction(table.name, table.title, labels, columns, protocols, others, rows, table.beside, notes)


def _cells(
    session: Session, targets: Sequence[TrialFields], filters: Filters, scope: int
) -> dict[Headline, dict[str, _Cell]]:
    """Headline -> cell -> what is known of it."""
    datasets, models = map(_dataset, targets), {target["model"] for target in targets}
    wanted = {headline(target) for target in targets}
    found: dict[Headline, dict[str, _Cell]] = {}
    for dataset in sorted(set(datasets)):
        query = (
            select(Trial.cell, Trial.id, Trial.fingerprint, Trial.state, Result.protocol, Result.valid)
            .add_columns(*(getattr(Trial, name) for name in HEADLINE))
            .join(Experiment, Experiment.id == Trial.experiment_id)
            .outerjoin(Result, Result.trial_id == Trial.id)
            .where(*filters.of_trials(dataset, scope), Trial.model.in_(models))
            .order_by(Trial.id)
        )
        for name, trial_id, fingerprint, state, protocol, valid, *key in session.execute(query):
            if tuple(key) not in wanted:
                continue
            cell = found.setdefault(tuple(key), {}).setdefault(name, _Cell(trial_id))
            cell.trial_id = trial_id
            cell.fingerprints.add(fingerprint)
            said = "invalid" if valid is False else state.value
            cell.states[said] = cell.states.get(said, 0) + 1
            if valid:
                cell.protocols.add(protocol)
    return found


def _protocols(
    found: Mapping[Headline, Mapping[str, _Cell]], targets: Sequence[TrialFields], asked: str | None
) -> tuple[dict[str, str], list[str]]:
    """Data set -> the protocol that fills most of its rows, or the one asked for; the other protocols.

    A protocol is one of a data set: a table over several has one of each. None where the one asked for has no results.
    """
    counts: dict[str, Counter[str]] = {}
    for target in targets:
        names = {name for cell in found.get(headline(target), {}).values() for name in cell.protocols}
        if names:
            counts.setdefault(_dataset(target), Counter()).update(names)
    if asked is not None and not any(asked in known for known in counts.values()):
        return {}, list(dict.fromkeys(name for known in counts.values() for name in sorted(known)))
    orders = {d: sorted(known, key=lambda name: (name != asked, -known[name], name)) for d, known in counts.items()}
    chosen = {dataset: order[0] for dataset, order in orders.items()}
    others = (name for order in orders.values() for name in order if name not in chosen.values())
    return chosen, list(dict.fromkeys(others))


def _configs(session: Session, trials: Sequence[int]) -> dict[int, TrialFields]:
    query = select(Trial.id, Trial.config).where(Trial.id.in_(trials))
    return {row[0]: row[1] for row in session.execute(query)}


def _dataset(target: TrialFields) -> str:
    return str(target["dataset"])


def _distance(config: TrialFields, target: TrialFields) -> int:
    return len(differences(reference.complete(config), target))


def _results(
    session: Session, cells: Sequence[str], protocols: Mapping[str, str], filters: Filters, scope: int
) -> dict[str, list[Counted]]:
    """Cell -> the results that count under its data set's protocol."""
    by_cell: dict[str, list[Counted]] = {}
    query = (
        select(Trial.cell, Trial.id, Trial.fingerprint, Result.protocol, *METRIC_COLUMNS)
        .join(Result, Result.trial_id == Trial.id)
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .where(
            *filters.of_experiments(scope),
            tuple_(Trial.dataset, Result.protocol).in_(list(protocols.items())),
            Trial.cell.in_(cells),
            Result.valid,
        )
    )
    for cell, trial_id, fingerprint, protocol, *values in session.execute(query) if cells else ():
        by_cell.setdefault(cell, []).append(Counted(trial_id, fingerprint, None, protocol, values))
    return {cell: newest(results) for cell, results in by_cell.items()}


def _row(
    table: PaperTable,
    row: PrintedRow,
    cells: dict[str, _Cell],
    item: tuple[str, _Cell] | None,
    measured: dict[str, Measures],
    notes: list[str],
) -> TableRow:
    if item is None:
        states: dict[str, int] = {}
        for cell in cells.values():
            for state, count in cell.states.items():
                states[state] = states.get(state, 0) + count
        if not states:
            status = "not run"
        elif any(cell.protocols for cell in cells.values()):
            status = "measured under another protocol"
        else:
            status = "no result: " + ", ".join(f"{count} {state}" for state, count in states.items())
        trials = sum(len(cell.fingerprints) for cell in cells.values())
        return TableRow(row.labels, status, None, 0, trials, {}, row.values, notes)
    name, cell = item
    known = measured[name]
    seeds, trials = known[Metric.ACCURACY].seeds, len(cell.fingerprints)
    status = "complete" if seeds == trials else f"{seeds} of {trials} seeds"
    shown = spreads(known, [*(column for column in table.columns if column not in RATIOS), *table.ratios.values()])
    if len(cells) > 1:
        notes = [f"the nearest of {len(cells)} cells that belong to this row", *notes]
    return TableRow(row.labels, status, name, seeds, trials, shown, row.values, notes)


def _with_ratios(table: PaperTable, rows: list[TableRow]) -> list[TableRow]:
    """With each row compared to the uncompressed one of the same other labels, as the paper does.

    A baseline has no constraint whose time could be compared.
    """
    whole = {_others(row): row.metrics for row in rows if row.labels["rank"] is None} if table.ratios else {}

    def ratio(name: str, row: TableRow) -> float | None:
        metric = table.ratios.get(name)
        if metric == Metric.CONSTRAINT_STEP_SECONDS and row.labels.get("method") == "baseline":
            return None
        theirs = whole.get(_others(row), {}).get(metric) if metric else None
        ours = row.metrics.get(metric) if metric else None
        if theirs is None or ours is None or min(theirs["mean"], ours["mean"]) <= 0:
            return None
        return theirs["mean"] / ours["mean"]

    return [
        replace(
            row,
            speedup=ratio(SPEEDUP, row),
            memory_saving=ratio(SAVING, row),
            metrics={name: value for name, value in row.metrics.items() if name in table.columns},
        )
        for row in rows
    ]


def _others(row: TableRow) -> tuple[Label, ...]:
    return tuple(value for name, value in row.labels.items() if name != "rank")


def _shared(rows: list[TableRow]) -> tuple[list[TableRow], list[str]]:
    """Notes that all measured rows have stand once, below the table."""
    noted = [set(row.notes) for row in rows if row.cell is not None]
    shared = set.intersection(*noted) if noted else set()
    order = dict.fromkeys(note for row in rows for note in row.notes if note in shared)
    stripped = [replace(row, notes=[note for note in row.notes if note not in shared]) for row in rows]
    return stripped, list(order)


def _machines(session: Session, table: PaperTable, results: Iterable[Counted]) -> list[str]:
    """On what the times were taken: a note, or none if nothing was.

    Those of a training are of the machines that trained, also where another one evaluated the network again.
    """
    compared, machines = set(table.ratios.values()), set[str]()
    trials = [counted.trial_id for counted in results]
    for environment in session.scalars(select(Result.environment).where(Result.trial_id.in_(trials))) if trials else ():
        here = machine_name(environment)
        trained = cast("list[str]", environment.get("trained_on")) or [here]  # earlier results do not say
        machines.update(trained if compared & _OF_TRAINING else ())
        machines.update([here] if compared - _OF_TRAINING else ())
    several = ": times of different machines are not comparable" if len(machines) > 1 else ""
    return [f"times taken on {' and '.join(sorted(machines))}{several}"] if machines else []
