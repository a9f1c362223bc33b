"""Coverage-guided fuzzing of the journal's parsers: no exception, no entry lost, the same answer on both ways in.

    pip install atheris && python tests/fuzz/fuzz_journal.py [-max_total_time=60] [-runs=N] [CORPUS …]

Bounded to 60 s unless told otherwise; without atheris (which has no wheel for every Python) it says so and does
nothing. The property-based tests in tests/test_journal_entries.py check the same without it.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path

SECONDS = 60
if importlib.util.find_spec("atheris") is None:
    sys.exit("atheris is not installed here: nothing was fuzzed")

import atheris  # noqa: E402  optional: its absence is said above

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
with atheris.instrument_imports(include=["orchestrator.journal"]):
    from orchestrator.journal import Classifier, read
    from orchestrator.journal.command import as_dict, as_text

HEADS = (b"", b'{"MESSAGE":"x"}\n', b"__CURSOR=s\n", b"Nov 30 14:51:53 box vllm[1]: x\n", b"plain log\n")


def one(data: bytes) -> None:
    """The first byte chooses the form; the rest is the journal."""
    if not data:
        return
    journal = HEADS[data[0] % len(HEADS)] + data[1:]
    entries = list(read(io.BytesIO(journal)))
    assert [entry.index for entry in entries] == list(range(len(entries)))
    early, whole = Classifier(), Classifier()
    early.feed_file(io.BytesIO(journal))
    for entry in entries:
        whole.feed(entry)
    assert early.seen == whole.seen == len(entries)
    answer = early.answer()
    assert answer == whole.answer()
    assert len(answer.evidence) <= 10
    as_text(answer)
    as_dict(answer)


def main() -> None:
    """Fuzz until the time is over."""
    bounded = any(arg.startswith(("-max_total_time", "-runs")) for arg in sys.argv)
    atheris.Setup(sys.argv if bounded else [*sys.argv, f"-max_total_time={SECONDS}"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
