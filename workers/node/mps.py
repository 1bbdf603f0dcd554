"""NVIDIA's MPS for the cards that this machine offers: a control daemon that lives and dies with Ray's part of it."""

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from service.errors import UserError
from ttsv.hardware.mps import (
    DEFAULT_PIPES,
    FOREGROUND,
    LOGS,
    PIPES,
    PROGRAM,
    answers,
    comes_up,
    control_environment,
    environment,
    quit_daemon,
    told,
)
from workers.node.machine import without_settings
from workers.node.processes import kill_programs, own_folder, ownerless, spawn, stop

logger = logging.getLogger(__name__)

PREFIX = "ttsv-mps-"
"""How the folders of our daemons begin."""
START_SECONDS = 15.0
_STOP_SECONDS = 5.0
_LONGEST_PIPES = 107 - 40
"""Of the path of a folder in which Unix sockets are made, whose own paths end at 107 characters."""
_SAID_LINES, _SAID_CHARACTERS = 5, 600


class Mps:
    """The control daemon for `cards`, named by UUID: one of our own, or one that somebody else runs here already.

    That one is used and left alone: it is neither watched nor ended. What clients need is `environment`, once it
    started. Call `start` in a thread that lives as long as the daemon is wanted.
    """

    def __init__(self, cards: Sequence[str]) -> None:
        """Raises `UserError` where there can be no daemon."""
        if shutil.which(PROGRAM) is None:
            raise UserError(
                f"TTSV_WORKER_MPS = true, and {PROGRAM} is not installed: it comes with NVIDIA's driver (package "
                "nvidia-compute-utils of the driver's own version; in a container, the capability `compute`); "
                "install it, or unset TTSV_WORKER_MPS"
            )
        if not cards:
            raise UserError(
                "TTSV_WORKER_MPS = true, and no GPU that nvidia-smi lists is offered here; unset it on this machine, "
                "or see `ttsv doctor` for why there is none"
            )
        if len(cards) > 1 and any(card.startswith("MIG-") for card in cards):
            raise UserError(
                "TTSV_WORKER_MPS = true, and parts of a card (MIG) are offered, each of which needs a daemon of its "
                "own: start a worker for each, with one of them in CUDA_VISIBLE_DEVICES"
            )
        self._cards = tuple(cards)
        self.environment: Mapping[str, str] = MappingProxyType({})
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._elsewhere = self._served = False
        self._problem = ""

    def start(self) -> None:
        """Waits until a daemon answers.

        Raises `UserError` where it does not the first time; later it has `failed`, and may be started again.
        """
        pipes = serving_elsewhere(os.environ)
        self._elsewhere = pipes is not None
        if pipes is not None:
            logger.info("trials are clients of the MPS daemon at %s, which somebody else runs", pipes)
            self.environment = MappingProxyType(environment(pipes, None, self._cards))
            return
        self._problem = ""
        try:
            self._begin()
        except OSError as error:
            self._problem = f"the MPS control daemon cannot be started: {error}"
            self.stop()
        if self._child is not None and not comes_up(self._child, self._control(), START_SECONDS):
            ended = self._child.poll() is not None
            does = "ended at once" if ended else f"does not answer within {START_SECONDS:.0f} s"
            self._problem = f"the MPS control daemon {does}: {self._said()}"
            self.stop()
        if self._problem and not self._served:
            raise UserError(f"{self._problem}; mend that, or unset TTSV_WORKER_MPS")
        if not self._problem:
            self._served = True
            logger.info("MPS serves %s, pipes in %s", ", ".join(self._cards), self.environment[PIPES])

    def failed(self) -> bool:
        """Whether our daemon did not start or has ended; of one that somebody else runs we do not ask."""
        return not self._elsewhere and (self._child is None or self._child.poll() is not None)

    def last_words(self) -> str:
        """In one line, why it failed."""
        return self._problem or f"the MPS control daemon ended: {self._said()}"

    def stop(self) -> None:
        """Ends our daemon and its servers, and leaves no folder. Clients should be gone by then."""
        if self._child is not None:
            quit_daemon(self._child, self._control(), _STOP_SECONDS)
            stop(self._child, grace=1.0)
        if self._folder is not None:
            _sweep(self._folder)
        self._child = self._folder = None

    def _begin(self) -> None:
        self._folder = own_folder(PREFIX)
        pipes, logs = _pipes(self._folder), self._folder / "log"
        if len(str(pipes)) > _LONGEST_PIPES:
            raise OSError(f"{pipes} is too long a path for its sockets: set TMPDIR to a shorter one")
        for folder in (pipes, logs):
            folder.mkdir()
        self.environment = MappingProxyType(environment(pipes, logs, self._cards))
        self._child = spawn(FOREGROUND, env=self._control(), log=self._folder / "said", death=signal.SIGTERM)

    def _control(self) -> dict[str, str]:
        return control_environment(without_settings(), self.environment)

    def _said(self) -> str:
        """The end of what our daemon said, in one line."""
        logs = [] if self._folder is None else [self._folder / "said", Path(self.environment[LOGS]) / "control.log"]
        for log in logs:
            if log.is_file() and (text := log.read_text(errors="replace").strip()):
                return " / ".join(text.splitlines()[-_SAID_LINES:])[-_SAID_CHARACTERS:]
        return "it said nothing"


def serving_elsewhere(environ: Mapping[str, str]) -> Path | None:
    """The folder of pipes of a daemon that somebody else runs and that answers: the one that the environment names.

    Where it names none, the folder that every process looks into by itself, if the system's or this user's daemon is
    there. A daemon of another user would take no client of ours.
    """
    named = environ.get(PIPES)
    pipes = Path(named) if named else DEFAULT_PIPES
    try:
        usable = bool(named) or pipes.stat().st_uid in (0, os.getuid())
    except OSError:
        return None
    if usable and answers(control_environment(environ, {PIPES: str(pipes)})):
        return pipes
    if named:
        logger.warning("no MPS daemon answers at %s, which %s names", pipes, PIPES)
    return None


def is_answering(folder: Path) -> bool:
    """Whether the daemon of one of our folders answers."""
    return answers(control_environment(os.environ, {PIPES: str(_pipes(folder))}))


def remove_daemons() -> None:
    """Ends and removes the daemons whose owners died without a chance to do so, and their servers."""
    for folder in ownerless(PREFIX):
        logger.info("removing %s, which a killed worker left", folder)
        told("quit", control_environment(os.environ, {PIPES: str(_pipes(folder))}), _STOP_SECONDS)
        _sweep(folder)


def _pipes(folder: Path) -> Path:
    return folder / "pipe"


def _sweep(folder: Path) -> None:
    # A server is no child of ours, and nothing in its command line says whose it is; its environment does.
    kill_programs("nvidia-cuda-mps", PIPES, str(_pipes(folder)))
    shutil.rmtree(folder, ignore_errors=True)
