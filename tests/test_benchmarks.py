"""Every script of the repository starts the way the documents say, and what the benchmarks keep is small and whole."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
MODULES = sorted(BENCHMARKS.glob("*.py"))
SCRIPTS = [path for path in MODULES if '__name__ == "__main__"' in path.read_text()]
RECORDS = BENCHMARKS / "records.jsonl"
STARTED_BY_OTHER_TESTS = {"docs/notebook.py": "tests/test_doc_blocks.py"}


def started(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT ...` from the root of a checkout, on one thread; without the authors' but for `variables`."""
    environment = {name: value for name, value in os.environ.items() if name != "AUTHORS"}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(script.relative_to(ROOT)), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_runs_and_a_quick_run_keeps_no_record(script: Path) -> None:
    kept = RECORDS.read_text()
    done = started(script, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "prints no figure"
    assert RECORDS.read_text() == kept


@pytest.mark.slow
def test_trajectories_say_what_they_lack() -> None:
    """In one line, and without stopping `make bench`."""
    kept = RECORDS.read_text()
    done = started(BENCHMARKS / "trajectories.py")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith("left out: needs --authors DIR, a checkout of")
    assert RECORDS.read_text() == kept


def test_a_checkout_of_the_authors_may_be_named_by_a_variable(tmp_path: Path) -> None:
    done = started(BENCHMARKS / "trajectories.py", AUTHORS=str(tmp_path))
    assert done.returncode == 1
    assert f"--authors {tmp_path}: has no src/utils.py" in done.stderr


def test_every_module_is_a_benchmark_or_shared_by_some() -> None:
    imported = {name for path in MODULES for name in re.findall(r"^from (\w+) import", path.read_text(), re.MULTILINE)}
    assert {path.stem for path in MODULES} - {path.stem for path in SCRIPTS} <= imported


def test_every_benchmark_is_told_of_and_made() -> None:
    table = re.findall(r"^\| `(\w+)\.py` \|", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == [path.stem for path in SCRIPTS]
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", "bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (names,) = re.findall(r"for name in ([\w ]+);.*python benchmarks/\$name\.py", done.stdout)
    assert sorted(names.split()) == [path.stem for path in SCRIPTS]
    for path in SCRIPTS:
        assert f"python benchmarks/{path.name}" in path.read_text(), f"{path.name} does not say how it is started"


def test_documents_name_scripts_that_exist() -> None:
    pages = [ROOT / "README.md", BENCHMARKS / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for name in re.findall(r"\b((?:benchmarks|docs)/[a-z]\w*\.(?:py|jsonl?))\b", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.relative_to(ROOT)} names {name}"


@pytest.mark.slow
def test_the_reference_pages_are_made_as_the_makefile_says(tmp_path: Path) -> None:
    done = started(ROOT / "docs" / "generate.py", "--into", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for page in tmp_path.glob("*.md"):
        assert page.read_text() == (ROOT / "docs" / page.name).read_text(), f"run `make docs`: {page.name} differs"
    assert len(list(tmp_path.glob("*.md"))) >= 5


def test_no_script_is_forgotten() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    scripts = [name for name in listed.stdout.split() if name.partition("/")[0] in ("benchmarks", "docs", "examples")]
    known = {str(path.relative_to(ROOT)) for path in MODULES} | {"docs/generate.py", *STARTED_BY_OTHER_TESTS}
    assert set(scripts) <= known
    assert all(Path(script).name in (ROOT / test).read_text() for script, test in STARTED_BY_OTHER_TESTS.items())


def test_a_record_is_one_compact_line() -> None:
    lines = RECORDS.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    names = [record["name"] for record in records]
    assert names == sorted(set(names))
    for line, record in zip(lines, records, strict=True):
        assert line == json.dumps(record, separators=(",", ":"))
        assert len(line) < 3000, record["name"]
        assert {"command", "date", "machine", "python"} <= record.keys()
        assert "instructions" in record or record["date"] < "2026-11-23", "older ones did not say"
        assert (ROOT / record["command"].split()[1]).is_file()
    assert {name.partition(" ")[0] for name in names} == {path.stem for path in SCRIPTS}
    assert not list(BENCHMARKS.glob("*.json"))
