"""Leaderboards against the same sums in plain Python, on SQLite and Postgres: from stored scores, and added up."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import JsonValue
from sqlalchemy import event
from sqlalchemy.orm import Session

from service.database import Experiment, ExperimentState, Project, Protocol, Result, Tag, Trial, TrialState, now
from service.database.engine import Database, driver_rows
from service.errors import NotFoundError, QueryError
from service.leaderboards import cell_scores, source, stored_rivals
from service.leaderboards.boards import Board, Change, Group, Hole, Leaderboard, Missing, PaperReference, Row
from service.leaderboards.conditions import condition
from service.leaderboards.corruption_baselines import baseline_of
from service.leaderboards.filters import Filters, Question
from service.leaderboards.leaderboard import leaderboard, measured_datasets, tried_datasets
from service.leaderboards.materialized import StoredScores
from service.leaderboards.metrics import Metric
from service.leaderboards.records import board_records
from service.leaderboards.scatter import scatter_plot
from service.leaderboards.score_ranks import tie_of
from service.leaderboards.sheets import board_sheets
from service.leaderboards.text_tables import Measured
from service.paper.reference import references
from service.specs.columns import value_of
from tests.examples import examples
from tests.machinery import Make
from ttsv.results import protocol_fingerprint


@dataclass(frozen=True)
class Run:
    """A trial as these tests draw it: its cell, seed and what it gave under which protocol, if anything."""

    cell: int
    seed: int
    protocol: str | None = "a"
    accuracy: float = 0.5
    loss: float = 1.0
    dataset: str = "digits"
    valid: bool = True
    model: str = "small-cnn"
    robust: float | None = None
    error: float | None = None
    """Its mean corruption error."""
    baseline: str | None = None
    lr: float | None = None


CORRUPTED_RECORD: dict[str, JsonValue] = {"name": "c", "corruptions": {"corruptions": "published"}}
CORRUPTED = protocol_fingerprint(CORRUPTED_RECORD)


def store_runs(
    session: Session,
    experiments: list[list[Run]],
    trial_result: Make,
    *,
    tags: bool = False,
    projects: Mapping[int, int] | None = None,
) -> None:
    """Enters experiments whose trials have the ids 1, 2, 3 ... in the order given, and then their scores.

    `tags`: all have the tag "all". `projects`: those of experiments, by their ids, which are made.
    """
    projects = projects or {}
    session.add_all(Project(id=number, name=f"project {number}") for number in set(projects.values()))
    for name in ("a", "b"):
        session.add(Protocol(fingerprint=name, record={"name": name}))
    session.add(Protocol(fingerprint=CORRUPTED, record=CORRUPTED_RECORD))
    session.flush()
    trial_id = 0
    for number, runs in enumerate(experiments, start=1):
        state = ExperimentState.SUCCEEDED
        counts = {"grid_points": len(runs), "trial_count": len(runs)}
        owned = {"project_id": projects.get(number)}
        session.add(Experiment(id=number, name="drawn", spec={}, state=state, **counts, **owned))
        session.flush()
        if tags:
            session.add(Tag(experiment_id=number, name="all"))
        trials, results = list[Trial](), list[Result]()
        for run in runs:
            trial_id += 1
            training = {} if run.lr is None else {"training": {"lr": run.lr}}
            trial = Trial(
                id=trial_id,
                experiment_id=number,
                number=trial_id,
                fingerprint=f"{run.cell}-{run.seed}",
                cell=f"cell {run.cell}",
                config={"rank": run.cell, "seed": run.seed, **training},
                dataset=run.dataset,
                model=run.model,
                layer="dense",
                rank=run.cell,
                lambda_ort=0.0,
                constraint="none",
                seed=run.seed,
                epochs=1,
                state=TrialState.SUCCEEDED if run.protocol else TrialState.FAILED,
            )
            trials.append(trial)
            if run.protocol:
                values = trial_result(run.accuracy, loss=run.loss, parameters=10**9 + run.cell, layers=[])
                values["robust_accuracy"] = run.robust
                values |= {"mce": run.error, "evaluation": {"corruptions": {"baseline_sha256": run.baseline}}}
                reasons = {} if run.valid else {"valid": False, "violations": ["certified, and broken"]}
                results.append(Result(trial_id=trial_id, protocol=run.protocol, fence=1, **(values | reasons)))
        session.add_all(trials)
        session.flush()
        session.add_all(results)
        cell_scores.refresh_cells(session, {(run.dataset, f"cell {run.cell}") for run in runs if run.protocol})
        posted = {(run.dataset, f"cell {run.cell}") for run in runs}
        cell_scores.recount(session, session.get_one(Experiment, number), posted)  # as posting trials does
    session.flush()


def brute_force(experiments: list[list[Run]], metric: str, only: int | None) -> tuple[dict[str, Any], list[str]]:
    """Board -> rows (cell, trials, seeds, mean, std, min, max, all values) in order, and the holes."""
    runs = [run for number, runs in enumerate(experiments, 1) if only in (None, number) for run in runs]
    cells = list(dict.fromkeys(run.cell for run in runs))
    boards: dict[str, Any] = {}
    holes = []
    for cell in cells:
        mine = [run for run in runs if run.cell == cell]
        newest = {(run.protocol, run.seed): run for run in mine if run.protocol}  # later ones replace
        trials = len({run.seed for run in mine})
        if not newest:
            holes.append(f"cell {cell}")
        for protocol in sorted({protocol for protocol, _ in newest if protocol}):
            values = [getattr(run, metric) for (name, _), run in newest.items() if name == protocol]
            std = statistics.stdev(values) if len(values) > 1 else None
            row = (f"cell {cell}", trials, len(values), statistics.mean(values), std, min(values), max(values), values)
            boards.setdefault(protocol, []).append(row)
    for rows in boards.values():
        rows.sort(key=lambda row: row[3], reverse=metric == "accuracy")
        rows.sort(key=lambda row: row[1] != row[2])  # complete ones first
    return boards, holes


exact = st.integers(0, 64).map(lambda k: k / 64)  # sums of these are exact, so equal means are equal
free = st.floats(1e-3, 1e3)


@st.composite
def drawn_experiments(draw: st.DrawFn) -> list[list[Run]]:
    keys = st.tuples(st.integers(0, 3), st.integers(0, 3))
    experiments = []
    for _ in range(draw(st.integers(1, 3))):
        cells = draw(st.lists(keys, min_size=1, max_size=8, unique=True))
        protocols = st.sampled_from(["a", "a", "b", None])
        experiments.append([Run(*key, draw(protocols), draw(exact), draw(free)) for key in cells])
    return experiments


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    """Nothing of it is ever committed."""
    with Session(database.writer) as session:
        yield session


def ask(session: Session, metric: str = "accuracy", only: int | None = None, **question: Any) -> Leaderboard:
    filters = question.pop("filters", Filters(experiment_id=only))
    return leaderboard(
        session, Question(dataset="digits", metric=Metric(metric), filters=filters, **question), references
    )


@contextmanager
def statements(session: Session) -> Iterator[list[str]]:
    """What the session sends to its database meanwhile."""
    sent: list[str] = []
    engine = session.connection().engine

    def note(*about: Any) -> None:
        sent.append(about[2])

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


class TestBruteForce:
    @pytest.mark.parametrize("metric", ["accuracy", "loss"])
    @examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(experiments=drawn_experiments(), by=st.sampled_from(["scores", "scores", "tag", "experiment"]))
    def test_agrees(
        self, session: Session, trial_result: Make, metric: str, experiments: list[list[Run]], by: str
    ) -> None:
        store_runs(session, experiments, trial_result, tags=True)
        only = 1 if by == "experiment" else None
        filters = Filters(experiment_id=only, tag="all" if by == "tag" else None)
        found = ask(session, metric, filters=filters, pivot=("layer", "model"))  # the same of all
        session.rollback()
        session.expunge_all()
        boards, holes = brute_force(experiments, metric, only)
        assert {board.protocol for board in found.boards} == set(boards)
        assert [hole.cell for hole in found.holes] == holes
        assert found.hole_count == len(holes)
        for board in found.boards:
            assert board.record == {"name": board.protocol}
            expected = boards[board.protocol]
            assert board.total == len(expected)
            means = [row.metrics[metric]["mean"] for row in board.rows]
            assert means == pytest.approx([row[3] for row in expected], rel=1e-12)
            if metric == "accuracy":  # exact means: equals share a place
                ranked = [(row.complete, row.metrics[metric]["mean"]) for row in board.rows]
                places = [1 + sum(other > mine for other in ranked) for mine in ranked]
                assert [row.place for row in board.rows] == places
            by_cell = {row[0]: row for row in expected}
            assert {row.cell for row in board.rows} == set(by_cell)
            for row in board.rows:
                _, trials, seeds, _, std, low, high, _ = by_cell[row.cell]
                assert (row.trials, row.seeds, row.complete) == (trials, seeds, trials == seeds)
                assert len(row.missing_seeds) == trials - seeds
                spread = row.metrics[metric]
                assert (spread["seeds"], spread["min"], spread["max"]) == (seeds, low, high)
                assert (spread["std"] is None) == (std is None)
                if spread["std"] is not None:
                    assert spread["std"] == pytest.approx(std, rel=1e-9, abs=1e-12)
            assert board.pivot is not None
            ((together,),) = board.pivot.cells
            assert together is not None
            values = [value for row in expected for value in row[-1]]
            assert (together["cells"], together["seeds"]) == (len(expected), len(values))
            assert together["mean"] == pytest.approx(statistics.mean(values), rel=1e-12)
            std = statistics.stdev(values) if len(values) > 1 else None
            assert together["std"] == (None if std is None else pytest.approx(std, rel=1e-9, abs=1e-12))
        sizes = [len(board.rows) for board in found.boards]
        assert sizes == sorted(sizes, reverse=True)


@pytest.fixture
def rank(session: Session, trial_result: Make) -> Callable[..., Leaderboard]:
    def rank(*experiments: list[Run], **question: Any) -> Leaderboard:
        store_runs(session, list(experiments), trial_result, tags=True)
        return ask(session, **question)

    return rank


Rank = Callable[..., Leaderboard]


def only_board(found: Leaderboard) -> Board:
    (board,) = found.boards
    return board


def only_row(found: Leaderboard) -> Row:
    (row,) = only_board(found).rows
    return row


class TestRules:
    def test_nothing(self, session: Session) -> None:
        assert ask(session) == Leaderboard([], [], 0, [], 0)

    def test_a_row_says_its_cell_without_the_seed(self, rank: Rank) -> None:
        row = only_row(rank([Run(3, 0), Run(3, 7)]))
        assert (row.cell, row.config, row.seeds) == ("cell 3", {"rank": 3}, 2)
        assert row.metrics["parameters"]["mean"] == 10**9 + 3
        assert "robust_accuracy" not in row.metrics  # nobody asked for it

    @pytest.mark.parametrize("filters", [Filters(), Filters(tag="all")], ids=["scores", "added up"])
    def test_shown_metrics_are_to_the_last_digit_those_of_all(
        self, session: Session, trial_result: Make, filters: Filters
    ) -> None:
        seeds = [Run(cell, seed, accuracy=1 / (3 + seed), loss=math.pi / 7**seed) for cell in (0, 1) for seed in (0, 1)]
        store_runs(session, [seeds], trial_result, tags=True)
        every = only_board(ask(session)).rows
        assert len(every[0].metrics) > 10
        chosen = only_board(ask(session, columns=(Metric.LOSS, Metric.ROBUST_ACCURACY), filters=filters)).rows
        assert [list(row.metrics) for row in chosen] == [["accuracy", "loss"]] * 2  # none has robust_accuracy
        for row, whole in zip(chosen, every, strict=True):
            assert row.metrics == {name: whole.metrics[name] for name in ("accuracy", "loss")}

    def test_another_board_costs_one_statement_more(self, session: Session, trial_result: Make) -> None:
        runs = [Run(0, 0, "a"), Run(1, 0, "a"), Run(1, 1, None), Run(0, 1, "b"), Run(2, 0, "b"), Run(2, 1, "b")]
        store_runs(session, [runs], trial_result)
        with statements(session) as of_one:
            assert len(ask(session, filters=Filters(protocol="a")).boards) == 1
        with statements(session) as of_two:
            assert len(ask(session).boards) == 2
        assert len(of_two) == len(of_one) + 1  # the order of its rows; whole rows and their trials are read together

    def test_a_front_costs_two_statements_more(self, session: Session, trial_result: Make) -> None:
        store_runs(session, [[Run(0, 0, accuracy=0.5, loss=2.0), Run(1, 0, accuracy=0.75, loss=3.0)]], trial_result)
        with statements(session) as plain:
            ask(session)
        with statements(session) as with_front:
            found = only_board(ask(session, front=(Metric.ACCURACY, Metric.LOSS, Metric.ECE)))
        assert found.front == ["cell 1", "cell 0"]
        assert len(with_front) == len(plain) + 2  # all metrics of all rows, and who is on it

    def test_a_trial_in_two_experiments_counts_once_with_its_newest_result(self, rank: Rank) -> None:
        row = only_row(rank([Run(0, 0, accuracy=0.25)], [Run(0, 0, accuracy=0.75)]))
        assert (row.trials, row.seeds, row.complete) == (1, 1, True)
        assert row.metrics["accuracy"]["mean"] == 0.75

    def test_a_later_failure_does_not_take_a_result_away(self, rank: Rank) -> None:
        row = only_row(rank([Run(0, 0, accuracy=0.25)], [Run(0, 0, None)]))
        assert (row.seeds, row.complete, row.metrics["accuracy"]["mean"]) == (1, True, 0.25)

    def test_protocols_are_never_mixed(self, rank: Rank, session: Session) -> None:
        found = rank([Run(0, 0, "a", 0.5, robust=0.5), Run(0, 1, "b", 1.0, robust=0.5), Run(1, 0, "b", 0.25)])
        means = {board.protocol: [row.metrics["accuracy"]["mean"] for row in board.rows] for board in found.boards}
        assert means == {"b": [0.25, 1.0], "a": [0.5]}  # that of 1.0 lacks a seed
        assert list(means) == ["b", "a"]  # the board with more rows first
        boards = ask(session, "robust_accuracy").boards  # or with more cells, where it has as many rows
        assert [(board.protocol, board.total, board.unmeasured) for board in boards] == [("b", 1, 1), ("a", 1, 0)]

    def test_a_cell_with_some_results_is_incomplete_and_one_without_is_a_hole(self, rank: Rank) -> None:
        found = rank([Run(0, 0), Run(0, 1, None), Run(1, 0, None), Run(1, 1, None)])
        row = only_row(found)
        assert (row.trials, row.seeds, row.complete) == (2, 1, False)
        assert row.missing == [Missing(2, 1, "failed")]
        assert found.holes == [Hole("cell 1", {"rank": 1}, 2, [Missing(3, 0, "failed"), Missing(4, 1, "failed")])]

    def test_equal_means_share_a_place(self, rank: Rank) -> None:
        accuracies = [0.5, 0.75, 0.5, 0.25]
        rows = only_board(rank([Run(cell, 0, "a", value) for cell, value in enumerate(accuracies)])).rows
        places = sorted((row.place, row.cell) for row in rows)
        assert places == [(1, "cell 1"), (2, "cell 0"), (2, "cell 2"), (4, "cell 3")]

    def test_one_seed_has_no_deviation(self, rank: Rank) -> None:
        assert only_row(rank([Run(0, 0)])).metrics["accuracy"]["std"] is None

    @pytest.mark.parametrize("value", [0.1, 1 / 3, 0.975])
    def test_equal_values_do_not_deviate(self, rank: Rank, value: float) -> None:
        row = only_row(rank([Run(0, seed, "a", value, value) for seed in range(7)]))
        for name in ("accuracy", "loss"):
            spread = row.metrics[name]
            assert spread["std"] is not None
            assert spread["std"] < 1e-15
            assert (spread["min"], spread["max"]) == (value, value)

    @pytest.mark.parametrize("value", [0.5, 1.5e308])
    def test_places_of_equal_values_do_not_deviate(self, rank: Rank, value: float) -> None:
        runs = [Run(cell, seed, loss=value) for cell in range(5) for seed in (0, 1)]
        board = only_board(rank(runs, metric="loss", pivot=("layer", "model")))
        assert board.pivot is not None
        ((together,),) = board.pivot.cells
        assert together is not None
        assert (together["mean"], together["std"], together["seeds"]) == (value, 0.0, 10)

    def test_columns_are_chosen_and_hidden_on_every_board(self, rank: Rank, session: Session) -> None:
        """And on the whole, where boards differ in more than the rows of each."""
        rank([Run(cell, 0, protocol, lr=0.5 if protocol == "a" else 0.25) for cell, protocol in enumerate("aabb")])

        def shown(*expected: str, **asked: Any) -> list[str]:
            found = ask(session, **asked)
            for row in (row for board in found.boards for row in board.rows):
                assert row.fields == {path: value_of(row.config, path) for path in expected}
            return [column.field for column in found.columns]

        assert shown("rank") == ["rank", "training.lr"]
        assert shown(hidden=("rank",)) == ["training.lr"]
        assert shown("training.lr", fields=("training.lr",)) == ["training.lr"]
        assert [board.common["training.lr"] for board in ask(session).boards] == [0.5, 0.25]

    @pytest.mark.parametrize(
        "other", [[Run(1, 0, None)], [Run(1, 0, accuracy=0.25), Run(1, 1, valid=False)]], ids=["a hole", "invalid"]
    )
    def test_columns_tell_also_what_no_row_shows(self, rank: Rank, other: list[Run]) -> None:
        found = rank([Run(0, 0), *other], limit=1)
        assert only_board(found).columns == []
        assert [column.field for column in found.columns] == ["rank"]

    def test_a_small_spread_keeps_its_digits(self, rank: Rank) -> None:
        """A sum of squares minus a squared mean would lose all of them."""
        losses = [1000 + k * 1e-6 for k in range(4)]
        spread = only_row(rank([Run(0, seed, "a", 0.5, loss) for seed, loss in enumerate(losses)])).metrics["loss"]
        assert spread["std"] == pytest.approx(statistics.stdev(losses), rel=1e-6)
        assert math.isclose(spread["std"] or 0, 1e-6 * math.sqrt(5 / 3), rel_tol=1e-5)

    def test_every_metric_knows_its_direction(self, session: Session, trial_result: Make) -> None:
        store_runs(session, [[Run(0, 0, None), Run(1, 0, None)]], trial_result)
        for trial_id, value in ((1, 1), (2, 0)):
            values = trial_result(0.5) | {metric.value: value for metric in Metric}
            session.add(Result(trial_id=trial_id, protocol="a", fence=1, **values))
            cell_scores.refresh_cells(session, [("digits", f"cell {trial_id - 1}")])
        for metric in Metric:
            more = "accuracy" in metric or "certified" in metric or metric == "compression"
            assert metric.more_is_better == more
            for only in (None, 1):
                first = only_board(ask(session, metric, only)).rows[0]
                assert first.cell == ("cell 0" if more else "cell 1"), metric

    def test_one_experiment_alone(self, rank: Rank) -> None:
        found = rank([Run(0, 0, "a", 0.25), Run(0, 1, "a", 0.75)], [Run(0, 0, "a", 0.5), Run(1, 0, None)], only=2)
        row = only_row(found)
        assert (row.trials, row.seeds, row.metrics["accuracy"]["mean"]) == (1, 1, 0.5)
        assert [hole.cell for hole in found.holes] == ["cell 1"]

    def test_other_data_sets_are_elsewhere(self, rank: Rank) -> None:
        found = rank([Run(0, 0), Run(1, 0, dataset="cifar10"), Run(2, 0, None, dataset="cifar10")])
        assert only_row(found).cell == "cell 0"
        assert found.holes == []

    def test_archived_experiments_do_not_count(self, session: Session, rank: Rank) -> None:
        rank([Run(0, 0, "a", 0.25), Run(1, 0)], [Run(0, 0, "a", 0.75)])
        session.get_one(Experiment, 2).archived_at = now()
        cell_scores.refresh_experiment(session, 2)
        rows = only_board(ask(session)).rows
        assert [(row.cell, row.metrics["accuracy"]["mean"]) for row in rows] == [("cell 1", 0.5), ("cell 0", 0.25)]
        session.get_one(Experiment, 1).archived_at = now()
        cell_scores.refresh_experiment(session, 1)
        assert ask(session) == Leaderboard([], [], 0, [], 0)
        session.get_one(Experiment, 2).archived_at = None
        cell_scores.refresh_experiment(session, 2)
        assert only_row(ask(session)).metrics["accuracy"]["mean"] == 0.75

    def test_an_invalid_result_is_listed_and_ranks_nowhere(self, rank: Rank) -> None:
        found = rank([Run(0, 0, accuracy=0.25), Run(0, 1, accuracy=1.0, valid=False), Run(1, 0, valid=False)])
        row = only_row(found)
        assert (row.metrics["accuracy"]["mean"], row.seeds, row.trials, row.missing_seeds) == (0.25, 1, 2, [1])
        assert [(bad.trial_id, bad.reasons) for bad in found.invalid] == [
            (2, ["certified, and broken"]),
            (3, ["certified, and broken"]),
        ]
        assert found.invalid_count == 2
        assert [hole.cell for hole in found.holes] == ["cell 1"]

    def test_boards_apart_say_why(self, session: Session, rank: Rank) -> None:
        rank([Run(0, 0), Run(1, 0)], [Run(0, 0, "b")])
        records: dict[str, dict[str, JsonValue]] = {
            "a": {"split": {"seed": 0}, "eps": 0.5},
            "b": {"split": {"seed": 1}, "eps": 0.5, "weights": "last"},
        }
        for name, record in records.items():
            session.get_one(Protocol, name).record = record
        session.flush()
        first, second = ask(session).boards
        assert first.apart == []
        assert [str(d) for d in second.apart] == ["split.seed: 1 here, 0 there", "weights: last here, none there"]


MODES = pytest.mark.parametrize("tag", [None, "all"])  # from scores, and added up


class TestDataSets:
    def test_they_are_listed_with_boards_and_cells_for_everyone_and_for_each_project(
        self, session: Session, trial_result: Make
    ) -> None:
        experiments = [
            [Run(0, 0, "a"), Run(0, 1, "a"), Run(1, 0, "b"), Run(2, 0, None), Run(6, 0, "a", dataset="svhn")],
            [Run(3, 0, "a"), Run(7, 0, None, dataset="cifar10")],
            [Run(8, 0, None, dataset="mnist")],
            [Run(4, 0, CORRUPTED, error=0.5, baseline="x"), Run(5, 0, CORRUPTED, error=0.5, baseline="y")],
        ]
        store_runs(session, experiments, trial_result, projects={1: 1, 2: 2, 3: 2})
        listed = {scope: [astuple(one) for one in measured_datasets(session, scope)] for scope in (0, 1, 2, 3)}
        assert listed == {
            0: [("cifar10", 0, 0), ("digits", 3, 5), ("mnist", 0, 0), ("svhn", 1, 1)],
            1: [("digits", 2, 2), ("svhn", 1, 1)],
            2: [("cifar10", 0, 0), ("digits", 1, 1), ("mnist", 0, 0)],
            3: [],
        }
        tried = {scope: list(tried_datasets(session, scope)) for scope in (0, 1, 2, 3)}
        assert tried == {scope: [name for name, _, _ in found] for scope, found in listed.items()}


class TestCorruptionBaselines:
    """Three cells under one protocol: errors against x, against y, and none."""

    RUNS = (
        Run(0, 0, CORRUPTED, accuracy=0.25, error=0.5, baseline="x"),
        Run(0, 1, CORRUPTED, accuracy=0.75, error=0.75, baseline="x"),
        Run(1, 0, CORRUPTED, accuracy=0.75, error=0.25, baseline="y"),
        Run(2, 0, CORRUPTED, accuracy=1.0),
    )

    @MODES
    def test_other_metrics_do_not_know_of_them(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank(list(self.RUNS))
        board = only_board(ask(session, filters=Filters(tag=tag), columns=(Metric.ECE,)))
        assert (board.protocol, board.apart) == (CORRUPTED, [])
        assert [(row.cell, row.seeds, row.missing) for row in board.rows] == [
            ("cell 2", 1, []),
            ("cell 1", 1, []),
            ("cell 0", 2, []),
        ]
        assert board.rows[-1].metrics["accuracy"]["mean"] == 0.5

    @MODES
    def test_errors_to_other_baselines_stand_on_other_boards(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        rank(list(self.RUNS))
        boards = ask(session, "mce", filters=Filters(tag=tag)).boards
        ranked = {board.protocol: [(r.cell, r.metrics["mce"]["mean"]) for r in board.rows] for board in boards}
        assert sorted(ranked.values()) == [[], [("cell 0", 0.625)], [("cell 1", 0.25)]]
        assert ranked[CORRUPTED] == []
        assert [board.unmeasured for board in boards if board.protocol == CORRUPTED] == [3]
        named = [baseline_of(board.record) for board in boards]
        assert sorted(map(str, named)) == ["None", "x", "y"]
        for board in boards:
            assert all(not row.missing for row in board.rows)
            (alone,) = ask(session, filters=Filters(tag=tag, protocol=board.protocol)).boards
            assert alone.protocol == board.protocol
            # On a board of a baseline all numbers of its rows are seen, on that of the protocol all but the error.
            assert all(("mce" in row.metrics) == (board.protocol != CORRUPTED) for row in alone.rows)
            assert all("accuracy" in row.metrics for row in alone.rows)

    @MODES
    def test_a_matrix_and_an_order_have_the_same_rows(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank(list(self.RUNS))
        for board in ask(session, "mce", filters=Filters(tag=tag)).boards:
            same = Filters(tag=tag, protocol=board.protocol)
            pivot = ask(session, "mce", filters=same, pivot=("rank", "layer")).boards[0].pivot
            seeds = (
                0 if pivot is None else sum(cell["seeds"] for row in pivot.cells for cell in row if cell is not None)
            )
            assert seeds == sum(row.seeds for row in board.rows)
            ordered = ask(session, "mce", filters=same, sort="rank").boards[0]
            assert sorted(row.cell for row in ordered.rows) == sorted(row.cell for row in board.rows)

    @MODES
    def test_of_a_cell_only_seeds_with_one_baseline_are_averaged(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        other = Run(0, 1, CORRUPTED, accuracy=0.75, error=0.75, baseline="y")
        rank([self.RUNS[0], other])
        rows = [row for board in ask(session, "mce", filters=Filters(tag=tag)).boards for row in board.rows]
        found = sorted((row.metrics["mce"]["mean"], row.seeds, row.trials) for row in rows)
        assert found == [(0.5, 1, 2), (0.75, 1, 2)]
        assert {(row.missing[0].seed, row.missing[0].state) for row in rows} == {
            (0, "other_protocol"),
            (1, "other_protocol"),
        }
        assert only_row(ask(session, filters=Filters(tag=tag), columns=(Metric.ECE,))).complete

    @MODES
    def test_one_baseline_everywhere_is_one_board(self, rank: Rank, session: Session, tag: str | None) -> None:
        """What has all cells of the protocol's board, and more numbers, takes its place for who sees all metrics."""
        rank([replace(run, error=0.5, baseline="x") for run in self.RUNS])
        for metric in ("accuracy", "mce"):
            board = only_board(ask(session, metric, filters=Filters(tag=tag)))
            assert board.total == 3
            assert all({"mce", "accuracy"} <= set(row.metrics) for row in board.rows)
        plot = scatter_plot(session, Question(dataset="digits", filters=Filters(tag=tag)), Metric.MCE, Metric.ACCURACY)
        assert plot is not None
        assert plot.cells == 3
        assert [(found.boards, found.cells) for found in measured_datasets(session, 0)] == [(1, 3)]

    @MODES
    def test_one_baseline_of_all_cells_is_enough_whatever_others_some_have(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        pairs = [(0, "y"), (0, "x"), (1, "x"), (1, "z")]
        rank([Run(cell, seed, CORRUPTED, error=0.5, baseline=one) for seed, (cell, one) in enumerate(pairs)])
        boards = ask(session, "mce", filters=Filters(tag=tag)).boards
        assert sorted((str(baseline_of(board.record)), board.total) for board in boards) == [
            ("x", 2),
            ("y", 1),
            ("z", 1),
        ]

    def test_scores_made_anew_are_the_same(self, rank: Rank, session: Session) -> None:
        rank(list(self.RUNS))
        before = [(b.protocol, [(row.cell, row.metrics) for row in b.rows]) for b in ask(session, "mce").boards]
        cell_scores.refresh_all(session)
        session.expire_all()
        assert [(b.protocol, [(r.cell, r.metrics) for r in b.rows]) for b in ask(session, "mce").boards] == before


class TestQuestions:
    @MODES
    def test_pages_are_the_board_in_pieces(self, rank: Rank, session: Session, tag: str | None) -> None:
        accuracies = [0.5, 0.75, 0.5, 0.25, 0.5, 1.0, 0.0]
        whole = only_board(rank([Run(cell, 0, "a", value) for cell, value in enumerate(accuracies)])).rows
        filters, rows, after, pages = Filters(protocol="a", tag=tag), [], None, 0
        while pages == 0 or after is not None:
            board = only_board(ask(session, filters=filters, limit=2, after=after))
            assert board.total == len(accuracies)
            rows += board.rows
            after, pages = board.next, pages + 1
        assert pages == 4
        assert [row.place for row in rows] == [1, 2, 3, 3, 3, 6, 7]
        assert [row.cell for row in rows] == [row.cell for row in whole]

    ORDERS: tuple[dict[str, Any], ...] = (
        {"sort": "model"},
        {"sort": "-rank"},
        {"group_by": "rank"},
        {"group_by": "model"},
        {"group_by": "rank", "sort": "-rank"},
        {"group_by": "rank", "sort": "model"},
    )

    def test_other_orders_have_pages_too(self, rank: Rank, session: Session) -> None:
        """Of rows that share places, and are few in some groups and many in others."""
        accuracies = [0.5, 0.75, 0.5, 0.25, 0.5, 1.0, 0.0, 0.75]
        rank([Run(cell, 0, "a", value, model="abc"[cell % 3]) for cell, value in enumerate(accuracies)])
        for tag, order in itertools.product((None, "all"), self.ORDERS):
            whole = only_board(ask(session, filters=Filters(tag=tag), **order))
            assert whole.next is None
            for limit in (1, 3):
                filters, rows, after, pages = Filters(protocol="a", tag=tag), [], None, 0
                while pages == 0 or after is not None:
                    board = only_board(ask(session, filters=filters, limit=limit, after=after, **order))
                    assert board.total == whole.total
                    rows += board.rows
                    after, pages = board.next, pages + 1
                assert pages == math.ceil(len(whole.rows) / limit)
                assert [(row.place, row.cell, row.group) for row in rows] == [
                    (row.place, row.cell, row.group) for row in whole.rows
                ], (tag, order, limit)

    @MODES
    @pytest.mark.parametrize("order", [{"sort": "rank"}, {"group_by": "rank"}])
    def test_a_page_after_a_row_that_has_changed_is_refused(
        self, rank: Rank, session: Session, tag: str | None, order: dict[str, Any]
    ) -> None:
        """Where it stood before, and so what follows it, is not known any more."""
        rank([Run(cell, 0, "a", 0.5) for cell in range(4)])
        filters = Filters(protocol="a", tag=tag)
        after = only_board(ask(session, filters=filters, limit=2, **order)).next
        assert after is not None
        for changed in (after._replace(mean=0.625), after._replace(mean=0.0), after._replace(tie=after.tie + 1)):
            with pytest.raises(QueryError, match="changed since; begin with the first page"):
                ask(session, filters=filters, limit=2, after=changed, **order)

    def test_equal_means_stand_in_one_order_however_they_are_asked_for(self, rank: Rank, session: Session) -> None:
        """Their cells' order: neither that of rows, which were stored in another order here, nor that of trials."""
        again = [Run(cell, 1) for cell in (3, 0, 5, 1)]
        stored = only_board(rank([Run(cell, 0) for cell in range(8)], again, front=(Metric.ACCURACY, Metric.LOSS)))
        cells = sorted((f"cell {cell}" for cell in range(8)), key=tie_of, reverse=True)
        assert [row.cell for row in stored.rows] == stored.front == cells != sorted(cells)
        for filters in (Filters(tag="all"), Filters(model="small-cnn"), Filters(tag="all", protocol="a")):
            board = only_board(ask(session, filters=filters, front=(Metric.ACCURACY, Metric.LOSS)))
            assert [row.cell for row in board.rows] == board.front == cells
            by_loss = only_board(ask(session, Metric.LOSS, filters=filters, group_by="rank"))
            assert [row.cell for row in by_loss.rows] == cells[::-1]

    def test_fronts_of_few_values_and_many_ties(self, rank: Rank, session: Session) -> None:
        source = random.Random(7)
        drawn = [(source.randrange(5) / 4, float(source.randrange(5))) for _ in range(40)]
        rank([Run(cell, 0, "a", *pair, model="ab"[cell % 2]) for cell, pair in enumerate(drawn)])
        points = {
            cell: {Metric.ACCURACY: -accuracy, Metric.LOSS: loss, Metric.PARAMETERS: cell}
            for cell, (accuracy, loss) in enumerate(drawn)
        }
        three = (Metric.ACCURACY, Metric.LOSS, Metric.PARAMETERS)
        for respects, model in itertools.product((*itertools.permutations(three, 2), three), (None, "a")):
            mine = [[point[m] for m in respects] for cell, point in points.items() if model is None or cell % 2 == 0]
            cells = [cell for cell in points if model is None or cell % 2 == 0]
            expected = {
                f"cell {cell}"
                for cell, here in zip(cells, mine, strict=True)
                if not any(there != here and all(a <= b for a, b in zip(there, here, strict=True)) for there in mine)
            }
            for tag in (None, "all"):
                board = only_board(ask(session, filters=Filters(model=model, tag=tag), front=respects))
                assert len(board.front or ()) == len(expected), (respects, model, tag)
                assert set(board.front or ()) == expected == {row.cell for row in board.rows if row.on_front}

    def test_a_cursor_serves_any_choice_of_the_same_trials(self, rank: Rank, session: Session) -> None:
        rank([Run(cell, 0) for cell in range(4)])
        first = only_board(ask(session, limit=1))
        second = only_board(ask(session, filters=Filters(tag="all", protocol="a"), limit=1, after=first.next))
        third = only_board(ask(session, filters=Filters(protocol="a"), limit=2, after=second.next))
        shown = [*first.rows, *second.rows, *third.rows]
        assert [row.cell for row in shown] == [row.cell for row in only_board(ask(session)).rows]

    FILTERS: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({"model": "vgg11"}, [0, 1]),
        ({"layer": "tt"}, []),
        ({"constraint": "none"}, [0, 1, 2]),
        ({"rank": 2.0}, [2]),
        ({"rank": "none"}, []),
        ({"min_seeds": 2}, [1]),
        ({"protocol": "b"}, []),
    )

    def test_filters(self, rank: Rank, session: Session) -> None:
        rank([Run(0, 0, model="vgg11"), Run(1, 0, model="vgg11"), Run(1, 1, model="vgg11"), Run(2, 0)])
        for tag, (filters, cells) in itertools.product((None, "all"), self.FILTERS):
            boards = ask(session, filters=Filters(tag=tag, **filters)).boards
            found = sorted(row.cell for board in boards for row in board.rows)
            assert found == [f"cell {cell}" for cell in cells], (tag, filters)
            assert sum(board.total for board in boards) == len(cells)

    def test_an_unknown_tag_has_nothing(self, rank: Rank, session: Session) -> None:
        rank([Run(0, 0)])
        assert ask(session, filters=Filters(tag="none")).boards == []

    @MODES
    def test_groups_show_their_best_cell(self, rank: Rank, session: Session, tag: str | None) -> None:
        runs = [Run(0, 0, "a", 0.5, model="vgg11"), Run(1, 0, "a", 0.75, model="vgg11"), Run(2, 0, "a", 0.625)]
        rank(runs)
        found = ask(session, filters=Filters(tag=tag), group_by="model")
        board = only_board(found)
        assert [(row.place, row.cell, row.group) for row in board.rows] == [
            (1, "cell 1", Group("model", "vgg11", 2)),
            (2, "cell 2", Group("model", "small-cnn", 1)),
        ]
        assert board.total == 2
        in_order = only_board(ask(session, filters=Filters(tag=tag), group_by="model", sort="model"))
        assert [(row.place, row.cell) for row in in_order.rows] == [(2, "cell 2"), (1, "cell 1")]
        notes = board_sheets(found, "digits", Metric.ACCURACY)[0].notes
        assert "Each row is the best cell of a value of model: vgg11 (of 2), small-cnn (of 1)." in notes

    ASKED: tuple[tuple[dict[str, Any], list[str]], ...] = (
        ({}, []),
        ({"sort": "-rank"}, []),
        ({"group_by": "model"}, []),
        ({}, ["rank>=4"]),
        ({}, ["training.lr<=0.5"]),
        ({}, ["rank<20", "training.lr<=0.5"]),
        ({"metric": "robust_accuracy"}, ["training.lr<=0.5"]),
    )

    @pytest.mark.slow
    def test_bold_is_of_the_board_and_not_of_a_page(
        self, rank: Rank, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether other rows are walked, read at once, or a page is compared with all."""
        rng = random.Random(5)
        runs = []
        for cell in range(24):
            robust = None if cell % 3 == 0 else 1 - cell / 64
            for seed in range(3):
                draw: dict[str, Any] = {"accuracy": cell / 32 + rng.random() / 16, "loss": rng.random() * (1 + cell)}
                draw["robust"] = robust and robust - rng.random() / 16
                runs.append(Run(cell, seed, None if cell > 20 and seed else "a", model=f"vgg{cell % 7}", **draw))
        rank(runs)
        metrics = (Metric.ACCURACY, Metric.LOSS, Metric.ROBUST_ACCURACY)
        for tag, (asked, where) in itertools.product((None, "all"), self.ASKED):
            ours = partial(
                ask,
                session,
                filters=Filters(tag=tag, protocol="a", where=tuple(map(condition, where))),
                columns=metrics,
                **asked,
            )
            whole = only_board(ours())
            assert {name for row in whole.rows for name in row.best} == {"accuracy", "loss", "robust_accuracy"}
            for few, every in ((0, 0), (1000, 0), (1000, 1000)):
                monkeypatch.setattr(stored_rivals, "_FEW", few)
                monkeypatch.setattr(source, "ALL", every)
                board = only_board(ours(limit=7))
                rows = [*board.rows]
                while board.next is not None:
                    board = only_board(ours(limit=7, after=board.next))
                    rows += board.rows
                assert len(rows) == whole.total
                found = {row.cell: row.best for row in rows}
                assert found == {row.cell: row.best for row in whole.rows}, (tag, asked, where, few, every)

    def test_bold_is_of_the_board_where_errors_differ(self, rank: Rank, session: Session) -> None:
        """Neither the ten that lead nor the last two tell from which row on they are beaten."""
        spreads = [0.25] * 12 + [1 / 1024] + [0.0] * 6 + [0.25] * 2
        runs = [
            Run(cell, seed, accuracy=(40 - cell) / 64 + spread * (seed - 1))
            for cell, spread in enumerate(spreads)
            for seed in range(3)
        ]
        rank(runs)
        expected = {f"cell {cell}" for cell in (*range(13), 19, 20)}
        orders: tuple[dict[str, Any], ...] = ({}, {"sort": "rank"}, {"group_by": "rank"})
        for tag, asked in itertools.product((None, "all"), orders):
            filters = Filters(tag=tag, protocol="a")
            whole = only_board(ask(session, filters=filters, **asked))
            assert {row.cell for row in whole.rows if "accuracy" in row.best} == expected, (tag, asked)
            board = only_board(ask(session, filters=filters, limit=4, **asked))
            rows = [*board.rows]
            while board.next is not None:
                board = only_board(ask(session, filters=filters, limit=4, after=board.next, **asked))
                rows += board.rows
            assert {row.cell: row.best for row in rows} == {row.cell: row.best for row in whole.rows}, (tag, asked)

    def test_bold_is_of_those_asked_for_that_neither_lead_nor_end_the_board(
        self, rank: Rank, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Twice as many of the board's ends are walked as would do if they were everywhere: none of them is there."""
        monkeypatch.setattr(stored_rivals, "_FEW", 0)
        monkeypatch.setattr(source, "ALL", 0)
        rank(
            [
                Run(cell, seed, accuracy=(100 - cell) / 128 + seed / 4096, lr=1.0 if 50 <= cell < 90 else None)
                for cell in range(100)
                for seed in (0, 1)
            ]
        )
        filters = Filters(where=(condition("training.lr=1"),))
        first = only_board(ask(session, filters=filters, limit=20))
        second = only_board(ask(session, filters=filters, limit=20, after=first.next))
        assert [row.cell for row in first.rows if "accuracy" in row.best] == ["cell 50"]
        assert [row.cell for row in second.rows] == [f"cell {cell}" for cell in range(70, 90)]
        assert not any("accuracy" in row.best for row in second.rows)

    PAGED: tuple[dict[str, Any], ...] = ({}, {"group_by": "rank"})

    def test_as_many_rivals_are_read_as_may_lead_or_end_a_large_board(
        self, rank: Rank, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ten and two of each metric's order, all of few cells, and more where some of the rows are not meant."""
        runs = [
            Run(cell, seed, accuracy=(100 - cell) / 128 + seed / 4096, loss=cell * 37 % 100 + seed / 4)
            for cell in range(100)
            for seed in range(1 + cell % 2)
        ]
        rank(
            [
                replace(run, robust=run.cell if run.cell % 4 else None, lr=0.5 if 50 <= run.cell < 90 else 1.0)
                for run in runs
            ]
        )
        read: list[int] = []

        def counted(*asked: Any) -> list[tuple[Any, ...]]:
            rows = driver_rows(*asked)
            read.append(sum(len(row[2]) if type(row[2]) is list else 1 for row in rows))  # in arrays, or each
            return rows

        monkeypatch.setattr(stored_rivals, "driver_rows", counted)
        monkeypatch.setattr(source, "ALL", 0)
        expected: list[tuple[Metric, int, str, Callable[[int], bool], list[int]]] = [
            (Metric.ACCURACY, 1000, "", lambda cell: True, [24]),
            (Metric.ACCURACY, 49, "rank<50", lambda cell: cell < 50, [24]),
            (Metric.ACCURACY, 50, "rank<50", lambda cell: cell < 50, [100]),
            (Metric.ACCURACY, 39, "lr=1", lambda cell: not 50 <= cell < 90, [2 * (34 + 7)]),
            (Metric.ACCURACY, 60, "lr=1", lambda cell: not 50 <= cell < 90, [120]),
            (Metric.ACCURACY, 39, "lr<1", lambda cell: 50 <= cell < 90, [2 * (50 + 10), 2 * 100]),
            (Metric.ROBUST_ACCURACY, 1000, "", lambda cell: cell % 4 > 0, [36]),
            (Metric.ROBUST_ACCURACY, 49, "rank<50", lambda cell: cell < 50 and cell % 4 > 0, [36]),
            (Metric.ROBUST_ACCURACY, 50, "rank<50", lambda cell: cell < 50 and cell % 4 > 0, [3 * 37]),
        ]
        for ranked, few, where, is_meant, count in expected:
            monkeypatch.setattr(stored_rivals, "_FEW", few)
            read.clear()
            scores = StoredScores(
                session,
                Question(dataset="digits", metric=ranked, filters=Filters(where=(condition(where),) if where else ())),
            )
            (board,) = scores.boards(ranked)
            metrics = [Metric.ACCURACY, Metric.LOSS]
            found = scores.rivals(board, ranked, metrics)
            assert found.complete
            assert read == count, (ranked, few, where)
            for metric in metrics:
                means = [
                    statistics.mean(getattr(one, metric) for one in runs if one.cell == cell)
                    for cell in range(100)
                    if is_meant(cell)
                ]
                means.sort(reverse=metric.more_is_better)
                assert [one.mean for one in found.measured[metric]] == [*means[:10], *means[-2:]], (ranked, few, where)

    @MODES
    def test_incomplete_rows_are_no_match_for_complete_ones_of_another_page(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        runs = [Run(cell, seed, accuracy=cell / 8 + seed / 64) for cell in (0, 1) for seed in (0, 1)]
        runs += [Run(7, seed, "a" if seed < 2 else None, accuracy=7 / 8 + seed / 64) for seed in range(3)]
        runs += [Run(6, seed, "a" if seed < 2 else None, accuracy=1 / 8 + seed / 64) for seed in range(3)]
        rank(runs)
        for order in self.PAGED:
            asked = partial(ask, session, filters=Filters(tag=tag, protocol="a"), limit=2, **order)
            first = only_board(asked())
            assert ["accuracy" in row.best for row in first.rows] == [True, False]
            second = only_board(asked(after=first.next))
            assert [(row.complete, row.best) for row in second.rows] == [(False, [])] * 2

    @MODES
    def test_where_all_rows_are_incomplete_those_of_other_pages_are_compared(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        rank(
            [
                Run(cell, seed, "a" if seed < 2 else None, accuracy=cell / 8 + seed / 64)
                for cell in range(3)
                for seed in range(3)
            ]
        )
        for order in self.PAGED:
            asked = partial(ask, session, filters=Filters(tag=tag, protocol="a"), **order)
            first = only_board(asked(limit=1))
            second = only_board(asked(limit=2, after=first.next))
            whole = only_board(asked())
            for rows in ([*first.rows, *second.rows], whole.rows):
                assert ["accuracy" in row.best for row in rows] == [True, False, False]

    @MODES
    def test_a_row_that_lacks_the_metric_of_a_seed_is_no_match_for_complete_ones(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        """Whether or not it has all results, and on whatever page it is."""
        runs = [Run(cell, seed, robust=(8 * cell + seed) / 64) for cell in (0, 1) for seed in (0, 1)]
        runs += [Run(7, 0, robust=0.9), Run(7, 1), Run(6, 0, robust=0.8), Run(6, 1)]
        rank(runs)
        asked: dict[str, Any] = {"metric": "robust_accuracy", "filters": Filters(tag=tag)}
        found = ask(session, **asked)
        whole = only_board(found)
        assert [(row.cell, row.place, row.complete) for row in whole.rows] == [
            ("cell 1", 1, True),
            ("cell 0", 2, True),
            ("cell 7", 3, False),
            ("cell 6", 4, False),
        ]
        assert [row.best for row in whole.rows] == [["robust_accuracy"], [], [], []]
        sheet = board_sheets(found, "digits", Metric.ROBUST_ACCURACY)[0]
        assert "Rows that lack seeds (k of N) of what is ranked have places behind complete ones." in sheet.notes
        first = only_board(ask(session, **asked, limit=1))
        second = only_board(ask(session, **asked, limit=3, after=first.next))
        assert [row.best for row in [*first.rows, *second.rows]] == [row.best for row in whole.rows]

    @MODES
    def test_nor_of_complete_ones_that_have_none_of_what_is_judged(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        """Ranked by a temperature, which has no best: complete rows are there all the same."""
        runs = [Run(0, seed) for seed in (0, 1)]
        for cell in (1, 2, 3):
            runs += [Run(cell, seed, "a" if seed < 2 else None, robust=(cell * 8 + seed) / 64) for seed in range(3)]
        rank(runs)
        asked: dict[str, Any] = {
            "metric": "temperature",
            "columns": (Metric.ROBUST_ACCURACY,),
            "filters": Filters(tag=tag),
        }
        whole = only_board(ask(session, **asked))
        assert [(row.complete, row.best) for row in whole.rows] == [(True, []), *[(False, [])] * 3]
        asked["filters"] = Filters(tag=tag, protocol="a")
        first = only_board(ask(session, **asked, limit=1))
        second = only_board(ask(session, **asked, limit=3, after=first.next))
        assert [row.best for row in second.rows] == [[]] * 3

    @pytest.mark.parametrize("few", [0, 1000], ids=["walked", "read at once"])
    def test_bold_is_the_same_of_scores_and_added_up_where_few_cells_are_ranked(
        self, rank: Rank, session: Session, few: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stored_rivals, "_FEW", few)
        monkeypatch.setattr(source, "ALL", 30)
        spreads = [0.25] * 12 + [1 / 1024] + [0.0] * 6 + [0.25] * 2
        runs = [
            Run(cell, seed, robust=(40 - cell) / 64 + spread * (seed - 1))
            for cell, spread in enumerate(spreads)
            for seed in range(3)
        ]
        rank([*runs, *(Run(cell, 0) for cell in range(100, 120))])
        found = []
        for tag in (None, "all"):
            asked: dict[str, Any] = {"filters": Filters(tag=tag, protocol="a"), "columns": (Metric.ROBUST_ACCURACY,)}
            board = only_board(ask(session, "robust_accuracy", limit=4, **asked))
            rows = [*board.rows]
            while board.next is not None:
                board = only_board(ask(session, "robust_accuracy", limit=4, after=board.next, **asked))
                rows += board.rows
            found.append([(row.cell, row.best) for row in rows])
        assert len(found[0]) == len(spreads)
        assert found[0] == found[1]

    @MODES
    def test_trials_of_cells_without_a_result_are_counted_in_the_first_matrix_alone(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        cells = [Run(0, 0), Run(0, 1, "b"), Run(1, 0, valid=False), Run(2, 0, accuracy=0.75)]
        rank([*cells, Run(3, 0, model="vgg11"), Run(4, 0, None, model="vgg11")])
        found = []
        for board in ask(session, filters=Filters(tag=tag), pivot=("model", "layer")).boards:
            assert board.pivot is not None
            found.append([(one["std"], one["missing"]) for (one,) in board.pivot.cells if one is not None])
        spread = pytest.approx(0.125 * math.sqrt(2))
        assert found == [[(spread, {"with an invalid result": 1}), (None, {"failed": 1})], [(None, {})]]

    @MODES
    def test_a_matrix_of_the_largest_numbers(self, rank: Rank, session: Session, tag: str | None) -> None:
        """Their sum is beyond float64, as may be those of a deep network's bounds."""
        losses = [[1.7e308, 1.5e308], [1.6e308], [1.7976931348623157e308] * 3]
        rank([Run(cell, seed, loss=loss) for cell, mine in enumerate(losses) for seed, loss in enumerate(mine)])
        asked: dict[str, Any] = {"filters": Filters(tag=tag), "pivot": ("layer", "model")}
        pivot = only_board(ask(session, "loss", **asked)).pivot
        assert pivot is not None
        ((place,),) = pivot.cells
        assert place is not None
        values = [loss / 1e308 for mine in losses for loss in mine]
        assert place["mean"] == pytest.approx(statistics.mean(values) * 1e308, rel=1e-14)
        assert place["std"] == pytest.approx(statistics.stdev(values) * 1e308, rel=1e-12)

    @MODES
    def test_a_board_shown_whole_costs_no_rivals(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank([Run(cell, seed, accuracy=cell / 8) for cell in range(3) for seed in (0, 1)])
        counts = []
        for limit in (2, 3):
            with statements(session) as sent:
                ask(session, filters=Filters(tag=tag), limit=limit)
            counts.append(len(sent))
        assert counts[0] == counts[1] + 1

    @MODES
    def test_the_front_is_marked(self, rank: Rank, session: Session, tag: str | None) -> None:
        points = [(0.5, 1.0), (0.75, 2.0), (0.25, 3.0), (0.75, 2.0), (1.0, 4.0)]  # accuracy up, loss down
        rank([Run(cell, 0, "a", *point) for cell, point in enumerate(points)])
        front = (Metric.ACCURACY, Metric.LOSS)
        board = only_board(ask(session, filters=Filters(tag=tag), front=front, limit=2))
        expected = {"cell 0", "cell 1", "cell 3", "cell 4"}
        assert set(board.front or ()) == expected
        assert [row.on_front for row in board.rows] == [row.cell in expected for row in board.rows]
        whole = only_board(ask(session, filters=Filters(tag=tag), front=front))
        assert {row.cell for row in whole.rows if row.on_front} == expected

    @MODES
    def test_differences_to_a_baseline(self, rank: Rank, session: Session, tag: str | None) -> None:
        values = {0: [0.5, 0.625, 0.5], 1: [0.75, 1.0], 2: [0.25]}
        rank([Run(cell, seed, "a", value) for cell, mine in values.items() for seed, value in enumerate(mine)])
        rows = only_board(ask(session, filters=Filters(tag=tag), baseline="cell 0")).rows
        changes = {row.cell: row.difference["accuracy"] for row in rows if row.difference}
        assert changes["cell 0"].mean == 0
        error = math.sqrt(statistics.variance(values[0]) / 3 + statistics.variance(values[1]) / 2)
        assert changes["cell 1"].error == pytest.approx(error)
        assert changes["cell 1"].mean == pytest.approx(0.875 - statistics.mean(values[0]))
        assert changes["cell 2"] == Change(0.25 - statistics.fmean(values[0]), None)
        with pytest.raises(NotFoundError, match="cell 9"):
            ask(session, filters=Filters(tag=tag), baseline="cell 9")

    @MODES
    def test_a_baseline_need_not_be_among_the_rows(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank([Run(0, 0, accuracy=0.25), Run(1, 0, accuracy=0.75)])
        for filters in (Filters(tag=tag, rank=1), Filters(tag=tag, where=(condition("rank in (1, 2)"),))):
            found = ask(session, filters=filters, baseline="cell 0")
            notes = board_sheets(found, "digits", Metric.ACCURACY)[0].notes
            assert "Differences ± their standard error are to: rank 0." in notes
            rows = only_board(found).rows
            assert [(row.cell, row.difference and row.difference["accuracy"].mean) for row in rows] == [("cell 1", 0.5)]

    def test_a_baseline_is_of_the_experiments_asked_for_where_it_has_results_there(
        self, rank: Rank, session: Session
    ) -> None:
        rank([Run(0, 0, accuracy=0.25), Run(1, 0, accuracy=0.5)], [Run(0, 1, accuracy=0.75)], [Run(1, 2, accuracy=1.0)])
        session.add(Tag(experiment_id=1, name="first"))
        session.flush()
        for filters, expected in (
            (Filters(experiment_id=1), 0.25),
            (Filters(tag="first"), 0.25),
            (Filters(experiment_id=3), 0.5),
        ):
            rows = only_board(ask(session, filters=filters, baseline="cell 0")).rows
            assert rows[0].difference
            assert rows[0].difference["accuracy"].mean == expected

    @MODES
    def test_a_baseline_of_another_project_is_not_seen(
        self, session: Session, trial_result: Make, tag: str | None
    ) -> None:
        store_runs(session, [[Run(0, 0)], [Run(1, 0)]], trial_result, tags=True, projects={1: 1, 2: 2})
        with pytest.raises(NotFoundError, match="cell 1"):
            ask(session, filters=Filters(tag=tag), baseline="cell 1", scope=1)
        assert only_board(ask(session, filters=Filters(tag=tag, rank=0), baseline="cell 1")).rows[0].difference

    @MODES
    def test_differences_are_of_what_both_measured(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank([Run(0, 0), Run(1, 0, robust=0.25), Run(2, 0, robust=0.5)])
        for baseline, others in (("cell 0", ("cell 1", "cell 2")), ("cell 1", ("cell 0",))):
            rows = only_board(ask(session, filters=Filters(tag=tag), baseline=baseline)).rows
            for row in rows:
                if row.cell in others:
                    assert row.difference is not None
                    assert "robust_accuracy" not in row.difference
                    assert {"accuracy", "loss", "parameters"} <= set(row.difference)

    @MODES
    def test_printed_rows_stand_beside_those_they_are_of(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank([Run(0, 0), Run(1, 0)])
        question = Question(dataset="digits", filters=Filters(tag=tag))

        def printed(config: Mapping[str, Any], record: Mapping[str, Any]) -> list[PaperReference]:
            return [PaperReference("table 1", {**config, **record}, {})]

        rows = only_board(leaderboard(session, question, printed)).rows
        assert {row.cell: row.paper[0].row for row in rows} == {
            f"cell {rank}": {"rank": rank, "name": "a"} for rank in (0, 1)
        }

    @MODES
    def test_the_last_page_names_no_next(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank([Run(0, 0, accuracy=0.25), Run(1, 0, accuracy=0.5)])
        pages = [only_board(ask(session, filters=Filters(tag=tag), limit=limit)) for limit in (1, 2, 3)]
        assert [page.next is None for page in pages] == [False, True, True]

    @MODES
    def test_columns_asked_for(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank([Run(0, 0)])
        row = only_row(ask(session, "loss", filters=Filters(tag=tag), columns=(Metric.ECE, Metric.MCE)))
        assert list(row.metrics) == ["ece", "loss"]
        assert row.on_front is None  # nobody asked

    @MODES
    def test_a_number_that_some_seeds_lack_says_of_how_many_it_is(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        rank([Run(0, seed, robust=robust) for seed, robust in enumerate([0.5, 0.25, None])])
        found = ask(session, "robust_accuracy", filters=Filters(tag=tag), pivot=("rank", "layer"))
        board, matrix = board_sheets(found, "digits", Metric.ROBUST_ACCURACY)
        of = {one.of: one.said for one in board.texts[0] if isinstance(one, Measured)}
        assert of.pop("2 of 3") == "37.50 ± 17.68"
        assert list(of) == [""]
        place = matrix.texts[0][1]
        assert isinstance(place, Measured)
        assert (place.said, place.of) == ("37.50 ± 17.68", "2 of 3")
        header, (record,) = board_records(found)
        assert dict(zip(header, record, strict=True))["robust_accuracy_seeds"] == 2
        assert [name for name in header if name.endswith("seeds")] == [
            "seeds",
            "missing_seeds",
            "robust_accuracy_seeds",
        ]

    @MODES
    def test_in_the_order_of_a_field_incomplete_rows_have_places_behind_complete_ones(
        self, rank: Rank, session: Session, tag: str | None
    ) -> None:
        """They may stand before these: what is said of them holds there, too."""
        rank([Run(0, 0, accuracy=0.75), Run(0, 1, protocol=None), Run(1, 0), Run(1, 1)])
        found = ask(session, filters=Filters(tag=tag), sort="rank")
        sheet = board_sheets(found, "digits", Metric.ACCURACY)[0]
        assert [(row[0], row[1]) for row in sheet.rows] == [(2, 0), (1, 1)]
        assert "Rows that lack seeds (k of N) of what is ranked have places behind complete ones." in sheet.notes

    @MODES
    def test_cells_without_the_metric_are_counted(self, rank: Rank, session: Session, tag: str | None) -> None:
        rank([Run(0, 0), Run(1, 0)])
        board = only_board(ask(session, "robust_accuracy", filters=Filters(tag=tag)))
        assert (board.rows, board.total, board.unmeasured) == ([], 0, 2)

    @pytest.mark.parametrize(("cells", "said"), [([0], "1 cell has"), ([0, 1], "2 cells have")])
    def test_how_many_cells_lack_the_metric_is_said(self, rank: Rank, cells: list[int], said: str) -> None:
        found = rank([*(Run(cell, 0) for cell in cells), Run(2, 0, robust=0.5)], metric="robust_accuracy")
        (sheet,) = board_sheets(found, "digits", Metric.ROBUST_ACCURACY)
        assert f"{said} results without this metric." in sheet.notes
