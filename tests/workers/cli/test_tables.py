"""How a terminal says how long something takes."""

import copy
import io

import pytest
from rich.console import Console

from service.api.experiments import _EXAMPLE
from service.schemas.experiments import DryRunOut
from service.schemas.trial_tables import Shown
from workers.cli.tables import dry_run_table, duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (2285, "38 min"),
        (3599, "1 h"),
        (3900, "1 h 5 min"),
        (187_800, "52 h 10 min"),
    ],
)
def test_durations_as_a_person_writes_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(1, "All rows: model"), (2400, "The first 1 of 2,400 trials. All trials: model")]
)
def test_a_dry_run_says_what_all_trials_share_and_not_those_that_it_lists(count: int, said: str) -> None:
    told = {"columns": [{"field": "rank", "name": "rank"}], "common": {"model": "small-cnn", "training.lr": 0.1}}
    would = DryRunOut.model_validate(copy.deepcopy(_EXAMPLE) | {"trial_count": count} | told)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(dry_run_table(would))
    text = " ".join(console.export_text().split())
    assert said in text
    assert "lr 0.1" in text
    assert "# rank parameters" in text
    chosen = dry_run_table(would, Shown.named("lr", "rank"))
    assert [str(column.header) for column in chosen.columns][:3] == ["#", "lr", "parameters"]
