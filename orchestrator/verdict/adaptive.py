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


def next_boots(records: Iterable[AnyRecord], plan: Plan, affordable: int | None = None) -> tuple[str, ...]:
    """The variants that are worth another block, in the order of the plan; none when all is settled.

    A variant is settled when it is rejected, when all its cells are, or when the plan's last look has its boots. One
    fatal cold boot rejects, but it takes two of the same cause to end a variant's boots. A fixed plan wants nothing.

    While the budget is enough for what is open, a block boots all of it, in random order. When it is not, every variant
    comes to its first look, and then boots go one by one where they decide most: to the variant whose cells need the
    fewest to reach a bound if their spread stays, of equals to the one with the fewest boots. Last come variants that
    are dominated as it looks now, spreads that no look would settle, and what is rejected and is only to die once more.

    Args:
        records: The ledger's records, once the boots planned so far have ended.
        plan: The plan as written before the first boot, with the blocks added since.
        affordable: Boots that the budget still pays for; None without a budget.
    """
    if plan.plan_name == "fixed":
        return ()
    series = series_from_records(records, plan=plan, variants=plan.variants)
    derived = derive(series)
    cases = {case.name: case for case in derived.cases}
    wanted = [cases[name] for name in plan.variants if not _settled(plan, cases[name])]
    needs = [_needed(plan, case) for case in wanted]
    most = [plan.looks.last - min(_planned(plan, case).values()) for case in wanted]
    # A variant never gets more than the plan has looks for, whatever its spread.
    whole = sum(min(need, left) for need, left in zip(needs, most, strict=True)) * len(plan.cache)
    if affordable is None or not wanted or whole <= affordable:
        return tuple(case.name for case in wanted)
    unseen = [case for case in wanted if min(_planned(plan, case).values()) < plan.looks.refute[0] and not case.reasons]
    if unseen:
        return tuple(case.name for case in unseen)
    # A place in the queue is no verdict, so this look costs no error rate.
    queue = [
        (derived.answer(case) == "DOMINATED", need, min(_planned(plan, case).values()))
        for case, need in zip(wanted, needs, strict=True)
    ]
    return (wanted[queue.index(min(queue))].name,)


def _planned(plan: Plan, case: Case) -> dict[str, int]:
    """Planned boots of a variant in each cache state: a box that disturbs every boot must not make a plan endless."""
    planned = Counter(boot.cache for boot in plan.boots_planned if boot.variant == case.name)
    return {cache: planned[cache] for cache in plan.cache}


def _needed(plan: Plan, case: Case) -> int:
    """Boots until the case is settled if every spread stays as it is; more than any plan's where that is unknown."""
    more = [cell.verdict.more_boots for cell in case.cells if cell.verdict.reproducibility == "UNDECIDED"]
    known = [count for count in more if count is not None]
    if case.reasons:
        return plan.looks.last + 2
    if not more or len(known) < len(more):
        return plan.looks.last + 1
    return max(known)


def _settled(plan: Plan, case: Case) -> bool:
    if min(_planned(plan, case).values()) >= plan.looks.last:
        return True
    if case.reasons == ("cold_boot_fatal",):
        causes = Counter(boot.cause or boot.outcome for boot in case.fatal)
        return max(causes.values()) >= FATAL_OF_ONE_CAUSE
    if case.reasons:
        return True
    return bool(case.cells) and all(cell.verdict.reproducibility != "UNDECIDED" for cell in case.cells)
