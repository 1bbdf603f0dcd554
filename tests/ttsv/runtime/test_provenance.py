"""Where a trial ran: complete, JSON-ready, bounded however dirty the tree is."""

import json
import subprocess
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
import torch

from ttsv.runtime import provenance
from ttsv.runtime.code import code_version


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that tracks a module of the name of ours."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "ttsv" / "runtime").mkdir(parents=True)
    for name in ("ttsv/runtime/provenance.py", "other.py"):
        (tmp_path / name).write_text("one = 1\n")
    (tmp_path / ".gitignore").write_text("__pycache__/\n*_own.py\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_it_is_complete_and_plain() -> None:
    found = provenance.provenance()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["packages"]["torch"] == version("torch")
    installed = {
        one.metadata["Name"].lower().replace("_", "-").replace(".", "-"): one.version for one in distributions()
    }
    told = {name.replace(".", "-"): number for name, number in found["packages"].items()}
    assert told.keys() >= installed.keys()
    assert {name: told[name] for name in ("torch", "numpy", "sqlalchemy")} == {
        name: installed[name] for name in ("torch", "numpy", "sqlalchemy")
    }
    assert found["torch"] == found["packages"]["torch"] or "+" in found["torch"]
    for name in ("python", "platform", "host", "cpu", "device", "device_name"):
        assert found[name], name
    assert (found["cpus"] or 0) >= 1
    git_says = {"git_revision", "git_dirty", "git_diff", "git_diff_cut", "git_untracked"}
    assert git_says | {"gpu_driver", "gpus"} <= found.keys()
    assert provenance.provenance() is found, "asked for by every trial, found once"


def test_a_clean_tree_has_no_difference(checkout: Path) -> None:
    assert provenance._changes(checkout) == {"git_diff": None, "git_diff_cut": False, "git_untracked": []}


def test_a_dirty_tree_is_told(checkout: Path) -> None:
    (checkout / "other.py").write_text("two = 2\n")
    (checkout / "staged.py").write_text("three = 3\n")
    git(checkout, "add", "staged.py")
    (checkout / "new.py").write_text("")
    found = provenance._changes(checkout)
    assert "-one = 1\n+two = 2\n" in (found["git_diff"] or "")
    assert "+three = 3\n" in (found["git_diff"] or "")
    assert (found["git_untracked"], found["git_diff_cut"]) == (["new.py"], False)


def test_a_checkout_of_another_user_is_one(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a service with a user of its own."""
    (checkout / "other.py").write_text("two = 2\n")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(subprocess.CalledProcessError):
        git(checkout, "status")
    assert provenance._revision.__wrapped__(checkout)["git_dirty"] is True
    assert "+two = 2" in (provenance._changes(checkout)["git_diff"] or "")


def test_what_is_untracked_and_can_be_imported_is_a_difference(checkout: Path) -> None:
    (checkout / "ttsv" / "new_layer.py").write_text("four = 4\n")
    found = provenance._changes(checkout)
    assert provenance._revision(checkout)["git_dirty"]
    assert "new file mode 100644" in (found["git_diff"] or "")
    assert "+++ b/ttsv/new_layer.py\n@@ -0,0 +1 @@\n+four = 4\n" in (found["git_diff"] or "")
    assert found["git_untracked"] == ["ttsv/new_layer.py"]
    (checkout / "other.py").write_text("two = 2\n")
    both = provenance._changes(checkout)["git_diff"] or ""
    assert both.index("+two = 2") < both.index("+four = 4")
    subprocess.run(["git", "-C", str(checkout), "apply", "--reverse"], input=both, check=True, text=True)
    assert not (checkout / "ttsv" / "new_layer.py").exists(), "a patch that makes the tree what it was"


def test_what_is_ignored_can_be_imported_all_the_same(checkout: Path) -> None:
    (checkout / "ttsv" / "layer_own.py").write_text("five = 5\n")
    assert provenance._revision(checkout)["git_dirty"]
    assert "+five = 5" in (provenance._changes(checkout)["git_diff"] or "")


def test_what_cannot_be_imported_is_no_difference(checkout: Path) -> None:
    (checkout / "ttsv" / "__pycache__").mkdir()
    for name in ("ttsv/__pycache__/gone.cpython-311.pyc", "ttsv/notes.md", "scratch.py"):
        (checkout / name).write_text("six = 6\n")
    found = provenance._changes(checkout)
    assert (found["git_diff"], found["git_diff_cut"]) == (None, False)
    assert found["git_untracked"] == ["scratch.py", "ttsv/notes.md"]
    assert provenance._revision(checkout)["git_dirty"] is False


def test_untracked_files_share_the_room_of_the_difference(checkout: Path) -> None:
    for index in range(30):
        (checkout / "ttsv" / f"new_{index:02}.py").write_text(f"# {index}\n" + "x = '\u00e9'\n" * 1000)
    found = provenance._changes(checkout)
    kept = found["git_diff"] or ""
    assert provenance.MOST_DIFF_BYTES - 4 < len(kept.encode()) <= provenance.MOST_DIFF_BYTES
    assert found["git_diff_cut"]
    assert "+# 0\n" in kept


def test_the_code_is_told_as_nodes_compare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = provenance.provenance()
    assert found["ttsv"] == code_version()
    assert provenance.describe_environment(torch.device("cpu"))["ttsv"] == code_version()

    def unreadable() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(provenance, "code_version", unreadable)
    assert provenance.describe_environment(torch.device("cpu"))["ttsv"] is None


def test_a_large_difference_is_cut(checkout: Path) -> None:
    (checkout / "other.py").write_text("x = 1\n" * 1_000_000)
    found = provenance._changes(checkout)
    assert len((found["git_diff"] or "").encode()) <= provenance.MOST_DIFF_BYTES
    assert found["git_diff_cut"]


def test_what_is_no_text_can_be_stored(checkout: Path) -> None:
    (checkout / "other.py").write_bytes(b"caf\xe9 = 1\n")
    assert "caf\ufffd" in (provenance._changes(checkout)["git_diff"] or "")


def test_a_program_that_the_checkout_names_is_not_run(checkout: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    git(checkout, "config", "diff.external", f"touch {mark}")
    git(checkout, "config", "core.fsmonitor", f"touch {mark}")
    (checkout / "other.py").write_text("two = 2\n")
    assert "+two = 2" in (provenance._changes(checkout)["git_diff"] or "")
    assert not mark.exists()


def test_outside_a_checkout_nothing_is_said(tmp_path: Path) -> None:
    assert provenance._changes(tmp_path)["git_diff"] is None
    assert provenance._revision(tmp_path)["git_revision"] is None


@pytest.mark.parametrize(("told", "recorded"), [("4f" * 20, "4f" * 20), ("unknown", None), ("", None)])
def test_an_image_says_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, recorded: str | None
) -> None:
    monkeypatch.setenv("TTSV_REVISION", told)
    assert provenance._revision(tmp_path) == {"git_revision": recorded, "git_dirty": None}


def test_a_checkout_knows_better_than_an_image(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTSV_REVISION", "4f" * 20)
    found = provenance._revision(checkout)
    assert (found["git_dirty"], found["git_revision"] == "4f" * 20) == (False, False)
