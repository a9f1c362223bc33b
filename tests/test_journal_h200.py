"""Twelve boots on a real H200, as Coldboot recorded them: what killed ten of them, and what the log says besides."""

import pytest
from journal_support import cases, entries_of

from orchestrator.journal import Classifier

CASES = {case["id"].removeprefix("h200-"): case for case in cases("h200.jsonl.gz")}


def fed(name):
    classifier = Classifier()
    for entry in entries_of(CASES[name]):
        classifier.feed(entry)
    return classifier


@pytest.mark.parametrize("name", CASES)
def test_each_real_death_has_its_outcome_phase_and_cause_and_rings_only_when_it_is_one(name):
    classifier, expected = fed(name), CASES[name]["expected"]
    answer = classifier.answer()
    assert {key: getattr(answer, key) for key in expected} == expected
    assert (classifier.alarm is None) == (expected["outcome"] == "benign")


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["expected"]["cause"].endswith("oom_torch")])
def test_the_first_evidence_of_a_death_by_memory_names_what_was_asked_for(name):
    assert "Tried to allocate" in fed(name).answer().evidence[0].text


def test_a_cold_boots_log_gives_weights_kv_cache_graphs_and_the_proof_that_it_compiled():
    timeline = fed("cold-boot").timeline()
    assert (timeline.compile_state, timeline.weights_gib, timeline.kv_gib) == ("compiled", 12.34, 56.3)
    assert (timeline.kv_tokens, timeline.num_batched_tokens, timeline.graph_capture_gib) == (398_848, 8192, 0.21)
    assert timeline.compile_s == 21.84
    assert timeline.warmup_s == pytest.approx(18.0, abs=0.1)


def test_a_boot_from_filled_caches_has_loaded_and_warms_up_in_a_second():
    timeline = fed("refused-prompts").timeline()
    assert timeline.compile_state == "loaded"
    assert timeline.warmup_s < 1.0


def test_what_shows_ready_dies_of_its_first_long_prompt_after_the_short_ones_were_answered():
    for name in ("first-long-prompt", "first-long-prompt-in-a-trial"):
        said = [str(entry["MESSAGE"]) for entry in CASES[name]["entries"]]
        ready = next(at for at, text in enumerate(said) if "Application startup complete" in text)
        death = next(at for at, text in enumerate(said) if "OutOfMemoryError" in text)
        answered = [text for text in said[ready:death] if "/v1/chat/completions" in text and "200 OK" in text]
        assert len(answered) >= 2


def test_a_killed_engine_core_leaves_no_cause_in_the_log_and_its_server_ends_in_order_within_a_second():
    answer = fed("engine-killed").answer()
    assert answer.evidence[0].text.endswith("engine core exited unexpectedly; starting cleanup")
    stamps = [int(entry["__REALTIME_TIMESTAMP"]) for entry in CASES["engine-killed"]["entries"]]
    first = next(
        at
        for at, entry in zip(stamps, CASES["engine-killed"]["entries"], strict=True)
        if "unexpectedly" in str(entry["MESSAGE"])
    )
    assert (stamps[-1] - first) / 1e6 < 1.0
