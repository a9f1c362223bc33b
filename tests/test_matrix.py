"""matrix.yaml to Matrix: what is read, and what stays equal between two sessions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.errors import LedgerError, MatrixError, UsageError
from orchestrator.matrix import (
    differences,
    duration,
    find_experiment,
    flag_name,
    load_matrix,
    newest_experiment,
    parse_boots,
    parse_matrix,
    select,
)

ROOT = Path(__file__).parent.parent
SMALL = """\
boxes:
  here: {unit: vllm.service}
variants:
  production: {}
  spec-1: {spec-tokens: 1}
"""


# --- the shipped file ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return load_matrix(ROOT / "matrix.yaml")


def test_the_shipped_file_is_the_seeds_experiment_on_the_rehearsal_box(shipped):
    assert shipped.experiment == "gwen"
    assert shipped.box == "rehearsal"
    assert shipped.target.rehearsal
    assert [variant.name for variant in shipped.variants] == ["no-spec", "spec-1", "spec-3", "spec-5", "spec-8"]
    assert shipped.concurrency == (1, 2, 4, 8)
    assert shipped.cache == ("cold",)
    assert shipped.headroom
    assert shipped.tolerance == 0.05
    assert shipped.notes == ()


def test_the_shipped_variants_say_only_what_differs(shipped):
    assert shipped.variant("no-spec").unset == ("spec-method", "spec-model", "spec-tokens")
    assert shipped.variant("no-spec").set == {}
    assert [shipped.variant(f"spec-{n}").set for n in (1, 3, 5, 8)] == [{"spec-tokens": n} for n in (1, 3, 5, 8)]


def test_the_shipped_rehearsal_is_short_and_the_real_box_is_not(shipped):
    rehearsal, gwen = shipped.effective_load("rehearsal"), shipped.effective_load("gwen")
    assert (rehearsal.window_s, rehearsal.output_tokens) == (0.65, 12)
    assert (gwen.window_s, gwen.input_tokens, gwen.output_tokens) == (30, 512, 256)
    assert shipped.effective_deadlines("rehearsal").ready_s == 30
    assert shipped.effective_deadlines("gwen").ready_s == 900


def test_the_shipped_real_box_is_reached_over_ssh(shipped):
    gwen = select(shipped, box="gwen").target
    assert (gwen.transport, gwen.host, gwen.service, gwen.unit, gwen.port) == (
        "ssh",
        "gwen",
        "systemd",
        "vllm-qwen.service",
        8080,
    )
    assert gwen.isolate
    assert not gwen.rehearsal


def test_the_shipped_unit_file_is_found_from_anywhere(shipped, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert shipped.target.unit_file is not None
    assert "--spec-tokens 3" in shipped.target.unit_file.read_text()


# --- reading -------------------------------------------------------------------------------------------------------


def test_the_smallest_file_has_the_defaults_of_the_design():
    matrix = parse_matrix(SMALL, Path("qwen.yaml"))
    assert matrix.experiment == "qwen"
    assert matrix.box == "here"
    assert (matrix.boots, matrix.concurrency, matrix.cache, matrix.headroom) == (None, (1, 2, 4, 8), ("cold",), True)
    assert (matrix.load.endpoint, matrix.load.temperature, matrix.load.window_s) == ("chat", 0, 30)
    assert (matrix.load.input_tokens, matrix.load.output_tokens) == (512, 256)
    assert (matrix.target.transport, matrix.target.service, matrix.target.isolate) == ("local", "systemd", True)


def test_flags_keep_the_type_that_the_file_gives_them():
    matrix = parse_matrix(
        SMALL
        + """\
  typed:
    text: eagle
    quoted: "8"
    whole: 8
    fraction: 0.90
    small: 1e-5
    bare: true
    negated: false
    several: [1, two, {a: 1}]
    json: {method: ngram, deep: {n: [1, null, true]}}
"""
    )
    flags = matrix.variant("typed").set
    assert flags == {
        "text": "eagle",
        "quoted": "8",
        "whole": 8,
        "fraction": 0.9,
        "small": 1e-5,
        "bare": True,
        "negated": False,
        "several": [1, "two", {"a": 1}],
        "json": {"method": "ngram", "deep": {"n": [1, None, True]}},
    }
    kinds = [type(flags[name]) for name in ("text", "quoted", "whole", "fraction", "bare")]
    assert kinds == [str, str, int, float, bool]


def test_a_flags_dashes_and_underscores_do_not_matter_but_those_behind_a_dot_do():
    assert flag_name("--spec_tokens") == "spec-tokens"
    assert flag_name("spec-tokens") == "spec-tokens"
    assert flag_name("-O") == "O"
    assert flag_name("--speculative_config.num_speculative_tokens") == "speculative-config.num_speculative_tokens"
    matrix = parse_matrix(SMALL + "  x: {--max_num_seqs: 4, unset: [--spec_model]}\n")
    assert matrix.variant("x").set == {"max-num-seqs": 4}
    assert matrix.variant("x").unset == ("spec-model",)


def test_yes_and_off_are_text_as_a_flags_value_and_that_is_noted():
    matrix = parse_matrix(SMALL + '  x: {enable-prefix-caching: no, quoted: "no"}\n')
    assert matrix.variant("x").set == {"enable-prefix-caching": "no", "quoted": "no"}
    (note,) = matrix.notes
    assert note.startswith("matrix.yaml:6: variants.x.enable-prefix-caching: `no` is passed on as the text no;")


def test_a_load_that_no_box_takes_is_noted_and_its_lengths_are_no_levels():
    here = "boxes:\n  here: {unit: vllm.service, load: {input_tokens: 64}}\n"
    more = "  there: {unit: other.service}\n"
    rest = "variants: {a: {}}\nconcurrency: [1, 8]\nload: {input_tokens: [512, 8000], window_s: 9}\n"
    claim = 'claims: ["a > 5 at 8@8000"]\n'
    (note,) = parse_matrix(here + rest).notes
    assert note == "matrix.yaml:5: load.input_tokens: counts on no box: `input_tokens` of here (line 2) is nearer"
    with pytest.raises(MatrixError, match="8000 is no prompt length of `input_tokens:`; accepted: 64"):
        parse_matrix(here + rest + claim)
    assert parse_matrix(f"box: here\n{here}{more}{rest}{claim}").notes == ()  # the other box takes it


def test_environment_is_passed_as_it_is_written_and_null_takes_it_away():
    matrix = parse_matrix(SMALL + '  x: {env: {A: 1, B: 0.90, C: "true", D: null, E: x y}}\n')
    assert matrix.variant("x").env == {"A": "1", "B": "0.90", "C": "true", "D": None, "E": "x y"}


def test_levels_ascend_whatever_the_file_says():
    assert parse_matrix(SMALL + "concurrency: [8, 1, 4]\n").concurrency == (1, 4, 8)


@pytest.mark.parametrize(("written", "meant"), [("off", False), ("on", True), ("true", True), ("false", False)])
def test_headroom_takes_off_and_on(written, meant):
    assert parse_matrix(SMALL + f"headroom: {written}\n").headroom is meant


def test_one_cache_state_or_several():
    assert parse_matrix(SMALL + "cache: warm\n").cache == ("warm",)
    assert parse_matrix(SMALL + "cache: [cold, as-is]\n").cache == ("cold", "as-is")


def test_a_box_overrides_single_keys_of_load_and_deadlines():
    text = """\
load: {window_s: 10, output_tokens: 99}
deadlines: {ready_s: 5min}
box: b
boxes:
  a: {unit: a.service}
  b: {unit: b.service, load: {window_s: 2s}, deadlines: {stop_s: 7}}
variants: {x: {}}
"""
    matrix = parse_matrix(text)
    assert (matrix.effective_load().window_s, matrix.effective_load().output_tokens) == (2, 99)
    assert (matrix.effective_load("a").window_s, matrix.effective_load("a").output_tokens) == (10, 99)
    assert (matrix.effective_deadlines().ready_s, matrix.effective_deadlines().stop_s) == (300, 7)
    assert (matrix.effective_deadlines("a").ready_s, matrix.effective_deadlines("a").stop_s) == (300, 90)


def test_a_box_may_count_requests_where_the_others_have_a_time_and_the_other_way_round():
    text = """
load: {window_s: 10}
box: a
boxes: {a: {unit: a.service}, b: {unit: b.service, load: {window_requests: 50}}}
variants: {x: {}}
"""
    matrix = parse_matrix(text)
    assert [matrix.effective_load(box).window_requests for box in "ab"] == [None, 50]
    other = parse_matrix(
        text.replace("window_s: 10", "window_requests: 9").replace("window_requests: 50", "window_s: 3")
    )
    assert [(load.window_requests, load.window_s) for load in map(other.effective_load, "ab")] == [
        (9, 30.0),
        (None, 3.0),
    ]


def test_a_key_that_came_later_changes_no_digest_until_it_is_used():
    text = "boxes: {a: {unit: a.service}}\nvariants: {x: {}}\n"
    assert parse_matrix(text).digest() == parse_matrix(text + "load: {window_requests: null}\n").digest()
    assert parse_matrix(text).digest() != parse_matrix(text + "load: {window_requests: 9}\n").digest()


def test_anchors_and_merge_keys_work():
    text = """\
boxes: {here: {unit: a.service}}
variants:
  base: &base {spec-tokens: 1, max-num-seqs: 4}
  other:
    <<: *base
    spec-tokens: 2
"""
    assert parse_matrix(text).variant("other").set == {"spec-tokens": 2, "max-num-seqs": 4}


def test_an_ssh_box_is_its_own_alias():
    matrix = parse_matrix("boxes: {gwen: {transport: ssh, unit: a.service}}\nvariants: {x: {}}\n")
    assert matrix.target.host == "gwen"


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load_matrix(path).variant("spec-1").set == {"spec-tokens": 1}


def test_a_key_is_found_by_its_line_also_by_another_spelling_of_the_flag():
    matrix = parse_matrix(SMALL + "  x:\n    --spec_model: y\n    unset:\n    - foo\n    - bar\n")
    assert matrix.line_of("variants", "x", "spec-model") == 7
    assert matrix.line_of("variants", "x", "unset", 1) == 10
    assert matrix.line_of("variants", "x", "not-there") == 6
    said = matrix.problem("variants", "x", "unset", what="no `foo`", accepted="bar")
    assert said == "matrix.yaml:8: variants.x.unset: no `foo`; accepted: bar"


# --- durations and boots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (90, 90),
        (0.5, 0.5),
        ("90", 90),
        ("90s", 90),
        ("5min", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h 30min", 5400),
        ("1.5h", 5400),
        ("2 days", 172800),
        ("250ms", 0.25),
        (" 3H ", 10800),
        (0, 0),
    ],
)
def test_a_duration_is_seconds(written, seconds):
    assert duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["", "h", "5 parsecs", "-5s", -1, "1h30", "1e3", "1,5h", True, None, float("nan"), []]
)
def test_what_is_no_duration_says_what_is(written):
    with pytest.raises(ValueError, match=r"is no duration; accepted: seconds as a number, or text such as"):
        duration(written)


@pytest.mark.parametrize("written", [1e308, 10**400, "9" * 400 + "h", "1001d", 1000 * 86400 + 1])
def test_a_duration_of_more_than_1000_days_is_a_slip_and_is_told_in_few_digits(written):
    with pytest.raises(ValueError, match=r"is longer than 1000 days; accepted: seconds") as caught:
        duration(written)
    assert len(str(caught.value)) < 140


def test_boots_is_a_number_from_1_or_auto():
    assert parse_boots("3") == 3
    assert parse_boots(6) == 6
    assert parse_boots("auto") == "auto"


@pytest.mark.parametrize("written", ["0", 0, -1, "1e3", "03", "3.0", "", "many", "1001", "٣"])
def test_other_boots_are_refused(written):
    with pytest.raises(UsageError, match=r"--boots: .* accepted: a whole number, 1 to 1000, or auto"):
        parse_boots(written)


# --- the command line's choice -------------------------------------------------------------------------------------


def test_only_keeps_the_order_of_the_file_and_the_digest(shipped):
    chosen = select(shipped, ["spec-8", "no-spec"])
    assert [variant.name for variant in chosen.variants] == ["no-spec", "spec-8"]
    assert chosen.digest() == shipped.digest()
    assert [variant.name for variant in select(chosen, ["spec-1"]).variants] == ["spec-1"]


def test_unknown_names_are_all_said_with_the_nearest():
    matrix = parse_matrix(SMALL)
    with pytest.raises(UsageError) as caught:
        select(matrix, ["spec1", "zzz"])
    assert str(caught.value).splitlines() == [
        "there is no variant `spec1`, did you mean `spec-1`?; there: production, spec-1",
        "there is no variant `zzz`; there: production, spec-1",
    ]
    with pytest.raises(UsageError, match="there is no box `her`, did you mean `here`"):
        select(matrix, box="her")
    with pytest.raises(UsageError, match="there is no cache state `hot`"):
        select(matrix, cache=["hot"])
    with pytest.raises(UsageError, match="no variant is named"):
        select(matrix, [" "])
    with pytest.raises(UsageError, match="cannot name a folder"):
        select(matrix, experiment="../x")


# --- what must not change ------------------------------------------------------------------------------------------


def test_boots_seed_comments_order_and_the_way_to_the_box_do_not_change_the_digest():
    text = """\
box: a
boxes:
  a: {transport: ssh, host: x, unit: a.service}
  b: {unit: b.service}
variants:
  x: {p: 1, q: 2, unset: [r, s]}
  y: {}
"""
    other = """\
# a comment
boots: 7
seed: 9
production: y
variants:
  y:
  x: {unset: [s, r], --q: 2, p: 1}
boxes:
  b: {unit: c.service}
  a: {transport: ssh, host: elsewhere, unit: a.service, dead_man_s: 60, sudo: true, port: 9}
box: b
"""
    assert parse_matrix(text).digest("a") == parse_matrix(other).digest("a")
    assert differences(text, parse_matrix(other), "a") == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("spec-tokens: 1", "spec-tokens: 4"), "variants.spec-1.spec-tokens: 1 → 4"),
        (("spec-tokens: 1", 'spec-tokens: "1"'), 'variants.spec-1.spec-tokens: 1 → "1"'),
        (("spec-tokens: 1", "spec-tokens: 1, env: {A: b}"), 'variants.spec-1.env: not set → {"A": "b"}'),
        (("  production: {}\n", ""), "variants.production: there → not set"),
        (("boxes:", "concurrency: [1, 2]\nboxes:"), "concurrency: [1, 2, 4, 8] → [1, 2]"),
        (("boxes:", "cache: warm\nboxes:"), 'cache: ["cold"] → ["warm"]'),
        (("boxes:", "headroom: off\nboxes:"), "headroom: true → false"),
        (("boxes:", "tolerance: 0.1\nboxes:"), "tolerance: 0.05 → 0.1"),
        (("boxes:", "load: {window_s: 5}\nboxes:"), "load.window_s: 30.0 → 5.0"),
        (("vllm.service", "vllm.service, load: {window_s: 5}"), "load.window_s: 30.0 → 5.0"),
        (("vllm.service", "vllm.service, deadlines: {ready_s: 9}"), "deadlines.ready_s: 900.0 → 9.0"),
        (("vllm.service", "qwen.service"), 'boxes.here.unit: "vllm.service" → "qwen.service"'),
        (("vllm.service", "vllm.service, env: {A: 1}"), 'boxes.here.env: {} → {"A": "1"}'),
    ],
)
def test_what_changed_is_named_and_changes_the_digest(change, said):
    changed = parse_matrix(SMALL.replace(*change))
    assert differences(SMALL, changed) == (said,)
    assert changed.digest() != parse_matrix(SMALL).digest()


def test_every_change_is_named_not_only_the_first():
    changed = parse_matrix(SMALL.replace("1}", "2}") + "  spec-9: {spec-tokens: 9}\n")
    assert differences(SMALL, changed) == (
        "variants.spec-1.spec-tokens: 1 → 2",
        "variants.spec-9: not set → there",
        "variants.spec-9.spec-tokens: not set → 9",
    )


def test_a_kept_file_that_cannot_be_read_is_a_difference():
    (said,) = differences("a: [", parse_matrix(SMALL))
    assert said.startswith("the kept matrix.yaml cannot be read any more (matrix.yaml:")


def test_the_digest_is_the_same_in_every_process():
    # Computed once and written down: a digest that moves by itself would refuse every experiment begun before.
    assert parse_matrix(SMALL).digest() == "b89546ee984f989a69cd0aa0a1379c6e7684ab94862f29191ffde34f76cb0948"


# --- finding experiments -------------------------------------------------------------------------------------------


def _ledger(out, name, at):
    (out / name).mkdir()
    (out / name / "records.jsonl").touch()
    os.utime(out / name / "records.jsonl", (at, at))


def test_the_newest_experiment_is_the_one_whose_records_were_written_last(tmp_path):
    assert newest_experiment(tmp_path) is None
    for name, at in (("a", 100), ("b.2", 300), ("c", 200)):
        _ledger(tmp_path, name, at)
    (tmp_path / "empty").mkdir()
    assert newest_experiment(tmp_path) == tmp_path / "b.2"
    assert find_experiment(tmp_path) == tmp_path / "b.2"
    assert find_experiment(tmp_path, "c") == tmp_path / "c"


def test_an_experiment_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(LedgerError, match="no experiment yet"):
        find_experiment(tmp_path)
    _ledger(tmp_path, "gwen", 100)
    with pytest.raises(LedgerError, match=r"no experiment `gwem`, did you mean `gwen`\?; there: gwen"):
        find_experiment(tmp_path, "gwem")


OWN = """
load: {prompts: mine/p.jsonl}
boxes: {a: {unit: a.service}, b: {unit: b.service, load: {input_tokens: 64}}}
box: a
variants: {x: {}}
"""


def own_matrix(folder, text=OWN, prompts='"one"\n"two"\n'):
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "p.jsonl").write_text(prompts)
    (folder / "matrix.yaml").write_text(text)
    return load_matrix(folder / "matrix.yaml")


def test_own_prompts_are_found_beside_the_matrix_and_a_box_may_have_generated_ones(tmp_path):
    matrix = own_matrix(tmp_path)
    assert matrix.own_prompts().prompts == ("one", "two")
    assert (matrix.own_prompts("b"), matrix.effective_load("b").input_tokens) == (None, 64)


def test_of_own_prompts_what_the_file_says_must_not_change_but_its_name_may(tmp_path):
    matrix = own_matrix(tmp_path)
    was = matrix.own_prompts().digest
    (tmp_path / "q.jsonl").write_bytes((tmp_path / "mine" / "p.jsonl").read_bytes())
    renamed = own_matrix(tmp_path, OWN.replace("mine/p.jsonl", "q.jsonl"))
    assert renamed.digest() == matrix.digest()
    assert differences(matrix.kept, renamed, old_prompts=was) == ()
    other = own_matrix(tmp_path, prompts='"one"\n"three"\n')
    assert other.digest() != matrix.digest()
    now = other.own_prompts().digest
    assert differences(matrix.kept, other, old_prompts=was) == (f'load.prompts: "{was}" → "{now}"',)


def test_bad_lines_of_own_prompts_are_said_with_the_line_of_the_matrix_and_with_all_else_that_is_wrong(tmp_path):
    with pytest.raises(MatrixError) as caught:
        own_matrix(tmp_path, OWN + "seed: x\n", prompts='"one"\n\n"two\n')
    said = [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]
    assert [line.partition(";")[0] for line in said] == [
        "matrix.yaml:2: load.prompts: 2 things are wrong with `mine/p.jsonl`",
        "matrix.yaml:6: seed: `x` is no number",
        "mine/p.jsonl:2: the prompt is empty",
        "mine/p.jsonl:3: Unterminated string starting at at column 1",
    ]


def test_many_bad_lines_of_own_prompts_are_counted_and_twenty_of_all_problems_are_shown(tmp_path):
    with pytest.raises(MatrixError) as caught:
        own_matrix(tmp_path, prompts='"one"\n' + "{\n" * 80)
    first, *lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert first == "matrix.yaml:2: load.prompts: 80 things are wrong with `mine/p.jsonl`"
    assert lines[0].startswith("mine/p.jsonl:2: ")
    assert lines[18].startswith("mine/p.jsonl:20: ")
    assert lines[19:] == ["and 61 more problems, 81 in all"]


def test_a_file_of_own_prompts_that_is_not_there(tmp_path):
    with pytest.raises(MatrixError, match=r"matrix.yaml:2: load.prompts: .*absent: cannot be read: No such file"):
        own_matrix(tmp_path, OWN.replace("mine/p.jsonl", "absent"))


def test_a_kept_copy_needs_no_file_of_prompts(tmp_path):
    assert parse_matrix(own_matrix(tmp_path).kept).load.prompts == "mine/p.jsonl"


def test_to_bring_production_back_no_prompts_are_needed(tmp_path):
    own_matrix(tmp_path)
    (tmp_path / "mine" / "p.jsonl").unlink()
    assert load_matrix(tmp_path / "matrix.yaml", prompts=False).own_prompts() is None
