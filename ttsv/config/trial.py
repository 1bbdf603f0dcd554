"""What one trial is: plain frozen dataclasses, torch-free.

Two configurations that train the same network the same way, and evaluate it alike, have the same `fingerprint()`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from ttsv.config.constraints import CLIPPING, CONSTRAINTS, DIVISION, ClippingConfig, DivisionConfig
from ttsv.config.evaluation import EVALUATION, EvaluationConfig
from ttsv.config.fields import (
    Checked,
    Each,
    FieldInfo,
    Number,
    OneOf,
    Schema,
    TrialFields,
    at_default,
    build,
    changed,
    differing,
    digest,
    field,
    plain,
    required,
    walk,
)
from ttsv.config.training import AUGMENTATION, LOOKING_ON, TRAINING, AugmentationConfig, TrainingConfig
from ttsv.data.catalog import USUAL_NORMALIZATION, DatasetInfo, DatasetName, dataset_info, training_images
from ttsv.errors import ConfigError
from ttsv.models import ModelArguments
from ttsv.models.architectures import CIFAR_STEM_BELOW
from ttsv.models.conv_shape import LAYERS, ConvShape, check_torchvision_layer, core_kind
from ttsv.models.counts import has_linear_layers, normalizes_single_pixels
from ttsv.models.registry import has_torchvision, name_fix, name_patterns
from ttsv.models.shapes import SMALLEST_STD, largest_rank, layer_shapes, list_models

_LARGEST_RANK = 1_000_000
_MANY_CHANNELS = 2**20
"""Of images of which nothing is known: enough for any rank to leave a layer some."""
_LEFT_ALONE = ("soc", "cayley")
"""Kinds of convolution that a projection passes over, to reach other layers; those of others it could not write."""


@dataclass(frozen=True)
class ModelName:
    """The value names a network."""

    def fix(self, value: Any) -> str | None:
        """What would be right, or None."""
        return name_fix(value if isinstance(value, str) else "")

    def schema(self) -> Schema:
        """As JSON schema (which cannot say that a depth is 6 n + 4)."""
        return {"anyOf": [{"enum": list(list_models())}, *({"pattern": f"^({p})$"} for p in name_patterns())]}


@dataclass(frozen=True)
class Rank:
    """A whole number of at least 1, or a fraction of the largest channel count."""

    def fix(self, value: float) -> str | None:
        """What would be right, or None."""
        right = 1 <= value <= _LARGEST_RANK if isinstance(value, int) else 0 < value < 1
        fix = f"must be a whole number of at least 1 and at most {_LARGEST_RANK}, or a fraction above 0 and below 1"
        return None if right else fix

    def schema(self) -> Schema:
        """As JSON schema."""
        whole = {"type": "integer", "minimum": 1, "maximum": _LARGEST_RANK}
        fraction = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [whole, fraction, {"type": "null"}]}


@dataclass(frozen=True, kw_only=True)
class TrialConfig(Checked):
    """One network, one constraint, one seed. `canonical()` is the form that is stored and compared."""

    dataset: str = required("data set", DatasetName())
    model: str = required("network", ModelName())
    layer: str = field("dense", "convolution: dense, tt (frame, core, frame), or one that is orthogonal", OneOf(LAYERS))
    rank: int | float | None = field(
        None,
        "largest TT rank of a layer, or a fraction of the largest channel count; null: not decomposed",
        Rank(),
    )
    frames: str = field("free", "frames of TT layers: free, or held orthonormal", OneOf(("free", "orthonormal")))
    lambda_ort: float = field(0.0, "weight of the orthogonal loss of free frames", Number(0))
    ort_normalizer: str = field(
        "paper",
        "what the orthogonal loss is divided by: paper (r1^2 + r2^2), or code (2 r2^2, the authors' programs, to which "
        "the published lambda_ort belong)",
        OneOf(("paper", "code")),
    )
    constraint: str = field("none", "what is done to the singular values: none, clip, divide", OneOf(CONSTRAINTS))
    delta: float | None = field(None, "clipping threshold; null: no clipping", Number(0, above=True))
    mean: tuple[float, ...] = field(
        (), "subtracted from the pixels, per channel or once; empty: the data set's own", Each(Number(-1e6, 1e6))
    )
    std: tuple[float, ...] = field((), "and divided by; empty: the data set's own", Each(Number(SMALLEST_STD, 1e6)))
    seed: int = field(0, "of the weights and the order of the data", Number(0, 2**32 - 1))
    training: TrainingConfig = TRAINING
    augmentation: AugmentationConfig = AUGMENTATION
    clipping: ClippingConfig = CLIPPING
    division: DivisionConfig = DIVISION
    evaluation: EvaluationConfig = EVALUATION

    def __post_init__(self) -> None:
        """Checks what concerns several fields."""
        super().__post_init__()
        if self.delta is not None and self.clipping.floor is not None and self.clipping.floor > self.delta:
            raise ConfigError("clipping.floor", self.clipping.floor, f"must be at most delta, {self.delta:g}")
        by = self.training.best_by
        if by == "certified" and self.layer not in ("soc", "soc-tt") and self.training.canonical().best_by == by:
            fix = f"must be accuracy: of layers {self.layer} nobody assumes a Lipschitz constant"
            raise ConfigError("training.best_by", "certified", fix)
        self.evaluation.check_dataset(self.dataset, dataset_info(self.dataset))

    def canonical(self) -> "TrialConfig":
        """The same trial with every field that has no effect set to its default.

        The normalisation is as short as it can be (`with_short_normalization`), and a schedule without a milestone
        before its end is constant. A network without TT layers has no frames, hence no rank and no lambda_ort; frames
        that are held orthonormal have nothing to lose; without a constraint its options mean nothing. `layer="tt"`
        without a rank is a dense network, `"soc-tt"` one of SOC layers.
        """
        return self.with_short_normalization()._with_effects_only()

    def _with_effects_only(self) -> "TrialConfig":
        layer, unused = self.layer, list[str]()
        if not layer.endswith("tt") or self.rank is None:
            layer = "dense" if layer == "tt" else layer.removesuffix("-tt")
            unused += ["rank", "frames"]
        if "rank" in unused or self.frames == "orthonormal" or not self.lambda_ort:
            unused += ["lambda_ort", "ort_normalizer"]
        clips = self.constraint == "clip" and self.delta is not None
        if not clips:
            unused += ["delta", "clipping"]
        divides = any((self.division.conv, self.division.linear, self.division.batch_norm))
        training = self.training.canonical()
        if self.constraint != "divide" or not divides:
            unused += ["division"]
            if not clips:
                unused += ["constraint"]
                training = at_default(training, ["final_projection"])
        if layer not in ("soc", "soc-tt"):
            training = at_default(training, ["soc_iterations"])
        augmentation = self.augmentation if self.augmentation.pad else at_default(self.augmentation, ["padding"])
        parts: dict[str, Checked] = {"training": training, "evaluation": self.evaluation.canonical()}
        if "clipping" not in unused:
            parts["clipping"] = self.clipping.canonical()
        if "division" not in unused:
            parts["division"] = self.division.canonical()
        return at_default(self, unused, layer=layer, augmentation=augmentation, **parts)

    def with_short_normalization(self) -> "TrialConfig":
        """The same trial, its `mean` and `std` written as short as they can be.

        One value stands for equal ones of all channels, and nothing for those that every data set has. How many were
        written is known no more: `check_normalization` looks at that before.
        """
        return changed(self, mean=_short(self.mean), std=_short(self.std))

    def check_normalization(self, info: DatasetInfo | None = None) -> None:
        """Raises `ConfigError` for a `mean` or `std` of another count than one or the channels of the data set.

        Without `info`, the data set's facts, as far as they are known without files: of the user's own sets nothing is.
        """
        if not (len(self.mean) > 1 or len(self.std) > 1):
            return
        info = info or dataset_info(self.dataset)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if info is not None and len(values) not in (0, 1, info.channels):
                fix = f"must be empty, one value, or one per channel of {self.dataset}, {info.channels}"
                raise ConfigError(name, values, fix)

    def check_images(self, info: DatasetInfo | None = None, *, build: bool = True) -> None:
        """Raises `ConfigError` where the network cannot take the data set's images.

        Without `info`, the data set's facts, as far as they are known without files: of the user's own sets nothing is,
        and what is refused then is what could take no images at all. `build`: whether one of torchvision's networks is
        built to see it, which takes up to some seconds; else only its name and its kind of layer are looked at, and
        without torchvision the layer alone.
        """
        info = info or dataset_info(self.dataset)
        if self.model.startswith("torchvision:"):
            self._check_torchvision(info, build)
        if info is not None:
            self.check_normalization(info)
            self._check_shapes(info)
        elif not self.model.startswith("torchvision:"):
            self._check_any_shapes()

    def _check_any_shapes(self) -> None:
        """Raises `ConfigError` where the network is refused whatever the images are.

        More channels, and sizes that every stride divides, are refused nothing that others are not; which of the two
        sizes it is decides of some networks what their first convolution is.
        """
        refused = []
        for size in (CIFAR_STEM_BELOW // 2, CIFAR_STEM_BELOW):
            try:
                shapes = layer_shapes(self.model, image_size=size)
                dims = shapes[0].dims
                self._check_shapes(
                    DatasetInfo(name=self.dataset, classes=10, channels=_MANY_CHANNELS, image_size=size, dims=dims)
                )
            except ConfigError as error:
                refused.append(error)
            else:
                return
        raise refused[0]

    def _check_shapes(self, info: DatasetInfo) -> None:
        shapes = [] if self.model.startswith("torchvision:") else self._shapes(info)
        dims = shapes[0].dims if shapes else 2
        if dims != info.dims:
            fix = f"must be a network for images of {info.dims} dimensions, as {self.dataset} has; it is one for {dims}"
            raise ConfigError("model", self.model, fix)
        rank = largest_rank(shapes, self.rank) if shapes else None
        for shape in shapes:
            shape.check_layer(self.layer, rank)
        if shapes:
            self._check_projection(has_linear_layers(self.model, shapes, info.classes))
            if self.leaves_one_alone(info) and normalizes_single_pixels(self.model, shapes, info.classes):
                raise self._no_variance()

    def leaves_one_alone(self, info: DatasetInfo | None = None) -> bool:
        """Whether a step of training, or of recalibration, takes one image, as far as is known.

        `info`: the facts of a data set of the user's own, which do not follow from its name. Recalibration goes through
        all images, however few steps an epoch has.
        """
        size, steps = self.training.batch_size, None if self.training.recalibrate else self.training.steps
        count = training_images(self.dataset, self.training.validation, info)
        if size == 1 or count is None:
            return size == 1
        return count % size == 1 and (steps is None or steps >= math.ceil(count / size))

    def _no_variance(self) -> ConfigError:
        fix = f"must leave no image alone in a batch: {self.model} normalises single pixels, which have no variance"
        return ConfigError("training.batch_size", self.training.batch_size, fix)

    def _check_projection(self, has_linear: bool) -> None:
        """Raises `ConfigError` for a constraint that no convolution of this kind takes.

        A division by the norms of linear layers or batch norms alone leaves the convolutions as they are.
        """
        asked = self.canonical()  # a rank or a delta of null is no layer of that kind, and no constraint
        kind, clips = core_kind(asked.layer), asked.constraint == "clip"
        linear = asked.clipping.linear if clips else asked.division.linear is not None
        if kind == "dense" or not (clips or asked.division.conv is not None):
            return
        rest = "clipping.linear: true" if clips else "division.linear"
        if kind in _LEFT_ALONE:
            if linear and has_linear:
                return
            why = f"layers {asked.layer} are orthogonal by construction, and nothing else is left"
            why += f" without {rest}" if has_linear else f": {self.model} has no linear layer"
        else:
            why = f"a projection cannot write the weights of layers {asked.layer}, which are parametrized"
        if clips:
            raise ConfigError("constraint", "clip", f"must be none (or layer dense or tt): {why}")
        raise ConfigError("division.conv", asked.division.conv, f"must be null (or layer dense or tt): {why}")

    def _shapes(self, info: DatasetInfo) -> list[ConvShape]:
        """The network's convolutions. Raises `ConfigError` where it cannot take the images."""
        try:
            return layer_shapes(
                self.model, in_channels=info.channels, image_size=info.image_size, num_classes=info.classes
            )
        except ConfigError as error:
            raise ConfigError("model", self.model, f"cannot take the images of {self.dataset}: {error}") from error

    def _check_torchvision(self, info: DatasetInfo | None, build: bool) -> None:
        """Its layers are known only once they are built: it is, without weights. Raises `ConfigError`."""
        check_torchvision_layer(self.layer)
        if not has_torchvision():
            return
        # Here are torch and torchvision, which other networks do not need.
        from ttsv.models.build import check_buildable
        from ttsv.models.torchvision_models import check_classifier

        check_classifier(self.model.removeprefix("torchvision:"), self.layer)
        if not build:
            return
        classes, channels, pixels = (10, 3, 224) if info is None else (info.classes, info.channels, info.image_size)
        arguments = ModelArguments(
            name=self.model, layer=self.layer, num_classes=classes, in_channels=channels, image_size=pixels
        )
        try:
            check_buildable(arguments, alone=info is not None and self.leaves_one_alone(info))
        except ConfigError as error:
            if error.field == "training.batch_size":
                raise self._no_variance() from error
            if error.field != "image_size":
                raise
            raise ConfigError("model", self.model, f"cannot take the images of {self.dataset}: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical trial: of the fields that differ from their defaults (`deciding`).

        A field added later with a default leaves older fingerprints as they are.
        """
        return digest(self.canonical().deciding())

    def written_fingerprint(self) -> str:
        """The same of the trial as it is: of one that an earlier version made canonical, that version's fingerprint."""
        return digest(self.deciding())

    def cell(self) -> str:
        """The fingerprint without the seed: trials of one cell are averaged on a leaderboard."""
        return digest({k: v for k, v in self.canonical().deciding().items() if k != "seed"})

    def deciding(self) -> TrialFields:
        """The fields that differ from their defaults, as nested plain data, without those that only look on."""
        return differing(changed(self, training=at_default(self.training, LOOKING_ON)))

    def to_dict(self) -> TrialFields:
        """Plain data (JSON-ready) with every field."""
        return plain(self)

    def kept(self) -> TrialFields:
        """The same as it is kept for other versions: one before refuses a field that it does not know."""
        fields = self.to_dict()
        training = fields["training"]
        assert isinstance(training, dict)
        for name in LOOKING_ON:
            if getattr(self.training, name) == getattr(TRAINING, name):
                del training[name]
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "TrialConfig":
        """Inverse of `to_dict`; fields left out take their defaults. Raises `ConfigError`."""
        return build(cls, data)


def _short(values: tuple[float, ...]) -> tuple[float, ...]:
    """Values of channels as short as they can be written."""
    if len(set(values)) > 1:
        return values
    return () if values[:1] == (USUAL_NORMALIZATION,) else values[:1]


@cache
def field_infos() -> Mapping[str, FieldInfo]:
    """Dotted path -> every field of a trial: what a grid axis can be named after."""
    return MappingProxyType(walk(TrialConfig))
