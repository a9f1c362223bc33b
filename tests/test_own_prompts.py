"""The user's own prompts through a whole campaign: kept, told in the ledger, refused when changed or too long."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.ledger import read
from orchestrator.verdict import series_from_records

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.rehearsal
MATRIX = """
boxes:
  rehearsal: {{service: process, engine: rehearsal, unit_file: {unit}, time_scale: 0.002}}
variants: {{spec-1: {{spec-tokens: 1, max-model-len: {room}}}}}
concurrency: [1, 2]
headroom: off
load: {{prompts: mine.jsonl, window_requests: 6, warmup_s: 0, output_tokens: 8, sanity_tokens: 2{more}}}
"""


class Desk:
    """A folder with a matrix and a file of prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, prompts: list[str], *, room: int = 4096, more: str = "") -> bytes:
        raw = "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()
        (self.folder / "mine.jsonl").write_bytes(raw)
        unit = ROOT / "examples" / "vllm-qwen.service"
        (self.folder / "m.yaml").write_text(MATRIX.format(unit=unit, room=room, more=more))
        return raw

    def matrix(self) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLORTERM")}
        words = ("matrix", "--matrix", str(self.folder / "m.yaml"), "--boots", "1", "--out", str(self.folder / "out"))
        return subprocess.run(
            (sys.executable, "-m", "invoke", *words),
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )

    def records(self, kind: str) -> list[dict]:
        lines = (self.folder / "out" / "m" / "records.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_a_campaign_with_them_keeps_the_file_and_says_which_it_was(desk):
    raw = desk.write([f"What is {number} times {number}?" for number in range(200)])
    done = desk.matrix()
    assert done.returncode == 0, done.stderr
    kept = desk.folder / "out" / "m" / "prompts.jsonl"
    assert (kept.read_bytes(), stat.S_IMODE(kept.stat().st_mode)) == (raw, 0o600)
    (begun,) = desk.records("campaign_started")
    assert begun["load"]["prompts_sha256"] == hashlib.sha256(raw).hexdigest()
    assert (begun["load"]["prompts_in_file"], begun["load"]["window_requests"]) == (200, 6)
    assert "input_tokens" not in begun["load"]
    trials = desk.records("trial")
    assert {trial["input_tokens"] for trial in trials} == {None}
    assert {trial["concurrency"] for trial in trials if trial["valid"]} == {1, 2}

    # Another file is another experiment; the same again is complete.
    assert desk.matrix().returncode == 0
    desk.write(["something else"] * 3)
    refused = desk.matrix()
    assert refused.returncode == 4
    assert 'load.prompts: "' in refused.stderr


def test_a_prompt_that_does_not_fit_ends_it_with_4_and_its_line_and_nothing_of_ours_runs(desk):
    desk.write(["fits", "a b c d " * 200], room=512)
    done = desk.matrix()
    assert done.returncode == 4
    assert "mine.jsonl:2: 8" in done.stderr
    assert "at most 504 fit spec-1's 512 (max_model_len)" in done.stderr
    (end,) = desk.records("boot_ended")
    assert (end["boot_outcome"], end["died"]) == ("aborted", False)
    assert desk.records("campaign_ended")[0]["restored"] is True
    assert desk.records("trial") == []


def test_repeated_prompts_hit_the_prefix_cache_and_the_trial_says_so_instead_of_being_disturbed(desk):
    desk.write(
        [f"Tell me {number} in many words: " + "why and how and when " * 40 for number in range(3)],
        more=", repeat_prompts: true",
    )
    assert desk.matrix().returncode == 0
    trials = desk.records("trial")
    assert len(trials) == 2
    assert all(trial["valid"] for trial in trials)
    assert all(any("repeated on purpose" in warning for warning in trial["warnings"]) for trial in trials)
    (note,) = series_from_records(read(desk.folder / "out" / "m")).notes
    assert "load.repeat_prompts" in note
