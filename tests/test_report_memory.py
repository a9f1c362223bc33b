"""What a report says of GPU memory, on the ledger of a real H200, and what stands there without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_samples import sample

from orchestrator import verdict
from orchestrator.ledger import read
from orchestrator.plan import read_plan
from orchestrator.records import GpuUse, StepEnded
from orchestrator.report import build_view, figures, memory

H200 = Path(__file__).parent.parent / "docs" / "evidence" / "h200"


@pytest.fixture(scope="module")
def view():
    records = read(H200)
    series = verdict.series_from_records(records, plan=read_plan(H200 / "plan.json"))
    return build_view(records, series, verdict.judge(series))


def test_each_boot_says_what_was_left_beside_weights_kv_cache_and_graphs(view):
    rows = {row[0]: row[1:] for row in view.section("memory").tables[0].rows}
    outcome, free, weights, kv, tokens, graphs, rest, _ = rows["b01-spec-1"]
    # 143156 MiB free before the start; the rest is what is left of it.
    assert (outcome, free, tokens) == ("completed", "139.80", "398\u202f832")
    assert float(rest) == pytest.approx(float(free) - float(weights) - float(kv) - float(graphs), abs=0.02)
    assert float(rest) > 70
    assert 2 < float(rows["b01-spec-3-full-card"][6]) < 2.5


def test_the_tightest_boot_is_named_with_what_became_of_it(view):
    said = " ".join(view.section("memory").sentences)
    assert re.search(r"Least of it had b0\d-spec-3-full-card: 2\.\d\d of 139\.80 GiB, which ended as crashed\.", said)
    assert "Each variant got the same KV cache on each of its boots." in said


def test_the_chart_has_a_bar_a_boot_and_only_the_groups_that_there_are(view):
    (panel,) = figures.FIGURES["memory"](view)
    assert panel.title == "one card of each boot"
    assert panel.height == pytest.approx(1.4 + 0.21 * 6)
    svg = figures.chart(view, "memory").svgs()[0]
    assert re.search(r"2\.\d left ✕ crashed", svg)
    assert "KV cache" in svg
    assert "free at the fullest" in svg  # the cards were watched during the trials
    by_hand = figures.chart(watched(used_mib=None)[2], "memory").svgs()[0]
    assert "free at the fullest" not in by_hand


def test_the_parts_of_a_bar_are_the_whole_card(view):
    for one in memory.of(view.boots):
        assert sum(one.parts) == pytest.approx(one.free)


def watched(*, used_mib):
    """The sample's boots on two cards with 24000 and 23000 MiB free; under load the second holds `used_mib`."""
    made = sample(boots=2, rehearsal=False)
    held = (None if used_mib is None else 9.0, used_mib)
    uses = tuple(GpuUse(index=card, samples=60, memory_used_max_mib=used) for card, used in enumerate(held))
    records = []
    for record in made.records:
        if isinstance(record, StepEnded) and record.name == "clean_slate":
            facts = {"free_mib": [24000, 23000], "gpu_idle_mib": [100, 100]}
            records.append(record.model_copy(update={"facts": facts}))
        elif record.kind == "trial":
            records.append(record.model_copy(update={"gpu": uses}))
        else:
            records.append(record)
    return made, records, build_view(records, made.series, made.verdicts)


def test_the_fullest_moment_of_the_trials_is_told_by_the_fullest_card():
    _, _, view = watched(used_mib=22588.0)
    rows = {row[0]: row[1:] for row in view.section("memory").tables[0].rows}
    # The tighter card: 23000 MiB = 22.46 GiB free before; 23000 + 100 − 22588 = 512 MiB = 0.50 GiB at the fullest.
    assert (rows["b01-spec-1"][1], rows["b01-spec-1"][-1]) == ("22.46", "0.50")
    assert rows["b01-spec-3"][-1] == "–"  # it died before its trials
    said = " ".join(view.section("memory").sentences)
    assert "had 0.50 GiB free, the least of 8 boots" in said
    assert "0.5 free" in figures.chart(view, "memory").svgs()[0]


def test_a_kv_cache_that_differs_between_boots_of_one_variant_is_told():
    made, records, _ = watched(used_mib=100.0)
    records = [
        one.model_copy(
            update={
                "answer": one.answer.model_copy(
                    update={"timeline": one.answer.timeline.model_copy(update={"kv_tokens": 100_000})}
                )
            }
        )
        if one.kind == "journal_answer" and one.boot == "b01-spec-1"
        else one
        for one in records
    ]
    said = " ".join(build_view(records, made.series, made.verdicts).section("memory").sentences)
    assert (
        "The KV cache of spec-1 is not the same on every boot: 100\u202f000 to 105\u202f472 tokens, 5.5 % apart."
        in said
    )


def test_without_a_gpu_one_line_says_why_nothing_is_shown():
    view = sample().view()
    assert view.section("memory") is None
    assert (
        "Memory headroom of each boot is not shown: no GPU's memory was seen before a boot."
        in view.section("excluded").sentences
    )
