"""One boot's life while it runs: what is known of it, and waiting that notices when it ends.

`Rig` is the same for all boots of a campaign, `Life` is one boot's. Every wait in a boot goes through `Life.wait_for`
or `Life.cancelled`, so that a death in the journal, an interruption, the unit's exit and the deadline end it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator import load
from orchestrator.box import facts
from orchestrator.box.engines import Engine, Launch
from orchestrator.box.services import Service, UnitFacts, UnitState
from orchestrator.box.transports import Transport
from orchestrator.interrupts import Interrupts
from orchestrator.journal import DEFAULT, RuleSet
from orchestrator.matrix import Deadlines, LoadSpec
from orchestrator.promptfile import PromptFile
from orchestrator.records import AnyRecord, BootOutcome, CacheState, Evidence, Level, levels_of
from orchestrator.redact import redact_text
from orchestrator.watch import Watch

STATE_EVERY_S = 1.0


class Planned(Protocol):
    """What this room needs of a planned boot (`plan.PlannedBoot` has it)."""

    @property
    def boot(self) -> str:
        """Its name, unique in the experiment."""

    @property
    def variant(self) -> str:
        """The engine configuration."""

    @property
    def cache(self) -> CacheState:
        """The cache state to start from."""

    @property
    def block(self) -> int:
        """The block, from 1."""

    @property
    def position(self) -> int:
        """The place in the plan, from 1."""

    @property
    def attempt(self) -> int:
        """1, or more for a repeat."""


@dataclass(slots=True)
class GpuIdle:
    """The box's idle level: the least memory used on each GPU, seen while nothing of ours ran."""

    used_mib: tuple[int, ...] | None = None


@dataclass(slots=True)
class Way:
    """Whether this session has asked already what the way to the box adds to a request."""

    asked: bool = False


@dataclass(frozen=True, slots=True)
class Rig:
    """Everything that is the same for all boots of one campaign."""

    transport: Transport
    service: Service
    engine: Engine
    unit: UnitFacts
    experiment: str
    load: LoadSpec
    deadlines: Deadlines
    concurrency: tuple[int, ...]
    headroom: bool
    seed: int
    boot_folder: Callable[[str], Path]
    interrupts: Interrupts
    cache_root: str | None = None
    clear: Callable[[], tuple[str, ...]] | None = None
    room: Callable[[], tuple[tuple[int, str], ...]] = tuple
    api_key: str | None = None
    temperature_c: int | None = None
    idle: GpuIdle = field(default_factory=GpuIdle)
    way: Way = field(default_factory=Way)
    rules: RuleSet = DEFAULT
    prompts: PromptFile | None = None

    @property
    def levels(self) -> tuple[Level, ...]:
        """What each boot measures, in order: lengths ascending, concurrencies ascending within a length."""
        return levels_of(self.concurrency, self.load.lengths)


class Ending(Exception):
    """The boot ends here, with this outcome."""

    def __init__(
        self, outcome: BootOutcome, why: str, *, died: bool = False, found: dict[str, Any] | None = None
    ) -> None:
        super().__init__(why)
        self.outcome: BootOutcome = outcome
        self.why = why
        self.died = died
        self.found = found or {}


@dataclass(slots=True)
class Done:
    """What a step found out."""

    detail: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False


Work = Generator[AnyRecord, None, Done]


class Life:
    """What is known of one boot while it runs.

    `launch` is the command as it will be run; `watch`, `identity` and `target` are None until the unit was started,
    started, and ready. `engine_s` are the seconds of the running step that belong to the engine.
    """

    def __init__(self, planned: Planned, launch: Launch, rig: Rig) -> None:
        """A boot that has not begun."""
        self.planned = planned
        self.launch = launch
        self.rig = rig
        self.folder = rig.boot_folder(planned.boot)
        self.key: dict[str, Any] = {
            "boot": planned.boot,
            "variant": planned.variant,
            "cache": planned.cache,
            "block": planned.block,
            "position": planned.position,
            "attempt": planned.attempt,
        }
        self.engine_s = 0.0
        self.watch: Watch | None = None
        self.identity: UnitState | None = None
        self.target: load.Target | None = None
        self.gpus: facts.GpuState | None = None

    @contextmanager
    def engine_time(self) -> Iterator[None]:
        """What passes inside belongs to the engine: it starts, works, dies, or is under load."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.engine_s += time.monotonic() - begun

    def cancelled(self) -> str | None:
        """Why waiting and load must end now: an interruption or the engine's death."""
        reason = self.rig.interrupts.reason
        if reason is not None:
            return reason
        alarm = None if self.watch is None else self.watch.alarm
        return None if alarm is None else f"the journal says {alarm.rule}"

    def check(self) -> None:
        """Raises the boot's ending when there is one: interrupted, dead, or the journal was lost."""
        reason = self.rig.interrupts.reason
        if reason is not None:
            raise Ending("aborted", reason)
        if self.watch is None:
            return
        alarm = self.watch.alarm
        if alarm is not None:
            raise self.death(alarm)
        if self.watch.broken is not None:
            raise Ending("disturbed", f"the journal could not be followed: {self.watch.broken.what}")

    def death(self, alarm: Evidence) -> Ending:
        """The ending by a fatal entry; the journal is given a moment to finish its sentence."""
        assert self.watch is not None
        self.watch.settle(quiet_s=0.05, deadline_s=0.5)
        answer = self.watch.answer()
        # The alarm is the first entry that says the engine is dead; the answer's first evidence says what killed it.
        root = answer.evidence[0] if answer.evidence else alarm
        found: dict[str, Any] = {}
        if alarm.at_us is not None and self.watch.alarm_seen_at_s is not None:
            # Both clocks are the box's and ours; over ssh their difference is in this number too.
            found["noticed_after_s"] = round(self.watch.alarm_seen_at_s - alarm.at_us / 1e6, 4)
        why = f"{answer.cause} in {answer.phase}: {redact_text(root.text)[:300]}"
        return Ending("crashed", why, died=True, found=found)

    def check_unit(self) -> UnitState:
        """The unit's state; raises when it is no longer the one that we started."""
        state = self.rig.service.state()
        if state.active_state in ("failed", "inactive") or (state.main_pid or 0) == 0:
            if self.watch is not None:
                self.watch.wait(1.0)
                self.check()
            raise Ending(
                "crashed",
                f"the unit is {state.active_state} (result {state.result}, status {state.exit_status}) "
                "and the journal names no cause",
                died=True,
            )
        return state

    def wait_for(self, ready: Callable[[], bool], *, deadline_s: float, every_s: float, late: Ending) -> None:
        """Waits until `ready`, racing it against death, interruption, the unit's exit and the deadline."""
        end = time.monotonic() + deadline_s
        look_at_unit = time.monotonic() + STATE_EVERY_S
        while not ready():
            self.check()
            now = time.monotonic()
            if now >= end:
                raise late
            if self.identity is not None and now >= look_at_unit:
                self.check_unit()
                look_at_unit = time.monotonic() + STATE_EVERY_S
            if self.watch is None:
                self.rig.interrupts.wait(every_s)
            else:
                self.watch.wait(every_s)
