"""The ledger's records of one experiment to a `Series`: which boots count, and what each of them says. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from orchestrator.goals import parse_constraint
from orchestrator.plan import Plan
from orchestrator.records import (
    STEPS,
    THROUGHPUT,
    Answer,
    AnyRecord,
    BootEnded,
    BootRecord,
    BootResult,
    BootStarted,
    CacheState,
    CampaignStarted,
    CountedOutcome,
    JournalAnswered,
    Level,
    LevelResult,
    Objective,
    Series,
    StepEnded,
    TrialEnded,
    level_of,
)
from orchestrator.verdict.values import throughput

COUNTED: Mapping[str, CountedOutcome] = {"completed": "completed", "crashed": "crashed", "not_ready": "not_ready"}
COVARIATES = ("start_temperature_c",)  # facts of steps that may explain a drift


def series_from_records(
    records: Iterable[AnyRecord],
    *,
    plan: Plan | None = None,
    tolerance: float | None = None,
    production: str | None = None,
    variants: Sequence[str] | None = None,
    boots_planned: int | None = None,
) -> Series:
    """The series of one experiment's records.

    One entry for each planned boot that ended completed, crashed or not_ready, in plan order, whatever order they
    ran in. Disturbed and aborted boots are only counted; one that has not ended is nowhere.

    Args:
        records: The ledger's records, those of one boot in the order in which they were written.
        plan: Its looks hold if it is adaptive; without it, or with a fixed one, there is one look, at all boots.
        tolerance: Default: that of the last campaign_started, as for the next three.
        production: The variant that is production's own setting.
        variants: In the order of the file.
        boots_planned: Boots a variant and cache state.
    """
    campaigns, boots = _read(records)
    last = campaigns[-1] if campaigns else None
    counted = _counted(boots.values())
    named = [name for campaign in campaigns for name in campaign.variants]
    seen = [boot.ended.variant for boot in counted if boot.ended is not None]
    ended = [boot.ended for boot in boots.values() if boot.ended is not None]
    lengths = _lengths(campaigns, counted)
    asked = _asked(last)
    return Series(
        experiment=last.experiment if last else "",
        box=last.box if last else None,
        rehearsal=any(campaign.rehearsal for campaign in campaigns),
        tolerance=tolerance if tolerance is not None else last.tolerance if last else 0.05,
        boots_planned=boots_planned if boots_planned is not None else last.boots_planned if last else None,
        production=production if production is not None else last.production_variant if last else None,
        variants=tuple(dict.fromkeys(variants if variants is not None else (*named, *seen))),
        changes=dict(last.changes) if last else {},
        concurrency=tuple(sorted({level for campaign in campaigns for level in campaign.concurrency})),
        input_tokens=lengths,
        caches=_caches(boots.values()),
        boots=tuple(_result(boot, lengths, asked) for boot in counted),
        boots_disturbed=dict(Counter(one.variant for one in ended if one.boot_outcome == "disturbed")),
        boots_aborted=dict(Counter(one.variant for one in ended if one.boot_outcome == "aborted")),
        confounded=_differing(campaigns),
        undeclared_look=_undeclared(plan, boots.values()),
        blocked=True,
        notes=_notes(campaigns),
        objective=last.objective if last else Objective(),
        constraints=last.constraints if last else (),
        claims=last.claims if last else (),
        **_looks(plan),
    )


def _asked(last: CampaignStarted | None) -> frozenset[str]:
    """The metrics besides throughput that the experiment is for: of thousands of boots no others are worked out."""
    if last is None:
        return frozenset()
    limits = [parse_constraint(text).metric for text in last.constraints]
    return frozenset({last.objective.metric, *limits} - {THROUGHPUT})


def _notes(campaigns: Iterable[CampaignStarted]) -> tuple[str, ...]:
    """What a reader of any number here has to know."""
    said = (
        "prompts were sent again as they are when all were sent (load.repeat_prompts): the prefix cache answered for "
        "the engine, and these are not the speeds of new prompts"
    )
    return (said,) if any(campaign.load.get("repeat_prompts") for campaign in campaigns) else ()


def _lengths(campaigns: Iterable[CampaignStarted], boots: Iterable[_Boot]) -> tuple[int, ...]:
    """The prompt lengths that were planned; of a ledger without its beginning those that its trials name."""
    planned = {length for campaign in campaigns for length in campaign.input_tokens}
    seen = {trial.input_tokens for boot in boots for trial in boot.trials if trial.input_tokens is not None}
    return tuple(sorted(planned or seen))


def _looks(plan: Plan | None) -> dict[str, Any]:
    """What an adaptive plan has declared; a fixed one has a single look, at the end."""
    if plan is None or plan.plan_name == "fixed":
        return {}
    return {
        "plan": plan.plan_name,
        "refute_looks": plan.looks.refute,
        "vouch_looks": plan.looks.vouch,
        "refute_alpha": plan.looks.refute_alpha,
        "vouch_alpha": plan.looks.vouch_alpha,
    }


def _undeclared(plan: Plan | None, boots: Iterable[_Boot]) -> str | None:
    """What is looked at too early, or again; an adaptive plan's cells look only where it has declared it."""
    if plan is None or plan.plan_name != "fixed":
        return None
    done = {
        (b.first.block, b.first.variant, b.first.cache) for b in boots if b.ended and b.ended.boot_outcome in COUNTED
    }
    left = sum((one.block, one.variant, one.cache) not in done for one in plan.boots_planned)
    early = f"after {len(plan.boots_planned) - left} of {len(plan.boots_planned)} planned boots"
    if left:
        return (
            f"an early look, {early}: the plan looks once, at its end, and what is acted on before is wrong more often "
            "(docs/statistics.md)"
        )
    if plan.extended_from:
        before = ", ".join(map(str, plan.extended_from))
        return (
            f"the plan was extended from {before} boots a variant: a look may have been taken then that nobody declared"
        )
    return None


@dataclass
class _Boot:
    """What the ledger holds of one boot."""

    first: BootRecord
    trials: list[TrialEnded] = field(default_factory=list)
    answer: Answer | None = None
    covariates: dict[str, float] = field(default_factory=dict)
    ended: BootEnded | None = None

    def add(self, record: BootRecord) -> None:
        if type(record) is TrialEnded:  # nearly all are, and isinstance takes many times as long
            self.trials.append(record)
            return
        match record:
            case JournalAnswered():
                self.answer = record.answer
            case StepEnded():
                self.covariates |= _covariates(record)
            case BootEnded():
                self.ended = record
            case _:
                pass


def _read(records: Iterable[AnyRecord]) -> tuple[list[CampaignStarted], dict[str, _Boot]]:
    campaigns: list[CampaignStarted] = []
    boots: dict[str, _Boot] = {}
    for record in records:
        if type(record) is CampaignStarted:
            campaigns.append(record)
        elif isinstance(record, BootRecord):
            # A boot that was cut off and started afresh under the same name is told by its last start alone.
            if record.boot not in boots or (isinstance(record, BootStarted) and boots[record.boot].ended is None):
                boots[record.boot] = _Boot(record)
            boots[record.boot].add(record)
    return campaigns, boots


def _counted(boots: Iterable[_Boot]) -> list[_Boot]:
    """Boots that count in plan order; of one planned boot the first attempt that counts."""
    planned: dict[tuple[int, str, str], _Boot] = {}
    for boot in sorted(boots, key=lambda boot: (boot.first.position, boot.first.attempt)):
        if boot.ended is not None and boot.ended.boot_outcome in COUNTED:
            planned.setdefault((boot.first.block, boot.first.variant, boot.first.cache), boot)
    return list(planned.values())


def _caches(boots: Iterable[_Boot]) -> tuple[CacheState, ...]:
    return tuple(dict.fromkeys(boot.first.cache for boot in boots)) or ("cold",)


def _result(boot: _Boot, lengths: Sequence[int], asked: Collection[str]) -> BootResult:
    ended, answer = boot.ended, boot.answer
    assert ended is not None
    bad = None if answer is None or answer.outcome == "benign" else answer
    lost = ended.boot_outcome in ("crashed", "not_ready")
    before = lost and _before_trials(ended, boot.trials)
    return BootResult(
        boot=ended.boot,
        variant=ended.variant,
        cache=ended.cache,
        block=ended.block,
        position=ended.position,
        outcome=COUNTED[ended.boot_outcome],
        why=ended.why,
        died=ended.died,
        died_before_trials=before,
        died_under_load=ended.died and not before and ended.step in (None, "trials"),
        cause=None if bad is None else bad.cause,
        phase=None if bad is None else bad.phase,
        levels=_levels(boot.trials, lengths, asked),
        at=ended.at,
        covariates=boot.covariates,
    )


def _before_trials(ended: BootEnded, trials: Sequence[TrialEnded]) -> bool:
    if ended.step is None:
        return not trials
    return STEPS.index(ended.step) < STEPS.index("trials")


def _levels(trials: Iterable[TrialEnded], lengths: Sequence[int], asked: Collection[str]) -> tuple[LevelResult, ...]:
    """One result for each level: windows of one boot describe that boot, so their logs are averaged."""
    by_level: dict[Level, list[TrialEnded]] = {}
    for trial in trials:
        by_level.setdefault(level_of(trial.concurrency, trial.input_tokens, lengths), []).append(trial)
    return tuple(_level(level, by_level[level], asked) for level in sorted(by_level))


def _level(level: Level, trials: Sequence[TrialEnded], asked: Collection[str]) -> LevelResult:
    values = [
        trial.tokens_per_s
        for trial in trials
        if trial.valid and not trial.failed and trial.tokens_per_s is not None and trial.tokens_per_s > 0
    ]
    failed = any(trial.failed for trial in trials)
    value = values[0] if len(values) == 1 else None
    if len(values) > 1:
        value = throughput(math.fsum(math.log(one) for one in values) / len(values))
    return LevelResult(
        concurrency=level.concurrency,
        input_tokens=level.input_tokens,
        value=None if failed else value,
        failed=failed,
        valid=bool(values) or failed,
        metrics={} if failed or not values else _latencies(trials, asked),
    )


def _latencies(trials: Sequence[TrialEnded], asked: Collection[str]) -> dict[str, float]:
    """Latencies of valid trials by name; several windows of one boot are one number, as their throughput is."""
    if not asked:
        return {}
    counted = [trial for trial in trials if trial.valid and not trial.failed]
    found: dict[str, float] = {}
    for what in ("ttft", "itl", "e2e"):
        seen = [getattr(trial, f"{what}_ms") for trial in counted]
        for quantile in ("p50", "p90", "p99", "max"):
            if f"{what}_{quantile}_ms" not in asked:
                continue
            logs = [math.log(value) for value in map(attrgetter(quantile), seen) if value is not None and value > 0]
            if logs:
                found[f"{what}_{quantile}_ms"] = throughput(math.fsum(logs) / len(logs))
    return found


def _covariates(step: StepEnded) -> dict[str, float]:
    found = {name: step.facts.get(name) for name in COVARIATES}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _differing(campaigns: Sequence[CampaignStarted]) -> str | None:
    """The first fact in which sessions of one experiment differ, where both know it."""
    known: dict[str, str] = {}
    for campaign in campaigns:
        for fact, value in campaign.fingerprint.items():
            if value is None:
                continue
            if known.setdefault(fact, value) != value:
                return f"boots of one comparison differ in {fact}: {known[fact]} and {value}"
    return None
