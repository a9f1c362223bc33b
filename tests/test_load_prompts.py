"""Prompts: no two alike, the same for the same seed, to the token as long as asked for; or the user's own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prompts import OwnPrompts, Prompts, Scale, Writer, serial, vocabulary
from orchestrator.rehearsal.text import pieces

# What a word costs to a tokenizer that cuts them into pieces of four letters.
TABLE = Scale(1.5, 7.0, measured=True, costs={word: len(pieces(f" {word}")) for word in vocabulary()})
EXACT, ABOUT = Writer(TABLE), Writer()


def test_a_thousand_prompts_share_no_beginning():
    prompts = [Prompts("boot/b01", 64, EXACT)[index] for index in range(1000)]
    assert len({" ".join(prompt.split()[:4]) for prompt in prompts}) == 1000


def test_the_text_of_a_seed_is_the_same_on_every_machine():
    assert ABOUT.write("a", 15) == "Note every simple ask everything quiet ask names an In a bright"


def test_a_serial_is_64_bits_in_words():
    assert len(serial("a")) == 8
    assert len({tuple(serial(str(number))) for number in range(10_000)}) == 10_000


@settings(max_examples=200)
@given(st.text(max_size=10), st.integers(24, 9000))
def test_a_prompt_has_its_tokens_exactly(seed, tokens):
    said = EXACT.write(seed, tokens)
    assert TABLE.length(said) == tokens
    # The same as the tokenizer counts it, whose first word has no space before it.
    assert len(pieces(said)) + 7 == tokens
    assert "{" not in said


@settings(max_examples=50)
@given(st.text(max_size=10), st.integers(12, 9000))
def test_without_a_table_it_has_as_many_words_as_that_makes_on_average(seed, tokens):
    assert len(ABOUT.write(seed, tokens).split()) == pytest.approx(tokens / 1.25, abs=0.51)


@pytest.mark.parametrize("tokens", [-5, 0, 1, 8])
def test_however_few_are_asked_for_five_words_are_there(tokens):
    assert len(ABOUT.write("a", tokens).split()) in (5, 6)


def test_drift_is_taken_into_account():
    drifting = Scale(1.5, 7.0, measured=True, costs=TABLE.costs, drift=1.02)
    said = Writer(drifting).write("a", 2000)
    assert drifting.length(said) == pytest.approx(2000, abs=2)
    assert TABLE.length(said) == pytest.approx(1961, abs=2)


@pytest.mark.parametrize(
    ("scale", "longest"),
    [
        (Scale(), None),
        (Scale(max_model_len=8192), 7777),  # 2 % less than 7936: only the mean cost of a word is known
        (Scale(costs=TABLE.costs, max_model_len=8192), 7936),
        (Scale(costs=TABLE.costs, max_model_len=200), -56),
    ],
)
def test_the_longest_prompt_that_fits_with_its_answer(scale, longest):
    assert scale.longest(256) == longest


def test_own_prompts_come_in_seeded_order_and_their_second_round_is_marked():
    own = [f"prompt {number}" for number in range(5)]
    prompts = OwnPrompts(own, "s")
    first = [prompts.take() for _ in range(5)]
    assert sorted(first) == own
    assert first != own
    same = OwnPrompts(own, "s")
    assert first == [same.take() for _ in range(5)]
    assert prompts.again == 0
    later = [prompts.take() for _ in range(10)]
    assert [prompt.partition(": ")[2] for prompt in later] == first + first
    assert len(set(first + later)) == 15
    assert prompts.again == 10


def test_own_prompts_are_repeated_as_they_are_when_that_is_wished():
    prompts = OwnPrompts(["a", "b"], "s", repeat=True)
    said = [prompts.take() for _ in range(4)]
    assert said[:2] == said[2:]
    assert sorted(said[:2]) == ["a", "b"]
    assert (prompts.again, len(prompts)) == (2, 2)


def test_what_stands_in_the_file_twice_is_sent_once():
    assert len(OwnPrompts(["a", "b", "a"], "s")) == 2
    assert len(OwnPrompts(["a", "b", "a"], "s", repeat=True)) == 3


def test_neighbouring_prompts_have_little_in_common():
    prompts = [set(Prompts("s", 640, EXACT)[index].split(". ")) for index in range(20)]
    shared = [len(a & b) / len(a) for a, b in itertools.combinations(prompts, 2)]
    assert max(shared) < 0.25
