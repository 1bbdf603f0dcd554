"""Conditions, groups, orders and matrices over any field of a trial, against plain Python on both databases."""

import itertools
import operator
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from service.database import Experiment, ExperimentState, Protocol, Result, Tag, Trial, TrialState
from service.database.engine import Database
from service.errors import QueryError
from service.leaderboards import cell_scores
from service.leaderboards.boards import Board
from service.leaderboards.conditions import Condition, condition
from service.leaderboards.filters import Filters, Question
from service.leaderboards.leaderboard import leaderboard
from service.leaderboards.metrics import Metric
from service.leaderboards.records import pivot_records
from service.leaderboards.sheets import board_sheets
from tests.machinery import Make
from ttsv.config.trial import TrialConfig

LRS, RANKS, SCHEDULES = (0.01, 0.05, 0.5), (None, 2, 0.5), ("cosine", "multistep")
CONFIGS: list[dict[str, Any]] = [
    {
        "layer": "dense" if rank is None else "tt",
        "rank": rank,
        "training": {"lr": lr, "schedule": schedule, "milestones": [1, 2] if schedule == "multistep" else []},
        "augmentation": {"flip": lr == 0.5},
        "division": {"power_iterations": None if lr == 0.01 else 1},
    }
    for lr, rank, schedule in itertools.product(LRS, RANKS, SCHEDULES)
]
HOLE = {"mean": None, "std": None, "seeds": 0, "trials": 2, "cells": 0, "missing": {"queued": 2}}
MODES = pytest.mark.parametrize("tag", [None, "all"], ids=["scores", "added up"])


def accuracy(cell: int, seed: int) -> float:
    """One that no other cell has."""
    return (cell * 7 % 19 + seed) / 64


@pytest.fixture(scope="module")
def stored(module_database: Database, trial_result: Make) -> Database:
    """With two trials of every configuration, of the last cell one of them without a result, and a hole."""
    with Session(module_database.writer) as session:
        session.add(Protocol(fingerprint="p", record={}))
        counts = {"grid_points": 1, "trial_count": 1, "state": ExperimentState.SUCCEEDED}
        session.add(Experiment(id=1, name="drawn", spec={}, **counts))
        session.flush()
        session.add(Tag(experiment_id=1, name="all"))
        hole = {"layer": "tt", "rank": 8, "training": {"lr": 0.7}}
        for cell, seed in itertools.product(range(len(CONFIGS) + 1), (0, 1)):
            given = {"dataset": "digits", "model": "small-cnn", "seed": seed}
            config = TrialConfig.from_dict(given | ([*CONFIGS, hole][cell])).to_dict()
            names = ("model", "layer", "rank", "lambda_ort", "constraint", "seed", "dataset")
            done = cell < len(CONFIGS) and (cell, seed) != (len(CONFIGS) - 1, 1)
            trial = Trial(
                experiment_id=1,
                number=2 * cell + seed,
                fingerprint=f"{cell}-{seed}",
                cell=f"cell {cell}",
                config=config,
                epochs=1,
                state=TrialState.SUCCEEDED if done else TrialState.QUEUED,
                **{name: config[name] for name in names},
            )
            session.add(trial)
            session.flush()
            if done:
                session.add(Result(trial_id=trial.id, protocol="p", fence=1, **trial_result(accuracy(cell, seed))))
        cell_scores.refresh_experiment(session, 1)
        session.commit()
    return module_database


@pytest.fixture
def session(stored: Database) -> Iterator[Session]:
    with Session(stored.writer) as session:
        yield session


def board_of(session: Session, tag: str | None, *where: str, **asked: Any) -> Board:
    filters = Filters(tag=tag, where=tuple(map(condition, where)))
    found = leaderboard(session, Question(dataset="digits", filters=filters, **asked))
    (board,) = found.boards
    return board


def numbers(board: Board) -> set[int]:
    assert board.total == len(board.rows)
    return {int(row.cell.split()[1]) for row in board.rows}


def that(path: str, holds: Callable[[Any], bool]) -> set[int]:
    def value(config: Any) -> Any:
        for part in path.split("."):
            config = config[part]
        return config

    return {cell for cell, config in enumerate(CONFIGS) if holds(value(config))}


@MODES
@pytest.mark.parametrize(
    ("where", "cells"),
    [
        ("training.lr<=0.05", that("training.lr", lambda lr: lr <= 0.05)),
        ("lr < 0.05", that("training.lr", lambda lr: lr < 0.05)),
        ("lr>0.05", that("training.lr", lambda lr: lr > 0.05)),
        ("lr >= 5e-2", that("training.lr", lambda lr: lr >= 0.05)),
        ("lr=0.05", that("training.lr", lambda lr: lr == 0.05)),
        ("lr!=0.05", that("training.lr", lambda lr: lr != 0.05)),
        ("lr in (0.05, 0.5)", that("training.lr", lambda lr: lr in (0.05, 0.5))),
        ("lr not in (0.05, 0.5)", that("training.lr", lambda lr: lr not in (0.05, 0.5))),
        ("rank=none", that("rank", lambda rank: rank is None)),
        ("rank != none", that("rank", lambda rank: rank is not None)),
        ("rank in (none, 2)", that("rank", lambda rank: rank in (None, 2))),
        ("rank not in (0.5, 2)", that("rank", lambda rank: rank is None)),
        ("rank<1", that("rank", lambda rank: rank == 0.5)),
        ("schedule=cosine", that("training.schedule", lambda name: name == "cosine")),
        ("schedule!='cosine'", that("training.schedule", lambda name: name != "cosine")),
        ("layer in (tt)", that("layer", lambda name: name == "tt")),
        ("flip=true", that("augmentation.flip", bool)),
        ("flip=false", that("augmentation.flip", operator.not_)),
        ("milestones=[1, 2]", that("training.milestones", bool)),
        ("milestones = []", that("training.milestones", operator.not_)),
        ("milestones in ([], [3])", that("training.milestones", operator.not_)),
        ("power_iterations=none", that("division.power_iterations", lambda count: count is None)),
        ("power_iterations!=none", that("division.power_iterations", lambda count: count is not None)),
        ("power_iterations>0", that("division.power_iterations", lambda count: count == 1)),
        ("label_smoothing=0", set(range(len(CONFIGS)))),
    ],
)
def test_rows_that_are_meant(session: Session, tag: str | None, where: str, cells: set[int]) -> None:
    assert len(cells) > 0
    board, one = board_of(session, tag, where), condition(where)
    assert numbers(board) == cells
    (row, *_) = board.rows
    assert one == condition(str(one))
    assert all(
        one.holds(None if one.field == "rank" and value is None else value)
        for value in row.fields.values()
        if list(row.fields) == [one.field]
    )


@MODES
def test_several_conditions_all_hold_and_holes_follow(session: Session, tag: str | None) -> None:
    both = board_of(session, tag, "lr<=0.05", "rank=2")
    assert numbers(both) == that("training.lr", lambda lr: lr <= 0.05) & that("rank", lambda rank: rank == 2)
    for where, holes in (("lr=0.7", 1), ("lr=0.5", 0)):
        question = Question(dataset="digits", filters=Filters(tag=tag, where=(condition(where),)))
        assert leaderboard(session, question).hole_count == holes


@MODES
@pytest.mark.parametrize("where", [(), ("lr<=0.5",)], ids=["with a hole", "one board alone"])
def test_what_others_decide_is_no_column(session: Session, tag: str | None, where: tuple[str, ...]) -> None:
    filters = Filters(tag=tag, where=tuple(map(condition, where)))
    found = leaderboard(session, Question(dataset="digits", filters=filters))
    assert {column.field for column in found.columns} >= {"rank", "training.lr", "training.schedule"}
    assert {column.field for column in found.decided} >= {"layer", "training.milestones"}
    assert not {column.field for column in found.columns} & {column.field for column in found.decided}


@MODES
def test_groups_of_any_field(session: Session, tag: str | None) -> None:
    rows = board_of(session, tag, group_by="training.lr").rows
    assert sorted(str(row.group.value) for row in rows if row.group) == list(map(str, LRS))
    assert [row.group.cells for row in rows if row.group] == [6, 6, 6]
    rows = board_of(session, tag, group_by="training.milestones").rows
    assert len(rows) == 2


@MODES
@pytest.mark.parametrize("sign", ["", "-"])
def test_orders_by_any_field(session: Session, tag: str | None, sign: str) -> None:
    ranked = board_of(session, tag)
    rows = board_of(session, tag, sort=f"{sign}rank", limit=10).rows
    values = [row.config["rank"] for row in rows]
    expected = sorted([0.5, 2] * 6, reverse=bool(sign))[:10]
    assert values == expected
    places = {row.cell: row.place for row in ranked.rows}
    assert [row.place for row in rows] == [places[row.cell] for row in rows]
    of_first = [row.place for row in rows[:6]]
    assert of_first == sorted(of_first)  # the metric's order within
    assert [row.config["rank"] for row in board_of(session, tag, sort=f"{sign}rank").rows[12:]] == [None] * 6


@MODES
def test_a_matrix_over_two_fields(session: Session, tag: str | None) -> None:
    pivot = board_of(session, tag, pivot=("rank", "training.lr")).pivot
    assert pivot is not None
    assert (pivot.down.name, pivot.across.name) == ("rank", "lr")
    assert (pivot.down.field, pivot.across.field) == ("rank", "training.lr")
    assert (pivot.rows, pivot.columns) == ([None, 0.5, 2, 8], [*LRS, 0.7])
    assert pivot.cells[3][3] == HOLE
    assert not any([*pivot.cells[3][:3], *(cells[3] for cells in pivot.cells[:3])])
    for row, rank in enumerate(pivot.rows[:3]):
        for column, lr in enumerate(pivot.columns[:3]):
            mine = that("rank", lambda one, rank=rank: one == rank) & that("training.lr", lambda one, lr=lr: one == lr)  # type: ignore[misc]
            values = [accuracy(cell, seed) for cell in mine for seed in (0, 1)]
            if len(CONFIGS) - 1 in mine:
                values.remove(accuracy(len(CONFIGS) - 1, 1))
            cell = pivot.cells[row][column]
            assert cell is not None
            assert (cell["seeds"], cell["trials"], cell["cells"]) == (len(values), 4, 2)
            assert (cell["mean"], cell["std"]) == pytest.approx((statistics.mean(values), statistics.stdev(values)))
    chosen = board_of(session, tag, "schedule=cosine", "rank!=2", pivot=("rank", "training.lr")).pivot
    assert chosen is not None
    assert chosen.rows == [None, 0.5, 8]
    assert {cell["cells"] for cells in chosen.cells for cell in cells if cell} == {1, 0}


@MODES
def test_a_matrix_counts_trials_of_cells_without_a_result(session: Session, tag: str | None) -> None:
    """Of fields of every kind, where the hole's are at their defaults; and in a place that others share."""
    pivot = board_of(session, tag, pivot=("training.milestones", "division.batch_norm_eps")).pivot
    assert pivot is not None
    assert (pivot.rows, pivot.columns) == ([(), (1, 2)], [None])
    (shared,), (others,) = pivot.cells
    assert shared is not None
    assert others is not None
    assert (shared["seeds"], shared["trials"], shared["cells"], shared["missing"]) == (18, 20, 9, {"queued": 2})
    assert (others["seeds"], others["trials"], others["missing"]) == (17, 18, {})


@MODES
def test_a_matrix_for_people_and_for_programs(session: Session, tag: str | None) -> None:
    found = leaderboard(
        session, Question(dataset="digits", filters=Filters(tag=tag), pivot=("training.nesterov", "training.lr"))
    )
    sheet = board_sheets(found, "digits", Metric.ACCURACY)[1]
    assert sheet.headings == ["nesterov", "lr 0.01", "lr 0.05", "lr 0.50", "lr 0.70"]
    assert sheet.texts[0][4] == "0 of 2, queued"
    assert any(note.endswith("behind N stands what became of them.") for note in sheet.notes)
    header, (row,) = pivot_records(found, ("training.nesterov", "training.lr"))
    told = dict(zip(header, row, strict=True))
    assert (told["status"], told["training.nesterov"]) == ("ranked", True)
    lasts = [told[f"training.lr=0.7 {part}"] for part in ("mean", "std", "seeds", "trials", "missing")]
    assert lasts == [None, None, 0, 2, "2 queued"]
    assert (told["training.lr=0.5 seeds"], told["training.lr=0.5 trials"]) == (11, 12)
    assert board_sheets(found, "digits", Metric.ACCURACY)[2].notes[0] == "1 cell has no result (2 trials: 2 queued)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training.le=1", "the nearest is training.lr"),
        ("lear=1", "there is no field 'lear'"),
        ("lr", "is no condition"),
        ("lr=", "is no condition"),
        ("lr=fast", "'fast' is not a number"),
        ("lr=nan", "is not a number"),
        ("flip=1", "is not true or false"),
        ("milestones=1,2", "is not a list"),
        ("milestones=1", "is not a list"),
        ("milestones=[1.5]", "is not a list"),
        ("milestones=[1e999]", "is not a list"),
        ('milestones!=["1"]', "is not a list"),
        pytest.param("radii=" + 1990 * "[", "is not a list", id="deep"),
        ("layer<tt", "only numbers have an order"),
        ("rank<none", "only numbers have an order"),
        ("rank in 2", "list the values in brackets"),
        (
            "rank=4 and lr<=0.1",
            "2 .*; give each condition by itself: where=rank=4&where=lr<=0.1, or --where 'r",
        ),
        ("model=a and b, rank in (2, 4) && lr=1", "3 .*: where=model=a and b&where=rank in .2, 4.&where=lr=1, or"),
        ("seed=0", "rows are means over seeds"),
        ("dataset=digits", "a leaderboard is of one"),
        ("model=small\0cnn", "must be without null characters"),
        ("accuracy>=0.9", r"rows chosen by it would be the lucky ones; rank by it \(metric=accuracy\)"),
    ],
)
def test_refusals(text: str, said: str) -> None:
    with pytest.raises(QueryError, match=said) as refused:
        condition(text)
    assert refused.value.problems[0].field == "where"


def test_what_is_read() -> None:
    assert condition(" rank  in (192, 256) ") == Condition("rank", "in", (192.0, 256.0))
    assert condition("lr not  in [0.1]") == Condition("training.lr", "not in", (0.1,))
    assert condition("clipping.every==2") == Condition("clipping.every", "=", (2.0,))
    assert condition("model=a and b=2") == Condition("model", "=", ("a and b=2",))  # which no field is
    assert condition("model='a and rank=2'") == Condition("model", "=", ("a and rank=2",))


@pytest.mark.parametrize("text", ["rank IN (2, 4)", "rank Not In (2, 4)"])
def test_words_of_a_comparison_are_read_in_any_case(text: str) -> None:
    assert condition(text) == condition(text.lower())


@pytest.mark.parametrize(("text", "nearest"), [("layer=TT", "tt"), ("training.schedule=Multistep", "multistep")])
def test_a_value_that_a_field_never_has_is_refused(text: str, nearest: str) -> None:
    with pytest.raises(QueryError) as refused:
        condition(text)
    assert refused.value.problems[0].message.endswith(f"is none of its values; the nearest is {nearest}")
