"""The library's tests are collected, and cards measured, where nothing is installed but the library and its needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COLLECT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {names} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
import pytest
code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
if not code:  # what it loads is loaded by then
    sys.path.insert(0, "benchmarks")
    import gpu
sys.exit(code)
"""
"""Collects some tests, and imports the benchmark of a card."""
SERVICE = {
    "alembic", "fastapi", "httpx2", "migrations", "optuna", "pandas", "prometheus_client", "psycopg", "pydantic",
    "pydantic_settings", "ray", "rich", "service", "sqlalchemy", "starlette", "typer", "uvicorn", "workers", "yaml",
}  # fmt: skip


def collected(*paths: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", COLLECT.format(names=sorted(SERVICE)), *paths]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_librarys_tests_need_the_library_alone() -> None:
    found = collected("tests/ttsv")
    assert found.returncode == 0, found.stdout[-3000:]
    assert "test_loop.py" in found.stdout


@pytest.mark.slow
def test_other_tests_need_more() -> None:
    """Else the one above would prove nothing."""
    found = collected("tests/service/queue/test_shares.py")
    assert found.returncode != 0
    assert "No module named" in found.stdout + found.stderr
