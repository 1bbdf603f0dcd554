"""What a trial logs and prints, in a file of its own."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOBase
from pathlib import Path
from typing import TextIO

_LONGEST_LINE = 10_000


@contextmanager
def trial_log(path: Path) -> Iterator[None]:
    """Writes what is logged, and what is printed, to a file until the context ends: time (UTC), level, message.

    What is printed goes where it went before, too. One trial at a time in a process.
    """
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO))
    out, err = _Printed(sys.stdout, handler, logging.INFO), _Printed(sys.stderr, handler, logging.WARNING)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        out.finish()
        err.finish()
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


class _LogFile(logging.FileHandler):
    """A file that a full disk keeps from taking lines; that it is full the trial hears when it writes itself."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing: what would be said is printed, and what is printed comes here."""


class _Printed(TextIOBase):
    """A stream that also leaves its lines in a log.

    It asks the handler itself: a logger might print to this very stream.
    """

    def __init__(self, stream: TextIO, handler: logging.Handler, level: int) -> None:
        self._stream, self._handler, self._level = stream, handler, level
        self._rest = ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._say(line)
        if len(self._rest) > _LONGEST_LINE:  # a progress bar that never ends its line
            self.finish()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def finish(self) -> None:
        """Writes the line that was not ended."""
        self._say(self._rest)
        self._rest = ""

    def _say(self, line: str) -> None:
        line = line.rpartition("\r")[2].rstrip()  # of a line that was written over, what was last seen
        if line:
            record = logging.LogRecord("printed", self._level, "", 0, line[:_LONGEST_LINE], None, None)
            self._handler.handle(record)
