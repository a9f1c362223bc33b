"""The GPUs during a window: lines of nvidia-smi in, a summary out; and a real process that is watched and ended."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.box import gpuwatch
from orchestrator.box.transports import LocalTransport
from orchestrator.records import GpuUse

DATA = Path(__file__).parent / "data" / "facts"

# --- pure ------------------------------------------------------------------------------------------------------------


def line(index=0, *, utilisation="98", clock="1980", power="436.31", heat="47", reasons="0x0000000000000000"):
    return f"2026/11/30 17:52:13.123, {index}, {utilisation}, 73051, {clock}, 3201, {power}, 700.00, {heat}, {reasons}"


def use(*lines, step_s=0.5):
    samples = [gpuwatch.parse_line(n * step_s, text) for n, text in enumerate(lines)]
    return gpuwatch.summarise((one for one in samples if one is not None), 0.0, 1e9)


def test_a_window_of_four_samples_has_means_extremes_and_the_share_of_each_reason():
    (gpu,) = use(
        line(),
        line(utilisation="100", clock="1965", power="690.69", heat="53", reasons="0x0000000000000004"),
        line(utilisation="96", clock="1890", power="700.00", heat="55", reasons="0x0000000000000004"),
        line(utilisation="100", clock="1980", power="400.00", heat="50"),
    )
    assert gpu == GpuUse(
        index=0,
        samples=4,
        utilisation_mean_percent=98.5,
        memory_used_max_mib=73051,
        sm_clock_min_mhz=1890,
        sm_clock_mean_mhz=1953.75,
        memory_clock_mhz=3201,
        power_mean_w=556.75,
        power_limit_w=700,
        temperature_max_c=55,
        throttle={"sw_power_cap": 0.5},
    )


def test_only_what_arrived_between_the_two_reads_is_of_the_window():
    samples = [gpuwatch.parse_line(at_s, line(utilisation=str(n))) for n, at_s in enumerate((9.9, 10.0, 14.9, 15.1))]
    (gpu,) = gpuwatch.summarise(samples, 10.0, 15.0)
    assert (gpu.samples, gpu.utilisation_mean_percent) == (2, 1.5)
    assert gpuwatch.summarise(samples, 20.0, 30.0) == ()


def test_each_gpu_of_a_box_has_a_summary_of_its_own():
    two = use(line(0, heat="40"), line(1, heat="61"), line(0, heat="41"), line(1, heat="60"))
    assert [(gpu.index, gpu.samples, gpu.temperature_max_c) for gpu in two] == [(0, 2, 41), (1, 2, 61)]


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "N/A", "[Unknown Error]", "ERR!", "[GPU requires reset]"])
def test_what_a_gpu_does_not_tell_is_none_and_never_0(word):
    mute = f"2026/11/30 17:52:13.123, 0, {', '.join([word] * 7)}, {word}"
    (gpu,) = use(mute, mute)
    assert gpu == GpuUse(index=0, samples=2)


@pytest.mark.parametrize(
    "text",
    ["", 'Field "clocks_event_reasons.active" is not a valid field to query.', "No devices were found", line()[:60]],
)
def test_a_line_that_is_no_sample_is_none(text):
    assert gpuwatch.parse_line(0.0, text) is None


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (0x08, "hw_slowdown"),
        (0x20, "sw_thermal_slowdown"),
        (0x40, "hw_thermal_slowdown"),
        (0x80, "hw_power_brake_slowdown"),
    ],
)
def test_heat_and_hardware_disturb_a_window_and_one_sample_of_four_is_enough(mask, name):
    told = gpuwatch.disturbances(use(line(), line(reasons=f"{mask:#018x}", heat="91"), line(), line()))
    assert told == (f"throttled: GPU 0 {name} in 25 % of 4 samples, 91 °C at most: cool it, or lower its power limit",)


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100])
def test_idleness_a_power_limit_and_a_clock_that_somebody_set_disturb_nothing(mask):
    assert gpuwatch.disturbances(use(line(reasons=f"{mask:#018x}"))) == ()


def test_a_power_limit_that_was_reached_is_said():
    told = gpuwatch.remarks(use(line(), line(reasons="0x0000000000000004"), line(reasons="0x4"), line()))
    assert told == ("GPU 0 was at its power limit of 700 W: sw_power_cap in 50 % of 4 samples",)
    assert gpuwatch.remarks(use(line())) == ()


def test_a_second_gpu_that_does_nothing_may_be_hot_without_disturbing_anybody():
    hot = "0x0000000000000040"
    assert gpuwatch.disturbances(use(line(0), line(1, utilisation="0", reasons=hot))) == ()
    assert gpuwatch.disturbances(use(line(0), line(1, utilisation="1", reasons=hot))) != ()
    assert gpuwatch.disturbances(use(line(0), line(1, utilisation="[N/A]", reasons=hot))) != ()


# --- as a real H200 told it ------------------------------------------------------------------------------------------


def captured(name):
    """(arrival, line) of a kept watch."""
    _, *rows = (DATA / name).read_text().splitlines()
    return [(float(at), text) for at, _, text in (row.partition(", ") for row in rows)]


def told(name):
    samples = [gpuwatch.parse_line(at, text) for at, text in captured(name)]
    return [sample for sample in samples if sample is not None]


def test_a_serving_engine_is_sampled_twice_a_second_and_was_at_its_power_limit_for_one_sample_of_warming_up():
    samples = told("h200_load.gpus.csv")
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(samples)]
    assert len(samples) == len(captured("h200_load.gpus.csv")) == 31
    assert 0.49 < min(gaps) <= max(gaps) < 0.52
    assert [sample.throttle for sample in samples].count(("sw_power_cap",)) == 1
    assert {sample.used_mib for sample in samples} == {73055}


def test_a_load_that_needs_more_power_than_the_limit_runs_at_three_quarters_of_the_clock_and_is_no_disturbance():
    samples = told("h200_power_cap.gpus.csv")
    (gpu,) = gpuwatch.summarise(samples, 0.0, 1e12)
    assert (gpu.samples, gpu.sm_clock_min_mhz, gpu.power_limit_w) == (15, 1440, 700)
    assert gpu.throttle == {"sw_power_cap": 0.9333}
    assert gpuwatch.disturbances((gpu,)) == ()
    assert gpuwatch.remarks((gpu,)) == ("GPU 0 was at its power limit of 700 W: sw_power_cap in 93 % of 15 samples",)


def test_a_driver_that_does_not_know_a_field_says_so_in_two_lines_that_are_no_samples():
    assert len(captured("h200_unknown_field.gpus.csv")) - len(told("h200_unknown_field.gpus.csv")) == 2
    assert all(sample.throttle == ("gpu_idle",) for sample in told("h200_unknown_field.gpus.csv"))


# --- a real process --------------------------------------------------------------------------------------------------

LOST = "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error"
NVIDIA_SMI = """#!/bin/sh
# Answers as nvidia-smi did, ten times as fast; or as a driver that does not know a field.
echo $$ >> {folder}/pids
case "$*" in
    *{unknown}*) echo 'Field "{unknown}.active" is not a valid field to query.'; echo; exit 2;;
esac
n=0
while [ $n -lt {lines} ]; do
    while read -r line; do
        echo "$line"
        n=$((n + 1))
        [ $n -lt {lines} ] || break
        sleep 0.05
    done < {folder}/lines
done
echo '{lost}'
exit 15
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi of ours in front of the path; returns the process ids that it ran under."""

    def put(*, lines=1000, unknown="nothing"):
        program = tmp_path / "nvidia-smi"
        program.write_text(NVIDIA_SMI.format(folder=tmp_path, lines=lines, unknown=unknown, lost=LOST))
        (tmp_path / "lines").write_text("".join(f"{text}\n" for _, text in captured("h200_load.gpus.csv")))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return lambda: [int(pid) for pid in (tmp_path / "pids").read_text().split()]

    return put


@pytest.fixture
def here():
    transport = LocalTransport()
    yield transport
    transport.close()


def until(true, deadline_s=10.0):
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("unknown", "asked"), [("nothing", 1), ("clocks_event_reasons", 2)])
def test_a_new_driver_and_an_old_one_are_watched_and_nothing_is_left_running(here, smi, unknown, asked):
    pids = smi(unknown=unknown)
    begun = time.monotonic()
    with gpuwatch.GpuWatch(here) as watch:
        until(lambda: len(watch.samples()) >= 3)
        assert any(runs(pid) for pid in pids())
    assert len(pids()) == asked
    until(lambda: not any(runs(pid) for pid in pids()))
    (gpu,), problem = watch.use(begun, time.monotonic())
    assert (gpu.samples, gpu.memory_used_max_mib, problem) == (len(watch.samples()), 73055, None)
    head, *rows = watch.raw().splitlines()
    assert head.startswith("arrived_at,timestamp,index,utilization.gpu,")
    assert rows[-1].partition(", ")[2] == captured("h200_load.gpus.csv")[gpu.samples - 1][1]


def test_a_gpu_that_is_lost_meanwhile_is_a_warning_with_what_nvidia_smi_said(here, smi):
    smi(lines=1)
    with gpuwatch.GpuWatch(here) as watch:
        until(lambda: watch.use(0.0, 0.0)[1].count("status 15"))
    assert watch.use(0.0, 0.0) == (
        None,
        f"the GPUs were not watched: nvidia-smi ended with status 15: {LOST}",
    )


def test_a_closed_way_to_the_box_is_a_warning_and_no_failure(smi):
    smi()
    transport = LocalTransport()
    with gpuwatch.GpuWatch(transport) as watch:
        until(watch.samples)
        transport.close()
    assert watch.use(1e9, 2e9)[0] is None
    assert watch.use(1e9, 2e9)[1].startswith("the GPUs were not watched: nvidia-smi gave ")


WATCHER = """
import sys, time
from orchestrator.box.gpuwatch import GpuWatch
from orchestrator.box.transports import LocalTransport
with GpuWatch(LocalTransport()) as watch:
    while not watch.samples():
        time.sleep(0.01)
    print("watching", flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_running_when_we_are_killed(smi):
    pids = smi()
    with subprocess.Popen([sys.executable, "-c", WATCHER], stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout.readline() == "watching\n"
        assert all(runs(pid) for pid in pids())
        os.kill(watcher.pid, signal.SIGKILL)
        watcher.wait(10)
    until(lambda: not any(runs(pid) for pid in pids()))
