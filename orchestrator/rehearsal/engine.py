"""EngineCore: the process that boots, schedules and steps, and that can die.

Forked from the API server before that imports anything heavy.  It knows requests as counts of tokens; text is made in
the API server.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from orchestrator.rehearsal import log as logs
from orchestrator.rehearsal.log import Log
from orchestrator.rehearsal.memory import Fit
from orchestrator.rehearsal.setup import EngineHandle, Setup
from orchestrator.rehearsal.speed import Step, acceptance
from orchestrator.rehearsal.startup import Booted, Starter, StartFailure, fail, torch_oom, worker_failed
from orchestrator.rehearsal.wire import Gone, Wire

_LATE_S = 0.5  # a schedule further behind than this is given up (a stopped process catches up no further)
_TRITON_OOM = "Triton Error [CUDA]: out of memory"


@dataclass
class Request:
    """A request as the scheduler sees it; times are monotonic seconds."""

    name: str
    prompt: int
    blocks: list[int]
    max_tokens: int
    eos_at: int
    arrived: float
    computed: int = 0
    cached: int = 0
    produced: int = 0
    scheduled: float = 0.0

    @property
    def decoding(self) -> bool:
        """The prompt is done."""
        return self.computed >= self.prompt

    @property
    def limit(self) -> int:
        """Tokens that it can still get."""
        return min(self.max_tokens, self.eos_at) - self.produced

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache."""
        return self.computed + self.produced


@dataclass
class Outputs:
    """What one step tells the API server."""

    tokens: list[tuple[str, int, str | None]] = field(default_factory=list)
    started: list[tuple[str, int, float, float]] = field(default_factory=list)
    drafts: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)
    queries: int = 0
    hits: int = 0


class Terminated(Exception):
    """SIGTERM while booting."""


class WorkerGone(Exception):
    """A worker process has ended while serving."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


def spawn(setup: Setup, listener: socket.socket) -> EngineHandle:
    """Forks EngineCore.

    Args:
        setup: Flags, constants, time scale.
        listener: The API server's bound socket, which the child must not keep.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        listener.close()
        _main(setup, Wire(theirs))
    theirs.close()
    return EngineHandle(pid, Wire(ours))


def _main(setup: Setup, wire: Wire) -> NoReturn:
    name_process("VLLM::EngineCore")
    core = Log("EngineCore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    workers = _spawn_workers(setup.settings.tensor_parallel_size, wire)
    try:
        starter = Starter(setup, workers)
        try:
            booted = starter.run()
        except StartFailure as failure:
            starter.report(failure)
    except OSError as error:
        fail(core, ["Traceback (most recent call last):", f"{type(error).__name__}: {error}"])
    except Terminated:
        core.raw(["Process EngineCore:", *logs.traceback("process", error="KeyboardInterrupt: terminated")])
        os._exit(1)
    engine = Engine(setup, booted, starter, wire)
    engine.serve()
    os._exit(0)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def name_process(name: str) -> None:
    """Sets the name that ``ps -o comm`` shows (fifteen bytes)."""
    try:
        Path("/proc/self/comm").write_text(name[:15])
    except OSError:
        return


def _spawn_workers(ranks: int, wire: Wire) -> list[int]:
    """Worker processes of a tensor parallel engine; they live as long as EngineCore does."""
    if ranks == 1:
        return []
    read_end, write_end = os.pipe()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            wire.socket.close()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they end with EngineCore, which closes the pipe
            name_process(f"VLLM::Worker_TP{rank}")
            os.read(read_end, 1)
            os._exit(0)
        pids.append(pid)
    os.close(read_end)
    return pids


class Engine:
    """The busy loop of EngineCore."""

    def __init__(self, setup: Setup, booted: Booted, starter: Starter, wire: Wire) -> None:
        settings = self.settings = setup.settings
        personality = self.personality = setup.personality
        self.scale = setup.scale
        self.booted = booted
        self.ledger = booted.ledger
        self.starter = starter
        self.wire = wire
        self.log = starter.core
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.refused: deque[tuple[float, str]] = deque()
        self.acceptance = acceptance(personality.speed, settings.spec_tokens)
        self.prefix: dict[int, None] = {}
        self.blocks = max(self.ledger.kv_tokens // settings.block_size, 1)
        self.first = True
        self.turn = 0

    def serve(self) -> None:
        """Serves until told to stop, or until orphaned for long enough."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGCHLD, self._on_sigchld)
        self.wire.send({"ready": self._facts()})
        clock = time.monotonic()
        try:
            while True:
                if not self.running and not self.waiting:
                    self._handle(self.wire.wait(self._next_refusal()))
                    self._refuse_due()
                    clock = time.monotonic()
                    continue
                clock = self._step(max(clock, time.monotonic() - _LATE_S))
        except Gone:
            self._orphan()
        except Terminated:
            self._stopped()
        except WorkerGone as gone:
            self._worker_died(gone.pid)

    def _facts(self) -> dict[str, Any]:
        return {
            "num_gpu_blocks": self.blocks,
            "kv_cache_size_tokens": self.ledger.kv_tokens,
            "kv_cache_max_concurrency": round(self.ledger.kv_tokens / self.settings.max_model_len, 2),
        }

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    def _on_sigchld(self, _signal: int, _frame: FrameType | None) -> None:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise WorkerGone(pid)

    def _stopped(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log, count = self.log, len(self.running) + len(self.waiting)
        log.at_info("core.py:1313", "[shutdown] EngineCore: trigger received signal=SIGTERM")
        log.at_info("core.py:1432", "[shutdown] EngineCore: start mode=abort timeout=0s")
        if count:
            log.at_info("core.py:1441", f"[shutdown] EngineCore: aborting in-flight requests count={count}")
        log.at_info("core.py:1463", "[shutdown] EngineCore: request processing complete; starting resource teardown")
        log.at_info("core.py:1326", "[shutdown] EngineCore: exiting busy loop")

    def _orphan(self) -> None:
        """The API server is gone without a word: vLLM's EngineCore stays, and so does its memory."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        until = time.monotonic() + self.personality.server.orphan_s
        while (left := until - time.monotonic()) > 0:
            select.select([], [], [], left)  # nothing can come any more but SIGTERM

    # --- messages -----------------------------------------------------------------------------------------------

    def _handle(self, messages: list[Any]) -> None:
        for message in messages:
            kind = message[0]
            if kind == "add":
                _, name, prompt, blocks, max_tokens, eos_at = message
                self.waiting.append(Request(name, prompt, blocks, max_tokens, eos_at, time.monotonic()))
            elif kind == "abort":
                self._abort(message[1])
            elif kind == "reset":
                if not self.running:
                    self.prefix.clear()
                self.wire.send({"reset": not self.running})

    def _abort(self, name: str) -> None:
        self.running = [request for request in self.running if request.name != name]
        self.waiting = deque(request for request in self.waiting if request.name != name)
        self.refused = deque(entry for entry in self.refused if entry[1] != name)
        self.wire.send({"stats": self._stats()})

    def _next_refusal(self) -> float | None:
        return self.refused[0][0] if self.refused else None

    def _refuse_due(self) -> None:
        now, any_due = time.monotonic(), False
        while self.refused and self.refused[0][0] <= now:
            any_due = True
            _, name = self.refused.popleft()
            self.starter.first.at_warning(
                "speculator.py:412",
                f"Draft workspace of {self.ledger.draft_demand(len(self.running) + 1):.0f} MiB does not fit into "
                f"{self.ledger.spare:.0f} MiB; request {name} is terminated.",
            )
            self.wire.send({"refused": name})
        if any_due:
            self.wire.send({"stats": self._stats()})

    # --- scheduling ---------------------------------------------------------------------------------------------

    def _admit(self, outputs: Outputs) -> None:
        now = time.monotonic()
        while self.waiting and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            if self.ledger.fit(len(self.running) + 1) is Fit.REFUSED:
                self.waiting.popleft()
                self.refused.append((now + self.personality.speed.refuse_ms / 1000.0, request.name))
                continue
            if self.running and self._used_blocks() + self._need(request) > self.blocks:
                return
            self.waiting.popleft()
            self._use_prefix(request, outputs)
            request.scheduled = now
            self.running.append(request)
            self.wire.send({"admitted": request.name})

    def _need(self, request: Request) -> int:
        return -(-(request.prompt + min(request.max_tokens, request.eos_at)) // self.settings.block_size)

    def _used_blocks(self) -> int:
        return sum(self._need(request) for request in self.running)

    def _use_prefix(self, request: Request, outputs: Outputs) -> None:
        if not self.settings.prefix_caching:
            return
        hits = 0
        for block in request.blocks[: (request.prompt - 1) // self.settings.block_size]:
            if block not in self.prefix:
                break
            hits += 1
        for block in request.blocks:
            self.prefix.pop(block, None)
            self.prefix[block] = None
        while len(self.prefix) > self.blocks:
            del self.prefix[next(iter(self.prefix))]
        request.cached = request.computed = hits * self.settings.block_size
        outputs.queries += request.prompt
        outputs.hits += request.cached

    def _chunks(self, budget: int) -> list[tuple[Request, int]]:
        """Prompt tokens of each request that are computed in the next step, first come first served."""
        chunks = []
        for request in self.running:
            if request.decoding or budget <= 0:
                continue
            tokens = min(request.prompt - request.computed, budget)
            budget -= tokens
            chunks.append((request, tokens))
        return chunks

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self, clock: float) -> float:
        """Runs the step that starts at ``clock``; returns when it ends, on the schedule."""
        outputs = Outputs()
        # A client whose answer ended with the last step asks again at once: it does not miss the next step by a hair.
        self._wait_until(clock + self.personality.speed.join_ms / 1000.0)
        self._admit(outputs)
        self._refuse_due()
        if not self.running:
            return time.monotonic()
        decoding = [request for request in self.running if request.decoding]
        rows = len(decoding) * (1 + self.settings.spec_tokens)
        chunks = self._chunks(max(self.settings.max_num_batched_tokens - rows, 1))
        prefill = sum(tokens for _, tokens in chunks)
        step = self.booted.pace.step(len(decoding), prefill, len(self.running))
        end = clock + step.seconds
        if prefill:
            end += self._first_request(prefill)
        self._wait_until(end)
        self._decode(decoding, step, outputs)
        self._finish_prefill(chunks, outputs)
        self._report(outputs)
        return end

    def _first_request(self, prefill: int) -> float:
        """What a prompt does beyond its own time: loads kernels, and may not find the memory for it."""
        memory, spare = self.personality.memory, self.ledger.spare
        stall = 0.0
        if self.first:
            self.first = False
            boot, fresh = self.personality.boot, self.booted.fresh
            stall = self.scale * (boot.first_stall_s if fresh else boot.first_stall_warm_s)
            if (memory.triton_cold_mib if fresh else memory.triton_warm_mib) > spare:
                self._wait_until(time.monotonic() + stall * 0.3)
                self._die(("run.worker.triton",), f"RuntimeError: {_TRITON_OOM}", _TRITON_OOM)
            if self.settings.spec_tokens:
                for kernel in ("_compute_local_logits_stats_kernel", "_rejection_kernel", "_resample_kernel"):
                    self.starter.first.at_warning(
                        "jit_monitor.py:135",
                        f"Triton kernel JIT compilation during inference: {kernel}. This causes a latency spike; "
                        "consider extending warmup to cover this shape/config.",
                    )
        wanted = memory.prefill_mib_per_1024 * prefill / 1024.0
        free = spare - memory.triton_warm_mib
        if wanted > free:
            error = torch_oom(memory.total_mib, wanted, free, self.ledger.graphs)
            self._die(("run.worker.torch",), error, error.partition(": ")[2])
        return stall

    def _wait_until(self, until: float) -> None:
        while time.monotonic() < until:
            self._handle(self.wire.wait(until))

    def _decode(self, decoding: list[Request], step: Step, outputs: Outputs) -> None:
        if step.single and decoding:
            self.turn += 1
            decoding = [decoding[self.turn % len(decoding)]]
        for request in decoding:
            if request not in self.running:
                continue
            tokens = 1
            if step.drafting:
                accepted = self.acceptance.next()
                tokens += accepted
                outputs.drafts += 1
                outputs.drafted += self.settings.spec_tokens
                outputs.accepted.append(accepted)
            self._emit(request, tokens, outputs)

    def _finish_prefill(self, chunks: list[tuple[Request, int]], outputs: Outputs) -> None:
        now = time.monotonic()
        for request, tokens in chunks:
            request.computed += tokens
            if request.decoding and request in self.running:
                queued = request.scheduled - request.arrived
                outputs.started.append((request.name, request.cached, queued, now - request.scheduled))
                self._emit(request, 1, outputs)

    def _emit(self, request: Request, tokens: int, outputs: Outputs) -> None:
        tokens = min(tokens, request.limit)
        request.produced += tokens
        reason = None
        if request.limit <= 0:
            reason = "stop" if request.produced >= request.eos_at else "length"
            self.running.remove(request)
        outputs.tokens.append((request.name, tokens, reason))

    def _stats(self) -> tuple[int, int, float]:
        used = sum(-(-request.kv_tokens // self.settings.block_size) for request in self.running)
        return len(self.running), len(self.waiting) + len(self.refused), used / self.blocks

    def _report(self, outputs: Outputs) -> None:
        message: dict[str, Any] = {"tokens": outputs.tokens, "stats": self._stats()}
        if outputs.started:
            message["started"] = outputs.started
        if outputs.queries:
            message["prefix"] = (outputs.queries, outputs.hits)
        if outputs.drafts:
            message["spec"] = (outputs.drafts, outputs.drafted, outputs.accepted)
        self.wire.send(message)

    # --- death --------------------------------------------------------------------------------------------------

    def _worker_died(self, pid: int) -> NoReturn:
        """A worker was killed: the executor gives up, and the engine with it."""
        rank = next(number for number, log in enumerate(self.starter.ranks) if f"pid={pid})" in log.prefix)
        count = len(self.starter.ranks) - 1
        self.log.at_error(
            "multiproc_executor.py:284",
            f"Worker proc VllmWorker-{rank} died unexpectedly (exit code: None), shutting down executor.",
        )
        self.log.at_info("multiproc_executor.py:429", f"[shutdown] Executor: waiting for worker exit count={count}")
        self.log.at_info("multiproc_executor.py:436", "[shutdown] Executor: all workers exited gracefully")
        if self.running:
            self._give_up(logs.traceback("run.core", "run.worker.gone", error="RuntimeError: cancelled"))
        self._give_up(logs.traceback("run.core", error="RuntimeError: Executor failed."), dump=False)

    def _die(self, worker: tuple[str, ...], error: str, short: str) -> NoReturn:
        """The engine's end at run time by an error in its model."""
        caches = self.booted.caches
        names = {"root": str(caches.root), "aot": caches.aot_hash}
        if self.settings.tensor_parallel_size > 1:
            for rank_log in self.starter.ranks:
                lines = logs.traceback("run.worker.head", *worker, error=error, **names)
                rank_log.at_error("multiproc_executor.py:1020", "\n".join(["WorkerProc hit an exception.", *lines]))
            last = worker_failed(short)
            lines = logs.traceback("run.core", "run.multiproc", error=last, **names)
        else:
            lines = logs.traceback("run.core", "run.uniproc", *worker, error=error, **names)
        self._give_up(lines)

    def _give_up(self, lines: list[str], *, dump: bool = True) -> NoReturn:
        """Dumps, traceback, and a last word to the API server."""
        if dump:
            self._dump()
        self.log.at_error("core.py:1332", "\n".join(["EngineCore encountered a fatal error.", *lines]))
        self.log.raw(["Process EngineCore:", *logs.frames("process"), *lines[1:]])
        self.wire.send({"dead": True})
        os._exit(1)

    def _dump(self) -> None:
        version = self.personality.engine_version
        config = self.starter.config_text()
        self.log.at_error(
            "dump_input.py:72", f"Dumping input data for V1 LLM engine (v{version}) with config: {config}, "
        )
        self.log.at_error("dump_input.py:79", f"Dumping scheduler output for model execution: {self._scheduled()}")
        running, waiting, usage = self._stats()
        self.log.at_error(
            "dump_input.py:81",
            f"Dumping scheduler stats: SchedulerStats(num_running_reqs={running}, num_waiting_reqs={waiting}, "
            f"step_counter=0, current_wave=0, kv_cache_usage={usage}, spec_decoding_stats=None)",
        )

    def _scheduled(self) -> str:
        new = ",".join(
            f"NewRequestData(req_id={request.name},prompt_token_ids_len={request.prompt},mm_features=[],"
            f"sampling_params=SamplingParams(n=1, max_tokens={request.max_tokens}))"
            for request in self.running
            if not request.decoding
        )
        tokens = ", ".join(f"{request.name}: {request.prompt - request.computed or 1}" for request in self.running)
        return f"SchedulerOutput(scheduled_new_reqs=[{new}], num_scheduled_tokens={{{tokens}}})"
