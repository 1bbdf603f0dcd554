import dataclasses
import hashlib
import math
from pathlib import Path

import pytest

from service.storage import Attempt, Folder, begin
from tests.results import made_epoch
from ttsv.results import EpochMetrics
from workers.trial_process.trial_folder import Journal, manifest, remove_tune_folders, tune_folder


def point(epoch: int, loss: float = 1.0) -> EpochMetrics:
    return made_epoch(epoch, epochs=9, train_loss=loss)


def trial_folder(data_dir: Path, trial_id: int, fence: int, number: int = 0) -> Path:
    return data_dir / begin(Folder(data_dir), trial_id, Attempt(fence, number))


def test_new_fence_starts_with_the_newest_earlier_folder(tmp_path: Path) -> None:
    for fence in (2, 9, 10):
        folder = trial_folder(tmp_path, 7, fence)
        assert folder == tmp_path / "trials" / "7" / str(fence)
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "newest").write_text(str(fence))
    (tmp_path / "trials" / "7" / "11.partial").mkdir()  # a copy that a kill cut short
    folder = trial_folder(tmp_path, 7, 12)
    assert (folder / "checkpoints" / "newest").read_text() == "10"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["11.partial", "12"]
    assert trial_folder(tmp_path, 7, 12) == folder  # a second attempt of the same claim goes on in it


def test_stale_fence_takes_nothing_from_its_successor(tmp_path: Path) -> None:
    (trial_folder(tmp_path, 7, 5) / "file").write_text("5")
    stale = trial_folder(tmp_path, 7, 4)
    assert not list(stale.iterdir())
    assert (tmp_path / "trials" / "7" / "5" / "file").read_text() == "5"


def test_journal_survives_a_line_that_is_cut_or_spoilt(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.after(0) == []
    journal.append(point(1))
    with (tmp_path / "epochs.jsonl").open("ab") as file:
        file.write(b'\n{"epoch": 2, "\xe5po')
    journal.append(point(2))
    journal.append(point(3, loss=2.0))
    journal.append(point(3, loss=3.0))
    assert journal.after(0) == [point(1), point(2), point(3, loss=3.0)]
    assert journal.after(2) == [point(3, loss=3.0)]


def test_journal_takes_no_number_of_which_a_disk_has_changed_a_bit(tmp_path: Path) -> None:
    """It would be as good a number as any other."""
    journal, path = Journal(tmp_path), tmp_path / "epochs.jsonl"
    journal.append(point(1))
    whole = path.read_bytes()
    taken = [journal.after(0)]
    for at in range(1, len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            taken.append(journal.after(0))
    assert taken[0] == [point(1)]
    assert all(found in ([], [point(1)]) for found in taken)
    assert sum(found == [point(1)] for found in taken) <= 3, "where a tab became another end of the line"
    path.write_bytes(whole.partition(b"\t")[0])
    assert journal.after(0) == [point(1)], "as an earlier version wrote it"


def test_journal_refuses_what_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        Journal(tmp_path).append(dataclasses.replace(point(1), val_loss=math.inf))


def test_manifest(tmp_path: Path) -> None:
    file = trial_folder(tmp_path, 1, 1) / "model.safetensors"
    file.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert manifest({"model": file}, tmp_path) == [
        {"kind": "model", "path": "trials/1/1/model.safetensors", "sha256": digest, "size": 7}
    ]


def test_tune_folders(tmp_path: Path) -> None:
    for experiment_id, fence in ((1, 1), (1, 2), (1, 3), (11, 1)):
        tune_folder(tmp_path, experiment_id, fence).mkdir(parents=True)
    remove_tune_folders(tmp_path, 1, 2)
    assert sorted(path.name for path in (tmp_path / "tune").iterdir()) == ["1-3", "11-1"]
