"""What to do next, under the headline of every report and at a campaign's end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from invoke.context import Context
from report_samples import sample

from orchestrator import closing, commands, report, verdict
from orchestrator.records import BootResult, LevelResult, Series
from orchestrator.report import formats, next_steps
from orchestrator.report.steps import Again


@pytest.fixture(scope="module")
def verdicts():
    return sample(rehearsal=False).verdicts


def test_a_provisional_winner_wants_boots_then_an_explanation_then_the_drop_in(verdicts):
    said = [
        (step.text, step.command)
        for step in next_steps(verdicts, "gwen.2", Again("coldboot", " --out o", " --matrix m.yaml"))
    ]
    assert said == [
        (
            # Six where three are: spec-3, spec-5 and spec-8 are rejected, no-spec is surely slower; they boot no more.
            "spec-1 is provisional: 3 more boots of what is still in question, 6 of each",
            "coldboot matrix --matrix m.yaml --box gwen --experiment gwen.2 --only spec-1 --boots 6 --out o",
        ),
        (
            "why spec-3 is rejected, with the whole derivation",  # production's rejection matters most
            "coldboot report --experiment gwen.2 --out o --explain spec-3",
        ),
        (
            "what would make spec-1 production; it is printed, nothing is changed",
            "coldboot adopt spec-1 --print --experiment gwen.2 --out o",
        ),
    ]


def test_boots_that_are_left_come_first_with_the_command_and_nobody_is_told_to_ask_for_more(verdicts):
    how = Again("coldboot", " --out o", " --matrix m.yaml", " --boots 3 --budget 3h")
    first, *others = next_steps(verdicts, "gwen.2", how, boots_left=2)
    assert first.text == "2 boots left; the same command goes on"
    # The name in place of `--new`: that would begin afresh once more.
    assert first.command == (
        "coldboot matrix --matrix m.yaml --box gwen --experiment gwen.2 --boots 3 --budget 3h --out o"
    )
    assert not any("matrix --" in (step.command or "") for step in others)


def test_boots_of_another_cache_state_are_added_in_that_one(verdicts):
    def warm(variant):
        return variant.model_copy(
            update={"cells": tuple(c.model_copy(update={"cache": "warm"}) for c in variant.cells)}
        )

    own = verdicts.model_copy(update={"variants": tuple(map(warm, verdicts.variants))})
    assert next(iter(next_steps(own, "gwen"))).command.endswith(" --only spec-1 --boots 6 --cache warm")


def test_the_hours_are_those_that_the_ledgers_own_boots_took(verdicts):
    made = sample(rehearsal=False)
    first = next(iter(next_steps(made.verdicts, "gwen", records=made.records)))
    # Each took 236 to 237 s: 3 × 236.5 s are 12 min.
    assert first.text.endswith("3 more boots of what is still in question, 6 of each, about 12 min")


def spread_out(*rows):
    """Verdicts over variants a, b …, each a row of boots at one level, tolerance 5 %."""
    names = [chr(ord("a") + place) for place in range(len(rows))]
    boots = tuple(
        BootResult(
            boot=f"b{block}-{name}",
            variant=name,
            cache="cold",
            block=block,
            position=block,
            outcome="completed",
            levels=(LevelResult(concurrency=1, value=value),),
        )
        for name, row in zip(names, rows, strict=True)
        for block, value in enumerate(row, start=1)
    )
    series = Series(
        experiment="x",
        box="here",
        boots_planned=3,
        variants=tuple(names),
        concurrency=(1,),
        caches=("cold",),
        boots=boots,
    )
    return verdict.judge(series)


def test_a_spread_near_the_tolerance_is_no_matter_of_counting():
    # sd of logs 4.5 % where 5 % is tolerated: over a hundred boots would settle it, and nobody should be told to.
    told = spread_out((100.0, 104.6, 95.6), (90.0, 90.1, 90.2))
    cell = told.variants[0].cells[0]
    assert cell.spread == pytest.approx(0.045, abs=0.0005)
    assert cell.more_boots > 100
    settled, near, *_ = next_steps(told, "x")
    assert settled.command == "invoke matrix --box here --experiment x --only b --boots 6"
    assert near.command is None
    assert near.text.startswith("a: the boots' spread (4.5 % at one level) is too near the tolerance of 5.0 %")
    for way in ("load.window_s", "`invoke aa`", "raise the tolerance", "--boots auto --budget 3h"):
        assert way in near.text
    assert not any("--boots 1" in f"{step.text}{step.command}" for step in next_steps(told, "x"))


def test_a_spread_that_some_boots_settle_is_told_by_its_number():
    told = spread_out((100.0, 103.0, 97.0), (99.0, 99.1, 99.2))
    more = told.variants[0].cells[0].more_boots
    assert 3 < more <= 17
    first, second, *_ = [*next_steps(told, "x"), None]
    assert first.command == f"invoke matrix --box here --experiment x --only a,b --boots {3 + more}"
    assert second is None or "too near" not in second.text


def test_a_winner_that_is_production_already_needs_no_drop_in(verdicts):
    own = verdicts.model_copy(update={"production": verdicts.winner})
    assert not any("adopt" in (step.command or "") for step in next_steps(own, "gwen"))


def test_after_a_rehearsal_the_way_to_an_own_box_is_told():
    rehearsed = sample().verdicts
    last = list(next_steps(rehearsed, "gwen"))[-1]
    assert last.command == "invoke init --box-host ALIAS --unit UNIT --matrix mine.yaml"
    *_, own = next_steps(rehearsed, "gwen", Again("invoke", "", " --matrix mine.yaml"))  # which init would not replace
    assert own.command == "invoke doctor --matrix mine.yaml --box NAME"


def test_the_page_and_the_comment_say_them_below_the_headline():
    made = sample()
    steps = tuple(next_steps(made.verdicts, "gwen"))
    view = report.build_view(made.records, made.series, made.verdicts, None, steps)
    html, markdown = (formats.FORMATS[name](view) for name in ("report.html", "report.md"))
    assert html.index("<h1>") < html.index("What now") < html.index('id="verdicts"')
    said = re.sub(r"</?span>", "", html)  # each word is whole on a phone
    assert "<code>invoke report --experiment gwen --explain spec-3</code>" in said
    assert markdown.index("**What now**") < markdown.index("| variant | verdict |")
    assert "with the whole derivation: `invoke report --experiment gwen --explain spec-3`" in markdown


def test_a_campaigns_end_says_where_the_report_will_be_and_the_same_steps(verdicts, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/venv/bin/coldboot", "matrix"])
    lines = list(closing.campaign_end(verdicts, Path("out/gwen"), closing.again(" --out out")))
    assert lines[:6] == [
        "the ledger:",
        "  out/gwen/records.jsonl",
        "the report goes to:",
        "  out/gwen/report/report.html",
        "next:",
        "  coldboot report --experiment gwen --out out",
    ]
    explain = lines.index("why spec-3 is rejected, with the whole derivation:")
    assert lines[explain + 1] == "  coldboot report --experiment gwen --out out --explain spec-3"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_at_every_width_reasons_are_wrapped_at_words_and_commands_are_whole(verdicts, width):
    folder = Path("a-folder/whose-name/is-longer/than-a-narrow-terminal/is-wide/gwen")
    whole = list(closing.campaign_end(verdicts, folder, closing.again(f" --out {folder.parent}")))
    lines = list(closing.campaign_end(verdicts, folder, closing.again(f" --out {folder.parent}"), width=width))
    commands = [line for line in whole if line.startswith("  ")]
    assert [line for line in lines if line.startswith("  ")] == commands
    assert max(map(len, commands)) > 120
    reasons = [line for line in lines if not line.startswith("  ")]
    assert max(map(len, reasons)) <= width
    assert " ".join(lines) == " ".join(whole)


def test_options_are_given_again_as_a_shell_reads_them():
    given = closing.given(boots="3", only="a,b c", budget=None, yes=True, new=False)
    assert given == " --boots 3 --only 'a,b c' --yes"


def test_advice_names_the_program_that_was_used(monkeypatch, tmp_path, capsys):
    for name in ("coldboot", "invoke"):
        monkeypatch.setattr("sys.argv", [f"/venv/bin/{name}", "report"])
        with pytest.raises(SystemExit):
            commands.report_(Context(), out=str(tmp_path))
        assert f"`{name} matrix --boots 3` makes one" in capsys.readouterr().err
