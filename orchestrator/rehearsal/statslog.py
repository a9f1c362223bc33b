"""The periodic statistics lines, with the windows and the faults of vLLM's own."""

from __future__ import annotations

import time
from collections import deque

from orchestrator.rehearsal.log import Log

_REMEMBERED_REQUESTS = 1000


class StatsLog:
    """Collects what happened since the last line and prints it when asked.

    The generation figure counts emitted tokens over the real time since the last line.  The SpecDecoding figures divide
    by the time since *their* last line, idle time included.

    Args:
        log: The API server's log.
        spec_tokens: Draft tokens per step; 0 prints no SpecDecoding line.
    """

    def __init__(self, log: Log, spec_tokens: int) -> None:
        self._log = log
        self._last = self._last_spec = time.monotonic()
        self._prompt = 0
        self._generation = 0
        self._quiet = True
        self._recent: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED_REQUESTS)
        self._drafts = 0
        self._drafted = 0
        self._accepted = [0] * spec_tokens
        self.running = 0
        self.waiting = 0
        self.usage = 0.0

    def tokens(self, prompt: int, generation: int) -> None:
        """Counts computed prompt tokens and emitted tokens."""
        self._prompt += prompt
        self._generation += generation

    def prefix(self, queries: int, hits: int) -> None:
        """Counts a request's prefix cache look-up, in tokens."""
        self._recent.append((queries, hits))

    def drafts(self, drafts: int, drafted: int, accepted: list[int]) -> None:
        """Counts verify steps, drafted tokens, and accepted ones per step."""
        self._drafts += drafts
        self._drafted += drafted
        for count in accepted:
            for position in range(count):
                self._accepted[position] += 1

    def print(self) -> None:
        """Prints the lines of this window; nothing when it and the one before were idle."""
        now = time.monotonic()
        elapsed = max(now - self._last, 1e-6)
        quiet = not (self._prompt or self._generation or self.running or self.waiting)
        silent, self._quiet = quiet and self._quiet, quiet
        prompt, generation = self._prompt / elapsed, self._generation / elapsed
        self._last, self._prompt, self._generation = now, 0, 0
        if silent:
            return
        queries = sum(query for query, _ in self._recent)
        hits = sum(hit for _, hit in self._recent)
        self._log.at_info(
            "loggers.py:310",
            f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generation:.1f} "
            f"tokens/s, Running: {self.running} reqs, Waiting: {self.waiting} reqs, GPU KV cache usage: "
            f"{self.usage * 100:.1f}%, Prefix cache hit rate: {hits / queries * 100 if queries else 0.0:.1f}%",
        )
        self._print_spec(now)

    def _print_spec(self, now: float) -> None:
        if not self._drafts:
            return
        elapsed = max(now - self._last_spec, 1e-6)
        accepted = sum(self._accepted)
        rates = ", ".join(f"{count / self._drafts:.3f}" for count in self._accepted)
        self._log.at_info(
            "metrics.py:120",
            f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / self._drafts:.2f}, Accepted throughput: "
            f"{accepted / elapsed:.2f} tokens/s, Drafted throughput: {self._drafted / elapsed:.2f} tokens/s, Accepted: "
            f"{accepted} tokens, Drafted: {self._drafted} tokens, Per-position acceptance rate: {rates}, Avg Draft "
            f"acceptance rate: {accepted / self._drafted * 100:.1f}%",
        )
        self._last_spec = now
        self._drafts = self._drafted = 0
        self._accepted = [0] * len(self._accepted)
