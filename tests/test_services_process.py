"""A plain process as the unit, on this machine: what it says, how it ends, what it leaves."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from orchestrator.box.engines import Launch
from orchestrator.box.process import ProcessService, exit_words, read_argv, read_environ
from orchestrator.box.services import SERVICES, make_service
from orchestrator.box.transports import connect
from orchestrator.errors import BoxError, UsageError
from orchestrator.matrix import BoxSpec
from orchestrator.records import ProductionState

READY = "import signal, sys, time, os\nprint('up', flush=True)\n"
SLEEP = READY + "time.sleep(60)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
# The API server is killed; EngineCore lives on in its session, as vLLM's does.
ORPHAN = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; print(\"core\", flush=True); time.sleep(60)'])\n"
    + SLEEP
)
DAEMON = (
    "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; print(\"core\", flush=True); time.sleep(60)'],"
    " start_new_session=True)\n" + SLEEP
)


def launch(code: str, *arguments: str, env: dict[str, str] | None = None, unset: tuple[str, ...] = ()) -> Launch:
    return Launch((sys.executable, "-c", code, *arguments), env or {}, unset, 1, "m")


class Heard:
    """The entries of one start, collected by a thread."""

    def __init__(self, service: ProcessService) -> None:
        self.stream = service.follow(service.cursor())
        self.entries = []
        self.came = threading.Condition()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        for entry in self.stream:
            with self.came:
                self.entries.append(entry)
                self.came.notify_all()

    def until(self, text: str, deadline_s: float = 10.0):
        with self.came:
            assert self.came.wait_for(lambda: any(text in e.message for e in self.entries), deadline_s), self.entries
            return next(e for e in self.entries if text in e.message)

    def messages(self) -> list[str]:
        return [entry.message for entry in self.entries]


@pytest.fixture
def transport():
    door = connect(BoxSpec(name="here", transport="local", service="process"))
    yield door
    door.close()


@pytest.fixture
def service(transport, tmp_path):
    box = BoxSpec(name="here", transport="local", service="process", program=("engine", "--model", "m"))
    made = make_service(transport, box, tmp_path)
    yield made
    made.stop(kill=True, deadline_s=0)
    assert made.pids() == ()


def begin(service, made: Launch) -> Heard:
    service.install(made)
    heard = Heard(service)
    service.start()
    return heard


def test_a_life_from_start_to_a_polite_stop(service):
    assert service.state().active_state == "inactive"
    assert service.pids() == ()
    heard = begin(service, launch(SLEEP))
    entry = heard.until("up")
    state = service.state()
    assert (state.active_state, state.sub_state, state.n_restarts, state.exit_status) == ("active", "running", 0, None)
    assert service.pids() == (state.main_pid,)
    assert (entry.unit, entry.transport, entry.invocation_id) == ("here.service", "stdout", state.invocation_id)
    assert abs(entry.at_us / 1e6 - time.time()) < 5
    service.stop(kill=False, deadline_s=10)
    heard.until("Main process exited, code=killed, status=15/TERM")
    state = service.state()
    assert (state.active_state, state.result, state.exit_status, state.main_pid) == ("failed", "signal", 143, None)
    heard.stream.close()
    heard.thread.join(5)
    assert not heard.thread.is_alive()


@pytest.mark.parametrize(
    ("code", "said", "active", "result"),
    [
        ("raise SystemExit(0)", "status=0/SUCCESS", "inactive", "success"),
        ("raise SystemExit(1)", "status=1/FAILURE", "failed", "exit-code"),
        ("raise SystemExit(2)", "status=2/INVALIDARGUMENT", "failed", "exit-code"),
        ("import os; os.kill(os.getpid(), 9)", "code=killed, status=9/KILL", "failed", "signal"),
    ],
)
def test_how_it_began_and_ended_is_said_in_systemds_words_around_its_own(service, code, said, active, result):
    heard = begin(service, launch("print('last words', flush=True)\n" + code))
    exited = heard.until("Main process exited")
    assert said in exited.message
    assert (exited.identifier, exited.transport, exited.pid) == ("systemd", "journal", 1)
    assert heard.messages()[:2] == ["Started here.service.", "last words"]
    began = heard.until("Started")
    assert (began.identifier, began.transport, began.invocation_id) == ("systemd", "journal", exited.invocation_id)
    assert (service.state().active_state, service.state().result) == (active, result)
    heard.stream.close()


def test_both_streams_are_kept_in_order(service):
    code = "import os\nfor i in range(50):\n os.write(1, b'out %d\\n' % i); os.write(2, b'err %d\\n' % i)\n"
    heard = begin(service, launch(code))
    heard.until("Main process exited")
    assert heard.messages()[1:101] == [f"{kind} {i}" for i in range(50) for kind in ("out", "err")]
    heard.stream.close()


def test_each_start_has_an_empty_log_and_an_invocation_of_its_own(service):
    first = begin(service, launch("print('one', flush=True)"))
    first.until("Main process exited")
    one = service.state().invocation_id
    first.stream.close()
    second = begin(service, launch("print('two', flush=True)"))
    second.until("Main process exited")
    assert "one" not in second.messages()
    assert service.state().invocation_id != one
    second.stream.close()


@pytest.mark.parametrize(
    "argument",
    ['{"enable_thinking": false}', "50%", "$HOME ${HOME} $$", "a b\tc\nd", "'\"\\", "äöü😀", "", "-x", "*"],
)
def test_every_argument_and_variable_arrives_unchanged(service, argument):
    code = "import os, sys, time\nprint(ascii(sys.argv[1:]), ascii(os.environ['V']), flush=True)\ntime.sleep(60)"
    made = launch(code, argument, env={"V": argument})
    heard = begin(service, made)
    heard.until(f"{[argument]!a} {argument!a}")
    argv, env = service.effective()
    assert argv == made.argv
    assert env["V"] == argument
    heard.stream.close()


def test_a_variable_can_be_taken_away(service, monkeypatch):
    monkeypatch.setenv("TAKEN", "1")
    heard = begin(service, launch("import os\nprint(os.environ.get('TAKEN'), flush=True)", unset=("TAKEN",)))
    heard.until("None")
    heard.stream.close()


def test_a_stubborn_one_is_killed_at_the_deadline(service):
    heard = begin(service, launch(STUBBORN))
    heard.until("up")
    begun = time.monotonic()
    service.stop(kill=False, deadline_s=0.5)
    assert 0.5 <= time.monotonic() - begun < 5
    assert service.pids() == ()
    assert service.state().exit_status == 137
    heard.stream.close()


def test_a_stopped_one_is_killed_too(service):
    heard = begin(service, launch(SLEEP))
    heard.until("up")
    os.kill(service.state().main_pid, signal.SIGSTOP)
    service.stop(kill=True, deadline_s=5)
    assert service.pids() == ()
    heard.stream.close()


@pytest.mark.parametrize("code", [ORPHAN, DAEMON], ids=["same session", "own session"])
def test_children_are_seen_and_killed_with_it(service, code):
    heard = begin(service, launch(code))
    heard.until("core")
    assert len(service.pids()) == 2
    service.stop(kill=True, deadline_s=5)
    assert service.pids() == ()
    heard.stream.close()


def test_an_orphan_of_a_killed_main_process_is_still_ours(service):
    heard = begin(service, launch(ORPHAN))
    heard.until("core")
    os.kill(service.state().main_pid, signal.SIGKILL)
    heard.until("status=9/KILL")
    assert service.state().active_state == "failed"
    assert len(service.pids()) == 1
    service.stop(kill=False, deadline_s=5)
    assert service.pids() == ()
    heard.stream.close()


def test_another_campaign_finds_and_ends_what_a_killed_one_left(service, transport, tmp_path):
    heard = begin(service, launch(SLEEP))
    heard.until("up")
    heard.stream.close()
    later = make_service(transport, BoxSpec(name="here", transport="local", service="process"), tmp_path)
    assert later.state().active_state == "active"
    assert later.pids() == service.pids() != ()
    later.restore(ProductionState(unit="here.service", active=False))
    later.restore(ProductionState(unit="here.service", active=False))
    assert service.pids() == ()


def test_a_process_that_only_has_the_number_of_ours_is_left_alone(service, tmp_path):
    heard = begin(service, launch(SLEEP))
    heard.until("up")
    pid_file = tmp_path / "service" / "pid"
    pid, start, boot, invocation = pid_file.read_text().split()
    pid_file.write_text(f"{pid} {int(start) + 1} {boot} {'0' * 32}\n")
    assert service.state().main_pid is None
    service.stop(kill=True, deadline_s=1)
    os.kill(int(pid), 0)
    pid_file.write_text(f"{pid} {start} {'0' * 36} {invocation}\n")
    assert service.state().active_state == "inactive"
    assert service.pids() == ()
    pid_file.write_text(f"{pid} {start} {boot} {invocation}\n")
    assert service.pids() == (int(pid),)
    heard.stream.close()


def test_nothing_of_ours_is_left_after_a_boot(service):
    heard = begin(service, launch(SLEEP))
    heard.until("up")
    service.stop(kill=True, deadline_s=5)
    heard.stream.close()
    heard.thread.join(5)
    directory = str(service._dir)
    deadline = time.monotonic() + 5
    while (left := _mentioning(directory)) and time.monotonic() < deadline:
        os.sched_yield()
    assert left == []


def _mentioning(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


def test_a_broken_follow_is_told(service):
    service.install(launch("pass"))
    stream = service.follow("0")
    os.unlink(f"{service._dir}/log")  # noqa: PTH108
    broken = service.follow("0")
    with pytest.raises(BoxError, match="tail"):
        list(broken)
    stream.close()


def test_the_command_comes_from_the_unit_file_or_is_the_program(transport, tmp_path):
    unit = tmp_path / "vllm.service"
    unit.write_text("[Service]\nEnvironment=A=1\nExecStart=/v/python -m vllm.x --model m \\\n --j '{\"a\": 1}'\n")
    box = BoxSpec(name="here", transport="local", service="process", unit_file=unit)
    found = make_service(transport, box, tmp_path).describe()
    assert found.argv == ("/v/python", "-m", "vllm.x", "--model", "m", "--j", '{"a": 1}')
    assert (found.env, found.active, found.name, found.home) == ({"A": "1"}, False, "here.service", os.environ["HOME"])
    missing = box.model_copy(update={"unit_file": tmp_path / "no"})
    with pytest.raises(UsageError, match="No such file"):
        make_service(transport, missing, tmp_path).describe()
    nothing = box.model_copy(update={"unit_file": None})
    with pytest.raises(UsageError, match="says nothing about what to run"):
        make_service(transport, nothing, tmp_path).describe()


def test_the_table_and_what_needs_no_sudo(service):
    assert SERVICES.keys() >= {"process"}
    assert service.sudo_lines() == ()
    service.arm(service.production(), 1)
    service.beat()
    service.disarm()
    assert not service.production().active
    texts = [action.text for action in service.boot_actions(launch("pass", env={"A": "b c"}))]
    assert texts[2].startswith("env 'A=b c' ")


def test_how_an_exit_is_told():
    assert exit_words(0) == ("Main process exited, code=exited, status=0/SUCCESS", "Deactivated successfully.")
    assert exit_words(139) == ("Main process exited, code=killed, status=11/SEGV", "Failed with result 'signal'.")


def test_proc_is_read_and_an_interpreter_before_a_script_taken_off():
    assert read_argv("/v/python\0/v/vllm\0serve\0\0", ("/v/vllm", "serve", "")) == ("/v/vllm", "serve", "")
    assert read_argv("a\0b\0", ("c",)) == ("a", "b")
    assert read_argv("", ("c",)) == ()
    assert read_environ("A=1\0B=x=y\nz\0") == {"A": "1", "B": "x=y\nz"}
