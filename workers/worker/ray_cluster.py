"""The Ray cluster of one worker: a local one that lives and dies with it, or one that runs elsewhere already."""

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from service.queue.cluster import Node
from service.settings import Settings
from ttsv.hardware.processor import computes_bf16
from workers.node.machine import is_loopback, memory_bytes, own_address, usable_instructions, without_settings
from workers.node.mps import Mps
from workers.node.raylet import (
    RayProcess,
    free_ports,
    port_options,
    remove_leftovers,
    server_ports,
    taken_port,
    token_environment,
)
from workers.worker.observation import Observation

logger = logging.getLogger(__name__)

_WITH_NODES = {
    # The head looks at every node. One that does not listen any more is gone after five looks (Ray: every 3 s), one
    # whose machine does not answer at all after five such waits (Ray: of 10 s).
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    # A node asks as often whether it belongs to this head, and not to one that is gone (Ray: every 60 s), and waits so
    # long for one that does not answer (Ray: 60 s), with what runs on it. Nodes have both from the head.
    "RAY_raylet_liveness_self_check_interval_ms": "5000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}


HEADLESS_SECONDS = 60.0
"""A cluster that has no head that answers for so long is started anew."""
STUCK = "Ray does not start"
"""How the worker's complaint begins of a cluster that ended twice in a row without having been ready."""


@dataclass(frozen=True)
class Door:
    """Where further nodes reach the head: its address and port, and the ports of all else (of step 1)."""

    address: str
    port: int
    ports: range

    @classmethod
    def of(cls, settings: Settings) -> "Door | None":
        """As the settings say it, None where nobody can join. Raises `UserError` where this machine cannot."""
        if settings.head_address is None:
            return None
        address = own_address(settings.head_address, "TTSV_HEAD_ADDRESS")
        if is_loopback(address):
            says = "TTSV_HEAD_ADDRESS: %s is %s here: only nodes on this machine can join"
            logger.warning(says, settings.head_address, address)
        return cls(address, settings.head_port, settings.ports)


class Cluster:
    """Where drivers find Ray: at an address (`RAY_ADDRESS`) at which somebody else runs it, who starts and stops it.

    Nothing is known of its nodes without an `observation`.
    """

    def __init__(self, address: str, observation: Observation | None = None) -> None:
        self.address = address
        self._observation = observation

    def start(self) -> None:
        """Begins to start; does not wait."""

    def ready(self) -> bool:
        """Whether drivers can connect. Elsewhere it is taken for granted: a driver that cannot ends, and gives back."""
        return True

    def failed(self) -> bool:
        """Whether it is gone, or did not come up in time; of one that runs elsewhere we cannot tell."""
        return False

    def last_words(self) -> str:
        """The last line of what it said, where that is known."""
        return ""

    def stop(self) -> None:
        """Ends it, or our part in it; nothing of that is left."""
        if self._observation is not None:
            self._observation.stop()

    def env(self) -> dict[str, str]:
        """What a driver's environment needs to connect, beyond the worker's own."""
        return {}

    def nodes(self) -> Sequence[Node] | None:
        """The nodes as they were last seen, those that just left or were refused among them; None: not known yet.

        Ask again and again, from the main thread: what looks at them is kept alive by it.
        """
        return self._observed({})

    def _observed(self, extra: Mapping[str, str]) -> Sequence[Node] | None:
        if self._observation is None or not self.ready():
            return None
        return self._observation.nodes(self.address, {**without_settings(), **self.env(), **extra})

    def bf16(self) -> bool | None:
        """Whether a node's processor has instructions for bf16 that it lets trials use; None where it is not known."""
        known = {node.machine.bf16 for node in self.nodes() or () if node.alive and node.machine is not None}
        return True if True in known else False if known == {False} else None


class LocalCluster(Cluster):
    """The head of a cluster, which lives and dies with this worker; further nodes may join through its `door`.

    `environment` says which GPUs are ours, where that is not all that this process sees; `mps` is for trials on them.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        cpus: int,
        gpus: int,
        environment: Mapping[str, str] = MappingProxyType({}),
        door: Door | None = None,
        observation: Observation | None = None,
        mps: Mps | None = None,
    ) -> None:
        super().__init__("", observation)
        self._cpus, self._gpus, self._environment, self._door = cpus, gpus, environment, door
        self._token = data_dir / "token"
        log = data_dir / "logs" / f"ray-{os.getpid()}.log"
        self._ray = RayProcess({"gcs_server", "raylet"}, self._token, log, mps)

    def start(self) -> None:
        """Starts in a fresh folder, on fresh ports where no door is open.

        Raises `OSError` where the machine refuses, or ports of the door are taken.
        """
        _write_token(self._token)
        (port,) = free_ports(1)
        options: dict[str, object] = {"num-cpus": self._cpus, "num-gpus": self._gpus, "include-dashboard": "false"}
        environment = self._environment
        if self._door is not None:
            port = self._door.port
            _require_free(self._door)
            options |= {"node-ip-address": self._door.address, **port_options(self._door.ports)}
            environment = {**environment, **_WITH_NODES}
            logger.info("nodes join at %s:%d with the token in %s", self._door.address, port, self._token)
        options["port"] = port
        self.address = f"127.0.0.1:{port}"
        self._ray.start("--head", "--no-monitor", options=options, environment=environment)

    def ready(self) -> bool:
        """Whether the raylet listens, and the head answers."""
        return self._ray.ready() and not self._is_headless()

    def failed(self) -> bool:
        """Whether a part of it died, or stands still, or it takes too long to start."""
        return self._ray.failed() or self._is_headless()

    def last_words(self) -> str:
        """The last line of its log, or that it stands still."""
        if self._is_headless():
            return "its head does not answer, or counts this machine as gone"
        return self._ray.last_words().rpartition("\n")[2]

    def stop(self) -> None:
        """Ends all of it on this machine; no process and no folder stays."""
        super().stop()
        self._ray.stop()

    def _is_headless(self) -> bool:
        """Whether its GCS or its raylet, which live, stand still: without a word, and whatever is asked of them."""
        return self._observation is not None and self._observation.headless_seconds() > HEADLESS_SECONDS

    def env(self) -> dict[str, str]:
        """Authentication by token: Ray listens on every address of the machine."""
        return token_environment(self._token)

    def nodes(self) -> Sequence[Node] | None:
        """The nodes as they were last seen; before that this machine alone, unless others may have joined."""
        shown = {**usable_instructions(), **self._environment}  # of the machine's cards those that are ours
        if self._door is not None:
            return self._observed(shown)
        memory = round(memory_bytes() / 2**30, 1)
        here = Node("", socket.gethostname(), "127.0.0.1", self._cpus, self._gpus, memory, head=True)
        return self._observed(shown) or (here,)

    def bf16(self) -> bool | None:
        """Whether this machine's processor has instructions for bf16 that it lets trials use, or another node's has."""
        try:
            here = computes_bf16({**os.environ, **usable_instructions()})
        except OSError:  # no process can be started now that would tell: it is asked again
            return None
        return here or super().bf16() or here


def _require_free(door: Door) -> None:
    """Raises `OSError` where Ray would listen in vain, and say so by a traceback."""
    remove_leftovers()  # of a worker that was killed: they listen still
    if taken_port([door.port]):
        raise OSError(f"port {door.port}, at which nodes would join (TTSV_HEAD_PORT), is taken by another program")
    if (port := taken_port(server_ports(door.ports))) is not None:
        words = "is taken on this machine, by a node or another head? Choose others"
        raise OSError(f"port {port}, the head's own (TTSV_NODE_PORTS), {words}")


def _write_token(path: Path) -> None:
    """Creates the token, readable by its owner only, unless it is there; several workers may try at once."""
    if path.exists():
        return  # and no room on the disk is needed for one more
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:  # noqa: PTH123
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(descriptor)  # a machine that dies now must not leave an empty token for good
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(fresh)
    finally:
        fresh.unlink()
