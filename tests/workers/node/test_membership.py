"""How a machine joins, waits and leaves, with stand-ins for the probe and for Ray."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.errors import UserError
from workers.node import membership
from workers.node.membership import Membership, Offer
from workers.node.mps import Mps
from workers.node.probe import VERDICT, Outcome, Verdict
from workers.node.pulse import LONGEST_PAUSE
from workers.node.raylet import taken_port
from workers.node.scratch import scratch_folder

FITS = Verdict(Outcome.FITS)
AWAY = Verdict(Outcome.UNANSWERED, "nothing answers")


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch folders and ports of other tests are there, too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(membership, "taken_port", lambda ports: None)


class StandInRay:
    """Ray's part of a machine, which lives for some looks."""

    looks = 2
    starts_up = True

    def __init__(self, *_: Any, mps: Mps | None = None) -> None:
        self.mps = mps
        self.options: list[dict[str, object]] = []
        self.stops = 0
        self.environments: list[Mapping[str, str]] = []
        self._left = 0

    def start(self, *, options: dict[str, object], environment: Mapping[str, str]) -> None:
        self.environments.append(environment)
        self.options.append(options)
        self._left = self.looks

    def ready(self) -> bool:
        return self.starts_up

    def failed(self) -> bool:
        self._left -= 1
        return self._left < 0

    def stop(self) -> None:
        self.stops += 1

    def last_words(self) -> str:
        return "no room"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it waited before it tried again."""
    found: list[float] = []
    monkeypatch.setattr(membership, "RayProcess", StandInRay)
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: found.append(seconds) if seconds >= 1 else None)
    return found


def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict]) -> Membership:
    (tmp_path / "token").write_text("x")
    offer = Offer(3, 1, address="10.0.0.2", ports=range(7000, 7100), environment={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    found = Membership("head:6379", tmp_path / "token", offer)
    answers = iter(verdicts)
    monkeypatch.setattr(found, "_probe", lambda name: next(answers))
    return found


def ray(found: Membership) -> StandInRay:
    assert isinstance(found._ray, StandInRay)
    return found._ray


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNWELCOME])
def test_a_refusal_ends_it_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], outcome: Outcome
) -> None:
    found = member(tmp_path, monkeypatch, [Verdict(outcome, "another Python")])
    with pytest.raises(UserError, match=r"cannot join head:6379: another Python"):
        found.run()
    assert ray(found).options == []


def test_it_waits_for_a_head_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    found = member(tmp_path, monkeypatch, [AWAY] * 7 + [Verdict(Outcome.REFUSED)])
    with caplog.at_level("WARNING"), pytest.raises(UserError):
        found.run()
    assert pauses == [2, 4, 8, 16, 30, 30, 30]
    assert "nothing answers; trying head:6379 again in 2 s" in caplog.text


def test_its_pulse_is_felt_between_a_pause_and_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """Each of the two alone takes less than a pulse may be away; both together do not."""
    found = member(tmp_path, monkeypatch, [])
    happened, verdicts = list[str](), iter([AWAY, AWAY, Verdict(Outcome.REFUSED)])

    def probe(_name: str) -> Verdict:
        happened.append("probe")
        return next(verdicts)

    monkeypatch.setattr(found, "_probe", probe)
    monkeypatch.setattr(membership, "beat", lambda: happened.append("beat"))
    monkeypatch.setattr(time, "sleep", lambda _seconds: happened.append("pause"))
    with pytest.raises(UserError):
        found.run()
    assert happened.count("probe") == 3
    assert "pause probe" not in " ".join(happened)
    assert membership.PROBE_SECONDS < LONGEST_PAUSE < membership.PROBE_SECONDS + membership.LONGEST_PAUSE + 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_port_that_another_node_has_refuses_it_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], place: int
) -> None:
    """Ray itself would try for a minute, end with a traceback, and so again for ever."""
    found = member(tmp_path, monkeypatch, [FITS])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found._offer = replace(found._offer, ports=range(port - place, port - place + 100))
        monkeypatch.setattr(membership, "taken_port", taken_port)
        words = f"cannot join head:6379: port {port} is taken on this machine, by another node or the head"
        with pytest.raises(UserError, match=f"{words}.*--ports A-B"):
            found.run()
    assert ray(found).options == []


def test_a_node_whose_port_was_taken_meanwhile_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    found = member(tmp_path, monkeypatch, [FITS, FITS, Verdict(Outcome.REFUSED, "another Python")])
    answers = iter([None, 7000, None, None])
    monkeypatch.setattr(membership, "taken_port", lambda ports: next(answers))
    with pytest.raises(UserError, match="another Python"):
        found.run()
    assert pauses == [2, 4, 8]
    assert "port 7000 is taken" in caplog.text
    assert len(ray(found).options) == 2


def test_connections_of_a_node_that_has_left_take_no_port() -> None:
    """As it closed them first, the system keeps them for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert taken_port([address[1]]) == address[1]
        with socket.create_connection(address) as client:
            server.accept()[0].close()
            client.recv(1)
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(address)
    assert taken_port([address[1]]) is None


def test_its_processes_know_its_data_folder_and_what_they_left_there_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    found = member(tmp_path, monkeypatch, [Verdict(Outcome.FITS), Verdict(Outcome.REFUSED)])
    found._offer = replace(found._offer, data_dir=tmp_path)
    (tmp_path / "scratch" / "1a").mkdir(parents=True)
    (tmp_path / "scratch" / "1a" / "file").touch()
    (tmp_path / "scratch" / "1a.lock").touch()
    with pytest.raises(UserError):
        found.run()
    assert [one["TTSV_NODE_DATA_DIR"] for one in ray(found).environments] == [str(tmp_path)]
    assert not list((tmp_path / "scratch").iterdir())


def left_by_a_killed_trial(file: Path) -> None:
    """A file in a folder of a scratch folder whose process is gone."""
    file.parent.mkdir(parents=True)
    file.parents[1].with_suffix(".lock").touch()
    file.touch()


@pytest.mark.parametrize("token", [None, "x", "of a worker that ran here once"])
def test_what_trials_leave_at_the_path_of_the_heads_folder_goes_unless_it_is_the_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], token: str | None
) -> None:
    there = tmp_path / "ttsv-data"
    found = member(tmp_path, monkeypatch, [Verdict(Outcome.FITS, data_dir=str(there)), Verdict(Outcome.REFUSED)])
    file = there / "scratch" / "1a" / "checkpoints" / "4.safetensors"

    def stop(_: StandInRay) -> None:
        if not file.exists():
            left_by_a_killed_trial(file)

    monkeypatch.setattr(StandInRay, "stop", stop)
    if token is not None:
        there.mkdir()
        (there / "token").write_text(token)
    with pytest.raises(UserError):
        found.run()
    if token == "x":
        assert file.exists(), "it is the folder whose token the cluster has"
    else:
        assert not any((there / "scratch").iterdir())


def test_a_trial_of_another_node_keeps_what_it_works_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    there = tmp_path / "ttsv-data"
    found = member(tmp_path, monkeypatch, [Verdict(Outcome.FITS, data_dir=str(there)), Verdict(Outcome.REFUSED)])
    with scratch_folder(there) as working:
        (working / "journal").touch()
        with pytest.raises(UserError):
            found.run()
        assert (working / "journal").exists()


def test_a_store_that_is_away_refuses_a_machine_and_is_waited_for_by_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    away = Verdict(Outcome.HINDERED, "the store is away")
    found = member(tmp_path, monkeypatch, [away])
    with pytest.raises(UserError, match="the store is away"):
        found.run()
    found = member(tmp_path, monkeypatch, [FITS, away, away, FITS, Verdict(Outcome.REFUSED, "another Python")])
    with pytest.raises(UserError, match="another Python"):
        found.run()
    assert len(ray(found).options) == 2


def test_it_joins_again_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    found = member(tmp_path, monkeypatch, [FITS, AWAY, FITS, Verdict(Outcome.REFUSED)])
    with caplog.at_level("INFO"), pytest.raises(UserError):
        found.run()
    first, second = ray(found).options
    assert ray(found).environments == [{"CUDA_VISIBLE_DEVICES": "GPU-1"}] * 2
    assert first["address"] == "head:6379"
    assert (first["num-cpus"], first["num-gpus"], first["node-ip-address"]) == (3, 1, "10.0.0.2")
    ports = [first[name] for name in ("node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port")]
    assert ports == [7000, 7001, 7002, 7099]
    assert first["node-name"] != second["node-name"]
    assert caplog.text.count("joined head:6379") == 2
    assert caplog.text.count("the connection to the head is lost") == 2


@pytest.mark.parametrize(("listens", "stays"), [(True, 50), (False, 2)])
def test_it_leaves_a_cluster_whose_head_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], *, listens: bool, stays: int
) -> None:
    """Whoever listens there next has another cluster, of which Ray's part of this machine would not hear."""
    found = member(tmp_path, monkeypatch, [FITS, Verdict(Outcome.REFUSED)])
    monkeypatch.setattr(StandInRay, "looks", 50)
    monkeypatch.setattr(membership, "_KNOCK_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as head:
        found.head = f"127.0.0.1:{head.getsockname()[1]}"
        if not listens:
            head.close()
        with pytest.raises(UserError):
            found.run()
    assert ray(found).looks - ray(found)._left - 1 == stays


def test_a_head_that_goes_while_ray_starts_is_not_said_to_be_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StandInRay, "starts_up", False)
    found = member(tmp_path, monkeypatch, [FITS, Verdict(Outcome.REFUSED)])
    monkeypatch.setattr(found, "_is_refused", lambda: True)
    with pytest.raises(UserError):
        found.run()
    assert "the connection to the head is lost" in caplog.text
    assert "Ray did not start" not in caplog.text


def test_a_head_that_cannot_be_reached_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = member(tmp_path, monkeypatch, [])
    for error in (TimeoutError(), OSError(errno.EHOSTUNREACH, "no route"), socket.gaierror("no such name")):

        def connect(*_: object, error: OSError = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(socket, "create_connection", connect)
        assert not found._is_refused()


def test_the_pause_is_short_again_after_a_long_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    found = member(tmp_path, monkeypatch, [AWAY, AWAY, AWAY, FITS, Verdict(Outcome.REFUSED)])
    monkeypatch.setattr(membership, "_HEALTHY_SECONDS", -1.0)
    with pytest.raises(UserError):
        found.run()
    assert pauses == [2, 4, 8, 2]


def test_a_daemon_of_mps_that_ended_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """It goes with Ray's part, and both start again."""

    class Ended(Mps):
        def __init__(self) -> None:
            """There is nothing to be started."""

        def failed(self) -> bool:
            return True

    monkeypatch.setattr(StandInRay, "last_words", lambda _: "the MPS control daemon ended: no more")
    (tmp_path / "token").write_text("x")
    found = Membership("head:6379", tmp_path / "token", Offer(3, 1, mps=Ended()))
    answers = iter([FITS, Verdict(Outcome.REFUSED)])
    monkeypatch.setattr(found, "_probe", lambda name: next(answers))
    with pytest.raises(UserError):
        found.run()
    assert ray(found).mps is found._offer.mps
    assert "the MPS control daemon ended: no more; trying head:6379 again in 2 s" in caplog.text


def test_ray_that_does_not_start_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StandInRay, "starts_up", False)
    found = member(tmp_path, monkeypatch, [FITS, Verdict(Outcome.REFUSED)])
    with pytest.raises(UserError):
        found.run()
    assert "Ray did not start here:\nno room" in caplog.text


def test_a_machine_that_cannot_start_ray_now_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """As its worker does: its disk may be full for an hour, and nobody is there to start the node anew."""

    def start(_: StandInRay, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StandInRay, "start", start)
    found = member(tmp_path, monkeypatch, [FITS, FITS, Verdict(Outcome.REFUSED)])
    with pytest.raises(UserError):
        found.run()
    assert pauses == [2, 4]
    assert "No space left on device; trying head:6379 again in 2 s" in caplog.text
    assert ray(found).stops == 3


def test_it_looks_again_while_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "PROBE_AGAIN_SECONDS", -1.0)
    monkeypatch.setattr(StandInRay, "looks", 1)
    later = Verdict(Outcome.REFUSED, "the clock is 60 s ahead")
    found = member(tmp_path, monkeypatch, [FITS, later, Verdict(Outcome.REFUSED)])
    with pytest.raises(UserError):
        found.run()
    assert "does not fit any more: the clock is 60 s ahead" in caplog.text
    assert len(ray(found).options) == 1


def test_a_look_that_is_not_answered_says_nothing_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "PROBE_AGAIN_SECONDS", -1.0)
    monkeypatch.setattr(StandInRay, "looks", 1)
    away = Verdict(Outcome.UNANSWERED, "the head at head:6379 is starting again")
    found = member(tmp_path, monkeypatch, [FITS, away, Verdict(Outcome.REFUSED)])
    with pytest.raises(UserError):
        found.run()
    assert "whether this node still fits is not known: the head at head:6379 is starting again" in caplog.text
    assert "does not fit any more" not in caplog.text


def test_sigterm_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RayProcess", StandInRay)
    monkeypatch.setattr(StandInRay, "looks", 10**9)
    found = member(tmp_path, monkeypatch, [FITS])
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    found.run()
    assert time.monotonic() - began < 5
    assert ray(found).stops == 1
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; copy the file `token`"):
        Membership("head:6379", tmp_path / "nothing", Offer(1, 0)).run()


def test_with_a_token_that_ray_would_end_over(tmp_path: Path) -> None:
    """It is said before any part of Ray reads it, which ends the process that does, and again and again."""
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UserError, match=r"token is empty: copy the file `token` .* for this user to read"):
        Membership("head:6379", tmp_path / "token", Offer(1, 0)).run()
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\): copy the file `token`"):
        Membership("head:6379", tmp_path, Offer(1, 0)).run()
    verdict = Membership("head:6379", tmp_path / "token", Offer(1, 0), probe=("false",))._probe("name")
    assert (verdict.outcome, "token is empty" in verdict.words) == (Outcome.UNANSWERED, True)


class TestProbe:
    def probe(self, tmp_path: Path, code: str) -> Verdict:
        (tmp_path / "token").write_text("x")
        found = Membership("head:1", tmp_path / "token", Offer(1, 0), probe=(sys.executable, "-c", code))
        return found._probe("name")

    def test_its_answer_is_the_last_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_DATABASE_URL", "postgresql://secret@/x")
        line = VERDICT.dump_json(Verdict(Outcome.REFUSED, "no")).decode()
        code = (
            "import json, os, sys; note = json.load(sys.stdin); assert note['name'] == 'name'; print('a warning');"
            "assert os.environ['RAY_AUTH_MODE'] == 'token' and 'TTSV_DATABASE_URL' not in os.environ;"
            f"assert sys.argv[1:] == ['head:1']; print({line!r})"
        )
        assert self.probe(tmp_path, code) == Verdict(Outcome.REFUSED, "no")

    def test_it_looks_at_the_machines_own_data_folder(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("x")
        code = "import json, os; print(json.dumps({'outcome': 'fits', 'words': os.environ['TTSV_NODE_DATA_DIR']}))"
        offer = Offer(1, 0, data_dir=tmp_path)
        found = Membership("head:1", tmp_path / "token", offer, probe=(sys.executable, "-c", code))
        assert found._probe("name") == Verdict(Outcome.FITS, str(tmp_path))

    @pytest.mark.parametrize("code", ["import sys; sys.exit('broken')", "print('what?')"])
    def test_one_that_breaks_refuses_nobody(self, tmp_path: Path, code: str) -> None:
        verdict = self.probe(tmp_path, code)
        assert verdict.outcome is Outcome.UNANSWERED
        assert verdict.words

    def test_a_machine_that_can_start_no_process_now_keeps_those_it_has(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> bytes:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(membership, "ask", refuse)
        verdict = self.probe(tmp_path, "")
        assert verdict.outcome is Outcome.UNANSWERED
        assert "Resource temporarily unavailable" in verdict.words
