"""Claims and baselines: sets of boots against sets of boots, with three answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator.errors import UsageError
from orchestrator.records import BootResult, LevelResult, Series
from orchestrator.verdict import check_claim, compare_baseline


def series(tables, **kwargs):
    """A series of {variant: {level: [value of each boot; None: failed]}}."""
    boots = []
    for name, table in tables.items():
        for i in range(max(len(values) for values in table.values())):
            levels = tuple(
                LevelResult(concurrency=level, value=values[i], failed=values[i] is None)
                for level, values in table.items()
                if i < len(values)
            )
            boots.append(
                BootResult(
                    boot=f"b{i + 1:02d}-{name}", variant=name, cache="cold", block=i + 1, position=i + 1,
                    outcome="completed", levels=levels,
                )
            )  # fmt: skip
    return Series(**({"experiment": "x", "variants": tuple(tables), "boots": tuple(boots)} | kwargs))


def around(middle, spread=0.01, n=4):
    """n values whose logs have exactly this sd around this middle."""
    z = np.linspace(-1, 1, n)
    return (middle * np.exp(spread * z / z.std(ddof=1))).tolist()


TWO = {"spec-1": {1: around(66.9), 8: around(339.9)}, "no-spec": {1: around(33.0), 8: around(340.0)}}


@pytest.mark.parametrize(
    ("claim", "answer"),
    [
        ("spec-1 >= 1.5x no-spec at 1", "PASS"),  # 2.03 times
        ("spec-1 >= 1.5 × no-spec at 1", "PASS"),
        ("spec-1>=1.5x no-spec at 1", "PASS"),
        ("spec-1 > no-spec at 1", "PASS"),
        ("spec-1 >= 2.5x no-spec at 1", "FAIL"),
        ("spec-1 >= 2.02x no-spec at 1", "UNDECIDED"),
        ("spec-1 >= no-spec at 8", "UNDECIDED"),
        ("spec-1 >= 0.95x no-spec at 8", "PASS"),
        ("spec-1 >= 1.4x no-spec at 1,8", "PASS"),  # √2.027 = 1.42
        ("spec-1 >= 1.4x no-spec", "PASS"),
        ("no-spec <= 0.6x spec-1 at 1", "PASS"),
        ("no-spec <= 0.4x spec-1 at 1", "FAIL"),
        ("spec-1 >= 60 tok/s at 1", "PASS"),
        ("spec-1 >= 60 at 1", "PASS"),
        ("spec-1 >= 70 tok/s at 1", "FAIL"),
        ("spec-1 <= 66.9 tok/s at 1", "UNDECIDED"),
        ("spec-1 >= 1x no-spec at 2", "UNDECIDED"),
    ],
)
def test_a_claim_holds_does_not_hold_or_is_undecided(claim, answer):
    finding = check_claim(series(TWO), claim)
    assert finding.answer == answer
    assert " ".join(claim.split()) in finding.sentence


def test_a_claim_is_told_with_its_bounds_and_what_would_decide():
    finding = check_claim(series(TWO), "spec-1 >= 2.02x no-spec at 1")
    half = 1.943 * 0.01 * math.sqrt(2 / 4)  # t(0.95, 6)
    low, high = 66.9 / 33 * math.exp(-half), 66.9 / 33 * math.exp(half)
    assert f"2.03× (90 % {low:#.3g}× to {high:#.3g}×, 4 boots against 4 boots)" in finding.sentence
    assert "boots each would decide" in finding.sentence


def test_one_boot_a_side_decides_no_claim():
    finding = check_claim(series({"a": {1: [100.0]}, "b": {1: [1.0]}}), "a >= 2x b at 1")
    assert finding.answer == "UNDECIDED"
    assert "needs two boots a side" in finding.sentence


def test_what_does_not_reproduce_supports_no_claim():
    tables = series({"lucky": {1: [124.8, 46.8]}, "steady": {1: around(30.0)}})
    assert check_claim(tables, "lucky >= 1.2x steady at 1").answer == "FAIL"
    assert check_claim(tables, "steady >= 0.1x lucky at 1").answer == "UNDECIDED"
    assert "lucky does not reproduce at 1 stream" in check_claim(tables, "lucky >= 10 tok/s at 1").sentence


@pytest.mark.parametrize(
    "claim", ["", "spec-1", "spec-1 >= ", "spec-1 = no-spec", "spec-1 >= 0x no-spec", "spec-1 >= 0"]
)
def test_no_claim_at_all(claim):
    with pytest.raises(UsageError, match=r"such as 'spec-1 >= 1\.5x spec-3 at 1'"):
        check_claim(series(TWO), claim)


def test_a_claim_about_nobody_names_those_that_are_there():
    with pytest.raises(UsageError, match=r"no variant 'spec-2'[\s\S]*one of: spec-1, no-spec"):
        check_claim(series(TWO), "spec-2 >= no-spec")


def test_a_true_claim_at_its_border_passes_5_percent_of_the_time():
    rng = np.random.default_rng(1)
    passed = 0
    for _ in range(2000):
        a, b = (100 * np.exp(rng.normal(0, 0.02, 4))).tolist(), (100 * np.exp(rng.normal(0, 0.02, 4))).tolist()
        passed += check_claim(series({"a": {1: a}, "b": {1: b}}), "a >= b at 1").answer == "PASS"
    assert passed / 2000 == pytest.approx(0.05, abs=0.025)


# --- baseline ------------------------------------------------------------------------------------------------------


def against(now, base, **kwargs):
    return compare_baseline(series({"a": now}), series({"a": base}), **kwargs)


@pytest.mark.parametrize(
    ("factor", "answer"), [(1.0, "PASS"), (1.3, "PASS"), (0.98, "PASS"), (0.95, "UNDECIDED"), (0.90, "FAIL")]
)
def test_three_answers_on_a_regression(factor, answer):
    assert against({1: around(100 * factor)}, {1: around(100)}).answer == answer


def test_every_cell_must_pass_and_one_is_enough_to_fail():
    base = {1: around(100), 8: around(300)}
    assert against({1: around(100), 8: around(300)}, base).answer == "PASS"
    assert against({1: around(100), 8: around(285)}, base).answer == "UNDECIDED"
    finding = against({1: around(100), 8: around(260)}, base)
    assert finding.answer == "FAIL"
    assert "8 streams 0.867×" in finding.sentence
    assert "1 stream " not in finding.sentence


def test_alpha_is_split_over_the_cells_that_could_fail():
    assert against({1: around(93.5)}, {1: around(100)}).answer == "FAIL"
    with_another = against({1: around(93.5), 8: around(300)}, {1: around(100), 8: around(300)})
    assert with_another.answer == "UNDECIDED"


def test_a_level_that_was_not_measured_again_is_undecided():
    finding = against({1: around(100)}, {1: around(100), 8: around(300)})
    assert (finding.answer, "8 streams was not measured again" in finding.sentence) == ("UNDECIDED", True)


def test_single_boots_are_never_compared():
    assert against({1: [50.0]}, {1: around(100)}).answer == "UNDECIDED"


def test_a_new_reason_to_reject_is_a_regression():
    finding = against({1: [*around(100), None]}, {1: around(100)})
    assert (finding.answer, "errors_under_load" in finding.sentence) == ("FAIL", True)


def test_what_did_not_reproduce_before_is_no_baseline():
    wild = {1: [100.0, 30.0]}
    assert against(wild, wild).answer == "UNDECIDED"
    assert "no value that reproduces" in against(wild, wild).sentence


def test_production_alone_is_compared_where_both_have_it():
    now = series({"a": {1: around(100)}, "b": {1: around(10)}}, production="a")
    base = series({"a": {1: around(100)}, "b": {1: around(100)}})
    assert compare_baseline(now, base).answer == "PASS"
    assert compare_baseline(now, base, variants=("a", "b")).answer == "FAIL"
    assert len(compare_baseline(now, base, variants=("a", "b")).parts) == 2


def test_the_margin_is_the_callers():
    assert against({1: around(90)}, {1: around(100)}, margin=0.2).answer == "PASS"
    with pytest.raises(UsageError, match="above 0"):
        against({1: around(90)}, {1: around(100)}, margin=0.0)


@pytest.mark.parametrize("difference", [{"box": "other"}, {"rehearsal": True}])
def test_boots_of_different_boxes_are_not_compared(difference):
    table = {"a": {1: around(100)}}
    with pytest.raises(UsageError, match="cannot be compared"):
        compare_baseline(
            series(table, box="gwen") if "box" in difference else series(table), series(table, **difference)
        )


def test_nothing_in_common():
    with pytest.raises(UsageError, match="none of these variants"):
        compare_baseline(series({"a": {1: [1.0]}}), series({"b": {1: [1.0]}}))
