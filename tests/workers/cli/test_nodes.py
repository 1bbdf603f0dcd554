"""`ttsv nodes` and `ttsv node` at the terminal."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from service.client import Client
from service.database.engine import Database
from service.queue import leases, nodes
from service.queue.cluster import Gpu, Machine, Node, Versions
from service.queue.contenders import say_why
from service.queue.trials import HeldExperiment
from service.schemas.service import NodeOut, NodeTrialOut
from service.specs.states import NodeState
from tests.held import under
from workers.cli.__main__ import app
from workers.cli.nodes import _show, _working
from workers.node import membership
from workers.node.membership import Offer
from workers.node.mps import Mps

MACHINE = Machine(Versions("0.1.0+abc", "3.11.9", "2.60.0", "2.9.1"), (Gpu("L4", 22.5),) * 2, 64.0, 10.0, True)
NODE = Node("a" * 56, "gpu2", "10.0.0.2", cpus=8, gpus=2, memory_gib=20.5, machine=MACHINE)


@pytest.fixture
def there(server: str, sqlite_url: str) -> str:
    """A service with a head, a node and a machine that was refused."""
    refused = dataclasses.replace(
        NODE, id="refused-x", host="[bold]x", state=NodeState.REFUSED, problem="Python is 3.12.0 here"
    )
    head = dataclasses.replace(NODE, id="b", host="gpu1", head=True, machine=None, gpus=0)
    database = Database(sqlite_url)
    database.write(lambda session: nodes.record(session, "worker", [refused, NODE, head]))
    database.close()
    return server


def run(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"TTSV_URL": url})


def test_a_line_for_each(there: str) -> None:
    done = run(there, "nodes")
    assert done.exit_code == 0, done.output
    heading, head, node, refused = (line.split("\t") for line in done.stdout.splitlines())
    assert heading[:3] == ["host", "state", "since (UTC)"]
    assert (head[0], head[6]) == ("gpu1 (head)", "-")
    assert (node[0], node[1], *node[3:]) == ("gpu2", "alive", "8", "2", "20.5", "2 x L4 22.5 GiB", "-", "-")
    assert (refused[0], refused[1], refused[-1]) == ("[bold]x", "refused", "Python is 3.12.0 here")


def test_what_waits_says_why(there: str, sqlite_url: str) -> None:
    with Client(there) as client:
        base = {"dataset": "digits", "model": "small-cnn"}
        waits, _ = (client.submit({"name": name, "base": base}) for name in ("[bold]large", "small"))
    database = Database(sqlite_url)
    reason = "needs 2 GPUs on one node; 2 are free, on different nodes"
    database.write(lambda session: say_why(session, {waits.id: reason}, ()))
    database.close()
    done = run(there, "nodes")
    assert done.stdout.splitlines()[4:] == [f"experiment {waits.id} ([bold]large) waits: {reason}"]


def test_more_that_may_wait_is_not_kept_back(there: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many no more are looked at; the command that is named lists the others, too."""
    monkeypatch.setattr("workers.cli.nodes._MOST_LOOKED_AT", 2)
    with Client(there) as client:
        base = {"dataset": "digits", "model": "small-cnn"}
        oldest, *_, newest = (client.submit({"name": f"grid {number}", "base": base}) for number in range(3))
    database = Database(sqlite_url)
    database.write(lambda session: say_why(session, {oldest.id: "its turn", newest.id: "its turn"}, ()))
    database.close()
    waits, more = run(there, "nodes").stdout.splitlines()[4:]
    assert waits == f"experiment {newest.id} (grid 2) waits: its turn"
    named = re.fullmatch(r"and more are queued: ttsv (ls .+); ttsv (show) ID says why one waits", more)
    assert named is not None
    listed = run(there, *named[1].split())
    assert listed.exit_code == 0, listed.output
    assert [line.split("\t")[0] for line in listed.stdout.splitlines()[1:]] == ["3", "2", "1"]
    assert "its turn" in run(there, named[2], str(oldest.id)).stdout
    monkeypatch.setattr("workers.cli.nodes._MOST_LOOKED_AT", 3)
    assert "and more" not in run(there, "nodes").stdout


def test_what_runs_says_how_long_it_may_be_silent(there: str, sqlite_url: str) -> None:
    with Client(there) as client:
        client.submit({"name": "one", "base": {"dataset": "digits", "model": "small-cnn"}})
    database = Database(sqlite_url)
    lease = database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    database.write(under(lease, HeldExperiment.start_trial, 1))
    database.write(under(lease, HeldExperiment.place_trial, 1, "gpu2, GPU 0"))
    database.close()
    lines = run(there, "nodes").stdout.splitlines()
    assert re.fullmatch(r"1 \(GPU 0, \d s\)", lines[2].split("\t")[7])
    assert re.fullmatch(r"trial 1: last report \d s ago; killed and tried again after 30 min without one", lines[4])


@pytest.mark.parametrize(
    ("place", "seconds", "said"),
    [
        ("gpu2 (c6416f72), GPU 0, 1", 190, "12 (GPU 0+1, 3 min)"),
        ("gpu2", 4000, "12 (1 h 7 min)"),
        ("gpu2, GPU 3", None, "12 (GPU 3)"),
        ("gpu2", None, "12"),
    ],
)
def test_a_trial_has_its_gpus_and_its_time_beside_it(place: str, seconds: float | None, said: str) -> None:
    moment = datetime.now(UTC)
    since = None if seconds is None else moment - timedelta(seconds=seconds)
    assert _working(NodeTrialOut(id=12, experiment_id=1, place=place, since=since), moment) == said


def test_a_terminal_of_a_hundred_columns_has_a_line_for_each_trial(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moment = datetime.now(UTC)
    trials = [
        NodeTrialOut(id=20 + number, experiment_id=1, place=f"gpu2, GPU {number}", since=moment) for number in range(9)
    ]
    node = NodeOut(
        **dataclasses.asdict(dataclasses.replace(NODE, machine=None, problem=None)),
        worker="w",
        joined_at=moment,
        seen_at=moment,
        left_at=None,
        trials=trials,
    )
    monkeypatch.setattr("workers.cli.client_options.console", lambda: Console(force_terminal=True, width=100))
    _show([node, node.model_copy(update={"problem": "the node has another data set of this name, " * 8})])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 9 + 9, "a long problem is broken where it is beside trials"
    for number in range(8):
        assert f"{20 + number} (GPU {number}, 0 s)," in lines[1 + number]
    assert "..." in lines[9]


def test_json_for_scripts(there: str) -> None:
    found = json.loads(run(there, "nodes", "--json").stdout)
    assert [one["host"] for one in found] == ["gpu1", "gpu2", "[bold]x"]
    with Client(there) as client:
        assert [one.model_dump(mode="json") for one in client.nodes()] == found


class TestNode:
    @pytest.fixture
    def joined(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        found: list[Any] = []

        class Stay:
            def __init__(self, *given: object) -> None:
                found.extend(given)

            def run(self) -> None:
                """Ends at once."""

        monkeypatch.setattr(membership, "Membership", Stay)
        return found

    def command(self, *arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> str:
        done = CliRunner().invoke(app, ["node", *arguments], env=environment)
        assert done.exit_code == code, done.output
        return done.stderr

    def test_what_it_is_told(self, joined: list[Any]) -> None:
        self.command("--head", "gpu1", "--token-file", "t", "--cpus", "3", "--gpus", "0", "--ports", "7000-7100")
        assert joined == ["gpu1:6379", Path("t"), Offer(3, 0, None, range(7000, 7101))]

    def test_or_by_its_environment(self, joined: list[Any]) -> None:
        environment = {
            "TTSV_HEAD": "10.0.0.1:7777",
            "TTSV_TOKEN_FILE": "t",
            "TTSV_NODE_ADDRESS": "127.0.0.2",
            "TTSV_WORKER_CPUS": "3",
            "TTSV_WORKER_GPUS": "1",
            "TTSV_NODE_PORTS": "7000-7100",
        }
        self.command(environment=environment)
        assert joined == ["10.0.0.1:7777", Path("t"), Offer(3, 1, "127.0.0.2", range(7000, 7101))]

    @pytest.mark.parametrize("environment", [{}, {"TTSV_WORKER_MPS": "true"}])
    def test_mps_is_asked_for(
        self, joined: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
    ) -> None:
        arguments = ["--head", "gpu1", "--token-file", "t", *([] if environment else ["--mps"])]
        monkeypatch.setenv("PATH", str(tmp_path))
        said = self.command(*arguments, environment=environment, code=1)
        assert "TTSV_WORKER_MPS = true, and nvidia-cuda-mps-control is not installed" in said
        for name in ("nvidia-smi", "nvidia-cuda-mps-control"):
            (tmp_path / name).write_text("#!/bin/sh\necho GPU-8c3d, H100, 81559\n")
            (tmp_path / name).chmod(0o755)
        self.command(*arguments, environment=environment)
        assert isinstance(joined[2].mps, Mps)

    @pytest.mark.parametrize("head", ["", ":6379", "gpu1:", "gpu1:http", "http://gpu1:6379"])
    def test_a_head_that_is_none(self, head: str, joined: list[Any]) -> None:
        expected = 0 if head == "gpu1:" else 1
        said = self.command("--head", head, "--token-file", "t", "--cpus", "1", "--gpus", "0", code=expected)
        assert ("must be HOST or HOST:PORT" in said) == bool(expected)

    @pytest.mark.parametrize("address", ["198.51.100.77", "no.such.name.invalid"])
    def test_an_address_of_another_machine(self, address: str, joined: list[Any]) -> None:
        """The node would be seen to join, and be thought dead half a minute later."""
        said = self.command("--head", "gpu1", "--token-file", "t", "--gpus", "0", "--address", address, code=1)
        assert said.startswith(f"ttsv: --address: {address} is no address of this machine")
        assert joined == []

    def test_ports_that_are_none(self, joined: list[Any]) -> None:
        said = self.command("--head", "gpu1", "--token-file", "t", "--ports", "7", code=1)
        assert said.startswith("ttsv: --ports 7: must be two ports")

    def test_without_a_token(self, tmp_path: Path) -> None:
        said = self.command("--head", "gpu1", "--token-file", str(tmp_path / "t"), "--cpus", "1", code=1)
        assert "copy the file `token` of the head's data folder" in said
