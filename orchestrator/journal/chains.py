"""Starts joined by systemd's automatic restart are one chain, answered by its first death."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.journal.judgement import judge
from orchestrator.journal.rules import Cause
from orchestrator.journal.start import Start
from orchestrator.records import Answer


@dataclass
class Chain:
    """The starts of one chain, of which only those are kept that may still matter.

    Attributes:
        causes: The vocabulary.
        current: The start that entries belong to now; `previous` the one before, for entries that come late.
        dead: The first start that failed; `noted` the first healthy one that had something alarming.
        invocations: InvocationIDs, oldest first.
    """

    causes: Mapping[str, Cause]
    current: Start
    previous: Start | None = None
    dead: Start | None = None
    noted: Start | None = None
    invocations: list[str] = field(default_factory=list)

    def next_start(self, invocation: str | None) -> Start:
        """The unit starts again; what its last start was is settled, but for late entries."""
        ended = self.current
        answer = judge(ended, self.causes)
        if answer.outcome != "benign":
            self.dead = self.dead or ended
        elif answer.cause != "healthy":
            self.noted = self.noted or ended
        self.previous, self.current = ended, Start(unit=ended.unit, invocation=invocation)
        self.name(invocation)
        return self.current

    def name(self, invocation: str | None) -> None:
        """The current start's InvocationID."""
        self.current.invocation = invocation
        if invocation is not None and invocation not in self.invocations[-1:]:
            self.invocations.append(invocation)

    def answer(self) -> Answer:
        """The first death's answer; else the first start's that had something alarming; else the last's."""
        if self.dead is not None:
            return judge(self.dead, self.causes)
        last = judge(self.current, self.causes)
        if last.outcome == "benign" and self.noted is not None:
            return judge(self.noted, self.causes)
        return last
