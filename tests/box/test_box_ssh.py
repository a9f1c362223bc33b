"""ssh against a real sshd: commands, streams, forwards, and everything that can be wrong with the way in."""

import json
import os
import select
import shlex
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from orchestrator.box import ssh as ssh_room
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.box.transports import connect
from orchestrator.errors import BoxError, CommandFailed, CommandTimeout, Unreachable
from orchestrator.matrix import BoxSpec


def wait_for(condition, within_s=10.0):
    """Wait until a condition holds; a test that waits in vain fails with it."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        select.select((), (), (), 0.02)


def altered(box, tmp_path, before="", **changes):
    """An ssh config like the box's, with other values, and its transport when asked for."""
    words = {
        "HostName": "127.0.0.1",
        "Port": box.port,
        "User": box.login,
        "IdentityFile": box.key,
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": box.known_hosts,
        "GlobalKnownHostsFile": "none",
        **changes,
    }
    path = tmp_path / "config"
    path.write_text(before + "Host gwen\n" + "".join(f"    {key} {value}\n" for key, value in words.items()))
    return path


# --- the way in ------------------------------------------------------------------------------------------------------


def test_a_box_of_the_matrix_is_reached_by_its_alias(box):
    transport = connect(BoxSpec(name="gwen", transport="ssh", unit="x.service", ssh_config=str(box.ssh_config)))
    assert (transport.name, transport.user, transport.is_root) == ("ssh", "alex", False)
    transport.close()
    root = connect(
        BoxSpec(name="g", transport="ssh", host="gwen", user="root", unit="x.service", ssh_config=str(box.ssh_config))
    )
    assert (root.user, root.is_root) == ("root", True)
    root.close()


def test_an_unknown_host_key_is_refused_and_the_fingerprint_shown_is_the_boxs(box, tmp_path):
    (tmp_path / "empty").write_text("")
    path = altered(box, tmp_path, UserKnownHostsFile=tmp_path / "empty", StrictHostKeyChecking="no")
    with pytest.raises(Unreachable, match="is not known") as caught:
        SshTransport(hop("gwen", config=path))
    shown = box.sh(("sh", "-c", "for key in /etc/ssh/ssh_host_*_key.pub; do ssh-keygen -lf $key; done")).stdout
    said = next(word for word in caught.value.what.split() if word.startswith("SHA256:"))
    assert said in shown
    assert f"ssh -F {path} gwen true" in caught.value.hint
    assert (tmp_path / "empty").read_text() == ""


def test_the_commands_of_the_hint_mend_it(box, tmp_path):
    known = tmp_path / "known"
    path = altered(box, tmp_path, UserKnownHostsFile=known)
    with pytest.raises(Unreachable, match="is not known") as caught:
        SshTransport(hop("gwen", config=path))
    scan = next(part for part in caught.value.hint.split("`") if part.startswith("ssh-keyscan")).split(" |")[0]
    known.write_text(subprocess.run(shlex.split(scan), capture_output=True, text=True, check=True).stdout)
    SshTransport(hop("gwen", config=path)).close()


def test_a_changed_host_key_is_refused(box, tmp_path):
    other = tmp_path / "other"
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)), check=True)
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{box.port} {other.with_suffix('.pub').read_text()}")
    with pytest.raises(Unreachable, match="has changed") as caught:
        SshTransport(hop("gwen", config=altered(box, tmp_path, UserKnownHostsFile=known)))
    assert "somebody may be listening in" in caught.value.hint


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_whichever_kind_of_host_key_is_known_is_asked_for(box, tmp_path, kind):
    known = tmp_path / "known"
    known.write_text("".join(line for line in box.known_hosts.read_text().splitlines(keepends=True) if kind in line))
    SshTransport(hop("gwen", config=altered(box, tmp_path, UserKnownHostsFile=known))).close()


def test_a_refused_port_and_an_unknown_name_say_so(box, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(Unreachable, match="nothing listens there"):
        SshTransport(hop("gwen", config=altered(box, tmp_path, Port=free)))
    with pytest.raises(Unreachable, match="the host name is not known"):
        SshTransport(hop("gwen", config=altered(box, tmp_path, HostName="no-such-host.invalid")))


def test_a_user_that_is_not_there_is_not_let_in_and_the_key_that_was_offered_is_named(box, tmp_path):
    with pytest.raises(Unreachable, match="cannot log in") as caught:
        SshTransport(hop("gwen", config=altered(box, tmp_path, User="nobody-here")))
    assert f"offered: {box.key}" in caught.value.what
    assert "authorized_keys" in caught.value.hint


def test_without_any_key_it_says_that_there_was_none_and_why(box, tmp_path):
    with pytest.raises(Unreachable, match="we had no key to offer") as caught:
        SshTransport(hop("gwen", config=altered(box, tmp_path, IdentityFile=tmp_path / "none")))
    assert f"{tmp_path}/none cannot be used: [Errno 2] No such file or directory" in caught.value.what


def locked_key(box, tmp_path):
    key = tmp_path / "locked"
    key.write_bytes(box.key.read_bytes())
    key.chmod(0o600)
    key.with_suffix(".pub").write_text(box.key.with_suffix(".pub").read_text())
    subprocess.run(("ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)), check=True)
    return key


def test_a_key_with_a_passphrase_asks_for_the_agent(box, tmp_path):
    key = locked_key(box, tmp_path)
    with pytest.raises(Unreachable, match=f"{key} is locked by a passphrase: `ssh-add {key}` first"):
        SshTransport(hop("gwen", config=altered(box, tmp_path, IdentityFile=key)))


def test_the_agent_opens_what_the_passphrase_locks(box, tmp_path, monkeypatch):
    key = locked_key(box, tmp_path)
    agent = subprocess.Popen(
        ("ssh-agent", "-D", "-a", str(tmp_path / "agent")), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for((tmp_path / "agent").exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        subprocess.run(("ssh-add", "-q", str(box.key)), check=True)
        SshTransport(hop("gwen", config=altered(box, tmp_path, IdentityFile=key))).close()
        SshTransport(
            hop("gwen", config=altered(box, tmp_path, IdentityFile=tmp_path / "none", IdentitiesOnly="no"))
        ).close()
    finally:
        agent.terminate()
        agent.wait()


def test_a_proxy_jump_and_a_proxy_command_lead_through_another_login(box, tmp_path):
    jump = box.ssh_config.read_text().replace("Host gwen-root", "Host bastion").replace("Host gwen\n", "Host unused\n")
    jump = jump.replace("Host *", "Host bastion")
    for way in (
        {"ProxyJump": "bastion"},
        {"ProxyCommand": f"ssh -F {box.ssh_config} -W %h:%p {box.root_alias}"},
    ):
        transport = SshTransport(hop("gwen", config=altered(box, tmp_path, before=jump, **way)))
        assert transport.run(("id", "-un"), timeout_s=5).stdout == "alex\n"
        transport.close()
    wait_for(lambda: box.pids("sshd: alex") == ())


def test_a_proxy_command_that_fails_is_unreachable(box, tmp_path):
    with pytest.raises(Unreachable, match="cannot connect"):
        SshTransport(hop("gwen", config=altered(box, tmp_path, ProxyCommand="false")))


def test_the_whole_way_in_takes_less_than_a_second(box):
    took_s = []
    for _ in range(3):
        started = time.monotonic()
        transport = SshTransport(hop(box.alias, config=box.ssh_config))
        took_s.append(time.monotonic() - started)
        transport.close()
    assert min(took_s) < 1.0


def test_a_login_without_a_shell_is_told_from_a_command_that_failed(box):
    box.sh(("usermod", "-s", "/usr/sbin/nologin", box.login))
    try:
        with pytest.raises(
            BoxError, match="was not run; the login answered:\n    This account is currently not available"
        ):
            SshTransport(hop(box.alias, config=box.ssh_config))
    finally:
        box.sh(("usermod", "-s", "/bin/bash", box.login))


@pytest.mark.parametrize("shell", ["/bin/dash", "/bin/sh", "/bin/bash"])
def test_whichever_shell_the_login_has_a_late_command_dies_with_its_group(box, shell):
    box.sh(("usermod", "-s", shell, box.login))
    try:
        transport = SshTransport(hop(box.alias, config=box.ssh_config))
        with pytest.raises(CommandTimeout, match="and was killed"):
            transport.run(("sh", "-c", "sleep 979 & wait"), timeout_s=0.3)
        wait_for(lambda: box.pids("sleep 979") == ())
        transport.close()
    finally:
        box.sh(("usermod", "-s", "/bin/bash", box.login))


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["", "a b", "$HOME", "`id`", "'", '"', "\\", "*", "a\nb", "ü€😀", "--", "~", "!x", "#"]
)
def test_every_word_arrives_through_sshd_and_the_login_shell_as_it_was_given(ssh, word):
    assert ssh.run(("printf", "%s|%s", word, "end"), timeout_s=5).stdout == f"{word}|end"


def test_outputs_status_and_death_by_signal_are_as_on_this_machine(ssh):
    result = ssh.run(("sh", "-c", "echo out; echo err >&2; exit 3"), timeout_s=5, check=False)
    assert (result.stdout, result.stderr, result.status) == ("out\n", "err\n", 3)
    assert ssh.run(("sh", "-c", "kill -KILL $$"), timeout_s=5, check=False).status == 137
    with pytest.raises(CommandFailed, match="is not there"):
        ssh.run(("no-such-program",), timeout_s=5)


def test_five_megabytes_go_in_and_come_back_at_the_same_time(ssh):
    assert len(ssh.run(("cat",), timeout_s=30, input=b"x" * 5_000_000).stdout) == 5_000_000
    assert ssh.run(("true",), timeout_s=30, input=b"x" * 5_000_000).status == 0


def test_five_megabytes_of_stderr_do_not_stop_stdout(ssh):
    result = ssh.run(("sh", "-c", "head -c 5000000 /dev/zero >&2; echo done"), timeout_s=30)
    assert result.stdout == "done\n"
    assert len(result.stderr) == 256 * 1024


def test_a_command_that_prints_for_ever_is_killed_on_the_box_at_16_mib(box, ssh):
    with pytest.raises(BoxError, match="printed more than 16 MiB and was killed"):
        ssh.run(("yes", "endless"), timeout_s=60)
    assert box.pids("yes endless") == ()


def test_a_late_command_is_killed_on_the_box_with_its_children(box, ssh):
    started = time.monotonic()
    with pytest.raises(CommandTimeout, match=r"did not end within 0\.3 s and was killed"):
        ssh.run(("sh", "-c", "trap '' TERM HUP; sleep 987 & wait"), timeout_s=0.3)
    assert time.monotonic() - started < 2
    wait_for(lambda: box.pids("sleep 987") == ())


def test_a_login_shell_that_chats_and_is_no_posix_shell_changes_nothing(box, ssh):
    bashrc = box.root / "home/alex/.bashrc"
    kept = bashrc.read_text()
    bashrc.write_text("echo welcome to gwen; echo mind the step >&2\n")
    try:
        assert ssh.run(("echo", "out"), timeout_s=5).stdout == "out\n"
        stream = ssh.stream(("echo", "line"))
        assert list(stream.lines()) == ["line"]
    finally:
        bashrc.write_text(kept)


def test_a_command_whose_shell_is_killed_on_the_box_has_a_status_and_the_connection_stands(box, ssh):
    killer = threading.Timer(0.2, lambda: [box.kill(pid) for pid in box.pids("sleep 981")])
    killer.start()
    assert ssh.run(("sleep", "981"), timeout_s=20, check=False).status in (137, 255)
    killer.join()
    stream = ssh.stream(("sleep", "980"))
    wait_for(lambda: len(box.pids("sleep 980")) > 1)
    for pid in box.pids("sleep 980"):
        box.kill(pid)
    assert list(stream.lines()) == []
    assert stream.status in (137, 255)
    assert ssh.run(("true",), timeout_s=5).status == 0


def test_one_command_costs_milliseconds_on_the_open_connection(ssh):
    seconds = [ssh.run(("true",), timeout_s=5).seconds for _ in range(20)]
    # The quickest, since other work on this machine can delay any of them.
    assert min(seconds) < 0.05


def test_twenty_threads_share_eight_sessions_and_all_are_answered(ssh):
    answers = {}

    def ask(number):
        answers[number] = ssh.run(("sh", "-c", f"sleep 0.05; echo {number}"), timeout_s=20).stdout.strip()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) for number in range(20)}


def test_when_all_sessions_are_taken_a_command_waits_until_its_deadline(ssh):
    streams = [ssh.stream(("sleep", "100")) for _ in range(ssh_room.MAX_SESSIONS)]
    with pytest.raises(CommandTimeout, match="8 commands are running already"):
        ssh.run(("true",), timeout_s=0.2)
    streams[0].close()
    assert ssh.run(("true",), timeout_s=5).status == 0
    for stream in streams:
        stream.close()


# --- who runs it -----------------------------------------------------------------------------------------------------


def test_without_sudo_the_line_that_is_missing_is_shown_and_it_is_enough(box, ssh, install_sudoers):
    argv = ("systemctl", "show", "-P", "Id", "ssh.service")
    with pytest.raises(CommandFailed, match="a password is required") as caught:
        ssh.run(argv, timeout_s=10, as_user="root", check=False)
    line = caught.value.hint.splitlines()[-1].strip()
    assert line == "alex ALL=(root) NOPASSWD: /usr/bin/systemctl show -P Id ssh.service"
    install_sudoers([line])
    assert ssh.run(argv, timeout_s=10, as_user="root").stdout == "ssh.service\n"
    with pytest.raises(CommandFailed, match="sudo"):
        ssh.run((*argv[:-1], "cron.service"), timeout_s=10, as_user="root")


@pytest.mark.parametrize(
    "word",
    [
        "a,b",
        "x:y=z",
        "*",
        "a b",
        "[x]?",
        "back\\slash",
        "!no",
        '{"json": [1, null]}',
        "it's",
        "(a)",
        "#x",
        "^re$",
        "ü",
        "%$HOME",
    ],
)
def test_the_line_shown_for_odd_arguments_allows_them_and_nothing_like_them(ssh, install_sudoers, word):
    with pytest.raises(CommandFailed) as caught:
        ssh.run(("printf", "%s", word), timeout_s=10, as_user="root")
    install_sudoers([caught.value.hint.splitlines()[-1].strip()])
    assert ssh.run(("printf", "%s", word), timeout_s=10, as_user="root").stdout == word
    with pytest.raises(CommandFailed):
        ssh.run(("printf", "%s", "anything"), timeout_s=10, as_user="root")


def test_the_login_itself_needs_no_sudo_and_root_needs_none_for_another(ssh, root_ssh):
    assert ssh.run(("id", "-un"), timeout_s=5, as_user="alex").stdout == "alex\n"
    assert root_ssh.run(("id", "-un"), timeout_s=5, as_user="root").stdout == "root\n"
    assert root_ssh.run(("id", "-un"), timeout_s=5, as_user="alex").stdout == "alex\n"


def test_a_late_command_of_root_that_cannot_be_killed_is_said_to_run_on(box, ssh, install_sudoers):
    install_sudoers(["alex ALL=(root) NOPASSWD: /usr/bin/sleep 986"])
    with pytest.raises(CommandTimeout) as caught:
        ssh.run(("sleep", "986"), timeout_s=0.5, as_user="root")
    assert "it may still be running on the box (process group " in caught.value.hint
    for pid in box.pids("sleep 986"):
        box.kill(pid)


def test_a_late_command_of_root_is_killed_where_sudo_allows_everything(box, ssh, install_sudoers):
    install_sudoers(["alex ALL=(ALL) NOPASSWD: ALL"])
    with pytest.raises(CommandTimeout, match="and was killed"):
        ssh.run(("sleep", "985"), timeout_s=0.5, as_user="root")
    wait_for(lambda: box.pids("sleep 985") == ())


# --- stream ----------------------------------------------------------------------------------------------------------


def test_lines_come_as_soon_as_the_command_on_the_box_writes_them(ssh):
    stream = ssh.stream(("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do date +%s.%N; sleep 0.05; done"))
    late_ms = [(time.time() - float(line)) * 1000 for line in stream.lines()]
    assert len(late_ms) == 9
    # The quickest, since other work on this machine can delay any of them; a buffer would delay them all.
    assert min(late_ms) < 50


def test_the_journal_is_followed_entry_by_entry(box, ssh):
    stream = ssh.stream(("journalctl", "-f", "-n", "0", "-o", "json", "-t", "ticker"))
    said = []
    reader = threading.Thread(target=lambda: said.extend(json.loads(line)["MESSAGE"] for line in stream.lines()))
    reader.start()
    number = 0
    while len(said) < 5:
        # journalctl does not say when it has begun to follow: until it does, entries pass it by.
        number += 1
        assert number < 100
        box.sh(("sh", "-c", f"echo tick {number} | systemd-cat -t ticker"))
    stream.close()
    reader.join()
    first = int(said[0].removeprefix("tick "))
    assert said == [f"tick {first + later}" for later in range(len(said))]


def test_closing_a_stream_kills_the_command_on_the_box(box, ssh):
    stream = ssh.stream(("journalctl", "-f", "-n", "0"))
    wait_for(lambda: box.pids("journalctl -f") != ())
    closer = threading.Timer(0.1, stream.close)
    closer.start()
    assert list(stream.lines()) == []
    closer.join()
    wait_for(lambda: box.pids("journalctl -f") == (), within_s=2)
    assert stream.ended


def test_a_stream_that_ends_by_itself_has_a_status_and_frees_its_session(ssh):
    for number in range(ssh_room.MAX_SESSIONS + 2):
        stream = ssh.stream(("sh", "-c", f"echo one; echo oops >&2; exit {number}"))
        assert list(stream.lines()) == ["one"]
        assert (stream.status, stream.stderr) == (number, "oops\n")


HOLDER = """
import sys
from pathlib import Path
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
stream = SshTransport(hop("gwen", config=Path(sys.argv[1]))).stream(("sh", "-c", "echo up; exec sleep 984"))
print(next(stream.lines()), flush=True)
sys.stdin.read()
"""


def test_a_stream_dies_on_the_box_when_our_process_is_killed(box):
    command = (box.python, "-c", HOLDER, str(box.ssh_config))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"up\n"
        assert box.pids("sleep 984") != ()
        holder.kill()
    wait_for(lambda: box.pids("sleep 984") == (), within_s=3)


# --- reach -----------------------------------------------------------------------------------------------------------

ECHO = """
import socket, threading
def serve(client):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client:
        while data := client.recv(65536):
            client.sendall(data)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture
def echo(ssh):
    """A port of the box that sends back what it gets."""
    stream = ssh.stream(("python3", "-c", ECHO))
    yield int(next(stream.lines()))
    stream.close()


def round_trip_ms(address, count=200):
    took = []
    with socket.create_connection(address) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            started = time.perf_counter()
            client.sendall(b"x" * 275)
            client.recv(65536)
            took.append((time.perf_counter() - started) * 1000)
    return min(took)


def test_a_forward_adds_about_a_millisecond_to_a_round_trip(ssh, echo):
    assert ssh.reach(echo) == ssh.reach(echo)
    forwarded = round_trip_ms(ssh.reach(echo))
    assert forwarded - round_trip_ms(("127.0.0.1", echo)) < 5


def test_sixty_four_connections_at_once_carry_their_own_bytes(ssh, echo):
    clients = [socket.create_connection(ssh.reach(echo)) for _ in range(64)]
    for number, client in enumerate(clients):
        client.sendall(f"{number}\n".encode())
    for number, client in enumerate(clients):
        client.settimeout(10)
        assert client.recv(100) == f"{number}\n".encode()
        client.close()


def test_megabytes_pass_in_both_directions_and_the_end_is_told(ssh, echo):
    sent = os.urandom(3_000_000)
    with socket.create_connection(ssh.reach(echo)) as client:
        client.settimeout(30)
        writer = threading.Thread(target=lambda: (client.sendall(sent), client.shutdown(socket.SHUT_WR)))
        writer.start()
        got = bytearray()
        while data := client.recv(1 << 20):
            got += data
        writer.join()
    assert bytes(got) == sent


def test_a_port_where_nothing_listens_is_reset_at_once_and_answers_as_soon_as_something_does(box, ssh):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()
    for _ in range(20):
        with socket.create_connection(ssh.reach(port)) as client:
            client.settimeout(5)
            with pytest.raises(ConnectionResetError):
                client.recv(10)
    assert time.monotonic() - started < 2
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(ssh.reach(port)) as client:
        served, _ = server.accept()
        with served:
            served.sendall(b"hello")
            client.settimeout(5)
            assert client.recv(10) == b"hello"


def test_forwards_close_with_the_transport(box, echo):
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    with socket.create_connection(transport.reach(echo)) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        transport.close()
        client.settimeout(5)
        assert client.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(client.getpeername())


# --- nothing is left -------------------------------------------------------------------------------------------------


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_two_hundred_commands_thirty_streams_and_thirty_connections_leave_nothing(box, echo):
    files, threads = open_files(), threading.active_count()
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    for _ in range(200):
        transport.run(("true",), timeout_s=10)
    for _ in range(30):
        transport.stream(("sleep", "978")).close()
        with socket.create_connection(transport.reach(echo)) as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
    wait_for(lambda: box.pids("sleep 978") == ())
    transport.close()
    wait_for(lambda: (open_files(), threading.active_count()) == (files, threads))


# --- the connection is lost ------------------------------------------------------------------------------------------


@pytest.fixture
def session(box):
    """A connection and the process on the box that serves it."""
    before = set(box.pids("sshd: alex"))
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    serving = [pid for pid in box.pids("sshd: alex") if pid not in before]
    yield transport, serving
    transport.close()


def test_a_connection_killed_in_mid_command_is_unreachable_at_once(box, session):
    transport, serving = session
    killer = threading.Timer(0.3, lambda: [box.kill(pid) for pid in serving])
    killer.start()
    started = time.monotonic()
    with pytest.raises(Unreachable, match="the connection was lost during `sleep 30`"):
        transport.run(("sleep", "30"), timeout_s=60)
    killer.join()
    assert time.monotonic() - started < 3
    with pytest.raises(Unreachable, match="cannot run `true`"):
        transport.run(("true",), timeout_s=5)
    with pytest.raises(Unreachable):
        transport.stream(("true",))


def test_a_connection_killed_under_a_stream_and_a_forward_ends_both(box, session, echo):
    transport, serving = session
    stream = transport.stream(("sh", "-c", "echo up; exec sleep 983"))
    lines = stream.lines()
    assert next(lines) == "up"
    with socket.create_connection(transport.reach(echo)) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        for pid in serving:
            box.kill(pid)
        with pytest.raises(Unreachable, match="the connection was lost during `sh -c"):
            next(lines)
        client.settimeout(5)
        assert client.recv(1) == b""
    wait_for(lambda: box.pids("sleep 983") == (), within_s=3)


def test_a_connection_that_stalls_without_closing_is_given_up(box, monkeypatch):
    monkeypatch.setattr(ssh_room, "KEEPALIVE_S", 0.2)
    monkeypatch.setattr(ssh_room, "STALL_S", 1.0)
    before = set(box.pids("sshd: alex"))
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    stream = transport.stream(("sleep", "982"))
    serving = [pid for pid in box.pids("sshd: alex") if pid not in before]
    for pid in serving:
        box.kill(pid, how=19)
    try:
        started = time.monotonic()
        with pytest.raises(Unreachable, match="the connection stalled: no answer for 1 s"):
            list(stream.lines())
        assert time.monotonic() - started < 4
        with pytest.raises(Unreachable, match="stalled"):
            transport.run(("true",), timeout_s=5)
    finally:
        for pid in serving:
            box.kill(pid, how=9)
        transport.close()


def test_a_box_that_loses_its_power_is_unreachable(box):
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    cut = threading.Timer(0.3, lambda: box.power_off(cut=True))
    cut.start()
    with pytest.raises(Unreachable):
        transport.run(("sleep", "30"), timeout_s=60)
    cut.join()
    box.start()
    transport.close()
    again = SshTransport(hop(box.alias, config=box.ssh_config))
    assert again.run(("true",), timeout_s=5).status == 0
    again.close()
