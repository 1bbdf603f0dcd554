"""The table of nodes, the same on SQLite and Postgres, and what API and Prometheus say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, update
from sqlalchemy.orm import Session

from service.database import ClusterNode, now
from service.database.engine import Database
from service.queue import leases, nodes
from service.queue.census import last_signs
from service.queue.cluster import Gpu, Machine, Node, Versions, named, nodes_as_json, nodes_from_json
from service.queue.contenders import amount, say_why
from service.queue.nodes import AtWork
from service.queue.shares import Amount
from service.queue.trials import hold
from service.specs.spec import Resources
from service.specs.states import NodeState

MACHINE = Machine(
    versions=Versions(package="0.1.0+abc", python="3.11.9", ray="2.60.0", torch="2.9.1"),
    gpus=(Gpu("L4", 22.5), Gpu("H100", 79.6)),
    memory_gib=64.0,
    free_disk_gib=100.0,
    bf16=True,
    clock_seconds=-0.5,
)
HEAD = Node("a" * 56, "one", "10.0.0.1", cpus=4, gpus=0, memory_gib=10, head=True, machine=MACHINE)
OTHER = Node("b" * 56, "two", "10.0.0.2", cpus=8, gpus=2, memory_gib=20.5)


def record(database: Database, *seen: Node, worker: str = "w") -> None:
    database.write(lambda session: nodes.record(session, worker, seen))


def listed(database: Database) -> list[ClusterNode]:
    with database.read() as session:
        return nodes.listed(session, 100)


def states(database: Database) -> dict[str, str]:
    return {row.host: row.state.value for row in listed(database)}


def age(database: Database, **columns: Any) -> None:
    database.write(lambda session: session.execute(update(ClusterNode).values(**columns)))


def test_nodes_travel_as_one_line() -> None:
    line = nodes_as_json([HEAD, OTHER])
    assert b"\n" not in line
    assert nodes_from_json(line) == (HEAD, OTHER)
    with pytest.raises(ValueError, match="JSON"):
        nodes_from_json(line[:-5])


def test_what_is_seen_is_stored_and_keeps_when_it_joined(database: Database) -> None:
    record(database, OTHER, HEAD)
    head, other = listed(database)
    assert (head.host, head.head, head.worker, head.state) == ("one", True, "w", NodeState.ALIVE)
    assert nodes.machine_of(head) == MACHINE
    assert (other.cpus, other.gpus, other.memory_gib, other.machine, other.left_at) == (8, 2, 20.5, None, None)
    record(database, dataclasses.replace(OTHER, machine=MACHINE, problem="the clock is off"), HEAD)
    again = listed(database)[1]
    assert (again.joined_at, again.problem) == (other.joined_at, "the clock is off")
    assert again.seen_at > other.seen_at
    assert nodes.machine_of(again) == MACHINE


def test_what_is_seen_no_more_has_left(database: Database) -> None:
    record(database, HEAD, OTHER)
    record(database, dataclasses.replace(HEAD, id="c", host="elsewhere"), worker="another")
    record(database, HEAD)
    assert states(database) == {"one": "alive", "elsewhere": "alive", "two": "left"}
    (left,) = [row for row in listed(database) if row.host == "two"]
    assert left.left_at is not None
    record(database)
    assert states(database) == {"elsewhere": "alive", "one": "left", "two": "left"}
    (same,) = [row for row in listed(database) if row.host == "two"]
    assert same.left_at == left.left_at


def test_one_that_is_told_to_have_left_did_so_once(database: Database) -> None:
    record(database, HEAD, OTHER)
    gone = dataclasses.replace(OTHER, state=NodeState.LEFT)
    record(database, HEAD, gone)
    left_at = listed(database)[1].left_at
    assert left_at is not None
    record(database, HEAD, gone)
    assert listed(database)[1].left_at == left_at


def test_nobody_has_seen_a_node_without_an_id(database: Database) -> None:
    record(database, dataclasses.replace(HEAD, id=""))
    assert listed(database) == []


def test_a_refused_machine_is_shown_until_it_joins(database: Database) -> None:
    refused = dataclasses.replace(
        OTHER, id="refused-two", address="", state=NodeState.REFUSED, machine=MACHINE, problem="another Python"
    )
    record(database, HEAD, refused)
    first = listed(database)[1]
    assert (first.state, first.problem, first.left_at) == (NodeState.REFUSED, "another Python", None)
    record(database, HEAD)
    assert states(database) == {"one": "alive", "two": "refused"}
    record(database, HEAD, OTHER)
    assert states(database) == {"one": "alive", "two": "alive"}


def test_a_machine_is_shown_that_is_refused_beside_a_node_of_the_same_name(database: Database) -> None:
    """Two on one host, or two machines that are called the same."""
    record(database, HEAD)
    refused = dataclasses.replace(HEAD, id="refused-one", head=False, state=NodeState.REFUSED, problem="another Python")
    record(database, HEAD, refused)
    assert [row.state for row in listed(database)] == [NodeState.ALIVE, NodeState.REFUSED]
    record(database, HEAD, dataclasses.replace(OTHER, host="one"))
    assert [row.state for row in listed(database)] == [NodeState.ALIVE, NodeState.ALIVE]


def test_nodes_of_a_killed_worker_have_left(database: Database) -> None:
    record(database, HEAD)
    age(database, seen_at=now() - nodes.SEEN_WITHIN - timedelta(seconds=1))
    (row,) = listed(database)
    assert (row.state, row.left_at) == (NodeState.LEFT, row.seen_at)
    record(database, HEAD)
    assert states(database) == {"one": "alive"}


def test_nodes_of_a_worker_that_is_known_to_be_dead_left_with_it(database: Database) -> None:
    for worker in ("dead", "other"):
        database.write(partial(leases.greet, worker=worker, cpus=4, gpus=0))
    record(database, HEAD, worker="dead")
    record(database, OTHER, worker="other")
    database.write(partial(nodes.bury, workers=["dead", "unknown"]))
    there, left = listed(database)
    assert (there.worker, there.state) == ("other", NodeState.ALIVE)
    assert (left.worker, left.state, left.left_at) == ("dead", NodeState.LEFT, left.seen_at)
    with database.read() as session:
        assert [sign.worker for sign in last_signs(session)] == ["other"]


def test_what_left_is_forgotten_after_a_day(database: Database) -> None:
    record(database, HEAD)
    age(database, state=NodeState.LEFT, seen_at=now() - nodes.FORGOTTEN_AFTER + timedelta(minutes=1))
    record(database, OTHER)
    assert states(database) == {"two": "alive", "one": "left"}
    age(database, seen_at=now() - nodes.FORGOTTEN_AFTER - timedelta(minutes=1))
    record(database, OTHER)
    assert states(database) == {"two": "alive"}


def test_the_api_lists_them(api: TestClient, database: Database) -> None:
    assert api.get("/v1/nodes").json() == []
    record(database, OTHER, HEAD)
    head, other = api.get("/v1/nodes").json()
    assert head["machine"]["gpus"] == [{"name": "L4", "memory_gib": 22.5}, {"name": "H100", "memory_gib": 79.6}]
    assert head["machine"]["versions"]["torch"] == "2.9.1"
    assert (other["host"], other["machine"], other["state"], other["gpus"]) == ("two", None, "alive", 2.0)


def test_the_api_says_what_runs_where(api: TestClient, database: Database) -> None:
    record(database, HEAD, OTHER)
    spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0, 1, 2]}}
    posted = api.post("/v1/experiments", json=spec).json()
    warning = "resources.gpus is 0: trials compute on CPUs alone, though the nodes have 2 GPUs"
    assert [text.partition(";")[0] for text in posted["warnings"]] == [warning]
    lease = database.write(lambda session: leases.claim(session, "w", None))
    assert lease is not None

    def start(session: Session) -> None:
        with hold(session, lease) as held:
            for trial, place in zip((1, 2), ("two, GPU 0", "one"), strict=True):
                held.start_trial(trial)
                held.place_trial(trial, place)

    database.write(start)
    head, other = api.get("/v1/nodes").json()
    assert [(trial["id"], trial["place"]) for trial in head["trials"]] == [(2, "one")]
    assert [(trial["id"], trial["place"], trial["experiment_id"]) for trial in other["trials"]] == [
        (1, "two, GPU 0", posted["id"])
    ]
    began = datetime.fromisoformat(other["trials"][0]["since"]).timestamp()
    joined = datetime.fromisoformat(other["joined_at"]).timestamp()
    told = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(api.get("/metrics").text)
        for sample in family.samples
        if sample.labels.get("node") == OTHER.id
    }
    where = {"host": "two", "node": OTHER.id}
    assert told["ttsv_node_joined_seconds"] == (where, joined)
    assert told["ttsv_node_running_since_seconds"] == ({**where, "experiment": str(posted["id"])}, began)
    assert api.get("/v1/trials/1").json()["node"] == "two, GPU 0"


class TestWhichNode:
    """Of trials that run, on which of several nodes of one machine."""

    ONE = dataclasses.replace(HEAD, id="a1" * 28, host="box")
    TWO = dataclasses.replace(OTHER, id="b2" * 28, host="box")

    def found(self, *trials: AtWork, of_workers: dict[str, str] | None = None) -> dict[str, list[int]]:
        workers = of_workers or {}
        by_node = nodes.by_node(trials, (self.ONE, self.TWO), lambda node: workers.get(node.id))
        return {node: [trial.id for trial in there] for node, there in by_node.items()}

    def test_it_says_so_itself(self) -> None:
        trials = [AtWork(1, 1, "box (a1a1a1a1), GPU 0", None), AtWork(2, 1, "box (b2b2b2b2)", None)]
        assert self.found(*trials) == {self.ONE.id: [1], self.TWO.id: [2]}
        assert nodes.cards_of(trials[0].place) == ("0",)

    def test_where_it_does_not_its_worker_tells(self) -> None:
        trials = [AtWork(number, 1, "box, GPU 1, 2", None, worker) for number, worker in enumerate(("v", "w", "x"))]
        of_workers = {self.ONE.id: "v", self.TWO.id: "w"}
        assert self.found(*trials, of_workers=of_workers) == {self.ONE.id: [0, 2], self.TWO.id: [1]}
        assert self.found(*trials) == {self.ONE.id: [0, 1, 2]}, "it was there first"
        assert nodes.cards_of(trials[0].place) == ("1", "2")

    def test_one_that_did_not_say_is_on_none(self) -> None:
        assert self.found(AtWork(1, 1, None, None), AtWork(2, 1, "elsewhere", None)) == {}

    def test_the_api_tells_them_apart(self, api: TestClient, database: Database) -> None:
        record(database, self.ONE, self.TWO)
        spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0, 1]}}
        api.post("/v1/experiments", json=spec)
        lease = database.write(lambda session: leases.claim(session, "w", None))
        assert lease is not None

        def start(session: Session) -> None:
            with hold(session, lease) as held:
                for trial, node in zip((1, 2), (self.TWO, self.ONE), strict=True):
                    held.start_trial(trial)
                    held.place_trial(trial, named(node.host, node.id))

        database.write(start)
        shown = {node["id"]: [trial["id"] for trial in node["trials"]] for node in api.get("/v1/nodes").json()}
        assert shown == {self.ONE.id: [2], self.TWO.id: [1]}
        lines = api.get("/metrics").text.splitlines()
        assert f'ttsv_node_running_trials{{host="box",node="{self.TWO.id}"}} 1.0' in lines


def test_prometheus_is_told_why_experiments_wait(api: TestClient, database: Database) -> None:
    reasons = {
        "turn": "others come first: the cluster is shared by experiments 4",
        "limit": "8 experiments run at a time here; TTSV_MAX_EXPERIMENTS",
        "unfit": "needs 3 GPUs on one node; the largest has 2",
        "places": "needs 2 GPUs on one node; 2 are free, on different nodes",
        "rest": "what is left of it rests until 12:34:56 UTC, as its trials' `error` says",
        "driver": "its driver died or could not start once",
        "start": "there is room for it: its processes start, or its trials' `error` says what keeps them",
        "worker": "no worker is there",
        "other": "nobody knows",
    }
    base = {"dataset": "digits", "model": "small-cnn"}
    for name, reason in [*reasons.items(), ("turn", "the cluster is full"), (None, None)]:
        number = api.post("/v1/experiments", json={"name": "x", "base": base}).json()["id"]
        unfit = {number} if name == "unfit" else set[int]()
        database.write(partial(say_why, reasons={number: reason}, unfit=unfit))
    lines = api.get("/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("ttsv_waiting{")]
    assert sorted(told) == sorted(f'ttsv_waiting{{reason="{name}"}} {1 + (name == "turn")}.0' for name in reasons)


class TestOthers:
    def test_what_other_workers_have_and_who_shares_ours(self, database: Database) -> None:
        record(database, HEAD, worker="mine")
        record(database, OTHER, worker="theirs")

        def seen(*ours: str) -> nodes.Others:
            with database.read() as session:
                return nodes.others(session, "mine", ours)

        assert seen(HEAD.id) == nodes.Others({"theirs": [Amount(8, 2, 20.5)]}, frozenset())
        record(database, HEAD, OTHER, worker="theirs")  # who wrote last
        assert seen(HEAD.id, OTHER.id) == nodes.Others({}, frozenset({"theirs"}))

    def test_what_an_experiments_trials_reserve(self, api: TestClient, database: Database) -> None:
        for resources in ({}, {"cpus": 2, "gpus": 0.5, "memory_gib": 3}):
            base = {"dataset": "digits", "model": "small-cnn"}
            api.post("/v1/experiments", json={"name": "x", "base": base, "resources": resources})
        with database.read() as session:
            assert nodes.needs_of(session, [1, 2, 9]) == {1: amount(Resources()), 2: Amount(2, 0.5, 3)}

    def test_of_none_nothing_is_asked(self, database: Database) -> None:
        """A worker decides twice a second, and mostly knows what its trials reserve."""
        sent = list[str]()
        event.listen(database.engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
        with database.read() as session:
            assert nodes.needs_of(session, set()) == {}
        assert not any("spec" in statement for statement in sent)


def test_prometheus_is_told_of_those_that_are_there(api: TestClient, database: Database) -> None:
    def told(lines: Sequence[str], start: str) -> list[str]:
        return [line for line in lines if line.startswith(start)]

    refused = dataclasses.replace(OTHER, id="refused-3", host="three", state=NodeState.REFUSED, machine=MACHINE)
    record(database, OTHER, HEAD, refused)
    lines = api.get("/metrics").text.splitlines()
    assert 'ttsv_nodes{state="alive"} 2.0' in lines
    assert 'ttsv_nodes{state="left"} 0.0' in lines
    assert 'ttsv_nodes{state="refused"} 1.0' in lines
    assert f'ttsv_node_gpus{{host="two",node="{OTHER.id}"}} 2.0' in lines
    assert len(told(lines, "ttsv_node_cpus{")) == 2
    assert len(told(lines, "ttsv_node_gpu_memory_bytes{")) == 2, "of the head's two; the other said nothing yet"
    assert told(lines, "ttsv_node_clock_seconds{")[0].endswith(" -0.5")
    assert float(told(lines, "ttsv_node_free_disk_bytes{")[0].split()[-1]) == 100 * 2**30
