"""How EngineCore boots: the phases in vLLM's order, with their lines, on the memory ledger."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import NoReturn

from orchestrator.rehearsal import caches as cache_store
from orchestrator.rehearsal import log as logs
from orchestrator.rehearsal import state
from orchestrator.rehearsal.caches import Caches
from orchestrator.rehearsal.log import Log
from orchestrator.rehearsal.memory import GIB_IN_MIB, MIB, Ledger, make_ledger
from orchestrator.rehearsal.setup import Setup
from orchestrator.rehearsal.speed import Pace
from orchestrator.rehearsal.wire import Phases

_SEE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


class StartFailure(Exception):
    """The boot cannot go on.

    Args:
        section: Traceback of ``data/tracebacks.txt``.
        error: Last line of it.
    """

    def __init__(self, section: str, error: str) -> None:
        super().__init__(error)
        self.section = section
        self.error = error


@dataclass(frozen=True)
class Booted:
    """What serving needs to know of the boot.

    Attributes:
        ledger: Memory of one card.
        pace: Step lengths.
        fresh: Graphs were compiled in this boot: the first request times candidate kernels.
        caches: The caches as they were found.
    """

    ledger: Ledger
    pace: Pace
    fresh: bool
    caches: Caches


class Starter:
    """Boots one EngineCore.

    Args:
        setup: Flags, constants, time scale.
        workers: Process ids of the tensor parallel workers; empty for one rank, which EngineCore serves itself.
    """

    def __init__(self, setup: Setup, workers: list[int]) -> None:
        settings = self.settings = setup.settings
        personality = self.personality = setup.personality
        self.phases = Phases(setup.scale)
        self.core = Log("EngineCore")
        self.ranks = [Log(f"Worker_TP{rank}", pid) for rank, pid in enumerate(workers)] or [self.core]
        self.first = self.ranks[0]
        self.caches = cache_store.look(settings, personality.engine_version, os.environ)
        digest = state.configuration_digest(settings)
        self.boot = state.next_boot(digest)
        tactics, width = personality.tactics, 1 + settings.spec_tokens
        self.tactic = state.pick(self.boot, width, tactics.tile_rows, tactics.seed)
        self.ledger = make_ledger(settings, personality.memory, tactics, loaded=self.caches.loaded, tactic=self.tactic)
        factor = state.boot_factor(digest, self.boot, tactics.seed, personality.speed.boot_sd)
        self.pace = Pace(personality.speed, self.ledger, self.tactic, settings.captures, factor)

    def run(self) -> Booted:
        """The whole boot.

        Raises:
            StartFailure: Memory does not suffice.
            OSError: A cache cannot be written.
        """
        boot = self.personality.boot
        self.phases.spend(boot.import_engine_s)
        began = time.monotonic()
        self._device()
        self._weights()
        compiling = self._compile()
        self._profile()
        self._kernel_warmup()
        self._capture()
        kernels = self.caches.kernels_loaded
        self.phases.spend(boot.triton_warm_s if kernels else boot.triton_cold_s)
        cache_store.save_kernels(self.caches)
        self.first.at_info(
            "jit_monitor.py:79",
            "Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.",
        )
        self.phases.spend(boot.finish_s)
        took = time.monotonic() - began
        part = f" (compilation: {compiling:.2f} s)" if self.settings.compiles else ""
        source = "core.py:340" if self.settings.compiles else "core.py:347"
        self.core.at_info(source, f"init engine (profile, create kv cache, warmup model) took {took:.2f} s{part}")
        self.core.at_info("vllm.py:1109", "Asynchronous scheduling is enabled.")
        self.core.at_info("kernel.py:295", IR_PRIORITY)
        fresh = self.settings.compiles and not self.caches.loaded
        return Booted(self.ledger, self.pace, fresh, self.caches)

    def config_text(self) -> str:
        """The configuration as EngineCore prints it, at its start and before a crash."""
        settings = self.settings
        speculation = "None"
        if settings.spec_tokens:
            speculation = (
                f"SpeculativeConfig(method={settings.spec_method!r}, model={settings.spec_model or settings.model!r}, "
                f"num_spec_tokens={settings.spec_tokens})"
            )
        sizes = list(self.ledger.sizes)
        return logs.fill(
            logs.engine_config(),
            model=repr(settings.model),
            spec=speculation,
            dtype=settings.dtype,
            max_model_len=str(settings.max_model_len),
            load_format=settings.load_format,
            tp=str(settings.tensor_parallel_size),
            quantization=str(settings.quantization),
            eager=str(not settings.compiles and not settings.captures),
            kv_dtype=settings.kv_cache_dtype,
            seed=str(settings.seed),
            served=settings.served_names[0],
            prefix=str(settings.prefix_caching),
            batched=str(settings.max_num_batched_tokens),
            sizes=str(sizes),
            max_size=str(sizes[-1] if sizes else 0),
        )

    def _device(self) -> None:
        settings, memory = self.settings, self.personality.memory
        version = self.personality.engine_version
        self.core.at_info("core.py:116", f"Initializing a V1 LLM engine (v{version}) with config: {self.config_text()}")
        self.phases.spend(self.personality.boot.distributed_s)
        world = settings.tensor_parallel_size
        port = 30_000 + os.getpid() % 30_000
        for rank, rank_log in enumerate(self.ranks):
            rank_log.at_info(
                "parallel_state.py:1615",
                f"world_size={world} rank={rank} local_rank={rank} "
                f"distributed_init_method=tcp://127.0.0.1:{port} backend=nccl",
            )
        if world > 1:
            self.first.at_info("pynccl.py:113", "vLLM is using nccl==2.28.9")
            self.first.at_warning(
                "custom_all_reduce.py:154",
                "Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. "
                "To silence this warning, specify disable_custom_all_reduce=True explicitly.",
            )
        for rank, rank_log in enumerate(self.ranks):
            rank_log.at_info(
                "parallel_state.py:1946",
                f"rank {rank} in world size {world} is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank {rank}, "
                "EP rank N/A, EPLB rank N/A",
            )
        self.first.at_info("gpu_worker.py:378", "Using V2 Model Runner")
        ledger = self.ledger
        if ledger.free_at_start < ledger.requested:
            raise StartFailure(
                "start.memory",
                f"ValueError: Free memory on device cuda:0 ({_gib(ledger.free_at_start)}/{_gib(memory.total_mib)} GiB) "
                "on startup is less than desired GPU memory utilization "
                f"({settings.gpu_memory_utilization}, {_gib(ledger.requested)} GiB). Decrease GPU memory utilization "
                "or reduce GPU memory used by other processes.",
            )

    def _weights(self) -> None:
        settings, boot = self.settings, self.personality.boot
        self.first.at_info("model_runner.py:284", "Loading model from scratch...")
        self.first.at_info(
            "cuda.py:482",
            "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', "
            "'FLEX_ATTENTION'].",
        )
        self.first.at_info("flash_attn.py:776", "Using FlashAttention version 2")
        began = time.monotonic()
        if settings.load_format != "dummy":
            size = self.personality.memory.weights_mib / GIB_IN_MIB
            self.first.at_info(
                "weight_utils.py:869",
                f"Filesystem type for checkpoints: EXT4. Checkpoint size: {size:.2f} GiB. Available RAM: 56.81 GiB.",
            )
            took = self.phases.spend(boot.weights_s)
            self.first.bar("Loading safetensors checkpoint shards", 4, took)
            self.first.at_info("default_loader.py:430", f"Loading weights took {took:.2f} seconds")
        self.phases.spend(boot.model_s)
        took = time.monotonic() - began
        self.first.at_info(
            "model_runner.py:305", f"Model loading took {_gib(self.ledger.weights)} GiB and {took:.6f} seconds"
        )

    def _compile(self) -> float:
        """Compiles or loads; returns the seconds that it took."""
        settings, boot, caches = self.settings, self.personality.boot, self.caches
        if not settings.compiles:
            return 0.0
        began = time.monotonic()
        span = f"compile range (1, {settings.max_num_batched_tokens})"
        self.phases.spend(boot.dynamo_warm_s if caches.loaded else boot.dynamo_cold_s)
        dynamo = time.monotonic() - began
        self.first.at_info(
            "backends.py:1094", f"Using cache directory: {caches.rank_folder(0)} for vLLM's torch.compile"
        )
        self.first.at_info("backends.py:1155", f"Dynamo bytecode transform time: {dynamo:.2f} s")
        if caches.loaded:
            took = self.phases.spend(boot.load_s)
            self.first.at_info(
                "backends.py:292", f"Directly load the compiled graph(s) for {span} from the cache, took {took:.3f} s"
            )
            for rank, rank_log in enumerate(self.ranks):
                rank_log.at_info(
                    "decorators.py:308", f"Directly load AOT compilation from path {caches.artefact(rank)}"
                )
        else:
            took = self.phases.spend(boot.inductor_s)
            self.first.at_info("backends.py:378", f"Cache the graph of {span} for later use")
            self.first.at_info("backends.py:393", f"Compiling a graph for {span} takes {took:.2f} s")
            self.phases.spend(boot.save_s)
            cache_store.save_graphs(caches, settings)
            for rank, rank_log in enumerate(self.ranks):
                rank_log.at_info("decorators.py:708", f"saved AOT compiled function to {caches.artefact(rank)}")
        took = time.monotonic() - began
        self.first.at_info("monitor.py:53", f"torch.compile took {took:.2f} s in total")
        return took

    def _profile(self) -> None:
        settings, ledger = self.settings, self.ledger
        took = self.phases.spend(self.personality.boot.profile_s)
        self.first.at_info("monitor.py:81", f"Initial profiling/warmup run took {took:.2f} s")
        if settings.kv_cache_memory_bytes is None:
            self.first.at_info("gpu_worker.py:560", f"Available KV cache memory: {_gib(ledger.kv)} GiB")
        else:
            self.first.at_info(
                "gpu_worker.py:479",
                f"Initial free memory {_gib(ledger.free_at_start)} GiB, reserved {_gib(ledger.kv)} GiB memory for KV "
                "Cache as specified by kv_cache_memory_bytes config and skipped memory profiling. This does not "
                "respect the gpu_memory_utilization config.",
            )
        if ledger.kv <= 0:
            raise StartFailure(
                "start.kv",
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, despite "
                f"its name). {_SEE}",
            )
        needed = settings.max_model_len * ledger.kv_token_bytes / MIB
        if needed > ledger.kv:
            most = int(ledger.kv * MIB / ledger.kv_token_bytes) // settings.block_size * settings.block_size
            raise StartFailure(
                "start.kv",
                "ValueError: To serve at least one request with the model's max seq len "
                f"({settings.max_model_len}), ({_gib(needed)} GiB KV cache is needed, which is larger than the "
                f"available KV cache memory ({_gib(ledger.kv)} GiB). Based on the available memory, the estimated "
                f"maximum model length is {most}. Try increasing `gpu_memory_utilization` (which also controls CPU "
                f"memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. {_SEE}",
            )
        self.core.at_info("kv_cache_utils.py:2177", f"GPU KV cache size: {ledger.kv_tokens:,} tokens")
        self.core.at_info(
            "kv_cache_utils.py:2178",
            f"Maximum concurrency for {settings.max_model_len:,} tokens per request: "
            f"{ledger.kv_tokens / settings.max_model_len:.2f}x",
        )

    def _kernel_warmup(self) -> None:
        memory, boot = self.personality.memory, self.personality.boot
        if self.ledger.headroom < memory.warmup_mib:
            raise StartFailure("start.warmup", self._torch_oom(memory.warmup_mib, self.ledger.headroom))
        if not self.settings.compiles:
            return
        self.first.plain(
            f"{_stamp()} - INFO - autotuner.py:651 - flashinfer.jit: [Autotuner]: Autotuning process starts ..."
        )
        self.phases.spend(boot.autotune_s)
        self.first.plain(f"{_stamp()} - INFO - autotuner.py:674 - flashinfer.jit: [Autotuner]: Autotuning process ends")
        self.first.at_warning(
            "kernel_warmup.py:258",
            "No FlashInfer autotune cache entries found.Falling back to default tactics.",
        )
        self.first.at_info("cutedsl_warmup.py:101", "Skipping CuTeDSL warmup because no compile units were requested.")

    def _capture(self) -> None:
        ledger, memory = self.ledger, self.personality.memory
        sizes, decode = len(ledger.sizes), len(ledger.decode)
        if not sizes:
            self._summary(0.0)
            return
        began = time.monotonic()
        took = self.phases.spend(self.personality.boot.graph_s * sizes)
        self.first.bar("Capturing CUDA graphs (PIECEWISE)", sizes, took)
        if ledger.spare < memory.graph_pool_mib:
            raise StartFailure(
                "start.capture", self._torch_oom(memory.graph_pool_mib, ledger.spare, pools=ledger.graphs)
            )
        took = self.phases.spend(self.personality.boot.graph_s * decode)
        self.first.bar("Capturing CUDA graphs (FULL)", decode, took)
        if self.settings.spec_tokens:
            self.first.at_info("speculator.py:85", "Capturing model for speculator...")
            self.first.bar("Capturing prefill CUDA graphs (PIECEWISE)", sizes, took)
            self.first.bar("Capturing prefill CUDA graphs (FULL)", decode, took)
        took = time.monotonic() - began
        graphs = ledger.graphs / GIB_IN_MIB
        seconds = round(took)
        self.first.at_info(
            "model_runner.py:747",
            f"Graph capturing finished in {seconds} sec{'' if seconds == 1 else 's'}, took {graphs:.2f} GiB",
        )
        self._summary(graphs)

    def _summary(self, graphs_gib: float) -> None:
        settings, ledger, memory = self.settings, self.ledger, self.personality.memory
        if settings.kv_cache_memory_bytes is not None:
            return
        fitting = int((ledger.kv - graphs_gib * GIB_IN_MIB - 150) * MIB)
        filling = int((ledger.kv + ledger.spare - 150) * MIB)
        self.first.at_info(
            "gpu_worker.py:857",
            f"Free memory on device ({_gib(ledger.free_at_start)}/{_gib(memory.total_mib)} GiB) on "
            f"startup. Desired GPU memory utilization is ({settings.gpu_memory_utilization}, "
            f"{_gib(ledger.requested)} GiB). Actual usage is {_gib(ledger.weights)} GiB for weight, "
            f"{_gib(ledger.activation)} GiB for peak activation, 0.22 GiB for non-torch memory, and "
            f"{graphs_gib:.2f} GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
            f"`--kv-cache-memory={fitting}` ({fitting / MIB / GIB_IN_MIB:.2f} GiB) to fit into requested memory, or "
            f"`--kv-cache-memory={filling}` ({filling / MIB / GIB_IN_MIB:.2f} GiB) to fully utilize gpu memory. "
            f"Current kv cache memory in use is {_gib(ledger.kv)} GiB.",
        )

    def report(self, failure: StartFailure) -> NoReturn:
        """Prints a failed start as vLLM does and ends the process with status 1."""
        lines = logs.frames(failure.section, root=str(self.caches.root), aot=self.caches.aot_hash)
        error = failure.error
        cut = next((number for number, line in enumerate(lines) if "gpu_worker.py" in line), None)
        if len(self.ranks) > 1 and cut is not None:
            starting = failure.section == "start.memory"
            title = "WorkerProc failed to start." if starting else "WorkerProc hit an exception."
            source = "multiproc_executor.py:948" if starting else "multiproc_executor.py:1020"
            for rank_log in self.ranks:
                rank_log.at_error(source, "\n".join([title, lines[0], *lines[cut:], error]))
            keep = next(number for number, line in enumerate(lines) if "uniproc_executor.py" in line)
            lines = lines[:keep]
            error = _WORKER_INIT if starting else worker_failed(error.partition(": ")[2])
        fail(self.core, [*lines, error])

    def _torch_oom(self, wanted: float, free: float, pools: float = 0.0) -> str:
        return torch_oom(self.personality.memory.total_mib, wanted, free, pools)


_WORKER_INIT = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause."
)
IR_PRIORITY = (
    "Final IR op priority after setting platform defaults: IrOpPriorityConfig(rms_norm=['native'], "
    "fused_add_rms_norm=['native'])"
)


def worker_failed(error: str) -> str:
    """The last line of EngineCore's traceback when a worker process has raised."""
    return f"RuntimeError: Worker failed with error '{error}', please check the stack trace above for the root cause"


def torch_oom(total: float, wanted: float, free: float, pools: float = 0.0) -> str:
    """The allocator's message; amounts in MiB."""
    free = max(free, 0.0)
    private = f", with {pools:.2f} MiB allocated in private pools (e.g., CUDA Graphs)" if pools else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted:.2f} MiB. GPU 0 has a total "
        f"capacity of {total / GIB_IN_MIB:.2f} GiB of which {free:.2f} MiB is free. Including non-PyTorch memory, "
        f"this process has {(total - free) / GIB_IN_MIB:.2f} GiB memory in use. Of the allocated memory "
        f"{(total - free - 900) / GIB_IN_MIB:.2f} GiB is allocated by PyTorch{private}, and 31.64 MiB is reserved "
        "by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def fail(core: Log, lines: list[str]) -> NoReturn:
    """Prints a failed start as EngineCore does, twice, and ends the process with status 1."""
    core.at_error("core.py:1330", "\n".join(["EngineCore failed to start.", *lines]))
    core.raw(["Process EngineCore:", *logs.frames("process"), *lines[1:]])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os._exit(1)


def _gib(mib: float) -> str:
    """GiB as vLLM prints it: two digits, trailing zeros away."""
    return f"{round(mib / GIB_IN_MIB, 2)}"


def _stamp() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f",{int(now % 1 * 1000):03d}"
