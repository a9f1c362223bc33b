"""A plain process on the real box, over ssh, as a login without root: the box restores it by itself when we die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nspawn import free_port

from tests.test_guard import await_true, engine_argv, serves

ROOT = Path(__file__).parent.parent.parent
MATRIX = """experiment: plain
boxes:
  real:
    transport: ssh
    host: {alias}
    ssh_config: {ssh_config}
    service: process
    unit_file: production.service
    dead_man_s: 3
    load: {{window_s: 0.5, warmup_s: 0.1, max_warmup_s: 0.3, input_tokens: 32, output_tokens: 8, sanity_tokens: 4,
            headroom_tokens: 4}}
    deadlines: {{ready_s: 60, stop_s: 10, first_request_s: 30, headroom_s: 30, sanity_s: 30, trial_s: 30}}
concurrency: [1]
variants:
  spec-1: {{}}
"""
# What of the login alex lives on the box and is neither sshd nor systemd: a line a process.
LIVING = "ps -u alex -o pid=,args= | grep -v -e sshd -e systemd -e sd-pam -e 'ps -u' -e 'grep '"
BEGIN = "cd ~/prod && export COLDBOOT_REHEARSAL_TIME_SCALE=0.01 KEPT='a b' PYTHONPATH={root}; setsid {argv} </dev/null >>~/prod/log 2>&1 &"  # noqa: E501
LOOK = "p=$1; readlink /proc/$p/cwd /proc/$p/fd/1; tr '\\0' '\\n' </proc/$p/environ | grep -e ^KEPT= -e ^COLDBOOT_"


@pytest.fixture
def production(box, ssh, tmp_path):
    port = free_port()
    argv = engine_argv(port)
    (tmp_path / "matrix.yaml").write_text(MATRIX.format(alias=box.alias, ssh_config=box.ssh_config))
    unit = f"[Service]\nEnvironment=COLDBOOT_REHEARSAL_TIME_SCALE=0.01\nEnvironment=PYTHONPATH={ROOT}\nExecStart="
    (tmp_path / "production.service").write_text(f"{unit}{' '.join(argv)}\n")
    ssh.run(("sh", "-c", f"mkdir -p ~/prod; {BEGIN.format(root=ROOT, argv=' '.join(argv))}"), timeout_s=20)
    await_true(lambda: serves(port), 60)
    yield port
    ssh.run(("sh", "-c", f"{LIVING} | while read -r p _; do kill -KILL $p; done; rm -rf ~/prod"), timeout_s=20)


def invoke(folder: Path, *words: str) -> tuple[str, ...]:
    files = ("--matrix", str(folder / "matrix.yaml"), "--out", str(folder / "artifacts"))
    return (sys.executable, "-m", "invoke", *words, *files)


def test_a_campaign_over_ssh_is_killed_and_the_box_starts_production_again_as_it_was(production, ssh, tmp_path):
    def living() -> list[str]:
        return ssh.run(("sh", "-c", LIVING), timeout_s=20, check=False).stdout.splitlines()

    def ended() -> list[str]:
        path = tmp_path / "artifacts" / "plain" / "records.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [r["boot_outcome"] for line in lines if (r := json.loads(line))["kind"] == "boot_ended"]

    def steps() -> list[object]:
        path = tmp_path / "artifacts" / "plain" / "records.jsonl"
        return [json.loads(line).get("name") for line in path.read_text().splitlines()] if path.exists() else []

    before = living()
    argv = invoke(tmp_path, "matrix", "--boots", "1", "--yes")
    process = subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    await_true(lambda: "ready" in steps() or process.poll() is not None, 90)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    killed = time.monotonic()
    assert not serves(production)
    await_true(lambda: serves(production), 60)
    assert 2 < time.monotonic() - killed < 50
    # One process as before, with the same command, and none of ours; the same place, output and environment.
    await_true(lambda: len(living()) == len(before), 20)
    pid, _, command = living()[0].strip().partition(" ")
    assert {line.strip().partition(" ")[2] for line in (*before, *living())} == {command}
    said = ssh.run(("sh", "-c", LOOK, "x", pid), timeout_s=20).stdout.splitlines()
    assert sorted(said) == ["/home/alex/prod", "/home/alex/prod/log", "COLDBOOT_REHEARSAL_TIME_SCALE=0.01", "KEPT=a b"]
    assert ssh.run(("sh", "-c", "ls -A ~/.cache/coldboot/real"), timeout_s=20, check=False).stdout.split() in (
        [],
        ["caches"],
    )
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ended() == ["aborted", "completed"]
    assert serves(production)
    await_true(lambda: len(living()) == len(before), 20)
