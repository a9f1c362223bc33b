"""When a campaign ends, or leaves a variant alone, although boots are left: `limits:` of matrix.yaml. Pure functions.

What is counted is read from the ledger, so a brake also holds for the next session of the same experiment, until
`limits:` is changed: `fatal_boots*` count boots that died or were not ready, in a row; disturbed and aborted boots say
nothing and are passed over. `fatal_boots` is looked at after a boot: a later session makes one more, and a box that was
mended meanwhile ends the row with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, time, timedelta

from orchestrator.matrix import LimitKeys
from orchestrator.records import AnyRecord, BootEnded

_FATAL = ("crashed", "not_ready")


def braked(records: Iterable[AnyRecord], limits: LimitKeys) -> dict[str, int]:
    """Variants that are not booted any more, with the number of their fatal boots in a row."""
    row: dict[str, int] = {}
    for end in _counted(records):
        row[end.variant] = row.get(end.variant, 0) + 1 if end.boot_outcome in _FATAL else 0
    return {name: count for name, count in row.items() if count >= limits.fatal_boots_variant}


def storm(records: Iterable[AnyRecord], limits: LimitKeys) -> int | None:
    """The number of fatal boots in a row, whatever their variants, when it ends the campaign; else None."""
    row = 0
    for end in _counted(records):
        row = row + 1 if end.boot_outcome in _FATAL else 0
    return row if row >= limits.fatal_boots else None


def _counted(records: Iterable[AnyRecord]) -> Iterable[BootEnded]:
    return (
        record for record in records if isinstance(record, BootEnded) and record.boot_outcome in ("completed", *_FATAL)
    )


def out_of_time(limits: LimitKeys, now: datetime, *, spent_s: float, boot_s: float) -> str | None:
    """Why a boot of `boot_s` may not begin now, in words; None when it may.

    Args:
        limits: of the matrix.
        now: the present moment, by the clock of this machine.
        spent_s: what the campaign has taken so far.
        boot_s: what the longest boot has taken; 0 before the first.
    """
    if limits.campaign_s is not None and spent_s + boot_s > limits.campaign_s:
        return f"another boot of {boot_s:.0f} s would end after the {limits.campaign_s:g} s of limits.campaign_s"
    if limits.quiet_hours is not None and _touches(limits.quiet_hours, now, now + timedelta(seconds=boot_s)):
        return f"another boot of {boot_s:.0f} s would reach into the quiet hours {limits.quiet_hours}"
    return None


def _touches(hours: str, begin: datetime, end: datetime) -> bool:
    """Whether any moment from `begin` to `end` lies in the daily hours, which may go over midnight."""
    first, last = (time.fromisoformat(word.strip().zfill(5)) for word in hours.split("-"))
    day = begin.date() - timedelta(days=1)
    while day <= end.date():
        quiet_from = datetime.combine(day, first, begin.tzinfo)
        quiet_to = datetime.combine(day + timedelta(days=1 if last <= first else 0), last, begin.tzinfo)
        if begin < quiet_to and end >= quiet_from:
            return True
        day += timedelta(days=1)
    return False
