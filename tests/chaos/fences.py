"""What the fence refuses and what it lets pass, noted by every worker and driver of a chaos run.

Nothing here decides anything: a write goes on as it would, and at its end, in its own transaction, it is looked whose
the experiment is. `weaken` takes the fence away, so that it can be tried whether a run without it is found out.
"""

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTES = "CHAOS_NOTES"
"""The environment variable that names the folder of a run's notes, which no mishap meets."""
UNFENCED = "CHAOS_UNFENCED"
"""Set where the fence is taken away."""
_FILE = "fences"
_FENCE = 'Experiment.fence == bindparam("lease_fence")'
_WEAKER = 'Experiment.fence >= bindparam("lease_fence")'
_FROZEN_SECONDS = 3.0
"""A thread of the lease's that paused for longer stood still."""
_LATE_SECONDS = 5.0


@dataclass(frozen=True)
class Refusals:
    """How many writes were refused, by the thread that wrote, and sentences on those that should have been."""

    by_thread: dict[str, int]
    stale: list[str]


def weaken() -> None:
    """Puts a fence in place of the product's that lets every older claim pass. Call it before anything imports that."""
    import service.queue

    name = "service.queue.leases"
    if name in sys.modules:
        raise RuntimeError("too late: the fence was imported already")
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    if source.count(_FENCE) != 1:
        raise RuntimeError(f"{spec.origin} has another predicate now than {_FENCE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source.replace(_FENCE, _WEAKER), spec.origin, "exec"), module.__dict__)
    setattr(service.queue, "leases", module)  # noqa: B010


def watch() -> None:
    """Has this process note every write that its fence refuses or should have refused.

    The lease's thread of every other experiment, if it stood still, goes on a little later than the rest of its
    process, as any thread may: what trials have said by then meets the fence first.
    """
    from sqlalchemy import select
    from sqlalchemy.orm import Session

    from service.database import Experiment
    from service.database.engine import Database
    from service.errors import LeaseLostError
    from service.queue import leases
    from service.queue.leases import Lease

    looked: dict[int, float] = {}

    def late(lease: Lease) -> None:
        if threading.current_thread().name != "lease":
            return
        now, here = time.monotonic(), threading.get_ident()
        if lease.experiment_id % 2 and now - looked.get(here, now) > _FROZEN_SECONDS:
            time.sleep(_LATE_SECONDS)
        looked[here] = time.monotonic()

    def watched(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def fenced(session: Session, lease: Lease) -> Any:
            late(lease)
            try:
                answer = genuine(session, lease)
            except LeaseLostError:
                _note("refused", lease.experiment_id, lease.fence)
                raise
            session.info["lease"] = lease
            return answer

        return fenced

    def is_held(session: Session, lease: Lease) -> bool:
        late(lease)
        return looks(session, lease)

    looks = leases.is_held
    setattr(leases, "is_held", is_held)  # noqa: B010
    setattr(leases, "lock", watched(leases.lock))  # noqa: B010
    setattr(leases, "renew", watched(leases.renew))  # noqa: B010
    write = Database.write

    def checked(self: Database, work: Callable[[Session], Any]) -> Any:
        def looked_at(session: Session) -> Any:
            answer = work(session)
            lease = session.info.get("lease")
            if lease is not None:
                session.flush()
                fence = session.scalar(select(Experiment.fence).where(Experiment.id == lease.experiment_id))
                if fence != lease.fence:
                    _note("stale", lease.experiment_id, lease.fence, f"fence {fence}")
            return answer

        return write(self, looked_at)

    setattr(Database, "write", checked)  # noqa: B010


def read(notes: Path) -> Refusals:
    """What was noted in this folder."""
    path = notes / _FILE
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    refused = [one["thread"] for one in found if one["what"] == "refused"]
    return Refusals(
        {name: refused.count(name) for name in sorted(set(refused))},
        [
            f"experiment {one['experiment']}: thread {one['thread']} of process {one['process']} wrote under fence "
            f"{one['fence']} what was under {one['detail']} by then"
            for one in found
            if one["what"] == "stale"
        ],
    )


def _note(what: str, experiment: int, fence: int, detail: str = "") -> None:
    line = {
        "what": what,
        "experiment": experiment,
        "fence": fence,
        "detail": detail,
        "thread": threading.current_thread().name,
        "process": os.getpid(),
    }
    with (Path(os.environ[NOTES]) / _FILE).open("a") as file:
        file.write(f"{json.dumps(line)}\n")
