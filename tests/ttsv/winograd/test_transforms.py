from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from ttsv.winograd.jit import compile_together
from ttsv.winograd.transforms import Frame, Tiles, TileTransform

MATRICES = {
    "tall": torch.tensor([[1.0, -0.5], [0.0, 2.0], [-1.0, 1.0 / 3]], dtype=torch.float64),
    "wide": torch.tensor([[-1.0, 0.0, 0.25], [1.5, 1.0, -1.0]], dtype=torch.float64),
    "square": torch.tensor([[0.0, -3.0], [1.0, 0.1]], dtype=torch.float64),
}
COUNTS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
CHANNELS = st.sampled_from([1, 3, 4, 15, 16, 17, 32, 39])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def separate(values: Tensor) -> Tiles:
    """Tiles (images, rows, columns, channels, y, x), each on its own, as they lie in memory."""
    image, row, column, channel, y, x = values.stride()
    return Tiles(values, 0, (image, row, column, y, x, channel))


def exact(matrix: Tensor, tiles: Tensor) -> Tensor:
    return matrix @ tiles.double() @ matrix.T


def channels_last(tiles: Tensor) -> Tensor:
    return tiles.movedim(3, -1).contiguous().movedim(-1, 3)


TRANSFORMS = {name: TileTransform(matrix) for name, matrix in MATRICES.items()}
APART = {name: TileTransform(matrix, apart=True) for name, matrix in MATRICES.items()}
FROM_IMAGES = {name: TileTransform(matrix, framed="source") for name, matrix in MATRICES.items()}
TO_IMAGES = {name: TileTransform(matrix, framed="target") for name, matrix in MATRICES.items()}
ONTO_IMAGES = {name: TileTransform(matrix, framed="target", add=True) for name, matrix in MATRICES.items()}


@pytest.fixture(scope="module", autouse=True)
def all_compiled() -> None:
    made = (TRANSFORMS, APART, FROM_IMAGES, TO_IMAGES, ONTO_IMAGES)
    compile_together([transform for transforms in made for transform in transforms.values()])


@pytest.mark.parametrize("name", MATRICES)
class TestAgainstFloat64:
    @examples(20)
    @given(counts=COUNTS, channels=CHANNELS)
    def test_of_separate_tiles(self, name: str, counts: tuple[int, int, int], channels: int) -> None:
        matrix = MATRICES[name]
        rows, columns = matrix.shape
        source = drawn(*counts, channels, columns, columns)
        target = channels_last(torch.full((*counts, channels, rows, rows), torch.nan))
        TRANSFORMS[name](separate(channels_last(source)), separate(target), counts, channels)
        torch.testing.assert_close(target.double(), exact(matrix, source), rtol=1e-6, atol=2e-6)
        again = torch.full_like(target, torch.nan)
        APART[name](separate(source), separate(again), counts, channels)
        assert torch.equal(again, target)

    @examples(20)
    @given(counts=COUNTS, channels=CHANNELS, size=st.tuples(st.integers(1, 9), st.integers(1, 9)), data=st.data())
    def test_of_tiles_that_overlap_and_reach_over_the_edge(
        self, name: str, counts: tuple[int, int, int], channels: int, size: tuple[int, int], data: st.DataObject
    ) -> None:
        matrix, step = MATRICES[name], data.draw(st.integers(1, 3))
        corner = data.draw(st.tuples(st.integers(-3, 2), st.integers(-3, 2)))
        rows, columns = matrix.shape
        images = drawn(counts[0], *size, channels)
        image, y, x, channel = images.stride()

        def framed(values: Tensor) -> Tiles:
            start = corner[0] * y + corner[1] * x
            return Tiles(values, start, (image, step * y, step * x, y, x, channel), Frame(corner, step, size))

        def windows(edge: int) -> Iterator[tuple[tuple[int, int], int, int, int, int]]:
            for r in range(counts[1]):
                for c in range(counts[2]):
                    for i in range(edge):
                        for j in range(edge):
                            place = corner[0] + r * step + i, corner[1] + c * step + j
                            if 0 <= place[0] < size[0] and 0 <= place[1] < size[1]:
                                yield place, r, c, i, j

        tiles = torch.zeros(*counts, channels, columns, columns)
        for place, r, c, i, j in windows(columns):
            tiles[:, r, c, :, i, j] = images[:, place[0], place[1]]
        target = channels_last(torch.full((*counts, channels, rows, rows), torch.nan))
        FROM_IMAGES[name](framed(images), separate(target), counts, channels)
        torch.testing.assert_close(target.double(), exact(matrix, tiles), rtol=1e-6, atol=2e-6)

        source = channels_last(drawn(*counts, channels, columns, columns, seed=1))
        results = exact(matrix, source)
        last, total = images.double(), images.double()
        for place, r, c, i, j in windows(rows):
            last[:, place[0], place[1]] = results[:, r, c, :, i, j]
            total[:, place[0], place[1]] += results[:, r, c, :, i, j]
        written, added = images.clone(), images.clone()
        TO_IMAGES[name](separate(source), framed(written), counts, channels)
        ONTO_IMAGES[name](separate(source), framed(added), counts, channels)
        torch.testing.assert_close(written.double(), last, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(added.double(), total, rtol=1e-6, atol=1e-5)


def test_what_is_not_finite_stays_so_and_alone() -> None:
    source = drawn(1, 2, 1, 2, 2, 20).movedim(-1, 3)
    source[0, 1, 0, 7] = torch.inf
    source[0, 0, 0, 18] = torch.nan
    target = channels_last(torch.zeros(1, 2, 1, 20, 3, 3))
    TRANSFORMS["tall"](separate(source), separate(target), (1, 2, 1), 20)
    spoilt = ~target.isfinite().all(-1).all(-1)
    assert spoilt.nonzero().tolist() == [[0, 0, 0, 18], [0, 1, 0, 7]]
