"""What nodes have left, of whole cards and of parts, beside what runs there and what is promised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.queue.capacity import Floor, Place, Standing
from service.queue.shares import Amount

ONE_GPU, TWO_GPUS = Amount(1, 1), Amount(1, 2)
TWO_NODES = [Place("a", "gpu1", Amount(8, 2)), Place("b", "gpu2", Amount(8, 2))]


def _ways(left: tuple[int, ...], asked: list[int]) -> bool:
    """Whether all of these go onto cards with so many quarters left; more than four quarters are whole cards."""
    if not asked:
        return True
    first, *others = asked
    if first >= 4:
        whole = [at for at, has in enumerate(left) if has == 4][: first // 4]
        rest = tuple(0 if at in whole else has for at, has in enumerate(left))
        return len(whole) == first // 4 and _ways(rest, others)
    return any(_ways((*left[:at], has - first, *left[at + 1 :]), others) for at, has in enumerate(left) if has >= first)


class TestFloor:
    def test_two_halves_are_no_card(self) -> None:
        half = Amount(1, 0.5)
        floor = Floor(TWO_NODES[:1], [Standing(1, "a", half, ("0",)), Standing(1, "a", half, ("1",))])
        assert not floor.fits(ONE_GPU)
        assert floor.fits(half)
        assert floor.is_apart(ONE_GPU)
        shared = Floor(TWO_NODES[:1], [Standing(1, "a", half, ("0",)), Standing(1, "a", half, ("0",))])
        assert shared.fits(ONE_GPU)
        assert Floor(TWO_NODES[:1], [Standing(1, "a", TWO_GPUS, ("0", "1"))]).lack(half) == (
            "needs 0.5 GPUs on one node; none is free"
        )

    def test_the_rest_of_a_card_is_free_where_a_whole_one_is_promised(self) -> None:
        half = Amount(1, 0.5)
        floor = Floor(TWO_NODES[:1], [Standing(1, "a", half, ("0",))])
        assert floor.promise(ONE_GPU, "a", 9)
        assert floor.fits(half, "a")
        assert floor.in_the_way(half, "a", {1}) == []
        assert not floor.fits(ONE_GPU, "a")
        assert floor.promise(half, "a", 9)
        assert not floor.fits(half, "a")

    def test_a_part_is_promised_of_a_card_that_is_in_use(self) -> None:
        half = Amount(1, 0.5)
        floor = Floor(TWO_NODES[:1], [Standing(1, "a", half, ("0",))])
        assert floor.promise(half, "a", 9)
        assert floor.fits(ONE_GPU, "a")

    def test_a_card_that_is_being_cleared_is_not_given_away_in_parts(self) -> None:
        half = Amount(1, 0.5)
        floor = Floor(TWO_NODES[:1], [Standing(1, "a", half, ("0",)), Standing(1, "a", half, ("1",))])
        assert floor.promise(TWO_GPUS, "a", 9)
        assert not floor.fits(half, "a")

    @given(
        cards=st.lists(st.integers(0, 4), min_size=1, max_size=4),
        promises=st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=3),
        asked=st.sampled_from([1, 2, 3, 4, 8]),
    )
    def test_what_fits_beside_promises_leaves_these_as_possible_as_they_were(
        self, cards: list[int], promises: list[int], asked: int
    ) -> None:
        """All that can be tried: whoever says that there is room has a way to put it and all that was promised."""
        node = Place("a", "gpu1", Amount(99, len(cards)))
        standing = [Standing(1, "a", Amount(0, taken / 4), (str(card),)) for card, taken in enumerate(cards) if taken]
        floor = Floor([node], standing)
        held = [promise for promise in promises if floor.promise(Amount(0, promise / 4), "a", 9)]
        left = tuple(4 - taken for taken in cards)
        if floor.fits(Amount(0, asked / 4), "a") and _ways(left, held):
            assert _ways(left, [*held, asked])

    def test_a_trial_that_did_not_say_where_it_is_stands_where_there_is_room(self) -> None:
        floor = Floor(TWO_NODES, [Standing(1, None, TWO_GPUS), Standing(2, "a", TWO_GPUS), Standing(3, "x", TWO_GPUS)])
        assert not floor.fits(ONE_GPU)
        assert floor.fits(Amount(1))

    @pytest.mark.parametrize(
        ("needs", "said"),
        [
            (Amount(6), "needs 6 CPUs on one node; 10 are free, on different nodes"),
            (Amount(1, 1), "needs 1 GPU on one node; none is free"),
            (Amount(1, 0, 9), "needs 9 GiB of memory on one node; none is free"),
        ],
    )
    def test_what_is_lacking(self, needs: Amount, said: str) -> None:
        nodes = [Place("a", "gpu1", Amount(8, 1)), Place("b", "gpu2", Amount(8, 1))]
        floor = Floor(nodes, [Standing(1, "a", Amount(3, 1)), Standing(1, "b", Amount(3, 1))])
        assert floor.lack(needs) == said

    def test_each_has_too_little_of_something(self) -> None:
        nodes = [Place("a", "gpu1", Amount(8, 1)), Place("b", "gpu2", Amount(8, 1))]
        floor = Floor(nodes, [Standing(1, "a", Amount(7)), Standing(1, "b", Amount(1, 1))])
        assert floor.lack(Amount(4, 1)) == (
            "needs 4 CPUs, 1 GPUs and 0 GiB of memory on one node; each node has too little of one of them free"
        )
