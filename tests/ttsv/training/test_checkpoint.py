import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from ttsv.errors import DataError
from ttsv.models import create_model
from ttsv.runtime import faults
from ttsv.training import checkpoint
from ttsv.training.checkpoint import Checkpoints, load_network, save_model

IDENTITY = {"trial": "a", "data": "b"}


def state(number: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((3, 2), float(number)), "steps": torch.tensor(number)},
        "progress": {"epoch": number, "seconds": number / 3},
        "parts": [{"sizes": [1, 2]}, {"none": None, "flag": True, "name": "x"}],
    }


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
        assert type(found) is type(expected)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return (torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))) * 3).to(dtype)


leaves = st.one_of(tensors(), st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), trees, max_size=4))
def test_a_state_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("round"), IDENTITY)
    checkpoints.save(1, tree)
    assert_same(checkpoints.latest(), tree)


def test_keys_may_hold_dots(tmp_path: Path) -> None:
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}, "": {"": torch.ones(3)}}
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    checkpoints.save(1, tree)
    assert_same(checkpoints.latest(), tree)


def test_the_saved_copy_is_independent(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tree = {"view": whole[::2], "transposed": whole.view(2, 3).T, "gradient": torch.ones(2, requires_grad=True)}
    Checkpoints(tmp_path, IDENTITY).save(1, tree)
    whole += 1
    found = Checkpoints(tmp_path, IDENTITY).latest()
    assert found is not None
    assert found["view"].tolist() == [0, 2, 4]
    assert found["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not found["gradient"].requires_grad


def test_keys_must_be_strings(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"keys of optimizer\.state must be strings"):
        Checkpoints(tmp_path, IDENTITY).save(1, {"optimizer": {"state": {0: torch.zeros(1)}}})


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "deep" / "folder", IDENTITY)
    assert checkpoints.latest() is None
    for number in (8, 9, 10, 11):
        checkpoints.save(number, state(number))
        assert_same(checkpoints.latest(), state(number))
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "000010.json",
        "000010.safetensors",
        "000011.json",
        "000011.safetensors",
    ]


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(content[:-1])
    else:
        content[int(len(content) * float(kind))] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["missing", "empty", "cut", "0.05", "0.3", "0.5", "0.7", "0.999"])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, suffix: str, kind: str) -> None:
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    for number in (1, 2):
        checkpoints.save(number, state(number))
    damage(tmp_path / f"000002{suffix}", kind)
    again = Checkpoints(tmp_path, IDENTITY)
    assert_same(again.latest(), state(1))
    again.save(2, state(2))
    assert_same(again.latest(), state(2))
    for number in (1, 2):
        damage(tmp_path / f"00000{number}{suffix}", kind)
    assert Checkpoints(tmp_path, IDENTITY).latest() is None


def test_a_checkpoint_that_cannot_be_read_now_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk or a mount fails for a moment: whole checkpoints stay, and nothing is begun anew."""
    checkpoints, read, away = Checkpoints(tmp_path, IDENTITY), Path.read_bytes, {1, 2}
    for number in (1, 2):
        checkpoints.save(number, state(number))

    def failing(path: Path) -> bytes:
        if path.suffix == ".safetensors" and int(path.stem) in away:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.latest()
    away.remove(1)
    assert_same(checkpoints.latest(), state(1))
    away.clear()
    assert_same(checkpoints.latest(), state(2))


many = pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.deep)])


def mutated(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """What a disk, a copy or a crash may make of a file: another content, always."""
    changed = bytearray(content)
    at, length = draw.randrange(len(changed)), draw.randrange(1, 65)
    kind = draw.choice(["flip", "byte", "cut", "lose", "insert", "zeros", "twice", "swap"])
    if kind == "flip":
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        changed[at] = draw.choice([byte for byte in range(256) if byte != changed[at]])
    elif kind == "cut":
        del changed[at:]
    elif kind == "lose":
        del changed[at : at + length]
    elif kind == "insert":
        changed[at:at] = draw.randbytes(length)
    elif kind == "zeros":
        changed[at : at + length] = bytes(len(changed[at : at + length]))
    elif kind == "twice":
        changed[at:at] = changed[at : at + length]
    else:
        changed[:] = other
    return bytes(changed)


@many
def test_no_mutated_checkpoint_is_taken_for_another(tmp_path: Path, count: int) -> None:
    """Of each only what was saved is ever read: the newest where nothing that counts was changed, or the one before."""
    draw = random.Random(20)
    states = {1: state(1), 2: state(2)}
    for number, tree in states.items():
        Checkpoints(tmp_path, IDENTITY).save(number, tree)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    read = Counter[int]()
    for _ in range(count):
        for name, content in whole.items():
            (tmp_path / name).write_bytes(content)
        for name in draw.sample(sorted(whole), draw.choice([1, 1, 2])):
            twin = name.replace("2.", "1.") if "2." in name else name.replace("1.", "2.")
            (tmp_path / name).write_bytes(mutated(whole[name], whole[twin], draw))
        found = Checkpoints(tmp_path, IDENTITY).latest()
        if found is None:
            read[0] += 1
            continue
        number = found["progress"]["epoch"]
        assert_same(found, states[number])
        read[number] += 1
    assert min(read[number] for number in (0, 1, 2)) > count // 20


@many
def test_mutated_networks_are_refused_or_what_they_were(tmp_path: Path, count: int) -> None:
    draw = random.Random(21)
    model = small(1)
    path = save_model(tmp_path, model, ARGUMENTS)
    told = load_network(path).arguments
    whole = {name: (tmp_path / name).read_bytes() for name in ("model.json", "model.safetensors")}
    refused = 0
    for _ in range(count):
        for name, content in whole.items():
            (tmp_path / name).write_bytes(content)
        name = draw.choice(sorted(whole))
        (tmp_path / name).write_bytes(mutated(whole[name], b"{}", draw))
        try:
            found = load_network(path)
        except DataError:
            refused += 1
        else:
            assert_same(found.model.state_dict(), model.state_dict())
            assert found.arguments == told
    assert refused > 0.9 * count


def test_every_byte_of_the_record_counts(tmp_path: Path) -> None:
    Checkpoints(tmp_path, IDENTITY).save(1, state(1))
    path = tmp_path / "000001.json"
    record = json.loads(path.read_bytes())
    record["body"]["state"]["progress"]["epoch"] = 2
    path.write_text(json.dumps(record))
    assert Checkpoints(tmp_path, IDENTITY).latest() is None


def test_another_trial_is_not_resumed(tmp_path: Path) -> None:
    Checkpoints(tmp_path, IDENTITY).save(1, state(1))
    assert Checkpoints(tmp_path, {**IDENTITY, "trial": "c"}).latest() is None


@pytest.mark.parametrize("kind", ["another trial", "damaged"])
def test_what_is_newer_and_not_resumed_makes_room(tmp_path: Path, kind: str) -> None:
    """Else the numbers that are written again would be the older ones, and be deleted at once."""
    earlier = Checkpoints(tmp_path, {**IDENTITY, "trial": "c"} if kind == "another trial" else IDENTITY)
    for number in (7, 8):
        earlier.save(number, state(number))
    if kind == "damaged":
        for number in (7, 8):
            damage(tmp_path / f"00000{number}.safetensors", "0.5")
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    assert checkpoints.latest() is None
    assert list(tmp_path.iterdir()) == []
    for number in (1, 2, 3):
        checkpoints.save(number, state(number))
        assert_same(Checkpoints(tmp_path, IDENTITY).latest(), state(number))


@pytest.mark.parametrize("operation", ["fsync", "replace", "unlink"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    class Crash(BaseException):
        pass

    owner: object = os if operation == "fsync" else Path
    original = getattr(owner, operation)
    crashed = survived = 0
    for moment in range(1, 8):
        folder = tmp_path / str(moment)
        checkpoints = Checkpoints(folder, IDENTITY)
        for number in (1, 2):
            checkpoints.save(number, state(number))
        calls = 0

        def fail(*arguments: Any, moment: int = moment, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                raise Crash
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, operation, fail)
            try:
                checkpoints.save(3, state(3))
                survived += 1
            except Crash:
                crashed += 1
        again = Checkpoints(folder, IDENTITY)
        found = again.latest()
        assert found is not None
        assert_same(found, state(found["progress"]["epoch"]))
        assert {path.stem for path in folder.iterdir()} == {path.stem for path in folder.glob("*.json")}
    assert crashed >= 2
    assert survived >= 1


class Gate:
    """Lets the writers of files through one at a time; the test sees who stands before it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.standing, self.let_through = threading.Semaphore(0), threading.Semaphore(0)
        write = checkpoint._write

        def held(path: Path, content: bytes) -> None:
            self.standing.release()
            assert self.let_through.acquire(timeout=60)
            write(path, content)

        patch.setattr(checkpoint, "_write", held)

    def await_writer(self) -> None:
        assert self.standing.acquire(timeout=60)

    def open(self, files: int = 2) -> None:
        for _ in range(files):
            self.let_through.release()


def test_a_checkpoint_is_written_while_its_owner_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, gate = Checkpoints(tmp_path, IDENTITY), Gate(monkeypatch)
    living = state(1)
    checkpoints.start(1, living)
    gate.await_writer()
    living["model"]["weight"].fill_(7)  # the next step
    living["parts"][0]["sizes"].append(3)
    assert not list(tmp_path.iterdir())
    gate.open()
    assert_same(checkpoints.latest(), state(1))


def test_there_are_never_two_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, gate = Checkpoints(tmp_path, IDENTITY), Gate(monkeypatch)
    checkpoints.start(1, state(1))
    gate.await_writer()
    second = threading.Thread(target=checkpoints.start, args=(2, state(2)))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.open(4)
    second.join()
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["000001.json", "000002.json"]


def test_what_writing_raised_comes_with_the_next_checkpoint_or_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    checkpoints.save(1, state(1))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        checkpoints.start(2, state(2))
        with pytest.raises(OSError, match="no space"):
            checkpoints.start(3, state(3))
        checkpoints.wait()  # it was said
        with pytest.raises(OSError, match="no space"), checkpoints:
            checkpoints.start(2, state(2))
        checkpoints.start(2, state(2))
        with pytest.raises(ZeroDivisionError), checkpoints:  # which says more than the disk
            raise ZeroDivisionError
    assert_same(checkpoints.latest(), state(1))


def test_a_state_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    with pytest.raises(TypeError, match="must be strings"):
        checkpoints.start(1, {"a": {1: 2}})
    checkpoints.wait()


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from ttsv.training.checkpoint import Checkpoints
torch.set_num_threads(1)
for seconds in sys.argv[2:]:
    process = os.fork()
    if not process:
        checkpoints = Checkpoints(Path(sys.argv[1]) / seconds, {})
        checkpoints.save(1, {"weight": torch.ones(300_000)})
        checkpoints.start(2, {"weight": torch.full((30_000_000,), 2.0)})
        time.sleep(float(seconds))
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
"""Loads torch once: so many processes of its own would take a second and a half each."""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    after = ("0.0", "0.02", "0.05", "0.1", "0.2")
    ended = subprocess.check_output([sys.executable, "-c", KILLED, str(tmp_path), *after], text=True).split()
    assert ended == [str(-signal.SIGKILL)] * len(after)
    for seconds in after:
        found = Checkpoints(tmp_path / seconds, {}).latest()
        assert found is not None, seconds
        weight = found["weight"]
        assert weight.shape in ((300_000,), (30_000_000,))
        assert weight.eq(1 if len(weight) == 300_000 else 2).all(), seconds


def small(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return create_model(**ARGUMENTS)


ARGUMENTS: dict[str, Any] = {
    "name": "small-cnn",
    "num_classes": 3,
    "in_channels": 1,
    "image_size": 8,
    "layer": "tt",
    "rank": 5,
    "mean": [0.4],
    "std": [0.2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_comes_back_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small(1).to(dtype)
    model(torch.rand(4, 1, 8, 8, dtype=dtype))  # batch norm takes note
    path = save_model(tmp_path, model, ARGUMENTS, config={"seed": 1})
    assert path == tmp_path / "model.safetensors"
    before = torch.get_rng_state()
    loaded = load_network(tmp_path / "model.safetensors").model
    assert torch.equal(before, torch.get_rng_state())
    assert not loaded.training
    pixels = torch.rand(2, 1, 8, 8, dtype=dtype)
    assert torch.equal(loaded(pixels), model.eval()(pixels))
    assert json.loads((tmp_path / "model.json").read_text())["config"] == {"seed": 1}


@pytest.mark.parametrize("kind", ["missing", "empty", "cut", "0.5"])
def test_a_damaged_model_is_refused(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path, small(0), ARGUMENTS)
    damage(tmp_path / "model.safetensors", kind)
    with pytest.raises(DataError, match=r"model\.safetensors"):
        load_network(tmp_path / "model.safetensors")
    save_model(tmp_path, small(0), ARGUMENTS)
    damage(tmp_path / "model.json", "cut")
    with pytest.raises(DataError, match=r"model\.json"):
        load_network(tmp_path / "model.safetensors")


@pytest.mark.parametrize("changed", [{"mean": [0.0]}, {"std": [0.25]}])
def test_another_normalisation_than_that_of_the_weights_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = save_model(tmp_path, small(0), ARGUMENTS)
    described = json.loads((tmp_path / "model.json").read_text())
    described["model"] |= changed
    (tmp_path / "model.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"model\.json is altered: its `model` is not that of the weights"):
        load_network(path)
    silent = save(load(path.read_bytes()))
    path.write_bytes(silent)
    described["sha256"] = hashlib.sha256(silent).hexdigest()
    (tmp_path / "model.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"model\.json is altered: its mean and std"):
        load_network(path)


@pytest.mark.parametrize("changed", [{"num_classes": 11}, {"widths": [3]}, {"name": "none-such"}])
def test_a_description_of_another_network_is_refused_beside_weights_that_say_nothing(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    path = save_model(tmp_path, small(0), ARGUMENTS)
    silent = save(load(path.read_bytes()))
    path.write_bytes(silent)
    described = json.loads((tmp_path / "model.json").read_text()) | {"sha256": hashlib.sha256(silent).hexdigest()}
    (tmp_path / "model.json").write_text(json.dumps(described))
    assert_same(load_network(path).model.state_dict(), small(0).state_dict())
    described["model"] |= changed
    (tmp_path / "model.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"model\.json is altered: the weights are of another network"):
        load_network(path)


@pytest.mark.parametrize(("point", "newest"), [("after_tensors", 1), ("after_checkpoint", 2)])
def test_who_is_stopped_while_it_writes_one_has_the_one_before_or_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, newest: int
) -> None:
    Checkpoints(tmp_path, IDENTITY).save(1, state(1))
    monkeypatch.setattr(faults, "_armed", faults.read(f"{point}=raise"))
    with pytest.raises(OSError, match=f"fault point {point}"):
        Checkpoints(tmp_path, IDENTITY).save(2, state(2))
    assert_same(Checkpoints(tmp_path, IDENTITY).latest(), state(newest))
