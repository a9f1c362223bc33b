"""How long an engine step takes and how many drafts are accepted in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.rehearsal.memory import Fit, Ledger, Tactic
from orchestrator.rehearsal.personality import Speed


@dataclass(frozen=True)
class Step:
    """One engine step.

    Attributes:
        seconds: Its length.
        drafting: Drafts are proposed and verified in it.
        single: Only one stream gets a token in it (the pool is rebuilt for each).
    """

    seconds: float
    drafting: bool
    single: bool


@dataclass(frozen=True)
class Pace:
    """Step lengths of one boot."""

    speed: Speed
    ledger: Ledger
    tactic: Tactic
    captures: bool
    factor: float = 1.0

    def step(self, streams: int, prefill_tokens: int) -> Step:
        """Length of a step.

        Args:
            streams: Requests that decode in it.
            prefill_tokens: Prompt tokens computed in it.
        """
        speed, drafts = self.speed, self.ledger.spec_tokens
        rows = streams * (1 + drafts)
        graph = self._graph(rows)
        millis = speed.step_ms + prefill_tokens * speed.prefill_ms_per_token
        single = False
        if streams:
            millis += speed.row_ms * (graph or rows) + speed.draft_ms * drafts
            if drafts > 1 and self.tactic is not Tactic.FUSED:
                millis += (drafts - 1) * (speed.pass_ms + speed.pass_stream_ms * streams)
            if drafts and graph is None and self.tactic is not Tactic.FUSED:
                millis *= speed.eager_factor
            if self.ledger.fit(streams) is not Fit.FITS:
                single = graph == rows
                millis = speed.thrash_step_ms if single else millis + speed.retry_ms
        if not self.captures:
            millis *= speed.no_graph_factor
        return Step(millis * self.factor / 1000.0, drafting=drafts > 0 and streams > 0 and not single, single=single)

    def _graph(self, rows: int) -> int | None:
        size = next((size for size in self.ledger.decode if size >= rows), None)
        return size if size is not None and size - rows <= self.speed.pad_rows else None


@dataclass
class Acceptance:
    """Accepted drafts per verify step by error diffusion: no dice, so that rates are as smooth as the means.

    Each position carries the part of an acceptance that it still owes.
    """

    probabilities: tuple[float, ...]
    owed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.owed:
            self.owed = [0.5] * len(self.probabilities)

    def next(self) -> int:
        """Drafts accepted by the next verify step, from 0 to all."""
        for position, probability in enumerate(self.probabilities):
            self.owed[position] += probability
            if self.owed[position] < 1.0:
                return position
            self.owed[position] -= 1.0
        return len(self.probabilities)


def acceptance(speed: Speed, spec_tokens: int) -> Acceptance:
    """The acceptance of a draft of ``spec_tokens`` tokens."""
    return Acceptance(tuple(speed.accept_first if i == 0 else speed.accept_next for i in range(spec_tokens)))
