"""What is bold: Welch's t-test against SciPy, ties, and what has no error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.leaderboards.metrics import Measure, Metric, spread
from service.leaderboards.significance import LEVEL, chance, unbeaten
from tests.lazily import lazily

stats = lazily("scipy.stats")

measured = st.builds(
    lambda seeds, mean, std: Measure(seeds, mean, std, mean, mean),
    st.integers(2, 30),
    st.floats(0, 1),
    st.floats(1e-6, 1),
)


@given(one=measured, other=measured)
def test_the_chance_is_scipys(one: Measure, other: Measure) -> None:
    theirs = stats.ttest_ind_from_stats(
        one.mean, one.std, one.seeds, other.mean, other.std, other.seeds, equal_var=False
    ).pvalue
    assert chance(one, other) == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def of(*values: float) -> Measure:
    return spread(values)


class TestUnbeaten:
    def test_one_that_is_best_beyond_its_error(self) -> None:
        assert unbeaten([of(0.5, 0.51, 0.49), of(0.8, 0.81, 0.79)], Metric.ACCURACY) == [1]
        assert unbeaten([of(0.5, 0.51, 0.49), of(0.8, 0.81, 0.79)], Metric.LOSS) == [0]

    def test_those_within_the_error_share_it(self) -> None:
        rows = [of(0.8, 0.82, 0.78), of(0.79, 0.81, 0.8), of(0.3, 0.31, 0.29)]
        assert unbeaten(rows, Metric.ACCURACY) == [0, 1]

    def test_one_that_any_other_beats_does_not(self) -> None:
        """The leader's error is too large to tell them apart, that of the second is not."""
        rows = [of(0.9, 0.7), of(0.75, 0.751), of(0.6, 0.601), of(0.2, 0.201)]
        assert chance(rows[0], rows[2]) > LEVEL > chance(rows[1], rows[2])
        assert unbeaten(rows, Metric.ACCURACY) == [0, 1]

    @given(
        st.lists(
            st.builds(
                lambda seeds, mean, std: Measure(seeds, mean / 100, std, mean, mean),
                st.integers(2, 4),
                st.integers(0, 12),
                st.sampled_from([0.0, 1e-3, 1e-2, 0.03, 0.1]),
            ),
            min_size=1,
            max_size=12,
        )
    )
    def test_is_each_compared_with_each(self, rows: list[Measure]) -> None:
        found = [
            index
            for index, one in enumerate(rows)
            if not any(other.mean > one.mean and chance(one, other) < LEVEL for other in rows)
        ]
        expected = found if len(found) < len(rows) else []
        assert unbeaten(rows, Metric.ACCURACY) == expected
        for judged in range(len(rows) + 1):
            assert unbeaten(rows, Metric.ACCURACY, judged) == [index for index in expected if index < judged]

    def test_nothing_where_all_are_alike(self) -> None:
        assert unbeaten([of(0.5, 0.75), of(0.75, 0.5), of(0.5, 0.7)], Metric.ACCURACY) == []
        assert unbeaten([of(0.5, 0.75)], Metric.ACCURACY) == []

    def test_a_difference_that_is_not_printed_is_none(self) -> None:
        rows = [of(0.5, 0.5), of(0.50001, 0.50001), of(0.25, 0.25)]
        assert unbeaten(rows, Metric.ACCURACY) == [0, 1]  # of 50.00 % and 50.00 %

    def test_counts_of_small_networks_are_printed_whole(self) -> None:
        assert unbeaten([of(12_345, 12_345), of(12_400, 12_400), of(12_900, 12_900)], Metric.PARAMETERS) == [0]
        large = [of(1_234_600, 1_234_600), of(1_234_610, 1_234_610), of(1_300_000, 1_300_000)]
        assert unbeaten(large, Metric.PARAMETERS) == [0, 1]  # of 1.235 and 1.235 millions

    def test_one_seed_has_no_error(self) -> None:
        rows = [of(0.5, 0.51, 0.49), of(0.8, 0.81, 0.79)]
        assert unbeaten([*rows, of(0.9)], Metric.ACCURACY) == []  # who leads is not known to
        assert unbeaten([*rows, of(0.1)], Metric.ACCURACY) == [1]

    def test_what_is_absent_takes_no_part(self) -> None:
        assert unbeaten([None, of(0.5, 0.51, 0.49), of(0.8, 0.81, 0.79)], Metric.ACCURACY) == [2]
        assert unbeaten([None], Metric.ACCURACY) == []

    def test_without_deviation_means_differ_for_certain(self) -> None:
        assert unbeaten([of(2.0, 2.0), of(3.0, 3.0)], Metric.COMPRESSION) == [1]


@pytest.mark.parametrize("images", [359, 360, 1797, 10_000, 50_000])
def test_equal_counts_are_equal_means(images: int) -> None:
    """However many seeds they come from: sums of rounded shares are off by some 1e-16."""
    for count in range(1, images, max(1, images // 200)):
        whole = spread([count / images]).mean
        for seeds in (3, 8):
            others = [(count + step) / images for step in range(-(seeds // 2), seeds // 2 + 1)]
            if others[0] > 0 and others[-1] < 1:
                assert spread(others).mean == whole
