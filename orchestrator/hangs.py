"""What hangs comes to an end: one table of deadline, deed and outcome, for the code, the docs and the tests.

`python -m orchestrator.hangs` prints it as the section of docs/promises.md. Imports nothing of ours but records.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from orchestrator.records import BootOutcome, StepName

LATE: dict[StepName, BootOutcome] = {
    "clean_slate": "disturbed",
    "ready": "not_ready",
    "first_request": "not_ready",
    "headroom": "not_ready",
    "trials": "not_ready",
}
"""The outcome of a boot whose step was not over by its deadline, when nobody else is to blame for that."""

ALIVE_S = 15.0
"""So long an engine that failed a request may take for one token before it counts as hanging."""


@dataclass(frozen=True, slots=True)
class Hang:
    """One thing that may hang: where, until when it is waited for, what is done then, and what that gives."""

    what: str
    until: str
    then: str
    gives: str
    test: str


HANGS = (
    Hang(
        "a server that accepts and never answers, while it boots",
        "`ready_s`",
        "its control group is killed",
        "not_ready",
        "tests/test_hangs.py, a server that never answers /health",
    ),
    Hang(
        "the same after it was ready",
        f"`first_request_s`, `headroom_s`, `request_timeout_s` or `trial_s`, then {ALIVE_S:g} s for one token",
        "its control group is killed",
        "not_ready",
        "tests/test_hangs.py, a server that is healthy and never answers",
    ),
    Hang(
        "an engine that died behind an `active` unit",
        "at once by its line in the journal; without one, as above",
        "its control group is killed",
        "crashed; without a line not_ready",
        "tests/test_boot.py, an EngineCore that is killed",
    ),
    Hang(
        "all processes suspended (SIGSTOP, a debugger)",
        "as above; then their state is read from /proc",
        "killed, repeated",
        "disturbed",
        "test_faults, SIGSTOP of the engine",
    ),
    Hang(
        "a stop that needs SIGKILL",
        "`stop_s`",
        "its control group is killed; what survives that is named",
        "the boot keeps its outcome; survivors disturb the next one",
        "tests/test_services_process.py, tests/box/test_services_systemd.py",
    ),
    Hang(
        "GPU memory that does not drain, a process on a GPU, a taken port",
        "`clean_slate_s`",
        "repeated; three disturbed boots in a row end the campaign",
        "disturbed; exit 3",
        "tests/test_hangs.py, memory that does not drain",
    ),
    Hang(
        "a journal that is silent",
        "when the engine is ready, or is not by its deadline",
        "killed, repeated: nothing would tell a cold start from a warm one",
        "disturbed",
        "tests/test_hangs.py, a journal that says nothing",
    ),
    Hang(
        "ssh that stalls without closing",
        "21 s without an answer to a keepalive; a shorter stall makes the trial invalid, which is repeated",
        "the connection is given up, and the box tried again for `reconnect_s`",
        "disturbed, repeated; gone for good: exit 3, and the box restores by itself",
        "test_faults, ssh stalls for 40 s",
    ),
    Hang(
        "a command on the box that does not end (nvidia-smi, systemctl)",
        "30 s",
        "it is killed with its process group",
        "disturbed",
        "tests/test_transports.py, tests/box/test_box_ssh.py",
    ),
    Hang(
        "the `nvidia-smi` that watches the GPUs",
        "the end of the trial; nobody waits for it",
        "it is killed with its process group, here or over ssh, also when we are killed",
        "a warning of the trial; no GPU facts",
        "tests/test_gpuwatch.py, tests/box/test_box_gpus.py",
    ),
    Hang(
        "coldboot itself (suspended, a laptop asleep)",
        "`dead_man_s` without a heartbeat",
        "the box restores production; awake again, the campaign asks for the box anew",
        "disturbed, repeated; exit 3 when production is being used by then",
        "test_faults, coldboot suspended",
    ),
    Hang(
        "production that does not serve after its restart",
        "`ready_s`",
        "the campaign ends and says what to look at",
        "exit 3",
        "tests/test_custody.py, production under another command",
    ),
)


def page() -> str:
    """The table as Markdown."""
    rows = [f"| {hang.what} | {hang.until} | {hang.then} | {hang.gives} | {hang.test} |" for hang in HANGS]
    head = ["| what hangs | is waited for until | then | gives | shown by |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
