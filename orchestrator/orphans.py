"""Engines that a killed campaign has left running, found by another folder's campaign or by `invoke restore`.

A plain process on this machine is known by the folder of its experiment alone. After `--new`, or for another experiment
on the same box, that folder is another one; its engine would still hold the port and the GPUs. Where such a campaign is
alive it has its lock, and is left alone. Everywhere else the box itself knows what is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from orchestrator.box import lock
from orchestrator.box.services import Service, make_service
from orchestrator.box.transports import Transport
from orchestrator.errors import BoxBusy
from orchestrator.matrix import BoxSpec


def end_orphans(
    transport: Transport, box: BoxSpec, folders: Iterable[Path], own: Service, *, holder: str, stop_s: float
) -> tuple[str, ...]:
    """Ends the engines of other folders' killed campaigns.

    Args:
        transport: the box.
        box: its description.
        folders: experiments of that box.
        own: the service of our own folder, whose lock we hold.
        holder: who we are, for the locks of the others.
        stop_s: how long an engine may take to end.

    Returns:
        The names of the folders whose engine was ended.

    Raises:
        BoxError: one survives.
    """
    if box.service != "process" or box.transport != "local":
        return ()
    ended = []
    for folder in folders:
        other = make_service(transport, box, folder.resolve() / "box")
        if not (folder / "box" / "service" / "pid").exists() or not other.pids():
            continue
        try:
            # The lock of a box that is no rehearsal is one for all its experiments: we hold it.
            held = None if other.lock_name == own.lock_name else lock.hold(transport, other.lock_name, holder)
        except BoxBusy:
            continue
        try:
            other.stop(kill=True, deadline_s=stop_s)
        finally:
            if held is not None:
                held.release()
        ended.append(folder.name)
    return tuple(ended)
