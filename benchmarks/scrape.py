"""How long a 2 MB /metrics page takes: `python benchmarks/scrape.py` (goal: < 50 ms, best of 15)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from orchestrator import scrape

PAGE = Path(__file__).parent.parent / "tests" / "data" / "metrics" / "vllm_0.26.0_dp2.txt"


def best_ms(work: Callable[[], object], rounds: int = 15) -> float:
    """The quickest of some rounds, milliseconds: what the work costs when nobody disturbs it."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took) * 1e3


def main() -> None:
    """Print the table."""
    text = PAGE.read_text(encoding="utf-8")
    big = text * (2_000_000 // len(text) + 1)
    samples = sum(1 for _ in scrape.parse(big))
    print(f"{len(big) / 1e6:.2f} MB, {samples} samples")
    print(f"every sample (parse)           {best_ms(lambda: list(scrape.parse(big))):6.1f} ms")
    print(f"a snapshot (read)              {best_ms(lambda: scrape.read(big, 0.0)):6.1f} ms")
    print(f"a page as it is, {len(text) // 1000} kB (read) {best_ms(lambda: scrape.read(text, 0.0)):6.1f} ms")


if __name__ == "__main__":
    main()
