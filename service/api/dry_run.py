"""What a spec would become with nothing stored: its trials, their costs, and what they take of a card."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TypeVar

from service.api.http.examples import Responses
from service.api.openapi_examples.trials import TRIAL
from service.database.engine import Database
from service.experiments.estimate import Estimator
from service.experiments.memory import GIB, Advice, Memory, MemoryEstimator, advise
from service.queue import nodes
from service.schemas.dry_runs import SHOWN, DryMemory, DryRange, DryRanges, DryRunOut, DryTotals, DryTrialOut
from service.schemas.trials import ColumnOut
from service.specs.columns import Columns, columns_of
from service.specs.planner import CellCount, Facts, GridCount, Plan, PlannedTrial
from service.specs.spec import ExperimentSpec
from ttsv.config.fields import Checked, TrialFields

_Number = TypeVar("_Number", int, float)

_EXAMPLE = {
    "grid_points": 24,
    "trial_count": 20,
    "totals": {"steps": 5040, "seconds": None},
    "ranges": {
        "parameters": {"least": 2486, "largest": 75_018},
        "compression": {"least": 1.0, "largest": 35.5},
        "seconds": None,
    },
    "memory": {
        "gib": 0.2,
        "basis": "worked out of its layers, batch and training; nothing like it was measured on a GPU yet",
        "needed_gib": 0.72,
        "card_gib": 79.6,
        "gpus": 0.0091,
    },
    "reasons": ["nothing was measured yet from which the time could be told"],
    "notes": [
        "each of these trials needs up to about 0.7 GiB of a card: resources.gpus: 0.0091 would run 109 side by side "
        "on a card of 80 GiB, as far as memory goes"
    ],
    "warnings": [],
    "trials": [
        {name: TRIAL[name] for name in ("fingerprint", "cell", "config")}
        | {
            "number": 0,
            "parameters": 2486,
            "compression": 35.5,
            "multiply_accumulates": 45_000,
            "steps": 252,
            "seconds": None,
            "basis": None,
            "memory_gib": 0.2,
            "memory_basis": "worked out of its layers, batch and training; nothing like it was measured on a GPU yet",
            "reasons": ["nothing was measured yet from which the time could be told"],
        }
    ],
}

DRY_RUN: Responses = {
    200: {
        "model": DryRunOut,
        "description": "With dry_run: what would be stored.",
        "content": {"application/json": {"example": _EXAMPLE}},
    }
}


def taken_of_cards(
    database: Database, spec: ExperimentSpec, cells: Sequence[CellCount], project_id: int | None
) -> tuple[list[Memory | None], Advice]:
    """What each takes of a card, and what is said of it."""
    with database.read() as session:
        estimator = MemoryEstimator(session, (cell.config for cell in cells), project_id)
        card = nodes.smallest_card(session)
    memories = [estimator.estimate(cell.config) for cell in cells]
    return memories, advise(memories, card, spec.resources.gpus)


def dry_run(
    database: Database,
    spec: ExperimentSpec,
    plan: Plan | GridCount,
    said: list[str],
    project_id: int | None,
    facts: Facts,
) -> DryRunOut:
    """The trials of a spec with what they would cost, by what trials of the project took; and what is `said` of it.

    `facts`: what is known of data sets.
    """
    cells = plan.cells
    memories, advice = taken_of_cards(database, spec, cells, project_id)
    with database.read() as session:
        estimator = Estimator(session, (cell.config for cell in cells), project_id, facts)
    estimates = [estimator.estimate(cell.config) for cell in cells]
    trials = [
        DryTrialOut(
            number=number,
            fingerprint=planned.fingerprint,
            cell=planned.cell,
            config=planned.config.kept(),
            **asdict(estimate) | {"reasons": list(estimate.reasons)},
            memory_gib=None if memory is None else memory.most / GIB,
            memory_basis=None if memory is None else memory.basis,
        )
        for number, (planned, estimate, memory) in enumerate(zip(_listed(plan), estimates, memories, strict=False))
    ]
    counts = [cell.trials for cell in cells]
    configs = [] if isinstance(plan, GridCount) else _telling(plan.trials)
    shape = columns_of(configs, without_decided=True) if configs else Columns([], {})
    columns, decided = (
        [ColumnOut(field=one.field, name=one.name) for one in some] for some in (shape.fields, shape.decided)
    )
    return DryRunOut(
        grid_points=plan.points,
        trial_count=sum(counts),
        totals=DryTotals(
            steps=_total([estimate.steps for estimate in estimates], counts),
            seconds=_total([estimate.seconds for estimate in estimates], counts),
        ),
        ranges=DryRanges(
            parameters=_range(estimate.parameters for estimate in estimates),
            compression=_range(estimate.compression for estimate in estimates),
            seconds=_range(estimate.seconds for estimate in estimates),
        ),
        memory=_memory(advice),
        reasons=list(dict.fromkeys(reason for estimate in estimates for reason in estimate.reasons)),
        notes=list(advice.notes),
        warnings=[*said, *advice.warnings],
        trials=trials,
        columns=columns,
        decided=decided,
        common=shape.common,
    )


def _telling(trials: Sequence[PlannedTrial]) -> list[TrialFields]:
    """Configurations that tell as much as those of all trials: one of every cell, and another seed if there is one."""
    cells = {trial.cell: trial for trial in reversed(trials)}
    others = (trial for trial in trials if trial.config.seed != trials[0].config.seed)
    # (Not `kept()`: each makes eight objects, of which a column is looked at and nothing stays.)
    return [
        {name: vars(part) if isinstance(part, Checked) else part for name, part in vars(trial.config).items()}
        for trial in (*reversed(cells.values()), *islice(others, 1))
    ]


def _listed(plan: Plan | GridCount) -> Sequence[PlannedTrial]:
    return () if isinstance(plan, GridCount) else plan.trials[:SHOWN]


def _total(values: Sequence[_Number | None], counts: Sequence[int]) -> _Number | None:
    """The sum of values, each counted so many times, where there are values and all of them are known."""
    known = [value * count for value, count in zip(values, counts, strict=True) if value is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None


def _memory(advice: Advice) -> DryMemory | None:
    if (largest := advice.largest) is None:
        return None
    return DryMemory(
        gib=largest.most / GIB,
        basis=largest.basis,
        needed_gib=largest.of_card / GIB,
        card_gib=None if advice.card is None else advice.card / GIB,
        gpus=advice.gpus,
    )


def _range(values: Iterable[float | None]) -> DryRange | None:
    """The least and the largest of the values that are known."""
    known = [value for value in values if value is not None]
    return DryRange(least=min(known), largest=max(known)) if known else None
