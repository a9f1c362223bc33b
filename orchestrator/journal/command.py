"""`invoke classify`: a file → the answer as a dict (interface.md) and as text. The one place here that reads files."""

from __future__ import annotations

import codecs
import shlex
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from orchestrator.errors import JournalError
from orchestrator.journal.classifier import DEFAULT, Classifier
from orchestrator.journal.rules import RuleSet
from orchestrator.records import Answer, Timeline

_SHOWN = 160
_HEAD = 4096
_STRANGE = 0.3  # of the head, beyond which it is no text
_AGAIN = {True: "yes", False: "no, another boot may pass", None: "it depends"}


@dataclass(frozen=True, slots=True)
class Said:
    """What `classify` prints: `value` for `--json` (a dict, or a list with `--all`), `text` for a person."""

    value: dict[str, Any] | list[dict[str, Any]]
    text: str


def main_answer(
    path: str | Path,
    *,
    invocation: str | None = None,
    every: bool = False,
    unit: str | None = None,
    rules: RuleSet = DEFAULT,
) -> Said:
    """Classify a journal or log file; `-` is standard input.

    Args:
        path: `journalctl -o json` (also as one JSON array), `-o export`, `-o short*`, or a plain log.
        invocation: Answer this InvocationID alone.
        every: Answer every chain of starts, not the last one alone.
        unit: Only this unit's entries.
        rules: What lines mean.

    Raises:
        JournalError: The file is empty, no text or cannot be read, or holds no entry of that InvocationID.
    """
    classifier = Classifier(rules, unit=unit, invocation=invocation)
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with _opened(path) as file:
            _refuse_binary(file, name)
            classifier.feed_file(file)
    except OSError as error:
        raise JournalError(f"{name}: cannot be read: {error.strerror or error}") from error
    if classifier.seen == 0:
        raise JournalError(f"{name}: empty", hint="give it `journalctl -o json -u UNIT`, or a log file")
    if invocation is not None and not classifier.own_entries:
        raise JournalError(f"{name}: no entry of the invocation {invocation}")
    if not every:
        answer = classifier.answer()
        return Said(as_dict(answer), as_text(answer))
    answers = classifier.all_answers()
    return Said(
        [{"invocations": list(ids), **as_dict(answer)} for ids, answer in answers],
        "\n\n".join(f"{', '.join(ids) or 'start'}:\n{as_text(answer)}" for ids, answer in answers),
    )


def _refuse_binary(file: BufferedReader, name: str) -> None:
    """What is no text would be taken for the journal of a boot without a fault."""
    head = file.peek(_HEAD)[:_HEAD]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise JournalError(f"{name}: UTF-16 text", hint=f"iconv -f UTF-16 -t UTF-8 {shlex.quote(name)} > FILE")
    # Binary fields of `-o export` have some zero bytes, in their lengths; other encodings have some strange letters.
    if head.count(0) + head.decode(errors="replace").count("\N{REPLACEMENT CHARACTER}") > _STRANGE * len(head):
        raise JournalError(f"{name}: no text", hint="give it `journalctl -o json -u UNIT`, or a log file")


def _opened(path: str | Path) -> AbstractContextManager[BufferedReader]:
    if str(path) == "-":
        if sys.stdin is None:
            raise JournalError("standard input is closed", hint="give classify a file, or pipe a journal into it")
        return nullcontext(cast("BufferedReader", sys.stdin.buffer))
    return Path(path).open("rb")


def as_dict(answer: Answer) -> dict[str, Any]:
    """The answer in the form of interface.md, `classify --json`, with what else is known after it."""
    first = ("outcome", "phase", "cause", "complete", "evidence_may_be_missing", "evidence")
    whole = answer.model_dump(mode="json")
    whole["evidence"] = [{key: item[key] for key in ("entry", "rule", "text")} for item in whole["evidence"]]
    rest = {key: value for key, value in whole.items() if key not in first}
    return {**{key: whole[key] for key in first}, **rest, "recognised": recognised(answer)}


def recognised(answer: Answer) -> bool:
    """Whether anything of an engine's start was found: without it, `healthy` says nothing about a boot."""
    if answer.complete or answer.evidence or answer.outcome != "benign" or answer.phase != "unknown":
        return True
    return answer.timeline is not None and answer.timeline != Timeline()


def as_text(answer: Answer) -> str:
    """The answer for a person: one line, the entries that prove it, what to do, where the time went."""
    if not recognised(answer):
        return (
            f"{answer.outcome} in phase {answer.phase}: {answer.cause}, but nothing of an engine was recognised here\n"
            "  these entries say nothing about a boot: are they of the right unit, and of its start?"
        )
    known = DEFAULT.causes.get(answer.cause)
    meaning = f": {known.definition}" if known is not None else ""
    lines = [f"{answer.outcome} in phase {answer.phase}: {answer.cause}{meaning}"]
    if not answer.complete:
        lines.append("  so far: this boot has neither served nor ended in these entries")
    if answer.evidence_may_be_missing:
        lines.append("  journald dropped entries here: the evidence may be incomplete")
    if answer.evidence:
        first = ", what decided first" if answer.outcome != "benign" and len(answer.evidence) > 1 else ""
        lines.append(f"  entries that tell (number from 0, rule, text{first}):")
    lines += [f"  {item.entry:>7}{_clock(item.at_us)}  {item.rule}: {_short(item.text)}" for item in answer.evidence]
    if answer.outcome != "benign":
        lines += [f"  what to do: {answer.advice}"] if answer.advice else []
        lines.append(f"  would the same boot fail again: {_AGAIN[answer.permanent]}")
    if answer.timeline is not None:
        lines += _timeline(answer.timeline.model_dump())
    return "\n".join(lines)


def _clock(at_us: int | None) -> str:
    """Time of an entry, in UTC; nothing for a log that has none."""
    return "" if at_us is None else f"  {datetime.fromtimestamp(at_us / 1e6, UTC):%H:%M:%S}Z"


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= _SHOWN else f"{one[: _SHOWN - 1]}…"


def _timeline(values: Mapping[str, Any]) -> list[str]:
    told = {key: value for key, value in values.items() if value not in (None, "unknown")}
    spans = [f"{key[:-2].replace('_', ' ')} {value:.3g} s" for key, value in told.items() if key.endswith("_s")]
    rest = [f"{key.replace('_', ' ')} {value}" for key, value in told.items() if not key.endswith("_s")]
    return [f"  {what}: {', '.join(part)}" for what, part in (("start-up", spans), ("engine", rest)) if part]
