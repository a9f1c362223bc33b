"""A warning about a boot that did not complete: the number, the limit, and the next thing to do.

Pure: from records and the matrix to text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.matrix import Matrix, flag_name
from orchestrator.plan import MAX_DISTURBED_REPEATS
from orchestrator.records import Answer, AnyRecord, BootEnded

_FLAG = re.compile(r"--([a-z][a-z0-9-]*[a-z0-9])")
_VERB = {"crashed": "died", "not_ready": "was given up", "disturbed": "was disturbed", "aborted": "was cut off"}
_AT = {"ready": " before it was ready", "first_request": " at its first request", "trials": " under load"}


def boot_warning(
    end: BootEnded,
    records: Iterable[AnyRecord],
    answer: Answer | None,
    *,
    matrix: Matrix,
    unit_argv: Sequence[str],
    journal: Path,
) -> str:
    """What a person must know about one boot, in up to three lines.

    Args:
        end: How it ended.
        records: All ends of boots so far, this one with them.
        answer: What its journal says.
        matrix: For the lines at which the flags of an advice stand.
        unit_argv: Production's command, for the flags that stand there.
        journal: Where its journal is kept.
    """
    at = "" if end.step is None else _AT.get(end.step, f" at {end.step.replace('_', ' ')}")
    why = end.why if answer is None else end.why.replace(f"{answer.cause} in {answer.phase}: ", f"{answer.cause}: ")
    lines = [f"{end.boot} {_VERB.get(end.boot_outcome, end.boot_outcome)}{at}: {why}"]
    if end.boot_outcome == "disturbed":
        left = MAX_DISTURBED_REPEATS - end.attempt + 1
        lines.append(
            f"The rig's, not the variant's: attempt {end.attempt}, "
            + (
                f"at most {left} more of {MAX_DISTURBED_REPEATS} repeats follow."
                if left > 0
                else "and no repeat is left."
            )
        )
    else:
        lines.append(" ".join((_count(end, records), _next_step(end, answer, matrix, unit_argv))).strip())
    lines.append(f"Journal: {journal}")
    return "\n        ".join(lines)


def _count(end: BootEnded, records: Iterable[AnyRecord]) -> str:
    ends = [
        record
        for record in records
        if isinstance(record, BootEnded)
        and (record.variant, record.cache) == (end.variant, end.cache)
        and record.boot_outcome in ("completed", "crashed", "not_ready")
    ]
    same = sum((record.boot_outcome, record.step) == (end.boot_outcome, end.step) for record in ends)
    return f"{same} of {len(ends)} boot{'' if len(ends) == 1 else 's'} of {end.variant} ended so."


def _next_step(end: BootEnded, answer: Answer | None, matrix: Matrix, unit_argv: Sequence[str]) -> str:
    if end.boot_outcome == "not_ready" and end.step != "ready":
        return (
            "It was ready and stopped answering: read the end of its journal, and `nvidia-smi` and `dmesg` on the box."
        )
    if end.boot_outcome == "not_ready":
        return f"The limit is deadlines.ready_s{_deadline_line(matrix)}: raise it, or read what the engine waited for."
    if answer is None or answer.advice is None:
        return "No cause is known; read the journal."
    named = {flag_name(word.partition("=")[0]) for word in unit_argv if word.startswith("--")}

    def placed(found: re.Match[str]) -> str:
        line = _flag_line(matrix, end.variant, found[1])
        if line is not None:
            return f"{found[0]} ({matrix.path.name}:{line})"
        return f"{found[0]} (in the unit)" if found[1] in named else found[0]

    return _FLAG.sub(placed, answer.advice)


def _flag_line(matrix: Matrix, variant: str, flag: str) -> int | None:
    """Where a variant sets a flag; None where it does not."""
    try:
        found = matrix.variant(variant)
    except UsageError:
        return None
    return matrix.line_of("variants", variant, flag) if flag in found.set else None


def _deadline_line(matrix: Matrix) -> str:
    own = matrix.target.deadlines
    keys = ("boxes", matrix.box, "deadlines", "ready_s") if own is not None else ("deadlines", "ready_s")
    limit = matrix.effective_deadlines().ready_s
    return f" = {limit:g} s ({matrix.path.name}:{matrix.line_of(*keys)})"
