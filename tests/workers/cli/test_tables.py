"""How a terminal says how long something takes, or is silent."""

import copy
import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from service.api.dry_run import _EXAMPLE
from service.api.openapi_examples.trials import TRIAL
from service.leaderboards.text_tables import Sheet
from service.schemas.dry_runs import DryRunOut
from service.schemas.trial_tables import Shown, trials_sheet
from service.schemas.trials import TrialOut
from workers.cli.client_options import print_whole
from workers.cli.tables import dry_run_table, duration, sheet_table, show_silences


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
    headings = [str(column.header) for column in dry_run_table(would, Shown.named("training.steps", None)).columns]
    assert len({*headings}) == len(headings), "steps of an epoch, and of the whole training"


def test_what_stands_above_a_narrow_table_is_not_broken_at_its_width() -> None:
    screen = Console(width=60, record=True, file=io.StringIO())
    print_whole(screen, sheet_table(Sheet("digits: not on the leaderboards", ["holes"], [True], [[1]], [])))
    assert screen.export_text().splitlines()[0].strip() == "digits: not on the leaderboards"


@pytest.mark.parametrize(
    ("state", "failure", "said"),
    [("failed", "timeout", "failed (timeout)"), ("diverged", "diverged", "diverged"), ("queued", None, "queued")],
)
def test_a_trial_that_failed_says_how(state: str, failure: str | None, said: str) -> None:
    trial = TrialOut.model_validate(TRIAL | {"state": state, "failure": failure, "result": None})
    sheet = trials_sheet([trial])
    assert sheet.rows[0][sheet.headings.index("state")] == said


def test_it_is_said_how_long_trials_are_silent_and_may_be() -> None:
    moment = datetime.now(UTC)

    def trial(number: int, silent: float | None, limit: float | None) -> TrialOut:
        last = None if silent is None else moment - timedelta(seconds=silent)
        return TrialOut.model_validate(TRIAL | {"id": number, "last_report_at": last, "hung_after": limit})

    def said(*trials: TrialOut) -> list[str]:
        console = Console(width=200, record=True, file=io.StringIO())
        show_silences(console, trials)
        return console.export_text().splitlines()

    assert said(trial(1, None, None)) == []
    assert said(trial(1, 5, 1800), trial(2, None, None), trial(3, 720, 1800), trial(4, -60, 36_000)) == [
        "trial 3: last report 12 min ago; killed and tried again after 30 min without one",
        "trial 1: last report 5 s ago; killed and tried again after 30 min without one",
        "trial 4: last report 0 s ago; killed and tried again after 10 h without one",
    ]
    many = said(*(trial(number, number, 1800) for number in range(1, 14)))
    assert [line.partition(":")[0] for line in many[:10]] == [f"trial {number}" for number in range(13, 3, -1)]
    assert many[10:] == ["3 more run, with more time left"]
