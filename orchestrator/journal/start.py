"""One start of the unit: what its lines said, and the judgement on it.

Rules of judgement: the earliest own fault wins; wrappers are never a cause; kernel evidence about our processes beats
the program's words; a stop that was requested before the first alarming line makes the rest shutdown noise; an end
with status 0 that nobody asked for, after serving, is a crash; when nothing names a root, the answer says so.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field, replace

from orchestrator.journal.lines import Line
from orchestrator.journal.rules import SERVING, Cause, Rule
from orchestrator.journal.timeline import Clock
from orchestrator.records import Answer, Evidence

MOST_EVIDENCE = 10
_TEXT = 500
_KEPT_HITS = 200
NO_REASON = 5

# Causes of a kernel's or an allocation's first use: one answered request does not yet mean that the engine served.
_FIRST_USE = frozenset(
    {
        "cuda_oom_torch",
        "cuda_oom_driver",
        "triton_oom",
        "triton_out_of_resources",
        "compile_error",
        "toolchain_missing",
        "no_kernel_image",
        "graph_capture_oom",
    }
)
# Which benign word is said when several alarming things happened: the one that matters most to an experiment.
_WEIGHT = (
    "benign_shutdown_slow",
    "benign_shutdown",
    "benign_other_process",
    "benign_alloc_retry",
    "benign_autotune_oom",
    "benign_kv_preemption",
    "benign_client_disconnect",
    "benign_request_error",
    "benign_request_rejected",
    "benign_retry",
    "benign_slow_init",
    "benign_import_warning",
    "benign_config_warning",
    "benign_advice_text",
    "benign_other",
)
_OURS = re.compile(
    r"^(?:VLLM|vllm|EngineCore|Worker|ray::RayWorker|sglang|llama-server|pt_main_thread|APIServer)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule fitted an entry. `seq` counts the lines of the start; the rest is what was known at that moment."""

    rule: Rule
    index: int
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
        return Evidence(entry=self.index, rule=self.rule.name, text=self.text[:_TEXT], at_us=self.at_us)


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
    entries: int = 0
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
    stop_marked: bool = False
    slow_stop: Hit | None = None
    hang: Hit | None = None
    restarted: bool = False
    pids: set[int] = field(default_factory=set)
    traces: dict[str, _Trace] = field(default_factory=dict)
    first_errors: list[Hit] = field(default_factory=list)
    last_errors: deque[Hit] = field(default_factory=lambda: deque(maxlen=5))
    _seen: set[tuple[str, bool, int]] = field(default_factory=set)

    # --- what the lines say ------------------------------------------------------------------------------------

    def hit(self, rule: Rule, index: int, line: Line, at_us: int | None) -> Hit:
        """A rule's hit with what is known now."""
        trace = self.traces.get(line.proc)
        return Hit(
            rule=rule,
            index=index,
            seq=self.seq,
            text=line.body,
            at_us=at_us,
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
        return self.stop is not None or self.stop_marked

    def knows(self, rule: Rule, proc: str) -> bool:
        """Another hit of this rule would tell nothing new."""
        return (rule.name, self.serving, self.recoveries) in self._seen and proc not in self.traces

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
                    kept[number] = replace(known, hint=hit.hint, hinted_cause=hit.hinted_cause)
                    return

    def frame(self, rule: Rule, proc: str) -> None:
        """A traceback's frame told a phase or, for an exception that nobody names, a cause."""
        if len(self.traces) > 256:
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
            alone = "scheduled_new_reqs=[NewRequestData" in text and "req_ids=['" not in text.partition("cached_reqs")[2][:80]
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

    # --- the judgement -----------------------------------------------------------------------------------------

    def judge(self, causes: dict[str, Cause]) -> Answer:
        """The answer on this start as far as its lines go."""
        ours = [event for event in self.kernel if self._is_ours(event)]
        candidates = self._candidates(ours)
        dead = self._death_evidence(candidates)
        if dead is not None:
            return self._failed(candidates, dead, causes)
        return self._benign(causes)

    def _is_ours(self, event: KernelEvent) -> bool:
        if event.pid is not None and event.pid in self.pids:
            return True
        if event.cgroup is not None and self.unit is not None:
            return self.unit in event.cgroup
        if event.name is not None and _OURS.match(event.name):
            return True
        told = event.pid is not None or event.cgroup is not None
        killed = any(hit.rule.cause in ("sigkill_unattributed", "host_oom_kill") for hit in (*self.faults, *self.exits))
        if event.hit.rule.cause == "host_oom_kill":
            return killed and not self.stopping() and (event.name is None or event.name.startswith("python"))
        # An event of the whole GPU, or of a process whose name says nothing: ours when the engine failed too.
        failed = bool(self.faults or self.deaths)
        return failed and (not told or (event.name or "").startswith("python"))

    def _recovered(self, hit: Hit) -> bool:
        """What came later takes this fault back: a server that became ready, or answered, without dying between."""
        if any(death.seq >= hit.seq and death.rule.when != "runtime" for death in self.deaths if not death.ready):
            return False
        if not hit.serving and self.ready and hit.rule.rank > 0:
            return True
        return not hit.rule.sticky and self.recoveries > hit.recoveries

    def _candidates(self, ours: list[KernelEvent]) -> list[Hit]:
        """Own faults that were not taken back, best first."""
        faults = [
            hit
            for hit in (*self.faults, *(exit_ for exit_ in self.exits if exit_.rule.cause))
            if not self._recovered(hit)
        ]
        faults += [event.hit for event in ours if event.hit.rule.kind == "fault"]
        faults.sort(key=lambda hit: (hit.rule.rank, hit.seq))
        return faults

    def _death_evidence(self, candidates: list[Hit]) -> Hit | None:
        """The first hit that means that this start failed; None when it did not."""
        told = [*candidates, *self.deaths]
        for end in self.exits:
            if self.stop is not None and end.seq > self.stop.seq:
                continue
            if not end.rule.clean or self.serving or not self._orderly():
                told.append(end)
        if not told and self.zero_streak >= 2 and self.hang is not None:
            told.append(self.hang)
        return min(told, key=lambda hit: hit.seq) if told else None

    def _orderly(self) -> bool:
        """The noise of a normal end was seen (a stop that only the program's lines show)."""
        return any(hit.rule.cause == "benign_shutdown" for hit in self.benign)

    def _failed(self, candidates: list[Hit], dead: Hit, causes: dict[str, Cause]) -> Answer:
        root = candidates[0] if candidates else None
        cause = "engine_dead_no_root"
        at = root or dead
        if root is not None:
            cause = root.rule.cause or cause
            if root.rule.rank == NO_REASON and cause == "engine_dead_no_root":
                cause = root.hinted_cause or self._hinted() or self._if_dead() or cause
        elif dead is self.hang:
            cause = "engine_hang"
        else:
            cause = self._if_dead() or cause
        phase = self._phase_of(at, cause)
        cause = at.rule.by_phase.get(phase, cause) if root is not None else cause
        outcome = "fatal" if phase in SERVING else "startup_failure"
        if phase == "unknown" and at.serving:
            outcome = "fatal"
        no_root = root is None or root.rule.rank == NO_REASON
        return self._answer(outcome, phase, cause, self._evidence(root, no_root=no_root), causes, rule=at.rule)

    def _hinted(self) -> str | None:
        return next((hit.hinted_cause for hit in self.faults if hit.hinted_cause), None)

    def _if_dead(self) -> str | None:
        return next((hit.rule.if_dead for hit in self.benign if hit.rule.if_dead), None)

    def _phase_of(self, hit: Hit, cause: str) -> str:
        rule = hit.rule
        if rule.phase in ("exec", "shutdown"):
            return rule.phase
        if rule.boot_only and self.ok_requests == 0:
            return rule.phase or hit.phase or rule.fallback or "unknown"
        runtime = any(death.rule.when == "runtime" for death in self.deaths)
        startup = any(death.rule.when == "startup" for death in self.deaths)
        if hit.serving or hit.hint in SERVING or (runtime and not startup and not hit.ready and hit.hint is None):
            return self._serving_phase(hit, cause)
        if rule.phase is not None:
            return rule.phase
        told = hit.hint or hit.phase
        if told is not None:
            return told
        if rule.fallback is not None:
            return self._serving_phase(hit, cause) if rule.fallback in SERVING else rule.fallback
        if self.serving and not startup:
            return self._serving_phase(hit, cause)
        later = next((death.phase or death.hint for death in self.deaths if death.phase or death.hint), None)
        return later or ("config" if startup else "unknown")

    def _serving_phase(self, hit: Hit, cause: str) -> str:
        if hit.idle:
            return "idle"
        if hit.hint == "first_request":
            return "first_request"
        if self.dump_new_only and hit.ok_requests < 100:
            return "first_request"
        enough = 1 if cause in _FIRST_USE else 0
        if hit.ready and hit.ok_requests <= enough and self.failed_requests <= 1:
            return "first_request"
        return "load"

    def _benign(self, causes: dict[str, Cause]) -> Answer:
        if self.stopping():
            slow = self.slow_stop is not None
            hits = [hit for hit in (self.stop, self.slow_stop, *self.benign) if hit is not None]
            cause = "benign_shutdown_slow" if slow else "benign_shutdown"
            if self.entries == 0 and not hits:
                cause = "healthy"
            return self._answer("benign", "shutdown", cause, hits, causes)
        kernel = [event.hit for event in self.kernel]
        if self.benign or kernel:
            words = [(_weight(hit.rule.cause), hit.seq, hit) for hit in self.benign]
            words += [(_weight("benign_other_process"), hit.seq, hit) for hit in kernel]
            _, _, first = min(words, key=lambda word: word[:2])
            cause = "benign_other_process" if first in kernel else first.rule.cause or "benign_other"
            phase = self._benign_phase(first)
            return self._answer("benign", phase, cause, sorted((w[2] for w in words), key=lambda h: h.seq), causes)
        errors = [*self.faults, *self.first_errors]
        if errors:
            first = min(errors, key=lambda hit: hit.seq)
            # Serving without having seen it become ready: the entries begin in the middle of its life.
            serving = first.serving or (self.serving and not self.ready)
            cause = "benign_request_error" if serving else "benign_retry" if self.faults else "benign_other"
            return self._answer("benign", self._benign_phase(first), cause, errors, causes)
        return self._answer("benign", self._last_phase(), "healthy", [], causes)

    def _last_phase(self) -> str:
        if self.ok_requests or (self.serving and not self.ready):
            return "load"
        return self.phase or ("idle" if self.ready else "unknown")

    def _benign_phase(self, hit: Hit) -> str:
        if hit.rule.phase in ("shutdown", "config", "compile"):
            return hit.rule.phase
        if hit.serving:
            return "load"
        return hit.rule.phase or hit.phase or hit.rule.fallback or self.first_phase or self._last_phase()

    def _evidence(self, root: Hit | None, *, no_root: bool) -> list[Hit]:
        """The root first, then what else tells, in the order of the entries."""
        kernel = [event.hit for event in self.kernel]
        told = [*self.faults, *self.deaths, *kernel, *self.exits, *([self.hang] if self.hang else [])]
        if no_root:
            told += [*self.first_errors, *self.last_errors]
        rest = sorted(
            {(hit.index, hit.rule.name): hit for hit in told if hit is not root}.values(), key=lambda h: h.seq
        )
        return [*([root] if root else []), *rest][:MOST_EVIDENCE]

    def _answer(
        self,
        outcome: str,
        phase: str,
        cause: str,
        hits: list[Hit],
        causes: dict[str, Cause],
        rule: Rule | None = None,
    ) -> Answer:
        known = causes[cause]
        ended = bool(self.exits) or self.stopping()
        permanent = rule.permanent if rule is not None and rule.permanent is not None else known.permanent
        return Answer.model_validate(
            {
                "outcome": outcome,
                "phase": phase,
                "cause": cause,
                "complete": outcome != "benign" or ended or self.ok_requests > 0,
                "evidence": tuple(hit.evidence() for hit in hits[:MOST_EVIDENCE]),
                "permanent": permanent,
                "advice": (rule.advice if rule is not None else None) or known.advice,
                "timeline": self.clock.timeline(),
            }
        )


def _weight(cause: str | None) -> int:
    return _WEIGHT.index(cause) if cause in _WEIGHT else len(_WEIGHT)
