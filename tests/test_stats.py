"""Numbers that a reader can check by hand or against the tables of docs/statistics."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from orchestrator import stats

SPEC_8 = [math.log(124.8), math.log(46.8)]


def test_importing_the_statistics_does_not_import_scipy_stats():
    code = "import sys, orchestrator.stats; print('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# --- location and spread -------------------------------------------------------------------------------------------


def test_nothing_has_no_mean_and_one_boot_has_no_spread():
    assert stats.mean([]) is None
    assert stats.sd([]) is None
    assert stats.sd([4.0]) is None
    assert stats.mean_interval([4.0]) is None
    assert stats.spread_bounds([4.0]) is None


def test_the_sd_divides_by_n_minus_one():
    assert stats.sd([1.0, 2.0, 3.0, 4.0]) == pytest.approx(math.sqrt(5 / 3))


@pytest.mark.parametrize("n", [2, 3, 7, 1000])
def test_equal_values_have_exactly_no_spread(n):
    assert stats.sd([math.log(75.9)] * n) == 0.0
    assert stats.mean([math.log(75.9)] * n) == math.log(75.9)


def test_the_interval_of_the_mean_is_students():
    # 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.303; 4.303/√3 = 2.484
    assert stats.mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)


# --- does it reproduce? --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "upper", "lower"),
    [
        (2, 15.95, 0.510),
        (3, 4.415, 0.578),
        (4, 2.920, 0.620),
        (5, 2.372, 0.649),
        (6, 2.089, 0.672),
        (8, 1.797, 0.705),
        (10, 1.645, 0.729),
        (15, 1.460, 0.769),
        (20, 1.370, 0.794),
    ],
)
def test_the_table_of_bounds(n, upper, lower):
    low, high = stats.spread_factors(n)
    assert high == pytest.approx(upper, rel=5e-4)
    assert low == pytest.approx(lower, rel=2e-3)


@pytest.mark.parametrize(("n", "factor"), [(6, 2.685), (8, 2.182), (10, 1.935)])
def test_the_vouch_looks_of_the_nightly_plan(n, factor):
    assert stats.spread_factors(n, 0.05 / 3, 0.05 / 3)[1] == pytest.approx(factor, rel=5e-4)


def test_two_boots_of_the_seed_refute_spec_8():
    spread = stats.spread_bounds(SPEC_8)
    assert spread is not None
    assert (spread.sd, spread.lower, spread.upper) == pytest.approx((0.694, 0.354, 11.06), rel=1e-3)
    assert spread.sd * stats.spread_factors(2, 0.05 / 6)[0] == pytest.approx(0.263, rel=1e-3)
    assert stats.reproducibility(2, spread.sd, 0.05) == "DOES_NOT_REPRODUCE"


@pytest.mark.parametrize(
    ("n", "sd", "answer"),
    [
        (0, None, "UNDECIDED"),
        (1, None, "UNDECIDED"),
        (5, 0.0, "UNDECIDED"),  # equal values, but five boots vouch for nothing
        (6, 0.0, "REPRODUCES"),
        (6, 0.0239, "REPRODUCES"),  # 0.0239 · 2.0893 = 0.04993
        (6, 0.0240, "UNDECIDED"),  # 0.0240 · 2.0893 = 0.05014
        (2, 0.0979, "UNDECIDED"),  # 0.0979 · 0.5102 = 0.04995
        (2, 0.0981, "DOES_NOT_REPRODUCE"),  # 0.0981 · 0.5102 = 0.05005
    ],
)
def test_three_answers_and_their_borders(n, sd, answer):
    assert stats.reproducibility(n, sd, 0.05) == answer


def test_a_look_without_an_alpha_of_its_own_never_decides():
    assert stats.reproducibility(2, 0.7, 0.05, refute_alpha=0) == "UNDECIDED"
    assert stats.reproducibility(9, 0.001, 0.05, vouch_alpha=0) == "UNDECIDED"


@pytest.mark.parametrize(
    ("n", "sd", "more"),
    [
        (1, None, None),
        (2, 0.694, 0),
        (6, 0.001, 0),
        (2, 0.001, 4),
        (5, 0.0, 1),
        (3, 0.0303, 7),  # U/s at n = 10 is 1.645: 0.04984; at 9 it is 1.711: 0.05184
        (3, 0.05, None),  # L < s < U for every n: the spread is the tolerance itself
    ],
)
def test_further_boots(n, sd, more):
    assert stats.more_boots(n, sd, 0.05) == more


@pytest.mark.parametrize("n", [2, 3, 6, 9])
@pytest.mark.parametrize("sd", [0.003, 0.02, 0.03, 0.04, 0.047, 0.054, 0.07, 0.09])
def test_further_boots_are_the_first_number_that_settles(n, sd):
    def settled(boots):
        return stats.reproducibility(boots, sd, 0.05) != "UNDECIDED"

    counted = next(k for k in range(n, 10_000) if settled(k)) - n
    assert stats.more_boots(n, sd, 0.05) == counted


@pytest.mark.parametrize(("n", "percent"), [(1, 95), (2, 78), (3, 63), (5, 45), (6, 39), (8, 31), (10, 26)])
def test_what_agreement_leaves_unseen(n, percent):
    rate = stats.hidden_mode_rate(n)
    assert rate is not None
    assert round(100 * rate) == percent
    assert (1 - rate) ** n == pytest.approx(0.05)  # so often n boots in a row miss a mode of that rate


def test_no_boot_agrees_with_nothing():
    assert stats.hidden_mode_rate(0) is None
    assert stats.median_coverage(0) is None


def test_six_boots_give_a_95_percent_interval_of_the_median():
    assert stats.median_coverage(5) == 0.9375
    assert stats.median_coverage(6) == 0.96875


def test_modes_are_the_widest_gap_when_it_is_wide_enough():
    two = stats.modes([math.log(v) for v in (124.8, 46.8, 122.0)], 0.05)
    assert two is not None
    assert (len(two.slow), len(two.fast)) == (1, 2)
    assert two.gap == pytest.approx(math.log(122.0 / 46.8))
    assert stats.modes([1.0, 1.04], 0.05) is None
    assert stats.modes([1.0, 1.06], 0.05) is not None
    assert stats.modes([1.0, 1.06], 0.05, within_sd=0.02) is None  # 4 · 0.02 = 0.08
    assert stats.modes([1.0], 0.05) is None


# --- boots that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "percent"), [(2, 22), (3, 37), (6, 61), (10, 74)])
def test_no_failure_in_n_boots_leaves_a_success_rate_of(n, percent):
    bounds = stats.clopper_pearson(n, n, sided=1)
    assert bounds is not None
    assert bounds[0] == pytest.approx(0.05 ** (1 / n))
    assert round(100 * bounds[0]) == percent
    assert bounds[1] == 1.0


def test_clopper_pearson_agrees_with_the_binomial_tails():
    bounds = stats.clopper_pearson(2, 7)
    assert bounds is not None
    low, high = bounds
    at_least_2 = 1 - (1 - low) ** 7 - 7 * low * (1 - low) ** 6
    at_most_2 = sum(math.comb(7, k) * high**k * (1 - high) ** (7 - k) for k in range(3))
    assert at_least_2 == pytest.approx(0.025)
    assert at_most_2 == pytest.approx(0.025)


def test_clopper_pearson_of_no_trials_is_none_and_of_nonsense_is_refused():
    assert stats.clopper_pearson(0, 0) is None
    with pytest.raises(ValueError, match="3 of 2"):
        stats.clopper_pearson(3, 2)


# --- which is faster? ----------------------------------------------------------------------------------------------


def test_welch_by_hand():
    # a: mean 2, s² = 1; b: mean 6, s² = 4; se² = 1/3 + 4/3 = 5/3; df = (5/3)²/((1/3)²/2 + (4/3)²/2) = 2.941
    result = stats.welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert result is not None
    assert result.value == pytest.approx(-4)
    assert result.se == pytest.approx(math.sqrt(5 / 3))
    assert result.df == pytest.approx(50 / 17)
    assert result.t == pytest.approx(-4 / math.sqrt(5 / 3))
    assert result.p == pytest.approx(0.05477, abs=5e-5)  # scipy.stats.ttest_ind(…, equal_var=False) says the same
    assert result.p_less == pytest.approx(result.p / 2)
    assert result.interval[0] < -4 < result.interval[1]


def test_welch_needs_two_boots_a_side():
    assert stats.welch([1.0], [2.0, 3.0]) is None
    assert stats.welch([], []) is None


def test_equal_values_differ_for_certain_or_not_at_all():
    apart = stats.welch([1.0, 1.0], [2.0, 2.0, 2.0])
    same = stats.welch([math.log(0.3)] * 2, [math.log(0.3)] * 3)
    assert apart is not None
    assert same is not None
    assert (apart.p, apart.p_less, apart.interval, apart.df) == (0.0, 0.0, (-1.0, -1.0), None)
    assert (same.p, same.p_less, same.value) == (1.0, 1.0, 0.0)


def test_one_side_without_spread_leaves_the_other_sides_degrees_of_freedom():
    result = stats.welch([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert result is not None
    assert result.df == pytest.approx(2)


def test_tiny_spreads_do_not_underflow():
    result = stats.welch([0.0, 1e-160], [1.0, 1.0 + 1e-15])
    assert result is not None
    assert math.isfinite(result.p)
    assert result.df is not None
    assert math.isfinite(result.df)


def test_paired_is_students_test_of_the_differences():
    result = stats.paired([-1.0, -2.0, -3.0])
    assert result is not None
    assert result.t == pytest.approx(-2 * math.sqrt(3))
    assert result.p == pytest.approx(0.0742, abs=1e-4)  # t = 3.464, df = 2
    assert stats.paired([1.0]) is None


def test_holm_by_hand():
    # sorted .01, .02, .03, .04 times 4, 3, 2, 1 = .04, .06, .06, .04, made to rise: .04, .06, .06, .06
    assert stats.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx((0.06, 0.04, 0.06, 0.06))
    assert stats.holm([]) == ()
    assert stats.holm([0.9, 0.8]) == (1.0, 1.0)


@pytest.mark.parametrize(("n", "p"), [(2, 1 / 3), (3, 0.1), (4, 2 / 70), (6, 2 / 924)])
def test_the_smallest_p_of_an_exact_permutation_test(n, p):
    assert stats.exact_permutation(list(range(n)), list(range(100, 100 + n))) == pytest.approx(p)


def test_the_permutation_test_counts_splits():
    # 1 2 | 3: differences of means of the three splits: 1.5, 0, 1.5 → two of three are as large
    assert stats.exact_permutation([1.0, 2.0], [3.0]) == pytest.approx(2 / 3)
    assert stats.exact_permutation([0.1] * 3, [0.1] * 3) == 1.0


def test_the_permutation_test_says_nothing_without_a_group_or_with_too_many_splits():
    assert stats.exact_permutation([], [1.0]) is None
    assert stats.exact_permutation([1.0] * 15, [2.0] * 15) is None


def test_tost_has_three_answers():
    base = [4.0, 4.01, 3.99, 4.0, 4.005, 3.995]
    same = stats.tost([x + 0.001 for x in base], base, 0.05)
    lower = stats.tost([x - 0.2 for x in base], base, 0.05)
    noisy = stats.tost([3.6, 4.4], [3.7, 4.3], 0.05)
    assert same is not None
    assert lower is not None
    assert noisy is not None
    assert (same.equivalent, same.not_lower, same.lower) == (True, True, False)
    assert same.p < 0.05
    assert (lower.equivalent, lower.not_lower, lower.lower) == (False, False, True)
    assert lower.p > 0.95
    assert (noisy.equivalent, noisy.not_lower, noisy.lower) == (False, False, False)


def test_tost_is_equivalent_exactly_when_both_one_sided_tests_are_significant():
    for shift in (0.0, 0.02, 0.035, 0.04, 0.045, 0.06):
        result = stats.tost([x + shift for x in (1.0, 1.01, 0.99, 1.005)], [1.0, 1.012, 0.99, 1.0], 0.05)
        assert result is not None
        assert result.equivalent == (result.p < 0.05)


def test_tost_of_equal_values_and_of_too_few():
    exact = stats.tost([1.0, 1.0], [1.0, 1.0], 0.05)
    assert exact is not None
    assert exact.equivalent
    assert exact.p == 0.0
    assert stats.tost([1.0], [1.0, 1.0], 0.05) is None
    with pytest.raises(ValueError, match="positive"):
        stats.tost([1.0, 1.0], [1.0, 1.0], 0.0)


@pytest.mark.parametrize(("spread", "boots"), [(0.01, [6, 3, 2, 2]), (0.02, [17, 4, 3, 2]), (0.05, [100, 17, 6, 3])])
def test_boots_for_power_80(spread, boots):
    assert [stats.boots_per_arm(delta, spread) for delta in (0.02, 0.05, 0.10, 0.20)] == boots


def test_power_where_it_does_not_exist():
    assert stats.power(1, 0.1, 0.05) is None
    assert stats.power(2, 0.1, 0.0) == 1.0
    assert stats.power(2, 0.0, 0.0) == 0.05
    assert stats.power(9, 0.0, 0.1) == pytest.approx(0.05)
    assert stats.boots_per_arm(0.0, 0.05) is None
    assert stats.boots_per_arm(1e-9, 0.05) is None


# --- how much is between boots? ------------------------------------------------------------------------------------


def test_variance_components_by_hand():
    # boots {1, 3} and {5, 7}: S₁² = 2, boot means 2 and 6, S₂² = 8, T₂² = 8 − 2/2 = 7
    parts = stats.variance_components([[1.0, 3.0], [5.0, 7.0]])
    assert parts is not None
    assert (parts.within, parts.between, parts.clipped) == (2.0, 7.0, False)
    assert parts.share == pytest.approx(7 / 9)
    assert parts.windows == 2


def test_a_negative_component_is_clipped_and_said():
    parts = stats.variance_components([[1.0, 5.0], [2.0, 4.0]])
    assert parts is not None
    assert (parts.between, parts.clipped, parts.share) == (0.0, True, 0.0)


def test_no_variance_at_all_has_no_share():
    parts = stats.variance_components([[1.0, 1.0], [1.0, 1.0]])
    assert parts is not None
    assert parts.share is None


def test_one_window_a_boot_tells_nothing_of_the_inside():
    assert stats.variance_components([[1.0], [2.0], [3.0]]) is None
    assert stats.variance_components([[1.0, 2.0]]) is None
    assert stats.variance_components([]) is None


def test_windows_worth_taking():
    assert stats.windows_worth(0.04, 0.01, 100, 25) == pytest.approx(4)  # √(4 · 4)
    assert stats.windows_worth(0.0001, 1.0, 100, 30) == 1.0  # boots dominate: one
    assert stats.windows_worth(0.04, 0.0, 100, 25) is None


# --- order and drift -----------------------------------------------------------------------------------------------


def test_theil_sen_by_hand():
    # slopes of (0,0) (1,1) (2,4): 1, 3 and 2; the median is 2
    trend = stats.theil_sen([[(0, 0), (1, 1), (2, 4)]])
    assert trend is not None
    assert (trend.slope, trend.pairs, trend.interval, trend.found) == (2.0, 3, None, False)


def test_one_wild_boot_does_not_bend_the_slope():
    points = [(float(i), 0.01 * i) for i in range(9)]
    points[4] = (4.0, 50.0)
    trend = stats.theil_sen([points])
    assert trend is not None
    assert trend.slope == pytest.approx(0.01)
    assert trend.found


def test_variants_far_apart_do_not_make_a_trend():
    trend = stats.theil_sen([[(i, 1.0 + (i % 2) / 100) for i in range(6)], [(i + 6, 9.0) for i in range(6)]])
    assert trend is not None
    assert not trend.found


def test_no_slope_without_two_places():
    assert stats.theil_sen([]) is None
    assert stats.theil_sen([[(1.0, 2.0)], [(2.0, 3.0)]]) is None
    assert stats.theil_sen([[(1.0, 2.0), (1.0, 3.0)]]) is None


def test_a_thousand_boots_are_thinned_and_keep_their_slope():
    trend = stats.theil_sen([[(float(i), 0.5 * i + 3 * (i % 7)) for i in range(1000)]])
    assert trend is not None
    assert trend.slope == pytest.approx(0.5, abs=0.01)
    assert trend.pairs == 300 * 299 // 2


def test_the_exact_interval_of_five_points():
    # Of the 5! orders 1 has no and 4 have one discordant pair: P(≤ 0) = 1/120, P(≤ 1) = 5/120 > 0.025, so the interval
    # runs from the lowest to the highest slope.
    trend = stats.theil_sen([[(0, 0.0), (1, 1.0), (2, 2.5), (3, 3.0), (4, 4.4)]])
    assert trend is not None
    assert trend.interval == pytest.approx((0.5, 1.5))
