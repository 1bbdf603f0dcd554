"""What `ttsv doctor` finds: one line of each, and the command that mends it."""

import math
from dataclasses import dataclass
from enum import StrEnum

BACKUP, RESTORE = "ttsv backup ttsv.backup", "ttsv restore --force ttsv.backup"
"""What takes all there is into another database. The data folder stays: without force nothing is restored over it."""


class Status(StrEnum):
    """How bad it is, the worst last: a warning is worth a look, what is wrong keeps something from working."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """What one check found. `says` is one line; `mend` the command that mends it, None where all is well."""

    check: str
    status: Status
    says: str
    mend: str | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (self.mend is None):
            raise ValueError(
                f"{self.check}: a command belongs to everything that is not as it should be, and only there"
            )
        object.__setattr__(self, "says", " ".join(self.says.split()))


def worst(findings: list[Finding]) -> Status:
    """The worst status among them."""
    return max((finding.status for finding in findings), key=list(Status).index, default=Status.OK)


class Check:
    """Makes the findings of one check: by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ok(self, says: str) -> Finding:
        """All is well."""
        return Finding(self.name, Status.OK, says)

    def warning(self, says: str, mend: str) -> Finding:
        """It works, and is worth a look."""
        return Finding(self.name, Status.WARNING, says, mend)

    def wrong(self, says: str, mend: str) -> Finding:
        """Something does not work until it is mended."""
        return Finding(self.name, Status.WRONG, says, mend)


def ago(seconds: float) -> str:
    """A time that has passed, in the unit that suits it."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size(count: float) -> str:
    """A number of bytes, in the unit that suits it, so that only nothing is 0."""
    if count < 2**20:
        return f"{math.ceil(count / 2**10)} KiB"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
