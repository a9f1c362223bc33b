"""A diagnosis for a person: a table on a terminal, plain lines elsewhere. A mend is never cut, so it can be pasted."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.doctor.findings import Diagnosis, Finding, Level

_STYLE: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def plain(diagnosis: Diagnosis) -> str:
    """One line a finding, its mend below it."""
    lines: list[str] = []
    for finding in diagnosis.findings:
        lines.append(f"{finding.level:<4} {finding.check}: {finding.said}")
        lines += [f"     → {line}" if index == 0 else f"       {line}" for index, line in enumerate(_mend(finding))]
    lines += [f"     not asked, {why}: {', '.join(checks)}" for why, checks in _not_asked(diagnosis)]
    return "\n".join([*lines, summary(diagnosis)])


def table(diagnosis: Diagnosis) -> RenderableType:
    """The findings as a table; `mends` belongs below it."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("check", no_wrap=True)
    grid.add_column("")
    grid.add_column("found", overflow="fold")
    for finding in diagnosis.findings:
        grid.add_row(Text(finding.check), Text(finding.level, style=_STYLE[finding.level]), Text(finding.said))
    for why, checks in _not_asked(diagnosis):
        said = f"not asked, {why}: {', '.join(checks)}"
        grid.add_row(Text(_many(checks), style="dim"), Text("–", style="dim"), Text(said, style="dim"))
    return grid


def mends(diagnosis: Diagnosis) -> str:
    """What to run, whole lines whatever the terminal's width, and the end."""
    lines = [""]
    for finding in diagnosis.findings:
        if finding.mend is not None:
            lines += [f"{finding.level} {finding.check}:", *(f"  {line}" for line in _mend(finding))]
    return "\n".join([*lines, *([""] if len(lines) > 1 else []), summary(diagnosis)])


def summary(diagnosis: Diagnosis) -> str:
    """The end of both."""
    ok, warned, failed = (diagnosis.count(level) for level in ("ok", "warn", "fail"))
    what = "rehearsal" if diagnosis.rehearsal else "campaign"
    verdict = f"a {what} cannot run here" if failed else f"a {what} can run here"
    lines = [f"{diagnosis.box}: {ok} ok, {warned} to note, {failed} to mend: {verdict}"]
    lines += [
        f"the box `{name}` was not looked at: the same command with --box {name} does"
        for name in diagnosis.not_looked_at
    ]
    return "\n".join(lines)


def _not_asked(diagnosis: Diagnosis) -> list[tuple[str, list[str]]]:
    """Each reason once, with all the checks that it kept from being asked."""
    found: dict[str, list[str]] = {}
    for check, why in diagnosis.not_asked.items():
        found.setdefault(why, []).append(check)
    return list(found.items())


def _many(checks: Sequence[str]) -> str:
    return checks[0] if len(checks) == 1 else f"{len(checks)} more"


def _mend(finding: Finding) -> list[str]:
    return [] if finding.mend is None else finding.mend.splitlines()
