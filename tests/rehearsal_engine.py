"""The rehearsal engine as a process under test: real program, real HTTP on a loopback port, its own home."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx

READY_S = 20.0
# The flags of the seed's production unit; a test adds or overrides what it is about (the last one wins).
PRODUCTION = (
    *("--model", "/models/qwen", "--served-model-name", "qwen3-27b", "--tensor-parallel-size", "2"),
    *("--gpu-memory-utilization", "0.97", "--max-model-len", "98304", "--max-num-seqs", "128"),
    *("--quantization", "compressed-tensors", "--dtype", "bfloat16", "--enable-prefix-caching"),
    *("--kv-cache-dtype", "fp8", "--host", "127.0.0.1"),
)
# A tenth of the real step times, for tests that are not about speed.
QUICK = """
[speed]
step_ms = 2.65
draft_ms = 0.12
row_ms = 0.1
pass_ms = 0.9
pass_stream_ms = 0.1
join_ms = 0.8
prefill_ms_per_token = 0.002
thrash_step_ms = 5.8
retry_ms = 5.2
refuse_ms = 25.0
"""
LINE = re.compile(
    r"^(?:\((?P<proc>[A-Za-z][\w-]*) pid=(?P<pid>\d+)\) )?(?P<level>INFO|WARNING|ERROR) "
    r"(?P<ts>\d\d-\d\d \d\d:\d\d:\d\d) \[(?P<src>[^\]\s]+):(?P<line>\d+)\] ?(?P<msg>.*)$"
)


def spec(tokens: int) -> tuple[str, ...]:
    return ("--spec-method", "qwen3_5_mtp", "--spec-model", "/models/qwen", "--spec-tokens", str(tokens))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Box:
    """A home, a state folder, a personality and the environment of its engines."""

    def __init__(self, folder: Path, scale: float = 0.002, personality: str = QUICK, **env: str) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "XDG_", "TRITON_"))}
        self.env = kept | {
            "HOME": str(self.home),
            "COLDBOOT_REHEARSAL_STATE": str(folder / "state"),
            "COLDBOOT_REHEARSAL_TIME_SCALE": str(scale),
            **env,
        }
        self.started = 0
        self.personality(personality)

    def personality(self, text: str) -> None:
        """What the engines started from now on take instead of the shipped constants."""
        file = self.folder / "personality.toml"
        file.write_text(text)
        self.env["COLDBOOT_REHEARSAL_PERSONALITY"] = str(file)

    def start(self, *flags: str, base: tuple[str, ...] = PRODUCTION, port: int | None = None, **env: str) -> Engine:
        self.started += 1
        return Engine(self, (*base, *flags), port or free_port(), env)


class Engine:
    """One run of the program."""

    def __init__(self, box: Box, flags: tuple[str, ...], port: int, env: dict[str, str]) -> None:
        self.port = port
        self._out = box.folder / f"{box.started}.out"
        self._err = box.folder / f"{box.started}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "orchestrator.rehearsal", *flags, "--port", str(port)),
                env=box.env | env,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    # --- what it says -------------------------------------------------------------------------------------------

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self._err.read_bytes().decode()

    def messages(self) -> list[str]:
        """`Proc level source message` of every logger line, in order."""
        matches = map(LINE.match, self.out.replace("\r\n", "\n").split("\n"))
        return [f"{match['proc']} {match['level']} {match['src']} {match['msg']}" for match in matches if match]

    def has(self, text: str) -> bool:
        return text in self.out or text in self.err

    def wait_for(self, text: str, seconds: float = READY_S) -> None:
        wait_until(lambda: self.has(text), f"{text!r} in the log", seconds)

    # --- life ---------------------------------------------------------------------------------------------------

    def ready(self) -> Engine:
        def healthy() -> bool:
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}:\n{self.out[-2000:]}\n{self.err[-2000:]}"
            )
            try:
                return self.client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(healthy, "/health 200", READY_S)
        return self

    def wait(self, seconds: float = 10.0) -> int:
        return self.process.wait(seconds)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def engine_pid(self) -> int:
        match = re.search(r"\(EngineCore pid=(\d+)\)", self.out)
        assert match
        return int(match.group(1))

    # --- requests -----------------------------------------------------------------------------------------------

    def complete(self, **body: object) -> httpx.Response:
        defaults = {"model": "qwen3-27b", "prompt": "Say something", "max_tokens": 16, "temperature": 0}
        return self.client.post("/v1/completions", json=defaults | body)

    def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels, without engine and model_name."""
        samples = {}
        for line in self.client.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = re.sub(r'(engine="0"|model_name="[^"]*"),?', "", name).replace(",}", "}").replace("{}", "")
                samples[name] = float(value)
        return samples


def wait_until(true, what: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"no {what} within {seconds:g} s"
        select.select([], [], [], 0.01)
