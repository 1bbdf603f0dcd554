"""Who trained which epoch: a notebook that every trial's process of a chaos run writes, and that no mishap meets."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from service.storage import Attempt
from tests.chaos.fences import NOTES

_FILE = "epochs"
_DATA = "data"


@dataclass
class Lives:
    """A trial's processes: how many, epochs trained again, checkpoints changed and found so, and what is wrong.

    `seen`: what each attempt saw of its data set, which is to be judged.

    A process may do no more again than the epoch that its predecessor (the newest attempt before it) did last, one
    more for the checkpoint that it found spoilt, and those that a predecessor may have been ahead of its store.
    """

    runs: int = 0
    redone: int = 0
    mutated: int = 0
    spoilt: int = 0
    seen: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def note_start(folder: Path, done: int, *, spoilt: bool) -> None:
    """A process begins after so many epochs; `spoilt`: its newest checkpoint was not whole."""
    _note(folder, f"{'spoilt' if spoilt else 'start'} {done}")


def note_epoch(folder: Path, epoch: int) -> None:
    """A process has trained an epoch, of which nothing is stored yet."""
    _note(folder, f"epoch {epoch}")


def note_seen(folder: Path, seen: str) -> None:
    """A process has read its data set (`tests.chaos.images.seen`)."""
    _note(folder, f"seen {seen}")


def note_mutation(notes: Path, folder: Path, number: int) -> None:
    """Somebody has changed this checkpoint, and nobody will write another of this attempt."""
    with (notes / _FILE).open("a") as file:
        file.write(f"{folder.parent.name} {folder.name} mutated {number}\n")


def note_data(notes: Path, what: str, which: str) -> None:
    """What became of a file of the data set, `which` in words: it was `changed`, or the service `noticed` that."""
    with (notes / _DATA).open("a") as file:
        file.write(f"{what} {which}\n")


def read_data(notes: Path) -> Counter[str]:
    """How often what became of a file of the data set."""
    path = notes / _DATA
    return Counter(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else Counter()


def read(notes: Path, ahead: int = 0) -> dict[int, Lives]:
    """What is noted of each trial, by its id; trials may have been so many epochs `ahead` of what was stored."""
    found: dict[int, Lives] = {}
    reached: dict[int, dict[Attempt, int]] = {}
    changed = set[str]()
    path = notes / _FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        trial, name, what, number = line.split()
        lives = found.setdefault(int(trial), Lives())
        if what == "seen":
            lives.seen.append((name, number))
            continue
        attempt, epoch = Attempt.parse(name), int(number)
        assert attempt is not None
        before = reached.setdefault(int(trial), {})
        if what == "epoch":
            before[attempt] = epoch
            continue
        if what == "mutated":
            lives.mutated += 1
            changed.add(trial)
            continue
        if trial in changed and what != "spoilt":
            lives.faults.append(f"attempt {name} went on from a checkpoint that was changed, and did not notice")
        changed.discard(trial)
        lives.runs += 1
        lives.spoilt += what == "spoilt"
        last = before[max(one for one in before if one <= attempt)] if any(one <= attempt for one in before) else 0
        lives.redone += max(0, last - epoch)
        if last - epoch > 1 + (what == "spoilt") + ahead:
            lives.faults.append(f"attempt {name} went on after epoch {epoch}, the one before had done {last}")
        before[attempt] = epoch
    return found


def _note(folder: Path, line: str) -> None:
    if (notes := os.environ.get(NOTES)) is not None:
        with (Path(notes) / _FILE).open("a") as file:
            file.write(f"{folder.parent.name} {folder.name} {line}\n")
