"""What to do next, under the headline of every report and at a campaign's end."""

from __future__ import annotations

from pathlib import Path

import pytest
from invoke.context import Context
from report_samples import sample

from orchestrator import closing, commands, report
from orchestrator.report import next_steps


@pytest.fixture(scope="module")
def verdicts():
    return sample(rehearsal=False).verdicts


def test_a_provisional_winner_wants_boots_then_an_explanation_then_the_drop_in(verdicts):
    said = [(step.text, step.command) for step in next_steps(verdicts, "gwen.2", tool="coldboot")]
    assert said == [
        ("spec-1 is provisional: the same command with --boots 6 adds the boots that vouching needs", None),
        (
            "why spec-3 is rejected, with the whole derivation",  # production's rejection matters most
            "coldboot report --experiment gwen.2 --explain spec-3",
        ),
        (
            "what would make spec-1 production; it is printed, nothing is changed",
            "coldboot adopt spec-1 --print --experiment gwen.2",
        ),
    ]


def test_boots_that_are_left_come_first_and_nobody_is_told_to_ask_for_more(verdicts):
    first, *others = next_steps(verdicts, "gwen", boots_left=2)
    assert first.text == "2 boots left: the same command goes on"
    assert not any("--boots" in step.text for step in others)


def test_a_winner_that_is_production_already_needs_no_drop_in(verdicts):
    own = verdicts.model_copy(update={"production": verdicts.winner})
    assert not any("adopt" in (step.command or "") for step in next_steps(own, "gwen"))


def test_after_a_rehearsal_the_way_to_an_own_box_is_told():
    last = list(next_steps(sample().verdicts, "gwen"))[-1]
    assert last.command == "invoke init --box-host ALIAS --unit UNIT --matrix mine.yaml"


def test_the_page_and_the_comment_say_them_below_the_headline():
    made = sample()
    steps = tuple(next_steps(made.verdicts, "gwen"))
    view = report.build_view(made.records, made.series, made.verdicts, None, steps)
    html, markdown = (report.FORMATS[name](view) for name in ("report.html", "report.md"))
    assert html.index("<h1>") < html.index("What now") < html.index('id="verdicts"')
    assert "<code>invoke report --experiment gwen --explain spec-3</code>" in html
    assert markdown.index("**What now**") < markdown.index("| variant | verdict |")
    assert "with the whole derivation: `invoke report --experiment gwen --explain spec-3`" in markdown


def test_a_campaigns_end_says_where_the_report_will_be_and_the_same_steps(verdicts, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/venv/bin/coldboot", "matrix"])
    lines = list(closing.campaign_end(verdicts, Path("out/gwen"), " --out out"))
    assert lines[1] == "next: coldboot report --experiment gwen --out out"
    explain = "coldboot report --experiment gwen --out out --explain spec-3"
    assert lines[3] == f"why spec-3 is rejected, with the whole derivation: {explain}"


def test_advice_names_the_program_that_was_used(monkeypatch, tmp_path, capsys):
    for name in ("coldboot", "invoke"):
        monkeypatch.setattr("sys.argv", [f"/venv/bin/{name}", "report"])
        with pytest.raises(SystemExit):
            commands.report_(Context(), out=str(tmp_path))
        assert f"`{name} matrix --boots 3` makes one" in capsys.readouterr().err
