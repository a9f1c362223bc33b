"""Bad input gets a clear answer, an exit code of its own, and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
from invoke.context import Context
from invoke.parser import Parser, ParserContext
from report_samples import sample

from orchestrator import commands

ROOT = Path(__file__).parent.parent


def invoke(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "invoke", *words),
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=stdin or "",
        timeout=120,
        check=False,
    )


def matrix_file(folder: Path, text: str) -> str:
    (folder / "matrix.yaml").write_text(text)
    return str(folder / "matrix.yaml")


def test_all_problems_of_a_matrix_are_told_at_once_with_file_and_line(tmp_path):
    text = """boots: 0
concurrency: [1, 0]
colour: blue
box: nowhere
boxes:
  rehearsal: {transport: local, service: process, engine: rehearsal, unit_file: unit.service}
variants:
  a: {}
  b: {spec-tokens: 010}
"""
    (tmp_path / "unit.service").write_text("[Service]\nExecStart=/usr/bin/true --model m\n")
    done = invoke("matrix", "--matrix", matrix_file(tmp_path, text), "--out", str(tmp_path / "out"))
    assert done.returncode == 4
    for line, word in ((1, "boots"), (2, "concurrency"), (3, "colour"), (4, "nowhere"), (9, "010")):
        assert any(f"matrix.yaml:{line}:" in told and word in told for told in done.stderr.splitlines()), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_flag_that_the_unit_lacks_cannot_be_unset_and_nothing_starts(tmp_path):
    (tmp_path / "unit.service").write_text(
        "[Service]\nExecStart=/usr/bin/python3 -m vllm.entrypoints.openai.api_server --model m\n"
    )
    text = """boxes:
  rehearsal: {transport: local, service: process, engine: rehearsal, unit_file: unit.service}
variants:
  a: {unset: [spec-tokens]}
  b: {unset: [dtype]}
"""
    done = invoke("matrix", "--boots", "1", "--matrix", matrix_file(tmp_path, text), "--out", str(tmp_path / "out"))
    assert done.returncode == 4
    assert "matrix.yaml:4" in done.stderr
    assert "spec-tokens" in done.stderr
    assert "matrix.yaml:5" in done.stderr
    assert not (tmp_path / "out" / "matrix" / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("matrix", "--boots", "0"), "--boots"),
        (("matrix", "--boots", "three"), "--boots"),
        (("matrix", "--budget", "soon"), "--budget"),
        (("matrix", "--box", "nowhere"), "nowhere"),
        (("matrix", "--only", "spec-1,spec-9"), "spec-9"),
        (("matrix", "--cache", "lukewarm"), "lukewarm"),
        (("matrix", "--only", ","), "--only"),
        (("matrix", "--matrix", "no-such-file.yaml"), "no-such-file.yaml"),
        (("report", "--experiment", "never"), "no experiment"),
        (("judge",), "--series"),
        (("judge", "--series", "no-such-file.yaml"), "no-such-file.yaml"),
        (("classify",), "--journal"),
        (("classify", "--journal", "no-such-file"), "no-such-file"),
    ],
)
def test_wrong_words_end_with_4_and_say_which(words, told, tmp_path):
    out = () if words[0] in ("judge", "classify") else ("--out", str(tmp_path))
    done = invoke(*words, *out)
    assert done.returncode == 4, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("task", "words", "told"),
    [
        (commands.report_, {"compare": "a,b"}, "no experiment"),
        (commands.adopt, {"variant": "spec-1", "print_": True}, "no experiment"),
        (commands.doctor_, {"box": "nowhere"}, "coldboot doctor: "),
        (commands.plan_, {"boots": "none"}, "--boots"),
        (commands.plan_, {"matrix": ""}, "--matrix: an empty path"),
        (commands.restore, {"matrix": ""}, "--matrix: an empty path"),
        (commands.plan_, {"only": "spec-9"}, "spec-9"),
        (commands.plan_, {"cache": "lukewarm"}, "lukewarm"),
    ],
)
def test_wrong_words_of_the_commands_around_a_campaign_end_with_4_too(task, words, told, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        task(Context(), out=str(tmp_path), **words)
    assert (ended.value.code, told in capsys.readouterr().err) == (4, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("task", "words", "told"),
    [
        (commands.judge, {"series": ""}, "--series: an empty path"),
        (commands.classify, {"journal_": ""}, "--journal: an empty path"),
        (commands.init, {"unit_file": ""}, "--unit-file: an empty path"),
        (commands.init, {"unit_file": "u", "matrix": " "}, "--matrix: an empty path"),
        (commands.simulate_, {"write": ""}, "--write: an empty path"),
        (commands.simulate_, {"write": "."}, "--write: .: Is a directory"),
        (commands.simulate_, {"write": "absent/page.md"}, "--write: absent/page.md: No such file"),
    ],
)
def test_a_path_that_is_empty_or_cannot_be_written_is_told_before_anything_is_done(
    task, words, told, *, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"variants": {"a": {"1": [5]}}}')
    with pytest.raises(SystemExit) as ended:
        task(Context(), **words)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (4, "")
    assert told in said.err


@pytest.mark.parametrize("task", [commands.matrix, commands.plan_])
def test_all_that_is_wrong_with_the_words_is_told_at_once(task, tmp_path, capsys):
    wrong = {"boots": "three", "budget": "soon", "seed": "x", "only": ",", "cache": "lukewarm", "plan": "weekly"}
    with pytest.raises(SystemExit) as ended:
        task(Context(), out=str(tmp_path), **wrong)
    said = capsys.readouterr().err
    assert ended.value.code == 4
    assert [name for name in wrong if f"--{name}: " not in said] == []
    assert list(tmp_path.iterdir()) == []


def test_every_option_of_every_command_says_what_it_is():
    for name, task in commands.NAMESPACE.tasks.items():
        for argument in task.get_arguments():
            assert argument.help, (name, argument.name)


@pytest.mark.parametrize("task", [commands.gate, commands.report_, commands.adopt])
def test_the_newest_of_several_experiments_is_named_with_its_box_and_age_and_a_named_one_too(task, tmp_path, capsys):
    whole = sample()
    for name, age_s in (("gwen", 7200), ("story", 60)):
        folder = tmp_path / name
        folder.mkdir()
        lines = b"".join(
            orjson.dumps(one.model_dump(mode="json"), option=orjson.OPT_APPEND_NEWLINE) for one in whole.records
        )
        (folder / "records.jsonl").write_bytes(lines)
        os.utime(folder / "records.jsonl", (time.time() - age_s,) * 2)
    words = {"variant": "spec-1", "print_": True} if task is commands.adopt else {}
    for named, told in (
        (None, f"ago; the newest of 2 in {tmp_path}, --experiment takes another"),
        ("gwen", "last written 2 h 00 min ago"),
    ):
        with suppress(SystemExit):  # the gate has its answer as an exit code
            task(Context(), out=str(tmp_path), experiment=named, **words)
        first = capsys.readouterr().err.splitlines()[0]
        assert first.startswith(f"experiment {named or 'story'} on box rehearsal, REHEARSAL, last written ")
        assert first.endswith(told)


def test_a_full_disk_below_the_result_is_one_clear_line():
    with Path("/dev/full").open("w") as full:
        argv = (sys.executable, "-m", "invoke", "judge", "--series", "examples/seed-series.yaml", "--json")
        done = subprocess.run(argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        "coldboot judge: no space left on the device: the result could not be written whole",
        "  → make room, and run it again",
    ]


def test_a_full_disk_below_the_messages_takes_neither_the_result_nor_its_exit_code(tmp_path):
    argv = (sys.executable, "-m", "invoke", "judge", "--series", "examples/seed-series.yaml", "--json")
    text = {"stdout": subprocess.PIPE, "text": True, "timeout": 120}
    wrong = (sys.executable, "-m", "invoke", "report", "--out", str(tmp_path), "--compare", "a,b", "--explain", "a")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, check=False, cwd=ROOT, stderr=full, **text)
        refused = subprocess.run(wrong, check=False, cwd=ROOT, stderr=full, **text)
    assert (done.returncode, json.loads(done.stdout)["schema"], refused.returncode) == (0, 1, 4)


def test_a_message_spells_its_task_as_it_is_typed(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        commands.box_helper(Context(), matrix=str(tmp_path / "none.yaml"))
    said = capsys.readouterr().err
    assert (ended.value.code, said.splitlines()[0]) == (
        4,
        f"coldboot box-helper: {tmp_path}/none.yaml: there is no such file",
    )


def test_the_programs_help_names_every_command_and_no_option_of_invokes_own_shell():
    argv = (sys.executable, "-c", "from orchestrator.cli import main; main()", "--help")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("Usage: coldboot COMMAND")
    assert [name for name in commands.NAMESPACE.task_names if f"\n  {name} " not in done.stdout] == []
    assert "--version" in done.stdout
    assert [word for word in ("sudo-password", "--pty", "--echo", "--hide") if word in done.stdout] == []


def test_the_seeds_tables_give_the_seeds_verdicts():
    done = invoke("judge", "--series", "examples/seed-series.yaml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    answers = {variant["name"]: (variant["verdict"], variant["reasons"]) for variant in found["variants"]}
    assert found["winner"] == "spec-1"
    assert found["provisional"] is True
    assert answers["spec-3"] == ("REJECTED", ["cold_boot_fatal"])
    assert answers["spec-5"] == ("REJECTED", ["collapses_with_concurrency", "errors_under_load"])
    assert answers["spec-8"] == ("REJECTED", ["does_not_reproduce", "errors_under_load"])


def test_an_empty_journal_is_refused():
    done = invoke("classify", "--journal", "-", stdin="")
    assert done.returncode == 4


def test_a_plain_log_on_standard_input_is_answered():
    log = "INFO 11-30 10:00:00 [core.py:1] x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    done = invoke("classify", "--journal", "-", "--json", stdin=log)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cause"] == "cuda_oom_torch"


def test_a_dry_run_prints_boots_and_commands_and_changes_nothing(tmp_path):
    done = invoke("matrix", "--boots", "3", "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("b01-") == 5
    assert done.stdout.count("b03-") == 5
    assert "--spec-tokens 8" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_each_claim_on_the_command_line_is_one_text_not_its_letters():
    words = ["gate", "--claim", "spec-1 >= 1.5x no-spec at 1", "--claim", ""]
    (_, gate) = Parser(
        contexts=[ParserContext("gate", args=commands.gate.get_arguments())], initial=ParserContext()
    ).parse_argv(words)
    assert gate.args["claim"].value == ["spec-1 >= 1.5x no-spec at 1", ""]


def test_a_folder_that_may_not_be_entered_is_one_line_and_4_not_a_bug(capsys):
    @commands.command(unexpected=3)
    def plan_() -> int:
        raise PermissionError(13, "Permission denied", "closed/gwen/plan.json")

    with pytest.raises(SystemExit) as ended:
        plan_()
    assert (ended.value.code, capsys.readouterr().err) == (
        4,
        "coldboot plan: closed/gwen/plan.json: Permission denied\n",
    )
