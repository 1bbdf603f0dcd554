"""The head's folder from another node, with a stand-in for Ray that loses, doubles and delays what is asked."""

import errno
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, AuthenticationError, GetTimeoutError, RayTaskError

from service.errors import UserError
from service.settings import Settings
from service.storage import Folder, copy_out, marked, trouble_of
from workers.node.depot import remote as remotes
from workers.node.depot import server
from workers.node.depot.home import Home, light_beacon
from workers.node.depot.remote import AwayError, RemoteFolder, join_head
from workers.node.depot.server import Depot

Happening = Callable[[str, tuple[Any, ...]], str]
"""What becomes of a call: `well`, `lost` before it is heard, `unheard` after it was done, or `gone` for good."""


class StandInRay:
    """Runs calls of an actor at once, or not; it is started anew where it died."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.starts = 0
        self.happens: Happening = lambda method, arguments: "well"
        self.sizes: list[int] = []

    def find(self, home: Home) -> Any:
        self.starts += 1
        return _Handle(self, Depot(self.home.data_dir))

    def get(self, answer: Any, timeout: float) -> Any:
        what, value = answer
        if what == "gone":
            raise ActorDiedError
        if what in ("lost", "unheard"):
            raise GetTimeoutError
        if isinstance(value, Exception):
            error: Any = RayTaskError
            raise error("call", "its traceback", value).as_instanceof_cause()
        return value


class _Handle:
    def __init__(self, stand_in: StandInRay, depot: Depot) -> None:
        self._stand_in, self._depot = stand_in, depot

    def __getattr__(self, method: str) -> Any:
        return _Method(self._stand_in, self._depot, method)


class _Method:
    def __init__(self, stand_in: StandInRay, depot: Depot, method: str) -> None:
        self._stand_in, self._depot, self._method = stand_in, depot, method

    def remote(self, *arguments: Any) -> Any:
        self._stand_in.sizes += [len(argument) for argument in arguments if isinstance(argument, bytes)]
        what = self._stand_in.happens(self._method, arguments)
        if what in ("gone", "lost"):
            return what, None
        try:
            return what, getattr(self._depot, self._method)(*arguments)
        except Exception as error:
            return what, error


@pytest.fixture
def home(tmp_path: Path) -> Home:
    data_dir = tmp_path / "head"
    return light_beacon(Settings(data_dir=data_dir), data_dir / "tune" / "1-1", "node-1")


@pytest.fixture
def stand_in(home: Home, monkeypatch: pytest.MonkeyPatch) -> StandInRay:
    stand_in = StandInRay(home)
    monkeypatch.setattr(remotes, "find_depot", stand_in.find)
    monkeypatch.setattr(ray, "get", stand_in.get)
    monkeypatch.setattr(remotes, "_PAUSE_SECONDS", 0.0)
    return stand_in


@pytest.fixture
def remote(home: Home, stand_in: StandInRay) -> RemoteFolder:
    return RemoteFolder(home)


def put(remote: RemoteFolder, path: str, content: bytes) -> str:
    return remote.write(path, io.BytesIO(content), len(content))


def test_it_is_the_folder(remote: RemoteFolder, home: Home, tmp_path: Path) -> None:
    content = os.urandom(2 * 2**20 + 7)
    assert put(remote, "trials/7/1/model", content) == hashlib.sha256(content).hexdigest()
    assert (Path(home.data_dir) / "trials/7/1/model").read_bytes() == content
    put(remote, "trials/7/1/empty", b"")
    assert remote.files("trials/7/1") == {"empty": 0, "model": len(content)}
    remote.copy("trials/7/1", "trials/7/2")
    remote.make("trials/7/3")
    assert remote.folders("trials/7") == ["1", "2", "3"]
    remote.remove("trials/7/1")
    assert remote.size("trials/7/1/model") is None
    assert copy_out(remote, "trials/7/2/model", tmp_path / "model") == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "model").read_bytes() == content
    with pytest.raises(FileNotFoundError):
        remote.read("trials/7/1/model", 0, 1)


def test_pieces_are_small(remote: RemoteFolder, stand_in: StandInRay) -> None:
    put(remote, "trials/7/1/model", bytes(5 * 2**20 + 1))
    assert max(stand_in.sizes) <= 2**20


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("read", "token"),
        ("read", "key-secret"),
        ("read", "trials/../token"),
        ("files", "trials"),
        ("write", "datasets/x"),
        ("write", "ttsv.db"),
        ("remove", "trials"),
        ("remove", "datasets/cifar10"),
    ],
)
def test_nothing_but_trials_is_written_and_data_sets_read(remote: RemoteFolder, method: str, path: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: remote.read(path, 0, 1),
        "files": lambda: remote.files(path),
        "write": lambda: put(remote, path, b"1"),
        "remove": lambda: remote.remove(path),
    }
    with pytest.raises(PermissionError):
        calls[method]()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), size=st.integers(0, 200), chunk=st.integers(1, 50))
def test_whatever_is_lost_doubled_or_dies_the_file_arrives_whole(
    remote: RemoteFolder,
    stand_in: StandInRay,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
    size: int,
    chunk: int,
) -> None:
    monkeypatch.setattr(remotes, "CHUNK", chunk)
    fates = iter(data.draw(st.lists(st.sampled_from(["well", "lost", "unheard", "gone"]), max_size=12)))
    stand_in.happens = lambda method, arguments: next(fates, "well")
    content = bytes((7 * index) % 256 for index in range(size))
    assert put(remote, "trials/7/1/file", content) == hashlib.sha256(content).hexdigest()
    assert (Path(home.data_dir) / "trials/7/1/file").read_bytes() == content


@pytest.mark.parametrize("changed", [b"123X5", b"1234", b"123456"])
def test_other_bytes_than_were_sent_never_get_the_name(
    remote: RemoteFolder, stand_in: StandInRay, home: Home, monkeypatch: pytest.MonkeyPatch, changed: bytes
) -> None:
    put(remote, "trials/7/1/file", b"before")
    times = iter(range(9))
    whole = Depot.call

    def altered(self: Depot, method: str, *arguments: Any) -> Any:
        if method == "write_part" and next(times) < bad:
            arguments = (*arguments[:2], changed)
        return whole(self, method, *arguments)

    monkeypatch.setattr(Depot, "call", altered)
    bad = 9
    with pytest.raises(OSError, match="bytes arrived") as caught:
        put(remote, "trials/7/1/file", b"12345")
    assert caught.value.errno == errno.EIO
    assert remote.read("trials/7/1/file", 0, 9) == b"before"
    assert not list((Path(home.data_dir) / "incoming").iterdir())
    times, bad = iter(range(9)), 2
    put(remote, "trials/7/1/file", b"12345")
    assert remote.read("trials/7/1/file", 0, 9) == b"12345"


def test_a_full_disk_is_told_as_such(remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    from service.storage import Folder

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Folder, "write_part", full)
    with pytest.raises(OSError, match="No space left") as caught:
        put(remote, "trials/7/1/file", b"12345")
    assert caught.value.errno == errno.ENOSPC
    assert remote.files("trials/7/1") == {}


def test_one_that_never_answers_is_an_error_of_the_machine(
    remote: RemoteFolder, stand_in: StandInRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "PATIENCE_SECONDS", 0.3)
    stand_in.happens = lambda method, arguments: "gone"
    with pytest.raises(OSError, match="does not answer") as caught:
        remote.size("trials/7/1/file")
    assert caught.value.errno == errno.EIO
    assert stand_in.starts > 1, "another one was started"


class TestHome:
    def test_seen_is_the_folder_itself_alone(self, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import shutil

        head = Path(home.data_dir)
        assert home.here() == head
        (tmp_path / "mounted").symlink_to(head)
        monkeypatch.setenv("TTSV_NODE_DATA_DIR", str(tmp_path / "mounted"))
        assert home.here() == tmp_path / "mounted", "the same folder at another path"
        shutil.copytree(head, tmp_path / "copied")
        again = light_beacon(Settings(data_dir=head), head / "tune" / "1-2", "node-1")
        monkeypatch.setenv("TTSV_NODE_DATA_DIR", str(tmp_path / "copied"))
        assert again.here() is None
        assert replace(again, shared=True).here() == head
        monkeypatch.setenv("TTSV_NODE_DATA_DIR", str(tmp_path / "nowhere"))
        assert again.here() is None

    def test_the_mark_is_the_databases_as_the_store_may_be_unmounted_just_now(self, tmp_path: Path) -> None:
        store, folder = tmp_path / "store", tmp_path / "data" / "tune" / "1-1"
        settings = Settings(data_dir=tmp_path / "data", storage=str(store))
        assert light_beacon(settings, folder, "node-1").mark is None
        with pytest.raises(OSError, match="not mounted here"):
            light_beacon(settings, folder, "node-1", "word").require_store()
        word = marked(Folder(store))
        assert light_beacon(settings, folder, "node-1").mark == word
        light_beacon(settings, folder, "node-1", word).require_store()
        bucket = settings.model_copy(update={"storage": "s3://bucket"})
        assert light_beacon(bucket, folder, "node-1", "word").mark is None

    def test_a_depot_that_does_not_see_it_is_not_used(self, home: Home, stand_in: StandInRay) -> None:
        RemoteFolder(home).check()
        with pytest.raises(AwayError, match="does not see the driver's data folder") as caught:
            RemoteFolder(replace(home, token="another")).check()
        assert caught.value.failure == "infrastructure"

    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
    def test_one_whose_disk_does_not_tell_is_the_machines_trouble(
        self, home: Home, stand_in: StandInRay, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Trials wait for it then, as for any disk: they do not fail."""

        def fail(path: Path) -> str:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(Path, "read_text", fail)
        assert home.here() is None
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            RemoteFolder(home).check()
        assert trouble_of(caught.value) is not None


def test_a_copy_whose_answer_is_late_is_made_once(remote: RemoteFolder, stand_in: StandInRay) -> None:
    put(remote, "trials/7/1/checkpoints/1", b"1")
    fates = iter(["unheard", "well"])
    stand_in.happens = lambda method, arguments: next(fates, "well") if arguments[:1] == ("copy",) else "well"
    remote.copy("trials/7/1", "trials/7/2")
    assert remote.files("trials/7") == {"1/checkpoints/1": 1, "2/checkpoints/1": 1}


@pytest.fixture(autouse=True)
def _no_endless_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Depot, "_end_when_idle", lambda self: None)


def test_a_depot_at_work_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first digest of a large data set takes longer than one waits for nobody to ask."""
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(Depot, "_end_when_idle", lambda _: None)
    depot: Any = Depot(str(tmp_path))  # to a type checker its methods are Ray's
    seen = list[bool]()

    def asked(_root: Path) -> list[str]:
        seen.append(depot.is_idle())
        return []

    monkeypatch.setattr(server, "known_data_sets", asked)
    assert depot.is_idle()
    depot.data_sets()
    assert (seen, depot.is_idle()) == ([False], True)
    monkeypatch.setattr(server, "IDLE_SECONDS", 900.0)
    assert not depot.is_idle()  # it was asked just now


def test_a_wrong_token_is_said_in_our_words_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(address: str) -> None:
        os.write(2, b"gcs_client.cc:210: Failed to get cluster ID\n")  # past Python, as Ray's own code does
        raise AuthenticationError("InvalidAuthToken")

    monkeypatch.setattr(remotes, "no_ray_at", lambda address: None)
    monkeypatch.setattr(remotes, "Notes", refuse)
    with pytest.raises(UserError, match="the token is not that of the cluster at head:6379"):
        join_head("head:6379")
    assert capfd.readouterr().err == ""
    os.write(2, b"heard\n")
    assert capfd.readouterr().err == "heard\n"
