"""`cache: clear` by coldboot-box: production is another user's, and the login has one line of sudoers and no more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import await_true
from nspawn import Box
from test_clear_box import GUARD, OURS, SMALL, STATE, UNIT, UNIT_TEXT, Stage, serves

from orchestrator.box import coldboot_box
from orchestrator.box.commands import HELPER

CONF = f"/etc/coldboot-box/{UNIT}.conf"
OWN = (
    *("/home/svc/.cache/vllm", "/tmp/torchinductor_svc", "/home/svc/.cache/torch_extensions"),
    *("/home/svc/.triton/cache", "/home/svc/.cache/flashinfer", "/home/svc/.tilelang/cache"),
    *("/tmp/svc/cutlass_python_cache", f"{SMALL}/nv"),
)
AT = Path("etc/systemd/system")


class Helped(Stage):
    """The same with production as another user, and the helper installed by the script that a user runs."""

    def argv(self, task: str, *words: str, out: str = "artifacts") -> tuple[str, ...]:
        argv = super().argv(task, *words, out=out)
        return argv if task != "box-helper" else argv[: argv.index("--out")]

    def caches(self) -> list[str]:
        return self.box.sh(("sh", "-c", STATE.replace("/alex/", "/svc/"))).stdout.splitlines()

    def ours(self) -> list[str]:
        return self.box.sh(("sh", "-c", OURS.replace("/alex", "/svc")), check=False).stdout.splitlines()

    def call(self, *words: str, feed: str = "", uid: int = 1000) -> tuple[int, str]:
        """The helper as sudo starts it for the login."""
        done = self.box.sh(("env", f"SUDO_UID={uid}", HELPER, UNIT, *words), check=False, feed=feed)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def furnished(box: Box) -> Iterator[Box]:
    box.sh(("sh", "-c", "id svc 2>/dev/null || useradd -m svc"))
    box.write_unit(UNIT, UNIT_TEXT.replace("User=alex", "User=svc"))
    box.sh(("systemctl", "enable", UNIT))
    # From its third start on an engine writes nothing any more.
    for _ in range(3):
        box.sh(("systemctl", "restart", UNIT))
        await_true(serves, 60, "production")
    yield box
    box.sh(("systemctl", "disable", UNIT), check=False)
    box.remove_unit(UNIT)
    mess = ("/home/svc/.cache", "/home/svc/.triton", SMALL, HELPER, coldboot_box.CONFIG)
    box.sh(("sh", "-c", f"rm -rf {' '.join(mess)} /etc/sudoers.d/coldboot-box-alex"))


@pytest.fixture
def stage(furnished: Box, tmp_path: Path) -> Iterator[Helped]:
    box = furnished
    box.sh(("sh", "-c", f"install -d -o svc {SMALL}; rm -f {CONF}"))
    await_true(serves, 60, "production")
    box.sh(
        ("runuser", "-u", "svc", "--", "sh", "-c", "cd ~/.cache/vllm && echo x >odd && chmod 0604 odd; chmod 2750 .")
    )
    made = Helped(box, tmp_path)
    printed = made.run("box-helper")
    assert printed.returncode == 0, printed.stderr
    box.sh(("sh", "-s"), feed=printed.stdout)
    yield made
    if made.ours():
        made.run("restore")
        box.sh(("sh", "-c", f"rm -rf /etc/systemd/system/*/{GUARD} /etc/systemd/system/{GUARD}"), check=False)
        box.sh(("systemctl", "daemon-reload"))


def test_a_whole_campaign_clears_and_gives_back_with_the_helpers_line_of_sudoers_alone(stage):
    conf = (stage.box.root / CONF[1:]).read_text().splitlines()
    assert [line for line in conf if line.startswith("clear ")] == [f"clear {path}" for path in OWN]
    planned = stage.run("plan")
    for what in ("guard", "empty", "back"):
        assert f"sudo {HELPER} {UNIT} clear {what}" in planned.stdout
    assert "sudo tee" not in planned.stdout
    assert "sudo -u svc" not in planned.stdout
    done = stage.run("matrix", "--boots", "2", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    ended = [record for record in stage.records() if record["kind"] == "boot_ended"]
    assert [(each["boot_outcome"], each["cache"], each["cache_proof"]) for each in ended] == [
        ("completed", "clear", "compiled"),
        ("completed", "clear", "compiled"),
    ]
    stage.all_is_back()
    log = stage.box.sh(("journalctl", "-q", "-b", "-o", "cat", "-t", "sudo")).stdout
    ran = set(re.findall(r"alex : .*COMMAND=(.*)", log))
    assert {f"{HELPER} {UNIT} clear {what}" for what in ("check", "guard", "empty", "free", "left", "back")} <= ran
    assert [command for command in ran if not command.startswith(HELPER)] == []


def test_after_a_power_cut_they_are_back_before_production_starts_and_restore_finds_nothing_to_do(stage):
    stage.killed_at("trials")
    assert stage.caches() != stage.before
    assert stage.box.sh(("systemctl", "is-enabled", GUARD)).stdout.strip() == "enabled"
    stage.box.reboot(cut=True)
    stage.all_is_back()
    said = stage.since_boot(GUARD)
    back = next(at for at, text in said if text == "/home/svc/.cache/vllm is back")
    put = next(at for at, text in said if text.startswith("Finished "))
    begun = next(at for at, text in stage.since_boot(UNIT) if text.startswith("Started"))
    assert back < put < begun
    for _twice in range(2):
        done = stage.run("restore")
        assert done.returncode == 0, done.stderr
        stage.all_is_back()


def test_restore_puts_them_back_after_a_kill(stage):
    stage.killed_at("trials")
    assert stage.caches() != stage.before
    done = stage.run("restore")
    assert done.returncode == 0, done.stderr
    stage.all_is_back()


def test_the_box_puts_them_back_by_itself(stage):
    stage.write(dead_man_s=3)
    stage.killed_at("trials")
    await_true(lambda: stage.ours() == [], 60, "the dead man's end")
    stage.all_is_back()


def test_a_cache_that_root_has_not_named_is_refused_before_anything_is_done_and_the_printed_line_mends_it(stage):
    conf = stage.box.root / CONF[1:]
    kept = [line for line in conf.read_text().splitlines() if "triton" not in line and "nv" not in line]
    conf.write_text("\n".join(kept) + "\n")
    mend = f"printf 'clear %s\\n' /home/svc/.triton/cache {SMALL}/nv | sudo tee -a {CONF}"
    line = (stage.folder / "matrix.yaml").read_text().splitlines().index("cache: clear") + 1
    for task in ("plan", "matrix"):
        done = stage.run(task, *(("--yes",) if task == "matrix" else ()))
        assert done.returncode == 4, done.stderr
        assert f"matrix.yaml:{line}: cache: clear: coldboot-box does not allow {UNIT}'s own caches" in done.stderr
        assert mend in done.stderr
    assert mend in stage.run("doctor").stdout
    stage.all_is_back()
    stage.box.sh(("sh", "-c", mend))
    assert stage.run("plan").returncode == 0
    found = stage.run("doctor").stdout
    assert "sets them aside for each boot, and puts them back" in found
    assert "leaves them alone" not in found


def test_a_cache_behind_a_link_is_refused_with_the_link_and_the_line_that_mends_it_and_then_cleared(stage):
    box, conf = stage.box, stage.box.root / CONF[1:]
    box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && mv .triton real && ln -s real .triton"))
    before = conf.read_text()
    try:
        line = (stage.folder / "matrix.yaml").read_text().splitlines().index("cache: clear") + 1
        asked, real = "/home/svc/.triton/cache", "/home/svc/real/cache"
        mend = f"printf 'clear %s\\n' {real} | sudo tee -a {CONF}"
        why = f"{asked} is {real}, as /home/svc/.triton is a link, and coldboot-box follows none: root names {real} too"
        for task in ("plan", "matrix"):
            done = stage.run(task, *(("--yes",) if task == "matrix" else ()))
            assert done.returncode == 4, done.stderr
            assert f"matrix.yaml:{line}: cache: clear: {why}: {mend}" in done.stderr
        checks = json.loads(stage.run("doctor", "--json").stdout)["checks"]
        assert [each["level"] for each in checks if why in each["said"]] == ["fail"]
        stage.all_is_back()
        box.sh(("sh", "-c", mend))
        done = stage.run("matrix", "--boots", "1", "--yes")
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"{real} " in done.stderr
        ended = [record for record in stage.records() if record["kind"] == "boot_ended"]
        assert [(each["boot_outcome"], each["cache_proof"]) for each in ended] == [("completed", "compiled")]
        stage.all_is_back()
    finally:
        box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && rm .triton && mv real .triton"))
        conf.write_text(before)


def test_what_root_has_not_named_links_and_other_callers_are_refused_and_leave_nothing(stage):
    own = f"own={OWN[0]}\n"
    for what in ("guard", "check", "empty", "left", "free"):
        for feed in ("own=/etc/ssh\n", "own=/home/svc\n", f"own={OWN[0]}/..\n", f"{own}own=/tmp/x\n", "", "x=y\n"):
            status, said = stage.call("clear", what, feed=feed)
            assert (status, "refused: clear: " in said) == (3, True), (what, feed, said)
        assert stage.call("clear", what, feed=own, uid=33)[0] == 3
        assert stage.call("clear", what, "x", feed=own)[0] == 4
    assert stage.call("clear", "back", uid=33)[0] == 3
    # Without the unit that puts back nothing is set aside.
    assert stage.call("clear", "empty", feed=own)[0] == 9
    box = stage.box
    box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && mv .cache real && ln -s real .cache"))
    try:
        assert stage.call("clear", "guard", feed=own)[0] == 0
        status, said = stage.call("clear", "empty", feed=own)
        assert (status, "'.cache' on the way" in said) == (3, True), said
    finally:
        box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && rm .cache && mv real .cache"))
    assert stage.call("clear", "back") == (0, "")
    stage.all_is_back()


def test_the_unit_that_puts_back_keeps_what_it_lists_and_one_that_is_not_ours_is_left(stage):
    path = stage.box.root / AT / GUARD
    assert stage.call("clear", "guard", feed=f"own={OWN[0]}\n")[0] == 0
    assert stage.call("clear", "guard", feed=f"own={OWN[-1]}\n")[0] == 0
    text = path.read_text()
    assert coldboot_box.listed_in(text) == (OWN[0], OWN[-1])
    assert "User=svc\n" in text
    path.write_text(text.replace("User=svc", "User=root"))
    status, said = stage.call("clear", "guard", feed=f"own={OWN[0]}\n")
    assert (status, "is not as it is written here" in said) == (3, True)
    path.write_text(text)
    assert stage.call("clear", "back")[0] == 0
    stage.all_is_back()
