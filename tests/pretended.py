"""A graphics card that is not there: tensors lie in the machine's memory, and say that they lie on `cuda:0`.

`PretendedCards` is entered around what is to be tried. Inside, torch has CUDA devices; a tensor is on one of them where
it was moved or made there, or computed from tensors that are. What a real card would refuse is refused (`WrongDevice`):
tensors of two devices in one operation, a card's tensor as a NumPy array, a generator of the processor for a card's
numbers. What a real card would wait for is noted (`Sync`, with the place in `ttsv` that asked for it), and refused
(`UnexpectedSync`) where it is not on the list of what is allowed.

It is no card: kernels are the processor's, streams run at once, and nothing is said of time, memory and rounding.
"""

import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ttsv.spectral.symbol import forget_tables
from ttsv.training.graph import forget_streams

CPU = torch.device("cpu")
UNPLACED = torch.device("meta", 7)
"""Of what an operation made for itself, of sizes alone: on whatever device its user is."""

_TTSV = Path(__file__).parents[1] / "ttsv"
_WAITING = {
    "_local_scalar_dense": "a number is read",
    "is_nonzero": "a truth is read",
    "equal": "tensors are compared",
    "allclose": "tensors are compared",
    "multinomial": "weights are checked",
    "histc": "the smallest and the largest value are read",
    "linalg_matrix_exp": "norms are read",
    "nonzero": "places are counted",
    "argwhere": "places are counted",
    "masked_select": "places are counted",
    "_unique": "values are counted",
    "_unique2": "values are counted",
    "unique_dim": "values are counted",
    "unique_consecutive": "values are counted",
    "bincount": "the largest value is read",
    "_linalg_check_errors": "a factorization is checked",
    "_linalg_eigh": "a factorization is checked",
    "_linalg_svd": "a factorization is checked",
    "linalg_eig": "a factorization is checked",
    "linalg_lstsq": "a factorization is checked",
    "linalg_pinv": "a factorization is checked",
}
_CHECKED = {"linalg_cholesky_ex", "linalg_inv_ex", "_linalg_solve_ex", "linalg_lu_factor_ex", "linalg_ldl_factor_ex"}
_INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_WATCHED = {*_WAITING, *_CHECKED, *_INDEXED, "normal", "repeat_interleave"}
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_FROM_HOST = ("tensor", "as_tensor", "asarray", "scalar_tensor")


_Weak: Any = StorageWeakRef


class WrongDevice(RuntimeError):
    """What a card would refuse: tensors of two devices in one operation, or a card's where the processor's belong."""


class UnexpectedSync(RuntimeError):
    """The processor waits for the card where nobody allowed it to."""


@dataclass(frozen=True)
class Sync:
    """The processor waited for the card: why, and for whom.

    `stack`: the functions of `ttsv` that were running, each as `room.module:function`, the outermost first.
    """

    why: str
    stack: tuple[str, ...]

    @property
    def place(self) -> str:
        """Who asked."""
        return self.stack[-1]


class _Event:
    """An event of CUDA: its moments are a count of events, a second apart. It belongs to the card it is recorded on."""

    def __init__(self, cards: "PretendedCards", *, external: bool = False) -> None:
        self._cards, self.device, self.moment, self._external = cards, CPU, 0, external

    def record(self, stream: Any = None) -> None:
        if self._cards.capture is not None:
            if not self._external:
                raise RuntimeError("only external events tell times of a graph that is replayed")
            self._cards.capture.calls.append(partial(self._now, stream))
            return
        self._now(stream)

    def _now(self, stream: Any = None) -> None:
        self.device = self._cards.current if stream is None else stream.device
        self._cards.moments += 1
        self.moment = self._cards.moments

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return bool(self.moment <= self._cards.finished[self.device.index])

    def synchronize(self) -> None:
        self._cards.synchronize(self.device)

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds. Raises `RuntimeError`, as torch does, for events of two cards and for one that is not over."""
        if self.device != end.device or not end.query():
            raise RuntimeError("both events must be recorded on the same card and over before their time is taken")
        return 1000.0 * (end.moment - self.moment)


class _Graph:
    """A graph of CUDA: operations that were captured, not run, and run on the same tensors at each replay."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    def replay(self) -> None:
        with torch.no_grad(), _disable_current_modes():
            for call in self.calls:
                call()

    def add(self, func: Any, args: Any, kwargs: Any, written: Iterable[Tensor], inputs: list[Tensor]) -> Any:
        """Runs an operation for what it returns, and keeps it. What it writes to is as before, in the end."""
        for tensor in written:
            storage: Any = tensor.untyped_storage()
            self._before.setdefault(_storage(tensor), (storage, storage.clone()))
        found = func(*args, **kwargs)
        given = {_storage(tensor) for tensor in inputs}
        made = [tensor for tensor in _tensors((found,)) if _storage(tensor) not in given]

        def again() -> None:
            anew = [tensor for tensor in _tensors((func(*args, **kwargs),)) if _storage(tensor) not in given]
            for tensor, new in zip(made, anew, strict=True):
                tensor.copy_(new)

        self.calls.append(again)
        return found

    def end(self) -> None:
        """Undoes what was run to be captured."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


class PretendedCards(TorchDispatchMode):
    """So many cards, while it is entered.

    `allowed`: functions, as in `Sync`, within which a card may be waited for, or None for all. `syncs` counts what was
    waited for since `take` was last called.
    """

    def __init__(self, count: int = 1, *, allowed: Collection[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch leaves it
        self.count, self.allowed = count, allowed
        self.syncs: Counter[Sync] = Counter()
        self.current = torch.device("cuda", 0)
        self.moments = 0
        self.finished = [0] * count
        self.pinned: dict[int, Any] = {}
        self.capture: _Graph | None = None
        self.captures_draws = False
        """Whether random numbers are kept for a capture that was ended by an error, as torch 2.11 keeps them."""
        self._wanted: torch.device | None = None
        self._mode = "default"
        self._patches: ExitStack | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled

    def __enter__(self) -> "PretendedCards":
        forget_tables()  # of a real card of the same name; and those of this one in the end
        forget_streams()
        # A mode imports it at its first operation, and it looks at what is replaced here.
        importlib.import_module("torch._dynamo")
        with ExitStack() as stack:
            for patch in self._replaced():
                stack.enter_context(patch)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._patches = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        assert self._patches is not None
        self._patches.close()
        forget_tables()
        forget_streams()

    def take(self) -> Counter[Sync]:
        """What was waited for since the last call."""
        syncs, self.syncs = self.syncs, Counter()
        return syncs

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor says it is."""
        place = self._place(tensor)
        return CPU if place == UNPLACED else place

    # --- what is noted ---

    def sync(self, why: str) -> None:
        """Notes that the processor waits for a card. Raises `UnexpectedSync` where it may not."""
        if self.capture is not None:
            self.captures_draws = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        stack = _stack()
        self.syncs[Sync(why, stack)] += 1
        if self._mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self._mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.allowed is not None and not any(place in self.allowed for place in stack):
            raise UnexpectedSync(f"{stack[-1]} waits for the card: {why}")

    def synchronize(self, device: Any = None) -> None:
        """As `torch.cuda.synchronize`."""
        self.sync("everything is waited for")
        self.finished[self._resolved(device or self.current).index] = self.moments

    def _place(self, tensor: Tensor) -> torch.device:
        real: torch.device = _REAL_DEVICE(tensor)
        if real.type != "cpu":
            return real
        found = _PLACES.get(_storage(tensor))
        return CPU if found is None else found.device

    def _mark(self, tensor: Tensor, place: torch.device) -> None:
        if _REAL_DEVICE(tensor).type != "cpu" or tensor.layout is not torch.strided:
            return
        if place == CPU:
            _PLACES.pop(_storage(tensor), None)
            return
        if place == UNPLACED and _storage(tensor) in _PLACES:
            return
        if len(_PLACES) % 4096 == 4095:
            for key in [key for key, placed in _PLACES.items() if placed.storage.expired()]:
                del _PLACES[key]
        storage = tensor.untyped_storage()
        found = _PLACES.get(int(storage._cdata))
        if found is None or found.device != place or found.nbytes != storage.nbytes():  # most write where they read
            _PLACES[int(storage._cdata)] = _Placed(_Weak(storage), place, storage.nbytes())

    def allocated(self, device: Any = None) -> int:
        """As `torch.cuda.memory_allocated`: bytes of what lives on a card."""
        place = self._resolved(self.current if device is None else device)
        return sum(one.nbytes for one in _PLACES.values() if one.device == place and not one.storage.expired())

    def _resolved(self, device: Any) -> torch.device:
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device(device)
        assert isinstance(device, torch.device)
        if device.type == "cuda":
            index = self.current.index if device.index is None else device.index
            if index >= self.count:
                raise RuntimeError(f"CUDA error: invalid device ordinal: there are {self.count} cards")
            return torch.device("cuda", index)
        return device

    @contextmanager
    def _made_on(self, device: torch.device) -> Iterator[None]:
        before, self._wanted = self._wanted, device
        try:
            yield
        finally:
            self._wanted = before

    def _debug(self, mode: str) -> None:
        """As `torch.cuda.set_sync_debug_mode`, whose first call in a process warns of itself."""
        if mode != "default":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        self._mode = mode

    # --- every operation ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation, given = _operation(func), _tensors((args, kwargs))
        if self._wanted is not None:
            place = self._wanted
            if operation.watched and any(self._place(tensor).type == "cuda" for tensor in given):  # the end of a range
                self._watch(operation.name, args, kwargs)
        else:
            place = self._common(operation, args, kwargs, given)
            if operation.watched and place.type == "cuda":
                self._watch(operation.name, args, kwargs)
        if operation.drawn_by and place.type == "cuda" and self.captures_draws:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        if self.capture is not None and place.type == "cuda":
            written = [kwargs.get(named, args[i] if i < len(args) else None) for i, named in operation.written]
            if operation.name == "native_batch_norm":  # writes to its statistics, of which its schema says nothing
                written += args[3:5]
            found = self.capture.add(func, args, kwargs, _tensors(written), given)
        else:
            found = func(*args, **kwargs)
        if operation.name != "set_":  # whose storage is where it was
            for tensor in (found,) if isinstance(found, Tensor) else _tensors((found,)):
                self._mark(tensor, place)
        return found

    def _common(self, operation: "_Operation", args: Any, kwargs: Any, given: list[Tensor]) -> torch.device:
        """The one device of all tensors of an operation. Raises `WrongDevice` for several."""
        name = operation.name
        places = [self._place(tensor) for tensor in given]
        if not given:
            return UNPLACED  # made of sizes inside another operation
        if name == "copy_":
            return self._copied(places[0], places[1], args, kwargs)
        cards = {place for place in places if place.type == "cuda"}
        if not cards:
            return UNPLACED if all(place == UNPLACED for place in places) else CPU
        (card, *others) = sorted(cards, key=str) if len(cards) > 1 else cards
        strangers = [
            tensor
            for tensor, place in zip(given, places, strict=True)
            if place == CPU and (tensor.ndim or name in ("cat", "stack"))
        ]
        if name in _INDEXED and places[0] == card and not others:
            strangers = [tensor for tensor in strangers if all(tensor is not index for index in args[1])]
            if any(index is not None and self._place(index) == CPU for index in args[1]):
                self.sync("an index is copied to the card")
        written = _tensors([kwargs.get(named, args[i] if i < len(args) else None) for i, named in operation.written])
        on_host = [tensor for tensor in written if self._place(tensor) == CPU]
        if others or strangers or on_host:
            seen = ", ".join(f"{tuple(t.shape)} on {p}" for t, p in zip(given, places, strict=True))
            raise WrongDevice(f"{_stack()[-1]}: {name} of tensors of several devices: {seen}")
        if any(kwargs.get(named, args[i] if i < len(args) else None) is not None for i, named in operation.drawn_by):
            raise WrongDevice(f"{_stack()[-1]}: {name} on {card} with a generator of the processor")
        for tensor, place in zip(given, places, strict=True):
            if place == UNPLACED:
                self._mark(tensor, card)
        return card

    def _copied(self, target: torch.device, source: torch.device, args: Any, kwargs: Any) -> torch.device:
        if UNPLACED in (target, source):
            target = source if target == UNPLACED else target
        elif target != source:
            later = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self._moved(source, target, args[1], non_blocking=later)
        return target

    def _moved(self, source: torch.device, target: torch.device, tensor: Tensor, *, non_blocking: bool) -> None:
        """Notes a copy from one device to another; from pinned memory to a card it may go on behind."""
        if target.type == "cuda" and source == CPU:
            if not (non_blocking and self._is_pinned(tensor)):
                self.sync("host to device")
        elif source.type == "cuda" and target == CPU:
            self.sync("device to host")

    def _is_pinned(self, tensor: Tensor) -> bool:
        found = self.pinned.get(_storage(tensor))
        return found is not None and not found.expired()

    def _watch(self, name: str, args: Any, kwargs: Any) -> None:
        """Notes an operation for which a real card is waited."""
        if name in _WAITING:
            self.sync(_WAITING[name])
        elif name in _CHECKED and kwargs.get("check_errors", False):
            self.sync("a factorization is checked")
        elif name == "normal" and any(isinstance(value, Tensor) for value in (kwargs.get("std"), *args[1:2])):
            self.sync("deviations are checked")
        elif name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[0], Tensor):
            self.sync("places are counted")
        elif name in _INDEXED:
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            filled = "put" in name and args[2].numel() == 1 and self._place(args[2]) == CPU  # torch fills under a mask
            if masks and not filled:
                self.sync("places are counted")

    # --- what torch's own functions are replaced by ---

    def _replaced(self) -> Iterator[AbstractContextManager[object]]:
        for name in ("device", "is_cuda", "is_cpu"):
            yield mock.patch.object(Tensor, name, self._attribute(name), create=True)
        methods = ("to", "cpu", "cuda", "numpy", "__array__", "tolist", "pin_memory", "is_pinned", "get_device")
        for name in (*methods, "record_stream", "new_tensor"):
            yield mock.patch.object(Tensor, name, self._method(name), create=True)
        yield mock.patch.object(Tensor, "__deepcopy__", self._deepcopy(Tensor.__deepcopy__))
        yield mock.patch.object(Tensor, "__reduce_ex__", self._pickled(Tensor.__reduce_ex__))
        for name in _NEW:
            yield mock.patch.object(Tensor, name, self._new(getattr(Tensor, name)), create=True)
        factories: list[Any] = [*_device_constructors(), torch.as_tensor, torch.asarray]
        for made in factories:
            is_torchs = getattr(torch, made.__name__, None) is made
            if is_torchs:
                yield mock.patch.object(torch, made.__name__, self._factory(made))
        cuda = self._cuda()
        yield mock.patch.object(torch.accelerator, "current_stream", cuda["current_stream"])
        for name, value in cuda.items():
            yield mock.patch.object(torch.cuda, name, value)
            if name.endswith(("seed", "seed_all", "rng_state")):
                yield mock.patch.object(torch.cuda.random, name, value)
        yield mock.patch.object(torch.autocast, "__init__", _as_on_cpu(torch.autocast.__init__, "device_type"))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            yield mock.patch.object(torch, name, _as_on_cpu(getattr(torch, name)))
        grouped = torch._C._group_tensors_by_device_and_dtype
        yield mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", self._grouped(grouped))

    def _attribute(self, name: str) -> property:
        return property(
            {
                "device": self.device_of,
                "is_cuda": lambda tensor: self.device_of(tensor).type == "cuda",
                "is_cpu": lambda tensor: self.device_of(tensor).type == "cpu",
            }[name]
        )

    def _method(self, name: str) -> Callable[..., Any]:
        methods: dict[str, Callable[..., Any]] = {
            "to": self._to,
            "cpu": lambda tensor, **options: self._move(tensor, CPU, **options),
            "cuda": lambda tensor, device=None, **options: self._move(
                tensor, self._resolved(self.current if device is None else device), **options
            ),
            "numpy": self._host_only(Tensor.numpy),
            "__array__": self._host_only(Tensor.__array__),
            "tolist": self._read(Tensor.tolist),
            "pin_memory": self._pin,
            "is_pinned": self._is_pinned,
            "get_device": lambda tensor: -1 if self.device_of(tensor) == CPU else self.device_of(tensor).index,
            "record_stream": lambda tensor, stream: None,
            "new_tensor": lambda tensor, data, *, device=None, dtype=None, requires_grad=False: torch.tensor(
                data, dtype=dtype or tensor.dtype, device=device or tensor.device, requires_grad=requires_grad
            ),
        }
        own = methods[name]

        def method(*arguments: Any, **options: Any) -> Any:  # a function, as which it is bound
            return own(*arguments, **options)

        return method

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        other = kwargs.pop("other", None)
        if args and isinstance(args[0], Tensor):
            other, args = args[0], args[1:]
        if other is not None:
            return self._move(tensor, self.device_of(other), *args, dtype=other.dtype, copy=copy, **kwargs)
        if len(args) > 3:  # device, dtype, non_blocking, copy
            copy, args = args[3], (*args[:3], *args[4:])
        if args and isinstance(args[0], int):
            args = (torch.device("cuda", args[0]), *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        target = self.device_of(tensor) if device is None else self._resolved(device)
        return self._move(tensor, target, non_blocking, dtype=dtype, copy=copy, memory_format=memory_format)

    def _move(
        self,
        tensor: Tensor,
        target: torch.device,
        non_blocking: bool = False,
        *,
        dtype: torch.dtype | None = None,
        copy: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        source = self._place(tensor)
        options: dict[str, Any] = {"memory_format": memory_format} if memory_format is not None else {}
        if target.type == "meta":
            return _REAL_TO(tensor, target, dtype or tensor.dtype, copy=copy, **options)
        if source == UNPLACED:
            self._mark(tensor, target)
        elif source != target:
            self._moved(source, target, tensor, non_blocking=non_blocking)
            with self._made_on(target):
                return _REAL_TO(tensor, dtype=dtype or tensor.dtype, copy=True, **options)
        return _REAL_TO(tensor, dtype=dtype or tensor.dtype, copy=copy, **options)

    def _host_only(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def on_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device_of(tensor).type == "cuda":
                raise WrongDevice(f"{_stack()[-1]}: a tensor on {self.device_of(tensor)} is no NumPy array")
            return real(tensor, *args, **kwargs)

        return on_host

    def _read(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor) -> Any:
            if self.device_of(tensor).type == "cuda" and tensor.ndim:  # a number alone is read by an operation
                self.sync("device to host")
            return real(tensor)

        return read

    def _pin(self, tensor: Tensor, *_: Any) -> Tensor:
        if self.device_of(tensor) != CPU:
            raise WrongDevice(f"{_stack()[-1]}: only tensors of the processor can be pinned")
        pinned = tensor.clone()
        self.pinned[_storage(pinned)] = _Weak(pinned.untyped_storage())
        return pinned

    def _new(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def new(tensor: Tensor, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            target = self._place(tensor) if device is None else self._resolved(device)
            if target.type == "meta" and target != UNPLACED:
                found: Tensor = real(tensor, *args, device=target, **kwargs)
                return found
            with self._made_on(target):
                found = real(tensor, *args, **kwargs)
            return found

        return new

    def _deepcopy(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def copied(tensor: Tensor, memo: Any) -> Any:
            place = self._place(tensor)
            with self._made_on(place):  # it copies on the storage's device, of which it has no name
                found = real(tensor, memo)
            self._mark(found, place)
            return found

        return copied

    def _pickled(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def pickled(tensor: Tensor, protocol: Any) -> Any:
            if self.device_of(tensor).type == "cuda":
                self.sync("device to host")
            return real(tensor, protocol)

        return pickled

    def _factory(self, real: Callable[..., Any]) -> Callable[..., Any]:
        name = real.__name__

        def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            like = args[0] if args and isinstance(args[0], Tensor) else None
            if device is not None:
                target = self._resolved(device)
            else:
                target = CPU if like is None or name == "tensor" else self._place(like)
            if target.type == "meta" and target != UNPLACED:
                return real(*args, device=target, **kwargs)
            if target.type == "cuda" and kwargs.get("generator") is not None:
                raise WrongDevice(f"{_stack()[-1]}: {name} on {target} with a generator of the processor")
            if name in ("as_tensor", "asarray") and like is not None:
                return self._move(like, target, dtype=kwargs.get("dtype"))
            if name == "tensor" and like is not None:
                return self._move(like.detach(), target, dtype=kwargs.get("dtype"), copy=True)
            if name in _FROM_HOST:
                for number in _tensors(args):  # in a list, which are read below the dispatcher
                    if self.device_of(number).type == "cuda":
                        self.sync("a number is read")
            if name in _FROM_HOST and target.type == "cuda" and name != "scalar_tensor":
                self.sync("host to device")
            with self._made_on(target):
                found = real(*args, **kwargs)
            for tensor in _tensors((found,)):  # torch.tensor makes its own below the dispatcher
                self._mark(tensor, target)
            return found

        return made

    def _grouped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def grouped(lists: Any, *args: Any, **kwargs: Any) -> Any:
            places = {self.device_of(tensor) for tensor in lists[0] if tensor is not None}
            if len(places) > 1:
                raise WrongDevice(f"{_stack()[-1]}: an optimizer's tensors are on several devices")
            (place,) = places or {CPU}
            return {(place, dtype): value for (_, dtype), value in real(lists, *args, **kwargs).items()}

        return grouped

    def _cuda(self) -> dict[str, Any]:
        """What `torch.cuda` has where there are cards."""

        @contextmanager
        def device(chosen: Any) -> Iterator[None]:
            before, self.current = self.current, self._resolved(chosen)
            try:
                yield
            finally:
                self.current = before

        @contextmanager
        def stream(chosen: object) -> Iterator[None]:
            yield

        def events(
            enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> _Event:
            return _Event(self, external=external)

        @contextmanager
        def graph(captured: _Graph, **_: Any) -> Iterator[None]:
            self.synchronize()
            self.capture = captured
            try:
                yield
            finally:
                self.capture = None
                with torch.no_grad(), _disable_current_modes():
                    captured.end()

        def number(chosen: Any) -> int:
            """Of a card, where torch takes none without one."""
            if isinstance(chosen, str | torch.device) and torch.device(chosen).index is None:
                raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{chosen}")
            return int(self._resolved(chosen).index)

        nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731

        def of(chosen: Any = None) -> SimpleNamespace:
            place = self.current if chosen is None else self._resolved(chosen)
            return SimpleNamespace(
                device=place,
                synchronize=lambda: self.synchronize(place),
                wait_stream=nothing,
                wait_event=nothing,
                is_capturing=lambda: False,
            )

        generator = SimpleNamespace(
            clone_state=lambda: None, graphsafe_set_state=lambda _: setattr(self, "captures_draws", False)
        )
        return {
            "default_generators": [generator] * self.count,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": nothing,
            "device_count": lambda: self.count,
            "current_device": lambda: self.current.index,
            "set_device": lambda chosen: setattr(self, "current", torch.device("cuda", number(chosen))),
            "device": device,
            "stream": stream,
            "Stream": lambda device=None, **_: of(device),
            "current_stream": of,
            "Event": events,
            "is_current_stream_capturing": lambda: self.capture is not None,
            "CUDAGraph": _Graph,
            "graph": graph,
            "synchronize": self.synchronize,
            "empty_cache": nothing,
            "reset_peak_memory_stats": nothing,
            "memory_allocated": self.allocated,
            "max_memory_allocated": lambda *_: 1 << 20,
            "memory_reserved": lambda *_: 0,
            "mem_get_info": lambda *_: (1 << 34, 1 << 34),
            "set_per_process_memory_fraction": lambda share, chosen=0: number(chosen) and None,
            "set_sync_debug_mode": self._debug,
            "get_sync_debug_mode": lambda: self._mode,
            "get_per_process_memory_fraction": lambda chosen=0: 1.0 + 0 * number(chosen),
            "get_device_name": lambda *_: "a pretended card",
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: SimpleNamespace(
                name="a pretended card", total_memory=1 << 34, major=9, minor=0, multi_processor_count=100
            ),
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": nothing,  # numbers of a card are drawn by the processor's generator, which is kept apart
            "manual_seed": nothing,
            "manual_seed_all": nothing,
        }


@dataclass(frozen=True)
class _Operation:
    """What is asked of an operation each time it runs: read off its schema once.

    `written`, `drawn_by`: the arguments, by place and name, that it writes to, and that are a generator. `watched`: a
    real card may be waited for in it.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    drawn_by: tuple[tuple[int, str], ...]
    watched: bool


@cache
def _operation(func: Any) -> _Operation:
    name, arguments = func.overloadpacket.__name__, list(enumerate(func._schema.arguments))
    return _Operation(
        name=name,
        written=tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write),
        drawn_by=tuple((i, one.name) for i, one in arguments if "Generator" in str(one.type)),
        watched=name in _WATCHED,
    )


@dataclass(frozen=True)
class _Placed:
    """A storage on a card. The weak reference keeps its address from being given to another one."""

    storage: Any
    device: torch.device
    nbytes: int


_PLACES: dict[int, _Placed] = {}
"""By address. All cards' alike: what a function keeps between two tests stays where it is."""

_REAL_DEVICE: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__
_REAL_TO: Callable[..., Tensor] = torch._C.TensorBase.to


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those among some values, and in their tuples, lists and dictionaries: torch's own way takes twice as long."""
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _as_on_cpu(real: Callable[..., Any], keyword: str = "") -> Callable[..., Any]:
    """A function of a kind of device, told the processor's in place of a card's: autocast has a state for each."""

    def called(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if isinstance(value, str) and value == "cuda" else value for value in args)
        if kwargs.get(keyword) == "cuda":
            kwargs[keyword] = "cpu"
        return real(*args, **kwargs)

    return called


def _stack() -> tuple[str, ...]:
    """The functions of `ttsv` that are running, `room.module:function`, the outermost first; else the nearest one."""
    found: list[str] = []
    nearest = "nobody"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, ours = _named(frame.f_code)
        if ours:
            found.append(name)
        elif name and nearest == "nobody":
            nearest = name
        frame = frame.f_back
    return tuple(reversed(found)) or (nearest,)


@cache
def _named(code: CodeType) -> tuple[str, bool]:
    """What a function is called, and whether it is one of `ttsv`; torch's own and those here have no name."""
    path = Path(code.co_filename)
    if path.is_relative_to(_TTSV):
        return f"{'.'.join(path.relative_to(_TTSV).with_suffix('').parts)}:{code.co_name}", True
    return "" if path == Path(__file__) or "torch" in path.parts else f"{path.stem}:{code.co_name}", False


def counted(syncs: Mapping[Sync, int], places: Iterable[str]) -> Counter[str]:
    """How often was waited within each of some functions, the innermost of them; within none of them: by who asked."""
    known, found = frozenset(places), Counter[str]()
    for sync, count in syncs.items():
        found[next((place for place in reversed(sync.stack) if place in known), sync.place)] += count
    return found
