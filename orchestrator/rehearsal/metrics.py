"""vLLM 0.26's /metrics page: names, labels, help texts, buckets and ``_created`` twins."""

from __future__ import annotations

import bisect
import gc
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_SECONDS_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_SECONDS_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_SECONDS_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SECONDS_HIGHR = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def number(value: float) -> str:
    """A sample's value as prometheus_client prints it."""
    return repr(float(value))


def label_text(labels: Mapping[str, str]) -> str:
    """Labels in braces, sorted, escaped; nothing without labels."""
    if not labels:
        return ""
    pairs = (
        '{}="{}"'.format(name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for name, value in sorted(labels.items())
    )
    return "{" + ",".join(pairs) + "}"


class Counter:
    """A counter with one child per given label set, printed as ``X_total`` and ``X_created``."""

    def __init__(self, name: str, text: str, labels: Sequence[Mapping[str, str]]) -> None:
        self.name = name
        self.text = text
        self._children = [label_text(child) for child in labels]
        self.values = [0.0] * len(labels)
        self._created = [time.time() for _ in labels]

    def inc(self, amount: float = 1.0, child: int = 0) -> None:
        """Adds to a child."""
        self.values[child] += amount

    def render(self) -> Iterable[str]:
        """The counter's lines."""
        yield f"# HELP {self.name}_total {self.text}"
        yield f"# TYPE {self.name}_total counter"
        for labels, value in zip(self._children, self.values, strict=True):
            yield f"{self.name}_total{labels} {number(value)}"
        yield f"# HELP {self.name}_created {self.text}"
        yield f"# TYPE {self.name}_created gauge"
        for labels, created in zip(self._children, self._created, strict=True):
            yield f"{self.name}_created{labels} {number(created)}"


class Gauge:
    """A gauge with one child per given label set."""

    def __init__(self, name: str, text: str, labels: Sequence[Mapping[str, str]], value: float = 0.0) -> None:
        self.name = name
        self.text = text
        self._children = [label_text(child) for child in labels]
        self.values = [value] * len(labels)

    def set(self, value: float, child: int = 0) -> None:
        """Sets a child."""
        self.values[child] = value

    def render(self) -> Iterable[str]:
        """The gauge's lines."""
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} gauge"
        for labels, value in zip(self._children, self.values, strict=True):
            yield f"{self.name}{labels} {number(value)}"


class Histogram:
    """A histogram with one child."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], edges: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self._edges = [float(edge) for edge in edges]
        self._labels = label_text(labels)
        self._buckets = [label_text({**labels, "le": edge}) for edge in [*map(number, self._edges), "+Inf"]]
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self._counts[bisect.bisect_left(self._edges, value)] += times
        self._sum += value * times

    def render(self) -> Iterable[str]:
        """The histogram's lines."""
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} histogram"
        total = 0
        for labels, count in zip(self._buckets, self._counts, strict=True):
            total += count
            yield f"{self.name}_bucket{labels} {number(total)}"
        yield f"{self.name}_count{self._labels} {number(total)}"
        yield f"{self.name}_sum{self._labels} {number(self._sum)}"
        yield f"# HELP {self.name}_created {self.text}"
        yield f"# TYPE {self.name}_created gauge"
        yield f"{self.name}_created{self._labels} {number(self._created)}"


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, … up to ``limit``: vLLM's edges for token counts."""
    edges: list[int] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > limit:
                return edges
            edges.append(mantissa * power)
        power *= 10


class EngineMetrics:
    """The ``vllm:`` series of one engine.

    Args:
        model: The served name.
        max_model_len: Sets the edges of the token histograms.
        spec_tokens: Draft tokens per step; the speculation series exist only above 0.
        cache_config: Labels of ``vllm:cache_config_info``.
    """

    def __init__(self, model: str, max_model_len: int, spec_tokens: int, cache_config: Mapping[str, str]) -> None:
        base = {"engine": "0", "model_name": model}
        one = [base]

        def counter(name: str, text: str, labels: Sequence[Mapping[str, str]] = one) -> Counter:
            return Counter(f"vllm:{name}", text, labels)

        def seconds(name: str, text: str, edges: Sequence[float] = _SECONDS_REQUEST) -> Histogram:
            return Histogram(f"vllm:{name}", text, base, edges)

        tokens = one_two_five(max_model_len)
        mfu = (
            ("flops", "floating point operations per GPU"),
            ("read_bytes", "bytes read from memory per GPU"),
            ("write_bytes", "bytes written to memory per GPU"),
        )
        why = "(for Model Flops Utilization calculations)."
        self._idle = [counter(f"estimated_{name}_per_gpu", f"Estimated number of {text} {why}") for name, text in mfu]
        self.running = Gauge("vllm:num_requests_running", "Number of requests in model execution batches.", one)
        self.waiting = Gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", one)
        self.waiting_by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
            "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
            "Sum of all reasons equals vllm:num_requests_waiting.",
            [{**base, "reason": reason} for reason in ("capacity", "deferred")],
        )
        self._sleep = Gauge(
            "vllm:engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            [{**base, "sleep_state": name} for name in ("awake", "weights_offloaded", "discard_all")],
        )
        self._sleep.set(1.0)
        self.kv_usage = Gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", one)
        prefix = "{}refix cache {}, in terms of number of {} tokens."
        external = (
            "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {} tokens."
        )
        self.prefix_queries = counter("prefix_cache_queries", prefix.format("P", "queries", "queried"))
        self.prefix_hits = counter("prefix_cache_hits", prefix.format("P", "hits", "cached"))
        self.prompt = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.prompt_by_source = counter(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            [{**base, "source": source} for source in _SOURCES],
        )
        self.prompt_cached = counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        self.generation = counter("generation_tokens", "Number of generation tokens processed.")
        self.success = counter(
            "request_success",
            "Count of successfully processed requests.",
            [{**base, "finished_reason": reason} for reason in FINISHED_REASONS],
        )
        self.request_prompt = seconds("request_prompt_tokens", "Number of prefill tokens processed.", tokens)
        self.request_generation = seconds("request_generation_tokens", "Number of generation tokens processed.", tokens)
        self.iteration = seconds("iteration_tokens_total", "Histogram of number of tokens per engine_step.", _ITERATION)
        self.max_generation = seconds(
            "request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", tokens
        )
        self.params_n = seconds("request_params_n", "Histogram of the n request parameter.", (1, 2, 5, 10, 20))
        self.params_max_tokens = seconds(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", tokens
        )
        self.first_token = seconds(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _SECONDS_TTFT
        )
        self.inter_token = seconds(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _SECONDS_TOKEN
        )
        self.per_output_token = seconds(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _SECONDS_TOKEN,
        )
        self.e2e = seconds("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.")
        phase = "Histogram of time spent in {} phase for request."
        self.queue_time = seconds("request_queue_time_seconds", phase.format("WAITING"))
        self.inference_time = seconds("request_inference_time_seconds", phase.format("RUNNING"))
        self.prefill_time = seconds("request_prefill_time_seconds", phase.format("PREFILL"))
        self.decode_time = seconds("request_decode_time_seconds", phase.format("DECODE"))
        self.prefill_computed = seconds(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            tokens,
        )
        self._cache_info = Gauge(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", [{**cache_config, "engine": "0"}], 1.0
        )
        self._order: list[Counter | Gauge | Histogram] = [
            *self._idle,
            self.running,
            self.waiting,
            self.waiting_by_reason,
            self._sleep,
            self.kv_usage,
            self.prefix_queries,
            self.prefix_hits,
            counter("external_prefix_cache_queries", external.format("queries", "queried")),
            counter("external_prefix_cache_hits", external.format("hits", "cached")),
            counter("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items."),
            counter("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items."),
            counter("num_preemptions", "Cumulative number of preemption from the engine."),
            self.prompt,
            self.prompt_by_source,
            self.prompt_cached,
            self.generation,
            self.success,
            self.request_prompt,
            self.request_generation,
            self.iteration,
            self.max_generation,
            self.params_n,
            self.params_max_tokens,
            self.first_token,
            self.inter_token,
            self.per_output_token,
            self.e2e,
            self.queue_time,
            self.inference_time,
            self.prefill_time,
            self.decode_time,
            self.prefill_computed,
            self._cache_info,
        ]
        self.drafts = counter("spec_decode_num_drafts", "Number of spec decoding drafts.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Number of draft tokens.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.")
        self.accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            [{**base, "position": str(position)} for position in range(spec_tokens)],
        )
        if spec_tokens:
            self._order[3:3] = [self.drafts, self.draft_tokens, self.accepted, self.accepted_per_pos]

    def finished(self, reason: str) -> None:
        """Counts a finished request."""
        self.success.inc(child=FINISHED_REASONS.index(reason))

    def render(self) -> Iterable[str]:
        """All lines of the ``vllm:`` series."""
        for metric in self._order:
            yield from metric.render()


class HttpMetrics:
    """The series of the HTTP instrumentation."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], Counter] = {}
        self._sizes: dict[tuple[str, str], tuple[int, float, float]] = {}
        self._latency: dict[tuple[str, str], Histogram] = {}
        self._highr = Histogram(
            "http_request_duration_highr_seconds",
            "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. ",
            {},
            _SECONDS_HIGHR,
        )

    def count(self, handler: str, method: str, status: int, seconds: float, sizes: tuple[int, int]) -> None:
        """Counts a finished exchange; ``sizes`` are bytes of request and answer."""
        group = f"{status // 100}xx"
        key = (handler, method, group)
        if key not in self._requests:
            labels = {"handler": handler, "method": method, "status": group}
            self._requests[key] = Counter(
                "http_requests", "Total number of requests by method, status and handler.", [labels]
            )
        self._requests[key].inc()
        for kind, size in zip(("request", "response"), sizes, strict=True):
            count, total, created = self._sizes.get((kind, handler), (0, 0.0, time.time()))
            self._sizes[kind, handler] = (count + 1, total + size, created)
        self._highr.observe(seconds)
        if (handler, method) not in self._latency:
            self._latency[handler, method] = Histogram(
                "http_request_duration_seconds",
                "Latency with only few buckets by handler. "
                "Made to be only used if aggregation by handler is important. ",
                {"handler": handler, "method": method},
                (0.1, 0.5, 1.0),
            )
        self._latency[handler, method].observe(seconds)

    def render(self) -> Iterable[str]:
        """All lines."""
        yield from _merged(self._requests.values())
        for kind, text in (("request", "incoming requests"), ("response", "outgoing responses")):
            name = f"http_{kind}_size_bytes"
            help_text = (
                f"Content length of {text} by handler. Only value of header is respected. Otherwise ignored. "
                "No percentile calculated. "
            )
            rows = [(key[1], value) for key, value in self._sizes.items() if key[0] == kind]
            yield f"# HELP {name} {help_text}"
            yield f"# TYPE {name} summary"
            for handler, (count, total, _) in rows:
                labels = label_text({"handler": handler})
                yield f"{name}_count{labels} {number(count)}"
                yield f"{name}_sum{labels} {number(total)}"
            yield f"# HELP {name}_created {help_text}"
            yield f"# TYPE {name}_created gauge"
            for handler, (_, _, created) in rows:
                yield f"{name}_created{label_text({'handler': handler})} {number(created)}"
        yield from self._highr.render()
        yield from _merged(self._latency.values())


def _merged(metrics: Iterable[Counter | Histogram]) -> Iterable[str]:
    """Families that were made child by child, with one head each."""
    heads: dict[str, list[str]] = {}
    for metric in metrics:
        head = ""
        for line in metric.render():
            if line.startswith("# HELP"):
                head = line.split(" ", 3)[2]
                heads.setdefault(head, [line])
            elif line.startswith("# TYPE"):
                if len(heads[head]) == 1:
                    heads[head].append(line)
            else:
                heads[head].append(line)
    for lines in heads.values():
        yield from lines


def process_lines(started: float) -> Iterable[str]:
    """The ``python_`` and ``process_`` series; ``started`` is the process's start, epoch seconds."""
    stats = gc.get_stats()
    families = (
        ("python_gc_objects_collected_total", "Objects collected during gc", "collected"),
        ("python_gc_objects_uncollectable_total", "Uncollectable objects found during GC", "uncollectable"),
        ("python_gc_collections_total", "Number of times this generation was collected", "collections"),
    )
    for name, text, key in families:
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} counter"
        for generation, values in enumerate(stats):
            yield f'{name}{{generation="{generation}"}} {number(values[key])}'
    version = sys.version_info
    yield "# HELP python_info Python platform information"
    yield "# TYPE python_info gauge"
    yield (
        f'python_info{{implementation="CPython",major="{version.major}",minor="{version.minor}",patchlevel="{version.micro}",'
        f'version="{version.major}.{version.minor}.{version.micro}"}} 1.0'
    )
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    page = resource.getpagesize()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    rows = (
        ("process_virtual_memory_bytes", "Virtual memory size in bytes.", "gauge", int(pages[0]) * page),
        ("process_resident_memory_bytes", "Resident memory size in bytes.", "gauge", int(pages[1]) * page),
        ("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", "gauge", started),
        (
            "process_cpu_seconds_total",
            "Total user and system CPU time spent in seconds.",
            "counter",
            usage.ru_utime + usage.ru_stime,
        ),
        (
            "process_open_fds",
            "Number of open file descriptors.",
            "gauge",
            sum(1 for _ in Path("/proc/self/fd").iterdir()),
        ),
        (
            "process_max_fds",
            "Maximum number of open file descriptors.",
            "gauge",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ),
    )
    for name, text, kind, value in rows:
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        yield f"{name} {number(value)}"
