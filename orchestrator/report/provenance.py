"""Where the numbers come from: fingerprint, versions, plan and seed, sessions, commands beside production's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.records import AnyRecord, CampaignEnded, CampaignStarted, Series
from orchestrator.report import commands, words
from orchestrator.report.model import BootView, Section, Table

PLAN = "plan.json"
_PLAN_KEYS = ("plan_name", "seed", "boots", "alpha", "looks", "cache", "concurrency", "variants", "matrix_digest")


def sessions(records: Iterable[AnyRecord]) -> tuple[tuple[CampaignStarted, ...], tuple[CampaignEnded, ...]]:
    """The campaign's starts (the first, then each that went on) and ends."""
    started, ended = [], []
    for record in records:
        # Not isinstance: of a pydantic class it takes many times as long, and nearly all records are neither.
        if type(record) is CampaignStarted:
            started.append(record)
        elif type(record) is CampaignEnded:
            ended.append(record)
    return tuple(started), tuple(ended)


def base_command(
    started: Sequence[CampaignStarted], series: Series, boots: Sequence[BootView]
) -> tuple[str, tuple[str, ...]]:
    """What commands are compared with, and its name: production's own, its variant's, else what all share."""
    for campaign in reversed(started):
        if campaign.base_command:
            return "production's command", campaign.base_command
        if campaign.production is not None and campaign.production.command:
            return "production's command", campaign.production.command
    firsts = first_commands(started, boots)
    if series.production is not None and series.production in firsts:
        return f"production ({series.production})", firsts[series.production]
    return ("what all variants share", commands.common(list(firsts.values()))) if firsts else ("", ())


def first_commands(started: Sequence[CampaignStarted], boots: Sequence[BootView]) -> dict[str, tuple[str, ...]]:
    """Each variant's effective command: as its first boot ran it, else as it was composed."""
    found: dict[str, tuple[str, ...]] = {}
    for boot in boots:
        if boot.started is not None and boot.started.command:
            found.setdefault(boot.variant, boot.started.command)
    for campaign in started:
        for name, argv in campaign.commands.items():
            found.setdefault(name, argv)
    return {name: argv for name, argv in found.items() if argv}


def section(records: Sequence[AnyRecord], series: Series, boots: Sequence[BootView], folder: Path | None) -> Section:
    """Everything that a stranger needs to boot the same again."""
    started, ended = sessions(records)
    tables = [_setup(series, started, boots)]
    tables.extend(_fingerprints(started))
    tables.extend(_plan(folder.parent / PLAN if folder is not None else None))
    tables.extend(_sessions(started, ended))
    base_name, base = base_command(started, series, boots)
    firsts = first_commands(started, boots)
    sentences = list(_in_short(started))
    if not records:
        sentences.append("Recorded by hand or by another tool: there is no ledger, so no fingerprint and no commands.")
    if firsts:
        rows = tuple(
            (words.clean(name), "; ".join(commands.difference(base, argv)) or "nothing", commands.shown(argv))
            for name, argv in firsts.items()
        )
        sentences.append(f"Differences are against {words.clean(base_name)}; address and port are left out of them.")
        title = "Effective commands, as read from the running process"
        tables.append(Table(title, ("variant", "differs in", "command"), rows, code=frozenset({1, 2}), folded=True))
        tables.extend(_environments(boots))
    return Section("provenance", "Provenance", tuple(sentences), tuple(tables))


def _in_short(started: Sequence[CampaignStarted]) -> Iterator[str]:
    """What was measured on what, in one sentence."""
    if not started:
        return
    last = started[-1]
    facts = {name: words.clean(value, 80) for name, value in last.fingerprint.items() if value is not None}
    engine = f"engine {facts['engine_version']}" if "engine_version" in facts else None
    driver = f"driver {facts['driver']}" if "driver" in facts else None
    box = ", ".join(part for part in (engine, facts.get("gpus"), driver) if part is not None)
    yield f"Measured on {words.clean(last.box)}{f' ({box})' if box else ''} with seed {last.seed}."


def _setup(series: Series, started: Sequence[CampaignStarted], boots: Sequence[BootView]) -> Table:
    rows = [
        ("experiment", series.experiment),
        ("box", series.box or words.ABSENT),
        ("production's setting", series.production or "not known"),
        ("tolerance (sd of logs between boots)", words.percent(series.tolerance, 1)),
        ("boots planned per variant", str(series.boots_planned) if series.boots_planned is not None else words.ABSENT),
        ("concurrency", ", ".join(str(level) for level in series.concurrency) or words.ABSENT),
    ]
    if started:
        first = started[0]
        rows.append(("seed", str(first.seed)))
        rows.extend((f"version of {name}", version) for name, version in sorted(first.versions.items()))
        rows.extend((f"load: {name}", _compact(value)) for name, value in first.load.items())
        rows.append(("headroom step", "on" if first.headroom else "off: no boot was tried with a full prefill batch"))
        rows.extend(_way(boots))
        if first.production is not None:
            state = first.production
            active = "active" if state.active else "not active"
            command = f": {commands.shown(state.command)}" if state.command else ""
            rows.append(("production before the campaign", f"{state.unit}, {active}{command}"))
    told = tuple((name, words.clean(value, 2000)) for name, value in rows)
    return Table("Experiment", ("what", "value"), told, folded=True)


def _way(boots: Sequence[BootView]) -> Iterator[tuple[str, str]]:
    """What the way to the box added to a request, as each session measured it at its first boot."""
    told = [step.facts["forward_ms"] for boot in boots for step in boot.steps if "forward_ms" in step.facts]
    if told:
        yield "the way to the box adds to a request", ", ".join(f"{float(one):.2f} ms" for one in told)


def _fingerprints(started: Sequence[CampaignStarted]) -> list[Table]:
    if not any(campaign.fingerprint for campaign in started):
        return []
    names = dict.fromkeys(name for campaign in started for name in campaign.fingerprint)
    rows, unknown = [], []
    for name in names:
        values = dict.fromkeys(campaign.fingerprint.get(name) for campaign in started)
        text = " → ".join(value if value is not None else words.ABSENT for value in values)
        if set(values) == {None}:
            unknown.append(words.clean(name))
        else:
            rows.append((words.clean(name), words.clean(text, 500)))
    if unknown:
        rows.append(("not there or not known", ", ".join(unknown)))
    return [Table("Fingerprint of the box", ("fact", "value"), tuple(rows), code=frozenset({1}), folded=True)]


def _plan(path: Path | None) -> list[Table]:
    if path is None or not path.is_file():
        return []
    try:
        plan = json.loads(path.read_text("utf-8"))
    except ValueError:
        return []
    if not isinstance(plan, dict):
        return []
    rows = [(key, _compact(plan[key])) for key in _PLAN_KEYS if key in plan]
    order = plan.get("boots_planned")
    if isinstance(order, list):
        names = [str(one.get("boot")) for one in order if isinstance(one, Mapping)]
        rows.append(("order of boots", ", ".join(names)))
    return [
        Table("Plan", ("what", "value"), tuple((key, words.clean(value, 4000)) for key, value in rows), folded=True)
    ]


def _compact(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_compact(one) for one in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _sessions(started: Sequence[CampaignStarted], ended: Sequence[CampaignEnded]) -> list[Table]:
    events = [(one.at, "went on" if one.resumed else "started", "") for one in started]
    events += [
        (
            one.at,
            f"ended: {one.outcome}",
            f"production {'restored' if one.restored else 'NOT restored'}{f'; {one.why}' if one.why else ''}",
        )
        for one in ended
    ]
    rows = tuple((at, words.clean(what), words.clean(note, 500)) for at, what, note in sorted(events))
    return [Table("Sessions", ("at (UTC)", "what", "note"), rows, folded=True)] if rows else []


def _environments(boots: Sequence[BootView]) -> list[Table]:
    found: dict[str, tuple[str, ...]] = {}
    for boot in boots:
        if boot.started is not None and boot.started.env:
            found.setdefault(boot.variant, commands.environment(boot.started.env))
    rows = tuple((words.clean(name), line) for name, lines in found.items() for line in lines)
    if not rows:
        return []
    title = "Environment that was set, from each variant's first boot"
    return [Table(title, ("variant", "set"), rows, code=frozenset({1}), folded=True)]
