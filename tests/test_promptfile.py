"""The user's own prompts: each form is read, every bad line is named, and nothing makes the reader fall over."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ProblemsError
from orchestrator.promptfile import MAX_BYTES, parse_prompts, read_prompts

LINES = [
    '"just text"',
    '{"prompt": "from a field", "id": 3}',
    '{"conversations": [{"from": "system", "value": "x"}, {"from": "human", "value": "asked"}]}',
    '{"messages": [{"role": "user", "content": "chat"}]}',
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]}]}',
]
EXPECTED = ("just text", "from a field", "asked", "chat", "in\nparts")
P = Path("p")


def problems(raw: bytes) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        parse_prompts(raw, P)
    return list(caught.value.problems)


def test_the_users_file_in_each_form(tmp_path):
    by_line, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    by_line.write_text("\n".join(LINES) + "\n")
    array.write_text(json.dumps([json.loads(line) for line in LINES], indent=1))
    lines, entries = read_prompts(by_line), read_prompts(array)
    assert lines.prompts == entries.prompts == EXPECTED
    assert (lines.where(3), entries.where(3)) == (f"{by_line}:4", f"{array}: entry 4")
    assert lines.digest != entries.digest


@pytest.mark.parametrize(
    "change", [lambda raw: raw[:-1], lambda raw: raw.replace(b"\n", b"\r\n"), lambda raw: b"\xef\xbb\xbf" + raw]
)
def test_ends_of_lines_and_a_mark_at_the_beginning_make_no_difference(change):
    assert parse_prompts(change("\n".join([*LINES, ""]).encode()), P).prompts == EXPECTED


def test_every_bad_line_is_named():
    raw = '"good"\n\n{"prompt": "  "}\n{"other": 1}\nnot json\n' + json.dumps("x" * 2_000_001) + '\n"\\ud800"\n'
    assert problems(raw.encode()) == [
        "p:2: the prompt is empty",
        "p:3: the prompt is empty",
        'p:4: no prompt; accepted: a string, {"prompt": "…"}, {"messages": […]}, or a ShareGPT conversation',
        "p:5: Expecting value at column 1",
        "p:6: 2000001 characters; at most 2000000",
        "p:7: half a surrogate pair",
    ]


def test_a_file_of_nothing_but_bad_lines_names_20_and_counts_them_all():
    with pytest.raises(ProblemsError) as caught:
        parse_prompts(b"{\n" * 81, Path("p"))
    assert (len(caught.value.problems), caught.value.count) == (20, 81)
    assert str(caught.value).splitlines()[-2:] == [
        "p:20: Expecting property name enclosed in double quotes at column 2",
        "and 61 more problems, 81 in all",
    ]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "p: no prompt in it"),
        (b"[]", "p: no prompt in it"),
        (b'["a",\n 3 ""]', "p:2: Expecting ',' delimiter at column 4"),
        (b'["a", 3]', "p: entry 2: no prompt; accepted: "),
        (b'"a"\n"b\xff"', "p:2: byte 0xff is not UTF-8"),
        (b"1" * 5000, "p:1: cannot be read as JSON: Exceeds the limit"),
        (b'{"a":' * 200_000, "p:1: cannot be read as JSON: maximum recursion depth"),
    ],
)
def test_a_file_that_is_none(raw, said):
    assert [problem.startswith(said) for problem in problems(raw)] == [True]


def test_a_file_that_is_not_there_or_too_large(tmp_path):
    with pytest.raises(ProblemsError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "absent")
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ProblemsError, match="larger than 64 MiB"):
        read_prompts(large)


text = st.text(min_size=1, max_size=20).filter(lambda said: said.strip() and said.isprintable())
rows = st.one_of(
    text,
    st.fixed_dictionaries({"prompt": text, "n": st.integers()}),
    st.builds(lambda said: {"conversations": [{"from": "gpt", "value": "no"}, {"from": "human", "value": said}]}, text),
    st.builds(lambda said: {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": said}]}, text),
)


@settings(max_examples=100)
@given(st.lists(rows, min_size=1, max_size=6), st.booleans())
def test_what_is_written_is_read_and_each_stands_in_its_line(written, ascii_only):
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in written]
    found = parse_prompts("\n".join(lines).encode(), P)
    assert len(found.prompts) == len(written)
    assert [found.where(place) for place in range(len(written))] == [f"p:{n}" for n in range(1, len(written) + 1)]
    assert parse_prompts(f"[{','.join(lines)}]".encode(), P).prompts == found.prompts


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=60), st.text(alphabet='[]{}",:\\u0d8\n "', max_size=60).map(str.encode)))
def test_whatever_stands_there_it_is_read_or_its_problems_are_named(raw):
    try:
        found = parse_prompts(raw, P)
    except ProblemsError as error:
        assert all(problem.startswith("p:") for problem in error.problems)  # noqa: PT017 - either way is right
    else:
        assert all(prompt.strip() for prompt in found.prompts)
        assert len(found.places) == len(found.prompts) > 0


def test_a_pipe_or_a_directory_is_refused_at_once_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ProblemsError, match="no regular file"):
            read_prompts(path)
