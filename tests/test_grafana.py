"""The dashboard for Grafana asks for what the service serves."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import Session

from service.database.engine import Database
from service.queue import leases, nodes
from service.queue.cluster import Gpu, Machine, Node, Versions
from service.queue.trials import hold
from service.specs.states import ExperimentState, NodeState, TrialState

ROOT = Path(__file__).parent.parent
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docker" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ADDED = {"job", "instance"}
"""Labels that Prometheus itself adds to everything it scrapes."""


def questions() -> list[str]:
    """Every expression of a panel, and what the variables ask for."""
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return asked + [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"][1:]]


@pytest.fixture
def served(sqlite_api: TestClient, sqlite_url: str) -> dict[str, set[str]]:
    """Name of a sample -> its labels, of all that the service serves where a trial runs on a node with a GPU."""
    versions = Versions(package="0.1.0", python="3.11.9", ray="2.60.0", torch="2.15.0")
    machine = Machine(versions, (Gpu("L4", 22.5),), memory_gib=64, free_disk_gib=100, bf16=True, clock_seconds=0.5)
    node = Node("a" * 56, "one", "10.0.0.1", cpus=4, gpus=1, memory_gib=10, machine=machine)
    spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}}
    sqlite_api.post("/v1/experiments", json=spec).raise_for_status()

    def run(session: Session) -> None:
        nodes.record(session, "worker", [node])
        lease = leases.claim(session, "worker", None)
        assert lease is not None
        with hold(session, lease) as held:
            held.start_trial(1)
            held.place_trial(1, "one, GPU 0")

    with closing(Database(sqlite_url)) as database:
        database.write(run)
    sqlite_api.get("/livez")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(sqlite_api.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_is_served_with_its_labels(served: dict[str, set[str]]) -> None:
    for question in questions():
        names = set(re.findall(r"\bttsv_\w+", question))
        assert names, question
        assert names <= served.keys(), question
        (labels,) = {frozenset(served[name]) for name in names}
        used = {
            label
            for selector in re.findall(r"\{([^{}]*)\}", question)
            for label in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', selector)
        }
        grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", question) for label in group.split(",")}
        if "histogram_quantile" in question:
            assert "le" in grouped
        assert used | grouped <= labels | ADDED, question


def test_every_metric_is_shown(served: dict[str, set[str]]) -> None:
    asked = set(re.findall(r"\bttsv_\w+", " ".join(questions())))
    assert {name for name in served if name.startswith("ttsv_") and not name.endswith("_created")} <= asked


def test_states_are_those_there_are() -> None:
    known = {*ExperimentState, *TrialState, *NodeState}
    for states in re.findall(r'\bstate(?:=~|!~|!=|=)"([^"]*)"', " ".join(questions())):
        assert set(states.split("|")) <= known


def test_it_has_the_form_of_a_dashboard() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None  # Grafana gives one
    assert re.fullmatch(r"[\w-]{8,40}", DASHBOARD["uid"])
    assert DASHBOARD["title"]
    assert DASHBOARD["time"].keys() == {"from", "to"}
    source, *others = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert {variable["name"] for variable in others} == ADDED
    assert {variable["type"] for variable in others} == {"query"}
    assert all(variable["datasource"] == SOURCE for variable in others)


def test_every_panel_asks_the_source_that_is_chosen() -> None:
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["description"].endswith(".")
        assert panel["datasource"] == SOURCE
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE
            for bracket in ("()", "{}", "[]"):
                assert target["expr"].count(bracket[0]) == target["expr"].count(bracket[1]), target["expr"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {(place["x"] + across, place["y"] + down) for across in range(place["w"]) for down in range(place["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_page_names_every_metric(served: dict[str, set[str]]) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for name in served:
        base = re.sub(r"_(?:bucket|sum|count|created)$", "", name)
        assert base in page or f"{base}_total" in page, name
