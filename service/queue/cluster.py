"""What a worker's cluster consists of, as plain data: nodes, the machines that they are, their GPUs.

Workers and their children hand it on as JSON; nothing of the database is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from service.specs.states import NodeState

GPUS = ", GPU "
"""What stands between a host and its GPUs, where a trial says where it runs."""
UNKNOWN = "it has not said yet what it is"
"""The problem of a node of which nothing is known yet."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver names it."""

    name: str
    memory_gib: float


@dataclass(frozen=True)
class Versions:
    """What must be the same wherever trials of one cluster run.

    `package` is the version with a digest of the code after it; `torch` is without its build (`+cpu`).
    """

    package: str
    python: str
    ray: str
    torch: str


@dataclass(frozen=True)
class Machine:
    """What a machine says of itself.

    `gpus` are in the order of their numbers. `bf16`: whether the processor has instructions for that that trials may
    use, if it is known. `clock_seconds`: how far its clock is ahead of the worker's; None: not compared.
    """

    versions: Versions
    gpus: tuple[Gpu, ...]
    memory_gib: float
    free_disk_gib: float
    bf16: bool | None
    clock_seconds: float | None = None


@dataclass(frozen=True)
class Node:
    """A node of a cluster: what Ray gives trials on it, and the machine, None until it was asked.

    `id` is Ray's, of one stay in the cluster; one that was refused has an id of its own. `memory_gib` is what Ray gives
    to trials that reserve some. `problem` says why it was refused, or what is wrong with it now.
    """

    id: str
    host: str
    address: str
    cpus: float
    gpus: float
    memory_gib: float
    head: bool = False
    state: NodeState = NodeState.ALIVE
    machine: Machine | None = None
    problem: str | None = None

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return self.state is NodeState.ALIVE

    @property
    def fits(self) -> bool:
        """Whether trials may be started on it."""
        return self.alive and self.problem is None

    @property
    def unknown(self) -> bool:
        """Whether it is there, and has yet to say what it is: it may fit then."""
        return self.alive and self.problem == UNKNOWN


def named(host: str, node_id: str) -> str:
    """What a node is called where its host has several: by the host and the beginning of its id."""
    return f"{host} ({node_id[:8]})"


_NODES = TypeAdapter(tuple[Node, ...])
_MACHINE = TypeAdapter(Machine)


def machine_as_json(machine: Machine) -> bytes:
    """A machine on one line, without its end."""
    return _MACHINE.dump_json(machine)


def machine_from_json(text: str | bytes) -> Machine:
    """A machine; raises `ValueError`."""
    return _MACHINE.validate_json(text)


def nodes_as_json(nodes: Sequence[Node]) -> bytes:
    """Nodes on one line, without its end."""
    return _NODES.dump_json(tuple(nodes))


def nodes_from_json(line: bytes) -> tuple[Node, ...]:
    """The nodes of a line; raises `ValueError`."""
    return _NODES.validate_json(line)
