"""Whole models between dense and TT convolutions."""

import copy
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from ttsv.errors import ConfigError
from ttsv.layers.framed import Framed, FramedConv2d, FrameKind, check_frames
from ttsv.layers.orthogonal import OrthogonalConv2d
from ttsv.layers.soc import SOC, SOCTT
from ttsv.layers.tt_conv import TTConv, TTConv1d, TTConv2d, TTConv3d
from ttsv.spectral.geometry import Convolution
from ttsv.spectral.network import check_model
from ttsv.tt.decomposition import tt_to_dense
from ttsv.tt.ranks import absolute_rank

_TT: dict[type[nn.Module], type[TTConv]] = {nn.Conv1d: TTConv1d, nn.Conv2d: TTConv2d, nn.Conv3d: TTConv3d}
_DENSE: dict[int, Callable[..., Convolution]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def tensorize(model: nn.Module, rank: float, *, skip: Collection[str] = (), frames: FrameKind = "free") -> nn.Module:
    """Returns a new model with its convolutions decomposed by `TTConv*.from_dense`; the given one stays as it is.

    `rank` is an int, or a fraction in (0, 1] of the largest channel count among the convolutions that are not
    skipped, 1x1 ones included (rounded, at least 1): with 1.0 nothing is truncated. A layer has ranks `min(c_in,
    rank)` and `min(c_out, rank)`; one whose rank reaches both channel counts stays dense, whatever its kernel size:
    that is the rule of the paper's compression figures, its 1x1 layers included. Grouped and transposed
    convolutions, subclasses of torch's (parametrized, lazy) and layers that have frames already stay what they are.
    `skip`: names of modules left alone with all they contain. `frames`: free, or held orthonormal (see `TTConv`).

    A `SOC` becomes a `SOCTT` with its bias, its `correction` and its numbers of terms, but with frames and a core drawn
    anew: an exponential has no factors to truncate, so such a network is to be trained afterwards.

    Weights in half precision are decomposed in float32 and their factors rounded.

    Factors of a frozen weight (`requires_grad=False`) and frozen biases stay frozen; what is drawn anew is not.

    Raises `ConfigError` for a rank out of range, an unknown kind of frames, a name in `skip` that the model does
    not have, and a convolution that has hooks, or a parameter of another layer's, which would be lost, or whose weight
    a hook recomputes (`torch.nn.utils.weight_norm`, `spectral_norm`, pruning).
    """
    check_frames(frames)
    check_model(model)
    if isinstance(skip, str) or not isinstance(skip, Collection):
        raise ConfigError("skip", skip, "must be a list of names of modules")
    known = {name for name, _ in model.named_modules()}
    for name in skip:
        if name not in known:
            raise ConfigError("skip", name, "must be the name of a module of the model")
    for name, module in model.named_modules():
        if isinstance(module, _CONVOLUTIONS) and not _is_within(name, skip) and (found := recomputed_weights(module)):
            raise ConfigError(f"model.{name}", type(module).__name__, recomputed_fix(found[0]))
    framed = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Framed)}
    alone = framed.union(skip)
    largest = _absolute_rank(model, rank, alone)

    def decompose(layer: nn.Module) -> nn.Module:
        if isinstance(layer, SOC) and largest < max(layer.in_channels, layer.out_channels):
            return _framed_soc(layer, largest, frames)
        if type(layer) not in _TT or not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return layer
        if layer.groups > 1 or largest >= max(layer.in_channels, layer.out_channels):
            return layer
        return _TT[type(layer)].from_dense(layer, largest, frames=frames)

    return _replace(model, decompose, alone)


def densify(model: nn.Module) -> nn.Module:
    """Returns a new model with every TT convolution merged into a dense one: the same function, up to rounding.

    Frames around an `nn.Conv2d` are merged too, around a layer without a kernel of its own size (`SOC`, Cayley, what
    takes its stride by space-to-depth) they stay. A merged weight is frozen (`requires_grad=False`) where all of its
    factors are. Raises `ConfigError` for a layer to merge that has hooks or shares a parameter with others, and for a
    model that cannot be copied, a hook recomputing one of its weights.
    """

    def merge(layer: nn.Module) -> nn.Module:
        if isinstance(layer, TTConv):
            return _merge(layer)
        if isinstance(layer, FramedConv2d) and isinstance(layer.core, nn.Conv2d) and layer.core.groups == 1:
            return _merge_around(layer, layer.core)
        return layer

    return _replace(model, merge, ())


def recomputed_weights(layer: nn.Module) -> list[str]:
    """Returns the names of weights that a hook recomputes from other parameters before each forward pass.

    So do `torch.nn.utils.weight_norm` and `spectral_norm` and pruning, in a plain attribute: what is written there
    is lost.
    """
    plain = [name for name, value in vars(layer).items() if isinstance(value, Tensor)]
    return [n for n in plain if n == "weight" or any(n + end in layer._parameters for end in ("_orig", "_v"))]


def recomputed_fix(weight: str) -> str:
    """Returns what `ConfigError` says of a weight that a hook recomputes."""
    return f"must not have a {weight} that a hook recomputes (weight_norm, spectral_norm, pruning): remove it"


def _is_within(name: str, modules: Collection[str]) -> bool:
    """Whether a module is one of those named, or part of one."""
    return any(name == other or not other or name.startswith(other + ".") for other in modules)


def _absolute_rank(model: nn.Module, rank: float, skip: Collection[str]) -> int:
    kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d | OrthogonalConv2d
    named = model.named_modules(remove_duplicate=False)
    kept = [module for name, module in named if isinstance(module, kinds) and not _is_within(name, skip)]
    return absolute_rank(rank, max((max(m.in_channels, m.out_channels) for m in kept), default=1))


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
        framed.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return framed.train(layer.training)


def _replace(model: nn.Module, convert: Callable[[nn.Module], nn.Module], skip: Collection[str]) -> nn.Module:
    """A deep copy of the model with its modules converted; one that is held twice is converted once."""
    check_model(model)
    _check_copies(model)
    copied = copy.deepcopy(model)
    if "" in skip:
        return copied
    holders = _parameter_holders(copied)
    converted: dict[nn.Module, nn.Module] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        # named_children() would leave out the second name of a module that the parent holds twice.
        for name, child in list(parent._modules.items()):
            path = prefix + name
            if child is None or path in skip:
                continue
            if child not in converted:
                converted[child] = convert(child)
                if converted[child] is not child:
                    _check_alone(path, child, holders)
                visit(converted[child], path + ".")
            setattr(parent, name, converted[child])

    root = convert(copied)
    if root is copied:
        visit(copied, "")
    else:
        _check_alone("", copied, holders)
    return root


def _parameter_holders(model: nn.Module) -> dict[nn.Parameter, dict[str, nn.Module]]:
    """For each parameter the modules that hold it, by name: several where layers are tied."""
    holders: dict[nn.Parameter, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, {})[name] = module
    return holders


def _check_alone(name: str, layer: nn.Module, holders: Mapping[nn.Parameter, Mapping[str, nn.Module]]) -> None:
    """Raises `ConfigError` for a layer whose replacement would lose a hook, or a parameter that others share."""
    for part in (layer, *layer.children()):
        if any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)):
            fix = "must not have hooks, which its replacement would not have: remove them, or leave the layer out"
            raise ConfigError(f"model.{name}", type(layer).__name__, fix)
    own = set(layer.modules())
    for parameter in layer.parameters():
        if others := [f"model.{other}" for other, module in holders[parameter].items() if module not in own]:
            fix = f"must not share a parameter with {', '.join(others)}: replaced, they would part; untie them"
            raise ConfigError(f"model.{name}", type(layer).__name__, fix)


def _check_copies(model: nn.Module) -> None:
    """Raises `ConfigError` for a weight that a hook has left as a result of autograd, which cannot be copied."""
    for name, module in model.named_modules():
        for weight in recomputed_weights(module):
            if not vars(module)[weight].is_leaf:
                raise ConfigError(f"model.{name}", type(module).__name__, recomputed_fix(weight))


def _is_trained(layer: nn.Module) -> bool:
    """Whether any parameter is, other than biases."""
    named = layer.named_parameters()
    return any(parameter.requires_grad for name, parameter in named if name.rpartition(".")[2] != "bias")


def _merge(layer: TTConv) -> nn.Module:
    dense = _dense_like(layer, layer, bias=layer.bias is not None)
    dense.weight = nn.Parameter(layer.dense_kernel().detach(), _is_trained(layer))
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return dense.train(layer.training)


def _merge_around(layer: FramedConv2d, core: nn.Conv2d) -> nn.Module:
    dense = _dense_like(layer, core, bias=layer.bias is not None or core.bias is not None)
    with torch.no_grad():
        dense.weight = nn.Parameter(tt_to_dense(layer.k1, core.weight, layer.k3), _is_trained(layer))
        if dense.bias is not None:
            bias = torch.zeros_like(layer.k3[0])
            bias += 0 if layer.bias is None else layer.bias
            bias += 0 if core.bias is None else core.bias @ layer.k3
            dense.bias = nn.Parameter(bias, any(b.requires_grad for b in (layer.bias, core.bias) if b is not None))
    return dense.train(layer.training)


def _dense_like(layer: Framed, core: TTConv | nn.Conv2d, *, bias: bool) -> Convolution:
    """A convolution, without memory, from the layer's input to its output channels that reads pixels as the core."""
    return _DENSE[len(core.kernel_size)](
        layer.in_channels,
        layer.out_channels,
        core.kernel_size,
        stride=core.stride,
        padding=core.padding,
        dilation=core.dilation,
        bias=bias,
        padding_mode=core.padding_mode,
        device="meta",
    )
