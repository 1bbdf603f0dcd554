"""A batch of one image is refused before anything runs where a batch norm would find no variance in it."""

import pytest
import torch

from ttsv.config.trial import TrialConfig
from ttsv.data.catalog import training_images
from ttsv.errors import ConfigError
from ttsv.models import create_model


def accepts(dataset: str, model: str, **training: object) -> bool:
    config = TrialConfig.from_dict({"dataset": dataset, "model": model, "training": training})
    try:
        config.check_images()
    except ConfigError as error:
        refused = error
    else:
        return True
    assert refused.field == "training.batch_size"
    assert f"no image alone in a batch: {model} " in refused.fix
    return False


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("single-conv", 1),
        ("small-cnn", 4),
        ("small-cnn", 8),
        ("wrn10-1", 4),
        ("wrn10-1", 8),
        ("resnet18", 8),
        ("resnet18", 16),
        ("vgg11", 32),
        ("lipconvnet-5", 32),
        ("torchvision:resnet18", 32),
        ("torchvision:resnet18", 64),
        ("torchvision:squeezenet1_1", 32),
        ("torchvision:regnet_x_400mf", 32),
        ("torchvision:regnet_x_400mf", 33),
    ],
)
def test_what_is_accepted_is_what_can_be_trained_on_one_image(model: str, size: int) -> None:
    network = create_model(model, in_channels=3, image_size=size, num_classes=5).train()
    try:
        network(torch.rand(1, 3, size, size))
        right = True
    except ValueError:
        right = False
    assert accepts(f"synthetic:3x{size}x{size}:5:200", model, batch_size=1) == right


def test_the_last_batch_counts_where_an_epoch_comes_to_it() -> None:
    dataset = "synthetic:3x4x4:5:200"
    assert training_images(dataset) == 145
    assert not accepts(dataset, "wrn10-1", batch_size=48)
    assert accepts(dataset, "wrn10-1", batch_size=48, steps=3)
    assert not accepts(dataset, "wrn10-1", batch_size=48, steps=4)
    assert not accepts(dataset, "wrn10-1", batch_size=48, steps=3, recalibrate=True)  # through all of them
    assert accepts(dataset, "wrn10-1", batch_size=48, validation="test")  # of 160 images 16 are left
    assert accepts(dataset, "wrn10-1", batch_size=47)
    assert accepts(dataset, "wrn10-1", batch_size=145)
    assert accepts(dataset, "single-conv", batch_size=48)
