"""`cache: clear` on the real box: production's own caches come back byte for byte, and before it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from faults import await_true
from nspawn import Box, free_port

from orchestrator.box.engines import OwnCache
from orchestrator.box.services import make_service
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.matrix import load_matrix

ROOT = Path(__file__).parent.parent.parent
UNIT = "vllm-clear.service"
GUARD = "coldboot-caches-vllm-clear.service"
PORT = free_port()
SMALL = "/var/cache/clear"

UNIT_TEXT = f"""[Unit]
Description=production
After=network.target

[Service]
User=alex
Environment=COLDBOOT_REHEARSAL_TIME_SCALE=0.01 CUDA_CACHE_PATH={SMALL}/nv
ExecStart={sys.executable} -m orchestrator.rehearsal \\
  --model /models/qwen --served-model-name qwen3-27b --tensor-parallel-size 2 \\
  --gpu-memory-utilization 0.97 --max-model-len 98304 --max-num-seqs 128 \\
  --spec-method qwen3_5_mtp --spec-model /models/qwen --spec-tokens 1 --host 127.0.0.1 --port {PORT}
Restart=on-failure
WorkingDirectory={ROOT}

[Install]
WantedBy=multi-user.target
"""
MATRIX = """experiment: cleared
boxes:
  real:
    transport: ssh
    host: gwen
    ssh_config: {ssh_config}
    service: systemd
    unit: {unit}
    dead_man_s: {dead_man_s}
    load: {{window_s: 0.4, warmup_s: 0.1, max_warmup_s: 0.3, input_tokens: 32, output_tokens: 8, sanity_tokens: 4,
            headroom_tokens: 4}}
    deadlines: {{ready_s: 60, stop_s: 10, first_request_s: 30, headroom_s: 30, sanity_s: 30, trial_s: 30}}
limits: {{free_disk_mib: {free_mib}}}
cache: {cache}
concurrency: [1]
variants:
  spec-1: {{}}
"""
# Everything that a cache is: names, owners, modes, times, links, contents.
STATE = rf"""
cd / && for each in home/alex/.cache/vllm {SMALL[1:]}/nv home/alex/.cache/flashinfer home/alex/.triton/cache; do
  # Production itself writes its kernels anew at each start, with the same contents.
  case $each in *triton*) find "$each" -type f -exec sha256sum {{}} +; continue ;; esac
  find "$each" -printf '%p %U:%G %m %T@ %s %l\n' 2>/dev/null
  find "$each" -type f -exec sha256sum {{}} + 2>/dev/null
done | sort
"""
OURS = (
    "find /etc/systemd /run /home/alex /var/cache -name '*coldboot*' ! -path '/run/systemd/units/*' 2>/dev/null"
    " | grep -v -e '^/run/coldboot$' -e '^/home/alex/.cache/coldboot$' -e coldboot-faults -e coldboot-rehearsal"
)


def serves() -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class Stage:
    """The box with its production and filled caches, and the tool on this side."""

    def __init__(self, box: Box, folder: Path) -> None:
        self.box = box
        self.folder = folder
        self.write()
        self.before = self.caches()

    def write(self, *, dead_man_s: float = 60, cache: str = "clear", free_mib: int = 1) -> None:
        values = {"ssh_config": self.box.ssh_config, "unit": UNIT, "dead_man_s": dead_man_s, "cache": cache}
        values["free_mib"] = free_mib
        (self.folder / "matrix.yaml").write_text(MATRIX.format(**values))

    def argv(self, task: str, *words: str, out: str = "artifacts") -> tuple[str, ...]:
        files = ("--matrix", str(self.folder / "matrix.yaml"), "--out", str(self.folder / out))
        return (sys.executable, "-m", "invoke", task, *files, *words)

    def run(self, task: str, *words: str, out: str = "artifacts") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(task, *words, out=out),
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=240,
            check=False,
        )

    def killed_at(self, place: str, boots: int = 1) -> None:
        """A campaign that is killed by SIGKILL when it has come to this step of its first boot."""
        process = self.stands_at(place, boots)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def stands_at(self, place: str, boots: int = 1) -> subprocess.Popen[bytes]:
        """A campaign that waits at this step of its first boot until it is let go."""
        (self.folder / "reached").unlink(missing_ok=True)
        process = subprocess.Popen(
            self.argv("matrix", "--boots", str(boots), "--yes"),
            cwd=ROOT,
            env={**os.environ, "COLDBOOT_FAILPOINT": f"{place}:{self.folder}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            reached = self.folder / "reached"
            await_true(lambda: reached.exists() or process.poll() is not None, 90, f"the place {place}")
            assert process.poll() is None
        except BaseException:
            process.kill()
            process.wait(10)
            raise
        return process

    def records(self) -> list[dict[str, object]]:
        lines = (self.folder / "artifacts" / "cleared" / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def caches(self) -> list[str]:
        return self.box.sh(("sh", "-c", STATE), timeout_s=60).stdout.splitlines()

    def ours(self) -> list[str]:
        return self.box.sh(("sh", "-c", OURS), check=False).stdout.splitlines()

    def all_is_back(self) -> None:
        await_true(serves, 60, "production")
        assert self.caches() == self.before
        await_true(lambda: self.ours() == [], 10, f"our end on the box: {self.ours()}")

    def since_boot(self, unit: str) -> list[tuple[int, str]]:
        """What systemd and the unit have said since the machine's boot, by the clock of that boot (µs)."""
        argv = ("journalctl", "-q", "-b", "-o", "json", "-u", unit)
        entries = [json.loads(line) for line in self.box.sh(argv).stdout.splitlines()]
        return [(int(each["__MONOTONIC_TIMESTAMP"]), str(each["MESSAGE"])) for each in entries]


@pytest.fixture(scope="module")
def furnished(box: Box) -> Iterator[Box]:
    box.write_unit(UNIT, UNIT_TEXT)
    box.sh(("systemctl", "enable", UNIT))
    # From its third start on an engine writes nothing any more.
    for _ in range(3):
        box.sh(("systemctl", "restart", UNIT))
        await_true(serves, 60, "production")
    yield box
    box.sh(("systemctl", "disable", UNIT), check=False)
    box.remove_unit(UNIT)
    box.sh(("sh", "-c", f"rm -rf /home/alex/.cache/vllm /home/alex/.triton {SMALL}"), check=False)


@pytest.fixture
def stage(furnished: Box, ssh: SshTransport, install_sudoers: Callable[..., None], tmp_path: Path) -> Iterator[Stage]:
    box = furnished
    box.sh(("sh", "-c", f"install -d -o alex {SMALL}; rm -rf {SMALL}/nv"))
    made = Stage(box, tmp_path)
    await_true(serves, 60, "production")
    # What no engine would think of: a link, an odd mode, an old time, another group's directory.
    odd = (
        "cd ~/.cache/vllm && ln -sfn torch_compile_cache link && echo x >odd && chmod 0604 odd"
        " && touch -d '2020-02-02 02:02:02.123456789' odd && chmod 2750 ."
    )
    box.sh(("runuser", "-u", "alex", "--", "sh", "-c", odd))
    made.before = made.caches()
    spec = load_matrix(tmp_path / "matrix.yaml").target
    service = make_service(ssh, spec, tmp_path / "state")
    service.describe()
    install_sudoers(service.sudo_lines())
    yield made
    # What a failed test left must not spoil the next one.
    if made.ours():
        made.run("restore")
        box.sh(("sh", "-c", f"rm -rf /etc/systemd/system/*/{GUARD} /etc/systemd/system/{GUARD}"), check=False)
        box.sh(("systemctl", "daemon-reload"))


def test_every_boot_starts_from_empty_own_caches_and_they_come_back_byte_for_byte(stage):
    assert any("torch_compile_cache" in line for line in stage.before)
    done = stage.run("matrix", "--boots", "2", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Its own caches are set aside before each boot: /home/alex/.cache/vllm" in done.stderr + done.stdout
    ended = [record for record in stage.records() if record["kind"] == "boot_ended"]
    assert [(each["boot"], each["boot_outcome"], each["cache"], each["cache_proof"]) for each in ended] == [
        ("b01-spec-1@clear", "completed", "clear", "compiled"),
        ("b02-spec-1@clear", "completed", "clear", "compiled"),
    ]
    cold = next(record for record in stage.records() if record.get("name") == "cold")
    assert cold["facts"] == {"empty": True}
    assert "/home/alex/.cache/vllm" in str(cold["detail"])
    assert stage.records()[-1]["restored"] is True
    stage.all_is_back()
    again = stage.run("restore")
    assert again.returncode == 0, again.stderr
    stage.all_is_back()


def test_it_is_a_cell_of_its_own_beside_cold(stage):
    stage.write(cache="[cold, clear]")
    done = stage.run("matrix", "--boots", "1", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    ended = {record["boot"]: record["cache_proof"] for record in stage.records() if record["kind"] == "boot_ended"}
    assert ended == {"b01-spec-1": "compiled", "b01-spec-1@clear": "compiled"}
    stage.all_is_back()


def test_a_variant_that_dies_leaves_no_trace_in_them_and_the_next_boot_begins_empty(stage):
    with (stage.folder / "matrix.yaml").open("a") as matrix:
        matrix.write("  spec-3: {spec-tokens: 3}\n")
    done = stage.run("matrix", "--boots", "2", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    ended = [record for record in stage.records() if record["kind"] == "boot_ended"]
    assert sorted((each["boot"], each["boot_outcome"]) for each in ended) == [
        *(("b01-spec-1@clear", "completed"), ("b01-spec-3@clear", "crashed")),
        *(("b02-spec-1@clear", "completed"), ("b02-spec-3@clear", "crashed")),
    ]
    assert {each["cache_proof"] for each in ended if each["boot_outcome"] == "completed"} == {"compiled"}
    stage.all_is_back()


@pytest.mark.parametrize("place", ["render", "trials"])
def test_the_box_puts_them_back_by_itself_when_the_campaign_is_killed(stage, place):
    stage.write(dead_man_s=3)
    stage.killed_at(place)
    assert stage.caches() != stage.before
    await_true(lambda: stage.ours() == [], 60, f"the dead man's end, with {stage.ours()}")
    stage.all_is_back()


@pytest.mark.parametrize("cut", [True, False], ids=["power cut", "reboot"])
@pytest.mark.parametrize("place", ["render", "trials"])
def test_after_a_power_cut_or_a_reboot_they_are_back_before_production_starts(stage, cut, place):
    stage.killed_at(place)
    assert stage.caches() != stage.before
    assert stage.box.sh(("systemctl", "is-enabled", GUARD)).stdout.strip() == "enabled"
    stage.box.reboot(cut=cut)
    stage.all_is_back()
    said = stage.since_boot(GUARD)
    texts = "\n".join(text for _, text in (*said, *stage.since_boot(UNIT)))
    back = next((at for at, text in said if text == "/home/alex/.cache/vllm is back"), None)
    put = next((at for at, text in said if text.startswith("Finished ")), None)
    begun = next((at for at, text in stage.since_boot(UNIT) if text.startswith("Started")), None)
    assert None not in (back, put, begun), texts
    assert back < put < begun, f"{put - begun} µs after production"
    assert stage.box.sh(("systemctl", "is-enabled", GUARD), check=False).stdout.strip() != "enabled"


def test_restore_by_hand_puts_them_back_and_a_second_time_changes_nothing(stage):
    stage.killed_at("trials")
    for _twice in range(2):
        done = stage.run("restore")
        assert done.returncode == 0, done.stderr
        stage.all_is_back()


@pytest.mark.parametrize("force", [False, True], ids=["told", "by force"])
def test_a_restore_from_another_checkout_is_told_who_runs_and_by_force_the_caches_come_back_twice(stage, force):
    process = stage.stands_at("trials")
    try:
        cleared = stage.caches()
        assert cleared != stage.before
        restored = stage.run("restore", *(("--break-lock",) if force else ()), out="another")
        if force:
            assert restored.returncode == 0, restored.stderr
            assert serves()
            assert stage.caches() == stage.before
        else:
            assert (restored.returncode, "cleared" in restored.stderr) == (3, True), restored.stderr
            assert stage.caches() == cleared
        (stage.folder / "go").touch()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait(10)
    ended = [record["boot_outcome"] for record in stage.records() if record["kind"] == "boot_ended"]
    assert ended == (["disturbed", "completed"] if force else ["completed"])
    stage.all_is_back()


def test_a_campaign_without_clear_gives_back_what_a_killed_one_with_it_has_set_aside(stage):
    stage.killed_at("trials")
    stage.write(cache="cold")
    done = stage.run("matrix", "--boots", "1", "--yes", "--experiment", "other")
    assert done.returncode == 0, done.stderr[-4000:]
    stage.all_is_back()


def test_the_same_command_goes_on_after_a_kill_and_gives_them_back(stage):
    stage.killed_at("trials")
    done = stage.run("matrix", "--boots", "1", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = [record["boot_outcome"] for record in stage.records() if record["kind"] == "boot_ended"]
    assert outcomes == ["aborted", "completed"]
    stage.all_is_back()


def test_whoever_starts_production_in_the_middle_finds_its_own_caches(stage):
    stage.killed_at("trials")
    box = stage.box
    box.sh(("systemctl", "stop", UNIT))
    box.sh(("sh", "-c", f"rm /run/systemd/system/{UNIT}.d/*coldboot*"))
    box.sh(("systemctl", "daemon-reload"))
    box.sh(("systemctl", "start", UNIT))
    await_true(serves, 60, "production")
    assert stage.caches() == stage.before
    assert stage.run("restore").returncode == 0
    stage.all_is_back()


def test_what_production_wrote_over_cleared_caches_is_kept_beside_the_original_and_named(stage):
    stage.killed_at("trials")
    box = stage.box
    box.sh(("systemctl", "stop", UNIT))
    # Somebody who takes away all that guards it.
    box.sh(("sh", "-c", f"rm /run/systemd/system/{UNIT}.d/*coldboot* /etc/systemd/system/*.wants/{GUARD}"))
    box.sh(("systemctl", "daemon-reload"))
    box.sh(("systemctl", "start", UNIT))
    await_true(serves, 60, "production")
    done = stage.run("restore")
    assert done.returncode == 0, done.stderr
    kept = box.sh(("sh", "-c", "ls -d /home/alex/.cache/vllm.coldboot-kept-*")).stdout.split()
    assert len(kept) == 1
    assert kept[0] in done.stderr + done.stdout
    assert box.sh(("ls", f"{kept[0]}/torch_compile_cache")).stdout
    box.sh(
        ("sh", "-c", "rm -r /home/alex/.cache/*kept* /home/alex/.triton/*kept* /var/cache/clear/*kept*"), check=False
    )
    stage.all_is_back()


def test_a_full_disk_of_a_cache_loses_nothing(stage):
    box = stage.box
    box.sh(("mount", "-t", "tmpfs", "-o", "size=1m,mode=0755,uid=1000", "tmpfs", SMALL))
    box.sh(("runuser", "-u", "alex", "--", "sh", "-c", f"mkdir {SMALL}/nv && echo precious >{SMALL}/nv/index"))
    stage.before = stage.caches()
    try:
        refused = stage.run("matrix", "--boots", "1", "--yes")
        assert refused.returncode == 3, refused.stderr[-2000:]
        assert f"0 MiB are free on the box, for {SMALL}/nv, less than limits.free_disk_mib: 1" in refused.stderr
        stage.all_is_back()
        stage.write(free_mib=0)
        stage.killed_at("trials")
        box.sh(("sh", "-c", f"cat /dev/zero >{SMALL}/filler"), check=False)
        done = stage.run("matrix", "--boots", "1", "--yes")
        assert done.returncode == 3, done.stderr[-2000:]
        assert f"cannot write {SMALL}/nv.coldboot-note" in done.stderr
        box.sh(("test", "-e", f"{SMALL}/filler"))
        await_true(serves, 60, "production")
        box.sh(("rm", f"{SMALL}/filler"))
        stage.all_is_back()
    finally:
        box.sh(("umount", SMALL))


def test_what_must_be_left_alone_is_told_with_file_and_line_before_anything_is_done(stage):
    box = stage.box
    box.sh(("sh", "-c", "mv /home/alex/.triton /home/alex/triton.real && ln -s /etc /home/alex/.triton"))
    box.sh(("runuser", "-u", "alex", "--", "ln", "-s", "/usr/share", f"{SMALL}/nv"))
    try:
        done = stage.run("matrix", "--boots", "1", "--yes")
    finally:
        box.sh(("sh", "-c", f"rm /home/alex/.triton {SMALL}/nv; mv /home/alex/triton.real /home/alex/.triton"))
    assert done.returncode == 4, done.stderr
    line = (stage.folder / "matrix.yaml").read_text().splitlines().index("cache: clear") + 1
    assert f"matrix.yaml:{line}: cache: clear: {SMALL}/nv is a symbolic link" in done.stderr
    assert "/home/alex/.triton/cache is /etc/cache, which lies below none of" in done.stderr
    assert "accepted: cold" in done.stderr
    stage.all_is_back()


# --- the user's own manager ------------------------------------------------------------------------------------------


def test_a_unit_of_the_users_own_manager_has_them_back_after_a_power_cut_without_any_root(box, tmp_path):
    folder = "/home/alex/.config/systemd/user"
    # The shell itself says what it sees: journald learns a user unit's name from the process that speaks, which must
    # still be there when it looks. An `ls` is gone by then, now and then, and its line has no unit.
    text = (
        "[Service]\nExecStart=/bin/sh -c 'echo %h/.cache/mine/*; sleep 1000'\nEnvironment=HOME=/home/alex\n"
        "[Install]\nWantedBy=default.target\n"
    )
    box.sh(("runuser", "-u", "alex", "--", "mkdir", "-p", folder, "/home/alex/.cache/mine/graphs"))
    box.sh(("loginctl", "enable-linger", "alex"))
    (box.root / folder[1:] / "mine.service").write_text(text)
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(
        MATRIX.format(ssh_config=box.ssh_config, unit="mine.service", dead_man_s=60, cache="clear", free_mib=1).replace(
            "service: systemd", "service: systemd-user"
        )
    )
    box.write_sudoers(())
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    try:
        ctl = ("env", "XDG_RUNTIME_DIR=/run/user/1000", "systemctl", "--user")
        transport.run((*ctl, "daemon-reload"), timeout_s=10)
        transport.run((*ctl, "enable", "--now", "mine.service"), timeout_s=10)
        service = make_service(transport, load_matrix(matrix).target, tmp_path / "state")
        unit = service.describe()
        service.arm(service.production(), 60)
        service.stop(kill=True, deadline_s=5)
        own = (OwnCache("/home/alex/.cache/mine"),)
        assert service.own_caches.empty(unit, own, (), None) == ("/home/alex/.cache/mine",)
        assert box.sh(("ls", "-A", "/home/alex/.cache/mine")).stdout == ""
        transport.close()
        box.reboot(cut=True)
        said = lambda: box.sh(("journalctl", "-q", "-b", "-o", "cat", "_SYSTEMD_USER_UNIT=mine.service")).stdout  # noqa: E731
        await_true(lambda: said().strip() != "", 90, "production")
        assert said().splitlines() == ["/home/alex/.cache/mine/graphs"], "it started over cleared caches"
        assert box.sh(("ls", "-A", "/home/alex/.cache/mine")).stdout.split() == ["graphs"]
        left = box.sh(("sh", "-c", f"find {folder} /home/alex/.cache/mine* -name '*coldboot*'"), check=False).stdout
        assert left == ""
    finally:
        transport.close()
        box.sh(("loginctl", "disable-linger", "alex"))
        box.sh(("rm", "-rf", "/home/alex/.cache/mine", folder))
