"""Run one unit on a box: the table of service managers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.box.owncaches import OwnCaches
from orchestrator.box.process import ProcessService
from orchestrator.box.systemd import SystemdService
from orchestrator.box.transports import Transport
from orchestrator.box.unit import Action, EntryStream, Service, UnitFacts, UnitState
from orchestrator.matrix import BoxSpec

__all__ = ["SERVICES", "Action", "EntryStream", "Service", "UnitFacts", "UnitState", "make_service", "own_caches"]


def _process(transport: Transport, box: BoxSpec, state: Path) -> Service:
    # On another machine our own path means nothing; there the login's cache directory is ours.
    remote = f".cache/coldboot/{box.name}"
    return ProcessService(transport, box, state=str(state) if box.transport == "local" else remote)


SERVICES: dict[str, Callable[[Transport, BoxSpec, Path], Service]] = {
    "systemd": lambda transport, box, _state: SystemdService(transport, box),
    "systemd-user": lambda transport, box, _state: SystemdService(transport, box, user=True),
    "process": _process,
}


def make_service(transport: Transport, box: BoxSpec, state: Path) -> Service:
    """The unit of a box. `state` is a directory of the campaign's own, for what a plain process leaves behind."""
    return SERVICES[box.service](transport, box, state)


def own_caches(service: Service) -> OwnCaches | None:
    """A unit's own cache directories; None where nothing could put them back after a reboot."""
    return service.own_caches if isinstance(service, SystemdService) else None
