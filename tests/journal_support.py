"""Cases and entries for the tests of the journal room."""

import gzip
import json
from pathlib import Path

from orchestrator.journal import classify, parse_json_line
from orchestrator.records import JournalEntry

DATA = Path(__file__).parent / "data" / "journal"
INVOCATION = "a" * 32


def cases(name):
    """The cases of one file: id, expected, entries …"""
    data = (DATA / name).read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if name.endswith(".gz") else data).splitlines()]


def entries_of(case):
    return [parse_json_line(json.dumps(entry), index) for index, entry in enumerate(case["entries"])]


def answer_of(case):
    return classify(entries_of(case))


def said(text, index=0, *, at_s=0.0, invocation=INVOCATION, unit="vllm.service", transport="stdout"):
    """An entry of the program's own."""
    return JournalEntry(index, text, round(at_s * 1e6), invocation, unit, "vllm", None, transport)


def systemd(text, index=0, *, at_s=0.0, invocation=INVOCATION, unit="vllm.service"):
    """systemd's word about the unit."""
    return JournalEntry(index, text, round(at_s * 1e6), invocation, unit, "systemd", 1, "journal")


def kernel(text, index=0, *, at_s=0.0):
    return JournalEntry(index, text, round(at_s * 1e6), None, None, "kernel", None, "kernel")
