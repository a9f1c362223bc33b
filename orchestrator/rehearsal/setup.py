"""What one run of the rehearsal engine is: flags, constants, time scale."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.rehearsal.flags import Settings
from orchestrator.rehearsal.personality import Personality
from orchestrator.rehearsal.wire import Wire


@dataclass(frozen=True)
class Setup:
    """Flags, constants and the time scale (1 is real time; it shortens boot phases and the logger's interval)."""

    settings: Settings
    personality: Personality
    scale: float


@dataclass(frozen=True)
class EngineHandle:
    """The API server's hold on its EngineCore: process id and the way to it."""

    pid: int
    wire: Wire
