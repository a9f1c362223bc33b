"""Three answers for CI, each with its exit code."""

from __future__ import annotations

import pytest

from orchestrator.errors import UsageError
from orchestrator.gate import gate
from orchestrator.records import BootResult, LevelResult, Series


def boots(name: str, values: list[float], *, cause: str | None = None) -> list[BootResult]:
    found = []
    for number, value in enumerate(values, start=1):
        died = cause is not None
        levels = () if died else (LevelResult(concurrency=1, value=value),)
        outcome = "crashed" if died else "completed"
        found.append(
            BootResult(
                boot=f"b{number:02d}-{name}",
                variant=name,
                cache="cold",
                block=number,
                position=number,
                outcome=outcome,
                died=died,
                died_before_trials=died,
                cause=cause,
                levels=levels,
            )
        )
    return found


STEADY = [100.0, 100.5, 99.5, 100.2, 99.8, 100.1]
FAST = [200.0, 201.0, 199.0, 200.4, 199.6, 200.2]
SLOW = [90.0, 90.4, 89.6, 90.2, 89.8, 90.1]


def series(production: str | None, **variants: list[BootResult]) -> Series:
    return Series(
        experiment="x",
        production=production,
        variants=tuple(variants),
        concurrency=(1,),
        boots=tuple(boot for found in variants.values() for boot in found),
    )


@pytest.mark.parametrize(
    ("production", "variants", "code", "word"),
    [
        ("a", {"a": boots("a", STEADY)}, 0, "PASS"),
        ("a", {"a": boots("a", STEADY[:3])}, 2, "UNDECIDED"),
        ("a", {"a": boots("a", STEADY), "b": boots("b", FAST)}, 5, "FAIL"),
        ("a", {"a": boots("a", [1.0, 1.0], cause="triton_oom"), "b": boots("b", STEADY)}, 5, "FAIL"),
        (None, {"a": boots("a", STEADY)}, 2, "UNDECIDED"),
    ],
)
def test_production_passes_fails_or_is_undecided(production, variants, code, word):
    found, sentence = gate(series(production, **variants))
    assert found == code
    assert word in sentence


def test_a_claim_is_judged_by_its_bound():
    both = series("a", a=boots("a", STEADY), b=boots("b", FAST))
    assert gate(both, claims=["b >= 1.5x a at 1"])[0] == 0
    assert gate(both, claims=["b >= 2.5x a at 1"])[0] == 5
    assert gate(both, claims=["b >= 2.0x a at 1"])[0] == 2


def test_a_baseline_is_compared_as_sets_of_boots():
    good = series("a", a=boots("a", STEADY))
    assert gate(good, baseline=good)[0] == 0
    assert gate(series("a", a=boots("a", SLOW)), baseline=good)[0] == 5


def test_the_worse_of_two_answers_counts():
    both = series("a", a=boots("a", STEADY), b=boots("b", FAST))
    code, text = gate(both, baseline=both, claims=["b >= 2.5x a at 1"])
    assert code == 5
    assert len(text.splitlines()) == 2


def test_each_of_several_claims_is_answered_and_the_worst_counts():
    both = series("a", a=boots("a", STEADY), b=boots("b", FAST))
    code, text = gate(both, claims=["b >= 1.5x a at 1", "b >= 2.0x a at 1", "b >= 2.5x a at 1"])
    assert (code, [line.split(":")[0] for line in text.splitlines()]) == (5, ["PASS", "UNDECIDED", "FAIL"])


def test_a_level_that_the_experiment_does_not_have_is_bad_input_and_not_undecided_for_ever():
    both = series("a", a=boots("a", STEADY), b=boots("b", FAST)).model_copy(update={"concurrency": (1,)})
    with pytest.raises(UsageError, match="level 2 is not in") as told:
        gate(both, claims=["b >= 1.5x a at 2"])
    assert told.value.hint == "one of: 1"
