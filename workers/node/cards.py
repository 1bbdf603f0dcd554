"""Which GPUs of this machine a process offers to a cluster: no two processes of one machine offer the same card."""

import contextlib
import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from service.errors import UserError
from workers.node.machine import local_gpus

logger = logging.getLogger(__name__)

_NAME = "\0ttsv-card-{}"


class Cards:
    """The cards that this process has booked, until it closes them or ends, however it ends.

    `count` is how many, `names` their UUIDs where they are known, `environment` what Ray must be told of them: nothing
    where it may take every card it sees. A card is booked by an abstract Unix socket with its UUID in its name, which
    lives as long as the process and counts for all users of the machine; a container with a network of its own has
    names of its own.
    """

    def __init__(self, wanted: int | None, environment: Mapping[str, str]) -> None:
        """Books so many cards of those that `environment` shows, all that are free where it does not matter.

        Raises `UserError` where fewer are free than are wanted. Where none is known and none is hidden, `wanted` is
        believed.
        """
        self._sockets: list[socket.socket] = []
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
            return
        most = len(visible) if wanted is None else wanted
        booked = [uuid for uuid in visible if len(self._sockets) < most and self._book(uuid)]
        self.count, self.names = len(booked), tuple(booked)
        if wanted is not None and len(booked) < wanted:
            self.close()
            raise UserError(_too_few(wanted, visible, len(booked)))
        if len(booked) < min(most, len(visible)):
            logger.warning("other workers on this machine offer %d of its GPUs", len(visible) - len(booked))
        if len(booked) < len(visible):
            self.environment = MappingProxyType({"CUDA_VISIBLE_DEVICES": ",".join(booked)})

    def close(self) -> None:
        """Gives the cards back."""
        while self._sockets:
            self._sockets.pop().close()

    def _book(self, uuid: str) -> bool:
        with contextlib.ExitStack() as stack:
            booking = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                booking.bind(_NAME.format(uuid))
            except OSError:
                return False
            stack.pop_all()
        self._sockets.append(booking)
        return True


def _too_few(wanted: int, visible: Sequence[str], free: int) -> str:
    if wanted > len(visible):
        return f"TTSV_WORKER_GPUS = {wanted}, and there are {len(visible)} GPUs; ask for no more"
    return (
        f"TTSV_WORKER_GPUS = {wanted}, and of {len(visible)} GPUs {free} are free: other workers on this machine offer "
        "the rest; ask for no more, or stop one of them"
    )
