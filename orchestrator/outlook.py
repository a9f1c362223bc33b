"""`invoke plan` and `invoke matrix --dry-run`: the commands of each step, the boots in order, the budget, the hours.

A look at the box that changes nothing, in words.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator import forecast, survey
from orchestrator.box import caches
from orchestrator.box.engines import Launch, differences
from orchestrator.box.services import own_caches
from orchestrator.box.transports import connect
from orchestrator.box.unit import Action
from orchestrator.forecast import Bought, Forecast
from orchestrator.progress import folded, hours, wrapped
from orchestrator.records import STEPS, Verdicts
from orchestrator.redact import redact_argv, redact_env
from orchestrator.survey import Design, Options, Site

Judge = Callable[[Path], Verdicts | None]
"""What an experiment's folder says so far; None before its first boot."""


def show(options: Options, judge: Judge, *, every: bool = True, width: int | None = None) -> str:
    """What would run, and last the hours, with what `--budget` buys of them.

    `every`: the commands of every variant, as a dry run shows them; else what each changes, and those of one boot.
    `width`: columns of the terminal; None: whole lines. Commands are never wrapped, so that they can be copied.
    """
    design = survey.prepare(options)
    transport = connect(design.box)
    try:
        site = survey.survey(design, transport)
        found = survey.expected(design)
        parts = [_commands(design, site) if every else _changes(design, site)]
        parts += [_boots(found), _steps(design, site, found, width)]
        if options.budget_s is not None:
            bought = forecast.buys(found, options.budget_s, longest_s=design.longest_s)
            parts.append(folded(_budget(design, bought, options.budget_s, judge(design.folder)), width))
        return "\n\n".join(part for part in (*parts, folded(_head(design, site, found), width)) if part)
    finally:
        transport.close()


def _head(design: Design, site: Site, found: Forecast) -> str:
    plan, left = design.plan, len(found.boots)
    lines = [
        f"experiment {design.matrix.experiment} on box {design.box.name} ({site.transport.name})"
        + (", REHEARSAL" if site.rehearsal else ""),
        (
            f"{_many(left, 'boot')} left of {len(plan.boots_planned)}, seed {plan.seed}, about {hours(found.seconds)} "
            f"({found.source})"
        ),
    ]
    lines[:0] = [f"note: {note}" for note in design.matrix.notes]
    if plan.plan_name != "fixed":
        lines.append(
            f"plan {plan.plan_name}: blocks are added while something is worth it, up to {plan.looks.last} boots "
            "of a variant"
        )
    return "\n".join(lines)


def _boots(found: Forecast) -> str:
    if not found.boots:
        return "nothing is left to boot"
    lines = ["boots, in order:"]
    block = 0
    width = max(len(each.boot.boot) for each in found.boots)
    for each in found.boots:
        if each.boot.block != block:
            block = each.boot.block
            lines.append(f"  block {block}")
        lines.append(f"    {each.boot.boot:<{width}}  {hours(each.seconds)}")
    return "\n".join(lines)


def _steps(design: Design, site: Site, found: Forecast, width: int | None) -> str:
    """Hours by step, over all boots, with what is waited for in each."""
    waits = _waits(design, site)
    lines = ["time by step, all boots:"]
    for name, seconds in found.steps.items():
        start = f"  {name.replace('_', ' '):<13}  {hours(seconds):>11}"
        wait = waits.get(name)
        lines += [start] if wait is None else wrapped(wait, width, f"{start}   ", " " * (len(start) + 3))
    return "\n".join([*lines, f"  {'in all':<13}  {hours(found.seconds):>11}"])


def _waits(design: Design, site: Site) -> dict[str, str]:
    matrix, launch = design.matrix, next(iter(site.launches.values()))
    limits, load = matrix.effective_deadlines(), matrix.effective_load()
    levels = ", ".join(map(str, matrix.levels))
    many = load.window_requests
    window = f"{load.window_s:g} s each" if many is None else f"until {many} requests have ended at each"
    lengths = ", ".join(map(str, load.lengths))
    given = f"{lengths} tokens in" if load.prompts is None else f"prompts of {load.prompts}"
    shape = f"{given}, {load.output_tokens} tokens out"
    gpus = site.fingerprint.get("gpus")
    return {
        "clean_slate": f"no process, GPU memory idle, port {launch.port} free, by {hours(limits.clean_slate_s)}",
        "ready": f"GET {site.engine.health_path} answers 200, by {hours(limits.ready_s)}",
        "first_request": f"the first token, by {hours(limits.first_request_s)}",
        "headroom": f"one prompt that fills a batch, then {max(matrix.concurrency)} at once",
        "sanity": "three greedy prompts",
        "trials": f"at {levels}: {window}, {shape}{'; its GPUs sampled twice a second' if gpus else ''}",
        "stop": f"politely when it serves, by {hours(limits.stop_s)}",
    }


def _wanted(design: Design, site: Site) -> dict[str, Launch]:
    """The variants that are still to boot."""
    wanted = {boot.variant for boot in design.todo()}
    return {name: launch for name, launch in site.launches.items() if name in wanted}


def _commands(design: Design, site: Site) -> str:
    """Each variant's command, and those of each step of its boots."""
    parts = []
    for name, launch in _wanted(design, site).items():
        lines = [f"{name}: {_difference(design, site, name)}", f"  {shlex.join(redact_argv(launch.argv))}"]
        parts.append("\n".join([*lines, *_step_lines(design, site, launch)]))
    return "\n\n".join(parts)


def _changes(design: Design, site: Site) -> str:
    """Production's command once, what each variant changes in it, and the steps of one boot."""
    wanted = _wanted(design, site)
    if not wanted:
        return ""
    width = max(map(len, wanted))
    first, launch = next(iter(wanted.items()))
    return "\n".join(
        [
            "production's command:",
            f"  {shlex.join(redact_argv(site.unit.argv))}",
            "",
            "what each variant changes in it:",
            *(f"  {name:<{width}}  {_difference(design, site, name)}" for name in wanted),
            "",
            f"the steps of a boot, here of {first} (--commands has those of every variant):",
            *_step_lines(design, site, launch),
        ]
    )


def _difference(design: Design, site: Site, name: str) -> str:
    """What a variant changes in production, as it would be typed."""
    variant, launch = design.matrix.variant(name), site.launches[name]
    own, left_out = differences(site.unit.argv, launch.argv)
    given = {key: value for key, value in variant.env.items() if value is not None}
    parts = [
        *([f"program {shlex.join(variant.program)}"] if variant.program else []),
        *(shlex.join(redact_argv(words)) for words in own),
        *(f"without --{flag}" for flag in left_out),
        *(f"{key}={shlex.quote(value)}" for key, value in redact_env(given).items()),
        *(f"without {key}" for key, value in variant.env.items() if value is None),
    ]
    return ", ".join(parts) or "production as it stands"


def _step_lines(design: Design, site: Site, launch: Launch) -> list[str]:
    lines = []
    for step, actions in _step_actions(design, site, launch):
        lines.append(f"  {step.replace('_', ' ')}:")
        lines += [f"    {line}" for action in actions for line in action.text.splitlines()]
    return lines


def _step_actions(design: Design, site: Site, launch: Launch) -> list[tuple[str, tuple[Action, ...]]]:
    """What each step does to the box, in the order of a boot."""
    found = dict(site.service.step_actions(launch))
    if site.clears and (door := own_caches(site.service)) is not None:
        paths = tuple(one.path for one in site.clears)
        why = f"the unit's own caches set aside as PATH.coldboot-aside, empty ones in their place: {' '.join(paths)}"
        empty, user = door.call(site.unit, "empty")
        guard = (replace(action, input=None) for action in door.guard_actions(paths))
        found["cold"] = (*guard, Action(why, empty, as_user=user))
        found["stop"] = (*found.get("stop", ()), replace(door.put_back_action, why="at the end: the caches back"))
    if any(state not in ("as-is", "clear") for state in design.plan.cache):
        place = caches.cache_place(site.unit, design.box.cache_root)
        make, user = caches.call(site.unit, site.transport.user, "cold")
        away, _ = caches.call(site.unit, site.transport.user, "remove")
        found["cold"] = (
            *found.get("cold", ()),
            Action(f"cache folders of the boot's own below {place}, empty", make, as_user=user),
        )
        found["stop"] = (*found.get("stop", ()), Action("its cache folders away", away, as_user=user))
    return [(step, found[step]) for step in STEPS if step in found]


def _budget(design: Design, bought: Bought, budget_s: float, verdicts: Verdicts | None) -> str:
    every = len(bought.boots) + len(bought.left)
    lines = [
        (
            f"a budget of {hours(budget_s)} buys {len(bought.boots)} of {every} boots "
            f"({_many(bought.whole_blocks, 'whole block')}), in about {hours(bought.seconds)}"
        )
    ]
    if bought.left:
        lines.append(f"  left then: {_many(len(bought.left), 'boot')}; the same command goes on")
    variants = design.only or design.plan.variants
    told = forecast.undecided(variants, bought.boots, design.records, verdicts)
    lines += [f"  still undecided then: {line}" for line in told] or ["  every variant can be decided then"]
    return "\n".join(lines)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
