"""A diagnosis for a person: a table on a terminal, plain lines elsewhere. A mend is never cut, so it can be pasted."""

from __future__ import annotations

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
    lines += [f"     {check}: not asked, {why}" for check, why in diagnosis.not_asked.items()]
    return "\n".join([*lines, summary(diagnosis)])


def table(diagnosis: Diagnosis) -> RenderableType:
    """The findings as a table; `mends` belongs below it."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("check", no_wrap=True)
    grid.add_column("")
    grid.add_column("found", overflow="fold")
    for finding in diagnosis.findings:
        grid.add_row(Text(finding.check), Text(finding.level, style=_STYLE[finding.level]), Text(finding.said))
    for check, why in diagnosis.not_asked.items():
        grid.add_row(Text(check, style="dim"), Text("–", style="dim"), Text(f"not asked, {why}", style="dim"))
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
    verdict = "a campaign cannot run" if failed else "a campaign can run"
    return f"{diagnosis.box}: {ok} ok, {warned} to note, {failed} to mend: {verdict}"


def _mend(finding: Finding) -> list[str]:
    return [] if finding.mend is None else finding.mend.splitlines()
