"""Leaderboards against the same sums in plain Python, on SQLite and Postgres."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from service.db import Database
from service.leaderboard import Board, Hole, Leaderboard, Metric, Row, leaderboard
from service.models import Experiment, ExperimentState, Protocol, Result, Trial, TrialState

Make = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """A trial as these tests draw it: its cell, seed and what it gave under which protocol, if anything."""

    cell: int
    seed: int
    protocol: str | None = "a"
    accuracy: float = 0.5
    loss: float = 1.0
    dataset: str = "digits"


def store_runs(session: Session, experiments: list[list[Run]], trial_result: Make) -> None:
    """Enters experiments whose trials have the ids 1, 2, 3 ... in the order given."""
    for name in ("a", "b"):
        session.add(Protocol(fingerprint=name, record={"name": name}))
    session.flush()
    trial_id = 0
    for number, runs in enumerate(experiments, start=1):
        state = ExperimentState.SUCCEEDED
        counts = {"grid_points": len(runs), "trial_count": len(runs)}
        session.add(Experiment(id=number, name="drawn", spec={}, state=state, **counts))
        session.flush()
        for run in runs:
            trial_id += 1
            trial = Trial(
                id=trial_id,
                experiment_id=number,
                number=trial_id,
                fingerprint=f"{run.cell}-{run.seed}",
                cell=f"cell {run.cell}",
                config={"rank": run.cell, "seed": run.seed},
                dataset=run.dataset,
                model="small-cnn",
                layer="dense",
                lambda_ort=0.0,
                constraint="none",
                seed=run.seed,
                epochs=1,
                state=TrialState.SUCCEEDED if run.protocol else TrialState.FAILED,
            )
            session.add(trial)
            session.flush()
            if run.protocol:
                values = trial_result(run.accuracy, loss=run.loss, parameters=10**9 + run.cell, layers=[])
                session.add(Result(trial_id=trial_id, protocol=run.protocol, fence=1, **values))
    session.flush()


def brute_force(experiments: list[list[Run]], metric: str, only: int | None) -> tuple[dict[str, Any], list[str]]:
    """Board -> rows (place, cell, trials, seeds, mean, std, min, max) in order, and the holes."""
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
            row = (f"cell {cell}", trials, len(values), statistics.mean(values), std, min(values), max(values))
            boards.setdefault(protocol, []).append(row)
    for rows in boards.values():
        rows.sort(key=lambda row: row[3], reverse=metric == "accuracy")
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


class TestBruteForce:
    @pytest.mark.parametrize("metric", ["accuracy", "loss"])
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(experiments=drawn_experiments(), only=st.sampled_from([None, None, 1]))
    def test_agrees(
        self, session: Session, trial_result: Make, metric: str, experiments: list[list[Run]], only: int | None
    ) -> None:
        store_runs(session, experiments, trial_result)
        found = leaderboard(session, "digits", metric=Metric(metric), experiment_id=only)
        session.rollback()
        session.expunge_all()
        boards, holes = brute_force(experiments, metric, only)
        assert {board.protocol for board in found.boards} == set(boards)
        assert [hole.cell for hole in found.holes] == holes
        for board in found.boards:
            assert board.record == {"name": board.protocol}
            expected = boards[board.protocol]
            means = [row.metrics[metric].mean for row in board.rows]
            assert means == pytest.approx([row[3] for row in expected], rel=1e-12)
            if metric == "accuracy":  # exact means: the order of equals counts too
                assert [row.cell for row in board.rows] == [row[0] for row in expected]
                places = [1 + sum(other > mean for other in means) for mean in means]
                assert [row.place for row in board.rows] == places
            by_cell = {row[0]: row for row in expected}
            for row in board.rows:
                _, trials, seeds, _, std, low, high = by_cell[row.cell]
                assert (row.trials, row.seeds, row.complete) == (trials, seeds, trials == seeds)
                spread = row.metrics[metric]
                assert (spread.min, spread.max) == (low, high)
                assert (spread.std is None) == (std is None)
                if spread.std is not None:
                    assert spread.std == pytest.approx(std, rel=1e-9, abs=1e-12)
        sizes = [len(board.rows) for board in found.boards]
        assert sizes == sorted(sizes, reverse=True)


@pytest.fixture
def rank(session: Session, trial_result: Make) -> Callable[..., Leaderboard]:
    def rank(*experiments: list[Run], metric: str = "accuracy", only: int | None = None) -> Leaderboard:
        store_runs(session, list(experiments), trial_result)
        return leaderboard(session, "digits", metric=Metric(metric), experiment_id=only)

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
        assert leaderboard(session, "digits") == Leaderboard([], [])

    def test_a_row_says_its_cell_without_the_seed(self, rank: Rank) -> None:
        row = only_row(rank([Run(3, 0), Run(3, 7)]))
        assert (row.cell, row.config, row.seeds) == ("cell 3", {"rank": 3}, 2)
        assert set(row.metrics) == {metric.value for metric in Metric}

    def test_a_trial_in_two_experiments_counts_once_with_its_newest_result(self, rank: Rank) -> None:
        row = only_row(rank([Run(0, 0, accuracy=0.25)], [Run(0, 0, accuracy=0.75)]))
        assert (row.trials, row.seeds, row.complete) == (1, 1, True)
        assert row.metrics["accuracy"].mean == 0.75

    def test_a_later_failure_does_not_take_a_result_away(self, rank: Rank) -> None:
        row = only_row(rank([Run(0, 0, accuracy=0.25)], [Run(0, 0, None)]))
        assert (row.seeds, row.complete, row.metrics["accuracy"].mean) == (1, True, 0.25)

    def test_protocols_are_never_mixed(self, rank: Rank) -> None:
        found = rank([Run(0, 0, "a", 0.5), Run(0, 1, "b", 1.0), Run(1, 0, "b", 0.25)])
        means = {board.protocol: [row.metrics["accuracy"].mean for row in board.rows] for board in found.boards}
        assert means == {"b": [1.0, 0.25], "a": [0.5]}
        assert list(means) == ["b", "a"]  # the board with more rows first

    def test_a_cell_with_some_results_is_incomplete_and_one_without_is_a_hole(self, rank: Rank) -> None:
        found = rank([Run(0, 0), Run(0, 1, None), Run(1, 0, None), Run(1, 1, None)])
        row = only_row(found)
        assert (row.trials, row.seeds, row.complete) == (2, 1, False)
        assert found.holes == [Hole("cell 1", {"rank": 1}, 2)]

    def test_equal_means_share_a_place(self, rank: Rank) -> None:
        accuracies = [0.5, 0.75, 0.5, 0.25]
        rows = only_board(rank([Run(cell, 0, "a", value) for cell, value in enumerate(accuracies)])).rows
        assert [(row.place, row.cell) for row in rows] == [(1, "cell 1"), (2, "cell 0"), (2, "cell 2"), (4, "cell 3")]

    def test_one_seed_has_no_deviation(self, rank: Rank) -> None:
        assert only_row(rank([Run(0, 0)])).metrics["accuracy"].std is None

    @pytest.mark.parametrize("value", [0.1, 1 / 3, 0.975])
    def test_equal_values_do_not_deviate(self, rank: Rank, value: float) -> None:
        row = only_row(rank([Run(0, seed, "a", value, value) for seed in range(7)]))
        for name in ("accuracy", "loss"):
            spread = row.metrics[name]
            assert spread.std is not None
            assert spread.std < 1e-15
            assert (spread.min, spread.max) == (value, value)

    def test_a_small_spread_keeps_its_digits(self, rank: Rank) -> None:
        """A sum of squares minus a squared mean would lose all of them."""
        losses = [1000 + k * 1e-6 for k in range(4)]
        spread = only_row(rank([Run(0, seed, "a", 0.5, loss) for seed, loss in enumerate(losses)])).metrics["loss"]
        assert spread.std == pytest.approx(statistics.stdev(losses), rel=1e-6)
        assert math.isclose(spread.std or 0, 1e-6 * math.sqrt(5 / 3), rel_tol=1e-5)

    @pytest.mark.parametrize("metric", Metric)
    def test_every_metric_knows_its_direction(self, session: Session, trial_result: Make, metric: Metric) -> None:
        assert metric.more_is_better == (metric in (Metric.ACCURACY, Metric.COMPRESSION))
        store_runs(session, [[Run(0, 0, None), Run(1, 0, None)]], trial_result)
        for trial_id, value in ((1, 1), (2, 0)):
            values = trial_result(0.5) | {metric.value: value}
            session.add(Result(trial_id=trial_id, protocol="a", fence=1, **values))
        session.flush()
        first = only_board(leaderboard(session, "digits", metric=metric)).rows[0]
        assert first.cell == ("cell 0" if metric.more_is_better else "cell 1")

    def test_one_experiment_alone(self, rank: Rank) -> None:
        found = rank([Run(0, 0, "a", 0.25), Run(0, 1, "a", 0.75)], [Run(0, 0, "a", 0.5), Run(1, 0, None)], only=2)
        row = only_row(found)
        assert (row.trials, row.seeds, row.metrics["accuracy"].mean) == (1, 1, 0.5)
        assert [hole.cell for hole in found.holes] == ["cell 1"]

    def test_other_data_sets_are_elsewhere(self, rank: Rank) -> None:
        found = rank([Run(0, 0), Run(1, 0, dataset="cifar10"), Run(2, 0, None, dataset="cifar10")])
        assert only_row(found).cell == "cell 0"
        assert found.holes == []
