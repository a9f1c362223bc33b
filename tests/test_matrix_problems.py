"""A matrix.yaml that is wrong: file, line, key, what, accepted; everything at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import USAGE, MatrixError, ProblemsError
from orchestrator.matrix import _unit_problems, load_matrix, load_yaml, parse_matrix
from orchestrator.yamlfile import MAX_NODES, parse

GOOD = """\
boxes:
  here:
    unit: vllm.service
variants:
  spec-1:
    spec-tokens: 1
"""


def problems(text):
    with pytest.raises(MatrixError) as caught:
        parse_matrix(text)
    assert caught.value.exit_code == USAGE == 4
    return caught.value.problems


def the_problem(text):
    (problem,) = problems(text)
    return problem


# --- all at once ---------------------------------------------------------------------------------------------------


def test_everything_is_said_at_once_in_the_order_of_the_lines():
    text = """\
experimnt: x
boots: 0
concurrency: [1, 0, 1e3]
headroom: no
concurrency: [2]
boxes:
  here:
    service: proces
    unit: vllm.service
    isolate: yes
  there: {transport: ssh}
variants:
  a:
    x: 1
    unset: [x]
  a: {}
  "../b": {}
"""
    lines = [problem.split(": ")[:2] for problem in problems(text)]
    assert lines == [
        ["matrix.yaml:1", "experimnt"],
        ["matrix.yaml:1", "box"],
        ["matrix.yaml:2", "boots"],
        ["matrix.yaml:3", "concurrency[1]"],
        ["matrix.yaml:3", "concurrency[2]"],
        ["matrix.yaml:4", "headroom"],
        ["matrix.yaml:5", "concurrency"],
        ["matrix.yaml:8", "boxes.here.service"],
        ["matrix.yaml:10", "boxes.here.isolate"],
        ["matrix.yaml:11", "boxes.there.unit"],
        ["matrix.yaml:15", "variants.a.unset[0]"],
        ["matrix.yaml:16", "variants.a"],
        ["matrix.yaml:17", "variants.../b"],
    ]


def test_a_problem_is_one_line_with_what_is_accepted():
    assert the_problem(GOOD + "boots: 0\n") == (
        "matrix.yaml:7: boots: `0` is not accepted; accepted: a whole number, 1 to 1000, or auto"
    )


def test_a_problem_stays_one_printable_line_whatever_stands_in_the_file():
    wrong = the_problem(GOOD + 'experiment: "a\\nb\\e[31m"\n')
    assert wrong.startswith(r'matrix.yaml:7: experiment: "a\nb\x1b[31m" (text) is not accepted;')
    assert "…" in the_problem(f"{GOOD}cache: {'x' * 10_000}\n")
    assert len(the_problem(f"{GOOD}cache: {'x' * 10_000}\n")) < 200


def test_what_only_the_unit_knows_is_said_with_all_the_rest(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text("""\
boots: 0
boxes: {a: {service: process, program: [engine, --there, "1"]}}
variants:
  good: {unset: [there]}
  wrong:
    env: {A: 1}
    unset: [gone]
  unreadable: {unset: [gone], x: null}
  wrong: {}
""")
    asked = []

    def unit_check(box, variant):
        asked.append((box.name, variant.name, variant.env))
        return [(("unset",), f"there is no `{flag}`") for flag in variant.unset if f"--{flag}" not in box.program]

    with pytest.raises(MatrixError) as caught:
        load_matrix(path, unit_check=unit_check)
    assert asked == [("a", "good", {}), ("a", "wrong", {"A": "1"})]
    assert [problem.removeprefix(f"{path}:").split(";")[0] for problem in caught.value.problems] == [
        "1: boots: `0` is not accepted",
        "7: variants.wrong.unset: there is no `gone`",
        "8: variants.unreadable.x: nothing (null) is no value of a flag",
        "9: variants.wrong: given twice (first in line 5)",
    ]


def test_the_unit_is_asked_about_the_box_of_the_command_line_and_not_about_one_that_cannot_be_read(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text("box: a\nboxes: {a: {unit: a}, b: {unit: b}, c: {unit: 1}}\nvariants: {x: {}}\n")
    asked = []
    for box in (None, "b", "c", "nowhere"):
        with pytest.raises(MatrixError, match=r"boxes\.c\.unit: `1` is not accepted"):
            load_matrix(path, box=box, unit_check=lambda box, _: asked.append(box.name) or ())
    assert asked == ["a", "b"]
    path.write_text("box: a\nboxes: {a: {unit: a}}\nvariants: {x: {}}\n")
    assert load_matrix(path, unit_check=lambda *_: ()).box == "a"


def test_the_unit_is_not_asked_about_a_box_with_a_number_that_is_ambiguous(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text("boxes: {a: {unit: a, port: 010}}\nvariants: {x: {}}\n")
    with pytest.raises(MatrixError) as caught:
        load_matrix(path, unit_check=lambda *_: [((), "was asked")])
    assert [problem.removeprefix(f"{path}:")[:25] for problem in caught.value.problems] == ["1: boxes.a.port: `010` is"]


# --- one at a time: the whole file is good but for one line --------------------------------------------------------

TOP = [
    ("boots: -1", "boots: `-1` is not accepted; accepted: a whole number, 1 to 1000, or auto"),
    ("boots: 1e3", "boots: `1e3` is no whole number as written, write 1000;"),
    ("boots: 010", "boots: `010` is 8-based to some YAML readers and 10-based to others; accepted: 10 as a number"),
    ("boots: 1_000", "boots: `1_000` is text in YAML 1.2, write 1000;"),
    ("boots: 0x10", "boots: `0x10` is text here, write 16;"),
    ("boots: 0o17", "boots: `0o17` is text here, write 15;"),
    ('boots: "3"', 'boots: "3" (text) is text because of its quotes, write 3;'),
    ("boots: true", "boots: `true` is not accepted;"),
    ("boots: 3.5", "boots: `3.5` is not accepted;"),
    ("boots: often", "boots: `often` is no number; accepted: a whole number, 1 to 1000, or auto"),
    ("boots: 1001", "boots: `1001` is not accepted;"),
    (
        "concurrency: [0]",
        "concurrency[0]: `0` is not accepted; accepted: a list of whole numbers, 1 to 4096, each once",
    ),
    ("concurrency: [-4]", "concurrency[0]: `-4` is not accepted;"),
    ("concurrency: [2, 2]", "concurrency[1]: `2` is given twice;"),
    ("concurrency: [1, on]", "concurrency[1]: `on` is no number;"),
    ("concurrency: [010]", "concurrency[0]: `010` is 8-based"),
    ("concurrency: []", "concurrency: an empty list is not accepted;"),
    ("concurrency: 4", "concurrency: `4` is not accepted; accepted: a list of whole numbers"),
    ("concurrency:", "concurrency: nothing (null) is not accepted;"),
    ("cache: hot", "cache: `hot` is not accepted; accepted: cold, clear, warm, as-is, or a list of these"),
    ("cache: [cold, wram]", "cache[1]: `wram` is not accepted, did you mean `warm`?;"),
    ("cache: [cold, cold]", "cache[1]: `cold` is given twice;"),
    ("cache: []", "cache: an empty list is not accepted;"),
    ("tolerance: .nan", "tolerance: `.nan` is no finite number; accepted: a number above 0, below 1"),
    ("tolerance: .inf", "tolerance: `.inf` is no finite number;"),
    ("tolerance: 5", "tolerance: `5` is not accepted;"),
    ("tolerance: 0", "tolerance: `0` is not accepted;"),
    ("tolerance: 5%", "tolerance: `5%` is no number;"),
    ("tolerance: 1e999", "tolerance: `1e999` is too large;"),
    ("seed: -1", "seed: `-1` is not accepted;"),
    (
        "headroom: no",
        "headroom: `no` is text in YAML 1.2, not a boolean, write false; accepted: true, false, on or off",
    ),
    ("headroom: 1", "headroom: `1` is not accepted;"),
    ("production: spec-2", "production: there is no variant `spec-2`, did you mean `spec-1`?; accepted: spec-1"),
    ("box: her", "box: there is no box `her`, did you mean `here`?; accepted: here"),
    ("experiment: ../x", "experiment: `../x` is not accepted; accepted: letters, digits,"),
    ("experiment: .x", "experiment: `.x` is not accepted;"),
    ("experiment: -x", "experiment: `-x` is not accepted;"),
    ("experiment: a b", "experiment: `a b` is not accepted;"),
    ("experiment: é", "experiment: `é` is not accepted;"),
    ("experiment: 7", "experiment: `7` is not accepted;"),
    (f"experiment: {'x' * 65}", "experiment: a text of 65 characters, at most 64 are accepted;"),
    ("concurency: [1]", "concurency: unknown key, did you mean `concurrency`?; accepted: experiment, box, boots,"),
    (
        "load: {stream: yes}",
        "load.stream: `yes` is text in YAML 1.2, not a boolean, write true; accepted: true or false",
    ),
    ("load: {stream: off}", "load.stream: `off` is text in YAML 1.2, not a boolean, write false;"),
    ('load: {stream: "on"}', 'load.stream: "on" (text) is no boolean;'),
    ("load: {stream: 1}", "load.stream: `1` is no boolean;"),
    ("load: {window_s: 0}", "load.window_s: `0` is not accepted; accepted: above 0: seconds as a number"),
    ("load: {window_s: -1}", "load.window_s: -1 is no duration;"),
    ("load: {window_s: soon}", "load.window_s: `soon` is no duration;"),
    ("load: {window_s: 1e308}", "load.window_s: `1e+308` is longer than 1000 days; accepted: above 0: seconds"),
    ("load: {windo_s: 3}", "load.windo_s: unknown key, did you mean `window_s`?;"),
    (
        "load: {endpoint: chats}",
        "load.endpoint: `chats` is not accepted, did you mean `chat`?; accepted: chat or compl",
    ),
    ("load: {warmup_s: 99}", "load.warmup_s: the longest warm-up (60 s) is shorter than the shortest (99 s);"),
    (
        "load: {window_s: 9, window_requests: 20}",
        "load.window_requests: is there beside `window_s`; accepted: one of the two",
    ),
    (
        "load: {prompts: p, input_tokens: 20}",
        "load.prompts: is there beside `input_tokens`; accepted: one of the two",
    ),
    ("load: {repeat_prompts: true}", "load.repeat_prompts: means nothing without prompts of your own"),
    ('load: {prompts: ""}', 'load.prompts: "" (text) is not accepted; accepted: a path'),
    ("load: {window_requests: 0}", "load.window_requests: `0` is not accepted; accepted: a whole number, 1 to 1000000"),
    ("load: [1]", "load: a list is not accepted; accepted: a mapping"),
    ("deadlines: {ready: 9}", "deadlines.ready: unknown key, did you mean `ready_s`?;"),
]


@pytest.mark.parametrize(("line", "said"), TOP, ids=[line for line, _ in TOP])
def test_a_wrong_line_at_the_top(line, said):
    assert the_problem(f"{GOOD}{line}\n").startswith(f"matrix.yaml:7: {said}")


VARIANT = [
    ("spec_tokens: 2", "spec_tokens: is the same flag as `spec-tokens`; accepted: each flag once"),
    ("no-spec-tokens: true", "no-spec-tokens: is the same flag as `spec-tokens`;"),
    (
        "x: null",
        "x: nothing (null) is no value of a flag; accepted: text, a number, true (bare flag), false (--no-FLAG)",
    ),
    ("x:", "x: nothing (null) is no value of a flag;"),
    ("x: []", "x: an empty list; accepted:"),
    ("x: [1, null]", "x[1]: nothing (null) in a list of values;"),
    ("x: [true]", "x[0]: `true` in a list of values;"),
    ("x: 010", "x: `010` is 8-based to some YAML readers"),
    ("x: 1e3", 'x: `1e3` is 1000.0 to YAML 1.2 and text to other readers; accepted: 1000, or "1e3" in quotes'),
    ("x: {deep: [1e3]}", "x.deep[0]: `1e3` is 1000.0 to YAML 1.2"),
    ("a b: 1", "a b: `a b` is no flag;"),
    ("8: 1", "8: `8` is no flag;"),
    ("port: 9", "port: `port` belongs to the box, not to a variant;"),
    ("--host: x", "--host: `host` belongs to the box, not to a variant;"),
    ("unset: [spec-tokens]", "unset[0]: `spec-tokens` is set and unset in the same variant;"),
    ("unset: [--spec_tokens]", "unset[0]: `--spec_tokens` is set and unset in the same variant;"),
    ("unset: [a, a]", "unset[1]: `a` is given twice;"),
    ("unset: a", "unset: `a` is no list; accepted: a list of flags"),
    ("unset:", "unset: nothing (null) is no list;"),
    ("unset: [3]", "unset[0]: `3` is no flag;"),
    ("env: {A-B: 1}", "env.A-B: `A-B` cannot name an environment variable;"),
    ("env: {A: true}", "env.A: `true` is not accepted; accepted: text or a number (true and false in quotes)"),
    ("env: {A: [1]}", "env.A: a list is not accepted;"),
    ("env: A=1", "env: `A=1` is no mapping;"),
    ('x: "a\\0b"', "x: a NUL or half a surrogate pair;"),
    ('x: "\\uD800"', "x: a NUL or half a surrogate pair;"),
    ("x: !!python/name:os.system y", "x: the tag `tag:yaml.org,2002:python/name:os.system` means nothing here;"),
]


@pytest.mark.parametrize(("line", "said"), VARIANT, ids=[line for line, _ in VARIANT])
def test_a_wrong_line_in_a_variant(line, said):
    assert the_problem(f"{GOOD}    {line}\n").startswith(f"matrix.yaml:7: variants.spec-1.{said}")


NAMES = [
    ("spec-1: {}", "spec-1: given twice (first in line 5); accepted: each key once"),
    ("SPEC-1: {}", "SPEC-1: differs from `spec-1` only in case, and names a folder;"),
    (".x: {}", ".x: `.x` cannot name a folder; accepted: letters, digits, `-`, `_` and `.`"),
    ("a/b: {}", "a/b: `a/b` cannot name a folder;"),
    ("a@warm: {}", "a@warm: `a@warm` cannot name a folder;"),
    ("a.r1: {}", "a.r1: ends like the repeat of a boot;"),
    (f"{'x' * 65}: {{}}", f"{'x' * 65}: a name of 65 characters; accepted: at most 64"),
    ("b: [spec-tokens]", "b: a list is no mapping;"),
    ("b: 3", "b: `3` is no mapping;"),
]


@pytest.mark.parametrize(("line", "said"), NAMES, ids=[line for line, _ in NAMES])
def test_a_wrong_variant(line, said):
    assert the_problem(f"{GOOD}  {line}\n").startswith(f"matrix.yaml:7: variants.{said}")


BOX = [
    ("{}", "unit: is missing for `service: systemd`; accepted: a unit's name"),
    ("{service: systemd-user}", "unit: is missing for `service: systemd-user`;"),
    ("{service: process}", "unit_file: is missing for `service: process` (so is `program`, which would do);"),
    ("{unit: a b}", "unit: `a b` is not accepted; accepted: a unit's name, such as vllm.service"),
    ("{unit: a, port: 0}", "port: `0` is not accepted; accepted: a port, 1 to 65535"),
    ("{unit: a, port: 65536}", "port: `65536` is not accepted;"),
    ("{unit: a, port: 080}", "port: `080` is 8-based"),
    ("{unit: a, isolate: on}", "isolate: `on` is text in YAML 1.2, not a boolean, write true; accepted: true or false"),
    ("{unit: a, sudo: n}", "sudo: `n` is text in YAML 1.2, not a boolean, write false;"),
    ("{unit: a, host: b}", "host: means nothing without `transport: ssh`;"),
    ("{unit: a, transport: ssh, host: -oProxyCommand=x}", "host: `-oProxyCommand=x` is not accepted;"),
    ("{unit: a, transport: shh}", "transport: `shh` is not accepted, did you mean `ssh`?; accepted: local or ssh"),
    ("{unit: a, time_scale: 0.5}", "time_scale: means nothing without `engine: rehearsal`;"),
    ("{unit: a, isolate_port: 9, port: 9}", "isolate_port: is production's own port;"),
    ("{unit: a, isolate_port: 9, isolate: false}", "isolate_port: means nothing with `isolate: false`;"),
    ("{unit: a, program: python}", "program: `python` is not accepted; accepted: a list of words"),
    ("{unit: a, cache_root: caches}", "cache_root: `caches` is not accepted; accepted: an absolute path"),
    ("{unit: a, env: {A: true}}", "env.A: `true` is not accepted;"),
    ("{unit: a, env: {A: null}}", "env.A: nothing (null) is not accepted;"),
    ("{unit: a, load: {windo_s: 1}}", "load.windo_s: unknown key, did you mean `window_s`?;"),
    ("{unit: a, load: {max_warmup_s: 1}}", "load.max_warmup_s: the longest warm-up (1 s) is shorter than the shortest"),
    ("{unit: a, name: x}", "name: unknown key; accepted: transport, host,"),
]


@pytest.mark.parametrize(("box", "said"), BOX, ids=[box for box, _ in BOX])
def test_a_wrong_box(box, said):
    text = f"variants: {{x: {{}}}}\nboxes:\n  b: {box}\n"
    assert the_problem(text).startswith(f"matrix.yaml:3: boxes.b.{said}")


def test_a_number_cannot_name_a_box():
    assert the_problem('variants: {x: {}}\nboxes:\n  "2": {unit: a}\n').startswith(
        "matrix.yaml:3: boxes.2: a number cannot name a box"
    )


def test_several_boxes_and_none_chosen():
    assert the_problem("variants: {x: {}}\nboxes:\n  a: {unit: a}\n  b: {unit: b}\n") == (
        "matrix.yaml:1: box: is missing, and there are several boxes; accepted: a, b"
    )


def test_nothing_to_compare_or_nowhere_to_boot():
    assert the_problem("variants: {}\nboxes: {a: {unit: a}}\n").startswith(
        "matrix.yaml:1: variants: an empty mapping is not accepted; accepted: a mapping: name, then flags"
    )
    assert the_problem("boxes: {a: {unit: a}}\n").startswith("matrix.yaml:1: variants: is missing;")
    assert the_problem("variants: {a: {}}\n").startswith("matrix.yaml:1: boxes: is missing;")


# --- the file itself -----------------------------------------------------------------------------------------------

FILES = [
    (b"", "1: is empty; accepted: `boxes:`, `variants:` and more, see docs/matrix.md"),
    (b"# only a comment\n", "1: is empty;"),
    (b"{}\n", "1: is empty;"),
    (b"- a\n- b\n", "1: is no mapping of keys;"),
    (b"text\n", "1: is no mapping of keys;"),
    (b"boxes:\n  a: \xff\n", "2: byte 0xff is not UTF-8; accepted: text in UTF-8"),
    ("boxes: {}\n".encode("utf-16"), "1: byte 0xff is not UTF-8;"),
    (b"boxes:\n\ta: 1\n", "2: a tab where the indentation stands; accepted: spaces"),
    (b"a: b: c\n", "1: not YAML: mapping values are not allowed here;"),
    (b"a: [1\n", "2: not YAML: while parsing a flow sequence"),
    (b"a: 1\nb: 'x\n", "3: not YAML: while scanning a quoted scalar"),
    (b"a: 1\nb: \x01\n", "2: a control character (U+0001) that YAML does not allow;"),
    (b"a: *x\n", "1: alias `*x` has no anchor before it"),
    (b"a: &a [*a]\n", "1: a[0]: an alias inside of what it stands for"),
    (b"a: 1\n---\nb: 1\n", "2: a second document begins here; accepted: one document a file"),
    (b"[" * 100 + b"]" * 100, "1: nested more than 60 deep;"),
    (b"? [a]\n: b\n", "1: a list or mapping as a key; accepted: text as a key"),
    (b"#" * (2 << 20), "1: larger than 1 MiB;"),
]


@pytest.mark.parametrize(("content", "said"), FILES, ids=[said[:40] for _, said in FILES])
def test_a_file_that_is_no_matrix(content, said, tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_bytes(content)
    with pytest.raises(MatrixError) as caught:
        load_matrix(path)
    assert caught.value.problems[0].startswith(f"{path}:{said}")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(MatrixError) as caught:
        load_matrix(tmp_path / "nope.yaml")
    what, hint = str(caught.value).splitlines()
    assert what == f"{tmp_path}/nope.yaml: there is no such file"
    assert "`invoke init --box-host ALIAS --unit UNIT`" in hint
    assert "`--unit-file FILE`" in hint


def test_a_folder_instead_of_a_file(tmp_path):
    with pytest.raises(MatrixError, match="cannot be read: Is a directory"):
        load_matrix(tmp_path)


def test_a_unit_file_that_is_not_there_is_said_when_the_file_is_loaded_and_not_for_a_kept_copy(tmp_path):
    text = "boxes:\n  a:\n    service: process\n    unit_file: units/x.service\nvariants: {x: {}}\n"
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    with pytest.raises(MatrixError, match=r"matrix\.yaml:4: boxes\.a\.unit_file: there is no file `units/x\.service`"):
        load_matrix(path)
    assert parse_matrix(text).target.unit_file is not None
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "x.service").touch()
    assert load_matrix(path).target.unit_file == tmp_path / "units" / "x.service"


def test_the_files_own_name_must_be_able_to_name_the_experiment(tmp_path):
    path = tmp_path / "my matrix.yaml"
    path.write_text(GOOD)
    with pytest.raises(MatrixError, match="the file's name `my matrix` cannot name the experiment"):
        load_matrix(path)
    path.write_text(GOOD + "experiment: mine\n")
    assert load_matrix(path).experiment == "mine"


def test_aliases_that_multiply_end_before_the_memory_does():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert f"more than {MAX_NODES} values once aliases are written out" in problems(bomb)[0]


# --- the YAML reader by itself -------------------------------------------------------------------------------------


def test_scalars_are_those_of_yaml_1_2():
    text = "[true, True, yes, on, null, ~, 1, -1, +1, 1.5, .5, 1e3, 1_0, 0x1f, .inf, 1:30, 2020-01-01, '1', \"on\"]"
    data, _ = load_yaml(text, "f")
    assert data[:5] == [True, True, "yes", "on", None]
    assert data[5:12] == [None, 1, -1, 1, 1.5, 0.5, 1000.0]
    assert data[12:] == ["1_0", "0x1f", ".inf", "1:30", "2020-01-01", "1", "on"]


def test_keys_are_text_as_written_and_marks_know_their_lines():
    data, marks = load_yaml("1: a\non:\n  - x\n  - {y: 0.50}\n", "f")
    assert data == {"1": "a", "on": ["x", {"y": 0.5}]}
    assert {path: mark.line for path, mark in marks.items()} == {
        (): 1,
        ("1",): 1,
        ("on",): 2,
        ("on", 0): 3,
        ("on", 1): 4,
        ("on", 1, "y"): 4,
    }
    assert marks["on", 1, "y"].text == "0.50"


def test_problems_of_form_carry_the_name_that_was_given():
    with pytest.raises(ProblemsError) as caught:
        load_yaml("a: 010\na: 1\n", "series.yaml")
    assert [problem.split(": ")[0] for problem in caught.value.problems] == ["series.yaml:1", "series.yaml:2"]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=60))
def test_no_text_whatever_breaks_the_reader(text):
    document = parse(text)
    assert document.problems or document.marks or document.data is None


@settings(max_examples=400, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["boxes", "variants", "load", "unit", "unset", "env", "cache", "concurrency", "box", "a"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_data_whatever_ends_in_anything_but_a_matrix_or_its_problems(data):

    text = json.dumps(data)
    list(_unit_problems(parse(text), Path("matrix.yaml"), None, lambda *_: ()))
    try:
        parse_matrix(text)
    except MatrixError as error:
        assert all(problem.startswith("matrix.yaml:") for problem in error.problems)  # noqa: PT017 - either is fine


SCRAPS = [
    "null",
    "[]",
    "{}",
    "on",
    "010",
    "1e3",
    "- a",
    "*x",
    "&a",
    "<<: *a",
    ": ",
    "\t",
    "'",
    '"',
    "[1",
    "!!int 3",
    "? ",
]
SCRAPS += ["|", "9" * 30, "-1", "\x07", "é", "\u2028", '"\\ud800"', '"\\0"', ".nan", "0x1"]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_slip_of_the_hand_in_the_shipped_file_ends_otherwise(data):
    lines = (Path(__file__).parent.parent / "matrix.yaml").read_text(encoding="utf-8").splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at, slip = (
            data.draw(st.integers(0, len(lines) - 1)),
            data.draw(st.sampled_from(["value", "twice", "gone", "in"])),
        )
        if slip == "value":
            lines[at] = f"{lines[at].partition(':')[0]}: {data.draw(st.sampled_from(SCRAPS))}"
        elif slip == "twice":
            lines.insert(data.draw(st.integers(0, len(lines) - 1)), lines[at])
        elif slip == "gone" and len(lines) > 1:
            del lines[at]
        else:
            column = data.draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:column] + data.draw(st.sampled_from(SCRAPS)) + lines[at][column:]
    text = "\n".join(lines)
    list(_unit_problems(parse(text), Path("matrix.yaml"), None, lambda *_: ()))
    try:
        parse_matrix(text).digest()
    except MatrixError as error:
        assert all(problem.startswith("matrix.yaml:") and "\n" not in problem for problem in error.problems)  # noqa: PT017 - either is fine


@pytest.mark.parametrize(
    "slip",
    [
        "boots: 1e308",
        "seed: 1e308",
        "concurrency: [1e308]",
        "load: {input_tokens: 1e308, output_tokens: -1e308}",
        "deadlines: {ready_s: 1e308}",
        "limits: {campaign_s: 1e308, failed_boots: 1e308}",
        "tolerance: 1e308",
        'claims: ["a >= 1e308x b"]',
        'constraints: ["ttft_p99_ms <= ' + "9" * 400 + '"]',
    ],
)
def test_a_number_of_308_digits_is_refused_in_few(slip):
    with pytest.raises(MatrixError) as caught:
        parse_matrix("boxes: {here: {unit: a.service}}\nvariants: {a: {x: 1e308}, b: {}}\n" + slip)
    assert len(caught.value.problems) >= 2
    assert max(map(len, caught.value.problems)) < 420
    assert "0000000" not in str(caught.value)
