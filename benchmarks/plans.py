"""Error rates and boots of each plan, by the real planner and the real verdict code: `python benchmarks/plans.py`.

A campaign of one variant is played against a truth that is known. A truth is good when its boot-to-boot sd is within
the tolerance of 5 % and no slow mode, death or drift is hidden in it. Accepted: REPRODUCES, and not confounded.
"Best of 3" is what people do without such a tool: how much the highest of three boots promises beyond the median boot.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from orchestrator import verdict
from orchestrator.plan import ALPHA, LOOKS, Looks, Plan, PlanName, add_block
from orchestrator.records import AnyRecord, BootEnded, CampaignStarted, TrialEnded

MOST = 10
DEATH = -1.0  # in place of a throughput
MIDDLE = 100.0


@dataclass(frozen=True)
class Truth:
    """How boots really behave: `draw(rng, n)` gives tok/s, or `DEATH` at the first request."""

    name: str
    good: bool
    draw: Callable[[np.random.Generator, int], np.ndarray]


def _normal(sigma: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: MIDDLE * np.exp(rng.normal(0, sigma, n))


def _modes(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: MIDDLE * np.exp(rng.normal(0, 0.003, n) + math.log(0.78) * (rng.random(n) < share))


def _fatal(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: np.where(rng.random(n) < share, DEATH, _normal(0.01)(rng, n))


def _drift(per_boot: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: _normal(0.01)(rng, n) * (1 - per_boot) ** np.arange(n)


TRUTHS = (
    Truth("sd 0.5 %", good=True, draw=_normal(0.005)),
    Truth("sd 1 %", good=True, draw=_normal(0.01)),
    Truth("sd 2 %", good=True, draw=_normal(0.02)),
    Truth("sd 5 % (the tolerance)", good=False, draw=_normal(0.05)),
    Truth("sd 10 %", good=False, draw=_normal(0.10)),
    Truth("sd 20 %", good=False, draw=_normal(0.20)),
    Truth("10 % of boots at 0.78×", good=False, draw=_modes(0.10)),
    Truth("30 % of boots at 0.78×", good=False, draw=_modes(0.30)),
    Truth("10 % of cold boots die", good=False, draw=_fatal(0.10)),
    Truth("50 % of cold boots die", good=False, draw=_fatal(0.50)),
    Truth("drift −1 % a boot", good=False, draw=_drift(0.01)),
)


def _plan(name: PlanName, boots: int) -> Plan:
    """The plan as it is before its first boot."""
    looks = LOOKS.get(name, Looks(refute=(boots,), refute_alpha=ALPHA, vouch=(boots,), vouch_alpha=ALPHA))
    plan = Plan(
        experiment="simulated",
        box="none",
        plan_name=name,
        seed=1,
        boots=boots if name == "fixed" else "auto",
        looks=looks,
        variants=("a",),
        cache=("cold",),
        concurrency=(1,),
        matrix_digest="",
    )
    for _ in range(looks.refute[0]):
        plan = add_block(plan)
    return plan


def _ledger(plan: Plan, values: Sequence[float]) -> list[AnyRecord]:
    started = {"experiment": "simulated", "box": "none", "rehearsal": True, "seed": 1, "boots_planned": None}
    records: list[AnyRecord] = [CampaignStarted(**started, variants=("a",), concurrency=(1,))]
    for boot in plan.boots_planned:
        where, value = boot.model_dump(), values[boot.block - 1]
        if value == DEATH:
            records.append(BootEnded(**where, boot_outcome="crashed", why="oom", died=True, step="first_request"))
            continue
        measured = {"concurrency": 1, "window_s": 1.0, "tokens": None, "tokens_per_s": value, "valid": True}
        records += [TrialEnded(**where, **measured), BootEnded(**where, boot_outcome="completed", why="")]
    return records


@dataclass
class Tally:
    """How often what came out, over the campaigns of one plan against one truth."""

    accepted: int = 0
    rejected: int = 0
    boots: int = 0


def play(start: Plan, truth: Truth, trials: int, seed: int) -> Tally:
    """Campaigns of one plan against one truth."""
    rng, tally = np.random.default_rng(seed), Tally()
    for _ in range(trials):
        values, plan = truth.draw(rng, MOST).tolist(), start
        while wanted := verdict.next_boots(records := _ledger(plan, values), plan):
            plan = add_block(plan, wanted)
        judged = verdict.judge(verdict.series_from_records(records, plan=plan))
        (a,) = judged.variants
        tally.rejected += a.verdict == "REJECTED"
        tally.accepted += judged.provisional is False and judged.confounded is None
        tally.boots += len(plan.boots_planned)
    return tally


def best_run(truth: Truth, boots: int, trials: int, seed: int) -> float:
    """How much the best of the first `boots` runs promises beyond the campaign's median boot, mean over campaigns."""
    rng, promises = np.random.default_rng(seed), []
    for _ in range(trials):
        runs = truth.draw(rng, MOST)
        alive, first = runs[runs != DEATH], runs[:boots][runs[:boots] != DEATH]
        if first.size:  # where all of them died, nobody is misled
            promises.append(float(first.max() / np.median(alive)) - 1)
    return float(np.mean(promises))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    plans = {
        "nightly": _plan("nightly", 0),
        "pull-request": _plan("pull-request", 0),
        **{f"fixed {boots}": _plan("fixed", boots) for boots in (3, 5, 10)},
    }
    print(f"{given.trials} campaigns each, seed {given.seed}; in %: accepted / undecided / rejected, and mean boots\n")
    print("| truth | good | " + " | ".join(plans) + " | best of 3 promises |")
    print("|--|--|" + "--|" * (len(plans) + 1))
    for truth in TRUTHS:
        row = []
        for plan in plans.values():
            tally = play(plan, truth, given.trials, given.seed)
            accepted, rejected = (100 * count / given.trials for count in (tally.accepted, tally.rejected))
            row.append(
                f"{accepted:.0f}/{100 - accepted - rejected:.0f}/{rejected:.0f}, {tally.boots / given.trials:.1f}"
            )
        promise = f"{100 * best_run(truth, 3, given.trials, given.seed):+.0f} %"
        print(f"| {truth.name} | {'yes' if truth.good else 'no'} | " + " | ".join(row) + f" | {promise} |", flush=True)


if __name__ == "__main__":
    main()
