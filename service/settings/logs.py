"""Logs that people and machines can read: one format for API and workers, with the ids of what they are about."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime

from service.settings.variables import LogFormat, Settings

_ERROR = re.compile(r"\S+ ERROR [\w.]+: (?P<message>.*)")
_IDS = ("request_id", "experiment_id", "trial_id")
_about: ContextVar[dict[str, object]] = ContextVar("about", default={})  # noqa: B039 - never changed in place


@contextmanager
def about(**ids: object) -> Iterator[None]:
    """Every line logged inside, in this thread or task and those it starts, carries these ids."""
    token = _about.set({**_about.get(), **ids})
    try:
        yield
    finally:
        _about.reset(token)


def request_id() -> str | None:
    """The id of the request that is being answered."""
    found = _about.get().get("request_id")
    return None if found is None else str(found)


def configure_logging(settings: Settings) -> None:
    """Writes the process's log to standard error in the settings' format; called once, where a process begins."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, ids where known, what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _about.get() | _extra(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then the ids where known."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback of an exception."""
        known = _about.get() | _extra(record)
        ids = "".join(f" {name}={known[name]}" for name in _IDS if known.get(name) is not None)
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return f"{_time(record)} {record.levelname} {record.name}: {message}{ids}"


def errors_in(text: str) -> list[str]:
    """The messages of errors in lines of a log, of either format, the oldest first; other lines are passed over."""
    found = []
    for line in text.splitlines():
        if match := _ERROR.match(line):
            found.append(match["message"])
        elif line.startswith("{"):
            with suppress(ValueError, KeyError):
                said = json.loads(line)
                if said["level"] == "error":
                    found.append(str(said["message"]))
    return found


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def _extra(record: logging.LogRecord) -> dict[str, object]:
    # A leading underscore marks what a library keeps on the record for itself, as Ray its time in nanoseconds.
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _USUAL and not name.startswith("_") and value is not None
    }
