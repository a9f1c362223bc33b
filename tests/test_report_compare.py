"""Two variants side by side: ratios that a reader can check, and silence where a number supports none."""

from __future__ import annotations

import math

import pytest
from report_samples import sample

from orchestrator import stats, verdict
from orchestrator.errors import UsageError
from orchestrator.records import BootResult, Level, LevelResult, Series
from orchestrator.report.compare import Experiment, compare, experiment, pairs, render, sentence


def series(name="gwen", *, rehearsal=False, **variants) -> Series:
    """Boots by variant: one mapping level → value a boot; None failed."""
    boots = tuple(
        BootResult(
            boot=f"b{block:02d}-{variant}",
            variant=variant,
            cache="cold",
            block=block,
            position=block,
            outcome="completed",
            levels=tuple(LevelResult(concurrency=c, value=v, failed=v is None) for c, v in table.items()),
        )
        for variant, tables in variants.items()
        for block, table in enumerate(tables, start=1)
    )
    return Series(experiment=name, box="gwen", rehearsal=rehearsal, variants=tuple(variants), boots=boots)


def made(name="gwen", **variants) -> Experiment:
    return experiment(name, series(name, **variants), ())


def pair(text: str, current: Experiment, *others: Experiment):
    known = {one.name: one for one in others}
    return pairs(text, current, known.get)


FAST = [{1: 100.0, 8: 400.0}, {1: 102.0, 8: 404.0}, {1: 98.0, 8: 396.0}]
SLOW = [{1: 50.0, 8: 300.0}, {1: 51.0, 8: 303.0}, {1: 49.0, 8: 297.0}]


def test_each_level_has_its_ratio_with_the_interval_of_boots_against_boots():
    ((a, b),) = pair("fast,slow", made(fast=FAST, slow=SLOW))
    found = compare(a, b)
    one, eight = found.rows
    assert (one.level, eight.level) == (Level(1), Level(8))
    assert math.exp(one.ratio.value) == pytest.approx(2.0, rel=1e-3)
    assert math.exp(eight.ratio.value) == pytest.approx(4 / 3, rel=1e-3)
    by_hand = stats.welch([math.log(t[1]) for t in FAST], [math.log(t[1]) for t in SLOW])
    assert one.ratio.interval == pytest.approx(by_hand.interval)
    assert one.ratio.boots == (3, 3)


def test_the_sentence_is_about_the_geometric_mean_over_all_levels():
    ((a, b),) = pair("fast,slow", made(fast=FAST, slow=SLOW))
    found = compare(a, b)
    assert math.exp(found.whole.value) == pytest.approx(math.sqrt(2 * 4 / 3), rel=1e-3)
    assert sentence(found).startswith("fast gives 1.63× the throughput of slow at 1 and 8 streams (95 % ")
    assert sentence(found).endswith("3 boots against 3): they are told apart.")
    assert "they are not told apart" in sentence(compare(a, a))


def test_turning_the_sides_turns_the_ratio():
    current = made(fast=FAST, slow=SLOW)
    ((a, b),) = pair("fast,slow", current)
    forth, back = compare(a, b), compare(b, a)
    assert back.whole.value == pytest.approx(-forth.whole.value)
    assert back.whole.interval == pytest.approx((-forth.whole.interval[1], -forth.whole.interval[0]))


def test_what_does_not_reproduce_supports_no_ratio():
    wild = [{1: 124.8, 8: 400.0}, {1: 46.8, 8: 401.0}, {1: 120.0, 8: 399.0}]
    ((a, b),) = pair("wild,slow", made(wild=wild, slow=SLOW))
    found = compare(a, b)
    assert (found.rows[0].ratio.value, found.rows[0].ratio.why) == (None, "wild does not reproduce")
    assert found.levels == (Level(8),)
    assert "does_not_reproduce" in render(found)
    assert "46.8 … 124.8" in render(found)


def test_one_boot_a_side_gives_a_ratio_without_an_interval():
    ((a, b),) = pair("fast,slow", made(fast=FAST[:1], slow=SLOW[:1]))
    found = compare(a, b)
    assert math.exp(found.rows[0].ratio.value) == pytest.approx(2.0)
    assert found.rows[0].ratio.interval is None
    assert "two boots on each side" in sentence(found)
    assert render(found).splitlines()[1].split() == ["at", "1", "100.0", "50.0", "2.00×", "too", "few", "boots"]


def test_a_comparison_fits_into_80_columns_and_says_neither_name_nor_verdict_twice():
    def near(times):
        return [{1: times * at_one, 8: times * at_one * 6} for at_one in (49.5, 50.0, 50.5)]

    ((a, b),) = pair("spec-1,no-spec", made(**{"spec-1": near(1.5), "no-spec": near(1.0)}))
    lines = render(compare(a, b)).splitlines()
    assert lines[0].split() == ["spec-1", "no-spec", "ratio", "its", "95", "%"]
    assert lines[2].split()[:3] == ["at", "8", "450.0"]
    assert max(map(len, lines[:3])) <= 80
    assert "ratio: spec-1 / no-spec" in lines[3]
    assert lines[5].startswith("spec-1, WINNER: wins provisionally with 183.7 tok/s (")
    assert lines[6].startswith("no-spec, DOMINATED: 122.5 tok/s (")


def test_a_level_that_only_one_side_has_is_no_ratio():
    ((a, b),) = pair("fast,short", made(fast=FAST, short=[{1: 50.0}, {1: 50.5}, {1: 49.5}]))
    found = compare(a, b)
    assert found.rows[1].ratio.why == "short has no value"
    assert found.levels == (Level(1),)


def test_nothing_is_compared_with_itself():
    with pytest.raises(UsageError, match="fast with itself"):
        pair("fast,fast", made(fast=FAST))


def test_a_variant_without_any_value_cannot_be_compared():
    ((a, b),) = pair("fast,dead", made(fast=FAST, dead=[{1: None, 8: None}] * 3))
    assert sentence(compare(a, b)) == "fast and dead cannot be compared: dead has no value."


def test_two_experiments_are_compared_variant_by_variant():
    now, before = made("gwen.2", fast=FAST, slow=SLOW), made("gwen", slow=FAST, other=SLOW)
    found = pair("gwen.2,gwen", now, now, before)
    assert [(a.label, b.label) for a, b in found] == [("gwen.2:slow", "gwen:slow")]
    assert compare(*found[0]).whole.value < 0
    ((a, b),) = pair("slow,gwen", now, now, before)
    assert (a.label, b.label) == ("slow", "gwen:slow")
    ((a, b),) = pair("fast,gwen:other", now, now, before)
    assert (a.label, b.label) == ("fast", "gwen:other")


def test_what_differs_between_two_experiments_is_noted():
    now, before = made("gwen.2", slow=SLOW), made("gwen", slow=SLOW)
    now.facts.update(driver="590", kernel="6.1")
    before.facts.update(driver="580", kernel="6.1")
    ((a, b),) = pair("gwen.2,gwen", now, now, before)
    assert compare(a, b).notes == ("driver differs: 590 and 580",)
    assert "NOTE driver differs" in render(compare(a, b))


def test_a_rehearsal_is_not_compared_with_a_real_box():
    real, rehearsed = made("real", slow=SLOW), experiment("stage", series(rehearsal=True, slow=SLOW), ())
    ((a, b),) = pair("real,stage", real, real, rehearsed)
    with pytest.raises(UsageError, match="rehearsal"):
        compare(a, b)


@pytest.mark.parametrize(
    ("text", "count"), [("fast", "1"), ("fast,slow,other", "3"), ("", "nothing"), (",", "nothing")]
)
def test_two_names_are_needed(text, count):
    with pytest.raises(UsageError, match=f"names {count}; accepted: two names .*, of variants or of exp") as caught:
        pair(text, made(fast=FAST, slow=SLOW))
    assert str(caught.value).endswith("fast, slow")


def test_unknown_names_and_strangers_are_told():
    current = made(fast=FAST, slow=SLOW)
    with pytest.raises(UsageError, match=r"'spec-9' is no variant of gwen[\s\S]*fast, slow"):
        pair("fast,spec-9", current)
    with pytest.raises(UsageError, match="no variant in common"):
        pair("gwen,other", current, current, made("other", else_=SLOW))


def test_a_whole_experiment_side_by_side():
    whole = sample()
    current = experiment("gwen", whole.series, whole.records)
    ((a, b),) = pair("spec-1,spec-8", current)
    text = render(compare(a, b))
    assert text.startswith("REHEARSAL")
    assert "spec-8, REJECTED" in text
    assert "spec-8 does not reproduce" in text
    assert current.verdicts == verdict.judge(whole.series)
