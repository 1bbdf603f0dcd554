"""What the observer makes of Ray's nodes and of their notes, with stand-ins for Ray."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from service.queue.cluster import Machine, Versions, machine_as_json, nodes_from_json
from service.queue.nodes import AtWork, by_node
from service.specs.states import NodeState
from service.storage import MARKER
from tests.workers.conftest import wait_for
from workers.node import observer
from workers.node.notes import Complaint, Folder, HeadNote, NodeNote
from workers.node.observer import Answer, Books, Observer, Questions

if TYPE_CHECKING:
    from collections.abc import Callable

VERSIONS = Versions(package="0.1.0+abc", python="3.11.9", ray="2.60.0", torch="2.9.1")
MACHINE = Machine(VERSIONS, (), 64.0, 10.0, True)
HEAD = HeadNote("head", VERSIONS, 0.0)


class Shelf:
    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def put(self, name: str, note: Any) -> None:
        self.notes[name] = note

    def get(self, name: str) -> Any:
        return self.notes.get(name)

    def names(self) -> list[str]:
        return list(self.notes)

    def remove(self, name: str) -> None:
        del self.notes[name]


class Board:
    """Notes, and the nodes that Ray knows."""

    def __init__(self) -> None:
        self.heads, self.nodes, self.refused, self.complaints = Shelf(), Shelf(), Shelf(), Shelf()
        self.infos: list[Any] = []
        self.client = SimpleNamespace(get_all_node_info=lambda timeout: dict(enumerate(self.infos)))

    def add(
        self, name: str, number: int, *, socket: str = "/nowhere", address: str = "127.0.0.1", **resources: float
    ) -> Any:
        info = SimpleNamespace(
            node_id=bytes([number]) * 2,
            node_name=name,
            state=0,
            node_manager_hostname=f"host-{name}",
            node_manager_address=address,
            raylet_socket_name=socket,
            is_head_node=number == 1,
            resources_total={"memory": 2.5 * 2**30} | resources,
            start_time_ms=0,
            end_time_ms=0,
        )
        self.infos.append(info)
        return info


def stand_at(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Has the observer alone go by a clock: loops of other threads, which go by the real one, would stand still."""
    monkeypatch.setattr(observer, "time", SimpleNamespace(time=time.time, monotonic=clock))


class Asked:
    def __init__(self) -> None:
        self.ids: list[str] = []
        self.kept: list[str] = []
        self.roused: list[str] = []
        self.heard: dict[str, str] = {}

    def hear(self, node_id: str, problem: str) -> None:
        self.heard[node_id] = problem

    def answer(self, node_id: str, head: HeadNote) -> Answer:
        self.ids.append(node_id)
        return Answer(None, "not yet")

    def forget(self, others_than: list[str]) -> None:
        self.kept = others_than

    def rouse(self, node_id: str) -> None:
        self.roused.append(node_id)


class Accounts:
    """What Ray's head has of each node: in all, and free."""

    def __init__(self) -> None:
        self.total: dict[str, dict[str, float]] = {}
        self.free: dict[str, dict[str, float]] = {}

    def total_resources_per_node(self) -> dict[str, dict[str, float]]:
        return self.total

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return self.free


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def accounts() -> Accounts:
    return Accounts()


@pytest.fixture
def looking(board: Board, accounts: Accounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observer:
    monkeypatch.setattr(observer, "describe", lambda folder: dataclasses.replace(MACHINE, memory_gib=1.0))
    books = Books("127.0.0.1:1")  # connects when it is asked
    books._state = accounts
    return Observer(board, Asked(), books, HEAD, tmp_path)  # type: ignore[arg-type]


def test_every_look_writes_the_clock(board: Board, looking: Observer) -> None:
    looking.look()
    first = board.heads.notes["head"]
    assert abs(first.time - time.time()) < 1
    looking.look()
    assert board.heads.notes["head"].time > first.time
    assert first.versions == VERSIONS


def test_who_sees_a_node_can_ask_it_for_the_head(board: Board, looking: Observer, tmp_path: Path) -> None:
    """A node is told of by the look that first sees it, and may look for the head's data folder at once."""
    here = tmp_path / "raylet"
    here.touch()
    board.add("b", 2, CPU=4)
    head = board.add("a", 1, socket=str(here))
    assert len(looking.look()) == 2
    assert board.heads.notes["head"].node == "0101"
    head.raylet_socket_name = "/nowhere"
    looking.look()
    assert board.heads.notes["head"].node is None


def test_a_node_is_not_said_to_have_more_memory_than_it_gives(board: Board, looking: Observer) -> None:
    """A trial that asks for all of it would fit, and never begin."""
    board.add("a", 1, memory=61.96 * 2**30)
    (node,) = looking.look()
    assert node.memory_gib == 61.9


def test_a_node_is_what_it_says_of_itself(board: Board, looking: Observer, tmp_path: Path) -> None:
    here = tmp_path / "raylet"
    here.touch()
    board.add("b", 3, CPU=8, GPU=2)
    board.add("c", 2, CPU=4)
    board.add("a", 1, socket=str(here))
    board.nodes.put("b", NodeNote("b", "host-b", MACHINE, "the clock is off"))
    head, noted, asked = looking.look()
    assert (noted.id, noted.host, noted.cpus, noted.gpus, noted.memory_gib) == ("0303", "host-b", 8, 2, 2.5)
    assert (noted.machine, noted.problem, noted.state) == (MACHINE, "the clock is off", NodeState.ALIVE)
    assert head.head
    assert head.machine is not None
    assert (head.machine.memory_gib, head.machine.clock_seconds) == (1.0, 0.0), "it is this machine"
    assert (asked.machine, asked.problem) == (None, "not yet")
    questions: Any = looking._questions
    assert questions.ids == ["0202"]
    assert questions.kept == ["0303", "0202", "0101"]


def test_a_machine_that_joined_by_ray_start_is_asked_though_it_has_the_paths_of_the_head(
    board: Board, looking: Observer, tmp_path: Path
) -> None:
    socket = tmp_path / "raylet"
    socket.touch()
    board.add("a", 1, socket=str(socket))
    board.add("", 2, socket=str(socket), address="192.0.2.9")  # of no machine: kept for documents (RFC 5737)
    _, other = looking.look()
    assert (other.machine, other.problem) == (None, "not yet")
    questions: Any = looking._questions
    assert questions.ids == ["0202"]
    assert board.heads.notes["head"].node == "0101"


def test_of_nodes_whose_hosts_are_called_alike_the_first_is_the_one_that_came_first(
    board: Board, looking: Observer
) -> None:
    """A trial that began while it was alone names its host, and no node (`by_node`)."""
    for number, came in ((2, 20), (3, 10)):
        info = board.add("b", number)
        info.start_time_ms = came
    board.add("a", 4)
    nodes = looking.look()
    assert [node.id for node in nodes] == ["0404", "0303", "0202"]
    assert list(by_node([AtWork(1, 1, "host-b", None)], nodes)) == ["0303"]


class TestOwnMachine:
    def test_a_folder_that_cannot_be_looked_at_hides_no_node(
        self, board: Board, looking: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "raylet").touch()
        board.add("a", 1, socket=str(tmp_path / "raylet"))
        board.add("b", 2)
        (before, *_) = looking.look()
        assert before.machine is not None
        asked = []

        def stale(folder: Path) -> Machine:
            asked.append(folder)
            raise OSError(errno.ESTALE, "Stale file handle")

        monkeypatch.setattr(observer, "describe", stale)
        looking._here._ask_after = 0.0
        (now, other) = looking.look()
        assert (now, other.host) == (before, "host-b")
        looking.look()
        assert len(asked) == 1, "it is asked again before long, not each second"

    def test_nor_does_one_that_holds_whoever_looks(
        self, board: Board, looking: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "raylet").touch()
        board.add("a", 1, socket=str(tmp_path / "raylet"))
        free = threading.Event()

        def held(folder: Path) -> Machine:
            free.wait(60)
            return MACHINE

        monkeypatch.setattr(observer, "describe", held)
        monkeypatch.setattr(observer, "_OWN_SECONDS", 0.01)
        (unknown,) = looking.look()
        assert (unknown.machine, unknown.problem) == (None, "it has not said yet what it is")
        free.set()
        looking._here._asking.join(10)  # type: ignore[union-attr]
        (known,) = looking.look()
        assert known.machine is not None


def test_the_note_of_a_machine_on_which_ray_did_not_start_goes(
    board: Board, looking: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again under another name, as often as it fails."""
    board.add("a", 1)
    for name in ("a", "b"):
        board.nodes.put(name, NodeNote(name, "host", MACHINE, None))
    looking.look()
    moment = time.monotonic() + observer._STRANGER_SECONDS + 1
    assert board.nodes.names() == ["a", "b"], "it may be starting"
    stand_at(monkeypatch, lambda: moment)
    looking.look()
    assert board.nodes.names() == ["a"]


def test_what_left_is_told_for_a_while(board: Board, looking: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    info = board.add("b", 2)
    board.nodes.put("b", NodeNote("b", "host-b", MACHINE))
    looking.look()
    info.state, info.end_time_ms = 1, int(time.time() * 1000)
    for _ in range(2):
        (left,) = looking.look()
        assert (left.state, left.machine) == (NodeState.LEFT, MACHINE)
    assert board.nodes.notes == {}, "its note is of no use to anybody"
    monkeypatch.setattr(observer, "SHOW_LEFT_SECONDS", 0.0)
    assert looking.look() == []


# As the head showed two nodes when it had failed to reserve places on the second, which had just come back.
FULL = {"CPU": 2.0, "memory": 1e9, "CPU_group_0_5c88f0": 1.0, "CPU_group_5c88f0": 1.0} | {
    "CPU_group_0_12c3ab": 1.0,
    "CPU_group_12c3ab": 1.0,
    "bundle_group_5c88f0": 1000.0,
    "bundle_group_12c3ab": 1000.0,
}
EMPTY = {"CPU": 2.0, "memory": 1e9}


class TestBooks:
    """Ray's head takes a place for taken that is free: whose node never has anything to tell would stand empty."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        clock = SimpleNamespace(now=0.0)
        stand_at(monkeypatch, lambda: clock.now)
        return clock

    def seen(self, looking: Observer, clock: SimpleNamespace, moment: float) -> list[str]:
        """Who is roused by a look at a moment."""
        clock.now = moment
        questions: Any = looking._questions
        before = len(questions.roused)
        looking.look()
        return list(questions.roused[before:])

    def test_a_node_that_stands_empty_is_roused(
        self, looking: Observer, accounts: Accounts, clock: SimpleNamespace
    ) -> None:
        accounts.total = {"full": FULL, "empty": EMPTY}
        accounts.free = {"full": {"memory": 1e9}, "empty": {"memory": 1e9}}
        moments = [moment for moment in range(0, 20_000, 5) if self.seen(looking, clock, moment)]
        assert moments == [5, 65, 185, 425, 905, 1865, 3785, 7385, 10985, 14585, 18185], "ever less often"
        questions: Any = looking._questions
        assert set(questions.roused) == {"empty"}
        accounts.free = {"full": {"memory": 1e9}, "empty": EMPTY}
        assert self.seen(looking, clock, 30_000) == []
        accounts.free = {"full": {"memory": 1e9}, "empty": {"memory": 1e9}}
        assert [self.seen(looking, clock, moment) for moment in (30_001, 30_006)] == [[], ["empty"]]

    def test_one_that_errs_for_a_moment_is_not(
        self, looking: Observer, accounts: Accounts, clock: SimpleNamespace
    ) -> None:
        accounts.total = {"empty": EMPTY}
        for moment in range(0, 20, 4):
            accounts.free = {"empty": {"CPU": 1.0}}
            assert self.seen(looking, clock, moment) == []
            accounts.free = {"empty": EMPTY}
            assert self.seen(looking, clock, moment + 2) == []

    @pytest.mark.parametrize(
        ("total", "free", "errs"),
        [
            ({"GPU": 4.0}, {"GPU": 4.0}, False),
            ({"GPU": 4.0}, {"GPU": 3.0}, True),
            ({"GPU": 4.0, "GPU_group_0_ab": 0.5, "GPU_group_ab": 0.5}, {"GPU": 3.5}, False),
            ({"GPU": 4.0, "GPU_group_0_ab": 0.5, "GPU_group_ab": 0.5}, {"GPU": 3.0}, True),
            ({"GPU": 1.0, "GPU_group_0_ab": 0.1, "GPU_group_1_ab": 0.2, "GPU_group_ab": 0.3}, {"GPU": 0.7}, False),
            ({"memory": 4.0}, {}, False),
        ],
    )
    def test_what_bundles_have_is_taken(
        self,
        looking: Observer,
        accounts: Accounts,
        clock: SimpleNamespace,
        total: dict[str, float],
        free: dict[str, float],
        errs: bool,
    ) -> None:
        accounts.total, accounts.free = {"node": total}, {"node": free}
        self.seen(looking, clock, 0)
        assert self.seen(looking, clock, 10) == ["node"] * errs


def test_what_left_before_is_not_told(board: Board, looking: Observer) -> None:
    info = board.add("b", 2)
    info.state, info.end_time_ms = 1, int((time.time() - 3600) * 1000)
    assert looking.look() == []


def test_what_a_trial_finds_wrong_with_a_node_that_says_nothing_is_heard_once(
    board: Board, looking: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    monkeypatch.setattr(looking, "_questions", asked)
    board.complaints.put("0202", Complaint("another data set"))
    looking.look()
    assert (asked.heard, board.complaints.notes) == ({"0202": "another data set"}, {})


def test_a_machine_that_tries_again_and_again_is_refused_once(board: Board, looking: Observer) -> None:
    for attempt in ("x-1", "x-2"):
        board.refused.put(attempt, NodeNote(attempt, "x", MACHINE, "another Python"))
        (refused,) = looking.look()
        assert (refused.id, refused.state, refused.problem) == ("refused-x", NodeState.REFUSED, "another Python")
        assert board.refused.notes == {}
    assert len(looking.look()) == 1, "it is told for a while"


def test_a_refusal_is_told_until_a_node_joins_from_there(board: Board, looking: Observer) -> None:
    board.add("x", 2)
    looking.look()
    board.refused.put("host-x-1", NodeNote("host-x-1", "host-x", MACHINE, "another Python"))
    there, refused = looking.look()
    assert (there.state, refused.state, refused.host) == (NodeState.ALIVE, NodeState.REFUSED, there.host)
    board.add("x", 3)
    assert {node.state for node in looking.look()} == {NodeState.ALIVE}


def test_notes_of_another_version_are_said_to_be(
    board: Board, looking: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(name: str) -> None:
        raise ValueError("1 validation error for NodeNote")

    board.add("b", 2)
    board.nodes.put("b", "?")
    board.refused.put("gpu-2-4711-abcdef", "?")
    for shelf in (board.nodes, board.refused):
        monkeypatch.setattr(shelf, "get", unreadable)
    node, refused = looking.look()
    assert "another version" in (node.problem or "")
    assert (refused.host, refused.state, refused.machine) == ("gpu-2", NodeState.REFUSED, None)
    assert "another version" in (refused.problem or "")
    assert board.refused.notes == {}


class TestObserve:
    def test_it_ends_when_nobody_reads(self, looking: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(observer, "LOOK_SECONDS", 0.0)
        reader, writer = os.pipe()
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            observer.observe(looking, writer)
        os.close(writer)
        # What would end the process where nothing is told.
        wait_for(lambda: "line" not in {thread.name for thread in threading.enumerate()}, 10)

    @pytest.mark.parametrize("how", ["refuses", "hangs"])
    def test_a_head_that_does_not_answer_for_long_ends_it(
        self, looking: Observer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
    ) -> None:
        ended = threading.Event()

        def away() -> Any:
            if ended.is_set():
                raise KeyboardInterrupt
            if how == "hangs":
                ended.wait()
            raise RuntimeError("no answer")

        def end(code: int) -> None:
            ended.set()

        monkeypatch.setattr(looking, "look", away)
        monkeypatch.setattr(observer, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(observer, "AWAY_SECONDS", 0.1)
        monkeypatch.setattr(os, "_exit", end)
        reader, writer = os.pipe()
        with pytest.raises(KeyboardInterrupt):
            observer.observe(looking, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            assert [nodes_from_json(line) for line in told] == [()]
        assert (caplog.text.count("the cluster does not answer") > 2) == (how == "refuses")


UNKNOWN = Answer(None, "it has not said yet what it is")


class FakeRay:
    """Ray's tasks: what is asked is answered when the test says so."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.asked: list[str] = []
        self.tasks: list[tuple[Any, ...]] = []

    def remote(self, **options: Any) -> Any:
        self.asked.append(options["scheduling_strategy"].node_id)
        assert options["num_cpus"] == 0
        return lambda function: SimpleNamespace(remote=lambda *given: self._begin(function, *given))

    def _begin(self, *task: Any) -> str:
        self.tasks.append(task)
        return "task"

    def run(self) -> None:
        """Answers what was asked last, on this machine."""
        function, *given = self.tasks[-1]
        self.answer = function(*given)

    def wait(self, tasks: list[Any], timeout: float) -> Any:
        return (tasks, []) if self.answer is not None else ([], tasks)

    def get(self, task: Any, timeout: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class TestQuestions:
    NODE = "ab" * 28

    @pytest.fixture
    def ray(self) -> FakeRay:
        return FakeRay()

    @pytest.fixture
    def questions(self, ray: FakeRay) -> Questions:
        questions = Questions("nowhere")
        questions._ray = ray
        return questions

    def test_a_node_is_asked_once(self, ray: FakeRay, questions: Questions) -> None:
        assert questions.answer(self.NODE, HEAD) == UNKNOWN
        assert questions.answer(self.NODE, HEAD) == UNKNOWN
        ray.answer = machine_as_json(MACHINE), time.time(), True, []
        found = questions.answer(self.NODE, HEAD)
        assert found.machine is not None
        assert found.machine.clock_seconds == 0
        assert found.problem is None
        questions.answer(self.NODE, HEAD)
        assert ray.asked == [self.NODE]
        questions.forget([])
        assert questions.answer(self.NODE, HEAD) == UNKNOWN
        assert len(ray.asked) == 2

    def test_a_trials_word_holds_until_it_is_asked_again(
        self, ray: FakeRay, questions: Questions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        questions.answer(self.NODE, HEAD)
        ray.answer = machine_as_json(MACHINE), time.time(), True, []
        machine = questions.answer(self.NODE, HEAD).machine
        questions.hear(self.NODE, "another data set")
        for _ in range(3):
            assert questions.answer(self.NODE, HEAD) == Answer(machine, "another data set")
        assert ray.asked == [self.NODE]
        moment = time.monotonic() + observer.ASK_AGAIN_SECONDS
        stand_at(monkeypatch, lambda: moment)
        questions.answer(self.NODE, HEAD)
        assert questions.answer(self.NODE, HEAD).problem is None
        assert ray.asked == [self.NODE] * 2

    def test_one_that_is_roused_runs_a_task_that_nobody_waits_for(self, ray: FakeRay, questions: Questions) -> None:
        questions.rouse(self.NODE)
        assert ray.asked == [self.NODE]
        assert questions._pending == {}
        ray.remote = lambda **_: 1 / 0  # type: ignore[method-assign]
        questions.rouse(self.NODE)

    def test_one_that_does_not_fit_says_why(self, ray: FakeRay, questions: Questions) -> None:
        questions.answer(self.NODE, HEAD)
        other = dataclasses.replace(MACHINE, versions=dataclasses.replace(VERSIONS, torch="1.0"))
        ray.answer = machine_as_json(other), time.time() - 60, True, []
        found = questions.answer(self.NODE, HEAD)
        assert "torch is 1.0 here and 2.9.1 on the head" in (found.problem or "")
        assert "60 s behind" in (found.problem or "")

    def test_one_without_the_heads_store_or_a_place_to_write_says_so(
        self, ray: FakeRay, questions: Questions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Its trials would train to their ends in vain."""
        monkeypatch.setattr("workers.node.machine.describe", lambda folder, environment: MACHINE)
        store, file = tmp_path / "store", tmp_path / "file"
        store.mkdir()
        file.touch()
        head = dataclasses.replace(HEAD, storage=Folder(str(store), "x"), data_dir=str(file / "data"))
        for marked, said in ((None, f"the head's store {store} is not here"), ("x", f"{file / 'data'} cannot be")):
            if marked is not None:
                (store / MARKER).write_text(marked)
            questions.forget([])
            questions.answer(self.NODE, head)
            ray.run()
            assert said in (questions.answer(self.NODE, head).problem or "")
            ray.answer = None
        stand_at(monkeypatch, lambda: time.monotonic() + 31)
        fits = dataclasses.replace(head, data_dir=str(tmp_path))
        questions.answer(self.NODE, fits)
        ray.run()
        assert questions.answer(self.NODE, fits) == Answer(questions._answers[self.NODE].machine)
        assert len(ray.asked) == 3, "it is asked again soon"

    def test_one_without_the_folder_that_all_share_says_so(
        self, ray: FakeRay, questions: Questions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("workers.node.machine.describe", lambda folder, environment: MACHINE)
        head = dataclasses.replace(HEAD, folder=Folder(str(tmp_path), "x"), data_dir=str(tmp_path))
        questions.answer(self.NODE, head)
        ray.run()
        assert f"data folder {tmp_path} is not here" in (questions.answer(self.NODE, head).problem or "")

    def test_one_without_the_package(self, ray: FakeRay, questions: Questions) -> None:
        questions.answer(self.NODE, HEAD)
        ray.answer = ModuleNotFoundError("No module named 'workers'")
        assert "No module named 'workers'" in (questions.answer(self.NODE, HEAD).problem or "")

    def test_ray_that_cannot_be_asked(
        self, ray: FakeRay, questions: Questions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_raylet(**options: object) -> None:
            raise ConnectionError("no raylet here")

        monkeypatch.setattr(ray, "remote", no_raylet)
        for _ in range(2):
            assert "no raylet here" in (questions.answer(self.NODE, HEAD).problem or "")

    def test_who_gave_no_answer_is_asked_again_soon(
        self, ray: FakeRay, questions: Questions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing runs there meanwhile."""
        ray.answer = RuntimeError("the process died")
        for _ in range(4):
            assert questions.answer(self.NODE, HEAD).problem
        assert len(ray.asked) == 1
        stand_at(monkeypatch, lambda: time.monotonic() + 31)
        questions.answer(self.NODE, HEAD)
        assert len(ray.asked) == 2
        ray.answer = machine_as_json(MACHINE), time.time(), True, []
        assert questions.answer(self.NODE, HEAD).problem is None

    def test_one_that_never_answers(self, ray: FakeRay, questions: Questions, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(observer, "_ANSWER_SECONDS", 0.0)
        monkeypatch.setattr(ray, "get", lambda task, timeout: (_ for _ in ()).throw(TimeoutError("no answer yet")))
        questions.answer(self.NODE, HEAD)
        assert "TimeoutError" in (questions.answer(self.NODE, HEAD).problem or "")


def test_a_line_is_read_back(board: Board, looking: Observer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    board.add("b", 2, CPU=1)
    monkeypatch.setattr(observer, "LOOK_SECONDS", 0.0)
    file = tmp_path / "line"

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    with file.open("wb") as out, pytest.raises(KeyboardInterrupt):
        observer.observe(looking, out.fileno())
    (node,) = nodes_from_json(file.read_bytes())
    assert (node.host, node.cpus) == ("host-b", 1)
