"""junit.xml: one testcase a variant. REJECTED fails with its reasons, UNDECIDED is skipped, all others pass.

DOMINATED passes: it is slower, not broken. Whether CI shall be red is `invoke gate`'s to say.
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from orchestrator.report import words
from orchestrator.report.model import VariantView, View

MOST_LINES = 24


def render(view: View) -> str:
    """The whole document."""
    verdicts = view.verdicts
    counts = {
        "tests": str(len(view.variants)),
        "failures": str(sum(one.verdict.verdict == "REJECTED" for one in view.variants)),
        "errors": "0",
        "skipped": str(sum(one.verdict.verdict == "UNDECIDED" for one in view.variants)),
    }
    root = Element("testsuites", {"name": "coldboot", **counts})
    name = words.clean(verdicts.experiment)
    suite = SubElement(root, "testsuite", {"name": f"{name} ({words.REHEARSAL})" if view.rehearsal else name, **counts})
    properties = SubElement(suite, "properties")
    for key, value in (
        ("stamp", words.REHEARSAL if view.rehearsal else "measured"),
        ("box", verdicts.box),
        ("winner", verdicts.winner),
        ("provisional", None if verdicts.provisional is None else str(verdicts.provisional).lower()),
        ("production", verdicts.production),
        ("answer", view.headline),
    ):
        if value is not None:
            SubElement(properties, "property", {"name": key, "value": words.clean(value)})
    for variant in view.variants:
        _case(suite, view, variant)
    indent(root, " ")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n'


def _case(suite: Element, view: View, variant: VariantView) -> None:
    verdict = variant.verdict
    spent = [
        boot.ended.seconds or 0.0 for boot in view.boots if boot.variant == verdict.name and boot.ended is not None
    ]
    case = SubElement(
        suite,
        "testcase",
        {
            "classname": words.clean(f"coldboot.{view.verdicts.experiment}"),
            "name": words.clean(verdict.name),
            "time": f"{sum(spent):.3f}",
        },
    )
    why = words.clean(verdict.sentence)
    if verdict.verdict == "REJECTED":
        reasons = ", ".join(verdict.reasons)
        failure = SubElement(case, "failure", {"message": words.clean(f"REJECTED: {reasons}"), "type": reasons})
        failure.text = "\n".join((why, *variant.notes, *_telling(variant)))
    elif verdict.verdict == "UNDECIDED":
        SubElement(case, "skipped", {"message": f"UNDECIDED: {why}" if why else "UNDECIDED"})
    out = SubElement(case, "system-out")
    cells = (f"at {cell.verdict.level}: {cell.long}" for cell in variant.cells)
    agreed = dict.fromkeys(cell.agreement for cell in variant.cells if cell.agreement is not None)
    stamp = (words.REHEARSAL,) if view.rehearsal else ()
    out.text = "\n".join((*stamp, f"{verdict.verdict}. {why}", *cells, *agreed))


def _telling(variant: VariantView) -> list[str]:
    lines = [
        f"{one.boot} [{line.rule}] {line.text}"
        for one in variant.evidence
        for line in one.lines
        if line.rule is not None
    ]
    return lines[:MOST_LINES]
