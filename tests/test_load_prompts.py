"""Prompts: no two alike, the same for the same seed, as long as asked for; or the user's own, checked line by line."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ProblemsError
from orchestrator.prompts import Prompts, Scale, read_prompts, text


def test_a_thousand_prompts_share_no_beginning():
    prompts = [Prompts("boot/b01", 64)[index] for index in range(1000)]
    assert len({prompt[:9] for prompt in prompts}) == 1000


def test_the_text_of_a_seed_is_the_same_on_every_machine():
    said = "40f8-9e39-5b66-422f: The driver repaired the long rope, then kept a loaf of bread, and went back"
    assert text("a", 16) == said


@settings(max_examples=50)
@given(st.text(max_size=10), st.integers(1, 800))
def test_as_many_words_as_asked_for(seed, words):
    said = text(seed, words)
    assert len(said.split()) == words
    assert "{" not in said


@pytest.mark.parametrize(
    ("scale", "tokens", "words"), [(Scale(), 125, 100), (Scale(2.0, 5.0), 405, 200), (Scale(2.0, 50.0), 10, 1)]
)
def test_words_for_tokens(scale, tokens, words):
    assert scale.words(tokens) == words
    assert len(Prompts("s", tokens, scale)[0].split()) == words


def test_own_prompts_come_in_seeded_order_and_their_second_round_is_marked():
    own = [f"prompt {number}" for number in range(5)]
    prompts = Prompts("s", 10, own=own)
    first = [prompts[index] for index in range(5)]
    assert sorted(first) == own
    assert first != own
    assert first == [Prompts("s", 10, own=own)[index] for index in range(5)]
    second = [prompts[index] for index in range(5, 10)]
    assert [prompt.partition(": ")[2] for prompt in second] == first
    assert len(set(first + second)) == 10
    again = Prompts("s", 10, own=own, repeat=True)
    assert again[0] == again[5]


def test_the_users_file_in_each_form(tmp_path):
    lines = [
        '"just text"',
        '{"prompt": "from a field", "id": 3}',
        '{"conversations": [{"from": "system", "value": "x"}, {"from": "human", "value": "asked"}]}',
        '{"messages": [{"role": "user", "content": "chat"}]}',
    ]
    expected = ("just text", "from a field", "asked", "chat")
    by_line, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    by_line.write_text("\n".join(lines) + "\n")
    array.write_text(json.dumps([json.loads(line) for line in lines]))
    assert read_prompts(by_line) == read_prompts(array) == expected


def test_every_bad_line_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"good"\n\n{"prompt": "  "}\n{"other": 1}\nnot json\n' + json.dumps("x" * 2_000_001) + "\n")
    with pytest.raises(ProblemsError) as caught:
        read_prompts(path)
    assert [problem.replace(str(path), "p") for problem in caught.value.problems] == [
        "p:2: the prompt is empty",
        "p:3: the prompt is empty",
        'p:4: no prompt; accepted: a string, {"prompt": "…"}, a ShareGPT conversation',
        "p:5: Expecting value at column 1",
        "p:6: 2000001 characters; at most 2000000",
    ]


@pytest.mark.parametrize("content", ["", "[]", "[", b"\xff\xfe"])
def test_a_file_without_prompts(tmp_path, content):
    path = tmp_path / "p"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProblemsError):
        read_prompts(path)
    with pytest.raises(ProblemsError, match="cannot be read"):
        read_prompts(tmp_path / "absent")


def test_neighbouring_prompts_have_little_in_common():
    prompts = [set(Prompts("s", 640)[index].split(". ")) for index in range(20)]
    shared = [len(a & b) / len(a) for a, b in itertools.combinations(prompts, 2)]
    assert max(shared) < 0.25
