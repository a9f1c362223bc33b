"""Coverage and error rates of the statistics by simulation: fixed seeds, at least 20,000 trials each.

A rate of p over N trials has a standard error of √(p(1−p)/N); limits below are five of them, or the rounding of the
table that is checked, whichever is wider.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator import stats
from orchestrator.verdict.derive import BLOCKS_ALPHA

TRIALS = 20_000
TAU = 0.05


def near(rate, truth, trials=TRIALS, rounding=0.0):
    return abs(rate - truth) <= max(rounding, 5 * math.sqrt(truth * (1 - truth) / trials))


def answers(logs):
    """Shares of REPRODUCES, UNDECIDED, DOES_NOT of rows of boots, without the rule of six boots; vectorised."""
    n = logs.shape[1]
    low, high = stats.spread_factors(n)
    s = logs.std(axis=1, ddof=1)
    vouched, refuted = s * high <= TAU, s * low > TAU
    return vouched.mean(), (~vouched & ~refuted).mean(), refuted.mean()


@pytest.mark.parametrize("n", [2, 3, 6, 10])
def test_the_bounds_of_the_spread_cover_it_95_percent_of_the_time(n):
    rng = np.random.default_rng(1)
    bounds = [stats.spread_bounds(row) for row in rng.normal(4, 0.07, (TRIALS, n)).tolist()]
    assert near(np.mean([b.lower <= 0.07 for b in bounds]), 0.95)
    assert near(np.mean([b.upper >= 0.07 for b in bounds]), 0.95)


TABLE = {  # docs/statistics: REPRODUCES / UNDECIDED / DOES_NOT in %, for n = 2, 3, 5, 6, 10
    0.01: [(25, 75, 0), (72, 28, 0), (100, 0, 0), (100, 0, 0), (100, 0, 0)],
    0.02: [(12, 88, 0), (28, 72, 0), (65, 35, 0), (79, 21, 0), (99, 1, 0)],
    0.05: [(5, 90, 5), (5, 90, 5), (5, 90, 5), (5, 90, 5), (5, 90, 5)],
    0.10: [(3, 65, 33), (1, 52, 47), (0, 33, 67), (0, 26, 74), (0, 10, 90)],
    0.20: [(1, 37, 62), (0, 17, 83), (0, 4, 96), (0, 2, 98), (0, 0, 100)],
}


@pytest.mark.parametrize(
    ("sigma", "n", "row"),
    [(sigma, n, row) for sigma, rows in TABLE.items() for n, row in zip((2, 3, 5, 6, 10), rows, strict=True)],
)
def test_the_table_of_answers(sigma, n, row):
    logs = np.random.default_rng(2).normal(4, sigma, (40_000, n))
    for share, percent in zip(answers(logs), row, strict=True):
        assert near(share, percent / 100, 40_000, rounding=0.0125)


@pytest.mark.parametrize(
    ("n", "row"), [(2, (41, 17, 42)), (3, (37, 0, 63)), (5, (17, 0, 83)), (6, (12, 0, 88)), (10, (3, 0, 97))]
)
def test_the_table_of_answers_with_a_slow_mode(n, row):
    rng = np.random.default_rng(3)
    slow = math.log(0.78) * (rng.random((40_000, n)) < 0.30)
    for share, percent in zip(answers(rng.normal(4, 0.003, (40_000, n)) + slow), row, strict=True):
        assert near(share, percent / 100, 40_000, rounding=0.0125)


def test_peeking_after_every_boot_inflates_both_errors():
    logs = np.random.default_rng(4).normal(4, TAU, (TRIALS, 8))
    vouched = np.zeros(TRIALS, dtype=bool)
    refuted = np.zeros(TRIALS, dtype=bool)
    for n in range(2, 9):
        low, high = stats.spread_factors(n)
        s = logs[:, :n].std(axis=1, ddof=1)
        still = ~vouched & ~refuted
        vouched |= still & (s * high <= TAU)
        refuted |= still & (s * low > TAU)
    assert near(vouched.mean(), 0.18, rounding=0.015)
    assert near(refuted.mean(), 0.13, rounding=0.015)


def nightly(sigma_or_logs):
    """Shares vouched for and refuted, and mean boots used, under the nightly looks."""
    logs = sigma_or_logs
    state = np.zeros(len(logs), dtype=int)
    used = np.full(len(logs), 10.0)
    for n in (2, 3, 4, 6, 8, 10):
        s = logs[:, :n].std(axis=1, ddof=1)
        refuted = (state == 0) & (s * stats.spread_factors(n, TAU / 6)[0] > TAU)
        vouched = (state == 0) & ~refuted & (n >= 6) & (s * stats.spread_factors(n, 0.05, 0.05 / 3)[1] <= TAU)
        state[refuted], state[vouched] = -1, 1
        used[refuted | vouched] = n
    return (state == 1).mean(), (state == -1).mean(), used


def test_the_nightly_plan_holds_both_errors_at_the_tolerance_itself():
    vouched, refuted, _ = nightly(np.random.default_rng(5).normal(4, TAU, (TRIALS, 10)))
    assert vouched <= 0.05 + 0.005
    assert refuted <= 0.05 + 0.005


def test_the_nightly_plan_spends_what_the_docs_say():
    rng = np.random.default_rng(6)
    vouched, _, used = nightly(rng.normal(4, 0.01, (TRIALS, 10)))
    assert near(vouched, 1.0, rounding=0.005)
    assert used.mean() == pytest.approx(6.0, abs=0.1)
    vouched, _, used = nightly(rng.normal(4, 0.02, (TRIALS, 10)))
    assert near(vouched, 0.925, rounding=0.012)
    assert used.mean() == pytest.approx(7.4, abs=0.1)
    _, refuted, used = nightly(rng.normal(4, 0.20, (TRIALS, 10)))
    assert near(refuted, 0.998, rounding=0.003)
    assert used.mean() == pytest.approx(3.1, abs=0.1)
    slow = math.log(0.78) * (rng.random((TRIALS, 10)) < 0.30)
    _, refuted, used = nightly(rng.normal(4, 0.003, (TRIALS, 10)) + slow)
    assert near(refuted, 0.88, rounding=0.03)
    assert used.mean() == pytest.approx(3.5, abs=0.4)


@pytest.mark.parametrize(("n", "p"), [(3, 0.1), (6, 0.3), (10, 0.5)])
def test_clopper_pearson_covers_at_least_95_percent(n, p):
    seen = np.random.default_rng(7).binomial(n, p, TRIALS)
    bounds = [stats.clopper_pearson(k, n) for k in range(n + 1)]
    covered = np.mean([bounds[k][0] <= p <= bounds[k][1] for k in seen])
    assert covered >= 0.95 - 0.005


@pytest.mark.parametrize("n", [2, 3, 6])
def test_an_unseen_mode_at_the_stated_rate_stays_unseen_5_percent_of_the_time(n):
    rate = stats.hidden_mode_rate(n)
    slow = np.random.default_rng(8).random((TRIALS, n)) < rate
    assert near((~slow.any(axis=1)).mean(), 0.05)


@pytest.mark.parametrize(("n", "m", "ratio"), [(3, 3, 1.0), (6, 6, 3.0), (3, 8, 2.0)])
def test_welch_covers_the_difference_and_keeps_its_error_rate(n, m, ratio):
    rng = np.random.default_rng(9)
    a = rng.normal(4.1, 0.05, (TRIALS, n)).tolist()
    b = rng.normal(4.0, 0.05 * ratio, (TRIALS, m)).tolist()
    results = [stats.welch(x, y) for x, y in zip(a, b, strict=True)]
    covered = np.mean([r.interval[0] <= 0.1 <= r.interval[1] for r in results])
    assert 0.94 <= covered <= 0.975  # Welch is known to be a little wide at three boots
    null = np.mean([abs(r.value - 0.1) / r.se > stats.t_quantile(0.975, r.df) for r in results])
    assert null == pytest.approx(1 - covered, abs=1e-9)


def test_the_paired_test_keeps_its_one_sided_error_rate():
    rows = np.random.default_rng(10).normal(0, 0.05, (TRIALS, 4)).tolist()
    assert near(np.mean([stats.paired(row).p_less < 0.05 for row in rows]), 0.05)


def test_holm_keeps_the_family_error_rate():
    p = np.random.default_rng(11).random((TRIALS, 4)).tolist()
    assert np.mean([min(stats.holm(row)) < 0.05 for row in p]) <= 0.05 + 0.008


def test_the_exact_permutation_test_never_exceeds_its_level():
    rng = np.random.default_rng(12)
    a, b = rng.standard_exponential((TRIALS, 4)).tolist(), rng.standard_exponential((TRIALS, 4)).tolist()
    p = np.array([stats.exact_permutation(x, y) for x, y in zip(a, b, strict=True)])
    assert near((p <= 2 / 70 + 1e-9).mean(), 2 / 70)
    assert near((p <= 0.2).mean(), 0.2)  # 14/70


def test_tost_at_the_margin_is_wrong_5_percent_of_the_time():
    rng = np.random.default_rng(13)
    a, b = rng.normal(4 - 0.05, 0.01, (TRIALS, 6)).tolist(), rng.normal(4, 0.01, (TRIALS, 6)).tolist()
    results = [stats.tost(x, y, 0.05) for x, y in zip(a, b, strict=True)]
    assert near(np.mean([r.not_lower for r in results]), 0.05, rounding=0.008)
    assert near(np.mean([r.lower for r in results]), 0.05, rounding=0.008)


@pytest.mark.parametrize(("n", "delta", "spread"), [(3, 0.05, 0.01), (6, 0.10, 0.05), (17, 0.05, 0.05), (4, 0.0, 0.02)])
def test_power_is_how_often_a_t_test_sees_it(n, delta, spread):
    rng = np.random.default_rng(14)
    a, b = rng.normal(delta, spread, (TRIALS, n)), rng.normal(0, spread, (TRIALS, n))
    pooled = np.sqrt((a.var(axis=1, ddof=1) + b.var(axis=1, ddof=1)) / 2)
    t = (a.mean(axis=1) - b.mean(axis=1)) / (pooled * math.sqrt(2 / n))
    seen = (np.abs(t) > stats.t_quantile(0.975, 2 * n - 2)).mean()
    assert near(seen, stats.power(n, delta, spread))


def test_variance_components_are_unbiased_before_the_clip():
    rng = np.random.default_rng(15)
    boots = rng.normal(4, 0.05, (TRIALS, 5, 1))
    windows = boots + rng.normal(0, 0.02, (TRIALS, 5, 3))
    parts = [stats.variance_components(groups) for groups in windows.tolist()]
    assert np.mean([p.within for p in parts]) == pytest.approx(0.02**2, rel=0.02)
    assert np.mean([p.between for p in parts]) == pytest.approx(0.05**2, rel=0.03)


@pytest.mark.parametrize("strata", [1, 3])
def test_a_trend_is_seen_in_no_more_than_5_percent_of_trendless_campaigns(strata):
    rng = np.random.default_rng(16)
    y = rng.normal(0, 0.02, (TRIALS, strata, 6)).tolist()
    campaigns = [[[(float(i), v) for i, v in enumerate(row)] for row in rows] for rows in y]
    found = np.mean([stats.theil_sen(campaign).found for campaign in campaigns])
    assert 0.005 <= found <= 0.05 + 0.008


def test_a_drift_is_seen():
    rng = np.random.default_rng(17)
    y = rng.normal(0, 0.01, (2_000, 3, 6)) - 0.01 * np.arange(6)
    seen = [stats.theil_sen([[(float(i), v) for i, v in enumerate(row)] for row in rows]).found for rows in y.tolist()]
    assert np.mean(seen) > 0.95


@pytest.mark.parametrize("block_sd", [0.0, 0.01, 0.05])
def test_pairing_only_where_blocks_are_real_keeps_the_error_rate(block_sd):
    """Two equal variants in six blocks: choosing the test by a look at the blocks costs at most a third of a point."""
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(TRIALS):
        boots = rng.normal(0, 0.01, (6, 2)) + rng.normal(0, block_sd, (6, 1))
        p_blocks = stats.block_p(boots.tolist())
        found = stats.welch(boots[:, 0].tolist(), boots[:, 1].tolist())
        if p_blocks < BLOCKS_ALPHA:
            found = stats.paired((boots[:, 0] - boots[:, 1]).tolist())
        alarms += found.p < stats.ALPHA
    assert alarms / TRIALS <= 0.05 + 1 / 300 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)


def test_block_p_is_uniform_without_blocks_and_near_zero_with_them():
    rng = np.random.default_rng(6)
    none = [stats.block_p(rng.normal(0, 1, (6, 3)).tolist()) for _ in range(TRIALS)]
    assert np.mean(np.array(none) < 0.05) == pytest.approx(0.05, abs=5 * math.sqrt(0.05 * 0.95 / TRIALS))
    real = [stats.block_p((rng.normal(0, 1, (6, 3)) + rng.normal(0, 5, (6, 1))).tolist()) for _ in range(200)]
    assert np.mean(np.array(real) < 0.05) > 0.95
    assert stats.block_p([[1.0, 2.0], [1.0, 2.0]]) is None  # two blocks
    assert stats.block_p([[1.0], [2.0], [3.0]]) is None  # one treatment
    assert stats.block_p([[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]) == 0.0  # blocks and nothing else
