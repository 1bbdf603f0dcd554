"""What commands write: whole files, and streams that lack signs or are closed."""

import io
import os
import sys
from pathlib import Path

import pytest

from workers.cli.__main__ import _prepare_streams
from workers.cli.output import written_whole


class TestFiles:
    def test_a_new_file(self, tmp_path: Path) -> None:
        file = tmp_path / "table.csv"
        with written_whole(file) as part:
            assert part.suffix == ".csv"
            part.write_text("new")
            assert not file.exists()
        assert file.read_text() == "new"
        assert list(tmp_path.iterdir()) == [file]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
    def test_whoever_is_interrupted_leaves_what_was_there(self, tmp_path: Path, error: type[BaseException]) -> None:
        file = tmp_path / "table.csv"
        file.write_text("old")
        with pytest.raises(error), written_whole(file) as part:
            raise error(part.write_text("ha"))
        assert file.read_text() == "old"
        assert list(tmp_path.iterdir()) == [file]

    def test_a_file_keeps_its_mode_and_a_link_its_place(self, tmp_path: Path) -> None:
        file, link = tmp_path / "table.csv", tmp_path / "link.csv"
        file.touch(0o600)
        link.symlink_to(file)
        with written_whole(link) as part:
            part.write_text("new")
        assert link.is_symlink()
        assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o600)

    def test_what_is_no_plain_file_is_written_itself(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with written_whole(pipe) as part:
            assert part == pipe
        assert pipe.is_fifo()

    def test_errors_name_the_file_and_not_what_stands_beside_it(self, tmp_path: Path) -> None:
        for file in (tmp_path / "missing/table.csv", tmp_path / ("x" * 254)):
            with pytest.raises(OSError, match=r"No such file|too long") as caught, written_whole(file) as part:
                part.write_text("new")
            assert caught.value.filename == str(file)


class TestStreams:
    def test_signs_that_an_encoding_lacks_are_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, encoding="latin-1", write_through=True))
        _prepare_streams()
        print("ü ± 名")
        assert said.getvalue().decode("latin-1") == "ü ± \\u540d\n"

    def test_what_is_closed_swallows_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", None)
        _prepare_streams()
        for stream in (sys.stdout, sys.stderr):
            with stream:
                assert stream.write("x") == 1
