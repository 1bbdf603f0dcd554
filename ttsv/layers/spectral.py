"""Which layers of a model have a spectrum that can be controlled, and the size of the input that each sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ttsv.checks import check_count
from ttsv.errors import ConfigError
from ttsv.layers.framed import FramedConv2d
from ttsv.layers.geometry import Convolution, TransposedConvolution
from ttsv.layers.orthogonal import OrthogonalConv2d
from ttsv.layers.tt_conv import TTConv
from ttsv.symbol import Size, as_tuple, padding_sides


def spectral_layers(model: nn.Module, *, linear: bool = False) -> dict[str, nn.Module]:
    """Name -> layer of every convolution, in the model's order: those whose singular values are known.

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
    """Whether a module is a convolution whose singular values are known."""
    if isinstance(module, FramedConv2d):
        core = module.core
        return isinstance(core, OrthogonalConv2d) or (isinstance(core, nn.Conv2d) and core.groups == 1)
    return isinstance(module, TTConv | Convolution | TransposedConvolution | OrthogonalConv2d)


def spatial_dims(layer: nn.Module) -> int:
    """Number of spatial axes of a spectral layer's input; 0 for a linear layer."""
    if isinstance(layer, TTConv | Convolution | TransposedConvolution):
        return len(layer.kernel_size)
    return 0 if isinstance(layer, nn.Linear) else 2


def layer_input_sizes(
    model: nn.Module, input_size: Size, *, in_channels: int | None = None, linear: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name -> size in pixels of the input of every spectral layer that a forward pass reaches (linear layers: `()`).

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
    if isinstance(layer, TTConv | Convolution):
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
