"""The errors a trial may end with, each of which says what to do about it."""

from typing import Any, ClassVar


class TrialError(ValueError):
    """Base of everything that ends a trial for a known reason.

    `failure` is the class under which the trial is reported: `bad_config`, `bad_data`, `diverged`, `oom`,
    `broken_context` or `lost_device`.
    """

    failure: ClassVar[str] = "error"


class ConfigError(TrialError):
    """A field of a configuration has a value that cannot be used.

    `field` is the dotted path from the trial configuration (`training.lr`), `fix` says what would be right.
    """

    failure = "bad_config"

    def __init__(self, field: str, value: Any, fix: str) -> None:
        super().__init__(f"{field} = {value!r}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.value, self.fix))


class DataError(TrialError):
    """A data set is missing, cut or altered; the message has the command that mends it."""

    failure = "bad_data"


class DivergedError(TrialError):
    """The loss or a weight is no longer finite. Final: the same seed would diverge again."""

    failure = "diverged"


class OutOfMemoryError(TrialError):
    """The trial does not fit the device. Never retried with a smaller batch: that would change the result."""

    failure = "oom"


class MachineMemoryError(OutOfMemoryError):
    """The trial does not fit the machine's memory: a card with more room would not help it."""


class LibraryMemoryError(OutOfMemoryError):
    """A library failed on a device with next to no memory left: its process must end, as for a `DeviceError`."""


class DeviceError(TrialError):
    """The GPU, or this process's part of it, can no longer be used.

    Whatever the process computed next would fail too: it must end, and the trial be tried again in another one.
    """


class BrokenContextError(DeviceError):
    """A kernel failed, and with it the process's CUDA context, or a server of NVIDIA's MPS that had it."""

    failure = "broken_context"


class LostDeviceError(DeviceError):
    """The GPU itself failed, or is not there any more: no fault of the trial."""

    failure = "lost_device"
