"""Signs of life between two reports: a trial whose epoch takes an hour gets on, one that hangs does not.

The trial's process leaves them in Ray's head while it computes, and its driver reads those of trials that are silent.
"""

import contextlib
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from ttsv.runtime.headway import headway
from workers.node.notes import Shelf
from workers.trial_process.messages import Job
from workers.trial_process.resources import Sampler

SIGN_SECONDS = 5.0
"""Between two signs, and between two looks for them."""


@dataclass(frozen=True)
class Sign:
    """How often the trial got on in this attempt, and what its process has used (a `ResourceSeries`), once known."""

    fence: int
    attempt: int
    headway: int
    used: dict[str, Any] | None = None


def signs() -> Shelf[Sign] | None:
    """The signs of the cluster's trials, by their numbers; None outside a cluster."""
    if not ray.is_initialized():
        return None
    return Shelf(internal_kv_get_gcs_client(), Sign, "sign/")  # type: ignore[no-untyped-call]


class SignsOfLife:
    """Leaves a sign of the trial every `SIGN_SECONDS` in which it got on, until the context ends.

    A thread of its own does: the trial computes meanwhile. While Ray's head is away there are none, as of all else.
    """

    def __init__(self, job: Job, sampler: Sampler, shelf: Shelf[Sign] | None) -> None:
        self._job, self._sampler, self._shelf = job, sampler, shelf
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self._shelf is not None:
            threading.Thread(target=self._leave, args=(self._shelf,), name="signs", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()

    def _leave(self, shelf: Shelf[Sign]) -> None:
        name, counted, left = str(self._job.trial_id), headway(), False
        used: dict[str, Any] | None = None
        while not self._over.wait(SIGN_SECONDS):
            if (now := headway()) == counted:
                continue
            used = dict(self._sampler.series(by="signs") or {}) or used
            with contextlib.suppress(Exception):  # Ray's, of many kinds: the next sign says as much
                shelf.put(name, Sign(self._job.fence, self._job.attempt, now, used))
                counted, left = now, True
        if left:
            with contextlib.suppress(Exception):
                shelf.remove(name)
