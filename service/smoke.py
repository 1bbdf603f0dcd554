"""Specs of the paper's experiments made small: every path in minutes on a CPU, and no result."""

from typing import Any

_NETWORKS = {
    "wrn16-10": "wrn10-1",
    "vgg19": "vgg11",
    "lipconvnet-20": "lipconvnet-5",
    "lipconvnet-30": "lipconvnet-5",
}
_IMAGES = {"cifar10": "synthetic:3x32x32:10:100", "cifar100": "synthetic:3x32x32:100:1000"}
_RANKS = {128: 0.125, 192: 0.3, 256: 0.25, 320: 0.5}
"""As fractions, so that they mean something in smaller networks too."""
_MOST_VARIANTS = 4
_EVALUATION = {
    "attack": "pgd",
    "attack_images": 4,
    "corruptions": "generated",
    "corruption_images": 1,
}


def one_layer_images(channels: int) -> str:
    """The data set of a figure about one layer: images as its input has them."""
    return f"synthetic:{channels}x16x16:10:100"


def smaller(spec: dict[str, Any]) -> dict[str, Any]:
    """Two short epochs, in smaller networks on synthetic images, of the first variants, ranks and seeds."""
    variants = [_smaller(part) for part in spec["variants"]][:_MOST_VARIANTS]
    grid = dict(spec["grid"])
    if "seed" in grid:
        grid["seed"] = grid["seed"][:1]
    if "dataset" in grid:
        grid["dataset"] = [_IMAGES[name] for name in grid["dataset"]]
    if "rank" in grid:
        grid["rank"] = [_RANKS.get(rank, rank) for rank in grid["rank"]][:2]
    return {"base": _smaller(spec["base"]), "variants": variants, "grid": grid}


def _smaller(fields: dict[str, Any]) -> dict[str, Any]:
    fields = dict(fields)
    layers = {one_layer_images(channels): one_layer_images(channels // 8) for channels in range(8, 2048, 8)}
    for name, values in (("model", _NETWORKS), ("dataset", _IMAGES | layers), ("rank", _RANKS)):
        if name in fields:
            fields[name] = values.get(fields[name], fields[name])
    if "lambda_ort" in fields:  # its loss is divided by the sizes of the frames, which are small here
        fields["lambda_ort"] /= 1000
    if "epochs" in fields.get("training", {}):
        fields["training"] = fields["training"] | {"epochs": 2, "steps": 2, "batch_size": 8}
        if "milestones" in fields["training"]:
            fields["training"]["milestones"] = [1]
    if "evaluation" in fields:
        fields["evaluation"] = fields["evaluation"] | _EVALUATION
        if "lipschitz" in fields["evaluation"]:
            fields["evaluation"] |= {"lipschitz": "fgsm", "lipschitz_images": 2}
    if "clipping" in fields:
        fields["clipping"] = fields["clipping"] | {"every": 2}
    return fields
