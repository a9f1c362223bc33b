"""What a series of boots is worth: each test is a small table and the verdict that follows from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from orchestrator import verdict
from orchestrator.errors import UsageError
from orchestrator.records import BootResult, Level, LevelResult, Series
from orchestrator.series import read_series

SEED = Path(__file__).parent.parent / "examples" / "seed-series.yaml"


def boot(variant, number, levels, *, cache="cold", fatal=None, position=None, **kwargs):
    """One boot; a level's value is a number, None (failed) or "-" (not measured)."""
    return BootResult(
        boot=f"b{number:02d}-{variant}",
        variant=variant,
        cache=cache,
        block=number,
        position=position or number,
        outcome="crashed" if fatal else "completed",
        died=bool(fatal),
        died_before_trials=bool(fatal),
        cause=fatal,
        levels=tuple(
            LevelResult(
                concurrency=level,
                value=value if isinstance(value, int | float) else None,
                failed=value is None,
                measured=value != "-",
            )
            for level, value in levels.items()
        ),
        **kwargs,
    )


def series(tables, **kwargs):
    """A series of {variant: {level: [value of each boot]}}, or {variant: [boots]}."""
    boots = []
    for name, table in tables.items():
        if isinstance(table, list):
            boots += table
            continue
        count = max((len(values) for values in table.values()), default=0)
        boots += [boot(name, i + 1, {level: values[i] for level, values in table.items()}) for i in range(count)]
    return Series(**({"experiment": "x", "variants": tuple(tables), "boots": tuple(boots)} | kwargs))


def judged(tables, **kwargs):
    verdicts = verdict.judge(series(tables, **kwargs))
    return verdicts, {variant.name: variant for variant in verdicts.variants}


def cell(variant, concurrency, cache="cold"):
    return next(c for c in variant.cells if (c.concurrency, c.cache) == (concurrency, cache))


STEADY = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]


# --- the seed ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed():
    verdicts = verdict.judge(read_series(SEED))
    return verdicts, {variant.name: variant for variant in verdicts.variants}


def test_the_seeds_verdicts(seed):
    verdicts, variants = seed
    assert {name: (v.verdict, v.reasons) for name, v in variants.items()} == {
        "no-spec": ("CONTENDER", ()),
        "spec-1": ("WINNER", ()),
        "spec-3": ("REJECTED", ("cold_boot_fatal",)),
        "spec-5": ("REJECTED", ("collapses_with_concurrency", "errors_under_load")),
        "spec-8": ("REJECTED", ("does_not_reproduce", "errors_under_load")),
    }
    assert (verdicts.winner, verdicts.provisional) == ("spec-1", True)
    assert [v.name for v in verdicts.variants] == ["no-spec", "spec-1", "spec-3", "spec-5", "spec-8"]


def test_the_seeds_spec_8_at_one_stream(seed):
    one = cell(seed[1]["spec-8"], 1)
    assert one.by_boot == (124.8, 46.8)
    assert (one.spread, one.spread_lower, one.spread_upper) == pytest.approx((0.694, 0.354, 11.06), rel=1e-3)
    assert (one.reproducibility, one.more_boots, one.hidden_mode_rate) == ("DOES_NOT_REPRODUCE", 0, None)
    assert (one.estimate, one.interval) == (None, None)
    assert "124.8 and 46.8 tok/s" in seed[1]["spec-8"].sentence


def test_the_seeds_objective_is_the_geometric_mean_of_the_levels_that_both_have(seed):
    verdicts, variants = seed
    assert verdicts.objective_levels == (Level(1), Level(8))
    assert variants["spec-1"].objective == pytest.approx(math.sqrt(75.9 * 232.3))
    assert variants["no-spec"].ratio_to_winner == pytest.approx(math.sqrt(36.6 * 233.1 / (75.9 * 232.3)))
    assert variants["no-spec"].ratio_interval is None


def test_the_seeds_boots_are_counted(seed):
    assert {name: (v.boots, v.boots_failed) for name, v in seed[1].items()} == {
        "no-spec": (1, 0),
        "spec-1": (1, 0),
        "spec-3": (3, 2),
        "spec-5": (1, 0),
        "spec-8": (2, 0),
    }


def test_the_seeds_warm_boot_stands_in_warm_cells_alone(seed):
    cells = seed[1]["spec-3"].cells
    assert {c.cache for c in cells} == {"warm"}
    assert cell(seed[1]["spec-3"], 1, "warm").by_boot == (None, None, 46.7)


def test_the_seeds_sentence_says_what_wins_how_sure_and_what_production_is(seed):
    sentence = seed[0].sentence
    assert sentence.startswith("spec-1 wins provisionally with 132.8 tok/s")
    assert "not told apart from no-spec" in sentence
    assert "95 % of boots would still be unseen" in sentence
    assert "Production, spec-3, is itself REJECTED (cold_boot_fatal)." in sentence


def test_the_json_has_the_schema_first_and_the_names_of_the_interface(seed):
    text = verdict.to_json(seed[0])
    data = json.loads(text, parse_constant=pytest.fail)
    assert next(iter(data.items())) == ("schema", 1)
    assert list(data)[:8] == [
        "schema", "experiment", "box", "rehearsal", "tolerance", "boots_planned", "winner", "provisional",
    ]  # fmt: skip
    assert {"name", "verdict", "reasons", "boots", "boots_failed", "sentence", "cells"} <= set(data["variants"][0])
    assert {
        "concurrency", "cache", "unit", "by_boot", "estimate", "interval", "reproducibility", "spread",
        "spread_lower", "spread_upper", "more_boots", "hidden_mode_rate",
    } <= set(data["variants"][0]["cells"][0])  # fmt: skip


# --- cells ---------------------------------------------------------------------------------------------------------


def test_one_boot_is_its_own_estimate_and_decides_nothing():
    one = cell(judged({"a": {1: [30.1]}})[1]["a"], 1)
    assert math.exp(math.log(30.1)) != 30.1  # so the way over logs would not give it back
    assert (one.estimate, one.interval, one.reproducibility) == (30.1, None, "UNDECIDED")
    assert (one.spread, one.spread_lower, one.spread_upper, one.more_boots) == (None, None, None, None)
    assert one.hidden_mode_rate == pytest.approx(0.95)


def test_no_boot_is_an_answer_too():
    verdicts, variants = judged({"a": []}, concurrency=(1,), caches=("cold",))
    none = cell(variants["a"], 1)
    assert (none.by_boot, none.estimate, none.hidden_mode_rate, none.more_boots) == ((), None, None, None)
    assert (variants["a"].verdict, variants["a"].boots, variants["a"].failure_rate) == ("UNDECIDED", 0, None)
    assert (verdicts.winner, verdicts.provisional) == (None, None)
    assert verdicts.sentence == "Nothing wins: no variant that is not rejected has a valid value."
    assert variants["a"].sentence == "a is not booted yet."


def test_no_variant_at_all():
    verdicts, variants = judged({})
    assert (variants, verdicts.winner) == ({}, None)
    assert verdicts.sentence == "Nothing wins: there are no variants."


def test_the_estimate_is_the_geometric_mean_with_students_interval():
    one = cell(judged({"a": {1: [100.0, 104.0]}})[1]["a"], 1)
    assert one.estimate == pytest.approx(math.sqrt(100 * 104))
    half = 12.706 * (math.log(1.04) / 2)  # t(0.975, 1)·s/√2, and s of two values is |difference|/√2
    assert one.interval == pytest.approx((one.estimate * math.exp(-half), one.estimate * math.exp(half)), rel=1e-4)


@pytest.mark.parametrize(
    ("values", "answer", "more"),
    [
        ([100.0] * 5, "UNDECIDED", 1),
        ([100.0] * 6, "REPRODUCES", 0),
        ([100.0] * 1000, "REPRODUCES", 0),
        (STEADY, "REPRODUCES", 0),
        ([100.0, 100.0], "UNDECIDED", 4),
        ([100.0, 114.0], "UNDECIDED", 1),  # s = 0.0927, L = 0.0473; at three boots L/s = 0.578: 0.0535
        ([100.0, 115.0], "DOES_NOT_REPRODUCE", 0),  # s = 0.0988, L = 0.0504
    ],
)
def test_reproducibility_of_a_cell(values, answer, more):
    one = cell(judged({"a": {1: values}})[1]["a"], 1)
    assert (one.reproducibility, one.more_boots) == (answer, more)


def test_equal_boots_have_no_spread_and_an_interval_without_width():
    one = cell(judged({"a": {1: [80.0] * 6}})[1]["a"], 1)
    assert (one.spread, one.spread_lower, one.spread_upper) == (0.0, 0.0, 0.0)
    assert one.interval == pytest.approx((80.0, 80.0))


def test_a_boot_without_a_valid_value_is_a_null_in_its_place():
    disturbed = LevelResult(concurrency=1, value=None, valid=False)
    boots = [boot("a", 1, {1: 50.0}), boot("a", 2, {1: "-"}), boot("a", 3, {1: 51.0})]
    boots[1] = boots[1].model_copy(update={"levels": (disturbed,)})
    variants = judged({"a": boots})[1]
    assert cell(variants["a"], 1).by_boot == (50.0, None, 51.0)
    assert variants["a"].reasons == ()


def test_every_cell_has_one_entry_for_each_boot_that_counts(seed):
    for variant in seed[1].values():
        assert {len(c.by_boot) for c in variant.cells} <= {variant.boots}


@pytest.mark.parametrize("values", [[1e308, 1e-308], [5e-324] * 2, [1.7976931348623157e308] * 6, [1e-320, 1e308, 3.0]])
def test_values_at_the_ends_of_what_can_be_written(values):
    verdicts, _ = judged({"a": {1: values}, "b": {1: [1.0] * len(values)}})
    json.loads(verdict.to_json(verdicts), parse_constant=pytest.fail)
    assert "nan" not in verdict.explain(series({"a": {1: values}}), "a")


# --- rejection -----------------------------------------------------------------------------------------------------


def test_one_fatal_cold_boot_is_enough_and_the_rate_is_shown():
    variants = judged({"a": [boot("a", 1, {1: 50.0}), boot("a", 2, {}, fatal="triton_oom"), boot("a", 3, {1: 50.0})]})[
        1
    ]
    assert variants["a"].reasons == ("cold_boot_fatal",)
    assert variants["a"].boots_failed == 1
    assert variants["a"].sentence == "a is rejected: it died before the trials in 1 of 3 cold boots (triton_oom)."
    assert variants["a"].failure_rate == pytest.approx((0.01695, 0.86465), abs=1e-5)
    # By hand: 1 − 0.95^(1/3) = 0.01695, and (1 − p)³ + 3p(1 − p)² = 0.05 at p = 0.86465.


def test_a_cold_boot_that_is_not_ready_by_the_deadline_is_fatal_but_nothing_died():
    late = boot("a", 1, {}).model_copy(update={"outcome": "not_ready", "died_before_trials": True, "why": "no /health"})
    variants = judged({"a": [late]})[1]
    assert (variants["a"].reasons, variants["a"].boots_failed) == (("cold_boot_fatal",), 0)
    assert "died or was not ready before the trials in 1 of 1 cold boot (no /health)" in variants["a"].sentence


@pytest.mark.parametrize(
    ("cache", "reasons"),
    [("cold", ("cold_boot_fatal",)), ("clear", ("cold_boot_fatal",)), ("warm", ()), ("as-is", ())],
)
def test_only_a_cold_boot_is_cold_boot_fatal(cache, reasons):
    variants = judged({"a": [boot("a", 1, {1: 50.0}), boot("a", 2, {}, cache=cache, fatal="oom")]})[1]
    assert (variants["a"].reasons, variants["a"].boots_failed) == (reasons, 1)
    if not reasons:
        assert "1 of 2 boots did not complete" in variants["a"].sentence


def test_a_variant_that_dies_while_it_gets_warm_says_so():
    variants = judged(
        {"a": [boot("a", 1, {}, cache="warm", fatal="oom"), boot("a", 2, {}, cache="warm", fatal="oom")]}
    )[1]
    assert (variants["a"].verdict, variants["a"].reasons, variants["a"].boots_failed) == ("UNDECIDED", (), 2)
    assert variants["a"].sentence == (
        "a is undecided: none of its 2 boots gave a valid value, and 2 did not complete (oom)."
    )


def test_warm_boots_never_lift_a_fatal_cold_boot():
    warm = [boot("a", i, {1: 90.0}, cache="warm") for i in range(2, 9)]
    variants = judged({"a": [boot("a", 1, {}, fatal="oom"), *warm], "b": {1: [40.0]}})[1]
    assert (variants["a"].verdict, variants["b"].verdict) == ("REJECTED", "WINNER")
    assert cell(variants["a"], 1, "warm").reproducibility == "REPRODUCES"


def test_warm_and_cold_values_are_never_pooled():
    boots = [boot("a", 1, {1: 50.0}), boot("a", 2, {1: 90.0}, cache="warm"), boot("a", 3, {1: 50.2})]
    variants = judged({"a": boots})[1]
    assert cell(variants["a"], 1).by_boot == (50.0, None, 50.2)
    assert cell(variants["a"], 1, "warm").by_boot == (None, 90.0, None)
    assert variants["a"].verdict == "WINNER"
    assert variants["a"].objective == pytest.approx(math.sqrt(50 * 50.2))


def test_a_variant_with_warm_values_alone_is_not_ranked_among_cold_ones():
    verdicts, variants = judged({"a": [boot("a", 1, {1: 90.0}, cache="warm")], "b": {1: [40.0]}})
    assert (variants["a"].verdict, verdicts.winner) == ("UNDECIDED", "b")
    assert "cache states are never pooled" in variants["a"].sentence


def test_warm_boots_are_ranked_where_there_are_no_others():
    verdicts, _ = judged({n: [boot(n, 1, {1: v}, cache="warm")] for n, v in (("a", 40.0), ("b", 50.0))})
    assert (verdicts.winner, verdicts.objective_cache) == ("b", "warm")


def test_a_failed_level_in_any_boot_rejects():
    variants = judged({"a": {1: [50.0, 50.0], 8: [90.0, None]}})[1]
    assert variants["a"].reasons == ("errors_under_load",)
    assert "it failed under load at 8 streams in 1 of 2 boots" in variants["a"].sentence


def test_a_death_under_load_rejects_though_no_level_tells():
    died = boot("a", 1, {1: 50.0}).model_copy(update={"outcome": "crashed", "died": True, "died_under_load": True})
    variants = judged({"a": [died]})[1]
    assert (variants["a"].reasons, variants["a"].boots_failed) == (("errors_under_load",), 1)


def test_a_level_that_was_not_measured_is_no_error():
    assert judged({"a": {1: [50.0], 8: ["-"]}})[1]["a"].reasons == ()


def test_all_reasons_stand_in_one_order():
    boots = [
        boot("a", 1, {1: 100.0, 4: 20.0, 8: None}),
        boot("a", 2, {1: 40.0, 4: 10.0}),
        boot("a", 3, {}, fatal="oom"),
    ]
    assert judged({"a": boots})[1]["a"].reasons == (
        "cold_boot_fatal",
        "collapses_with_concurrency",
        "does_not_reproduce",
        "errors_under_load",
    )


# --- collapse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "collapses"),
    [
        ({1: [100.0], 4: [49.9]}, True),
        ({1: [100.0], 4: [50.0]}, False),  # more than twice, not twice
        ({1: [100.0], 2: [150.0], 4: [74.0]}, True),  # any lower level counts, not the lowest alone
        ({1: [100.0, 100.0], 4: [40.0, 90.0]}, False),  # in every boot that measured it
        ({1: [100.0, 100.0], 4: [40.0, "-"]}, True),
        ({1: [100.0, "-"], 4: [40.0, 40.0]}, False),  # the second boot cannot tell
        ({1: [10.0], 2: [19.0], 4: [35.0]}, False),
        ({4: [40.0]}, False),
        ({1: [40.0], 4: [100.0]}, False),
    ],
)
def test_more_than_twice_in_every_boot(table, collapses):
    reasons = judged({"a": table}, tolerance=1.0)[1]["a"].reasons
    assert ("collapses_with_concurrency" in reasons) == collapses


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        # The table shows the mean of both boots, 19.0; the sentence speaks of one of them, and says of which.
        ([80.0, 81.0], [20.0, 18.0], "in the worst boot, b02-a, 18.0 tok/s in all, where 2 streams gave 81.0 (4.5× as"),
        ([80.0], [20.0], "in b01-a, 20.0 tok/s in all, where 2 streams gave 80.0 (4.0× as much)."),
    ],
)
def test_a_collapse_says_of_which_boot_it_speaks(low, high, said):
    assert f"it collapses at 4 streams: {said}" in judged({"a": {2: low, 4: high}})[1]["a"].sentence


def test_each_boot_may_collapse_against_another_level():
    table = {1: [100.0, 30.0], 2: [40.0, 100.0], 4: [45.0, 45.0]}
    assert "collapses_with_concurrency" in judged({"a": table}, tolerance=1.0)[1]["a"].reasons


@pytest.mark.parametrize(
    ("high", "collapses"),
    [
        ([85.0, 84.0, 86.0], True),  # 15 % lower, tightly
        ([91.0, 92.0, 91.5], False),  # significantly lower, but by less than 10 %
        ([85.0, 84.0], False),  # two boots
        ([60.0, 95.0, 100.0], False),  # 16 % lower, but all over the place
    ],
)
def test_more_than_ten_percent_and_significantly_so_from_three_boots_on(high, collapses):
    table = {1: [100.0, 99.0, 101.0][: len(high)], 8: high}
    reasons = judged({"a": table}, tolerance=1.0)[1]["a"].reasons
    assert ("collapses_with_concurrency" in reasons) == collapses


def test_a_significant_drop_is_told_with_its_numbers():
    variants = judged({"a": {1: [100.0, 99.0, 101.0], 8: [85.0, 84.0, 86.0]}})[1]
    assert "it collapses at 8 streams: 0.850× the throughput of 1 stream (95 % 0.8" in variants["a"].sentence
    assert "3 boots" in variants["a"].sentence


def test_a_flat_curve_is_seldom_called_a_collapse():
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(800):
        table = {level: rng.lognormal(4, 0.06, 3).tolist() for level in (1, 2, 4, 8)}
        wrong += "collapses_with_concurrency" in judged({"a": table}, tolerance=1.0)[1]["a"].reasons
    assert wrong / 800 < 0.05  # Holm over the six pairs; the rule of 10 % takes more away


def test_a_level_that_failed_has_no_aggregate():
    variants = judged({"a": {1: [100.0], 8: [None]}})[1]
    assert variants["a"].reasons == ("errors_under_load",)


# --- ranking -------------------------------------------------------------------------------------------------------


def test_significantly_slower_is_dominated_and_the_rest_contend():
    fast, near, slow = STEADY, [v * 0.998 for v in STEADY], [v * 0.8 for v in STEADY]
    verdicts, variants = judged({"slow": {1: slow}, "near": {1: near}, "fast": {1: fast}})
    assert {n: v.verdict for n, v in variants.items()} == {"slow": "DOMINATED", "near": "CONTENDER", "fast": "WINNER"}
    assert variants["slow"].ratio_to_winner == pytest.approx(0.8)
    low, high = variants["slow"].ratio_interval
    assert low < 0.8 < high < 0.85
    assert variants["slow"].p_holm < 0.001
    assert variants["near"].p_holm > 0.05
    assert "not told apart from near:" in verdicts.sentence
    assert verdicts.provisional is False


def test_one_boot_a_side_cannot_tell_anything_apart():
    variants = judged({"a": {1: [10.0]}, "b": {1: [1000.0]}})[1]
    assert (variants["a"].verdict, variants["b"].verdict) == ("CONTENDER", "WINNER")
    assert "a comparison needs two boots on both sides" in variants["a"].sentence


def test_holm_spares_a_difference_that_one_comparison_would_have_found():
    base = {"win": {1: [100.0, 101.0, 99.0]}}
    close = {1: [96.5, 98.2, 96.0]}
    alone = judged(base | {"x": close})[1]["x"]
    among = judged(base | {"x": close} | {f"y{i}": {1: [97.0, 104.0, 98.0]} for i in range(4)})[1]["x"]
    assert (alone.verdict, among.verdict) == ("DOMINATED", "CONTENDER")
    assert among.p_holm == pytest.approx(5 * alone.p_holm)


def test_the_objective_takes_the_levels_that_every_ranked_variant_has_measured():
    tables = {
        "a": {1: [10.0], 8: [100.0]},
        "b": {1: [20.0], 2: [1000.0]},
        "rejected": {16: [5.0], 1: [None]},
        "empty": {32: ["-"]},
    }
    verdicts, variants = judged(tables)
    assert (verdicts.objective_levels, verdicts.winner) == ((Level(1),), "b")
    assert variants["empty"].verdict == "UNDECIDED"
    assert variants["rejected"].verdict == "REJECTED"
    assert variants["empty"].objective is None


def test_variants_without_a_common_level_are_not_compared():
    verdicts, variants = judged({"a": {1: [10.0]}, "b": {2: [20.0]}})
    assert verdicts.winner is None
    assert {v.verdict for v in variants.values()} == {"UNDECIDED"}
    assert verdicts.sentence == "Nothing wins: no level was measured by every variant that is not rejected."


def test_boots_that_miss_a_level_count_for_the_estimate_and_not_for_the_test():
    table = {1: [10.0, 10.1, 9.9, 10.0], 8: [80.0, 80.5, 79.5, "-"]}
    variants = judged({"a": table, "b": {1: [5.0, 5.1, 4.9], 8: [40.0, 40.2, 39.8]}})[1]
    assert variants["a"].objective == pytest.approx(
        math.sqrt(math.prod([10.0, 10.1, 9.9, 10.0]) ** 0.25 * math.prod([80.0, 80.5, 79.5]) ** (1 / 3))
    )
    assert variants["b"].verdict == "DOMINATED"


def test_equal_printed_objectives_are_a_tie_that_fewest_changes_win():
    tables = {"a": {1: [100.04]}, "b": {1: [100.0]}, "c": {1: [99.8]}}
    verdicts, variants = judged(tables, changes={"a": 2, "b": 1, "c": 0})
    assert verdicts.winner == "b"
    assert [v.tied for v in variants.values()] == [True, True, False]
    assert "a tie with a, decided by the fewest changes from production (1)" in variants["b"].sentence


def test_a_tie_goes_by_the_order_of_the_file_where_no_changes_are_known():
    verdicts, variants = judged({"a": {1: [100.0]}, "b": {1: [100.04]}})
    assert verdicts.winner == "a"
    assert "decided by the order of the file" in variants["a"].sentence


def test_production_itself_has_no_changes():
    assert judged({"a": {1: [100.0]}, "b": {1: [100.0]}}, production="b")[0].winner == "b"


def test_no_tie_one_printed_digit_apart():
    verdicts, variants = judged({"a": {1: [100.0]}, "b": {1: [100.1]}})
    assert (verdicts.winner, variants["b"].tied) == ("b", False)


def test_everything_rejected_has_no_winner_and_says_what_production_is():
    verdicts, _ = judged({"a": {1: [None]}, "b": {1: [10.0, 30.0]}}, production="b")
    assert (verdicts.winner, verdicts.provisional) == (None, None)
    assert verdicts.sentence == (
        "Nothing wins: all 2 variants are rejected. Production, b, is itself REJECTED (does_not_reproduce)."
    )


def test_provisional_until_all_cells_of_the_winner_reproduce():
    assert judged({"a": {1: STEADY}})[0].provisional is False
    assert judged({"a": {1: STEADY, 8: [*STEADY[:5], "-"]}})[0].provisional is True


def test_a_rehearsal_is_stamped():
    verdicts, _ = judged({"a": {1: [5.0]}}, rehearsal=True)
    assert verdicts.rehearsal is True
    assert "REHEARSAL" in verdicts.sentence


# --- order and drift -----------------------------------------------------------------------------------------------


def drifting(per_boot):
    return {
        name: [boot(name, i + 1, {1: 100.0 * (1 - per_boot * (2 * i + k))}, position=2 * i + k + 1) for i in range(6)]
        for k, name in enumerate(("a", "b"))
    }


def test_a_drift_with_boot_order_confounds_the_comparison():
    verdicts, variants = judged(drifting(0.008))
    assert verdicts.confounded is not None
    assert "drifts with boot order: -8." in verdicts.confounded
    assert verdicts.confounded in verdicts.sentence
    assert variants["a"].confounded == verdicts.confounded


def test_a_drift_below_the_tolerance_is_let_be():
    assert judged(drifting(0.003))[0].confounded is None


def test_boots_without_a_trend_are_not_confounded():
    rng = np.random.default_rng(2)
    tables = {n: {1: rng.lognormal(4, 0.02, 6).tolist()} for n in ("a", "b", "c")}
    assert judged(tables)[0].confounded is None


def test_a_drift_with_the_temperature_at_start_is_named():
    degrees = [50.0, 32.0, 44.0, 38.0, 47.0, 35.0, 41.0, 29.0]
    boots = [
        boot("a", i + 1, {1: 100.0 - 0.5 * t}, covariates={"start_temperature_c": t}) for i, t in enumerate(degrees)
    ]
    assert "drifts with start_temperature_c" in (judged({"a": boots})[0].confounded or "")


def test_boots_that_cannot_be_pooled_confound():
    verdicts, _ = judged({"a": {1: [5.0]}}, confounded="boots of one comparison differ in driver: 1 and 2")
    assert "The comparison is confounded: boots of one comparison differ in driver: 1 and 2." in verdicts.sentence


# --- the derivation ------------------------------------------------------------------------------------------------


def test_explain_shows_the_numbers_of_spec_8():
    text = verdict.explain(read_series(SEED), "spec-8")
    for part in (
        "spec-8: REJECTED",
        "b01-spec-8 [cold]: 1: 124.8, 2: 90.9, 4: 200.7, 8: failed",
        "8: not measured",
        "s = 0.6936",
        "L = s·0.5102 = 0.3539, U = s·15.95 = 11.06",
        "yes does_not_reproduce",
        "no  cold_boot_fatal: none of 2 cold boots died before the trials",
        "4 more boots would settle it",
        "rejected variants are not ranked",
    ):
        assert part in text


def test_explain_shows_the_test_against_the_winner():
    text = verdict.explain(series({"a": {1: STEADY}, "b": {1: [v * 0.8 for v in STEADY]}}), "b")
    for part in ("winner a", "Welch on log boot means: 0.800×", "df = 10", "Holm over 1 comparison", "slower"):
        assert part in text


@pytest.mark.parametrize("name", ["no-spec", "spec-1", "spec-3", "spec-5"])
def test_every_variant_can_be_explained(name):
    assert verdict.explain(read_series(SEED), name).startswith(f"{name}: ")


def test_explain_of_an_unknown_variant_names_those_that_are_there():
    with pytest.raises(UsageError, match=r"no variant 'spec-9'[\s\S]*no-spec, spec-1, spec-3, spec-5, spec-8"):
        verdict.explain(read_series(SEED), "spec-9")


def test_a_thousand_boots_make_a_short_sentence():
    rng = np.random.default_rng(3)
    variants = judged({"a": {1: rng.lognormal(4, 0.3, 1000).tolist()}, "b": {1: [60.0]}})[1]
    assert "over 1000 boots" in variants["a"].sentence
    assert len(variants["a"].sentence) < 400
