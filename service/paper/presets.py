"""The tables and figures of the paper (Senderovich et al., NeurIPS 2022) as specs that can be posted."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from service.errors import NotFoundError
from service.paper import recipes
from service.paper.recipes import TIMED, Part, PartialTrial, PresetGrid, Protocol, one_layer_images
from ttsv.config.fields import FieldValue

PAPER = "senderovich2022"


class Scale(StrEnum):
    """How much of a preset is run."""

    FULL = "full"
    """As in the paper."""
    SMOKE = "smoke"
    """Every path with few steps, small networks and synthetic images: minutes on a CPU, and no result."""


class PresetSpec(PresetGrid):
    """A spec that can be posted."""

    spec_version: int
    name: str
    notes: str


@dataclass(frozen=True)
class Preset:
    """One table or figure; `name` is what it is asked for by."""

    name: str
    title: str
    build: Callable[[Protocol], PresetGrid]


def presets() -> list[Preset]:
    """All of them, in the paper's order."""
    return list(_PRESETS)


def preset_spec(name: str, *, scale: Scale = Scale.FULL, protocol: Protocol = Protocol.CODE) -> PresetSpec:
    """A preset as a spec to post. Raises `NotFoundError` for an unknown name."""
    found = next((preset for preset in _PRESETS if preset.name == name), None)
    if found is None:
        names = ", ".join(preset.name for preset in _PRESETS)
        asked = name.removeprefix("-/")[:100]  # a client sends a name without a paper so
        raise NotFoundError(f"there is no preset {asked!r}; the nearest is {_nearest(name)}; there are {names}")
    spec = found.build(protocol)
    notes = f"{found.title}. Protocol: {protocol.value}. " + _NOTES[protocol]
    if scale is Scale.SMOKE:
        spec = smaller(spec)
        notes += " Scale smoke: it shows that every path works and measures nothing."
    label = f"{name} ({scale.value}, {protocol.value})"
    return {"spec_version": 1, "name": label, "notes": notes, **_looked_on(spec)}


_LOOKS = 20
"""So often the singular values of a trial's layers are kept: 0.05 % of its time (`docs/pages.md`)."""


def _nearest(name: str) -> str:
    """The preset that a name may mean, whose paper may be missing."""
    spelt = {preset.name.rpartition("/")[2]: preset.name for preset in _PRESETS}
    return spelt[difflib.get_close_matches(name.rpartition("/")[2].lower(), spelt, 1, 0.0)[0]]


def _looked_on(spec: PresetGrid) -> PresetGrid:
    """The same with spectra over training, which change no number, no epoch's seconds and no fingerprint."""
    base = spec["base"].copy()
    if base.get("model") == TIMED:
        return spec
    training = base["training"]
    base["training"] = training | {"spectra_every": max(1, int(str(training["epochs"])) // _LOOKS)}
    return {**spec, "base": base}


_NOTES = {
    Protocol.CODE: (
        "Hyperparameters as in the authors' programs; trained on all training images, no epoch is chosen: "
        "the last one counts."
    ),
    Protocol.TEXT: (
        "Hyperparameters as in the paper's text; trained on all training images, no epoch is chosen: "
        "the last one counts."
    ),
    Protocol.AUTHORS: (
        "Hyperparameters as in the authors' programs, and the epoch is chosen by its accuracy on the test images; of "
        "LipConvNets the last epoch is evaluated, and the one of best certified accuracy on the test images kept."
    ),
}

_PRESETS = tuple(
    Preset(f"{PAPER}/{name}", title, build)
    for name, title, build in (
        ("table1", "SOC and SOC-TT in LipConvNet-5, -20 and -30 on CIFAR-10", recipes.table1),
        ("table2", "Clipping and division in WRN-16-10 on CIFAR-10", recipes.table2),
        ("table3", "lambda_ort of SOC-TT in LipConvNet-5, -20 and -30, rank 256, on CIFAR-10", recipes.table3),
        ("table4", "Clipping and division in WRN-16-10 on CIFAR-100", recipes.table4),
        ("figure-vgg", "TT, clipping and division in VGG-19 on CIFAR-10 and CIFAR-100", recipes.figure_vgg),
        ("figure-lipschitz", "Empirical Lipschitz constants of LipConvNets over lambda_ort", recipes.figure_lipschitz),
        ("figure-speedup", "Time and memory of the exact spectrum of a TT layer, n = 16", recipes.figure_speedup),
        ("figure-soc-speedup", "Inference time of a SOC-TT layer, n = 16", recipes.figure_soc_speedup),
    )
)


# The same made small: every path in minutes on a CPU, and no result.

_NETWORKS = {
    "wrn16-10": "wrn10-1",
    "vgg19": "vgg11",
    "lipconvnet-20": "lipconvnet-5",
    "lipconvnet-30": "lipconvnet-5",
}
_IMAGES = {"cifar10": "synthetic:3x32x32:10:100", "cifar100": "synthetic:3x32x32:100:1000"}
_RANKS: dict[FieldValue, float] = {128: 0.125, 192: 0.3, 256: 0.25, 320: 0.5}
"""As fractions, so that they mean something in smaller networks too."""
_MOST_VARIANTS = 4
_SMALL_EVALUATION: Part = {
    "attack": "pgd",
    "attack_images": 4,
    "corruptions": "generated",
    "corruption_images": 1,
}


def smaller(spec: PresetGrid) -> PresetGrid:
    """Two short epochs, in smaller networks on synthetic images, of the first variants, ranks and seeds."""
    variants = [_smaller(part) for part in spec["variants"]][:_MOST_VARIANTS]
    grid = dict(spec["grid"])
    if "seed" in grid:
        grid["seed"] = grid["seed"][:1]
    if "dataset" in grid:
        grid["dataset"] = [_IMAGES[str(name)] for name in grid["dataset"]]
    if "rank" in grid:
        grid["rank"] = [_RANKS.get(rank, rank) for rank in grid["rank"]][:2]
    return {"base": _smaller(spec["base"]), "variants": variants, "grid": grid}


def _smaller(given: PartialTrial) -> PartialTrial:
    fields = given.copy()
    if "model" in fields:
        fields["model"] = _NETWORKS.get(fields["model"], fields["model"])
    if "dataset" in fields:
        layers = {one_layer_images(channels): one_layer_images(channels // 8) for channels in range(8, 2048, 8)}
        fields["dataset"] = (_IMAGES | layers).get(fields["dataset"], fields["dataset"])
    if "rank" in fields:
        fields["rank"] = _RANKS.get(fields["rank"], fields["rank"])
    if "lambda_ort" in fields:  # its loss is divided by the sizes of the frames, which are small here
        fields["lambda_ort"] /= 1000
    if "epochs" in fields.get("training", {}):
        fields["training"] = fields["training"] | {"epochs": 2, "steps": 2, "batch_size": 8}
        if "milestones" in fields["training"]:
            fields["training"]["milestones"] = [1]
    if "evaluation" in fields:
        fields["evaluation"] = fields["evaluation"] | _SMALL_EVALUATION
        if "lipschitz" in fields["evaluation"]:
            fields["evaluation"] |= {"lipschitz": "fgsm", "lipschitz_images": 2}
    if "clipping" in fields:
        fields["clipping"] = fields["clipping"] | {"every": 2}
    return fields
