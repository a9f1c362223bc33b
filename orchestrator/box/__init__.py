"""The machine room's reach: the system under test, and every command that runs on it.

commands.py    how one argv becomes one command line, sudo and its refusals, what an answer means
sshconfig.py   the person's ssh config and known hosts -> the way to a box
sshlogin.py    the way in: jumps, host keys, logins; the door at which paramiko's exceptions are translated
ssh.py         one connection by paramiko with many channels
forward.py     a port of the box, answered on a port of this machine
transports.py  the narrow door itself: `Transport`, the local one, the table `TRANSPORTS`
lock.py        one campaign at a time per box; dies with its holder
facts.py       (command, parse) pairs: what must be equal before boots are pooled, and what the GPUs do now
services.py    one unit: systemd (system or user), or a plain process
engines.py     what is special to one server: flags, readiness, caches
unitfile.py    systemd's own quoting, both ways
caches.py      cold caches of a boot, and the proof that they are

Nothing here assumes that it is the only campaign in its process.
"""
