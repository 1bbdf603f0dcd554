"""`ttsv node`: this machine joins a head's cluster when it fits, stays, and joins again when the head was away."""

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from service.errors import UserError
from workers.node.machine import describe, usable_instructions, without_settings
from workers.node.mps import Mps
from workers.node.notes import NodeNote, name_here
from workers.node.probe import CLOCK_SECONDS, NOTE, VERDICT, Outcome, Verdict
from workers.node.processes import ask
from workers.node.pulse import beat
from workers.node.raylet import (
    RayProcess,
    port_options,
    remove_leftovers,
    server_ports,
    taken_port,
    token_environment,
    token_problem,
)
from workers.node.scratch import NODE_DATA, node_data, remove_abandoned

logger = logging.getLogger(__name__)

PROBE = (sys.executable, "-m", "workers.node.probe")
PROBE_SECONDS = CLOCK_SECONDS + 100.0
"""A probe takes no longer; Ray itself waits 40 s for a head that is there and does not answer."""
LONGEST_PAUSE = 30.0
PROBE_AGAIN_SECONDS = 600.0
_HEALTHY_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_KNOCK_SECONDS = 1.0
_REFUSED_KNOCKS = 2
"""So many in a row, as a firewall that starts again may refuse one."""


@dataclass(frozen=True)
class Offer:
    """What this machine gives to the cluster. `address`: at which the others reach it, by default Ray's guess.

    `ports` (of step 1): those that it uses, by default any. `environment` says which GPUs are meant, where not all are.
    `data_dir`: its data folder, by default at the same path as the head's. `mps`: of which its trials are clients.
    """

    cpus: int
    gpus: int
    address: str | None = None
    ports: range | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    data_dir: Path | None = None
    mps: Mps | None = None


class Membership:
    """Call `run` in the main thread: the kernel ends the children together with the thread that started them.

    `head` is the address (host:port) of the head's Ray, `token` a file with the cluster's token.
    """

    def __init__(self, head: str, token: Path, offer: Offer, *, probe: tuple[str, ...] = PROBE) -> None:
        self.head, self._token, self._offer, self._probe_command = head, token.absolute(), offer, probe
        self._ray = RayProcess({"raylet"}, self._token, mps=offer.mps)
        self._failures, self._was_member = 0, False
        self._path_on_head: str | None = None

    def run(self) -> None:
        """Stays a node until SIGTERM or Ctrl-C, and leaves nothing behind. Raises `UserError` where it is refused."""
        if (words := token_problem(self._token)) is not None:
            raise UserError(words)
        previous = signal.signal(signal.SIGTERM, _leave)
        try:
            while True:
                self._join()
        except KeyboardInterrupt:
            logger.info("leaving %s", self.head)
        finally:
            # A second Ctrl-C shall not leave the ending half done.
            ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
            self._ray.stop()
            self._remove_scratch()
            signal.signal(signal.SIGINT, ignored[signal.SIGINT])
            signal.signal(signal.SIGTERM, previous)

    def _join(self) -> None:
        """One stay from the probe to its end, or one attempt that failed, and the pause after it."""
        name = name_here()
        beat()  # the pause before and the probe together may take as long as a pulse may be away
        if (port := self._taken_port()) is not None:
            words = f"port {port} is taken on this machine, by another node or the head? Choose others with --ports A-B"
            if not self._was_member:
                raise UserError(f"{socket.gethostname()} cannot join {self.head}: {words}")
            self._pause(words)  # whoever took it meanwhile may end
            return
        if not self._failures:  # a head that does not answer is waited for, by Ray, most of a minute
            logger.info("asking %s whether this machine fits", self.head)
        verdict = self._probe(name)
        self._path_on_head = verdict.data_dir or self._path_on_head
        # What fitted before is waited for, like the head: it may be the machine of the store that is starting again.
        final = verdict.outcome is Outcome.HINDERED and not self._was_member
        if final or verdict.outcome in (Outcome.REFUSED, Outcome.UNWELCOME):
            raise UserError(f"{socket.gethostname()} cannot join {self.head}: {verdict.words}")
        if verdict.outcome is not Outcome.FITS:
            self._pause(verdict.words)
            return
        began = time.monotonic()
        try:
            self._start(name)
        except OSError as error:  # such as for want of room on the disk, which may end
            self._ray.stop()
            self._pause(f"Ray cannot be started here: {error}")
            return
        joined = self._stay(name)
        self._was_member |= joined
        words, mps = self._ray.last_words(), self._offer.mps
        if mps is not None and mps.failed():
            reason = words
        else:
            lost = joined or self._is_refused()
            reason = "the connection to the head is lost" if lost else f"Ray did not start here:\n{words}\n"
        self._ray.stop()
        if time.monotonic() - began > _HEALTHY_SECONDS:
            self._failures = 0
        self._pause(reason)

    def _taken_port(self) -> int | None:
        """One that Ray needs here and another program has: Ray would say so after a minute, by a traceback."""
        if self._offer.ports is None:
            return None
        remove_leftovers()  # of a node that was killed: they listen still
        return taken_port(server_ports(self._offer.ports))

    def _start(self, name: str) -> None:
        offer = self._offer
        options: dict[str, object] = {
            "address": self.head,
            "node-name": name,
            "num-cpus": offer.cpus,
            "num-gpus": offer.gpus,
        }
        if offer.address is not None:
            options["node-ip-address"] = offer.address
        if offer.ports is not None:
            options |= port_options(offer.ports)
        self._remove_scratch()
        self._ray.start(options=options, environment={**offer.environment, **self._own_data()})

    def _own_data(self) -> dict[str, str]:
        """What tells the processes of Ray of this machine's data folder."""
        return {} if self._offer.data_dir is None else {NODE_DATA: str(self._offer.data_dir)}

    def _remove_scratch(self) -> None:
        """Trials that were killed leave what they were working on; other nodes' trials that live keep theirs."""
        remove_abandoned(self._data_folder())

    def _data_folder(self) -> Path | None:
        """Where trials here put their scratch folders; None where that is not known, or is the head's own folder.

        The head's has the cluster's token in it: what its trials leave is its own to remove.
        """
        if self._offer.data_dir is not None:
            return self._offer.data_dir
        if self._path_on_head is None:
            return None
        folder = node_data(self._path_on_head)
        try:
            return None if (folder / "token").read_bytes() == self._token.read_bytes() else folder
        except FileNotFoundError:
            return folder
        except OSError:  # it cannot be told, as of another user's, or of one that is away
            return None

    def _stay(self, name: str) -> bool:
        """Until Ray's part of this machine is gone; whether it was there."""
        joined, probe_after = False, time.monotonic() + PROBE_AGAIN_SECONDS
        knock_after, refused = 0.0, 0
        while not self._ray.failed() and refused < _REFUSED_KNOCKS:
            if time.monotonic() > knock_after:
                refused = refused + 1 if self._is_refused() else 0
                knock_after = time.monotonic() + _KNOCK_SECONDS
            if not joined and self._ray.ready():
                joined = True
                logger.info("joined %s with %d CPUs and %d GPUs", self.head, self._offer.cpus, self._offer.gpus)
            if joined and time.monotonic() > probe_after:
                verdict = self._probe(name)
                if verdict.outcome is Outcome.UNANSWERED:
                    logger.warning("whether this node still fits is not known: %s", verdict.words)
                elif verdict.outcome is not Outcome.FITS:
                    logger.warning("this node does not fit any more: %s", verdict.words)
                probe_after = time.monotonic() + PROBE_AGAIN_SECONDS
            beat()
            time.sleep(_LOOK_SECONDS)
        return joined

    def _is_refused(self) -> bool:
        """Whether nobody listens at the head's port: the cluster is gone, and the next one there is another.

        Ray's part of this machine would ask whoever listens there next, as fast as it can, for a minute. A head that
        does not answer may be one that cannot be reached for a while, which Ray outlasts.
        """
        host, _, port = self.head.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_LOOK_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _probe(self, name: str) -> Verdict:
        if (words := token_problem(self._token)) is not None:  # it was there when we began
            return Verdict(Outcome.UNANSWERED, words)
        try:
            return self._probed(name)
        except OSError as error:  # no process can be started now: no reason to end those that are at work
            return Verdict(Outcome.UNANSWERED, f"the probe cannot be run: {error}")

    def _probed(self, name: str) -> Verdict:
        folder = self._data_folder() or Path(self._path_on_head or tempfile.gettempdir())
        machine = describe(folder, {**os.environ, **self._offer.environment})
        note = NodeNote(name, socket.gethostname(), machine)
        env = {**without_settings(), **usable_instructions(), **token_environment(self._token), **self._own_data()}
        try:
            answer = ask([*self._probe_command, self.head], NOTE.dump_json(note), env=env, seconds=PROBE_SECONDS)
            return VERDICT.validate_json(answer.strip().rpartition(b"\n")[2])
        except subprocess.CalledProcessError as error:
            return Verdict(Outcome.UNANSWERED, f"the probe failed: {error.stderr.decode(errors='replace')[-500:]}")
        except (subprocess.SubprocessError, ValueError) as error:
            return Verdict(Outcome.UNANSWERED, f"the probe gave no answer: {error}")

    def _pause(self, reason: str) -> None:
        """Longer with every failure in a row, and different on every machine: they do not come back all at once."""
        self._failures += 1
        seconds = min(2.0 ** min(self._failures, 10), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        logger.warning("%s; trying %s again in %.0f s", reason, self.head, seconds)
        beat()
        time.sleep(seconds)


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
