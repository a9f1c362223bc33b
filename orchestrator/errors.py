"""Every way in which Coldboot fails on purpose.

ColdbootError                    exit  what the person can do about it
├── UsageError                      4  mend the command line or a file
│   ├── MatrixError                 4  mend matrix.yaml (all problems at once)
│   ├── SeriesError                 4  mend a series file for `judge` (all problems at once)
│   ├── JournalError                4  give `classify` a file that can be read
│   ├── LedgerError                 4  the experiment's folder cannot go on (changed matrix, damaged ledger)
│   └── ExperimentChanged           4  something that must be equal is not; `--new` starts afresh
├── BoxError                        3  the box could not be used, or was lost
│   ├── Unreachable                 3  ssh: refused, unknown host key, no authentication, connection lost
│   ├── CommandFailed               3  a command on the box failed: command, status, last ten lines
│   ├── CommandTimeout              3  a command on the box did not end by its deadline
│   ├── BoxBusy                     3  another campaign holds the box, or requests are running on it
│   └── RestoreFailed               3  production did not come back: what is left, and what to run
└── Interrupted               130/143  Ctrl-C or SIGTERM; production is restored before this is seen

Foreign exceptions (paramiko, httpx, OSError …) are translated at one door each: the transport, the load client,
the scraper, the ledger. `sys.exit` stands in the command line alone, which reads `exit_code` from here.
This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

OK = 0
UNDECIDED = 2
BOX = 3
USAGE = 4
FAIL = 5
INTERRUPTED = 130
TERMINATED = 143

PROBLEMS_SHOWN = 20


class ColdbootError(Exception):
    """Base of all: one line says what, `hint` says what to do next."""

    exit_code = USAGE

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return self.what if self.hint is None else f"{self.what}\n  → {self.hint}"


class UsageError(ColdbootError):
    """Wrong command line or a file that cannot be used."""


class ProblemsError(UsageError):
    """Bad input that names its problems, one a line: `problems` has all, the text the first `PROBLEMS_SHOWN`.

    `count` is how many there are, where whoever found them stopped to keep them.
    """

    def __init__(self, problems: Sequence[str], *, hint: str | None = None, count: int | None = None) -> None:
        self.problems = tuple(problems)
        self.count = len(self.problems) if count is None else count
        shown = self.problems[:PROBLEMS_SHOWN]
        left = self.count - len(shown)
        more = (f"and {left} more problem{'s' * (left > 1)}, {self.count} in all",) if left > 0 else ()
        super().__init__("\n".join((*shown, *more)), hint=hint)


class MatrixError(ProblemsError):
    """matrix.yaml is not usable: `file:line: key: what is wrong; what is accepted`, all at once."""


class SeriesError(ProblemsError):
    """A series file for `judge` is not usable."""


class JournalError(UsageError):
    """A journal or log for `classify` is empty or cannot be read."""


class LedgerError(UsageError):
    """The experiment's folder cannot be read or cannot go on."""


class ExperimentChanged(UsageError):
    """A matrix, engine or driver differs from what the experiment began with; names what changed."""


class BoxError(ColdbootError):
    """The box could not be used, or was lost."""

    exit_code = BOX


class Unreachable(BoxError):
    """No connection to the box, or it was lost."""


class CommandFailed(BoxError):
    """A command on the box ended with a status that is not 0."""

    def __init__(self, command: str, status: int, tail: str, *, hint: str | None = None) -> None:
        lines = tail.strip().splitlines()[-10:]
        shown = "".join(f"\n    {line}" for line in lines)
        super().__init__(f"`{command}` ended with status {status}{shown}", hint=hint)
        self.command = command
        self.status = status
        self.tail = tail


class CommandTimeout(BoxError):
    """A command on the box did not end by its deadline."""


class BoxBusy(BoxError):
    """Somebody else uses the box: another campaign, or running requests."""


class RestoreFailed(BoxError):
    """Production did not come back; says what is left and what to run."""


class Interrupted(ColdbootError):
    """The person or the system asked us to stop; production is back before this reaches the command line."""

    exit_code = INTERRUPTED

    def __init__(self, what: str, *, exit_code: int = INTERRUPTED, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.exit_code = exit_code
