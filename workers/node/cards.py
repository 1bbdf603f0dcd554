"""Which GPUs of this machine a process offers to a cluster: no two processes of one machine offer the same card."""

import contextlib
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from service.errors import UserError
from workers.node.machine import card_devices, local_gpus

logger = logging.getLogger(__name__)

OFFERED = "TTSV_OFFERED_CARDS"
"""Names the cards that this node offers to a cluster, in the order of their numbers, for the processes of trials."""
_NAME = "\0ttsv-card-{}"


class Cards:
    """The cards that this process has booked, until it closes them or ends, however it ends.

    `count` is how many, `names` their UUIDs where they are known, `environment` what Ray must be told of them: always
    by UUID, as CUDA numbers cards by speed where nvidia-smi, and whoever sets CUDA_VISIBLE_DEVICES, goes by their bus.

    A card is booked by an abstract Unix socket with its UUID in its name, which lives as long as the process and counts
    for all users of the machine, and by a lock on its device file, where there is one: a container with a network of
    its own has sockets of its own, and often the same file.
    """

    def __init__(self, wanted: int | None, environment: Mapping[str, str]) -> None:
        """Books so many cards of those that `environment` shows, all that are free where it does not matter.

        Raises `UserError` where fewer are free than are wanted. Where none is known and none is hidden, `wanted` is
        believed, with a warning.
        """
        self._sockets: list[socket.socket] = []
        self._locks: list[int] = []
        self.names: tuple[str, ...] = ()
        self.environment: Mapping[str, str] = MappingProxyType({})
        visible = local_gpus(environment)
        if not visible and wanted and "CUDA_VISIBLE_DEVICES" in environment:
            raise UserError(
                f"TTSV_WORKER_GPUS = {wanted}, and CUDA_VISIBLE_DEVICES hides every GPU from this process; unset it or "
                "name in it what may be used"
            )
        if not visible or not sys.platform.startswith("linux"):
            self.count = len(visible) if wanted is None else wanted
            if not visible and wanted:
                logger.warning(
                    "TTSV_WORKER_GPUS = %d is believed, though this machine lists no GPU: where it has none, trials "
                    "that reserve one compute on the processor; run `ttsv doctor`, load the driver, or leave "
                    "TTSV_WORKER_GPUS out",
                    wanted,
                )
            return
        most = len(visible) if wanted is None else wanted
        self._devices = card_devices() if most else {}
        booked = [uuid for uuid in visible if len(self._sockets) < most and self._book(uuid)]
        self.count, self.names = len(booked), tuple(booked)
        if wanted is not None and len(booked) < wanted:
            self.close()
            raise UserError(_too_few(wanted, visible, len(booked)))
        if len(booked) < min(most, len(visible)):
            logger.warning("other workers on this machine offer %d of its GPUs", len(visible) - len(booked))
        shown = ",".join(booked)
        self.environment = MappingProxyType(
            {"CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", OFFERED: shown}
        )

    def close(self) -> None:
        """Gives the cards back."""
        while self._sockets:
            self._sockets.pop().close()
        while self._locks:
            os.close(self._locks.pop())

    def _book(self, uuid: str) -> bool:
        with contextlib.ExitStack() as stack:
            booking = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                booking.bind(_NAME.format(uuid))
                if (device := self._devices.get(uuid)) is not None:
                    self._lock(device)
            except OSError:
                return False
            stack.pop_all()
        self._sockets.append(booking)
        return True

    def _lock(self, device: Path) -> None:
        """Raises `OSError` where another process has the lock; a file that cannot be opened has none."""
        try:
            file = os.open(device, os.O_RDONLY)
        except OSError:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise
        except OSError:  # a file that takes no locks
            os.close(file)
        else:
            self._locks.append(file)


def _too_few(wanted: int, visible: Sequence[str], free: int) -> str:
    if wanted > len(visible):
        return f"TTSV_WORKER_GPUS = {wanted}, and there are {len(visible)} GPUs; ask for no more"
    return (
        f"TTSV_WORKER_GPUS = {wanted}, and of {len(visible)} GPUs {free} are free: other workers on this machine offer "
        "the rest; ask for no more, or stop one of them"
    )
