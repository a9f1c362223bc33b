"""Rules as data: each brings its witnesses, users add theirs, and the page of causes is current."""

import re
from pathlib import Path

import pytest
from journal_support import said

from orchestrator.errors import MatrixError, ProblemsError
from orchestrator.journal import Classifier, main_answer, rules_from
from orchestrator.journal.classifier import DEFAULT
from orchestrator.journal.page import page
from orchestrator.journal.rules import PHASES, words_of
from orchestrator.matrix import differences, load_matrix, parse_matrix

MINE = {
    "name": "FluxCapacitor",
    "pattern": r"flux capacitor .* charge",
    "words": ["capacitor"],
    "cause": "engine_hang",
    "sticky": True,
    "matches": ["ERROR 11-30 14:51:53 [x.py:1] flux capacitor lost its charge"],
    "ignores": ["ERROR 11-30 14:51:53 [x.py:1] flux capacitor ready"],
}


@pytest.mark.parametrize("rule", DEFAULT.rules, ids=lambda rule: rule.name)
def test_each_shipped_rule_fits_its_witnesses_and_none_of_its_near_misses(rule):
    assert rule.matches
    assert rule.ignores
    assert all(rule.fits(text) for text in rule.matches)
    assert not any(rule.fits(text) for text in rule.ignores)


@pytest.mark.parametrize("rule", DEFAULT.rules, ids=lambda rule: rule.name)
def test_each_shipped_rule_is_found_by_its_words_so_that_other_lines_cost_nothing(rule):
    assert rule.words
    assert all(set(rule.words) & set(words_of(text)) for text in rule.matches)


def test_the_witnesses_of_a_fault_are_not_taken_by_a_rule_that_stands_before_it():
    taken = []
    for rule in DEFAULT.rules:
        if rule.kind != "fault":
            continue
        for text in rule.matches:
            first = next(
                (
                    other
                    for other in DEFAULT.rules
                    if other.transport == rule.transport
                    and other.kind not in ("phase", "served", "ready", "frame")
                    and other.fits(text)
                ),
                None,
            )
            if first is not rule:
                taken.append(f"{rule.name}: {first.name} takes {text!r}")
    assert taken == []


def test_frames_are_found_by_names_alone_because_their_shape_is_remembered_without_digits():
    for rule in DEFAULT.rules:
        if rule.kind == "frame":
            assert not re.search(r"[0-9]", re.sub(r"\{\d+,\d*\}", "", rule.pattern)), rule.name


def test_wrappers_name_no_cause_and_faults_name_one_of_the_vocabulary():
    for rule in DEFAULT.rules:
        if rule.kind == "death":
            assert rule.cause is None
        if rule.kind == "fault":
            assert rule.cause in DEFAULT.causes
        assert rule.phase is None or rule.phase in PHASES


def test_the_vocabulary_has_41_failures_and_16_benign_words_each_with_advice():
    causes = DEFAULT.causes.values()
    assert sum(cause.outcome == "failure" for cause in causes) == 41
    assert sum(cause.outcome == "benign" for cause in causes) == 16
    assert all(cause.advice and cause.definition for cause in causes)


def test_a_user_adds_a_rule_and_it_decides():
    mine = DEFAULT.extended(rules_from([MINE], source="matrix.yaml"))
    classifier = Classifier(mine)
    classifier.feed(said(MINE["matches"][0]))
    answer = classifier.answer()
    assert (answer.outcome, answer.cause) == ("startup_failure", "engine_hang")
    assert answer.evidence[0].rule == "FluxCapacitor"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"matches": []}, "no witnesses"),
        ({"ignores": []}, "no witnesses"),
        ({"matches": ["something else"]}, "does not fit its own witness"),
        ({"ignores": ["a flux capacitor at full charge"]}, "fits a line that it must not"),
        ({"pattern": "("}, "no regular expression"),
        ({"cause": "gremlins"}, "'gremlins' is no cause"),
        ({"phase": "lunch"}, "'lunch' is no phase"),
        ({"name": "lower case"}, "name"),
        ({"words": ["x1"]}, "runs of at least three letters"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_a_rule_that_cannot_be_trusted_is_refused_with_the_reason(change, words):
    with pytest.raises(ProblemsError) as refused:
        rules_from([{**MINE, **change}], source="matrix.yaml")
    assert words in str(refused.value)
    assert "matrix.yaml" in str(refused.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ProblemsError) as refused:
        rules_from([{**MINE, "cause": "gremlins"}, {**MINE, "phase": "lunch"}], source="matrix.yaml")
    assert len(refused.value.problems) == 2


def test_the_page_of_causes_is_current():
    shipped = Path(__file__).parent.parent / "docs" / "causes.md"
    assert shipped.read_text(encoding="utf-8") == page(), "run: python -m orchestrator.journal.page > docs/causes.md"


# --- rules of the user's own -----------------------------------------------------------------------------------------

HEAD = "boxes: {here: {unit: vllm.service}}\nvariants: {production: {}}\n"
STALE = HEAD + (
    "rules:\n"
    "  - reason: WeightsShareGone\n"
    "    pattern: 'Stale file handle'\n"
    "    cause: model_not_found\n"
    "    phase: weights\n"
    "    permanent: false\n"
    "    alarm: true\n"
    "    matches: [\"OSError: [Errno 116] Stale file handle: '/srv/x'\"]\n"
    "    ignores: ['a handle that is fresh']\n"
)
LINE = "(EngineCore pid=7) ERROR 11-30 14:51:53 [core.py:7] OSError: [Errno 116] Stale file handle: '/srv/x'"


def test_a_rule_of_matrix_yaml_decides_live_and_rings_and_changes_no_digest():
    matrix = parse_matrix(STALE)
    classifier = Classifier(DEFAULT.extended(matrix.rules))
    classifier.feed(said(LINE))
    assert (classifier.alarm.rule, classifier.answer().permanent) == ("WeightsShareGone", False)
    assert (classifier.answer().cause, classifier.answer().phase) == ("model_not_found", "weights")
    assert matrix.digest() == parse_matrix(HEAD).digest()
    assert differences(HEAD, matrix) == ()


def test_a_rule_with_a_benign_cause_makes_a_line_harmless():
    matrix = parse_matrix(
        STALE.replace("cause: model_not_found", "cause: benign_retry").replace("    alarm: true\n", "")
    )
    classifier = Classifier(DEFAULT.extended(matrix.rules))
    classifier.feed(said(LINE))
    assert (classifier.answer().outcome, classifier.answer().cause) == ("benign", "benign_retry")


def test_every_problem_of_every_rule_is_said_at_once_with_its_line():
    text = HEAD + (
        "rules:\n"  # line 3
        "  - reason: NoWitness\n"  # 4
        "    pattern: x\n"
        "    cause: gremlins\n"  # 6
        "    matches: []\n"  # 7
        "    ignores: [y]\n"
        "  - reason: Contradicted\n"  # 9
        "    pattern: '('\n"  # 10
        "    cause: engine_hang\n"
        "    matches: [x]\n"
        "    ignores: [y]\n"
        "  - reason: Contradicted\n"  # 14
        "    pattern: flux\n"
        "    cause: engine_hang\n"
        "    phase: lunch\n"  # 17
        "    matches: [capacitor]\n"  # 18
        "    ignores: [flux]\n"  # 19
        "  - reason: Half\n"  # 20: `pattern`, `cause`, `matches` and `ignores` are missing
    )
    with pytest.raises(MatrixError) as refused:
        parse_matrix(text)
    lines = [problem.split(":")[1] for problem in refused.value.problems]
    assert lines == ["6", "7", "10", "14", "17", "18", "19", "20", "20", "20", "20"]
    said_so = str(refused.value)
    for words in ("'gremlins' is no cause", "no witnesses", "no regular expression", "is there twice", "is no phase"):
        assert words in said_so


def test_a_rule_without_words_sees_numbers_that_differ_only_in_their_digits():
    rule = {**MINE, "pattern": "code 42", "words": [], "matches": ["code 42"], "ignores": ["code 43"]}
    classifier = Classifier(DEFAULT.extended(rules_from([rule], source="matrix.yaml")))
    for number in (40, 41, 42):
        classifier.feed(said(f"code {number}", number))
    assert [item.entry for item in classifier.answer().evidence] == [42]


def test_classify_uses_the_rules_of_the_matrix_that_it_is_given(tmp_path):
    (tmp_path / "matrix.yaml").write_text(STALE, encoding="utf-8")
    (tmp_path / "log").write_text(LINE + "\n", encoding="utf-8")
    rules = DEFAULT.extended(load_matrix(tmp_path / "matrix.yaml").rules)
    assert main_answer(tmp_path / "log", rules=rules).value["evidence"][0]["rule"] == "WeightsShareGone"
    assert main_answer(tmp_path / "log").value["evidence"][0]["rule"] != "WeightsShareGone"
