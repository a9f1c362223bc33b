"""Text from journals, answers and names reaches every format as text and never as markup."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from markdown_it import MarkdownIt
from report_samples import sample

from orchestrator import report, verdict
from orchestrator.records import BootEnded, Evidence, JournalAnswered, TrialEnded
from orchestrator.report import canvas, figures, formats, markdown, text

HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(2)> </pre></details> | a | b | `tick` ```fence "
    "**bold** [link](http://evil.example) @everyone #1 &amp; \x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07x "
    "\u202etxt.exe \x00 \ud800 ]]> $x$ {{ 7 * 7 }} {% raw %}"
)
NAME = "<b>|`x`"
# A ledger and a series are UTF-8: half a surrogate pair comes only from a journal.
TOLD = HOSTILE.replace("\ud800", "")


def xml(text):
    """Our own file read back."""
    return ET.fromstring(text)  # noqa: S314 - our own file, read back


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    made = sample(tmp_path_factory.mktemp("gwen") / "boots")
    records = [_spoil(one) for one in made.records]
    for path in made.boots_dir.glob("*-spec-3/journal.jsonl"):
        path.write_bytes(b"".join(json.dumps({"MESSAGE": HOSTILE}).encode() + b"\n" for _ in range(12)))
    boots = tuple(
        boot.model_copy(update={"variant": NAME, "why": TOLD, "cause": TOLD}) if boot.variant == "spec-3" else boot
        for boot in made.series.boots
    )
    names = tuple(NAME if name == "spec-3" else name for name in made.series.variants)
    series = made.series.model_copy(update={"boots": boots, "variants": names, "production": NAME})
    return report.build_view(records, series, verdict.judge(series), made.boots_dir)


@pytest.fixture(scope="module")
def files(view):
    with pytest.MonkeyPatch.context() as patch:
        # Charts have a test of their own; drawing all of them here would only take time.
        patch.setattr(figures, "charts", lambda one: (figures.chart(one, "boots"),))
        return {name: render(view) for name, render in formats.FORMATS.items()}


def _spoil(record):
    changes: dict[str, object] = {}
    if getattr(record, "variant", None) == "spec-3":
        changes["variant"] = NAME
    if isinstance(record, JournalAnswered) and record.answer.outcome == "fatal":
        evidence = (Evidence(entry=4, rule="TritonOom", text=HOSTILE), Evidence(entry=8, rule=HOSTILE, text=HOSTILE))
        changes["answer"] = record.answer.model_copy(update={"evidence": evidence, "advice": HOSTILE, "cause": HOSTILE})
    if isinstance(record, BootEnded):
        changes |= {"why": HOSTILE, "cache_proof": HOSTILE}
    if isinstance(record, TrialEnded) and record.failed:
        changes["errors"] = {HOSTILE: 3}
    if isinstance(record, TrialEnded) and not record.valid:
        changes["invalid_reasons"] = (HOSTILE,)
    return record.model_copy(update=changes)


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.handlers, self.text = set(), [], []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_holds_it_as_text(files):
    tags = _Tags()
    tags.feed(files["report.html"])
    assert not tags.seen & {"script", "img", "iframe", "object", "embed"}
    assert tags.handlers == []
    said = "".join(tags.text)
    assert "<script>alert(1)</script>" in said
    assert "{{ 7 * 7 }}" in said


def test_a_hostile_name_is_text_in_a_chart_too(view):
    svg = figures.chart(view, "boots").svgs()[0]
    assert "&lt;b&gt;|`x`" in svg
    assert "<b>" not in svg


def test_a_dollar_sign_in_a_name_starts_no_mathematics():
    panel = canvas.Panel("a", 3, 2, lambda ax, _ink: ax.set_yticks([0], [figures.name_shown(r"$\frac{")]) and None)
    assert "frac" in canvas.svgs([panel], "x", rehearsal=False)[0]


def test_markdown_renders_it_as_text(files):
    content = files["report.md"]
    # Journal lines stand in fences, where nothing is markup; a renderer that allows HTML shows what is left.
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(content)
    tags = _Tags()
    tags.feed(page)
    assert not tags.seen & {"script", "img", "a", "b", "iframe"}
    assert "<script>alert(1)</script>" in "".join(tags.text)
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", content)
    assert not re.search(r"(?<!`)[@#](?=everyone|1)", outside)


def test_markdown_tables_keep_their_columns(view):
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown.render(view))
    for table in re.findall(r"<table>.*?</table>", page, re.DOTALL):
        widths = {len(re.findall(r"<t[hd][ >]", row)) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)}
        assert len(widths) == 1


def test_a_fence_cannot_be_closed_from_inside():
    block = markdown.fenced(["before", "`````", "````text", "after"])
    assert block.startswith("``````text\n")
    assert MarkdownIt().parse(block)[0].content == "before\n`````\n````text\nafter\n"


@pytest.mark.parametrize(
    "start", ["# no heading", "- no list", "+ no list", "1. no list", "> no quote", "=== no", "--- no"]
)
def test_a_sentence_begins_no_block(start):
    tokens = [token.type for token in MarkdownIt().parse(markdown.escape(start))]
    assert tokens == ["paragraph_open", "inline", "paragraph_close"]


def test_a_number_stays_a_number():
    assert [markdown.escape(text) for text in ("107.7", "3", "-0.5 %")] == ["107.7", "3", "\\-0.5 %"]


def test_junit_stays_well_formed(view):
    root = xml(formats.FORMATS["junit.xml"](view))
    case = next(case for case in root.iter("testcase") if case.get("name") == NAME)
    assert "<script>alert(1)</script>" in case.find("failure").text


def test_a_spreadsheet_is_given_no_formula(view):
    spoiled = list(csv.reader(io.StringIO(formats.FORMATS["cells.csv"](view))))
    assert len({len(row) for row in spoiled}) == 1
    from_name = sample(boots=1)
    series = from_name.series.model_copy(update={"experiment": "=HYPERLINK(1)"})
    rows = report.build_view((), series, verdict.judge(series), None)
    assert "\n'=HYPERLINK(1)," in formats.FORMATS["cells.csv"](rows)


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_no_format_holds_a_control_character(files, name):
    content = files[name]
    if name == "verdicts.json":
        content = json.dumps(json.loads(content), ensure_ascii=True)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", content)
    content.encode("utf-8")


def test_the_terminal_is_sent_no_escape_and_reads_no_markup(view):
    verdicts = view.verdicts
    odd = verdicts.variants[0].model_copy(update={"name": "[red]x[/red]\x1b[2J"})
    shown = text.plain(verdicts.model_copy(update={"variants": (odd,)}))
    assert "[red]x[/red]" in shown
    assert "\x1b" not in shown
