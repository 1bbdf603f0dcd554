from __future__ import annotations

import errno
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service.errors import UserError
from service.queue.cluster import Machine, Node, Versions
from service.settings import Settings
from service.specs.states import NodeState
from workers.node.processes import identity
from workers.node.raylet import free_ports
from workers.worker import ray_cluster
from workers.worker.observation import Observation
from workers.worker.ray_cluster import Cluster, Door, LocalCluster, _write_token


@pytest.fixture
def fast_death(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Clusters whose child ends at once, with their temporary folders under the test's; the commands asked for."""
    commands: list[list[str]] = []

    def spawn(command: list[str], *, log: Path, **_: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        log.parent.mkdir(parents=True, exist_ok=True)
        code = f"import pathlib; pathlib.Path({str(log)!r}).write_text('Traceback\\nno port left\\n')"
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("workers.node.raylet.spawn", spawn)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return commands


def test_token_is_ours_alone_and_stays(tmp_path: Path, fast_death: list[list[str]]) -> None:
    token = tmp_path / "data" / "token"
    for _ in range(2):
        cluster = LocalCluster(tmp_path / "data", cpus=1, gpus=0)
        cluster.start()
        first = token.read_text()
        assert len(bytes.fromhex(first)) == 32
        assert token.stat().st_mode & 0o777 == 0o600
        cluster.stop()
    assert token.read_text() == first
    assert {path.name for path in token.parent.iterdir()} == {"token", "logs"}
    ports = [part for command in fast_death for part in command if part.startswith("--port=")]
    assert len(set(ports)) == 2


def test_failed_start_is_noticed_and_leaves_nothing(tmp_path: Path, fast_death: list[list[str]]) -> None:
    cluster = LocalCluster(tmp_path, cpus=1, gpus=0)
    assert cluster.failed()
    cluster.start()
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    while not cluster.failed():
        assert not cluster.ready()
    assert cluster.last_words() == "no port left"
    cluster.stop()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_cluster_whose_head_stands_still_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes live, so that nobody else would notice; until it has lasted a while the head may be back."""
    seen = Observation(tmp_path)
    cluster = LocalCluster(tmp_path, cpus=1, gpus=0, observation=seen)
    for name, said in {"ready": True, "failed": False, "last_words": "a line\nits last line"}.items():
        monkeypatch.setattr(cluster._ray, name, lambda said=said: said)
    seen._hear(())
    assert (cluster.ready(), cluster.failed(), cluster.last_words()) == (True, False, "its last line")
    monkeypatch.setattr(ray_cluster, "HEADLESS_SECONDS", 0.0)
    assert (cluster.ready(), cluster.failed()) == (False, True)
    assert "its head does not answer" in cluster.last_words()
    seen.stop()
    assert (cluster.ready(), cluster.failed()) == (True, False), "the next one has another head"


def test_a_log_that_cannot_be_read_says_nothing(
    tmp_path: Path, fast_death: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker asks for it where its cluster ended, for which a disk that fails may be the reason."""
    cluster = LocalCluster(tmp_path, cpus=1, gpus=0)
    cluster.start()
    while not cluster.failed():
        pass

    def failing(*_: object, **__: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", failing)
        assert cluster.last_words() == ""
    cluster.stop()


def test_a_start_that_the_machine_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("workers.node.raylet.spawn", spawn)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    cluster = LocalCluster(tmp_path, cpus=1, gpus=0)
    with pytest.raises(OSError, match="No space left"):
        cluster.start()
    assert cluster.failed()
    cluster.stop()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_token_that_is_there_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("there")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("workers.worker.ray_cluster.os.open", full)
    _write_token(tmp_path / "token")
    with pytest.raises(OSError, match="No space left"):
        _write_token(tmp_path / "another")


def test_a_token_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("workers.worker.ray_cluster.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _write_token(tmp_path / "token")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    _write_token(tmp_path / "token")
    assert [(path.name, path.stat().st_mode & 0o777) for path in tmp_path.iterdir()] == [("token", 0o600)]


def test_start_removes_what_killed_workers_left(tmp_path: Path, fast_death: list[list[str]]) -> None:
    mine = identity()
    assert mine is not None
    for name, owner in (("dead", {**mine, "start": 1}), ("alive", mine)):
        folder = tmp_path / "tmp" / f"ttsv-ray-{name}"
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps(owner))
    left = [sys.executable, "-c", "print(flush=True); input()", str(tmp_path / "tmp" / "ttsv-ray-dead")]
    pipe = subprocess.PIPE
    with subprocess.Popen(left, start_new_session=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # for a moment after its start a process has no arguments by which it is known
        cluster = LocalCluster(tmp_path, cpus=1, gpus=0)
        cluster.start()
        assert process.wait(5) == -9
    cluster.stop()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["ttsv-ray-alive"]


class TestDoor:
    def test_none_is_open_by_default(self, tmp_path: Path, fast_death: list[list[str]]) -> None:
        assert Door.of(Settings(data_dir=tmp_path)) is None
        cluster = LocalCluster(tmp_path, cpus=1, gpus=0)
        cluster.start()
        cluster.stop()
        (command,) = fast_death
        assert not [part for part in command if part.startswith(("--node-", "--object-manager", "--min-", "--max-"))]

    def test_ports_are_those_of_the_settings(
        self,
        tmp_path: Path,
        fast_death: list[list[str]],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(ray_cluster, "taken_port", lambda ports: None)
        settings = Settings(data_dir=tmp_path, head_address="localhost", head_port=23_456, node_ports="7000-7099")
        cluster = LocalCluster(tmp_path, cpus=2, gpus=1, door=Door.of(settings))
        with caplog.at_level("INFO"):
            cluster.start()
        cluster.stop()
        (command,) = fast_death
        assert {
            "--port=23456",
            "--node-ip-address=127.0.0.1",
            "--node-manager-port=7000",
            "--object-manager-port=7001",
            "--min-worker-port=7002",
            "--max-worker-port=7099",
        } <= set(command)
        assert cluster.address == "127.0.0.1:23456"
        assert "nodes join at 127.0.0.1:23456" in caplog.text

    def test_a_port_that_is_taken_is_said(self, tmp_path: Path, fast_death: list[list[str]]) -> None:
        """Before Ray starts, which would say so by a traceback after a minute, and again for ever."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            (free,) = free_ports(1)
            for head, ports, words in (
                (port, range(free, free + 100), "at which nodes would join (TTSV_HEAD_PORT), is taken by another"),
                (free, range(port, port + 100), "the head's own (TTSV_NODE_PORTS), is taken on this machine"),
                (free, range(port - 1, port + 99), "the head's own (TTSV_NODE_PORTS), is taken on this machine"),
            ):
                cluster = LocalCluster(tmp_path, cpus=1, gpus=0, door=Door("127.0.0.1", head, ports))
                with pytest.raises(OSError, match=re.escape(f"port {port}, {words}")):
                    cluster.start()
                assert cluster.failed()
                cluster.stop()
        assert fast_death == []

    def test_a_port_that_a_killed_worker_s_cluster_has_is_made_free(
        self, tmp_path: Path, fast_death: list[list[str]]
    ) -> None:
        mine = identity()
        assert mine is not None
        folder = tmp_path / "tmp" / "ttsv-ray-dead"
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps({**mine, "start": 1}))
        code = "import socket, time; one = socket.create_server(('', 0)); print(one.getsockname()[1], flush=True)"
        left = [sys.executable, "-c", f"{code}; time.sleep(60)", str(folder)]
        with subprocess.Popen(left, start_new_session=True, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            cluster = LocalCluster(tmp_path, cpus=1, gpus=0, door=Door("127.0.0.1", port, range(7000, 7100)))
            cluster.start()
            assert process.wait(5) == -9
        cluster.stop()

    @pytest.mark.parametrize("address", ["192.0.2.77", "no.such.name.invalid"])
    def test_an_address_of_another_machine(self, tmp_path: Path, address: str) -> None:
        with pytest.raises(UserError, match=f"TTSV_HEAD_ADDRESS: {address} is no address of this machine"):
            Door.of(Settings(data_dir=tmp_path, head_address=address))


class Seen(Observation):
    """What a test says that the observer saw."""

    def __init__(self, nodes: tuple[Node, ...] | None) -> None:
        self.seen = nodes

    def nodes(self, address: str, env: object) -> tuple[Node, ...] | None:
        return self.seen


class TestNodes:
    def node(self, bf16: bool | None, state: NodeState = NodeState.ALIVE) -> Node:
        machine = Machine(Versions("1", "3", "2", "2"), (), 1.0, 1.0, bf16)
        return Node("x", "one", "10.0.0.1", 1, 0, 1.0, state=state, machine=machine)

    def test_those_of_a_cluster_elsewhere_are_not_known_until_they_were_seen(self) -> None:
        assert Cluster("elsewhere:1").nodes() is None
        assert Cluster("elsewhere:1", Seen(None)).nodes() is None
        assert Cluster("elsewhere:1", Seen((self.node(None),))).nodes() == (self.node(None),)

    def test_of_our_own_this_machine_is_known_at_once(self, tmp_path: Path) -> None:
        (here,) = LocalCluster(tmp_path, cpus=3, gpus=2, observation=Seen(None)).nodes() or ()
        assert (here.id, here.host, here.cpus, here.gpus, here.head) == ("", socket.gethostname(), 3, 2, True)
        assert here.alive
        assert here.memory_gib > 0.5

    def test_where_others_may_have_joined_nothing_is_taken_for_granted(self, tmp_path: Path) -> None:
        door = Door("127.0.0.1", 7, range(10, 20))
        assert LocalCluster(tmp_path, cpus=3, gpus=2, door=door, observation=Seen(None)).nodes() is None

    @pytest.mark.parametrize(
        ("known", "expected"),
        [((), None), ((None,), None), ((True, False), True), ((False, None), None), ((False, False), False)],
    )
    def test_bf16_where_any_node_has_it(self, known: tuple[bool | None, ...], expected: bool | None) -> None:
        left = self.node(True, NodeState.LEFT)
        cluster = Cluster("elsewhere:1", Seen((*map(self.node, known), left)))
        assert cluster.bf16() is expected

    def test_bf16_is_not_known_where_no_process_can_tell_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse() -> dict[str, str]:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr("workers.worker.ray_cluster.usable_instructions", refuse)
        assert LocalCluster(tmp_path, cpus=1, gpus=0).bf16() is None

    def test_bf16_of_our_own_is_this_machines_or_anothers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster = LocalCluster(tmp_path, cpus=1, gpus=0, observation=Seen((self.node(True),)))
        monkeypatch.setattr("workers.worker.ray_cluster.computes_bf16", lambda environment: False)
        assert cluster.bf16() is False, "Ray is not ready: nobody was asked"
        monkeypatch.setattr(cluster, "ready", lambda: True)
        assert cluster.bf16() is True
