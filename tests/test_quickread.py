"""Trials read quickly are what pydantic reads: from real ledgers, and whatever stands in a line."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from report_samples import sample

from orchestrator.ledger import to_line
from orchestrator.quickread import trial_reader
from orchestrator.records import RECORD, TrialEnded

LEDGERS = sorted((Path(__file__).parent.parent / "docs" / "evidence").rglob("*records.jsonl"))
FULL = TrialEnded(
    boot="b01-a",
    variant="a",
    cache="cold",
    block=1,
    position=1,
    concurrency=8,
    window_s=30.0,
    tokens=1e4,
    tokens_per_s=333.3,
    valid=True,
)
READ, LEAN = trial_reader(), trial_reader(frozenset({"whole"}))


def lines() -> list[bytes]:
    real = [line for path in LEDGERS for line in path.read_bytes().splitlines(keepends=True)]
    return [*real, *map(to_line, sample().records)]


def test_every_trial_of_every_ledger_here_is_read_as_pydantic_reads_it():
    trials = 0
    for line in lines():
        slow, quick = RECORD.validate_python(orjson.loads(line)), READ(line)
        assert (quick is not None) == isinstance(slow, TrialEnded)
        if quick is not None:
            trials += 1
            assert quick == slow
            assert (repr(quick), hash(quick.boot)) == (repr(slow), hash(slow.boot))
            assert to_line(quick) == to_line(slow)
    assert trials > 50


def test_a_key_that_is_left_out_is_as_never_written():
    line = next(line for line in lines() if b'"whole":{' in line)
    slow = orjson.loads(line)
    del slow["whole"]
    assert LEAN(line) == RECORD.validate_python(slow)
    assert READ(line).whole is not None


def test_what_an_older_version_did_not_write_has_its_default():
    old = orjson.loads(to_line(FULL))
    for name in ("input_tokens", "errors", "rulers", "deltas", "whole", "ttft_ms", "gpu", "warnings", "at"):
        del old[name]
    quick = READ(orjson.dumps(old))
    assert quick.model_copy(update={"at": ""}) == RECORD.validate_python(old | {"at": ""})
    counters = {"deltas": {"seconds": 1.0}}
    assert READ(orjson.dumps(old | counters)).deltas.requests_by_reason == {}


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["seconds", "n", "p50", "counter", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(sorted(TrialEnded.model_fields)), VALUES)
def test_whatever_a_field_holds_is_read_alike_or_left_to_pydantic(name, value):
    try:
        line = orjson.dumps(orjson.loads(to_line(FULL)) | {name: value}, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # an integer beyond 64 bit, which no ledger holds
        return
    quick = READ(line)
    if quick is not None:
        assert quick == RECORD.validate_python(orjson.loads(line))


@pytest.mark.parametrize(
    "line", [b"", b"{", b'{"kind":"trial"}', b'{"kind":"trial","v":2}', b'[{"kind":"trial"}]', b'"kind":"trial"\xff']
)
def test_what_is_no_trial_is_left_to_pydantic(line):
    assert READ(line) is None
    with pytest.raises((orjson.JSONDecodeError, ValidationError)):
        RECORD.validate_python(orjson.loads(line))
