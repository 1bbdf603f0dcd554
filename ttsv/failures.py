"""What torch raises, as one of the errors that a trial may end with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ttsv.errors import ConfigError, DivergedError, OutOfMemoryError, TrialError


@contextmanager
def known_failures(model: nn.Module | None = None) -> Iterator[None]:
    """Turns what torch raises for lack of memory, or over a weight that is not finite, into a `TrialError`."""
    try:
        yield
    except TrialError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(f"the trial does not fit the device: {error}") from error
    except (RuntimeError, ValueError) as error:
        if "DefaultCPUAllocator" in str(error):
            raise OutOfMemoryError(f"the trial does not fit the machine's memory: {error}") from error
        if "Expected more than 1 value per channel when training" in str(error):
            fix = "batch norm finds no variance in a single value: choose batches of more images, none left over alone"
            raise ConfigError("training.batch_size", 1, fix) from error
        if model is not None and not all(p.isfinite().all() for p in model.parameters()):
            raise DivergedError(f"a weight is not finite: {error}") from error
        raise
