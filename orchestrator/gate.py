"""The verdict for CI: three answers with their exit codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator import verdict
from orchestrator.errors import FAIL, OK, UNDECIDED
from orchestrator.records import Series, Verdicts

_CODES: Mapping[str, int] = {"PASS": OK, "FAIL": FAIL, "UNDECIDED": UNDECIDED}


def gate(series: Series, *, baseline: Series | None = None, claims: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and sentence: on claims, on a baseline, on both, or else on production and the matrix's own claims.

    Of several answers the worst counts.

    Raises:
        UsageError: a claim that is none, or series that cannot be compared.
    """
    found = [verdict.check_claim(series, claim) for claim in claims]
    if baseline is not None:
        found.append(verdict.compare_baseline(series, baseline))
    stamp = "REHEARSAL: " if series.rehearsal else ""
    answers = [(_CODES[one.answer], f"{stamp}{one.answer}: {one.sentence}") for one in found]
    if not found:
        verdicts = verdict.judge(series)
        answers = [judge_production(verdicts)]
        answers += [(_CODES[one.answer], f"{stamp}{one.answer}: {one.sentence}") for one in verdicts.claims]
    # A failure counts before what is undecided, and that before a pass.
    code = max((code for code, _ in answers), key=(OK, UNDECIDED, FAIL).index)
    return code, "\n".join(sentence for _, sentence in answers)


def judge_production(verdicts: Verdicts) -> tuple[int, str]:
    """Exit code and sentence on the production setting.

    5 when it is REJECTED or DOMINATED; 0 when it is WINNER or CONTENDER and all its cells are REPRODUCES; else 2.
    """
    stamp = "REHEARSAL: " if verdicts.rehearsal else ""
    name = verdicts.production
    found = next((variant for variant in verdicts.variants if variant.name == name), None)
    if found is None:
        return UNDECIDED, f"{stamp}UNDECIDED: no variant is production's own setting, so there is nothing to judge"
    if found.verdict in ("REJECTED", "DOMINATED"):
        return FAIL, f"{stamp}FAIL: production ({name}) is {found.verdict}: {found.why}"
    vouched = bool(found.cells) and all(cell.reproducibility == "REPRODUCES" for cell in found.cells)
    if found.verdict in ("WINNER", "CONTENDER") and vouched:
        return OK, f"{stamp}PASS: production ({name}) is {found.verdict}: {found.why}"
    return UNDECIDED, f"{stamp}UNDECIDED: production ({name}) is {found.verdict}: {found.why}"
