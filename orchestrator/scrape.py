"""/metrics: fetch once; pure parse → samples, one snapshot, the increase between two.

The text format is Prometheus' 0.0.4 and OpenMetrics' 1.0.0 as far as servers write them. Names of vLLM 0.10 to 0.32
stand in one table, `NAMES`. A counter `x_total` has a twin `x_created` (a gauge with the epoch time at which it was
made): it is never summed, and tells a restarted server.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import httpx

from orchestrator.errors import BoxError, Unreachable
from orchestrator.records import Deltas

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """What one quantity is called: `names` in order of preference (the first that is there is read, never two)."""

    kind: Kind
    names: tuple[str, ...]


NAMES: Mapping[str, Family] = {
    "generation_tokens": Family("counter", ("vllm:generation_tokens_total",)),
    "prompt_tokens": Family("counter", ("vllm:prompt_tokens_total",)),
    "requests": Family("counter", ("vllm:request_success_total",)),
    "preemptions": Family("counter", ("vllm:num_preemptions_total",)),
    # 0.10 exported `gpu_…` beside, or instead of, the names that all later versions have.
    "prefix_cache_queries": Family(
        "counter",
        ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries"),
    ),
    "prefix_cache_hits": Family(
        "counter",
        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits"),
    ),
    "spec_drafts": Family("counter", ("vllm:spec_decode_num_drafts_total",)),
    "spec_draft_tokens": Family("counter", ("vllm:spec_decode_num_draft_tokens_total",)),
    "spec_accepted_tokens": Family("counter", ("vllm:spec_decode_num_accepted_tokens_total",)),
    "spec_accepted_per_position": Family("counter", ("vllm:spec_decode_num_accepted_tokens_per_pos_total",)),
    "running": Family("gauge", ("vllm:num_requests_running",)),
    "waiting": Family("gauge", ("vllm:num_requests_waiting",)),
    "kv_usage": Family("gauge", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
    "ttft": Family("histogram", ("vllm:time_to_first_token_seconds",)),
    # One observation per engine output, not per token; 0.10 had the first name only as a twin of the second.
    "itl": Family("histogram", ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
}
"""Quantity → what vLLM 0.10 to 0.32 call it (source of each version, and captured pages of 0.26.0)."""

PROCESS_START = "process_start_time_seconds"


# --- text → samples --------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """One point: `label_text` is what stands between the braces, unparsed (most samples' labels nobody asks for)."""

    name: str
    label_text: str
    value: float

    @property
    def labels(self) -> dict[str, str]:
        """The labels, unescaped."""
        return parse_labels(self.label_text)


# Possessive throughout: text that does not match fails in linear time.
_LINE = re.compile(
    r"^[ \t]*+([a-zA-Z_:][a-zA-Z0-9_:.]*+)[ \t]*+"  # name
    # Labels: anything may stand inside the quotes, braces and escaped quotes too.
    r'(?:\{((?:[ \t,]*+[a-zA-Z_][a-zA-Z0-9_:.]*+[ \t]*+=[ \t]*+"(?:[^"\\\n]++|\\[^\n])*+")*+[ \t,]*+)\}[ \t]*+)?'
    r"(?<=[ \t}])([0-9.eE+-]++|[+-]?(?:[nN]a[nN]|[iI]nf(?:inity)?))"  # value
    r"(?:[ \t]++[0-9.eE+-]++)?"  # timestamp
    r"[ \t]*+(?:#[^\n]*+)?\r?\n",  # exemplar
    re.MULTILINE,
)
_LABEL = re.compile(r'[ \t,]*+([a-zA-Z_][a-zA-Z0-9_.:]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def _unescape(match: re.Match[str]) -> str:
    # The format knows \\, \" and \n; an unknown escape stands for its letter with the backslash.
    letter = match.group(1)
    return {"n": "\n", "\\": "\\", '"': '"'}.get(letter, "\\" + letter)


def parse_labels(text: str) -> dict[str, str]:
    r"""Labels between the braces: values may hold commas, spaces, braces, `\"`, `\\` and `\n`."""
    return {
        name: _ESCAPE.sub(_unescape, value) if "\\" in value else value
        for name, value in (match.groups() for match in _LABEL.finditer(text))
    }


def parse(text: str, names: Container[str] | None = None) -> Iterator[Sample]:
    """Samples of one page, in order; with `names` only those so called, which is several times faster.

    Comments and lines that are no sample are passed over. A last line without its newline is not read: of half a page
    it may be half a number.
    """
    if names is not None:
        text = "".join(line + "\n" for line in text.split("\n")[:-1] if _may_be_in(names, line.partition("{")[0]))
    for name, labels, value in _LINE.findall(text):
        try:
            number = float(value)
        except ValueError:  # "1e", "+-1": not a number
            continue
        if names is None or name in names:
            yield Sample(name, labels, number)


def _may_be_in(names: Container[str], head: str) -> bool:
    """Whether a line with `head` before its first brace may be a sample of these names; rather too often than not."""
    return head in names or head.partition(" ")[0] in names or head[:1] == " " or "\t" in head


# --- samples → snapshot ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Histogram:
    """A Prometheus histogram summed over its series: `bounds` are upper edges, `counts` are cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    count: float

    def minus(self, earlier: Histogram | None) -> Histogram | None:
        """Observations since `earlier`; None when it is not the same histogram any more (other edges, or a reset)."""
        if earlier is None:
            return self
        if earlier.bounds != self.bounds or earlier.count > self.count:
            return None
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - earlier.total, self.count - earlier.count)

    @property
    def mean(self) -> float | None:
        """Exact mean, in the histogram's unit."""
        return self.total / self.count if self.count > 0 else None

    def quantile(self, q: float) -> tuple[float, float, float] | None:
        """(estimate, lower, upper): linear inside its bucket, and the bucket's edges, between which the truth lies.

        None without observations. In the last, open bucket the estimate is its lower edge and `upper` is infinite.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q must lie in 0..1, not {q}")
        if self.count <= 0 or not self.bounds:
            return None
        rank = q * self.counts[-1]
        lower, below = 0.0, 0.0
        for upper, upto in zip(self.bounds, self.counts, strict=True):
            if upto >= rank and upto > below:
                if math.isinf(upper):
                    return lower, lower, upper
                return lower + (upper - lower) * (rank - below) / (upto - below), lower, upper
            lower, below = upper, upto
        return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The server's counters and gauges at one moment, summed over engines; None where the family is not exported.

    `t_s` is the client's monotonic clock (midpoint of the request), `half_s` by how much it may be off, `at_s` the
    epoch. `series` holds every counter series by itself (`family{labels}` → value), `created` every `_created` stamp.
    `kv_usage` is the mean over engines, 0..1.
    """

    t_s: float
    half_s: float = 0.0
    at_s: float | None = None
    engines: int = 0
    generation_tokens: float | None = None
    prompt_tokens: float | None = None
    requests: float | None = None
    requests_by_reason: Mapping[str, float] = field(default_factory=dict)
    preemptions: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    spec_drafts: float | None = None
    spec_draft_tokens: float | None = None
    spec_accepted_tokens: float | None = None
    spec_accepted_per_position: tuple[float, ...] = ()
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    ttft: Histogram | None = None
    itl: Histogram | None = None
    series: Mapping[str, float] = field(default_factory=dict)
    created: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> float | None:
        """Requests running and waiting; None when the server tells neither."""
        told = [value for value in (self.running, self.waiting) if value is not None]
        return sum(told) if told else None


def _wanted() -> dict[str, str]:
    """Sample name → quantity, histogram parts and `_created` twins included."""
    wanted: dict[str, str] = {}
    for quantity, family in NAMES.items():
        for name in family.names:
            parts = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            wanted.update({name + part: quantity for part in parts})
    return wanted


_WANTED = _wanted()
_CREATED = {
    name.removesuffix("_total") + "_created"
    for family in NAMES.values()
    if family.kind != "gauge"
    for name in family.names
} | {PROCESS_START}
_READ = _CREATED | _WANTED.keys()


def snapshot(samples: Iterable[Sample], t_s: float, *, half_s: float = 0.0, at_s: float | None = None) -> Snapshot:
    """One snapshot of a page's samples. `t_s`: client's monotonic time of the read, `half_s` its uncertainty."""
    found: dict[str, list[Sample]] = {}
    created: dict[str, float] = {}
    for sample in samples:
        if sample.name in _WANTED:
            if not math.isnan(sample.value):
                found.setdefault(sample.name, []).append(sample)
        elif sample.name in _CREATED:
            created[f"{sample.name}{{{sample.label_text}}}"] = sample.value
    chosen = {quantity: _first(family, found) for quantity, family in NAMES.items()}
    counters = {quantity for quantity, family in NAMES.items() if family.kind == "counter"}
    sums = {
        quantity: math.fsum(sample.value for sample in chosen[quantity]) if chosen[quantity] else None
        for quantity, family in NAMES.items()
        if family.kind != "histogram" and quantity != "spec_accepted_per_position"
    }
    usage = chosen["kv_usage"]
    if usage:
        sums["kv_usage"] = math.fsum(sample.value for sample in usage) / len(usage)
    return Snapshot(
        t_s=t_s,
        half_s=half_s,
        at_s=at_s,
        engines=len({sample.labels.get("engine", "") for sample in chosen["generation_tokens"]}),
        requests_by_reason=_by_label(chosen["requests"], "finished_reason"),
        spec_accepted_per_position=_positions(chosen["spec_accepted_per_position"]),
        ttft=_histogram(NAMES["ttft"], found),
        itl=_histogram(NAMES["itl"], found),
        series={f"{s.name}{{{s.label_text}}}": s.value for quantity in counters for s in chosen[quantity]},
        created=created,
        **sums,  # the keys are NAMES', each a field of that name
    )


def _first(family: Family, found: Mapping[str, list[Sample]]) -> list[Sample]:
    return next((found[name] for name in family.names if found.get(name)), [])


def _by_label(samples: Iterable[Sample], label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for sample in samples:
        key = sample.labels.get(label, "")
        sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def _positions(samples: Iterable[Sample]) -> tuple[float, ...]:
    """Accepted per position, position 0 first; positions that nobody exports are 0."""
    sums = {int(key): value for key, value in _by_label(samples, "position").items() if re.fullmatch(r"\d{1,3}", key)}
    return tuple(sums.get(position, 0.0) for position in range(max(sums) + 1)) if sums else ()


def _histogram(family: Family, found: Mapping[str, list[Sample]]) -> Histogram | None:
    name = next((name for name in family.names if found.get(name + "_bucket")), None)
    if name is None:
        return None
    buckets: dict[float, float] = {}
    for sample in found[name + "_bucket"]:
        try:
            bound = float(sample.labels.get("le", ""))
        except ValueError:
            continue
        buckets[bound] = buckets.get(bound, 0.0) + sample.value
    bounds = tuple(sorted(bound for bound in buckets if not math.isnan(bound)))
    counts = tuple(buckets[bound] for bound in bounds)
    total = math.fsum(sample.value for sample in found.get(name + "_sum", ()))
    counted = found.get(name + "_count")
    count = math.fsum(sample.value for sample in counted) if counted else (counts[-1] if counts else 0.0)
    return Histogram(bounds, counts, total, count)


# --- two snapshots → increase ----------------------------------------------------------------------------------------


def was_reset(earlier: Snapshot, later: Snapshot) -> bool:
    """Whether the server (or one of its engines) began anew: a series fell or vanished, or a birth stamp moved."""
    fell = any(later.series.get(key, -1.0) < value for key, value in earlier.series.items())
    moved = any(key in later.created and later.created[key] != stamp for key, stamp in earlier.created.items())
    return fell or moved


def delta(earlier: Snapshot, later: Snapshot) -> Deltas:
    """The increase from `earlier` to `later`; after a reset no increase exists, and all are None.

    A series that is only in `later` was made in between and counts from 0. Times are the reads' midpoints.
    """
    seconds = later.t_s - earlier.t_s
    if was_reset(earlier, later):
        return Deltas(seconds=seconds, counter_reset=True)

    def increase(now: float | None, then: float | None) -> float | None:
        return None if now is None else now - (then or 0.0)

    reasons = {
        reason: count - earlier.requests_by_reason.get(reason, 0.0)
        for reason, count in later.requests_by_reason.items()
    }
    before = earlier.spec_accepted_per_position
    return Deltas(
        seconds=seconds,
        generation_tokens=increase(later.generation_tokens, earlier.generation_tokens),
        prompt_tokens=increase(later.prompt_tokens, earlier.prompt_tokens),
        requests_by_reason=reasons,
        preemptions=increase(later.preemptions, earlier.preemptions),
        prefix_cache_queries=increase(later.prefix_cache_queries, earlier.prefix_cache_queries),
        prefix_cache_hits=increase(later.prefix_cache_hits, earlier.prefix_cache_hits),
        spec_drafts=increase(later.spec_drafts, earlier.spec_drafts),
        spec_draft_tokens=increase(later.spec_draft_tokens, earlier.spec_draft_tokens),
        spec_accepted_tokens=increase(later.spec_accepted_tokens, earlier.spec_accepted_tokens),
        spec_accepted_per_position=tuple(
            now - (before[position] if position < len(before) else 0.0)
            for position, now in enumerate(later.spec_accepted_per_position)
        ),
    )


# --- the door --------------------------------------------------------------------------------------------------------


def read_page(url: str, status: int, content_type: str, body: bytes) -> str:
    """The page's text, or the error that says what answered instead.

    Raises:
        BoxError: no /metrics there (404), it asks for a key (401, 403), another status, or it is a page for people.
    """
    if status == 404:
        raise BoxError(f"{url} is not there (404)", hint="was the server started with --disable-log-stats?")
    if status in (401, 403):
        raise BoxError(f"{url} wants a key ({status})", hint="vLLM leaves /metrics open: is a proxy in between?")
    if status != 200:
        raise BoxError(f"{url} answered {status}: {excerpt(body)}")
    text = body.decode("utf-8", "replace")
    if "html" in content_type.lower() or text.lstrip()[:1] == "<":
        raise BoxError(f"{url} answered HTML, no metrics: {excerpt(body)}", hint="does this port belong to the engine?")
    if not _LINE.search(text):
        raise BoxError(f"{url} answered no sample in the Prometheus text format: {excerpt(body)}")
    return text


def excerpt(body: bytes, limit: int = 160) -> str:
    """The first characters of a body, on one line."""
    text = " ".join(body[: limit * 4].decode("utf-8", "replace").split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read(text: str, t_s: float, *, half_s: float = 0.0, at_s: float | None = None) -> Snapshot:
    """The snapshot of one page's text, without looking at what it does not need."""
    return snapshot(parse(text, _READ), t_s, half_s=half_s, at_s=at_s)


def fetch(base_url: str, timeout_s: float, *, api_key: str | None = None, path: str = "/metrics") -> Snapshot:
    """One snapshot of the server at `base_url` (`http://host:port`), by a request of at most `timeout_s`.

    Raises:
        Unreachable: refused, lost, or no answer in time.
        BoxError: something answered, but not a metrics page (see `read_page`).
    """
    url = base_url.rstrip("/").removesuffix("/v1") + path
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = bytearray()
    sent_s = time.monotonic()
    try:
        # No proxies or .netrc from the environment: the ruler reads the box itself.
        with (
            httpx.Client(timeout=timeout_s, trust_env=False) as http,
            http.stream("GET", url, headers=headers) as response,
        ):
            for piece in response.iter_bytes():
                body += piece
                # httpx's time-out is for each read: a page that drips would never end.
                if time.monotonic() - sent_s > timeout_s:
                    raise Unreachable(f"{url} did not end within {timeout_s:g} s")
            ended_s, at_s = time.monotonic(), time.time()
    except httpx.TimeoutException as error:
        raise Unreachable(f"{url} gave no answer within {timeout_s:g} s") from error
    except httpx.ConnectError as error:
        raise Unreachable(f"{url}: no connection ({error})") from error
    except (httpx.TransportError, httpx.InvalidURL, httpx.DecodingError) as error:
        raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error
    half_s = (ended_s - sent_s) / 2
    text = read_page(url, response.status_code, response.headers.get("content-type", ""), bytes(body))
    return read(text, sent_s + half_s, half_s=half_s, at_s=at_s - half_s)
