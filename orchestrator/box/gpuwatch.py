"""What the GPUs do while a trial runs: one long `nvidia-smi` on the box, read line by line and summed up per window.

    transport.stream → (arrival, line) → Sample → GpuUse of the window, and what of it disturbs the trial

Watching never fails a trial: whatever goes wrong with it is a warning. nvidia-smi loads itself before the window, while
the load warms up, and dies with the stream, that is with the connection and with us.

Sources: `nvidia-smi --help-query-gpu`, and nvidia-smi(1) on "Clocks Event Reasons".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from orchestrator.box.facts import REASON_FIELDS, present, reasons_of
from orchestrator.box.transports import Stream, Transport
from orchestrator.errors import BoxError
from orchestrator.records import GpuUse

EVERY_MS = 500
FIELDS = (
    "timestamp",
    "index",
    "utilization.gpu",
    "memory.used",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
"""What is asked beside the reasons, whose name depends on the driver's age."""

DISTURBING = frozenset({"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Heat and hardware: such a window speaks of the rig. Many cards are at their power limit whenever they work."""
POWER_CAP = "sw_power_cap"

_MAX_LINES = 100_000  # some hours of eight GPUs: a trial is over long before
_JOIN_S = 2.0

_SCRIPT = f"""
for reasons; do
    nvidia-smi --query-gpu={",".join(FIELDS)},"$reasons" --format=csv,noheader,nounits --loop-ms={EVERY_MS} && exit 0
    status=$?
done
exit $status
"""
ARGV = ("sh", "-c", _SCRIPT, "coldboot", *REASON_FIELDS)
"""The command on the box: it asks by the driver's newer name of the reasons, then by the older one."""


# --- pure ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One GPU at one moment; `at_s` is when its line arrived, monotonic seconds. None: this GPU does not tell."""

    at_s: float
    index: int
    utilisation_percent: float | None
    used_mib: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    throttle: tuple[str, ...] | None


def parse_line(at_s: float, line: str) -> Sample | None:
    """One line of `ARGV`'s output; None for whatever else nvidia-smi says (a refusal, a torn line)."""
    row = [value.strip() for value in line.split(",")]
    if len(row) != len(FIELDS) + 1 or not row[1].isdecimal():
        return None
    utilisation, used, sm_clock, memory_clock, power, limit, temperature = (_number(value) for value in row[2:-1])
    return Sample(
        at_s=at_s,
        index=int(row[1]),
        utilisation_percent=utilisation,
        used_mib=used,
        sm_clock_mhz=sm_clock,
        memory_clock_mhz=memory_clock,
        power_w=power,
        power_limit_w=limit,
        temperature_c=temperature,
        throttle=_reasons(row[-1]),
    )


def _number(value: str) -> float | None:
    said = present(value)
    try:
        return None if said is None else float(said)
    except ValueError:  # nvidia-smi's words for a broken sensor are many: ERR!, [GPU requires reset] …
        return None


def _reasons(value: str) -> tuple[str, ...] | None:
    try:
        return reasons_of(value)
    except ValueError:
        return None


def summarise(samples: Iterable[Sample], from_s: float, to_s: float) -> tuple[GpuUse, ...]:
    """Each GPU over a window (monotonic seconds), by index; a GPU without a sample in it is not there."""
    by_gpu: dict[int, list[Sample]] = {}
    for sample in samples:
        if from_s <= sample.at_s <= to_s:
            by_gpu.setdefault(sample.index, []).append(sample)
    return tuple(_use(index, by_gpu[index]) for index in sorted(by_gpu))


def _use(index: int, samples: Sequence[Sample]) -> GpuUse:
    clocks = _told(sample.sm_clock_mhz for sample in samples)
    told = [sample.throttle for sample in samples if sample.throttle is not None]
    names = sorted({name for reasons in told for name in reasons})
    limits = _told(sample.power_limit_w for sample in samples)
    return GpuUse(
        index=index,
        samples=len(samples),
        utilisation_mean_percent=_mean(_told(sample.utilisation_percent for sample in samples)),
        memory_used_max_mib=max(_told(sample.used_mib for sample in samples), default=None),
        sm_clock_min_mhz=min(clocks, default=None),
        sm_clock_mean_mhz=_mean(clocks),
        memory_clock_mhz=min(_told(sample.memory_clock_mhz for sample in samples), default=None),
        power_mean_w=_mean(_told(sample.power_w for sample in samples)),
        power_limit_w=limits[-1] if limits else None,
        temperature_max_c=max(_told(sample.temperature_c for sample in samples), default=None),
        throttle={name: round(sum(name in one for one in told) / len(told), 4) for name in names} if told else None,
    )


def _told(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def disturbances(use: Sequence[GpuUse]) -> tuple[str, ...]:
    """Why a window says nothing about its variant: a GPU that worked was slowed down by heat or by its hardware."""
    return tuple(
        f"throttled: GPU {gpu.index} {_shares(gpu, DISTURBING)}{_heat(gpu)}: cool it, or lower its power limit"
        for gpu in use
        if _works(gpu) and DISTURBING.intersection(gpu.throttle or ())
    )


def remarks(use: Sequence[GpuUse]) -> tuple[str, ...]:
    """What is normal and yet good to know: a power limit that was reached."""
    return tuple(
        f"GPU {gpu.index} was at its power limit{_limit(gpu)}: {_shares(gpu, (POWER_CAP,))}"
        for gpu in use
        if gpu.throttle and POWER_CAP in gpu.throttle
    )


def _works(gpu: GpuUse) -> bool:
    """A GPU that did nothing in the whole window is not the engine's; one that does not tell may be."""
    return gpu.utilisation_mean_percent is None or gpu.utilisation_mean_percent > 0


def _shares(gpu: GpuUse, names: Iterable[str]) -> str:
    seen = {name: share for name, share in (gpu.throttle or {}).items() if name in names}
    return ", ".join(f"{name} in {_percent(share)}" for name, share in seen.items()) + f" of {gpu.samples} samples"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _heat(gpu: GpuUse) -> str:
    return "" if gpu.temperature_max_c is None else f", {gpu.temperature_max_c:.0f} °C at most"


def _limit(gpu: GpuUse) -> str:
    return "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f} W"


# --- watching --------------------------------------------------------------------------------------------------------


class GpuWatch:
    """Watches the GPUs of a box inside a `with` block. Never raises for what goes wrong on the box."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None
        self._lines: list[tuple[float, float, str]] = []
        self._trouble: str | None = None

    def __enter__(self) -> Self:
        try:
            self._stream = self._transport.stream(ARGV)
        except BoxError as error:
            self._trouble = error.what
            return self
        self._thread = threading.Thread(target=self._follow, args=(self._stream,), name="gpus", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _follow(self, stream: Stream) -> None:
        try:
            for line in stream.lines():
                if len(self._lines) < _MAX_LINES:
                    self._lines.append((time.monotonic(), time.time(), line))
        except BoxError as error:
            self._trouble = error.what
            return
        if stream.status is not None:
            # nvidia-smi says on stdout what it does not like.
            said = [
                line for line in (*stream.stderr.splitlines(), *(line for _, _, line in self._lines)) if line.strip()
            ]
            last = next((line.strip() for line in reversed(said) if parse_line(0.0, line) is None), "it said nothing")
            self._trouble = f"nvidia-smi ended with status {stream.status}: {last[:200]}"

    def samples(self) -> tuple[Sample, ...]:
        """Everything that was sampled so far."""
        found = (parse_line(at_s, line) for at_s, _, line in tuple(self._lines))
        return tuple(sample for sample in found if sample is not None)

    def raw(self) -> str:
        """The lines as they came, each behind the epoch seconds of its arrival; the columns' names stand above."""
        head = ",".join(("arrived_at", *FIELDS, "clocks_event_reasons.active"))
        return "".join(f"{line}\n" for line in (head, *(f"{at:.3f}, {line}" for _, at, line in tuple(self._lines))))

    def use(self, from_s: float, to_s: float) -> tuple[tuple[GpuUse, ...] | None, str | None]:
        """Each GPU over a window (monotonic seconds), and a warning where there is nothing to tell of it."""
        found = summarise(self.samples(), from_s, to_s)
        if found:
            return found, None
        why = self._trouble or f"nvidia-smi gave {len(self._lines)} lines, none of them in the window"
        return None, f"the GPUs were not watched: {why}"
