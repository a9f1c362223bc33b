"""A series of boots to verdicts: what is rejected, what wins, how sure that is, and why.

`judge` is the one judge of a campaign, of `invoke judge` and of `invoke gate`. `gather` makes a series of a ledger's
records, `derive` holds the rules, `wording` the prose; the numbers come from `stats`.
"""

from __future__ import annotations

from orchestrator import stats
from orchestrator.errors import UsageError
from orchestrator.goals import UNITS
from orchestrator.records import ClaimVerdict, Series, VariantVerdict, Verdicts
from orchestrator.verdict import wording
from orchestrator.verdict.adaptive import next_boots
from orchestrator.verdict.case import Case
from orchestrator.verdict.claims import Finding, check_claim, compare_baseline, weigh_claim
from orchestrator.verdict.derive import Derivation, changes, derive
from orchestrator.verdict.gather import series_from_records
from orchestrator.verdict.values import exp, exp_interval, printed, throughput

__all__ = [
    "Finding",
    "check_claim",
    "compare_baseline",
    "explain",
    "judge",
    "next_boots",
    "printed",
    "series_from_records",
    "to_json",
]


def judge(series: Series) -> Verdicts:
    """The verdicts on a series; each variant in the order of the file."""
    derived = derive(series)
    ranking = derived.ranking
    winner = None if ranking.winner is None else derived.case(ranking.winner)
    return Verdicts(
        experiment=series.experiment,
        box=series.box,
        rehearsal=series.rehearsal,
        tolerance=series.tolerance,
        boots_planned=series.boots_planned,
        winner=ranking.winner,
        provisional=None if winner is None else wording.provisional(winner),
        production=series.production,
        sentence=wording.overall_sentence(derived),
        confounded=derived.confounded,
        objective_cache=ranking.cache,
        objective_levels=ranking.levels,
        objective_metric=ranking.goal.metric,
        objective_unit=UNITS[ranking.goal.metric],
        objective_weights={level: ranking.goal.weight(level) for level in ranking.levels},
        input_tokens=series.input_tokens,
        claims=tuple(_claim(derived, text) for text in series.claims),
        plan=series.plan,
        refute_looks=series.refute_looks,
        vouch_looks=series.vouch_looks,
        refute_alpha=series.refute_alpha,
        vouch_alpha=series.vouch_alpha,
        notes=series.notes,
        undeclared_look=series.undeclared_look,
        variants=tuple(_variant(derived, case) for case in derived.cases),
    )


def explain(series: Series, variant: str) -> str:
    """How one variant's verdict follows from its boots: every number, every rule, whether it held or not.

    Raises:
        UsageError: the series has no such variant.
    """
    derived = derive(series)
    case = derived.case(variant)
    if case is None:
        raise UsageError(
            f"no variant {variant!r} in {series.experiment}",
            hint=f"one of: {', '.join(case.name for case in derived.cases)}",
        )
    return wording.explanation(derived, case)


def to_json(verdicts: Verdicts) -> str:
    """verdicts.json: indented, `"schema": 1` first, no NaN, a line feed at its end."""
    return verdicts.model_dump_json(by_alias=True, indent=2) + "\n"


def _claim(derived: Derivation, text: str) -> ClaimVerdict:
    try:
        found = weigh_claim(derived, text)
    except UsageError as error:  # of the matrix's claims, one may be about a variant that `--only` left out
        found = Finding("UNDECIDED", f"{text}: {error.what}")
    return ClaimVerdict(claim=text, answer=found.answer, sentence=found.sentence)


def _variant(derived: Derivation, case: Case) -> VariantVerdict:
    series, ranking = derived.series, derived.ranking
    own = ranking.objectives.get(case.name)
    best = None if ranking.winner is None else ranking.objectives[ranking.winner]
    comparison = ranking.comparisons.get(case.name)
    difference = None if comparison is None else comparison.difference
    return VariantVerdict(
        name=case.name,
        verdict=derived.answer(case),
        reasons=case.reasons,
        boots=len(case.boots),
        boots_failed=sum(boot.died for boot in case.boots),
        boots_disturbed=series.boots_disturbed.get(case.name, 0),
        boots_aborted=series.boots_aborted.get(case.name, 0),
        sentence=wording.variant_sentence(derived, case),
        remarks=wording.remarks(derived, case),
        objective=None if own is None else throughput(own),
        objective_levels=() if own is None else ranking.levels,
        ratio_to_winner=None if own is None or best is None else exp(own - best),
        ratio_interval=None if difference is None else exp_interval(difference.interval),
        p_holm=None if comparison is None else comparison.p_holm,
        compared=None if comparison is None or difference is None else comparison.method,
        failure_rate=stats.clopper_pearson(wording.failures(case), len(case.boots), sided=1),
        confounded=None if own is None else derived.confounded,
        tied=case.name in ranking.tied,
        changes=changes(series, case.name),
        constraints=case.constraints,
        cells=tuple(cell.verdict for cell in case.cells),
    )
