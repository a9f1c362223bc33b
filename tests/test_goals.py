"""Objectives, constraints and claims of matrix.yaml: their grammar, their lines, and what the verdicts make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator import verdict
from orchestrator.errors import MatrixError
from orchestrator.gate import gate
from orchestrator.goals import GoalError, parse_claim, parse_constraint
from orchestrator.matrix import parse_matrix
from orchestrator.records import (
    BootEnded,
    BootResult,
    CampaignStarted,
    Level,
    LevelResult,
    Objective,
    Quantiles,
    Series,
    TrialEnded,
)
from orchestrator.report import build_view
from orchestrator.report.markdown import render

BASE = "boxes: {here: {unit: a.service}}\nvariants: {spec-1: {}, spec-3: {}}\nconcurrency: [1, 8]\n"


@pytest.mark.parametrize(
    ("text", "metric", "at_most", "value", "levels"),
    [
        ("ttft_p99_ms <= 800 at 8", "ttft_p99_ms", True, 800, (Level(8),)),
        ("ttft_p99_ms ≤ 800 ms at 8", "ttft_p99_ms", True, 800, (Level(8),)),
        ("ttft_p99_ms<=0.8s at 8, 1", "ttft_p99_ms", True, 800, (Level(1), Level(8))),
        ("ttft_p99_ms <= 800 at 8@8000, 8@512", "ttft_p99_ms", True, 800, (Level(8, 512), Level(8, 8000))),
        ("itl_p50_ms < 20", "itl_p50_ms", True, 20, ()),
        ("tokens_per_s >= 60 tok/s at 1", "tokens_per_s", False, 60, (Level(1),)),
    ],
)
def test_a_constraint_is_a_metric_a_limit_and_levels(text, metric, at_most, value, levels):
    found = parse_constraint(text)
    assert (found.metric, found.at_most, found.value, found.levels) == (metric, at_most, value, levels)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "no constraint"),
        ("ttft_p99_ms <= 0 at 8", "above 0"),
        ("ttft_p98_ms <= 8 at 8", "no metric"),
        ("ttft_p99_ms <= 8 tok/s at 8", "is in ms, not in tok/s"),
        ("ttft_p99_ms <= nan at 8", "no constraint"),
        ("ttft_p99_ms == 8 at 8", "no constraint"),
        ("ttft_p99_ms <= -8 at 8", "no constraint"),
    ],
)
def test_what_is_no_constraint_says_why(text, said):
    with pytest.raises(GoalError, match=said):
        parse_constraint(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no sign where one of >= and <= has to stand"),
        ("spec-1 = spec-3", "`=` where one of >= and <="),
        ("spec-1 => spec-3", "`=>` where one of >= and <="),
        ("spec-1 >= spec-3 >= 60", "`>=` and `>=` where one of"),
        ("spec-1 >= ", "nothing stands behind `>=`"),
        (">= spec-1", "nothing stands before `>=`"),
        ("spec-1 >= 1e308x spec-3", "`1e308` is no factor, write a number such as 2 or 1.5"),
        ("spec-1 >= 1,5x spec-3", "`1,5` is no factor"),
        ("spec-1 >= -1x spec-3", "`-1` is no factor"),
        ("spec-1 >= 0x spec-3", "factor 0, where a finite number above 0"),
        ("spec-1 >= 1.5x", "no variant stands behind the factor `1.5x`"),
        ("spec-1 >= 1.5xspec-3", "a space stands between a factor, here `1.5x`, and its variant"),
        ("spec-1 >= 60 ms", "`60 ms` is no value, write a number of tok/s"),
        ("spec-1 >= 1e3", "`1e3` is no value"),
        ("spec-1 >= -5", "`-5` is no value"),
        ("spec-1 >= 0", "value 0, where a finite number above 0"),
        ("spec-1 >= " + "9" * 400, "…, where a finite number above 0"),
        ("spec-1 >= spec-3 at", "`at ` names no levels, write 8, or 1, 8, or 8@8000"),
        ("spec-1 >= spec-3 at one", "`at one` names no levels"),
        ("spec-1 >= spec-3 at 1 and 8", "`at 1 and 8` names no levels"),
        ("spec-1 >= 60 tok/s at 8@", "`at 8@` names no levels"),
        ("spec-1 >= spec-3 at " + "9" * 5000, "names no levels"),
        ("spec-1 >= 1x spec-1 at 1", "compares a variant with itself"),
    ],
)
def test_what_is_no_claim_says_which_part_was_not_understood(text, said):
    with pytest.raises(GoalError) as caught:
        parse_claim(text, frozenset({"spec-1", "spec-3"}))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", ["60", "1.5x", "b at one", "a=b", "1e3", "60 ms"])
def test_a_variant_may_have_a_name_that_looks_like_another_part_of_a_claim(name):
    assert parse_claim(f"spec-1 >= {name}", frozenset({"spec-1", name})).other == name


def test_a_claim_may_be_written_with_the_signs_of_print():
    assert parse_claim("spec-1 ≥ 1.5× spec-3 at 1".replace("×", "x"), frozenset()).at_least
    assert not parse_claim("spec-1 ≤ spec-3", frozenset()).at_least


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("objective: {metric: speed}", "matrix.yaml:4: objective.metric: `speed` is not accepted"),
        ("objective: {levels: [4]}", "matrix.yaml:4: objective.levels[0]: `4` is no level of `concurrency:`"),
        ("objective: {levels: [8, 8]}", "matrix.yaml:4: objective.levels[1]: `8` is given twice"),
        ("objective: {weights: {4: 1}}", "`4` is no level of `concurrency:`"),
        ("objective: {weights: {8: 0}}", "matrix.yaml:4: objective.weights.8: "),
        ("objective: {speed: 1}", "matrix.yaml:4: objective.speed: unknown key"),
        ("constraints: [ttft_p99_ms <= fast at 8]", "matrix.yaml:4: constraints[0]: `ttft_p99_ms <= fast at 8` is no"),
        ("constraints:\n- ttft_p99_ms <= 800 at 4", "matrix.yaml:5: constraints[0]: 4 is no level of `concurrency:`"),
        ("constraints: ttft_p99_ms <= 800", "matrix.yaml:4: constraints"),
        ("claims:\n- spec-1 >= spec-2", "matrix.yaml:5: claims[0]: there is no variant `spec-2`, did you mean `spec-"),
        ("claims:\n- spec-1 >= 0x spec-3", "matrix.yaml:5: claims[0]: "),
        ("claims:\n- spec-1 >= spec-3 at 2", "matrix.yaml:5: claims[0]: 2 is no level of `concurrency:`"),
    ],
)
def test_goals_that_cannot_be_are_named_with_their_line(text, problem):
    with pytest.raises(MatrixError) as caught:
        parse_matrix(BASE + text)
    assert any(problem in said for said in caught.value.problems), caught.value.problems


def test_goals_of_a_file_are_what_is_read_and_belong_to_the_experiment():
    text = (
        "objective: {metric: ttft_p99_ms, levels: [8], weights: {8: 2}}\nconstraints: [ttft_p99_ms ≤ 800 at 8]\n"
        'claims: ["spec-1 >= 1.5x spec-3 at 1"]\n'
    )
    found = parse_matrix(BASE + text)
    assert found.objective == Objective(metric="ttft_p99_ms", levels=(8,), weights={8: 2.0})
    assert (found.constraints, found.claims) == (("ttft_p99_ms ≤ 800 at 8",), ("spec-1 >= 1.5x spec-3 at 1",))
    assert found.digest() != parse_matrix(BASE).digest()


def boots(name: str, rates: list[float], ttft: list[float]) -> list[BootResult]:
    """Boots with tok/s at 1 and, ten times as many, at 8; the p99 of TTFT is the same at both."""
    return [
        BootResult(
            boot=f"b{i:02d}-{name}", variant=name, cache="cold", block=i, position=i, outcome="completed",
            levels=tuple(
                LevelResult(concurrency=level, value=rate * factor, metrics={"ttft_p99_ms": late})
                for level, factor in ((1, 1.0), (8, 10.0))
            ),
        )
        for i, (rate, late) in enumerate(zip(rates, ttft, strict=True), start=1)
    ]  # fmt: skip


FAST = ([100.0, 101.0, 99.0, 100.0, 100.5, 99.5], [900.0, 905.0, 895.0, 900.0, 903.0, 897.0])
PROMPT = ([90.0, 90.5, 89.5, 90.0, 90.2, 89.8], [500.0, 504.0, 496.0, 500.0, 502.0, 498.0])


def series(**over) -> Series:
    return Series(
        **{
            "experiment": "x",
            "variants": ("fast", "prompt"),
            "boots": (*boots("fast", *FAST), *boots("prompt", *PROMPT)),
            **over,
        }
    )


def judged(**over) -> dict:
    return json.loads(verdict.to_json(verdict.judge(series(**over))))


def test_of_throughput_the_highest_wins_and_of_a_latency_the_lowest():
    assert judged()["winner"] == "fast"
    said = judged(objective=Objective(metric="ttft_p99_ms"))
    assert (said["winner"], said["objective_unit"]) == ("prompt", "ms")
    fast = said["variants"][0]
    assert fast["verdict"] == "DOMINATED"
    assert fast["ratio_to_winner"] == pytest.approx(1.8, rel=0.01)  # 900 ms where the winner has 500
    assert "ttft_p99_ms 900" in fast["sentence"]


def test_weights_and_levels_say_which_concurrency_counts():
    # At 1 100 tok/s, at 8 1000: weights 3 and 1 give 100^(3/4)·1000^(1/4) = 177.8.
    said = judged(objective=Objective(weights={1: 3.0}))
    assert said["variants"][0]["objective"] == pytest.approx(177.8, rel=1e-3)
    assert said["objective_weights"] == {"1": 3.0, "8": 1.0}
    only = judged(objective=Objective(levels=(8,)))
    assert only["variants"][0]["objective"] == pytest.approx(1000, rel=1e-3)
    assert only["objective_levels"] == [8]


def test_a_constraint_that_is_surely_missed_rejects():
    said = judged(constraints=("ttft_p99_ms <= 800 at 8",))
    fast, prompt = said["variants"]
    assert (fast["verdict"], fast["reasons"]) == ("REJECTED", ["misses_constraint"])
    assert fast["constraints"][0]["answer"] == "FAIL"
    assert "at 8 900.0 ms (90 % " in fast["sentence"]
    assert (prompt["verdict"], prompt["constraints"][0]["answer"]) == ("WINNER", "PASS")
    assert said["provisional"] is False


def test_a_constraint_that_may_be_missed_keeps_the_winner_provisional():
    # The p99 of TTFT is 500 ± 3 ms over six boots: a limit of 501 is neither surely held nor surely missed.
    said = judged(objective=Objective(metric="ttft_p99_ms"), constraints=("ttft_p99_ms <= 501 at 8",))
    assert said["variants"][1]["constraints"][0]["answer"] == "UNDECIDED"
    assert said["provisional"] is True
    assert "not surely held: ttft_p99_ms <= 501 at 8" in said["sentence"]


@pytest.mark.parametrize(
    ("claims", "code"),
    [(("fast >= 1.05x prompt at 1",), 0), (("fast >= 1.5x prompt at 1",), 5), (("fast >= 1.11x prompt at 1",), 2)],
)
def test_a_gate_without_arguments_checks_production_and_the_claims_of_the_matrix(claims, code):
    found, said = gate(series(production="fast", claims=claims))
    assert found == code
    assert said.splitlines()[0].startswith("PASS: production (fast) is WINNER")
    assert claims[0] in said.splitlines()[1]


def test_a_claim_about_a_variant_that_was_left_out_is_undecided():
    said = judged(claims=("fast >= other at 1",))
    assert said["claims"][0]["answer"] == "UNDECIDED"
    assert gate(series(production="fast", claims=("fast >= other at 1",)))[0] == 2


def records() -> list:
    started = CampaignStarted(
        experiment="x", box="b", rehearsal=False, seed=1, boots_planned=2, variants=("fast",), concurrency=(8,),
        objective=Objective(metric="ttft_p99_ms"), constraints=("ttft_p99_ms <= 800 at 8",),
        claims=("fast >= 60 tok/s at 8",),
    )  # fmt: skip
    found: list = [started]
    for number in (1, 2):
        where = {"boot": f"b0{number}-fast", "variant": "fast", "cache": "cold", "block": number, "position": number}
        trial = {"concurrency": 8, "window_s": 1.0, "tokens": 1.0, "tokens_per_s": 100.0 + number, "valid": True}
        found += [
            TrialEnded(**where, **trial, ttft_ms=Quantiles(n=40, p50=100.0, p90=300.0, p99=700.0 + number, max=900.0)),
            BootEnded(**where, boot_outcome="completed", why=""),
        ]
    return found


def test_goals_travel_by_the_ledger_into_verdicts_and_report():
    ledger = records()
    found = verdict.series_from_records(ledger)
    assert found.boots[0].levels[0].metrics["ttft_p99_ms"] == 701.0
    verdicts = verdict.judge(found)
    assert verdicts.objective_metric == "ttft_p99_ms"
    assert [held.answer for held in verdicts.variants[0].constraints] == ["PASS"]
    assert [claim.answer for claim in verdicts.claims] == ["PASS"]
    said = render(build_view(ledger, found, verdicts, Path("none")))
    assert "What was asked for" in said
    assert "fast &gt;= 60 tok/s at 8" in said
