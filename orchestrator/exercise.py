"""What a ready engine is asked: the first requests, the headroom prompts, three fixed questions, and the load.

Each method of `Exercise` is a step of the boot cycle (see `boot`). An error answer from a living engine is recorded; an
engine that died or stopped answering ends the boot.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import orjson

from orchestrator import load
from orchestrator.box import gpuwatch
from orchestrator.box.services import UnitState
from orchestrator.errors import ProblemsError
from orchestrator.hangs import ALIVE_S, LATE
from orchestrator.ledger import write_private
from orchestrator.life import Done, Ending, Life, Work
from orchestrator.records import Level, RequestTiming, TrialEnded
from orchestrator.redact import redact_text

DISTURBED_TRIALS = 3
STALLED_S = 1.5


class Exercise:
    """The steps of one boot that need an engine which answers.

    `scale`: how long text is for the engine that runs now; None until it was asked. `failed_at`: the levels at which a
    request failed, in order.
    """

    def __init__(self, life: Life) -> None:
        """Asks nothing yet."""
        self.life = life
        self.scale: load.Scale | None = None
        self.failed_at: dict[Level, None] = {}
        own, repeat = life.rig.prompts, life.rig.load.repeat_prompts
        self.own = None if own is None else load.OwnPrompts(own.prompts, str(life.rig.seed), repeat=repeat)

    def first_request(self) -> Work:
        """The first generated tokens, one short request of each sampling kind."""
        yield from ()
        assert self.life.watch is not None
        seconds: dict[str, float] = {}
        errors: list[str] = []
        with self.life.engine_time():
            for kind, sampling in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.7, "top_p": 0.9})):
                timings = self.probe(1, 16, sampling=sampling, deadline_s=self.life.rig.deadlines.first_request_s)
                seconds[f"{kind}_s"] = round(timings[0].ended_at_s - timings[0].sent_at_s, 4)
                errors += [timing.error for timing in timings if timing.error is not None]
        if not errors:
            self.life.watch.mark("served")
        found = {"seconds": seconds, "prompts": self.calibrate()}
        self.refuse_long_prompts()
        return Done("; ".join(dict.fromkeys(errors)) or None, found)

    def calibrate(self) -> dict[str, Any]:
        """How long text is for this engine: asked once, used by all that follows; what it found, for the record."""
        assert self.life.target is not None
        with self.life.engine_time():
            scale = load.calibrate(
                self.life.target, endpoint=self.life.rig.load.endpoint, cancelled=self.life.cancelled
            )
        self.life.check()
        self.scale = scale
        return {
            "lengths": "exact" if scale.exact else "mean" if scale.measured else "guessed",
            "tokens_per_word": round(scale.tokens_per_word, 3),
            "overhead_tokens": round(scale.overhead_tokens, 1),
            "max_model_len": scale.max_model_len,
        }

    def refuse_long_prompts(self) -> None:
        """Prompts of the user's file that this engine cannot take are told now, and not by a 400 in a window.

        Raises:
            ProblemsError: names each with its line.
        """
        own, scale, spec = self.life.rig.prompts, self.scale, self.life.rig.load
        if own is None or scale is None or self.life.target is None:
            return
        with self.life.engine_time():
            found = load.too_long(
                self.life.target,
                own.prompts,
                scale,
                endpoint=spec.endpoint,
                output_tokens=spec.output_tokens,
                deadline_s=self.life.rig.deadlines.first_request_s,
                cancelled=self.life.cancelled,
            )
        self.life.check()
        limit = scale.max_model_len
        if found and limit is not None:
            room = limit - spec.output_tokens
            said = (
                f"too long: at most {room} fit {self.life.planned.variant}'s {limit} (max_model_len) with their answers"
            )
            hint = "take them out, or raise max-model-len of every variant, or lower load.output_tokens; then --new"
            raise ProblemsError([f"{own.where(place)}: {n} tokens, {said}" for place, n in found.items()], hint=hint)

    def headroom(self) -> Work:
        """One prompt that fills a whole prefill batch, then as many at once as the highest concurrency.

        With several prompt lengths it is as long as the longest, if that is more.
        """
        yield from ()
        if not self.life.rig.headroom:
            return Done("switched off in matrix.yaml", skipped=True)
        assert self.life.watch is not None
        length = self.life.rig.engine.headroom_tokens(
            self.life.launch,
            self.life.watch.timeline(),
            output_tokens=self.life.rig.load.headroom_tokens,
            at_least=max(self.life.rig.load.lengths) if len(self.life.rig.load.lengths) > 1 else 0,
        )
        found: dict[str, Any] = {"prompt_tokens": length}
        errors: list[str] = []
        with self.life.engine_time():
            for count in sorted({1, max(self.life.rig.concurrency)}):
                timings = self.probe(count, length, deadline_s=self.life.rig.deadlines.headroom_s)
                failed = [timing.error for timing in timings if timing.error is not None]
                found[f"at_{count}"] = {"answered": len(timings) - len(failed), "failed": len(failed)}
                errors += failed
        return Done("; ".join(dict.fromkeys(errors)) or None, found)

    def probe(
        self, count: int, prompt_tokens: int, *, deadline_s: float, sampling: dict[str, float] | None = None
    ) -> tuple[RequestTiming, ...]:
        """Requests whose failure is looked into at once: did the engine die, or does it live on?"""
        assert self.life.target is not None
        timings = load.probe(
            self.life.target,
            endpoint=self.life.rig.load.endpoint,
            prompt_tokens=prompt_tokens,
            output_tokens=self.life.rig.load.headroom_tokens,
            n=count,
            seed=f"{self.life.rig.seed}/{self.life.planned.boot}/{prompt_tokens}/{count}/{sampling}",
            deadline_s=deadline_s,
            sampling=sampling,
            scale=self.scale or load.Scale(),
            cancelled=self.life.cancelled,
        )
        self.life.check()
        errors = [timing.error for timing in timings if timing.error is not None]
        refused = next((error for error in errors if error.startswith(load.REFUSALS)), None)
        if refused is not None:
            raise Ending("disturbed", f"our request was refused: {redact_text(refused)}")
        if errors:
            self.lives()
        return timings

    def lives(self) -> None:
        """After an error answer: returns when the engine serves again, raises when it died or stopped answering."""
        assert self.life.target is not None
        target = self.life.target

        def serves() -> bool:
            timing = load.probe(
                target,
                endpoint=self.life.rig.load.endpoint,
                prompt_tokens=16,
                output_tokens=1,
                n=1,
                seed=f"{self.life.planned.boot}/alive/{time.monotonic_ns()}",
                deadline_s=ALIVE_S,
                sampling=None,
                scale=load.Scale(),
                cancelled=self.life.cancelled,
            )[0]
            return timing.error is None

        self.life.check_unit()
        late = Ending(LATE["first_request"], f"the engine answers no request any more ({ALIVE_S:g} s after an error)")
        self.life.wait_for(serves, deadline_s=ALIVE_S, every_s=0.25, late=late)

    def sanity(self) -> Work:
        """Three fixed greedy prompts: what a fast variant says is part of the record."""
        yield from ()
        assert self.life.target is not None
        with self.life.engine_time():
            said = load.greedy(
                self.life.target,
                endpoint=self.life.rig.load.endpoint,
                output_tokens=self.life.rig.load.sanity_tokens,
                deadline_s=self.life.rig.deadlines.sanity_s,
                cancelled=self.life.cancelled,
            )
        self.life.check()
        return Done(facts=said.to_facts())

    def trials(self) -> Work:
        """Levels ascending; a window that was disturbed is measured again, at most three times."""
        for level in self.life.rig.levels:
            if (why := self.too_long(level)) is not None:
                yield self.unmeasured(level, why)
                continue
            taken = itertools.count(1)
            for _ in range(self.life.rig.load.windows):
                yield from self.window(level, taken)
        return Done()

    def length(self, level: Level) -> int | None:
        """How long the prompts of a level are, tokens; None where they are the user's own."""
        return level.input_tokens or next(iter(self.life.rig.load.lengths), None)

    def too_long(self, level: Level) -> str | None:
        """Why a level cannot be measured: with the engine's own word on its context, where no flag stated it.

        The only length of an experiment is cut to what fits, with a warning; one of several would be another level.
        """
        room = None if self.scale is None else self.scale.max_model_len
        asked, answer = level.input_tokens, self.life.rig.load.output_tokens
        if room is None or asked is None or asked + answer <= room:
            return None
        return f"too_long: {asked} tokens in and {answer} out do not fit into the engine's context of {room}"

    def unmeasured(self, level: Level, why: str) -> TrialEnded:
        """A level that nobody can measure, for the books."""
        return TrialEnded(
            **self.life.key,
            concurrency=level.concurrency,
            input_tokens=self.length(level),
            window_s=None,
            tokens=None,
            tokens_per_s=None,
            valid=False,
            invalid_reasons=(why,),
        )

    def window(self, level: Level, taken: Iterator[int]) -> Iterator[TrialEnded]:
        """One window at one level, with its repeats; `taken` numbers all trials of the level."""
        for _ in range(DISTURBED_TRIALS + 1):
            trial = self.trial(level, next(taken))
            yield trial
            self.life.check()
            if trial.failed:
                self.failed_at[level] = None
                with self.life.engine_time():
                    self.lives()
            if trial.valid or trial.failed:
                break

    def trial(self, level: Level, attempt: int) -> TrialEnded:
        """One load at one level."""
        assert self.life.target is not None
        assert self.life.watch is not None
        before = self.life.identity
        length = self.length(level)
        begun = time.monotonic()
        gpus = None if self.life.gpus is None else gpuwatch.GpuWatch(self.life.rig.transport)
        with gpus or nullcontext(), self.life.engine_time():
            result = load.run_trial(
                self.life.target,
                self.life.rig.load.at(length),
                concurrency=level.concurrency,
                seed=f"{self.life.rig.seed}/{self.life.planned.boot}/{level}/{attempt}",
                cancelled=self.life.cancelled,
                deadline_s=self.life.rig.deadlines.trial_s,
                scale=self.scale,
                prompts=self.own,
            )
        found = load.to_record_fields(result, self.life.watch.logger_samples())
        reasons = list(found.pop("invalid_reasons"))
        if self.life.watch.alarm is None and self.life.rig.interrupts.reason is None:
            self.life.identity = self.life.rig.service.state()
            reasons += _identity_changes(before, self.life.identity)
        stalled_s = self.life.rig.transport.stalled_s(begun)
        if stalled_s > STALLED_S:
            # What failed or was slow meanwhile may be the network's fault: the level is measured again.
            reasons.append(f"the way to the box stalled for {stalled_s:.1f} s")
            found["failed"] = False
        if gpus is not None:
            reasons += _add_gpus(found, gpus, result)
        self.keep_raw(level, attempt, result, gpus)
        valid = bool(found.pop("valid")) and not reasons
        if not valid:
            found["tokens_per_s"] = None
        told = length if self.own is None else None
        return TrialEnded(**self.life.key, **found, input_tokens=told, valid=valid, invalid_reasons=tuple(reasons))

    def keep_raw(self, level: Level, attempt: int, result: load.TrialResult, gpus: gpuwatch.GpuWatch | None) -> None:
        """Each request's timing, each counter read and each look at the GPUs, beside the ledger."""
        name = f"c{level}" + ("" if attempt == 1 else f".r{attempt - 1}")
        for kind, rows in (("requests", result.timings), ("metrics", result.snapshots)):
            lines = [orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE, default=str) for row in rows]
            write_private(self.life.folder / f"{kind}-{name}.jsonl", b"".join(lines))
        if gpus is not None:
            write_private(self.life.folder / f"gpus-{name}.csv", gpus.raw().encode())


def _add_gpus(found: dict[str, Any], gpus: gpuwatch.GpuWatch, result: load.TrialResult) -> tuple[str, ...]:
    """Adds the GPUs in the window, and what to say of them, to a trial's fields; why it is disturbed, if it is."""
    if result.window is None:
        return ()
    use, problem = gpus.use(result.window.start_s, result.window.end_s)
    found["gpu"] = use
    found["warnings"] = (*found["warnings"], *gpuwatch.remarks(use or ()), *([] if problem is None else [problem]))
    return gpuwatch.disturbances(use or ())


def _identity_changes(before: UnitState | None, after: UnitState) -> list[str]:
    """Why a window does not speak of one engine process."""
    if before is None:
        return ["the unit's identity is not known"]
    return [
        f"{name} changed during the window: {was} → {now}"
        for name, was, now in (
            ("InvocationID", before.invocation_id, after.invocation_id),
            ("MainPID", before.main_pid, after.main_pid),
            ("NRestarts", before.n_restarts, after.n_restarts),
        )
        if was != now
    ]
