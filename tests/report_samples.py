"""A whole experiment by hand, shaped like the first one: five variants × three boots × four levels, in tokens.

no-spec and spec-1 are stable, spec-3 dies at its first request, spec-5 collapses and fails at 8, spec-8 has a fast and
a slow mode and fails at 8. One boot was disturbed and repeated, one trial was not valid and measured again.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import verdict
from orchestrator.records import (
    Answer,
    AnyRecord,
    BootEnded,
    BootResult,
    BootStarted,
    CampaignEnded,
    CampaignStarted,
    Deltas,
    Evidence,
    JournalAnswered,
    LevelResult,
    ProductionState,
    Quantiles,
    Rulers,
    Series,
    StepEnded,
    Timeline,
    TrialEnded,
    Verdicts,
)
from orchestrator.report import View, build_view

LEVELS = (1, 2, 4, 8)
VARIANTS = ("no-spec", "spec-1", "spec-3", "spec-5", "spec-8")
TRITON_LINES = (
    "INFO 11-30 16:20:01 [launcher.py:46] Route: /v1/chat/completions, Methods: POST",
    "INFO:     Application startup complete.",
    'INFO:     127.0.0.1:40114 - "GET /health HTTP/1.1" 200 OK',
    "(EngineCore pid=812) ERROR 11-30 16:20:04 [dump_input.py:72] Dumping input data for V1 LLM engine (v0.26.0)",
    "(EngineCore pid=812) ERROR 11-30 16:20:04 [core.py:1332] EngineCore encountered a fatal error.",
    "(EngineCore pid=812) ERROR 11-30 16:20:04 [core.py:1332] Traceback (most recent call last):",
    '(EngineCore pid=812) ERROR 11-30 16:20:04 [core.py:1332]   File "vllm/compilation/cuda_graph.py", line 254',
    "(EngineCore pid=812) ERROR 11-30 16:20:04 [core.py:1332]     return self.runnable(*args, **kwargs)",
    "(EngineCore pid=812) ERROR 11-30 16:20:04 [core.py:1332] RuntimeError: Triton Error [CUDA]: out of memory",
    "(APIServer pid=790) ERROR 11-30 16:20:04 [async_llm.py:701] AsyncLLM output_handler failed.",
    "vllm-qwen.service: Main process exited, code=exited, status=1/FAILURE",
)
TRITON_EVIDENCE = (
    Evidence(entry=4, rule="EngineCoreFatal", text=TRITON_LINES[4]),
    Evidence(entry=8, rule="TritonOom", text=TRITON_LINES[8]),
)
SERVER_ERROR_LINES = (
    'INFO:     127.0.0.1:40200 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "(APIServer pid=790) ERROR 11-30 16:24:09 [serving.py:88] Error in chat completion stream generator.",
    'INFO:     127.0.0.1:40201 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
)
BASE = ("/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--max-num-seqs", "128", "--port", "8080")
TOKENS = {"no-spec": 0, "spec-1": 1, "spec-3": 3, "spec-5": 5, "spec-8": 8}
# What a boot gives at each level; None fails there. spec-8 takes its second row in its second boot.
SPEEDS: dict[str, tuple[tuple[float | None, ...], ...]] = {
    "no-spec": ((52.0, 101.5, 189.0, 333.0),),
    "spec-1": ((107.5, 147.0, 270.5, 340.0),),
    "spec-5": ((63.0, 58.9, 15.3, None),),
    "spec-8": ((178.0, 129.9, 292.7, None), (66.9, 127.9, 92.0, None), (176.1, 131.0, 281.0, None)),
}


def command(variant: str) -> tuple[str, ...]:
    count = TOKENS[variant]
    spec = ("--spec-method", "qwen3_5_mtp", "--spec-tokens", str(count)) if count else ()
    return (*BASE[:-1], "18080", *spec)


@dataclass(frozen=True)
class Sample:
    """Everything that a report is made from."""

    records: tuple[AnyRecord, ...]
    series: Series
    verdicts: Verdicts
    boots_dir: Path | None

    def view(self) -> View:
        return build_view(self.records, self.series, self.verdicts, self.boots_dir)


def sample(folder: Path | None = None, *, boots: int = 3, rehearsal: bool = True) -> Sample:
    """The experiment; with a folder also its journals and plan.json."""
    dice = random.Random(20261130)
    records: list[AnyRecord] = [_started(rehearsal=rehearsal)]
    results: list[BootResult] = []
    position = 0
    order: list[str] = []
    for block in range(1, boots + 1):
        for variant in dice.sample(VARIANTS, len(VARIANTS)):
            position += 1
            name = f"b{block:02d}-{variant}"
            order.append(name)
            if name == "b02-no-spec":
                records += _disturbed(name, variant, block, position)
                name += ".r1"
            made, result = _boot(name, variant, block, position, dice)
            records += made
            results.append(result)
            if folder is not None:
                _journal(folder / name, variant)
    records.append(CampaignEnded(at="2026-11-30T17:02:11.000Z", outcome="complete", restored=True))
    series = Series(
        experiment="gwen",
        box="rehearsal" if rehearsal else "gwen",
        rehearsal=rehearsal,
        boots_planned=boots,
        production="spec-3",
        variants=VARIANTS,
        changes={"no-spec": 3, "spec-1": 1, "spec-3": 0, "spec-5": 1, "spec-8": 1},
        concurrency=LEVELS,
        caches=("cold",),
        boots=tuple(results),
        boots_disturbed={"no-spec": 1} if boots > 1 else {},
    )
    if folder is not None:
        plan = {"v": 1, "plan_name": "fixed", "seed": 7, "boots": boots, "alpha": 0.05, "looks": [boots]}
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "plan.json").write_text(
            json.dumps({**plan, "boots_planned": [{"boot": one} for one in order]}), "utf-8"
        )
    return Sample(tuple(records), series, verdict.judge(series), folder)


def _started(*, rehearsal: bool) -> CampaignStarted:
    return CampaignStarted(
        at="2026-11-30T16:15:00.000Z",
        experiment="gwen",
        box="rehearsal" if rehearsal else "gwen",
        rehearsal=rehearsal,
        seed=7,
        boots_planned=3,
        fingerprint={
            "kernel": "6.1.0-38-amd64",
            "driver": "580.95",
            "gpus": None if rehearsal else "2 × NVIDIA GeForce RTX 3090",
            "nvlink": None,
        },
        versions={"coldboot": "0.1.0", "python": "3.11.2"},
        production=ProductionState(unit="vllm-qwen.service", active=True, enabled=True, command=command("spec-3")),
        base_command=(*BASE, "--spec-method", "qwen3_5_mtp", "--spec-tokens", "3"),
        variants=VARIANTS,
        concurrency=LEVELS,
        production_variant="spec-3",
        load={"endpoint": "chat", "input_tokens": 512, "output_tokens": 256, "window_s": 30.0},
    )


def _key(name: str, variant: str, block: int, position: int) -> dict[str, Any]:
    return {"boot": name, "variant": variant, "cache": "cold", "block": block, "position": position}


def _step(
    key: dict[str, Any], name: Any, seconds: float, ours: float, outcome: Any = "ok", /, **facts: Any
) -> StepEnded:
    return StepEnded(**key, name=name, seconds=seconds, engine_s=seconds - ours, outcome=outcome, facts=facts)


def _disturbed(name: str, variant: str, block: int, position: int) -> list[AnyRecord]:
    key = _key(name, variant, block, position)
    why = "no clean slate: process 4711 holds GPU memory"
    return [
        BootStarted(**key, command=command(variant)),
        StepEnded(**key, name="clean_slate", seconds=120.0, outcome="disturbed", detail=why),
        BootEnded(**key, boot_outcome="disturbed", why=why, step="clean_slate", seconds=120.1, ours_s=0.1),
    ]


def _boot(
    name: str, variant: str, block: int, position: int, dice: random.Random
) -> tuple[list[AnyRecord], BootResult]:
    key = _key(name, variant, block, position)
    timeline = Timeline(
        engine_version="0.26.0",
        imports_s=11.9 + dice.random(),
        weights_s=8.1,
        compile_s=20.4 + dice.random(),
        profiling_s=2.2,
        graph_capture_s=5.3,
        warmup_s=17.6 + dice.random(),
        ready_s=84.0 + dice.random(),
        compile_state="compiled",
        weights_gib=9.3,
        kv_tokens=105_472,
        kv_gib=10.31,
        graph_capture_gib=0.51,
    )
    records: list[AnyRecord] = [
        BootStarted(**key, command=command(variant), env={"VLLM_CACHE_ROOT": f"/var/cache/{name}", "HF_TOKEN": "hf_x"}),
        _step(key, "clean_slate", 0.09, 0.09, gpu_idle_mib=[1, 1]),
        _step(key, "cold", 0.05, 0.05, empty=True),
        _step(key, "render", 0.08, 0.08),
        _step(key, "start", 0.04, 0.02),
        _step(key, "ready", 84.3 + dice.random(), 0.01, "ok", cache_proof="compiled"),
    ]
    if variant == "spec-3":
        answer = Answer(
            outcome="fatal",
            phase="first_request",
            cause="triton_oom",
            complete=True,
            evidence=TRITON_EVIDENCE,
            timeline=timeline,
            advice="lower gpu-memory-utilization or spec-tokens: the driver needs headroom outside torch's allocator",
        )
        why = "triton_oom in first_request: RuntimeError: Triton Error [CUDA]: out of memory"
        records += [
            _step(key, "first_request", 1.9, 0.0, "failed"),
            _step(key, "stop", 0.6, 0.05),
            JournalAnswered(**key, answer=answer),
            _end(key, "crashed", why, 88.2, step="first_request", died=True),
        ]
        result = BootResult(
            **key,
            outcome="crashed",
            why=why,
            died=True,
            died_before_trials=True,
            cause="triton_oom",
            phase="first_request",
        )
        return records, result
    records += [
        _step(key, "first_request", 2.1, 0.0, seconds={"greedy_s": 1.4, "sampled_s": 0.7}),
        _step(key, "headroom", 3.2, 0.0, "ok", **_headroom(variant)),
        _step(key, "sanity", 1.1, 0.0, "ok", **_sanity(name)),
    ]
    rows = SPEEDS[variant]
    row = rows[(block - 1) % len(rows)]
    levels = []
    for level, speed in zip(LEVELS, row, strict=True):
        value = None if speed is None else speed * (1 + dice.gauss(0, 0.006))
        if name == "b01-spec-1" and level == 4:
            reasons = ("MainPID changed during the window: 811 → 907",)
            records.append(
                TrialEnded(
                    **key,
                    concurrency=4,
                    window_s=30.0,
                    tokens=7000,
                    tokens_per_s=None,
                    valid=False,
                    invalid_reasons=reasons,
                )
            )
        records.append(_trial(key, variant, level, value, dice))
        levels.append(LevelResult(concurrency=level, value=value, failed=value is None))
    answer = Answer(outcome="benign", phase="shutdown", cause="benign_shutdown", complete=True, timeline=timeline)
    records += [
        _step(key, "trials", 142.0 + dice.random(), 0.2),
        _step(key, "stop", 2.4, 0.06, polite=True, exit_s=2.3),
        JournalAnswered(**key, answer=answer),
        _end(key, "completed", "every level was measured", 236.0 + dice.random()),
    ]
    return records, BootResult(**key, outcome="completed", why="every level was measured", levels=tuple(levels))


def _headroom(variant: str) -> dict[str, Any]:
    lost = 3 if variant == "spec-8" else 0
    return {"prompt_tokens": 8192, "at_1": {"answered": 1, "failed": 0}, "at_8": {"answered": 8 - lost, "failed": lost}}


def _sanity(name: str) -> dict[str, Any]:
    said = "the the the the" if name == "b02-spec-8" else "January, February, March"
    return {
        "digest": f"{len(said):064x}",
        "repetition": 0.9 if said[0] == "t" else 0.02,
        "texts": [said],
        "tokens": [16],
    }


def _end(key: dict[str, Any], outcome: Any, why: str, seconds: float, **more: Any) -> BootEnded:
    return BootEnded(**key, boot_outcome=outcome, why=why, seconds=seconds, ours_s=0.56, cache_proof="compiled", **more)


def _trial(key: dict[str, Any], variant: str, level: int, value: float | None, dice: random.Random) -> TrialEnded:
    if value is None:
        return TrialEnded(
            **key,
            concurrency=level,
            window_s=None,
            tokens=None,
            tokens_per_s=None,
            valid=True,
            failed=True,
            errors={"HTTP 500": 8},
            requests_sent=8,
        )
    count = TOKENS[variant]
    a = 1 + count * (0.97 if count == 1 else 0.6)
    drafts = value * 30 / a
    per_chunk = a if count else 1.0
    ttft = 90.0 * level**0.5
    itl = 1000 * per_chunk * level / value
    return TrialEnded(
        **key,
        concurrency=level,
        window_s=30.0,
        tokens=round(value * 30),
        tokens_per_s=value,
        valid=True,
        requests_sent=level * 4,
        requests_ok=level * 4,
        rulers=Rulers(
            counter=value,
            usage=value * 1.0004,
            chunks=value / per_chunk,
            words=value * (0.71 + dice.gauss(0, 0.01)),
            logger=value * (0.93 + dice.gauss(0, 0.03)),
        ),
        deltas=Deltas(
            seconds=30.0,
            generation_tokens=value * 30,
            spec_drafts=drafts if count else 0.0,
            spec_draft_tokens=drafts * count,
            spec_accepted_tokens=drafts * (a - 1),
        ),
        ttft_ms=Quantiles(n=level * 4, p50=ttft, p90=ttft * 1.4, p99=ttft * 2, max=ttft * 2.2),
        itl_ms=Quantiles(n=999, p50=itl, p90=itl * 1.2, p99=itl * 1.9, max=itl * 4),
        e2e_ms=Quantiles(n=level * 4, p50=ttft + 256 * itl / per_chunk, p99=ttft + 300 * itl / per_chunk),
    )


def _journal(folder: Path, variant: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = TRITON_LINES if variant == "spec-3" else SERVER_ERROR_LINES
    text = "".join(json.dumps({"MESSAGE": line, "_TRANSPORT": "stdout"}) + "\n" for line in lines)
    (folder / "journal.jsonl").write_text(text, "utf-8")
