"""The judgement on one start: which of its hits is the root, where it happened, and what that makes of the start.

The earliest own fault wins; wrappers are never a cause; kernel evidence about our processes beats the program's words;
a stop that was requested before the first alarming line makes the rest shutdown noise; an end with status 0 that
nobody asked for, after serving, is a crash; when nothing names a root, the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.journal.rules import NO_REASON, SERVING, Cause, Rule
from orchestrator.journal.start import Hit, KernelEvent, Start
from orchestrator.records import Answer, Outcome

MOST_EVIDENCE = 10
# A dump of a new request alone, after so few answers, is a first request of its kind (a first long prompt).
_FEW_REQUESTS = 100
# Periods of the engine's own line without a token while requests wait: no slow prefill is that long.
_HANGING_PERIODS = 2
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
_NO_ROOT = "engine_dead_no_root"


def judge(start: Start, causes: Mapping[str, Cause]) -> Answer:
    """The answer on a start as far as its lines go."""
    return _Judgement(start, causes).answer()


@dataclass(frozen=True)
class _Judgement:
    start: Start
    causes: Mapping[str, Cause]

    def answer(self) -> Answer:
        roots = self._roots()
        dead = self._sign_of_death(roots)
        return self._benign() if dead is None else self._failed(roots[0] if roots else None, dead)

    # --- did it die, and of what -------------------------------------------------------------------------------

    def _roots(self) -> list[Hit]:
        """Own faults that were not taken back, best first."""
        start = self.start
        named = (*start.faults, *(end for end in start.own_exits if end.rule.cause and not self._cleaned_up(end)))
        roots = [hit for hit in named if not self._recovered(hit)]
        roots += [event.hit for event in start.kernel if event.hit.rule.kind == "fault" and self._is_ours(event)]
        return sorted(roots, key=lambda hit: (hit.rule.rank, hit.seq))

    def _cleaned_up(self, end: Hit) -> bool:
        """A SIGKILL after the program itself had told of its engine's death: whoever kills then clears away."""
        killed = end.rule.cause == "sigkill_unattributed"
        return killed and any(death.serving and death.seq < end.seq for death in self.start.deaths)

    def _recovered(self, hit: Hit) -> bool:
        """What came later takes this fault back: a server that became ready, or answered, without dying between."""
        start = self.start
        between = (death for death in start.deaths if not death.ready and death.rule.when != "runtime")
        if any(death.seq >= hit.seq for death in between):
            return False
        if not hit.serving and start.ready and hit.rule.rank > 0:
            return True
        return not hit.rule.sticky and start.recoveries > hit.recoveries

    def _is_ours(self, event: KernelEvent) -> bool:
        """By pid, by cgroup, by an engine's name; a nameless Python's, or a whole GPU's, when the engine failed too."""
        start = self.start
        if event.pid is not None and event.pid in start.pids:
            return True
        if event.cgroup is not None and start.unit is not None:
            return start.unit in event.cgroup
        if event.name is not None and _OURS.match(event.name):
            return True
        nameless = event.name is None or event.name.startswith("python")
        if event.hit.rule.cause == "host_oom_kill":
            killed = {"sigkill_unattributed", "host_oom_kill"}
            return nameless and any(hit.rule.cause in killed for hit in (*start.faults, *start.exits))
        whole_gpu = event.pid is None and event.cgroup is None
        return bool(start.faults or start.deaths) and (whole_gpu or (nameless and event.name is not None))

    def _sign_of_death(self, roots: list[Hit]) -> Hit | None:
        """The first hit that means that this start failed; None when it did not."""
        start = self.start
        signs = [*roots, *start.deaths]
        # A normal end that only the program's own noise shows is a crash once the server has served.
        quiet_end = not start.serving and any(hit.rule.cause == "benign_shutdown" for hit in start.benign)
        for end in start.own_exits:
            asked = start.stop is not None and end.seq > start.stop.seq
            if not asked and not (end.rule.clean and quiet_end):
                signs.append(end)
        if not signs and start.zero_streak >= _HANGING_PERIODS and start.hang is not None:
            signs.append(start.hang)
        return min(signs, key=lambda hit: hit.seq, default=None)

    def _failed(self, root: Hit | None, dead: Hit) -> Answer:
        at = root or dead
        cause = self._cause(root, dead)
        phase = self._phase(at, cause)
        if root is not None:
            cause = root.rule.by_phase.get(phase, cause)
        fatal = phase in SERVING or (phase == "unknown" and at.serving)
        evidence = self._evidence(root, no_root=root is None or root.rule.rank == NO_REASON)
        return self._said("fatal" if fatal else "startup_failure", phase, cause, evidence, at.rule)

    def _cause(self, root: Hit | None, dead: Hit) -> str:
        start = self.start
        if root is None and dead is start.hang:
            return "engine_hang"
        cause = (root.rule.cause if root is not None else None) or _NO_ROOT
        if cause != _NO_ROOT:
            return cause
        # Nothing names it outright: the files that a traceback went through, then a warning that would explain it.
        hints = [hit.hinted_cause for hit in ([root] if root else []) + start.faults if hit.hinted_cause]
        warned = [hit.rule.if_dead for hit in start.benign if hit.rule.if_dead]
        return next(iter([*(hints if root is not None else []), *warned]), _NO_ROOT)

    # --- where ---------------------------------------------------------------------------------------------------

    def _phase(self, hit: Hit, cause: str) -> str:
        """The phase of a failure: the rule's own, what frames told, the boot so far, and what the wrappers imply."""
        rule, deaths = hit.rule, self.start.deaths
        startup = any(death.rule.when == "startup" for death in deaths)
        runtime = any(death.rule.when == "runtime" for death in deaths)
        if rule.boot_only and self.start.ok_requests == 0:
            found = rule.phase or hit.phase or rule.fallback
        elif hit.serving or hit.hint in SERVING or (runtime and not startup and hit.hint is None):
            found = self._serving_phase(hit, cause)
        else:
            found = rule.phase or hit.hint or hit.phase or rule.fallback
            if found is None and self.start.serving and not startup:
                found = "load"
            if found in SERVING:
                found = self._serving_phase(hit, cause)
        if found is not None:
            return found
        later = (death.phase or death.hint for death in deaths)
        return next((phase for phase in later if phase), "config" if startup else "unknown")

    def _serving_phase(self, hit: Hit, cause: str) -> str:
        start = self.start
        if hit.idle:
            return "idle"
        enough = 1 if cause in _FIRST_USE else 0
        alone = hit.ready and hit.ok_requests <= enough and start.failed_requests <= 1
        of_a_kind = bool(start.dump_new_only) and hit.ok_requests < _FEW_REQUESTS
        return "first_request" if alone or of_a_kind or hit.hint == "first_request" else "load"

    # --- nothing died --------------------------------------------------------------------------------------------

    def _benign(self) -> Answer:
        start = self.start
        if start.stop is not None:
            hits = [hit for hit in (start.stop, start.slow_stop, *start.benign) if hit is not None]
            return self._said("benign", "shutdown", f"benign_shutdown{'_slow' if start.slow_stop else ''}", hits)
        words = [(hit.rule.cause or "benign_other", hit) for hit in start.benign]
        words += [("benign_other_process", event.hit) for event in start.kernel]
        if not words:
            words = self._unnamed()
        if not words:
            return self._said("benign", self._last_phase(), "healthy", [])
        cause, first = min(words, key=lambda word: (_weight(word[0]), word[1].seq))
        return self._said("benign", self._benign_phase(first), cause, _unique(hit for _, hit in words))

    def _unnamed(self) -> list[tuple[str, Hit]]:
        """Faults that were got over, and error lines that no rule names, with the benign word for them."""
        start = self.start
        # Serving without having been seen to become ready: the entries begin in the middle of its life.
        middle = start.serving and not start.ready
        rest = "benign_retry" if start.faults else "benign_other"
        errors = _unique((*start.faults, *start.first_errors))
        return [("benign_request_error" if hit.serving or middle else rest, hit) for hit in errors[:1]] + [
            ("benign_other", hit) for hit in errors[1:]
        ]

    def _last_phase(self) -> str:
        start = self.start
        if start.ok_requests or (start.serving and not start.ready):
            return "load"
        return start.phase or ("idle" if start.ready else "unknown")

    def _benign_phase(self, hit: Hit) -> str:
        rule = hit.rule
        if rule.phase in ("shutdown", "config", "compile"):
            return rule.phase
        if hit.serving:
            return "load"
        # What was said before the weights began is of the configuration.
        first = "config" if self.start.first_phase == "weights" else self.start.first_phase
        return rule.phase or hit.phase or rule.fallback or first or self._last_phase()

    # --- the answer ----------------------------------------------------------------------------------------------

    def _evidence(self, root: Hit | None, *, no_root: bool) -> list[Hit]:
        """The root first, then what else tells, in the order of the entries."""
        start = self.start
        kernel = [event.hit for event in start.kernel]
        told = [*start.faults, *start.deaths, *kernel, *start.own_exits, *([start.hang] if start.hang else [])]
        rest = _unique(hit for hit in told if hit is not root)[:MOST_EVIDENCE]
        if no_root:
            known = {hit.entry for hit in rest}
            errors = [hit for hit in (*start.first_errors, *start.last_errors) if hit.entry not in known]
            rest = _unique([*rest, *errors[: MOST_EVIDENCE - len(rest)]])
        return [*([root] if root else []), *rest]

    def _said(self, outcome: Outcome, phase: str, cause: str, hits: list[Hit], rule: Rule | None = None) -> Answer:
        known, start = self.causes[cause], self.start
        ended = bool(start.exits) or start.stop is not None
        own = rule.permanent if rule is not None else None
        return Answer(
            outcome=outcome,
            phase=phase,
            cause=cause,
            complete=outcome != "benign" or ended or start.ok_requests > 0,
            evidence=tuple(hit.evidence() for hit in hits[:MOST_EVIDENCE]),
            permanent=known.permanent if own is None else own,
            advice=(rule.advice if rule is not None else None) or known.advice,
            timeline=start.clock.timeline(),
        )


def _unique(hits: Iterable[Hit]) -> list[Hit]:
    """One hit for each entry and rule, in the order of the entries."""
    return sorted({(hit.entry, hit.rule.name): hit for hit in hits}.values(), key=lambda hit: hit.seq)


def _weight(cause: str) -> int:
    return _WEIGHT.index(cause) if cause in _WEIGHT else len(_WEIGHT)
