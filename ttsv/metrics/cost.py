"""What a network costs."""

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile  # that of torch.profiler imports the compiler: two seconds
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ttsv.checks import check_counts
from ttsv.layers import SOC, FramedConv2d, OrthogonalConv2d, TTConv, densify
from ttsv.layers.skew import by_convolutions
from ttsv.runtime.precision import own_dtype
from ttsv.spectral.geometry import Convolution, TransposedConvolution
from ttsv.spectral.network import evaluating, spectral_layers, zero_input
from ttsv.spectral.symbol import Size

_Found = TypeVar("_Found")


def parameters(model: nn.Module) -> int:
    """Returns the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def compression(model: nn.Module) -> float:
    """Returns the convolution weights of the same network uncompressed over those of this one.

    It is 1 where nothing is decomposed: in a network without a convolution, too.
    Biases, linear layers and normalisation are left out, as in the paper's columns. A layer between frames is
    compared with one like its core from all input to all output channels: for SOC a square one, for a parametrized
    kernel that kernel.
    """
    counts = [_weights(layer) for layer in spectral_layers(model).values()]
    return sum(original for original, _ in counts) / sum(own for _, own in counts) if counts else 1.0


def _weights(layer: nn.Module) -> tuple[int, int]:
    """Weights of a spectral layer uncompressed and as it is."""
    if isinstance(layer, TTConv):
        original = layer.in_channels * layer.out_channels * math.prod(layer.kernel_size)
        return original, layer.k1.numel() + layer.core.numel() + layer.k3.numel()
    if isinstance(layer, FramedConv2d):
        core = layer.core
        assert isinstance(core, OrthogonalConv2d | nn.Conv2d)
        if isinstance(core, SOC):
            original = max(core.stride**2 * layer.in_channels, layer.out_channels) ** 2 * core.kernel_size**2
        else:
            original = core.weight.numel() // math.prod(layer.rank) * layer.in_channels * layer.out_channels
        return original, layer.k1.numel() + core.weight.numel() + layer.k3.numel()
    assert isinstance(layer, Convolution | TransposedConvolution | OrthogonalConv2d)
    return layer.weight.numel(), layer.weight.numel()


@torch.no_grad()
def inference_seconds(model: nn.Module, images: Tensor, count: int, *, budget: float = 1.0) -> float:
    """Returns the median seconds, after a pass to warm up, that the logits of `count` images take in evaluation mode.

    It takes as many passes as fit into a budget of seconds, one at least and 20 at most.

    `images` (at least one, channels, height, width), pixels in [0, 1] on the model's device: the first `count`,
    taken again from the start where there are fewer. Raises `ConfigError` for no images.
    """
    check_counts(images=len(images), count=count)
    batch = images[torch.arange(count, device=images.device) % len(images)].to(own_dtype(model))
    times: list[float] = []
    with evaluating(model), parametrize.cached():
        while len(times) < 2 or (sum(times[1:]) < budget and len(times) <= 20):
            started = time.perf_counter()
            model(batch)
            if batch.is_cuda:
                torch.cuda.synchronize(batch.device)
            times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


@dataclass(frozen=True, kw_only=True)
class InferenceTime:
    """Median `seconds` for `count` images at once, of the network as it is or, `merged`, of its dense form."""

    merged: bool
    count: int
    seconds: float
    images_per_second: float


def inference_times(model: nn.Module, images: Tensor, counts: Sequence[int] = (1, 128)) -> list[InferenceTime]:
    """Returns `inference_seconds` for each count, of the model and, where there are frames to merge, of `merged`.

    As it is, each TT layer computes merged or factored, whichever multiplies less for so many images.
    """
    dense = merged(model)
    found = []
    for network in (model,) if dense is None else (model, dense):
        for count in counts:
            seconds = inference_seconds(network, images, count)
            found.append(
                InferenceTime(merged=network is dense, count=count, seconds=seconds, images_per_second=count / seconds)
            )
    return found


def peak_memory(device: torch.device) -> int:
    """Returns bytes: of a GPU the most that was allocated since `torch.cuda.reset_peak_memory_stats`.

    Of a CPU the most that this process has ever held, data sets and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def peak_allocation(compute: Callable[[], _Found], device: torch.device) -> tuple[_Found, int]:
    """Returns what `compute` does, and the most that torch had allocated for it at one time, in bytes.

    On a CPU from torch's profiler: of its tensors, without the workspaces of the libraries that it calls. On a GPU from
    its allocator. What was allocated before does not count.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        found = compute()
        return found, torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes of each start to standard error
    with profile(profile_memory=True, use_kineto=True) as profiler:
        found = compute()
    peak = present = 0
    living: set[int] = set()
    events = profiler.kineto_results.experimental_event_tree()
    for _, pointer, size in sorted(_allocations(events), key=itemgetter(0)):
        if size > 0:
            living.add(pointer)
        elif pointer not in living:
            continue  # freed here, and allocated while an earlier call was looked at
        present += size
        peak = max(peak, present)
    return found, peak


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Yields when it was, the address, and bytes: positive for an allocation, negative where it was freed."""
    for event in events:
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from _allocations(event.children)


def merged(model: nn.Module) -> nn.Module | None:
    """Returns a copy with frames merged into dense kernels (`ttsv.layers.densify`); None where there are none."""
    found = any(
        isinstance(layer, TTConv) or (isinstance(layer, FramedConv2d) and type(layer.core) is nn.Conv2d)
        for layer in model.modules()
    )
    return densify(model) if found else None


def multiply_accumulates(model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> int:
    """Returns the multiply-accumulates of convolutions and matrix products for one image, in evaluation mode.

    As the layers really compute: TT layers factored or merged, the merging included, SOC with all terms of its
    series (as convolutions, whatever a CPU makes of small images), Cayley and strided AOC with the making of their
    operators. Parametrized weights are taken as ready made, and what Fourier transforms, products of a matrix and a
    vector and elementwise operations take is left out.
    `input_size` in pixels; `in_channels` defaults to those of the first convolution, or to what the first linear layer
    of a model without one takes. The forward pass over one zero image changes nothing in the model. Raises
    `ConfigError` for a model that has neither, where `in_channels` is not given.
    """
    image = zero_input(model, input_size, in_channels=in_channels)
    counter = _Counter()
    with torch.no_grad(), evaluating(model), parametrize.cached():
        for module in model.modules():
            if parametrize.is_parametrized(module):
                for name in module.parametrizations:  # type: ignore[union-attr] # a ModuleDict
                    getattr(module, name)
        with counter, by_convolutions():
            model(image)
    return counter.operations // 2


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its subclassing untyped
    """Counts floating-point operations by torch's formulas: of each operator that has one, or of its parts.

    As `FlopCounterMode` itself does, with which each process would import torch's compiler for two seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as torch leaves it
        products = {torch.ops.aten.bmm: _matrix_products}
        self._formulas = FlopCounterMode(display=False, custom_mapping=products).flop_registry
        self.operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        formula = self._formulas.get(operator.overloadpacket)
        if formula is None:
            with self:
                found = operator.decompose(*args, **given)
            return operator(*args, **given) if found is NotImplemented else found
        found = operator(*args, **given)
        self.operations += int(formula(*args, **given, out_val=found))
        return found


def _matrix_products(a: Sequence[int], b: Sequence[int], *_: object, out_shape: Sequence[int], **__: object) -> int:
    """Operations of `a (count, m, n) @ b (count, n, p)`; none for vectors, as for those that come alone."""
    count, m, n = a
    return 2 * count * m * n * b[-1] if b[-1] > 1 else 0
