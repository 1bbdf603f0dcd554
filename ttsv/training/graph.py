"""A training step as one CUDA graph: what its hundreds of kernels cost to launch one by one is paid once."""

import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ttsv.errors import BrokenContextError
from ttsv.runtime.devices import free_memory

Step: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_LOG = logging.getLogger(__name__)
_SETTLED = 3
"""Steps of a kind after which nothing is made at the first use any more: memory, cuDNN's choice, cuBLAS's handles."""
_WAIT = "called a synchronizing CUDA operation"


class GraphedStep:
    """A step of a training that is run by Python a few times, and from then on replayed as a CUDA graph.

    A step, `step(images, labels)`, trains `model` by one batch and returns a tensor of numbers; it waits for nothing,
    leaves no gradients, and does the same work for all batches of one shape and one `kind`. The first kind that was
    seen often enough is captured, any other is always run; so is a step that comes upon buffers of other shapes, as
    batches of other sizes may leave them. A replay launches the kernels of the captured step, in their order, on the
    same memory: the numbers are those of the step. Weights and buffers that a step replaces by new tensors, rather than
    writing to them, are copied back to where they were, so that the next replay goes on from them; so is what was
    replaced between two. `replayed` is called after each replay. `peak`: bytes that were allocated at most while the
    step was captured, 0 where none is.

    A step that waits for the GPU, one that CUDA does not capture, and one that takes more than half of what memory is
    left, as a graph keeps its own, is run as it is for ever; that is logged. Raises `BrokenContextError` where the
    attempt left this process without the GPU.
    """

    def __init__(self, model: nn.Module, replayed: Callable[[], None]) -> None:
        self._replayed = replayed
        self._state = _State(model)
        self._seen: Counter[Hashable] = Counter()
        self._captured: _Captured | None = None
        self._refused = False
        self.peak = 0

    def __call__(self, step: Step, images: Tensor, labels: Tensor, kind: Hashable = None) -> Tensor:
        """Trains by one batch, by the same `step` each time. What is returned holds until the next call."""
        key = (images.shape, images.dtype, kind)
        if self._captured is None and not self._refused:
            self._seen[key] += 1
            if self._seen[key] <= _SETTLED:
                return self._tried(step, images, labels, last=self._seen[key] == _SETTLED)
            self._capture(key, step, images, labels)
        if self._captured is None or self._captured.key != key or not self._state.keep():
            return step(images, labels)
        found = self._captured.replay(images, labels)
        self._replayed()
        return found

    def _tried(self, step: Step, images: Tensor, labels: Tensor, *, last: bool) -> Tensor:
        """Runs a step where it will be captured: autograd's nodes remember the stream that they were made on."""
        here, there = torch.cuda.current_stream(images.device), _stream(images.device)
        there.wait_stream(here)
        looking: AbstractContextManager[list[str]] = _waits() if last else nullcontext([])
        with torch.cuda.stream(there), looking as waits:
            found = step(images, labels)
        here.wait_stream(there)
        if waits:
            self._refused = True
            _LOG.warning("steps are not run as a CUDA graph, as each waits for the GPU: %s", waits[0])
        return found

    def _capture(self, key: Hashable, step: Step, images: Tensor, labels: Tensor) -> None:
        self._state.note()
        gc.collect()  # of earlier steps, what only cycles hold
        torch.cuda.reset_peak_memory_stats(images.device)
        before = torch.cuda.memory_allocated(images.device)
        try:
            with torch.cuda.stream(_stream(images.device)):  # to be left where a capture fails, too
                captured = _Captured(key, step, self._state, images, labels)
            peak = torch.cuda.max_memory_allocated(images.device)
            if free_memory(images.device) < peak - before:
                raise RuntimeError("beside its memory there is too little for a step that is run")
            self._captured, self.peak = captured, peak
        except RuntimeError as error:  # such as memory that is out, which a step by itself may find
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            _require_gpu(images.device, reason)
            _release_generator(images.device)
            self._state.restore()  # nothing was computed, nor written
            self._refused = True
            _LOG.warning("steps are not run as a CUDA graph, which could not be captured: %s", reason)


class _Captured:
    """A graph with the memory that it reads batches from, and writes its numbers to."""

    def __init__(self, key: Hashable, step: Step, state: "_State", images: Tensor, labels: Tensor) -> None:
        self.key = key
        self._images, self._labels = images.clone(), labels.clone()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads go on: they gather images, and write checkpoints.
        stream = torch.cuda.current_stream(images.device)
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._found = step(self._images, self._labels)
            if not state.keep():
                raise RuntimeError("a step leaves a buffer of another shape than it found")

    def replay(self, images: Tensor, labels: Tensor) -> Tensor:
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()
        return self._found


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps are captured: one for all trainings of a process, as cuBLAS keeps memory for each."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def forget_streams() -> None:
    """Has the next training make its stream anew: for tests, whose cards come and go."""
    _stream.cache_clear()


def _release_generator(device: torch.device) -> None:
    """Has random numbers drawn again: of a capture that CUDA has ended, torch 2.11 believes that it goes on."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _require_gpu(device: torch.device, reason: str) -> None:
    """Raises `BrokenContextError` where nothing can be read from the GPU any more, as after a wait in a capture."""
    try:
        torch.zeros((), device=device).item()
    except RuntimeError as error:
        raise BrokenContextError(
            f"a step could not be captured as a CUDA graph ({reason}), which left this process without the GPU: set "
            "training.cuda_graph to false"
        ) from error


class _State:
    """Where the weights and buffers of a model lie."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[MutableMapping[str, Any], str, Tensor, int]] = []
        self._storages = set[int]()

    def note(self) -> None:
        """Takes the present places for the ones to keep."""
        self._places = []
        for module in self._model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        self._places.append((tensors, name, tensor.detach(), tensor.data_ptr()))
        self._storages = {kept.untyped_storage().data_ptr() for _, _, kept, _ in self._places}

    @torch.no_grad()
    def keep(self) -> bool:
        """Copies what lies elsewhere now to the noted places, and has the model use them again.

        Leaves all as it is, and returns False, where something has not the shape of its place, as a buffer that
        follows the size of the batch.
        """
        moved = list[tuple[Tensor, Tensor]]()
        for tensors, name, kept, address in self._places:
            now = tensors.get(name)
            if now is not None and now.data_ptr() == address:
                continue
            if now is None or (now.shape, now.dtype) != (kept.shape, kept.dtype):
                return False
            moved.append((kept, now))
        # Read before any is written: a step may have put one in the place of another.
        values = [now.clone() if now.untyped_storage().data_ptr() in self._storages else now for _, now in moved]
        for (kept, _), value in zip(moved, values, strict=True):
            kept.copy_(value)
        if moved:
            self._use_places()
        return True

    def restore(self) -> None:
        """Has the model be as it was noted, between two steps: with the places that it had, and without gradients."""
        self._use_places()
        self._model.zero_grad()

    def _use_places(self) -> None:
        for tensors, name, kept, address in self._places:
            now = tensors.get(name)
            if now is not None and now.data_ptr() == address:
                continue
            if isinstance(now, nn.Parameter):
                now.data = kept
            else:
                tensors[name] = kept


@contextmanager
def _waits() -> Iterator[list[str]]:
    """What torch says of waiting for the GPU inside, once that is left. What is said of other things is said then."""
    waits, before = list[str](), torch.cuda.get_sync_debug_mode()
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", _WAIT)
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # said of what is set here
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(before)
    finally:
        for one in caught:
            said = str(one.message).strip().partition("\n")[0]
            if said.startswith(_WAIT):
                waits.append(said)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)
