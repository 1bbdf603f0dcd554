"""The layers of a network that have a spectrum, the size of the input that each sees, and the spectra."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from ttsv.checks import check_count
from ttsv.errors import ConfigError
from ttsv.runtime.headway import get_on
from ttsv.runtime.precision import at_least_single, full_precision
from ttsv.spectral.geometry import Convolution, Sliding, TransposedConvolution, layer_geometry
from ttsv.spectral.singular_values import periodic_singular_values
from ttsv.spectral.symbol import Size, as_tuple, padding_sides


class SpectralLayer(nn.Module, ABC):
    """Base of layers whose singular values are known, as those of torch's own convolutions are."""

    in_channels: int
    out_channels: int
    spatial_dims: ClassVar[int] = 2
    """Axes of the images beside their channels."""

    @property
    def has_spectrum(self) -> bool:
        """Whether the singular values of this one are known."""
        return True

    @abstractmethod
    def spectrum(self, input_size: Size) -> Tensor:
        """Returns the singular values for images of `input_size` pixels, see `layer_singular_values`."""


def spectral_layers(model: nn.Module, *, linear: bool = False) -> dict[str, nn.Module]:
    """Returns name -> layer of every convolution whose singular values are known, in the model's order.

    These are `nn.Conv1d/2d/3d` and `nn.ConvTranspose1d/2d/3d`, `TTConv1d/2d/3d`, layers that are orthogonal by
    construction (`OrthogonalConv2d`: `SOC` and others) and a `FramedConv2d` around one of these or an ungrouped
    `nn.Conv2d`; what such a layer consists of is not listed again. `linear=True` adds `nn.Linear`. A model that is
    itself such a layer has the name "". A layer that the model holds twice is listed once, under its first name.
    """
    check_model(model)
    found: dict[str, nn.Module] = {}
    parts: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in parts and (is_spectral(module) or (linear and isinstance(module, nn.Linear))):
            found[name] = module
            parts.update(module.modules())
    return found


def check_model(model: object) -> None:
    """Raises `ConfigError` for anything but a module."""
    if not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "must be a torch.nn.Module")


def is_spectral(module: nn.Module) -> bool:
    """Tells whether a module is a convolution whose singular values are known."""
    if isinstance(module, SpectralLayer):
        return module.has_spectrum
    return isinstance(module, Convolution | TransposedConvolution)


def spatial_dims(layer: nn.Module) -> int:
    """Number of spatial axes of a spectral layer's input; 0 for a linear layer."""
    if isinstance(layer, SpectralLayer):
        return layer.spatial_dims
    return len(layer.kernel_size) if isinstance(layer, Convolution | TransposedConvolution) else 0


@full_precision()  # a kernel that a parametrization makes is made here
def layer_singular_values(layer: nn.Module, input_size: Size) -> Tensor:
    """Returns the singular values (detached) of one spectral or linear layer, as `model_spectra` gives them.

    A stride that does not divide the size is taken at the smallest larger size that it divides. Of layers between
    frames the nonzero ones: the core's, with what frames that are not orthonormal make of them. A `SOC` counts with
    the terms of its series in its present mode. A transposed convolution that sees n pixels is the adjoint of the
    convolution with its weight from images of n times the stride. Of weights in half precision, in float32.
    """
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            values: Tensor = torch.linalg.svdvals(at_least_single(layer.weight))
            return values[None]
        if not is_spectral(layer):
            raise TypeError(f"{type(layer).__name__} is no spectral layer")
        if isinstance(layer, SpectralLayer):
            return layer.spectrum(input_size)
        assert isinstance(layer, Convolution | TransposedConvolution)
        weight = at_least_single(layer.weight)
        return periodic_singular_values(weight, layer_geometry(layer, input_size).periodic_conv(weight))


def model_spectra(
    model: nn.Module, input_size: Size, *, in_channels: int | None = None, linear: bool = False
) -> dict[str, Tensor]:
    """Returns name -> singular values (detached) of every spectral layer at the size it sees, in the model's order.

    `input_size` (int or d-tuple of pixels) is the model's; each layer's is found by a forward pass over a zero
    image of `in_channels` channels (default: those of the first convolution) in evaluation mode, which changes
    nothing in the model. Layers that the pass does not reach are left out. Values are those of the periodic
    operator, as in `conv_singular_values` and `tt_singular_values`; where a stride does not divide a layer's
    size, at the smallest larger size that it divides. `linear=True` adds linear layers, `(1, min(in, out))`.
    """
    sizes = layer_input_sizes(model, input_size, in_channels=in_channels, linear=linear)
    layers = spectral_layers(model, linear=linear)
    found: dict[str, Tensor] = {}
    for name, size in sizes.items():
        found[name] = layer_singular_values(layers[name], size)
        get_on()
    return found


def layer_input_sizes(
    model: nn.Module, input_size: Size, *, in_channels: int | None = None, linear: bool = False
) -> dict[str, tuple[int, ...]]:
    """Returns name -> input size in pixels of every spectral layer that a forward pass reaches (linear layers: `()`).

    The pass runs over one zero image `(1, in_channels, *input_size)`, in evaluation mode and without gradients;
    each module's mode is restored and no statistics change. `in_channels` defaults to those of the first
    convolution. A layer that is called several times counts with the largest size on each axis, which none of its
    inputs need have: it holds them all. Raises `ConfigError` where the model has no convolution to tell its axes
    from, and where the pass fails at a layer that cannot take what it sees.
    """
    layers = spectral_layers(model, linear=linear)
    image = zero_image(model, input_size, in_channels=in_channels)
    seen: dict[str, tuple[int, ...]] = {}
    entered: list[tuple[str, torch.Size]] = []

    def recorder(name: str, axes: int) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            images = next(iter((*inputs, *named.values())))
            found = tuple(images.shape[images.ndim - axes :])
            entered[:] = [(name, images.shape)]
            seen[name] = tuple(map(max, found, seen.get(name, found)))

        return record

    hooks = [
        layer.register_forward_pre_hook(recorder(name, spatial_dims(layer)), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad(), evaluating(model):
            model(image)
    except RuntimeError:
        for name, shape in entered:
            _check_seen(name, layers[name], shape, input_size)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    return {name: seen[name] for name in layers if name in seen}


def _check_seen(name: str, layer: nn.Module, images: torch.Size, input_size: Size) -> None:
    """Raises `ConfigError` for a shape (b, channels, ...) that a layer cannot take, which is the model's input's doing.

    Torch would not say which layer it is. Nothing is known of a layer whose class has a forward pass of its own, which
    may pad or concatenate first.
    """
    axes = spatial_dims(layer)
    if not layer.forward.__module__.startswith(("torch.nn.modules.", "ttsv.layers.")) or len(images) <= axes:
        return
    channels, expected = images[-axes - 1], layer.in_channels if axes else layer.in_features
    if channels != expected:
        fix = f"must be, with in_channels, of images that the model takes: layer {name!r} takes {expected} "
        raise ConfigError("input_size", input_size, fix + f"{'channels' if axes else 'features'}, not {channels}")
    if isinstance(layer, Sliding) and not isinstance(layer, TransposedConvolution):
        seen, sides = images[-axes:], padding_sides(layer.padding, layer.kernel_size, layer.dilation)
        shapes = zip(layer.dilation, layer.kernel_size, sides, strict=True)
        least = tuple(max(1, e * (k - 1) + 1 - sum(side)) for e, k, side in shapes)
        if any(n < m for n, m in zip(seen, least, strict=True)):
            fix = f"must leave the kernel of layer {name!r} at least {least} pixels, not {tuple(seen)}"
            raise ConfigError("input_size", input_size, fix)


def zero_image(model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> Tensor:
    """One zero image `(1, in_channels, *input_size)` on the model's device and in its dtype.

    `in_channels` defaults to those of the first convolution, whose axes it has. Raises `ConfigError` without one.
    """
    first = next(iter(spectral_layers(model).values()), None)
    if first is None:
        raise ConfigError("model", type(model).__name__, "must have a convolution")
    channels = first.in_channels if in_channels is None else in_channels
    check_count("in_channels", channels)
    size = as_tuple("input_size", input_size, spatial_dims(first))
    assert isinstance(channels, int)
    return next(first.parameters()).new_zeros(1, channels, *size)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def zero_input(model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> Tensor:
    """As `zero_image`; without a convolution the first linear layer is taken to see all pixels."""
    linear = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
    if spectral_layers(model) or (in_channels is None and linear is None):
        return zero_image(model, input_size, in_channels=in_channels)
    size = as_tuple("input_size", input_size, len(input_size) if isinstance(input_size, Sequence) else 2)
    if in_channels is None and linear is not None:
        in_channels, rest = divmod(linear.in_features, math.prod(size))
        if rest or not in_channels:
            fix = f"must divide the {linear.in_features} inputs of the first linear layer, or give in_channels"
            raise ConfigError("input_size", input_size, fix)
    return next(model.parameters(), torch.zeros(0)).new_zeros(1, in_channels or 1, *size)
