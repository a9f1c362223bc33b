"""A box without a service manager restores by itself: real processes, killed for real, in seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from orchestrator.box import standing
from orchestrator.box.engines import Launch
from orchestrator.box.process import ProcessService
from orchestrator.box.services import make_service
from orchestrator.box.transports import connect
from orchestrator.errors import BoxError, RestoreFailed
from orchestrator.matrix import BoxSpec
from orchestrator.records import ProductionState
from tests.rehearsal_engine import free_port

ROOT = Path(__file__).parent.parent
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(300)\n"
# As vLLM: what the server started outlives it.
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "print('child', child.pid, flush=True)\ntime.sleep(300)\n"
)
MATRIX = """experiment: plain
boxes:
  bare:
    transport: local
    service: process
    unit_file: production.service
    dead_man_s: 2
    cache_root: {caches}
    load: {{window_s: 0.4, warmup_s: 0.1, max_warmup_s: 0.3, input_tokens: 32, output_tokens: 8, sanity_tokens: 4,
            headroom_tokens: 4}}
    deadlines: {{ready_s: 60, stop_s: 10, first_request_s: 30, headroom_s: 30, sanity_s: 30, trial_s: 30}}
concurrency: [1]
variants:
  spec-1: {{}}
  spec-2: {{spec-tokens: 2}}
"""
UNIT = """[Service]
Environment=COLDBOOT_REHEARSAL_TIME_SCALE=0.01
ExecStart={command}
"""
REHEARSAL = """experiment: alone
boxes:
  here: {engine: rehearsal, transport: local, service: process, unit_file: production.service, time_scale: 0.01,
         dead_man_s: 2, load: {window_s: 20, warmup_s: 0.1}}
concurrency: [1]
variants: {spec-1: {}}
"""


def await_true(what: Callable[[], object], seconds: float = 30) -> None:
    end, pause = time.monotonic() + seconds, threading.Event()
    while not what():
        assert time.monotonic() < end, "it did not come"
        pause.wait(0.02)


def mentioning(text: str) -> list[str]:
    """Command lines of living processes that hold this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words and path.parent.name != str(os.getpid()):
            found.append(f"{path.parent.name} {words}")
    return found


class Production:
    """A server that somebody has started by hand, with an environment, a working directory and a log of its own."""

    def __init__(self, folder: Path, argv: tuple[str, ...], **env: str) -> None:
        self.argv = argv
        self.folder = folder / "of production"
        self.folder.mkdir()
        self.log = self.folder / "it's log"
        self.env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(ROOT), **env}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """Its main process; what it forked has its command line too. Without our variable."""
        found: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace")
                environ = (path / "environ").read_bytes()
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if words == "\0".join((*self.argv, "")) and b"COLDBOOT_INVOCATION=" not in environ:
                found[int(path.name)] = parent
        return [pid for pid, parent in found.items() if parent not in found]

    def end(self) -> None:
        while pids := self.pids():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def as_it_was(pid: int, production: Production) -> None:
    """The same command, environment, working directory and log."""
    proc = Path(f"/proc/{pid}")
    env = dict(pair.split("=", 1) for pair in (proc / "environ").read_text().split("\0") if pair)
    assert env == production.env
    assert (proc / "cwd").readlink() == production.folder
    assert (proc / "fd/1").readlink() == (proc / "fd/2").readlink() == production.log
    assert (proc / "fd/0").readlink() == Path("/dev/null")


# --- the service ---------------------------------------------------------------------------------------------------


@pytest.fixture
def transport():
    door = connect(BoxSpec(name="here", transport="local", service="process"))
    yield door
    door.close()


@pytest.fixture
def production(tmp_path) -> Iterator[Production]:
    odd = "a b\tc\nd '\"$HOME %"
    made = Production(tmp_path, (sys.executable, "-c", PARENT, f"unique-{tmp_path}", odd), ODD=odd, SECRET="sesame")
    await_true(lambda: "child" in made.log.read_text())
    yield made
    made.end()


@pytest.fixture
def service(transport, production, tmp_path) -> Iterator[ProcessService]:
    box = BoxSpec(name="here", transport="local", service="process", program=production.argv)
    made = make_service(transport, box, tmp_path / "state")
    yield made
    made._stop_ours(kill=True, deadline_s=0)
    made.disarm()


def launch(tmp_path: Path) -> Launch:
    return Launch((sys.executable, "-c", SLEEP, f"engine-{tmp_path}"), {}, (), 1, "m")


def test_production_is_found_by_its_command_stopped_with_all_it_started_and_started_as_it_was(
    service, production, tmp_path
):
    facts = service.describe()
    assert (facts.active, facts.main_pid) == (True, production.process.pid)
    was = service.production()
    assert was == ProductionState(unit="here.service", active=True, command=production.argv)
    assert not service.ours()
    assert service.state().main_pid == production.process.pid
    assert len(service.pids()) == 2
    service.arm(was, 60)
    service.stop(kill=False, deadline_s=0.5)
    assert service.pids() == ()
    assert production.pids() == []
    service.restore(was)
    (pid,) = production.pids()
    assert service.effective()[0] == production.argv
    as_it_was(pid, production)
    service.restore(was)
    assert production.pids() == [pid]
    service.disarm()
    assert mentioning(str(tmp_path / "state")) == []
    assert list((tmp_path / "state").iterdir()) == []


def test_without_a_sign_of_life_the_engine_is_ended_and_production_started_with_nothing_of_ours_left(
    service, production, tmp_path
):
    was = service.production()
    service.arm(was, 1.0)
    service.stop(kill=False, deadline_s=0.5)
    caches = tmp_path / "state" / "caches" / "here"
    (caches / "b-1").mkdir(parents=True)
    (caches / ".coldboot").write_text("")
    service.install(launch(tmp_path))
    service.start()
    assert len(service.pids()) == 1
    begun = time.monotonic()
    await_true(production.pids, 10)
    assert 0.5 < time.monotonic() - begun < 8
    (pid,) = production.pids()
    as_it_was(pid, production)
    await_true(lambda: not mentioning(str(tmp_path / "state")), 5)
    assert mentioning(f"engine-{tmp_path}") == []
    assert list((tmp_path / "state").iterdir()) in ([], [caches.parent])
    assert not caches.exists()
    # A campaign that was only suspended learns it, and starts nothing beside production.
    with pytest.raises(BoxError, match="no sign of life"):
        service.beat()
    service.install(launch(tmp_path))
    with pytest.raises(BoxError, match="no sign of life"):
        service.start()
    assert mentioning(f"engine-{tmp_path}") == []


def test_as_long_as_it_hears_from_us_nothing_happens_and_a_killed_watchdog_is_started_again(service, production):
    service.arm(service.production(), 1.0)
    (watchdog,) = mentioning("-guard/watch")
    os.killpg(int(watchdog.split()[0]), signal.SIGKILL)
    end, pause = time.monotonic() + 2.5, threading.Event()
    while time.monotonic() < end:
        service.beat()
        pause.wait(0.2)
    assert len(mentioning("-guard/watch")) == 1
    assert production.pids() == [production.process.pid]


def test_after_a_reboot_the_next_command_still_knows_how_to_start_production(service, transport, production, tmp_path):
    service.arm(service.production(), 60)
    service.stop(kill=False, deadline_s=0.5)
    # A reboot ends every process, the watchdog too; what is on the disk stays.
    watch = f"{service.guard_folder}/watch"
    (watchdog,) = mentioning(watch)
    os.killpg(int(watchdog.split()[0]), signal.SIGKILL)
    await_true(lambda: mentioning(watch) == [])
    box = BoxSpec(name="here", transport="local", service="process", program=production.argv)
    later = make_service(transport, box, tmp_path / "state")
    was = later.production()
    assert (was.active, was.command) == (True, production.argv)
    later.restore(was)
    (pid,) = production.pids()
    as_it_was(pid, production)
    later.disarm()
    assert list((tmp_path / "state").iterdir()) == []


def test_what_went_to_a_pipe_goes_to_a_file_of_ours_afterwards(transport, tmp_path):
    argv = (sys.executable, "-c", PARENT, f"piped-{tmp_path}")
    piped = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    box = BoxSpec(name="here", transport="local", service="process", program=argv)
    service = make_service(transport, box, tmp_path / "state")
    try:
        assert piped.stdout is not None
        assert b"child" in piped.stdout.readline()
        was = service.production()
        service.arm(was, 60)
        service.stop(kill=False, deadline_s=0.5)
        service.restore(was)
        log = tmp_path / "state" / "production.log"
        await_true(lambda: "child" in log.read_text())
        service.disarm()
        assert list((tmp_path / "state").iterdir()) == [log]
    finally:
        for line in mentioning(f"piped-{tmp_path}"):
            os.kill(int(line.split()[0]), signal.SIGKILL)
        piped.communicate(timeout=10)


def test_a_killed_campaigns_watchdog_is_taken_over_and_what_it_knows_of_production_too(
    service, transport, production, tmp_path
):
    service.arm(service.production(), 60)
    service.stop(kill=False, deadline_s=0.5)
    (old,) = mentioning("-guard/watch")
    box = BoxSpec(name="here", transport="local", service="process", program=production.argv)
    later = make_service(transport, box, tmp_path / "state")
    was = later.production()
    assert (was.active, was.command) == (True, production.argv)
    later.arm(was, 60)
    (new,) = mentioning("-guard/watch")
    assert new.split()[0] != old.split()[0]
    later.restore(was)
    (pid,) = production.pids()
    as_it_was(pid, production)


def test_production_that_nobody_knows_how_to_start_is_not_measured_over(service, production):
    was = service.production()
    production.end()
    with pytest.raises(BoxError, match="how it was started is not known"):
        service.arm(was, 60)
    with pytest.raises(RestoreFailed, match="does not know any more") as told:
        service.restore(was)
    assert "start it by hand" in told.value.hint


def test_two_productions_are_not_guessed_between(service, production, tmp_path):
    other = subprocess.Popen(production.argv, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        with pytest.raises(BoxError, match="2 processes run production's command"):
            service.describe()
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait(10)


def test_a_script_runs_under_its_interpreter_and_by_its_path():
    command = ("vllm", "serve", "m")
    assert standing.runs(("/v/python3", "/v/bin/vllm", "serve", "m"), command)
    assert standing.runs(("/usr/bin/env", "python3", "/v/bin/vllm", "serve", "m"), command)
    assert not standing.runs(("nohup", "vllm", "serve", "m"), command)
    assert not standing.runs(("/v/python3", "/v/bin/vllm", "serve", "other"), command)
    assert not standing.runs((), command)


# --- a whole campaign ----------------------------------------------------------------------------------------------


def engine_argv(port: int) -> tuple[str, ...]:
    flags = (
        "--model /models/qwen --served-model-name qwen3-27b --tensor-parallel-size 2 --gpu-memory-utilization 0.97 "
        "--max-model-len 98304 --max-num-seqs 128 --spec-method qwen3_5_mtp --spec-model /models/qwen --spec-tokens 1 "
        f"--host 127.0.0.1 --port {port}"
    )
    return (sys.executable, "-m", "orchestrator.rehearsal", *flags.split())


def serves(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def invoke(folder: Path, *words: str) -> tuple[str, ...]:
    files = ("--matrix", str(folder / "matrix.yaml"), "--out", str(folder / "artifacts"))
    return (sys.executable, "-m", "invoke", *words, *files)


def begin(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        invoke(folder, "matrix", "--boots", "1", *words),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def records(folder: Path, experiment: str) -> list[dict[str, object]]:
    path = folder / "artifacts" / experiment / "records.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_in_mid_boot(folder: Path, experiment: str, *words: str) -> None:
    process = begin(folder, *words)
    await_true(
        lambda: any(r.get("name") == "ready" for r in records(folder, experiment)) or process.poll() is not None, 60
    )
    assert process.poll() is None
    process.kill()
    process.wait(10)


def test_a_campaign_that_is_killed_gives_production_back_within_seconds_and_the_same_command_goes_on(tmp_path):
    port = free_port()
    argv = engine_argv(port)
    # The engine's sockets lie in its caches: a path that is too long for them is refused.
    caches = Path(tempfile.mkdtemp(prefix="cb-"))
    (tmp_path / "matrix.yaml").write_text(MATRIX.format(caches=caches))
    (tmp_path / "production.service").write_text(UNIT.format(command=" ".join(argv)))
    production = Production(tmp_path, argv, COLDBOOT_REHEARSAL_TIME_SCALE="0.01")
    try:
        await_true(lambda: serves(port), 60)
        kill_in_mid_boot(tmp_path, "plain", "--yes")
        killed = time.monotonic()
        assert production.pids() == []
        await_true(lambda: serves(port), 30)
        assert 1 < time.monotonic() - killed < 25
        (pid,) = production.pids()
        as_it_was(pid, production)
        # The engine's own processes, the watchdog, the caches: gone.
        await_true(lambda: not mentioning(str(tmp_path / "artifacts")), 10)
        assert not (tmp_path / "artifacts" / "plain" / "box" / "service").exists()
        assert list(caches.iterdir()) == []
        done = subprocess.run(
            invoke(tmp_path, "matrix", "--boots", "1", "--yes"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        ended = [r["boot_outcome"] for r in records(tmp_path, "plain") if r["kind"] == "boot_ended"]
        assert ended == ["aborted", "completed", "completed"]
        (pid,) = production.pids()
        as_it_was(pid, production)
        assert serves(port)
        assert mentioning(str(tmp_path / "artifacts")) == []
        assert list(caches.iterdir()) == []
    finally:
        production.end()
        caches.rmdir()


def test_a_rehearsal_that_is_killed_leaves_no_process_behind(tmp_path):
    (tmp_path / "matrix.yaml").write_text(REHEARSAL)
    (tmp_path / "production.service").write_text(UNIT.format(command=" ".join(engine_argv(free_port()))))
    kill_in_mid_boot(tmp_path, "alone")
    assert mentioning(str(tmp_path / "artifacts"))
    await_true(lambda: not mentioning(str(tmp_path / "artifacts")), 15)
    assert not (tmp_path / "artifacts" / "alone" / "box" / "service").exists()
