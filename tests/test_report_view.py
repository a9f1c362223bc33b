"""What a report says, before any format: sentences, cells, evidence, exclusions, provenance."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report_samples import BASE, TRITON_EVIDENCE, TRITON_LINES, sample

from orchestrator import verdict
from orchestrator.records import (
    BootResult,
    CampaignStarted,
    Evidence,
    GpuUse,
    JournalAnswered,
    LevelResult,
    Series,
    TrialEnded,
)
from orchestrator.report import build_view, canvas, commands, evidence, figures, plain, wall, words
from orchestrator.report.formats import FORMATS
from orchestrator.report.model import Table


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return sample(tmp_path_factory.mktemp("gwen") / "boots")


@pytest.fixture(scope="module")
def view(made):
    return made.view()


def cell_of(view, variant, level):
    one = next(one for one in view.variants if one.verdict.name == variant)
    return next(cell for cell in one.cells if cell.verdict.concurrency == level)


def table_of(view, key, title):
    return next(table for table in view.section(key).tables if table.title.startswith(title))


def test_the_answer_names_winner_doubt_rejections_and_what_production_is(view):
    assert view.headline == "spec-1 wins, provisionally; 3 of 5 variants are rejected."
    assert "Production, spec-3, is itself REJECTED (cold_boot_fatal)" in view.sureness[0]


def test_what_is_known_of_the_winner_is_said_once_and_beside_its_name_only_what_the_top_leaves_out(view):
    bias = "the highest of several is biased upwards, so confirm it with fresh boots"
    for name in ("report.html", "report.md"):
        text = FORMATS[name](view)
        assert text.count("with 195.3 tok/s") == 1
        assert text.count("4 of 4 cells not yet vouched for") == 1
        assert text.count(f"wins, as said above; {bias}.") == 1
    # What stands alone says all of it: the terminal's rows, JUnit, a derivation.
    (winner,) = (one for one in view.verdicts.variants if one.verdict == "WINNER")
    assert winner.remarks == (bias,)
    assert winner.sentence.startswith(view.verdicts.sentence.partition(": ")[0])
    assert all(part in winner.sentence for part in ("4 of 4 cells not yet vouched for", bias))
    assert not any(one.remarks for one in view.verdicts.variants if one is not winner)


def test_no_word_of_a_provisional_report_denies_another():
    # 3 of 3 boots agree, which is too few to vouch: neither is the winner "undecided", nor are there "too few to say".
    made = sample()
    page, comment = (FORMATS[name](made.view()) for name in ("report.html", "report.md"))
    assert "4 of 4 cells not yet vouched for (six boots at least)" in made.verdicts.sentence
    for text in (page, comment):
        assert "3 of 3 agree" in text
        assert "not yet vouched for: it takes six boots at least" in text
        assert "it stands unless the boots are shown to disagree" in text
        assert "undecided" not in text
        assert "too few boots to say" not in text


def test_a_variant_without_a_boot_is_not_booted_yet():
    made = sample()
    without = made.series.model_copy(update={"boots": tuple(b for b in made.series.boots if b.variant != "spec-8")})
    told = verdict.judge(without)
    assert next(one.verdict for one in told.variants if one.name == "spec-8") == "UNDECIDED"  # verdicts.json as ever
    view = build_view((), without, told)
    for text in (FORMATS["report.html"](view), FORMATS["report.md"](view), plain(told)):
        assert "not booted yet" in text
        assert "UNDECIDED" not in text.rpartition("</style>")[2]
    # The verdict is wrapped first, so that in 60 columns neither a name nor a number is cut.
    narrow = plain(told, 60).splitlines()
    assert "…" not in "".join(narrow)
    row = next(place for place, line in enumerate(narrow) if line.startswith("spec-8 "))
    assert ("not booted" in narrow[row], narrow[row + 1].split()) == (True, ["yet"])


def test_every_agreement_says_what_it_is_worth(view):
    said = " ".join(view.section("boots").sentences)
    assert "3 of 3 agree: a slow mode in up to 63 % of boots would still be unseen" in said
    assert "spec-1 at 1, 2, 4 and 8" in said
    assert cell_of(view, "spec-8", 2).agreement is not None
    assert cell_of(view, "spec-8", 1).agreement is None  # its boots disagree: there is no agreement to speak of


def test_the_winner_stands_first_and_the_rejected_last_in_file_order(view):
    assert [one.verdict.name for one in view.variants] == ["spec-1", "no-spec", "spec-3", "spec-5", "spec-8"]
    assert [one.index for one in view.variants] == [1, 0, 2, 3, 4]  # colours stay with the file's order


def test_a_cell_that_does_not_reproduce_shows_its_boots_and_no_mean(view):
    cell = cell_of(view, "spec-8", 1)
    values = [point.value for point in cell.points]
    assert cell.verdict.estimate is None
    assert cell.short == " · ".join(f"{value:.1f}" for value in values)
    assert "does not reproduce" in cell.long


def test_boots_without_a_value_say_why(view):
    assert {point.why for point in cell_of(view, "spec-3", 1).points} == {"triton_oom at first_request"}
    assert {point.status for point in cell_of(view, "spec-3", 1).points} == {"died"}
    assert {(point.status, point.why) for point in cell_of(view, "spec-5", 8).points} == {("failed", "HTTP 500")}


def test_cache_states_are_never_pooled_into_one_cell():
    boots = tuple(
        BootResult(
            boot=f"b{number:02d}",
            variant="a",
            cache=cache,
            block=number,
            position=number,
            outcome="completed",
            levels=(LevelResult(concurrency=1, value=value),),
        )
        for number, (cache, value) in enumerate(
            (("cold", 50.0), ("warm", 80.0), ("cold", 51.0), ("warm", 81.0)), start=1
        )
    )
    series = Series(experiment="two", variants=("a",), boots=boots)
    view = build_view((), series, verdict.judge(series), None)
    by_cache = {
        cell.verdict.cache: [(point.boot, point.value) for point in cell.points] for cell in view.variants[0].cells
    }
    assert by_cache == {"cold": [("b01", 50.0), ("b03", 51.0)], "warm": [("b02", 80.0), ("b04", 81.0)]}


def test_a_rejected_variant_brings_its_journal_with_the_telling_lines_marked(view):
    spec3 = next(one for one in view.variants if one.verdict.name == "spec-3")
    assert [one.boot for one in spec3.evidence] == ["b01-spec-3", "b02-spec-3", "b03-spec-3"]
    first = spec3.evidence[0]
    assert first.title == "fatal in phase first_request: triton_oom"
    assert [(line.entry, line.rule) for line in first.lines if line.rule] == [(4, "EngineCoreFatal"), (8, "TritonOom")]
    assert [line.entry for line in first.lines] == list(range(1, 11))  # three lines around each, none twice
    assert first.source == "boots/b01-spec-3/journal.jsonl"
    assert "3 of 3 cold boots never got to the trials: triton_oom at first_request (3)" in spec3.notes[0]


def test_errors_of_a_living_engine_are_shown_from_its_log(view):
    spec5 = next(one for one in view.variants if one.verdict.name == "spec-5")
    assert [line.rule for line in spec5.evidence[0].lines] == [None, "ErrorLine", "Answered5xx"]
    assert any("at 8 streams, 3 of 3 boots failed (HTTP 500 × 24)" in note for note in spec5.notes)
    assert any(
        note.startswith("collapses_with_concurrency") and "b01-spec-5 63.3 → 58.9 → 15" in note for note in spec5.notes
    )


def test_the_winner_has_no_evidence_against_it(view):
    assert view.variants[0].evidence == ()
    assert view.variants[0].notes == ()


FRAME = '(EngineCore pid=7)   File \\"/v/vllm/compilation/cuda_graph.py\\", line 254, in __call__'


@pytest.mark.parametrize(
    ("cause", "phase", "frame", "noted"),
    [
        ("triton_oom", "first_request", FRAME, True),
        ("triton_oom", "first_request", "another frame", False),
        ("triton_oom", "graph_capture", FRAME, False),
        ("torch_oom", "first_request", FRAME, False),
    ],
)
def test_the_other_reading_as_graph_capture_stands_where_its_frame_does(tmp_path, cause, phase, frame, noted):
    boot = BootResult(
        boot="b01",
        variant="spec-3",
        cache="cold",
        block=1,
        position=1,
        outcome="crashed",
        died=True,
        died_before_trials=True,
        cause=cause,
        phase=phase,
    )
    (tmp_path / "b01").mkdir()
    (tmp_path / "b01" / "journal.jsonl").write_text(f'{{"MESSAGE": "{frame}"}}\n')
    series = Series(experiment="seed", variants=("spec-3",), boots=(boot,))
    notes = build_view((), series, verdict.judge(series), tmp_path).variants[0].notes
    assert (evidence.GRAPH_CAPTURE_NOTE in notes) is noted


def test_without_the_journal_file_the_telling_lines_stand_alone(tmp_path):
    lines = evidence.excerpt(tmp_path / "not-there.jsonl", TRITON_EVIDENCE)
    assert [(line.entry, line.text) for line in lines] == [(4, TRITON_LINES[4]), (8, TRITON_LINES[8])]


def test_a_journal_numbered_otherwise_never_marks_an_innocent_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps({"MESSAGE": line}) + "\n" for line in ("one more line", *TRITON_LINES)), "utf-8")
    lines = evidence.excerpt(path, TRITON_EVIDENCE)
    assert [line.text for line in lines] == [TRITON_LINES[4], TRITON_LINES[8]]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"MESSAGE": "as a string"}', "as a string"),
        ('{"MESSAGE": [27, 91, 109, 195, 169]}', "\x1b[mé"),
        ('{"MESSAGE": null}', ""),
        ('{"message": "our own"}', "our own"),
        ("a plain line", "a plain line"),
        ("{not json", "{not json"),
    ],
)
def test_a_journal_line_is_read_in_every_form(line, text):
    assert evidence.message(line) == text


def test_an_excerpt_of_many_telling_lines_keeps_the_telling_ones(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(f"line {number}\n" for number in range(1000)), "utf-8")
    many = [Evidence(entry=number, rule="R", text=f"line {number}") for number in range(0, 400, 10)]
    lines = evidence.excerpt(path, many)
    assert len(lines) == evidence.MOST_LINES
    assert sum(line.rule is not None for line in lines) == 40


def test_what_was_left_out_is_listed_with_its_reason(view):
    rows = view.section("excluded").tables[0].rows
    assert rows == (
        ("b01-spec-1", "spec-1", "trial at 4", "invalid", "MainPID changed during the window: 811 → 907"),
        ("b02-no-spec", "no-spec", "whole boot", "disturbed", "no clean slate: process 4711 holds GPU memory"),
    )


def test_a_repeated_trial_counts_and_the_disturbed_one_does_not(view):
    assert [point.status for point in cell_of(view, "spec-1", 4).points] == ["value"] * 3


def test_nothing_left_out_is_said_too():
    made = sample(boots=1)
    clean = tuple(one for one in made.records if getattr(one, "valid", True))
    section = build_view(clean, made.series, made.verdicts, None).section("excluded")
    assert section.sentences[0] == "Nothing: every trial was valid, and every boot counts."
    assert section.tables == ()


def test_our_overhead_is_a_table_of_steps_and_leaves_the_rigs_waiting_out(view):
    rows = {row[0]: row[1:] for row in table_of(view, "boot_table", "Our own part").rows}
    assert rows["clean_slate"] == ("15", "0.090 s", "0.090 s")  # not the 120 s of the disturbed boot
    assert rows["trials"] == ("12", "0.200 s", "0.200 s")
    assert rows["whole boot"] == ("15", "0.560 s", "0.560 s")
    assert "Of each boot 0.560 s is ours in the median" in view.section("boot_table").sentences[-1]


def test_each_ruler_says_by_how_much_it_would_have_misled(view):
    said = " ".join(view.section("rulers").sentences)
    assert "The client's own count of tokens agrees with the counter within 0.04 % in 42 trials." in said
    assert "Counting words would have said 29 % less than the counter" in said
    assert "Counting SSE chunks would have put another variant on top" in said
    assert "no-spec instead of spec-1 at 8" in said
    chunks = {(one.variant, one.level.concurrency): one.chunks for one in view.rulers}
    assert chunks["spec-1", 8] == pytest.approx(1 / 1.97)


def test_what_moved_between_boots_is_told_by_tokens_per_step_and_steps(view):
    row = view.section("attribution").tables[0].rows[0]
    assert row[:2] == ("spec-8", "1")
    assert row[5] == "5.80 / 5.80"
    assert row[7] == "S (100 %)"


def test_what_a_trial_remarked_stands_in_the_report_although_the_trial_counts():
    made = sample()
    text = "GPU 0 was at its power limit of 350 W: sw_power_cap in 80 % of 60 samples"
    records = tuple(
        record.model_copy(update={"warnings": (text,)})
        if isinstance(record, TrialEnded) and (record.boot, record.concurrency) == ("b01-spec-1", 8)
        else record
        for record in made.records
    )
    section = build_view(records, made.series, made.verdicts).section("excluded")
    assert "1 remark of trials disturbed nothing." in section.sentences
    assert section.tables[-1].rows == (("b01-spec-1", "spec-1", "trial at 8", text),)
    assert all(table.title != "Remarks of trials" for table in made.view().section("excluded").tables)


def test_what_moved_shows_the_clocks_of_both_windows_where_the_gpus_told_them():
    made = sample()
    clocks = {"b01-spec-8": 1950.0, "b02-spec-8": 1005.0, "b03-spec-8": 1950.0}
    records = tuple(
        record.model_copy(
            update={
                "gpu": tuple(GpuUse(index=n, samples=60, sm_clock_mean_mhz=clocks[record.boot] + n) for n in (0, 1))
            }
        )
        if isinstance(record, TrialEnded) and record.boot in clocks
        else record
        for record in made.records
    )
    table = build_view(records, made.series, made.verdicts).section("attribution").tables[0]
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["slowest"][:10], row["SM MHz"]) == ("b02-spec-8", "1950 / 1005")
    assert "SM MHz" not in made.view().section("attribution").tables[0].columns


def test_the_wall_is_computed_from_its_inputs_where_they_are_known():
    section = sample(rehearsal=False).view().section("wall")
    row = next(row for row in section.tables[0].rows if row[:2] == ("spec-1", "8"))
    # 936 GB/s ÷ 9.3 GiB = 93.7 steps a second; × 1.97 tokens a step × 8 streams = 1477 tok/s; 340 of it is 23 %.
    assert row == ("spec-1", "8", "9.30 GiB", "93.7", "1.97", "1477", "3", "23 %")
    assert "936 GB/s a card (2 × NVIDIA GeForce RTX 3090" in section.sentences[0]


def test_the_wall_is_a_chart_of_each_boots_share_of_it():
    view = sample(rehearsal=False).view()
    (panel,) = figures.FIGURES["wall"](view)
    svg = figures.chart(view, "wall").svgs()[0]
    assert view.section("wall").figure == "wall"
    assert (panel.title, "of the wall" in svg, "100 %" in svg, "spec-1" in svg) == ("", True, True, True)
    # 107.5 tok/s of 93.7 × 1.97 × 1 = 184.6 are 58 %; the fastest boot has a percent more.
    assert "Nearest to it comes spec-1 at 1: 59 %." in view.section("wall").sentences


def test_the_wall_says_what_it_lacks(view):
    assert view.section("wall") is None  # no section with nothing in it: one line where the left out stands
    said = view.section("excluded").sentences
    assert "The bandwidth wall is not shown: the box names no GPU." in said


def walled(*, timeline=True, **started):
    """The sample with other inputs of the wall."""
    made = sample(rehearsal=False)
    records = tuple(
        record.model_copy(update=started)
        if isinstance(record, CampaignStarted)
        else record.model_copy(update={"answer": record.answer.model_copy(update={"timeline": None})})
        if isinstance(record, JournalAnswered) and not timeline
        else record
        for record in made.records
    )
    return build_view(records, made.series, made.verdicts)


def test_what_matrix_yaml_says_of_a_card_and_its_weights_goes_before_the_table_and_the_log():
    section = walled(memory_bandwidth_gb_s=1000.0, weights_gib=4.65).section("wall")
    row = next(row for row in section.tables[0].rows if row[:2] == ("spec-1", "8"))
    # 1000 GB/s ÷ 4.65 GiB = 200.3 steps a second; × 1.97 × 8 = 3156; 340 of it is 11 %.
    assert row == ("spec-1", "8", "4.65 GiB", "200.3", "1.97", "3156", "3", "11 %")
    assert "1000 GB/s a card (matrix.yaml)" in section.sentences[0]
    assert section.sentences[0].endswith("reads in a step, from matrix.yaml.")


def test_where_the_log_is_mute_the_checkpoints_size_is_the_weights():
    section = walled(timeline=False, checkpoint_gib={"spec-1": 9.3}).section("wall")
    assert {row[0] for row in section.tables[0].rows} == {"spec-1"}
    assert section.sentences[0].endswith("from the checkpoint's size.")


@pytest.mark.parametrize(
    ("inputs", "lacks"),
    [
        (
            {"fingerprint": {"gpus": "2 × NVIDIA X9"}},
            "no bandwidth is known for 2 × NVIDIA X9 (memory_bandwidth_gb_s of",
        ),
        (
            {"timeline": False},
            "neither the engine's log nor a checkpoint tells the size of the weights (weights_gib of",
        ),
    ],
)
def test_what_the_wall_lacks_is_named_with_the_key_that_gives_it(inputs, lacks):
    said = walled(**inputs).section("excluded").sentences
    assert any(one.startswith(f"The bandwidth wall is not shown: {lacks}") for one in said)


@pytest.mark.parametrize(
    ("gpus", "rate"),
    [
        ("2 × NVIDIA GeForce RTX 3090", 936),
        ("1 × NVIDIA GeForce RTX 3090 Ti", 1008),
        ("NVIDIA L40S", 864),
        ("1 × NVIDIA RTX A6000", 768),
        ("1 × NVIDIA H200 NVL", 4800),
        ("4 × NVIDIA A100-SXM4-40GB", 1555),
        ("8 × NVIDIA H100 80GB HBM3", 3350),
        ("1 × NVIDIA H200, 1 × NVIDIA L4", None),  # two kinds: no one bandwidth
        ("1 × NVIDIA L400", None),
        (None, None),
    ],
)
def test_a_cards_bandwidth_is_known_by_its_whole_name(gpus, rate):
    assert wall.bandwidth(gpus) == rate


def test_headroom_errors_of_a_living_engine_are_told(view):
    said = view.section("answers").sentences[0]
    assert "spec-8 (3 of 8 at 8 in b01-spec-8, 3 of 8 at 8 in b02-spec-8 and 3 of 8 at 8 in b03-spec-8)" in said


def test_a_boot_that_answers_otherwise_and_babbles_is_told(view):
    said = " ".join(view.section("answers").sentences)
    assert "11 of 12 boots gave the same answers to the fixed prompts; otherwise answered spec-8 (1 boot)" in said
    assert "b02-spec-8 babbles: 90 % of an answer repeats" in said
    rows = {row[0]: row for row in view.section("answers").tables[0].rows}
    assert (rows["b01-spec-8"][3], rows["b02-spec-8"][3]) == ("A", "B")


def test_provenance_shows_each_command_beside_productions(view):
    rows = {row[0]: row[1] for row in table_of(view, "provenance", "Effective commands").rows}
    assert rows == {
        "no-spec": "without --spec-method; without --spec-tokens",
        "spec-1": "--spec-tokens 1 (was 3)",
        "spec-3": "nothing",
        "spec-5": "--spec-tokens 5 (was 3)",
        "spec-8": "--spec-tokens 8 (was 3)",
    }
    setup = dict(table_of(view, "provenance", "Experiment").rows)
    assert setup["seed"] == "7"
    assert dict(table_of(view, "provenance", "Plan").rows)["looks"] == "3"
    assert dict(table_of(view, "provenance", "Fingerprint").rows)["not there or not known"] == "gpus, nvlink"


def test_secrets_stand_in_no_environment_table(view):
    lines = [row[1] for row in table_of(view, "provenance", "Environment").rows]
    assert "HF_TOKEN=[redacted]" in lines
    assert not any("hf_x" in line for line in lines)


def test_a_series_recorded_by_hand_needs_no_ledger():
    made = sample(boots=2)
    view = build_view((), made.series, made.verdicts, None)
    assert view.section("rulers") is None
    assert view.section("memory") is None
    assert "Recorded by hand" in view.section("provenance").sentences[0]
    assert view.section("boots") is not None


def test_a_boot_that_never_ended_is_told_as_aborted(made):
    cut = tuple(
        one for one in made.records if getattr(one, "boot", None) != "b03-no-spec" or one.kind == "boot_started"
    )
    series = made.series.model_copy(
        update={"boots": tuple(boot for boot in made.series.boots if boot.boot != "b03-no-spec")}
    )
    view = build_view(cut, series, verdict.judge(series), None)
    assert ("b03-no-spec", "no-spec", "whole boot", "aborted", "it never ended") in view.section("excluded").tables[
        0
    ].rows


def test_flags_differ_by_value_by_absence_and_by_form():
    base = (*BASE, "--a", "1", "--b", "--c=x y", "--api-key", "s3cret")
    other = (*BASE[:3], "--max-num-seqs", "128", "--a=2", "--d", "p", "q", "--api-key", "other", "--port", "1")
    assert commands.difference(base, other) == (
        "--a 2 (was 1)",
        "without --b",
        "without --c",
        "--d p q",
    )
    assert (
        commands.shown(("x", "--api-key", "s3cret", "--api-key=s3cret"))
        == "x --api-key '[redacted]' '--api-key=[redacted]'"
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("10%\r50%\r100%", "100%"),
        ("a\nb\tc", "a b    c"),
        ("nul\x00 bell\x07", "nul\ufffd bell\ufffd"),
        ("rtl\u202eevil", "rtl\ufffdevil"),
        ("half \ud800 pair", "half \ufffd pair"),
        ("a" * 20, "a" * 9 + "…"),
    ],
)
def test_foreign_text_is_made_harmless(given, shown):
    assert words.clean(given, 10 if len(given) == 20 and given[0] == "a" else None) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0.0, "0.0"), (66.94, "66.9"), (999.94, "999.9"), (1234.5, "1234")]
)
def test_numbers_are_short_and_what_is_not_there_is_a_dash(value, shown):
    assert words.number(value) == shown


def test_a_report_of_thousands_of_boots_shows_the_first_rows_and_counts_the_rest():
    rows = tuple((f"b{number:04}", "1.0") for number in range(2000))
    table = Table("Boots", ("boot", "tok/s"), rows, folded=True)
    short = table.shortened()
    assert (len(short.rows), short.left_out, short.all_rows) == (500, 1500, 2000)
    assert short.shortened() == short
    few = replace(table, rows=rows[:500])
    assert few.shortened() is few


def test_latency_of_boots_that_disagree_stands_boot_by_boot(view):
    table = table_of(view, "latency", "Latency in ms")
    by_cell = {row[:2]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    # spec-8's three boots give one number each at 1; the boots of spec-1 agree, and one number tells them.
    assert by_cell["spec-8", "1"]["ITL p50"].count(" · ") == 2
    assert " · " not in by_cell["spec-1", "1"]["ITL p50"]
    assert "Latency is not judged by itself" in " ".join(view.section("latency").sentences)


def test_a_logarithmic_axis_says_so(view):
    labels = []
    for panel in figures.FIGURES["latency"](view):
        axes = canvas.lay_out([panel], 1, ink=canvas.LIGHT, title=None, rehearsal=False).axes[0]
        labels.append((axes.get_yscale(), axes.get_ylabel()))
    # The first tokens take 90 to 255 ms; chunks 20 to 1000 ms.
    assert labels == [("linear", "ms, median request"), ("log", "ms, median request, log scale")]


def test_the_legend_names_only_what_is_drawn(view):
    page = FORMATS["report.html"](view)
    caption = page.partition("<figcaption")[2].partition("</figcaption>")[0]
    assert [name in caption for name in ("spec-1", "no-spec", "spec-5", "spec-8", "spec-3")] == [True] * 4 + [False]


def test_the_legend_shows_a_line_only_where_two_estimates_stand_beside_each_other():
    # b fails at 2 streams: its estimates at 1 and at 4 are not joined, and its marks are filled; c has no estimate.
    tables = {"a": ((9.0, 18.0, 36.0),) * 2, "b": ((8.0, None, 32.0),) * 2, "c": ((9.0,) * 3, (90.0,) * 3)}
    boots = tuple(
        BootResult(
            boot=f"b{block:02d}-{name}",
            variant=name,
            cache="cold",
            block=block,
            position=block,
            outcome="completed",
            levels=tuple(
                LevelResult(concurrency=streams, value=value, failed=value is None)
                for streams, value in zip((1, 2, 4), row, strict=True)
            ),
        )
        for name, rows in tables.items()
        for block, row in enumerate(rows, start=1)
    )
    series = Series(
        experiment="x", box="here", variants=("a", "b", "c"), concurrency=(1, 2, 4), caches=("cold",), boots=boots
    )
    (panel,) = figures.FIGURES["throughput"](build_view((), series, verdict.judge(series)))
    legend = canvas.lay_out([panel], 1, ink=canvas.LIGHT, title=None, rehearsal=False).axes[0].get_legend()
    drawn = {
        line.get_label().partition(" ")[0]: (line.get_linestyle(), line.get_markerfacecolor() != "none")
        for line in legend.legend_handles
    }
    assert drawn == {"a": ("-", True), "b": ("None", True), "c": ("None", False)}


def test_a_number_has_its_unit_on_a_phones_card_and_in_the_terminals_head(made, view):
    assert 'data-label="tok/s at 8"' in FORMATS["report.html"](view)
    head = plain(made.verdicts, 80).splitlines()[1:4]
    assert any(line.split() == ["tok/s"] * 4 for line in head), head


def test_beside_name_and_verdict_neither_is_said_again(made):
    said = {one.name: words.why(one) for one in made.verdicts.variants}
    assert said["spec-3"].startswith("it died before the trials in 3 of 3 cold boots")
    assert said["spec-1"].startswith("wins provisionally with 195.3 tok/s")
    assert said["no-spec"].startswith("135.0 tok/s (at 1, 2, 4 and 8 streams")
    # One way to print a spread: the tolerance beside it is 5.0 %.
    assert "spread 56.3 %, at least 32.5 % (95 %), where 5.0 % is tolerated" in said["spec-8"]


def test_a_benign_end_is_one_word(view):
    table = table_of(view, "boot_table", "Boots in the order")
    column = table.columns.index("journal")
    assert {row[column] for row in table.rows if row[3] == "completed"} == {"benign_shutdown"}


def test_of_two_thousand_boots_that_disagree_a_table_shows_the_first_dozen_and_says_how_many_more():
    assert words.one_by_one([124.8, 46.8]) == ("124.8", "46.8")
    assert words.one_by_one([1.0] * 2000) == ("1.0",) * 12 + ("and 1988 more",)
