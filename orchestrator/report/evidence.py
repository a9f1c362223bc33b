"""The witnesses of a rejection: journal excerpts with the telling lines marked, and what the trials themselves say.

The classifier's telling lines come from the ledger. Their surroundings are read from `boots/<boot>/journal.jsonl`, line
by line, never whole; without that file the telling lines stand alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.records import Evidence, Level, VariantVerdict
from orchestrator.redact import redact_text
from orchestrator.report import words
from orchestrator.report.model import BootView, CellView, EvidenceView, Line
from orchestrator.verdict.wording import streams

AROUND = 3
MOST_LINES = 48
MOST_LOOKED_FOR = 6
LINE_LIMIT = 400
JOURNAL = "journal.jsonl"
# An engine that lives on after an error has no fatal entry: these lines of its log are the witnesses then.
TELLING: dict[str, re.Pattern[str]] = {
    "Answered5xx": re.compile(r'HTTP/1\.[01]" 5\d\d\b'),
    "ErrorLine": re.compile(r"^(?:\([\w-]+ pid=\d+\) )?(?:ERROR|CRITICAL)\b"),
}
GRAPH_CAPTURE_NOTE = (
    "The traceback goes through vllm/compilation/cuda_graph.py, and has been read as a failure of CUDA-graph capture "
    "for that. In vLLM 0.26.0 its line 254 is the branch without capture or replay: an ordinary forward pass, here the "
    "first prompt's prefill. “Triton Error [CUDA]: out of memory” is the driver that cannot load a kernel's binary at "
    "its first use, outside torch's allocator. Hence triton_oom at the first request: what is missing is headroom "
    "beside gpu-memory-utilization."
)


def message(line: str) -> str:
    """The text of one line of a journal file: journald's JSON (string, list of bytes or null), our own, or plain."""
    if not line.startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    said = entry.get("MESSAGE", entry.get("message"))
    if isinstance(said, list):
        return bytes(byte for byte in said if isinstance(byte, int) and 0 <= byte < 256).decode("utf-8", "replace")
    return said if isinstance(said, str) else ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for entry, line in enumerate(file):
            yield entry, message(line.rstrip("\n"))


def excerpt(path: Path | None, telling: Sequence[Evidence]) -> tuple[Line, ...]:
    """The telling lines with `AROUND` lines on both sides; the telling lines alone where the journal is not there."""
    marks = {one.entry: one for one in telling}
    alone = tuple(
        Line(one.entry, words.clean(redact_text(one.text), LINE_LIMIT), words.clean(one.rule, 40))
        for one in telling[:MOST_LINES]
    )
    if not marks or path is None or not path.is_file():
        return alone
    wanted = {near for entry in marks for near in range(entry - AROUND, entry + AROUND + 1)}
    found: list[Line] = []
    for entry, text in _lines(path):
        if entry > max(wanted):
            break
        if entry in wanted:
            mark = marks.get(entry)
            # Another numbering than the classifier's would mark innocent lines: then the telling lines stand alone.
            if mark is not None and words.clean(mark.text, 200).rstrip("…") not in words.clean(text):
                return alone
            found.append(
                Line(
                    entry,
                    words.clean(redact_text(text), LINE_LIMIT),
                    words.clean(mark.rule, 40) if mark is not None else None,
                )
            )
    return _shortened(found) if found else alone


def _shortened(lines: Sequence[Line]) -> tuple[Line, ...]:
    """At most `MOST_LINES`: telling lines first, then their surroundings as they come."""
    if len(lines) <= MOST_LINES:
        return tuple(lines)
    telling = [line.entry for line in lines if line.rule is not None][:MOST_LINES]
    others = [line.entry for line in lines if line.rule is None][: MOST_LINES - len(telling)]
    kept = {*telling, *others}
    return tuple(line for line in lines if line.entry in kept)


def look_for(path: Path | None) -> tuple[Line, ...]:
    """The first few lines in which a living engine says that it answered with an error, each with its predecessor."""
    if path is None or not path.is_file():
        return ()
    found: list[Line] = []
    before: deque[Line] = deque(maxlen=1)
    telling = 0
    for entry, text in _lines(path):
        flat = words.clean(redact_text(text), LINE_LIMIT)
        rule = next((rule for rule, pattern in TELLING.items() if pattern.search(flat)), None)
        line = Line(entry, flat, rule)
        if rule is not None:
            found.extend(before)
            found.append(line)
            before.clear()
            telling += 1
            if telling == MOST_LOOKED_FOR:
                break
        else:
            before.append(line)
    return tuple(found)


def gather(
    verdict: VariantVerdict, cells: Sequence[CellView], boots: Sequence[BootView], folder: Path | None
) -> tuple[tuple[EvidenceView, ...], tuple[str, ...]]:
    """The evidence of one rejected variant: journals of the boots that witness it, and one note a reason."""
    if verdict.verdict != "REJECTED":
        return (), ()
    mine = [boot for boot in boots if boot.variant == verdict.name and boot.counted]
    found = [view for boot in mine if (view := _witness(boot, verdict, folder)) is not None]
    notes = [note for reason in verdict.reasons for note in _notes(reason, verdict, cells, mine)]
    causes = {(one.cause, one.phase) for boot in mine if (one := boot.result) is not None and one.died}
    first = any(cause == "triton_oom" and phase in ("first_request", None) for cause, phase in causes)
    if first and folder is not None and any(_names_the_frame(folder / boot.name / JOURNAL) for boot in mine):
        notes.append(GRAPH_CAPTURE_NOTE)
    return tuple(found), tuple(notes)


def _names_the_frame(path: Path) -> bool:
    """Whether a boot's traceback can be mistaken for one of graph capture."""
    try:
        with path.open("rb") as file:
            return any(b"cuda_graph.py" in line and b"254" in line for line in file)
    except OSError:
        return False


def _witness(boot: BootView, verdict: VariantVerdict, folder: Path | None) -> EvidenceView | None:
    path = folder / boot.name / JOURNAL if folder is not None else None
    answer = boot.answer
    name = boot.name
    source = f"boots/{name}/{JOURNAL}" if path is not None and path.is_file() else None
    if answer is not None and answer.outcome != "benign":
        title = f"{answer.outcome} in phase {answer.phase}: {answer.cause}"
        notes = [words.clean(answer.advice, 500)] if answer.advice else []
        if answer.evidence_may_be_missing:
            notes.append("The journal dropped entries around this time: evidence may be missing.")
        return EvidenceView(name, words.clean(title), excerpt(path, answer.evidence), tuple(notes), source)
    failed = [trial for trial in boot.trials if trial.failed]
    if failed and "errors_under_load" in verdict.reasons:
        said = words.listing(f"{_errors(trial.errors)} at {boot.level(trial)}" for trial in failed)
        lines = look_for(path) or (excerpt(path, answer.evidence) if answer is not None else ())
        return EvidenceView(name, words.clean(f"errors under load: {said}"), lines, (), source)
    return None


def _errors(errors: dict[str, int]) -> str:
    return ", ".join(f"{kind} × {count}" for kind, count in sorted(errors.items())) or "failed"


def _notes(reason: str, verdict: VariantVerdict, cells: Sequence[CellView], boots: Sequence[BootView]) -> Iterator[str]:
    match reason:
        case "cold_boot_fatal":
            yield _fatal_note(verdict, boots)
        case "errors_under_load":
            yield from _error_notes(cells, boots)
        case "collapses_with_concurrency":
            yield from _collapse_notes(boots)
        case "does_not_reproduce":
            for cell in cells:
                if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE":
                    yield f"{reason}: at {streams((cell.verdict.level,))}: {cell.long}."
        case _:
            yield f"{words.clean(reason)}: {words.REASONS.get(reason, 'see the verdict')}."


def _fatal_note(verdict: VariantVerdict, boots: Sequence[BootView]) -> str:
    cold = [one for boot in boots if (one := boot.result) is not None and one.cache in ("cold", "clear")]
    died = [result for result in cold if result.died_before_trials]
    causes = Counter(" at ".join(part for part in (one.cause, one.phase) if part) or one.outcome for one in died)
    named = words.listing(f"{cause} ({count})" for cause, count in causes.most_common())
    rate = ""
    if verdict.failure_rate is not None:
        low, high = verdict.failure_rate
        rate = f"; the true rate of failing boots is at least {words.percent(low)} and at most {words.percent(high)}"
    which = words.listing(one.boot for one in died)
    return words.clean(
        f"cold_boot_fatal: {len(died)} of {words.plural(len(cold), 'cold boot')} never got to the trials: {named}, in "
        f"{which}{rate}."
    )


def _error_notes(cells: Sequence[CellView], boots: Sequence[BootView]) -> Iterator[str]:
    errors: dict[Level, Counter[str]] = {}
    for boot in boots:
        for trial in boot.trials:
            if trial.failed:
                errors.setdefault(boot.level(trial), Counter()).update(trial.errors)
    for cell in cells:
        tried = [point for point in cell.points if point.status in ("failed", "value", "invalid")]
        failed = [point for point in tried if point.status == "failed"]
        if failed:
            level = cell.verdict.level
            kinds = _errors(dict(errors.get(level, Counter())))
            kinds = "" if kinds == "failed" else f" ({kinds})"
            yield words.clean(
                f"errors_under_load: at {streams((level,))}, {len(failed)} of "
                f"{words.plural(len(tried), 'boot')} failed{kinds}."
            )


def _collapse_notes(boots: Sequence[BootView]) -> Iterator[str]:
    rows = []
    for boot in boots:
        by_length: dict[int | None, list[tuple[Level, float]]] = {}
        for one in boot.result.levels if boot.result is not None else ():
            if one.value is not None:
                by_length.setdefault(one.input_tokens, []).append((one.level, one.value))
        for values in by_length.values():
            if len(values) > 1:
                row = " → ".join(words.number(value) for _, value in sorted(values))
                where = words.listing(str(level) for level, _ in sorted(values))
                rows.append(f"{boot.name} {row} (at {where})")
    if rows:
        yield words.clean(f"collapses_with_concurrency: tok/s of all streams together, {'; '.join(rows)}.")
