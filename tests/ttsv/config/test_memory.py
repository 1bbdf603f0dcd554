"""What a trial takes of a card, by what of its configuration decides it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttsv.config.memory import TrialMemory, trial_memory
from ttsv.config.trial import TrialConfig
from ttsv.models.counts import network_cost

MIB = 2**20


def of(training: dict[str, Any] | None = None, **fields: Any) -> TrialMemory:
    base = {"dataset": "cifar10", "model": "vgg11"}
    found = trial_memory(TrialConfig.from_dict({**base, **fields, "training": training or {}}).canonical())
    assert found is not None
    return found


def test_what_is_held_beside_the_weights() -> None:
    plain = of()
    parameters = network_cost(
        "vgg11", layer="dense", rank=None, in_channels=3, image_size=32, num_classes=10
    ).parameters
    assert parameters is not None

    def more(**training: Any) -> float:
        return (of(training).training - plain.training) / (4 * parameters)

    assert more(momentum=0.0) == -1
    assert more(optimizer="adam") == 1
    assert more(optimizer="adamw", amsgrad=True) == 2
    assert more(ema=0.9) == pytest.approx(1, abs=0.01)
    assert more(select="best") == pytest.approx(1, abs=0.01)
    assert more(select="best", ema=0.9) == pytest.approx(2, abs=0.01)
    assert 0.1 < more(clip_gradient=1.0) < 1, "all gradients at once"
    assert more(precision="bf16") < 0
    assert more(precision="fp16") > more(precision="bf16")
    kept = of({"keep_best": True})
    assert kept.evaluation - plain.evaluation == pytest.approx(4 * parameters, rel=0.01)


def test_images_are_on_the_card_if_they_leave_room() -> None:
    found = of({"batch_size": 512})
    assert found.images == 50_000 * 3072
    assert of({"validation": "test"}).images == 60_000 * 3072
    assert found.most == found.training == found.within(2 * found.images)
    assert found.within(2 * found.images - 1) == found.training - found.images
    assert of(dataset="synthetic:3x32x32:10:1000").images == 800 * 3072


def test_clipping_and_attacks_take_memory_of_their_own() -> None:
    assert of(constraint="clip", delta=1.0).training > of().training
    assert of(evaluation={"attack": "pgd", "batch_size": 64}).evaluation < of(evaluation={"attack": "pgd"}).evaluation
    wide: dict[str, Any] = {"model": "wrn16-4"}
    assert of(**wide, evaluation={"lipschitz": "fgsm"}).evaluation > of(**wide).evaluation
    soc: dict[str, Any] = {"model": "lipconvnet-5", "layer": "soc"}
    attacked = of(**soc, evaluation={"attack": "autoattack"})
    assert attacked.most == attacked.evaluation > of(**soc).most, "twelve terms for 256 images"


@pytest.mark.parametrize("change", [{"model": "torchvision:resnet18"}, {"dataset": "npz:mine"}, {"layer": "aol"}])
def test_what_is_known_only_once_it_is_built_or_read(change: dict[str, Any]) -> None:
    fields = {"dataset": "cifar10", "model": "vgg11"} | change
    assert trial_memory(TrialConfig.from_dict(fields).canonical()) is None


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 64), st.integers(1, 64))
def test_it_grows_with_batch_and_never_falls_below_what_is_held(a: int, b: int, rank: int, other: int) -> None:
    small, large = sorted((a, b))
    fields: dict[str, Any] = {"layer": "tt", "rank": rank}
    less, more = of({"batch_size": small}, **fields), of({"batch_size": large}, **fields)
    # Merged frames, as larger batches have fewer of, are weights and no activations.
    assert less.training <= more.training + 16 * MIB
    assert less.evaluation == more.evaluation
    assert of({"batch_size": small}, layer="tt", rank=other).images == less.images
