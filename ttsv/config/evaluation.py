"""What is measured of a trained network besides its accuracy, loss and calibration: a part of a trial, torch-free."""

from dataclasses import dataclass
from typing import Any

from ttsv.checks import tiles_fit
from ttsv.config.fields import Checked, Each, Number, OneOf, at_default, field
from ttsv.data.catalog import DatasetInfo
from ttsv.errors import ConfigError

ATTACKS = ("none", "pgd", "autoattack", "both")
ATTACK_NORMS = ("L2", "Linf", "L1")
ATTACK_VERSIONS = ("standard", "plus", "rand")
CORRUPTIONS = ("none", "published", "generated")
LIPSCHITZ = ("none", "fgsm", "ascent", "both")
PUBLISHED_CORRUPTIONS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}
"""Data set -> folder, in `data_dir/datasets`, of its published corruptions."""
ATTACK_BATCH = 256
"""Images per batch of an attack, on which its random numbers depend, where nothing else is asked for."""
RADII = (36 / 255, 72 / 255, 108 / 255, 1.0)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Checked):
    """How a trained network is evaluated; by default nothing that takes long. Images are the first test images."""

    path = "evaluation."

    attack: str = field(
        "none",
        "none; pgd (quick, for smoke runs: proves little), autoattack, or both, one after the other",
        OneOf(ATTACKS),
    )
    attack_norm: str = field("L2", "norm of the attack: L2, Linf or L1 (AutoAttack only)", OneOf(ATTACK_NORMS))
    attack_eps: float = field(0.5, "radius of the attack, in pixels of [0, 1]", Number(0, above=True))
    attack_version: str = field(
        "standard", "of AutoAttack: standard, plus, or rand (for randomised networks)", OneOf(ATTACK_VERSIONS)
    )
    attack_images: int | None = field(None, "test images attacked; null: all", Number(1, 10_000_000))
    corruptions: str = field(
        "none",
        "none, published (CIFAR-10-C, CIFAR-100-C), or generated (another protocol, for any set of images)",
        OneOf(CORRUPTIONS),
    )
    corruption_images: int | None = field(
        None, "test images per corruption and severity; null: all", Number(1, 10_000_000)
    )
    certified: bool = field(False, "certify images by a rigorous Lipschitz bound")
    radii: tuple[float, ...] = field(
        RADII, "L2 radii, in pixels of [0, 1], of the certified accuracies", Each(Number(0, above=True))
    )
    lipschitz: str = field(
        "none",
        "empirical Lipschitz constants: none, fgsm (radius 0.5, as in the paper), ascent (a stronger search), or both",
        OneOf(LIPSCHITZ),
    )
    lipschitz_images: int | None = field(None, "test images they are taken over; null: all", Number(1, 10_000_000))
    batch_size: int | None = field(
        ATTACK_BATCH,
        f"images per batch of an attack, whose random numbers depend on it: part of the protocol; null: {ATTACK_BATCH}",
        Number(1, 1_000_000),
    )
    seed: int = field(0, "of attacks, generated corruptions and searches", Number(0, 2**32 - 1))

    def __post_init__(self) -> None:
        """Checks what concerns several fields."""
        super().__post_init__()
        if self.attack in ("pgd", "both") and self.attack_norm == "L1":
            raise ConfigError("evaluation.attack_norm", "L1", "must be L2 or Linf for PGD")

    @property
    def attacks(self) -> tuple[str, ...]:
        """Those that are run, in order."""
        return {"none": (), "both": ("pgd", "autoattack")}.get(self.attack, (self.attack,))

    @property
    def lipschitz_methods(self) -> tuple[str, ...]:
        """Those that are run, in order."""
        return {"none": (), "both": ("fgsm", "ascent")}.get(self.lipschitz, (self.lipschitz,))

    def canonical(self) -> "EvaluationConfig":
        """The same evaluation with every field that has no effect set to its default."""
        unused: list[str] = []
        attacks, searches = self.attacks, self.lipschitz_methods
        if self.batch_size is None:
            unused += ["batch_size"]
        if not attacks:
            unused += ["attack_norm", "attack_eps", "attack_images", "batch_size"]
        if "autoattack" not in attacks:
            unused += ["attack_version"]
        if self.corruptions == "none":
            unused += ["corruption_images"]
        if not self.certified:
            unused += ["radii"]
        if not searches:
            unused += ["lipschitz_images"]
        if not attacks and not searches and self.corruptions != "generated":
            unused += ["seed"]
        return at_default(self, unused)

    def check_dataset(self, dataset: str, info: DatasetInfo | None) -> None:
        """Raises `ConfigError` where the data set does not have what the evaluation takes.

        `info`: its facts, None where they are known only once it is loaded.
        """

        def refuse(name: str, fix: str) -> None:
            value: Any = getattr(self, name)
            raise ConfigError(self.path + name, value, fix)

        if self.corruptions == "published" and dataset not in PUBLISHED_CORRUPTIONS:
            sets = " and ".join(PUBLISHED_CORRUPTIONS)
            refuse("corruptions", f"must be generated for {dataset}: published ones are those of {sets}")
        if info is None:
            return
        if self.attacks and info.dims != 2:
            refuse("attack", f"must be none: attacks take images of 2 dimensions, those of {dataset} have {info.dims}")
        if self.corruptions == "generated" and (info.dims != 2 or info.channels not in (1, 3)):
            shape = f"{info.channels} channels and {info.dims} dimensions"
            refuse("corruptions", f"must be none: images of {dataset} have {shape}; 1 or 3 channels and 2 are wanted")
        needed = 3 if self.attack_version == "rand" else 4
        if "autoattack" in self.attacks and info.classes < needed:
            refuse("attack", f"must be none or pgd: AutoAttack needs {needed} classes, {dataset} has {info.classes}")
        tiled = "autoattack" in self.attacks and self.attack_version != "rand" and self.attack_norm != "Linf"
        if tiled and not tiles_fit(info.image_size, info.image_size):
            size = f"{info.image_size}x{info.image_size}"
            refuse(
                "attack_norm", f"must be Linf: AutoAttack's Square Attack cannot start from images of {size} otherwise"
            )


EVALUATION = EvaluationConfig()
"""The default: accuracy, loss and calibration."""
