"""Whole models between dense and TT convolutions."""

import copy
from collections.abc import Callable, Collection

import torch
from torch import nn

from ttsv.errors import ConfigError
from ttsv.layers.framed import Framed, FramedConv2d, FrameKind, check_frames
from ttsv.layers.orthogonal import OrthogonalConv2d
from ttsv.layers.soc import SOC, SOCTT
from ttsv.layers.tt_conv import TTConv, TTConv1d, TTConv2d, TTConv3d
from ttsv.ranks import absolute_rank
from ttsv.tt import tt_to_dense

_TT: dict[type[nn.Module], type[TTConv]] = {nn.Conv1d: TTConv1d, nn.Conv2d: TTConv2d, nn.Conv3d: TTConv3d}
_DENSE = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def tensorize(model: nn.Module, rank: float, *, skip: Collection[str] = (), frames: FrameKind = "free") -> nn.Module:
    """A new model with its convolutions decomposed by `TTConv*.from_dense`; the given one stays as it is.

    `rank` is an int, or a fraction in (0, 1] of the largest channel count among the convolutions other than 1x1
    (rounded, at least 1). A layer has ranks `min(c_in, rank)` and `min(c_out, rank)`; one whose rank reaches both
    channel counts stays dense, whatever its kernel size: that is the rule of the paper's compression figures, its
    1x1 layers included. Grouped convolutions, subclasses of torch's (parametrized, lazy) and layers that have frames
    already stay what they are.
    `skip`: names of modules left alone with all they contain. `frames`: free, or held orthonormal (see `TTConv`).

    A `SOC` becomes a `SOCTT` with its bias, its `correction` and its numbers of terms, but with frames and a core drawn
    anew: an exponential has no factors to truncate, so such a network is to be trained afterwards.

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
        if isinstance(layer, SOC) and largest < max(layer.in_channels, layer.out_channels):
            return _framed_soc(layer, largest, frames)
        if type(layer) not in _TT or not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return layer
        if layer.groups > 1 or largest >= max(layer.in_channels, layer.out_channels):
            return layer
        return _TT[type(layer)].from_dense(layer, largest, frames=frames)

    framed = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Framed)}
    return _replace(model, decompose, framed.union(skip))


def densify(model: nn.Module) -> nn.Module:
    """A new model with every TT convolution merged into a dense one: the same function, up to rounding.

    Frames around an `nn.Conv2d` are merged too, around a layer without a kernel of its own size (`SOC`, Cayley, what
    takes its stride by space-to-depth) they stay.
    """

    def merge(layer: nn.Module) -> nn.Module:
        if isinstance(layer, TTConv):
            return _merge(layer)
        if isinstance(layer, FramedConv2d) and isinstance(layer.core, nn.Conv2d) and layer.core.groups == 1:
            return _merge_around(layer, layer.core)
        return layer

    return _replace(model, merge, ())


def _absolute_rank(model: nn.Module, rank: float) -> int:
    kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d | OrthogonalConv2d
    convolutions = [module for module in model.modules() if isinstance(module, kinds)]
    spatial = [m for m in convolutions if m.kernel_size not in (1, (1,), (1, 1), (1, 1, 1))] or convolutions
    return absolute_rank(rank, max((max(m.in_channels, m.out_channels) for m in spatial), default=1))


def _framed_soc(layer: SOC, rank: int, frames: FrameKind) -> SOCTT:
    framed = SOCTT(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        rank,
        layer.stride,
        bias=layer.bias is not None,
        frames=frames,
        correction=layer.correction,
        train_terms=layer.train_terms,
        eval_terms=layer.eval_terms,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    if layer.bias is not None:
        framed.bias = nn.Parameter(layer.bias.detach().clone())
    return framed.train(layer.training)


def _replace(model: nn.Module, convert: Callable[[nn.Module], nn.Module], skip: Collection[str]) -> nn.Module:
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


def _merge_around(layer: FramedConv2d, core: nn.Conv2d) -> nn.Module:
    dense = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        core.kernel_size,  # type: ignore[arg-type]
        stride=core.stride,  # type: ignore[arg-type]
        padding=core.padding,  # type: ignore[arg-type]
        dilation=core.dilation,  # type: ignore[arg-type]
        bias=layer.bias is not None or core.bias is not None,
        padding_mode=core.padding_mode,
        device="meta",
    )
    with torch.no_grad():
        dense.weight = nn.Parameter(tt_to_dense(layer.k1, core.weight, layer.k3))
        if dense.bias is not None:
            bias = torch.zeros_like(layer.k3[0])
            bias += 0 if layer.bias is None else layer.bias
            bias += 0 if core.bias is None else core.bias @ layer.k3
            dense.bias = nn.Parameter(bias)
    return dense.train(layer.training)
