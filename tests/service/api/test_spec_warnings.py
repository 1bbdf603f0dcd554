"""What is said of a spec that is looked at or posted: what is lacking where its trials would run."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from sqlalchemy import update

from service.database import ClusterNode, Trial, Worker, now
from service.database.engine import Database
from service.main import create_app
from service.queue import leases, nodes
from service.queue.cluster import Machine, Node, Versions
from service.settings import Settings
from tests.machinery import Claim, Finish, Table
from ttsv.data.catalog import DATASETS, FETCHED
from ttsv.data.sources import source_of

SPEC: dict[str, Any] = {
    "name": "said",
    "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training": {"epochs": 3, "batch_size": 64}},
    "grid": {"rank": [None, 4], "seed": [0, 1]},
}


def test_bf16_is_warned_of_where_no_worker_has_instructions_for_it(api: TestClient, database: Database) -> None:
    """Of workers that are there and say what their processors have; not where a trial gets a GPU."""
    training = {"epochs": 1, "precision": "bf16"}
    spec = {**SPEC, "base": {**SPEC["base"], "training": training}}

    def said(spec: dict[str, Any]) -> list[str]:
        found: list[str] = api.post("/v1/experiments?dry_run=true", json=spec).json()["warnings"]
        stored = api.post("/v1/experiments", json=spec).json()["warnings"]
        assert stored == found
        return found

    def greet(name: str, has: bool | None) -> None:
        database.write(lambda session: leases.greet(session, name, 2, 0, has))

    assert said(spec) == [], "nobody is there"
    greet("old", None)
    assert said(spec) == [], "one that does not say"
    greet("old", False)
    (warning,) = said(spec)
    assert warning.startswith("training.precision: 4 trials in bf16 will be refused by every worker that is there")
    assert said(SPEC) == []
    assert said({**spec, "resources": {"cpus": 1, "gpus": 1}}) == []
    greet("new", True)
    assert said(spec) == []


def test_idle_gpus_are_warned_of_before_a_worker_has_nodes(api: TestClient, database: Database) -> None:
    """Its cluster takes a while to start; then its nodes have the same GPUs, or more."""

    def idle() -> list[str]:
        found: list[str] = api.post("/v1/experiments?dry_run=true", json=SPEC).json()["warnings"]
        return [text.partition(";")[0].partition("though ")[2] for text in found]

    def greet(name: str, gpus: int) -> None:
        database.write(lambda session: leases.greet(session, name, 2, gpus, True))

    greet("cpus", 0)
    assert idle() == []
    greet("one", 1)
    assert idle() == ["the nodes have 1 GPU"]
    greet("two", 2)
    assert idle() == ["the nodes have 3 GPUs"]
    seen = [Node(host * 56, host, "10.0.0.1", 8, gpus, 64) for host, gpus in (("a", 3), ("b", 1))]
    database.write(lambda session: nodes.record(session, "two", seen))
    assert idle() == ["the nodes have 4 GPUs"], "what a worker offers is in its nodes"
    database.write(lambda session: session.execute(update(ClusterNode).values(seen_at=now() - timedelta(minutes=2))))
    assert idle() == ["the nodes have 3 GPUs"]
    database.write(lambda session: session.execute(update(Worker).values(seen_at=now() - timedelta(minutes=2))))
    assert idle() == [], "workers that were killed offer nothing"


def test_what_is_made_of_an_experiment_is_warned_of_as_it_was(
    api: TestClient, database: Database, claim: Claim, finish: Finish, table: Table
) -> None:
    """Of an extension only the new trials, and a re-evaluation trains nothing."""
    database.write(lambda session: leases.greet(session, "old", 2, 0, False))
    base = {**SPEC["base"], "training": {"epochs": 1, "precision": "bf16"}}
    spec = {**SPEC, "base": base, "grid": {**SPEC["grid"], "delta": [1.0]}}
    first = api.post("/v1/experiments", json=spec).json()
    idle, bf16 = first["warnings"]
    assert idle.startswith("grid.delta has an effect in no trial")
    path = f"/v1/experiments/{first['id']}"
    assert api.post(f"{path}/clone").json()["warnings"] == [idle, bf16]
    extended = api.post(f"{path}/extend", json={"grid": {"seed": [2]}}).json()["warnings"]
    assert extended == [idle, bf16.replace("4 trials", "2 trials")]
    finish(claim(), table(Trial)[0].id)
    published = {"evaluation": {"corruptions": "generated"}}
    assert api.post(f"{path}/re-evaluate", json=published).json()["warnings"] == []


def test_bf16_is_warned_of_where_some_nodes_have_no_instructions_for_it(api: TestClient, database: Database) -> None:
    """A trial comes to run on any node of the cluster, whatever the head's processor has."""
    spec = {**SPEC, "base": {**SPEC["base"], "training": {"epochs": 1, "precision": "bf16"}}}
    database.write(lambda session: leases.greet(session, "head", 2, 0, True))
    versions = Versions(package="0.1.0", python="3.11.9", ray="2.60.0", torch="2.9.1")

    def join(bf16: Mapping[str, bool | None]) -> list[str]:
        seen = [
            Node(host * 56, host, "10.0.0.1", 8, 0, 64, machine=Machine(versions, (), 64, 100, bf16=has))
            for host, has in bf16.items()
        ]
        database.write(lambda session: nodes.record(session, "head", seen))
        found: list[str] = api.post("/v1/experiments?dry_run=true", json=spec).json()["warnings"]
        return found

    assert join({"a": True, "b": None}) == []
    (warning,) = join({"a": True, "b": False, "c": False})
    assert warning.startswith("training.precision: 4 trials in bf16 will be refused where they come to run on some")
    assert "(b, c)" in warning
    (warning,) = join({host: host == "a" for host in "abcdef"})
    assert "(b, c, d and 2 more)" in warning
    assert api.post("/v1/experiments?dry_run=true", json=SPEC).json()["warnings"] == []


def test_absent_published_corruptions_are_warned_of(api: TestClient) -> None:
    folder: Path = api.app.state.settings.data_dir / "datasets"  # type: ignore[attr-defined]
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    base = {"dataset": "cifar10", "model": "small-cnn", "evaluation": {"corruptions": "published"}}
    spec = {"name": "corrupted", "base": base, "grid": {"seed": [0, 1]}}
    for query in ("?dry_run=true", "?dry_run=true&summary=true", ""):
        (warning,) = api.post(f"/v1/experiments{query}", json=spec).json()["warnings"]
        assert warning.startswith("evaluation.corruptions: this service's data folder has no datasets/CIFAR-10-C")
        assert "without which 2 trials fail at the start; unpack" in warning
        assert warning.endswith("there, on the head, from which further nodes copy it, or take generated ones")
    (folder / "CIFAR-10-C").mkdir(parents=True)
    assert api.post("/v1/experiments?dry_run=true", json=spec).json()["warnings"] == []


def test_published_data_that_was_not_fetched_is_warned_of(api: TestClient) -> None:
    folder: Path = api.app.state.settings.data_dir / "datasets"  # type: ignore[attr-defined]
    spec = {"name": "x", "base": {"model": "wrn10-1"}, "grid": {"dataset": ["synthetic", *FETCHED]}}
    for query in ("?dry_run=true", "?dry_run=true&summary=true", ""):
        warnings = api.post(f"/v1/experiments{query}", json=spec).json()["warnings"]
        assert [warning.partition(":")[0] for warning in warnings] == [f"dataset {name}" for name in sorted(FETCHED)]
        assert "without which its trials fail at the start" in warnings[0]
        assert warnings[0].endswith("run `ttsv data fetch cifar10` on the head, from which further nodes copy it")
    for name in FETCHED:
        for file in source_of(name)._published(folder):  # type: ignore[attr-defined]
            file.path.parent.mkdir(parents=True, exist_ok=True)
            file.path.touch()
    assert api.post("/v1/experiments?dry_run=true", json=spec).json()["warnings"] == []
    assert {name for name, info in DATASETS.items() if not info.embedded} == FETCHED.keys()


def test_with_a_store_the_worker_may_have_data_that_the_service_has_not(sqlite_url: str, tmp_path: Path) -> None:
    """Then each has a data folder of its own, and what trials find is not known here."""
    settings = Settings(database_url=sqlite_url, data_dir=tmp_path / "data", storage=str(tmp_path / "store"))
    base = {"dataset": "cifar10", "model": "small-cnn", "evaluation": {"corruptions": "published"}}
    with TestClient(create_app(settings)) as api:
        body = api.post("/v1/experiments?dry_run=true", json={"name": "x", "base": base}).json()
    published, corruptions = body["warnings"]
    for warning in (published, corruptions):
        assert "without which" not in warning
        assert "on the head of each worker, from which further nodes copy it" in warning
    assert "has none, and where the worker's has none its trials fail at the start" in published
    assert "has no datasets/CIFAR-10-C, and where the worker's has none the trial fails at the start" in corruptions


def test_searches_are_warned_of_as_grids_are(api: TestClient, database: Database) -> None:
    """Their trials are still to be drawn: what all of them have, or may have, is known."""
    folder: Path = api.app.state.settings.data_dir / "datasets"  # type: ignore[attr-defined]
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    database.write(lambda session: leases.greet(session, "old", 2, 0, False))
    base = {"dataset": "cifar10", "model": "small-cnn"}
    drawn = {"training.lr": {"loguniform": [0.001, 0.1]}}
    choices = {
        "training.precision": {"choice": ["float32", "bf16"]},
        "evaluation.corruptions": {"choice": ["published"]},
    }
    fixed = {"training": {"precision": "bf16"}, "evaluation": {"corruptions": "published"}}
    for given, space in ((base, drawn | choices), (base | fixed, drawn)):
        search = {"algorithm": "random", "trials": 4, "space": space}
        spec = {"name": "searched", "base": given, "search": search}
        for query in ("?dry_run=true", "?dry_run=true&summary=true", ""):
            corruptions, bf16 = api.post(f"/v1/experiments{query}", json=spec).json()["warnings"]
            assert corruptions.startswith(
                "evaluation.corruptions: this service's data folder has no datasets/CIFAR-10-C"
            )
            assert "its trials fail at the start" in corruptions
            assert bf16.startswith("training.precision: trials in bf16 will be refused by every worker that is there")


def test_data_of_no_trial_are_not_asked_for(sqlite_api: TestClient) -> None:
    """Each variant has a data set of its own, and that of the base is nobody's."""
    base = {"dataset": "npz:gone", "model": "small-cnn"}
    spec = {"name": "x", "base": base, "variants": [{"dataset": "digits"}, {"dataset": "synthetic"}]}
    for query in ("?dry_run=true", ""):
        answer = sqlite_api.post(f"/v1/experiments{query}", json=spec)
        assert answer.is_success, answer.text
        assert answer.json()["warnings"] == []
