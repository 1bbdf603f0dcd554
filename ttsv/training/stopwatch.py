"""What part of a training takes, told on a GPU by the GPU."""

import time
from collections.abc import Sequence

import torch


class Stopwatch:
    """Adds up the seconds spent in `with stopwatch:`, on a GPU in device time and without waiting for it.

    What is captured by a CUDA graph counts as often as `again` is called, each time with the seconds of the last replay
    before the reading.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []
        self._captured: list[torch.cuda.Event] = []
        self._replays = 0
        self._entered = 0.0

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._record()
        else:
            self._entered = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cuda":
            self._record()
        else:
            self._seconds += time.perf_counter() - self._entered

    def again(self) -> None:
        """Counts what was captured once more."""
        self._replays += 1

    def read(self) -> float:
        """The seconds since the last reading; waits for the device."""
        if self._events:
            self._events[-1].synchronize()
            self._seconds += _seconds_between(self._events)
            self._events.clear()
        if self._replays:
            self._captured[-1].synchronize()
            self._seconds += self._replays * _seconds_between(self._captured)
            self._replays = 0
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _record(self) -> None:
        """Notes a moment of the device's own stream: it need not be the current one."""
        captured = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=captured)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        (self._captured if captured else self._events).append(event)


def _seconds_between(events: Sequence[torch.cuda.Event]) -> float:
    """What passed from the first to the second, the third to the fourth and so on, in sum."""
    pairs = zip(events[::2], events[1::2], strict=True)
    milliseconds: float = sum(start.elapsed_time(end) for start, end in pairs)
    return milliseconds / 1000
