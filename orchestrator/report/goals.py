"""What the matrix asked for: its objective, its constraints and its claims, each with its answer."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.records import THROUGHPUT, Verdicts
from orchestrator.report import words
from orchestrator.report.model import Section, Table

_ANSWERS = {"PASS": "holds", "FAIL": "does not hold", "UNDECIDED": "undecided"}


def section(verdicts: Verdicts) -> Section | None:
    """None where the matrix asked for nothing beyond throughput over all levels."""
    rows = tuple(
        (words.clean(name), words.clean(text), _ANSWERS[answer], words.clean(sentence))
        for name, text, answer, sentence in _answers(verdicts)
    )
    plain = verdicts.objective_metric == THROUGHPUT and len(set(verdicts.objective_weights.values())) <= 1
    if not rows and plain:
        return None
    table = Table("Constraints and claims", ("about", "asked", "answer", "why"), rows)
    return Section("goals", "What was asked for", (_objective(verdicts),), (table,) if rows else ())


def _answers(verdicts: Verdicts) -> Iterator[tuple[str, str, str, str]]:
    for variant in verdicts.variants:
        for held in variant.constraints:
            yield variant.name, held.constraint, held.answer, held.sentence
    for claim in verdicts.claims:
        yield "claim", claim.claim, claim.answer, claim.sentence


def _objective(verdicts: Verdicts) -> str:
    best = "highest" if verdicts.objective_metric == THROUGHPUT else "lowest"
    levels = words.listing(
        f"{level}" + (f" (weight {weight:g})" if weight != 1 else "")
        for level, weight in sorted(verdicts.objective_weights.items())
    )
    at = f" over the levels {levels}" if levels else ""
    return (
        f"The winner has the {best} {verdicts.objective_metric} ({verdicts.objective_unit}), geometric mean{at}. A "
        "constraint or claim holds, or does not, by a one-sided 95 % bound over boots; else it is undecided."
    )
