"""Verdicts in sentences, with their numbers, and the whole derivation as text. Pure; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from orchestrator import stats
from orchestrator.goals import UNITS
from orchestrator.records import THROUGHPUT, BootResult, CellVerdict, Level
from orchestrator.verdict.case import Case, Cell, Collapse, Drop
from orchestrator.verdict.derive import Derivation, changes
from orchestrator.verdict.values import exp, exp_interval, logs_of, printed, throughput

SHOWN = 6  # boots listed by their numbers; more are told by their range
FAR = 100  # boots above which a comparison's number of boots is no advice
MOST_MORE = 20  # further boots, of minutes each, above which counting is no advice


def plural(count: int, word: str) -> str:
    """A count with its noun: 1 boot, 2 boots."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def listed(items: Iterable[str], word: str = "and") -> str:
    """Items as a person lists them: a, b and c."""
    *first, last = items
    return f"{', '.join(first)} {word} {last}" if first else last


def streams(levels: Sequence[Level]) -> str:
    """Levels in words: 1 stream, 1 and 8 streams, 8 streams with prompts of 512 and 8000 tokens."""
    by_length: dict[int | None, list[int]] = {}
    for level in levels:
        by_length.setdefault(level.input_tokens, []).append(level.concurrency)
    mixed = len(by_length) > 1
    by_streams: dict[tuple[tuple[int, ...], bool], list[int | None]] = {}
    for length, counts in by_length.items():
        by_streams.setdefault((tuple(counts), length is None), []).append(length)
    return listed(f"{_streams(counts)}{_prompts(lengths, mixed=mixed)}" for (counts, _), lengths in by_streams.items())


def _streams(counts: Sequence[int]) -> str:
    return f"{listed(map(str, counts))} stream{'' if tuple(counts) == (1,) else 's'}"


def _prompts(lengths: Sequence[int | None], *, mixed: bool) -> str:
    """Nothing where nobody names a length; beside levels that do, a level without one must not seem to share theirs."""
    known = [str(length) for length in lengths if length is not None]
    if known:
        return f" with prompts of {listed(known)} tokens"
    return " with prompts of unknown length" if mixed else ""


def values(by_boot: Iterable[float | None]) -> str:
    """Boots by their numbers; many by their range."""
    there = [value for value in by_boot if value is not None]
    if len(there) <= SHOWN:
        return f"{listed(printed(value) for value in there)} tok/s"
    return f"{printed(min(there))} to {printed(max(there))} tok/s over {len(there)} boots"


def times(log_ratio: float) -> str:
    """A ratio from its log to three figures, `0.697×`; one that is not finite is told by its power of ten."""
    ratio = exp(log_ratio)
    if ratio is None or ratio == 0:
        return f"10^{log_ratio / math.log(10):.0f}×"
    return f"{ratio:#.3g}".rstrip(".") + "×"


def percent(share: float) -> str:
    """A share: `63 %`, below one in a hundred `0.3 %`."""
    return f"{share * 100:.0f} %" if share >= 0.01 or share == 0 else f"{share * 100:.1g} %"


def p_value(p: float) -> str:
    """A p-value that never claims to be 0."""
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.2g}"


def further(more: int | None) -> str:
    """Advice on further boots."""
    if more is None:
        return "no number of boots is known to settle it"
    if more > MOST_MORE:
        return f"over {MOST_MORE} more boots would settle it, so near the tolerance is the spread"
    return f"{plural(more, 'more boot')} would settle it"


# --- one sentence a variant ----------------------------------------------------------------------------------------


def variant_sentence(derived: Derivation, case: Case) -> str:
    """The variant's verdict in one sentence, with its numbers."""
    answer = derived.answer(case)
    if answer == "REJECTED":
        return f"{case.name} is rejected: {'; '.join(_reasons(derived, case))}."
    if answer == "WINNER":
        return _winner(derived, case)
    if answer == "UNDECIDED" and not case.boots:
        return f"{case.name} is not booted yet."
    if answer == "UNDECIDED":
        return f"{case.name} is undecided: {_unranked(derived, case)}."
    return _compared(derived, case, dominated=answer == "DOMINATED")


def _reasons(derived: Derivation, case: Case) -> list[str]:
    told: list[str] = []
    if case.fatal:
        told.append(_fatal(case))
    told += [_collapse(collapse) for collapse in case.collapses[:1]]
    told += [_wide(cell.verdict, derived.series.tolerance) for cell in case.wide[:1]]
    if case.errors:
        told.append(_errors(case))
    told += [f"it misses {missed.sentence}" for missed in case.missed[:1]]
    return told


def _fatal(case: Case) -> str:
    cold = [boot for boot in case.boots if boot.cache in {fatal.cache for fatal in case.fatal}]
    died = "died or was not ready" if any(not boot.died for boot in case.fatal) else "died"
    return (
        f"it {died} before the trials in {len(case.fatal)} of {plural(len(cold), 'cold boot')} ({_causes(case.fatal)})"
    )


def _causes(boots: Iterable[BootResult]) -> str:
    lost = [boot for boot in boots if boot.outcome != "completed"]
    return listed(dict.fromkeys(boot.cause or boot.why or "cause unknown" for boot in lost))


def _collapse(collapse: Collapse) -> str:
    at = f"it collapses at {streams((collapse.level,))}{_state(collapse.cache)}"
    if collapse.worst:
        boot, low, best, value = max(collapse.worst, key=lambda entry: entry[2] / entry[3])
        where, of = f"in {boot},", ""
        if len(collapse.worst) > 1:  # tables show the mean over boots, and this is one of them
            where = f"in the worst boot, {boot},"
            of = f", and more than 2× in each of {len(collapse.worst)} boots"
        return (
            f"{at}: {where} {printed(value)} tok/s in all, where {streams((low,))} gave {printed(best)} "
            f"({best / value:.1f}× as much{of})"
        )
    assert collapse.drop is not None
    return f"{at}: {_drop(collapse.drop)}"


def _drop(drop: Drop) -> str:
    return (
        f"{times(drop.difference.value)} the throughput of {streams((drop.low,))} "
        f"({_between(drop.difference.interval)}, {drop.boots} boots, {p_value(drop.p_holm)} one-sided after Holm)"
    )


def _wide(cell: CellVerdict, tolerance: float) -> str:
    return (
        f"it does not reproduce at {streams((cell.level,))}{_state(cell.cache)}: its boots gave "
        f"{values(cell.by_boot)}, spread {_share(cell.spread)}, at least {_share(cell.spread_lower)} (95 %), "
        f"where {_share(tolerance)} is tolerated"
    )


def _share(spread: float | None) -> str:
    """A spread as reports print it everywhere: `47.7 %`."""
    return "unknown" if spread is None else f"{spread * 100:.1f} %"


def _errors(case: Case) -> str:
    levels = sorted({level for _, failed in case.errors for level in failed})
    at = f" at {streams(levels)}" if levels else ""
    return f"it failed under load{at} in {len(case.errors)} of {plural(len(case.boots), 'boot')}"


def _winner(derived: Derivation, case: Case) -> str:
    return "; ".join((_wins(derived, case), _assurance(case), *_remarks(derived, case))) + "."


def _wins(derived: Derivation, case: Case) -> str:
    manner = " provisionally" if provisional(case) else ""
    return f"{case.name} wins{manner} with {_objective(derived, case)}"


def remarks(derived: Derivation, case: Case) -> tuple[str, ...]:
    """What must be known of the winner besides `overall_sentence`; nothing of the others."""
    return tuple(_remarks(derived, case)) if derived.answer(case) == "WINNER" else ()


def _remarks(derived: Derivation, case: Case) -> Iterator[str]:
    ranking = derived.ranking
    if lost := failures(case):
        yield f"{lost} of {plural(len(case.boots), 'boot')} did not complete"
    if ranking.tied:
        others = [name for name in ranking.tied if name != case.name]
        yield f"a tie with {listed(others)}, decided by {_tie_break(derived, case)}"
    if len(ranking.objectives) > 1:
        yield "the highest of several is biased upwards, so confirm it with fresh boots"


def _tie_break(derived: Derivation, case: Case) -> str:
    count = changes(derived.series, case.name)
    return "the order of the file" if count is None else f"the fewest changes from production ({count})"


def _assurance(case: Case) -> str:
    open_cells = [cell.verdict for cell in case.cells if cell.verdict.reproducibility == "UNDECIDED"]
    fewest = min(len(cell.logs) for cell in case.cells)
    unseen = stats.hidden_mode_rate(fewest)
    slow = "" if unseen is None else f"; a slow mode on up to {percent(unseen)} of boots would still be unseen"
    unsure = [held.constraint for held in case.constraints if held.answer != "PASS"]
    slow += f"; not surely held: {listed(unsure)}" if unsure else ""
    if not open_cells:
        return (
            f"{'its one cell reproduces' if len(case.cells) == 1 else f'all {len(case.cells)} cells reproduce'}{slow}"
        )
    wanted = [cell.more_boots for cell in open_cells]
    known = [more for more in wanted if more is not None]
    advice = f", {further(max(known))}" if len(known) == len(wanted) else ""
    few = " (six boots at least)" if fewest < stats.MIN_VOUCH else ""
    return f"{len(open_cells)} of {plural(len(case.cells), 'cell')} not yet vouched for{few}{advice}{slow}"


def _compared(derived: Derivation, case: Case, *, dominated: bool) -> str:
    ranking = derived.ranking
    assert ranking.winner is not None
    comparison = ranking.comparisons[case.name]
    ratio = times(ranking.objectives[case.name] - ranking.objectives[ranking.winner])
    kind = "dominated" if dominated else "a contender"
    start = f"{case.name} is {kind}: {_objective(derived, case)}{_failures(case)}, {ratio} the winner's"
    if comparison.difference is None or comparison.p_holm is None:
        return f"{start}; a comparison needs two boots on both sides, so nothing tells them apart yet."
    within = ", paired within blocks" if comparison.method == "paired" else ""
    told = (
        f"({_between(comparison.difference.interval)}{within}; {p_value(comparison.p_holm)} after Holm over "
        f"{plural(comparison.family, 'comparison')})"
    )
    if dominated:
        return f"{start} {told}."
    return f"{start} {told}, not told apart from it{_would_tell(derived, case)}."


def _would_tell(derived: Derivation, case: Case) -> str:
    ranking = derived.ranking
    comparison = ranking.comparisons[case.name]
    assert comparison.difference is not None
    logs = case.objective_logs(ranking.cache or "cold", ranking.levels, ranking.goal)
    pooled = comparison.difference.se * math.sqrt(len(logs) / 2)
    needed = stats.boots_per_arm(comparison.difference.value, pooled)
    if needed is None or needed > FAR or needed <= len(logs):
        return ""
    return f"; about {needed} boots each would, if the difference and the spread stay"


def _objective(derived: Derivation, case: Case) -> str:
    ranking, goal = derived.ranking, derived.ranking.goal
    value = f"{printed(throughput(ranking.objectives[case.name]))} {UNITS[goal.metric]}"
    name = "" if goal.metric == THROUGHPUT else f"{goal.metric} "
    weighted = "weighted " if any(goal.weight(level) != 1.0 for level in ranking.levels) else ""
    mean = "" if len(ranking.levels) == 1 else f", {weighted}geometric mean"
    cache = ranking.cache or "cold"
    boots = max(len(logs_of(case.boots, cache, level, goal.metric)) for level in ranking.levels)
    return f"{name}{value} (at {streams(ranking.levels)}{_state(cache)}{mean}, {plural(boots, 'boot')})"


def _failures(case: Case) -> str:
    lost = failures(case)
    return f", although {lost} of {plural(len(case.boots), 'boot')} did not complete" if lost else ""


def failures(case: Case) -> int:
    """Boots that crashed or were not ready."""
    return sum(boot.outcome != "completed" for boot in case.boots)


def _unranked(derived: Derivation, case: Case) -> str:
    if not case.boots:
        return "not booted yet"
    if not case.has_value:
        lost = failures(case)
        told = f", and {lost} did not complete ({_causes(case.boots)})" if lost else ""
        return f"none of its {plural(len(case.boots), 'boot')} gave a valid value{told}"
    if not case.levels(derived.ranking.cache or "cold"):
        return f"no {derived.ranking.cache} boot gave a valid value, and cache states are never pooled"
    return "no level was measured by every variant that is not rejected"


def _state(cache: str) -> str:
    return "" if cache == "cold" else f" ({cache} cache)"


def _between(logs: stats.Interval) -> str:
    return f"95 % {times(logs[0])} to {times(logs[1])}"


# --- the sentence on top -------------------------------------------------------------------------------------------


def overall_sentence(derived: Derivation) -> str:
    """What wins, how sure that is, and what production's own verdict is."""
    parts = [_outcome(derived)]
    if derived.confounded:
        parts.append(f"The comparison is confounded: {derived.confounded}.")
    production = derived.series.production
    case = None if production is None else derived.case(production)
    if case is not None:
        answer = derived.answer(case)
        why = f" ({', '.join(case.reasons)})" if case.reasons else ""
        itself = "itself " if answer == "REJECTED" else ""
        parts.append(f"Production, {case.name}, is {itself}{answer}{why}.")
    if derived.series.undeclared_look:
        parts.append(f"{derived.series.undeclared_look[0].upper()}{derived.series.undeclared_look[1:]}.")
    if derived.series.rehearsal:
        parts.append("REHEARSAL: made on the stand-in engine, not on a GPU.")
    return " ".join(parts)


def _outcome(derived: Derivation) -> str:
    ranking = derived.ranking
    if ranking.winner is None:
        return f"Nothing wins: {_no_winner(derived)}."
    case = derived.case(ranking.winner)
    assert case is not None
    contenders = [other.name for other in derived.cases if derived.answer(other) == "CONTENDER"]
    apart = f", not told apart from {listed(contenders)}" if contenders else ""
    return f"{_wins(derived, case)}{apart}: {_assurance(case)}."


def provisional(case: Case) -> bool:
    """Whether any cell of the winner is not `REPRODUCES`, or a constraint on it is not surely held."""
    unsure = any(held.answer != "PASS" for held in case.constraints)
    return unsure or any(cell.verdict.reproducibility != "REPRODUCES" for cell in case.cells)


def _no_winner(derived: Derivation) -> str:
    if not derived.cases:
        return "there are no variants"
    rejected = sum(bool(case.reasons) for case in derived.cases)
    if rejected == len(derived.cases):
        return f"all {plural(rejected, 'variant')} are rejected" if rejected != 1 else "the only variant is rejected"
    if derived.ranking.cache is None:
        return "no variant that is not rejected has a valid value"
    return "no level was measured by every variant that is not rejected"


# --- the whole derivation ------------------------------------------------------------------------------------------


def explanation(derived: Derivation, case: Case) -> str:
    """How one variant's verdict follows from its boots, step by step, with every number."""
    lines = [
        f"{case.name}: {derived.answer(case)}",
        variant_sentence(derived, case),
        "",
        _count(derived, case),
        *(f"  {_boot(boot)}" for boot in case.boots),
    ]
    bounds = stats.clopper_pearson(failures(case), len(case.boots), sided=1)
    if bounds is not None:
        rate = f"true rate from {percent(bounds[0])} to {percent(bounds[1])} (Clopper-Pearson, one-sided 95 % each)"
        lines.append(f"  {failures(case)} of {len(case.boots)} did not complete: {rate}")
    for cell in case.cells:
        lines += ["", *_cell(derived, cell)]
    lines += ["", "Reasons to reject", *(f"  {line}" for line in _rules(derived, case))]
    lines += ["", "Ranking", *(f"  {line}" for line in _ranked(derived, case))]
    lines += ["", f"Drift: {derived.confounded or 'none found'}"]
    return "\n".join(lines)


def _count(derived: Derivation, case: Case) -> str:
    disturbed = derived.series.boots_disturbed.get(case.name, 0)
    aborted = derived.series.boots_aborted.get(case.name, 0)
    return f"Boots that count: {len(case.boots)} (besides {disturbed} disturbed, {aborted} aborted)"


def _boot(boot: BootResult) -> str:
    told = ", ".join(
        f"{level.level}: "
        + (
            "not measured"
            if not level.measured
            else "failed"
            if level.failed
            else "not valid"
            if not level.valid or level.value is None
            else printed(level.value)
        )
        for level in sorted(boot.levels, key=lambda level: level.level)
    )
    end = "" if boot.outcome == "completed" else f" {boot.outcome} ({boot.cause or boot.why or 'cause unknown'})"
    return f"{boot.boot} [{boot.cache}]{end}{': ' + told if told else ''}"


def _cell(derived: Derivation, cell: Cell) -> list[str]:
    series, verdict, n = derived.series, cell.verdict, len(cell.logs)
    lines = [f"Cell {streams((verdict.level,))}, {verdict.cache} cache: {verdict.reproducibility}"]
    if n == 0:
        return [*lines, "  no valid value"]
    lines.append(f"  n = {n}: {values(verdict.by_boot)}")
    if verdict.spread is None:
        lines.append("  one boot has no spread: undecided")
    else:
        low, high = stats.spread_factors(n)
        lines += [
            f"  sd of logs s = {verdict.spread:.4g}, tolerance τ = {series.tolerance:g}",
            f"  L = s·{low:.4g} = {verdict.spread_lower:.4g}, U = s·{high:.4g} = {verdict.spread_upper:.4g} (α = 0.05)",
            *_look(derived, verdict),
            f"  {_decision(derived, verdict, n)}",
        ]
        apart = stats.modes(cell.logs, series.tolerance)
        if apart is not None:
            lines.append(f"  widest gap: {len(apart.slow)} slow and {len(apart.fast)} fast, {times(apart.gap)} apart")
    if verdict.estimate is not None:
        ends = exp_interval(stats.mean_interval(cell.logs))
        ci = "no interval" if ends is None else f"95 % {printed(ends[0])} to {printed(ends[1])}"
        lines.append(f"  estimate {printed(verdict.estimate)} tok/s (geometric mean; {ci})")
    if verdict.hidden_mode_rate is not None:
        lines.append(
            f"  a slow mode on up to {percent(verdict.hidden_mode_rate)} of boots would be unseen (1 − 0.05^(1/{n}))"
        )
    return lines


def _look(derived: Derivation, verdict: CellVerdict) -> list[str]:
    """Which looks the plan allows, and which of them decided."""
    series = derived.series
    if not series.refute_looks and not series.vouch_looks:
        return []
    refute = f"refute after {listed(map(str, series.refute_looks))} boots at α = {series.refute_alpha:.3g}"
    vouch = f"vouch after {listed(map(str, series.vouch_looks))} boots at α = {series.vouch_alpha:.3g}"
    allowed = [text for text, looks in ((refute, series.refute_looks), (vouch, series.vouch_looks)) if looks]
    decided = f"settled after {verdict.decided_at}" if verdict.decided_at else "not settled yet"
    return [f"  plan {series.plan} may {' and '.join(allowed)}: {decided}"]


def _decision(derived: Derivation, verdict: CellVerdict, n: int) -> str:
    if verdict.reproducibility == "DOES_NOT_REPRODUCE":
        return "L > τ: even the kindest reading is too wide"
    if verdict.reproducibility == "REPRODUCES":
        return f"U ≤ τ and n ≥ {stats.MIN_VOUCH}: vouched for"
    within = verdict.spread_upper is not None and verdict.spread_upper <= derived.series.tolerance
    few = within and n < stats.MIN_VOUCH
    why = f"U ≤ τ, but it takes {stats.MIN_VOUCH} boots to vouch" if few else "L ≤ τ < U"
    return f"{why}: {further(verdict.more_boots)}"


def _rules(derived: Derivation, case: Case) -> list[str]:
    cold = sum(boot.cache in {"cold", "clear"} for boot in case.boots)
    told = {
        "cold_boot_fatal": _fatal(case)
        if case.fatal
        else f"none of {plural(cold, 'cold boot')} died before the trials",
        "collapses_with_concurrency": "; ".join(_collapse(c) for c in case.collapses)
        or "no level is below half of a lower one in every boot, or significantly more than 10 % lower",
        "does_not_reproduce": "; ".join(_wide(cell.verdict, derived.series.tolerance) for cell in case.wide)
        or "no cell is refuted",
        "errors_under_load": _errors(case) if case.errors else "no trial failed",
    }
    if case.constraints:
        told["misses_constraint"] = "; ".join(held.sentence for held in case.constraints)
    lines = [f"{'yes' if name in case.reasons else 'no '} {name}: {why}" for name, why in told.items()]
    return lines + [
        f"    {drop.high} against {streams((drop.low,))}{_state(drop.cache)}: {_drop(drop)}"
        for drop in case.drops
        if drop.difference.value < 0
    ]


def _ranked(derived: Derivation, case: Case) -> list[str]:
    ranking = derived.ranking
    if case.reasons:
        return ["rejected variants are not ranked"]
    if case.name not in ranking.objectives or ranking.winner is None:
        return [_unranked(derived, case)]
    lines = [f"objective {_objective(derived, case)}", f"winner {ranking.winner}"]
    if ranking.tied:
        lines.append(f"tied to the printed digits: {listed(ranking.tied)}")
    comparison = ranking.comparisons.get(case.name)
    if comparison is None:
        return lines
    d = comparison.difference
    if d is None or comparison.p_holm is None:
        return [*lines, "Welch's test needs two boots with every level on both sides"]
    test = "no spread on either side" if d.t is None else f"t = {d.t:.3g}, df = {d.df:.3g}"
    name = "Welch on log boot means"
    if comparison.method == "paired":
        name = "Student's t on differences within blocks, because blocks differ more than the boots in them"
    return [
        *lines,
        f"{name}: {times(d.value)} ({_between(d.interval)}), {test}, {p_value(d.p)}",
        f"Holm over {plural(comparison.family, 'comparison')}: {p_value(comparison.p_holm)}, "
        + ("slower" if comparison.slower else "not told apart"),
    ]
