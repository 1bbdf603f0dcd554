"""The operators whose norm a constraint bounds: how a layer's kernel becomes one, and how its norm is bounded."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.checks import check_choice
from ttsv.errors import ConfigError
from ttsv.layers import Framed, FramedConv2d, OrthogonalConv2d, TTConv
from ttsv.layers.convert import recomputed_fix, recomputed_weights
from ttsv.runtime.precision import at_least_single
from ttsv.spectral.bounds import conv_norm_bounds, matrix_norm_bounds
from ttsv.spectral.geometry import Convolution, LayerGeometry, TransposedConvolution, layer_geometry
from ttsv.spectral.network import layer_input_sizes, spectral_layers
from ttsv.spectral.norms import scale_down, stored_norm, widened
from ttsv.spectral.symbol import Size, output_sizes
from ttsv.tt.decomposition import TTFactors, orthogonalized

Operator = Literal["periodic", "zero-padded"]
"""`periodic`: the circular convolution at the size that the layer sees, or the next that its stride divides.
`zero-padded`: what the layer applies, with its own padding (also where that is circular)."""

MEASURES: dict[Operator, str] = {
    "periodic": "periodic norm",
    "zero-padded": "norm with the layer's own padding, rigorous upper bound",
}
MATRIX = "matrix norm"


def check_operator(operator: str) -> None:
    """Raises `ConfigError` for an unknown operator."""
    check_choice("operator", operator, get_args(Operator))


def sizes_to_control(
    model: nn.Module,
    input_size: Size,
    operator: Operator,
    *,
    in_channels: int | None,
    linear: bool,
    convolutions: bool = True,
) -> dict[str, tuple[int, ...]]:
    """Returns name -> size of the input of every layer that a projection is to change (linear layers: `()`).

    Layers that are orthogonal by construction (`SOC` and the like, between frames too) are left alone: their norm is
    what it is. `convolutions=False` leaves linear layers only. Raises `ConfigError` where nothing else is left, for a
    layer whose weight is parametrized or recomputed by a hook, which a projection could not write (frames held
    orthonormal are left as they are), for two that share a weight, and for one whose own padding is neither zeros nor
    circular, or circular to another size than the periodic operator's.
    """
    sizes = layer_input_sizes(model, input_size, in_channels=in_channels, linear=linear)
    if not convolutions:
        sizes = {name: size for name, size in sizes.items() if not size}
    layers = spectral_layers(model, linear=linear)
    orthogonal = [name for name in sizes if _is_orthogonal(layers[name])]
    if orthogonal and len(orthogonal) == len(sizes):
        fix = "is orthogonal by construction, as are all others: nothing is left to clip or divide"
        raise ConfigError(f"model.{orthogonal[0]}", type(layers[orthogonal[0]]).__name__, fix)
    sizes = {name: size for name, size in sizes.items() if name not in orthogonal}
    _check_untied({name: layers[name] for name in sizes})
    for name, size in sizes.items():
        layer = layers[name]
        _check_writable(name, layer)
        if operator == "zero-padded" and isinstance(layer, TTConv | Convolution | TransposedConvolution):
            _check_padding(name, layer_geometry(layer, size), layer.padding)
    return sizes


def _check_untied(layers: Mapping[str, nn.Module]) -> None:
    """Raises `ConfigError` for two layers with a common weight: a projection of one would change the other's norm."""
    owners: dict[nn.Parameter, str] = {}
    for name, layer in layers.items():
        for key, parameter in layer.named_parameters():
            owner = owners.setdefault(parameter, name)
            if owner != name and key != "bias":
                fix = f"must not share its weight with model.{owner} to be clipped or divided: untie them"
                raise ConfigError(f"model.{name}", type(layer).__name__, fix)


def _check_writable(name: str, layer: nn.Module) -> None:
    """Raises `ConfigError` where a projection could not write the layer's weight."""
    if isinstance(layer, FramedConv2d):
        fix = "must not be frames around a convolution to be clipped or divided: TTConv2d is that"
        raise ConfigError(f"model.{name}", type(layer).__name__, fix)
    if _is_parametrized(layer):
        kind = parametrize.type_before_parametrizations(layer).__name__
        raise ConfigError(f"model.{name}", kind, "must not be parametrized to be clipped or divided")
    if recomputed := recomputed_weights(layer):
        raise ConfigError(f"model.{name}", type(layer).__name__, recomputed_fix(recomputed[0]))


def _check_padding(name: str, geometry: LayerGeometry, padding: str | tuple[int, ...]) -> None:
    """Raises `ConfigError` where the norm of what the layer applies to images of this size cannot be bounded."""
    mode, size = geometry.padding_mode, geometry.input_size
    if mode not in ("zeros", "circular"):
        raise ConfigError(f"model.{name}.padding_mode", mode, 'must be zeros or circular, or operator "periodic"')
    if mode == "zeros":
        return
    if geometry.periodic_size != size:
        fix = f'must divide input_size = {size} on every axis in circular mode, or operator "periodic"'
        raise ConfigError(f"model.{name}.stride", geometry.stride, fix)
    found = output_sizes(size, geometry.sides, geometry.kernel_size, geometry.stride, geometry.dilation)
    expected = tuple(n // s for n, s in zip(size, geometry.stride, strict=True))
    if found != expected:
        fix = f'must leave {expected} outputs in circular mode, or operator "periodic"'
        raise ConfigError(f"model.{name}.padding", padding, fix)


def _is_orthogonal(layer: nn.Module) -> bool:
    return isinstance(layer.core if isinstance(layer, FramedConv2d) else layer, OrthogonalConv2d)


def _is_parametrized(layer: nn.Module) -> bool:
    if isinstance(layer, Framed) and layer.frames == "orthonormal":
        return parametrize.is_parametrized(layer, "core")
    return parametrize.is_parametrized(layer)


def operator_norm(kernel: Tensor, geometry: LayerGeometry, operator: Operator) -> float:
    """Returns the norm of the operator with a kernel of the layer that the geometry is of, as `MEASURES` says.

    In float64: a norm that is a few roundings of float32 too small would leave the kernel above its bound.
    """
    kernel = kernel.double()
    if operator == "periodic":
        return stored_norm(kernel, geometry.periodic_conv(kernel))
    padding: list[int] | None = [before for before, _ in geometry.sides]
    if geometry.padding_mode == "circular":
        padding = None  # the periodic operator itself, also where an even kernel is padded unevenly
    elif any(before != after for before, after in geometry.sides):
        # Of the convolution that is padded on both sides by all it reaches, the layer's own keeps some rows.
        padding = [e * (k - 1) for e, k in zip(geometry.dilation, geometry.kernel_size, strict=True)]
    return conv_norm_bounds(
        kernel,
        geometry.input_size,
        stride=geometry.stride,
        dilation=geometry.dilation,
        groups=geometry.groups,
        padding=padding,
        padding_mode=geometry.padding_mode,
    ).upper


def matrix_norm(weight: Tensor) -> float:
    """Returns the norm of a linear layer's weight as it is stored, in float64."""
    norm: float = torch.linalg.matrix_norm(weight.double(), 2).item()
    return norm


def make_frames_orthonormal(layers: Iterable[nn.Module]) -> None:
    """Makes the free frames of TT layers orthonormal by QR, written back in their dtype: the same convolutions."""
    free = [layer for layer in layers if isinstance(layer, TTConv) and layer.frames == "free"]
    factors = [TTFactors(*map(at_least_single, (layer.k1, layer.core, layer.k3))) for layer in free]
    for layer, found in zip(free, orthogonalized(factors), strict=True):
        for parameter, factor in zip((layer.k1, layer.core, layer.k3), found, strict=True):
            parameter.copy_(factor)


def frames_norms(layers: Mapping[str, TTConv]) -> dict[str, float]:
    """Returns rigorous bounds of the factors by which stored frames of TT layers may raise the norms of their cores.

    They are some 1 + 1e-7 for frames that are orthonormal up to rounding in float32. Frames of one rank are decomposed
    together.
    """
    bounds = matrix_norm_bounds([frame for layer in layers.values() for frame in (layer.k1, layer.k3)])
    return {name: first * last for name, first, last in zip(layers, bounds[::2], bounds[1::2], strict=True)}


def rescale_to_target(
    kernel: Tensor, target: float, norm: Callable[[Tensor], float], measured: float
) -> tuple[Tensor, float]:
    """Multiplies the kernel until its norm, as stored in its dtype, is at most the target; returns it and that norm.

    `norm` measures a kernel as it is stored, `measured` is this one's. Once is enough but for the rounding of the
    entries.
    """
    margin = 4 * torch.finfo(kernel.dtype).eps
    while measured > target:
        kernel = scale_down(kernel, target / measured * (1 - margin))
        measured, margin = norm(kernel), widened(margin)
    return kernel, measured
