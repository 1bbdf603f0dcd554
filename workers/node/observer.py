"""The worker's eye on its cluster: a child that knows Ray, so that the worker need not.

`python -m workers.node.observer HOST:PORT FD DATA_DIR [MARKER]` writes the head's note every second, and a line of JSON
into the file descriptor: the nodes of the cluster, those that left and machines that were refused a minute ago at most.
What a node is it reads from its note, sees itself where it is this machine, and asks by a task of Ray otherwise. A node
that stands empty because Ray's head errs about it is made to say so. It ends when nobody reads, or when the head has
not answered for half a minute: its last line names no node then.
"""

import contextlib
import dataclasses
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Self

from service.errors import UserError
from service.queue.cluster import UNKNOWN, Machine, Node, machine_from_json, nodes_as_json
from service.specs.states import NodeState
from workers.node.machine import describe, own_address, versions
from workers.node.notes import STORAGE, STORAGE_MARKER, Folder, HeadNote, Notes, host_of, misfits, said

LOOK_SECONDS = 1.0
AWAY_SECONDS = 30.0
ASK_AGAIN_SECONDS = 600.0
_ASK_SOON_SECONDS = 30.0
"""After this a node is asked again that gave no answer: until then nothing may run on it."""
_OWN_SECONDS = 1.0
"""So long the observer's own machine is waited for, which nearly always has answered by then."""
SHOW_LEFT_SECONDS = 60.0
_STRANGER_SECONDS = 600.0
"""So long a machine may take from its note until it is a node: Ray is given a minute to start."""
_ANSWER_SECONDS = 60.0
_TIMEOUT_SECONDS = 5.0
_ERRS_SECONDS = 5.0
"""To reserve a place takes milliseconds, in which the head's books and the bundles of a node differ, too."""
_ROUSE_AGAIN_SECONDS = 60.0
"""Then after twice as long each time, up to an hour: what others run on a cluster that is not ours has no bundle."""
_ROUSE_SELDOM_SECONDS = 3600.0
_RESERVED = {name: re.compile(rf"{name}_group_[0-9a-f]+") for name in ("CPU", "GPU")}
"""What the bundles of a placement group have of a node together, among the node's resources."""
_ALIVE = 0  # of Ray's GcsNodeInfo.GcsNodeState
_GIB = 2**30
_OTHER_NOTES = "its ttsv is of another version, which writes other notes: install the same on both"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a node said of itself; no machine where it could not."""

    machine: Machine | None
    problem: str | None = None


_UNKNOWN = Answer(None, UNKNOWN)


class OwnMachine:
    """What the observer's own machine has, asked now and then by a thread.

    Its data folder may be one that holds for minutes whoever asks for it, and a virtual machine takes half a minute to
    say which instructions it lets processes use. The nodes are looked at meanwhile: else all of them would be given up.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, _UNKNOWN
        self._asking: threading.Thread | None = None
        self._ask_after = 0.0

    def answer(self) -> Answer:
        """The newest answer there is."""
        if self._asking is None or (not self._asking.is_alive() and time.monotonic() > self._ask_after):
            self._asking = threading.Thread(target=self._ask, name="own machine", daemon=True)
            with contextlib.suppress(RuntimeError):  # the machine has no thread for now
                self._asking.start()
                self._asking.join(_OWN_SECONDS)
        return self._known

    def _ask(self) -> None:
        self._ask_after = time.monotonic() + _ASK_SOON_SECONDS
        try:
            self._known = Answer(dataclasses.replace(describe(self._folder), clock_seconds=0.0))
        except OSError as error:
            logger.warning("what this machine has cannot be told: %s", error)
        else:
            self._ask_after = time.monotonic() + ASK_AGAIN_SECONDS


class Questions:
    """Asks nodes that left no note, each once and then rarely, by a task of Ray that reserves nothing."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ray: Any = None
        self._pending: dict[str, tuple[Any, float, float]] = {}
        self._answers: dict[str, Answer] = {}
        self._ask_after: dict[str, float] = {}

    def answer(self, node_id: str, head: HeadNote) -> Answer:
        """The newest answer of a node; asks it, if it is time, and does not wait."""
        if node_id in self._pending:
            self._collect(node_id, head)
        elif time.monotonic() >= self._ask_after.get(node_id, 0.0):
            try:
                self._ask(node_id, head)
            except Exception as error:  # Ray's, of many kinds: the other nodes are seen none the less
                logger.exception("a node cannot be asked")
                self._answers[node_id] = Answer(None, f"it cannot be asked ({type(error).__name__}: {error})")
                self._ask_after[node_id] = time.monotonic() + _ASK_SOON_SECONDS
        return self._answers.get(node_id, _UNKNOWN)

    def hear(self, node_id: str, problem: str) -> None:
        """Takes a trial's word for what is wrong with a node, until that is asked again."""
        self._pending.pop(node_id, None)
        self._answers[node_id] = dataclasses.replace(self._answers.get(node_id, _UNKNOWN), problem=problem)
        self._ask_after[node_id] = time.monotonic() + ASK_AGAIN_SECONDS

    def forget(self, others_than: Iterable[str]) -> None:
        """Drops what is known of nodes that are gone."""
        kept = set(others_than)
        for known in (self._pending, self._answers, self._ask_after):
            for node_id in known.keys() - kept:
                del known[node_id]

    def rouse(self, node_id: str) -> None:
        """Has a node run a task, whose answer nobody waits for: as it begins, the node tells the head what is free."""
        try:
            self._task(node_id, None)
        except Exception:  # Ray's, of many kinds
            logger.exception("a node cannot be roused")

    def _ask(self, node_id: str, head: HeadNote) -> None:
        self._pending[node_id] = self._task(node_id, head), time.time(), time.monotonic()

    def _task(self, node_id: str, head: HeadNote | None) -> Any:
        if self._ray is None:
            import ray

            ray.init(address=self._address, log_to_driver=False, configure_logging=False)
            self._ray = ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_describe)
        return task.remote(head)

    def _collect(self, node_id: str, head: HeadNote) -> None:
        question, asked_at, began = self._pending[node_id]
        done, _ = self._ray.wait([question], timeout=0)
        if not done and time.monotonic() - began < _ANSWER_SECONDS:
            return
        del self._pending[node_id]
        self._ask_after[node_id] = time.monotonic() + ASK_AGAIN_SECONDS
        try:
            text, their_time, sees_folder, misplaced = self._ray.get(question, timeout=0)
            machine = machine_from_json(text)
        except Exception as error:  # whatever a node answers: it is shown as its problem
            reason = str(error).strip().rpartition("\n")[2]
            self._answers[node_id] = Answer(None, f"it does not say what it is ({type(error).__name__}: {reason})")
            self._ask_after[node_id] = time.monotonic() + _ASK_SOON_SECONDS
            return
        # It was read between question and answer: no more than that is certain.
        ahead = their_time - min(max(their_time, asked_at), time.time())
        machine = dataclasses.replace(machine, clock_seconds=round(ahead, 2))
        problems = misfits(head, machine.versions, clock_seconds=ahead, sees_folder=sees_folder)
        self._answers[node_id] = Answer(machine, said([*problems, *misplaced]) or None)
        if misplaced or not sees_folder:  # a store may be away for a moment
            self._ask_after[node_id] = time.monotonic() + _ASK_SOON_SECONDS


def _describe(head: HeadNote | None) -> tuple[str, float, bool, list[str]]:
    """Runs on a node: its machine as JSON, its clock, whether it sees the folder that the head shares, if any.

    Then what keeps its trials from writing where they would: of these two it says only where it is asked for a head.
    """
    import tempfile
    import time
    from pathlib import Path

    from service.queue.cluster import machine_as_json
    from workers.node.machine import describe
    from workers.node.probe import folder_problems, store_problems
    from workers.node.scratch import node_data

    folder = Path(tempfile.gettempdir()) if head is None or head.data_dir is None else node_data(head.data_dir)
    machine = describe(folder, environment={})  # a task without a GPU sees none
    sees_folder = head is None or head.folder is None or head.folder.seen()
    problems = [] if head is None else [*store_problems(head), *folder_problems(head)]
    return machine_as_json(machine).decode(), time.time(), sees_folder, problems


class Books:
    """What Ray's head believes is taken of each node, where at times it errs.

    Where it cannot reach a node in the moment in which it reserves a place there, as just after the node came back at
    the address at which it died, the head (Ray 2.60) keeps the place as taken until it hears from the node anew. That
    is when something begins or ends on it: never, as all of its places seem taken.
    """

    def __init__(self, address: str) -> None:
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions  # type: ignore[attr-defined] # which its stubs leave out

        self._state: Any = GlobalState()  # type: ignore[no-untyped-call]
        self._state._initialize_global_state(
            GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
        )
        self._due: dict[str, tuple[float, float]] = {}
        """By node: when it is to be roused, and how long after that again."""

    def erring(self) -> list[str]:
        """The nodes of which for some seconds more was taken than is reserved; each again, but ever less often."""
        total, free = self._state.total_resources_per_node(), self._state.available_resources_per_node()
        moment = time.monotonic()
        first = moment + _ERRS_SECONDS, _ROUSE_AGAIN_SECONDS
        wrong = [node_id for node_id in total if _unaccounted(total[node_id], free.get(node_id, {}))]
        self._due = {node_id: self._due.get(node_id, first) for node_id in wrong}
        found = []
        for node_id, (due, pause) in self._due.items():
            if due <= moment:
                found.append(node_id)
                self._due[node_id] = moment + pause, min(2 * pause, _ROUSE_SELDOM_SECONDS)
        return found


def _is_here(info: Any) -> bool:
    """Whether a node is of this machine. What joined by `ray start` has the paths of the head, wherever it is."""
    try:
        return Path(info.raylet_socket_name).exists() and bool(own_address(info.node_manager_address, "its address"))
    except UserError:
        return False


def _unaccounted(total: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Whether processors or GPUs of a node are neither free nor a bundle's."""
    return any(
        total.get(name, 0) - free.get(name, 0) - sum(total[one] for one in total if reserved.fullmatch(one)) > 1e-3
        for name, reserved in _RESERVED.items()
    )


class Observer:
    """What is seen of a cluster, look by look."""

    def __init__(self, notes: Notes, questions: Questions, books: Books, head: HeadNote, data_dir: Path) -> None:
        self._notes, self._questions, self._books = notes, questions, books
        self._head, self._data_dir = head, data_dir
        self._left_at: dict[str, float] = {}
        self._refusals: dict[str, tuple[Node, float]] = {}
        self._joined_at: dict[str, float] = {}
        self._answers: dict[str, Answer] = {}
        self._here = OwnMachine(data_dir)
        self._strangers: dict[str, float] = {}
        """Names of notes, and since when no node has them."""

    def look(self) -> list[Node]:
        """The nodes as they are now; writes the head's note first, and anew once it can name the head."""
        self._tell()
        found = self._notes.client.get_all_node_info(timeout=_TIMEOUT_SECONDS).values()
        # Those of one host in the order in which they came: what began while the first was alone there names no other.
        infos = sorted(found, key=lambda info: info.start_time_ms)
        introduced = self._introduced({info.node_name for info in infos})
        self._hear()
        nodes, alive, here = [], [], []
        for info in infos:
            node_id = info.node_id.hex()
            if info.state != _ALIVE:
                if info.node_name in introduced:
                    self._notes.nodes.remove(info.node_name)
                if self._shows(node_id, info):
                    nodes.append(_node(node_id, info, self._answers.get(node_id, Answer(None)), NodeState.LEFT))
                continue
            alive.append(node_id)
            if _is_here(info):
                here.append((not info.is_head_node, node_id))
            answer = self._answers[node_id] = self._answer(node_id, info, introduced)
            nodes.append(_node(node_id, info, answer, NodeState.ALIVE))
        node = min(here)[1] if here else None
        if node != self._head.node:  # whoever sees a node by this look may ask it for the head
            self._head = dataclasses.replace(self._head, node=node)
            self._tell()
        self._questions.forget(alive)
        for node_id in self._books.erring():
            logger.warning("Ray's head has more of node %s as taken than is: a task there lets it look again", node_id)
            self._questions.rouse(node_id)
        self._answers = {node.id: self._answers[node.id] for node in nodes if node.id in self._answers}
        refused = self._refused([node for node in nodes if node.alive])
        return [*sorted(nodes, key=lambda node: (not node.head, node.host)), *refused]

    def _introduced(self, nodes: Set[str]) -> set[str]:
        """The names under which notes were left; those go that no node had for long, as Ray did not start there."""
        moment, names = time.monotonic(), set(self._notes.nodes.names())
        self._strangers = {name: self._strangers.get(name, moment) for name in names - nodes}
        for name, since in self._strangers.items():
            if moment - since > _STRANGER_SECONDS:
                self._notes.nodes.remove(name)
                names.discard(name)
        return names

    def _hear(self) -> None:
        """What trials complain of, where nobody but us tells of their node."""
        for node_id in self._notes.complaints.names():
            try:
                complaint = self._notes.complaints.get(node_id)
            except ValueError:  # another version's, which its node will say of itself
                complaint = None
            self._notes.complaints.remove(node_id)
            if complaint is not None:
                self._questions.hear(node_id, complaint.problem)

    def _tell(self) -> None:
        self._notes.heads.put("head", dataclasses.replace(self._head, time=time.time()))

    def _shows(self, node_id: str, info: Any) -> bool:
        """Whether a node that left is told of still."""
        left_at = self._left_at.setdefault(
            node_id, time.monotonic() - max(0.0, time.time() - info.end_time_ms / 1000 if info.end_time_ms else 0.0)
        )
        return time.monotonic() - left_at < SHOW_LEFT_SECONDS

    def _answer(self, node_id: str, info: Any, introduced: set[str]) -> Answer:
        if info.node_name in introduced:
            try:
                note = self._notes.nodes.get(info.node_name)
            except ValueError:
                return Answer(None, _OTHER_NOTES)
            return _UNKNOWN if note is None else Answer(note.machine, note.problem)
        if _is_here(info):
            return self._here.answer()
        return self._questions.answer(node_id, self._head)

    def _refused(self, there: Sequence[Node]) -> list[Node]:
        """Machines that asked to join, one row a host however often it tries, until a node joined from there since.

        Of one that was there before, another machine may have the name, or share the host with it.
        """
        for name in self._notes.refused.names():
            try:
                note = self._notes.refused.get(name)
                refusal = None if note is None else _refusal(note.host, note.machine, note.problem)
            except ValueError:
                refusal = _refusal(host_of(name), None, _OTHER_NOTES)
            self._notes.refused.remove(name)
            if refusal is not None:
                self._refusals[refusal.host] = refusal, time.monotonic()
        moment = time.monotonic()
        self._joined_at = {node.id: self._joined_at.get(node.id, moment) for node in there}
        over = dict.fromkeys(self._refusals, moment - SHOW_LEFT_SECONDS)
        for node in there:
            over[node.host] = max(over.get(node.host, 0.0), self._joined_at[node.id])
        self._refusals = {host: (node, at) for host, (node, at) in self._refusals.items() if at > over[host]}
        return [node for node, _ in self._refusals.values()]


def _refusal(host: str, machine: Machine | None, problem: str | None) -> Node:
    return Node(
        id=f"refused-{host}"[:100],
        host=host,
        address="",
        cpus=0,
        gpus=0 if machine is None else len(machine.gpus),
        memory_gib=0 if machine is None else machine.memory_gib,
        state=NodeState.REFUSED,
        machine=machine,
        problem=problem,
    )


def _node(node_id: str, info: Any, answer: Answer, state: NodeState) -> Node:
    total: Mapping[str, float] = info.resources_total
    return Node(
        id=node_id,
        host=info.node_manager_hostname,
        address=info.node_manager_address,
        cpus=total.get("CPU", 0),
        gpus=total.get("GPU", 0),
        memory_gib=math.floor(10 * total.get("memory", 0) / _GIB) / 10,  # a trial may ask for all of it
        head=info.is_head_node,
        state=state,
        machine=answer.machine,
        problem=answer.problem,
    )


class Line:
    """Tells the worker what was seen. Where nothing was for too long, tells of no node, and ends this process.

    A call to a head that stands still may never return. As a context, it no longer minds what comes after.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._told, self._over = descriptor, threading.Event(), False
        threading.Thread(target=self._watch, name="line", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._told.set()

    def tell(self, nodes: Sequence[Node]) -> None:
        """Writes one line. Raises `BrokenPipeError` where nobody reads."""
        line = nodes_as_json(nodes) + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]
        self._told.set()

    def _watch(self) -> None:
        while self._told.wait(AWAY_SECONDS):
            self._told.clear()
            if self._over:
                return
        logger.error("the head has not answered for %.0f s", AWAY_SECONDS)
        with contextlib.suppress(BrokenPipeError):
            self.tell([])
        os._exit(1)  # another observer begins anew


def observe(observer: Observer, descriptor: int) -> None:
    """Looks and tells until nobody reads, or the head is away for too long."""
    with Line(descriptor) as line:
        while True:
            began = time.monotonic()
            try:
                nodes = observer.look()
            except Exception:  # Ray's, of many kinds
                logger.exception("the cluster does not answer")
            else:
                line.tell(nodes)
            time.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - began)))


def main() -> None:
    """The child's whole life."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    from ray._private.services import canonicalize_bootstrap_address

    given, descriptor, data_dir, *marker = sys.argv[1:]
    address = canonicalize_bootstrap_address(given) or given  # `auto`, for one
    folder = Folder(data_dir, marker[0]) if marker else None
    place = os.environ.get(STORAGE)
    storage = Folder(place, os.environ.get(STORAGE_MARKER, "")) if place else None
    head = HeadNote(socket.gethostname(), versions(), time.time(), folder, data_dir, storage=storage)
    try:
        observe(Observer(Notes(address), Questions(address), Books(address), head, Path(data_dir)), int(descriptor))
    except BrokenPipeError:
        logger.info("the worker is gone")


if __name__ == "__main__":
    main()
