"""Numbers to estimates with intervals: pure functions over logs of boot means. Imports nothing of ours.

The unit of analysis is the boot. Where a function takes `logs`, it takes one natural logarithm of a throughput for each
boot of one cell; a standard deviation of logs is close to a coefficient of variation, and a difference of logs is the
log of a ratio. A number that does not exist is None: no spread of one boot, no interval without a spread.

Quantiles come from `scipy.special`: importing `scipy.stats` costs most of a second and 80 MB.

Sources: Kalibera & Jones, Rigorous Benchmarking in Reasonable Time (ISMM 2013); Clopper & Pearson (Biometrika 1934);
Welch (Biometrika 1947); Holm (Scand. J. Statist. 1979); Schuirmann (J. Pharmacokin. Biopharm. 1987); Sen (JASA 1968);
Hirsch & Slack (Water Resour. Res. 1984); Searle, Casella & McCulloch, Variance Components (1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from scipy import special

ALPHA = 0.05
MIN_VOUCH = 6  # boots: P(median within [min, max]) = 1 − 2^(1−n) passes 95 % at six; fewer miss a minority mode
FURTHEST = 1_000_000  # boots beyond which a spread counts as being the tolerance itself
MOST_SPLITS = 200_000  # of an exact permutation test
MOST_TREND_POINTS = 300  # of one stratum of a Theil-Sen slope; longer ones are thinned evenly

Answer = Literal["REPRODUCES", "DOES_NOT_REPRODUCE", "UNDECIDED"]
Interval = tuple[float, float]


# --- location and spread -------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, exact for equal values; None of nothing."""
    if not values:
        return None
    first = values[0]  # differences from it are exactly 0 where all values are equal, whatever their number
    return first + math.fsum(value - first for value in values) / len(values)


def sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n − 1), exactly 0 for equal values; None below two values."""
    middle = mean(values)
    if middle is None or len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def mean_interval(logs: Sequence[float], alpha: float = ALPHA) -> Interval | None:
    """Two-sided 1 − α Student interval of the mean; None below two values."""
    middle, spread = mean(logs), sd(logs)
    if middle is None or spread is None:
        return None
    half = t_quantile(1 - alpha / 2, len(logs) - 1) * spread / math.sqrt(len(logs))
    return middle - half, middle + half


def t_quantile(p: float, df: float) -> float:
    """The value that Student's t with `df` degrees of freedom stays below with probability `p`."""
    return float(special.stdtrit(df, p))


# --- does it reproduce? --------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def spread_factors(n: int, lower_alpha: float = ALPHA, upper_alpha: float = ALPHA) -> Interval:
    """L/s and U/s: factors from a sample sd of `n` ≥ 2 normal values to one-sided bounds on the true sd.

    L = s·√((n−1)/χ²_{1−α}), U = s·√((n−1)/χ²_α) with n − 1 degrees of freedom; (n−1)s²/σ² is χ² distributed.
    """
    df = n - 1
    return (
        math.sqrt(df / float(special.chdtri(df, lower_alpha))),
        math.sqrt(df / float(special.chdtri(df, 1 - upper_alpha))),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Boot-to-boot sd of logs with its one-sided 1 − α bounds."""

    n: int
    sd: float
    lower: float
    upper: float


def spread_bounds(logs: Sequence[float], alpha: float = ALPHA) -> Spread | None:
    """The spread of `logs` and one-sided χ² bounds on the true one; None below two values."""
    spread = sd(logs)
    if spread is None:
        return None
    low, high = spread_factors(len(logs), alpha, alpha)
    return Spread(len(logs), spread, spread * low, spread * high)


def reproducibility(
    n: int,
    spread: float | None,
    tolerance: float,
    *,
    refute_alpha: float = ALPHA,
    vouch_alpha: float = ALPHA,
) -> Answer:
    """Three answers on a true sd against `tolerance`: two boots can refute, six are needed to vouch.

    `DOES_NOT_REPRODUCE` iff L > tolerance; `REPRODUCES` iff U ≤ tolerance and n ≥ 6; else `UNDECIDED`, as without a
    spread. An α of 0 never decides: that is a look which an adaptive plan has not set aside.
    """
    if n < 2 or spread is None:
        return "UNDECIDED"
    if _refutes(n, spread, tolerance, refute_alpha):
        return "DOES_NOT_REPRODUCE"
    if _vouches(n, spread, tolerance, vouch_alpha):
        return "REPRODUCES"
    return "UNDECIDED"


def _refutes(n: int, spread: float, tolerance: float, alpha: float) -> bool:
    return alpha > 0 and spread * spread_factors(n, alpha, alpha)[0] > tolerance


def _vouches(n: int, spread: float, tolerance: float, alpha: float) -> bool:
    return alpha > 0 and n >= MIN_VOUCH and spread * spread_factors(n, alpha, alpha)[1] <= tolerance


def more_boots(
    n: int,
    spread: float | None,
    tolerance: float,
    *,
    refute_alpha: float = ALPHA,
    vouch_alpha: float = ALPHA,
) -> int | None:
    """How many further boots would settle `reproducibility` if the spread stays as it is.

    0 when it is settled; None when none would (the spread is the tolerance itself), or when it is not known. L/s rises
    and U/s falls with n, so the first number of boots that settles is found by halving.
    """
    if n < 2 or spread is None:
        return None
    if reproducibility(n, spread, tolerance, refute_alpha=refute_alpha, vouch_alpha=vouch_alpha) != "UNDECIDED":
        return 0

    def settles(boots: int) -> bool:
        return _refutes(boots, spread, tolerance, refute_alpha) or _vouches(boots, spread, tolerance, vouch_alpha)

    return _first(settles, n + 1, FURTHEST, start=n, end=FURTHEST)


def _first(holds: Callable[[int], bool], low: int, high: int, *, start: int, end: int) -> int | None:
    """Distance from `start` to the first number in low…high for which `holds`; None when not even at `end`."""
    if not holds(end):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low - start


def refute_chance(n: int, sigma: float, tolerance: float, alpha: float = ALPHA) -> float | None:
    """Chance that `n` boots with the true sd `sigma` are called not reproducible; None below two boots.

    (n−1)s²/σ² is χ² distributed, and refuted is L > tolerance.
    """
    if n < 2:
        return None
    if sigma <= 0:
        return 0.0
    limit = tolerance / spread_factors(n, alpha, alpha)[0]
    return float(special.chdtrc(n - 1, (n - 1) * (limit / sigma) ** 2))


def hidden_mode_rate(n: int, alpha: float = ALPHA) -> float | None:
    """Share of boots up to which a slow mode is still unseen at 1 − α when all `n` boots agree: 1 − α^(1/n)."""
    return None if n < 1 else 1 - alpha ** (1 / n)


def median_coverage(n: int) -> float | None:
    """P(the true median lies between the lowest and the highest of `n` values) = 1 − 2^(1−n)."""
    return None if n < 1 else 1 - 2.0 ** (1 - n)


@dataclass(frozen=True, slots=True)
class Modes:
    """Two groups of boots apart by the widest gap of their logs; description only, never a gate."""

    slow: tuple[float, ...]
    fast: tuple[float, ...]
    gap: float


def modes(logs: Sequence[float], tolerance: float, within_sd: float | None = None) -> Modes | None:
    """The largest gap of the sorted values, when over max(4·within-boot sd, tolerance); else None."""
    ordered = sorted(logs)
    if len(ordered) < 2:
        return None
    gaps = [high - low for low, high in pairwise(ordered)]
    cut = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[cut] <= max(4 * (within_sd or 0.0), tolerance):
        return None
    return Modes(tuple(ordered[: cut + 1]), tuple(ordered[cut + 1 :]), gaps[cut])


# --- boots that fail -----------------------------------------------------------------------------------------------


def clopper_pearson(k: int, n: int, alpha: float = ALPHA, *, sided: Literal[1, 2] = 2) -> Interval | None:
    """Exact bounds on a rate of which `k` of `n` were seen: two-sided 1 − α, or each of the two one-sided.

    One-sided, n successes in n leave a lower bound of α^(1/n). None without a trial. Clopper & Pearson (1934).

    Raises:
        ValueError: `k` is not within 0…n.
    """
    if n == 0:
        return None
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n}")
    tail = alpha / sided
    low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, tail))
    high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1 - tail))
    return low, high


# --- which is faster? ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of two means (a − b), its two-sided interval and p; `t` and `df` are None where both spreads are 0.

    `p_less` is one-sided: small when a is below b.
    """

    value: float
    se: float
    df: float | None
    t: float | None
    p: float
    p_less: float
    interval: Interval


def welch(a: Sequence[float], b: Sequence[float], alpha: float = ALPHA) -> Difference | None:
    """Welch's test of mean(a) − mean(b), spreads not assumed equal (Welch 1947); None below two values a side.

    Where all values of each side are equal, a difference is certain: p is 0 if there is one, else 1.
    """
    mean_a, mean_b, sd_a, sd_b = mean(a), mean(b), sd(a), sd(b)
    if mean_a is None or mean_b is None or sd_a is None or sd_b is None:
        return None
    share_a, share_b = sd_a**2 / len(a), sd_b**2 / len(b)
    se = math.sqrt(share_a + share_b)
    if se == 0:
        return _difference(mean_a - mean_b, 0.0, None, alpha)
    fraction = share_a / (share_a + share_b)  # of the variance; squares of tiny shares would underflow to 0 / 0
    df = 1 / (fraction**2 / (len(a) - 1) + (1 - fraction) ** 2 / (len(b) - 1))
    return _difference(mean_a - mean_b, se, df, alpha)


def paired(differences: Sequence[float], alpha: float = ALPHA) -> Difference | None:
    """Student's test of the mean of differences within boots, or within blocks; None below two values."""
    middle, spread = mean(differences), sd(differences)
    if middle is None or spread is None:
        return None
    se = spread / math.sqrt(len(differences))
    return _difference(middle, se, float(len(differences) - 1) if se > 0 else None, alpha)


def block_p(blocks: Sequence[Sequence[float]]) -> float | None:
    """P of the F test that blocks (rows) do not differ, given one value for each treatment (column) in every block.

    Two-way layout without replication: MS(blocks)/MS(residual) with b − 1 and (b − 1)(k − 1) degrees of freedom. None
    below three blocks or two treatments. It is independent of the treatments' own differences.
    """
    b, k = len(blocks), min((len(row) for row in blocks), default=0)
    if b < 3 or k < 2:
        return None
    table = np.asarray([row[:k] for row in blocks], dtype=float)
    rows = table.mean(axis=1) - table.mean()
    rest = table - table.mean() - rows[:, None] - (table.mean(axis=0) - table.mean())[None, :]
    across, within = k * float((rows**2).sum()) / (b - 1), float((rest**2).sum()) / ((b - 1) * (k - 1))
    if within <= 1e-24:
        return 0.0 if across > 1e-24 else 1.0
    return float(special.fdtrc(b - 1, (b - 1) * (k - 1), across / within))


def _difference(value: float, se: float, df: float | None, alpha: float) -> Difference:
    if df is None:
        certain = 0.0 if value < 0 else 1.0
        return Difference(value, 0.0, None, None, 1.0 if value == 0 else 0.0, certain, (value, value))
    t = value / se
    half = t_quantile(1 - alpha / 2, df) * se
    two_sided = min(1.0, 2 * float(special.stdtr(df, -abs(t))))
    return Difference(value, se, df, t, two_sided, float(special.stdtr(df, t)), (value - half, value + half))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Adjusted p-values in the order given: all those ≤ α hold together at error rate α (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return tuple(adjusted)


def exact_permutation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of the difference of means over every way to split the pooled values into two such groups.

    The smallest that it can be is 2/C(n+m, n): 0.33 for 2 and 2, 0.10 for 3 and 3, 0.029 for 4 and 4. None where a
    group is empty, or where there are more than `MOST_SPLITS` splits.
    """
    n, m = len(a), len(b)
    if n == 0 or m == 0 or math.comb(n + m, n) > MOST_SPLITS:
        return None
    pooled = np.asarray([*a, *b], dtype=float)
    pooled -= pooled[0]
    picks = np.fromiter((i for pick in combinations(range(n + m), n) for i in pick), dtype=np.int64).reshape(-1, n)
    sums = pooled[picks].sum(axis=1)
    differences = np.abs(sums / n - (pooled.sum() - sums) / m)
    slack = 1e-12 * max(1.0, float(np.abs(pooled).max()))  # equal splits may differ by rounding
    return float(np.mean(differences >= differences[0] - slack))


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided tests of |a − b| < margin, as a 1 − 2α interval of a − b."""

    difference: float
    interval: Interval
    p: float
    equivalent: bool
    not_lower: bool
    lower: bool


def tost(a: Sequence[float], b: Sequence[float], margin: float, alpha: float = ALPHA) -> Equivalence | None:
    """Is mean(a) within `margin` of mean(b)? Two one-sided Welch tests (Schuirmann 1987), each at α.

    `equivalent`: the 1 − 2α interval lies within ±margin. `not_lower`: its lower end is above −margin (no regression).
    `lower`: its upper end is below −margin (a regression beyond the margin). None below two values a side.

    Raises:
        ValueError: `margin` is not positive.
    """
    if margin <= 0:
        raise ValueError(f"a margin is positive, not {margin}")
    difference = welch(a, b, 2 * alpha)
    if difference is None:
        return None
    low, high = difference.interval
    return Equivalence(
        difference=difference.value,
        interval=difference.interval,
        p=max(_one_sided(difference, -margin, above=True), _one_sided(difference, margin, above=False)),
        equivalent=-margin < low and high < margin,
        not_lower=low > -margin,
        lower=high < -margin,
    )


def _one_sided(difference: Difference, limit: float, *, above: bool) -> float:
    """P-value of the claim that the difference is above (else below) `limit`."""
    distance = difference.value - limit if above else limit - difference.value
    if difference.df is None:
        return 0.0 if distance > 0 else 1.0
    return float(special.stdtr(difference.df, -distance / difference.se))


def power(n: int, delta: float, spread: float, alpha: float = ALPHA) -> float | None:
    """Chance that a two-sided t test with `n` boots an arm sees a difference of logs `delta`; None below two boots.

    `spread` is the true sd in both arms. From the noncentral t distribution with 2n − 2 degrees of freedom.
    """
    if n < 2:
        return None
    if spread == 0:
        return 1.0 if delta != 0 else alpha
    df = 2 * n - 2
    shift = abs(delta) / (spread * math.sqrt(2 / n))
    limit = t_quantile(1 - alpha / 2, df)
    beyond = 1 - float(special.nctdtr(df, shift, limit))
    # The far tail is below 1e-9 from a shift of 4 on, where the function loses its digits.
    return beyond + (float(special.nctdtr(df, shift, -limit)) if shift < 4 else 0.0)


def boots_per_arm(delta: float, spread: float, wanted: float = 0.8, alpha: float = ALPHA) -> int | None:
    """Fewest boots in each of two arms with at least the power `wanted`; None for no difference or over 10,000."""
    if delta == 0:
        return None

    def enough(n: int) -> bool:
        reached = power(n, delta, spread, alpha)
        return reached is not None and reached >= wanted

    return _first(enough, 2, 10_000, start=0, end=10_000)


# --- how much is between boots? ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VarianceComponents:
    """One-way random effects, boot as the random factor. Variances of logs.

    `within` is T₁² (windows inside a boot), `between` T₂² (boots), set to 0 where the estimate is negative (`clipped`).
    `share` is T₂²/(T₁² + T₂²), None where both are 0. `windows` is the mean number of windows of a boot, as it enters.
    """

    within: float
    between: float
    clipped: bool
    share: float | None
    windows: float


def variance_components(groups: Sequence[Sequence[float]]) -> VarianceComponents | None:
    """T₁² and T₂² from windows grouped by boot (Searle, Casella & McCulloch 1992, ANOVA estimators).

    With r windows in every boot T₂² = S₂² − S₁²/r, S₂² the variance of boot means. None with fewer than two boots, or
    where no boot has two windows: then within cannot be told from between.
    """
    groups = [group for group in groups if group]
    total = sum(len(group) for group in groups)
    if len(groups) < 2 or total == len(groups):
        return None
    middles = [float(mean(group) or 0.0) for group in groups]
    grand = math.fsum(x for group in groups for x in group) / total
    inside = math.fsum((x - m) ** 2 for group, m in zip(groups, middles, strict=True) for x in group)
    across = math.fsum(len(group) * (m - grand) ** 2 for group, m in zip(groups, middles, strict=True))
    within = inside / (total - len(groups))
    windows = (total - sum(len(group) ** 2 for group in groups) / total) / (len(groups) - 1)
    raw = (across / (len(groups) - 1) - within) / windows
    between = max(0.0, raw)
    both = within + between
    return VarianceComponents(within, between, raw < 0, between / both if both > 0 else None, windows)


def windows_worth(within: float, between: float, boot_s: float, window_s: float) -> float | None:
    """Windows worth taking in a boot: r* = √((boot/window cost)·T₁²/T₂²), at least 1; None where T₂² is 0.

    Kalibera & Jones (2013): when boots dominate, one.
    """
    return None if between <= 0 else max(1.0, math.sqrt(boot_s / window_s * within / between))


# --- order and drift -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trend:
    """A Theil-Sen slope (per unit of x) with its 1 − α interval; `found` when the interval leaves out 0."""

    slope: float
    interval: Interval | None
    pairs: int

    @property
    def found(self) -> bool:
        """Whether the data show a trend at all."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def theil_sen(strata: Sequence[Sequence[tuple[float, float]]], alpha: float = ALPHA) -> Trend | None:
    """Median slope of all pairs within strata, with the interval of Sen (1968) over strata (Hirsch & Slack 1984).

    Each stratum holds the (x, y) of one variant: pairs across strata would mix the trend with the variants' own
    difference, and centring would make residuals depend on each other. Exact without ties up to 60 points a stratum,
    else by the normal approximation with the variance for ties. None where no pair differs in x; no interval where
    there are too few pairs for one.
    """
    parts = [_thin(stratum) for stratum in strata if len(stratum) > 1]
    slopes = np.sort(np.concatenate([_slopes(part) for part in parts])) if parts else np.empty(0)
    if slopes.size == 0:
        return None
    count = int(slopes.size)
    rank = _sen_rank(parts, count, alpha)
    interval = (float(slopes[rank - 1]), float(slopes[count - rank])) if rank >= 1 else None
    return Trend(float(np.median(slopes)), interval, count)


def _thin(points: Sequence[tuple[float, float]]) -> np.ndarray:
    array = np.asarray(points, dtype=float)
    if len(array) <= MOST_TREND_POINTS:
        return array
    return np.asarray(array[np.linspace(0, len(array) - 1, MOST_TREND_POINTS).astype(int)])


def _slopes(points: np.ndarray) -> np.ndarray:
    one, other = _pairs(len(points))
    run = points[other, 0] - points[one, 0]
    rise = points[other, 1] - points[one, 1]
    return np.asarray(rise[run != 0] / run[run != 0])


@lru_cache(maxsize=64)
def _pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    one, other = np.triu_indices(n, k=1)
    return one, other


def _sen_rank(parts: Sequence[np.ndarray], count: int, alpha: float) -> int:
    """From which end-rank the sorted slopes form the interval; 0 where there is none."""
    tied = any(len(set(column)) < len(part) for part in parts for column in part.T.tolist())
    if not tied and max(len(part) for part in parts) <= 60:
        below = _inversions(tuple(len(part) for part in parts))
        return int(np.searchsorted(below, alpha / 2, side="right"))
    variance = sum(_kendall_variance(part) for part in parts)
    normal = float(special.ndtri(1 - alpha / 2))
    return max(0, math.floor((count - normal * math.sqrt(variance)) / 2))


@lru_cache(maxsize=64)
def _inversions(sizes: tuple[int, ...]) -> np.ndarray:
    """P(at most so many discordant pairs) when order means nothing, over independent strata."""
    chances: np.ndarray = np.ones(1)
    for size in sizes:
        for place in range(2, size + 1):
            chances = np.convolve(chances, np.full(place, 1 / place))
    return np.cumsum(chances)


def _kendall_variance(points: np.ndarray) -> float:
    """Variance of Kendall's S under no trend, with ties in either axis (Kendall, Rank Correlation Methods, 1970)."""
    n = len(points)
    ties = [np.unique(points[:, axis], return_counts=True)[1].astype(float) for axis in (0, 1)]
    first = n * (n - 1) * (2 * n + 5) - sum(float((t * (t - 1) * (2 * t + 5)).sum()) for t in ties)
    pairs = math.prod(float((t * (t - 1)).sum()) for t in ties) / (2 * n * (n - 1))
    if n < 3:
        return first / 18 + pairs
    triples = math.prod(float((t * (t - 1) * (t - 2)).sum()) for t in ties) / (9 * n * (n - 1) * (n - 2))
    return first / 18 + pairs + triples
