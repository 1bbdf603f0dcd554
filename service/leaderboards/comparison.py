"""Two to ten trials, cells or experiments beside each other: what differs in their configurations, and their results.

A trial has one result, a cell those of its seeds. Of experiments the cells stand beside each other that have the same
values in all fields that any of these experiments varies. So nothing is averaged over configurations; and nothing is
over protocols: a mean is of one, and a difference is of two means under the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from service.database import Experiment, Protocol, Result, Trial, TrialState
from service.database.engine import among
from service.errors import NotFoundError
from service.leaderboards.boards import Missing
from service.leaderboards.corruption_baselines import BASELINE, with_baseline
from service.leaderboards.counted_results import EVERYONE, Counted, newest
from service.leaderboards.differing import differing_fields, named, spec_fields
from service.leaderboards.leaderboard import tried_datasets
from service.leaderboards.metrics import HEADLINE, Metric
from service.leaderboards.protocols import Record
from service.leaderboards.side_measures import Part, numbers_of, side_measures, unequal
from service.leaderboards.sides import CompareRow, Comparison, Key, Kind, Side, SideLayers, UsedProtocol
from service.leaderboards.source import hashable, in_order
from service.specs.columns import Columns, FieldColumn, columns_of, value_of
from service.specs.states import OPEN_TRIALS
from ttsv.config.fields import FieldValue, TrialFields
from ttsv.results import LayerFields

FEWEST, MOST = 2, 10
"""Sides of a comparison."""
MOST_DRAWN = 20
"""Trials of a side whose curves are laid over those of others."""
_BATCH = 10_000


@dataclass(frozen=True, kw_only=True)
class CompareQuestion:
    """What stands beside each other: `FEWEST` to `MOST` different keys of one kind.

    Differences are to the one that `baseline` counts, from 0 on. `metrics`: none named are all that somebody has.
    `protocol`: only results under it count. `limit` rows at most. `scope` is a project, or 0.
    """

    kind: Kind
    keys: Sequence[Key]
    baseline: int = 0
    metrics: Sequence[Metric] = HEADLINE
    protocol: str | None = None
    limit: int = 100
    scope: int = EVERYONE

    @property
    def shown(self) -> list[Metric]:
        """The metrics, in the order of tables."""
        return [metric for metric in Metric if not self.metrics or metric in self.metrics]


class _Row(NamedTuple):
    """A trial as it was read, with its result if it has one."""

    id: int
    experiment_id: int
    number: int
    cell: str
    fingerprint: str
    seed: int
    state: TrialState
    failure: str | None
    best_val_accuracy: float | None
    protocol: str | None
    valid: bool | None
    baseline: str | None
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class _Matched:
    """The cells of all sides by what they share: `parts` of each place those of every side, best filled first."""

    columns: Columns
    values: list[dict[str, list[FieldValue]]]
    axes: list[FieldColumn]
    parts: dict[tuple[FieldValue, ...], list[Part | None]]


def compare(session: Session, question: CompareQuestion) -> Comparison:
    """Answers a question. Raises `NotFoundError` for what is not there, or not of the project if one is meant."""
    kind, keys = question.kind, question.keys
    experiments = _experiments(session, question) if kind is Kind.EXPERIMENTS else {}
    trials = _trials(session, question)
    _refuse_missing(question, experiments if kind is Kind.EXPERIMENTS else trials)
    found = _matched(session, question, trials)
    shown = dict(list(found.parts.items())[: question.limit])
    rows = numbers_of(shown.values(), found.parts.values(), question.shown, question.baseline)
    used: dict[str, set[int]] = {}
    for numbers in rows:
        for one in numbers.values():
            for side, protocol in enumerate(one.protocols):
                if protocol is not None:
                    used.setdefault(protocol, set()).add(side)
    records = _records(session, used)
    differing = differing_fields(found.columns.fields, found.values)
    if kind is Kind.EXPERIMENTS:
        differing += spec_fields([experiments[key].spec for key in keys])
    sides = [
        _side(question, key, trials.get(key, []), experiments.get(key), _left_out(question, side, shown, used, trials))
        for side, key in enumerate(keys)
    ]
    index = {name: number for number, name in enumerate(used)}
    return Comparison(
        kind=kind,
        baseline=question.baseline,
        sides=named(sides, differing),
        differing=differing,
        axes=found.axes,
        common=found.columns.common,
        metrics=[metric for metric in question.shown if any(metric in numbers for numbers in rows)],
        protocols=[UsedProtocol(name, records[name], sorted(mine)) for name, mine in used.items()],
        unequal=unequal(rows, question.baseline, records),
        rows=[
            CompareRow(
                fields={axis.field: value for axis, value in zip(found.axes, place, strict=True)},
                trials=[None if part is None else part.trials for part in parts],
                metrics={
                    metric.value: side_measures(metric, one, parts, question.baseline, index, records)
                    for metric, one in numbers.items()
                },
            )
            for (place, parts), numbers in zip(shown.items(), rows, strict=True)
        ],
        row_count=len(found.parts),
    )


def _matched(session: Session, question: CompareQuestion, trials: Mapping[Key, Sequence[_Row]]) -> _Matched:
    """What lies beside each other: a place for each combination of values of the fields that a side varies."""
    cells = [_by_cell(trials.get(key, [])) for key in question.keys]
    configs = _configs(session, [rows[0].id for mine in cells for rows in mine.values()])
    hidden = () if question.kind is Kind.TRIALS else ("seed",)
    columns = columns_of(list(configs.values()), hidden=hidden) if configs else Columns([], {})
    paths = [one.field for one in columns.fields]
    fields = {
        rows[0].id: {path: hashable(value_of(configs[rows[0].id], path)) for path in paths}
        for mine in cells
        for rows in mine.values()
    }
    told = [
        {path: sorted({fields[rows[0].id][path] for rows in mine.values()}, key=in_order) for path in paths}
        for mine in cells
    ]
    axes = [one for one in columns.fields if any(len(side[one.field]) > 1 for side in told)]
    parts: dict[tuple[FieldValue, ...], list[Part | None]] = {}
    for side, mine in enumerate(cells):
        for rows in mine.values():
            place = tuple(fields[rows[0].id][axis.field] for axis in axes)
            parts.setdefault(place, [None] * len(cells))[side] = _part(rows, question.protocol)
    order = sorted(parts, key=lambda place: (parts[place].count(None), [*map(in_order, place)]))
    return _Matched(columns, told, axes, {place: parts[place] for place in order})


def _left_out(
    question: CompareQuestion,
    side: int,
    shown: Mapping[tuple[FieldValue, ...], Sequence[Part | None]],
    used: Mapping[str, set[int]],
    trials: Mapping[Key, Sequence[_Row]],
) -> int:
    """How many valid results of a side are of other protocols than its numbers."""
    mine = {name.partition("+")[0] for name, sides in used.items() if side in sides}
    parts = [row[side] for row in shown.values()]
    others = sum(bool(mine) and one.protocol not in mine for part in parts if part is not None for one in part.results)
    rows = trials.get(question.keys[side], [])
    return others + sum(bool(row.valid) and question.protocol not in (None, row.protocol) for row in rows)


def _experiments(session: Session, question: CompareQuestion) -> dict[Key, Experiment]:
    there: list[ColumnElement[bool]] = [Experiment.id.in_(question.keys), Experiment.deleted_at.is_(None)]
    if question.scope:
        there.append(Experiment.project_id == question.scope)
    return {one.id: one for one in session.scalars(select(Experiment).where(*there))}


def _trials(session: Session, question: CompareQuestion) -> dict[Key, list[_Row]]:
    """By key the trials that are meant, oldest first. Cells are those of leaderboards: without archived experiments."""
    there: list[ColumnElement[bool]] = [Experiment.deleted_at.is_(None)]
    if question.scope:
        there.append(Experiment.project_id == question.scope)
    if question.kind is Kind.TRIALS:
        there.append(Trial.id.in_(question.keys))
    elif question.kind is Kind.EXPERIMENTS:
        there.append(Trial.experiment_id.in_(question.keys))
    else:
        datasets = list(tried_datasets(session, question.scope))  # with which an index finds cells
        there += [Trial.dataset.in_(datasets), Trial.cell.in_(question.keys), Experiment.archived_at.is_(None)]
    query = (
        select(Trial.id, Trial.experiment_id, Trial.number, Trial.cell, Trial.fingerprint, Trial.seed, Trial.state)
        .add_columns(Trial.failure, Trial.best_val_accuracy, Result.protocol, Result.valid, BASELINE)
        .add_columns(*(getattr(Result, metric.value) for metric in question.shown))
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .outerjoin(Result, Result.trial_id == Trial.id)
        .where(*there)
        .order_by(Trial.id)
    )
    found: dict[Key, list[_Row]] = {}
    for plain in session.connection().execute(query):
        row = _Row._make((*plain[:12], tuple(plain[12:])))
        key: Key = row.id
        if question.kind is not Kind.TRIALS:
            key = row.cell if question.kind is Kind.CELLS else row.experiment_id
        found.setdefault(key, []).append(row)
    return found


def _refuse_missing(question: CompareQuestion, found: Mapping[Key, object]) -> None:
    if missing := [key for key in question.keys if key not in found]:
        where = " outside of the archive" if question.kind is Kind.CELLS else ""
        raise NotFoundError(f"there is no {question.kind.one} {missing[0]}{where}")


def _by_cell(rows: Iterable[_Row]) -> dict[str, list[_Row]]:
    found: dict[str, list[_Row]] = {}
    for row in rows:
        found.setdefault(row.cell, []).append(row)
    return found


def _configs(session: Session, trial_ids: Sequence[int]) -> dict[int, TrialFields]:
    found: dict[int, TrialFields] = {}
    for first in range(0, len(trial_ids), _BATCH):
        some = among(session, Trial.id, trial_ids[first : first + _BATCH])
        found |= {row[0]: row[1] for row in session.execute(select(Trial.id, Trial.config).where(some))}
    return found


def _part(rows: Sequence[_Row], protocol: str | None) -> Part:
    """The newest result of every different trial and protocol, as leaderboards count them."""
    valid = [row for row in rows if row.valid and protocol in (None, row.protocol)]
    results = newest(Counted(row.id, row.fingerprint, None, row.protocol or "", row.values) for row in valid)
    return Part(len({row.fingerprint for row in rows}), results, {row.id: row.baseline for row in valid})


def _records(session: Session, used: Iterable[str]) -> dict[str, Record]:
    """By protocol (`under`) its record."""
    names = {name: name.partition("+") for name in used}
    query = select(Protocol.fingerprint, Protocol.record).where(
        Protocol.fingerprint.in_({one[0] for one in names.values()})
    )
    known: dict[str, Record] = {row[0]: row[1] for row in session.execute(query)}
    return {
        name: with_baseline(known[own], baseline) if baseline else known[own]
        for name, (own, _, baseline) in names.items()
    }


def _side(
    question: CompareQuestion, key: Key, rows: Sequence[_Row], experiment: Experiment | None, left_out: int
) -> Side:
    counts = Counter(row.state.value for row in rows)
    name = f"{question.kind.one} {key[:12] if isinstance(key, str) else key}"
    return Side(
        key=key,
        name=name,
        about="" if experiment is None else experiment.name,
        experiment_id=rows[0].experiment_id if question.kind is Kind.TRIALS else None,
        states={state.value: counts[state.value] for state in TrialState if counts[state.value]},
        missing=_missing(rows),
        invalid=sum(row.valid is False for row in rows),
        left_out=left_out,
        drawn=_drawn(question.kind, rows),
    )


def _missing(rows: Iterable[_Row]) -> dict[str, int]:
    """The different trials without a result, counted by what became of the one that may yet bring it, or the newest."""
    mine: dict[str, list[_Row]] = {}
    for row in rows:
        mine.setdefault(row.fingerprint, []).append(row)
    lacking = [same for same in mine.values() if all(row.protocol is None for row in same)]
    chosen = [next((row for row in reversed(same) if row.state in OPEN_TRIALS), same[-1]) for same in lacking]
    return Counter(Missing(row.id, row.seed, row.state.value, row.failure).said for row in chosen)


def _drawn(kind: Kind, rows: Sequence[_Row]) -> list[int]:
    """The trials whose curves stand for a side; of those that compute the same the newest."""
    if kind is Kind.EXPERIMENTS:
        known = {
            cell: [row.best_val_accuracy for row in mine if row.best_val_accuracy is not None]
            for cell, mine in _by_cell(rows).items()
        }
        best = max((cell for cell in known if known[cell]), key=lambda cell: fmean(known[cell]), default=None)
        rows = [row for row in rows if row.cell == best]
    different = {row.fingerprint: row for row in rows}
    return [row.id for row in sorted(different.values(), key=lambda row: (row.seed, row.id))][:MOST_DRAWN]


def side_layers(session: Session, sides: Sequence[Side]) -> list[SideLayers | None]:
    """Of each side its layers; None where no trial that stands for it has a result."""
    drawn = [trial for side in sides for trial in side.drawn]
    query = select(Result.trial_id, Result.layers).where(Result.trial_id.in_(drawn), Result.valid)
    known: dict[int, list[LayerFields]] = {row[0]: row[1] for row in session.execute(query)}
    firsts = [next((trial for trial in side.drawn if trial in known), None) for side in sides]
    return [None if trial is None else SideLayers(trial, known[trial]) for trial in firsts]
