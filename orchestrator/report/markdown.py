"""report.md: what stands in a pull request's comment or a CI run's summary.

Foreign text is escaped for Markdown and HTML both, because GitHub reads both; journal lines stand in code fences longer
than any run of backticks in them. A comment holds 65,536 characters: folded evidence is shortened first.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from orchestrator.records import Level, VariantAnswer, VariantVerdict
from orchestrator.report import words
from orchestrator.report.model import CellView, EvidenceView, NextStep, Table, VariantView, View

MOST_CHARACTERS = 60_000
MOST_FOLDED_ROWS = 40
MOST_TABLE_ROWS = 200
MOST_IN_A_PARAGRAPH = 3
ICONS: dict[VariantAnswer, str] = {
    "WINNER": "🏆",
    "CONTENDER": "🤝",
    "DOMINATED": "🐢",
    "UNDECIDED": "❔",
    "REJECTED": "⛔",
}
MARKS = {"REPRODUCES": "=", "UNDECIDED": "?", "DOES_NOT_REPRODUCE": "≠"}
_SPECIAL = re.compile(r"[\\`*_\[\]|~$]")


def escape(text: str) -> str:
    """Foreign text as text: no markup, no HTML, no mention, no link, no break out of a table's cell."""
    flat = html.escape(words.clean(text), quote=False)
    flat = _SPECIAL.sub(r"\\\g<0>", flat)
    flat = _quiet(flat)
    # At the start of a line these would begin a list, a heading, a quotation or a rule.
    flat = re.sub(r"^(\s*)([#+>=-])", r"\1\\\2", flat)
    return re.sub(r"^(\s*\d+)([.)])(?=\s|$)", r"\1\\\2", flat)


def _quiet(text: str) -> str:
    """GitHub makes mentions, references and links of plain text: an invisible word joiner keeps it as it stands."""
    return re.sub(r"(?i)([@#])(?=\w)|\b(https?|ftp)(?=:)|\b(www)(?=\.)", "\\g<0>\N{WORD JOINER}", text)


def _summary(text: str, rest: str) -> str:
    """A fold with foreign text as its title; inside HTML no Markdown is read, but mentions are."""
    return f"<details><summary>{_quiet(html.escape(words.clean(text), quote=False))}</summary>\n\n{rest}\n\n</details>"


def fenced(lines: Sequence[str]) -> str:
    """Lines as code, in a fence that none of them can close."""
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join((f"{fence}text", *lines, fence))


def render(view: View) -> str:
    """The whole file, shortened until it fits into a comment."""
    for evidence, tables in ((True, True), (False, True), (False, False)):
        text = "\n\n".join(_parts(view, evidence=evidence, tables=tables)) + "\n"
        if len(text) <= MOST_CHARACTERS:
            return text
    note = "\n\n… cut: the rest stands in report.html.\n"
    return text[: text.rfind("\n", 0, MOST_CHARACTERS - len(note))] + note


def _parts(view: View, *, evidence: bool, tables: bool) -> Iterator[str]:
    yield f"# {escape(view.headline)}"
    if view.rehearsal:
        yield f"> [!CAUTION]\n> **{words.REHEARSAL}.** {words.REHEARSAL_SENTENCE}"
    yield from _answer(view)
    yield from _verdicts(view)
    for section in view.sections:
        if section.key == "verdicts":
            continue
        yield f"## {section.title}"
        yield from _said(section.sentences)
        if section.key == "evidence":
            yield from _evidence(view, whole=evidence)
        for table in section.tables:
            # Long details belong onto the page; a comment is scrolled past.
            if not table.folded:
                yield f"**{escape(table.title)}**\n\n{_table(table)}"
            elif tables and table.all_rows <= MOST_FOLDED_ROWS:
                yield _summary(table.title, _table(table))
    name = escape(view.verdicts.experiment)
    stamp = f" · {words.REHEARSAL}" if view.rehearsal else ""
    yield (
        f"<sub>Coldboot · experiment {name}{stamp} · pictures: report.html and figures/ beside this file"
        f"{'' if evidence and tables else ' · shortened, the rest stands in report.html'}</sub>"
    )


def _answer(view: View) -> Iterator[str]:
    if view.sureness:
        yield escape(view.sureness[0])
    if view.sureness[1:]:
        yield "\n".join(f"- {escape(sentence)}" for sentence in view.sureness[1:])
    if view.steps:
        yield "**What now**"
        yield "\n".join(_step(step) for step in view.steps)


def _said(sentences: Sequence[str]) -> Iterator[str]:
    """A section's sentences: a paragraph, or a list where that would be a wall of text."""
    if len(sentences) > MOST_IN_A_PARAGRAPH:
        yield "\n".join(f"- {escape(sentence)}" for sentence in sentences)
    elif sentences:
        yield " ".join(escape(sentence) for sentence in sentences)


def _step(step: NextStep) -> str:
    """A command is code, and code is not escaped: a fence of backticks that it does not hold."""
    text = f"- {escape(step.text)}"
    if step.command is None:
        return text
    flat = words.clean(step.command)
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", flat)), default=0) + 1)
    return f"{text}: {ticks}{flat}{ticks}"


def _verdicts(view: View) -> Iterator[str]:
    levels = view.levels
    several = len(view.caches) > 1
    rows = []
    for variant in view.variants:
        cells = (" / ".join(_cell(cell, several=several) for cell in _at(variant, level)) or "–" for level in levels)
        verdict = variant.verdict
        died = f", {verdict.boots_failed} died" if verdict.boots_failed else ""
        name = f"**{escape(verdict.name)}**{' (production)' if variant.production else ''}"
        reasons = "<br>".join(escape(reason) for reason in verdict.reasons)
        rows.append(
            (
                name,
                f"{ICONS[verdict.verdict]} {words.answer(verdict)}",
                *cells,
                f"{verdict.boots}{died}",
                reasons or "–",
            )
        )
    columns = ("variant", "verdict", *(f"tok/s at {level}" for level in levels), "boots", "reasons")
    yield _rows(columns, rows, frozenset(range(2, 3 + len(levels))))
    note = f" `{meant}`." if (meant := words.level_note(levels)) else ""
    yield (
        f"<sub>`=` the boots reproduce; `?` {words.OPEN}; `≠` they do not reproduce: they stand one by one, and "
        f"no mean exists.{note}</sub>"
    )
    yield "\n".join(f"- {escape(_sentence(one.verdict))}" for one in view.variants if one.verdict.sentence)


def _sentence(variant: VariantVerdict) -> str:
    return f"{variant.name} {words.beside(variant)}" if variant.verdict == "WINNER" else variant.sentence


def _at(variant: VariantView, level: Level) -> list[CellView]:
    return [cell for cell in variant.cells if cell.verdict.level == level]


def _cell(cell: CellView, *, several: bool) -> str:
    state = f" {cell.verdict.cache}" if several else ""
    valued = any(point.value is not None for point in cell.points)
    return f"{escape(cell.short)}{f' `{MARKS[cell.verdict.reproducibility]}`' if valued else ''}{state}"


def _table(table: Table) -> str:
    # More would not fit into a comment, however short its rows.
    shown = table.rows[:MOST_TABLE_ROWS]
    rows = [tuple(escape(cell) for cell in row) for row in shown]
    more = table.all_rows - len(shown)
    note = f"\n\n<sub>{more} more rows stand in boots.csv, cells.csv and records.jsonl.</sub>" if more else ""
    return _rows(table.columns, rows, table.numeric) + note


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: frozenset[int]) -> str:
    rule = ("--:" if place in numeric else ":--" for place in range(len(columns)))
    lines = (columns, tuple(rule), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _evidence(view: View, *, whole: bool) -> Iterator[str]:
    for variant in view.variants:
        if variant.verdict.verdict != "REJECTED":
            continue
        yield f"### {escape(variant.verdict.name)}"
        yield "\n".join(f"- {escape(note)}" for note in variant.notes)
        # One boot is shown; the others say the same, and stand in report.html.
        shown = [one for one in variant.evidence if one.lines]
        for one in shown[:1]:
            yield _journal(one, whole=whole)
        if len(shown) > 1:
            yield f"<sub>The journals of {len(shown) - 1} more boots stand in report.html.</sub>"


def _journal(evidence: EvidenceView, *, whole: bool) -> str:
    kept = [line for line in evidence.lines if whole or line.rule is not None]
    lines = []
    last: int | None = None
    for line in kept:
        if last is not None and line.entry != last + 1:
            lines.append("   …")
        lines.append(f"{'>>' if line.rule is not None else '  '} {line.entry:>5}  {line.text}")
        last = line.entry
    notes = "".join(f"\n\n{escape(note)}" for note in evidence.notes)
    return _summary(f"{evidence.boot}: {evidence.title} (>> marks the telling lines)", f"{fenced(lines)}{notes}")
