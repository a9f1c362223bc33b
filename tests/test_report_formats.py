"""How it looks: every format of one report, read back."""

from __future__ import annotations

import csv
import errno
import io
import json
import multiprocessing
import os
import re
import signal
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from matplotlib.figure import Figure
from report_samples import LEVELS, VARIANTS, sample

from orchestrator import report, verdict
from orchestrator.errors import LedgerError
from orchestrator.records import BootResult, LevelResult, Series, VariantVerdict, Verdicts
from orchestrator.report import canvas, figures, formats, markdown, text
from orchestrator.report import csv as cells

TEXTS = ("verdicts.json", "report.md", "report.html", "junit.xml", "cells.csv", "boots.csv")
PICTURES = ("boots", "throughput", "latency", "rulers", "timeline", "order")


def xml(text):
    """Our own file read back."""
    return ET.fromstring(text)  # noqa: S314 - our own file, read back


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return sample(tmp_path_factory.mktemp("gwen") / "boots")


@pytest.fixture(scope="module")
def view(made):
    return made.view()


@pytest.fixture(scope="module")
def folder(view, tmp_path_factory):
    target = tmp_path_factory.mktemp("report") / "report"
    formats.write(view, target)
    return target


@pytest.fixture(scope="module")
def texts(folder):
    return {name: (folder / name).read_text("utf-8") for name in TEXTS}


def test_every_format_and_every_picture_is_written_and_nothing_else(folder):
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert there == sorted((*TEXTS, *(f"figures/{name}.png" for name in PICTURES)))


def test_no_file_holds_nan_or_infinity(texts):
    for name, content in texts.items():
        assert not re.search(r"\b(?:nan|[-+]?inf|infinity)\b", content, re.IGNORECASE), name


def test_the_rehearsal_is_stamped_in_every_format(texts, folder):
    assert json.loads(texts["verdicts.json"])["rehearsal"] is True
    assert "> **REHEARSAL.**" in texts["report.md"]
    assert '<div class="stamp" role="note"><p><strong>REHEARSAL</strong>' in texts["report.html"]
    assert texts["report.html"].count(">REHEARSAL<") >= len(PICTURES) + 1  # the page and every chart
    properties = {one.get("name"): one.get("value") for one in xml(texts["junit.xml"]).iter("property")}
    assert properties["stamp"] == "REHEARSAL"
    assert {row["stamp"] for row in csv.DictReader(io.StringIO(texts["cells.csv"]))} == {"REHEARSAL"}
    for name in PICTURES:
        assert (folder / "figures" / f"{name}.png").read_bytes().find(b"Comment\x00REHEARSAL") > 0


def test_what_was_measured_bears_no_stamp(monkeypatch):
    view = sample(rehearsal=False).view()
    monkeypatch.setattr(figures, "charts", lambda one: (figures.chart(one, "throughput"),))  # one chart stands for all
    for name, render in formats.FORMATS.items():
        assert "REHEARSAL" not in render(view), name
    assert b"REHEARSAL" not in figures.chart(view, "throughput").png()


def test_every_picture_is_visibly_stamped(view):
    for name in PICTURES:
        panels = figures.FIGURES[name](view)
        for rehearsal in (True, False):
            figure = canvas.lay_out(panels, 2, ink=canvas.LIGHT, title="a title", rehearsal=rehearsal)
            said = " ".join(one.get_text() for one in figure.texts)
            assert said.count("REHEARSAL") == (1 if rehearsal else 0), name
            # Each panel has its own, behind all that is drawn there.
            stamps = [[one for one in ax.texts if one.get_text() == "REHEARSAL"] for ax in figure.axes]
            assert [len(found) for found in stamps[: len(panels)]] == [int(rehearsal)] * len(panels), name
            assert all(one.get_zorder() < 0 for found in stamps for one in found), name


def test_the_stamp_covers_more_than_one_pixel_in_a_hundred(view):
    panels = figures.FIGURES["throughput"](view)
    stamped, plain = (canvas_pixels(canvas.png(panels, "t", rehearsal=rehearsal)) for rehearsal in (True, False))
    assert sum(a != b for a, b in zip(stamped, plain, strict=True)) > 0.01 * len(stamped)


def canvas_pixels(png: bytes) -> bytes:
    """The raw scan lines of a PNG."""
    data, place = b"", 8
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        if kind == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += 12 + length
    return zlib.decompress(data)


def test_the_mean_of_boots_that_do_not_reproduce_stands_nowhere(texts, view):
    spec8 = next(one for one in view.variants if one.verdict.name == "spec-8")
    for cell in spec8.cells:
        values = [point.value for point in cell.points if point.value is not None]
        if cell.verdict.reproducibility != "DOES_NOT_REPRODUCE":
            continue
        product = 1.0
        for value in values:
            product *= value
        for mean in (sum(values) / len(values), product ** (1 / len(values))):
            for name, content in texts.items():
                # Coordinates of charts stand in tags; what is said stands between them.
                said = re.sub(r"<[^>]*>", " ", content) if name == "report.html" else content
                assert f"{mean:.1f}" not in said, (name, mean)


def test_the_json_is_the_analysis_own_text(texts, made):
    assert texts["verdicts.json"] == verdict.to_json(made.verdicts)
    assert next(iter(json.loads(texts["verdicts.json"]))) == "schema"


def test_the_csv_has_its_documented_columns_and_one_row_a_cell_and_boot(texts):
    rows = list(csv.DictReader(io.StringIO(texts["cells.csv"])))
    assert tuple(rows[0]) == tuple(cells.COLUMNS)
    assert len(rows) == len(VARIANTS) * len(LEVELS) * 3
    assert len({(row["variant"], row["concurrency"], row["boot"]) for row in rows}) == len(rows)
    one = next(row for row in rows if (row["boot"], row["concurrency"]) == ("b01-spec-1", "4"))
    assert (one["status"], one["window_s"], one["tokens_per_step"]) == ("value", "30.0", "1.97")
    died = next(row for row in rows if row["variant"] == "spec-3")
    assert (died["status"], died["tokens_per_s"], died["why"]) == ("died", "", "triton_oom at first_request")


def test_the_columns_of_the_csv_stay():
    assert " ".join(cells.COLUMNS) == (
        "experiment box stamp variant verdict cache concurrency boot position status why tokens_per_s window_s tokens "
        "usage_per_s chunks_per_s words_per_s logger_tokens_per_s tokens_per_step ttft_p50_ms ttft_p99_ms itl_p50_ms "
        "itl_p99_ms e2e_p50_ms requests_sent requests_ok boot_outcome cache_proof cell_reproducibility cell_estimate "
        "cell_low cell_high cell_spread input_tokens"
    )


def test_the_boots_table_has_every_boot_and_says_which_count(texts):
    rows = {row["boot"]: row for row in csv.DictReader(io.StringIO(texts["boots.csv"]))}
    assert tuple(next(iter(rows.values()))) == tuple(cells.BOOT_COLUMNS)
    assert len(rows) == 16  # 15 that count, and the disturbed one
    assert (rows["b02-no-spec"]["counts"], rows["b02-no-spec"]["outcome"]) == ("false", "disturbed")
    assert (rows["b02-no-spec.r1"]["counts"], rows["b02-no-spec.r1"]["block"]) == ("true", "2")
    died = rows["b01-spec-3"]
    assert (died["journal_phase"], died["journal_cause"]) == ("first_request", "triton_oom")
    assert (died["kv_tokens"], died["weights_gib"], died["free_before_gib"]) == ("105472", "9.3", "")


def test_each_column_of_both_tables_holds_one_type(texts):
    texty = {"experiment", "box", "stamp", "variant", "verdict", "cache", "boot", "status", "why", "boot_outcome"}
    texty |= {"cache_proof", "cell_reproducibility", "outcome", "ended_at", "journal_outcome", "journal_phase"}
    texty |= {"journal_cause"}
    for name in ("cells.csv", "boots.csv"):
        for row in csv.DictReader(io.StringIO(texts[name])):
            for column, value in row.items():
                if column == "counts":
                    assert value in ("true", "false")
                elif value and column not in texty:
                    float(value)


def test_every_column_stands_in_the_reference():
    page = (Path(__file__).parent.parent / "docs" / "reference.md").read_text("utf-8")
    for columns in (cells.COLUMNS, cells.BOOT_COLUMNS):
        assert "".join(f"| `{column}` | {said} |\n" for column, said in columns.items()) in page


def test_junit_fails_the_rejected_and_passes_the_slower(texts):
    suite = xml(texts["junit.xml"]).find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "3", "0")
    failures = {case.get("name"): case.find("failure") for case in suite.iter("testcase")}
    assert {name for name, failure in failures.items() if failure is not None} == {"spec-3", "spec-5", "spec-8"}
    assert failures["spec-8"].get("message") == "REJECTED: does_not_reproduce, errors_under_load"
    assert "b01-spec-3 [TritonOom]" in failures["spec-3"].text


def test_junit_skips_the_undecided():
    one = VariantVerdict(
        name="a", verdict="UNDECIDED", boots=0, boots_failed=0, sentence="a is undecided: no boot ended."
    )
    series = sample(boots=1).series.model_copy(update={"boots": ()})
    verdicts = Verdicts(
        experiment="e",
        box=None,
        rehearsal=False,
        tolerance=0.05,
        boots_planned=None,
        winner=None,
        provisional=None,
        variants=(one,),
    )
    view = report.build_view((), series, verdicts, None)
    skipped = xml(formats.FORMATS["junit.xml"](view)).find("testsuite/testcase/skipped")
    assert skipped.get("message") == "UNDECIDED: a is undecided: no boot ended."
    for name, render in formats.FORMATS.items():
        assert render(view), name  # an experiment without any boot is a report too


def test_every_markdown_row_has_as_many_cells_as_its_header(texts):
    width = None
    for line in texts["report.md"].splitlines():
        if not line.startswith("|"):
            width = None
            continue
        count = len(re.findall(r"(?<!\\)\|", line))
        width = width or count
        assert count == width, line


def test_the_markdown_fits_into_a_comment_however_much_there_is(made):
    long = tuple(
        one.model_copy(update={"why": "x" * 5000}) if one.kind == "boot_ended" else one for one in made.records
    )
    rounds = [
        one.model_copy(update={"boot": f"{one.boot}.{number}"}) if hasattr(one, "boot") else one
        for number in range(12)
        for one in long
    ]
    view = report.build_view(rounds, made.series, made.verdicts, made.boots_dir)
    content = markdown.render(view)
    assert len(content) <= markdown.MOST_CHARACTERS
    assert "spec-1 wins" in content[:200]
    assert "report.html" in content[-200:]


class _Page(HTMLParser):
    """Collects ids, references to anything outside, and sections."""

    def __init__(self):
        super().__init__()
        self.ids, self.outside, self.sections, self.scripts = [], [], [], 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if "id" in found:
            self.ids.append(found["id"])
        for name in ("src", "href", "action", "srcset"):
            value = found.get(name)
            if value and not value.startswith(("#", "data:")):
                self.outside.append(value)
        if tag == "section":
            self.sections.append(found["id"])
        self.scripts += tag == "script"


def test_the_page_stands_alone(texts):
    page = _Page()
    page.feed(texts["report.html"])
    assert page.outside == []
    assert page.scripts == 0
    assert not re.search(r"@import|url\((?!#)|https?://", texts["report.html"])
    assert len(page.ids) == len(set(page.ids))
    assert " ".join(page.sections) == (
        "verdicts boots throughput latency boot_table rulers evidence answers order attribution provenance excluded"
    )
    assert len(texts["report.html"]) < 8 * 2**20


def test_every_reference_inside_a_chart_finds_its_target(texts):
    ids = set(re.findall(r'\bid="([^"]+)"', texts["report.html"]))
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', texts["report.html"]))
    assert {one or other for one, other in used} <= ids


def test_charts_in_the_page_take_every_colour_from_the_page(view):
    for svg in figures.chart(view, "boots").svgs():
        assert not re.search(r"#[0-9a-f]{6}\b", svg)
        assert "var(--ink)" in svg


def test_variants_differ_by_marker_and_not_only_by_colour(view):
    assert len({figures.marker(one) for one in view.variants}) == len(VARIANTS)
    assert len({figures.colour(one, canvas.LIGHT) for one in view.variants}) == len(VARIANTS)
    for ink in (canvas.LIGHT, canvas.DARK):
        for paint in (*ink.series, ink.text, ink.muted, ink.warn):
            assert contrast(paint, ink.paper) >= 3.0, paint  # WCAG 2.2, 1.4.11: graphical objects


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_hundred_boots_become_one_bar_a_variant(made):
    rounds = [
        one.model_copy(update={"boot": f"{one.boot}.{number}"}) if hasattr(one, "boot") else one
        for number in range(7)
        for one in made.records
    ]
    boots = tuple(
        boot.model_copy(update={"boot": f"{boot.boot}.{number}"}) for number in range(7) for boot in made.series.boots
    )
    many = report.build_view(rounds, made.series.model_copy(update={"boots": boots}), made.verdicts, None)
    few, crowded = (figures.FIGURES["timeline"](one)[0] for one in (made.view(), many))
    assert (few.title, crowded.title) == ("steps of each boot", "steps of the median boot")
    assert (few.height, crowded.height) == (pytest.approx(1.4 + 0.21 * 16), pytest.approx(1.4 + 0.21 * 5))


def test_each_chart_has_its_data_and_a_sentence_beside_it(view):
    for section in view.sections:
        if section.figure is not None:
            assert section.tables, section.key
            assert section.sentences, section.key


def test_the_same_report_twice_is_the_same_bytes(view, texts):
    for name, render in formats.FORMATS.items():
        assert render(view) == texts[name], name


def test_a_report_that_cannot_be_written_leaves_the_old_file_whole(view, tmp_path, monkeypatch):
    (tmp_path / "report.md").write_text("the report before", "utf-8")
    monkeypatch.setattr(formats, "FORMATS", {"report.md": formats.FORMATS["report.md"]})
    monkeypatch.setattr("pathlib.Path.replace", _refuse)
    with pytest.raises(LedgerError, match="the report cannot be written: no room"):
        formats.write(view, tmp_path)
    assert (tmp_path / "report.md").read_text("utf-8") == "the report before"
    assert not list(tmp_path.glob(".*"))


def _refuse(*_):
    raise OSError(28, "no room")


def test_a_picture_without_data_is_taken_away(made, tmp_path, monkeypatch):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "rulers.png").write_bytes(b"of an earlier report")
    monkeypatch.setattr(formats, "FORMATS", {})
    by_hand = report.build_view((), made.series, made.verdicts, None)
    written = formats.write(by_hand, tmp_path)
    assert sorted(path.stem for path in (tmp_path / "figures").iterdir()) == ["boots", "order", "throughput"]
    assert sorted(path.stem for path in written if path.suffix == ".png") == ["boots", "order", "throughput"]


def test_the_terminal_never_shows_a_warm_number_as_a_cold_one():
    trials = (LevelResult(concurrency=1, value=46.7),)
    boots = tuple(
        BootResult(boot=name, variant=name, cache=cache, block=1, position=1, outcome="completed", levels=trials)
        for name, cache in (("a", "cold"), ("b", "warm"))
    )
    shown = text.plain(verdict.judge(Series(experiment="e", boots=boots))).splitlines()
    rows = {line.split()[0]: line for line in reversed(shown) if "46.7" in line and "tok/s" not in line}
    assert "46.7 warm" in rows["b"]
    assert "warm" not in rows["a"]


def test_the_terminal_shows_boots_one_by_one_where_they_do_not_reproduce(made, view):
    shown = text.plain(made.verdicts, width=80)
    cell = next(one for one in view.variants if one.verdict.name == "spec-8").cells[0]
    lines = shown.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("spec-8"))
    for line, point in zip(lines[first:], cell.points, strict=False):
        assert f"{point.value:.1f}" in line
    assert "…" not in shown
    assert max(len(line) for line in lines) <= 80
    assert "spec-8: does_not_reproduce, errors_under_load" in lines
    assert shown.startswith("REHEARSAL")


# --- many boots ----------------------------------------------------------------------------------------------------


def test_of_hundreds_of_boots_150_are_drawn_the_slowest_and_the_fastest_among_them_and_the_page_says_so():
    levels = [(LevelResult(concurrency=1, value=100.0 + 0.1 * (7 * n % 400)),) for n in range(400)]
    boots = tuple(
        BootResult(boot=f"b{n:03d}", variant="a", cache="cold", block=n, position=n, outcome="completed", levels=one)
        for n, one in enumerate(levels)
    )
    series = Series(experiment="many", variants=("a",), concurrency=(1,), boots=boots)
    view = report.build_view((), series, verdict.judge(series))
    assert "Each mark is one boot; of more than 150 of a cell so many are drawn" in markdown.render(view)
    (panel,) = figures.chart(view, "boots").panels
    axes = Figure().subplots()
    panel.draw(axes, canvas.LIGHT)
    marks = max((line.get_xdata() for line in axes.lines), key=len)
    assert len(marks) == 150
    assert (min(marks), max(marks)) == (pytest.approx(100.0), pytest.approx(139.9))


# --- on another core -----------------------------------------------------------------------------------------------


def test_figures_are_drawn_in_a_process_of_their_own_and_here_where_that_one_could_not(tmp_path):
    def work(*, fails: bool) -> None:
        elsewhere = os.getpid() != here
        with (tmp_path / f"done-{fails}").open("a") as file:
            file.write("elsewhere\n" if elsewhere else "here\n")
        if fails and elsewhere:
            raise OSError(errno.ENOSPC, "no space left")

    here = os.getpid()
    for fails in (False, True):
        formats.Beside(lambda fails=fails: work(fails=fails)).finish()
    assert (tmp_path / "done-False").read_text() == "elsewhere\n"
    assert (tmp_path / "done-True").read_text() == "elsewhere\nhere\n"


def test_a_process_that_hangs_while_it_draws_is_ended_and_its_work_done_here(monkeypatch):
    monkeypatch.setattr(formats, "LIMIT_S", 0.05)
    here, done = os.getpid(), []

    def work() -> None:
        if os.getpid() != here:
            signal.pause()
        done.append("here")

    beside = formats.Beside(work)
    beside.finish()
    assert done == ["here"]
    assert multiprocessing.active_children() == []


def test_what_cannot_be_drawn_for_lack_of_room_is_told_once(view, tmp_path, monkeypatch, capfd):
    def full(_panels: object, _title: str, *, rehearsal: bool) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(canvas, "png", full)
    monkeypatch.setattr(formats, "FORMATS", {})
    with pytest.raises(LedgerError, match="the report cannot be written: No space left on device"):
        formats.write(view, tmp_path)
    assert capfd.readouterr() == ("", "")
