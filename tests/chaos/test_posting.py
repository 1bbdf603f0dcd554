"""What is posted is such that a verdict can tell, and a record says how it was made."""

import argparse
import re

import pytest

from service.experiments.submission import turns_of
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.chaos.__main__ import GRIDS, Grid, circumstances

NODE = GRIDS["node"]


@pytest.mark.parametrize("number", [0, 2, 4])
def test_trials_that_are_added_have_their_turn_before_those_that_run(number: int) -> None:
    """In the order of any grid that was posted whole those that were lost come before others, rule or none."""
    spec = ExperimentSpec.model_validate(NODE.spec(number))
    planned = expand_grid(spec, max_trials=NODE.trials).trials
    turn = {trial.config.seed: at for trial, at in zip(planned, turns_of(planned, spec.order), strict=True)}
    first, added = NODE.seeds(number)
    assert sorted(first + added) == list(range(NODE.trials))
    assert max(turn[seed] for seed in added) < min(turn[seed] for seed in first)
    assert len(first) == 2 * NODE.cpus
    assert len(added) > 2 * NODE.cpus, "as many may begin before a lost one as there are places"


def test_every_other_grid_is_posted_whole() -> None:
    assert NODE.seeds(1) == (list(range(NODE.trials)), [])
    assert Grid().seeds(0) == (list(range(4)), [])


def test_a_record_says_when_on_what_and_with_which_options_it_was_made() -> None:
    options = argparse.Namespace(seed=1, database="sqlite", record=True, every=None, calm=True, respite=9.0)
    found = circumstances(options, 10.0)
    assert found.keys() == {"date", "revision", "dirty", "options"}
    assert found["options"] == {"every": 10.0, "calm": True, "respite": 9.0}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    assert found["revision"] is None or re.fullmatch("[0-9a-f]{40}", found["revision"])
