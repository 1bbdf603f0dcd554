"""The digest of the code: of every line of it, and of nothing else."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from ttsv.runtime import code
from ttsv.runtime.code import code_digest, code_version


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "ttsv_copy"
    (folder / "inner").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("a.py", "1"), ("inner/b.py", "2"), ("notes.txt", "3")):
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(code, "_CODE", ("ttsv_copy",))
    yield folder
    code_digest.cache_clear()


def digest() -> str:
    code_digest.cache_clear()
    return code_digest()


def test_it_is_of_all_code(package: Path) -> None:
    first = digest()
    assert digest() == first
    (package / "notes.txt").write_text("other")
    assert digest() == first
    (package / "inner" / "b.py").write_text("other")
    second = digest()
    assert second != first
    (package / "a.py").rename(package / "c.py")
    assert digest() not in (first, second)


def test_the_library_alone_has_one_too(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest()
    monkeypatch.setattr(code, "_CODE", ("ttsv_copy", "ttsv_absent"))
    assert digest() == first


def test_it_stands_behind_the_version() -> None:
    assert re.fullmatch(rf"{re.escape(version('ttsv'))}\+[0-9a-f]{{12}}", code_version())
