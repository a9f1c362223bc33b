"""The recorded cases: what the classifier must say about 100 reports, 12 whole logs of a GPU, and three of a CPU."""

import re
from collections import defaultdict

import pytest
from journal_support import DATA, answer_of, cases, entries_of

from orchestrator.journal import Classifier, Rule, RuleSet, classify, main_answer
from orchestrator.journal.classifier import DEFAULT
from orchestrator.journal.lines import parse
from orchestrator.journal.rules import words_of

PUBLIC = cases("journal.jsonl")
GPU = cases("real_gpu.jsonl.gz")
COMPOSED = cases("composed.jsonl")
UNSEEN = cases("unseen.jsonl")


def scores(known):
    wrong = defaultdict(list)
    for case in known:
        answer = answer_of(case)
        for key in ("outcome", "cause", "phase"):
            if getattr(answer, key) != case["expected"][key]:
                wrong[key].append(f"{case['id']}: {getattr(answer, key)} instead of {case['expected'][key]}")
    return wrong


@pytest.mark.parametrize("known", [PUBLIC, GPU, COMPOSED, UNSEEN], ids=["public", "gpu", "composed", "unseen"])
def test_all_outcomes_98_percent_of_causes_and_95_percent_of_phases_are_right(known):
    wrong = scores(known)
    assert wrong["outcome"] == []
    assert len(wrong["cause"]) <= 0.02 * len(known), wrong["cause"]
    assert len(wrong["phase"]) <= 0.05 * len(known), wrong["phase"]


@pytest.mark.parametrize("case", [*PUBLIC, *GPU, *COMPOSED, *UNSEEN], ids=lambda case: case["id"])
def test_no_alarm_rings_in_a_benign_case_and_one_rings_where_an_engine_wrapper_or_exit_stands(case):
    classifier = Classifier()
    for entry in entries_of(case):
        classifier.feed(entry)
    if case["expected"]["outcome"] == "benign":
        assert classifier.alarm is None
    elif any(
        re.search(r"EngineCore (failed to start|encountered a fatal)|Main process exited", str(entry["MESSAGE"]))
        for entry in case["entries"]
    ):
        assert classifier.alarm is not None


@pytest.mark.parametrize("case", [*PUBLIC, *GPU, *COMPOSED, *UNSEEN], ids=lambda case: case["id"])
def test_every_prefix_of_every_case_has_an_answer_and_the_evidence_points_at_its_entries(case):
    classifier = Classifier()
    entries = entries_of(case)
    for count, entry in enumerate(entries[:60], start=1):
        classifier.feed(entry)
        answer = classifier.answer()
        assert answer.cause in DEFAULT.causes
        assert all(0 <= item.entry < count for item in answer.evidence)
        assert len(answer.evidence) <= 10


def parts(pattern):
    """The alternatives of a pattern's top level."""
    found, depth, start, inside = [], 0, 0, False
    for place, sign in enumerate(pattern):
        if place and pattern[place - 1] == "\\" and (place < 2 or pattern[place - 2] != "\\"):
            continue
        inside = (inside or sign == "[") and sign != "]"
        depth += (sign == "(") - (sign == ")") if not inside else 0
        if sign == "|" and depth == 0 and not inside:
            found.append(pattern[start:place])
            start = place + 1
    return [*found, pattern[start:]]


def sources_of_parts():
    """For every alternative of every pattern: the sources (composed cases are one) that have a line which it fits."""
    lines = {(case.get("source", ""), entry.message) for case in [*PUBLIC, *COMPOSED] for entry in entries_of(case)}
    words = [(source, text, set(words_of(text))) for source, text in lines]
    found = {}
    for rule in DEFAULT.rules:
        own = [(source, text) for source, text, known in words if not known.isdisjoint(rule.words)]
        for part in parts(rule.pattern):
            regex = re.compile(part)
            found[rule.name, part] = {source for source, text in own if regex.search(parse(text).body)}
    return found


def without(source, found):
    """The shipped rules less every alternative of a pattern that among all cases only this source's lines fit."""
    rules = []
    for rule in DEFAULT.rules:
        known = parts(rule.pattern)
        kept = [part for part in known if found[rule.name, part] != {source}]
        if kept == known or rule.kind in ("phase", "served", "ready", "chain", "exit", "stop"):
            rules.append(rule)
        elif kept:
            rules.append(Rule.model_construct(**{**rule.model_dump(), "pattern": "|".join(kept)}))
    return RuleSet(tuple(rules), DEFAULT.causes)


def test_most_answers_carry_over_to_a_source_whose_own_wordings_are_left_out():
    """Every pattern that one thread alone supports is taken away before that thread's cases are asked.

    What is right then is right by another source's wording: a lower bound of what a source not yet seen would get.
    """
    found = sources_of_parts()
    sources = sorted({case["source"] for case in PUBLIC})
    right = {"outcome": 0, "cause": 0, "phase": 0}
    for source in sources:
        rules = without(source, found)
        for case in (case for case in PUBLIC if case["source"] == source):
            answer = classify(entries_of(case), rules)
            for key in right:
                right[key] += getattr(answer, key) == case["expected"][key]
    assert right["outcome"] >= 92, right
    assert right["cause"] >= 80, right
    assert right["phase"] >= 80, right


def test_a_crash_of_the_real_cpu_build_is_told_from_its_plain_output_alone():
    said = main_answer(DATA / "real" / "cpu26_s26b.out")
    assert (said.value["outcome"], said.value["cause"]) == ("fatal", "engine_dead_no_root")


def test_a_stop_of_the_real_cpu_build_with_two_api_servers_is_a_stop():
    said = main_answer(DATA / "real" / "cpu26_as.out")
    assert (said.value["outcome"], said.value["cause"]) == ("benign", "benign_shutdown")


def test_a_boot_that_was_cut_off_in_its_configuration_is_not_complete():
    said = main_answer(DATA / "real" / "cpu26_t1.out")
    assert said.value["outcome"] == "benign"
    assert said.value["complete"] is False
