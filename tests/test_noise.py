"""Twins: one configuration under two names, and what their boots say about the rig."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from orchestrator import noise, stats
from orchestrator.errors import UsageError
from orchestrator.matrix import parse_matrix
from orchestrator.plan import make_plan
from orchestrator.records import BootEnded, CampaignStarted, TrialEnded
from orchestrator.twins import NAMES, twin_matrix

TEXT = """\
experiment: gwen
box: here
boxes:
  here: {unit: a.service, load: {window_s: 2}}
  there: {unit: b.service, transport: ssh}
variants:
  fast: {spec-tokens: 1, unset: [spec-model], env: {A: 1, B: null}}
  slow: {}
concurrency: [1, 8]
tolerance: 0.02
load: {input_tokens: 64}
"""


def test_twins_are_one_variant_under_two_names_with_all_the_rest_as_it_was():
    matrix = parse_matrix(TEXT)
    found = parse_matrix(twin_matrix(matrix, "fast", windows=3))
    assert [variant.name for variant in found.variants] == list(NAMES)
    one, other = found.variants
    assert one.model_copy(update={"name": "x"}) == other.model_copy(update={"name": "x"})
    assert one.set == matrix.variant("fast").set
    assert (one.unset, one.env) == (("spec-model",), {"A": "1", "B": None})
    assert (found.experiment, found.concurrency, found.tolerance) == ("gwen-aa", (1, 8), 0.02)
    assert (found.effective_load().windows, found.effective_load().window_s) == (3, 2.0)
    assert found.boxes["there"].host == "there"


def test_twins_find_the_users_own_prompts_where_they_are():
    matrix = parse_matrix(TEXT.replace("{input_tokens: 64}", "{prompts: mine/p.jsonl}"), Path("/there/m.yaml"))
    assert parse_matrix(twin_matrix(matrix, "fast", windows=3)).load.prompts == "/there/mine/p.jsonl"


def test_a_variant_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="no variant `fats`, did you mean `fast`"):
        twin_matrix(parse_matrix(TEXT), "fats", windows=2)


def plan(boots=3):
    return make_plan(parse_matrix(twin_matrix(parse_matrix(TEXT), "fast", windows=2)), boots)


def ledger(values, tolerance=0.05):
    """Records of twins at one level; values[twin][boot] are the tok/s of its windows."""
    found = [
        CampaignStarted(
            experiment="x", box="b", rehearsal=False, seed=1, boots_planned=3, variants=NAMES, concurrency=(1,),
            tolerance=tolerance,
        )
    ]  # fmt: skip
    position = 0
    for number in range(max(map(len, values))):
        for name, boots in zip(NAMES, values, strict=True):
            if number >= len(boots):
                continue
            position += 1
            where = {
                "boot": f"b{number + 1:02d}-{name}", "variant": name, "cache": "cold", "block": number + 1,
                "position": position,
            }  # fmt: skip
            trial = {"concurrency": 1, "window_s": 1.0, "tokens": 1.0, "valid": True}
            found += [TrialEnded(**where, **trial, tokens_per_s=value) for value in boots[number]]
            found.append(BootEnded(**where, boot_outcome="completed", why=""))
    return found


def test_noise_within_and_between_boots_is_told_apart_by_hand():
    # Logs: boots at 0, 0.02 and 0.04; windows 0.01 either side of them. Boot means of a twin have sd 0.02, of the
    # windows every boot has sd 0.01·√2.
    boots = [[math.exp(middle - 0.01), math.exp(middle + 0.01)] for middle in (0.0, 0.02, 0.04)]
    (level,) = noise.measure(ledger([boots, boots]), plan()).levels
    assert level.between == pytest.approx(0.02)
    assert level.within == pytest.approx(0.01 * math.sqrt(2))
    assert level.boots_alone == pytest.approx(math.sqrt(0.02**2 - 0.0002 / 2))
    # Four degrees of freedom: two from each twin.
    assert level.upper == pytest.approx(0.02 * stats.spread_factors(5)[1])
    # Of 20 ways to deal 0, 0, 0.02, 0.02, 0.04, 0.04 the four like 0, 0, 0.02 against the rest have p = 0.047.
    assert (level.p, level.alarms) == (pytest.approx(1.0), pytest.approx(4 / 20))


def test_windows_that_scatter_more_than_boots_leave_nothing_between_and_say_so():
    boots = [[80.0, 125.0]] * 3
    (level,) = noise.measure(ledger([boots, boots]), plan()).levels
    assert (level.boots_alone, level.clipped) == (0.0, True)
    assert "(clipped at 0)" in noise.report(noise.measure(ledger([boots, boots]), plan()))


def test_a_tolerance_below_the_noise_is_warned_about_and_one_above_it_is_not():
    wide = [[[100.0], [70.0], [130.0]], [[90.0], [140.0], [75.0]]]
    assert "below the rig's noise" in " ".join(noise.warnings(noise.measure(ledger(wide), plan())))
    calm = [[[100.0], [100.5], [99.5]], [[100.2], [99.8], [100.1]]]
    found = noise.measure(ledger(calm), plan())
    assert noise.warnings(found) == ()
    assert "not told apart, as it should be" in noise.report(found)
    assert found.refuted == pytest.approx(0.0, abs=1e-9)


def test_twins_that_are_told_apart_are_a_false_alarm():
    apart = [[[100.0], [100.1], [99.9]], [[90.0], [90.1], [89.9]]]
    found = noise.measure(ledger(apart), plan())
    assert found.told_apart
    assert "identical variants were told apart" in " ".join(noise.warnings(found))
    # Of the 20 ways to deal six boots to two names only the two true ones tell them apart.
    assert found.levels[0].alarms == pytest.approx(2 / 20)


def test_one_boot_each_or_none_gives_no_floor_and_no_number_is_made_up():
    found = noise.measure(ledger([[[100.0]], [[101.0]]]), plan())
    assert (found.floor, found.refuted, found.levels[0].between, found.levels[0].alarms) == (None, None, None, None)
    assert "takes two of a twin" in noise.report(found)
    assert noise.measure(ledger([[[100.0]], []])[:1], plan()).levels == ()


def test_the_chance_of_a_false_refutation_is_what_simulation_gives():
    rng = np.random.default_rng(1)
    for n, sigma in ((3, 0.05), (3, 0.1), (6, 0.06)):
        boots = rng.normal(0, sigma, (40_000, n))
        refuted = np.mean(boots.std(axis=1, ddof=1) * stats.spread_factors(n)[0] > 0.05)
        assert stats.refute_chance(n, sigma, 0.05) == pytest.approx(refuted, abs=0.01)
    assert stats.refute_chance(1, 0.1, 0.05) is None
    assert stats.refute_chance(3, 0.0, 0.05) == 0.0
