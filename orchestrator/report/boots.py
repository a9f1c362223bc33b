"""Boots as the report shows them: the index over the ledger, the boot table, our own overhead, run order and drift."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from orchestrator import stats
from orchestrator.records import (
    STEPS,
    AnyRecord,
    BootEnded,
    BootOutcome,
    BootRecord,
    BootResult,
    BootStarted,
    JournalAnswered,
    Series,
    StepEnded,
    Timeline,
    TrialEnded,
)
from orchestrator.report import words
from orchestrator.report.model import MOST_ROWS, BootView, Section, Table, VariantView

# Facts of steps that have a table of their own.
_ELSEWHERE = frozenset({"timeline", "texts", "digest"})
PHASES: tuple[tuple[str, str], ...] = (
    ("imports", "imports_s"),
    ("config", "config_s"),
    ("weights", "weights_s"),
    ("compile", "compile_s"),
    ("profiling", "profiling_s"),
    ("KV cache", "kv_cache_s"),
    ("graph capture", "graph_capture_s"),
    ("warm-up", "warmup_s"),
    ("ready", "ready_s"),
)


@dataclass(slots=True)
class _Found:
    """What the ledger holds of one boot, while it is being read."""

    started: BootStarted | None = None
    steps: list[StepEnded] = field(default_factory=list)
    answer: JournalAnswered | None = None
    trials: list[TrialEnded] = field(default_factory=list)
    ended: BootEnded | None = None

    def add(self, record: AnyRecord) -> None:
        if type(record) is TrialEnded:  # nearly all are, and isinstance takes many times as long
            self.trials.append(record)
            return
        match record:
            # A boot that was cut off and started afresh under the same name is told by its last start alone.
            case BootStarted():
                self.started, self.answer, self.ended = record, None, None
                self.steps, self.trials = [], []
            case StepEnded():
                self.steps.append(record)
            case JournalAnswered():
                self.answer = record
            case BootEnded():
                self.ended = record
            case _:
                pass


def collect(records: Iterable[AnyRecord], series: Series) -> tuple[BootView, ...]:
    """Every boot in run order: those of the series joined with their records, and those that do not count."""
    found: dict[str, _Found] = defaultdict(_Found)
    for record in records:
        if isinstance(record, BootRecord):
            found[record.boot].add(record)
    results = {boot.boot: boot for boot in series.boots}
    names = dict.fromkeys((*results, *found))
    views = (_join(name, results.get(name), found.get(name, _Found()), series.input_tokens) for name in names)
    return tuple(sorted(views, key=lambda boot: (boot.position, boot.name)))


def _join(name: str, result: BootResult | None, one: _Found, lengths: tuple[int, ...]) -> BootView:
    some: BootRecord | BootResult | None = result or one.ended or one.started or next(iter(one.trials), None)
    some = some or next(iter(one.steps), None) or one.answer
    assert some is not None  # a boot is found through its result or a record of it
    ended: tuple[BootOutcome, str] = ("aborted", "it never ended")
    if result is not None:
        ended = result.outcome, result.why or (one.ended.why if one.ended is not None else "")
    elif one.ended is not None:
        ended = one.ended.boot_outcome, one.ended.why
    return BootView(
        name=name,
        variant=some.variant,
        cache=some.cache,
        position=some.position,
        outcome=ended[0],
        why=words.clean(ended[1], 300),
        result=result,
        started=one.started,
        steps=tuple(one.steps),
        answer=one.answer.answer if one.answer is not None else None,
        trials=tuple(one.trials),
        ended=one.ended,
        lengths=lengths,
    )


# --- the boot table ------------------------------------------------------------------------------------------------


def boot_section(boots: Sequence[BootView]) -> Section:
    """What became of each boot, where its time went, and whether it was really cold."""
    outcome = Table(
        "Boots in the order in which they ran",
        ("boot", "variant", "cache", "outcome", "ended at", "journal", "cache proof", "whole boot", "why"),
        tuple(_outcome_row(boot) for boot in boots[:MOST_ROWS]),
        numeric=frozenset({7}),
        code=frozenset({0}),
        folded=True,
        left_out=len(boots[MOST_ROWS:]),
    )
    tables = [outcome]
    if any(boot.steps for boot in boots):
        tables.append(_steps_table(boots))
    if any(_phases(boot) for boot in boots):
        tables.append(_phase_table(boots))
    ours, overhead = _overhead(boots)
    if overhead is not None:
        tables.append(overhead)
    noted = _facts_table(boots)
    if noted.rows:
        tables.append(noted)
    return Section(
        "boot_table",
        "Boot timeline",
        (*_boot_sentences(boots), *((ours,) if ours is not None else ())),
        tuple(tables),
        figure="timeline" if any(boot.steps for boot in boots) else None,
    )


def _boot_sentences(boots: Sequence[BootView]) -> tuple[str, ...]:
    counted = [boot for boot in boots if boot.counted]
    died = sum(boot.result is not None and boot.result.died for boot in counted)
    said = [f"{words.plural(len(counted), 'boot')} counted; the engine died in {died} of them."]
    proofs = [boot.ended.cache_proof for boot in counted if boot.ended is not None and boot.ended.cache_proof]
    cold = [boot for boot in counted if boot.cache in ("cold", "clear") and boot.ended is not None]
    if proofs and cold:
        shown = sum(boot.ended is not None and boot.ended.cache_proof == "compiled" for boot in cold)
        said.append(f"{shown} of {len(cold)} cold boots show in the engine's log that it compiled instead of loading.")
    ready = [step.seconds for boot in counted for step in boot.steps if step.name == "ready" and step.outcome == "ok"]
    if ready:
        span = f"{words.seconds(min(ready))} to {words.seconds(max(ready))}"
        said.append(f"From start to ready took {span}, median {words.seconds(median(ready))}.")
    return tuple(said)


def _outcome_row(boot: BootView) -> tuple[str, ...]:
    ended, answer = boot.ended, boot.answer
    journal: tuple[str | None, ...] = ()
    if answer is not None:
        # A benign end's cause says all three.
        journal = (answer.cause,) if answer.outcome == "benign" else (answer.outcome, answer.phase, answer.cause)
    elif boot.result is not None:
        journal = boot.result.phase, boot.result.cause
    return (
        boot.name,
        words.clean(boot.variant),
        boot.cache,
        boot.outcome,
        (ended.step if ended is not None else None) or words.ABSENT,
        words.clean(", ".join(part for part in journal if part), 120) or words.ABSENT,
        words.clean((ended.cache_proof if ended is not None else None) or words.ABSENT, 60),
        words.seconds(ended.seconds if ended is not None else None),
        boot.why or words.ABSENT,
    )


def step_seconds(boot: BootView) -> dict[str, float]:
    """Seconds per step of one boot; a step that came several times is summed."""
    total: dict[str, float] = defaultdict(float)
    for step in boot.steps:
        total[step.name] += step.seconds
    return dict(total)


def _steps_table(boots: Sequence[BootView]) -> Table:
    rows = []
    for boot in boots[:MOST_ROWS]:
        spent = step_seconds(boot)
        marks = {step.name: "" if step.outcome == "ok" else f" ({step.outcome})" for step in boot.steps}
        cells = (f"{words.seconds(spent.get(name))}{marks.get(name, '')}" for name in STEPS)
        rows.append((boot.name, *cells))
    return Table(
        "Seconds per step",
        ("boot", *STEPS),
        tuple(rows),
        numeric=frozenset(range(1, len(STEPS) + 1)),
        code=frozenset({0}),
        folded=True,
        left_out=len(boots[MOST_ROWS:]),
    )


def _phases(boot: BootView) -> Timeline | None:
    return boot.answer.timeline if boot.answer is not None else None


def _phase_table(boots: Sequence[BootView]) -> Table:
    told_of = [(boot, line) for boot in boots if (line := _phases(boot)) is not None]
    rows = []
    for boot, line in told_of[:MOST_ROWS]:
        told = (words.seconds(getattr(line, attribute)) for _, attribute in PHASES)
        kv = words.ABSENT if line.kv_tokens is None else f"{line.kv_tokens:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
        memory = (
            words.number(line.weights_gib, 2),
            words.number(line.kv_gib, 2),
            words.number(line.graph_capture_gib, 2),
        )
        rows.append((boot.name, *told, line.compile_state, kv, *memory))
    columns = (
        "boot",
        *(label for label, _ in PHASES),
        "compile state",
        "KV tokens",
        "weights GiB",
        "KV GiB",
        "graphs GiB",
    )
    return Table(
        "Start-up phases, from the engine's own lines",
        columns,
        tuple(rows),
        numeric=frozenset({*range(1, len(PHASES) + 1), *range(len(PHASES) + 2, len(columns))}),
        code=frozenset({0}),
        folded=True,
        left_out=len(told_of[MOST_ROWS:]),
    )


def _facts_table(boots: Sequence[BootView]) -> Table:
    noted = [(boot.name, step) for boot in boots for step in boot.steps if step.facts or step.detail]
    rows = [
        (name, step.name, step.outcome, words.clean(step.detail or words.ABSENT, 200), _facts(step.facts))
        for name, step in noted[:MOST_ROWS]
    ]
    return Table(
        "What each step noted",
        ("boot", "step", "outcome", "detail", "facts"),
        tuple(rows),
        code=frozenset({0, 4}),
        folded=True,
        left_out=len(noted[MOST_ROWS:]),
    )


def _facts(facts: Mapping[str, object]) -> str:
    said = (_fact(name, value) for name, value in facts.items() if name not in _ELSEWHERE)
    return words.clean("; ".join(one for one in said if one), 400) or words.ABSENT


def _fact(name: str, value: object) -> str:
    """`name value`, nested ones in brackets; nothing for what is empty."""
    if isinstance(value, Mapping):
        inner = ", ".join(one for key, item in value.items() if (one := _fact(str(key), item)))
        return f"{name} ({inner})" if inner else ""
    if isinstance(value, list | tuple):
        value = ", ".join(str(one) for one in value)
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return f"{name} {'yes' if value else 'no'}"
    if isinstance(value, float):
        return f"{name} {value:.4g}" if math.isfinite(value) else ""
    return f"{name} {value}"


# --- our own part ---------------------------------------------------------------------------------------------------


def _overhead(boots: Sequence[BootView]) -> tuple[str | None, Table | None]:
    """Seconds of ours per boot, in a sentence and as a table of steps: neither the engine worked nor a load ran."""
    by_step: dict[str, list[float]] = defaultdict(list)
    # A disturbed boot's time is the rig's, and its waiting for a clean slate would drown everything else.
    counted = [boot for boot in boots if boot.counted]
    for boot in counted:
        ours: dict[str, float] = defaultdict(float)
        for step in boot.steps:
            ours[step.name] += max(0.0, step.seconds - step.engine_s)
        for name, spent in ours.items():
            by_step[name].append(spent)
    if not by_step:
        return None, None
    rows = [_overhead_row(name, by_step[name]) for name in STEPS if name in by_step]
    totals = [boot.ended.ours_s for boot in counted if boot.ended is not None and boot.ended.ours_s is not None]
    sentence = None
    if totals:
        rows.append(_overhead_row("whole boot", totals))
        sentence = (
            f"Of each boot {words.seconds(median(totals))} is ours in the median, {words.seconds(max(totals))} at "
            "most: time in which neither the engine works, starts or dies nor a load runs."
        )
    columns = ("step", "boots", "median", "most")
    numeric, code = frozenset({1, 2, 3}), frozenset({0})
    return sentence, Table("Our own part of each boot", columns, tuple(rows), numeric, code, folded=True)


def _overhead_row(name: str, spent: Sequence[float]) -> tuple[str, ...]:
    return name, str(len(spent)), words.seconds(median(spent)), words.seconds(max(spent))


# --- order and drift ------------------------------------------------------------------------------------------------


def residuals(variants: Sequence[VariantView], boots: Sequence[BootView]) -> dict[str, tuple[tuple[int, float], ...]]:
    """Per variant: (position in the plan, mean over its levels of ln(value ÷ cell's centre)), refuted cells not."""
    position = {boot.name: boot.position for boot in boots}
    found: dict[str, tuple[tuple[int, float], ...]] = {}
    for variant in variants:
        gathered: dict[str, list[float]] = defaultdict(list)
        for cell in variant.cells:
            if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE":
                continue
            logs = {point.boot: math.log(point.value) for point in cell.points if point.value is not None}
            if len(logs) < 2:
                continue
            centre = sum(logs.values()) / len(logs)
            for boot, value in logs.items():
                gathered[boot].append(value - centre)
        line = sorted((position[boot], sum(many) / len(many)) for boot, many in gathered.items() if boot in position)
        if line:
            found[variant.verdict.name] = tuple(line)
    return found


def order_section(variants: Sequence[VariantView], boots: Sequence[BootView], confounded: str | None) -> Section | None:
    """Whether boots became faster or slower in the course of the campaign (Theil–Sen slope within variants)."""
    found = residuals(variants, boots)
    trend = stats.theil_sen([[(float(place), value) for place, value in line] for line in found.values()])
    if trend is None:
        return None
    places = [place for line in found.values() for place, _ in line]
    across = max(places) - min(places)
    sentences = [f"From the first boot to the last throughput changed by {_change(trend.slope * across)}: "]
    if trend.interval is None:
        sentences[0] += "too few boots to tell a trend from chance."
    else:
        span = f"{_change(trend.interval[0] * across)} to {_change(trend.interval[1] * across)}"
        said = "later boots are not like earlier ones" if trend.found else "no trend is seen"
        sentences[0] += f"95 % interval {span}, {said}."
    if confounded is not None:
        sentences.append(f"The comparison is confounded: {words.clean(confounded)}.")
    rows = tuple(
        (str(place), words.clean(name), _change(value, 2)) for name, line in found.items() for place, value in line
    )
    table = Table(
        "Difference from the cell's own centre",
        ("position", "variant", "difference"),
        tuple(sorted(rows, key=lambda row: int(row[0]))),
        numeric=frozenset({0, 2}),
        folded=True,
    )
    return Section("order", "Order and drift", tuple(sentences), (table,), figure="order")


def _change(log: float, digits: int = 1) -> str:
    # Beyond a factor of e^9 a percentage says nothing, and the exponential may not be finite.
    percent = round(math.expm1(max(-9.0, min(9.0, log))) * 100, digits)
    return f"{percent + 0.0:+.{digits}f} %"
