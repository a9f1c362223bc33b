"""Other load generators' results as boots: `vllm bench sweep serve`, GuideLLM and AIPerf. Reads JSON, writes nothing.

What is a boot? These tools repeat within one running server, and **repeats within one server are not boots**: they
share its compiled graphs, its autotuning and its KV cache. So all runs of one server become one value (the mean of
their logs), and the notes say so. Which runs shared a server follows from where they lie:

* `vllm bench sweep serve` starts one server for each combination of `--serve-params` in each invocation. An experiment
  folder (`results/20260801_120000`) therefore holds one boot of each `SERVE--…` folder in it. Several invocations side
  by side are several boots.
* GuideLLM and AIPerf measure a server that somebody else started: `VARIANT/BOOT/….json`. The first folder below the
  one that was given names the variant, the second the boot; without a second one each GuideLLM report is a boot, and
  all AIPerf exports of a variant are one.

Shapes: vllm/benchmarks/sweep/serve.py and vllm/benchmarks/serve.py; guidellm/benchmark/schemas/generative (`args` up to
0.3, `config` from 0.4); AIPerf's docs/reference/json-export-schema.md (`loadgen` up to 0.6, `phases` later).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import SeriesError
from orchestrator.records import BootResult, Level, LevelResult, Series, with_one_length

MOST_FILES = 10_000
MOST_BYTES = 256 * 1024 * 1024  # GuideLLM keeps its requests in its report
VLLM = "vllm bench serve"
DEFAULT = "default"
_INPUT_LENGTH = re.compile(r"-?\b(?:random[-_])?input[-_]len=([1-9][0-9]{0,6})\b")
_NOT_RESULTS = frozenset({"summary.json", "warmup.json"})  # the runs again, and what was not to be measured
ONE_SERVER = "runs of one server are repeats, not boots: each boot counts once, as the mean of their logs"


@dataclass(frozen=True, slots=True)
class Run:
    """One run against one server. `value` is tok/s, None where it failed; `workload` tells unlike runs apart.

    `input_tokens` is the prompt length that was asked for, None where the result does not say.
    """

    tool: str
    variant: str
    boot: str
    concurrency: int | None
    value: float | None
    workload: str = ""
    fatal: str | None = None
    input_tokens: int | None = None

    @property
    def level(self) -> Level | None:
        """Where it was measured; None for a server that never came up."""
        return None if self.concurrency is None else Level(self.concurrency, self.input_tokens)


def is_result(data: Any) -> bool:
    """Whether a file's JSON is a result of one of these tools."""
    return _tool(data) is not None


def read_results(path: Path) -> Series:
    """A result file, or a folder of them.

    Raises:
        SeriesError: nothing there is a result, or what is there cannot be compared; all problems at once.
    """
    problems: list[str] = []
    runs: list[Run] = []
    strange = 0
    for file in _files(path):
        try:
            data = _load(file)
        except SeriesError as error:
            problems += error.problems
            continue
        tool = _tool(data)
        if tool is None:
            strange += 1
            continue
        try:
            runs += tool(data, file, path)
        except _NoLevelError as error:
            problems.append(f"{file}: {error}")
    if not runs and not problems:
        problems.append(f"{path}: no result of vllm bench sweep serve, GuideLLM or AIPerf among {strange} JSON files")
    problems += _mixed(runs)
    if problems:
        raise SeriesError(problems, hint='see docs/statistics.md, "Other tools\' results"')
    return _series(path, runs, strange)


class _NoLevelError(ValueError):
    """A result without the number that is needed; its text is a problem of the input."""


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*.json") if file.name not in _NOT_RESULTS)
    if len(found) > MOST_FILES:
        raise SeriesError([f"{path}: {len(found)} JSON files; accepted: at most {MOST_FILES}"])
    return found


def _load(file: Path) -> Any:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise SeriesError([f"{file}: larger than {MOST_BYTES // 1024 // 1024} MiB"])
        return json.loads(file.read_bytes())
    except OSError as error:
        raise SeriesError([f"{file}: cannot be read: {error.strerror or error}"]) from error
    except (ValueError, RecursionError) as error:
        raise SeriesError([f"{file}: not JSON: {error}"]) from error


# --- one reader a tool ---------------------------------------------------------------------------------------------


def _vllm(data: Mapping[str, Any], file: Path, root: Path) -> Iterator[Run]:
    """`run=0.json` in `SERVE--a=1-BENCH--max_concurrency=8` in the folder of one invocation."""
    variant, boot, load, length = _swept(file, root, swept="run_number" in data)
    failed = data.get("failed")
    if failed is None and isinstance(data.get("completed"), int) and isinstance(data.get("num_prompts"), int):
        failed = data["num_prompts"] - data["completed"]  # before 0.11 the failures were not counted
    level = _level(data.get("max_concurrency"), "max_concurrency")
    value = None if failed else _positive(data.get("output_throughput"))
    yield Run(VLLM, variant, boot, level, value, load, input_tokens=length)


def _vllm_failure(data: Mapping[str, Any], file: Path, root: Path) -> Iterator[Run]:
    """`run=0.failure.json` beside the runs, or `SERVE--a=1-failure.json` where the server never came up."""
    asked = data.get("bench_overrides")
    if not isinstance(asked, dict):
        variant, _ = _combination(file.name.removesuffix("-failure.json"))
        told = " ".join(f"{data['error_type']}: {data.get('error', '')}".split())
        yield Run(VLLM, variant, _invocation(file.parent, root), None, None, fatal=told[:120])
        return
    variant, boot, load, length = _swept(file, root, swept=True)
    level = asked.get("max_concurrency", asked.get("max-concurrency"))
    where = _level(level, "max_concurrency of the failed run")
    yield Run(VLLM, variant, boot, where, None, load, input_tokens=length)


def _swept(file: Path, root: Path, *, swept: bool) -> tuple[str, str, str, int | None]:
    """Variant, boot, load and prompt length of a run.

    Of a sweep, or of `vllm bench serve` alone, which needs folders of ours.
    """
    folder = file.parent
    if folder.name.startswith(("SERVE--", "BENCH--")):
        variant, bench = _combination(folder.name)
        length = _INPUT_LENGTH.search(bench)
        tokens = int(length[1]) if length is not None else None
        return variant, _invocation(folder.parent, root), _without_level(bench), tokens
    if swept:  # neither server nor load was varied: the runs lie in the invocation's own folder
        return DEFAULT, _invocation(folder, root), "", None
    return (*_placed(file, root, alone=""), "", None)


def _invocation(folder: Path, root: Path) -> str:
    return str(folder.relative_to(root)) if root.is_dir() and folder.is_relative_to(root) else folder.name


def _combination(folder: str) -> tuple[str, str]:
    """Variant and load of a combination's folder: `SERVE--a=1-BENCH--b=2` is `a=1` and `b=2`."""
    serve, _, bench = folder.partition("BENCH--")
    return serve.removeprefix("SERVE--").removesuffix("-" if bench else "") or DEFAULT, bench


def _without_level(bench: str) -> str:
    """The load without its concurrency and prompt length, which are a level of one experiment, not another load."""
    return _INPUT_LENGTH.sub("", re.sub(r"-?max[-_]concurrency=[0-9]+", "", bench)).strip("-")


def _guidellm(data: Mapping[str, Any], file: Path, root: Path) -> Iterator[Run]:
    variant, boot = _placed(file, root, alone=file.name)
    for benchmark in data["benchmarks"]:
        settings = benchmark.get("config") or benchmark.get("args") or {}
        strategy = settings.get("strategy") or {}
        kind = strategy.get("type_") or strategy.get("kind")
        level = 1 if kind == "synchronous" else _level(strategy.get("streams"), f"streams of its `{kind}` load")
        metrics = benchmark.get("metrics") or {}
        rate = (metrics.get("output_tokens_per_second") or {}).get("successful") or {}
        totals = metrics.get("request_totals") or benchmark.get("request_totals") or {}
        failed = isinstance(totals.get("errored"), int) and totals["errored"] > 0
        yield Run("GuideLLM", variant, boot, level, None if failed else _positive(rate.get("mean")))


def _aiperf(data: Mapping[str, Any], file: Path, root: Path) -> Iterator[Run]:
    variant, boot = _placed(file, root, alone="")
    if data.get("was_cancelled"):
        raise _NoLevelError("this run was cancelled; take it away")
    settings = data.get("input_config") or {}
    phases = [phase for phase in settings.get("phases") or () if isinstance(phase, dict)]
    profiling = next((p for p in phases if "profiling" in (p.get("name"), p.get("kind"))), None)
    load = profiling or settings.get("loadgen") or {}
    rate = data["output_token_throughput"]
    if rate.get("unit") not in (None, "tokens/sec", "tokens/s", "tok/s"):
        raise _NoLevelError(f"output_token_throughput in {rate['unit']!r}; accepted: tokens/sec")
    failed = any(isinstance(error, dict) and error.get("count", 1) for error in data.get("error_summary") or ())
    level = _level(load.get("concurrency"), "concurrency")
    yield Run("AIPerf", variant, boot, level, None if failed else _positive(rate.get("avg")))


Reader = Callable[[Mapping[str, Any], Path, Path], Iterator[Run]]


def _tool(data: Any) -> Reader | None:
    """Who wrote a file, from what stands in it."""
    if not isinstance(data, dict):
        return None
    if "output_throughput" in data and "max_concurrency" in data:
        return _vllm
    if "error_type" in data and "serve_overrides" in data:
        return _vllm_failure
    benchmarks = data.get("benchmarks")
    if isinstance(benchmarks, list) and benchmarks and all(isinstance(b, dict) and "metrics" in b for b in benchmarks):
        return _guidellm
    if isinstance(data.get("output_token_throughput"), dict) and "variants" not in data:
        return _aiperf
    return None


def _placed(file: Path, root: Path, *, alone: str) -> tuple[str, str]:
    """Variant and boot, by the folders between the one that was given and the file."""
    if not root.is_dir():
        return file.stem, ""
    parts = file.relative_to(root).parts[:-1]
    return parts[0] if parts else root.resolve().name, parts[1] if len(parts) > 1 else alone


def _positive(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise _NoLevelError(f"an output throughput of {value!r}; accepted: a finite positive number of tokens/s")
    return float(value)


def _level(value: Any, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise _NoLevelError(f"no {what}; accepted: results of a closed loop with a number of concurrent streams")


# --- runs to boots -------------------------------------------------------------------------------------------------


def _mixed(runs: Iterable[Run]) -> Iterator[str]:
    """Unlike loads at one level of one boot: their numbers must not be pooled."""
    loads: dict[tuple[str, str, Level | None], set[str]] = {}
    for run in runs:
        loads.setdefault((run.variant, run.boot, run.level), set()).add(run.workload)
    for (variant, _, level), seen in loads.items():
        if len(seen) > 1:
            named = ", ".join(sorted(load or "(none)" for load in seen))
            yield f"{variant} at {level}: different loads must not be pooled ({named}); accepted: one of them"


def _series(path: Path, runs: Sequence[Run], strange: int) -> Series:
    boots: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        boots.setdefault(run.variant, {}).setdefault(run.boot, []).append(run)
    results, lengths = with_one_length(
        _boot(variant, number, own)
        for variant, there in boots.items()
        for number, own in enumerate(there.values(), start=1)
    )
    return Series(
        experiment=path.stem if path.is_file() else path.resolve().name,
        variants=tuple(boots),
        boots=results,
        input_tokens=lengths,
        notes=tuple(_notes(runs, boots, strange)),
    )


def _boot(variant: str, number: int, runs: Sequence[Run]) -> BootResult:
    fatal = next((run.fatal for run in runs if run.fatal is not None), None)
    levels = sorted({level for run in runs if (level := run.level) is not None})
    dead = fatal is not None and not levels
    return BootResult(
        boot=f"b{number:02d}-{variant}",
        variant=variant,
        cache="as-is",  # nobody cleared the compile caches before
        block=number,
        position=number,
        outcome="crashed" if dead else "completed",
        why=f"the server did not come up: {fatal}" if dead else "",
        died=dead,
        died_before_trials=dead,
        cause=fatal if dead else None,
        levels=tuple(_measured(level, [run for run in runs if run.level == level]) for level in levels),
    )


def _measured(level: Level, runs: Sequence[Run]) -> LevelResult:
    where = {"concurrency": level.concurrency, "input_tokens": level.input_tokens}
    values = [run.value for run in runs if run.value is not None]
    if len(values) < len(runs):
        return LevelResult(**where, value=None, failed=True)
    middle = values[0] if len(values) == 1 else math.exp(math.fsum(map(math.log, values)) / len(values))
    return LevelResult(**where, value=middle)


def _notes(runs: Sequence[Run], boots: Mapping[str, Mapping[str, Sequence[Run]]], strange: int) -> Iterator[str]:
    tools = sorted({run.tool for run in runs})
    servers = sum(len(there) for there in boots.values())
    yield f"read {len(runs)} runs of {' and '.join(tools)} as {servers} boots of {len(boots)} variants"
    yield ONE_SERVER
    yield "nobody says that the compile caches were empty before these boots, so none of them counts as a cold start"
    if strange:
        yield f"{strange} other JSON files were not read"
