"""What doctor says: one finding a check, and all of them together. Plain data; how it looks is in `show`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from orchestrator.errors import BOX, OK

Level = Literal["ok", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check.

    `number` is what was measured, in `unit`; None where there is nothing to count. `mend` says what to run, and stands
    with every `warn` and `fail`.
    """

    check: str
    level: Level
    said: str
    number: float | None = None
    unit: str | None = None
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings on one box, in the order of the table. `not_asked`: check → what it would have needed.

    `rehearsal`: it is one, so that it says nothing about the file's real boxes, `not_looked_at`.
    """

    box: str
    findings: tuple[Finding, ...]
    not_asked: Mapping[str, str]
    rehearsal: bool = False
    not_looked_at: tuple[str, ...] = ()

    @property
    def worst(self) -> Level:
        """The worst level of all."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    @property
    def exit_code(self) -> int:
        """0 when nothing fails, else 3."""
        return BOX if self.worst == "fail" else OK

    def count(self, level: Level) -> int:
        """How many findings have this level."""
        return sum(finding.level == level for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The whole as plain data."""
        return {
            "v": 1,
            "box": self.box,
            "worst": self.worst,
            "checks": [asdict(finding) for finding in self.findings],
            "not_asked": dict(self.not_asked),
        }
