"""How a terminal shows leaderboards."""

import copy
import io
from typing import Any

from rich.console import Console

from service.api.openapi_examples.leaderboards import LEADERBOARD
from service.schemas.leaderboards import LeaderboardOut
from workers.cli.tables import show_leaderboard


def shown(change: dict[str, Any] | None = None, *, extra: tuple[str, ...] = (), **top: Any) -> str:
    plain = copy.deepcopy(LEADERBOARD) | top
    plain["boards"][0]["rows"][0] |= change or {}
    console = Console(width=160, record=True, file=io.StringIO())
    show_leaderboard(console, LeaderboardOut.model_validate(plain), extra)
    return console.export_text()


def test_a_row() -> None:
    text = shown()
    assert "digits: by accuracy" in text
    assert "98.75 ± 0.20" in text
    assert "paper" not in text


def test_missing_metrics_and_seeds() -> None:
    text = shown({"metrics": {}, "complete": False, "trials": 3})
    assert "2 of 3" in text


def test_the_ranked_metric_and_others_have_columns() -> None:
    text = shown(metric="loss", extra=("latency_seconds", "ece"))
    headings = " ".join(text.split("All rows")[0].split())
    assert "by loss" in headings
    assert "0.0448 ± 0.0012" in text
    assert "0.43 ± 0.02" in text  # inference of one image, in milliseconds
    assert text.count("ECE") == 1


def test_what_does_not_count_is_said() -> None:
    bad = {"trial_id": 7, "cell": "c", "config": {}, "protocol": "p", "reasons": ["certified, and broken"]}
    missing = [{"trial_id": seed, "seed": seed, "state": state} for seed, state in enumerate(("running", "queued"))]
    hole = {"cell": "c", "config": {}, "trials": 2, "missing": missing}
    text = shown(invalid=[bad], invalid_count=1, holes=[hole], hole_count=4)
    assert "trial 7 is left out: certified, and broken" in text
    assert "4 cells have no result (2 trials of the first cell: 1 running, 1 queued)" in text
    assert "seed 0 running; seed 1 queued" in text


def test_all_metrics_are_those_that_were_measured() -> None:
    measured = LEADERBOARD["boards"][0]["rows"][0]["metrics"]
    spread = next(iter(measured.values()))
    text = " ".join(shown({"metrics": measured | {"adaptive_ece": spread}}, extra=("all",)).split())
    assert "adaptive" in text
    assert "AutoAttack" not in text


def test_no_result_is_told_from_no_trial() -> None:
    hole = {"cell": "c", "config": {}, "trials": 2, "missing": [{"trial_id": 1, "seed": 0, "state": "diverged"}]}
    console = Console(width=160, record=True, file=io.StringIO())
    for holes in ([hole], []):
        plain = copy.deepcopy(LEADERBOARD) | {"boards": [], "holes": holes, "hole_count": len(holes)}
        show_leaderboard(console, LeaderboardOut.model_validate(plain))
    text = console.export_text()
    assert "no cell has a result on digits" in text
    assert "seed 0 diverged" in text
    assert text.endswith("no trial on digits fits what was asked\n")
    assert "yet" not in text


def test_the_papers_value_stands_beside() -> None:
    values = {"accuracy": {"mean": 0.9527, "spread": None, "comparable": True}}
    text = shown({"paper": [{"table": "table2", "row": {}, "values": values, "notes": []}]})
    assert "95.27" in text
