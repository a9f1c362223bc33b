"""Grids, linked factors, versions and includes: plain variants come out, and every problem has its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.errors import MatrixError
from orchestrator.matrix import Variant, differences, load_matrix, parse_matrix, select

HEAD = "boxes: {here: {unit: vllm.service}}\n"


def made(text):
    return parse_matrix(HEAD + text).variants


def names(text):
    return [variant.name for variant in made(text)]


def problems(text):
    with pytest.raises(MatrixError) as caught:
        parse_matrix(HEAD + text)
    return caught.value.problems


# --- grids ---------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_after_the_variants_that_are_written_out():
    text = "variants: {production: {}}\ngrids: {g: {factors: {a: [1, 2], b: [x, y]}}}\n"
    assert names(text) == ["production", "a-1_b-x", "a-1_b-y", "a-2_b-x", "a-2_b-y"]
    assert made(text)[3] == Variant(name="a-2_b-x", set={"a": 2, "b": "x"})


def test_a_grid_needs_no_variants_beside_it():
    assert names("grids: {g: {factors: {a: [1]}}}\n") == ["a-1"]


def test_levels_keep_their_types_and_have_readable_names():
    text = "grids: {g: {factors: {f: [true, false, 0.90, fp8/e4m3, [1, 2], {m: n}]}}}\n"
    assert names(text) == ["f-on", "f-off", "f-0.9", "f-fp8-e4m3", "f-5", "f-6"]
    assert [variant.set["f"] for variant in made(text)] == [True, False, 0.9, "fp8/e4m3", [1, 2], {"m": "n"}]


def test_excluded_are_those_that_have_all_levels_of_a_rule_by_value_or_label():
    grid = "grids: {{g: {{factors: {{a: [1, 2], b: {{p: {{}}, q: {{x: 1}}}}}}, exclude: [{rule}]}}}}\n"
    assert names(grid.format(rule="{a: 1, b: q}")) == ["a-1_p", "a-2_p", "a-2_q"]
    assert names(grid.format(rule="{a: a-2}")) == ["a-1_p", "a-1_q"]
    assert names(grid.format(rule="{a: 1}, {b: q}")) == ["a-2_p"]


def test_true_is_not_1_in_an_exclusion():
    assert names("grids: {g: {factors: {a: [true, 1]}, exclude: [{a: 1}]}}\n") == ["a-on"]


def test_linked_factors_go_through_their_levels_together():
    text = "grids: {g: {factors: {a: [1, 2], c: [7, 8], b: [x, y]}, linked: [[a, b]]}}\n"
    assert names(text) == ["a-1_c-7_b-x", "a-1_c-8_b-x", "a-2_c-7_b-y", "a-2_c-8_b-y"]


def test_a_level_may_say_all_that_belongs_together():
    text = """\
grids:
  g:
    factors:
      venv:
        v26: {}
        v32: {program: [/opt/v32/bin/python, -m, vllm.entrypoints.openai.api_server], unset: [spec-model]}
      env.OMP_NUM_THREADS: [1, 0.50]
    common: {enable-prefix-caching: false, unset: [dtype], env: {A: 1}}
"""
    assert names(text) == [
        "v26_OMP_NUM_THREADS-1",
        "v26_OMP_NUM_THREADS-0.5",
        "v32_OMP_NUM_THREADS-1",
        "v32_OMP_NUM_THREADS-0.5",
    ]
    assert made(text)[3] == Variant(
        name="v32_OMP_NUM_THREADS-0.5",
        set={"enable-prefix-caching": False},
        unset=("dtype", "spec-model"),
        env={"A": "1", "OMP_NUM_THREADS": "0.50"},
        program=("/opt/v32/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
    )


def test_a_name_of_ones_own_may_hold_the_value_alone():
    text = 'grids: {g: {factors: {spec-tokens: [1, 3], v: {old: {}, new: {x: 1}}}, name: "{v}.s{spec-tokens!}"}}\n'
    assert names(text) == ["old.s1", "new.s1", "old.s3", "new.s3"]


@pytest.mark.parametrize(
    ("grid", "line", "told"),
    [
        ("    factors: {a: []}\n", 4, "grids.g.factors.a: no levels; accepted: a list of values"),
        ("    factors: 3\n", 4, "grids.g.factors: `3` is not accepted"),
        ("    linked: []\n", 3, "grids.g.factors: is missing"),
        ("    factors: {a: [1]}\n    colour: 1\n", 5, "grids.g.colour: unknown key; accepted: factors, linked"),
        ("    factors: {a: [1]}\n    comon: {}\n", 5, "unknown key, did you mean `common`?"),
        ("    factors: {a: [1, 2]}\n    exclude: [{b: 1}]\n", 5, "grids.g.exclude[0].b: there is no factor `b`"),
        ("    factors: {a: [1, 2]}\n    exclude: [{a: 3}]\n", 5, "exclude[0].a: is none of its levels; accepted: a-1"),
        ("    factors: {a: [1]}\n    exclude: [{a: 1}]\n", 5, "grids.g.exclude: excludes everything"),
        (
            "    factors: {a: [1, 2], b: [1]}\n    exclude: [{a: 1}, {a: 1, b: 1}, {b: 1}]\n",
            5,
            "grids.g.exclude: excludes everything",
        ),
        (
            "    factors: {a: [1], b: [1, 2]}\n    linked: [[a, b]]\n",
            5,
            "different numbers of levels: a has 1, b has 2",
        ),
        ("    factors: {a: [1], b: [1]}\n    linked: [[a, c]]\n", 5, "is no list of factors; accepted: two or more"),
        ("    factors: {a: [1], b: [1]}\n    linked: [[a, b], [b, a]]\n", 5, "`b` is linked twice"),
        ("    factors: {a: [1, 1]}\n", 4, "grids.g.factors.a[1]: is called `a-1` as well as level 1"),
        ("    factors: {a: {x: 3}}\n", 4, "grids.g.factors.a.x: is no mapping; accepted: the keys of a variant"),
        ('    factors: {a: [1, 2]}\n    name: "same"\n', 3, "makes a second variant `same`"),
        ('    factors: {a: [1]}\n    name: "{b}"\n', 5, "grids.g.name: there is no factor `b`; accepted: {a}"),
        ('    factors: {a: [1]}\n    name: "a/{a}"\n', 3, "`a/a-1` cannot name a folder"),
        ("    factors: {p: {x: {program: numactl}}}\n", 4, "`numactl` is not accepted; accepted: a list of words"),
        ("    factors: {a: [1, null]}\n", 4, "nothing (null) is no value of a flag"),
        ("    factors: {host: [a]}\n", 4, "`host` belongs to the box"),
    ],
)
def test_what_is_wrong_with_a_grid_is_told_with_its_line(grid, line, told):
    said = problems("grids:\n  g:\n" + grid)
    assert any(one.startswith(f"matrix.yaml:{line}: ") and told in one for one in said), said


def test_one_mistake_in_a_grid_is_told_once_and_not_for_each_variant():
    said = problems("grids:\n  g:\n    factors: {a: [1, 2, 3], b: [1, 2, 3]}\n    common: {port: 8}\n")
    assert len(said) == 1
    assert said[0].startswith("matrix.yaml:5: ")


def test_what_one_level_sets_and_another_leaves_out_is_a_problem_at_its_line():
    said = problems("grids:\n  g:\n    factors:\n      a: [1]\n      b:\n        without: {unset: [x, a]}\n")
    (one,) = said
    assert one.startswith("matrix.yaml:7: ")
    assert "`a` is set and unset in the same variant" in one


def test_a_grid_of_millions_is_refused_before_it_is_made():
    factors = ", ".join(f"f{number}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for number in range(9))
    said = problems(f"grids: {{g: {{factors: {{{factors}}}}}}}\n")
    assert "1000000000 variants; accepted: at most 500" in said[0]


def test_the_line_of_a_made_variants_flag_is_where_its_level_stands():
    matrix = parse_matrix(HEAD + "grids:\n  g:\n    factors:\n      a:\n      - 1\n      - 2\n")
    assert matrix.line_of("variants", "a-2", "a") == 7
    assert matrix.problem("variants", "a-2", "a", what="no") == "matrix.yaml:7: variants.a-2.a: no"


def test_only_takes_the_names_that_a_grid_makes():
    matrix = parse_matrix(HEAD + "grids: {g: {factors: {a: [1, 2]}}}\n")
    assert [variant.name for variant in select(matrix, ["a-2"]).variants] == ["a-2"]


def test_a_grid_and_the_same_variants_written_out_are_the_same_experiment():
    grid = parse_matrix(HEAD + "grids: {g: {factors: {a: [1, 2]}}}\n")
    plain = parse_matrix(HEAD + "variants: {a-1: {a: 1}, a-2: {a: 2}}\n")
    assert grid.digest() == plain.digest()


def test_another_program_is_another_experiment():
    text = "variants: {{v: {{program: [/opt/{version}/bin/python]}}}}\n"
    old, new = (parse_matrix(HEAD + text.format(version=version)) for version in ("v26", "v32"))
    assert old.digest() != new.digest()
    assert "variants.v.program" in differences(old.text, new)[0]


# --- includes ------------------------------------------------------------------------------------------------------

COMMON = """\
boxes:
  here:
    unit: vllm.service
    env: {A: 0.90}
variants:
  production: {}
  spec-1: {spec-tokens: 1}
load:
  window_s: 20
  input_tokens: 512
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "common.yaml").write_text(COMMON)
    return tmp_path


def write(folder, text, name="long.yaml"):
    (folder / name).write_text(text)
    return folder / name


def test_what_stands_in_the_file_counts_before_what_it_includes(folder):
    matrix = load_matrix(
        write(folder, "include: [common.yaml]\nload: {input_tokens: 4096}\nvariants: {spec-1: {spec-tokens: 2}}\n")
    )
    assert matrix.experiment == "long"
    assert (matrix.load.input_tokens, matrix.load.window_s) == (4096, 20)
    assert [variant.name for variant in matrix.variants] == ["production", "spec-1"]
    assert matrix.variant("spec-1").set == {"spec-tokens": 2}


def test_a_box_of_the_same_name_is_taken_whole_and_keeps_no_key_of_the_included_one(folder):
    matrix = load_matrix(
        write(folder, "include: [common.yaml]\nboxes: {here: {unit: b.service}, there: {unit: c.service}}\nbox: here\n")
    )
    assert {name: (box.unit, dict(box.env)) for name, box in matrix.boxes.items()} == {
        "here": ("b.service", {}),
        "there": ("c.service", {}),
    }


def test_a_later_file_counts_before_an_earlier_one(folder):
    write(folder, "load: {window_s: 7}\nseed: 3\n", "more.yaml")
    matrix = load_matrix(write(folder, "include: [common.yaml, more.yaml]\n"))
    assert (matrix.load.window_s, matrix.load.input_tokens, matrix.seed) == (7, 512, 3)


def test_a_problem_is_told_with_the_file_that_it_stands_in(folder):
    write(folder, "load:\n  window_s: soon\nvariants:\n  x: {host: a}\n", "more.yaml")
    with pytest.raises(MatrixError) as caught:
        load_matrix(write(folder, "include: [common.yaml, more.yaml]\nboots: 0\n"))
    told = caught.value.problems
    assert told[0].startswith(f"{folder / 'long.yaml'}:2: boots: ")
    assert told[1].startswith(f"{folder / 'more.yaml'}:2: load.window_s: ")
    assert told[2].startswith(f"{folder / 'more.yaml'}:4: variants.x.host: ")
    assert len(told) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("include: [no.yaml]\n", "long.yaml:1: include[0]: there is no file `no.yaml`"),
        ("include: common.yaml\n", "long.yaml:1: include: `common.yaml` is not accepted; accepted: a list of paths"),
        ("include: [nested.yaml]\n", "nested.yaml:1: include: an included file includes no other"),
        ("include: [list.yaml]\n", "list.yaml:1: is no mapping of keys"),
        ("include: [bad.yaml]\n", "bad.yaml:2: not YAML"),
        ("include: [common.yaml]\nvariants: 3\n", "long.yaml:2: variants: `3` is not accepted"),
    ],
)
def test_an_include_that_cannot_be_used_is_told(folder, text, told):
    write(folder, "include: [common.yaml]\n", "nested.yaml")
    write(folder, "[1, 2]\n", "list.yaml")
    write(folder, "a: [\n", "bad.yaml")
    with pytest.raises(MatrixError) as caught:
        load_matrix(write(folder, text))
    assert any(told in one for one in caught.value.problems), caught.value.problems


def test_the_experiment_keeps_one_file_that_says_the_same(folder):
    text = "include: [common.yaml]\ngrids: {g: {factors: {a: [1, 2], env.B: [0.50]}}}\nexperiment: e\n"
    matrix = load_matrix(write(folder, text))
    assert matrix.text == text
    again = parse_matrix(matrix.kept)
    assert again.digest() == matrix.digest()
    assert differences(matrix.kept, matrix) == ()
    assert again.variant("a-2_B-0.5").env == {"B": "0.50"}
    assert again.boxes["here"].env == {"A": "0.90"}
    assert json.loads(matrix.kept.partition("\n")[2])["experiment"] == "e"


def test_a_file_that_includes_nothing_is_kept_as_given(folder):
    matrix = load_matrix(folder / "common.yaml")
    assert matrix.kept == COMMON


def test_a_change_in_an_included_file_is_named_when_the_experiment_goes_on(folder):
    path = write(folder, "include: [common.yaml]\n")
    kept = load_matrix(path).kept
    write(folder, COMMON.replace("window_s: 20", "window_s: 30"), "common.yaml")
    assert differences(kept, load_matrix(path)) == ("load.window_s: 20.0 → 30.0",)


def test_lines_of_included_keys_are_those_of_their_file(folder):
    matrix = load_matrix(write(folder, "include: [common.yaml]\n"))
    assert matrix.line_of("variants", "spec-1", "spec-tokens") == 7
    assert matrix.problem("variants", "spec-1", what="no").endswith("common.yaml:7: variants.spec-1: no")


def test_unit_checks_name_the_file_of_the_variant(folder):
    def check(_box, variant):
        if variant.name == "spec-1":
            yield ("spec-tokens",), "is not there"

    with pytest.raises(MatrixError) as caught:
        load_matrix(write(folder, "include: [common.yaml]\n"), unit_check=check)
    (one,) = caught.value.problems
    assert one == f"{Path(folder / 'common.yaml')}:7: variants.spec-1.spec-tokens: is not there"


def test_more_than_a_thousand_variants_are_told_by_their_number_and_key():
    levels = ", ".join(map(str, range(400)))
    grids = "grids:\n" + "".join(f"  g{n}: {{factors: {{f{n}: [{levels}]}}}}\n" for n in range(3))
    assert problems(grids) == (
        "matrix.yaml:2: grids: 1200 variants in all, with those that are written out; accepted: at most 1000",
    )
    plain = "variants:\n" + "".join(f"  v{n}: {{a: {n}}}\n" for n in range(1001))
    assert problems(plain) == ("matrix.yaml:2: variants: 1001 variants in all; accepted: at most 1000",)
    assert len(made(plain.replace("  v1000: {a: 1000}\n", ""))) == 1000
