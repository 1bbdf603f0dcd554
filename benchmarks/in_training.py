"""Kernels as a clip finds them in training: real steps of WRN-16-10 since the clip before."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from networks import DELTA
from ttsv.config.training import AugmentationConfig, TrainingConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import Clip, Compose, Orthogonal
from ttsv.data import load_dataset
from ttsv.layers import TTConv
from ttsv.models import create_model
from ttsv.runtime.determinism import random_state
from ttsv.spectral.geometry import Convolution, layer_geometry
from ttsv.spectral.network import spectral_layers
from ttsv.training.loop import fit
from ttsv.tt.decomposition import orthogonalize

IMAGES = "synthetic:3x32x32:10:2000"


@dataclass(frozen=True)
class Course:
    """So many clips of a network, each after `steps` steps of `batch` images; the last is what is measured."""

    model: str = "wrn16-10"
    steps: int = 100
    clips: int = 5
    batch: int = 8


@dataclass(frozen=True)
class Moved:
    """A layer's kernel (of a TT layer the core between orthonormal frames) as the last clip finds it.

    `change`: its distance from what the clip before left, relative to that.
    """

    name: str
    kernel: Tensor
    size: int
    stride: int
    change: float


def moved_kernels(rank: int | None, course: Course) -> list[Moved]:
    """Of every convolution of the network, trained as published but for the batch and the synthetic images.

    The engine's own steps (`ttsv.training.loop.fit`): float32, learning rate 0.1, Nesterov momentum 0.9, weight decay
    1e-4, flips and crops, the orthogonal loss for TT layers, and `Clip(DELTA)` with its defaults.
    """
    config = TrialConfig(
        dataset=IMAGES,
        model=course.model,
        layer="dense" if rank is None else "tt",
        rank=rank,
        training=TrainingConfig(
            epochs=course.clips,
            steps=course.steps,
            batch_size=course.batch,
            lr=0.1,
            schedule="constant",
            nesterov=True,
            weight_decay=1e-4,
        ),
        augmentation=AugmentationConfig(flip=True, pad=4, padding="symmetric"),
    )
    with random_state(0, torch.device("cpu")):
        model = create_model(course.model, num_classes=10, layer=config.layer, rank=rank, mean=(0.5,), std=(0.5,))
    clip = _Watched(course)
    constraint = Compose(Orthogonal(0.0 if rank is None else 1e5, normalizer="code"), clip)
    with tempfile.TemporaryDirectory() as folder:
        for metrics in fit(model, load_dataset(IMAGES, Path(folder)), config, constraint, device=torch.device("cpu")):
            print(f"trained to clip {metrics.epoch}: loss {metrics.train_loss:.3f}", flush=True)
    return clip.moved


class _Watched(Clip):
    """Keeps what the last clip finds."""

    def __init__(self, course: Course) -> None:
        super().__init__(DELTA, every=course.steps)
        self.last = course.clips * course.steps
        self.settled: dict[str, Tensor] = {}
        self.moved: list[Moved] = []

    @torch.no_grad()
    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        """As `Clip` has it."""
        if step == self.last and not self.moved:
            self.moved = [self._moved(name, layer) for name, layer in spectral_layers(model).items()]
        super().project(model, step, force=force)
        if step % self.every == 0:
            self.settled = {name: _kernel(layer) for name, layer in spectral_layers(model).items()}

    def _moved(self, name: str, layer: nn.Module) -> Moved:
        assert isinstance(layer, TTConv | Convolution)
        assert self._sizes is not None
        kernel, before = _kernel(layer), self.settled[name]
        change = torch.linalg.vector_norm(kernel - before) / torch.linalg.vector_norm(before)
        size = layer_geometry(layer, self._sizes[name]).periodic_size[0]
        return Moved(name, kernel, size, layer.stride[0], change.item())


def _kernel(layer: nn.Module) -> Tensor:
    if isinstance(layer, TTConv):
        return orthogonalize(layer.k1, layer.core, layer.k3).core
    return layer.get_parameter("weight").detach().clone()
