"""What a person sees during a campaign, and what a program reads: drawn into a recorded console."""

from __future__ import annotations

import io
import json
import os
import re
from datetime import datetime
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from orchestrator.advice import boot_warning
from orchestrator.ledger import to_line
from orchestrator.live import LiveListener
from orchestrator.matrix import load_matrix
from orchestrator.progress import JsonLines, PlainListener, QuietListener, folded
from orchestrator.records import (
    Answer,
    BootEnded,
    BootStarted,
    CampaignEnded,
    CampaignStarted,
    JournalAnswered,
    StepEnded,
    TrialEnded,
)

ROOT = Path(__file__).parent.parent
VARIANTS = ("no-spec", "spec-1", "spec-3")
BEGUN = CampaignStarted(
    experiment="gwen", box="rehearsal", rehearsal=True, seed=1, boots_planned=3, concurrency=(1, 2, 4, 8)
)


def key(variant, block, cache="cold", attempt=1):
    repeat = "" if attempt == 1 else f".r{attempt - 1}"
    return {
        "boot": f"b{block:02d}-{variant}{repeat}",
        "variant": variant,
        "cache": cache,
        "block": block,
        "position": block,
        "attempt": attempt,
    }


def trial(at, variant, block, value, **more):
    return TrialEnded(
        **key(variant, block),
        concurrency=at,
        window_s=1,
        tokens=value,
        tokens_per_s=value,
        valid=value is not None,
        **more,
    )


def good_boot(variant, block, values=(36.4, 70.6, 129, 226), seconds=8.0):
    yield BootStarted(**key(variant, block))
    yield from (trial(at, variant, block, value) for at, value in zip((1, 2, 4, 8), values, strict=False))
    yield BootEnded(**key(variant, block), boot_outcome="completed", why="every level was measured", seconds=seconds)


def dead_boot(variant, block, seconds=2.0):
    answer = Answer(outcome="fatal", phase="first_request", cause="triton_oom", complete=True)
    yield BootStarted(**key(variant, block))
    yield JournalAnswered(**key(variant, block), answer=answer)
    yield BootEnded(
        **key(variant, block),
        boot_outcome="crashed",
        why="triton_oom in first_request: RuntimeError: Triton Error [CUDA]: out of memory",
        step="first_request",
        seconds=seconds,
    )


def told(listener, *records):
    for record in records:
        listener.record(record)


def drawn(listener, width=80, height=24):
    console = Console(width=width, height=height, force_terminal=False, record=True, file=io.StringIO())
    console.print(listener)
    return console.export_text()


@pytest.fixture
def live():
    console = Console(width=80, height=24, force_terminal=False, record=True, file=io.StringIO())
    listener = LiveListener(console, moving=False)
    listener.planned(VARIANTS, 3)
    told(listener, BEGUN)
    return listener


# --- the live table ------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_a_variant_and_a_column_a_boot(live):
    told(live, *good_boot("no-spec", 1), *dead_boot("spec-3", 1))
    lines = drawn(live).splitlines()
    assert "variant   boot 1" in lines[1]
    assert "boot 3" in lines[1]
    assert lines[3].startswith("no-spec   ✔ 36 71 129 226")
    assert lines[5].startswith("spec-3    ✘ triton_oom")
    assert "Ctrl-C ends this boot and restores" in lines[-1]


def test_levels_stand_below_each_other(live):
    told(live, *good_boot("no-spec", 1, (9, 70, 129, 226)), *good_boot("spec-1", 1, (101, 70, 1029, 226)))
    rows = {line.split()[0]: line for line in drawn(live).splitlines() if line.startswith(VARIANTS)}
    assert "✔   9 70  129 226" in rows["no-spec"]
    assert "✔ 101 70 1029 226" in rows["spec-1"]


def test_the_time_left_is_known_from_the_second_boot_on_and_is_each_rows_own(live):
    live.left(("no-spec", "spec-3", "no-spec", "spec-3"))
    assert ": 0 of 4 boots" in drawn(live)
    assert "left" not in drawn(live).splitlines()[0]
    told(live, *good_boot("no-spec", 1, seconds=600))
    live.left(("spec-3", "no-spec", "spec-3"))
    assert "1 of 4 boots, about 30 min left, until " in drawn(live)
    told(live, *dead_boot("spec-3", 1, seconds=60))
    assert "2 of 4 boots, about 11 min left, until " in drawn(live)  # also before the next boots are told
    live.left(("no-spec", "spec-3"))
    assert "2 of 4 boots, about 11 min left, until " in drawn(live)


def test_a_disturbed_boot_does_not_count_and_is_still_to_go(live):
    live.left(("spec-1",))
    end = BootEnded(**key("spec-1", 1), boot_outcome="disturbed", why="no clean slate", seconds=3)
    told(live, BootStarted(**key("spec-1", 1)), end)
    assert ": 0 of 1 boot, about 3 s left" in drawn(live)


def test_before_the_first_boot_is_planned_no_number_of_boots_is_made_up(live):
    assert re.fullmatch(r"gwen on rehearsal \(REHEARSAL\), 0 s", drawn(live).splitlines()[0])


@pytest.mark.parametrize(
    ("width", "headline"),
    [
        (120, r"gwen on rehearsal (REHEARSAL), 0 s: 1 of 12 boots, about 3 h 05 min left, until 00:00"),
        (84, r"gwen on rehearsal (REHEARSAL), 0 s: 1 of 12 boots, 3 h 05 min left, until 00:00"),
        (76, r"gwen on rehearsal (REHEARSAL): 1 of 12 boots, 3 h 05 min left, until 00:00"),
        (70, r"gwen on rehearsal (REHEARSAL): 1 of 12 boots, 3 h 05 min left"),
        (60, r"gwen (REHEARSAL): 1 of 12 boots, 3 h 05 min left"),
        (40, r"1 of 12 boots, 3 h 05 min left"),
        (20, r"1 of 12 boots"),
    ],
)
def test_a_narrow_headline_keeps_the_boots_and_then_the_time_left(live, width, headline):
    told(live, *good_boot("no-spec", 1, seconds=185 / 11 * 60))
    live.left(("no-spec",) * 11)
    first = drawn(live, width=width).splitlines()[0]
    assert re.sub(r"\d\d:\d\d", "00:00", first) == headline


@pytest.mark.parametrize(
    ("width", "legend", "keys"),
    [
        (
            120,
            "tok/s at 1, 2, 4, 8 · ✔ completed  ✘ died, failed  ↻ repeated  ? not valid",
            "Ctrl-C ends this boot and restores; the same command goes on later",
        ),
        (
            60,
            "tok/s at 1, 2, 4, 8 · ✔ done ✘ died ↻ again ? not valid",
            "Ctrl-C ends and restores; the same command goes on",
        ),
        (40, "✔ done ✘ died ↻ again ? not valid", "Ctrl-C ends this boot and restores"),
    ],
)
def test_a_narrow_legend_keeps_the_marks_and_the_key(live, width, legend, keys):
    assert drawn(live, width=width).splitlines()[-2:] == [legend, keys]


def test_what_runs_now_is_named_with_its_step_and_level(live):
    told(live, BootStarted(**key("spec-1", 2)))
    assert "▶ b02-spec-1: clean slate, 0 s" in drawn(live)
    told(live, StepEnded(**key("spec-1", 2), name="start", seconds=1, outcome="ok"))
    assert "▶ b02-spec-1: ready, 0 s" in drawn(live)
    told(live, StepEnded(**key("spec-1", 2), name="sanity", seconds=1, outcome="ok"), trial(1, "spec-1", 2, 57))
    assert "▶ b02-spec-1: trial at 2, 2 of 4, 0 s" in drawn(live)
    told(live, StepEnded(**key("spec-1", 2), name="trials", seconds=1, outcome="failed"))
    assert "▶ b02-spec-1: stop, 0 s" in drawn(live)


def test_a_failed_and_an_invalid_level_have_marks_of_their_own(live):
    told(live, BootStarted(**key("spec-1", 1)), trial(1, "spec-1", 1, None), trial(2, "spec-1", 1, None, failed=True))
    assert "▶ ? ✘" in drawn(live)


def test_a_repeat_takes_the_place_of_the_disturbed_boot(live):
    end = BootEnded(**key("spec-1", 1), boot_outcome="disturbed", why="no clean slate", seconds=3)
    told(live, BootStarted(**key("spec-1", 1)), end)
    assert "spec-1    ↻ disturbed" in drawn(live)
    told(live, BootStarted(**key("spec-1", 1, attempt=2)))
    assert "disturbed" not in drawn(live).replace("↻ repeated", "")


def test_an_adaptive_plan_may_add_blocks_and_another_cache_state_is_a_row(live):
    told(live, BootStarted(**key("spec-1", 4, cache="warm")))
    text = drawn(live, width=120)
    assert "boot 4" in text
    assert "spec-1@warm" in text


def test_the_last_warning_stands_below_and_the_one_before_scrolls_up():
    console = Console(width=80, height=24, force_terminal=True, record=True, file=io.StringIO(), color_system=None)
    with LiveListener(console) as listener:
        listener.planned(VARIANTS, 3)
        listener.warn("the first thing")
        assert "the first thing" in drawn(listener)
        listener.warn("the second thing")
        assert "WARNING (2 so far) the second thing" in drawn(listener)
        assert "the first thing" not in drawn(listener)
        listener.record(CampaignEnded(outcome="complete", restored=True))
    text = console.export_text()
    assert "WARNING the first thing" in text.splitlines()
    assert text.rindex("WARNING the first thing") < text.rindex("WARNING (2 so far) the second thing")
    assert text.rstrip().endswith("WARNING (2 so far) the second thing")


DEATH = (
    "b01-spec-3 died at its first request: triton_oom: RuntimeError: Triton Error [CUDA]: out of memory\n        "
    "1 of 1 boot of spec-3 ended so. Leave some hundred MiB outside the engine's budget: lower "
    "--gpu-memory-utilization (in the unit) or --spec-tokens (matrix.yaml:30).\n        "
    "Journal: artifacts/gwen/boots/b01-spec-3/journal.jsonl"
)


def test_a_warning_of_several_lines_hangs_below_its_label_on_every_width():
    for width in (80, 140):
        console = Console(width=width, height=24, force_terminal=True, record=True, file=io.StringIO())
        listener = LiveListener(console, moving=False)
        listener.warn(DEATH)
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        assert lines[0].startswith("WARNING b01-spec-3 died at its first request: triton_oom: RuntimeError:")
        assert all(re.match(r" {8}\S", line) for line in lines[1:]), lines
        assert lines[-1] == "        Journal: artifacts/gwen/boots/b01-spec-3/journal.jsonl"
        assert max(map(len, lines)) <= width


def test_the_last_warning_keeps_its_beginning_and_where_its_journal_is():
    console = Console(width=60, height=24, force_terminal=True, record=True, file=io.StringIO(), color_system=None)
    with LiveListener(console) as listener:
        listener.planned(VARIANTS, 3)
        listener.warn(DEATH)
        lines = drawn(listener, width=60).splitlines()
    shown = [line for line in lines if line.startswith(("WARNING", "        "))]
    assert len(shown) == 5
    assert shown[0].startswith("WARNING b01-spec-3 died at its first request:")
    assert shown[3].endswith("engine's budget: lower …")  # at a word's end
    assert "boots/b01-spec-3/journal.jsonl" in shown[4]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_at_the_end_the_last_warning_is_whole_below_the_table_with_its_path_in_one_piece(width):
    path = "artifacts/an-experiment-of-a-longer-name/boots/b01-spec-3/journal.jsonl"
    console = Console(width=width, height=24, force_terminal=True, record=True, file=io.StringIO(), color_system=None)
    with LiveListener(console) as listener:
        listener.planned(VARIANTS, 3)
        told(listener, BEGUN, *dead_boot("spec-3", 1))
        listener.warn(DEATH.replace("artifacts/gwen/boots/b01-spec-3/journal.jsonl", path))
        listener.record(CampaignEnded(outcome="complete", restored=True))
    written = console.export_text()
    table = "spec-3    ✘ triton_oom"
    end = [line.rstrip() for line in written[written.rindex(table) :].splitlines()[1:]]
    assert "…" not in "".join(end)
    assert next(line for line in end if path in line).strip() in (path, f"Journal: {path}")
    assert " ".join(" ".join(end).split()) == "WARNING " + " ".join(DEATH.replace("gwen", path.split("/")[1]).split())
    assert all(cell_len(line) <= width or line.strip() == path for line in end)


def test_what_earlier_sessions_booted_is_there_from_the_beginning(live):
    earlier = (BEGUN, *good_boot("no-spec", 1, seconds=100), BootStarted(**key("spec-1", 1)))
    listener = LiveListener(live.console, moving=False)
    listener.planned(VARIANTS, 3, earlier)
    listener.left(("spec-1",))
    text = drawn(listener)
    assert "✔ 36 71 129 226" in text
    assert "1 of 2 boots, about 2 min left, until " in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("blocks", [1, 3, 6, 30])
def test_no_line_is_wider_than_the_terminal_and_the_running_boot_is_in_sight(live, width, blocks):
    listener = LiveListener(live.console, moving=False)
    names = tuple(f"a-rather-long-name-{number}" for number in range(3))
    listener.planned(names, blocks)
    told(listener, BEGUN)
    for block in range(1, blocks):
        for name in names:
            told(listener, *good_boot(name, block, (1036.4, 2070, 3129, 4226)))
    told(listener, BootStarted(**key(names[0], blocks)), trial(1, names[0], blocks, 777))
    listener.warn("a long warning " * 40)
    listener.left(names)
    text = drawn(listener, width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "777" in text
    assert f"boot {blocks}" in text


def test_the_frame_is_never_higher_than_the_terminal_and_shows_the_running_row(live):
    listener = LiveListener(live.console, moving=False)
    names = tuple(f"v{number:02d}" for number in range(60))
    listener.planned(names, 3)
    told(listener, BEGUN, BootStarted(**key("v41", 1)))
    listener.warn("a long warning " * 40)
    lines = drawn(listener, height=24).splitlines()
    assert len(lines) <= 24
    assert any(line.startswith("v41") for line in lines)
    assert any(line.startswith("… and ") for line in lines)


@pytest.mark.parametrize("width", [40, 80])
def test_what_is_said_is_wrapped_at_words_and_a_path_or_command_is_never_cut(width):
    command = "invoke restore --box gwen --experiment one-with-a-long-name"
    console = Console(width=width, height=24, force_terminal=True, record=True, file=io.StringIO(), color_system=None)
    LiveListener(console, moving=False).say(f"vllm.service is stopped; `{command}` brings it back, and changes no file")
    lines = console.export_text().splitlines()
    assert any(f"`{command}`" in line for line in lines)
    assert all(len(line) <= width for line in lines if command not in line)
    assert all(len(line) > 4 for line in lines)


def test_a_log_gets_whole_lines_and_a_number_stays_with_its_sign():
    text = "a slow mode on up to 63 % of boots would still be unseen"
    assert folded(text, None) == text
    assert folded(f"  {text}", 24).splitlines() == [
        "  a slow mode on up to",
        "    63 % of boots would",
        "    still be unseen",
    ]


def test_a_ctrl_c_that_the_terminal_echoes_fits_behind_the_last_line(live):
    assert cell_len(drawn(live, width=40).splitlines()[-1]) + len("^C") < 40


def test_a_terminal_without_utf_8_gets_ascii(live):
    told(live, *good_boot("no-spec", 1), *dead_boot("spec-3", 1))
    raw = io.BytesIO()
    console = Console(width=80, file=io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    console.print(live)
    console.file.flush()
    assert b"v 36 71 129 226" in raw.getvalue()
    assert b"x triton_oom" in raw.getvalue()


def test_a_frame_is_one_write_so_that_nothing_flickers():
    class Writes(io.StringIO):
        def __init__(self):
            super().__init__()
            self.written = []

        def write(self, text):
            self.written.append(text)
            return super().write(text)

    file = Writes()
    console = Console(width=80, height=24, force_terminal=True, file=file)
    with LiveListener(console) as listener:
        listener.planned(VARIANTS, 3)
        told(listener, BEGUN, *good_boot("no-spec", 1))
        file.written.clear()
        listener._live.refresh()
        assert len([text for text in file.written if text]) == 1


# --- plain, quiet, JSON --------------------------------------------------------------------------------------------


def plain(**options):
    out = io.StringIO()
    return out, Console(file=out, width=80, soft_wrap=True, highlight=False, **options)


def test_plain_lines_have_times_and_nothing_moves():
    out, console = plain()
    late, early = datetime(2026, 11, 30, 23, 59, 58), datetime(2026, 12, 1, 0, 0, 1)  # noqa: DTZ001 - local times
    moments = iter((late, late, late, early))
    listener = PlainListener(console, clock=lambda: next(moments))
    told(listener, BEGUN)
    listener.left(("no-spec", "spec-1"))
    told(listener, BootStarted(**key("no-spec", 1)))
    listener.warn("a warning")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    days = [line for line in lines if ", times are " in line]
    assert [day[:10] for day in days] == ["2026-11-30", "2026-12-01"]
    assert any(line.endswith(" gwen on rehearsal begins: seed 1, REHEARSAL") for line in lines)
    assert any(line.endswith(" 2 boots left") for line in lines)
    assert any(line.endswith(" b01-no-spec: starting (cold)") for line in lines)
    assert lines[-1].endswith(" WARNING a warning")


def test_plain_lines_say_the_time_left_from_the_second_boot_on():
    out, console = plain()
    listener = PlainListener(console)
    told(listener, *good_boot("no-spec", 1, seconds=120))
    listener.left(("no-spec", "spec-1"))
    assert out.getvalue().splitlines()[-1].endswith("2 boots left, about 4 min")


def test_quiet_says_warnings_alone_but_what_a_question_is_about_before_it():
    out, console = plain()
    listener = QuietListener(console)
    listener.say("production is taken down for 3 h")
    told(listener, BEGUN, *good_boot("no-spec", 1))
    listener.warn("something")
    assert out.getvalue() == "WARNING something\n"
    assert listener.confirm("Go on?") is None
    assert "production is taken down for 3 h" in out.getvalue()


def test_json_lines_are_the_ledgers_own_lines_and_nothing_else():
    out, console = plain()
    lines = io.BytesIO()
    listener = JsonLines(QuietListener(console), to_line, lines)
    records = (BEGUN, *good_boot("no-spec", 1))
    told(listener, *records)
    listener.warn("something")
    assert lines.getvalue() == b"".join(map(to_line, records))
    assert [json.loads(line)["kind"] for line in lines.getvalue().splitlines()][:2] == [
        "campaign_started",
        "boot_started",
    ]
    assert out.getvalue() == "WARNING something\n"


def test_a_reader_of_json_lines_that_goes_away_ends_nothing():
    out, console = plain()
    read, write = os.pipe()
    with os.fdopen(write, "wb") as file:
        listener = JsonLines(QuietListener(console), to_line, file)
        os.close(read)
        told(listener, BEGUN, *good_boot("no-spec", 1))
    assert out.getvalue().count("nobody reads the JSON lines any more, after campaign_started") == 1


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    PlainListener(Console(file=out, force_terminal=True, width=80)).warn("something")
    assert "\x1b[33m" not in out.getvalue()
    monkeypatch.delenv("NO_COLOR")
    out = io.StringIO()
    PlainListener(Console(file=out, force_terminal=True, color_system="standard", width=80)).warn("something")
    assert "\x1b[33m" in out.getvalue()


# --- warnings ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matrix():
    return load_matrix(ROOT / "matrix.yaml")


def test_a_death_is_warned_of_with_its_count_and_the_line_of_what_to_change(matrix):
    ends = [record for block in (1, 2) for record in dead_boot("spec-3", block) if isinstance(record, BootEnded)]
    good = [record for record in good_boot("spec-3", 3) if isinstance(record, BootEnded)]
    answer = Answer(
        outcome="fatal",
        phase="first_request",
        cause="triton_oom",
        complete=True,
        advice="Lower --gpu-memory-utilization or --spec-tokens, or --other.",
    )
    text = boot_warning(
        ends[1],
        [*ends, *good],
        answer,
        matrix=matrix,
        unit_argv=("vllm", "--gpu-memory-utilization=0.97"),
        journal=Path("artifacts/gwen/boots/b02-spec-3/journal.jsonl"),
    )
    number = (ROOT / "matrix.yaml").read_text().splitlines().index("    spec-tokens: 3") + 1
    assert text.splitlines() == [
        ("b02-spec-3 died at its first request: triton_oom: RuntimeError: Triton Error [CUDA]: out of memory"),
        (
            "        2 of 3 boots of spec-3 ended so. Lower --gpu-memory-utilization (in the unit) or "
            f"--spec-tokens (matrix.yaml:{number}), or --other."
        ),
        "        Journal: artifacts/gwen/boots/b02-spec-3/journal.jsonl",
    ]


def test_a_boot_that_is_late_names_its_limit_and_where_it_stands(matrix):
    end = BootEnded(**key("spec-1", 1), boot_outcome="not_ready", why="not ready after 30 s", step="ready")
    text = boot_warning(end, [end], None, matrix=matrix, unit_argv=(), journal=Path("j"))
    number = (ROOT / "matrix.yaml").read_text().splitlines().index("      ready_s: 30") + 1
    assert f"1 of 1 boot of spec-1 ended so. The limit is deadlines.ready_s = 30 s (matrix.yaml:{number})" in text
    end = BootEnded(**key("spec-1", 1), boot_outcome="not_ready", why="no request answered any more", step="trials")
    text = boot_warning(end, [end], None, matrix=matrix, unit_argv=(), journal=Path("j"))
    assert "1 of 1 boot of spec-1 ended so. It was ready and stopped answering" in text
    assert "ready_s" not in text


def test_a_disturbed_boot_says_how_often_it_will_be_repeated(matrix):
    end = BootEnded(**key("spec-1", 1, attempt=4), boot_outcome="disturbed", why="port 1 is taken", step="clean_slate")
    text = boot_warning(end, [end], None, matrix=matrix, unit_argv=(), journal=Path("j"))
    assert "b01-spec-1.r3 was disturbed at clean slate: port 1 is taken" in text
    assert "attempt 4, and no repeat is left" in text
    first = end.model_copy(update={"attempt": 1})
    assert "attempt 1, at most 3 more" in boot_warning(
        first, [first], None, matrix=matrix, unit_argv=(), journal=Path("j")
    )
