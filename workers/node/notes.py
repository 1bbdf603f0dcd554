"""Notes that head and nodes leave for each other in Ray's head (its key-value store), under the cluster's token.

The worker's observer writes the head's note every second; its time is the clock that nodes compare theirs with. A node
writes what it has before it starts Ray's processes, or why it does not.
"""

import dataclasses
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from service.queue.cluster import Machine, Versions
from service.storage import MARKER

MOST_CLOCK_SECONDS = 5.0
STORAGE, STORAGE_MARKER = "TTSV_STORAGE", "TTSV_STORAGE_MARKER"
"""Environment variables by which the observer knows the store of the trials' files, and a folder's marker."""
_NAMESPACE = b"ttsv"
_ANSWER_SECONDS = 10.0
_Note = TypeVar("_Note")


@dataclass(frozen=True)
class Folder:
    """The data folder that all nodes must see, and what the head wrote into its marker."""

    path: str
    marker: str

    def seen(self) -> bool:
        """Whether it is here."""
        try:
            return (Path(self.path) / MARKER).read_text() == self.marker
        except OSError:
            return False


@dataclass(frozen=True)
class HeadNote:
    """What nodes compare themselves with; `time` is in seconds since 1970.

    `data_dir`: the path of the worker's data folder, and `node` the id of Ray's part of the worker's machine.
    `storage`: the folder that keeps the trials' files instead, or a bucket's URL, which has no marker.
    """

    host: str
    versions: Versions
    time: float
    folder: Folder | None = None
    data_dir: str | None = None
    node: str | None = None
    storage: Folder | None = None


@dataclass(frozen=True)
class NodeNote:
    """What a node says of itself under the name that its part of Ray has."""

    name: str
    host: str
    machine: Machine
    problem: str | None = None


@dataclass(frozen=True)
class Complaint:
    """What a trial found wrong with a node that says nothing of itself; its name is Ray's id of the node."""

    problem: str


def name_here() -> str:
    """A name for one stay of this machine in a cluster."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def host_of(name: str) -> str:
    """The machine of such a name."""
    return name.rsplit("-", 2)[0]


class Shelf(Generic[_Note]):
    """Notes of one kind, by name; `client` is Ray's of its head."""

    def __init__(self, client: Any, kind: type[_Note], prefix: str) -> None:
        self._client, self._prefix = client, prefix.encode()
        self._json: TypeAdapter[_Note] = TypeAdapter(kind)

    def put(self, name: str, note: _Note) -> None:
        """Writes a note, over the one that was there."""
        self._client.internal_kv_put(
            self._key(name), self._json.dump_json(note), True, _NAMESPACE, timeout=_ANSWER_SECONDS
        )

    def get(self, name: str) -> _Note | None:
        """A note, None if there is none. Raises `ValueError` of another version's."""
        text = self._client.internal_kv_get(self._key(name), _NAMESPACE, timeout=_ANSWER_SECONDS)
        return None if text is None else self._json.validate_json(text)

    def names(self) -> list[str]:
        """Of all notes."""
        keys = self._client.internal_kv_keys(self._prefix, _NAMESPACE, timeout=_ANSWER_SECONDS)
        return [key.removeprefix(self._prefix).decode() for key in keys]

    def remove(self, name: str) -> None:
        """Takes a note away, if it is there."""
        self._client.internal_kv_del(self._key(name), False, _NAMESPACE, timeout=_ANSWER_SECONDS)

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()


class Notes:
    """The notes of a cluster: its head's, those of nodes, those of machines that were refused, complaints of trials.

    Its arguments are the address of Ray's head; the token is that of the environment. Errors are Ray's
    (`ray.exceptions.RaySystemError` among them), `AuthenticationError` at once where the token is wrong.
    """

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined] # which its stubs leave out

        self.client = GcsClient(address=address)
        self.heads = Shelf(self.client, HeadNote, "head/")
        self.nodes = Shelf(self.client, NodeNote, "node/")
        self.refused = Shelf(self.client, NodeNote, "refused/")
        self.complaints = Shelf(self.client, Complaint, "complaint/")


def complain(problem: str) -> None:
    """Notes what is wrong with the node of Ray on which this process is, until it is probed again.

    One whose note has a problem already stays as it is; of a node that left no note the observer is told. Errors are
    Ray's, and `ValueError`.
    """
    import ray

    context = ray.get_runtime_context()
    here = context.get_node_id()
    name = next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == here)  # type: ignore[no-untyped-call]
    notes = Notes(context.gcs_address)
    note = notes.nodes.get(name)
    if note is None:
        notes.complaints.put(here, Complaint(problem))
    elif note.problem is None:
        notes.nodes.put(name, dataclasses.replace(note, problem=problem))


def other_versions(head: HeadNote, versions: Versions) -> list[str]:
    """What of a machine is of another version than the head's, each with what mends it."""
    compared = (
        ("ttsv", versions.package, head.versions.package),
        ("Python", versions.python, head.versions.python),
        ("Ray", versions.ray, head.versions.ray),
        ("torch", versions.torch, head.versions.torch),
    )
    return [
        f"{name} is {here} here and {there} on the head: {_fix(name, here, there)}"
        for name, here, there in compared
        if here != there
    ]


def misfits(
    head: HeadNote, versions: Versions, *, clock_seconds: float | None = None, sees_folder: bool = True
) -> list[str]:
    """What keeps a machine from running trials of this head, each with what mends it."""
    found = other_versions(head, versions)
    if clock_seconds is not None and abs(clock_seconds) > MOST_CLOCK_SECONDS:
        side = "ahead of" if clock_seconds > 0 else "behind"
        found.append(
            f"the clock is {abs(clock_seconds):.0f} s {side} the head's, {MOST_CLOCK_SECONDS:.0f} s at most may be: "
            "set both by NTP (timedatectl set-ntp true)"
        )
    if head.folder is not None and not sees_folder:
        found.append(
            f"the head's data folder {head.folder.path} is not here (its file {MARKER} is missing, or of another "
            "folder): mount it at this path"
        )
    return found


def said(problems: Sequence[str]) -> str:
    """Problems in one line."""
    return "; ".join(problems)


def _fix(name: str, here: str, there: str) -> str:
    if name == "ttsv" and here.partition("+")[0] == there.partition("+")[0]:
        return "the code differs; install the same on both, and start both again"
    return "install the same on both"
