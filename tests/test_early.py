"""A signal in the seconds of loading ends at once, with the exit code that it has everywhere."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from orchestrator import early

# Whoever runs these tests in the background of a shell has SIGINT ignored, and so would these.
HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from orchestrator import early; "
LOADING = f"{HEARS}early.until_begun(); print('loading', flush=True); input()"
BEGUN = f"{HEARS}early.until_begun(); early.begun(); print('begun', flush=True); input()"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_before_a_command_runs_a_signal_has_its_exit_code_and_one_line(number, code):
    with subprocess.Popen(
        (sys.executable, "-c", LOADING),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        assert process.wait(20) == code
        assert process.stderr.read() == "coldboot: interrupted before anything was begun; nothing was changed\n"


def test_a_command_begins_when_the_rooms_that_it_names_are_loaded(tmp_path):
    (tmp_path / "slow_room.py").write_text("print('loading', flush=True)\ninput()\n")
    (tmp_path / "begins.py").write_text(
        f"{HEARS}early.until_begun()\n"
        "from orchestrator.later import Later\nfrom orchestrator.outermost import command\n"
        "slow_room = Later('slow_room')\n"
        "@command(unexpected=3)\ndef go():\n    print('begun')\n    return slow_room.x\n"
        "go()\n"
    )
    with subprocess.Popen(
        (sys.executable, str(tmp_path / "begins.py")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        assert process.stdout.read() == ""


def test_once_a_command_runs_the_signals_are_its_own():
    with subprocess.Popen(
        (sys.executable, "-c", BEGUN), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        process.wait(20)
        assert "KeyboardInterrupt" in process.stderr.read()


@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGINT, 130, "interrupted by Ctrl-C"),
        (signal.SIGTERM, 143, "terminated by SIGTERM"),
        (signal.SIGHUP, 143, "terminated by SIGHUP"),
    ],
)
def test_a_signal_after_the_campaign_ends_what_on_end_runs_and_does_not_say_that_nothing_was_changed(
    tmp_path, number, code, how
):
    lives = tmp_path / "lives"
    os.mkfifo(lives)
    # More output than a pipe holds: it is waited for when the line comes. Its end of the pipe closes with its life.
    words = ("/bin/sh", "-c", f"head -c 200000 /dev/zero; exec 3> '{lives}'; echo waited for >&3; exec sleep 600")
    (tmp_path / "waits.py").write_text(
        f"{HEARS}early.until_begun()\n"
        "from orchestrator import on_end\nfrom orchestrator.outermost import command\n"
        f"@command(unexpected=3)\ndef matrix():\n    return on_end.run({words!r}, {{}}, timeout_s=600) and 0\n"
        "matrix()\n"
    )
    with subprocess.Popen((sys.executable, str(tmp_path / "waits.py")), stderr=subprocess.PIPE, text=True) as process:
        with lives.open() as life:
            assert life.readline() == "waited for\n"
            process.send_signal(number)
            assert process.wait(20) == code
            assert select.select([life], [], [], 20)[0] == [life]
            assert life.read() == ""
        assert process.stderr.read() == f"coldboot matrix: {how}; no campaign was under way; what is recorded stays\n"


@pytest.mark.parametrize(
    ("argv0", "ours"),
    [
        ("/v/bin/invoke", True),
        ("/v/lib/invoke/__main__.py", True),
        ("coldboot", True),
        ("/v/lib/pytest/__main__.py", False),
        ("-c", False),
    ],
)
def test_only_our_own_programs_take_the_signals(argv0, ours):
    assert early.is_program(argv0) is ours
