"""The user's own command at a campaign's end: what it is told, its deadline, and that its failure changes nothing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from orchestrator import on_end, verdict
from orchestrator.errors import MatrixError
from orchestrator.matrix import parse_matrix
from orchestrator.on_end import Ending
from orchestrator.series import read_series

ROOT = Path(__file__).parent.parent
ENDING = Ending("complete", "gwen", "rehearsal", Path("artifacts/gwen"), 0, None, 0)


def python(text: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", text, *words)


def test_the_command_is_told_the_winner_and_the_verdict_on_production():
    verdicts = verdict.judge(read_series(ROOT / "examples" / "seed-series.yaml"))
    told = on_end.environment(ENDING, verdicts)
    assert told["COLDBOOT_OUTCOME"] == "complete"
    assert told["COLDBOOT_EXPERIMENT"] == "gwen"
    assert told["COLDBOOT_FOLDER"] == str(Path("artifacts/gwen").absolute())
    assert told["COLDBOOT_WINNER"] == "spec-1"
    assert told["COLDBOOT_PROVISIONAL"] == "true"
    assert told["COLDBOOT_EXIT_CODE"] == "0"
    assert told["COLDBOOT_BOOTS_LEFT"] == "0"
    assert "spec-1" in told["COLDBOOT_SENTENCE"]


def test_what_does_not_exist_is_the_empty_text():
    told = on_end.environment(Ending("failed", "gwen", "box", Path(), 3, "the box was lost"), None)
    assert told["COLDBOOT_WHY"] == "the box was lost"
    assert (told["COLDBOOT_WINNER"], told["COLDBOOT_PROVISIONAL"], told["COLDBOOT_BOOTS_LEFT"]) == ("", "", "")


def test_the_words_reach_the_command_as_they_are_and_no_shell_reads_them(tmp_path):
    out = tmp_path / "out"
    text = "import os, sys; open(sys.argv[1], 'w').write(sys.argv[2] + os.environ['COLDBOOT_OUTCOME'])"
    wrong = on_end.run(python(text, str(out), "$(touch x); "), on_end.environment(ENDING, None), timeout_s=30)
    assert wrong is None
    assert out.read_text() == "$(touch x); complete"


def test_our_api_key_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("COLDBOOT_API_KEY", "secret")
    text = "import os, sys; sys.exit('COLDBOOT_API_KEY' in os.environ)"
    assert on_end.run(python(text), {}, timeout_s=30) is None


def test_a_status_that_is_not_0_is_a_warning_with_the_last_lines():
    wrong = on_end.run(python("import sys; print('no such room'); sys.exit(7)"), {}, timeout_s=30)
    assert wrong is not None
    assert wrong.splitlines()[0].endswith("ended with status 7")
    assert wrong.splitlines()[-1].strip() == "no such room"


def test_a_program_that_is_not_there_is_a_warning():
    wrong = on_end.run(("/no/such/program",), {}, timeout_s=30)
    assert wrong is not None
    assert "/no/such/program cannot be run" in wrong
    assert "`on_end:`" in wrong


def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(tmp_path):
    pid = tmp_path / "pid"
    text = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600']);"
        "open(sys.argv[1], 'w').write(str(child.pid)); child.wait()"
    )
    begun = time.monotonic()
    wrong = on_end.run(python(text, str(pid)), {}, timeout_s=1)
    assert time.monotonic() - begun < 10
    assert wrong is not None
    assert "did not end within 1 s (deadlines.on_end_s) and was killed" in wrong
    end = time.monotonic() + 10
    while _runs(int(pid.read_text())):
        assert time.monotonic() < end
        os.sched_yield()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_is_a_list_of_words_in_the_matrix_and_no_text():
    small = "boxes: {here: {unit: vllm.service}}\nvariants: {a: {}}\n"
    assert parse_matrix(small + "on_end: [./notify, night]\n").on_end == ("./notify", "night")
    assert parse_matrix(small).on_end is None
    for wrong in ("./notify night", "[]", "[1]"):
        with pytest.raises(MatrixError, match=r"matrix.yaml:3: on_end.*a list of words"):
            parse_matrix(small + f"on_end: {wrong}\n")


def test_it_may_change_between_two_sessions():
    small = "boxes: {here: {unit: vllm.service}}\nvariants: {a: {}}\n"
    with_it = parse_matrix(small + "on_end: [./notify]\ndeadlines: {on_end_s: 5}\n")
    assert with_it.digest() == parse_matrix(small).digest()
