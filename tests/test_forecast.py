"""What boots will take from what boots took, and what a budget buys by the campaign's own rule."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from invoke.context import Context
from report_samples import sample

from orchestrator import commands, verdict
from orchestrator.forecast import History, Past, best_history, buys, forecast, history_of, undecided
from orchestrator.ledger import to_line
from orchestrator.matrix import LoadSpec
from orchestrator.plan import PlannedBoot
from orchestrator.records import BootEnded, CampaignStarted, StepEnded

ROOT = Path(__file__).parent.parent
MATRIX = ROOT / "matrix.yaml"
LOAD = LoadSpec(window_s=30.0, warmup_s=5.0)


def planned(*variants: str, blocks: int = 1) -> list[PlannedBoot]:
    pairs = [(block, variant) for block in range(1, blocks + 1) for variant in variants]
    return [
        PlannedBoot(boot=f"b{block:02d}-{variant}", variant=variant, cache="cold", block=block, position=place)
        for place, (block, variant) in enumerate(pairs, start=1)
    ]


def boot_records(variant: str, block: int, outcome: str = "completed", **steps: float):
    where = {"boot": f"b{block:02d}-{variant}", "variant": variant, "cache": "cold", "block": block, "position": block}
    ended = BootEnded(**where, boot_outcome=outcome, why="", seconds=sum(steps.values()))
    return [*(StepEnded(**where, name=name, seconds=s, outcome="ok") for name, s in steps.items()), ended]


def begun(**changes) -> CampaignStarted:
    given = {"experiment": "gwen", "box": "gwen", "rehearsal": False, "seed": 1, "boots_planned": 3}
    load = {"window_s": 30.0, "warmup_s": 5.0}
    return CampaignStarted(**(given | {"concurrency": (1, 8), "load": load} | changes))


def test_a_boot_takes_what_boots_of_its_variant_took_on_average():
    records = [
        begun(),
        *boot_records("a", 1, ready=90.0, trials=80.0),
        *boot_records("a", 2, ready=110.0, trials=80.0),
        *boot_records("b", 1, "crashed", ready=40.0),
        *boot_records("b", 2, "disturbed", ready=4000.0),
    ]
    found = forecast(planned("a", "b"), history_of(records, "gwen"), LOAD, 2)
    assert [each.seconds for each in found.boots] == [180.0, 40.0]
    assert found.steps == {"ready": 140.0, "trials": 80.0}
    assert found.seconds == 220.0
    assert found.source == "as 3 boots of gwen took"


def test_a_variant_that_never_booted_takes_what_all_took():
    history = history_of([begun(), *boot_records("a", 1, ready=90.0), *boot_records("b", 1, ready=110.0)], "gwen")
    assert forecast(planned("new"), history, LOAD, 2).seconds == 100.0


def test_trials_grow_with_the_load_and_the_rest_does_not():
    history = History("x", (Past("a", "cold", {"ready": 100.0, "trials": 80.0}),), load_s=2 * 35.0)
    twice = LOAD.model_copy(update={"window_s": 65.0})
    assert forecast(planned("a"), history, twice, 2).steps == {"ready": 100.0, "trials": 160.0}
    assert forecast(planned("a"), history, LOAD, 4).steps["trials"] == 160.0


def test_settling_boots_of_one_step_are_summed():
    records = [begun(), *boot_records("a", 1, ready=10.0)]
    records.insert(1, records[1].model_copy(update={"seconds": 5.0}))
    assert history_of(records, "x").boots[0].steps == {"ready": 15.0}


def test_without_any_experience_it_is_a_guess_and_says_so():
    real = forecast(planned("a"), None, LOAD, 4)
    assert "guess" in real.source
    assert real.steps["trials"] == 4 * 45.0
    assert 60 < real.seconds - real.steps["trials"] < 300
    rehearsed = forecast(planned("a"), None, LoadSpec(window_s=0.65, warmup_s=0.1), 4, time_scale=0.003)
    assert rehearsed.seconds < 10
    assert "headroom" not in forecast(planned("a"), None, LOAD, 4, headroom=False).steps


def test_the_newest_other_experiment_on_the_same_box_is_the_experience(tmp_path):
    for name, box, ready in (("old", "gwen", 10.0), ("other", "elsewhere", 20.0), ("mine", "gwen", 30.0)):
        (tmp_path / name).mkdir()
        lines = map(to_line, [begun(box=box), *boot_records("a", 1, ready=ready)])
        (tmp_path / name / "records.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "records.jsonl").write_bytes(b"{}\n{}\n{}\n")
    found = best_history(tmp_path, "gwen", besides=tmp_path / "mine", variants={"a"})
    assert (found.source, found.boots[0].steps) == ("as one boot of old took", {"ready": 10.0})
    assert best_history(tmp_path, "nowhere", besides=tmp_path / "mine", variants={"a"}) is None


def test_a_boot_that_died_is_no_experience_for_another_variant(tmp_path):
    whole = [begun(), *boot_records("a", 1, ready=100.0, trials=80.0)]
    died = [begun(), *boot_records("b", 1, ready=5.0, outcome="crashed")]
    for age, (name, records) in enumerate((("whole", whole), ("died", died))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_bytes(b"".join(map(to_line, records)))
        os.utime(tmp_path / name / "records.jsonl", (1000 + age, 1000 + age))
    found = best_history(tmp_path, "gwen", besides=tmp_path / "mine", variants={"a", "b"})
    assert found.source == "as one boot of whole took"
    # Alone it tells of its own variant only.
    alone = history_of(died, "died")
    assert forecast(planned("b"), alone, LOAD, 2).steps == {"ready": 5.0}
    other = forecast(planned("a"), alone, LOAD, 2)
    assert (other.source, other.steps["trials"]) == ("as one boot of died took; of other variants a guess", 2 * 45.0)
    # Beside a completed boot it does not count for others.
    both = history_of([*whole, *died[1:]], "both")
    assert forecast(planned("c"), both, LOAD, 2).steps == {"ready": 100.0, "trials": 80.0}


@pytest.mark.parametrize(
    ("budget_s", "boots", "blocks"), [(0, 1, 0), (150, 1, 0), (200, 2, 1), (399, 3, 1), (400, 4, 2), (9999, 4, 2)]
)
def test_a_budget_buys_the_boots_that_would_begin_in_it(budget_s, boots, blocks):
    # 100 s a boot: a boot begins while what is spent and the longest boot so far fit.
    history = History("x", (Past("a", "cold", {"ready": 100.0}),))
    found = buys(forecast(planned("a", "b", blocks=2), history, LOAD, 2), budget_s)
    assert (len(found.boots), found.whole_blocks, found.seconds) == (boots, blocks, 100.0 * boots)
    assert len(found.boots) + len(found.left) == 4


def test_a_budget_shorter_than_an_earlier_sessions_longest_boot_buys_none():
    found = forecast(planned("a", "b"), History("x", (Past("a", "cold", {"ready": 100.0}),)), LOAD, 2)
    assert [len(buys(found, 90, longest_s=longest).boots) for longest in (0.0, 90.0, 91.0)] == [1, 1, 0]


@pytest.mark.rehearsal
def test_a_budget_that_pays_for_no_boot_begins_none_and_says_what_is_undecided(tmp_path, capsys):
    words = {"boots": "6", "out": str(tmp_path), "matrix": str(fixed_port(tmp_path)), "only": "spec-1"}
    commands.matrix(Context(), **words | {"boots": "1"})
    ledger = tmp_path / "gwen" / "records.jsonl"
    before = ledger.read_bytes()
    capsys.readouterr()
    commands.matrix(Context(), budget="1s", **words)
    said = capsys.readouterr()
    assert "a budget of 1 s pays for no boot: the longest boot so far took" in said.err
    assert ledger.read_bytes() == before
    assert "5 boots" in said.out


def test_what_would_stay_undecided_is_named_with_its_boots():
    todo = planned("a", "b", blocks=2)
    assert undecided(("a", "b", "c"), todo[:3], (), None) == (
        "a: 2 boots can refute it, 6 are needed to vouch for it",
        "b: one boot decides nothing",
        "c: no boot decides nothing",
    )
    assert undecided(("a", "b", "c"), todo, (), None)[0].startswith("a, b: 2 boots")  # each reason once
    assert undecided(("a", "b"), planned("a", "b", blocks=6), (), None) == ()


def test_what_is_rejected_already_is_decided():
    whole = sample()
    told = undecided(("spec-1", "spec-3", "spec-8"), (), whole.records, verdict.judge(whole.series))
    assert told == ("spec-1: 3 boots can refute it, 6 are needed to vouch for it",)


def test_the_command_prints_boots_commands_hours_and_the_budget_and_changes_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    commands.plan_(Context(), boots="2", only="spec-1,no-spec", budget="15s", out=str(out), matrix=str(MATRIX))
    said = capsys.readouterr().out
    assert said.count("b01-") == 2
    assert "time by step" in said
    assert "a budget of 15 s buys 2 of 4 boots (1 whole block)" in said
    assert re.search(r"still undecided then: (no-spec, spec-1|spec-1, no-spec): one boot decides nothing", said)
    # Every command can be pasted, production's too.
    assert len(re.findall(r" '\{\"enable_thinking\": false\}'", said)) == said.count("enable_thinking") == 2
    for step in ("cold:", "render:", "start:", "stop:"):
        assert f"  {step}\n" in said
    assert "--spec-tokens 8" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_each_difference_once_and_the_hours_last(tmp_path, capsys):
    words = {"boots": "1", "out": str(tmp_path), "matrix": str(fixed_port(tmp_path))}
    commands.plan_(Context(), **words)
    said = capsys.readouterr().out
    changes = said.partition("what each variant changes in it:\n")[2].partition("\n\n")[0]
    assert changes.splitlines() == [
        "  no-spec  without --spec-method, without --spec-model, without --spec-tokens",
        "  spec-1   --spec-tokens 1",
        "  spec-3   production as it stands",
        "  spec-5   --spec-tokens 5",
        "  spec-8   --spec-tokens 8",
    ]
    # Production's command, and that of the one boot whose steps are shown.
    assert said.count("--gpu-memory-utilization") == 2
    experiment, left = said.splitlines()[-2:]
    assert experiment == "experiment gwen on box rehearsal (local), REHEARSAL"
    assert left.startswith("5 boots left of 5, seed 1, about ")
    commands.plan_(Context(), commands=True, **words)
    assert capsys.readouterr().out.count("--gpu-memory-utilization") == 10


def test_a_dry_run_and_a_plan_with_all_its_commands_say_the_same(tmp_path, capsys):
    words = {"boots": "1", "out": str(tmp_path), "matrix": str(fixed_port(tmp_path))}
    commands.plan_(Context(), commands=True, **words)
    plan = capsys.readouterr().out
    commands.matrix(Context(), dry_run=True, **words)
    assert capsys.readouterr().out == plan
    assert "b01-spec-8" in plan


def fixed_port(folder: Path) -> Path:
    text = MATRIX.read_text().replace("time_scale:", "isolate_port: 18099\n    time_scale:")
    path = folder / "m.yaml"
    path.write_text(text.replace("examples/", f"{ROOT}/examples/"))
    return path
