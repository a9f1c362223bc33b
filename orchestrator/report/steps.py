"""What to do next: a few steps, each with its reason and, where there is one, the command. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.records import Verdicts
from orchestrator.report import words
from orchestrator.report.model import NextStep

ENOUGH_TO_VOUCH = 6


def next_steps(
    verdicts: Verdicts, experiment: str, *, tool: str = "invoke", options: str = "", boots_left: int = 0
) -> Iterator[NextStep]:
    """The steps, the most useful first.

    Args:
        verdicts: What the boots so far say.
        experiment: The name of the experiment's folder.
        tool: How this program was called, `invoke` or `coldboot`.
        options: What further commands need, such as ` --out DIR`, with its leading blank.
        boots_left: Planned boots that are still to go.
    """
    report = f"{tool} report --experiment {experiment}{options}"
    if boots_left:
        yield NextStep(f"{words.plural(boots_left, 'boot')} left: the same command goes on")
    else:
        yield from _more_boots(verdicts)
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
    if verdicts.rehearsal:
        yield NextStep(
            "this was a rehearsal; for a box of yours", f"{tool} init --box-host ALIAS --unit UNIT --matrix mine.yaml"
        )


def _more_boots(verdicts: Verdicts) -> Iterator[NextStep]:
    open_ = ("WINNER", "CONTENDER", "UNDECIDED")
    booted = [one for one in verdicts.variants if one.verdict in open_ and one.boots > 0]
    if not booted:
        if verdicts.winner is None and any(one.verdict == "REJECTED" for one in verdicts.variants):
            yield NextStep("nothing is left to recommend: read the evidence, and put other variants into matrix.yaml")
        return
    if verdicts.plan == "fixed" and min(one.boots for one in booted) < ENOUGH_TO_VOUCH:
        why = f"{words.clean(verdicts.winner)} is provisional" if verdicts.winner else "nothing is decided"
        wanted = max(one.boots + (cell.more_boots or 0) for one in booted for cell in one.cells)
        boots = max(wanted, ENOUGH_TO_VOUCH)
        yield NextStep(f"{why}: the same command with --boots {boots} adds the boots that vouching needs")


def _rejected(verdicts: Verdicts) -> str | None:
    """Whose rejection matters most: production's, else the first of the file."""
    names = [one.name for one in verdicts.variants if one.verdict == "REJECTED"]
    return verdicts.production if verdicts.production in names else next(iter(names), None)
