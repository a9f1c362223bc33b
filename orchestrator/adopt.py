"""`invoke adopt VARIANT`: the drop-in that makes a measured variant production. Writes nothing.

What was measured stands in the ledger, secrets hidden, with the campaign's own address and (on a rehearsal) another
program. Production keeps its own host and port; its flags are taken from what was measured, in production's order, so
that the difference is what the variant changed and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.box import unitfile
from orchestrator.box.engines import ENGINES, Flag, is_place, parse_flags, split_program
from orchestrator.errors import LedgerError, UsageError
from orchestrator.matrix import parse_matrix
from orchestrator.records import AnyRecord, BootStarted, CampaignStarted, Verdicts
from orchestrator.redact import HIDDEN, redact_env

DROP_IN = "50-coldboot-adopt.conf"
# What every boot of ours has, and production need not.
_OURS = ("NO_COLOR", "PYTHONUNBUFFERED", "COLDBOOT_")


@dataclass(frozen=True, slots=True)
class Adoption:
    """A variant as production: what changes, and what to think of before it does.

    `diff` is a unified diff of the unit's present command against the new one; `text` is the drop-in, to lie at
    `path`; `warnings` are reasons to think again.
    """

    path: str
    diff: str
    text: str
    warnings: tuple[str, ...]


def unset_of(folder: Path, variant: str) -> tuple[str, ...]:
    """The variables that a variant takes away, of the experiment's kept matrix.yaml; the ledger does not hold them."""
    try:
        matrix = parse_matrix((folder / "matrix.yaml").read_text(encoding="utf-8"))
        return tuple(name for name, value in matrix.variant(variant).env.items() if value is None)
    except (OSError, UnicodeDecodeError, UsageError):
        # A variant that an older or a foreign file does not know takes nothing away that we could name.
        return ()


def adopt(
    records: Sequence[AnyRecord],
    verdicts: Verdicts,
    variant: str,
    *,
    unset_env: Sequence[str] = (),
    force: bool = False,
) -> Adoption:
    """Make the drop-in of one variant.

    Args:
        records: The ledger of the experiment.
        verdicts: What its boots say.
        variant: Which one.
        unset_env: Variables that the variant takes away from production's environment.
        force: Also of a variant that is rejected, or that no boot speaks for.

    Raises:
        UsageError: the experiment has no such variant, or speaks against it.
        LedgerError: the ledger does not hold production's command, or not the variant's.
    """
    campaign = next((record for record in reversed(records) if isinstance(record, CampaignStarted)), None)
    if campaign is None or not campaign.base_command:
        raise LedgerError("the ledger does not hold production's command", hint="a campaign writes it at its start")
    known = tuple(dict.fromkeys((*campaign.variants, *campaign.commands)))
    if variant not in known:
        raise UsageError(f"no variant {variant!r} in {verdicts.experiment}", hint=f"one of: {', '.join(known)}")
    boot = next((r for r in reversed(records) if isinstance(r, BootStarted) and r.variant == variant), None)
    measured = campaign.commands.get(variant) or (boot.command if boot is not None else ())
    if not measured:
        raise LedgerError(f"the ledger does not hold the command of {variant}")
    if not force:
        _refuse(verdicts, variant)
    argv = as_production(campaign.base_command, measured, keep_program=campaign.rehearsal)
    env = {} if boot is None else _environment(boot)
    unit = campaign.production.unit if campaign.production is not None else "UNIT.service"
    path = f"/etc/systemd/system/{unit}.d/{DROP_IN}"
    before, after = ("\n".join(command_lines(each)) + "\n" for each in (campaign.base_command, argv))
    diff = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{unit}, its command now", f"{unit}, as {variant}", n=100, lineterm=""
    )
    return Adoption(
        path=path,
        diff="\n".join(diff),
        text=_drop_in(
            argv, env, unset_env, f"{variant} of experiment {verdicts.experiment}, measured on {verdicts.box}"
        ),
        warnings=tuple(_warnings(verdicts, variant, unit, (*argv, *env.values()), same=argv == campaign.base_command)),
    )


def as_production(base: Sequence[str], measured: Sequence[str], *, keep_program: bool) -> tuple[str, ...]:
    """The measured command with production's own address, in production's order of flags.

    `keep_program`: also production's own program and model, as on a rehearsal, where another one served.
    """
    runs, told = split_program(base)
    positional, production = parse_flags(told)
    measured_runs, measured_told = split_program(measured)
    measured_positional, flags = parse_flags(measured_told)
    if keep_program and positional and not measured_positional:
        # `vllm serve MODEL` is `--model MODEL` to the program that stood in for it.
        flags = tuple(flag for flag in flags if flag.words != ("--model", positional[0]))
    if not keep_program:
        runs, positional = measured_runs, measured_positional
    new: dict[str, list[Flag]] = {}
    for flag in flags:
        if not is_place(flag.name):
            new.setdefault(flag.name, []).append(flag)
    out: list[Flag] = []
    for flag in production:
        out += [flag] if is_place(flag.name) else new.pop(flag.name, [])
    out += [flag for rest in new.values() for flag in rest]
    return (*runs, *positional, *(word for flag in out for word in flag.words))


def command_lines(argv: Sequence[str]) -> list[str]:
    """`ExecStart=` over several lines as systemd joins them again: the program, then a flag a line.

    Raises:
        UsageError: a command that systemd would not take.
    """
    runs, told = split_program(argv)
    positional, flags = parse_flags(told)
    program = runs[:1]
    head = unitfile.quote_exec((*runs, *positional))
    bare = unitfile.quote_exec(program) + " "
    groups = [unitfile.quote_exec((*program, *flag.words)).removeprefix(bare) for flag in flags]
    lines = [f"ExecStart={head}", *(f"  {group}" for group in groups)]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _drop_in(argv: Sequence[str], env: Mapping[str, str], unset_env: Sequence[str], what: str) -> str:
    lines = [
        f"# {what}",
        "[Service]",
        "ExecStart=",
        *command_lines(argv),
        *(f"Environment={unitfile.quote_env(name, value)}" for name, value in env.items()),
        *(f"UnsetEnvironment={name}" for name in unset_env),
    ]
    return "\n".join(lines) + "\n"


def _environment(boot: BootStarted) -> dict[str, str]:
    """What a boot of the variant had beyond production's environment: not its cold caches, and not what is ours."""
    caches = ENGINES["vllm"].cold_env("/")
    kept = {name: value for name, value in boot.env.items() if name not in caches and not name.startswith(_OURS)}
    return redact_env(kept)


def _refuse(verdicts: Verdicts, variant: str) -> None:
    """No drop-in of what must not run in production, or of what nobody has measured."""
    own = next((one for one in verdicts.variants if one.name == variant), None)
    hint = "--force prints the drop-in all the same"
    if own is None or own.boots == 0:
        what = f"{variant} has no boot that counts in {verdicts.experiment}: there is nothing to go by"
        raise UsageError(what, hint=f"boot it first; {hint}")
    if own.verdict == "REJECTED":
        raise UsageError(f"{variant} is REJECTED in {verdicts.experiment}: {own.why}", hint=hint)


def _warnings(verdicts: Verdicts, variant: str, unit: str, words: Sequence[str], *, same: bool) -> list[str]:
    """Why one would not do it, or not yet."""
    found = []
    if verdicts.rehearsal:
        found.append("REHEARSAL: nothing measured there says anything about a real engine")
    own = next((one for one in verdicts.variants if one.name == variant), None)
    if own is None or own.boots == 0:
        found.append(f"{variant} has no boot that counts: there is nothing to go by")
    elif own.verdict != "WINNER":
        winner = f"; the winner is {verdicts.winner}" if verdicts.winner else ""
        found.append(f"{variant} is {own.verdict}, not WINNER{winner}: {own.why}")
    elif verdicts.provisional:
        more = max((cell.more_boots for cell in own.cells if cell.more_boots), default=None)
        advice = "" if more is None else f"; {more} more boots would settle it if the spread stays"
        boots = "one boot does" if own.boots == 1 else f"{own.boots} boots do"
        found.append(f"{variant} wins provisionally: {boots} not vouch for it yet{advice}")
    if verdicts.confounded:
        found.append(f"the comparison is confounded: {verdicts.confounded}")
    if any(HIDDEN in word for word in words):
        found.append(f"put the secret of {unit} in the place of {HIDDEN}: the ledger does not hold it")
    if same:
        found.append(f"{unit} runs this command already, as far as the experiment knows")
    return found
