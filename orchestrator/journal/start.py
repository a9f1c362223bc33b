"""One start of the unit: what its lines said, kept small however long it runs. The judgement is in judgement.py."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from orchestrator.journal.lines import Line
from orchestrator.journal.rules import SERVING, Rule
from orchestrator.journal.timeline import Clock
from orchestrator.records import Evidence

_TEXT = 500
_KEPT_HITS = 200
_KEPT_TRACES = 256
_KEPT_TEXTS = 512


class Where(Protocol):
    """The entry that is being read."""

    @property
    def entry(self) -> int:
        """Place in the input, from 0."""

    @property
    def at_us(self) -> int | None:
        """Its time, microseconds since the epoch."""


class Hit(NamedTuple):
    """A rule fitted an entry. `seq` counts the lines of the start; the rest is what was known at that moment."""

    rule: Rule
    entry: int
    seq: int
    text: str
    at_us: int | None
    phase: str | None
    hint: str | None
    hinted_cause: str | None
    serving: bool
    ready: bool
    idle: bool
    ok_requests: int
    recoveries: int
    proc: str = ""

    def evidence(self) -> Evidence:
        """As the answer shows it."""
        return Evidence(entry=self.entry, rule=self.rule.name, text=self.text[:_TEXT], at_us=self.at_us)


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A kernel entry about some process: `pid`, `name` and `cgroup` as far as the entry gives them."""

    hit: Hit
    pid: int | None
    name: str | None
    cgroup: str | None


@dataclass(slots=True)
class _Trace:
    """A traceback that one process is printing: what its frames told."""

    hint: str | None = None
    cause: str | None = None


@dataclass
class Start:
    """State of one start; memory does not grow with its length."""

    unit: str | None = None
    invocation: str | None = None
    clock: Clock = field(default_factory=Clock)
    seq: int = 0
    phase: str | None = None
    then: str | None = None
    first_phase: str | None = None
    ready: bool = False
    serving: bool = False
    ok_requests: int = 0
    failed_requests: int = 0
    idle: bool = False
    zero_streak: int = 0
    recoveries: int = 0
    dump_new_only: bool | None = None
    faults: list[Hit] = field(default_factory=list)
    deaths: list[Hit] = field(default_factory=list)
    benign: list[Hit] = field(default_factory=list)
    exits: list[Hit] = field(default_factory=list)
    kernel: list[KernelEvent] = field(default_factory=list)
    stop: Hit | None = None
    slow_stop: Hit | None = None
    ended_seq: int | None = None
    hang: Hit | None = None
    restarted: bool = False
    pids: set[int] = field(default_factory=set)
    traces: dict[str, _Trace] = field(default_factory=dict)
    first_errors: list[Hit] = field(default_factory=list)
    last_errors: deque[Hit] = field(default_factory=lambda: deque(maxlen=5))
    _seen: set[tuple[str, bool, int]] = field(default_factory=set)
    _texts: set[str] = field(default_factory=set)
    _settled: set[tuple[str, bool, int]] = field(default_factory=set)

    # --- what the lines say ------------------------------------------------------------------------------------

    def hit(self, rule: Rule, where: Where, line: Line) -> Hit:
        """A rule's hit with what is known now."""
        trace = self.traces.get(line.proc)
        return Hit(
            rule=rule,
            entry=where.entry,
            seq=self.seq,
            text=line.body,
            at_us=where.at_us,
            phase=self.then or self.phase,
            hint=trace.hint if trace else None,
            hinted_cause=trace.cause if trace else None,
            serving=self.serving,
            ready=self.ready,
            idle=self.idle,
            ok_requests=self.ok_requests,
            recoveries=self.recoveries,
            proc=line.proc,
        )

    def stopping(self) -> bool:
        """A stop was requested before anything alarming: all that follows is shutdown noise."""
        return self.stop is not None

    def is_news(self, text: str) -> bool:
        """Whether an error line that no rule names is the first of its text, and not shutdown noise."""
        if text in self._texts or self.stop is not None:
            return False
        if len(self._texts) >= _KEPT_TEXTS:
            self._texts.clear()
        self._texts.add(text)
        return True

    def error(self, hit: Hit) -> None:
        """An error line that no rule names: the first five and the last five are shown when nothing names a root."""
        if self.stopping():
            return
        if len(self.first_errors) < 5:
            self.first_errors.append(hit)
        else:
            self.last_errors.append(hit)

    def asked_to_stop(self, hit: Hit) -> None:
        """A stop was requested; it explains what follows unless something alarming came before and was not got over."""
        alarming = [known.recoveries for known in (*self.faults, *self.deaths)]
        if not alarming or self.recoveries > max(alarming):
            self.stop = self.stop or hit

    @property
    def own_exits(self) -> list[Hit]:
        """How it ended by itself: what came after the orchestrator ended it says nothing about its death."""
        return [end for end in self.exits if self.ended_seq is None or end.seq <= self.ended_seq]

    def knows(self, rule: Rule, proc: str) -> bool:
        """Another hit of this rule would tell nothing new."""
        key = (rule.name, self.serving, self.recoveries)
        if key not in self._seen:
            return False
        trace = self.traces.get(proc)
        return trace is None or trace.hint is None or key in self._settled

    def note(self, kept: list[Hit], hit: Hit) -> None:
        """Keep the first hit of each rule (again after a recovery), so that a flood costs nothing."""
        key = (hit.rule.name, hit.serving, self.recoveries)
        if key not in self._seen and len(kept) < _KEPT_HITS:
            self._seen.add(key)
            kept.append(hit)
        elif hit.hint is not None:
            # The same thing again, now with a traceback around it: take over what the frames told.
            for number, known in enumerate(kept):
                if known.rule is hit.rule and known.hint is None and not known.serving:
                    kept[number] = known._replace(hint=hit.hint, hinted_cause=hit.hinted_cause)
                    return
            self._settled.add(key)

    def frame(self, rule: Rule, proc: str) -> None:
        """A traceback's frame told a phase or, for an exception that nobody names, a cause."""
        if len(self.traces) > _KEPT_TRACES:
            self.traces.clear()
        trace = self.traces.setdefault(proc, _Trace())
        serving = self.serving or trace.hint in SERVING
        if rule.phase is not None and serving == (rule.phase in SERVING or rule.name == "FrameServing"):
            trace.hint = rule.phase
        elif rule.phase == "load":
            trace.hint = "load"
        if rule.cause is not None:
            trace.cause = rule.cause

    def traceback(self, proc: str) -> None:
        """A new traceback begins in this process."""
        self.traces.pop(proc, None)

    def dump(self, text: str) -> None:
        """The scheduler's output at the time of death: was a new request alone in the batch?"""
        if text.startswith("Dumping scheduler output"):
            alone = (
                "scheduled_new_reqs=[NewRequestData" in text
                and "req_ids=['" not in text.partition("cached_reqs")[2][:80]
            )
            self.dump_new_only = alone

    def milestone(self, rule: Rule, values: dict[str, str | None], at_us: int | None) -> None:
        """A milestone of the boot."""
        self.clock.mark(rule.name, at_us, values)
        if rule.phase is not None and not self.ready:
            self.first_phase = self.first_phase or rule.phase
            self.phase, self.then = rule.phase, rule.then

    def is_ready(self, at_us: int | None) -> None:
        """The server says that it is ready."""
        self.clock.mark("Ready", at_us, {})
        if not self.ready:
            self.recoveries += 1
        self.ready = self.serving = True

    def answered(self, status: int, *, generates: bool) -> None:
        """An access-log line."""
        self.serving = True
        self.idle = self.idle and not generates
        if status < 400 and generates:
            self.ok_requests += 1
            if self.faults:
                self.recoveries += 1
        elif status >= 500:
            self.failed_requests += 1

    def stats(self, hit: Hit, running: int, waiting: int, tokens_per_s: float) -> None:
        """The engine's periodic line."""
        self.serving = True
        self.idle = running == 0 and waiting == 0
        if tokens_per_s > 0 or self.idle:
            self.zero_streak = 0
            self.hang = None
        else:
            self.zero_streak += 1
            self.hang = self.hang or hit

    def progressed(self) -> None:
        """The engine's periodic line says that tokens flow."""
        self.serving = True
        self.idle = False
        self.zero_streak = 0
        self.hang = None
