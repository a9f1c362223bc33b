"""The rehearsal box's arithmetic: memory, graphs, speed, acceptance, and the lottery of kernels."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from statistics import mean, stdev

import pytest

from orchestrator.rehearsal import flags, personality, state
from orchestrator.rehearsal.memory import Fit, Tactic, capture_sizes, decode_sizes, make_ledger
from orchestrator.rehearsal.speed import Pace, acceptance

BOX = personality.load()
FITS, THRASHES, REFUSED = Fit.FITS, Fit.THRASHES, Fit.REFUSED


def settings(tokens=0, **changes):
    words = ["--tensor-parallel-size=2", "--gpu-memory-utilization=0.97", "--max-model-len=98304"]
    words += ["--max-num-seqs=128", "--kv-cache-dtype=fp8"]
    if tokens:
        words += ["--spec-method=qwen3_5_mtp", f"--spec-tokens={tokens}"]
    return replace(flags.parse(words, BOX, {}), **changes)


def ledger(tokens, tactic=Tactic.SINGLE, *, loaded=False, **changes):
    return make_ledger(settings(tokens, **changes), BOX.memory, BOX.tactics, loaded=loaded, tactic=tactic)


def pace(tokens, tactic=Tactic.SINGLE, **changes):
    made = ledger(tokens, tactic, **changes)
    return Pace(BOX.speed, made, tactic, settings(tokens, **changes).captures)


def steady(tokens, streams, tactic=Tactic.SINGLE):
    """Tokens per second of `streams` that only decode."""
    drafts = acceptance(BOX.speed, tokens)
    accepted = sum(drafts.next() for _ in range(2000)) / 2000
    step = pace(tokens, tactic).step(streams, 0)
    return (1 if step.single else streams * (1 + accepted)) / step.seconds


# --- memory -----------------------------------------------------------------------------------------------------------


def test_16_sequences_with_one_draft_capture_11_and_6_graphs_as_on_the_h200():
    small = settings(1, max_num_seqs=16)
    assert capture_sizes(small) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_sizes(small) == (2, 4, 8, 16, 24, 32)


def test_128_sequences_with_three_drafts_capture_51_and_49_graphs_as_on_the_h200():
    assert len(capture_sizes(settings(3))) == 51
    assert len(decode_sizes(settings(3))) == 49


@pytest.mark.parametrize(("tokens", "graphs"), [(0, 19), (1, 34), (2, 13), (3, 49), (5, 15), (7, 48), (8, 5)])
def test_graphs_for_uniform_decode_follow_from_divisibility(tokens, graphs):
    assert len(decode_sizes(settings(tokens))) == graphs


def test_097_of_24_gib_leaves_512_mib_beside_the_budget():
    assert ledger(0).headroom == pytest.approx(24576 * 0.03 - 225)
    assert 512 < ledger(0).headroom < 513


@pytest.mark.parametrize(
    ("tokens", "cold"),
    [
        (0, "serves"),
        (1, "serves"),
        (2, "serves"),
        (3, "dies"),
        (4, "serves"),
        (5, "serves"),
        (7, "dies"),
        (8, "serves"),
    ],
)
def test_only_variants_with_many_graphs_have_no_room_for_the_kernels_of_a_cold_first_request(tokens, cold):
    spare = ledger(tokens).spare
    assert (spare >= BOX.memory.triton_cold_mib) == (cold == "serves")
    assert spare >= BOX.memory.triton_warm_mib


@pytest.mark.parametrize(
    ("tokens", "tactic", "expected"),
    [
        (1, Tactic.SINGLE, (FITS, FITS, FITS, FITS)),
        (2, Tactic.SINGLE, (FITS, FITS, FITS, FITS)),
        (3, Tactic.SINGLE, (FITS, FITS, FITS, FITS)),
        (5, Tactic.SINGLE, (FITS, FITS, THRASHES, REFUSED)),
        (8, Tactic.FUSED, (FITS, FITS, FITS, REFUSED)),
        (8, Tactic.SPLIT, (FITS, FITS, THRASHES, REFUSED)),
    ],
)
def test_the_seeds_table_of_what_fits_at_1_2_4_and_8_streams(tokens, tactic, expected):
    assert tuple(ledger(tokens, tactic).fit(streams) for streams in (1, 2, 4, 8)) == expected


def test_loaded_code_leaves_22_mib_more_for_the_kv_cache_than_compiled_code():
    assert ledger(1, loaded=True).kv - ledger(1).kv == pytest.approx(22)
    assert ledger(1, loaded=True).kv_tokens > ledger(1).kv_tokens


def test_a_token_of_kv_cache_takes_16_kib_on_each_of_two_cards():
    made = ledger(0)
    assert made.kv_token_bytes == 16384
    assert made.kv_tokens == int(made.kv * 64) // 16 * 16


def test_an_explicit_kv_size_moves_the_headroom_by_what_it_leaves():
    assert ledger(1, kv_cache_memory_bytes=2**30).headroom == pytest.approx(ledger(1).headroom + ledger(1).kv - 1024)


def test_without_graphs_nothing_is_captured():
    made = ledger(3, captures=False)
    assert (made.sizes, made.decode, made.graphs) == ((), (), 0)


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "streams", "tactic", "rate", "within"),
    [
        (0, 1, Tactic.SINGLE, 36.6, 0.05),  # the seed's words; its no-spec was never counted in tokens
        (0, 8, Tactic.SINGLE, 233.1, 0.05),
        (1, 1, Tactic.SINGLE, 66.9, 0.03),  # counter delta
        (1, 8, Tactic.SINGLE, 339.9, 0.08),  # counter delta, diluted by prompts
        (3, 1, Tactic.SINGLE, 46.7 / 0.7, 0.08),
        (5, 1, Tactic.SINGLE, 44.1 / 0.7, 0.08),
        (5, 4, Tactic.SINGLE, 10.7 / 0.7, 0.2),
        (8, 1, Tactic.FUSED, 124.8 / 0.7, 0.15),
        (8, 1, Tactic.SPLIT, 46.8 / 0.7, 0.18),
    ],
)
def test_rates_are_those_of_the_seed(tokens, streams, tactic, rate, within):
    assert steady(tokens, streams, tactic) == pytest.approx(rate, rel=within)


def test_the_two_kernels_differ_by_2_to_3_and_more_with_four_streams():
    assert 2.0 < steady(8, 1, Tactic.FUSED) / steady(8, 1, Tactic.SPLIT) < 3.0
    assert 2.5 < steady(8, 4, Tactic.FUSED) / steady(8, 4, Tactic.SPLIT) < 4.0


def test_two_drafts_are_plausible_between_one_and_three():
    for streams in (1, 2, 4, 8):
        low, high = sorted((steady(1, streams), steady(3, streams)))
        assert low * 0.9 < steady(2, streams) < high * 1.1


def test_five_drafts_collapse_at_four_streams_to_one_token_a_step():
    step = pace(5).step(4, 0)
    assert (step.single, step.drafting) == (True, False)
    assert pace(5).step(3, 64, 4).single  # the fourth holds its memory while its prompt is computed
    assert steady(5, 4) < steady(5, 1) / 3


def test_prompts_cost_time_by_their_length():
    steps = [pace(1).step(4, tokens).seconds for tokens in (0, 512, 1024)]
    assert [round((b - a) * 1000, 2) for a, b in pairwise(steps)] == [10.24, 10.24]


def test_without_graphs_a_step_takes_1_3_times_as_long():
    assert pace(0, captures=False).step(1, 0).seconds == pytest.approx(1.3 * pace(0).step(1, 0).seconds)


def test_acceptance_meets_its_probabilities_and_is_smooth_in_every_hundred_steps():
    drafts = acceptance(BOX.speed, 8)
    counts = [drafts.next() for _ in range(5000)]
    for position in range(8):
        expected = BOX.speed.accept_first * BOX.speed.accept_next**position
        assert sum(count > position for count in counts) / 5000 == pytest.approx(expected, abs=0.002)
    sums = [sum(counts[start : start + 100]) for start in range(0, 5000, 100)]
    assert stdev(sums) < 0.01 * mean(sums)  # dice would give 4.5 %


# --- the lottery ------------------------------------------------------------------------------------------------------


def test_the_default_seed_picks_the_fast_kernel_first_and_the_slow_one_next():
    picks = [state.pick(boot, 9, BOX.tactics.tile_rows, BOX.tactics.seed) for boot in range(2)]
    assert picks == [Tactic.FUSED, Tactic.SPLIT]


@pytest.mark.parametrize("seed", range(20))
def test_any_three_boots_in_a_row_show_both_kernels(seed):
    picks = [state.pick(boot, 9, 8, seed) for boot in range(300)]
    assert all(len(set(picks[start : start + 3])) == 2 for start in range(298))


def test_up_to_eight_rows_there_is_no_choice():
    assert {state.pick(boot, 8, 8, 4) for boot in range(50)} == {Tactic.SINGLE}


def test_only_flags_that_change_speed_or_memory_change_the_configuration():
    base = settings(8)
    same = replace(base, port=1, host="::", served_names=("x",), api_keys=("k",), uvicorn_level="error", seed=7)
    assert state.configuration_digest(base) == state.configuration_digest(same)
    others = [settings(5), replace(base, max_num_seqs=64), replace(base, gpu_memory_utilization=0.9)]
    assert len({state.configuration_digest(each) for each in (base, *others)}) == 4


def test_boots_at_the_same_time_get_different_numbers(tmp_path):
    with ProcessPoolExecutor(2) as pool:
        numbers = sorted(pool.map(state.next_boot, ["d"] * 40, [tmp_path] * 40))
    assert numbers == list(range(40))


def test_a_broken_counter_begins_again(tmp_path):
    (tmp_path / "boots-d").write_text("nonsense\n")
    assert [state.next_boot("d", tmp_path) for _ in range(2)] == [0, 1]


def test_boots_spread_by_the_personalitys_three_tenths_of_a_percent():
    factors = [state.boot_factor("d", boot, 4, 0.003) for boot in range(2000)]
    assert mean(factors) == pytest.approx(1, abs=0.0003)
    assert stdev(factors) == pytest.approx(0.003, rel=0.05)


# --- the personality --------------------------------------------------------------------------------------------------


def test_a_personality_file_replaces_single_constants(tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_text("max_num_seqs = 7\n[memory]\nother_process_mib = 600.0\n")
    monkeypatch.setenv("COLDBOOT_REHEARSAL_PERSONALITY", str(file))
    mine = personality.load()
    assert (mine.max_num_seqs, mine.memory.other_process_mib) == (7, 600.0)
    assert replace(mine.memory, other_process_mib=0.0) == BOX.memory


def test_an_unknown_constant_is_an_error(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[speed]\nwarp = 9\n")
    with pytest.raises(TypeError, match="warp"):
        personality.load(file)
