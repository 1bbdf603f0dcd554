"""Time spent in parts of a loop."""

import time

import torch


class Stopwatch:
    """Adds up the seconds spent in `with stopwatch:`, on a GPU in device time and without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []
        self._entered = 0.0

    def __enter__(self) -> None:
        if self._cuda:
            self._record()
        else:
            self._entered = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if self._cuda:
            self._record()
        else:
            self._seconds += time.perf_counter() - self._entered

    def read(self) -> float:
        """The seconds since the last reading; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            self._seconds = sum(start.elapsed_time(end) for start, end in pairs) / 1000
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
