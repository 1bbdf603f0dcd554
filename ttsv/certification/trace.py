"""A forward pass in which every tensor carries a bound of the Lipschitz constant from the input to itself.

One pass over a tensor without data (torch's meta device): each function that the network calls on it is met by a rule
(`ttsv.certification.rules`), so that sums, concatenations and branches are composed as the network has them,
whatever its Python code does with shapes. What has no rule, or asks for a value, raises `ConfigError`: nothing is
guessed. Bounds are rounded up.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ttsv.certification.determinism import unwatched, watched_for_random_numbers
from ttsv.certification.linear_maps import EPS, LinearMap, rounded_up
from ttsv.certification.reach import Affine, Factor, Reach
from ttsv.errors import ConfigError
from ttsv.runtime.headway import get_on


class Traced(Tensor):
    """A tensor without data that carries its reach."""

    reach: Reach | Affine
    following: "Trace"
    group: object
    """The same for tensors that may share their values in memory."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Passes what torch does with such a tensor on to the trace."""
        with torch._C.DisableTorchFunctionSubclass():
            return next(traced_in((args, kwargs))).following.apply(function, args, kwargs or {})


Rule = Callable[..., Reach | Affine]
"""Of the trace, the result's shape (as a meta tensor) and the function's own arguments."""

ModuleRule = Callable[["Trace", Any, Traced], tuple[Sequence[int], Reach | Affine]]
"""Of the trace, a module and its input: the output's shape and reach."""

_METADATA = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}
_VIEWS_AT_TIMES = {"contiguous", "reshape", "flatten"}
"""Functions that copy or do not by the layout of the data, which a tensor without data need not have."""
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}
"""What torch's functions take for names of their own as well."""
_ATTRIBUTES = {"shape", "ndim", "dtype", "layout", "requires_grad", "is_sparse", "is_quantized"}


@dataclass
class Trace:
    """The state of a pass: rules, the path of the module that is running, and the factors found so far.

    `functions` are those of one argument that depends on the input, `joins` those of one or several.
    """

    functions: dict[str, Rule]
    joins: dict[str, Rule]
    modules: Callable[[nn.Module], ModuleRule | None]
    device: torch.device
    factors: list[Factor] = field(default_factory=list)
    _path: list[str] = field(default_factory=list)
    _alive: "weakref.WeakValueDictionary[int, Traced]" = field(default_factory=weakref.WeakValueDictionary)
    _refused: Exception | None = None

    @property
    def name(self) -> str:
        """Path of the module that is running."""
        return self._path[-1] if self._path else ""

    def run(self, model: nn.Module, shape: Sequence[int]) -> Traced:
        """The output of a model for an input of this shape. The model's modules are rewritten: give a copy."""
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigError("model", name or type(module).__name__, "is compiled: its parts cannot be seen")
            module.forward = self._forward(name, module)
        pixels = self.wrap(torch.empty(tuple(shape), dtype=torch.float64, device="meta"), Reach(1.0))
        try:
            with watched_for_random_numbers(self._drawn, self._unseen):
                output = model(pixels)
            if self._refused is not None:  # the network caught it and went another way than with numbers
                raise self._refused
        except ConfigError:
            raise
        except Exception as error:
            fix = f"cannot be followed: {error}"
            raise ConfigError("model", self._where(), fix) from error
        if isinstance(output, Traced):
            return output
        if not isinstance(output, Tensor) or output.is_meta:
            raise ConfigError("model", type(model).__name__, "must give one tensor, as its input makes it")
        return self.wrap(output.to("meta"), Reach(0.0))

    def wrap(self, plain: Tensor, reach: Reach | Affine) -> Traced:
        """A tensor without data with its reach."""
        traced = plain.as_subclass(Traced)
        traced.reach, traced.following, traced.group = reach, self, object()
        self._alive[id(traced)] = traced
        return traced

    def record(
        self, kind: str, sources: Sequence[Reach | Affine], total: float, how: str, *, name: str | None = None
    ) -> float:
        """Lists a step and gives back its total. Raises `ConfigError` where that is not finite."""
        name = self.name if name is None else name
        if not math.isfinite(total):
            raise ConfigError(name or "model", total, f"its {kind} has no finite bound: are all weights finite?")
        before = max(source.total for source in sources)
        self.factors.append(Factor(name=name, kind=kind, bound=total / before if before else 0.0, total=total, how=how))
        return total

    def mapped(self, kind: str, linear: LinearMap, source: Reach | Affine) -> Affine:
        """The reach behind a linear map, which takes in the scales that stand before it."""
        settled = Reach(source.total) if isinstance(source, Affine) else source
        return Affine(self.record, self.name, kind, linear, settled)

    def channelwise(self, source: Reach | Affine, factor: float, how: str, kind: str = "elementwise") -> Reach:
        """The reach behind something that enlarges no channel's difference by more than a factor."""
        reach = Reach(source.base if factor == 1 else rounded_up(source.base * factor), source.scale)
        self.record(kind, [source], reach.total, how)
        return reach

    def scaled(self, source: Reach | Affine, scale: Tensor, kind: str, how: str) -> Reach:
        """The reach behind one factor (at least 0) per channel; the scales of a linear map's output go into the map."""
        if isinstance(source, Affine):
            reach = Reach(source.scaled(scale, self.name or kind))
            self.record(kind, [reach], reach.total, f"{how}, folded into {source.name or source.kind}")
            return reach
        # A product of two scales is off by an eps in each channel.
        reach = Reach(source.base, scale if source.scale is None else scale * source.scale * (1 + 2 * EPS))
        self.record(kind, [source], reach.total, how)
        return reach

    def refuse(self, what: str, fix: str = "has no rule for its Lipschitz constant") -> ConfigError:
        """The error for something that cannot be bounded, with the module it stands in; caught, it is raised again."""
        error = ConfigError("model", f"{what} in {self._where()}", fix)
        self._refused = self._refused or error
        return error

    def apply(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a function of torch gives for arguments some of which are traced."""
        try:
            with unwatched():
                return self._apply(function, args, kwargs)
        except Exception as error:
            self._refused = self._refused or error
            raise

    def _apply(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        if name == "__get__":
            attribute = function.__self__.__name__  # type: ignore[attr-defined] # a getter's
            if attribute in _ATTRIBUTES:
                return function(*args)
            if attribute in ("device", "is_cuda"):
                return self.device if attribute == "device" else self.device.type == "cuda"
            raise self.refuse(f"the attribute {attribute}")
        if function in _METADATA:
            return function(*args, **kwargs)
        in_place = (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))
        name = name if name.endswith("__") else name.removesuffix("_")
        rule = self.joins.get(name) or self.functions.get(name)
        if rule is None or "out" in kwargs or not _of_torch(function):
            raise self.refuse(f"{name}()")
        if any(tensor.is_meta and not isinstance(tensor, Traced) for tensor in _tensors((args, kwargs))):
            raise self.refuse(f"an argument of {name}()", "comes from the input in a way that cannot be followed")
        if name not in self.joins and len(list(traced_in((args, kwargs)))) > 1:
            raise self.refuse(f"{name}() of several tensors that depend on the input", "has no bound")
        if name == "__getitem__" and _is_mask(args[1]):
            raise self.refuse("an index by a boolean mask", "has no rule: index by a list of the places it takes")
        kwargs = {_NUMPY_NAMES.get(key, key): value for key, value in kwargs.items() if key != "inplace"}
        plain = _meta(function, args, kwargs)
        if isinstance(plain, Tensor) and plain.dtype != torch.float64:
            raise self.refuse(
                f"{name}() with a result of {plain.dtype}", "has no bound: another dtype than its input's"
            )
        if in_place:
            target = args[0]
            if not isinstance(target, Traced) or self._shared(target):
                raise self.refuse(
                    f"{name}() in place", "changes a tensor that is used elsewhere too: do it out of place"
                )
            if plain.shape != target.shape:
                raise self.refuse(f"{name}() in place", "changes the shape: do it out of place")
            target.reach = rule(self, plain, *args, **kwargs)
            return target
        parts = [plain] if isinstance(plain, Tensor) else plain
        if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
            raise self.refuse(f"{name}() with the result {type(plain).__name__}")
        first, found = args[0] if args else None, []
        for part in parts:
            # Places of maxima, not their values, jump: what is computed from them has no finite bound.
            exact = part.dtype == torch.float64
            found.append(self.wrap(part, rule(self, part, *args, **kwargs) if exact else Reach(math.inf)))
            if isinstance(first, Traced) and (name in _VIEWS_AT_TIMES or _storage(part) == _storage(first)):
                found[-1].group = first.group
        if isinstance(plain, Tensor):
            return found[0]
        return type(plain)(found) if isinstance(plain, tuple) else tuple(found)  # some have names, such as sort()'s

    def _forward(self, name: str, module: nn.Module) -> Callable[..., Any]:
        rule, forward = self.modules(module), module.forward

        def follow(*args: Any, **kwargs: Any) -> Any:
            self._path.append(name)
            inputs = list(traced_in((args, kwargs)))
            if rule is None or not inputs:
                output = forward(*args, **kwargs)
            else:
                channels = getattr(module, "in_channels", inputs[0].shape[1])
                if channels != inputs[0].shape[1]:
                    raise self.refuse(f"an input of {inputs[0].shape[1]} channels", f"must have {channels}")
                own = (*module.parameters(), *module.buffers(), *vars(module).values())
                if any(isinstance(one, Traced) or (isinstance(one, Tensor) and one.is_meta) for one in own):
                    raise self.refuse("a weight or bias that depends on the input", "has no bound")
                with unwatched():
                    shape, reach = rule(self, module, inputs[0])
                    output = self.wrap(torch.empty(tuple(shape), dtype=torch.float64, device="meta"), reach)
            self._path.pop()
            get_on()
            return output

        return follow

    def _drawn(self, what: str) -> None:
        raise self.refuse(what, "draws random numbers in evaluation mode: the network is no function of its input")

    def _unseen(self, what: str) -> None:
        raise self.refuse(what, "gets at what depends on the input past torch's functions, where it is not followed")

    def _where(self) -> str:
        return self.name or "the model itself"

    def _shared(self, target: Traced) -> bool:
        """Whether another tensor that is still in use has the target's storage, or may have it."""
        others = (other for other in self._alive.values() if other is not target)
        return any(other.group is target.group or _storage(other) == _storage(target) for other in others)


def _of_torch(function: Callable[..., Any]) -> bool:
    """Whether it is torch's own: what somebody else has registered or lets torch dispatch may have any name."""
    home = getattr(function, "__module__", None) or "torch"  # methods and built-in functions name none
    return home.split(".")[0] == "torch" and not isinstance(function, torch._ops.OpOverloadPacket)


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def traced_in(value: Any) -> Iterator[Traced]:
    """Every traced tensor among nested arguments."""
    return (tensor for tensor in _tensors(value) if isinstance(tensor, Traced))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor among nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _is_mask(index: Any) -> bool:
    """Whether an index chooses by true and false, in any of its axes."""
    if isinstance(index, tuple | list):
        return any(map(_is_mask, index))
    return isinstance(index, bool) or str(getattr(index, "dtype", "")) in ("bool", "torch.bool")


def _meta(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function's result in shapes alone."""

    def shapes(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.as_subclass(Tensor) if isinstance(value, Traced) else value.to("meta")
        if isinstance(value, tuple | list):
            return [shapes(part) for part in value] if isinstance(value, list) else tuple(map(shapes, value))
        return value

    return function(*shapes(args), **{key: shapes(value) for key, value in kwargs.items()})
