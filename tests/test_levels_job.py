"""Two prompt lengths end to end on the rehearsal box: what is planned, measured, judged and shown."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = ["1@64", "4@64", "1@2000", "4@2000"]
MATRIX = f"""\
experiment: lengths
variants:
  no-spec: {{unset: [spec-method, spec-model, spec-tokens]}}
  spec-1: {{spec-tokens: 1}}
concurrency: [1, 4]
claims: [spec-1 >= 1.2x no-spec at 1, spec-1 >= 1x no-spec at 1@2000]
boxes:
  here:
    engine: rehearsal
    service: process
    unit_file: {ROOT}/examples/vllm-qwen.service
    time_scale: 0.003
    load: {{input_tokens: [2000, 64], output_tokens: 12, window_s: 0.65, warmup_s: 0.1, max_warmup_s: 0.5,
           sanity_tokens: 4, headroom_tokens: 4, request_timeout_s: 20}}
    deadlines: {{clean_slate_s: 10, ready_s: 30, first_request_s: 20, headroom_s: 20, sanity_s: 20, trial_s: 30,
                stop_s: 5, command_s: 10}}
"""

pytestmark = pytest.mark.rehearsal


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lengths")


def invoke(folder, *words):
    done = subprocess.run(
        (sys.executable, "-m", "invoke", *words, "--out", str(folder / "out")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 2), done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def said(folder):
    (folder / "matrix.yaml").write_text(MATRIX)
    matrix = ("--matrix", str(folder / "matrix.yaml"), "--boots", "2")
    return {name: invoke(folder, name, *matrix) for name in ("plan", "matrix")} | {"report": invoke(folder, "report")}


@pytest.fixture(scope="module")
def experiment(folder, said):
    assert said
    return folder / "out" / "lengths"


@pytest.fixture(scope="module")
def verdicts(experiment):
    return json.loads((experiment / "report" / "verdicts.json").read_text())


def test_the_plan_names_the_levels_before_anything_is_started(said, experiment):
    assert "at 1@64, 4@64, 1@2000, 4@2000: 0.65 s each, 64, 2000 tokens in, 12 tokens out" in said["plan"]
    assert json.loads((experiment / "plan.json").read_text())["input_tokens"] == [64, 2000]


def test_each_boot_measures_every_concurrency_at_every_length_in_order(experiment):
    records = [json.loads(line) for line in (experiment / "records.jsonl").read_text().splitlines()]
    measured: dict[str, list[str]] = {}
    for one in records:
        if one["kind"] == "trial":
            level = f"{one['concurrency']}@{one['input_tokens']}"
            own = measured.setdefault(one["boot"], [])
            own += [level] if not own or own[-1] != level else []  # a disturbed window is measured again
    assert measured == dict.fromkeys(("b01-no-spec", "b01-spec-1", "b02-no-spec", "b02-spec-1"), LEVELS)
    assert any((experiment / "boots" / "b01-spec-1").glob("requests-c4@2000*.jsonl"))


def test_the_verdict_is_over_all_levels_and_longer_prompts_are_slower_but_collapse_nothing(verdicts):
    assert verdicts["input_tokens"] == [64, 2000]
    assert (verdicts["objective_levels"], verdicts["winner"]) == (LEVELS, "spec-1")
    assert "at 1 and 4 streams with prompts of 64 and 2000 tokens, geometric mean" in verdicts["sentence"]
    for variant in verdicts["variants"]:
        speed = {cell["level"]: cell["estimate"] for cell in variant["cells"]}
        assert list(speed) == LEVELS
        assert speed["1@2000"] < speed["1@64"]
        assert speed["4@2000"] < speed["4@64"]
        assert "collapses_with_concurrency" not in variant["reasons"]


def test_claims_are_about_one_length_or_all(verdicts):
    assert [one["answer"] for one in verdicts["claims"]] == ["PASS", "PASS"]


def test_every_report_tells_the_length(said, experiment):
    report = experiment / "report"
    assert "at 4@2000" in said["matrix"]
    assert "prompt" in said["matrix"]
    for name in ("report.md", "report.html", "junit.xml"):
        assert "at 4@2000" in (report / name).read_text(), name
    with (report / "cells.csv").open(newline="") as file:
        assert {row["input_tokens"] for row in csv.DictReader(file)} == {"64", "2000"}
