"""A whole campaign on the real box: real sshd, real systemd, real journald, a login without root, exact sudo lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from nspawn import Box, free_port

from orchestrator.box.services import make_service
from orchestrator.box.ssh import SshTransport
from orchestrator.matrix import load_matrix

ROOT = Path(__file__).parent.parent.parent
UNIT = "vllm-qwen.service"
PORT = free_port()
MODEL = "qwen3-27b"

UNIT_TEXT = f"""[Unit]
Description=production

[Service]
Type=simple
User=alex
Group=alex
Environment=COLDBOOT_REHEARSAL_TIME_SCALE=0.01
ExecStart={sys.executable} -m orchestrator.rehearsal \\
  --model /models/qwen --served-model-name {MODEL} --tensor-parallel-size 2 \\
  --gpu-memory-utilization 0.97 --max-model-len 98304 --max-num-seqs 128 \\
  --spec-method qwen3_5_mtp --spec-model /models/qwen --spec-tokens 1 \\
  --default-chat-template-kwargs '{{"enable_thinking": false}}' \\
  --host 127.0.0.1 --port {PORT}
Restart=on-failure
WorkingDirectory={ROOT}
"""

MATRIX = """experiment: boxed
boxes:
  real:
    transport: ssh
    host: {alias}
    ssh_config: {ssh_config}
    service: systemd
    unit: {unit}
    dead_man_s: {dead_man_s}
    load: {{window_s: 0.5, warmup_s: 0.1, max_warmup_s: 0.3, input_tokens: 32, output_tokens: 8, sanity_tokens: 4,
            headroom_tokens: 4}}
    deadlines: {{ready_s: 60, stop_s: 10, first_request_s: 30, headroom_s: 30, sanity_s: 30, trial_s: 30}}
concurrency: [1, 2]
variants:
  spec-1: {{}}
  spec-3: {{spec-tokens: 3}}
"""


class Campaign:
    """The tool on this side, with the box on the other."""

    def __init__(self, box: Box, folder: Path) -> None:
        self.box = box
        self.folder = folder
        self.out = folder / "artifacts"
        self.write()

    def write(self, **changes: object) -> None:
        values = {"alias": self.box.alias, "ssh_config": self.box.ssh_config, "unit": UNIT, "dead_man_s": 60} | changes
        (self.folder / "matrix.yaml").write_text(MATRIX.format(**values))

    def argv(self, *words: str) -> tuple[str, ...]:
        files = ("--matrix", str(self.folder / "matrix.yaml"), "--out", str(self.out))
        return (sys.executable, "-m", "invoke", "matrix", *files, *words)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words),
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=240,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def records(self) -> list[dict[str, object]]:
        path = self.out / "boxed" / "records.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def await_step(self, name: str, process: subprocess.Popen[bytes]) -> None:
        await_true(
            lambda: any(record.get("name") == name for record in self.records()) or process.poll() is not None, 90
        )
        assert process.poll() is None, "the campaign ended before that step"


def await_true(what: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def serves(port: int = PORT) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def effective(box: Box) -> tuple[str, ...]:
    pid = box.sh(("systemctl", "show", "-p", "MainPID", "--value", UNIT)).stdout.strip()
    return tuple(box.sh(("cat", f"/proc/{pid}/cmdline")).stdout.rstrip("\0").split("\0"))


def ours_on(box: Box) -> list[str]:
    """What of us is left on the box: files under /run, timers. An empty folder of all units may stay, and the lock."""
    found = box.sh(
        ("sh", "-c", "find /run -name '*coldboot*' 2>/dev/null; systemctl list-timers --all | grep -i coldboot"),
        check=False,
    )
    return [line for line in found.stdout.splitlines() if line and line != "/run/coldboot" and "/lock" not in line]


@pytest.fixture(scope="module")
def production(box: Box) -> Iterator[Box]:
    box.write_unit(UNIT, UNIT_TEXT)
    box.sh(("systemctl", "start", UNIT))
    await_true(serves, 60)
    yield box
    box.remove_unit(UNIT)


@pytest.fixture
def campaign(production: Box, ssh: SshTransport, install_sudoers: Callable[..., None], tmp_path: Path) -> Campaign:
    made = Campaign(production, tmp_path)
    spec = load_matrix(tmp_path / "matrix.yaml").target
    install_sudoers(make_service(ssh, spec, tmp_path / "state").sudo_lines())
    await_true(serves, 60)
    return made


def test_a_campaign_without_root_measures_rejects_and_gives_production_back(campaign):
    before = effective(campaign.box)
    done = campaign.run("--boots", "1", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    ended = {r["variant"]: r for r in campaign.records() if r["kind"] == "boot_ended"}
    assert ended["spec-1"]["boot_outcome"] == "completed"
    assert ended["spec-1"]["cache_proof"] == "compiled"
    assert ended["spec-3"]["boot_outcome"] == "crashed"
    answers = {r["variant"]: r["answer"] for r in campaign.records() if r["kind"] == "journal_answer"}
    assert (answers["spec-3"]["phase"], answers["spec-3"]["cause"]) == ("first_request", "triton_oom")
    begun = campaign.records()[0]
    assert begun["rehearsal"] is True
    assert begun["production_variant"] == "spec-1"
    ready = [r["facts"] for r in campaign.records() if r.get("name") == "ready" and r["outcome"] == "ok"]
    # What the way adds is measured once, at the session's first boot: a forward on loopback.
    assert ["forward_ms" in facts for facts in ready] == [True] + [False] * (len(ready) - 1)
    assert 0 <= ready[0]["forward_ms"] < 50
    # Production is back: same command, serving, nothing of ours left.
    assert serves()
    assert effective(campaign.box) == before
    assert ours_on(campaign.box) == []
    assert campaign.records()[-1]["restored"] is True


def test_trials_are_out_of_reach_of_productions_port(campaign):
    process = campaign.start("--boots", "1", "--yes", "--only", "spec-1")
    try:
        campaign.await_step("first_request", process)
        assert not serves()
    finally:
        assert process.wait(120) == 0
    assert serves()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_mid_boot_restores_and_the_same_command_goes_on(campaign, number, code):
    before = effective(campaign.box)
    process = campaign.start("--boots", "1", "--yes")
    campaign.await_step("ready", process)
    process.send_signal(number)
    assert process.wait(120) == code
    assert serves()
    assert effective(campaign.box) == before
    assert ours_on(campaign.box) == []
    done = campaign.run("--boots", "1", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    ended = [r for r in campaign.records() if r["kind"] == "boot_ended"]
    assert sorted(r["boot_outcome"] for r in ended) == ["aborted", "completed", "crashed"]
    assert len({r["boot"] for r in ended}) == 3


def test_the_box_restores_by_itself_when_the_orchestrator_is_killed(campaign):
    campaign.write(dead_man_s=3)
    before = effective(campaign.box)
    process = campaign.start("--boots", "1", "--yes")
    campaign.await_step("ready", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    await_true(lambda: ours_on(campaign.box) == [] and serves(), 60)
    assert effective(campaign.box) == before
    # Its cold caches went with it.
    left = campaign.box.sh(("find", "/home/alex/.cache/coldboot", "-mindepth", "1"), check=False).stdout
    assert left == ""


def test_a_killed_campaign_goes_on_and_counts_its_torn_boot_as_aborted(campaign):
    process = campaign.start("--boots", "1", "--yes", "--only", "spec-1")
    campaign.await_step("ready", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    done = campaign.run("--boots", "1", "--yes", "--only", "spec-1")
    assert done.returncode == 0, done.stderr[-4000:]
    ended = [(r["boot"], r["boot_outcome"]) for r in campaign.records() if r["kind"] == "boot_ended"]
    assert ended == [("b01-spec-1", "aborted"), ("b01-spec-1.r1", "completed")]
    assert serves()
    assert ours_on(campaign.box) == []


def test_it_refuses_without_consent_and_changes_nothing(campaign):
    done = campaign.run("--boots", "1")
    assert done.returncode == 4
    assert "--yes" in done.stderr
    assert "downtime" in done.stderr
    assert serves()
    assert not campaign.out.exists()


def test_a_service_that_was_stopped_stays_stopped(campaign):
    campaign.box.sh(("systemctl", "stop", UNIT))
    try:
        done = campaign.run("--boots", "1", "--yes", "--only", "spec-1")
        assert done.returncode == 0, done.stderr[-4000:]
        assert campaign.box.sh(("systemctl", "is-active", UNIT), check=False).stdout.strip() == "inactive"
        assert ours_on(campaign.box) == []
    finally:
        campaign.box.sh(("systemctl", "start", UNIT))
        await_true(serves, 60)


def test_running_requests_are_not_cut_off(campaign):
    body = {"model": MODEL, "prompt": "tell me everything", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=60, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        done = campaign.run("--boots", "1", "--yes")
        assert done.returncode == 3
        assert "1 requests are running" in done.stderr
        assert "--drain" in done.stderr
    assert serves()


def test_a_second_campaign_is_told_who_holds_the_box(campaign, tmp_path):
    process = campaign.start("--boots", "5", "--yes")
    try:
        campaign.await_step("clean_slate", process)
        second = campaign.run("--boots", "1", "--yes", "--experiment", "other")
        assert second.returncode == 3
        assert "boxed" in second.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143


def test_what_sudo_refuses_is_told_with_the_line_that_mends_it(campaign, install_sudoers):
    install_sudoers(())
    done = campaign.run("--boots", "1", "--yes")
    assert done.returncode == 3
    assert "NOPASSWD" in done.stderr
    assert serves()
    assert ours_on(campaign.box) == []


def test_no_such_unit_and_no_such_host_key_say_what_to_run(campaign, tmp_path):
    campaign.write(unit="nothing.service")
    done = campaign.run("--boots", "1", "--yes")
    assert done.returncode == 3
    assert "nothing.service" in done.stderr
    config = campaign.box.ssh_config.read_text().replace(str(campaign.box.known_hosts), str(tmp_path / "empty"))
    (tmp_path / "empty").touch()
    (tmp_path / "ssh_config").write_text(config)
    campaign.write(ssh_config=tmp_path / "ssh_config")
    done = campaign.run("--boots", "1", "--yes")
    assert done.returncode == 3
    assert "host key" in done.stderr
    assert "ssh" in done.stderr.split("→")[-1]
    assert serves()


def test_restore_by_hand_brings_production_back_from_a_killed_campaign(campaign):
    before = effective(campaign.box)
    process = campaign.start("--boots", "1", "--yes")
    campaign.await_step("ready", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    for _twice in range(2):
        argv = [*campaign.argv()]
        argv[argv.index("matrix")] = "restore"
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "serving" in done.stdout
        assert serves()
        assert effective(campaign.box) == before
        assert ours_on(campaign.box) == []
