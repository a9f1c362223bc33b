"""`cache: clear`: the unit's own cache directories set aside, and put back whatever happens. Names and texts; pure.

Each directory D is renamed to `D.coldboot-aside`, and an empty one of the same owner and mode takes its place before
every boot. All of that is done as the service's user. Beside D lies a note, `D.coldboot-note`, written and flushed
before the rename: whoever finds it knows what is half done.

They are put back by one oneshot unit of ours on persistent disk, `coldboot-caches-NAME.service`, which runs as the
service's user and holds the list of directories. It stands and is enabled before the first rename. Everybody starts
it: the end of a campaign, `invoke restore`, the dead man, and systemd itself before every start of the service, at boot
too (`Before=` and `WantedBy=` the service). While our drop-in is there what starts is a variant, and the unit does
nothing (`ConditionPathExists=!`); so production never starts over cleared caches. Having put back it removes itself.

What is done as root, for a system unit NAME.service with U = /etc/systemd/system/coldboot-caches-NAME.service (for a
user's unit the same without root, below ~/.config/systemd/user):

    tee U.new                                         the unit's text on standard input
    mv -f U.new U
    systemctl enable coldboot-caches-NAME.service
    systemctl start coldboot-caches-NAME.service      puts the caches back; returns when that is done
    systemctl disable coldboot-caches-NAME.service    may fail: it has removed itself
    rm -f U U.new

and, for the file with the environment of a boot, which may hold keys, before its first `tee`:

    install -m 0600 /dev/null /run/systemd/system/NAME.service.d/zz-coldboot.env
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aside:
    """The unit that puts the caches of one service back.

    unit      the service's full name
    user      whether it is a unit of the user's own manager
    base      where the manager reads persistent units of ours
    drop_in   our drop-in: while it is there, what runs is a variant
    """

    unit: str
    user: bool
    base: str
    drop_in: str

    @property
    def name(self) -> str:
        """The unit's name."""
        return "coldboot-caches-" + re.sub(r"[^A-Za-z0-9_.-]", "_", self.unit.removesuffix(".service")) + ".service"

    @property
    def path(self) -> str:
        """Path of the unit's file."""
        return f"{self.base}/{self.name}"
