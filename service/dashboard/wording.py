"""How numbers, times and states are said on the pages: filters of the templates."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from service.database import now
from service.leaderboards.boards import missing_said
from service.leaderboards.metrics import Metric, unit_of
from service.leaderboards.text_tables import in_digits
from service.leaderboards.value_texts import in_words, with_all_digits
from service.queue.attempts import Silence
from service.specs.columns import flat

NONE = "\u2013"
"""What stands for a value that there is not."""
_CURVE_METRICS = {
    "val_accuracy": "validation accuracy",
    "train_accuracy": "training accuracy",
    "val_loss": "validation loss",
    "train_loss": "training loss",
    "ort_loss": "orthogonal loss",
    "lr": "learning rate",
    "seconds": "seconds",
    "constraint_seconds": "seconds of the constraint",
}
"""Metrics of epochs as the form that chooses curves says them."""
_IMAGES = {"test": "test", "both": "validation or test"}
_LONG = 60
"""So many characters of a value are shown within a line."""


def measured_on(images: str | None) -> str:
    """What epochs are measured on, by `validated_on`: validation images unless there are others."""
    return _IMAGES.get(images or "", "validation")


def curve_metrics(images: str | None) -> dict[str, str]:
    """Metrics of epochs by what they are called where trials validate on these images."""
    return {name: text.replace("validation", measured_on(images)) for name, text in _CURVE_METRICS.items()}


def fixed(value: float | None, decimals: int = 3, mean: float | None = None) -> str:
    """A number with so many decimals; one of which they would show nothing by its first digits, as `numbers.js` has it.

    The deviation of a mean of which they show some is as small as they say.
    """
    if value is None:
        return NONE
    text = in_digits(value, decimals)
    if value == 0 or float(text) != 0 or (mean is not None and float(in_digits(mean, decimals)) != 0):
        return text
    return f"{value:.1e}".replace("e-0", "e-") if abs(value) < 1e-3 else f"{value:.2g}"


def number(value: float | None) -> str:
    """A number of any size, to four digits."""
    return NONE if value is None else f"{value:.4g}"


def percent(value: float | None, decimals: int = 1) -> str:
    """A fraction in percent."""
    return NONE if value is None else f"{fixed(100 * value, decimals)} %"


def measured(value: float | None, metric: Metric) -> str:
    """A metric as people read it, with its unit."""
    if value is None:
        return NONE
    unit, reading = unit_of(metric, [value]), metric.reading
    if unit.title == reading.heading and unit.decimals == 0:
        return whole(value)
    text = fixed(value * unit.factor, unit.decimals)
    return f"{text} {reading.unit}" if reading.unit else text


def short(value: Any) -> str:
    """Any value of a configuration or protocol, within a line."""
    if value is None:
        return NONE
    if isinstance(value, float):
        return f"{value:g}"
    text = in_words(value)
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def whole(value: float | None) -> str:
    """A count, its thousands apart."""
    return NONE if value is None else f"{value:,.0f}".replace(",", "\u202f")


def counted(count: int, one: str) -> str:
    """How many of something there are, in the number that fits."""
    return f"{whole(count)} {one if count == 1 else f'{one}s'}"


def size(count: int) -> str:
    """Bytes."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def duration(seconds: float | None) -> str:
    """A time span in the two largest units that matter."""
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def instant(when: datetime | None) -> str:
    """A moment in UTC, to the second."""
    return NONE if when is None else when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(when: datetime | None) -> str:
    """How long something is past."""
    if when is None:
        return NONE
    past = max(timedelta(), now() - when)
    if past < timedelta(seconds=60):
        return f"{past.seconds} s ago"
    if past < timedelta(hours=1):
        return f"{past.seconds // 60} min ago"
    if past < timedelta(days=2):
        return f"{past.total_seconds() / 3600:.0f} h ago"
    return f"{past.days} days ago"


def silent(silence: Silence) -> str:
    """How long a trial has reported nothing, and how long it may."""
    past = max(0.0, (now() - silence.last_report_at).total_seconds())
    return f"{duration(past)} ago; killed and tried again after {duration(silence.hung_after)} without one"


def said(name: str) -> str:
    """The name of a state, an event or a field in words."""
    return name.replace("_", " ").replace("-", " ")


def document(value: Any) -> str:
    """A spec or a record as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


_ALL = (
    fixed,
    number,
    percent,
    measured,
    short,
    whole,
    counted,
    size,
    duration,
    instant,
    ago,
    silent,
    said,
    document,
    flat,
    missing_said,
    with_all_digits,
    measured_on,
    curve_metrics,
)
FILTERS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _ALL}
