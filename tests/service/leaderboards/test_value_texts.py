"""Values as text for people: short, and different ones never alike."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.leaderboards.protocols import Difference
from service.leaderboards.value_texts import column_texts, exact_text, in_words, number_texts


class TestNumbers:
    @pytest.mark.parametrize(
        ("values", "texts"),
        [
            ([900000.0, 1200000.0], ["900000", "1200000"]),
            ([0.1, 0.05, 1], ["0.10", "0.05", "1.00"]),
            ([192, 256], ["192", "256"]),
            ([1e-5, 5e-4], ["0.00001", "0.0005"]),
            ([1e-12, 1.5], ["1e-12", "1.5"]),
            ([1 / 3, 0.25], ["0.333", "0.250"]),
            ([0.0400584123, 0.0351287654, 0.0351], ["0.04006", "0.03513", "0.0351"]),
            ([1.12345, 1.12346, 2 / 3], ["1.12345", "1.12346", "0.667"]),
            ([1e-7, 0.1, 1e5], ["0.0000001", "0.1", "100000"]),
            ([0.0001, 0.1, 1e5], ["0.0001", "0.1", "100000"]),
            ([0.12345678, 0.12345679], ["0.12345678", "0.12345679"]),
            ([1e20, 1.0], ["1e+20", "1"]),
            ([0.9996123, 0.9], ["0.9996", "0.9000"]),
            ([0.99999999], ["0.99999999"]),
            ([123.456789], ["123.5"]),
            ([], []),
        ],
    )
    def test_numbers_of_a_column_share_them(self, values: list[float], texts: list[str]) -> None:
        assert number_texts(values) == texts

    def test_channels_and_a_share_of_them_have_no_digits_in_common(self) -> None:
        assert column_texts([8, 0.5, None, 0.25, 192]) == ["8", "0.50", "-", "0.25", "192"]


RADII = [36 / 255 * number for number in range(1, 13)]
"""Twelve radii that nobody typed."""
NUMBERS = st.one_of(st.integers(1, 500), st.floats(1e-9, 1e9), st.sampled_from([*RADII, 1.0, 0.1412]))
LISTS = st.lists(NUMBERS, max_size=9) | st.integers(0, 2**12).map(
    lambda odd: [one + 1e-7 * (odd >> at & 1) for at, one in enumerate(RADII)]
)


class TestLists:
    @pytest.mark.parametrize(
        ("lists", "texts"),
        [
            ([[*RADII[:3], 1.0], [60, 120, 160], []], ["[0.141, 0.282, 0.424, 1]", "[60, 120, 160]", "[]"]),
            ([RADII, RADII[:11]], ["[0.141, 0.282, …, 1.69] (12)", "[0.141, 0.282, …, 1.55] (11)"]),
            # What else tells one from another is shown, and of its digits what that takes.
            (
                [RADII, [*RADII[:6], 1.0, *RADII[7:]]],
                [f"[0.141, 0.282, …, {one}, …, 1.69] (12)" for one in ("0.988", 1)],
            ),
            ([[0.12345678, 1 / 3], [0.1235, 1 / 3]], ["[0.123, 0.333]", "[0.1235, 0.333]"]),
            ([[0.12345678], [0.12345679]], ["[0.12345678]", "[0.12345679]"]),
            ([[0.99999999, 1234567.125]], ["[0.99999999, 1234567.125]"]),
        ],
    )
    def test_they_are_short(self, lists: list[list[float]], texts: list[str]) -> None:
        assert column_texts(lists) == texts

    @given(st.lists(LISTS, max_size=8))
    def test_different_ones_differ_and_say_their_numbers(self, lists: list[list[float]]) -> None:
        texts = column_texts(lists)
        assert len(set(texts)) == len({tuple(one) for one in lists})
        for numbers, text in zip(lists, texts, strict=True):
            assert json.loads(exact_text(numbers)) == numbers
            said = re.findall(r"[^\[\], ]+", text.partition("]")[0])
            assert len(text) <= 2 + 22 * len(said) + 5
            if "…" not in said:
                assert len(said) == len(numbers)
            shown = [*numbers[:2], *numbers[-1:]] if "…" in said else numbers
            for number, told in zip(shown, [*said[:2], *said[-1:]] if "…" in said else said, strict=True):
                assert any(float(f"{number:.{digits}g}") == float(told) for digits in range(3, 18))


class TestWords:
    def test_a_record_is_said_in_words(self) -> None:
        assert in_words({"pgd": {"eps": 0.03, "steps": 10}}) == "pgd (eps 0.03, steps 10)"
        assert in_words({"split": "test", "images": None, "sizes": [1, 2]}) == "split test, images none, sizes [1, 2]"
        said = str(Difference("attacks", {"pgd": {"eps": 0.03}}, None))
        assert said == "attacks: pgd (eps 0.03) here, none there"

    def test_two_values_that_differ_are_said_otherwise(self) -> None:
        exact, rounded = 8 / 255, 0.0313725
        assert str(Difference("eps", exact, rounded)) == "eps: 0.03137255 here, 0.0313725 there"
        assert str(Difference("pgd", {"eps": exact}, None)) == "pgd: eps 0.0313725 here, none there"
        following = math.nextafter(exact, 1)
        assert len(set(Difference("pgd", {"eps": exact}, {"eps": following}).said)) == 2

    def test_lists_that_differ_are_said_otherwise(self) -> None:
        here, there = Difference("radii", RADII, [*RADII[:6], 1.0, *RADII[7:]]).said
        assert here != there
        assert in_words({"radii": RADII}) == "radii [0.141, 0.282, …, 1.69] (12)"
        nested = Difference("certified", {"radii": RADII}, {"radii": [*RADII[:6], 1.0, *RADII[7:]]}).said
        assert nested[0] != nested[1]
