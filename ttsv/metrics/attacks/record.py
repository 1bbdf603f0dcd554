"""What an attack is told to do, how far it is, and what came out."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ttsv.checks import check_choice, check_count, check_positive, check_seed, tiles_fit
from ttsv.config.evaluation import ATTACK_BATCH, ATTACK_NORMS
from ttsv.config.fields import JsonObject
from ttsv.data.loading import as_pixels
from ttsv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Threat:
    """What an attack may do to each image: change it by at most `eps`, in pixels of [0, 1] and in a norm.

    `seed` and, which random numbers depend on too, `batch_size` are the attack's; None is `ATTACK_BATCH`, on every
    device and whatever memory is free there. Raises `ConfigError` naming the field.
    """

    norm: str = "L2"
    eps: float = 0.5
    seed: int = 0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, ATTACK_NORMS)
        check_positive("eps", self.eps, "must be a positive radius in pixels of [0, 1]")
        check_seed(self.seed)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)

    @property
    def images_at_once(self) -> int:
        """The batch size."""
        return ATTACK_BATCH if self.batch_size is None else int(self.batch_size)


@dataclass(frozen=True)
class AttackCounts:
    """Of one attack: the images that it was tried on, those of them that it broke, and its time."""

    attacked: int
    broken: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AttackProgress:
    """Where an attack is after a batch of images.

    `batch` of `batches` are done in this `attack`; `robust` of `images` withstand so far; `seconds` have passed, those
    before an interruption included; `seconds_left` is an estimate from the passes through the network yet to come.
    """

    attack: str
    batch: int
    batches: int
    robust: int
    images: int
    seconds: float
    seconds_left: float


Progress = Callable[[AttackProgress], None]


@dataclass(frozen=True, kw_only=True)
class AttackRecord:
    """What an attack found; tensors are on the CPU.

    `robust` (images,), bool: classified correctly, and so after every attack. `counts`: per attack, in order.
    `adversarial_indices` (k,), ascending, are the images that were correct and were broken, `adversarial_images`
    (k, channels, height, width) what broke them, `adversarial_attacks` (k,) by which attack, counted from 0 as in
    `counts`, and `adversarial_classes` (k,) what the network takes them for; `largest_perturbation` is the largest
    norm, in float64, by which one of them was changed (0 where there is none):
    rounding may take it past `eps` by a few units in the last place of float32. `warnings` are AutoAttack's own, each
    text once. `targets`: how many other classes the targeted attacks tried. `version`: of AutoAttack.
    """

    attack: str
    norm: str
    eps: float
    version: str | None
    seed: int
    batch_size: int
    package: str
    package_version: str
    targets: dict[str, int]
    clean_accuracy: float
    robust_accuracy: float
    robust: Tensor
    adversarial_indices: Tensor
    adversarial_images: Tensor
    adversarial_classes: Tensor
    adversarial_attacks: Tensor
    largest_perturbation: float
    counts: dict[str, AttackCounts]
    warnings: tuple[str, ...]
    seconds: float

    def protocol(self) -> JsonObject:
        """How it was measured, JSON-ready: numbers of equal protocols, over the same images, may be compared."""
        return {
            "attack": self.attack,
            "version": self.version,
            "package": self.package,
            "package_version": self.package_version,
            "norm": self.norm,
            "eps": self.eps,
            "space": "pixels in [0, 1]",
            "targets": self.targets,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "images": len(self.robust),
        }


def attack_inputs(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels (float32, contiguous) and labels (int64) of an attack; raises `ConfigError` naming what cannot be used."""
    if images.ndim != 4 or len(images) == 0:
        raise ConfigError("images", tuple(images.shape), "must be (count, channels, height, width), one at least")
    pixels = as_pixels(images).float().contiguous()
    low, high = pixels.aminmax()
    if not (low >= 0 and high <= 1):  # also where one is not a number
        raise ConfigError(
            "images", f"{low:g} to {high:g}", "must be pixels in [0, 1]; normalisation is part of the model"
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        found = f"{labels.dtype} {tuple(labels.shape)}"
        raise ConfigError("labels", found, f"must be {len(images)} integers, one per image")
    if labels.min() < 0:
        raise ConfigError("labels", int(labels.min()), "must be classes, from 0")
    return pixels.detach(), labels.long()


def require_tiles(images: Tensor, norm: str) -> None:
    """Raises `ConfigError` for a size that Square Attack fails on under L2 and L1 (`tiles_fit`)."""
    height, width = images.shape[2:]
    if not tiles_fit(height, width):
        fix = f"is a size that AutoAttack's Square Attack cannot start from under {norm}: resize, or attack under Linf"
        raise ConfigError("images", (height, width), fix)


def perturbation(adversarial: Tensor, images: Tensor, norm: str) -> Tensor:
    """Norm (count,) of the change of each image, in float64."""
    order = {"L2": 2.0, "Linf": math.inf, "L1": 1.0}[norm]
    found: Tensor = torch.linalg.vector_norm((adversarial.double() - images.double()).flatten(1), order, dim=1)
    return found
