"""`on_end:` of matrix.yaml: a command of the user's own when a campaign has ended or failed, for a night's message.

It is a list of words and never a shell's text. What happened stands in its environment, as `COLDBOOT_…`. It has a
deadline, and whatever goes wrong with it is a warning: the campaign's own end stays what it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records import Verdicts

_NOT_INHERITED = "COLDBOOT_API_KEY"
_SHOWN_LINES = 5


@dataclass(frozen=True, slots=True)
class Ending:
    """How a campaign ended, for the command.

    `outcome` is complete, budget_spent, interrupted, terminated, refused (bad input; nothing was changed) or failed.
    """

    outcome: str
    experiment: str
    box: str
    folder: Path
    exit_code: int
    why: str | None = None
    boots_left: int | None = None


def environment(ending: Ending, verdicts: Verdicts | None) -> dict[str, str]:
    """What the command is told. A thing that does not exist is the empty text."""
    told = {
        "OUTCOME": ending.outcome,
        "EXPERIMENT": ending.experiment,
        "BOX": ending.box,
        "FOLDER": str(ending.folder.absolute()),
        "EXIT_CODE": str(ending.exit_code),
        "WHY": ending.why or "",
        "BOOTS_LEFT": "" if ending.boots_left is None else str(ending.boots_left),
        "WINNER": "",
        "PROVISIONAL": "",
        "PRODUCTION": "",
        "PRODUCTION_VERDICT": "",
        "SENTENCE": "",
        "REHEARSAL": "",
    }
    if verdicts is not None:
        production = next((one for one in verdicts.variants if one.name == verdicts.production), None)
        told |= {
            "WINNER": verdicts.winner or "",
            "PROVISIONAL": "" if verdicts.provisional is None else str(verdicts.provisional).lower(),
            "PRODUCTION": verdicts.production or "",
            "PRODUCTION_VERDICT": "" if production is None else production.verdict,
            "SENTENCE": verdicts.sentence,
            "REHEARSAL": str(verdicts.rehearsal).lower(),
        }
    return {f"COLDBOOT_{name}": value.replace("\0", " ") for name, value in told.items()}


def run(words: Sequence[str], told: Mapping[str, str], *, timeout_s: float) -> str | None:
    """Runs the command to its end.

    Args:
        words: The program and its arguments.
        told: Further environment; our own API key is taken out of what is inherited.
        timeout_s: After so long the command and all that it started are killed.

    Returns:
        What went wrong, for a warning; None when it ended with status 0.
    """
    env = {name: value for name, value in os.environ.items() if name != _NOT_INHERITED} | dict(told)
    try:
        process = subprocess.Popen(
            tuple(words),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"on_end: {words[0]} cannot be run: {error}; mend `on_end:` in matrix.yaml"
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        return f"on_end: {words[0]} did not end within {timeout_s:g} s (deadlines.on_end_s) and was killed"
    except BaseException:
        # Ctrl-C while we wait: it is a session of its own and would not notice.
        _kill_group(process)
        raise
    if process.returncode == 0:
        return None
    lines = output.decode("utf-8", "replace").strip().splitlines()[-_SHOWN_LINES:]
    return "\n        ".join((f"on_end: {words[0]} ended with status {process.returncode}", *lines))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The command and what it left running with our pipe in its hands."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
