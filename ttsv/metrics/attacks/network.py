"""A network under attack: as attacks call it, and what is set aside meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ttsv.errors import ConfigError
from ttsv.runtime.determinism import random_state
from ttsv.runtime.headway import get_on
from ttsv.runtime.precision import own_dtype
from ttsv.spectral.network import evaluating


class AttackedNetwork:
    """A network as a function from float32 pixels to float32 logits (images, classes).

    The logits are the caller's to write to (Square Attack does), and have a gradient, of zero, where they do not depend
    on the image at all. Raises `ConfigError` for logits of another shape, and on `require_finite` where any so far was
    not finite: no attack notices these, and a class that is not a number looks like one that is wrong.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._dtype = own_dtype(model)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._unread: list[Tensor] = []

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of the images (count, channels, height, width)."""
        get_on()
        # A network may write into what it is given, and attacks give it leaves of autograd and the caller's images.
        # Each operation counts: a pass of a small network through one image takes less than a millisecond.
        logits: Tensor = self.model(images.clone() if images.dtype is self._dtype else images.to(self._dtype))
        if logits.ndim != 2 or len(logits) != len(images):
            raise ConfigError("model", type(self.model).__name__, f"must give logits ({len(images)}, classes)")
        self._unread.append(logits.detach() if logits.requires_grad else logits)
        if len(self._unread) == _READ_TOGETHER:
            self._read()
        single = logits if logits.dtype is torch.float32 else logits.float()
        if logits.requires_grad:
            return single
        if torch.is_grad_enabled() and images.requires_grad:
            return single + 0 * images.flatten(1).sum(1, keepdim=True)
        return single.clone() if single is logits else single

    def require_finite(self) -> None:
        """Raises `ConfigError` where a logit was not finite."""
        self._read()
        if not self._total.isfinite():
            raise ConfigError("model", type(self.model).__name__, "must give finite logits for every image in [0, 1]")

    def _read(self) -> None:
        """Adds logits up: one sum, which nothing that is not finite leaves finite, and no waiting for the device."""
        if self._unread:
            self._total = self._total + torch.cat(self._unread).sum(dtype=torch.float64)
            self._unread.clear()


_READ_TOGETHER = 32
"""So many passes' logits are kept to be added up at once."""


@contextmanager
def under_attack(model: nn.Module, images: Tensor, seed: int) -> Iterator[AttackedNetwork]:
    """Inside, the model is in evaluation mode, its weights are constants, and torch's random numbers follow `seed`.

    Afterwards everything is as it was. Constant weights spare the attacks the weights' gradients, which
    they never read, and let parametrized weights be computed once. The model stays on the device of its parameters;
    one without parameters is called on that of the images.
    """
    device = next((p.device for p in model.parameters()), images.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with evaluating(model), parametrize.cached(), random_state(seed, device):
            yield AttackedNetwork(model, device)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
