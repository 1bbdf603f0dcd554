"""Whole models between dense and TT convolutions."""

import copy
from collections.abc import Callable, Collection

from torch import nn

from ttsv.errors import ConfigError
from ttsv.layers.framed import FrameKind, check_frames
from ttsv.layers.tt_conv import TTConv, TTConv1d, TTConv2d, TTConv3d

_TT: dict[type[nn.Module], type[TTConv]] = {nn.Conv1d: TTConv1d, nn.Conv2d: TTConv2d, nn.Conv3d: TTConv3d}
_DENSE = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def tensorize(model: nn.Module, rank: float, *, skip: Collection[str] = (), frames: FrameKind = "free") -> nn.Module:
    """A new model with its convolutions decomposed by `TTConv*.from_dense`; the given one stays as it is.

    `rank` is an int, or a fraction in (0, 1] of the largest channel count among the convolutions other than 1x1
    (rounded, at least 1). A layer has ranks `min(c_in, rank)` and `min(c_out, rank)`; one whose rank reaches both
    channel counts stays dense, whatever its kernel size: that is the rule of the paper's compression figures, its
    1x1 layers included. Grouped convolutions and subclasses of torch's (parametrized, lazy) stay what they are.
    `skip`: names of modules left alone with all they contain. `frames`: free, or held orthonormal (see `TTConv`).

    Raises `ConfigError` for a rank out of range, an unknown kind of frames, and a name in `skip` that the model does
    not have.
    """
    check_frames(frames)
    known = {name for name, _ in model.named_modules()}
    for name in skip:
        if name not in known:
            raise ConfigError("skip", name, "must be the name of a module of the model")
    largest = _absolute_rank(model, rank)

    def decompose(layer: nn.Module) -> nn.Module:
        if type(layer) not in _TT or not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return layer
        if layer.groups > 1 or largest >= max(layer.in_channels, layer.out_channels):
            return layer
        return _TT[type(layer)].from_dense(layer, largest, frames=frames)

    return _replace(model, decompose, frozenset(skip))


def densify(model: nn.Module) -> nn.Module:
    """A new model with every TT convolution merged into a dense one: the same function, up to rounding."""
    return _replace(model, lambda layer: _merge(layer) if isinstance(layer, TTConv) else layer, frozenset())


def _absolute_rank(model: nn.Module, rank: float) -> int:
    if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1:
        return rank
    if not isinstance(rank, float) or not 0 < rank <= 1:
        fix = "must be a whole number of at least 1 or a fraction above 0 and at most 1"
        raise ConfigError("rank", rank, fix)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    spatial = [m for m in convolutions if max(m.kernel_size) > 1] or convolutions
    widest = max((max(m.in_channels, m.out_channels) for m in spatial), default=1)
    return max(1, round(rank * widest))


def _replace(model: nn.Module, convert: Callable[[nn.Module], nn.Module], skip: frozenset[str]) -> nn.Module:
    """A deep copy of the model with its modules converted; one that is held twice is converted once."""
    copied = copy.deepcopy(model)
    if "" in skip:
        return copied
    converted: dict[nn.Module, nn.Module] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        # named_children() would leave out the second name of a module that the parent holds twice.
        for name, child in list(parent._modules.items()):
            path = prefix + name
            if child is None or path in skip:
                continue
            if child not in converted:
                converted[child] = convert(child)
                visit(converted[child], path + ".")
            setattr(parent, name, converted[child])

    root = convert(copied)
    if root is copied:
        visit(copied, "")
    return root


def _merge(layer: TTConv) -> nn.Module:
    dense = _DENSE[layer.spatial_dims](
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type] # as long as the axes, which mypy cannot see
        stride=layer.stride,  # type: ignore[arg-type]
        padding=layer.padding,  # type: ignore[arg-type]
        dilation=layer.dilation,  # type: ignore[arg-type]
        bias=layer.bias is not None,
        padding_mode=layer.padding_mode,  # type: ignore[arg-type]
        device="meta",
    )
    dense.weight = nn.Parameter(layer.dense_kernel().detach())
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().clone())
    return dense.train(layer.training)
