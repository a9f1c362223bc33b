"""How fast the classifier reads: MB/s and entries/s on one core, and peak memory, over journals of a given size.

    python benchmarks/journal.py [--mb 100] [--rounds 3] [--log FILE]

The journals, written to a temporary folder: `serving` as `journalctl -o json` prints it (access log, periodic lines,
warnings, a crash at the end) and as a plain log; `errors`, the worst case, tracebacks only, likewise; `reports`, the
100 reported cases of tests/data one after the other, over and over; and each whole log of a real GPU, over and over.
`--log` takes the serving part from a real log's lines instead. CPU time, the best of some rounds; the goal is 50 MB/s
or 200,000 entries/s.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.journal import Classifier

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "journal"
ID = "0123456789abcdef0123456789abcdef"
START_US = 1_796_000_000_000_000
CORE = "(EngineCore pid=1510) ERROR 11-30 15:05:03 [core.py:1332] "
PERIODIC = (
    "(APIServer pid=1184) INFO 11-30 14:54:08 [loggers.py:310] Engine 000: Avg prompt throughput: 1977.4 tokens/s, "
    "Avg generation throughput: 3384.8 tokens/s, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix "
    "cache hit rate: 0.0%"
)
SPECULATION = (
    "(APIServer pid=1184) INFO 11-30 14:54:08 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.79, "
    "Accepted throughput: 1491.17 tokens/s, Drafted throughput: 1885.04 tokens/s, Accepted: 14912 tokens, Drafted: "
    "18851 tokens, Per-position acceptance rate: 0.791, Avg Draft acceptance rate: 79.1%"
)
OOM = (
    f"{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 186.00 MiB. GPU 0 has a total capacity of "
    "139.80 GiB of which 27.56 MiB is free."
)
SERVING = (
    '(APIServer pid=1184) INFO:     127.0.0.1:59970 - "POST /v1/completions HTTP/1.1" 200 OK',
    '(APIServer pid=1184) INFO:     127.0.0.1:60018 - "GET /metrics HTTP/1.1" 200 OK',
    PERIODIC,
    SPECULATION,
    "(EngineCore pid=1510) INFO 11-30 14:54:09 [scheduler.py:88] Iteration(4711): 8 context requests, 0 prefill tokens",
)
ERRORS = (
    f"{CORE}Traceback (most recent call last):",
    f'{CORE}  File "/opt/site/vllm/v1/engine/core.py", line 1323, in run_busy_loop',
    f"{CORE}    return func(*args, **kwargs)",
    "(APIServer pid=1184) ERROR 11-30 14:57:21 [serving.py:495] Error in completion stream generator.",
    OOM,
)


def as_json(message: str, number: int) -> str:
    """One line with the fields that journald really writes."""
    return json.dumps(
        {
            "__CURSOR": f"s={ID};i={number:x};b={ID};m={number:x}",
            "__REALTIME_TIMESTAMP": str(START_US + 1000 * number),
            "__MONOTONIC_TIMESTAMP": str(1000 * number),
            "_BOOT_ID": "0123456789abcdef0123456789abcdef",
            "_TRANSPORT": "stdout",
            "PRIORITY": "6",
            "SYSLOG_IDENTIFIER": "vllm",
            "_PID": "1184",
            "_UID": "998",
            "_COMM": "vllm",
            "_EXE": "/usr/bin/python3.12",
            "_SYSTEMD_CGROUP": "/system.slice/vllm.service",
            "_SYSTEMD_UNIT": "vllm.service",
            "_SYSTEMD_INVOCATION_ID": "7405cbd3dea40dd68a726f3133dd714f",
            "_HOSTNAME": "box",
            "MESSAGE": message,
        }
    )


def lines(messages: tuple[str, ...], size: int, *, form: str) -> Iterator[str]:
    """Lines until `size` bytes are written, and a crash at the end."""
    written = number = 0
    while written < size:
        message = messages[number % len(messages)]
        line = as_json(message, number) if form == "json" else message
        yield line
        written += len(line) + 1
        number += 1
    for message in (f"{CORE}EngineCore encountered a fatal error.", OOM):
        yield as_json(message, number) if form == "json" else message


def measure(path: Path) -> tuple[float, int, str]:
    """Seconds of CPU, entries and the answer's cause."""
    classifier = Classifier()
    began = time.process_time()
    with path.open("rb") as file:
        classifier.feed_file(file)
    return time.process_time() - began, classifier.seen, classifier.answer().cause


def repeated(entries: list[object], size: int) -> Iterator[str]:
    """The entries as lines, over and over, until `size` bytes are written."""
    block = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    written, length = 0, sum(len(line.encode()) + 1 for line in block)
    while written < size:
        yield from block
        written += length


def journals(size: int, serving: tuple[str, ...]) -> Iterator[tuple[str, Iterator[str]]]:
    """Name and lines of each journal."""
    for name, messages in (("serving", serving), ("errors", ERRORS)):
        for form in ("json", "plain"):
            yield f"{name}, {form}", lines(messages, size, form=form)
    reports = [json.loads(line) for line in (DATA / "journal.jsonl").read_bytes().splitlines()]
    yield "reports", repeated([entry for case in reports for entry in case["entries"]], size)
    real = [json.loads(line) for line in gzip.decompress((DATA / "real_gpu.jsonl.gz").read_bytes()).splitlines()]
    for case in real:
        yield case["id"], repeated(case["entries"], size)


def main() -> None:
    """Measure the journals and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log", type=Path, help="take the serving part from this file (one message a line)")
    given = parser.parse_args()
    serving = tuple(given.log.read_text(encoding="utf-8").splitlines()) if given.log else SERVING
    print("| journal | MB | entries | CPU s | MB/s | entries/s | peak MiB | cause |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in journals(given.mb * 1_000_000, serving):
            path = Path(folder) / "journal"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in text)
            seconds, entries, cause = min(measure(path) for _ in range(given.rounds))
            size = path.stat().st_size / 1e6
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"| {name} | {size:.0f} | {entries} | {seconds:.2f} | {size / seconds:.0f} | {entries / seconds:.0f} "
                f"| {peak:.0f} | {cause} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
