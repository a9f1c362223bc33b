"""The GPUs of a box over a real sshd, by an nvidia-smi that says what a real one said; and what the way there adds."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.box import gpuwatch, way
from orchestrator.box.facts import listening_ports

KEPT = Path(__file__).parent.parent / "data" / "facts" / "h200_load.gpus.csv"
SMI = "/usr/local/bin/nvidia-smi"
NVIDIA_SMI = """#!/bin/sh
while :; do
    echo '{line}'
    sleep 0.05
done
"""
WATCHER = """
import sys, time
from pathlib import Path
from orchestrator.box.gpuwatch import GpuWatch
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
with GpuWatch(SshTransport(hop(sys.argv[1], config=Path(sys.argv[2])))) as watch:
    while not watch.samples():
        time.sleep(0.01)
    print("watching", flush=True)
    time.sleep(600)
"""

SERVER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
HTTPServer(("127.0.0.1", 18099), Health).serve_forever()
"""


def wait_for(condition, within_s=10.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        select.select((), (), (), 0.02)


@pytest.fixture
def with_gpu(box):
    line = KEPT.read_text().splitlines()[-1].partition(", ")[2]
    program = box.root / SMI.lstrip("/")
    program.write_text(NVIDIA_SMI.format(line=line))
    program.chmod(0o755)
    yield box
    program.unlink()


def test_the_gpus_are_watched_by_ssh_and_nothing_is_left_on_the_box(with_gpu, ssh):
    begun = time.monotonic()
    with gpuwatch.GpuWatch(ssh) as watch:
        wait_for(lambda: len(watch.samples()) >= 3)
        assert with_gpu.pids(SMI)
    (gpu,), problem = watch.use(begun, time.monotonic())
    assert (gpu.memory_used_max_mib, gpu.sm_clock_min_mhz, problem) == (73055, 1980, None)
    wait_for(lambda: with_gpu.pids(SMI) == ())


def test_nothing_is_left_on_the_box_when_we_are_killed(with_gpu):
    argv = (sys.executable, "-c", WATCHER, with_gpu.alias, str(with_gpu.ssh_config))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout.readline() == "watching\n"
        assert with_gpu.pids(SMI)
        os.kill(watcher.pid, signal.SIGKILL)
        watcher.wait(10)
    wait_for(lambda: with_gpu.pids(SMI) == ())


def test_a_box_without_nvidia_smi_is_a_warning(ssh):
    with gpuwatch.GpuWatch(ssh) as watch:
        wait_for(lambda: "status 127" in watch.use(0.0, 0.0)[1])


def test_a_forward_adds_less_than_20_ms_to_a_request_on_loopback(box, ssh):
    server = ssh.stream(("python3", "-c", SERVER))
    wait_for(lambda: 18099 in listening_ports(ssh))
    added = way.added_ms(ssh, ("python3", "-m", "vllm"), 18099, "/health")
    server.close()
    assert 0 <= added < 20
    wait_for(lambda: box.pids("BaseHTTPRequestHandler") == ())
