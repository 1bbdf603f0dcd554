"""Tabs of a trial: tables of its record, whatever of it is there, and why something is not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from service.dashboard.trial_tabs import (
    absent,
    corruption_values,
    reliabilities,
    robustness,
    threshold,
    uses,
)
from service.database import Environment, Result, TrialState
from service.database.engine import Database
from service.queue.attempts import AttemptDetail
from service.queue.leases import Lease
from tests import measured


def result(evaluation: dict[str, Any] | None) -> Any:
    return SimpleNamespace(evaluation=evaluation)


def trial(**values: Any) -> Any:
    return SimpleNamespace(
        **{"state": TrialState.SUCCEEDED, "constraint": "none", "delta": None, "config": {}} | values
    )


def test_everything_that_was_measured_is_there() -> None:
    found = robustness(result(measured.evaluation(0.9)))
    assert found.corruptions is not None
    assert len(found.corruptions.kinds) == 19
    assert list(found.corruptions.severities) == [1, 2, 3, 4, 5]
    first = found.corruptions.kinds[0]
    assert first.mean == pytest.approx(sum(first.accuracies) / 5)
    assert [round(one.radius, 4) for one in found.radii] == [0.1412, 0.2824, 0.4235, 1.0]
    assert all(one.certified is not None and one.assumed is not None for one in found.radii)
    assert [(one.name, one.norm) for one in found.attacks] == [("pgd", "L2"), ("autoattack", "Linf")]
    assert (found.searches[0].space, found.searches[0].method, found.searches[0].bound) == ("pixels", "fgsm", 11.4)
    assert (found.bound, found.no_bound) == (11.4, None)
    raw, scaled = reliabilities(result(measured.evaluation(0.9)))
    assert (raw.name, scaled.name) == ("as it is", "at temperature 1.234")
    assert len(raw.bins) == 15
    assert (raw.bins[0].count, raw.bins[0].accuracy) == (0, None)


@pytest.mark.parametrize("record", [None, {}, {"accuracy": 0.5}, {"corruptions": {"table": {}}, "certified": None}])
def test_records_without_it_have_none(record: dict[str, Any] | None) -> None:
    for one in (result(record), None):
        found = robustness(one)
        assert found.corruptions is None
        assert not found.radii
        assert not found.attacks
        assert not found.searches
        assert reliabilities(one) == []


def test_a_bound_that_there_is_not_says_why() -> None:
    found = robustness(result({"certified": {"bound": None, "why": "batch norm in training mode"}}))
    assert (found.bound, found.no_bound) == (None, "batch norm in training mode")


def test_why_there_is_nothing() -> None:
    known: Any = result({"accuracy": 0.5})
    assert "not finished" in absent(trial(state=TrialState.RUNNING), None, "certified=true").why
    assert absent(trial(state=TrialState.RUNNING), None, "certified=true").values is None
    assert "scheduler" in absent(trial(state=TrialState.EARLY_STOPPED), None).why
    assert "failed" in absent(trial(state=TrialState.FAILED), None).why
    asked = absent(trial(), known, "certified=true")
    assert (asked.why, asked.values) == ("Its spec does not ask for it.", "certified=true")
    assert "no record" in absent(trial(), result(None), "certified=true").why
    assert "no record" in absent(trial(), known).why
    assert corruption_values("cifar100") == "corruptions=published"
    assert corruption_values("digits") == "corruptions=generated"


def test_what_holds_singular_values() -> None:
    assert threshold(trial()) is None
    assert threshold(trial(constraint="clip", delta=0.5)) == 0.5
    assert threshold(trial(constraint="divide", config={"division": {"conv": 2.0}})) == 2.0
    assert threshold(trial(constraint="divide")) is None


def test_what_an_attempt_used() -> None:
    stored = {
        "interval": 1.0,
        "seconds": [1.0, 2.0],
        "cpu": [90.0, 110.0],
        "memory": [5.0, 7.0],
        "gpu": [None, 50.0],
    } | {"gpu_memory": [None, None]}
    both = [
        AttemptDetail(1, None, "a", None, None),  # type: ignore[arg-type] # when it began does not matter
        AttemptDetail(2, None, "b", None, stored),  # type: ignore[arg-type]
    ]
    (used,) = uses(both)
    assert (used.points, used.seconds, used.cpu) == (2, 2.0, 100.0)
    assert (used.memory, used.gpu, used.gpu_memory) == (7.0, 50.0, None)


def test_the_page_has_them_without_scripts(
    api: TestClient,
    database: Database,
    submit: Callable[..., int],
    claim: Callable[..., Lease],
    finish: Callable[..., None],
) -> None:
    submit(seeds=1)
    finish(claim(), 1)

    def dress(session: Any) -> None:
        assert session.get(Result, 1) is not None
        measured.dress(session, 1)

    browser = {"Accept": "text/html"}
    before = api.get("/trials/1", headers=browser).text
    for words in ("corruptions=generated", "spectra_every: 5", "Nothing was sampled", "None was written down"):
        assert words in before
    database.write(dress)
    text = api.get("/trials/1", headers=browser).text
    for words in ("gaussian noise", "pgd", "fgsm", "at temperature 1.234", "gpu2, GPU 0", "4f4f4f4f4f4f"):
        assert words in text
        assert words not in before
    database.write(lambda session: session.execute(update(Environment).values(record={"ttsv": "0.1.0+3fa9c2d41b77"})))
    assert "<code>0.1.0+3fa9c2d41b77</code>" in api.get("/trials/1", headers=browser).text
    part = api.get("/trials/1/summary", headers=browser)
    assert 'id="summary"' in part.text
    assert len(part.text) < len(text) / 10
    assert api.get("/trials/99/summary", headers=browser).status_code == 404
