"""What a planned trial will take of a card: by what was measured before, else worked out of its network and training.

Functions take a Session and change nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Result, Trial
from service.experiments.estimate import Key, key_of, newest_measured
from ttsv.config.memory import CONTEXT_BYTES, TrialMemory, trial_memory
from ttsv.config.trial import TrialConfig
from ttsv.errors import ConfigError

GIB = 2**30
HELD_IN_PIECES = 1.1
"""What torch's allocator holds over what tensors take at most: it keeps whole blocks, which count in a share."""

_Scale = tuple[int, bool]
"""Images of a batch, and whether they are computed in half precision: what the memory of an unknown network goes by."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a trial's tensors, `most` at any moment, and how that came about."""

    most: float
    basis: str
    computed: TrialMemory | None = None
    """All that was worked out; None where something like it was measured."""

    @property
    def of_card(self) -> float:
        """Bytes of a card that a process with this trial takes."""
        return self.most * HELD_IN_PIECES + CONTEXT_BYTES

    def fits(self, room: float) -> bool:
        """Whether so many bytes of a card are enough: images stay in the machine's memory where they are not."""
        taken = self.most if self.computed is None else self.computed.within(room)
        return taken * HELD_IN_PIECES + CONTEXT_BYTES <= room


@dataclass(frozen=True)
class _Measured:
    trial_id: int
    peak: int
    scale: _Scale
    computed: TrialMemory | None


class MemoryEstimator:
    """Estimates what trials of one spec take of a card, from what trials of a project (None: of all) took."""

    def __init__(self, session: Session, trials: Iterable[TrialConfig], project_id: int | None = None) -> None:
        self._measured = _newest(session, {key_of(config) for config in trials}, project_id)
        self._found: dict[tuple[Key, _Scale, TrialMemory | None], Memory | None] = {}

    def estimate(self, config: TrialConfig) -> Memory | None:
        """One trial's; None where nothing like it was measured, and its network is known only once it is built."""
        key = key_of(config), _scale(config), trial_memory(config)
        if key not in self._found:
            self._found[key] = self._estimated(*key)
        return self._found[key]

    def _estimated(self, key: Key, scale: _Scale, computed: TrialMemory | None) -> Memory | None:
        measured = self._measured.get(key)
        if measured is None:
            return None if computed is None else Memory(computed.most, _COMPUTED, computed)
        basis = f"what trial {measured.trial_id} took, the newest of this data set, network, layer and rank on a GPU"
        if computed is not None and measured.computed is not None:
            ratio = computed.training / measured.computed.training
            taken = max(measured.peak * ratio, computed.evaluation)
            if ratio != 1:
                basis += f", times {ratio:.3g} for another batch or training"
            if taken > measured.peak * ratio:
                basis = f"its evaluation, worked out of its layers; in training {basis}"
            return Memory(taken, basis)
        (images, half), (before, was_half) = scale, measured.scale
        # All of it for what a larger batch or more precision may take; what a smaller one spares is not known.
        ratio = max(1.0, images / before) * (2 if was_half and not half else 1)
        if ratio != 1:
            basis += f", times {ratio:.3g} at most for a larger batch or more precision"
        return Memory(measured.peak * ratio, basis)


_COMPUTED = "worked out of its layers, batch and training; nothing like it was measured on a GPU yet"


def _scale(config: TrialConfig) -> _Scale:
    return config.training.batch_size, config.training.precision != "float32"


def _newest(session: Session, wanted: set[Key], project_id: int | None) -> dict[Key, _Measured]:
    """The newest trial of each key whose training on a GPU was measured."""
    newest = newest_measured(Result.peak_memory > 0, wanted, project_id)
    columns = (Trial.id, Trial.dataset, Trial.model, Trial.layer, Trial.rank, Trial.config, Result.peak_memory)
    rows = session.execute(select(*columns).join(Result, Result.trial_id == Trial.id).where(Trial.id.in_(newest)))
    found = {}
    for row in rows:
        key = (row.dataset, row.model, row.layer, row.rank)
        if key not in wanted:
            continue
        try:
            config = TrialConfig.from_dict(row.config)
        except ConfigError:
            continue  # of another version
        found[key] = _Measured(row.id, row.peak_memory, _scale(config), trial_memory(config))
    return found


@dataclass(frozen=True)
class Advice:
    """What is said of GPUs for one spec's trials, and changes nothing of it.

    `largest`: the trial's that takes the most, of those whose memory is known. `card`: bytes of the smallest card that
    is there, None where none is known. `gpus`: the fraction that runs as many trials side by side there as fit, each
    with its images on the card; None without a card, where the spec asks for none or several, and where none fits.
    """

    largest: Memory | None = None
    card: float | None = None
    gpus: float | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def shares(gpus: float) -> bool:
    """Whether trials that ask for so many GPUs have one, or a fraction of one."""
    return 0 < gpus <= 1


def advise(memories: Sequence[Memory | None], card_gib: float | None, gpus: float) -> Advice:
    """What to say of trials that ask for so many GPUs, where the smallest card has so much memory."""
    known = {memory for memory in memories if memory is not None}
    largest = max(known, key=lambda memory: memory.most, default=None)
    card = None if card_gib is None else card_gib * GIB
    if largest is None or card is None or not shares(gpus):
        return Advice(largest, card)
    beside = _side_by_side(largest, card)
    fraction = _fraction(beside) if beside else None
    need = f"about {largest.of_card / GIB:.1f} GiB of a card"
    if None in memories:
        need = f"the largest of the trials whose memory is known needs {need}"
    else:
        need = f"each of these trials needs {'up to ' if len(known) > 1 else ''}{need}"
    size = f"{card / GIB:.0f} GiB"
    notes, warnings = [], []
    if not largest.fits(gpus * card):
        has = f"resources.gpus: {gpus:g} of the smallest one there, of {size}, is {gpus * card / GIB:.1f} GiB"
        remedy = f"ask for {fraction:g} or more" if fraction else "take smaller batches, or a larger card"
        warnings.append(f"{need}, and {has}: it would run out of memory; {remedy}")
    if fraction:
        runs = f"would run {beside} side by side" if beside > 1 else "runs one at a time"
        notes.append(f"{need}: resources.gpus: {fraction:g} {runs} on a card of {size}, as far as memory goes")
    return Advice(largest, card, fraction, tuple(notes), tuple(warnings))


def _side_by_side(memory: Memory, card: float) -> int:
    """How many such trials a card takes."""
    count = min(int(card / memory.of_card), _DIGITS)
    while count and _fraction(count) * card < memory.of_card:
        count -= 1
    return count


_DIGITS = 10_000
"""Fractions of GPUs are counted to four digits."""


def _fraction(count: int) -> float:
    """The largest fraction of which so many make no more than one."""
    return (_DIGITS // count) / _DIGITS
