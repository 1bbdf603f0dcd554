"""What a trial's process uses of its machine over time: a thread that looks now and then, at next to no cost."""

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    from service.database.experiments import ResourceSeries

MOST_POINTS = 300
"""Of one attempt: where there are more every other one goes, and from then on the thread looks half as often."""
FIRST_SECONDS = 1.0
REPORT_SECONDS = 30.0
"""Between two reports; the last comes with the trial's end."""
_MIB = 2**20


Look = Callable[[], tuple[float | None, ...]]


class Sampler:
    """Looks at this process until its context ends, at most `MOST_POINTS` points however long that is.

    `look` gives CPU (percent of one core, since the look before), resident memory (MiB), the GPU's utilisation
    (percent, of everybody on it) and the memory that torch holds there (MiB); None where it is not known.
    """

    def __init__(
        self, look: Look | None = None, *, first: float = FIRST_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look, self._clock, self.interval = look or Process().look, clock, first
        self._begun = clock()
        self._reported: dict[str, float] = {}
        self._points: list[tuple[float, *tuple[float | None, ...]]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(5)

    def series(self, *, at_once: bool = False, by: str = "reports") -> "ResourceSeries | None":
        """All points until now, a list for each column: every `REPORT_SECONDS` and `at_once`, else None.

        `by` whom it is told: each of several has it so often.
        """
        with self._lock:
            moment = self._clock()
            due = moment - self._reported.get(by, self._begun) >= REPORT_SECONDS
            if not self._points or not (at_once or due):
                return None
            self._reported[by] = moment
            cpu, memory, gpu, gpu_memory = map(list, zip(*(point[1:] for point in self._points), strict=True))
            return {
                "interval": self.interval,
                "seconds": [point[0] for point in self._points],
                "cpu": cpu,
                "memory": memory,
                "gpu": gpu,
                "gpu_memory": gpu_memory,
            }

    def take(self) -> None:
        """Looks once."""
        at = round(self._clock() - self._begun, 1)
        seen = tuple(_short(value) for value in self._look())
        with self._lock:
            self._points.append((at, *seen))
            if len(self._points) >= MOST_POINTS:
                self._points = self._points[1::2]
                self.interval *= 2

    def _run(self) -> None:
        while not self._over.wait(self.interval):
            with contextlib.suppress(Exception):  # whatever a driver or a file system says: the trial goes on
                self.take()


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


class Process:
    """This process, and the GPU that torch computes on in it, once it does."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first says nothing
        self._card: Card | None = None
        self._sought = False

    def look(self) -> tuple[float | None, ...]:
        """CPU, memory, GPU, memory on it."""
        cpu, memory = self._process.cpu_percent(), self._process.memory_info().rss / _MIB
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return cpu, memory, None, None
        if not self._sought:
            self._sought = True
            with contextlib.suppress(Exception):
                self._card = Card(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
        used = None
        with contextlib.suppress(Exception):
            used = None if self._card is None else self._card.utilisation()
        return cpu, memory, used, torch.cuda.memory_reserved() / _MIB


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Card:
    """A GPU by its UUID, as NVIDIA's management library sees it. Raises `OSError` where there is none."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def utilisation(self) -> float:
        """Percent of the last moment in which anything was computed on it."""
        found = _Utilisation()
        self._ask("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(found))
        return float(found.gpu)

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name}: NVML error {code}")
