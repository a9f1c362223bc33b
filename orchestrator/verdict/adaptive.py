"""What an adaptive plan still wants: boots go where a verdict is open. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from orchestrator.plan import Plan
from orchestrator.records import AnyRecord
from orchestrator.verdict.case import Case
from orchestrator.verdict.derive import derive
from orchestrator.verdict.gather import series_from_records

FATAL_OF_ONE_CAUSE = 2


def next_boots(records: Iterable[AnyRecord], plan: Plan) -> tuple[str, ...]:
    """The variants that are worth another block, in the order of the plan; none when all is settled.

    A variant is settled when it is rejected, when all its cells are, or when the plan's last look has its boots. One
    fatal cold boot rejects, but it takes two of the same cause to end a variant's boots. A fixed plan wants nothing.

    Args:
        records: The ledger's records, once the boots planned so far have ended.
        plan: The plan as written before the first boot, with the blocks added since.
    """
    if plan.plan_name == "fixed":
        return ()
    series = series_from_records(records, plan=plan, variants=plan.variants)
    cases = {case.name: case for case in derive(series).cases}
    return tuple(name for name in plan.variants if not _settled(plan, cases[name]))


def _settled(plan: Plan, case: Case) -> bool:
    # Planned ones count, not ended ones: a box that disturbs every boot must not make a plan without an end.
    planned = Counter(boot.cache for boot in plan.boots_planned if boot.variant == case.name)
    if all(planned[cache] >= plan.looks.last for cache in plan.cache):
        return True
    if case.reasons == ("cold_boot_fatal",):
        causes = Counter(boot.cause or boot.outcome for boot in case.fatal)
        return max(causes.values()) >= FATAL_OF_ONE_CAUSE
    if case.reasons:
        return True
    return bool(case.cells) and all(cell.verdict.reproducibility != "UNDECIDED" for cell in case.cells)
