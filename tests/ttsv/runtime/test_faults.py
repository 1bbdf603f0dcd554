"""A fault point does what it is asked to, once where that is asked for, and else nothing."""

import ast
import errno
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttsv.runtime.faults import FAULTS, ONCE, POINTS, fault, read

ROOT = Path(__file__).parents[3]
NAME = "after_claim"


def arm(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr("ttsv.runtime.faults._armed", read(words))


def meet(*names: str, words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What becomes of a process of its own that comes to these points, one after the other, and then says so."""
    program = f"from ttsv.runtime.faults import fault; [fault(name) for name in {names}]; print('went on')"
    environment = {"PYTHONPATH": str(ROOT), FAULTS: words} | ({} if folder is None else {ONCE: str(folder)})
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_what_is_asked_for_may_have_spaces_and_be_nothing() -> None:
    assert read(" , ") == {}
    assert read("after_claim=kill, before_commit = raise ,after_checkpoint=sleep:0.5") == {
        "after_claim": ("kill", 0),
        "before_commit": ("raise", 0),
        "after_checkpoint": ("sleep", 0.5),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("after_lunch=kill", f"'after_lunch' is no fault point; there are {', '.join(POINTS)}"),
        ("=kill", "'' is no fault point"),
        (f"{NAME}=kill,{NAME}=raise", f"{NAME} is named twice"),
        (NAME, "'' is nothing that after_claim can do: write kill, raise or sleep:SECONDS"),
        *((f"{NAME}={action}", f"'{action}' is nothing") for action in ("die", "kill:9", "sleep", "sleep:long")),
        *((f"{NAME}={action}", f"'{action}' is nothing") for action in ("sleep:-1", "sleep:inf", "sleep:nan", "nap:1")),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{FAULTS}: ") as raised:
        read(words)
    assert said in str(raised.value)


def test_a_process_with_a_mistake_in_it_does_not_start() -> None:
    ended = meet(words="after_lunch=kill")
    assert ended.returncode == 1
    assert f"{FAULTS}: 'after_lunch' is no fault point; there are after_submission, " in ended.stderr


def test_nothing_happens_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ONCE, str(tmp_path))
    for name in POINTS:
        fault(name)
    arm(monkeypatch, "before_commit=raise")
    fault(NAME)
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_that_of_a_disk_or_the_one_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, f"{NAME}=raise")
    for _ in range(2):
        with pytest.raises(OSError, match=f"fault point {NAME}") as raised:
            fault(NAME)
        assert raised.value.errno == errno.EIO
    with pytest.raises(KeyError, match=f"fault point {NAME}"):
        fault(NAME, KeyError)


def test_who_sleeps_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, f"{NAME}=sleep:0.2")
    start = time.monotonic()
    fault(NAME)
    assert 0.2 <= time.monotonic() - start < 5


def test_who_is_killed_is_killed_at_once() -> None:
    ended = meet("after_start", NAME, words=f"{NAME}=kill")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    assert f"fault point {NAME} ({FAULTS}): kill" in ended.stderr


def test_a_process_is_killed_once_for_all_where_that_is_asked_for(tmp_path: Path) -> None:
    """Each point for itself; the note is there though the process had no time for anything."""
    folder = tmp_path / "made" / "when needed"
    words = f"{NAME}=kill,before_commit=kill"
    codes = [meet(NAME, "before_commit", words=words, folder=folder).returncode for _ in range(3)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    notes = {note.name: note.read_text() for note in folder.iterdir()}
    assert sorted(notes) == [NAME, "before_commit"]
    assert all(int(text) > 0 for text in notes.values())


def test_of_many_who_come_at_once_one_is_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arm(monkeypatch, f"{NAME}=raise")
    monkeypatch.setenv(ONCE, str(tmp_path))
    start, met = threading.Barrier(8), list[OSError]()

    def come() -> None:
        start.wait()
        try:
            fault(NAME)
        except OSError as error:
            met.append(error)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(met) == 1


def _passed() -> Iterator[str]:
    """The name of each point in the code, as often as it stands there."""
    for path in (path for package in ("ttsv", "service", "workers") for path in (ROOT / package).rglob("*.py")):
        if "fault" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "fault":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: a name is written out"
                yield str(name.value)


def test_each_point_is_at_one_place_and_there_is_no_other() -> None:
    if not (ROOT / "workers").is_dir():
        pytest.skip("the library alone has some of them")
    assert Counter(_passed()) == Counter(POINTS.keys())


def test_the_document_has_each_with_its_moment() -> None:
    page = ROOT / "docs" / "reliability.md"
    if not page.is_file():
        pytest.skip("the library alone has no documents")
    rows = [f"| `{name}` | {point.who} | {point.moment} |" for name, point in POINTS.items()]
    assert "\n".join(rows) in page.read_text()
