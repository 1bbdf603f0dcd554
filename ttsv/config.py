"""What one trial is: plain frozen dataclasses, torch-free.

Two configurations that train the same network the same way have the same `fingerprint()`.
"""

from dataclasses import dataclass
from typing import Any

from ttsv.data.catalog import DATASETS
from ttsv.fields import (
    Ascending,
    Checked,
    FieldInfo,
    Number,
    OneOf,
    build,
    changed,
    differing,
    digest,
    field,
    plain,
    required,
    walk,
)
from ttsv.models.shapes import list_models

LAYERS = ("dense", "tt")
CONSTRAINTS = ("none", "clip")
OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("constant", "cosine", "multistep")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """How the network is trained."""

    path = "training."

    epochs: int = field(20, "passes over the training images", Number(1, 100_000))
    batch_size: int = field(64, "images per step", Number(1, 1_000_000))
    optimizer: str = field("sgd", "sgd or adam", OneOf(OPTIMIZERS))
    lr: float = field(0.05, "learning rate at the start", Number(0, above=True))
    momentum: float = field(0.9, "SGD's momentum (Nesterov)", Number(0, 1))
    weight_decay: float = field(1e-4, "L2 penalty on all weights", Number(0))
    schedule: str = field(
        "cosine", "learning rate over the steps: constant, cosine (to 0), multistep", OneOf(SCHEDULES)
    )
    milestones: tuple[int, ...] = field((), "multistep: epochs after which lr is multiplied by gamma", Ascending())
    gamma: float = field(0.1, "multistep: the factor", Number(0, 1, above=True))


@dataclass(frozen=True, kw_only=True)
class ClippingConfig(Checked):
    """How singular values are clipped (constraint "clip")."""

    path = "clipping."

    every: int = field(100, "optimizer steps between two clips", Number(1))
    rounds: int = field(1, "alternations of clip and truncation to the kernel's support", Number(1, 1000))
    rescale: bool = field(True, "end with a periodic norm of at most delta, by dividing what truncation left")


@dataclass(frozen=True, kw_only=True)
class TrialConfig(Checked):
    """One network, one constraint, one seed. `canonical()` is the form that is stored and compared."""

    dataset: str = required("data set", OneOf(tuple(DATASETS)))
    model: str = required("network", OneOf(list_models()))
    layer: str = field("dense", "convolution: dense, or tt (frame, core, frame)", OneOf(LAYERS))
    rank: int | None = field(None, "largest TT rank of a layer; null: not decomposed", Number(1))
    lambda_ort: float = field(0.0, "weight of the orthogonal loss of the frames", Number(0))
    constraint: str = field("none", "what is done to the singular values: none, clip", OneOf(CONSTRAINTS))
    delta: float | None = field(None, "clipping threshold; null: no clipping", Number(0, above=True))
    seed: int = field(0, "of the weights and the order of the data", Number(0, 2**32 - 1))
    training: TrainingConfig = TrainingConfig()
    clipping: ClippingConfig = ClippingConfig()

    def canonical(self) -> "TrialConfig":
        """The same trial with every field that has no effect set to its default.

        A dense network has no frames, hence no rank and no lambda_ort; without a constraint, delta and the
        clipping's schedule mean nothing. `layer="tt"` without a rank is a dense network.
        """
        changes: dict[str, Any] = {}
        if self.layer == "dense" or self.rank is None:
            changes |= {"layer": "dense", "rank": None, "lambda_ort": 0.0}
        if self.constraint == "none" or self.delta is None:
            changes |= {"constraint": "none", "delta": None, "clipping": ClippingConfig()}
        training: dict[str, Any] = {}
        if self.training.schedule != "multistep":
            training |= {"milestones": (), "gamma": 0.1}
        if self.training.optimizer != "sgd":
            training |= {"momentum": 0.9}
        changes["training"] = changed(self.training, training)
        return changed(self, changes)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical trial: of the fields that differ from their defaults.

        A field added later with a default leaves older fingerprints as they are.
        """
        return digest(differing(self.canonical()))

    def cell(self) -> str:
        """The fingerprint without the seed: trials of one cell are averaged on a leaderboard."""
        return digest({k: v for k, v in differing(self.canonical()).items() if k != "seed"})

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON-ready) with every field."""
        return plain(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrialConfig":
        """Inverse of `to_dict`; fields left out take their defaults. Raises `ConfigError`."""
        return build(cls, data)


def field_infos() -> dict[str, FieldInfo]:
    """Dotted path -> every field of a trial: what a grid axis can be named after."""
    return walk(TrialConfig)
