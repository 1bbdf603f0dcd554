"""What a spec may ask of a network's norms, and what a constraint can be bound to: the same."""

from typing import Any

import pytest

from ttsv.config.trial import TrialConfig
from ttsv.constraints import make_constraint
from ttsv.errors import ConfigError
from ttsv.models import create_model
from ttsv.models.conv_shape import LAYERS

CONSTRAINTS: dict[str, dict[str, Any]] = {
    "clip": {"constraint": "clip", "delta": 1.0},
    "clip linear": {"constraint": "clip", "delta": 1.0, "clipping": {"linear": True}},
    "no delta": {"constraint": "clip"},
    "divide": {"constraint": "divide", "division": {"conv": 1.0}},
    "divide linear": {"constraint": "divide", "division": {"linear": 1.0}},
    "divide batch norm": {"constraint": "divide", "division": {"batch_norm": 1.0}},
    "divide both": {"constraint": "divide", "division": {"conv": 1.0, "linear": 1.0}},
    "conv and batch norm": {"constraint": "divide", "division": {"conv": 1.0, "batch_norm": 1.0}},
}
NETWORKS = [("digits", "small-cnn", 1, 8, layer) for layer in LAYERS]
NETWORKS += [("digits", "wrn10-1", 1, 8, "soc"), ("digits", "wrn10-1", 1, 8, "aol-tt")]
NETWORKS += [("synthetic:3x32x32:10:100", "lipconvnet-5", 3, 32, layer) for layer in ("dense", "soc")]


@pytest.mark.parametrize(("dataset", "model", "channels", "size", "layer"), NETWORKS)
def test_a_trial_is_accepted_where_its_constraint_can_be_bound(
    dataset: str, model: str, channels: int, size: int, layer: str
) -> None:
    rank = 2 if layer.endswith("tt") else None
    options: dict[str, Any] = {"num_classes": 10, "in_channels": channels, "image_size": size}
    if model == "lipconvnet-5":
        options["width"] = 4  # of its own width its SOC layers take seconds to make
    made = create_model(model, layer=layer, rank=rank, **options)
    accepted, bound = {}, {}
    refused: list[ConfigError] = []
    for name, asked in CONSTRAINTS.items():
        config = TrialConfig.from_dict({"dataset": dataset, "model": model, "layer": layer, "rank": rank} | asked)
        try:
            config.check_images()
            accepted[name] = True
        except ConfigError as error:
            accepted[name] = False
            refused.append(error)
        try:
            make_constraint(config.canonical()).bind(made, (size, size), in_channels=channels)
            bound[name] = True
        except ConfigError:
            bound[name] = False
    assert accepted == bound
    assert {error.field for error in refused} <= {"constraint", "division.conv"}
    assert all(layer in error.fix for error in refused)
    assert all(accepted.values()) == (layer in ("dense", "tt"))


def test_a_refusal_says_what_to_do() -> None:
    trial = {"dataset": "digits", "model": "small-cnn", "layer": "soc", "constraint": "clip", "delta": 1.0}
    with pytest.raises(ConfigError, match=r"constraint = 'clip': must be none .*without clipping.linear: true"):
        TrialConfig.from_dict(trial).check_images()
    TrialConfig.from_dict(trial | {"rank": 2, "layer": "tt"}).check_images()
    TrialConfig.from_dict(trial | {"layer": "soc-tt", "delta": None}).check_images()


@pytest.mark.parametrize(("size", "norm", "right"), [(4, "L2", False), (2, "L1", False), (8, "L2", True)])
@pytest.mark.parametrize("attack", ["autoattack", "both"])
def test_autoattack_takes_no_images_without_room_for_its_tiles(size: int, norm: str, right: bool, attack: str) -> None:
    evaluation = {"attack": attack if norm == "L2" else "autoattack", "attack_norm": norm}
    trial = {"dataset": f"synthetic:1x{size}x{size}:10:100", "model": "single-conv", "evaluation": evaluation}
    if right:
        TrialConfig.from_dict(trial)
        return
    with pytest.raises(ConfigError, match=r"evaluation.attack_norm = .*must be Linf"):
        TrialConfig.from_dict(trial)
    TrialConfig.from_dict(trial | {"evaluation": evaluation | {"attack": "autoattack", "attack_norm": "Linf"}})
    TrialConfig.from_dict(trial | {"evaluation": evaluation | {"attack": "autoattack", "attack_version": "rand"}})


@pytest.mark.parametrize(
    ("field", "trial"),
    [
        ("layer", {"model": "resnet18", "layer": "aol"}),
        ("layer", {"model": "small-cnn1d", "layer": "soc"}),
        ("layer", {"model": "small-cnn", "layer": "aoc-tt", "rank": 1}),
        ("constraint", {"model": "small-cnn", "layer": "bcop"} | CONSTRAINTS["clip"]),
        ("division.conv", {"model": "lipconvnet-5", "layer": "cayley"} | CONSTRAINTS["divide"]),
        ("layer", {"model": "torchvision:resnet18", "layer": "bcop"}),
    ],
)
def test_what_takes_no_images_at_all_is_refused_of_data_sets_of_ones_own(field: str, trial: dict[str, Any]) -> None:
    """Of their images nothing is known before they are read, and what fails whatever they are is known all the same."""
    for dataset in ("npz:mine", "folder:mine"):
        with pytest.raises(ConfigError) as refused:
            TrialConfig.from_dict({"dataset": dataset} | trial).check_images()
        assert refused.value.field == field


@pytest.mark.parametrize("model", ["small-cnn", "small-cnn3d", "single-conv", "wrn10-1", "resnet18", "lipconvnet-5"])
@pytest.mark.parametrize("layer", LAYERS)
def test_what_takes_some_images_is_taken_with_data_of_ones_own(model: str, layer: str) -> None:
    trial = {"model": model, "layer": layer, "rank": 0.001 if layer == "aoc-tt" else 2}
    dims = 3 if model.endswith("3d") else 2
    channels = 5000 if model == "single-conv" else 3
    some = [f"synthetic:{channels}{f'x{size}' * dims}:2:20" for size in (16, 32) if channels * size**dims < 2**24]
    taken = []
    for dataset in some:
        try:
            TrialConfig.from_dict(trial | {"dataset": dataset}).check_images()
            taken.append(dataset)
        except ConfigError:
            pass
    own = TrialConfig.from_dict(trial | {"dataset": "npz:mine"})
    if taken:
        own.check_images()
    elif layer != "aoc-tt":
        with pytest.raises(ConfigError):
            own.check_images()
