"""The narrow door without a network: how a command ends, what is kept of it, who runs it, which error it gives."""

import contextlib
import inspect
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import paramiko
import pytest
from paramiko import ssh_exception

from orchestrator.box import commands, ssh, sshconfig, sshlogin
from orchestrator.box.transports import LocalTransport
from orchestrator.errors import BoxError, CommandFailed, CommandTimeout, Unreachable


@pytest.fixture
def here():
    transport = LocalTransport()
    yield transport
    transport.close()


def gone(pid, within_s=5.0):
    """Whether a process is dead (a zombie that nobody reaped is) within some seconds."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        threading.Event().wait(0.01)
    return False


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["", "a b", "$HOME", "`id`", "'", '"', "\\", "*", "a\nb", "ü€😀", "-n", "--", "{a,b}", "~", "!x", "#"]
)
def test_every_word_arrives_as_it_was_given(here, word):
    assert here.run(("printf", "%s|%s", word, "end"), timeout_s=5).stdout == f"{word}|end"


def test_a_result_holds_both_outputs_the_status_and_the_time(here):
    result = here.run(("sh", "-c", "echo out; echo err >&2; exit 3"), timeout_s=5, check=False)
    assert (result.stdout, result.stderr, result.status) == ("out\n", "err\n", 3)
    assert 0 < result.seconds < 5


def test_a_status_other_than_0_shows_command_status_and_the_last_ten_lines(here):
    with pytest.raises(CommandFailed) as caught:
        here.run(("sh", "-c", "seq 30 >&2; exit 4"), timeout_s=5)
    said = str(caught.value)
    assert said.startswith("`sh -c 'seq 30 >&2; exit 4'` ended with status 4\n")
    assert said.splitlines()[1:] == [f"    {number}" for number in range(21, 31)]


def test_death_by_a_signal_is_128_plus_its_number(here):
    assert here.run(("sh", "-c", "kill -KILL $$"), timeout_s=5, check=False).status == 137
    assert here.run(("sh", "-c", "kill -SEGV $$"), timeout_s=5, check=False).status == 139


def test_a_program_that_is_not_there_says_so(here):
    with pytest.raises(CommandFailed, match="`no-such-program` is not there") as caught:
        here.run(("no-such-program", "--flag"), timeout_s=5)
    assert caught.value.status == 127


def test_input_reaches_the_command_and_without_input_it_is_at_its_end(here):
    assert here.run(("cat",), timeout_s=5, input="grüße\n").stdout == "grüße\n"
    assert here.run(("wc", "-c"), timeout_s=5, input=b"\x00\xff").stdout.strip() == "2"
    assert here.run(("cat",), timeout_s=5).stdout == ""


def test_five_megabytes_go_in_and_come_back_at_the_same_time(here):
    assert len(here.run(("cat",), timeout_s=20, input=b"x" * 5_000_000).stdout) == 5_000_000


def test_a_command_that_ends_without_reading_its_input_is_no_error(here):
    assert here.run(("true",), timeout_s=5, input=b"x" * 5_000_000).status == 0


def test_bytes_that_are_no_utf8_are_shown_as_replacement_characters(here):
    assert here.run(("printf", r"a\377b"), timeout_s=5).stdout == "a\ufffdb"


def test_a_late_command_is_killed_with_its_children_and_says_its_deadline(here, tmp_path):
    script = f"trap '' TERM HUP INT; sleep 1000 & echo $! > {tmp_path}/child; echo waiting >&2; wait"
    started = time.monotonic()
    with pytest.raises(CommandTimeout) as caught:
        here.run(("sh", "-c", script), timeout_s=0.3)
    assert time.monotonic() - started < 2
    assert "did not end within 0.3 s and was killed\n    waiting" in str(caught.value)
    assert gone(int((tmp_path / "child").read_text()))


def test_a_command_that_prints_for_ever_is_killed_at_16_mib(here):
    with pytest.raises(BoxError, match="printed more than 16 MiB and was killed"):
        here.run(("yes",), timeout_s=30)


def test_of_endless_stderr_the_last_256_kib_are_kept(here):
    result = here.run(("sh", "-c", "seq 200000 >&2"), timeout_s=10)
    assert len(result.stderr) == 256 * 1024
    assert result.stderr.endswith("199999\n200000\n")


def test_a_command_run_by_two_threads_at_once_answers_each(here):
    answers = {}

    def ask(number):
        answers[number] = here.run(("sh", "-c", f"sleep 0.2; echo {number}"), timeout_s=5).stdout.strip()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) for number in range(5)}
    assert time.monotonic() - started < 0.9


# --- stream ----------------------------------------------------------------------------------------------------------


def test_lines_come_as_soon_as_they_are_written(here):
    stream = here.stream(("sh", "-c", "for i in 1 2 3 4 5; do date +%s.%N; sleep 0.05; done"))
    late_s = [time.time() - float(line) for line in stream.lines()]
    assert len(late_s) == 5
    assert sorted(late_s)[2] < 0.05
    assert stream.status == 0


def test_a_stream_that_ends_has_a_status_and_what_it_said_on_stderr(here):
    stream = here.stream(("sh", "-c", "echo one; printf two; echo oops >&2; exit 7"))
    assert list(stream.lines()) == ["one", "two"]
    assert (stream.status, stream.stderr, stream.ended) == (7, "oops\n", True)


def test_closing_a_stream_kills_it_with_its_children_and_ends_the_reader(here):
    stream = here.stream(("sh", "-c", "sleep 1000 & echo $!; echo $$; wait"))
    lines = stream.lines()
    pids = [int(next(lines)), int(next(lines))]
    closer = threading.Timer(0.1, stream.close)
    closer.start()
    assert list(lines) == []
    closer.join()
    assert stream.ended
    assert stream.status is None
    assert all(gone(pid) for pid in pids)
    stream.close()


def test_closing_the_transport_ends_its_streams():
    transport = LocalTransport()
    stream = transport.stream(("sleep", "1000"))
    transport.close()
    assert stream.ended


def test_a_stream_with_its_stdin_kept_takes_what_is_sent(here):
    stream = here.stream(("cat",), keep_stdin=True)
    stream.send("hello\n")
    assert next(stream.lines()) == "hello"
    stream.close()
    with pytest.raises(BoxError, match="takes no more input"):
        stream.send("too late\n")


def test_a_line_without_end_does_not_fill_the_memory(here):
    stream = here.stream(("sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x; echo; echo next"))
    long, following = stream.lines()
    assert len(long) == commands.LINE_LIMIT
    assert following == "next"


HOLDER = """
import sys
from orchestrator.box.transports import LocalTransport
stream = LocalTransport().stream(("sh", "-c", "echo $$; exec sleep 1000"))
print(next(stream.lines()), flush=True)
sys.stdin.read()
"""


def test_a_stream_dies_when_our_process_is_killed():
    with subprocess.Popen((sys.executable, "-c", HOLDER), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        pid = int(holder.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        holder.kill()
    assert gone(pid)


# --- who runs it -----------------------------------------------------------------------------------------------------


def test_a_stream_over_a_network_dies_without_heartbeats_although_nobody_closes_it():
    line = commands.stream_line(("sh", "-c", "echo $$; exec sleep 60"), keep_stdin=False, expires_s=1)
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        process.stdout.readline()
        pid = int(process.stdout.readline())
        begun = time.monotonic()
        while time.monotonic() < begun + 2.5:
            process.stdin.write(commands.BEAT)
            process.stdin.flush()
            assert not gone(pid, within_s=0.3)
        assert gone(pid, within_s=5)
        assert process.wait(5) == -9


@pytest.mark.parametrize(
    ("login", "is_root", "sudo", "user", "before"),
    [
        ("alex", False, None, None, ()),
        ("alex", False, None, "alex", ()),
        ("alex", False, None, "root", ("sudo", "-n", "--")),
        ("alex", False, None, "vllm", ("sudo", "-n", "-u", "vllm", "--")),
        ("alex", False, False, "root", ()),
        ("root", True, None, "root", ()),
        ("root", True, None, "vllm", ("runuser", "-u", "vllm", "--")),
        ("toor", True, None, "root", ()),
        ("root", True, True, "root", ("sudo", "-n", "--")),
        ("root", True, True, "vllm", ("sudo", "-n", "-u", "vllm", "--")),
    ],
)
def test_another_user_is_reached_by_sudo_or_from_root_by_runuser(login, is_root, sudo, user, before):
    runner = LocalTransport(sudo=sudo)
    runner.user, runner.is_root = login, is_root
    assert runner.as_user(("systemctl", "stop", "x"), user) == (*before, "systemctl", "stop", "x")


@pytest.mark.parametrize(
    "line",
    [
        "sudo: a password is required",
        "sudo: a terminal is required to read the password; either use the -S option to read from standard input",
        "Sorry, user alex is not allowed to execute '/usr/bin/systemctl stop x' as root on gwen.",
        "alex is not in the sudoers file.",
        "sudo: sorry, you must have a tty to run sudo",
        "sudo: unknown user vllm",
    ],
)
def test_a_refusal_of_sudo_is_known_from_the_commands_own_failure(line):
    assert commands.refused(f"sudo: some warning\n{line}\n", 1) == line
    assert commands.refused(f"Failed to stop x.service: {line}\n", 1) is None
    assert commands.refused(f"{line}\n", 0) is None


def test_sudo_that_is_not_installed_is_a_refusal_only_with_status_127():
    assert commands.refused("coldboot: 1: sudo: not found\n", 127) == "sudo: not found"
    assert commands.refused("coldboot: 1: sudo: not found\n", 1) is None


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("systemctl", "stop", "a.service"), "alex ALL=(root) NOPASSWD: /usr/bin/systemctl stop a.service"),
        (("/sbin/reboot",), 'alex ALL=(root) NOPASSWD: /sbin/reboot ""'),
        (("rm", "-f", "/run/a=b,c:*"), r"alex ALL=(root) NOPASSWD: /usr/bin/rm -f /run/a\=b\,c\:\*"),
    ],
)
def test_the_missing_line_of_sudoers_allows_exactly_this_command(argv, line):
    assert commands.sudoers_line("alex", "root", argv) == line


# --- what the shell around a command says ----------------------------------------------------------------------------


def test_what_a_chatty_login_shell_prints_before_the_mark_is_dropped():
    assert commands.split_mark(b"welcome to gwen\n\x1ecoldboot:4711\nout\n") == (4711, b"out\n")
    assert commands.split_mark(b"welcome to gwen\n") == (None, b"")
    assert commands.split_mark(b"\x1ecoldboot:47") == (None, b"")


def test_lines_are_the_same_however_the_bytes_are_cut():
    text = "motd\n\x1ecoldboot:5\nöne\r\n\nthree".encode()
    for cut in range(len(text)):
        lines = commands.Lines()
        assert [*lines.feed(text[:cut]), *lines.feed(text[cut:]), *lines.end()] == ["öne", "", "three"]


# --- ssh: the config -------------------------------------------------------------------------------------------------


def config(tmp_path, text):
    path = tmp_path / "config"
    path.write_text(text)
    return path


def test_an_alias_leads_to_host_port_user_key_and_known_hosts(tmp_path):
    path = config(
        tmp_path,
        "Host gwen\n HostName 10.0.0.7\n Port 2222\n User alex\n IdentityFile ~/k1\n IdentityFile /k2\n"
        " IdentitiesOnly yes\n UserKnownHostsFile ~/.ssh/%h.hosts /b\n GlobalKnownHostsFile none\n ConnectTimeout 3\n",
    )
    hop = sshconfig.hop("gwen", config=path)
    assert (hop.host, hop.port, hop.user, hop.connect_timeout_s) == ("10.0.0.7", 2222, "alex", 3.0)
    assert hop.identities == (Path.home() / "k1", Path("/k2"))
    assert hop.identities_only
    assert hop.known_hosts == (Path.home() / ".ssh/10.0.0.7.hosts", Path("/b"))
    assert hop.known_as == "[10.0.0.7]:2222"
    assert hop.ssh("true") == f"ssh -F {path} gwen true"


def test_a_login_given_with_the_box_or_the_name_is_stronger_than_the_configs(tmp_path):
    path = config(tmp_path, "Host gwen\n User alex\n")
    assert sshconfig.hop("gwen", config=path, user="root").user == "root"
    assert sshconfig.hop("bob@gwen", config=path).user == "bob"


def test_a_host_key_alias_is_the_name_in_known_hosts(tmp_path):
    path = config(tmp_path, "Host gwen\n HostKeyAlias the-box\n Port 2222\n")
    assert sshconfig.hop("gwen", config=path).known_as == "the-box"


def test_proxy_jump_is_a_chain_of_hops_each_with_its_own_config(tmp_path):
    path = config(
        tmp_path,
        "Host gwen\n HostName gwen.lan\n ProxyJump bastion,ops@inner:2200\n"
        "Host bastion\n HostName b.example\n User gate\n ProxyJump outer\n"
        "Host inner\n HostName i.lan\n ProxyJump none\n",
    )
    hop = sshconfig.hop("gwen", config=path)
    assert [(jump.user, jump.host, jump.port) for jump in hop.jumps][1:] == [
        ("gate", "b.example", 22),
        ("ops", "i.lan", 2200),
    ]
    assert hop.jumps[0].host == "outer"


def test_a_proxy_jump_through_itself_ends_with_an_error(tmp_path):
    path = config(tmp_path, "Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(Unreachable, match="more than 8 hosts"):
        sshconfig.hop("a", config=path)


def test_a_proxy_command_has_its_tokens_filled_and_none_is_none(tmp_path):
    path = config(tmp_path, "Host a\n HostName h\n Port 5\n ProxyCommand nc %h %p\nHost b\n ProxyCommand none\n")
    assert sshconfig.hop("a", config=path).proxy_command == "nc h 5"
    assert sshconfig.hop("b", config=path).proxy_command is None


def test_include_is_followed_and_the_block_around_it_goes_on(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more/10.conf").write_text("Host other\n Port 1\n")
    (tmp_path / "more/20.conf").write_text("Host gwen\n User alex\n")
    path = config(tmp_path, f"Host gwen\n Include {tmp_path}/more/*.conf\n Port 99\nHost *\n Port 7\n")
    hop = sshconfig.hop("gwen", config=path)
    assert (hop.user, hop.port) == ("alex", 99)
    assert sshconfig.hop("other", config=path).port == 1


def test_an_include_of_itself_ends_with_an_error(tmp_path):
    path = config(tmp_path, f"Include {tmp_path}/config\n")
    with pytest.raises(Unreachable, match="nested more than 16 deep"):
        sshconfig.hop("gwen", config=path)


@pytest.mark.parametrize(
    "text", ["Host gwen\n Port many\n", "Match host\n", 'Host "gwen\n', "Host gwen\n ProxyJump a:b\n"]
)
def test_a_config_that_cannot_be_read_says_what_and_where(tmp_path, text):
    path = config(tmp_path, text)
    with pytest.raises(Unreachable, match="the ssh config for gwen cannot be used") as caught:
        sshconfig.hop("gwen", config=path)
    assert f"mend {path}" in caught.value.hint


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(Unreachable, match="No such file"):
        sshconfig.hop("gwen", config=tmp_path / "none")


# --- ssh: known hosts ------------------------------------------------------------------------------------------------


def hop_with(tmp_path, known):
    (tmp_path / "known").write_text(known)
    return sshconfig.hop(
        "gwen",
        config=config(
            tmp_path,
            f"Host gwen\n HostName h\n Port 2222\n UserKnownHostsFile {tmp_path}/known\n GlobalKnownHostsFile none\n",
        ),
    )


@pytest.fixture(scope="module")
def keys():
    return paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()


def line(key, name="[h]:2222"):
    return f"{name} {key.get_name()} {key.get_base64()}\n"


def test_the_key_in_known_hosts_is_accepted_and_no_other(tmp_path, keys):
    where = hop_with(tmp_path, line(keys[0]))
    sshconfig.check_host_key(where, sshconfig.known_keys(where), keys[0])
    with pytest.raises(Unreachable, match="has changed") as caught:
        sshconfig.check_host_key(where, sshconfig.known_keys(where), keys[1])
    assert f"`ssh-keygen -R '[h]:2222' -f {tmp_path}/known`" in caught.value.hint
    assert sshconfig.fingerprint(keys[1]) in caught.value.what


def test_an_unknown_key_shows_its_fingerprint_and_how_to_compare_it(tmp_path, keys):
    where = hop_with(tmp_path, line(keys[0], name="other"))
    with pytest.raises(Unreachable, match="is not known") as caught:
        sshconfig.check_host_key(where, sshconfig.known_keys(where), keys[0])
    assert sshconfig.fingerprint(keys[0]) in caught.value.what
    assert "compare it with what the box's own console says" in caught.value.hint
    assert "`ssh-keyscan -p 2222 h | ssh-keygen -lf -`" in caught.value.hint
    assert "StrictHostKeyChecking" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        ("[h]:2222", True),
        ("[*]:2222", True),
        ("other,[H]:2222", True),
        ("h", False),
        ("[hh]:2222", False),
        ("[*]:2222,![h]:2222", False),
        ("[?]:2222", True),
        (paramiko.HostKeys.hash_host("[h]:2222"), True),
        (paramiko.HostKeys.hash_host("[x]:2222"), False),
        ("|1|torn", False),
    ],
)
def test_names_in_known_hosts_are_matched_as_openssh_does(tmp_path, keys, names, known):
    where = hop_with(tmp_path, line(keys[0], name=names))
    assert bool(sshconfig.known_keys(where).keys) is known


def test_damaged_lines_and_certificate_authorities_are_passed_over(tmp_path, keys):
    noise = f"# note\n\n@cert-authority * {line(keys[1], name='')}[h]:2222 ssh-ed25519 !!!\n[h]:2222 ssh-odd AAAA\n"
    where = hop_with(tmp_path, noise + line(keys[0]))
    assert list(sshconfig.known_keys(where).keys.values()) == [keys[0]]


def test_a_revoked_key_is_refused_even_where_it_is_listed(tmp_path, keys):
    where = hop_with(tmp_path, line(keys[0]) + f"@revoked * {keys[0].get_name()} {keys[0].get_base64()}\n")
    with pytest.raises(Unreachable, match="is revoked"):
        sshconfig.check_host_key(where, sshconfig.known_keys(where), keys[0])


def test_fingerprints_are_those_of_ssh_keygen(tmp_path, keys):
    (tmp_path / "key.pub").write_text(f"{keys[0].get_name()} {keys[0].get_base64()}\n")
    shown = subprocess.run(
        ("ssh-keygen", "-lf", tmp_path / "key.pub"), capture_output=True, text=True, check=True
    ).stdout
    assert sshconfig.fingerprint(keys[0]) == shown.split()[1]


# --- ssh: foreign exceptions -----------------------------------------------------------------------------------------

HOP = sshconfig.Hop("gwen", "10.0.0.7", 22, "alex", (), identities_only=False, known_hosts=())


def _subclasses(kind):
    return {kind, *(deep for child in kind.__subclasses__() for deep in _subclasses(child))}


def _made(kind):
    """An instance of a foreign exception, whatever its constructor wants."""
    samples = {
        ssh_exception.BadAuthenticationType: ("bad", ["password"]),
        ssh_exception.PartialAuthentication: (["password"],),
        ssh_exception.ChannelException: (2, "Connect failed"),
        ssh_exception.BadHostKeyException: ("h", paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()),
        ssh_exception.ProxyCommandFailure: ("nc h 22", "127"),
        ssh_exception.NoValidConnectionsError: ({("10.0.0.7", 22): ConnectionRefusedError(111, "refused")},),
        paramiko.AuthFailure: ([],),
    }
    return kind(*samples.get(kind, ("something",)))


PARAMIKO = sorted(
    {kind for kind in _subclasses(paramiko.SSHException) if kind.__module__.startswith("paramiko")}
    | {ssh_exception.NoValidConnectionsError},
    key=lambda kind: kind.__name__,
)
SYSTEM = [
    EOFError(),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    *(OSError(number, os.strerror(number)) for number in (2, 13, 24, 32, 101, 104, 110, 111, 113)),
    TimeoutError("timed out"),
]


def test_the_list_of_paramikos_exceptions_is_the_whole_of_them():
    named = {
        kind
        for _, kind in inspect.getmembers(ssh_exception, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__.startswith("paramiko")
    }
    assert named <= set(PARAMIKO)
    assert len(PARAMIKO) >= 14


@pytest.mark.parametrize("error", [*map(_made, PARAMIKO), *SYSTEM], ids=lambda error: f"{type(error).__name__}-{error}")
def test_every_foreign_exception_becomes_what_happened_and_what_to_run(error):
    assert isinstance(error, sshlogin.FOREIGN)
    answer = sshlogin.unreachable(error, HOP, "cannot connect")
    assert answer.exit_code == 3
    assert answer.what.startswith("gwen (alex@10.0.0.7:22): cannot connect: ")
    assert answer.hint.endswith("; `ssh gwen true` shows the same by hand")
    assert "new to us" not in answer.hint


def test_a_host_that_is_not_there_names_the_way_out(tmp_path):
    port = _closed_port()
    path = config(tmp_path, f"Host gwen\n HostName 127.0.0.1\n Port {port}\n User alex\n")
    with pytest.raises(Unreachable, match=rf"gwen \(alex@127.0.0.1:{port}\): cannot connect: nothing listens there"):
        ssh.SshTransport(sshconfig.hop("gwen", config=path))


def test_a_server_that_speaks_no_ssh_is_told_from_one_that_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(sshlogin, "BANNER_S", 0.5)
    for greeting in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""):
        with socket.create_server(("127.0.0.1", 0)) as server:
            path = config(tmp_path, f"Host gwen\n HostName 127.0.0.1\n Port {server.getsockname()[1]}\n")
            accepted = []
            threading.Thread(target=_greet, args=(server, greeting, accepted), daemon=True).start()
            started = time.monotonic()
            with pytest.raises(Unreachable, match="cannot connect"):
                ssh.SshTransport(sshconfig.hop("gwen", config=path))
            assert time.monotonic() - started < 5
            for one in accepted:
                one.close()


def _greet(server, greeting, accepted):
    with contextlib.suppress(OSError):
        client, _ = server.accept()
        accepted.append(client)
        client.sendall(greeting)


def _closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_what_the_person_sees_of_a_command_is_the_command_and_not_our_shell():
    line = commands.run_line(("systemctl", "stop", "a b"))
    assert ssh._shown(line) == "systemctl stop 'a b'"
    assert re.fullmatch(r"sh -c .* coldboot systemctl stop 'a b'", shlex.join(line), re.DOTALL)
