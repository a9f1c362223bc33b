"""Several prompt lengths: how a level is spelled, and that lengths are never pooled and never poison each other."""

from __future__ import annotations

import csv
import io
import json
import random
from xml.etree.ElementTree import fromstring

import pytest

from orchestrator import gate, verdict
from orchestrator.errors import MatrixError, SeriesError, UsageError
from orchestrator.forecast import load_s
from orchestrator.matrix import differences, parse_matrix
from orchestrator.plan import Plan, make_plan
from orchestrator.progress import trial_text
from orchestrator.records import (
    RECORD,
    BootEnded,
    BootStarted,
    CampaignStarted,
    Level,
    Objective,
    TrialEnded,
    level_of,
    levels_of,
)
from orchestrator.report import build_view, plain
from orchestrator.report.compare import compare, experiment, pairs, sentence
from orchestrator.report.figures import FIGURES
from orchestrator.report.formats import FORMATS
from orchestrator.series import read_series
from orchestrator.survey import too_long
from orchestrator.verdict.derive import derive

FILE = "boxes: {here: {unit: a.service}}\nvariants: {a: {}, b: {}}\nconcurrency: [1, 8]\n"
TWO = FILE + "load: {input_tokens: [8000, 512]}\n"
SPELLED = ["1@512", "8@512", "1@8000", "8@8000"]


def problems(text):
    with pytest.raises(MatrixError) as caught:
        parse_matrix(text)
    return caught.value.problems


# --- a level -------------------------------------------------------------------------------------------------------


def test_levels_ascend_by_length_and_then_by_concurrency_in_whatever_order_they_are_given():
    assert [str(level) for level in levels_of((8, 1), (8000, 512))] == SPELLED
    shuffled = [Level.parse(text) for text in SPELLED]
    random.Random(3).shuffle(shuffled)
    assert [str(level) for level in sorted(shuffled)] == SPELLED


def test_with_one_length_no_level_names_it():
    assert [str(level) for level in levels_of((1, 8), (512,))] == ["1", "8"]
    assert level_of(8, 512, (512,)) == Level(8)
    assert level_of(8, 512, (512, 8000)) == Level(8, 512)


@pytest.mark.parametrize("text", ["", "0", "8@", "@512", "8@0", "8@512@1", "-1", "8 @512", "1e3", "٨"])
def test_what_is_no_level_is_refused_with_what_is_accepted(text):
    with pytest.raises(ValueError, match="8@8000: streams@prompt tokens"):
        Level.parse(text)


def test_in_json_a_level_is_a_number_or_its_spelling_and_comes_back_as_it_was():
    goal = Objective(levels=(8, "8@8000"), weights={8: 2.0, "8@8000": 3.0})
    written = goal.model_dump_json()
    assert json.loads(written) == {
        "metric": "tokens_per_s",
        "levels": [8, "8@8000"],
        "weights": {"8": 2.0, "8@8000": 3.0},
    }
    assert Objective.model_validate_json(written) == goal
    assert [goal.weight(level) for level in (Level(8, 8000), Level(8, 512), Level(1, 512))] == [3.0, 2.0, 1.0]


# --- the file and the plan -----------------------------------------------------------------------------------------


def test_a_list_of_lengths_is_measured_ascending_and_stands_in_the_plan():
    matrix = parse_matrix(TWO)
    assert [str(level) for level in matrix.levels] == SPELLED
    plan = make_plan(matrix, 2)
    assert (plan.input_tokens, plan.concurrency) == ((512, 8000), (1, 8))
    old = plan.model_dump(mode="json")
    del old["input_tokens"]
    assert Plan.model_validate(old).input_tokens == ()


def test_a_list_of_one_is_that_one_and_no_other_experiment():
    one, listed = (parse_matrix(FILE + f"load: {{input_tokens: {text}}}\n") for text in ("700", "[700]"))
    assert one.digest() == listed.digest()
    assert listed.effective_load().model_dump(mode="json")["input_tokens"] == 700
    assert [str(level) for level in listed.levels] == ["1", "8"]
    assert differences(one.text, parse_matrix(FILE + "load: {input_tokens: [700, 900]}\n")) == (
        "load.input_tokens: 700 → [700, 900]",
    )


def test_a_boxs_own_lengths_go_before_the_files():
    text = TWO.replace("{unit: a.service}", "{unit: a.service, load: {input_tokens: 64}}")
    assert [str(level) for level in parse_matrix(text).levels] == ["1", "8"]


def test_one_trials_load_has_one_length_and_all_the_rest():
    load = parse_matrix(FILE + "load: {input_tokens: [8, 16], window_s: 7, stream: false}\n").effective_load()
    one = load.at(16)
    assert (one.input_tokens, one.window_s, one.stream, one.output_tokens) == (16, 7.0, False, 256)


def test_prompts_of_the_users_own_have_no_length_that_anybody_could_name():
    load = parse_matrix(FILE).effective_load().model_copy(update={"prompts": "mine.jsonl"})
    assert (load.lengths, [str(level) for level in levels_of((1, 8), load.lengths)]) == ((), ["1", "8"])
    assert load.at(None).output_tokens == 256
    assert started(512, prompts="mine.jsonl").input_tokens == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("load: {prompts: mine.jsonl, input_tokens: [512, 8000]}", "load"),
        ("load: {input_tokens: [512, 512]}", "load.input_tokens[1]: `512` is given twice"),
        ("load: {input_tokens: []}", "load.input_tokens: an empty list is not accepted"),
        ("load: {input_tokens: [512, 0]}", "load.input_tokens[1]: `0` is not accepted"),
        ("load: {input_tokens: [512, 1e3]}", "load.input_tokens[1]: `1e3` is no whole number as written, write 1000"),
        ("load: {input_tokens: long}", "load.input_tokens: `long` is no number"),
        ("objective: {levels: [8@8000]}", "`8000` is no prompt length of `input_tokens:`; accepted: 512"),
        ("objective: {levels: [8@, 1]}", "objective.levels[0]"),
        ("objective: {weights: {4@512: 2}}", "`4` is no level of `concurrency:`; accepted: 1, 8"),
        ("claims: [a >= b at 8@64]", "64 is no prompt length of `input_tokens:`; accepted: 512"),
        ("constraints: [ttft_p99_ms <= 8 at 2@512]", "2 is no level of `concurrency:`; accepted: 1, 8"),
    ],
)
def test_lengths_and_levels_that_cannot_be_are_named_with_their_line(text, said):
    (found,) = problems(FILE + text + "\n")
    assert found.startswith("matrix.yaml:4: ")
    assert said in found


def test_levels_of_goals_are_those_of_the_lengths_of_any_box():
    goals = "objective: {levels: [8@8000, 1], weights: {8: 2, 8@512: 3}}\nclaims: [a >= b at 8@8000, a >= b at 8]\n"
    matrix = parse_matrix(TWO + goals)
    assert matrix.objective.levels == (Level(1), Level(8, 8000))
    text = FILE.replace("{unit: a.service}", "{unit: a.service, load: {input_tokens: 64}}")
    assert parse_matrix(text + "claims: [a >= b at 8@64]\n").claims == ("a >= b at 8@64",)


def test_a_length_that_does_not_fit_into_a_variants_context_is_a_problem_with_its_line():
    matrix = parse_matrix(TWO)
    assert too_long(matrix, {"a": 8256, "b": None}) == []
    (found,) = too_long(matrix, {"a": 8255, "b": 4096})
    assert found.startswith("matrix.yaml:4: load.input_tokens: 8000 tokens in and 256 out do not fit into ")
    assert found.endswith("--max-model-len 4096 (a, b); accepted: at most 3840 tokens in")


def test_twice_the_levels_are_twice_the_seconds_of_load():
    campaign = started((512, 8000), window_s=10.0, warmup_s=2.0)
    assert load_s(campaign.load, len(campaign.levels)) == 4 * 12.0
    assert load_s(started(512, window_s=10.0, warmup_s=2.0).load, 2) == 2 * 12.0


# --- the ledger ----------------------------------------------------------------------------------------------------


def started(lengths, **load):
    return CampaignStarted(
        experiment="gwen",
        box="b",
        rehearsal=False,
        seed=1,
        boots_planned=3,
        variants=("a", "b"),
        concurrency=(1, 8),
        load={"input_tokens": lengths, **load},
    )


def ledger(tables, lengths=(512, 8000), **campaign):
    """Records of {variant: [{spelling: tok/s of the boot}]}; None is a trial that failed under load."""
    records = [started(list(lengths)).model_copy(update=campaign)]
    for name, boots in tables.items():
        for block, table in enumerate(boots, start=1):
            key = {"boot": f"b{block:02d}-{name}", "variant": name, "cache": "cold", "block": block, "position": block}
            records.append(BootStarted(**key))
            for text, value in table.items():
                level = Level.parse(text)
                records.append(
                    TrialEnded(
                        **key,
                        concurrency=level.concurrency,
                        input_tokens=level.input_tokens,
                        window_s=10.0,
                        tokens=None,
                        tokens_per_s=value,
                        valid=True,
                        failed=value is None,
                        errors={} if value is not None else {"http_500": 4},
                    )
                )
            records.append(BootEnded(**key, boot_outcome="completed", why=""))
    return records


def boots(*rows):
    return [dict(zip(SPELLED, row, strict=True)) for row in rows]


# `a` is the faster at 512 tokens and collapses at 8000; `b` is steady at both.
DISAGREE = {
    "a": boots((100.0, 400.0, 60.0, 20.0), (101.0, 404.0, 60.5, 20.2), (99.0, 396.0, 59.5, 19.8)),
    "b": boots((80.0, 300.0, 50.0, 150.0), (80.5, 303.0, 50.5, 151.0), (79.5, 297.0, 49.5, 149.0)),
}
STEADY = {
    "a": boots((100.0, 400.0, 40.0, 120.0), (101.0, 404.0, 40.4, 121.0), (99.0, 396.0, 39.6, 119.0)),
    "b": boots((80.0, 300.0, 50.0, 150.0), (80.5, 303.0, 50.5, 151.0), (79.5, 297.0, 49.5, 149.0)),
}


def series_of(tables, **campaign):
    return verdict.series_from_records(ledger(tables, **campaign))


def said_of(series):
    return json.loads(verdict.to_json(verdict.judge(series)))


def variant(said, name):
    return next(one for one in said["variants"] if one["name"] == name)


def test_a_ledger_names_the_length_of_each_level_where_there_are_several():
    said = said_of(series_of(STEADY))
    assert said["input_tokens"] == [512, 8000]
    assert said["objective_levels"] == SPELLED
    assert [(c["level"], c["concurrency"], c["input_tokens"]) for c in variant(said, "a")["cells"]] == [
        ("1@512", 1, 512),
        ("8@512", 8, 512),
        ("1@8000", 1, 8000),
        ("8@8000", 8, 8000),
    ]


@pytest.mark.parametrize("recorded", [512, None])
def test_with_one_length_the_verdicts_name_no_length_also_from_a_ledger_that_did_not_record_it(recorded):
    spelled = "1" if recorded is None else "1@512"
    records = ledger({"a": [{spelled: 100.0}, {spelled: 101.0}]}, lengths=(512,))
    said = said_of(verdict.series_from_records(records))
    assert said["objective_levels"] == [1]
    assert said["objective_weights"] == {"1": 1.0}
    (one, eight) = variant(said, "a")["cells"]
    assert (one["level"], one["concurrency"], one["input_tokens"], eight["level"]) == (1, 1, 512, 8)
    assert "prompts" not in json.dumps(said)


def test_an_old_trial_record_is_read_as_it_was():
    (trial,) = [r for r in ledger({"a": [{"1": 100.0}]}, lengths=(512,)) if isinstance(r, TrialEnded)]
    old = trial.model_dump(mode="json")
    del old["input_tokens"]
    read = RECORD.validate_python(old)
    assert level_of(read.concurrency, read.input_tokens, ()) == Level(1)


# --- the verdict ---------------------------------------------------------------------------------------------------


def test_what_is_fast_at_512_tokens_and_collapses_at_8000_is_rejected_and_the_sentence_says_where():
    said = said_of(series_of(DISAGREE))
    a = variant(said, "a")
    assert (a["verdict"], a["reasons"], said["winner"]) == ("REJECTED", ["collapses_with_concurrency"], "b")
    # 60.5 / 20.2 is 2.995, 59.5 / 19.8 is 3.005: the widest of the three is told.
    assert (
        "it collapses at 8 streams with prompts of 8000 tokens: in the worst boot, b03-a, 19.8 tok/s in all, where "
        "1 stream with " in a["sentence"]
    )
    assert "(3.0× as much, and more than 2× in each of 3 boots)" in a["sentence"]


def test_longer_prompts_are_slower_and_that_is_no_collapse():
    # 8 streams at 8000 tokens give 30 tok/s, 8 at 512 give 400: thirteen times as much, but another load.
    said = said_of(series_of({"a": boots((100.0, 400.0, 20.0, 30.0), (101.0, 401.0, 20.1, 30.1))}))
    assert variant(said, "a")["reasons"] == []


def test_the_objective_is_the_geometric_mean_over_all_lengths_and_concurrencies():
    said = said_of(series_of({"a": [dict(zip(SPELLED, (16.0, 81.0, 4.0, 9.0), strict=True))]}))
    assert variant(said, "a")["objective"] == pytest.approx((16 * 81 * 4 * 9) ** 0.25)
    assert "at 1 and 8 streams with prompts of 512 and 8000 tokens, geometric mean" in said["sentence"]


def test_a_length_that_failed_leaves_the_other_lengths_cells_as_they_are():
    tables = STEADY | {"b": boots((80.0, 300.0, None, None), (80.5, 303.0, None, None), (79.5, 297.0, None, None))}
    said = said_of(series_of(tables))
    b = variant(said, "b")
    assert b["reasons"] == ["errors_under_load"]
    assert "it failed under load at 1 and 8 streams with prompts of 8000 tokens in 3 of 3 boots" in b["sentence"]
    assert [cell["estimate"] is None for cell in b["cells"]] == [False, False, True, True]


def test_a_spread_at_one_length_is_told_with_its_length():
    wide = boots((100.0, 400.0, 124.8, 300.0), (101.0, 404.0, 46.8, 301.0))
    said = variant(said_of(series_of({"a": wide})), "a")
    assert said["reasons"] == ["does_not_reproduce"]
    assert (
        "it does not reproduce at 1 stream with prompts of 8000 tokens: its boots gave 124.8 and 46.8"
        in said["sentence"]
    )


@pytest.mark.parametrize(
    ("goal", "winner"),
    [
        (Objective(levels=("8@512", "1@512")), "a"),
        (Objective(levels=("1@8000",)), "b"),
        (Objective(weights={8: 1.0, "1@512": 99.0}), "a"),
    ],
)
def test_the_objective_may_be_about_some_levels(goal, winner):
    assert said_of(series_of(STEADY, objective=goal))["winner"] == winner


def test_holm_is_over_the_pairs_of_all_lengths():
    case = derive(series_of({"a": DISAGREE["a"]})).cases[0]
    assert [(str(drop.low), str(drop.high)) for drop in case.drops] == [("1@512", "8@512"), ("1@8000", "8@8000")]
    alone, adjusted = (
        min(read(drop) for drop in case.drops) for read in (lambda d: d.difference.p_less, lambda d: d.p_holm)
    )
    assert 0 < alone < 0.01
    assert adjusted == pytest.approx(2 * alone)


def test_the_explanation_names_every_cell():
    told = verdict.explain(series_of(DISAGREE), "a")
    assert "Cell 8 streams with prompts of 8000 tokens, cold cache: UNDECIDED" in told
    assert "b01-a [cold]: 1@512: 100.0, 8@512: 400.0, 1@8000: 60.0, 8@8000: 20.0" in told


# --- claims, constraints, gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "code", "said"),
    [
        ("a >= 1.2x b at 8@512", 0, "holds"),
        ("a >= 1.2x b at 8@8000", 5, "does not hold"),
        # At both lengths: √(400/300 · 120/150) = 1.033.
        ("a >= 1x b at 8", 0, "holds, 1.03×"),
    ],
)
def test_a_claim_is_about_one_length_or_about_all(claim, code, said):
    found = gate.gate(series_of(STEADY), claims=[claim])
    assert found[0] == code
    assert said in found[1]


def test_a_claim_about_a_length_that_was_not_planned_is_bad_input():
    with pytest.raises(UsageError, match="level 8@64 is not in"):
        gate.gate(series_of(STEADY), claims=["a >= b at 8@64"])


def test_a_claim_at_a_concurrency_is_not_answered_by_the_lengths_that_happen_to_be_there():
    tables = {"a": STEADY["a"], "b": boots(*((80.0 + i, 300.0 + i, 50.0, None) for i in range(3)))}
    assert gate.gate(series_of(tables), claims=["a >= 1x b at 8"])[0] == 2


def test_a_constraint_at_one_length_does_not_ask_for_the_other():
    only = ("tokens_per_s >= 350 at 8@512",)
    assert variant(said_of(series_of(STEADY, constraints=only)), "a")["constraints"][0]["answer"] == "PASS"
    both = variant(said_of(series_of(STEADY, constraints=("tokens_per_s >= 350 at 8",))), "a")
    assert both["constraints"][0]["answer"] == "FAIL"
    assert "at 8@8000 120.0 tok/s" in both["constraints"][0]["sentence"]


def test_a_claim_may_name_the_only_length():
    one = {name: [{"1@512": row["1@512"]} for row in rows] for name, rows in STEADY.items()}
    assert gate.gate(series_of(one, lengths=(512,)), claims=["a >= 1.2x b at 1@512"])[0] == 0


def test_a_baseline_of_one_length_is_compared_with_that_length_alone():
    short = {name: [{"1@512": row["1@512"], "8@512": row["8@512"]} for row in rows] for name, rows in STEADY.items()}
    slower = {name: [row | {"1@8000": 1.0} for row in rows] for name, rows in STEADY.items()}
    before, now = series_of(short, lengths=(512,)), series_of(slower)
    code, said = gate.gate(now, baseline=before)
    assert code == 0, said
    assert "8000" not in said
    assert gate.gate(before, baseline=now)[0] == 2


# --- a series by hand ----------------------------------------------------------------------------------------------


def read(folder, text, name="s.yaml"):
    path = folder / name
    path.write_text(text)
    return read_series(path)


def test_a_hand_recorded_series_spells_its_levels(tmp_path):
    text = 'variants: {a: {8@512: [400, 404], 8@8000: [120, "-"]}, b: {boots: [{trials: {8@8000: 99}}]}}'
    found = read(tmp_path, text)
    assert found.input_tokens == (512, 8000)
    assert [[str(x.level) for x in boot.levels] for boot in found.boots] == [["8@512", "8@8000"]] * 2 + [["8@8000"]]
    rows = "variant,boot,concurrency,value\na,1,8@512,400\na,1,8@8000,120\na,2,8@512,404\n"
    assert [str(x.level) for x in read(tmp_path, rows, "s.csv").boots[0].levels] == ["8@512", "8@8000"]


def test_a_hand_recorded_series_of_one_length_names_it_nowhere_and_an_unsaid_length_is_a_level_of_its_own(tmp_path):
    one = read(tmp_path, "variants: {a: {1@512: [100], 8@512: [400]}}")
    assert (one.input_tokens, [str(x.level) for x in one.boots[0].levels]) == ((512,), ["1", "8"])
    mixed = read(tmp_path, "variants: {a: {8: [400], 8@8000: [120]}}")
    assert (mixed.input_tokens, [str(x.level) for x in mixed.boots[0].levels]) == ((), ["8", "8@8000"])
    assert said_of(mixed)["variants"][0]["reasons"] == []


def test_a_level_twice_or_misspelt_is_a_problem(tmp_path):
    with pytest.raises(SeriesError, match=r"8@: .* is no concurrency; accepted: a whole number .* or 8@8000"):
        read(tmp_path, "variants: {a: {8@: [400]}}")


# --- what is shown -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def view():
    records = ledger(DISAGREE)
    series = verdict.series_from_records(records)
    return build_view(records, series, verdict.judge(series))


def test_every_format_tells_the_length(view):
    texts = {name: render(view) for name, render in FORMATS.items()}
    assert "| tok/s at 8@8000 |" in texts["report.md"]
    assert "8@8000 is 8 streams with prompts of 8000 tokens" in texts["report.md"]
    assert 'data-label="tok/s at 8@8000"' in texts["report.html"]
    out = fromstring(texts["junit.xml"]).find(".//system-out")  # noqa: S314 - our own text
    assert "at 1@512: 80.0 tok/s" in out.text
    rows = list(csv.DictReader(io.StringIO(texts["cells.csv"])))
    found = {(row["variant"], row["concurrency"], row["input_tokens"]): row["cell_estimate"] for row in rows}
    assert float(found["b", "8", "8000"]) == pytest.approx(150.0, rel=1e-2)
    assert len(found) == 8


def test_the_csv_tells_the_trial_of_the_cells_own_length(view):
    rows = csv.DictReader(io.StringIO(FORMATS["cells.csv"](view)))
    one = next(row for row in rows if (row["boot"], row["concurrency"], row["input_tokens"]) == ("b01-a", "8", "8000"))
    assert float(one["tokens_per_s"]) == 20.0


def test_charts_have_a_panel_for_each_length(view):
    titles = {name: [panel.title for panel in FIGURES[name](view)] for name in ("boots", "throughput")}
    assert titles["boots"] == [
        "1 stream, prompts of 512 tokens",
        "8 streams, prompts of 512 tokens",
        "1 stream, prompts of 8000 tokens",
        "8 streams, prompts of 8000 tokens",
    ]
    assert titles["throughput"] == ["prompts of 512 tokens", "prompts of 8000 tokens"]


def test_the_terminals_table_has_a_row_for_each_length_in_80_columns(view):
    text = plain(view.verdicts, width=80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines() if " 512 " in line or " 8000 " in line]
    assert rows[0] == ["b", "WINNER", "512", "80.0", "300.0", "3"]
    assert rows[1] == ["provisional", "8000", "50.0", "150.0"] or rows[1][-3:] == ["8000", "50.0", "150.0"]


def test_a_comparison_names_the_length_and_pairs_it_with_an_experiment_of_that_length():
    records = ledger(STEADY)
    both = experiment("both", verdict.series_from_records(records), records)
    short = ledger({"a": [{"8@512": row["8@512"] / 2} for row in STEADY["a"]]}, lengths=(512,))
    other = experiment("short", verdict.series_from_records(short), short)
    ((a, b),) = pairs("a,b", both, lambda _name: None)
    assert "at 1 and 8 streams with prompts of 512 and 8000 tokens" in sentence(compare(a, b))
    ((a, b),) = pairs("both:a,short:a", both, {"both": both, "short": other}.get)
    found = compare(a, b)
    assert [str(row.level) for row in found.rows if row.ratio.value is not None] == ["8@512"]
    assert sentence(found).startswith("both:a gives 2.00× the throughput of short:a at 8 streams with prompts of 512 ")


def test_a_line_of_progress_names_the_length_where_there_are_several():
    trial = next(record for record in ledger(STEADY) if isinstance(record, TrialEnded))
    assert trial_text(trial, (512, 8000)) == "at 1@512: 100.0 tok/s"
    assert trial_text(trial, (512,)) == "at 1: 100.0 tok/s"
