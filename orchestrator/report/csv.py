"""cells.csv and boots.csv for a notebook: one row a cell and boot, one row a boot.

`COLUMNS` and `BOOT_COLUMNS` name and explain every column; they stay, each has one type, and its unit in its name.

Empty means that the value does not exist. Text that a spreadsheet would take for a formula gets a leading apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping

from orchestrator.records import TrialEnded
from orchestrator.report import memory, trials, words
from orchestrator.report.model import BootView, CellView, Point, VariantView, View

COLUMNS: Mapping[str, str] = {
    "experiment": "name of the experiment",
    "box": "name of the box",
    "stamp": "REHEARSAL, or measured",
    "variant": "name of the variant",
    "verdict": "the variant's answer",
    "cache": "cache state that the boot started from",
    "concurrency": "streams at once",
    "boot": "name of the boot, the unit of replication",
    "position": "place of the boot in the plan, from 1",
    "status": "value, failed (under load), died (before this trial), invalid, or not_measured",
    "why": "what happened, where status is not value",
    "tokens_per_s": "increase of the server's token counter over the window, all streams together",
    "window_s": "length of the window",
    "tokens": "increase of the server's token counter in the window",
    "usage_per_s": "the client's own count of tokens in the same window, per second",
    "chunks_per_s": "SSE chunks per second",
    "words_per_s": "words per second",
    "logger_tokens_per_s": "the engine's own log line",
    "tokens_per_step": "1 + accepted ÷ drafts",
    "ttft_p50_ms": "time to first token, median of the trial's requests",
    "ttft_p99_ms": "time to first token, 99th percentile",
    "itl_p50_ms": "time between chunks, median",
    "itl_p99_ms": "time between chunks, 99th percentile",
    "e2e_p50_ms": "whole request, median",
    "requests_sent": "requests sent in the trial",
    "requests_ok": "requests that succeeded",
    "boot_outcome": "completed, crashed or not_ready",
    "cache_proof": "what the engine's log says about its compile cache",
    "cell_reproducibility": "REPRODUCES, DOES_NOT_REPRODUCE or UNDECIDED",
    "cell_estimate": "geometric mean of the cell's boots, empty where they do not reproduce",
    "cell_low": "lower end of its 95 % interval",
    "cell_high": "upper end of its 95 % interval",
    "cell_spread": "sd of logs between the cell's boots",
    "input_tokens": "about how many tokens each prompt has, empty where nobody knows",
}


BOOT_COLUMNS: Mapping[str, str] = {
    "experiment": "name of the experiment",
    "box": "name of the box",
    "stamp": "REHEARSAL, or measured",
    "boot": "name of the boot; .r1 is a repeat",
    "variant": "name of the variant",
    "cache": "cache state that it started from",
    "block": "block of the plan",
    "position": "place in the plan, from 1",
    "counts": "true where the boot is in the verdicts; false for a disturbed or aborted one",
    "outcome": "completed, crashed, not_ready, disturbed or aborted",
    "ended_at": "step at which it ended, where that was not the last",
    "why": "how it ended, in words",
    "journal_outcome": "startup_failure, fatal or benign",
    "journal_phase": "phase of the cause",
    "journal_cause": "the cause, as in causes.md",
    "cache_proof": "what the engine's log says about its compile cache",
    "seconds": "the whole boot",
    "ours_s": "the part in which neither the engine worked nor a load ran",
    "ready_s": "from the start to ready",
    "compile_s": "compiling or loading, by the engine's own line",
    "graph_capture_s": "graph capture, by the engine's own line",
    "weights_gib": "weights on a card, by the engine's own line",
    "kv_gib": "KV cache on a card, by the engine's own line",
    "kv_tokens": "tokens that the KV cache holds",
    "graphs_gib": "graphs on a card, by the engine's own line",
    "free_before_gib": "free on the card that had least, before the start",
    "least_free_gib": "free on the fullest card at the fullest moment of the trials",
}


def render_boots(view: View) -> str:
    """boots.csv: a header, then every boot in run order, those that do not count too."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, BOOT_COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    cards = {one.boot.name: one for one in memory.of(view.boots)}
    for boot in view.boots:
        row = dict(_boot_row(view, boot, cards.get(boot.name)))
        writer.writerow({name: _field(value) for name, value in row.items()})
    return buffer.getvalue()


def _boot_row(view: View, boot: BootView, card: memory.Memory | None) -> Iterator[tuple[str, object]]:
    record = boot.started or boot.ended or boot.result
    yield from {
        "experiment": view.verdicts.experiment,
        "box": view.verdicts.box,
        "stamp": words.REHEARSAL if view.rehearsal else "measured",
        "boot": boot.name,
        "variant": boot.variant,
        "cache": boot.cache,
        "block": record.block if record is not None else None,
        "position": boot.position,
        "counts": "true" if boot.counted else "false",
        "outcome": boot.outcome,
        "why": boot.why,
        "ready_s": next((step.seconds for step in boot.steps if step.name == "ready" and step.outcome == "ok"), None),
    }.items()
    if boot.ended is not None:
        yield "ended_at", boot.ended.step
        yield "cache_proof", boot.ended.cache_proof
        yield "seconds", boot.ended.seconds
        yield "ours_s", boot.ended.ours_s
    if boot.answer is not None:
        yield "journal_outcome", boot.answer.outcome
        yield "journal_phase", boot.answer.phase
        yield "journal_cause", boot.answer.cause
    line = boot.answer.timeline if boot.answer is not None else None
    if line is not None:
        yield from {
            "compile_s": line.compile_s,
            "graph_capture_s": line.graph_capture_s,
            "weights_gib": line.weights_gib,
            "kv_gib": line.kv_gib,
            "kv_tokens": line.kv_tokens,
            "graphs_gib": line.graph_capture_gib,
        }.items()
    if card is not None:
        yield "free_before_gib", card.free
        yield "least_free_gib", card.least_free


def render(view: View) -> str:
    """The whole file: a header, then rows in the order of verdicts, cells and boots."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    boots = {boot.name: boot for boot in view.boots}
    for variant in view.variants:
        for cell in variant.cells:
            for point in cell.points:
                row = dict(_row(view, variant, cell, point, boots.get(point.boot)))
                writer.writerow({name: _field(value) for name, value in row.items()})
    return buffer.getvalue()


def _field(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)
    text = words.clean(str(value))
    return f"'{text}" if isinstance(value, str) and text[:1] in {"=", "+", "-", "@"} else text


def _row(
    view: View, variant: VariantView, cell: CellView, point: Point, boot: BootView | None
) -> Iterator[tuple[str, object]]:
    verdict = cell.verdict
    yield from {
        "experiment": view.verdicts.experiment,
        "box": view.verdicts.box,
        "stamp": words.REHEARSAL if view.rehearsal else "measured",
        "variant": variant.verdict.name,
        "verdict": variant.verdict.verdict,
        "cache": verdict.cache,
        "concurrency": verdict.concurrency,
        "boot": point.boot,
        "status": point.status,
        "why": point.why,
        "tokens_per_s": point.value,
        "cell_reproducibility": verdict.reproducibility,
        "cell_estimate": verdict.estimate,
        "cell_low": verdict.interval[0] if verdict.interval is not None else None,
        "cell_high": verdict.interval[1] if verdict.interval is not None else None,
        "cell_spread": verdict.spread,
        "input_tokens": verdict.input_tokens,
    }.items()
    if boot is None:
        return
    yield "position", boot.position
    yield "boot_outcome", boot.outcome
    yield "cache_proof", boot.ended.cache_proof if boot.ended is not None else None
    trial = trials.of_level(boot, verdict.level)
    if trial is not None:
        yield from _trial(trial)


def _trial(trial: TrialEnded) -> Iterator[tuple[str, object]]:
    yield from {
        "window_s": trial.window_s,
        "tokens": trial.tokens,
        "usage_per_s": trial.rulers.usage,
        "chunks_per_s": trial.rulers.chunks,
        "words_per_s": trial.rulers.words,
        "logger_tokens_per_s": trial.rulers.logger,
        "tokens_per_step": trials.tokens_per_step(trial),
        "ttft_p50_ms": trial.ttft_ms.p50,
        "ttft_p99_ms": trial.ttft_ms.p99,
        "itl_p50_ms": trial.itl_ms.p50,
        "itl_p99_ms": trial.itl_ms.p99,
        "e2e_p50_ms": trial.e2e_ms.p50,
        "requests_sent": trial.requests_sent,
        "requests_ok": trial.requests_ok,
    }.items()
