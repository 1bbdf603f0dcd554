"""How the paper's networks are trained (Senderovich et al., NeurIPS 2022): what each table and figure asks for.

Where the text and the authors' programs differ a `Protocol` says which of them is followed.
"""

from enum import StrEnum
from typing import TypedDict

from ttsv.config.fields import FieldValue


class Protocol(StrEnum):
    """Where the paper's text and its authors' programs differ: which of them is followed."""

    CODE = "code"
    """The programs, from which the printed numbers come: learning rates of WRN-16-10 fall to 0.2 (text: 0.1) of what
    they were, LipConvNet-30 with SOC-TT starts at 0.05 (0.1), two power iterations (one), division of VGG-19 as it is
    (at every rank), and the orthogonal loss is divided by the sum of 2 r2^2 (r1^2 + r2^2), to which the published
    lambda_ort belong."""
    TEXT = "text"
    """The text."""
    AUTHORS = "authors"
    """The programs, and the epoch chosen by its accuracy on the test images, as the authors did: not comparable. Of
    LipConvNets they evaluate the last epoch and keep the one of best certified accuracy."""


Part = dict[str, FieldValue]
"""Fields of a part of a trial, such as `training`."""


class PartialTrial(TypedDict, total=False):
    """The fields of a trial of which presets say something."""

    dataset: str
    model: str
    layer: str
    rank: float | None
    lambda_ort: float
    ort_normalizer: str
    constraint: str
    delta: float
    mean: list[float]
    std: list[float]
    training: Part
    augmentation: Part
    clipping: Part
    division: Part
    evaluation: Part


class PresetGrid(TypedDict):
    """What a preset says of its trials: as `service.specs.spec.ExperimentSpec` has it."""

    base: PartialTrial
    variants: list[PartialTrial]
    grid: dict[str, list[FieldValue]]


TIMED = "single-conv"
"""The network of which times alone are wanted."""
_SEEDS: list[FieldValue] = [3407, 3408, 3409]
"""The first is the default of the authors' programs."""

_SELECTED_LAMBDA = {5: 5e3, 20: 7e4, 30: 2e5}
"""Depth of a LipConvNet -> lambda_ort at the selected points of table 3."""

_TABLE3 = {
    5: [5e3, 8e3, 1e4, 3e4, 4e4, 5e4],
    20: [7e4, 8e4, 1e5, 2e5, 3e5, 4e5],
    30: [2e5, 3e5, 5e5, 7e5, 9e5, 1.2e6],
}


def _normalizer(protocol: Protocol) -> str:
    return "paper" if protocol is Protocol.TEXT else "code"


def _choice(protocol: Protocol) -> Part:
    """All training images are trained on; by the authors' protocol the best epoch on the test images counts, as it is.

    What is evaluated is projected once more where the last step was not followed by a projection, but not by theirs.
    """
    theirs = protocol is Protocol.AUTHORS
    return {"validation": "test", "select": "best" if theirs else "last", "final_projection": not theirs}


_EVALUATION: Part = {
    "attack": "autoattack",
    "attack_norm": "L2",
    "attack_eps": 0.5,
    "attack_version": "standard",
    "corruptions": "published",
    "certified": True,
}
"""The paper's columns, of all test images: AutoAttack (here in pixels), CIFAR-C, and certificates beside its p.r."""


def _lipconvnet(protocol: Protocol) -> PartialTrial:
    return {
        "dataset": "cifar10",
        "evaluation": _EVALUATION,
        "mean": [0.4914, 0.4822, 0.4465],
        "std": [0.2507],
        "ort_normalizer": _normalizer(protocol),
        "training": {
            "epochs": 200,
            "batch_size": 128,
            "optimizer": "sgd",
            "momentum": 0.9,
            "nesterov": False,
            "schedule": "multistep",
            "milestones": [100, 150],
            "gamma": 0.1,
            "validation": "test",
            **_lipconvnet_training(protocol),
        },
        "augmentation": {"flip": True, "pad": 4, "padding": "zeros"},
    }


def _lipconvnet_training(protocol: Protocol) -> Part:
    """The last epoch counts; by the authors' protocol that of best certified accuracy on the test images is kept, too.

    Their program for LipConvNets saves both together, and their scripts evaluate the last one. It scales SOC kernels by
    norms from a schedule of its own.
    """
    if protocol is not Protocol.AUTHORS:
        return {}
    return {"best_by": "certified", "keep_best": True, "soc_iterations": "code"}


def _soc(depth: int) -> PartialTrial:
    return {"model": f"lipconvnet-{depth}", "layer": "soc", "training": {"lr": 0.1, "weight_decay": 5e-4}}


def _soc_tt(depth: int, rank: int, lambda_ort: float, protocol: Protocol) -> PartialTrial:
    slow = depth == 20 or (depth == 30 and protocol is not Protocol.TEXT)
    return {
        "model": f"lipconvnet-{depth}",
        "layer": "soc-tt",
        "rank": rank,
        "lambda_ort": lambda_ort,
        "training": {"lr": 0.05 if slow else 0.1, "weight_decay": 0.0},
    }


def table1(protocol: Protocol) -> PresetGrid:
    """SOC beside SOC-TT of two ranks, in each LipConvNet at its selected lambda_ort."""
    variants: list[PartialTrial] = []
    for depth, lambda_ort in _SELECTED_LAMBDA.items():
        variants.append(_soc(depth))
        variants += [_soc_tt(depth, rank, lambda_ort, protocol) for rank in (128, 256)]
    return {"base": _lipconvnet(protocol), "variants": variants, "grid": {"seed": _SEEDS}}


def table3(protocol: Protocol) -> PresetGrid:
    """Its last column is the empirical Lipschitz constant."""
    base: PartialTrial = {**_lipconvnet(protocol), "evaluation": {**_EVALUATION, "lipschitz": "both"}}
    variants = [_soc_tt(depth, 256, value, protocol) for depth, values in _TABLE3.items() for value in values]
    return {"base": base, "variants": variants, "grid": {"seed": _SEEDS[:1]}}


def figure_lipschitz(protocol: Protocol) -> PresetGrid:
    """Table 3's networks, measured as there, beside those of SOC layers."""
    spec = table3(protocol)
    return {**spec, "variants": [*map(_soc, _TABLE3), *spec["variants"]]}


def _clip(delta: float) -> PartialTrial:
    """The authors' clip: one round, and what truncation to the kernel's taps leaves above delta stays."""
    return {
        "constraint": "clip",
        "delta": delta,
        "clipping": {"every": 100, "rounds": 1, "rescale": False},
    }


def _divide(conv: float, linear: float, batch_norm: float, iterations: int) -> PartialTrial:
    division: Part = {
        "conv": conv,
        "linear": linear,
        "batch_norm": batch_norm,
        "every": 1,
        "power_iterations": iterations,
        "batch_norm_eps": 1e-6,
    }
    return {"constraint": "divide", "division": division}


def _wide_resnet(dataset: str, division: PartialTrial, protocol: Protocol) -> PresetGrid:
    base: PartialTrial = {
        "dataset": dataset,
        "evaluation": _EVALUATION,
        "model": "wrn16-10",
        "layer": "tt",
        "lambda_ort": 1e5,
        "mean": [0.5],
        "std": [0.5],
        "ort_normalizer": _normalizer(protocol),
        "training": {
            "epochs": 200,
            "batch_size": 128,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 1e-4,
            "schedule": "multistep",
            "milestones": [60, 120, 160],
            "gamma": 0.1 if protocol is Protocol.TEXT else 0.2,
            **_choice(protocol),
        },
        "augmentation": {"flip": True, "pad": 4, "padding": "symmetric"},
    }
    variants: list[PartialTrial] = [{"constraint": "none"}, _clip(1.0), _clip(2.0), division]
    return {"base": base, "variants": variants, "grid": {"rank": [None, 192, 256, 320], "seed": _SEEDS[:1]}}


def _iterations(protocol: Protocol) -> int:
    return 1 if protocol is Protocol.TEXT else 2


def table2(protocol: Protocol) -> PresetGrid:
    """WRN-16-10 on CIFAR-10."""
    return _wide_resnet("cifar10", _divide(7.0, 7.0, 10.0, _iterations(protocol)), protocol)


def table4(protocol: Protocol) -> PresetGrid:
    """WRN-16-10 on CIFAR-100."""
    divided = _divide(10.0, 3.9, 6.1, _iterations(protocol))
    division: PartialTrial = {**divided, "training": {"weight_decay": 5e-5}}
    return _wide_resnet("cifar100", division, protocol)


def figure_vgg(protocol: Protocol) -> PresetGrid:
    """The paper's figure names no ranks: 192, 256 and 320 here, as for WRN-16-10.

    The programs divide the uncompressed network; the text has all three methods at every rank.
    """
    base: PartialTrial = {
        "model": "vgg19",
        "evaluation": _EVALUATION,
        "layer": "tt",
        "lambda_ort": 1e5,
        "mean": [0.5],
        "std": [0.5],
        "ort_normalizer": _normalizer(protocol),
        "training": {
            "epochs": 140,
            "batch_size": 128,
            "optimizer": "adam",
            "amsgrad": True,
            "eps": 1e-7,
            "lr": 1e-4,
            "weight_decay": 0.0,
            "schedule": "multistep",
            "milestones": [100, 120],
            "gamma": 0.1,
            **_choice(protocol),
        },
        "augmentation": {"flip": True, "pad": 4, "padding": "zeros"},
    }
    free: PartialTrial = {"constraint": "none"}
    clip, division = _clip(0.5), _divide(1.5, 1.5, 8.0, _iterations(protocol))
    variants: list[PartialTrial] = [{**method, "rank": None} for method in (free, clip, division)]
    for rank in (192, 256, 320):
        methods = (clip, free, division) if protocol is Protocol.TEXT else (clip, free)
        variants += [{**method, "rank": rank} for method in methods]
    return {"base": base, "variants": variants, "grid": {"dataset": ["cifar10", "cifar100"], "seed": _SEEDS[:1]}}


def _one_layer(layer: str, channels: list[int], ranks: list[FieldValue]) -> PresetGrid:
    """One convolution of n = 16 and no training to speak of: what is wanted are the times that every trial records."""
    base: PartialTrial = {
        "model": TIMED,
        "layer": layer,
        "training": {"epochs": 1, "steps": 1, "batch_size": 16},
    }
    variants: list[PartialTrial] = [{"dataset": one_layer_images(count)} for count in channels]
    return {"base": base, "variants": variants, "grid": {"rank": ranks}}


def figure_speedup(protocol: Protocol) -> PresetGrid:
    """Time and memory of the exact spectrum over channels and ranks."""
    return _one_layer("tt", [128, 192, 256, 384, 512], [None, 0.25, 1 / 3, 0.5])


def figure_soc_speedup(protocol: Protocol) -> PresetGrid:
    """Inference time of one SOC-TT layer over channels."""
    return _one_layer("soc-tt", [128, 256, 512, 1024], [None, 0.25, 0.5])


def one_layer_images(channels: int) -> str:
    """The data set of a figure about one layer: images as its input has them."""
    return f"synthetic:{channels}x16x16:10:100"
