"""Series files: what is accepted in each format, and every problem of a bad one at once, with where it stands."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from orchestrator import report, verdict
from orchestrator.errors import SeriesError
from orchestrator.series import read_series

SEED = Path(__file__).parent.parent / "examples" / "seed-series.yaml"


@pytest.fixture
def read(tmp_path):
    def from_text(text, name="x.yaml"):
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
        return read_series(path)

    return from_text


@pytest.fixture
def problems(read):
    def of(text, name="x.yaml"):
        with pytest.raises(SeriesError) as caught:
            read(text, name)
        assert caught.value.exit_code == 4
        assert len(set(caught.value.problems)) == len(caught.value.problems)
        return list(caught.value.problems)

    return of


def table(series, variant):
    """Boots of a variant as {level: value}; `failed` and `-` for what has none."""
    return [
        {x.concurrency: x.value if x.value is not None else "failed" if x.failed else "-" for x in boot.levels}
        for boot in series.boots
        if boot.variant == variant
    ]


# --- what is accepted ----------------------------------------------------------------------------------------------


def test_only_variants_is_required(read):
    series = read("variants: {a: {1: [5]}}", "night.yaml")
    assert series.experiment == "night"
    assert (series.tolerance, series.production, series.box, series.boots_planned) == (0.05, None, None, None)
    assert series.rehearsal is False
    assert [boot.cache for boot in series.boots] == ["cold"]


def test_every_key_at_the_top(read):
    series = read(
        "experiment: gwen\nbox: garage\nrehearsal: true\ntolerance: 0.1\nproduction: a\nboots_planned: 3\n"
        "cache: as-is\nvariants: {a: {1: [5]}}"
    )
    assert (series.experiment, series.box, series.rehearsal, series.tolerance) == ("gwen", "garage", True, 0.1)
    assert (series.production, series.boots_planned, series.boots[0].cache) == ("a", 3, "as-is")


def test_the_seed(read):
    series = read_series(SEED)
    assert series.variants == ("no-spec", "spec-1", "spec-3", "spec-5", "spec-8")
    assert series.production == "spec-3"
    assert table(series, "spec-8") == [
        {1: 124.8, 2: 90.9, 4: 200.7, 8: "failed"},
        {1: 46.8, 2: 89.5, 4: 64.4, 8: "-"},
    ]
    assert table(series, "spec-3") == [{}, {}, {1: 46.7, 2: 99.2, 4: 93.1, 8: 208.6}]
    dead = [boot for boot in series.boots if boot.variant == "spec-3"]
    assert [(b.cache, b.died, b.died_before_trials, b.outcome, b.cause) for b in dead] == [
        ("cold", True, True, "crashed", "triton_oom"),
        ("cold", True, True, "crashed", "triton_oom"),
        ("warm", False, False, "completed", None),
    ]


def test_levels_may_be_strings_of_digits(read):
    assert read('variants: {a: {"8": [5], 1: [6]}}') == read("variants: {a: {1: [6], 8: [5]}}")
    assert read('{"variants": {"a": {"8": [5], "1": [6]}}}', "x.json") == read("variants: {a: {1: [6], 8: [5]}}")


def test_a_shorter_list_leaves_its_last_boots_not_measured(read):
    assert table(read("variants: {a: {1: [5, 6, 7], 8: [9]}}"), "a") == [{1: 5, 8: 9}, {1: 6, 8: "-"}, {1: 7, 8: "-"}]


def test_both_forms_say_the_same(read):
    short = "variants: {a: {1: [5, 6], 8: [null, 4]}}"
    long = "variants: {a: {boots: [{trials: {1: 5, 8: null}}, {trials: {8: 4, 1: 6}}]}}"
    assert read(short) == read(long)


def test_yaml_json_and_csv_say_the_same(read):
    tree = {"variants": {"a": {"boots": [{"fatal": "oom"}, {"cache": "warm", "trials": {"1": 5.5, "8": None}}]}}}
    yaml = "variants: {a: {boots: [{fatal: oom}, {cache: warm, trials: {1: 5.5, 8: null}}]}}"
    csv = "variant,boot,concurrency,value,cache,fatal\na,x,,,cold,oom\na,y,1,5.5,warm,\na,y,8,null,warm,\n"
    assert read(yaml) == read(json.dumps(tree), "x.json") == read(csv, "x.csv")


def test_csv_columns_in_any_order_and_without_the_optional_ones(read):
    series = read("\ufeffvalue,concurrency,boot,variant\r\n124.8,1,mon,a\r\n\r\n-,8,mon,a\r\n46.8,1,tue,a\r\n", "x.csv")
    assert table(series, "a") == [{1: 124.8, 8: "-"}, {1: 46.8}]


def test_a_thousand_boots(read):
    series = read(f"variants: {{a: {{1: {list(range(1, 1001))}}}}}")
    assert len(series.boots) == 1000
    assert series.boots[999].levels[0].value == 1000.0


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("-3", "-3 is not positive"),
        ("0", "0 is not positive"),
        ("0.0", "0.0 is not positive"),
        (".nan", "'.nan' is no number"),
        (".inf", "'.inf' is no number"),
        ("fast", "'fast' is no number"),
        ('"5"', "'5' is no number"),
        ("5 tok/s", "'5 tok/s' is no number"),
        ("true", "true is no number"),
        ("1e999", "is too large"),
        ("[1, 2]", "repeats within one boot are no boots"),
        ("{a: 1}", "a mapping is no number"),
    ],
)
def test_a_value_that_is_none(problems, value, what):
    (problem,) = problems(f"variants:\n  a:\n    1: [5, {value}]")
    assert what in problem
    assert problem.startswith("x.yaml:3: variants.a.1[1]: ")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_json_numbers_that_are_not_finite(problems, value):
    (problem,) = problems(f'{{"variants": {{"a": {{"1": [{value}]}}}}}}', "x.json")
    assert "is not finite" in problem
    assert problem.startswith("x.json: variants.a.1[0]: ")


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "fast", "1_000", "", "0x10"])
def test_csv_values_that_are_none(problems, value):
    (problem,) = problems(f"variant,boot,concurrency,value\na,x,1,{value}\n", "x.csv")
    assert problem.startswith("x.csv:2: value: ")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no keys, but null"),
        ("[1, 2]", "no keys, but a list"),
        ("experiment: x", "`variants` missing"),
        ("variants: {}", "variants: no variants"),
        ("variants: []", "variants: no variants"),
        ("variants: {a: {}}", "variants.a: no boots"),
        ("variants: {a: 5}", "variants.a: 5 are no boots"),
        ("variants: {a: {1: []}}", "variants.a.1: an empty list"),
        ("variants: {a: {1: 5}}", "variants.a.1: 5 is no list"),
        ("variants: {a: {0: [5]}}", "variants.a.0: '0' is no concurrency"),
        ("variants: {a: {1.5: [5]}}", "'1.5' is no concurrency"),
        ("variants: {a: {one: [5]}}", "'one' is no concurrency"),
        ("variants: {a: {-1: [5]}}", "'-1' is no concurrency"),
        ('variants: {a: {1: [5], "1": [6]}}', "variants.a.1: given twice"),
        ("variants: {a: {1: [5]}, a: {1: [6]}}", "variants.a: given twice"),
        ("variants: {a: {1: [5]}}\nvariants: {b: {1: [5]}}", "variants: given twice"),
        ("variants: {a: {boots: []}}", "variants.a.boots: no boots"),
        ("variants: {a: {boots: [5]}}", "variants.a.boots[0]: 5 is no boot"),
        ("variants: {a: {boots: [{}]}}", "an empty boot"),
        ("variants: {a: {boots: [{cache: warm}]}}", "an empty boot"),
        ("variants: {a: {boots: [{trials: {}}]}}", "are no trials"),
        ("variants: {a: {boots: [{trials: {1: 5}, fatal: oom}]}}", "both `fatal`"),
        ("variants: {a: {boots: [{fatal: 137}]}}", "137 is no cause"),
        ("variants: {a: {boots: [{fatal: null}]}}", "null is no cause"),
        ("variants: {a: {boots: [{trials: {1: 5}, cache: lukewarm}]}}", "'lukewarm' is no cache state"),
        ("variants: {a: {boots: [{trials: {1: 5}, chache: warm}]}}", "chache: unknown key"),
        ("variants: {a: {boots: [{trials: {1: 5}}], 1: [5]}}", "beside `boots`"),
        ("variants: {'': {1: [5]}}", "'' is no name of a variant"),
        ("varaints: {a: {1: [5]}}\nvariants: {a: {1: [5]}}", "varaints: unknown key"),
        ("tolerance: 0\nvariants: {a: {1: [5]}}", "tolerance: 0 is not accepted"),
        ("tolerance: 5\nvariants: {a: {1: [5]}}", "tolerance: 5 is not accepted"),
        ("tolerance: 5 %\nvariants: {a: {1: [5]}}", "tolerance: '5 %' is not accepted"),
        ("boots_planned: 0\nvariants: {a: {1: [5]}}", "boots_planned: 0 is not accepted"),
        ("boots_planned: true\nvariants: {a: {1: [5]}}", "boots_planned: true is not accepted"),
        ("rehearsal: yes\nvariants: {a: {1: [5]}}", "rehearsal: 'yes' is not accepted"),
        ("experiment: 5\nvariants: {a: {1: [5]}}", "experiment: 5 is no name"),
        ("production: b\nvariants: {a: {1: [5]}}", "production: 'b' is no variant here"),
        ("cache: hot\nvariants: {a: {1: [5]}}", "cache: 'hot' is no cache state"),
        ("variants: {a: {1: [5]}", "not YAML"),
    ],
)
def test_a_file_that_is_none(problems, text, what):
    (problem,) = problems(text)
    assert what in problem


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not JSON"),
        ("{", "x.json:1: not JSON"),
        ('{"variants": {"a": {"1": [5]}, "a": {"1": [6]}}}', "variants.a: given twice"),
        ('{"variants": {"a": {"1": [5], "1": [6]}}}', "variants.a.1: given twice"),
        ("[" * 100_000, "not JSON that can be read"),
        ('{"variants": ' + "[" * 900 + "]" * 900 + "}", "no variants"),
        ('{"variants": {"a": {"1": [' + "9" * 5000 + "]}}}", "not JSON that can be read"),
        ('{"variants": {"\\ud800": {"1": [5]}}}', "no name of a variant"),
        ('{"variants": {"a\\u001b[31m": {"1": [5]}}}', "no name of a variant"),
    ],
)
def test_json_that_is_none(problems, text, what):
    found = problems(text, "x.json")
    assert what in found[0]
    assert all(problem.isprintable() for problem in found)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no boots"),
        ("variant,boot,concurrency,value\n", "no boots"),
        ("variant,boot,value\na,x,5\n", "no column concurrency"),
        ("variant,boot,concurrency,value,speed\na,x,1,5,6\n", "'speed' is no column"),
        ("variant,boot,concurrency,value,value\na,x,1,5,6\n", "column 'value' given twice"),
        ("variant;boot;concurrency;value\na;x;1;5\n", "is no column"),
        ("variant,boot,concurrency,value\na,x,1,5,6\n", "more than the header has"),
        ("variant,boot,concurrency,value\na,x,1\n", "fewer than the header has"),
        ("variant,boot,concurrency,value\n,x,1,5\n", "variant: '' is no name"),
        ("variant,boot,concurrency,value\na,,1,5\n", "boot: '' is no name"),
        ("variant,boot,concurrency,value\na,x,1,5\na,x,1,6\n", "x.csv:3: concurrency: 1 given twice for this boot"),
        ("variant,boot,concurrency,value\na,x,0,5\n", "'0' is no concurrency"),
        ("variant,boot,concurrency,value,cache\na,x,1,5,cold\na,x,2,5,warm\n", "this boot was cold before"),
        ("variant,boot,concurrency,value,cache\na,x,1,5,hot\n", "'hot' is no cache state"),
        ("variant,boot,concurrency,value,fatal\na,x,1,5,oom\n", "a death before the trials has no values"),
        ("variant,boot,concurrency,value,fatal\na,x,,,oom\na,x,1,5,\n", "died before the trials, so it has no values"),
        ('variant,boot,concurrency,value\na,x,1,"5\n', "not CSV"),
    ],
)
def test_csv_that_is_none(problems, text, what):
    assert what in problems(text, "x.csv")[0]


def test_all_problems_at_once_each_with_its_line(problems):
    found = problems(
        "tolerance: -1\nvariants:\n  a:\n    1: [5, -5, .nan]\n    0: [5]\n  b: {}\n  a:\n    1: [5]\ncolour: red\n"
    )
    assert sorted(problem.split("; accepted")[0] for problem in found) == [
        "x.yaml:1: tolerance: -1 is not accepted",
        "x.yaml:4: variants.a.1[1]: -5 is not positive",
        "x.yaml:4: variants.a.1[2]: '.nan' is no number",
        "x.yaml:5: variants.a.0: '0' is no concurrency",
        "x.yaml:6: variants.b: no boots",
        "x.yaml:7: variants.a: given twice (first in line 3)",
        "x.yaml:9: colour: unknown key",
    ]


def test_a_file_that_cannot_be_read(tmp_path, problems):
    with pytest.raises(SeriesError, match="cannot be read: No such file"):
        read_series(tmp_path / "none.yaml")
    with pytest.raises(SeriesError, match="no result of vllm bench sweep serve, GuideLLM or AIPerf among 0 JSON"):
        read_series(tmp_path)
    assert "not UTF-8" in problems(b"variants: {\xff\xfe: 1}")[0]


def test_an_alias_bomb_ends(problems):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert any("more than" in problem for problem in problems("\n".join(lines)))


# --- anything at all -----------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NEARLY = st.fixed_dictionaries(
    {
        "variants": st.dictionaries(
            st.text(min_size=1, max_size=6),
            st.dictionaries(st.sampled_from(["1", "2", "8", "boots", "x"]), ANYTHING, max_size=3),
            max_size=3,
        )
        | ANYTHING
    },
    optional={"tolerance": ANYTHING, "experiment": ANYTHING, "cache": ANYTHING, "boots_planned": ANYTHING},
)


def read_or_refuse(path):
    """The series, or the problems; anything but a SeriesError is a failure."""
    try:
        return read_series(path), ()
    except SeriesError as error:
        return None, error.problems


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NEARLY | ANYTHING)
def test_any_json_is_read_or_refused_with_printable_problems(tmp_path, data):
    path = tmp_path / "any.json"
    path.write_text(json.dumps(data))
    series, problems = read_or_refuse(path)
    if series is None:
        assert problems
        assert all(problem.isprintable() for problem in problems)
    else:
        assert all(level.value is None or level.value > 0 for boot in series.boots for level in boot.levels)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@pytest.mark.parametrize("name", ["any.csv", "any.yaml"])
def test_any_bytes_are_read_or_refused(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(b"variant,boot,concurrency,value\n" + data if name == "any.csv" else data)
    series, problems = read_or_refuse(path)
    assert (series is None) == bool(problems)


def test_a_mean_over_levels_with_and_without_a_length_claims_no_length_for_those_without(read):
    series = read("variants: {a: {8: [100, 101], 8@8000: [50, 51]}, b: {8: [90, 91], 8@8000: [60, 61]}}")
    said = str(verdict.judge(series).sentence)
    assert "at 8 streams with prompts of unknown length and 8 streams with prompts of 8000 tokens" in said


def test_a_value_of_308_digits_is_printed_in_three_figures(read):
    series = read("variants: {a: {8: [1e308, 1e307, 1.5e308]}, b: {8: [100, 101, 102]}}")
    verdicts = verdict.judge(series)
    table = Console(file=io.StringIO(), width=200)
    table.print(report.table(verdicts))
    assert "1e+308" in table.file.getvalue()
    assert "0000000" not in table.file.getvalue() + verdict.explain(series, "a") + verdicts.sentence


def test_of_60_problems_20_are_shown_and_the_others_counted(read, problems):
    text = "variants: {a: {8: [" + ", ".join(["-1"] * 60) + "]}}"
    assert len(problems(text)) == 60
    with pytest.raises(SeriesError) as caught:
        read(text)
    shown = str(caught.value).splitlines()
    assert shown[19].startswith("x.yaml:1: variants.a.8[19]: -1 is not positive")
    assert shown[20] == "and 40 more problems, 60 in all"


def test_one_cell_is_told_in_the_singular(read):
    series = read("variants: {a: {8: [50, 50, 50, 50, 50, 51]}, b: {8: [9, 9, 9, 9, 9, 9]}}")
    assert "its one cell reproduces;" in verdict.judge(series).sentence
