"""A disk that cannot be read is no empty one, and a backup's own disk that is full is no fault of what is copied."""

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select, update

from service.database import Artifact, Trial, TrialState, now
from service.database.engine import Database
from service.errors import UserError
from service.settings import Settings
from service.upkeep import backup, retention
from service.upkeep.archive import WritingError
from service.upkeep.backup import back_up
from service.upkeep.files import DataFolder
from service.upkeep.places import Disk
from service.upkeep.retention import Rules
from tests.service.upkeep.conftest import write_checkpoint

Break = Callable[..., None]


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """What the database is plays no part."""
    return sqlite_url


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Lets the disk fail wherever such a file is opened, or such a folder listed."""

    def breaks(what: Path | str, name: str, number: int = errno.EIO) -> None:
        genuine = getattr(os, name)

        def failing(path: Any, *given: Any, **named: Any) -> Any:
            if str(path) == str(what):
                raise OSError(number, os.strerror(number))
            return genuine(path, *given, **named)

        monkeypatch.setattr(os, name, failing)

    return breaks


def missing(settings: Settings, database: Database, file: Path) -> dict[str, bool]:
    return {one.path: one.expected for one in back_up(settings, database, file).missing}


@pytest.fixture
def trial_id(lived: Database) -> int:
    """One that left a file, and a log."""
    with lived.read() as session:
        return session.scalars(select(Artifact.trial_id)).one()


class TestBackup:
    def test_a_folder_of_a_trial(
        self, lived: Database, source: Settings, tmp_path: Path, unreadable: Break, trial_id: int
    ) -> None:
        assert missing(source, lived, tmp_path / "sound") == {}
        unreadable(source.data_dir / f"trials/{trial_id}", "scandir")
        assert missing(source, lived, tmp_path / "backup") == {f"trials/{trial_id}": False}

    @pytest.mark.parametrize("name", ["key-secret", "trial.log"])
    def test_a_file(self, lived: Database, source: Settings, tmp_path: Path, unreadable: Break, name: str) -> None:
        unreadable(name, "open")
        found = missing(source, lived, tmp_path / "backup")
        assert {path.rpartition("/")[2]: expected for path, expected in found.items()} == {name: False}

    def test_data_sets(self, lived: Database, source: Settings, tmp_path: Path, unreadable: Break) -> None:
        unreadable(source.data_dir / "datasets", "scandir")
        assert missing(source, lived, tmp_path / "backup") == {"datasets": False}

    def test_a_checkpoint_counts_as_unreadable_where_no_other_is_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, inside = DataFolder(tmp_path), tmp_path / "trials/7/1/checkpoints"
        for number in (1, 2):
            write_checkpoint(inside, number)
        genuine = Disk.open

        def failing(self: Disk, path: str) -> Any:
            if path.endswith("000002.safetensors"):
                raise OSError(errno.EIO, "Input/output error")
            return genuine(self, path)

        monkeypatch.setattr(Disk, "open", failing)
        found = folder.checkpoint(7)
        assert found is not None
        assert found.epoch == 1
        (inside / "000001.json").unlink()
        with pytest.raises(OSError, match="Input/output"):
            folder.checkpoint(7)

    def test_no_room_for_the_backup_ends_it(
        self, lived: Database, source: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else it would go on without the files that had no room, and say that these cannot be read."""

        class Small(io.BytesIO):
            full = False

            def write(self, piece: Any) -> int:
                if self.full and len(piece) > 10_000:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(piece)

        small, genuine = Small(), DataFolder.open

        @contextmanager
        def writing(_file: Path) -> Iterator[Small]:
            yield small

        def open_and_fill(self: DataFolder, path: str) -> Any:
            small.full = True
            return genuine(self, path)

        monkeypatch.setattr(backup, "writing", writing)
        monkeypatch.setattr(DataFolder, "open", open_and_fill)
        with pytest.raises(WritingError, match="No space left"):
            back_up(source, lived, tmp_path / "backup")


@pytest.mark.parametrize("room", ["nothing", "half the database", "some files"])
def test_a_backup_onto_a_full_disk_names_its_file(
    lived: Database, source: Settings, small_disk: Callable[[int], Path], trial_id: int, room: str
) -> None:
    (log,) = (source.data_dir / "trials" / str(trial_id)).rglob("trial.log")
    log.write_bytes(os.urandom(8 * 2**20))
    assert source.database_url is not None
    size = Path(str(make_url(source.database_url).database)).stat().st_size
    kib = {"nothing": 16, "half the database": size // 2**11, "some files": 4096}[room]
    folder = small_disk(kib)
    with pytest.raises(UserError, match=f"FILE {folder}/backup: its disk is full; free room there"):
        back_up(source, lived, folder / "backup")
    assert list(folder.iterdir()) == []


def test_what_is_not_ours_to_read_may_go_and_what_fails_stays(tmp_path: Path, unreadable: Break) -> None:
    folder, path = DataFolder(tmp_path), "trials/1/1/model.safetensors"
    with pytest.raises(FileNotFoundError, match="mounted"):
        folder.require(path)
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    unreadable("model.safetensors", "open", errno.EACCES)
    folder.require(path)
    unreadable("model.safetensors", "open")
    with pytest.raises(OSError, match="Input/output"):
        folder.require(path)


def test_retention_passes_over_what_cannot_be_read(
    lived: Database, source: Settings, unreadable: Break, trial_id: int
) -> None:
    with lived.read() as session:
        other = session.scalars(select(Trial.id).where(Trial.id != trial_id)).first()
    ended = update(Trial).where(Trial.id.in_([trial_id, other]))
    values = {"state": TrialState.FAILED, "finished_at": now() - timedelta(days=9)}
    lived.write(lambda session: session.execute(ended.values(values)))
    for one in (trial_id, other):
        write_checkpoint(source.data_dir / f"trials/{one}/1/checkpoints", 1)
    unreadable(source.data_dir / f"trials/{trial_id}/1/checkpoints", "scandir")
    with lived.read() as session:
        found = retention.plan(session, DataFolder(source.data_dir), Rules(days=5))
    assert [one.trial_id for one in found.checkpoints] == [other]
