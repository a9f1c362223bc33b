"""Error rates and boots of a plan, by the real planner and the real verdict code on boots whose truth is known. Pure.

A campaign is played as `campaign` plays it: `make_plan`, `remaining`, `next_boots`, `add_block`, and `judge` at its
end. Only the box is missing: a truth draws what each boot would give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from orchestrator import verdict
from orchestrator.errors import UsageError
from orchestrator.matrix import Matrix, parse_matrix
from orchestrator.plan import LOOKS, Plan, PlanName, PlannedBoot, add_block, make_plan, remaining
from orchestrator.records import AnyRecord, BootEnded, CampaignStarted, TrialEnded, Verdicts

MOST = 10  # boots of a variant that any of these plans makes
DEATH = -1.0  # in place of a throughput
MIDDLE = 100.0
SLOW_MODE = 0.78
FIXED = (3, 5, 6, 10)
BUDGET = 6  # boots a variant, of the column with a budget: 60 % of the largest fixed plan
TRIALS = 1000
MOST_CELLS = 64
SEED = 1
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"  # in docs/error-rates.md

Draw: TypeAlias = Callable[[np.random.Generator, int], np.ndarray]
Right: TypeAlias = Literal["accept", "reject", "neither"]


@dataclass(frozen=True)
class Truth:
    """How the boots of one or several variants really behave.

    `draws` gives for each variant tok/s, or `DEATH` at the first request. `right` is what a perfect judge would say of
    the first variant: accept (it reproduces, and is the winner), reject, or neither (it is as good as another).
    """

    name: str
    right: Right
    draws: tuple[Draw, ...]


def normal(sigma: float, middle: float = MIDDLE) -> Draw:
    """Boots with this sd of logs around `middle` tok/s."""
    return lambda rng, n: middle * np.exp(rng.normal(0, sigma, n))


def modes(share: float, ratio: float = SLOW_MODE) -> Draw:
    """A share of the boots in a slow mode; 0.3 % within a mode."""
    return lambda rng, n: MIDDLE * np.exp(rng.normal(0, 0.003, n) + math.log(ratio) * (rng.random(n) < share))


def fatal(share: float) -> Draw:
    """A share of the boots die at the first request; the others are steady."""
    return lambda rng, n: np.where(rng.random(n) < share, DEATH, normal(0.01)(rng, n))


def drift(per_boot: float) -> Draw:
    """Each boot is slower than the last by this share."""
    return lambda rng, n: normal(0.01)(rng, n) * (1 - per_boot) ** np.arange(n)


TRUTHS = (
    Truth("sd 0.5 %", "accept", (normal(0.005),)),
    Truth("sd 1 %", "accept", (normal(0.01),)),
    Truth("sd 2 %", "accept", (normal(0.02),)),
    Truth("sd 5 % (the tolerance itself)", "neither", (normal(0.05),)),
    Truth("sd 10 %", "reject", (normal(0.10),)),
    Truth("sd 20 %", "reject", (normal(0.20),)),
    Truth("10 % of boots at 0.78×", "reject", (modes(0.10),)),
    Truth("30 % of boots at 0.78×", "reject", (modes(0.30),)),
    Truth("10 % of cold boots die", "reject", (fatal(0.10),)),
    Truth("50 % of cold boots die", "reject", (fatal(0.50),)),
    Truth("drift −1 % a boot", "reject", (drift(0.01),)),
    Truth("5 % faster than another", "accept", (normal(0.01), normal(0.01, MIDDLE / 1.05))),
    Truth("tie of two", "neither", (normal(0.01), normal(0.01))),
    Truth("as fast as one with 30 % lucky boots", "accept", (normal(0.01), modes(0.30, 1 / SLOW_MODE))),
    Truth("steady beside four at sd 4 %", "accept", (normal(0.005, 1.3 * MIDDLE), *(normal(0.04),) * 4)),
    Truth(
        "five as in the seed",
        "accept",
        (normal(0.01), normal(0.01, MIDDLE / 2), fatal(1.0), modes(0.5, 46.8 / 124.8), normal(0.01, MIDDLE / 1.5)),
    ),
)


# --- one campaign --------------------------------------------------------------------------------------------------


def names_of(truth: Truth) -> tuple[str, ...]:
    """One letter for each variant."""
    return tuple("abcdefgh"[: len(truth.draws)])


def matrix_of(variants: Sequence[str], tolerance: float, cells: int = 1) -> Matrix:
    """A matrix with nothing but names: the planner reads no flag. Its cells are prompt lengths of 1, 2 … tokens."""
    return parse_matrix(
        "experiment: simulated\nboxes: {none: {unit: none.service}}\nconcurrency: [1]\n"
        f"load: {{input_tokens: {list(range(1, cells + 1))}}}\n"
        f"tolerance: {tolerance:g}\nvariants: {{{', '.join(f'{name}: {{}}' for name in variants)}}}\n"
    )


@dataclass
class Ledger:
    """Records of a campaign whose boots were drawn before: the n-th boot of a variant gets its n-th, a value a cell."""

    values: Mapping[str, Sequence[Sequence[float]]]
    records: list[AnyRecord]
    made: Counter[str] = field(default_factory=Counter)

    @property
    def boots(self) -> int:
        """Boots so far, over all variants."""
        return self.made.total()

    def boot(self, planned: PlannedBoot) -> None:
        """One boot, ended."""
        where = planned.model_dump()
        values = self.values[planned.variant][self.made[planned.variant]]
        self.made[planned.variant] += 1
        if values[0] == DEATH:
            end = BootEnded(**where, boot_outcome="crashed", why="oom", died=True, step="first_request")
            self.records.append(end)
            return
        measured = {"concurrency": 1, "window_s": 1.0, "tokens": None, "valid": True}
        self.records += [
            TrialEnded(**where, **measured, input_tokens=length, tokens_per_s=value)
            for length, value in enumerate(values, start=1)
        ]
        self.records.append(BootEnded(**where, boot_outcome="completed", why=""))


def campaign(start: Plan, values: Mapping[str, Sequence[Sequence[float]]], budget: int | None) -> tuple[Verdicts, int]:
    """The verdicts of one campaign, and the boots that it took; `budget` in boots."""
    started = {"experiment": "simulated", "box": "none", "rehearsal": True, "seed": 1, "boots_planned": None}
    load = {"input_tokens": list(start.input_tokens)}
    begun = CampaignStarted(**started, variants=start.variants, concurrency=(1,), load=load)
    ledger, plan = Ledger(values, [begun]), start
    while True:
        todo = remaining(plan, ledger.records)
        left = len(todo) if budget is None else budget - ledger.boots
        for planned in todo[:left]:
            ledger.boot(planned)
        if left < len(todo):
            break
        wanted = verdict.next_boots(ledger.records, plan, None if budget is None else budget - ledger.boots)
        if not wanted:
            break
        plan = add_block(plan, wanted)
    return verdict.judge(verdict.series_from_records(ledger.records, plan=plan)), ledger.boots


# --- many ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """What came out of many campaigns against one truth, as shares of them; `boots` is their mean, a variant's.

    Accepted: the first variant wins alone, vouched for and not confounded. Rejected: it is rejected, or dominated. Each
    is false where something else is right.
    """

    false_accept: float
    false_reject: float
    undecided: float
    boots: float

    def __str__(self) -> str:
        """As in the table: shares in %, then boots."""
        shares = "/".join(f"{100 * share:.1f}" for share in (self.false_accept, self.false_reject, self.undecided))
        return f"{shares}, {self.boots:.1f}"


def _rates(said: Counter[str], right: Right, boots: float) -> Rates:
    trials = said.total()
    return Rates(
        false_accept=0.0 if right == "accept" else said["accept"] / trials,
        false_reject=0.0 if right == "reject" else said["reject"] / trials,
        undecided=said["undecided"] / trials,
        boots=boots / trials,
    )


def play(plan: Plan, truth: Truth, trials: int, seed: int, budget: int | None = None) -> Rates:
    """Campaigns of one plan against one truth."""
    rng, names, boots, said = np.random.default_rng(seed), names_of(truth), 0, Counter[str]()
    for _ in range(trials):
        values = {
            name: _drawn(draw, rng, len(plan.input_tokens)) for name, draw in zip(names, truth.draws, strict=True)
        }
        judged, took = campaign(plan, values, budget)
        said[_said(judged)] += 1
        boots += took
    return _rates(said, truth.right, boots / len(names))


def _drawn(draw: Draw, rng: np.random.Generator, cells: int) -> list[tuple[float, ...]]:
    """Boots of one variant, a value for each of its cells, drawn as if cells of one boot had nothing in common.

    That is the worst case: the more alike they are, the more they count as one cell. An engine dies in all of them.
    """
    columns = [draw(rng, MOST) for _ in range(cells)]
    columns = [columns[0], *(np.where(one == DEATH, MIDDLE, one) for one in columns[1:])]
    return list(zip(*(one.tolist() for one in columns), strict=True))


def _said(judged: Verdicts) -> str:
    first = judged.variants[0]
    if first.verdict in ("REJECTED", "DOMINATED"):
        return "reject"
    alone = not any(other.verdict in ("CONTENDER", "UNDECIDED") for other in judged.variants[1:])
    sure = judged.winner == first.name and judged.provisional is False and judged.confounded is None
    return "accept" if sure and alone else "undecided"


def best_run(truth: Truth, trials: int, seed: int) -> Rates:
    """What people do without such a tool: one run of each, and the highest wins."""
    rng, said = np.random.default_rng(seed), Counter[str]()
    for _ in range(trials):
        runs = [float(draw(rng, MOST)[0]) for draw in truth.draws]
        said["accept" if runs[0] == max(runs) and runs[0] != DEATH else "reject"] += 1
    return _rates(said, truth.right, trials)


# --- the table -----------------------------------------------------------------------------------------------------


def columns(chosen: Sequence[PlanName]) -> tuple[str, ...]:
    """The table's header."""
    fixed = [f"fixed {boots}" for boots in FIXED]
    within = [f"{name}, {BUDGET} boots a variant" for name in chosen if LOOKS[name].last > BUDGET]
    return ("truth", "right", *chosen, *within, *fixed, "best single run", *(f"{name} ÷ fixed 10" for name in chosen))


def row(
    truth: Truth, chosen: Sequence[PlanName], trials: int, seed: int, tolerance: float, *, cells: int = 1
) -> tuple[str, ...]:
    """One truth against every plan; the same boots for all of them."""
    matrix = matrix_of(names_of(truth), tolerance, cells)
    budget = BUDGET * len(truth.draws)
    adaptive = {name: make_plan(matrix, plan_name=name) for name in chosen}
    free = [play(plan, truth, trials, seed) for plan in adaptive.values()]
    within = [play(plan, truth, trials, seed, budget) for plan in adaptive.values() if plan.looks.last > BUDGET]
    fixed = [play(make_plan(matrix, boots), truth, trials, seed) for boots in FIXED]
    share = (f"{100 * rates.boots / fixed[-1].boots:.0f} %" for rates in free)
    found = (*free, *within, *fixed, best_run(truth, trials, seed))
    return (truth.name, truth.right, *map(str, found), *share)


def table(
    chosen: Sequence[PlanName], trials: int = TRIALS, seed: int = SEED, tolerance: float = 0.05, *, cells: int = 1
) -> Iterator[str]:
    """The table as Markdown, line by line, each as soon as it is known.

    Args:
        chosen: The adaptive plans.
        trials: Campaigns of each truth and plan.
        seed: Of the boots.
        tolerance: Sd of logs.
        cells: Of each variant, independent of each other.

    Raises:
        UsageError: no trials, no cells.
    """
    for name, number, most in (("trials", trials, 10**9), ("cells", cells, MOST_CELLS)):
        if not 1 <= number <= most:
            many = "from 1" if name == "trials" else f"1 to {most}"
            raise UsageError(f"--{name} {number}: accepted: a whole number {many}")
    each = "" if cells == 1 else f", {cells} independent cells a variant"
    yield (
        f"{trials} campaigns a cell, seed {seed}, tolerance {100 * tolerance:g} %{each}: false accept / false reject / "
        "undecided in %, then boots a variant."
    )
    yield ""
    header = columns(chosen)
    yield f"| {' | '.join(header)} |"
    yield f"|{'--|' * len(header)}"
    for truth in TRUTHS:
        yield f"| {' | '.join(row(truth, chosen, trials, seed, tolerance, cells=cells))} |"


def rewritten(page: str, lines: Sequence[str]) -> str:
    """A page with its table made anew, between its two marks.

    Raises:
        UsageError: the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the page has no {BEGIN} and {END} to write between")
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"
