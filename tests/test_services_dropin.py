"""What can be said of a systemd unit without one: the drop-in, the actions in their order, the reading of `cat`."""

from __future__ import annotations

from typing import ClassVar

import pytest

from orchestrator.box import unitfile
from orchestrator.box.engines import Launch
from orchestrator.box.services import SERVICES, make_service
from orchestrator.box.systemd import _properties, _split_cat
from orchestrator.box.transports import LocalTransport, connect
from orchestrator.box.unit import Action, together
from orchestrator.errors import CommandFailed, UsageError
from orchestrator.matrix import BoxSpec

LAUNCH = Launch(("/v/python", "-m", "vllm", "--j", '{"a": "50% $x"}'), {"A": 'b "c"'}, ("HTTP_PROXY",), 1, "m")


@pytest.fixture
def transport():
    door = connect(BoxSpec(name="here", transport="local", service="process"))
    yield door
    door.close()


@pytest.fixture
def service(transport):
    return make_service(transport, BoxSpec(name="g", transport="local", service="systemd", unit="vllm"), None)


def installed(service, launch, **options):
    """What systemd would make of our files on top of a production unit: the merged unit and its environment."""
    files = {action.argv[-1]: action.input for action in service.install_actions(launch, **options) if action.input}
    production = "[Service]\nExecStart=/production\nEnvironment=A=0 B=1\nRestart=always\nTimeoutStopSec=90\n"
    merged = unitfile.parse(production, files[service.drop_in])
    return merged, unitfile.environment(merged, {}, files)


def test_what_is_installed_says_all_that_a_boot_needs_and_reads_back_as_what_was_asked_for(service):
    merged, env = installed(service, LAUNCH, stop_timeout_s=12)
    assert unitfile.exec_argv(merged, {}, env) == LAUNCH.argv
    assert (env["A"], env["B"]) == ('b "c"', "1")
    for key, value in {
        "Restart": "no",
        "KillMode": "control-group",
        "TimeoutStartSec": "infinity",
        "TimeoutStopSec": "12",
        "StandardOutput": "journal",
        "StandardError": "journal",
        "LogRateLimitIntervalSec": "0",
        "UnsetEnvironment": "HTTP_PROXY",
    }.items():
        assert merged.last("Service", key) == value
    assert merged.last("Unit", "StartLimitIntervalSec") == "0"


def test_arguments_that_no_variable_can_hold_stand_in_the_drop_in_itself(service):
    made = Launch(("/v", "bell\x07", "$x", "\udcff"), {}, (), 1, "m")
    merged, env = installed(service, made)
    assert "COLDBOOT_ARGS" not in env
    assert unitfile.exec_argv(merged, {}, env) == made.argv


def test_the_drop_in_sorts_after_the_one_that_systemctl_edit_makes(service):
    assert service.drop_in == "/run/systemd/system/vllm.service.d/zz-coldboot.conf"
    assert service.drop_in.rpartition("/")[2] > "override.conf"


def test_the_order_of_a_boots_effects(service):
    told = [" ".join(action.argv) for action in service.boot_actions(LAUNCH)]
    assert told == [
        "mkdir -p /run/systemd/system/vllm.service.d",
        "tee /run/systemd/system/vllm.service.d/zz-coldboot.conf",
        "install -m 0600 /dev/null /run/systemd/system/vllm.service.d/zz-coldboot.env",
        "tee /run/systemd/system/vllm.service.d/zz-coldboot.env",
        "systemctl daemon-reload",
        "systemctl start --no-block vllm.service",
        "systemctl stop vllm.service",
        "systemctl kill -s KILL vllm.service",
        "systemctl stop vllm.service",
    ]
    shown = service.boot_actions(LAUNCH)[3].text
    assert shown.startswith("sudo tee /run/systemd/system/vllm.service.d/zz-coldboot.env  # what this boot runs\n")
    assert "      | COLDBOOT_ARGS=" in shown


def test_secrets_are_not_shown_but_installed(service):
    made = Launch(("/v", "--api-key", "sk-0123456789abcdef0123"), {"HF_TOKEN": "hf_0123456789abcdef0123"}, (), 1, "m")
    action = service.install_actions(made)[3]
    assert "0123456789abcdef" not in action.text
    assert (action.input or "").count("0123456789abcdef0123") == 2


def test_a_box_without_a_unit_is_told_what_to_write(transport):
    with pytest.raises(UsageError, match="names no unit"):
        SERVICES["systemd"](transport, BoxSpec.model_construct(name="g", unit=None), None)


def test_cat_is_cut_at_the_files_that_systemd_has_loaded_and_not_at_comments_that_look_like_them():
    text = "# Warning: changed on disk\n# /etc/a\n[Service]\n# /etc/b\nA=1\n\n# /run/c.conf\n[Service]\nB=2\n"
    assert _split_cat(text, ("/etc/a", "/run/c.conf")) == {
        "/etc/a": "[Service]\n# /etc/b\nA=1\n\n",
        "/run/c.conf": "[Service]\nB=2\n",
    }


def test_properties_are_read_and_what_is_none_is_left_out():
    assert _properties("A=1\nFailed to connect: x=y\nB=c=d\nE=\n") == {"A": "1", "B": "c=d", "E": ""}


# --- several actions in one round trip -------------------------------------------------------------------------------


def test_actions_run_in_order_and_the_first_failure_names_its_own_command(transport, tmp_path):
    file = tmp_path / "a b"
    actions = (
        Action("made", ("tee", str(file)), input="it's\n$HOME %s\n"),
        Action("no matter", ("rmdir", str(tmp_path / "none")), may_fail=True),
        Action("left out", ("false",), unless=str(file)),
        Action("fails", ("ls", str(tmp_path / "none"))),
        Action("never", ("rm", str(file))),
    )
    with pytest.raises(CommandFailed, match=r"^`ls .*none` ended with status 2") as failed:
        together(transport, actions)
    assert "No such file" in failed.value.tail
    assert "coldboot-failed" not in failed.value.tail
    assert file.read_text() == "it's\n$HOME %s\n"


def test_what_is_given_travels_on_standard_input_as_an_argv_is_seen_by_everybody(tmp_path):
    class Seen(LocalTransport):
        lines: ClassVar[list[tuple[str, ...]]] = []

        def _execute(self, line, data, timeout_s):
            self.lines.append(line)
            return super()._execute(line, data, timeout_s)

    door = Seen()
    together(door, (Action("a", ("tee", str(tmp_path / "f")), input="sk-0123456789"), Action("b", ("cat",))))
    door.close()
    assert (tmp_path / "f").read_text() == "sk-0123456789"
    assert len(door.lines) == 1
    assert "0123456789" not in str(door.lines)


def test_what_several_actions_say_comes_back(transport):
    said = together(transport, (Action("a", ("echo", "1")), Action("b", ("echo", "2"))))
    assert said.stdout == "1\n2\n"
