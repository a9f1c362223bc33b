"""Other tools' results as boots: what counts as one, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from orchestrator import verdict
from orchestrator.errors import SeriesError
from orchestrator.series import read_series

DATA = Path(__file__).parent / "data" / "foreign"


def judged(path: Path) -> dict:
    return json.loads(verdict.to_json(verdict.judge(read_series(path))))


def cells(said: dict, variant: str) -> dict[int, list]:
    (found,) = [v for v in said["variants"] if v["name"] == variant]
    return {cell["concurrency"]: cell["by_boot"] for cell in found["cells"]}


def variant(said: dict, name: str) -> dict:
    return next(v for v in said["variants"] if v["name"] == name)


def test_two_invocations_of_a_vllm_sweep_are_two_boots_and_the_runs_of_one_server_are_one_value():
    said = judged(DATA / "vllm-sweep")
    # Runs 0 and 1 of max_num_seqs=32 at 8 streams: 402.1 and 404.9 in the first invocation, 399.0 and 401.5 after.
    assert cells(said, "max_num_seqs=32")[8] == pytest.approx([math.sqrt(402.1 * 404.9), math.sqrt(399.0 * 401.5)])
    assert variant(said, "max_num_seqs=32")["boots"] == 2
    assert any("repeats, not boots" in note for note in said["notes"])


def test_failed_requests_of_a_vllm_sweep_are_errors_under_load():
    said = judged(DATA / "vllm-sweep")
    assert cells(said, "max_num_seqs=128")[8] == [pytest.approx(math.sqrt(455.0 * 458.2)), None]
    assert variant(said, "max_num_seqs=128")["reasons"] == ["errors_under_load"]


def test_a_server_that_never_came_up_is_a_boot_that_died():
    said = variant(judged(DATA / "vllm-sweep"), "max_num_seqs=512")
    assert (said["boots"], said["boots_failed"], said["cells"]) == (1, 1, [])


def test_one_invocation_alone_is_one_boot(tmp_path):
    shutil.copytree(DATA / "vllm-sweep" / "20261101_101500", tmp_path / "once")
    said = judged(tmp_path / "once")
    assert [v["boots"] for v in said["variants"]] == [1, 1]
    assert {cell["reproducibility"] for v in said["variants"] for cell in v["cells"]} == {"UNDECIDED"}


def test_each_guidellm_report_is_a_boot_of_the_variant_that_its_folder_names():
    said = judged(DATA / "guidellm")
    assert cells(said, "spec-1") == {1: [61.0, 61.9], 8: [402.0, 405.0]}
    assert cells(said, "spec-8") == {1: [124.8, 46.8], 8: [None, None]}
    assert variant(said, "spec-8")["reasons"] == ["does_not_reproduce", "errors_under_load"]
    assert said["winner"] == "spec-1"


def test_a_single_guidellm_report_is_one_boot_named_after_its_file():
    said = judged(DATA / "guidellm" / "spec-1" / "monday.json")
    assert [(v["name"], v["boots"]) for v in said["variants"]] == [("monday", 1)]


def test_aiperf_exports_lie_in_folders_of_variant_and_boot_in_the_old_and_the_new_form():
    said = judged(DATA / "aiperf")
    assert cells(said, "no-spec") == {1: [60.0, 60.6, 60.2], 8: [398.0, 401.0, 400.0]}
    assert variant(said, "spec-5")["reasons"] == ["errors_under_load"]


def test_no_boot_of_another_tool_counts_as_a_cold_start():
    for tool in ("vllm-sweep", "guidellm", "aiperf"):
        said = judged(DATA / tool)
        assert {cell["cache"] for v in said["variants"] for cell in v["cells"]} == {"as-is"}
        assert any("cold start" in note for note in said["notes"])


def changed(tmp_path: Path, **over) -> Path:
    """A copy of one run of a vllm sweep with other values."""
    run = json.loads(next((DATA / "vllm-sweep").rglob("run=0.json")).read_text()) | over
    file = tmp_path / "sweep" / "SERVE--a=1-BENCH--max_concurrency=8" / "run=0.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(run))
    return tmp_path / "sweep"


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"max_concurrency": None}, "no max_concurrency"),
        ({"output_throughput": 0.0}, "throughput of 0.0"),
        ({"output_throughput": -3.0}, "throughput of -3.0"),
        ({"output_throughput": math.nan}, "throughput of nan"),
        ({"output_throughput": "fast"}, "throughput of 'fast'"),
    ],
)
def test_a_run_without_a_level_or_a_rate_is_refused_with_its_file(tmp_path, over, said):
    with pytest.raises(SeriesError) as caught:
        read_series(changed(tmp_path, **over))
    assert "run=0.json" in caught.value.problems[0]
    assert said in caught.value.problems[0]


def test_unlike_loads_at_one_level_are_not_pooled(tmp_path):
    sweep = changed(tmp_path)
    first = sweep / "SERVE--a=1-BENCH--max_concurrency=8"
    for length in (128, 4096):
        shutil.copytree(first, sweep / f"SERVE--a=1-BENCH--max_concurrency=8-random_output_len={length}")
    shutil.rmtree(first)
    with pytest.raises(SeriesError, match="different loads must not be pooled"):
        read_series(sweep)


def test_prompt_lengths_that_a_vllm_sweep_names_are_levels_of_their_own(tmp_path):
    sweep = changed(tmp_path)
    first = sweep / "SERVE--a=1-BENCH--max_concurrency=8"
    for length in (128, 4096):
        shutil.copytree(first, sweep / f"SERVE--a=1-BENCH--max_concurrency=8-random_input_len={length}")
    shutil.rmtree(first)
    found = read_series(sweep)
    assert found.input_tokens == (128, 4096)
    assert [str(one.level) for one in found.boots[0].levels] == ["8@128", "8@4096"]


def test_a_folder_without_results_and_one_with_damaged_ones_say_so(tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(SeriesError, match="among 1 JSON files"):
        read_series(tmp_path)
    (tmp_path / "run=0.json").write_text("{")
    with pytest.raises(SeriesError, match=r"run=0\.json: not JSON"):
        read_series(tmp_path)
