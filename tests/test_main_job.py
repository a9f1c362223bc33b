"""The main job, end to end, as a person runs it: `invoke matrix --boots 3` and `invoke report` on the rehearsal box."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
INVOKE = (sys.executable, "-m", "invoke")

pytestmark = pytest.mark.rehearsal

MAX_SECONDS = 120
MAX_RSS_MIB = 200


def invoke(*words: str, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLORTERM")}
    return subprocess.run(
        (*INVOKE, *words),
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def campaign(out):
    """What `invoke matrix` said, its seconds, and its peak memory in MiB."""
    begun = time.monotonic()
    peak_kib = 0
    with (
        (out / "said").open("wb") as said,
        subprocess.Popen(
            (*INVOKE, "matrix", "--boots", "3", "--out", str(out)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        ) as process,
    ):
        # Not ru_maxrss: that of a child begins with what this process held when it was forked.
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            peak_kib = max(peak_kib, int(found[1]) if found else 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.25)
    seconds = time.monotonic() - begun
    assert process.returncode == 0, (out / "said").read_text()[-4000:]
    return (out / "said").read_text(), seconds, peak_kib / 1024


@pytest.fixture(scope="module")
def verdicts(out, campaign):
    done = invoke("report", "--out", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "gwen" / "report" / "verdicts.json").read_text())


def variant(verdicts, name):
    return next(found for found in verdicts["variants"] if found["name"] == name)


def records(out):
    return [json.loads(line) for line in (out / "gwen" / "records.jsonl").read_text().splitlines()]


def test_the_whole_rehearsal_ends_within_two_minutes(campaign):
    assert campaign[1] <= MAX_SECONDS


def test_the_orchestrator_stays_below_200_mib(campaign):
    assert 20 < campaign[2] < MAX_RSS_MIB


def test_fifteen_boots_ended_and_none_is_missing(out, campaign):
    outcomes = Counter(record["boot_outcome"] for record in records(out) if record["kind"] == "boot_ended")
    assert outcomes["completed"] == 12
    assert outcomes["crashed"] == 3


def test_what_a_campaign_keeps_is_for_its_owner_alone(out, campaign):
    # The stand-in engine writes its own state and caches, as any engine does; the folder around them is closed.
    engines = (out / "gwen" / "box" / "engine", out / "gwen" / "box" / "caches", out / "gwen" / "report")
    kept = [path for path in (out / "gwen").rglob("*") if not {path, *path.parents}.intersection(engines)]
    assert len(kept) > 30
    readable = {str(path): oct(path.stat().st_mode & 0o777) for path in kept if path.stat().st_mode & 0o077}
    assert readable == {}
    assert (out / "gwen").stat().st_mode & 0o077 == 0


def test_everything_is_stamped_as_a_rehearsal(out, verdicts):
    report = out / "gwen" / "report"
    assert verdicts["rehearsal"] is True
    for name in ("report.md", "report.html", "junit.xml", "cells.csv"):
        assert "rehearsal" in (report / name).read_text().lower(), name
    assert list((report / "figures").glob("*.png"))


def test_spec_1_wins_provisionally(verdicts):
    assert verdicts["winner"] == "spec-1"
    assert verdicts["provisional"] is True
    assert variant(verdicts, "spec-1")["verdict"] == "WINNER"


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("spec-3", ["cold_boot_fatal"]),
        ("spec-5", ["collapses_with_concurrency", "errors_under_load"]),
        ("spec-8", ["does_not_reproduce", "errors_under_load"]),
    ],
)
def test_the_seeds_rejections_come_out_with_exactly_their_reasons(verdicts, name, reasons):
    assert variant(verdicts, name)["verdict"] == "REJECTED"
    assert variant(verdicts, name)["reasons"] == reasons


def test_the_stable_variants_are_not_rejected(verdicts):
    assert variant(verdicts, "no-spec")["verdict"] in ("CONTENDER", "DOMINATED")


def test_spec_3_dies_at_its_first_request_of_triton_and_the_journal_says_so(out, campaign):
    answers = [
        record["answer"]
        for record in records(out)
        if record["kind"] == "journal_answer" and record["variant"] == "spec-3"
    ]
    assert len(answers) == 3
    for answer in answers:
        assert (answer["outcome"], answer["phase"], answer["cause"]) == ("fatal", "first_request", "triton_oom")
        assert any("Triton Error [CUDA]: out of memory" in evidence["text"] for evidence in answer["evidence"])


def test_every_cold_boot_is_proven_cold(out, campaign):
    proofs = {record["cache_proof"] for record in records(out) if record["kind"] == "boot_ended"}
    assert proofs == {"compiled"}


def test_the_books_of_every_valid_trial_agree_to_the_token(out, campaign):
    trials = [
        record for record in records(out) if record["kind"] == "trial" and record["valid"] and not record["failed"]
    ]
    assert len(trials) >= 40
    for trial in trials:
        assert trial["whole"]["generation_tokens"] == trial["client_tokens"]


def measured(out):
    return [record for record in records(out) if record["kind"] == "trial" and record["tokens_per_s"]]


def off(trial, ruler):
    return trial["rulers"][ruler] / trial["rulers"]["counter"]


def test_counting_words_would_have_said_about_seven_tenths(out, campaign):
    assert 0.65 < median(off(trial, "words") for trial in measured(out)) < 0.8


def test_chunks_are_tokens_without_drafts_and_steps_with_them(out, campaign):
    plain = [trial for trial in measured(out) if trial["variant"] == "no-spec"]
    assert median(off(trial, "chunks") for trial in plain) == pytest.approx(1, abs=0.01)
    drafted = [trial for trial in measured(out) if trial["variant"] == "spec-1"]
    # Each step gives 1.97 tokens, and each answer of 12 begins with one that no draft precedes.
    assert all(0.5 < off(trial, "chunks") < 0.7 for trial in drafted)


def logged(folder, until):
    """Tokens by the log's lines, each over its own interval, up to that second."""
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    lines = [
        (int(entry["__REALTIME_TIMESTAMP"]) / 1e6, float(found[1]))
        for entry in entries
        if (found := re.search(r"Avg generation throughput: ([\d.]+) tokens/s", entry["MESSAGE"]))
    ]
    return sum(rate * (end - begin) for (begin, _), (end, rate) in itertools.pairwise(lines) if end < until + 0.1)


def test_the_log_line_counts_emitted_tokens_and_is_off_in_windows_that_are_not_its_own(out, campaign):
    for boot, name in {(trial["boot"], trial["variant"]) for trial in measured(out)}:
        folder = out / "gwen" / "boots" / boot
        pages = (file.read_text().splitlines() for file in folder.glob("metrics-*.jsonl"))
        last = max((json.loads(line) for page in pages for line in page), key=lambda read: read["t_s"])
        emitted = last["generation_tokens"]
        # Its intervals are of 30 ms here, which a busy machine reads late.
        assert logged(folder, last["at_s"]) == pytest.approx(emitted, rel=0.2), boot
        if name == "spec-8":
            assert last["spec_draft_tokens"] + last["spec_accepted_tokens"] > 1.4 * emitted
    wrong = [abs(off(trial, "logger") - 1) for trial in measured(out) if trial["rulers"]["logger"]]
    assert max(wrong) > 0.02
    assert max(wrong) > 2 * median(abs(off(trial, "usage") - 1) for trial in measured(out))


def test_the_same_command_again_says_that_it_is_complete(out, campaign):
    begun = time.monotonic()
    done = invoke("matrix", "--boots", "3", "--out", str(out))
    assert done.returncode == 0
    assert "complete" in done.stdout
    assert time.monotonic() - begun < 30
    assert len(done.stdout.splitlines()) == 1


def test_a_changed_matrix_is_refused_with_what_changed(out, campaign, tmp_path):
    text = (ROOT / "matrix.yaml").read_text().replace("concurrency: [1, 2, 4, 8]", "concurrency: [1, 2]")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "matrix.yaml").write_text(text)
    done = invoke("matrix", "--boots", "3", "--out", str(out), "--matrix", str(tmp_path / "matrix.yaml"))
    assert done.returncode == 4
    assert "concurrency: [1, 2, 4, 8] → [1, 2]" in done.stderr


def test_no_process_of_ours_is_left(campaign):
    left = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"orchestrator.rehearsal" in words and b"qwen3-27b" in words:
            left.append(path.parent.name)
    assert left == []


def test_the_derivation_of_a_verdict_can_be_read(out, verdicts):
    done = invoke("report", "--out", str(out), "--explain", "spec-8")
    assert done.returncode == 0
    assert "spec-8" in done.stdout
    assert "does_not_reproduce" in done.stdout
