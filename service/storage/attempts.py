"""How the files of a trial lie in a store: `trials/TRIAL/ATTEMPT/`, a folder for each attempt at it.

Files cannot check a fence. So each attempt writes into a folder of its own, which starts as a copy of the newest
earlier one: a stalled predecessor that wakes up spoils nothing.
"""

import re
from dataclasses import dataclass
from functools import total_ordering

from service.storage.folder import PARTIAL
from service.storage.store import Store, StoredFile
from ttsv.results import CHECKPOINTS

TRIALS = "trials"
LOG = "trial.log"
"""Its name in an attempt's folder. A later attempt goes on in a copy of it."""
_NAME = re.compile(r"(\d{1,18})(?:\.(\d{1,18}))?")


@total_ordering
@dataclass(frozen=True)
class Attempt:
    """An attempt at a trial: under a claim's `fence`, and of those its driver made the one of this `number` from 0."""

    fence: int
    number: int = 0

    def __lt__(self, other: "Attempt") -> bool:
        return (self.fence, self.number) < (other.fence, other.number)

    def __str__(self) -> str:
        """The name of its folder: the fence, and behind a dot the number of a further one."""
        return f"{self.fence}.{self.number}" if self.number else str(self.fence)

    @classmethod
    def parse(cls, name: str) -> "Attempt | None":
        """The attempt of a folder's name; None of other names."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2] or 0))

    def folder(self, trial_id: int) -> str:
        """Its folder."""
        return f"{TRIALS}/{trial_id}/{self}"


def attempts(store: Store, trial_id: int) -> list[Attempt]:
    """Those that have a folder, oldest first."""
    return sorted(filter(None, map(Attempt.parse, store.folders(f"{TRIALS}/{trial_id}"))))


def begin(store: Store, trial_id: int, attempt: Attempt) -> str:
    """The folder of an attempt, with the newest earlier attempt's files in it; the folders of earlier ones go.

    So do copies that they left unfinished when they were killed.
    """
    folder, known = attempt.folder(trial_id), attempts(store, trial_id)
    while attempt not in known:
        earlier = [one for one in known if one < attempt]
        if not earlier:
            store.make(folder)
            break
        try:
            store.copy(earlier[-1].folder(trial_id), folder)
            break
        except FileNotFoundError:
            # An attempt between the two that is left over has removed what it had copied: by now its own is whole.
            before, known = known, attempts(store, trial_id)
            if known == before:
                raise
    for name in store.folders(f"{TRIALS}/{trial_id}", partial=True):
        old = _attempt_of(name)
        if old is not None and old < attempt:
            store.remove(f"{TRIALS}/{trial_id}/{name}")
    return folder


def remove_checkpoints(store: Store, trial_id: int, fence: int, number: int | None = None) -> None:
    """Removes what only a resume would need, of every attempt under no later claim; the trial's artifacts stay.

    Those of later claims serve: by now the trial may be retried, and at work. So do those that the driver of this claim
    makes from that of this `number` on.
    """
    for name in store.folders(f"{TRIALS}/{trial_id}", partial=True):
        attempt = _attempt_of(name)
        serves = number is not None and attempt is not None and attempt >= Attempt(fence, number)
        if not (serves or is_later(name, fence)):
            store.remove(f"{TRIALS}/{trial_id}/{name}/{CHECKPOINTS}")


def is_later(name: str, fence: int) -> bool:
    """Whether an attempt's folder of that name, or an unfinished copy of one, is of a later claim."""
    first = name.partition(".")[0]
    return first.isdecimal() and int(first) > fence


def _attempt_of(name: str) -> Attempt | None:
    """The attempt whose folder, or an unfinished copy of it, has that name."""
    return Attempt.parse(name.removesuffix(PARTIAL).rpartition(".")[0] if name.endswith(PARTIAL) else name)


def logs_of(store: Store, trial_id: int) -> list[StoredFile]:
    """The logs of a trial, that of the newest attempt first."""
    paths = [f"{one.folder(trial_id)}/{LOG}" for one in reversed(attempts(store, trial_id))]
    return [StoredFile(store, path) for path in paths if store.size(path) is not None]
