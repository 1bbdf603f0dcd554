"""Data frames of what the API says."""

import pytest

from service.api.openapi_examples.leaderboards import LEADERBOARD
from service.api.openapi_examples.trials import TRIAL
from service.client.frames import board_frame, pivot_frame, result_frame
from service.errors import QueryError
from service.schemas.leaderboards import LeaderboardOut, PivotOut
from service.schemas.trial_tables import Shown
from service.schemas.trials import TrialOut
from ttsv.metrics.catalog import METRICS


def test_a_leaderboard_has_the_fields_that_differ() -> None:
    (board,) = LeaderboardOut.model_validate(LEADERBOARD).boards
    frame = board_frame(board)
    assert list(frame.columns)[:6] == ["place", "rank", "seeds", "trials", "accuracy", "accuracy_std"]
    assert frame.loc[board.rows[0].cell, "accuracy_std"] == 0.00197
    assert frame.loc[board.rows[0].cell, "rank"] == 16
    assert frame.attrs["common"]["training.lr"] == 0.05
    assert frame.attrs["columns"] == ["rank"]


def test_a_metric_that_some_results_lack_says_of_how_many_seeds_it_is() -> None:
    (board,) = LeaderboardOut.model_validate(LEADERBOARD).boards
    first, *others = board.rows
    lacking = first.metrics["accuracy"].model_copy(update={"seeds": first.seeds - 1})
    row = first.model_copy(update={"metrics": {**first.metrics, "accuracy": lacking}})
    frame = board_frame(board.model_copy(update={"rows": [row, *others]}))
    assert frame.loc[row.cell, "accuracy_seeds"] == row.seeds - 1
    assert [name for name in frame.columns if name.endswith("_seeds")] == ["accuracy_seeds"]


def test_a_matrix_has_means_and_counts_beside_each_other() -> None:
    measured = {"mean": 0.5, "std": 0.25, "seeds": 2, "trials": 3, "cells": 1, "missing": {}}
    hole = {"mean": None, "std": None, "seeds": 0, "trials": 3, "cells": 0, "missing": {"diverged": 3}}
    frame = pivot_frame(
        PivotOut.model_validate(
            {
                "down": {"field": "training.milestones", "name": "milestones"},
                "across": {"field": "rank", "name": "rank"},
                "rows": [[], [3, 5]],
                "columns": [None, 8],
                "cells": [[measured, hole], [None, measured]],
            }
        )
    )
    assert (frame.index.name, list(frame.index), frame.columns.names) == (
        "milestones",
        ["[]", "[3, 5]"],
        ["rank", None],
    )
    means = frame.xs("mean", axis=1, level=1)
    assert (means.loc["[]", "none"], means.loc["[3, 5]", 8]) == (0.5, 0.5)
    assert means.isna().to_numpy().tolist() == [[False, True], [True, False]]
    assert (frame.loc["[]", (8, "seeds")], frame.loc["[]", (8, "trials")]) == (0, 3)
    assert frame.loc["[]", (8, "missing")] == "3 diverged"


def test_an_invalid_result_has_no_numbers() -> None:
    """Of a group of seeds the mean is that of the valid ones, as on the leaderboards."""
    result = TRIAL["result"]
    wrong = result | {"accuracy": 0.99, "valid": False, "violations": ["certified, and broken"]}
    trials = [TrialOut.model_validate(TRIAL | {"id": i, "result": one}) for i, one in enumerate([result, wrong])]
    frame = result_frame(trials)
    assert frame.groupby("rank")["accuracy"].mean().to_dict() == {4: result["accuracy"]}
    assert frame.loc[1, [*METRICS]].isna().all()
    assert frame["valid"].tolist() == [True, False]
    assert frame.loc[1, "violations"] == ["certified, and broken"]
    assert frame.loc[1, "protocol"] == result["protocol"]


def test_trials_have_the_fields_that_were_chosen_and_say_which_differ() -> None:
    training = TRIAL["config"]["training"]
    changed = TRIAL["config"] | {"training": training | {"lr": 0.2}}
    trials = [TrialOut.model_validate(TRIAL | {"id": i, "config": c}) for i, c in enumerate([TRIAL["config"], changed])]
    frame = result_frame(trials)
    assert frame.attrs["columns"] == ["training.lr"]
    assert frame.attrs["common"]["rank"] == 4
    assert "training.lr" not in frame.attrs["common"]
    assert {"rank", "training.lr", "seed"} <= set(frame.columns)
    chosen = result_frame(trials, Shown.named("floor, lr, rank", ["rank"]))
    assert list(chosen["training.lr"]) == [training["lr"], 0.2]
    assert list(chosen["clipping.floor"]) == [None, None]
    assert not {"rank", "seed", "model"} & set(chosen.columns)
    assert "seed" not in result_frame(trials, Shown.named(None, "seed")).columns
    assert result_frame([], Shown.named("lr", None)).shape[0] == 0
    with pytest.raises(QueryError, match="the nearest is"):
        Shown.named("learning_rate", None)
