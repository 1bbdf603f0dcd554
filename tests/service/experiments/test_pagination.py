"""Pages in every order, and filters, against sorting and filtering in Python."""

import base64
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from service.database import Experiment, ExperimentState, Protocol, Result, Tag, Trial, TrialState
from service.database.engine import Database
from service.errors import QueryError
from service.experiments.listing import (
    EXPERIMENT_ORDERS,
    TRIAL_ORDERS,
    ExperimentFilter,
    TrialFilter,
    list_experiments,
    list_trials,
)
from service.leaderboards import field_index
from service.leaderboards.conditions import condition
from service.specs.columns import known_field, value_of
from tests.examples import PROFILE

START = datetime(2026, 1, 1, tzinfo=UTC)
TRIALS = 40
CONFIGS: list[dict[str, Any]] = [
    {},
    {"training": {"lr": 0.1 + 0.2, "nesterov": False, "milestones": [3, 5]}, "augmentation": {"padding": "symmetric"}},
    {"training": {"lr": 1, "clip_gradient": None}, "evaluation": {"batch_size": None}},
    {"training": {"lr": 1e-05, "nesterov": True, "clip_gradient": 0.5}, "evaluation": {"batch_size": 8}},
]
"""Of trials: fields that are not there, are null, and of every kind."""


@pytest.fixture
def filled(database: Database, trial_result: Callable[..., dict[str, Any]]) -> Database:
    """Experiments and trials whose columns are equal here and there, and missing here and there."""
    rng = random.Random(0)

    def some(values: list[Any]) -> Any:
        return rng.choice(values)

    def fill(session: Session) -> None:
        session.add(Protocol(fingerprint="p", record={}))
        for number in range(12):
            created = START + timedelta(days=some([0, 1, 2]), microseconds=number % 2)
            session.add(
                Experiment(
                    name=some(["grid", "Grid 10%", "other_grid", "ranks"]),
                    spec={"resources": {"gpus": 0}},
                    state=some(list(ExperimentState)),
                    priority=some([-3, 0, 7]),
                    grid_points=1,
                    trial_count=some([1, 5]),
                    created_at=created,
                    started_at=some([None, created]),
                    finished_at=some([None, created + timedelta(hours=1)]),
                    owner=some([None, "ada", "bob"]),
                    archived_at=some([None, None, START]),
                )
            )
        session.flush()
        for experiment_id in range(1, 13):
            for name in rng.sample(["a", "b", "c"], some([0, 1, 2])):
                session.add(Tag(experiment_id=experiment_id, name=name))
        for number in range(TRIALS):
            cell = rng.randrange(len(CONFIGS))
            trial = Trial(
                experiment_id=some([1, 2]),
                number=number,
                fingerprint=str(number),
                cell="xyzw"[cell],
                config=CONFIGS[cell],
                dataset="digits",
                model=some(["small-cnn", "vgg19"]),
                layer=some(["tt", "dense"]),
                rank=some([None, 4.0, 0.1 + 0.2]),
                lambda_ort=0.0,
                constraint=some(["clip", "none"]),
                delta=some([None, 1.0]),
                seed=some([0, 1, 2**53 - 1]),
                epochs=3,
                epoch=some([0, 3]),
                best_val_accuracy=some([None, 0.5, 2 / 3]),
                state=some(list(TrialState)),
                failure=some([None, "oom"]),
                started_at=some([None, START, START + timedelta(seconds=0.1)]),
                run_seconds=some([0.0, 1 / 3]),
            )
            session.add(trial)
            session.flush()
            if some([True, False]):
                session.add(
                    Result(
                        trial_id=trial.id,
                        protocol="p",
                        fence=1,
                        **trial_result(some([0.25, 1 / 3]), peak_memory=some([None, 2**40, 5]))
                        | {"valid": some([True, True, False])},
                    )
                )

    database.write(fill)
    return database


def from_trials_and_index(database: Database) -> Iterator[Session]:
    """Lists are read from the trials themselves, and again once all of them are in their index."""
    for indexed in (False, True):
        assert not (indexed and database.write(field_index.fill))
        with database.read() as session:
            assert field_index.is_whole(session) == indexed
            yield session


def ranked(rows: list[Any], value: Callable[[Any], Any], identity: Callable[[Any], int], descending: bool) -> list[int]:
    """Ids in the order promised: by value, then id, rows without a value last."""
    known = sorted((row for row in rows if value(row) is not None), key=lambda row: (value(row), identity(row)))
    unknown = sorted((row for row in rows if value(row) is None), key=identity)
    parts = (reversed(known), reversed(unknown)) if descending else (known, unknown)
    return [identity(row) for part in parts for row in part]


def test_experiments_in_every_order(filled: Database) -> None:
    for sort in (sign + name for name in EXPERIMENT_ORDERS for sign in ("", "-")):
        for limit in (1, 5):
            check_experiments(filled, sort, limit)


def check_experiments(filled: Database, sort: str, limit: int) -> None:
    """All pages together are all experiments in their order."""
    wanted = ExperimentFilter(archived=None)
    with filled.read() as session:
        every = list_experiments(session, wanted, limit=100).rows
        found: list[int] = []
        cursor, pages = None, 0
        while cursor is not None or pages == 0:
            page = list_experiments(session, wanted, limit=limit, sort=sort, cursor=cursor)
            found += [row.id for row in page.rows]
            cursor, pages = page.next, pages + 1
        assert pages == math.ceil(12 / limit)
        name = sort.removeprefix("-")
        if name == "name":  # the order of words is the database's own
            assert sorted(found) == list(range(1, 13))
            names = [next(e.name for e in every if e.id == i) for i in found]
            assert len([1 for a, b in itertools.pairwise(names) if a != b]) == len(set(names)) - 1
            return
        assert found == ranked(every, lambda row: getattr(row, name), lambda row: row.id, sort.startswith("-"))


@pytest.mark.slow
def test_trials_in_every_order(filled: Database) -> None:
    for name in TRIAL_ORDERS:
        for sign in ("", "-"):
            check_trials(filled, name, sign)


def check_trials(filled: Database, name: str, sign: str) -> None:
    """All pages together are all trials in their order, whether results are shown or not.

    But for `make test-deep` upwards with results, downwards without.
    """
    column = TRIAL_ORDERS[name]
    with filled.read() as session:
        every = list_trials(session, TrialFilter(), limit=100).rows
        assert len(every) == TRIALS
        for with_result in (True, False) if PROFILE == "deep" else (sign == "",):
            found: list[int] = []
            cursor, first = None, True
            while cursor is not None or first:
                first = False
                page = list_trials(
                    session, TrialFilter(), limit=17, sort=sign + name, cursor=cursor, with_result=with_result
                )
                found += [trial.id for trial, _ in page.rows]
                cursor = page.next

            def value(row: tuple[Trial, Result | None]) -> Any:
                trial, result = row
                if column.class_ is Trial:
                    return getattr(trial, column.key)
                return getattr(result, column.key) if result and result.valid else None

            if name in ("model", "layer", "constraint"):
                assert sorted(found) == sorted(trial.id for trial, _ in every)
            else:
                assert found == ranked(every, value, lambda row: row[0].id, sign == "-")


FIELDS = ("training.lr", "nesterov", "clip_gradient", "evaluation.batch_size", "milestones", "augmentation.padding")
INDEXED = ("rank", "seed", "id", "number", "accuracy", "peak_memory")
"""Orders of `TRIAL_ORDERS` whose values the index of fields has, and some that it leads to."""


def test_trials_in_orders_of_their_index(filled: Database) -> None:
    assert not filled.write(field_index.fill)
    for name in INDEXED:
        check_trials(filled, name, "")
        check_trials(filled, name, "-")


def test_trials_by_any_field_of_their_configurations(filled: Database) -> None:
    """Equal values, none, and those at their defaults: pages of every length are all trials in their order."""
    for session in from_trials_and_index(filled):
        every = [trial for trial, _ in list_trials(session, TrialFilter(), limit=100).rows]
        for name, sign in itertools.product(FIELDS, ("", "-")):
            path = known_field(name, "sort")
            found: list[int] = []
            cursor, first = None, True
            while cursor is not None or first:
                page = list_trials(session, TrialFilter(), limit=7, sort=sign + name, cursor=cursor)
                found += [trial.id for trial, _ in page.rows]
                cursor, first = page.next, False

            def value(trial: Trial, path: str = path) -> Any:
                one = value_of(trial.config, path)
                return json.dumps(one, separators=(",", ":")) if isinstance(one, list) else one

            assert found == ranked(every, value, lambda trial: trial.id, sign == "-"), sign + name
        # A cursor is the field's, by whichever of its names.
        page = list_trials(session, TrialFilter(), limit=7, sort="lr")
        assert list_trials(session, TrialFilter(), limit=7, sort="training.lr", cursor=page.next).rows


@pytest.mark.parametrize(
    ("name", "near"),
    [("learning_rate", "lr"), ("acuracy", "accuracy"), ("-batch", "training.batch_size"), ("finished", "finished_at")],
)
def test_an_order_that_nothing_has_is_refused_with_the_nearest(database: Database, name: str, near: str) -> None:
    with database.read() as session, pytest.raises(QueryError) as caught:
        list_trials(session, TrialFilter(), limit=1, sort=name)
    (problem,) = caught.value.problems
    assert problem.field == "sort"
    assert problem.message.endswith(f"the nearest is {near}")


EXPERIMENT_FILTERS: list[tuple[ExperimentFilter, Callable[[Experiment], bool]]] = [
    (ExperimentFilter(), lambda e: e.archived_at is None),
    (ExperimentFilter(archived=True), lambda e: e.archived_at is not None),
    (ExperimentFilter(archived=None, name="GRID"), lambda e: "grid" in e.name.lower()),
    (ExperimentFilter(archived=None, name="10%"), lambda e: "10%" in e.name),
    (ExperimentFilter(archived=None, name="_"), lambda e: "_" in e.name),
    (ExperimentFilter(archived=None, owner="ada"), lambda e: e.owner == "ada"),
    (
        ExperimentFilter(archived=None, created_after=START + timedelta(days=1)),
        lambda e: e.created_at >= START + timedelta(days=1),
    ),
    (
        ExperimentFilter(archived=None, created_before=START + timedelta(days=1)),
        lambda e: e.created_at < START + timedelta(days=1),
    ),
    (
        ExperimentFilter(archived=None, states=(ExperimentState.QUEUED, ExperimentState.FAILED)),
        lambda e: e.state in ("queued", "failed"),
    ),
    (ExperimentFilter(archived=None, project_id=1), lambda e: False),
]


def test_filters_of_experiments(filled: Database) -> None:
    with filled.read() as session:
        every = list_experiments(session, ExperimentFilter(archived=None), limit=100).rows
        for wanted, keep in EXPERIMENT_FILTERS:
            found = list_experiments(session, wanted, limit=100).rows
            assert [row.id for row in found] == [row.id for row in every if keep(row)], wanted


def test_filter_by_tags(filled: Database, table: Callable[[type], list[Any]]) -> None:
    tags = {(tag.experiment_id, tag.name) for tag in table(Tag)}
    with filled.read() as session:
        for names in (["a"], ["a", "b"], ["none"]):
            found = list_experiments(session, ExperimentFilter(archived=None, tags=names), limit=100).rows
            assert {e.id for e in found} == {i for i in range(1, 13) if all((i, name) in tags for name in names)}


TRIAL_FILTERS: list[tuple[TrialFilter, Callable[[Trial], bool]]] = [
    (TrialFilter(experiment_id=2), lambda t: t.experiment_id == 2),
    (TrialFilter(states=(TrialState.FAILED, TrialState.RUNNING)), lambda t: t.state in ("failed", "running")),
    (TrialFilter(rank=4.0), lambda t: t.rank == 4),
    (TrialFilter(rank=0.1 + 0.2), lambda t: t.rank == 0.1 + 0.2),
    (TrialFilter(rank="none"), lambda t: t.rank is None),
    (TrialFilter(seed=2**53 - 1, model="vgg19"), lambda t: t.seed == 2**53 - 1 and t.model == "vgg19"),
    (TrialFilter(layer="tt", constraint="clip"), lambda t: t.layer == "tt" and t.constraint == "clip"),
    (TrialFilter(cell="x", failure="oom"), lambda t: t.cell == "x" and t.failure == "oom"),
    (TrialFilter(project_id=3), lambda t: False),
]


def test_filters_of_trials(filled: Database) -> None:
    for session in from_trials_and_index(filled):
        every = [trial for trial, _ in list_trials(session, TrialFilter(), limit=100).rows]
        for wanted, keep in TRIAL_FILTERS:
            found = [trial.id for trial, _ in list_trials(session, wanted, limit=100).rows]
            assert found == [trial.id for trial in every if keep(trial)], wanted


def chosen(text: str, **others: Any) -> TrialFilter:
    return TrialFilter(where=(condition(text, field_named=lambda name, _: name),), **others)


def field_of(trial: Trial, path: str) -> Any:
    return value_of(trial.config, path)


CONDITIONS: list[tuple[TrialFilter, Callable[[Trial, Result | None], bool]]] = [
    (chosen("training.lr<=0.1"), lambda t, _: field_of(t, "training.lr") <= 0.1),
    (chosen("training.nesterov!=true"), lambda t, _: not field_of(t, "training.nesterov")),
    (chosen("training.clip_gradient=none"), lambda t, _: field_of(t, "training.clip_gradient") is None),
    (chosen("training.clip_gradient!=none"), lambda t, _: field_of(t, "training.clip_gradient") is not None),
    (chosen("evaluation.batch_size=none"), lambda t, _: field_of(t, "evaluation.batch_size") is None),
    (chosen("evaluation.batch_size>=8"), lambda t, _: (field_of(t, "evaluation.batch_size") or 0) >= 8),
    (
        chosen("training.milestones not in ([3, 5])"),
        lambda t, _: field_of(t, "training.milestones") != [3, 5],
    ),
    (
        chosen("training.lr>0.1", experiment_id=2, states=(TrialState.FAILED, TrialState.QUEUED)),
        lambda t, _: field_of(t, "training.lr") > 0.1 and t.experiment_id == 2 and t.state in ("failed", "queued"),
    ),
    (chosen("rank!=4", failure="oom"), lambda t, _: t.rank != 4 and t.failure == "oom"),
    (chosen("accuracy>=0.3"), lambda _, result: result is not None and result.accuracy >= 0.3),
    (chosen("accuracy<0.3"), lambda _, result: result is not None and result.accuracy < 0.3),
    (chosen("peak_memory=none"), lambda _, result: result is None or result.peak_memory is None),
    (chosen("peak_memory in (5)"), lambda _, result: result is not None and result.peak_memory == 5),
    (chosen("peak_memory not in (5, none)"), lambda _, result: result is not None and result.peak_memory == 2**40),
]


def test_conditions_on_fields_and_valid_results(filled: Database) -> None:
    for session in from_trials_and_index(filled):
        every = list_trials(session, TrialFilter(), limit=100).rows
        for wanted, keep in CONDITIONS:
            kept = [trial.id for trial, result in every if keep(trial, result if result and result.valid else None)]
            assert 0 < len(kept) < TRIALS
            assert [trial.id for trial, _ in list_trials(session, wanted, limit=100).rows] == kept, wanted
            backwards = [trial.id for trial, _ in list_trials(session, wanted, limit=100, sort="-number").rows]
            assert backwards == kept[::-1], wanted


def cursor(*parts: Any) -> str:
    """As `Order.cursor` makes it."""
    return base64.urlsafe_b64encode(json.dumps(list(parts)).encode()).decode().rstrip("=")


FORGED: list[tuple[str, str]] = [
    ("-id", cursor("-id", "7", 7)),
    ("-id", cursor("-id", 7, -1)),
    ("-id", cursor("-id", 7, 2**63)),
    ("-id", cursor("-id", 10**400, 7)),
    ("-id", cursor("-id", True, 7)),
    ("-id", cursor("-id", None, 7)),
    ("-id", cursor("-id", 7)),
    ("-id", cursor("-id", {}, 7)),
    ("-id", cursor({}, 7, 7)),
    ("-id", base64.urlsafe_b64encode(b"[" * 900).decode()),
    ("name", cursor("name", "a\0b", 7)),
    ("name", cursor("name", "\ud800", 7)),
    ("state", cursor("state", "lost", 7)),
    ("created_at", cursor("created_at", "2026-01-01", 7)),
    ("created_at", cursor("created_at", "0001-01-01T00:00:00+23:59", 7)),
    ("created_at", cursor("created_at", 7, 7)),
    ("priority", cursor("priority", 1e300, 7)),
]


def test_forged_cursors_are_refused(database: Database) -> None:
    with database.read() as session:
        for sort, forged in FORGED:
            with pytest.raises(QueryError, match=r"cursor: not a cursor"):
                list_experiments(session, ExperimentFilter(), limit=1, sort=sort, cursor=forged)


def test_a_cursor_of_another_order_says_so(filled: Database) -> None:
    with filled.read() as session:
        following = list_experiments(session, ExperimentFilter(), limit=1, sort="-priority").next
        with pytest.raises(QueryError, match=r"cursor: belongs to sort=-priority; .* sort=name"):
            list_experiments(session, ExperimentFilter(), limit=1, sort="name", cursor=following)


def test_unknown_orders_name_the_known(database: Database) -> None:
    with database.read() as session, pytest.raises(QueryError, match=r"sort: unknown; sort by one of id, name, "):
        list_experiments(session, ExperimentFilter(), limit=1, sort="spec")


def test_what_is_not_wanted_is_not_read(filled: Database) -> None:
    with filled.read() as session:
        (experiment,) = list_experiments(session, ExperimentFilter(), limit=1, with_spec=False).rows
        with pytest.raises(Exception, match="raiseload"):
            assert experiment.spec
    with filled.read() as session:
        rows = list_trials(session, TrialFilter(), limit=50, with_config=False).rows
        with pytest.raises(Exception, match="raiseload"):
            assert rows[0][0].config
        result = next(result for _, result in rows if result is not None)
        with pytest.raises(Exception, match="raiseload"):
            assert result.layers
