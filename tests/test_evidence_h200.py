"""The ledger of a real campaign (one H200, vLLM 0.26.0) is still read, and still says what its page says."""

import re
from pathlib import Path

import pytest

from orchestrator.box.transports import connect
from orchestrator.ledger import parse, read
from orchestrator.records import BootEnded, CampaignEnded, CampaignStarted, JournalAnswered, StepEnded, TrialEnded
from orchestrator.report import build_view
from orchestrator.survey import Options, announcement, prepare, survey
from orchestrator.verdict import judge, series_from_records

FOLDER = Path(__file__).parents[1] / "docs" / "evidence" / "h200"
RECORDS = read(FOLDER)
TRIALS = [record for record in RECORDS if isinstance(record, TrialEnded)]


def test_the_real_ledger_is_no_rehearsal_and_names_its_gpu_and_engine():
    started = next(record for record in RECORDS if isinstance(record, CampaignStarted))
    assert not started.rehearsal
    assert started.fingerprint["gpus"] == "1 × NVIDIA H200"
    assert started.fingerprint["engine_version"] == "0.26.0"


def test_three_drafts_win_and_the_full_card_is_rejected_for_dying_in_every_cold_boot():
    verdicts = judge(series_from_records(RECORDS))
    assert verdicts.winner == "spec-3"
    said = {variant.name: (variant.verdict, variant.reasons) for variant in verdicts.variants}
    assert said["spec-1"][0] == "DOMINATED"
    assert said["spec-3-full-card"] == ("REJECTED", ("cold_boot_fatal",))


def test_the_client_counts_what_the_server_counts_within_a_thousandth_and_the_log_line_within_12():
    assert len(TRIALS) == 8
    for trial in TRIALS:
        counter = trial.tokens_per_s
        assert trial.rulers.usage == pytest.approx(counter, rel=0.001)
        assert trial.rulers.logger == pytest.approx(counter, rel=0.012)
        assert trial.rulers.chunks < 0.54 * counter


def test_drafted_plus_accepted_is_what_was_emitted_with_one_draft_token_and_70_percent_too_much_with_three():
    page = (FOLDER.parents[1] / "why.md").read_text(encoding="utf-8")
    for trial in TRIALS:
        whole = trial.whole
        drafted, accepted, emitted = whole.spec_draft_tokens, whole.spec_accepted_tokens, whole.generation_tokens
        assert emitted == trial.client_tokens
        ratio = (drafted + accepted) / emitted
        assert ratio == pytest.approx(1 if trial.variant == "spec-1" else 1.712, abs=0.002)
        if trial.block == 1:
            numbers = (emitted, trial.client_tokens, drafted, accepted, drafted + accepted)
            row = " | ".join(f"{number:.0f}" for number in numbers)
            assert f"| {trial.variant[-1]} | {trial.concurrency} | {row} | " in page
    series = series_from_records(RECORDS)
    said = " ".join(build_view(RECORDS, series, judge(series)).section("rulers").sentences)
    assert "Drafted plus accepted tokens would have said × 1.00 (spec-1) and × 1.71 (spec-3) of the counter" in said
    # Random weights say hardly a space.
    assert "Counting words would have said 99.8 % less than the counter (× 0.002 to × 0.002, 8 trials)." in said


@pytest.mark.parametrize(("variant", "asked"), [("spec-1", 1.9), ("spec-3", 2.8)])
def test_a_step_gives_as_many_tokens_as_the_synthetic_acceptance_was_told_to_give(variant, asked):
    for trial in (trial for trial in TRIALS if trial.variant == variant):
        tokens = 1 + trial.deltas.spec_accepted_tokens / trial.deltas.spec_drafts
        assert tokens == pytest.approx(asked, rel=0.01)
        steps_per_s = trial.deltas.spec_drafts / trial.deltas.seconds
        assert tokens * steps_per_s == pytest.approx(trial.tokens_per_s, rel=0.002)


def test_each_boot_that_came_up_had_compiled_and_found_the_same_room_for_its_kv_cache():
    ready = [record for record in RECORDS if isinstance(record, StepEnded) and record.name == "ready"]
    up = [record.facts for record in ready if record.outcome == "ok"]
    assert [facts["cache_proof"] for facts in up] == ["compiled"] * 4
    assert {facts["timeline"]["kv_tokens"] for facts in up} == {398832}


def test_the_memory_was_back_within_half_a_second_of_every_stop_and_a_boot_cost_us_less_than_half_a_second():
    stops = [record for record in RECORDS if isinstance(record, StepEnded) and record.name == "stop"]
    assert max(record.facts["gpu_drained_s"] for record in stops) < 0.5
    assert max(record.ours_s for record in RECORDS if isinstance(record, BootEnded)) < 0.5


def test_where_each_start_went_is_told_from_its_first_second_on():
    timelines = [record.answer.timeline for record in RECORDS if isinstance(record, JournalAnswered)]
    assert len(timelines) == 6
    # The first boot's imports and its look at the model were not yet in the page cache.
    assert [round(one.imports_s) for one in timelines] == [28, 12, 13, 12, 12, 13]
    for one in (one for one in timelines if one.ready_s is not None):
        told = (one.imports_s, one.config_s, one.weights_s, one.compile_s, one.graph_capture_s, one.warmup_s)
        assert 0.9 < sum(told) / one.ready_s < 1.0


def test_each_window_tells_what_the_gpu_did_and_that_it_met_its_power_limit_for_one_sample_in_one_of_eight():
    held = {}
    for trial in TRIALS:
        (gpu,) = trial.gpu
        assert gpu.samples == pytest.approx(2 * trial.window_s, abs=1)
        assert (gpu.sm_clock_min_mhz, gpu.memory_clock_mhz) == (1965 if gpu.throttle else 1980, 3201)
        assert 402 < gpu.power_mean_w < 454 < gpu.power_limit_w
        assert 83 < gpu.utilisation_mean_percent <= 100
        held |= {(trial.boot, trial.concurrency): gpu.throttle} if gpu.throttle else {}
    assert held == {("b01-spec-3", 8): {"sw_power_cap": 0.0526}}
    assert all(trial.valid for trial in TRIALS)
    series = series_from_records(RECORDS)
    section = build_view(RECORDS, series, judge(series)).section("gpus")
    assert any("Something held a clock down in 1 of 8 windows" in sentence for sentence in section.sentences)
    assert section.tables[0].rows[1][:5] == ("spec-1", "8", "0", "2", "92 %")


def test_at_one_stream_half_of_the_bandwidth_wall_is_reached_and_at_eight_less():
    series = series_from_records(RECORDS)
    rows = build_view(RECORDS, series, judge(series)).section("wall").tables[0].rows
    shares = {row[:2]: row[-1] for row in rows}
    # 4800 GB/s ÷ 12.35 GiB = 362.0 steps a second.
    assert {row[3] for row in rows} == {"362.0"}
    assert (shares["spec-3", "1"], shares["spec-1", "1"], shares["spec-3", "8"]) == ("47 %", "54 %", "35 % to 37 %")


def test_each_test_that_stands_in_for_hardware_is_where_the_page_says():
    tests = FOLDER.parents[2] / "tests"
    page = (FOLDER / "README.md").read_text(encoding="utf-8").partition("## What no hardware has shown")[2]
    named = re.findall(r"`(test_\w+)\.py`(?: \(`(test_\w+)`\))?", page)
    assert sum(bool(test) for _, test in named) == 9
    for file, test in named:
        (path,) = tests.rglob(f"{file}.py")
        assert f"def {test}" in path.read_text(encoding="utf-8"), test


def ends(name, folder="deaths"):
    return parse((FOLDER / folder / f"{name}.records.jsonl").read_bytes()).records


def test_at_64_streams_the_clients_tokens_are_the_servers_to_the_token():
    trials = {one.concurrency: one for one in ends("h200-wide", "wide") if isinstance(one, TrialEnded)}
    assert {streams: (one.client_tokens, one.whole.generation_tokens) for streams, one in trials.items()} == {
        32: (107264, 107264),
        64: (180992, 180992),
    }
    assert [round(trials[streams].tokens_per_s) for streams in (32, 64)] == [6910, 11189]
    assert all(one.valid and one.rulers.usage == pytest.approx(one.tokens_per_s, rel=0.0012) for one in trials.values())


def test_streams_that_a_killed_server_cuts_are_counted_and_those_of_a_killed_engine_end_with_the_journals_word():
    trials = {one.variant: one for one in ends("h200-ends") if isinstance(one, TrialEnded)}
    assert trials["main-killed"].errors == {"cut_stream": 8, "connection_refused": 8}
    killed = trials["engine-killed"]
    assert (killed.requests_sent, killed.requests_ok, killed.errors) == (40, 32, {})
    assert killed.invalid_reasons == ("cancelled: the journal says EngineFatal",)


def test_what_is_killed_is_a_crash_and_what_somebody_suspended_is_disturbed_and_booted_again():
    ended = {one.boot.removesuffix("@as-is"): one for one in ends("h200-ends") if isinstance(one, BootEnded)}
    assert {name: (one.boot_outcome, one.died) for name, one in ended.items()} == {
        "b01-stopped": ("disturbed", False),
        "b01-stopped@as-is.r1": ("completed", False),
        "b01-engine-killed": ("crashed", True),
        "b01-main-killed": ("crashed", True),
    }
    assert ended["b01-stopped"].why.startswith("somebody suspended its processes: ")
    assert ended["b01-engine-killed"].why.startswith("engine_dead_no_root in load: ")
    assert ended["b01-main-killed"].why.startswith("sigkill_unattributed in load: ")
    stops = [one for one in ends("h200-ends") if isinstance(one, StepEnded) and one.name == "stop"]
    assert max(one.facts["gpu_drained_s"] for one in stops) < 0.5


def test_a_foreign_process_on_the_gpu_is_named_and_ends_the_campaign_after_three_boots_in_a_row():
    records = ends("h200-foreign")
    whys = [one.why for one in records if isinstance(one, BootEnded)]
    assert whys == ["no clean slate: process 1468 holds GPU memory"] * 3
    assert records[-1].kind == "campaign_ended"
    assert isinstance(records[-1], CampaignEnded)
    assert (records[-1].outcome, records[-1].restored) == ("failed", True)


def test_who_is_asked_on_a_box_without_a_service_manager_is_not_told_of_a_service_that_is_taken_down(tmp_path):
    design = prepare(Options(matrix=FOLDER / "matrix.yaml", out=tmp_path))
    transport = connect(design.box)
    text = announcement(design, survey(design, transport))
    transport.close()
    first, second, *_ = text.splitlines()
    assert first == "h200 has no service that is taken down: the engine runs as a plain process."
    assert second.startswith("  6 boots of 3 variants, about ")
    assert "downtime" not in text


def test_one_boot_of_one_variant_is_announced_in_the_singular(tmp_path):
    design = prepare(Options(matrix=FOLDER / "wide" / "h200-wide.yaml", out=tmp_path))
    transport = connect(design.box)
    lines = announcement(design, survey(design, transport)).splitlines()
    transport.close()
    assert lines[1].startswith("  1 boot of 1 variant, about ")
