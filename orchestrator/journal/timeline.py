"""Where the start-up time went: milestones of one start → records.Timeline.

Numbers come from the engine's own lines first (a named group of a `phase` rule's pattern is a field of Timeline), and
from the distance of two milestones where the engine prints none. Seconds; None where no line told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orchestrator.records import Timeline

_INTEGERS = frozenset({"kv_tokens", "num_batched_tokens"})
_TEXTS = frozenset({"engine_version"})
# Printed once for each compiled model or loaded part: the parts add up.
_SUMMED = frozenset({"weights_s"})
_FIRST = frozenset({"engine_version", "num_batched_tokens"})


@dataclass
class Clock:
    """Collects milestones and numbers of one start. `at_us`: first time at which each milestone was seen."""

    started_us: int | None = None
    at_us: dict[str, int] = field(default_factory=dict)
    last_us: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    version: str | None = None
    compiled: int = 0
    loaded: int = 0
    eager: bool = False

    def begin(self, at_us: int | None) -> None:
        """The start's first sign of life."""
        if self.started_us is None:
            self.started_us = at_us

    def mark(self, milestone: str, at_us: int | None, values: dict[str, str | None]) -> None:
        """A milestone was seen, with what its line told."""
        if at_us is not None:
            self.at_us.setdefault(milestone, at_us)
            self.last_us[milestone] = at_us
        for name, text in values.items():
            if text is not None:
                self._take(name, text)

    def _take(self, group: str, text: str) -> None:
        name = group.rstrip("0123456789")
        if name == "compiled":
            self.compiled += 1
        elif name == "loaded":
            self.loaded += 1
        elif name == "eager":
            self.eager = True
        elif name in _TEXTS:
            self.version = self.version or text
        else:
            try:
                number = float(text.replace(",", ""))
            except ValueError:
                return
            if name in _FIRST and name in self.numbers:
                return
            self.numbers[name] = number + (self.numbers.get(name, 0.0) if name in _SUMMED else 0.0)

    def _between(self, earlier: str, later: str) -> float | None:
        begin = self.last_us.get(earlier)
        end = self.at_us.get(later)
        return None if begin is None or end is None or end < begin else (end - begin) / 1e6

    def _since_start(self, milestone: str) -> float | None:
        end = self.at_us.get(milestone)
        if end is None or self.started_us is None or end < self.started_us:
            return None
        return (end - self.started_us) / 1e6

    def _state(self) -> Literal["compiled", "loaded", "mixed", "no_compile", "unknown"]:
        if self.compiled and self.loaded:
            return "mixed"
        if self.compiled:
            return "compiled"
        if self.loaded:
            return "loaded"
        reached = "KvSize" in self.at_us or "KvAvailable" in self.at_us or "EngineReady" in self.at_us
        return "no_compile" if reached and self.eager else "unknown"

    def timeline(self) -> Timeline:
        """What is known so far."""
        numbers = self.numbers
        tokens = numbers.get("kv_tokens")
        batched = numbers.get("num_batched_tokens")
        profiling = numbers.get("profiling_s")
        if profiling is None:
            span = self._between("ModelLoaded", "KvAvailable")
            profiling = None if span is None else max(0.0, span - numbers.get("compile_s", 0.0))
        warmup = self._between("CaptureFinished", "EngineReady")
        return Timeline(
            engine_version=self.version,
            imports_s=self._since_start("Arguments"),
            config_s=self._between("Arguments", "LoadingModel"),
            weights_s=numbers.get("weights_s", self._between("LoadingModel", "ModelLoaded")),
            compile_s=numbers.get("compile_s", self._between("CpuCompiling", "CpuCompiled")),
            profiling_s=profiling,
            kv_cache_s=self._between("KvAvailable", "KvSize"),
            graph_capture_s=numbers.get("graph_capture_s"),
            warmup_s=warmup,
            ready_s=self._since_start("Ready"),
            compile_state=self._state(),
            weights_gib=numbers.get("weights_gib"),
            kv_tokens=None if tokens is None else int(tokens),
            kv_gib=numbers.get("kv_gib"),
            graph_capture_gib=numbers.get("graph_capture_gib"),
            num_batched_tokens=None if batched is None else int(batched),
        )
