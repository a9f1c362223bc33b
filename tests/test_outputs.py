"""What a campaign writes where: `--json-lines`, `--quiet`, and the command of `on_end:`, on short rehearsals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INVOKE = (sys.executable, "-m", "invoke", "matrix")

pytestmark = pytest.mark.rehearsal

TELL = """\
import os, pathlib, sys
told = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("COLDBOOT_"))
pathlib.Path(sys.argv[1]).write_text("\\n".join(told))
sys.exit(int(sys.argv[2]))
"""


def environment():
    dropped = ("FORCE_COLOR", "COLORTERM", "COLDBOOT_API_KEY")
    return {name: value for name, value in os.environ.items() if name not in dropped}


@pytest.fixture
def place(tmp_path):
    """A matrix of its own whose `on_end:` writes down what it is told, and fails when asked to."""

    def make(status=0):
        (tmp_path / "examples").symlink_to(ROOT / "examples")
        (tmp_path / "tell.py").write_text(TELL)
        words = [sys.executable, "-S", str(tmp_path / "tell.py"), str(tmp_path / "told"), str(status)]
        text = (ROOT / "matrix.yaml").read_text(encoding="utf-8")
        (tmp_path / "matrix.yaml").write_text(f"on_end: {json.dumps(words)}\n{text}", encoding="utf-8")
        return ("--matrix", str(tmp_path / "matrix.yaml"), "--out", str(tmp_path / "out"))

    return make


def told(folder):
    return dict(line.split("=", 1) for line in (folder / "told").read_text(encoding="utf-8").splitlines())


def run(*words):
    return subprocess.run(
        (*INVOKE, *words),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )


def test_json_lines_are_the_ledger_and_nothing_else_stands_on_standard_output(place, tmp_path):
    done = run("--boots", "1", "--only", "spec-1", "--json-lines", *place())
    assert done.returncode == 0, done.stderr
    ledger = tmp_path / "out" / "gwen" / "records.jsonl"
    assert done.stdout == ledger.read_text(encoding="utf-8")
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert (kinds[0], kinds[-1]) == ("campaign_started", "campaign_ended")
    assert kinds.count("trial") == 4
    assert "next:\n  invoke report --experiment gwen --out " in done.stderr
    assert "\x1b" not in done.stderr
    said = told(tmp_path)
    assert said["COLDBOOT_OUTCOME"] == "complete"
    assert said["COLDBOOT_EXPERIMENT"] == "gwen"
    assert said["COLDBOOT_FOLDER"] == str(tmp_path / "out" / "gwen")
    assert (said["COLDBOOT_EXIT_CODE"], said["COLDBOOT_REHEARSAL"]) == ("0", "true")


def test_quiet_says_warnings_and_the_end_and_a_failing_command_is_one_of_them(place, tmp_path):
    done = run("--boots", "1", "--only", "spec-3", "--quiet", *place(status=3))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("        ")] == ["WARNING", "WARNING"]
    assert lines[0].startswith("WARNING b01-spec-3 died at its first request: triton_oom: ")
    assert "1 of 1 boot of spec-3 ended so." in lines[1]
    assert "--spec-tokens (matrix.yaml:" in lines[1]
    assert lines[-1].endswith("ended with status 3")
    assert "REJECTED" in done.stdout
    assert "next:\n  invoke report --experiment gwen --out " in done.stdout
    assert told(tmp_path)["COLDBOOT_WINNER"] == ""


def in_terminal(columns, *words, **more):
    """What a command writes into a terminal of so many columns and 24 lines, and how it ends."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")} | more
    process = subprocess.Popen(
        (*INVOKE, *words), cwd=ROOT, env=env | {"TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    written = bytearray()
    try:
        with suppress(OSError):  # how a terminal ends whose other side is closed
            while select.select([master], [], [], 60)[0]:
                written += os.read(master, 65536)
        return written.decode(), process.wait(timeout=60)
    finally:
        os.close(master)
        process.kill()
        process.wait()


def test_in_60_columns_the_end_of_a_campaign_cuts_no_word_no_path_and_no_command(place, tmp_path):
    words = (*place(), "--boots", "1", "--only", "spec-3")
    written, status = in_terminal(60, *words, NO_COLOR="1")
    assert status == 0, written
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", written)
    end = written[written.rindex("gwen on rehearsal (REHEARSAL): complete after ") :]
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in end.split("\r\n")]
    assert "…" not in end
    # The frame is above, the whole warning below it, its path in one piece on a line of its own.
    warning = next(place for place, line in enumerate(lines) if line.startswith("WARNING b01-spec-3 died"))
    journal = f"        {tmp_path}/out/gwen/boots/b01-spec-3/journal.jsonl"
    assert warning < lines.index("        Journal:") == lines.index(journal) - 1
    options = f" --out {tmp_path}/out"
    commands = [line for line in lines if line.startswith("  invoke ")]
    assert commands[0] == f"  invoke report --experiment gwen{options}"
    assert f"  invoke report --experiment gwen{options} --explain spec-3" in commands
    assert f"  {tmp_path}/out/gwen/report/report.html" in lines
    whole = [line for line in lines if str(tmp_path) not in line and not line.startswith("  invoke ")]
    assert max(map(len, whole)) <= 60


def test_an_interrupted_campaign_tells_the_command_that_it_was(place, tmp_path):
    process = subprocess.Popen(
        (*INVOKE, "--boots", "1", "--only", "spec-1", "--new", "--json-lines", "--quiet", *place()),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["kind"] == "boot_started":
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert json.loads(rest.splitlines()[-1])["outcome"] == "interrupted"
    said = told(tmp_path)
    assert (said["COLDBOOT_OUTCOME"], said["COLDBOOT_EXIT_CODE"]) == ("interrupted", "130")
    assert "1 boot is left" in said["COLDBOOT_WHY"]
    assert "→ the same command, without --new, goes on" in errors  # with it, it would begin afresh


def test_a_campaign_that_has_nothing_to_do_runs_no_command_and_leaves_standard_output_empty(place, tmp_path):
    words = ("--boots", "1", "--only", "spec-3", "--json-lines", "--quiet", *place())
    assert run(*words).returncode == 0
    (tmp_path / "told").unlink()
    again = run(*words)
    assert (again.returncode, again.stdout) == (0, "")
    assert "is complete" in again.stderr
    assert not (tmp_path / "told").exists()
