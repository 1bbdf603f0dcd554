"""Experiments made from specs, the same on SQLite and Postgres."""

from typing import Any

import pytest
from sqlalchemy import delete
from sqlalchemy.orm import Session

from service.database import (
    Experiment,
    ExperimentState,
    FieldIndex,
    IdempotencyKey,
    Result,
    Tag,
    Trial,
    TrialState,
)
from service.database.engine import Database
from service.experiments import store, submission
from service.experiments.submission import Draft
from service.specs.grid import Plan
from service.specs.spec import ExperimentSpec
from tests.grids import plan_of
from tests.held import waiting_trials, write
from tests.machinery import Claim, Finish, Submit, Table
from ttsv.config.training import LOOKING_ON
from ttsv.config.trial import TrialConfig

SPEC = ExperimentSpec(
    name="two ranks",
    priority=3,
    base={"model": "small-cnn", "dataset": "digits", "layer": "tt", "constraint": "clip", "delta": 1.5},
    grid={"training.lr": [0.1, 1e-5], "rank": [8, None], "seed": [2**32 - 1, 0]},
    tags=["thesis", "a"],
    notes="ünïcode ✓",
)
BASE: dict[str, Any] = {"dataset": "digits", "model": "small-cnn", "layer": "tt"}


class TestCreate:
    def test_stores_spec_and_trials_as_they_are(self, database: Database, table: Table) -> None:
        plan = plan_of(SPEC)
        write(database, submission.submit, Draft(SPEC, plan))
        (experiment,) = table(Experiment)
        assert experiment.spec == SPEC.model_dump(mode="json")
        assert (experiment.name, experiment.priority, experiment.state) == ("two ranks", 3, ExperimentState.QUEUED)
        assert (experiment.grid_points, experiment.trial_count) == (8, 8)
        trials = table(Trial)
        assert [trial.number for trial in trials] == list(range(8))
        for trial, planned in zip(trials, plan.trials, strict=True):
            assert (trial.fingerprint, trial.cell) == (planned.fingerprint, planned.cell)
            assert TrialConfig.from_dict(trial.config) == planned.config
            whole: dict[str, Any] = dict(planned.config.to_dict())
            for name in LOOKING_ON:  # not asked for: what workers of the version before do not know
                del whole["training"][name]
            assert trial.config == whole
            for name in ("dataset", "model", "layer", "rank", "lambda_ort", "constraint", "delta", "seed"):
                assert getattr(trial, name) == getattr(planned.config, name)
            assert trial.epochs == planned.config.training.epochs
            assert (trial.state, trial.attempts, trial.epoch) == (TrialState.QUEUED, 0, 0)

    def test_keeps_the_order_of_the_axes(self, database: Database, table: Table) -> None:
        """The last axis varies fastest: a spec posted again must give the same trials in the same order."""
        write(database, submission.submit, Draft(SPEC, plan_of(SPEC)))
        (experiment,) = table(Experiment)
        assert list(experiment.spec["grid"]) == ["training.lr", "rank", "seed"]
        again = plan_of(ExperimentSpec.model_validate(experiment.spec))
        assert [planned.fingerprint for planned in again.trials] == [trial.fingerprint for trial in table(Trial)]

    def test_whole_ranks_and_fractions_go_together(self, submit: Submit, table: Table) -> None:
        submit(seeds=1, layer=["tt"], rank=[8, 0.5, None, 4])
        expected = [8.0, 0.5, None, 4.0]
        assert [trial.rank for trial in table(Trial)] == expected
        assert [entered.rank for entered in table(FieldIndex)] == expected

    @pytest.mark.parametrize("order", ["grid", "random", "seeds-last"])
    def test_the_order_in_which_trials_begin(self, database: Database, table: Table, order: str) -> None:
        """Numbers and fingerprints are the grid's whatever the order."""
        grid = {"rank": [1, 2], "seed": [5, 3, 4], "lambda_ort": [0.0, 1.0]}
        spec = ExperimentSpec.model_validate({"name": "ordered", "base": BASE, "grid": grid, "order": order})
        plan = plan_of(spec)
        write(database, submission.submit, Draft(spec, plan))
        trials = table(Trial)
        assert [trial.number for trial in trials] == list(range(12))
        assert [trial.fingerprint for trial in trials] == [planned.fingerprint for planned in plan.trials]
        begun = waiting_trials(database)
        if order == "grid":
            assert [trial.number for trial in begun] == list(range(12))
        elif order == "seeds-last":
            assert [trial.seed for trial in begun] == [5] * 4 + [3] * 4 + [4] * 4
            for seeds in (begun[:4], begun[4:8], begun[8:]):
                assert len({trial.cell for trial in seeds}) == 4
                assert [trial.number for trial in seeds] == sorted(trial.number for trial in seeds)
        else:
            assert sorted(trial.number for trial in begun) == list(range(12))
            assert [trial.number for trial in begun] != list(range(12))

    def test_a_mixed_order_is_the_same_every_time_and_fair_to_every_axis(
        self, database: Database, table: Table
    ) -> None:
        seeds = list(range(60))
        for name in ("one", "two"):
            spec = ExperimentSpec(name=name, base=BASE, grid={"rank": [1, 2], "seed": seeds}, order="random")
            write(database, submission.submit, Draft(spec, plan_of(spec)))
        turns = [trial.turn for trial in table(Trial)]
        assert turns[:120] == turns[120:]
        assert min(turns) >= 0  # below zero is what began before
        assert max(turns) < 2**63
        half = waiting_trials(database)[:60]
        assert 15 <= sum(trial.rank == 1 for trial in half) <= 45

    def test_all_or_nothing(self, database: Database, table: Table) -> None:
        plan = plan_of(SPEC)
        doubled = Plan([*plan.trials, plan.trials[0]], plan.points + 1)
        with pytest.raises(Exception, match=r"(?i)unique"):
            write(database, submission.submit, Draft(SPEC, doubled))
        assert (table(Experiment), table(Trial)) == ([], [])

    def test_a_failure_after_the_insert_takes_it_back(self, database: Database, table: Table) -> None:
        def work(session: Session) -> None:
            def answer() -> dict[str, Any]:
                submission.submit(session, Draft(SPEC, plan_of(SPEC)))
                raise RuntimeError("power cut")

            store.answer_once(session, "key", {}, answer)

        with pytest.raises(RuntimeError, match="power cut"):
            database.write(work)
        assert (table(Experiment), table(Trial), table(IdempotencyKey)) == ([], [], [])

    def test_ids_are_never_used_again(self, submit: Submit, database: Database) -> None:
        first = submit()
        database.write(lambda session: session.execute(delete(Experiment)))
        assert submit() > first

    def test_trials_go_with_their_experiment(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit()
        lease = claim()
        finish(lease, table(Trial)[0].id)
        database.write(lambda session: session.execute(delete(Experiment)))
        assert (table(Trial), table(Result)) == ([], [])

    def test_tags_can_be_found(self, database: Database, table: Table) -> None:
        write(database, submission.submit, Draft(SPEC, plan_of(SPEC)))
        assert [tag.name for tag in table(Tag)] == ["a", "thesis"]
