"""What killed this boot: the journal, entry by entry, against rules that are data. Pure but for `main_answer`."""

from orchestrator.journal.classifier import DEFAULT, Classifier, classify
from orchestrator.journal.command import Said, main_answer
from orchestrator.journal.entries import parse_json_line, read
from orchestrator.journal.rules import Rule, RuleSet, rules_from

__all__ = [
    "DEFAULT",
    "Classifier",
    "Rule",
    "RuleSet",
    "Said",
    "classify",
    "main_answer",
    "parse_json_line",
    "read",
    "rules_from",
]
