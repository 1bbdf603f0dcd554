"""Checkpoints that serve nothing more go, aside; those that may still serve stay."""

import threading
from pathlib import Path

import pytest

from service.storage import Folder
from ttsv.results import CHECKPOINTS
from workers.driver.leftovers import Leftovers


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Those of two attempts at a trial, under two claims."""
    found = [tmp_path / "trials/7" / name / CHECKPOINTS for name in ("3.1", "5")]
    for folder in found:
        folder.mkdir(parents=True)
    return found


def test_those_of_later_claims_stay(tmp_path: Path, checkpoints: list[Path]) -> None:
    """The driver stood still between a failure's COMMIT and their removal, and the trial was retried meanwhile."""
    leftovers = Leftovers(Folder(tmp_path), 3)
    leftovers.add(7, 2)
    assert leftovers.wait(10)
    assert [folder.exists() for folder in checkpoints] == [False, True]


def test_those_of_later_attempts_under_the_same_claim_stay(tmp_path: Path, checkpoints: list[Path]) -> None:
    leftovers = Leftovers(Folder(tmp_path), 5)
    leftovers.add(7, 0)
    assert leftovers.wait(10)
    assert [folder.exists() for folder in checkpoints] == [False, True]
    leftovers.add(7, 1)
    assert leftovers.wait(10)
    assert not any(folder.exists() for folder in checkpoints)


def test_a_store_that_does_not_answer_holds_nobody_up(tmp_path: Path, checkpoints: list[Path]) -> None:
    class Away(Folder):
        def __init__(self, root: Path) -> None:
            super().__init__(root)
            self.back = threading.Event()

        def folders(self, path: str, *, partial: bool = False) -> list[str]:
            assert self.back.wait(60)
            if path.endswith("8"):
                raise OSError("it cannot be read")
            return super().folders(path, partial=partial)

    store = Away(tmp_path)
    leftovers = Leftovers(store, 5)
    for trial_id in (8, 7):
        leftovers.add(trial_id, 1)
    assert not leftovers.wait(0.05)
    store.back.set()
    assert leftovers.wait(10)
    assert not any(folder.exists() for folder in checkpoints)
