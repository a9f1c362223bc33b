"""What a trial is asked to do, and what it says afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator import rulers as measure
from orchestrator.client import Endpoint
from orchestrator.records import Deltas, Quantiles, RequestTiming, Rulers
from orchestrator.rulers import Health, Window
from orchestrator.scrape import Snapshot


class LoadLike(Protocol):
    """What a trial needs to know; the matrix' `load:` block is one."""

    @property
    def endpoint(self) -> Endpoint:
        """`chat` or `completions`."""

    @property
    def stream(self) -> bool:
        """Whether answers are streamed."""

    @property
    def input_tokens(self) -> int:
        """Prompt length."""

    @property
    def output_tokens(self) -> int:
        """Answer length, exactly."""

    @property
    def window_s(self) -> float:
        """Length of the measured window."""

    @property
    def window_requests(self) -> int | None:
        """How many requests end in the window, instead of its length."""

    @property
    def warmup_s(self) -> float:
        """Shortest warm-up."""

    @property
    def max_warmup_s(self) -> float:
        """Longest warm-up: then the window begins although not every stream has finished a request."""

    @property
    def temperature(self) -> float:
        """Sampling temperature."""

    @property
    def request_timeout_s(self) -> float:
        """After so long one request has failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """A `LoadLike` of this module's own."""

    endpoint: Endpoint = "chat"
    stream: bool = True
    input_tokens: int = 512
    output_tokens: int = 256
    window_s: float = 30.0
    window_requests: int | None = None
    warmup_s: float = 2.0
    max_warmup_s: float = 60.0
    temperature: float = 0.0
    request_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial; the fields of `records.TrialEnded`, and what they were made from.

    `cancelled` is the reason for which it was stopped from outside. `snapshots` are the reads: before, at the window's
    ends, after. `error_examples` has the first detail seen of each kind of error.
    """

    concurrency: int
    window_s: float | None
    tokens: float | None
    tokens_per_s: float | None
    valid: bool
    invalid_reasons: tuple[str, ...]
    failed: bool
    errors: Mapping[str, int]
    requests_sent: int
    requests_ok: int
    rulers: Rulers
    deltas: Deltas | None
    whole: Deltas | None
    client_tokens: int | None
    ttft_ms: Quantiles
    itl_ms: Quantiles
    e2e_ms: Quantiles
    window_started_at: str | None
    warnings: tuple[str, ...]
    error_examples: Mapping[str, str] = field(default_factory=dict)
    window: Window | None = None
    health: Health | None = None
    timings: tuple[RequestTiming, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    cancelled: str | None = None
    seconds: float = 0.0


_RECORD_FIELDS = (
    "concurrency",
    "window_s",
    "tokens",
    "tokens_per_s",
    "valid",
    "invalid_reasons",
    "failed",
    "errors",
    "requests_sent",
    "requests_ok",
    "rulers",
    "deltas",
    "whole",
    "client_tokens",
    "ttft_ms",
    "itl_ms",
    "e2e_ms",
    "window_started_at",
    "warnings",
)


def to_record_fields(result: TrialResult, logger_samples: Iterable[tuple[float, float]] = ()) -> dict[str, Any]:
    """The fields of `records.TrialEnded` that a trial knows; the boot's own are the caller's.

    `logger_samples` are the engine's lines, (epoch seconds, tok/s), for the `logger` ruler (see `with_logger`).
    """
    fields = {name: getattr(result, name) for name in _RECORD_FIELDS} | {"errors": dict(result.errors)}
    if result.window is not None:
        fields["rulers"] = measure.with_logger(result.rulers, logger_samples, result.window)
    return fields
