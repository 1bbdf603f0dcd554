import itertools
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lazily import lazily
from ttsv.data.augment import Augmentation, Draws
from ttsv.errors import ConfigError

transforms = lazily("torchvision.transforms.v2.functional")

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards

MODES = {"zeros": "constant", "symmetric": "symmetric"}


def images(count: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)
    return made if dtype == torch.uint8 else made.to(dtype) / 255


def drawn(augmentation: Augmentation, count: int, dims: int, seed: int = 0) -> Draws:
    return augmentation.draw(count, [1] * dims, torch.Generator().manual_seed(seed))


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    channels=st.integers(1, 4),
    count=st.integers(1, 6),
    pad=st.integers(0, 5),
    padding=st.sampled_from(sorted(MODES)),
    flip=st.booleans(),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_equal_to_torchvision_on_the_same_draws(
    size: tuple[int, int],
    channels: int,
    count: int,
    pad: int,
    padding: str,
    flip: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    if padding == "symmetric":
        pad = min(pad, *size)  # torchvision mirrors once only
    augmentation = Augmentation(flip=flip, pad=pad, padding=padding)
    batch = images(count, channels, *size, seed=seed, dtype=dtype)
    draws = drawn(augmentation, count, 2, seed)
    expected = []
    for image, flipped, (top, left) in zip(batch, draws.flips, draws.corners.tolist(), strict=True):
        varied = transforms.horizontal_flip(image) if flipped else image
        varied = transforms.pad(varied, [pad], padding_mode=MODES[padding])
        expected.append(transforms.crop(varied, top, left, *size))
    found = augmentation.apply(batch, draws)
    assert found.dtype == dtype
    assert torch.equal(found, torch.stack(expected))


@given(
    dims=st.integers(1, 3),
    size=st.integers(1, 5),
    pad=st.integers(0, 12),
    padding=st.sampled_from(sorted(MODES)),
    seed=st.integers(0, 1000),
)
def test_equal_to_numpy_in_every_dimension_and_for_any_pad(
    dims: int, size: int, pad: int, padding: str, seed: int
) -> None:
    augmentation = Augmentation(flip=True, pad=pad, padding=padding)
    batch = images(3, 2, *[size] * dims, seed=seed)
    draws = drawn(augmentation, 3, dims, seed)
    for image, found, flipped, corner in zip(
        batch.numpy(), augmentation.apply(batch, draws), draws.flips, draws.corners.tolist(), strict=True
    ):
        varied = image[..., ::-1] if flipped else image
        varied = np.pad(varied, [(0, 0), *[(pad, pad)] * dims], mode=MODES[padding])  # type: ignore[call-overload]
        window = (slice(None), *(slice(start, start + size) for start in corner))
        assert np.array_equal(found.numpy(), varied[window])


def test_zeros_are_black_pixels_before_the_normalisation() -> None:
    white = torch.full((1, 3, 4, 4), 255, dtype=torch.uint8)
    corner = Draws(torch.tensor([False]), torch.tensor([[0, 8]]))
    found = Augmentation(pad=4).apply(white, corner)
    assert not found.any()
    normalised = (found / 255 - 0.5) / 0.25
    assert (normalised == -2).all()  # -mean / std


def test_draws_are_uniform_and_follow_the_generator() -> None:
    augmentation = Augmentation(flip=True, pad=1)
    draws = drawn(augmentation, 9000, 2, seed=5)
    assert draws.flips.double().mean() == pytest.approx(0.5, abs=0.02)
    counts = [
        ((draws.corners == torch.tensor(corner)).all(1)).sum().item()
        for corner in itertools.product(range(3), repeat=2)
    ]
    assert sum(counts) == 9000
    assert min(counts) > 850
    assert max(counts) < 1150
    again = drawn(augmentation, 9000, 2, seed=5)
    assert torch.equal(draws.flips, again.flips)
    assert torch.equal(draws.corners, again.corners)
    assert not torch.equal(draws.corners, drawn(augmentation, 9000, 2, seed=6).corners)


def test_without_flip_nothing_is_flipped_and_the_crops_are_the_same() -> None:
    both, crops = (drawn(Augmentation(flip=flip, pad=3), 50, 2) for flip in (True, False))
    assert both.flips.any()
    assert not crops.flips.any()
    assert torch.equal(both.corners, crops.corners)


def test_an_epochs_draws_are_applied_batch_by_batch() -> None:
    augmentation = Augmentation(flip=True, pad=2, padding="symmetric")
    batch, draws = images(20, 3, 6, 6), drawn(augmentation, 20, 2)
    whole = augmentation.apply(batch, draws)
    parts = [augmentation.apply(batch[part], draws[part]) for part in (slice(0, 8), slice(8, 16), slice(16, 24))]
    assert torch.equal(torch.cat(parts), whole)


def test_nothing_to_do_gives_the_very_images() -> None:
    batch = images(4, 3, 5, 5)
    assert Augmentation().apply(batch, drawn(Augmentation(), 4, 2)) is batch


def test_channels_last_and_sliced_images() -> None:
    augmentation = Augmentation(flip=True, pad=2)
    batch = images(6, 3, 5, 5)
    draws = drawn(augmentation, 6, 2)
    expected = augmentation.apply(batch, draws)
    assert torch.equal(augmentation.apply(batch.to(memory_format=torch.channels_last), draws), expected)
    wide = torch.zeros(12, 3, 5, 10, dtype=torch.uint8)
    wide[::2, :, :, ::2] = batch
    assert torch.equal(augmentation.apply(wide[::2, :, :, ::2], draws), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"pad": -1}, "augmentation.pad = -1"), ({"padding": "reflect"}, "augmentation.padding = 'reflect'")],
)
def test_wrong_options_are_named(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Augmentation(**options)  # type: ignore[arg-type]


def test_a_gpu_gives_the_same(card: "Cards") -> None:
    for padding in MODES:
        augmentation = Augmentation(flip=True, pad=4, padding=padding)
        batch, draws = images(64, 3, 32, 32), drawn(augmentation, 64, 2)
        expected = augmentation.apply(batch, draws)
        on_device, moved = batch.to(card.device), draws.to(card.device)
        work = partial(augmentation.apply, on_device, moved[0:64])
        assert card.synchronizations(work) == 0
        assert torch.equal(work().cpu(), expected)
