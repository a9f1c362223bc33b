"""What to do next: a few steps, each with its reason and, where there is one, the command. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from orchestrator.progress import hours
from orchestrator.records import AnyRecord, BootEnded, VariantVerdict, Verdicts
from orchestrator.report import words
from orchestrator.report.model import NextStep

ENOUGH_TO_VOUCH = 6
# A boot takes minutes of production's time: beyond this many a variant, counting is no answer any more.
MOST_BOOTS = 20
_COUNTED = ("completed", "crashed", "not_ready")


@dataclass(frozen=True, slots=True)
class Again:
    """How this program was called, and what the same command needs again.

    Attributes:
        tool: `invoke` or `coldboot`.
        options: For every command, such as ` --out DIR`, with its leading blank.
        campaign: For `matrix` besides, such as ` --matrix FILE`, with its leading blank.
        same: For `matrix` to go on with the boots that are left, such as ` --boots 3 --budget 3h`.
    """

    tool: str = "invoke"
    options: str = ""
    campaign: str = ""
    same: str = ""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One variant in question: the boots it has in each cache state, and how many it should have (None: too many)."""

    variant: VariantVerdict
    has: int
    wanted: int | None
    caches: int


def next_steps(
    verdicts: Verdicts,
    experiment: str,
    again: Again | None = None,
    *,
    records: Sequence[AnyRecord] = (),
    boots_left: int = 0,
) -> Iterator[NextStep]:
    """The steps, the most useful first.

    Args:
        verdicts: What the boots so far say.
        experiment: The name of the experiment's folder.
        again: How this program was called.
        records: The ledger's, for how long boots take.
        boots_left: Planned boots that are still to go.
    """
    again = again or Again()
    tool, options = again.tool, again.options
    report = f"{tool} report --experiment {experiment}{options}"
    if boots_left:
        text = f"{words.plural(boots_left, 'boot')} left; the same command goes on"
        yield NextStep(text, _matrix(verdicts, experiment, again, again.same))
    else:
        yield from _more_boots(verdicts, experiment, again, _seconds(records))
    rejected = _rejected(verdicts)
    if rejected is not None:
        text = f"why {words.clean(rejected)} is rejected, with the whole derivation"
        yield NextStep(text, f"{report} --explain {rejected}")
    winner = verdicts.winner
    if winner is not None and winner != verdicts.production:
        yield NextStep(
            f"what would make {words.clean(winner)} production; it is printed, nothing is changed",
            f"{tool} adopt {winner} --print --experiment {experiment}{options}",
        )
    if verdicts.rehearsal and again.campaign:  # a matrix of the reader's own, which `init` would not replace
        text = "this was a rehearsal; fill in the box of yours in that file, then"
        yield NextStep(text, f"{tool} doctor{again.campaign} --box NAME")
    elif verdicts.rehearsal:
        yield NextStep(
            "this was a rehearsal; for a box of yours", f"{tool} init --box-host ALIAS --unit UNIT --matrix mine.yaml"
        )


def _more_boots(verdicts: Verdicts, experiment: str, again: Again, seconds: dict[str, float]) -> Iterator[NextStep]:
    open_ = ("WINNER", "CONTENDER", "UNDECIDED")
    booted = [one for one in verdicts.variants if one.verdict in open_ and one.boots > 0]
    if not booted:
        if verdicts.winner is None and any(one.verdict == "REJECTED" for one in verdicts.variants):
            yield NextStep("nothing is left to recommend: read the evidence, and put other variants into matrix.yaml")
        return
    if verdicts.plan != "fixed":
        return
    asked = [wanted for one in booted if (wanted := _wanted(one)) is not None]
    near = [one for one in asked if one.wanted is None]
    # What is enough for one may be more than another needs; a plan has one number for all that it boots.
    boots = max((one.wanted for one in asked if one.wanted is not None), default=0)
    more = [one for one in asked if one.wanted is not None]
    if more:
        why = f"{words.clean(verdicts.winner)} is provisional" if verdicts.winner else "nothing is decided"
        missing = {one.variant.name: (boots - one.has) * one.caches for one in more}
        count = words.plural(sum(missing.values()), "more boot")
        names = ",".join(missing)
        text = f"{why}: {count} of what is still in question, {boots} of each{_time(missing, seconds)}"
        asking = f" --only {shlex.quote(names)} --boots {boots}{_caches(verdicts)}"
        yield NextStep(text, _matrix(verdicts, experiment, again, asking))
    if near:
        yield NextStep(_too_near(verdicts, near))


def _wanted(variant: VariantVerdict) -> _Wanted | None:
    """How many boots a variant should have in each cache state; None where every cell of it is settled."""
    open_cells = [cell for cell in variant.cells if cell.reproducibility == "UNDECIDED"]
    if not open_cells:
        return None
    caches = len({cell.cache for cell in variant.cells})
    has = -(-variant.boots // caches)
    more = [cell.more_boots for cell in open_cells if sum(value is not None for value in cell.by_boot) > 1]
    known = [each for each in more if each is not None]
    wanted = max(has + max(known, default=0), ENOUGH_TO_VOUCH)
    beyond = len(known) < len(more) or wanted > MOST_BOOTS
    if beyond:
        return _Wanted(variant, has, None, caches)
    return _Wanted(variant, has, wanted, caches) if wanted > has else None


def _too_near(verdicts: Verdicts, near: Sequence[_Wanted]) -> str:
    names = words.listing(words.clean(one.variant.name) for one in near)
    spreads = [
        cell.spread
        for one in near
        for cell in one.variant.cells
        if cell.reproducibility == "UNDECIDED" and cell.spread is not None
    ]
    closest = min(spreads, key=lambda spread: abs(spread - verdicts.tolerance), default=None)
    told = "" if closest is None else f" ({words.percent(closest, 1)} at one level)"
    return (
        f"{names}: the boots' spread{told} is too near the tolerance of {words.percent(verdicts.tolerance, 1)} for "
        f"counting to help: it would take more than {MOST_BOOTS} boots a variant. Lengthen the window (load.window_s), "
        "see with `invoke aa` how much of it is the rig's own noise, raise the tolerance, or let `--new --boots auto "
        "--budget 3h` spend what there is"
    )


def _matrix(verdicts: Verdicts, experiment: str, again: Again, wanted: str) -> str:
    box = "" if verdicts.box is None else f" --box {shlex.quote(verdicts.box)}"
    return f"{again.tool} matrix{again.campaign}{box} --experiment {experiment}{wanted}{again.options}"


def _caches(verdicts: Verdicts) -> str:
    """Those that were booted, where they are not the default: without them cold boots would be added."""
    found = dict.fromkeys(cell.cache for variant in verdicts.variants for cell in variant.cells)
    return "" if set(found) <= {"cold"} else f" --cache {','.join(found)}"


def _seconds(records: Sequence[AnyRecord]) -> dict[str, float]:
    """How long a boot of each variant takes, mean over those that ended by themselves."""
    took: dict[str, list[float]] = {}
    for record in records:
        if isinstance(record, BootEnded) and record.boot_outcome in _COUNTED and record.seconds is not None:
            took.setdefault(record.variant, []).append(record.seconds)
    return {variant: fmean(many) for variant, many in took.items()}


def _time(missing: dict[str, int], seconds: dict[str, float]) -> str:
    if not all(name in seconds for name in missing):
        return ""
    return f", about {hours(sum(count * seconds[name] for name, count in missing.items()))}"


def _rejected(verdicts: Verdicts) -> str | None:
    """Whose rejection matters most: production's, else the first of the file."""
    names = [one.name for one in verdicts.variants if one.verdict == "REJECTED"]
    return verdicts.production if verdicts.production in names else next(iter(names), None)
