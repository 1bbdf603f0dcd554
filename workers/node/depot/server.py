"""The depot: a process of Ray beside the head's data folder, which gives and takes files for other nodes.

It knows nothing that is not on the disk, so that another one goes on where it died. It is started by the first trial
that needs it, and ends when nobody has for a while.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.storage import Folder
from ttsv.runtime.code import code_digest
from workers.node.depot.data_sets import DataSetFiles, describe_data_set, known_data_sets
from workers.node.depot.home import Home

NAMESPACE = "ttsv"
THREADS = 32
DATA_SETS = "data_sets"
"""The threads that read data sets: one that was never used is read for long, and all that ask for it wait. Meanwhile
trials' files are stored by the others."""
_DATA_SET_THREADS = 8
IDLE_SECONDS = 900.0
_READABLE = ("trials", "datasets")


class Depot:
    """Reads files of trials and data sets, and writes files of trials; what it raises is raised at the caller's."""

    def __init__(self, data_dir: str) -> None:
        self._folder = Folder(Path(data_dir))
        self._folder.drop_abandoned()
        self._asked = time.monotonic()
        self._busy = 0
        self._counted = threading.Lock()
        threading.Thread(target=self._end_when_idle, name="idle", daemon=True).start()

    def sees(self, home: Home) -> bool:
        """Whether the home is the folder that is seen from here. Raises `OSError` where that cannot be told."""
        return home.knows(self._folder.root)

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of `Folder` returns, of those that concern trials alone."""
        if method not in _ALLOWED:
            raise PermissionError(f"the depot has no {method}")
        for path in arguments[_ALLOWED[method]]:
            parts = Path(path).parts
            if len(parts) < 2 or parts[0] not in (_READABLE if method in _READS else _READABLE[:1]):
                raise PermissionError(f"the depot does not {method} {path}")
        with self._work():
            return getattr(self._folder, method)(*arguments)

    @ray.method(concurrency_group=DATA_SETS)
    def data_set(self, name: str) -> DataSetFiles | str:
        """A data set as it is here; in words why there is none."""
        with self._work():
            return describe_data_set(name, self._folder.root / "datasets")

    @ray.method(concurrency_group=DATA_SETS)
    def data_sets(self) -> list[str]:
        """The names of those whose files are here."""
        with self._work():
            return known_data_sets(self._folder.root)

    def is_idle(self) -> bool:
        """Whether nobody has asked for anything for long: the first digest of a large data set takes long itself."""
        return not self._busy and time.monotonic() - self._asked >= IDLE_SECONDS

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        with self._counted:
            self._busy += 1
        try:
            yield
        finally:
            self._asked = time.monotonic()
            with self._counted:
                self._busy -= 1

    def _end_when_idle(self) -> None:
        while not self.is_idle():
            time.sleep(5)
        os._exit(0)


_READS = {"files", "folders", "size", "read", "digest"}
_NONE, _FIRST, _SECOND, _BOTH = slice(0), slice(1), slice(1, 2), slice(2)
_ALLOWED = {
    "files": _FIRST,
    "folders": _FIRST,
    "size": _FIRST,
    "read": _FIRST,
    "digest": _FIRST,
    "write_part": _NONE,
    "finish": _SECOND,
    "drop": _NONE,
    "copy": _BOTH,
    "make": _FIRST,
    "remove": _FIRST,
}
"""Which arguments of a method are paths."""


def find_depot(home: Home) -> Any:
    """Ray's handle of the home's depot, which is started where there is none."""
    what = f"{home.node_id} {home.data_dir} {code_digest()}"
    name = f"depot-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    there = NodeAffinitySchedulingStrategy(home.node_id, soft=False)
    remote: Any = ray.remote  # whose types know no groups
    actor = remote(concurrency_groups={DATA_SETS: _DATA_SET_THREADS})(Depot).options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=THREADS,
        scheduling_strategy=there,
    )
    return actor.remote(home.data_dir)
