"""The simulator plays real campaigns, and the table in the docs is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator import simulate
from orchestrator.errors import UsageError
from orchestrator.plan import make_plan

PAGE = (Path(__file__).parent.parent / "docs" / "error-rates.md").read_text(encoding="utf-8")
TABLE = PAGE.partition(simulate.BEGIN)[2].partition(simulate.END)[0].strip().splitlines()
CHOSEN = ("nightly", "pull-request")
FEW = 40


def fixed(boots, names=("a",)):
    return make_plan(simulate.matrix_of(names, 0.05), boots)


def truth(name):
    return next(one for one in simulate.TRUTHS if one.name == name)


def test_the_page_has_the_header_and_the_rows_that_the_command_prints():
    header = simulate.columns(CHOSEN)
    assert TABLE[2] == f"| {' | '.join(header)} |"
    assert TABLE[3] == f"|{'--|' * len(header)}"
    assert [line.split(" | ")[0].removeprefix("| ") for line in TABLE[4:]] == [one.name for one in simulate.TRUTHS]
    trials = re.match(r"(\d+) campaigns a cell, seed 1, tolerance 5 %", TABLE[0])
    assert trials is not None
    assert int(trials[1]) >= 500


def numbers(cell):
    """A cell's three shares, and its boots: `0.2/0.0/5.4, 7.1`."""
    shares, boots = cell.split(", ")
    return [float(share) / 100 for share in shares.split("/")], float(boots)


@pytest.mark.parametrize("name", ["sd 2 %", "30 % of boots at 0.78×", "10 % of cold boots die", "five as in the seed"])
def test_the_pages_numbers_are_those_of_the_simulation(name):
    (line,) = [line for line in TABLE if line.startswith(f"| {name} |")]
    said = line.strip("| ").split(" | ")
    found = simulate.row(truth(name), CHOSEN, FEW, 7, 0.05)
    assert len(said) == len(found)
    for old, new in zip(said[2:-2], found[2:-2], strict=True):
        (before, boots), (after, now) = numbers(old), numbers(new)
        # Four standard errors of a share over 40 campaigns, and a boot in ten for the mean.
        for one, other in zip(before, after, strict=True):
            assert other == pytest.approx(one, abs=4 * (max(one * (1 - one), 0.01) / FEW) ** 0.5)
        assert now == pytest.approx(boots, abs=1.0)


def test_a_steady_variant_costs_six_boots_of_a_nightly_plan_and_ten_of_the_fixed_one():
    steady = truth("sd 0.5 %")
    nightly = simulate.play(make_plan(simulate.matrix_of(("a",), 0.05), plan_name="nightly"), steady, 10, 1)
    assert nightly == simulate.Rates(false_accept=0, false_reject=0, undecided=0, boots=6)
    assert simulate.play(fixed(10), steady, 10, 1).boots == 10
    assert simulate.play(fixed(5), steady, 10, 1).undecided == 1  # five boots never vouch


def test_more_cells_are_more_ways_to_be_refuted_and_fewer_to_be_vouched_for():
    at_tolerance = truth("sd 5 % (the tolerance itself)")
    one, eight = (
        simulate.play(make_plan(simulate.matrix_of(("a",), 0.05, cells), 6), at_tolerance, 60, 1) for cells in (1, 8)
    )
    # At the tolerance each cell is refuted in 5 % of campaigns, one of eight in 1 − 0.95⁸ = 34 %. All eight are vouched
    # for in 0.05⁸ of them: never.
    assert one.false_reject < 0.17 < eight.false_reject < 0.55
    assert eight.false_accept == 0
    steady = simulate.play(make_plan(simulate.matrix_of(("a",), 0.05, 8), plan_name="nightly"), truth("sd 0.5 %"), 5, 1)
    assert steady == simulate.Rates(false_accept=0, false_reject=0, undecided=0, boots=6)


def test_no_cells_and_no_trials_are_refused():
    for asked in ({"trials": 0}, {"cells": 0}, {"cells": 65}):
        with pytest.raises(UsageError, match="accepted: a whole number"):
            next(simulate.table(CHOSEN, **asked))


def test_a_variant_that_always_dies_gets_two_boots_of_a_nightly_plan():
    dead = simulate.Truth("dead", "reject", (simulate.fatal(1.0),))
    plan = make_plan(simulate.matrix_of(("a",), 0.05), plan_name="nightly")
    assert simulate.play(plan, dead, 5, 1) == simulate.Rates(0, 0, 0, boots=2)


def test_a_tie_is_never_decided_by_more_than_the_error_rate_and_a_single_run_always_decides_it():
    tie = truth("tie of two")
    judged = simulate.play(fixed(6, ("a", "b")), tie, 200, 1)
    assert judged.false_accept + judged.false_reject <= 0.05 + 4 * (0.05 * 0.95 / 200) ** 0.5
    single = simulate.best_run(tie, 200, 1)
    assert single.false_accept + single.false_reject == 1


def test_a_budget_is_never_exceeded():
    names = ("a", "b", "c", "d", "e")
    plan = make_plan(simulate.matrix_of(names, 0.05), plan_name="nightly")
    for boots in (3, 11, 23):
        assert simulate.play(plan, truth("five as in the seed"), 5, 1, boots).boots * 5 <= boots


def test_the_same_seed_gives_the_same_campaigns():
    once, again = (simulate.play(fixed(6), truth("sd 5 % (the tolerance itself)"), 30, 3) for _ in range(2))
    assert once == again


def test_a_page_is_written_between_its_marks_or_not_at_all():
    page = f"before\n{simulate.BEGIN}\nold\n{simulate.END}\nafter\n"
    assert simulate.rewritten(page, ["new"]) == f"before\n{simulate.BEGIN}\nnew\n{simulate.END}\nafter\n"
    with pytest.raises(UsageError, match="to write between"):
        simulate.rewritten("no marks", ["new"])


def test_no_trials_are_refused():
    with pytest.raises(UsageError, match="--trials 0"):
        next(simulate.table(CHOSEN, 0))
