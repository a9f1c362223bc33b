"""From the ledger's records to a series: which boots count, in which order, and what each of them says."""

from __future__ import annotations

import math
import random

import pytest

from orchestrator import verdict
from orchestrator.matrix import parse_matrix
from orchestrator.plan import LOOKS, extend, make_plan
from orchestrator.records import (
    Answer,
    BootEnded,
    BootStarted,
    CampaignStarted,
    JournalAnswered,
    LevelResult,
    StepEnded,
    TrialEnded,
)
from orchestrator.series import read_series
from orchestrator.verdict import judge, series_from_records


def campaign(**kwargs):
    given = {
        "experiment": "gwen",
        "box": "rehearsal",
        "rehearsal": True,
        "seed": 1,
        "boots_planned": 3,
        "variants": ("a", "b"),
        "concurrency": (1, 8),
        "tolerance": 0.1,
        "production_variant": "b",
        "changes": {"a": 1, "b": 0},
    }
    return CampaignStarted(**(given | kwargs))


def key(block, variant, *, position, attempt=1, cache="cold"):
    suffix = "" if attempt == 1 else f".r{attempt - 1}"
    state = "" if cache == "cold" else f"@{cache}"
    return {
        "boot": f"b{block:02d}-{variant}{state}{suffix}",
        "variant": variant,
        "cache": cache,
        "block": block,
        "position": position,
        "attempt": attempt,
    }


def trial(where, concurrency, tokens_per_s, **kwargs):
    given = {"window_s": 30.0, "tokens": None, "tokens_per_s": tokens_per_s, "valid": True}
    return TrialEnded(**where, concurrency=concurrency, **(given | kwargs))


def ended(where, outcome="completed", **kwargs):
    return BootEnded(**where, boot_outcome=outcome, why=kwargs.pop("why", ""), **kwargs)


def whole(where, values, outcome="completed", **kwargs):
    return [BootStarted(**where), *(trial(where, c, v) for c, v in values.items()), ended(where, outcome, **kwargs)]


def test_an_empty_ledger_is_an_empty_series():
    assert verdict.judge(verdict.series_from_records([])).winner is None


def test_the_campaign_tells_what_was_planned():
    series = verdict.series_from_records([campaign()])
    assert (series.experiment, series.box, series.rehearsal, series.boots_planned) == ("gwen", "rehearsal", True, 3)
    assert (series.variants, series.concurrency, series.tolerance) == (("a", "b"), (1, 8), 0.1)
    assert (series.production, series.changes, series.caches) == ("b", {"a": 1, "b": 0}, ("cold",))


def test_a_planned_level_that_no_boot_reached_is_an_empty_cell():
    where = key(1, "a", position=1)
    records = [campaign(), BootStarted(**where), ended(where, "crashed", died=True, step="first_request")]
    (a, b) = verdict.judge(verdict.series_from_records(records)).variants
    assert [(cell.concurrency, cell.by_boot) for cell in a.cells] == [(1, (None,)), (8, (None,))]
    assert [(cell.concurrency, cell.by_boot) for cell in b.cells] == [(1, ()), (8, ())]
    assert (a.reasons, a.boots, a.boots_failed) == (("cold_boot_fatal",), 1, 1)


def test_boots_stand_in_plan_order_whatever_order_they_ran_in():
    planned = enumerate([(1, "b"), (1, "a"), (2, "a"), (2, "b")], start=1)
    boots = [whole(key(block, name, position=place), {1: 10.0 * place}) for place, (block, name) in planned]
    random.Random(1).shuffle(boots)
    series = verdict.series_from_records([campaign(), *(record for boot in boots for record in boot)])
    assert [boot.boot for boot in series.boots] == ["b01-b", "b01-a", "b02-a", "b02-b"]
    assert series.variants == ("a", "b")
    assert verdict.judge(series).variants[0].cells[0].by_boot == (20.0, 30.0)


def test_disturbed_and_aborted_boots_are_counted_and_stand_nowhere_else():
    first, second, third = (key(1, "a", position=1, attempt=n) for n in (1, 2, 3))
    records = [
        campaign(),
        *whole(first, {1: 900.0, 8: None}, "disturbed"),
        *whole(second, {1: 901.0}, "aborted"),
        *whole(third, {1: 50.0}),
    ]
    series = verdict.series_from_records(records)
    assert [boot.boot for boot in series.boots] == ["b01-a.r2"]
    a = verdict.judge(series).variants[0]
    assert (a.boots, a.boots_disturbed, a.boots_aborted) == (1, 1, 1)
    assert a.cells[0].by_boot == (50.0,)
    assert a.reasons == ()


def test_a_boot_that_has_not_ended_is_nowhere():
    where = key(1, "a", position=1)
    series = verdict.series_from_records([campaign(), BootStarted(**where), trial(where, 1, 50.0)])
    assert (series.boots, series.boots_disturbed, series.boots_aborted) == ((), {}, {})


def test_a_planned_boot_counts_once():
    records = [
        campaign(),
        *whole(key(1, "a", position=1), {1: 50.0}),
        *whole(key(1, "a", position=1, attempt=2), {1: 60.0}),
    ]
    assert [boot.boot for boot in verdict.series_from_records(records).boots] == ["b01-a"]


def test_a_boot_started_afresh_under_the_same_name_is_told_by_its_last_start():
    where = key(1, "a", position=1)
    records = [campaign(), BootStarted(**where), trial(where, 1, 10.0), *whole(where, {1: 50.0})]
    (boot,) = verdict.series_from_records(records).boots
    assert boot.levels == (LevelResult(concurrency=1, value=50.0),)


def test_cache_states_are_planned_boots_of_their_own():
    records = [
        campaign(),
        *whole(key(1, "a", position=1), {1: 50.0}),
        *whole(key(1, "a", position=2, cache="warm"), {1: 80.0}),
    ]
    a = verdict.judge(verdict.series_from_records(records)).variants[0]
    assert [(c.cache, c.concurrency, c.by_boot) for c in a.cells] == [
        ("cold", 1, (50.0, None)),
        ("cold", 8, (None, None)),
        ("warm", 1, (None, 80.0)),
        ("warm", 8, (None, None)),
    ]


@pytest.mark.parametrize("step", ["start", "ready", "first_request", "headroom", "sanity"])
def test_a_death_before_the_trials(step):
    where = key(1, "a", position=1)
    (boot,) = verdict.series_from_records([campaign(), ended(where, "crashed", died=True, step=step)]).boots
    assert (boot.died_before_trials, boot.died_under_load) == (True, False)


def test_a_death_in_the_trials_is_an_error_under_load():
    where = key(1, "a", position=1)
    records = [campaign(), trial(where, 1, 50.0), ended(where, "crashed", died=True, step="trials")]
    series = verdict.series_from_records(records)
    assert (series.boots[0].died_before_trials, series.boots[0].died_under_load) == (False, True)
    assert verdict.judge(series).variants[0].reasons == ("errors_under_load",)


def test_a_death_after_the_trials_failed_but_not_under_load():
    where = key(1, "a", position=1)
    records = [campaign(), trial(where, 1, 50.0), ended(where, "crashed", died=True, step="stop")]
    a = verdict.judge(verdict.series_from_records(records)).variants[0]
    assert (a.reasons, a.boots_failed) == ((), 1)


def test_not_ready_by_the_deadline_is_fatal_and_no_death():
    where = key(1, "a", position=1)
    a = verdict.judge(verdict.series_from_records([campaign(), ended(where, "not_ready", step="ready")])).variants[0]
    assert (a.reasons, a.boots_failed) == (("cold_boot_fatal",), 0)


@pytest.mark.parametrize(
    ("trials", "level"),
    [
        ([{"tokens_per_s": 50.0}], LevelResult(concurrency=1, value=50.0)),
        ([{"tokens_per_s": None, "failed": True}], LevelResult(concurrency=1, value=None, failed=True)),
        ([{"tokens_per_s": None, "valid": False, "failed": True}], LevelResult(concurrency=1, value=None, failed=True)),
        ([{"tokens_per_s": 50.0, "valid": False}], LevelResult(concurrency=1, value=None, valid=False)),
        ([{"tokens_per_s": 0.0}], LevelResult(concurrency=1, value=None, valid=False)),
        # Windows of one boot describe that boot: √(50 · 72) = 60.
        ([{"tokens_per_s": 50.0}, {"tokens_per_s": 72.0}], LevelResult(concurrency=1, value=60.0)),
        ([{"tokens_per_s": 50.0}, {"tokens_per_s": None, "valid": False}], LevelResult(concurrency=1, value=50.0)),
        (
            [{"tokens_per_s": 50.0}, {"tokens_per_s": None, "failed": True}],
            LevelResult(concurrency=1, value=None, failed=True),
        ),
    ],
)
def test_trials_of_one_level(trials, level):
    where = key(1, "a", position=1)
    records = [campaign(), *(trial(where, 1, **kwargs) for kwargs in trials), ended(where)]
    (found,) = verdict.series_from_records(records).boots[0].levels
    assert (found.concurrency, found.failed, found.valid, found.measured) == (1, level.failed, level.valid, True)
    assert found.value == pytest.approx(level.value)


def test_the_journals_cause_stands_in_the_sentence():
    where = key(1, "a", position=1)
    answer = Answer(outcome="fatal", phase="first_request", cause="triton_oom", complete=True)
    records = [
        campaign(),
        JournalAnswered(**where, answer=answer),
        ended(where, "crashed", died=True, step="first_request"),
    ]
    series = verdict.series_from_records(records)
    assert (series.boots[0].cause, series.boots[0].phase) == ("triton_oom", "first_request")
    assert "1 of 1 cold boot (triton_oom)" in verdict.judge(series).variants[0].sentence


def test_a_benign_answer_is_no_cause():
    where = key(1, "a", position=1)
    answer = Answer(outcome="benign", phase="serving", cause="none", complete=True)
    (boot,) = verdict.series_from_records([campaign(), JournalAnswered(**where, answer=answer), ended(where)]).boots
    assert (boot.cause, boot.phase) == (None, None)


def test_the_temperature_at_start_is_a_covariate():
    where = key(1, "a", position=1)
    step = StepEnded(
        **where, name="clean_slate", seconds=1.0, outcome="ok", facts={"start_temperature_c": 41, "x": "y"}
    )
    (boot,) = verdict.series_from_records([campaign(), step, ended(where)]).boots
    assert boot.covariates == {"start_temperature_c": 41.0}


def test_sessions_whose_fingerprints_differ_confound_and_name_the_fact():
    records = [campaign(fingerprint={"driver": "580.1", "kernel": None}), campaign(fingerprint={"driver": "581.2"})]
    assert (
        verdict.series_from_records(records).confounded == "boots of one comparison differ in driver: 580.1 and 581.2"
    )


def test_a_fact_that_one_session_does_not_know_is_no_difference():
    records = [campaign(fingerprint={"driver": None}), campaign(fingerprint={"driver": "581.2"}, resumed=True)]
    assert verdict.series_from_records(records).confounded is None


def test_an_extended_campaign_goes_by_its_last_start():
    records = [campaign(), campaign(boots_planned=6, variants=("a", "b", "c"))]
    series = verdict.series_from_records(records)
    assert (series.boots_planned, series.variants) == (6, ("a", "b", "c"))


def test_what_the_caller_knows_better_holds():
    series = verdict.series_from_records(
        [campaign()], tolerance=0.2, production="a", variants=["b", "a"], boots_planned=9
    )
    assert (series.tolerance, series.production, series.variants, series.boots_planned) == (0.2, "a", ("b", "a"), 9)


def test_the_looks_of_the_plans_split_alpha():
    assert LOOKS["nightly"].refute_alpha == pytest.approx(0.05 / 6)
    assert LOOKS["nightly"].vouch_alpha == pytest.approx(0.05 / 3)


# --- looks and blocks ----------------------------------------------------------------------------------------------


def fixed_plan(boots, variants=("a", "b")):
    named = ", ".join(f"{variant}: {{}}" for variant in variants)
    text = f"boxes: {{x: {{unit: a.service}}}}\nconcurrency: [1]\nvariants: {{{named}}}"
    return make_plan(parse_matrix(text), boots)


def played(plan, value, blocks=None):
    """Records of the plan's boots up to a block; `value(variant, block)` is tok/s."""
    started = {"experiment": "x", "box": "x", "rehearsal": False, "seed": 1, "boots_planned": plan.boots}
    found = [CampaignStarted(**started, variants=plan.variants, concurrency=(1,))]
    for boot in plan.boots_planned:
        if blocks is not None and boot.block > blocks:
            continue
        where = boot.model_dump()
        trial = {"window_s": 1.0, "tokens": None, "valid": True, "concurrency": 1}
        found += [
            TrialEnded(**where, **trial, tokens_per_s=value(boot.variant, boot.block)),
            BootEnded(**where, boot_outcome="completed", why=""),
        ]
    return found


def judged_plan(plan, value, blocks=None):
    return judge(series_from_records(played(plan, value, blocks), plan=plan))


def test_a_look_in_the_middle_of_a_fixed_plan_is_said_to_be_undeclared():
    plan = fixed_plan(6)
    early = judged_plan(plan, lambda _v, _b: 100.0, blocks=2)
    assert early.undeclared_look is not None
    assert "an early look, after 4 of 12 planned boots" in early.undeclared_look
    assert early.undeclared_look[1:] in early.sentence
    assert judged_plan(plan, lambda _v, _b: 100.0).undeclared_look is None


def test_an_extended_plan_says_that_it_may_have_been_looked_at():
    said = judged_plan(extend(fixed_plan(3), 6), lambda _v, _b: 100.0).undeclared_look
    assert said is not None
    assert "extended from 3 boots a variant" in said


def test_blocks_that_differ_are_paired_and_blocks_that_do_not_are_not():
    # Blocks differ by up to 4 %, b is 1 % below a in each of them within 0.1 %: only paired is that seen.
    level = {1: 0.0, 2: 0.04, 3: -0.03, 4: 0.02, 5: -0.02, 6: 0.01}
    own = {1: 0.001, 2: -0.001, 3: 0.0005, 4: -0.0005, 5: 0.001, 6: -0.001}

    def blocked(variant, block):
        return 100 * math.exp(level[block] + (0.01 + own[block] if variant == "a" else 0.0))

    b = next(v for v in judged_plan(fixed_plan(6), blocked).variants if v.name == "b")
    assert (b.compared, b.verdict) == ("paired", "DOMINATED")
    assert b.ratio_to_winner == pytest.approx(math.exp(-0.01), rel=1e-3)
    assert "paired within blocks" in b.sentence

    def shuffled(variant, block):  # the same values, but b's in another order: nothing in common within a block
        return blocked(variant, block if variant == "a" else 1 + (block + 2) % 6)

    other = next(v for v in judged_plan(fixed_plan(6), shuffled).variants if v.name == "b")
    assert (other.compared, other.verdict) == ("welch", "CONTENDER")


def test_hand_recorded_boots_have_no_blocks_and_are_never_paired(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("variants: {a: {1: [100, 104, 97, 102]}, b: {1: [99, 103, 96, 101]}}")
    found = judge(read_series(file)).variants[1]
    assert found.compared == "welch"
