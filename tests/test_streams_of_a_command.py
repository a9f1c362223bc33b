"""A command whose standard streams are closed, or cannot write all letters, ends as it would with good ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAYS = (
    "import sys; from orchestrator.outermost import command, say, show\n"
    "@command(unexpected=3)\ndef gate():\n    say('a – b'); show('c – d'); return 2\n"
    "gate()\n"
)


@pytest.mark.parametrize(
    ("closed", "out", "err"), [(">&-", "", "a – b\n"), ("2>&-", "c – d\n", ""), (">&- 2>&-", "", "")]
)
def test_a_closed_stream_changes_no_exit_code_and_not_what_the_other_says(closed, out, err):
    words = ("/bin/sh", "-c", f'exec "$0" -X utf8 -c "$1" {closed}', sys.executable, SAYS)
    ended = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, out, err)


def test_a_letter_that_the_encoding_lacks_is_a_question_mark():
    told = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        (sys.executable, "-c", SAYS), capture_output=True, encoding="ascii", timeout=60, check=False, env=told
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "c ? d\n", "a ? b\n")
