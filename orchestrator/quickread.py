"""Trials of a ledger, read by msgspec in a quarter of the time: nearly all lines of a long one are trials.

What it reads, pydantic would read alike; what it does not take is left to pydantic, which may be more lenient. The
types are the model's own: nothing of a record stands here a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec

from orchestrator.records import TrialEnded

_MARK = b'"kind":"trial"'


@cache
def trial_reader(without: frozenset[str] = frozenset()) -> Callable[[bytes], TrialEnded | None]:
    """What makes a trial of a line; None for another record, and for what it does not understand.

    Args:
        without: Keys that are as if they had not been written; they have a default.
    """
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name, about in TrialEnded.model_fields.items():
        if name in without:
            continue
        fresh = partial(about.get_default, call_default_factory=True)
        default = about.default if about.default_factory is None else msgspec.field(default_factory=fresh)
        fields.append((name, about.annotation) if about.is_required() else (name, about.annotation, default))
    decode = msgspec.json.Decoder(msgspec.defstruct("Trial", fields, kw_only=True)).decode
    left_out = {name: TrialEnded.model_fields[name].get_default(call_default_factory=True) for name in without}

    def read(line: bytes) -> TrialEnded | None:
        if _MARK not in line:
            return None
        try:
            values = msgspec.structs.asdict(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return TrialEnded.made(values | left_out)

    return read
