"""docs/causes.md, made from the rules: `python -m orchestrator.journal.page > docs/causes.md`."""

from __future__ import annotations

from orchestrator.journal.classifier import DEFAULT
from orchestrator.journal.rules import Rule, RuleSet

_HEAD = """# What killed this boot: every cause, and what to do about it

Made from `orchestrator/journal/*.toml` by `python -m orchestrator.journal.page > docs/causes.md`; a test holds it
current.

The classifier answers with an outcome (`startup_failure`, `fatal`, `benign`), a phase and one of these causes. Rules of
judgement: the earliest own fault wins; wrappers ("Engine core initialization failed", "EngineDeadError") never are a
cause; kernel evidence about our own processes beats the program's words, and about another process it is benign; a stop
that was requested before the first alarming line makes the rest shutdown noise; an end with status 0 that nobody asked
for, after serving, is a crash; when nothing names a root, the answer says so and shows the most telling entries.
"""


def page(rules: RuleSet = DEFAULT) -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for outcome, title in (("failure", "Failures"), ("benign", "Benign: looks alarming and is not")):
        parts.append(f"## {title}\n")
        parts += [_cause(cause.slug, rules) for cause in rules.causes.values() if cause.outcome == outcome]
    wrappers = sorted({rule.name for rule in rules.rules if rule.kind == "death"})
    parts.append(f"## Wrappers\n\nThese say that something died, never why: {', '.join(wrappers)}.\n")
    return "\n".join(parts)


def _cause(slug: str, rules: RuleSet) -> str:
    cause = rules.causes[slug]
    known = [rule for rule in rules.rules if slug in (rule.cause, rule.if_dead, *rule.by_phase.values())]
    lines = [f"### {slug}\n", cause.definition, ""]
    if cause.outcome == "failure":
        again = {True: "yes", False: "no, another boot may pass", None: "it depends"}[cause.permanent]
        lines += [f"- **Do:** {cause.advice}", f"- **Would the same boot fail again?** {again}"]
    else:
        lines.append(f"- {cause.advice}")
    named = [rule for rule in known if rule.kind != "frame"]
    if named:
        lines.append(f"- **Rules:** {', '.join(_named(rule) for rule in named)}")
        lines.append(f"- **For example:** `{_example(named[0])}`")
    return "\n".join([*lines, ""])


def _named(rule: Rule) -> str:
    return f"{rule.name} ({rule.source})"


def _example(rule: Rule) -> str:
    text = rule.matches[0].replace("`", "'")
    return text if len(text) <= 160 else f"{text[:159]}…"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  this module's one output is the page itself
