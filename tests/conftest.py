"""What every test starts from; the service's fixtures are in `tests/machinery.py`.

The library's tests, in `tests/ttsv`, are collected and run where only `ttsv` and what it needs are installed.
"""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import PROFILE, ROWS, SHARES, examples

# Mutants are tried in one process, where a method is called of another object each time.
_SPARED = [HealthCheck.differing_executors] if "MUTANT_UNDER_TEST" in os.environ else []
for _profile in SHARES:
    settings.register_profile(
        _profile,
        examples(),
        derandomize=_profile != "explore",
        print_blob=True,
        suppress_health_check=_SPARED,
    )
settings.load_profile(PROFILE)

# Test processes and those that they start share few cores: threads that wait for each other in a product of matrices
# burn what the others need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No power is lost here, and what these processes write dies with them: the disk need not be waited for. Kills lose
# nothing either way, and the processes that are killed are others.
os.fsync = lambda fd: None

# Some virtual machines show AMX and let no process use it: bf16 products would end the test run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

_LIBRARY = Path(__file__).parent / "ttsv"

MACHINERY = {"api", "postgres_url", "postgres_template", "server", "lab", "quick_lab", "cluster"}
"""Fixtures that start the whole API, a PostgreSQL server, a web server, workers or Ray."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leaves what is collected alone, of which nothing is garbage: to look through it takes a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Brings in the service's fixtures, and all that they need, once tests of more than the library are read."""
    if isinstance(collector, pytest.Module) and not collector.path.is_relative_to(_LIBRARY):
        collector.config.pluginmanager.import_plugin("tests.machinery")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks what starts more than its own room; slow files come first, that none is left to one process alone.

    The library's come last, as they wait for nothing: with them no process is left that waits alone.
    Of what is then chosen by its marks, a profile may run some rows of each table only.
    """
    for item in items:
        callspec = getattr(item, "callspec", None)
        started = MACHINERY & set(getattr(item, "fixturenames", ()))
        if item.get_closest_marker("here"):
            started -= {"api", "server", "lab"}
        if started or (callspec and "postgres" in callspec.params.values()):
            item.add_marker("machinery")
    items.sort(key=lambda item: (not _is_slow_throughout(item), item.nodeid.startswith("tests/ttsv/")))
    yield
    if ROWS is not None:
        chosen = _of_each_table(items, ROWS)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def _of_each_table(items: list[pytest.Item], rows: int) -> set[pytest.Item]:
    """So many rows of each parametrized test, evenly spread, and all of those at the root, which hold for all rooms."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {
        item
        for table in tables.values()
        for item in (
            table
            if len(table) <= rows or table[0].path.parent == Path(__file__).parent
            else (table[place * (len(table) - 1) // (rows - 1)] for place in range(rows))
        )
    }


def _is_slow_throughout(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    return module is not None and any(mark.name == "slow" for mark in module.own_markers)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it again after every test."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests have imported stays too: else a trial's own collections take seconds in the end."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse="MUTANT_UNDER_TEST" in os.environ)
def _nothing_remembered() -> None:
    """A mutant of what makes a statement once would else not be asked, as the process has it from the original."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("ttsv", "service", "workers"):
            for value in list(vars(module).values()):
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a folder on a disk of its own, of so many KiB; where none can be made the test is skipped."""
    folders = list[Path]()

    def make(kib: int) -> Path:
        folder = tmp_path / f"disk-{len(folders)}"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        try:
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"no disk can be made here: {error}")
        if done.returncode:
            pytest.skip(f"no disk can be made here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield make
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(autouse=True)
def _process_as_found() -> Iterator[None]:
    """What a trial run here says to its process would reach later tests, and the processes that they start.

    A handler that a test's command leaves behind would write to that test's closed stream in all later ones.
    """
    root = logging.getLogger()
    handlers, level, environment = root.handlers[:], root.level, _environment()
    yield
    root.handlers[:] = handlers
    if root.level != level:
        root.setLevel(level)
    if environment != (left := _environment()):
        for name in left.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _environment() -> dict[str, str]:
    """All but what pytest says there of the test's progress, which is never the same."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
