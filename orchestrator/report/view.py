"""What is said: the View of one experiment, from its verdicts, the ledger's records and the boots' folders.

`build` reads as the report's table of contents. Nothing is computed here that decides: verdicts come from the analysis
and are only put into words, and a cell that does not reproduce never shows a mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.records import (
    AnyRecord,
    CacheState,
    CampaignStarted,
    CellVerdict,
    Level,
    LevelResult,
    Series,
    VariantVerdict,
    Verdicts,
)
from orchestrator.report import answers, commands, evidence, goals, gpus, memory, provenance, trials, wall, words
from orchestrator.report import boots as boot_room
from orchestrator.report.model import (
    MOST_POINTS,
    BootView,
    CellView,
    NextStep,
    Point,
    Section,
    Table,
    VariantView,
    View,
)

_NEEDS_A_GPU = frozenset({"wall", "memory"})


def build_view(
    records: Sequence[AnyRecord],
    series: Series,
    verdicts: Verdicts,
    boots_dir: Path | None = None,
    steps: Sequence[NextStep] = (),
) -> View:
    """The View of one experiment.

    Args:
        records: the ledger's records, in order; empty for a series recorded by hand.
        series: what the verdicts were made of.
        verdicts: the answers.
        boots_dir: `artifacts/<experiment>/boots`, for journal excerpts, with `plan.json` beside it; None without one.
        steps: what to do next.
    """
    started, _ = provenance.sessions(records)
    boots = boot_room.collect(records, series)
    variants = _variants(verdicts, series, records, boots, boots_dir)
    good = trials.good(boots)
    ratios = trials.ruler_ratios(good)
    sections = (
        _verdict_section(variants),
        goals.section(verdicts),
        _boots_section(variants),
        _throughput_section(variants),
        trials.latency_section(variants, good),
        wall.section(variants, boots, good, started),
        boot_room.boot_section(boots),
        memory.section(boots, started),
        gpus.section(good),
        trials.rulers_section(good, ratios),
        _evidence_section(variants),
        answers.section(boots),
        boot_room.order_section(variants, boots, verdicts.confounded),
        trials.attribution_section(variants, good),
        provenance.section(records, series, boots, boots_dir),
        trials.excluded_section(boots),
    )
    return View(
        verdicts=verdicts,
        headline=headline(verdicts),
        sureness=tuple(_sureness(verdicts, started)),
        variants=variants,
        boots=boots,
        rulers=trials.ruler_medians(ratios),
        sections=_shown([section for section in sections if section is not None]),
        good=good,
        steps=tuple(steps),
        walls={key: one.tokens_per_s for key, one in wall.walls(variants, boots, good, started).items()},
    )


def _shown(sections: Sequence[Section]) -> tuple[Section, ...]:
    """What could not be shown for lack of data is one sentence at the end, and no section of its own."""
    empty = [one for one in sections if one.key in _NEEDS_A_GPU and not one.tables]
    said = tuple(
        f"{one.title} is not shown: {one.sentences[0].removeprefix('Not computed: ').rstrip('.')}." for one in empty
    )
    kept = [
        replace(one, tables=tuple(table.shortened() for table in one.tables)) for one in sections if one not in empty
    ]
    return tuple(replace(one, sentences=one.sentences + said) if one.key == "excluded" else one for one in kept)


# --- the answer -----------------------------------------------------------------------------------------------------


def headline(verdicts: Verdicts) -> str:
    """The answer in one short sentence; how sure it is stands below it."""
    rejected = sum(variant.verdict == "REJECTED" for variant in verdicts.variants)
    count = (
        f"{rejected} of {words.plural(len(verdicts.variants), 'variant')} {'is' if rejected == 1 else 'are'} rejected"
    )
    if verdicts.winner is None:
        return f"Nothing wins: {count}."
    sure = ", provisionally" if verdicts.provisional else ""
    return f"{words.clean(verdicts.winner)} wins{sure}; {count}."


def _sureness(verdicts: Verdicts, started: Sequence[CampaignStarted]) -> Iterator[str]:
    if verdicts.sentence:
        yield words.clean(verdicts.sentence)
    for note in verdicts.notes:
        yield f"Note: {words.clean(note)}."
    if started and not started[-1].headroom:
        yield "The headroom step was off: no boot was tried with a full prefill batch or with all streams at once."


def _agreements(variants: Sequence[VariantView]) -> Iterator[str]:
    """Each agreement's sentence once, with the cells that it speaks of."""
    found: dict[str, dict[str, list[str]]] = {}
    for variant in variants:
        for cell in variant.cells:
            if cell.agreement is not None:
                level = str(cell.verdict.level)
                found.setdefault(cell.agreement, {}).setdefault(words.clean(variant.verdict.name), []).append(level)
    for sentence, cells in found.items():
        where = "; ".join(f"{name} at {words.listing(levels)}" for name, levels in cells.items())
        yield f"{sentence[0].upper()}{sentence[1:]} ({where})."


def lost_words(verdicts: Verdicts, series: Series) -> dict[tuple[str, CacheState, Level], str]:
    """What became of each cell that has no value: `died`, `failed`, `invalid`; nothing where nobody measured."""
    boots = boot_room.collect((), series)
    found = {}
    for variant in verdicts.variants:
        mine = [boot for boot in boots if boot.variant == variant.name and boot.counted]
        for cell in variant.cells:
            said = lost(tuple(_points(cell, mine)))
            if said != words.ABSENT:
                found[variant.name, cell.cache, cell.level] = said
    return found


# --- variants and cells ---------------------------------------------------------------------------------------------


def _variants(
    verdicts: Verdicts,
    series: Series,
    records: Sequence[AnyRecord],
    boots: Sequence[BootView],
    boots_dir: Path | None,
) -> tuple[VariantView, ...]:
    index = {variant.name: place for place, variant in enumerate(verdicts.variants)}
    started, _ = provenance.sessions(records)
    firsts = provenance.first_commands(started, boots)
    _, base = provenance.base_command(started, series, boots)
    production = verdicts.production or series.production
    views = []
    for verdict in words.by_rank(verdicts.variants):
        mine = [boot for boot in boots if boot.variant == verdict.name and boot.counted]
        cells = tuple(cell_view(verdict, cell, mine) for cell in verdict.cells)
        found, notes = evidence.gather(verdict, cells, boots, boots_dir)
        differs = commands.difference(base, firsts[verdict.name]) if verdict.name in firsts else ()
        views.append(
            VariantView(
                index=index[verdict.name],
                verdict=verdict,
                production=verdict.name == production,
                cells=cells,
                differs=differs,
                evidence=found,
                notes=notes,
            )
        )
    return tuple(views)


def cell_view(variant: VariantVerdict, cell: CellVerdict, boots: Sequence[BootView]) -> CellView:
    """One cell in words. `boots`: the variant's boots that count, in order."""
    points = tuple(_points(cell, boots))
    shown = " · ".join(_point_text(point) for point in points) or words.ABSENT
    if cell.reproducibility == "DOES_NOT_REPRODUCE":
        short, long = shown, f"{shown} {cell.unit}: does not reproduce, {words.spread(cell)}"
    elif cell.estimate is None:
        short, long = lost(points), f"{shown}: no value"
    else:
        bounds = f" ({words.interval(cell.interval)})" if cell.interval is not None else " (one value)"
        short = words.number(cell.estimate)
        answer = words.REPRODUCIBILITY[cell.reproducibility]
        rest = "; ".join(part for part in (f"{answer}, {words.spread(cell)}", words.settles(cell)) if part)
        long = f"{words.number(cell.estimate)} {cell.unit}{bounds}; {rest}"
    return CellView(variant.name, cell, points, short, long, words.agreement(cell))


def _points(cell: CellVerdict, boots: Sequence[BootView]) -> Iterator[Point]:
    """The cell's boots. `by_boot` has an entry for every boot of the variant; other cache states' are left out here."""
    matched = len(boots) == len(cell.by_boot)
    for place, value in enumerate(cell.by_boot):
        boot = boots[place] if matched else None
        name = boot.name if boot is not None else f"boot {place + 1}"
        if value is not None:
            yield Point(name, value, "value")
        elif boot is None:
            yield Point(name, None, "not_measured")
        elif boot.cache == cell.cache:
            yield _missing(boot, cell.level)


def _missing(boot: BootView, at: Level) -> Point:
    result = boot.result
    level: LevelResult | None = None
    if result is not None:
        level = next((one for one in result.levels if one.level == at), None)
    if level is not None and level.failed:
        errors = next((trial.errors for trial in boot.trials if trial.failed and boot.level(trial) == at), {})
        return Point(boot.name, None, "failed", words.clean(", ".join(sorted(errors)) or "failed under load", 120))
    if level is not None and level.measured and not level.valid:
        return Point(boot.name, None, "invalid", "the trial was not valid")
    if result is not None and result.died:
        cause = " at ".join(part for part in (result.cause, result.phase) if part)
        return Point(boot.name, None, "died", words.clean(cause or "the engine died", 120))
    if result is not None and result.outcome == "not_ready":
        return Point(boot.name, None, "died", "not ready by the deadline")
    return Point(boot.name, None, "not_measured", "not measured")


def lost(points: Sequence[Point]) -> str:
    """What stands where a value would be: `died`, `failed`, `invalid`, each once; `–` where nobody measured."""
    said = dict.fromkeys(_point_text(point) for point in points if point.status not in ("value", "not_measured"))
    return ", ".join(said) or words.ABSENT


def _point_text(point: Point) -> str:
    match point.status:
        case "value":
            return words.number(point.value)
        case "failed":
            return "failed"
        case "died":
            return "died"
        case "invalid":
            return "invalid"
        case _:
            return words.ABSENT


# --- sections of the verdicts ---------------------------------------------------------------------------------------


def _verdict_section(variants: Sequence[VariantView]) -> Section:
    rows = tuple((words.clean(one.verdict.name), one.verdict.verdict, _why(one)) for one in variants)
    table = Table("Verdicts", ("variant", "verdict", "why"), rows)
    return Section("verdicts", "Verdicts", (), (table,))


def _why(variant: VariantView) -> str:
    reasons = ", ".join(variant.verdict.reasons)
    return words.clean(variant.verdict.sentence or reasons or words.ABSENT)


def _boots_section(variants: Sequence[VariantView]) -> Section:
    several = len({cell.verdict.cache for variant in variants for cell in variant.cells}) > 1
    rows = []
    for variant in variants:
        for cell in variant.cells:
            name = words.clean(variant.verdict.name) + (f" ({cell.verdict.cache})" if several else "")
            estimate = words.number(cell.verdict.estimate)
            boots = " · ".join(_point_text(point) for point in cell.points)
            state = words.REPRODUCIBILITY[cell.verdict.reproducibility]
            bounds = words.interval(cell.verdict.interval)
            worth = cell.agreement or words.ABSENT
            more = words.ABSENT if cell.verdict.more_boots is None else str(cell.verdict.more_boots)
            spread = words.spread(cell.verdict).removeprefix("spread ")
            level = str(cell.verdict.level)
            rows.append((name, level, boots, estimate, bounds, spread, state, more, worth))
    columns = (
        "variant",
        words.level_column(cell.verdict.level for variant in variants for cell in variant.cells),
        "boots, tok/s",
        "estimate",
        "95 % interval",
        "spread (95 % bounds)",
        "reproducibility",
        "more boots",
        "what the agreement is worth",
    )
    table = Table("Every boot of every cell", columns, tuple(rows), numeric=frozenset({1, 3, 7}), folded=True)
    refuted = [
        f"{words.clean(variant.verdict.name)} at {cell.verdict.level}"
        for variant in variants
        for cell in variant.cells
        if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE"
    ]
    sentences = [
        f"Each mark is one boot{_thinning(variants)}.",
        "A bar is the 95 % interval of the cell; it stands unless the boots are shown to disagree.",
    ]
    if refuted:
        said = words.listing(refuted)
        sentences.append(f"Boots disagree beyond the tolerance in {words.plural(len(refuted), 'cell')}: {said}.")
        sentences.append("For those no mean is shown, because no single number describes them.")
    else:
        sentences.append("In no cell do the boots disagree beyond the tolerance.")
    sentences.extend(_agreements(variants))
    return Section("boots", "Boot by boot", tuple(sentences), (table,), figure="boots")


def _thinning(variants: Sequence[VariantView]) -> str:
    if all(len(cell.points) <= MOST_POINTS for variant in variants for cell in variant.cells):
        return ""
    return f"; of more than {MOST_POINTS} of a cell so many are drawn, evenly by rank, slowest and fastest among them"


def _throughput_section(variants: Sequence[VariantView]) -> Section:
    levels = sorted({cell.verdict.level for variant in variants for cell in variant.cells})
    caches = {cell.verdict.cache for variant in variants for cell in variant.cells}
    rows = []
    for variant in variants:
        for cache in sorted(caches):
            cells = {cell.verdict.level: cell for cell in variant.cells if cell.verdict.cache == cache}
            name = words.clean(variant.verdict.name) + (f" ({cache})" if len(caches) > 1 else "")
            if cells:
                rows.append((name, *(cells[level].short if level in cells else words.ABSENT for level in levels)))
    columns = ("variant", *(f"at {level}" for level in levels))
    numeric = frozenset(range(1, len(columns)))
    table = Table(
        "tok/s against concurrency; boots one by one where they disagree", columns, tuple(rows), numeric, folded=True
    )
    return Section(
        "throughput", "Throughput against concurrency", tuple(_throughput_sentences(variants)), (table,), "throughput"
    )


def _throughput_sentences(variants: Sequence[VariantView]) -> Iterator[str]:
    yield "A line joins the estimates of one variant; boots that disagree stand as single open marks, without a line."
    winner = next((one for one in variants if one.verdict.verdict == "WINNER"), None)
    if winner is not None:
        by_length: dict[int | None, list[CellVerdict]] = {}
        for cell in winner.verdict.cells:
            if cell.estimate is not None:
                by_length.setdefault(cell.level.input_tokens, []).append(cell)
        for valued in by_length.values():
            if len(valued) > 1:
                low, high = valued[0], valued[-1]
                yield (
                    f"{words.clean(winner.verdict.name)} gives {words.number(low.estimate)} tok/s at {low.level} and "
                    f"{words.number(high.estimate)} at {high.level}."
                )
    without = [
        words.clean(one.verdict.name) for one in variants if all(cell.verdict.estimate is None for cell in one.cells)
    ]
    if without:
        yield f"Without any estimate: {words.listing(without)}."


def _evidence_section(variants: Sequence[VariantView]) -> Section | None:
    rejected = [variant for variant in variants if variant.verdict.verdict == "REJECTED"]
    if not rejected:
        return None
    names = words.listing(words.clean(variant.verdict.name) for variant in rejected)
    said = f"Why {names} {'is' if len(rejected) == 1 else 'are'} rejected, with the lines of their journals."
    return Section("evidence", "Evidence", (said,))
