"""One boot on a real engine process: the order of its steps, and each way in which it can end."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rehearsal_engine import QUICK

from orchestrator.boot import cycle
from orchestrator.box.engines import ENGINES, Launch
from orchestrator.box.services import Service, make_service
from orchestrator.box.transports import Transport, connect
from orchestrator.errors import CommandFailed, ProblemsError
from orchestrator.interrupts import Interrupts
from orchestrator.life import GpuIdle, Rig, Way
from orchestrator.matrix import BoxSpec, Deadlines, LoadSpec, Variant
from orchestrator.plan import PlannedBoot
from orchestrator.promptfile import PromptFile, parse_prompts
from orchestrator.records import AnyRecord, BootEnded, JournalAnswered, StepEnded, TrialEnded
from orchestrator.survey import compose, isolated_port

ROOT = Path(__file__).parent.parent
LOAD = LoadSpec(
    window_s=0.15,
    warmup_s=0,
    max_warmup_s=0.5,
    input_tokens=16,
    output_tokens=8,
    sanity_tokens=2,
    headroom_tokens=2,
    request_timeout_s=10,
)
DEADLINES = Deadlines(
    clean_slate_s=2, ready_s=20, first_request_s=20, headroom_s=20, sanity_s=20, trial_s=20, stop_s=5, command_s=10
)
MEASURED = ["clean_slate", "cold", "render", "start", "ready", "first_request", "headroom", "sanity", "trials", "stop"]


@dataclass
class Bench:
    """A rehearsal box of a test's own, and what happens at which record."""

    folder: Path
    transport: Transport
    spec: BoxSpec
    service: Service
    port: int
    interrupts: Interrupts = field(default_factory=Interrupts)
    deadlines: Deadlines = DEADLINES
    load: LoadSpec = LOAD
    levels: tuple[int, ...] = (1, 2)
    idle: GpuIdle = field(default_factory=GpuIdle)
    way: Way = field(default_factory=Way)
    temperature_c: int | None = None
    prompts: PromptFile | None = None
    seen: list[AnyRecord] = field(default_factory=list)
    stranger: subprocess.Popen[bytes] | None = None

    def launch(self, tokens: int, **flags: Any) -> Launch:
        unit = self.service.describe()
        composed = compose(self.spec, unit.argv, Variant(name="v", set={"spec-tokens": tokens, **flags}), self.port)
        assert isinstance(composed, Launch)
        own = ENGINES["rehearsal"].own_env(state=str(self.folder / "state"), time_scale=0.002)
        personality = {"COLDBOOT_REHEARSAL_PERSONALITY": str(self.folder / "personality.toml")}
        return replace(composed, env=own | personality | composed.env)

    def boot(self, launch: Launch, at: Callable[[AnyRecord], None] = lambda _record: None, name: str = "b01-v") -> None:
        rig = Rig(
            transport=self.transport,
            service=self.service,
            engine=ENGINES["rehearsal"],
            unit=self.service.describe(),
            experiment="test",
            load=self.load,
            deadlines=self.deadlines,
            concurrency=self.levels,
            headroom=True,
            seed=1,
            boot_folder=self.boot_folder,
            interrupts=self.interrupts,
            cache_root=str(self.folder / "caches" / "here"),
            idle=self.idle,
            way=self.way,
            temperature_c=self.temperature_c,
            prompts=self.prompts,
        )
        planned = PlannedBoot(boot=name, variant="v", cache="cold", block=1, position=1)
        for record in cycle(planned, launch, rig):
            self.seen.append(record)
            at(record)

    def boot_folder(self, boot: str) -> Path:
        folder = self.folder / "boots" / boot
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def steps(self) -> list[str]:
        return [record.name for record in self.seen if isinstance(record, StepEnded)]

    @property
    def end(self) -> BootEnded:
        end = self.seen[-1]
        assert isinstance(end, BootEnded)
        return end

    def step(self, name: str) -> StepEnded:
        return next(record for record in self.seen if isinstance(record, StepEnded) and record.name == name)

    @property
    def trials(self) -> list[TrialEnded]:
        return [record for record in self.seen if isinstance(record, TrialEnded)]

    def engine_core(self) -> int:
        """The process id of the EngineCore: the child of the one that serves."""
        main = self.service.state().main_pid
        return next(pid for pid in self.service.pids() if pid != main and _parent(pid) == main)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def at_step(name: str, what: Callable[[], None]) -> Callable[[AnyRecord], None]:
    def look(record: AnyRecord) -> None:
        if isinstance(record, StepEnded) and record.name == name:
            what()

    return look


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    spec = BoxSpec(
        name="rehearsal",
        transport="local",
        service="process",
        engine="rehearsal",
        unit_file=ROOT / "examples" / "vllm-qwen.service",
    )
    transport = connect(spec)
    (tmp_path / "personality.toml").write_text(QUICK)
    made = Bench(
        tmp_path, transport, spec, make_service(transport, spec, tmp_path / "box"), isolated_port(transport, spec)
    )
    yield made
    made.service.stop(kill=True, deadline_s=5)
    transport.close()


def on_time(bench) -> list[TrialEnded]:
    """The trials but those, repeated, in which a busy machine made our client late, as it does at 20 ms a request."""
    return [trial for trial in bench.trials if not any("client_late" in reason for reason in trial.invalid_reasons)]


def test_a_good_boot_takes_its_steps_in_order_and_leaves_nothing(bench):
    bench.boot(bench.launch(1))
    assert bench.steps == MEASURED
    assert (bench.end.boot_outcome, bench.end.died, bench.end.step) == ("completed", False, None)
    assert bench.end.cache_proof == "compiled"
    assert [(trial.concurrency, trial.valid, trial.failed) for trial in on_time(bench)] == [
        (1, True, False),
        (2, True, False),
    ]
    assert all(trial.client_tokens == trial.whole.generation_tokens for trial in bench.trials)
    assert bench.service.pids() == ()
    assert not [
        path for path in (bench.folder / "caches").rglob("*") if path.is_file() and "torch_compile" in str(path)
    ]
    kept = {path.name for path in (bench.folder / "boots" / "b01-v").iterdir()}
    assert {"journal.jsonl", "requests-c1.jsonl", "requests-c2.jsonl", "metrics-c1.jsonl"} <= kept


def test_the_tokenizer_is_asked_once_a_boot_and_prompts_are_exact_in_every_trial(bench):
    bench.load = LOAD.model_copy(update={"input_tokens": 64})
    bench.boot(bench.launch(1))
    found = bench.step("first_request").facts["prompts"]
    assert (found["lengths"], found["max_model_len"]) == ("exact", 98304)
    folder = bench.boot_folder("b01-v")
    rows = [
        orjson.loads(line)
        for level in (1, 2)
        for line in (folder / f"requests-c{level}.jsonl").read_bytes().splitlines()
    ]
    assert {row["prompt_tokens"] for row in rows} == {64}


def own_prompts(bench, *prompts: str) -> None:
    raw = "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()
    bench.prompts = parse_prompts(raw, Path("mine.jsonl"))
    bench.load = LOAD.model_copy(update={"prompts": "mine.jsonl"})


def test_the_users_own_prompts_are_shared_by_all_levels_of_a_boot_and_hit_no_prefix_cache(bench):
    own_prompts(bench, *(f"What is {number} plus {number + 1}, and why do you think so?" for number in range(300)))
    bench.boot(bench.launch(1))
    assert all(trial.valid for trial in on_time(bench))
    assert {trial.concurrency for trial in bench.trials} == {1, 2}
    assert all(trial.deltas.prefix_cache_hits in (None, 0.0) for trial in bench.trials)
    assert not any("of the file again" in warning for trial in bench.trials for warning in trial.warnings)


def test_prompts_of_the_user_that_do_not_fit_end_the_campaign_before_a_trial_and_are_named_by_their_lines(bench):
    own_prompts(bench, "fits", "a b c " * 200, "so does this", "x" * 2400)
    with pytest.raises(ProblemsError) as caught:
        bench.boot(bench.launch(1, **{"max-model-len": 512}))
    assert [problem.partition(";")[0] for problem in caught.value.problems] == [
        "mine.jsonl:2: 630 tokens, too long: at most 504 fit v's 512 (max_model_len) with their answers",
        "mine.jsonl:4: 630 tokens, too long: at most 504 fit v's 512 (max_model_len) with their answers",
    ]
    assert (bench.end.boot_outcome, bench.end.step, bench.end.died) == ("aborted", "first_request", False)
    assert bench.steps[-2:] == ["first_request", "stop"]
    assert bench.trials == []
    assert bench.service.pids() == ()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": "other"}, "our request was refused: http_404: The model `other` does not exist."),
        ({"api_key": "wrong"}, "our request was refused: http_401: Unauthorized"),
    ],
)
def test_a_server_that_refuses_our_model_or_key_disturbs_the_boot_at_once_and_blames_no_variant(bench, wrong, why):
    launch = bench.launch(1, **({"api-key": "right"} if "api_key" in wrong else {}))
    bench.boot(replace(launch, **wrong))
    assert (bench.end.boot_outcome, bench.end.step, bench.end.died) == ("disturbed", "first_request", False)
    assert bench.end.why == why
    assert bench.step("first_request").seconds < 10


def test_each_concurrency_is_measured_at_each_prompt_length_and_longer_prompts_are_slower(bench):
    bench.load = LOAD.model_copy(update={"input_tokens": (16, 4000)})
    bench.boot(bench.launch(1))
    assert (bench.end.boot_outcome, bench.step("headroom").facts["prompt_tokens"]) == ("completed", 4000)
    good = on_time(bench)
    assert [(trial.concurrency, trial.input_tokens) for trial in good] == [(1, 16), (2, 16), (1, 4000), (2, 4000)]
    short, long = ([trial.tokens_per_s for trial in good if trial.input_tokens == n] for n in (16, 4000))
    assert all(slow < fast for slow, fast in zip(long, short, strict=True))
    rows = (bench.boot_folder("b01-v") / "requests-c2@4000.jsonl").read_bytes().splitlines()
    told = {orjson.loads(row)["prompt_tokens"] for row in rows} - {None}
    assert told
    assert all(abs(tokens - 4000) <= 40 for tokens in told)


def test_a_length_that_the_engine_has_no_room_for_is_told_and_the_others_are_measured(bench):
    bench.load = LOAD.model_copy(update={"input_tokens": (16, 98300)})
    bench.levels = (1,)
    bench.boot(bench.launch(1))
    assert bench.end.boot_outcome == "completed"
    short, long = bench.trials[-2:]
    assert (short.valid, short.input_tokens, long.valid, long.failed) == (True, 16, False, False)
    assert long.invalid_reasons == (
        "too_long: 98300 tokens in and 8 out do not fit into the engine's context of 98304",
    )


def test_several_windows_of_a_level_are_trials_of_their_own_with_prompts_of_their_own(bench):
    bench.load = LOAD.model_copy(update={"windows": 2})
    bench.levels = (1,)
    bench.boot(bench.launch(1))
    assert [trial.concurrency for trial in bench.trials if trial.valid] == [1, 1]
    assert all(trial.deltas.prefix_cache_hits in (None, 0.0) for trial in bench.trials)
    kept = {path.name for path in bench.boot_folder("b01-v").rglob("*c1*")}
    assert {name.split(".")[0] for name in kept} == {"requests-c1", "metrics-c1"}
    assert any(".r1" in name for name in kept)


def test_a_second_boot_is_cold_again_because_its_caches_are_its_own(bench):
    bench.levels = (1,)
    bench.boot(bench.launch(1))
    bench.boot(bench.launch(1), name="b02-v")
    assert [record.cache_proof for record in bench.seen if isinstance(record, BootEnded)] == ["compiled", "compiled"]


def test_death_at_the_first_request_ends_the_boot_at_once_with_its_cause(bench):
    bench.boot(bench.launch(3))
    assert bench.steps == ["clean_slate", "cold", "render", "start", "ready", "first_request", "stop"]
    assert (bench.end.boot_outcome, bench.end.died, bench.end.step) == ("crashed", True, "first_request")
    assert bench.end.why == "triton_oom in first_request: RuntimeError: Triton Error [CUDA]: out of memory"
    answer = next(record.answer for record in bench.seen if isinstance(record, JournalAnswered))
    assert (answer.outcome, answer.phase, answer.cause) == ("fatal", "first_request", "triton_oom")
    assert bench.step("first_request").facts["noticed_after_s"] < 0.5
    assert bench.step("stop").facts["polite"] is False
    assert bench.service.pids() == ()


def test_an_engine_that_fails_to_start_is_told_at_once_and_not_at_the_deadline(bench):
    bench.boot(bench.launch(1, **{"gpu-memory-utilization": 0.99}))
    assert bench.end.boot_outcome == "crashed"
    assert bench.end.step == "ready"
    assert bench.step("ready").seconds < DEADLINES.ready_s / 2
    answer = next(record.answer for record in bench.seen if isinstance(record, JournalAnswered))
    assert answer.outcome == "startup_failure"


def test_a_flag_that_the_engine_does_not_know_is_its_own_cause(bench):
    bench.boot(bench.launch(1, **{"no-such-flag": 7}))
    assert bench.end.boot_outcome == "crashed"
    assert bench.end.why.startswith("cli_bad_flag in config")


def test_not_ready_by_the_deadline_is_not_a_crash(bench):
    bench.deadlines = DEADLINES.model_copy(update={"ready_s": 0.2})
    slow = bench.launch(1)
    bench.boot(replace(slow, env=slow.env | {"COLDBOOT_REHEARSAL_TIME_SCALE": "0.5"}))
    assert (bench.end.boot_outcome, bench.end.died, bench.end.step) == ("not_ready", False, "ready")
    assert "0.2 s" in bench.end.why
    assert bench.service.pids() == ()


def test_an_engine_core_that_is_killed_during_the_trials_is_a_crash_although_the_server_exits_0(bench):
    bench.levels = (1, 2, 4)

    def kill(record: AnyRecord) -> None:
        if isinstance(record, TrialEnded) and record.concurrency == 1:
            os.kill(bench.engine_core(), signal.SIGKILL)

    bench.boot(bench.launch(1), kill)
    assert (bench.end.boot_outcome, bench.end.died, bench.end.step) == ("crashed", True, "trials")
    assert bench.trials[0].failed is False
    assert bench.trials[-1].failed is True
    answer = next(record.answer for record in bench.seen if isinstance(record, JournalAnswered))
    assert answer.outcome == "fatal"
    assert answer.cause in ("engine_dead_no_root", "sigkill_unattributed")


def test_a_500_from_a_living_engine_is_recorded_and_the_other_levels_go_on(bench):
    bench.levels = (1, 8)
    bench.boot(bench.launch(5))
    assert bench.end.boot_outcome == "completed"
    assert [(trial.concurrency, trial.failed) for trial in bench.trials] == [(1, False), (8, True)]
    assert bench.trials[1].errors.keys() == {"http_500"}
    assert bench.trials[1].tokens_per_s is None


def test_a_wish_to_stop_ends_the_boot_as_aborted_and_kills_what_runs(bench):
    bench.boot(bench.launch(1), at_step("first_request", lambda: bench.interrupts.wish("asked to")))
    assert (bench.end.boot_outcome, bench.end.died) == ("aborted", False)
    assert bench.end.why == "asked to"
    assert "trials" not in bench.steps
    assert bench.steps[-1] == "stop"
    assert bench.service.pids() == ()


def test_a_taken_port_disturbs_the_boot_and_says_so(bench):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", bench.port))
        stranger.listen()
        bench.boot(bench.launch(1))
    assert bench.steps == ["clean_slate", "stop"]
    assert bench.end.boot_outcome == "disturbed"
    assert f"port {bench.port} is taken" in bench.end.why


def test_what_a_killed_campaign_left_is_ended_before_the_next_boot(bench):
    bench.levels = (1,)
    bench.service.install(bench.launch(1))
    bench.service.start()
    left = bench.service.pids()
    assert left
    bench.boot(bench.launch(1))
    assert bench.end.boot_outcome == "completed"
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


def test_secrets_stay_out_of_the_records_and_the_raw_files(bench):
    bench.levels = (1,)
    bench.boot(bench.launch(1, **{"api-key": "sesame-open"}))
    assert bench.end.boot_outcome == "completed", bench.end.why
    assert not any("sesame-open" in record.model_dump_json() for record in bench.seen)
    assert not [path for path in (bench.folder / "boots").rglob("*.*") if b"sesame-open" in path.read_bytes()]


def test_a_failed_command_is_shown_in_the_record_without_the_key_in_its_arguments(bench, monkeypatch):
    launch = bench.launch(1, **{"api-key": "sesame-open"})

    def start() -> None:
        raise CommandFailed(shlex.join(("env", "HF_TOKEN=open-sesame", *launch.argv)), 1, "no")

    monkeypatch.setattr(bench.service, "start", start)
    bench.boot(launch)
    assert bench.end.boot_outcome == "disturbed"
    assert "--api-key [redacted]" in bench.end.why
    assert not any("sesame" in record.model_dump_json() for record in bench.seen)


def test_raw_files_are_their_owners_alone(bench):
    bench.levels = (1,)
    bench.boot(bench.launch(1))
    kept = [path for path in (bench.folder / "boots").rglob("*") if path.is_file()]
    assert len(kept) >= 3
    assert {oct(path.stat().st_mode & 0o777) for path in kept} == {"0o600"}


def test_a_trial_during_which_the_way_to_the_box_stalled_is_measured_again(bench, monkeypatch):
    bench.levels = (1,)
    stalls = itertools.chain([3.0], itertools.repeat(0.0))
    monkeypatch.setattr(bench.transport, "stalled_s", lambda _since: next(stalls))
    bench.boot(bench.launch(1))
    assert bench.end.boot_outcome == "completed"
    first, last = bench.trials[0], bench.trials[-1]
    assert (first.valid, first.tokens_per_s, first.failed) == (False, None, False)
    assert "the way to the box stalled for 3.0 s" in first.invalid_reasons
    assert (last.valid, last.invalid_reasons) == (True, ())


NVIDIA_SMI = """#!/bin/sh
# One GPU that serves nobody else, and the clock of which is what the test says.
case "$*" in
    *--loop-ms*) while :; do echo '2026/11/30 17:52:13.123, 0, 98, 73051, 1890, 3201, 436.31, 700.00, 84, {reasons}'
        sleep 0.02; done;;
    *query-gpu*) echo '0, GPU-1, 143771, 0, 143156, 1980, 36, 0, 130.87, 0x0000000000000000';;
esac
"""


def with_gpu(bench, monkeypatch, reasons):
    program = bench.folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI.format(reasons=reasons))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    bench.levels = (1,)
    bench.boot(bench.launch(1))


def test_each_trial_tells_what_the_gpus_did_in_its_window_and_a_power_limit_leaves_it_valid(bench, monkeypatch):
    with_gpu(bench, monkeypatch, "0x0000000000000004")
    (trial,) = on_time(bench)
    (gpu,) = trial.gpu
    assert (trial.valid, gpu.index, gpu.memory_used_max_mib, gpu.power_mean_w) == (True, 0, 73051, 436.31)
    assert gpu.throttle == {"sw_power_cap": 1.0}
    assert any(text.startswith("GPU 0 was at its power limit of 700 W") for text in trial.warnings)
    kept = (bench.folder / "boots" / "b01-v" / "gpus-c1.csv").read_text().splitlines()
    assert len(kept) > gpu.samples


def test_a_window_in_which_heat_slows_the_gpu_down_is_measured_again_three_times_and_has_no_value(bench, monkeypatch):
    with_gpu(bench, monkeypatch, "0x0000000000000020")
    assert [(trial.valid, trial.tokens_per_s) for trial in bench.trials] == [(False, None)] * 4
    heat = "throttled: GPU 0 sw_thermal_slowdown in 100 %"
    assert all(any(heat in reason for reason in trial.invalid_reasons) for trial in bench.trials)
    assert bench.end.boot_outcome == "completed"


def test_without_a_gpu_a_trial_says_nothing_of_one(bench):
    bench.levels = (1,)
    bench.boot(bench.launch(1))
    assert [(trial.gpu, trial.valid) for trial in bench.trials] == [(None, True)]
    assert not list((bench.folder / "boots").rglob("gpus-*"))


def test_what_the_way_adds_to_a_request_is_measured_at_the_first_boot_of_a_session_and_stands_in_its_ready_step(
    bench, monkeypatch
):
    bench.levels = (1,)
    measured = iter([0.1234])
    monkeypatch.setattr("orchestrator.box.way.added_ms", lambda *_args: next(measured))
    bench.boot(bench.launch(1))
    bench.boot(bench.launch(1), name="b02-v")
    ready = [record for record in bench.seen if isinstance(record, StepEnded) and record.name == "ready"]
    assert [step.facts.get("forward_ms") for step in ready] == [0.123, None]
