"""How long an engine step takes and how many drafts are accepted in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from orchestrator.rehearsal.memory import Fit, Ledger, Tactic
from orchestrator.rehearsal.personality import Speed

_GOLDEN = (5**0.5 - 1) / 2


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

    def step(self, streams: int, prefill_tokens: int, running: int | None = None) -> Step:
        """Length of a step.

        Args:
            streams: Requests that decode in it.
            prefill_tokens: Prompt tokens computed in it.
            running: Requests that hold memory in it, with those whose prompt is computed; ``None`` is the same number.
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
            if self.ledger.fit(running or streams) is not Fit.FITS:
                # One tile: the workspace lies in the graphs' pool, which is rebuilt, without drafts, for each token.
                # More: it is allocated beside the graphs, which only takes its time.
                single = self.tactic is Tactic.SINGLE
                millis = speed.thrash_step_ms if single else millis + speed.retry_ms
        if not self.captures:
            millis *= speed.no_graph_factor
        return Step(millis * self.factor / 1000.0, drafting=drafts > 0 and streams > 0 and not single, single=single)

    def _graph(self, rows: int) -> int | None:
        size = next((size for size in self.ledger.decode if size >= rows), None)
        return size if size is not None and size - rows <= self.speed.pad_rows else None


class Acceptance:
    """Accepted drafts per verify step from a low-discrepancy sequence: no dice, so that rates are as smooth as means.

    The multiples of the golden ratio fill the unit interval as evenly as a sequence can; a draft's position is accepted
    when the step's number lies below the probability that it and all before it are.

    Args:
        probabilities: Of each position, given that all before it were accepted.
    """

    def __init__(self, probabilities: Sequence[float]) -> None:
        self._below = tuple(accumulate(probabilities, mul))
        self._number = 0.5

    def next(self) -> int:
        """Drafts accepted by the next verify step, from 0 to all."""
        self._number = (self._number + _GOLDEN) % 1.0
        return sum(self._number < limit for limit in self._below)


def acceptance(speed: Speed, spec_tokens: int) -> Acceptance:
    """The acceptance of a draft of ``spec_tokens`` tokens."""
    return Acceptance([speed.accept_first if i == 0 else speed.accept_next for i in range(spec_tokens)])
