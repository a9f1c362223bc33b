"""Plans: order, extension, what the ledger leaves, files and folders."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import LedgerError, UsageError
from orchestrator.matrix import load_matrix, parse_matrix, select
from orchestrator.plan import (
    MAX_DISTURBED_REPEATS,
    Plan,
    add_block,
    boot_name,
    experiment_folder,
    extend,
    given_up,
    make_plan,
    read_plan,
    remaining,
    write_plan,
)
from orchestrator.records import BootEnded, BootStarted, CampaignStarted, StepEnded

ROOT = Path(__file__).parent.parent


def matrix_of(variants=("a", "b", "c"), cache=("cold",), **keys):
    more = "".join(f"{key}: {value}\n" for key, value in keys.items())
    names = "".join(f"  {name}: {{}}\n" for name in variants)
    return parse_matrix(f"boxes: {{here: {{unit: x.service}}}}\ncache: [{', '.join(cache)}]\n{more}variants:\n{names}")


names = st.lists(st.sampled_from([f"v{n}" for n in range(8)]), min_size=1, max_size=6, unique=True)
caches = st.lists(st.sampled_from(["cold", "clear", "warm", "as-is"]), min_size=1, max_size=3, unique=True)
seeds = st.integers(0, 2**32 - 1)
plans = st.builds(
    lambda variants, cache, boots, seed: make_plan(matrix_of(variants, cache), boots, seed),
    names,
    caches,
    st.integers(1, 3),
    seeds,
)


# --- order ---------------------------------------------------------------------------------------------------------


def test_the_shipped_matrix_three_times_is_fifteen_boots_in_this_very_order():
    # Written down once: the order may never differ between platforms or versions of Python.
    plan = make_plan(load_matrix(ROOT / "matrix.yaml"), 3)
    assert [boot.boot for boot in plan.boots_planned] == [
        *("b01-spec-8", "b01-spec-5", "b01-spec-1", "b01-spec-3", "b01-no-spec"),
        *("b02-spec-3", "b02-no-spec", "b02-spec-1", "b02-spec-8", "b02-spec-5"),
        *("b03-spec-1", "b03-spec-3", "b03-spec-5", "b03-no-spec", "b03-spec-8"),
    ]
    assert [boot.position for boot in plan.boots_planned] == list(range(1, 16))
    assert (plan.plan_name, plan.boots, plan.seed, plan.blocks) == ("fixed", 3, 1, 3)


@settings(max_examples=60, deadline=None)
@given(names, caches, st.integers(1, 6), seeds)
def test_every_block_holds_each_variant_and_cache_state_exactly_once(variants, cache, boots, seed):
    plan = make_plan(matrix_of(variants, cache), boots, seed)
    cells = Counter(itertools.product(variants, cache))
    assert plan.blocks == boots
    for block in range(1, boots + 1):
        assert Counter((b.variant, b.cache) for b in plan.boots_planned if b.block == block) == cells
    assert [boot.position for boot in plan.boots_planned] == list(range(1, boots * len(cells) + 1))
    assert len({boot.boot for boot in plan.boots_planned}) == len(plan.boots_planned)
    assert [boot.block for boot in plan.boots_planned] == sorted(boot.block for boot in plan.boots_planned)


def test_the_order_is_random_over_seeds_and_over_blocks():
    # Three variants have six orders; 600 blocks put about 100 on each. Chi-square with 5 degrees of freedom exceeds
    # 20.5 once in a thousand; the seeds are fixed, so this either holds for ever or never.
    matrix = matrix_of()
    for drawn in ([make_plan(matrix, 1, seed) for seed in range(600)], [make_plan(matrix, 600, 1)]):
        orders: Counter[tuple[str, ...]] = Counter()
        for plan in drawn:
            for _, block in itertools.groupby(plan.boots_planned, key=lambda boot: boot.block):
                orders[tuple(boot.variant for boot in block)] += 1
        assert len(orders) == 6
        assert sum((count - 100) ** 2 / 100 for count in orders.values()) < 20.5


def test_the_order_of_the_file_does_not_matter_to_the_order_of_the_boots():
    one, other = make_plan(matrix_of(("a", "b", "c")), 4, 7), make_plan(matrix_of(("c", "a", "b")), 4, 7)
    assert one.boots_planned == other.boots_planned


def test_a_boots_name_says_block_variant_cache_and_repeat():
    assert boot_name(2, "spec-8", "cold") == "b02-spec-8"
    assert boot_name(2, "spec-8", "warm") == "b02-spec-8@warm"
    assert boot_name(12, "spec-8", "as-is", attempt=3) == "b12-spec-8@as-is.r2"
    assert boot_name(100, "x", "cold") == "b100-x"


# --- how many ------------------------------------------------------------------------------------------------------


def test_a_fixed_plan_has_one_look_at_its_end():
    plan = make_plan(matrix_of(), 3)
    assert (plan.looks.refute, plan.looks.vouch) == ((3,), (3,))
    assert (plan.looks.refute_alpha, plan.looks.vouch_alpha, plan.alpha) == (0.05, 0.05, 0.05)


@pytest.mark.parametrize(
    ("name", "refute", "vouch", "alphas", "last"),
    [
        ("nightly", (2, 3, 4, 6, 8, 10), (6, 8, 10), (0.05 / 6, 0.05 / 3), 10),
        ("pull-request", (2, 3, 5), (), (0.05 / 3, 0.05), 5),
        ("smoke", (3,), (), (0.05, 0.05), 3),
    ],
)
def test_an_adaptive_plan_declares_its_looks_and_begins_with_one_block_unless_it_has_one_look(
    name, refute, vouch, alphas, last
):
    plan = make_plan(matrix_of(boots=4), plan_name=name)
    assert plan.boots == "auto"
    assert (plan.looks.refute, plan.looks.vouch) == (refute, vouch)
    assert (plan.looks.refute_alpha, plan.looks.vouch_alpha) == pytest.approx(alphas)
    assert plan.looks.last == last
    assert plan.blocks == (3 if name == "smoke" else 1)


def test_auto_is_the_nightly_plan_also_from_the_file():
    assert make_plan(matrix_of(), "auto").plan_name == "nightly"
    assert make_plan(matrix_of(boots="auto")).plan_name == "nightly"
    assert make_plan(matrix_of(boots=4)).boots == 4


def test_a_number_and_an_adaptive_plan_exclude_each_other():
    with pytest.raises(UsageError, match="--boots 3 and --plan nightly exclude each other"):
        make_plan(matrix_of(), 3, plan_name="nightly")
    with pytest.raises(UsageError, match="how often shall each variant boot"):
        make_plan(matrix_of())
    for wrong in (0, -1, 1001):
        with pytest.raises(UsageError, match="accepted: a whole number, 1 to 1000"):
            make_plan(matrix_of(), wrong)


# --- more of them --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(names, caches, st.integers(1, 4), st.integers(1, 8), seeds)
def test_extending_keeps_what_was_planned_and_equals_having_asked_for_it_at_once(variants, cache, before, after, seed):
    matrix = matrix_of(variants, cache)
    plan = make_plan(matrix, before, seed)
    longer = extend(plan, after)
    assert longer.boots_planned[: len(plan.boots_planned)] == plan.boots_planned
    assert longer.boots_planned == make_plan(matrix, max(before, after), seed).boots_planned
    assert longer.boots == max(before, after)


def test_extending_moves_the_look_and_remembers_where_it_was():
    plan = extend(extend(make_plan(matrix_of(), 3), 6), 8)
    assert (plan.boots, plan.looks.refute, plan.extended_from) == (8, (8,), (3, 6))
    assert extend(plan, 8) is plan
    assert extend(plan, 2) is plan


def test_extending_some_variants_adds_blocks_of_these_alone():
    plan = extend(make_plan(matrix_of(), 2), 4, variants=["b"])
    assert [boot.boot for boot in plan.boots_planned[6:]] == ["b03-b", "b04-b"]
    assert [boot.position for boot in plan.boots_planned[6:]] == [7, 8]
    assert plan.boots == 4
    # The others catch up in blocks of their own: a block is a group in time.
    whole = extend(plan, 4)
    assert sorted(boot.boot for boot in whole.boots_planned[8:]) == ["b05-a", "b05-c", "b06-a", "b06-c"]
    assert Counter(boot.variant for boot in whole.boots_planned) == {"a": 4, "b": 4, "c": 4}


def test_variants_and_cache_states_that_come_later_get_as_many_boots():
    matrix = matrix_of()
    plan = make_plan(select(matrix, ["a"]), 2)
    plan = extend(plan, 2, variants=["a", "b"], cache=["cold", "warm"])
    assert Counter((boot.variant, boot.cache) for boot in plan.boots_planned) == {
        ("a", "cold"): 2,
        ("a", "warm"): 2,
        ("b", "cold"): 2,
        ("b", "warm"): 2,
    }
    assert (plan.variants, plan.cache) == (("a", "b"), ("cold", "warm"))


def test_an_adaptive_plan_grows_by_blocks_of_what_is_not_settled():
    plan = make_plan(matrix_of(), "auto")
    grown = add_block(add_block(plan, ["c", "a"]), ["c"])
    assert [sorted(b.variant for b in grown.boots_planned if b.block == n) for n in (2, 3)] == [["a", "c"], ["c"]]
    assert grown.variants == plan.variants
    assert grown.looks == plan.looks
    with pytest.raises(UsageError, match="a nightly plan adds boots by itself"):
        extend(plan, 6)


# --- what remains --------------------------------------------------------------------------------------------------


def started(boot):
    return BootStarted(**boot.model_dump())


def ended(boot, outcome):
    return BootEnded(**boot.model_dump(), boot_outcome=outcome, why="test")


def one_boot():
    plan = make_plan(matrix_of(("a",)), 1)
    return plan, plan.boots_planned[0]


@pytest.mark.parametrize("outcome", ["completed", "crashed", "not_ready"])
def test_a_boot_with_an_answer_is_not_repeated(outcome):
    plan, boot = one_boot()
    assert remaining(plan, [started(boot), ended(boot, outcome)]) == ()


def test_a_disturbed_boot_is_repeated_three_times_and_then_given_up():
    plan, _ = one_boot()
    records = []
    names = []
    while left := remaining(plan, records):
        names.append(left[0].boot)
        records += [started(left[0]), ended(left[0], "disturbed")]
    assert names == ["b01-a", "b01-a.r1", "b01-a.r2", "b01-a.r3"]
    assert [boot.boot for boot in given_up(plan, records)] == ["b01-a"]


def test_aborted_boots_are_repeated_and_do_not_use_up_the_three():
    plan, boot = one_boot()
    records = []
    for outcome in ("aborted", "disturbed", "aborted", "aborted", "disturbed", "disturbed", "aborted"):
        (left,) = remaining(plan, records)
        records += [started(left), ended(left, outcome)]
    (left,) = remaining(plan, records)
    assert (left.boot, left.attempt, left.position, left.block) == ("b01-a.r7", 8, boot.position, boot.block)
    records += [started(left), ended(left, "disturbed")]
    assert remaining(plan, records) == ()


def test_a_boot_that_began_and_never_ended_is_repeated_under_another_name():
    plan, boot = one_boot()
    step = StepEnded(**boot.model_dump(), name="clean_slate", seconds=1.0, outcome="ok")
    assert [left.boot for left in remaining(plan, [started(boot), step])] == ["b01-a.r1"]


def test_a_repeat_comes_before_the_boots_that_follow():
    plan = make_plan(matrix_of(), 2)
    first, second = plan.boots_planned[:2]
    left = remaining(plan, [ended(first, "completed"), ended(second, "disturbed")])
    assert [boot.boot for boot in left[:2]] == [f"{second.boot}.r1", plan.boots_planned[2].boot]
    assert len(left) == 5


def test_only_some_variants_remain_when_only_these_are_asked_for():
    plan = make_plan(matrix_of(), 2)
    assert {boot.variant for boot in remaining(plan, [], variants={"a", "c"})} == {"a", "c"}


def test_records_of_boots_that_the_plan_does_not_know_are_ignored():
    plan, _ = one_boot()
    (stranger,) = make_plan(matrix_of(("z",)), 1).boots_planned
    campaign = CampaignStarted(experiment="x", box="here", rehearsal=False, seed=1, boots_planned=1)
    assert remaining(plan, [campaign, ended(stranger, "completed")]) == plan.boots_planned


outcomes = st.sampled_from(["completed", "crashed", "not_ready", "disturbed", "aborted", "lost"])


@settings(max_examples=100, deadline=None)
@given(plans, st.lists(outcomes, max_size=40), st.randoms(use_true_random=False))
def test_no_boot_is_lost_or_made_twice_whatever_the_order_of_the_ledger(plan, events, shuffler: random.Random):
    records = []
    made = []
    done = set()
    disturbed: Counter[tuple[int, str, str]] = Counter()
    for event in events:  # a campaign that is interrupted and goes on as it may
        left = remaining(plan, records)
        if not left:
            break
        boot = left[0]
        key = (boot.block, boot.variant, boot.cache)
        made.append(boot.boot)
        records.append(started(boot))
        if event != "lost":
            records.append(ended(boot, event))
        done |= {key} if event in ("completed", "crashed", "not_ready") else set()
        disturbed[key] += event == "disturbed"
        extra = records[:]
        shuffler.shuffle(extra)
        assert remaining(plan, extra + extra[:3]) == remaining(plan, records)
    assert len(made) == len(set(made))
    wanted = [
        key
        for key in ((b.block, b.variant, b.cache) for b in plan.boots_planned)
        if key not in done and disturbed[key] <= MAX_DISTURBED_REPEATS
    ]
    assert [(b.block, b.variant, b.cache) for b in remaining(plan, records)] == wanted
    assert not {boot.boot for boot in remaining(plan, records)} & set(made)


# --- plan.json -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(names, caches, st.integers(1, 4), seeds)
def test_a_plan_reads_back_as_it_was_written(tmp_path_factory, variants, cache, boots, seed):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = extend(make_plan(matrix_of(variants, cache), boots, seed), boots + 1)
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert [other.name for other in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "damaged"),
        (b'{"v": 1, "expe', "damaged"),
        (b"[]", "damaged: no JSON object"),
        (b"\xff\xfe", "damaged"),
        (b'{"v": 2}', "a plan of version 2; this Coldboot reads version 1"),
        (b'{"v": 1}', "damaged: experiment: Field required"),
    ],
)
def test_a_plan_that_cannot_be_read_says_why(tmp_path, content, said):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(LedgerError, match=r"plan\.json: ") as caught:
        read_plan(tmp_path / "plan.json")
    assert said in str(caught.value)


def test_a_plan_that_is_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(LedgerError, match="there is no such file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(LedgerError, match="cannot be written"):
        write_plan(tmp_path / "nowhere" / "plan.json", make_plan(matrix_of(), 1))


# --- folders -------------------------------------------------------------------------------------------------------

TWO = """\
experiment: gwen
box: {box}
boxes:
  rehearsal: {{unit: a.service}}
  gwen: {{unit: b.service}}
variants: {{x: {{p: {p}}}}}
"""


def two(box="rehearsal", p=1):
    return parse_matrix(TWO.format(box=box, p=p))


def begin(out, matrix, *, new=False):
    folder = experiment_folder(out, matrix, new=new)
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder / "plan.json", make_plan(matrix, 1))
    return folder.name


def test_the_files_own_box_has_the_plain_name_and_another_its_own(tmp_path):
    assert begin(tmp_path, two()) == "gwen"
    assert begin(tmp_path, select(two(), box="gwen")) == "gwen.gwen"
    assert begin(tmp_path, two()) == "gwen"


def test_another_box_first_does_not_take_the_plain_name(tmp_path):
    assert begin(tmp_path, select(two(), box="gwen")) == "gwen.gwen"
    assert begin(tmp_path, two()) == "gwen"


def test_an_edited_box_line_goes_on_where_that_box_has_its_results(tmp_path):
    assert begin(tmp_path, two("rehearsal")) == "gwen"
    assert begin(tmp_path, two("gwen")) == "gwen.gwen"
    assert begin(tmp_path, two("rehearsal")) == "gwen"
    assert begin(tmp_path, select(two("gwen"), box="rehearsal")) == "gwen"


def test_an_edited_box_line_finds_what_was_begun_by_the_command_line(tmp_path):
    assert begin(tmp_path, select(two("rehearsal"), box="gwen")) == "gwen.gwen"
    assert begin(tmp_path, two("gwen")) == "gwen.gwen"


def test_new_takes_the_first_free_number_and_the_session_after_goes_on_there(tmp_path):
    assert begin(tmp_path, two(), new=True) == "gwen"
    assert begin(tmp_path, two(), new=True) == "gwen.2"
    assert begin(tmp_path, two(p=2), new=True) == "gwen.3"
    assert begin(tmp_path, two(p=2)) == "gwen.3"
    # A matrix that was changed back goes on with the newest experiment of its own.
    assert begin(tmp_path, two(p=1)) == "gwen.2"
    # One that fits none goes to the newest, where the campaign refuses it and names what changed.
    assert experiment_folder(tmp_path, two(p=3)).name == "gwen.3"


def test_new_on_another_box_numbers_that_boxs_folder(tmp_path):
    begin(tmp_path, two())
    other = select(two(), box="gwen")
    assert [begin(tmp_path, other, new=True) for _ in range(3)] == ["gwen.gwen", "gwen.gwen.2", "gwen.gwen.3"]
    assert begin(tmp_path, two()) == "gwen"


def test_a_folder_without_a_plan_is_used(tmp_path):
    (tmp_path / "gwen").mkdir()
    assert experiment_folder(tmp_path, two()).name == "gwen"


def test_a_damaged_plan_on_the_way_is_an_error_and_not_another_folder(tmp_path):
    (tmp_path / "gwen").mkdir()
    (tmp_path / "gwen" / "plan.json").write_text("{")
    with pytest.raises(LedgerError, match="damaged"):
        experiment_folder(tmp_path, two())


def test_later_versions_may_add_keys_to_a_plan(tmp_path):
    plan = make_plan(matrix_of(), 1)
    text = plan.model_dump_json()[:-1] + ', "later": 1}'
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(tmp_path / "plan.json") == plan
    assert isinstance(plan, Plan)
