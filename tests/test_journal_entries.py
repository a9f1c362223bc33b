"""Journal files in every form that journalctl prints, and the realities of a journal."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import JournalError
from orchestrator.journal import Classifier, entries, main_answer, parse_json_line, read
from orchestrator.journal.entries import TOO_LONG, form_of, parse_short_line
from orchestrator.journal.lines import parse, split

FIELDS = {
    "__REALTIME_TIMESTAMP": "1796000000000000",
    "__CURSOR": "s=1;i=2",
    "_TRANSPORT": "stdout",
    "_SYSTEMD_UNIT": "vllm.service",
    "_SYSTEMD_INVOCATION_ID": "7405cbd3dea40dd68a726f3133dd714f",
    "SYSLOG_IDENTIFIER": "vllm",
    "_PID": "1184",
}


def entry(**fields):
    return parse_json_line(json.dumps({**FIELDS, **fields}), 17)


def messages(data):
    return [item.message for item in read(io.BytesIO(data))]


def test_a_json_line_gives_every_field():
    got = entry(MESSAGE="hello")
    assert (got.index, got.message, got.at_us, got.unit, got.pid) == (
        17,
        "hello",
        1796000000000000,
        "vllm.service",
        1184,
    )
    assert (got.transport, got.identifier, got.cursor) == ("stdout", "vllm", "s=1;i=2")
    assert got.invocation_id == "7405cbd3dea40dd68a726f3133dd714f"


def test_systemd_own_entry_belongs_to_the_unit_that_it_speaks_of():
    got = entry(MESSAGE="Stopping", UNIT="llm.service", INVOCATION_ID="b" * 32, _SYSTEMD_UNIT="init.scope")
    assert (got.unit, got.invocation_id) == ("llm.service", "b" * 32)


def test_a_user_units_entries_belong_to_the_user_unit():
    assert (
        entry(MESSAGE="x", _SYSTEMD_UNIT="user@1000.service", _SYSTEMD_USER_UNIT="vllm.service").unit == "vllm.service"
    )


def test_a_byte_array_is_text_and_broken_utf8_is_shown_as_such():
    assert entry(MESSAGE=list(b"\rbar 50%")).message == "\rbar 50%"
    assert entry(MESSAGE=[255, 65]).message == "\ufffdA"


def test_a_message_that_journalctl_left_out_says_so_and_the_answer_warns():
    classifier = Classifier()
    classifier.feed(entry(MESSAGE=None))
    assert entry(MESSAGE=None).message == TOO_LONG
    assert classifier.answer().evidence_may_be_missing


def test_a_field_given_twice_gives_its_first():
    assert entry(MESSAGE=["first", "second"]).message == "first"


@pytest.mark.parametrize("line", ["", "   ", "no json", "[1, 2]", "17", "{"])
def test_what_is_no_json_object_is_none(line):
    assert parse_json_line(line, 0) is None


@pytest.mark.parametrize(
    "line",
    [
        "Nov 30 14:51:53 box vllm[1184]: hello there",
        "Nov 30 14:51:53.123456 box vllm[1184]: hello there",
        "2026-11-30T14:51:53+00:00 box vllm[1184]: hello there",
        "2026-11-30T14:51:53.123456+0000 box vllm[1184]: hello there",
        "Mon 2026-11-30 14:51:53 UTC box vllm[1184]: hello there",
        "1796050313.123456 box vllm[1184]: hello there",
        "[ 4711.123456] box vllm[1184]: hello there",
    ],
)
def test_each_short_form_gives_text_program_and_time(line):
    got = parse_short_line(line, 3)
    assert (got.message, got.identifier, got.pid, got.transport) == ("hello there", "vllm", 1184, "stdout")
    assert got.at_us is not None


def test_short_lines_of_systemd_and_the_kernel_are_told_apart():
    stop = parse_short_line("Nov 30 14:51:53 box systemd[1]: vllm.service: Main process exited, code=exited", 0)
    assert (stop.transport, stop.unit) == ("journal", "vllm.service")
    assert parse_short_line("Nov 30 14:51:53 box kernel: Out of memory: Killed process 7 (x)", 0).transport == "kernel"


def test_the_export_form_is_read_with_its_binary_fields():
    text = b"two\nlines"
    data = b"__REALTIME_TIMESTAMP=5\n_TRANSPORT=stdout\nMESSAGE\n" + len(text).to_bytes(8, "little") + text + b"\n\n"
    data += b"__REALTIME_TIMESTAMP=6\nMESSAGE=second\n\n"
    assert messages(data) == ["two\nlines", "second"]


def test_a_line_that_is_no_json_is_an_entry_of_its_own_and_the_indices_go_on():
    data = json.dumps({**FIELDS, "MESSAGE": "a"}) + "\nnot json\n\n" + json.dumps({**FIELDS, "MESSAGE": "b"}) + "\n"
    got = list(read(io.BytesIO(data.encode())))
    assert [(item.index, item.message) for item in got] == [(0, "a"), (1, "not json"), (2, "b")]


def test_an_entry_of_5_mb_is_read_whole():
    data = json.dumps({**FIELDS, "MESSAGE": "x" * 5_000_000}).encode() + b"\n"
    assert [len(text) for text in messages(data)] == [5_000_000]


@pytest.mark.parametrize(
    ("head", "form"),
    [
        (b'{"MESSAGE":"x"}\n', "json"),
        (b'\xef\xbb\xbf{"MESSAGE":"x"}\n', "json"),
        (b"__CURSOR=s=1\n", "export"),
        (b"-- Journal begins at Mon --\nNov 30 14:51:53 box vllm[1]: x\n", "short"),
        (b"INFO 11-30 14:51:53 [core.py:116] x\n", "plain"),
        (b"{not json\n", "plain"),
        (b"", "plain"),
    ],
)
def test_the_form_is_found_out_from_the_beginning(head, form):
    assert form_of(head) == form


@pytest.mark.parametrize(
    ("text", "proc", "level", "body"),
    [
        ("INFO 11-30 14:51:53 [core.py:116] x", "", "INFO", "x"),
        ("ERROR 10-24 07:20:26 registry.py:272]     code()", "", "ERROR", "    code()"),
        ("(EngineCore_DP0 pid=1) (Worker_TP7 pid=2) ERROR 12-17 21:32:44 [m.py:1] x", "Worker_TP7:2", "ERROR", "x"),
        ("(VllmWorker rank=5 pid=689) INFO 05-22 04:39:02 [g.py:1] x", "VllmWorker rank=5:689", "INFO", "x"),
        (
            "2025-09-03T00:04:02.880Z (VllmWorker TP0 pid=697) ERROR 09-03 00:04:02 [m.py:5] x",
            "VllmWorker TP0:697",
            "ERROR",
            "x",
        ),
        ("[rank0]: RuntimeError: x", "rank0", "", "RuntimeError: x"),
        ("(APIServer pid=1) INFO:     Shutting down", "APIServer:1", "INFO", "Shutting down"),
        ("2025-11-03 05:17:04,315 - vllm.v1.engine - ERROR - x", "", "ERROR", "x"),
        ("[2025-01-30 01:52:44 TP2] x", "TP2", "", "x"),
        ("worker0[info]    raise X\\n", "", "", "    raise X"),
        (
            "(RayWorkerWrapper pid=211825, ip=10.0.0.25) ERROR 03-28 02:29:13 [w.py:6] x",
            "RayWorkerWrapper:211825",
            "ERROR",
            "x",
        ),
    ],
)
def test_every_generations_prefix_is_taken_off(text, proc, level, body):
    got = parse(text)
    assert (got.proc, got.level, got.body) == (proc, level, body)


def test_colours_progress_bars_and_long_lines_are_taken_apart():
    assert split("\x1b[32mINFO\x1b[0m x") == ["INFO x"]
    assert split("(E pid=1) \rbar 1%\rbar 2%") == ["(E pid=1) ", "bar 1%", "bar 2%"]
    long = split("a" * 1_000_000 + "Killed")
    assert len(long[0]) < 20_000
    assert long[0].endswith("Killed")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_no_bytes_make_the_reader_fail(data):
    for index, item in enumerate(read(io.BytesIO(data))):
        assert item.index == index


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=80), max_size=20))
def test_no_line_of_a_plain_log_is_lost(texts):
    head = "plain log\n"
    got = messages((head + "".join(f"{text}\n" for text in texts)).encode())
    assert got == ["plain log", *texts]


FIELD = st.one_of(
    st.text(max_size=40), st.none(), st.lists(st.integers(0, 255), max_size=20), st.integers(), st.lists(st.text())
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from([*FIELDS, "MESSAGE", "UNIT", "_TRANSPORT", "INVOCATION_ID"]), FIELD),
        max_size=15,
    )
)
def test_no_fields_make_the_classifier_fail_and_no_entry_is_lost(entries):
    data = "".join(json.dumps(fields) + "\n" for fields in [{"MESSAGE": "begin"}, *entries]).encode()
    classifier = Classifier()
    classifier.feed_file(io.BytesIO(data))
    assert classifier.seen == 1 + len(entries)
    assert classifier.answer().cause


VOCABULARY = st.sampled_from(
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB",
        "(EngineCore pid=1) ERROR 11-30 15:05:03 [core.py:1332] EngineCore encountered a fatal error.",
        "INFO:     Application startup complete.",
        'INFO:     1.1.1.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
        "Traceback (most recent call last):",
        '  File "/x/vllm/v1/worker/gpu_worker.py", line 1, in capture_model',
        "Killed",
        "KeyboardInterrupt",
        "[shutdown] API server: shutdown triggered",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(VOCABULARY, st.text(max_size=60)), max_size=40))
def test_any_order_of_telling_lines_has_an_answer_and_bounded_evidence(texts):
    classifier = Classifier()
    for index, text in enumerate(texts):
        classifier.feed(parse_json_line(json.dumps({**FIELDS, "MESSAGE": text}), index))
    answer = classifier.answer()
    assert answer.outcome in ("startup_failure", "fatal", "benign")
    assert (answer.outcome == "benign") == (answer.cause == "healthy" or answer.cause.startswith("benign_"))
    assert all(item.entry < len(texts) for item in answer.evidence)


SAID = st.one_of(
    VOCABULARY,
    st.sampled_from(
        [
            "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 7.0 tokens/s, Running: 8 reqs",
            "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.1 tokens/s, Running: 8 reqs",
            "(EngineCore pid=2) INFO 11-30 14:54:09 [x.py:88] Iteration(4711): 8 context requests",
            "an unremarkable line",
            "(EngineCore pid=2) ERROR 11-30 14:54:09 [x.py:88] an error that no rule names",
        ]
    ),
)


@st.composite
def journals(draw):
    """Entries of two units and three starts, by program, manager and kernel, digits changing as they do."""
    entries = []
    for message in draw(st.lists(SAID, max_size=30)):
        number = str(draw(st.integers(0, 9)))
        unit, start = draw(st.sampled_from(["a.service", "b.service"])), draw(st.sampled_from(["x" * 31, "y" * 31]))
        fields = {
            "MESSAGE": message.replace("1", number),
            "_SYSTEMD_UNIT": unit,
            "_SYSTEMD_INVOCATION_ID": start + draw(st.sampled_from("12")),
            "_TRANSPORT": draw(st.sampled_from(["stdout", "stdout", "stdout", "kernel", "syslog"])),
            "__REALTIME_TIMESTAMP": f"179600000000{number}000",
            "__CURSOR": f"s=ab;i={number}f",
        }
        if draw(st.integers(0, 5)) == 0:
            word = draw(
                st.sampled_from(
                    ["Started a.", "Stopping a...", "a.service: Scheduled restart job, restart counter is at 1."]
                )
            )
            fields |= {"MESSAGE": word, "_TRANSPORT": "journal", "SYSLOG_IDENTIFIER": "systemd", "UNIT": unit}
        entries.append(fields)
    return entries


@settings(max_examples=150, deadline=None)
@given(journals())
def test_lines_taken_unparsed_change_no_answer_about_any_mix_of_units_and_starts(entries):
    early, whole = Classifier(), Classifier()
    early.feed_file(io.BytesIO("".join(json.dumps(fields) + "\n" for fields in entries * 2).encode()))
    for index, fields in enumerate(entries * 2):
        whole.feed(parse_json_line(json.dumps(fields), index))
    assert early.all_answers() == whole.all_answers()
    assert (early.seen, early.own_entries, early.alarm) == (whole.seen, whole.own_entries, whole.alarm)


def as_array(path):
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return json.dumps(entries, indent=1).encode()


def test_one_json_array_is_read_as_its_entries(tmp_path):
    text = b'{"MESSAGE": "first", "_PID": "7"}\n{"MESSAGE": "second"}\n'
    lines = list(read(io.BytesIO(text)))
    (tmp_path / "lines").write_bytes(text)
    assert list(read(io.BytesIO(as_array(tmp_path / "lines")))) == lines
    assert [entry.message for entry in lines] == ["first", "second"]


def test_what_only_begins_as_an_array_is_a_plain_log():
    assert [entry.message for entry in read(io.BytesIO(b"[{not json\nat all"))] == ["[{not json", "at all"]
    assert [entry.message for entry in read(io.BytesIO(b"[2026-11-30 12:00:00] INFO ready\n"))] == [
        "[2026-11-30 12:00:00] INFO ready"
    ]


def test_an_array_that_is_too_large_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(entries, "MOST_ARRAY_BYTES", 1 << 10)
    with pytest.raises(JournalError, match="a JSON array of more than 0 MiB") as refused:
        list(read(io.BytesIO(b"[" + b'{"MESSAGE": "x"},' * 8000 + b"{}]")))
    assert "jq -c" in str(refused.value)


def test_entries_without_anything_of_an_engine_are_told_apart_from_a_healthy_boot(tmp_path):
    noise, healthy = tmp_path / "noise", tmp_path / "healthy"
    noise.write_text("hello world\nlorem ipsum\n")
    healthy.write_text("INFO:     Application startup complete.\n")
    said, well = main_answer(noise), main_answer(healthy)
    assert "nothing of an engine was recognised here" in said.text
    assert (said.value["outcome"], said.value["complete"], said.value["recognised"]) == ("benign", False, False)
    assert "recognised" not in well.text
    assert well.value["recognised"] is True
