"""What is bold: Welch's t-test against SciPy, ties, and what has no error."""

import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.leaderboards import significance
from service.leaderboards.metrics import Measure, Metric, spread, unit_of
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


@pytest.mark.parametrize("seeds", [2, 5, 5000])
def test_means_that_hardly_differ_do_so_by_chance(seeds: int) -> None:
    """There the continued fraction is taken from the other side: from this one it takes steps without end."""
    one, other = (Measure(seeds, mean, 0.1, mean, mean) for mean in (0.5, 0.5 + 1e-8))
    theirs = stats.ttest_ind_from_stats(0.5, 0.1, seeds, other.mean, 0.1, seeds, equal_var=False).pvalue
    assert chance(one, other) == pytest.approx(theirs, abs=1e-6)
    assert theirs > 0.999


def test_means_without_deviation_differ_for_certain_or_not_at_all() -> None:
    assert chance(Measure(3, 0.5, 0.0, 0.5, 0.5), Measure(2, 0.6, 0.0, 0.6, 0.6)) == 0.0
    assert chance(Measure(3, 0.5, 0.0, 0.5, 0.5), Measure(2, 0.5, 0.0, 0.5, 0.5)) == 1.0


@given(one=measured, other=measured, power=st.integers(-950, 950), metric=st.sampled_from(["lipschitz_bound", "ece"]))
@example(one=Measure(3, 0.5, 0.1, 0.5, 0.5), other=Measure(3, 0.9, 0.1, 0.9, 0.9), power=400, metric="lipschitz_bound")
@example(one=Measure(3, 0.5, 0.1, 0.5, 0.5), other=Measure(3, 0.9, 0.1, 0.9, 0.9), power=-400, metric="lipschitz_bound")
def test_the_size_of_values_decides_nothing(one: Measure, other: Measure, power: int, metric: str) -> None:
    """Squares of a deep network's bounds are beyond float64, those of its smallest values below."""
    size = 2.0**power
    sized = [Measure(n, mean * size, (std or 0.0) * size, 0.0, size) for n, mean, std, _, _ in (one, other)]
    assert chance(sized[0], sized[1]) == pytest.approx(chance(one, other), rel=1e-9, abs=1e-12)
    found = unbeaten(sized, Metric(metric))
    if power >= 0 and chance(one, other) < 0.9 * LEVEL and abs(one.mean - other.mean) > 0.01:
        assert found == [min((0, 1), key=lambda place: (one, other)[place].mean)]


def test_spreads_of_values_whose_squares_are_no_numbers() -> None:
    for size in (1e-200, 1.0, 1e200):
        found = of(1.0 * size, 2.0 * size, 4.0 * size)
        assert found.std is not None
        assert found.std / size == pytest.approx(statistics.stdev([1, 2, 4]), rel=1e-14)


def of(*values: float) -> Measure:
    return spread(values)


def compared_each(rows: list[Measure], metric: Metric) -> list[int]:
    """Those that no other beats, each compared with each and by what is printed of them."""
    sign, unit = 1 if metric.more_is_better else -1, unit_of(metric, [one.mean for one in rows])

    def beats(one: Measure, other: Measure) -> bool:
        apart = [f"{row.mean * unit.factor:.{unit.decimals}f}" for row in (one, other)]
        return sign * one.mean > sign * other.mean and apart[0] != apart[1] and chance(one, other) < LEVEL

    found = [index for index, one in enumerate(rows) if not any(beats(other, one) for other in rows)]
    return found if len(found) < len(rows) else []


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

    def test_one_that_a_second_with_more_seeds_beats_does_not(self) -> None:
        """The leader's error is smaller, but of so few seeds that it is told apart from nobody near."""
        rows = [Measure(2, 0.882, 0.012, 0, 0), Measure(12, 0.88, 0.03, 0, 0), Measure(12, 0.85, 0.03, 0, 0)]
        rows.append(Measure(2, 0.1, 0.01, 0, 0))
        assert chance(rows[0], rows[2]) > LEVEL > chance(rows[1], rows[2])
        assert unbeaten(rows, Metric.ACCURACY) == [0, 1]

    def test_one_that_a_second_with_a_larger_error_beats_does_not(self) -> None:
        """The leader's own error is so small that the degrees of freedom are the other's alone: fewer than of both."""
        rows = [Measure(2, 0.87, 1e-6, 0, 0), Measure(2, 0.865, 0.01414, 0, 0), Measure(2, 0.8, 0.01414, 0, 0)]
        assert chance(rows[0], rows[2]) > LEVEL > chance(rows[1], rows[2])
        assert unbeaten(rows, Metric.ACCURACY) == [0, 1]
        assert unbeaten([rows[0], *[rows[1]] * 3, rows[2]], Metric.ACCURACY) == [0, 1, 2, 3]

    @given(
        rows=st.lists(
            st.builds(
                lambda seeds, mean, std: Measure(seeds, mean / 100, std, mean, mean),
                st.one_of(st.integers(2, 4), st.integers(2, 15)),
                st.integers(0, 12),
                st.sampled_from([0.0, 1e-3, 1e-2, 0.02, 0.03, 0.1]),
            ),
            min_size=1,
            max_size=12,
        ),
        metric=st.sampled_from([Metric.ACCURACY, Metric.ECE]),
    )
    def test_is_each_compared_with_each(self, rows: list[Measure], metric: Metric) -> None:
        expected = compared_each(rows, metric)
        assert unbeaten(rows, metric) == expected
        for judged in range(len(rows) + 1):
            assert unbeaten(rows, metric, judged) == [index for index in expected if index < judged]

    @pytest.mark.parametrize("seeds", [(2, 3), (2, 12), (3, 4, 8), (7,), (5000, 2)])
    def test_among_many_near_the_level(self, seeds: tuple[int, ...]) -> None:
        """Where errors differ by orders of magnitude one may be beaten by a row that neither leads nor is surest."""
        rng = random.Random(0)
        for _ in range(60):
            rows = [
                Measure(rng.choice(seeds), 0.5 + round(rng.gauss(0, 0.02), 3), 10 ** rng.uniform(-4, -1.5), 0, 1)
                for _ in range(rng.choice([6, 12]))
            ]
            assert unbeaten(rows, Metric.ACCURACY) == compared_each(rows, Metric.ACCURACY), rows

    @given(
        seeds=st.tuples(st.integers(2, 12), st.integers(2, 12)),
        stds=st.tuples(st.sampled_from([0.0, 0.01, 0.02, 0.03]), st.floats(0.01, 0.03)),
    )
    @example(seeds=(2, 12), stds=(0.03, 0.01))  # hardly more than one degree of freedom
    def test_the_level_itself_decides(self, seeds: tuple[int, int], stds: tuple[float, float]) -> None:
        """However near to it: no bound that is cruder takes a mean for another."""
        one = Measure(seeds[0], 0.3, stds[0], 0, 0)

        def other(apart: float) -> Measure:
            return Measure(seeds[1], 0.3 + apart, stds[1], 0, 0)

        low, high = 0.0, 1.0
        while high - low > 1e-12:
            middle = (low + high) / 2
            low, high = (low, middle) if chance(one, other(middle)) < LEVEL else (middle, high)
        assert unbeaten([one, other(high * (1 + 1e-7))], Metric.ACCURACY) == [1]
        assert unbeaten([one, other(low * (1 - 1e-7))], Metric.ACCURACY) == []

    @pytest.mark.parametrize("power", [100, 150, 160, 200, 300])
    def test_one_that_is_far_from_all_hides_no_difference(self, power: int) -> None:
        """Such is the bound of a network without constraints: beside it squares of the others are below float64."""
        far = of(1.0 * 10.0**power, 1.25 * 10.0**power)
        rows = [of(1.0, 1.001), of(2.0, 2.001), of(2.5, 4.0), of(0.0, 1e-9), of(1e-9, 2e-9)]
        for others in (rows, rows[:3], rows[:2]):
            expected = compared_each(others, Metric.LIPSCHITZ_BOUND)
            for judged in range(1, len(others) + 1):
                found = unbeaten([*others, far], Metric.LIPSCHITZ_BOUND, judged)
                assert found == [index for index in expected if index < judged]
        assert unbeaten([*rows, of(10.0**power)], Metric.LIPSCHITZ_BOUND) == [2, 3, 4]
        alike = [of(1.0, 1.0), of(1.00001, 1.00001)]
        assert unbeaten([*alike, of(10.0**power, 10.0**power)], Metric.LIPSCHITZ_BOUND) == [0, 1]

    @given(
        rows=st.lists(
            st.builds(
                lambda seeds, mean, std, power: Measure(seeds, mean * 10.0**power, std * 10.0**power, 0, 0),
                st.integers(2, 5),
                st.integers(1, 4),
                st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
                st.sampled_from([0, 0, 100, 121, 140, 155, 160, 161, 300]),
            ),
            min_size=1,
            max_size=8,
        ),
        metric=st.sampled_from([Metric.COMPRESSION, Metric.LIPSCHITZ_BOUND]),
    )
    def test_whatever_lies_between_is_each_compared_with_each(self, rows: list[Measure], metric: Metric) -> None:
        assert unbeaten(rows, metric) == compared_each(rows, metric)

    def test_one_that_is_far_from_all_makes_no_difference(self) -> None:
        """Squares of the others' errors may be rounded to nothing where those of their differences are not."""
        far = of(1e161, 1.25e161)
        for mean in (1.1, 1.2, 1.3, 1.4):
            for std in (0.2, 0.3, 0.4):
                rows = [Measure(3, 1.0, std, 0, 0), Measure(3, mean, std, 0, 0), far]
                assert unbeaten(rows, Metric.LIPSCHITZ_BOUND) == compared_each(rows, Metric.LIPSCHITZ_BOUND), rows

    def test_nothing_is_better_than_no_error(self) -> None:
        assert unbeaten([of(0.0, 0.0), of(0.5, 0.51)], Metric.ECE) == [0]

    def test_nothing_where_all_are_alike(self) -> None:
        assert unbeaten([of(0.5, 0.75), of(0.75, 0.5), of(0.5, 0.7)], Metric.ACCURACY) == []
        assert unbeaten([of(0.5, 0.75)], Metric.ACCURACY) == []

    def test_a_difference_that_is_not_printed_is_none(self) -> None:
        rows = [of(0.5, 0.5), of(0.50001, 0.50001), of(0.25, 0.25)]
        assert unbeaten(rows, Metric.ACCURACY) == [0, 1]  # of 50.00 % and 50.00 %

    @pytest.mark.parametrize(
        ("metric", "least", "digit"),
        [
            (Metric.ACCURACY, 0.5, 1e-4),
            (Metric.LIPSCHITZ_BOUND, 2e3, 1e-4),
            (Metric.LIPSCHITZ_BOUND, 0.1, 1e-4),
            (Metric.PARAMETERS, 2e6, 1e3),
        ],
    )
    @given(
        places=st.lists(st.integers(0, 40), min_size=2, max_size=6),
        share=st.sampled_from([0.0, 1e-3, 0.05]),
        seeds=st.integers(2, 9),
    )
    @example(places=[5, 14, 40], share=0.0, seeds=2)  # nine tenths of a digit apart, and printed alike
    @example(places=[4, 6, 40], share=0.0, seeds=2)  # two tenths, and printed otherwise
    def test_what_is_printed_alike_is_no_difference(
        self, metric: Metric, least: float, digit: float, places: list[int], share: float, seeds: int
    ) -> None:
        """Whatever lies between two means: a digit or less."""
        assert digit == pytest.approx(10.0 ** -unit_of(metric, [least]).decimals / unit_of(metric, [least]).factor)
        means = [least + digit * (place / 10 + 0.003) for place in places]
        rows = [Measure(seeds, mean, share * digit, mean, mean) for mean in means]
        assert unbeaten(rows, metric) == compared_each(rows, metric)

    def test_means_are_printed_only_where_that_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A page of a board has forty columns. The first and the last one tell whether all are printed alike."""
        printed: list[float] = []

        def noted(mean: float, form: str) -> str:
            printed.append(mean)
            return format(mean, form)

        monkeypatch.setattr(significance, "format", noted, raising=False)
        rng = random.Random(1)

        def prints(rows: list[Measure]) -> int:
            printed.clear()
            assert unbeaten(rows, Metric.ACCURACY) == compared_each(rows, Metric.ACCURACY)
            assert len(printed) == len(set(printed)), "each once"
            return len(printed)

        digits = [Measure(3, 0.5 + 1.5e-4 * place, 1e-6, 0, 1) for place in range(50)]
        sure = [Measure(3, 0.5 + rng.gauss(0, 0.02), 0.01, 0, 1) for _ in range(200)]
        mixed = [Measure(rng.choice((2, 3, 5)), rng.gauss(0.5, 0.1), 10 ** rng.uniform(-3, -1), 0, 1) for _ in sure]
        assert [prints(digits), prints(sure), prints(mixed)] == [2] * 3
        assert prints([Measure(2, 0.5 + 1e-7 * place, 1e-12, 0, 1) for place in range(9)]) == 2
        near = [Measure(2, mean, 1e-9, 0, 1) for mean in (0.50001, 0.50003, 0.4) for _ in range(4)]
        assert prints(near) == 3

    def test_counts_of_small_networks_are_printed_whole(self) -> None:
        assert unbeaten([of(12_345, 12_345), of(12_400, 12_400), of(12_900, 12_900)], Metric.PARAMETERS) == [0]
        large = [of(1_234_600, 1_234_600), of(1_234_610, 1_234_610), of(1_300_000, 1_300_000)]
        assert unbeaten(large, Metric.PARAMETERS) == [0, 1]  # of 1.235 and 1.235 millions

    def test_one_seed_has_no_error(self) -> None:
        rows = [of(0.5, 0.51, 0.49), of(0.8, 0.81, 0.79)]
        assert unbeaten([*rows, of(0.9)], Metric.ACCURACY) == []  # who leads is not known to
        assert unbeaten([*rows, of(0.1)], Metric.ACCURACY) == [1]
        assert unbeaten([*rows, of(0.1)], Metric.ECE) == []
        assert unbeaten([*rows, of(0.9)], Metric.ECE) == [0]

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
