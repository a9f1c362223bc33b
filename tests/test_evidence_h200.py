"""The ledger of a real campaign (one H200, vLLM 0.26.0) is still read, and still says what its page says."""

from pathlib import Path

import pytest

from orchestrator.box.transports import connect
from orchestrator.ledger import read
from orchestrator.records import BootEnded, CampaignStarted, StepEnded, TrialEnded
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


def test_the_client_counts_what_the_server_counts_within_a_thousandth_and_the_log_line_within_a_hundredth():
    assert len(TRIALS) == 8
    for trial in TRIALS:
        counter = trial.tokens_per_s
        assert trial.rulers.usage == pytest.approx(counter, rel=0.001)
        assert trial.rulers.logger == pytest.approx(counter, rel=0.01)
        assert trial.rulers.chunks < 0.54 * counter


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
    assert {facts["timeline"]["kv_tokens"] for facts in up} == {398848}


def test_the_memory_was_back_within_half_a_second_of_every_stop_and_a_boot_cost_us_less_than_half_a_second():
    stops = [record for record in RECORDS if isinstance(record, StepEnded) and record.name == "stop"]
    assert max(record.facts["gpu_drained_s"] for record in stops) < 0.5
    assert max(record.ours_s for record in RECORDS if isinstance(record, BootEnded)) < 0.5


def test_who_is_asked_on_a_box_without_a_service_manager_is_not_told_of_a_service_that_is_taken_down(tmp_path):
    design = prepare(Options(matrix=FOLDER / "matrix.yaml", out=tmp_path))
    transport = connect(design.box)
    text = announcement(design, survey(design, transport))
    transport.close()
    first, second, *_ = text.splitlines()
    assert first == "h200 has no service that is taken down: the engine runs as a plain process."
    assert second.startswith("  6 boots of 3 variants, about ")
    assert "downtime" not in text
