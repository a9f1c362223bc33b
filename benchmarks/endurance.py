"""A day of campaigns in an hour: thousands of rehearsal boots in one experiment, and whether anything grows.

    python benchmarks/endurance.py run FOLDER [--boots 2000]
    python benchmarks/endurance.py page FOLDER [TO]
    python benchmarks/endurance.py grow FOLDER TO [--boots 500]

`run` starts the ordinary `invoke matrix` in FOLDER and looks at its process from outside once a boot: resident memory,
open descriptors, threads, child processes, seconds of ours, size of the ledger. Each look is a line of `looks.csv`, so
that a run that is cut off is kept; the same command goes on. Afterwards it measures what a ledger of that size costs:
going on, `plan`, `report`, `gate`, each with its time and its peak memory.

`grow` makes the same ledger without booting: the boots of a short run in FOLDER again and again, each with values of
its own, until each variant has so many; then it measures what that costs, as `run` does.

`page` makes benchmarks/endurance.md and its chart; with TO, the costs are those of the grown ledger. Whether something
grows is not judged by eye: it is the Theil-Sen slope with its 95 % interval over all looks but those of
the first 100 boots, in percent of the median.

The boots are short by what a matrix may say: boot phases at a 2000th, an engine whose steps take 3 ms, windows of
one request, many of them a level; no headroom. Everything else is what a night on a real box does.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import orjson
from scipy import stats

from orchestrator.plan import PLAN_FILE, extend, read_plan, write_plan

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
NAME = "endurance"
WARM = 100
WANTED = 2000
CHART = "endurance.png"

MATRIX = """experiment: endurance
headroom: off
concurrency: [1, 2]
tolerance: 0.5
variants:
  no-spec: {unset: [spec-method, spec-model, spec-tokens]}
  spec-1: {spec-tokens: 1}
  spec-2: {spec-tokens: 2}
  eager: {enforce-eager: true}
limits: {free_disk_mib: 200}
boxes:
  here:
    engine: rehearsal
    transport: local
    service: process
    unit_file: production.service
    time_scale: 0.0005
    dead_man_s: 60
    env: {COLDBOOT_REHEARSAL_PERSONALITY: "@"}
    load: {window_requests: 1, warmup_s: 0, max_warmup_s: 5, input_tokens: 8, output_tokens: 4, windows: 18,
           sanity_tokens: 1}
"""
UNIT = (
    "[Service]\nExecStart=/usr/bin/vllm --model /models/qwen --served-model-name qwen3-27b --tensor-parallel-size 2 "
    "--gpu-memory-utilization 0.9 --max-model-len 8192 --max-num-seqs 16 --spec-method qwen3_5_mtp "
    "--spec-model /models/qwen --spec-tokens 1 --host 127.0.0.1 --port 8080\n"
)
PERSONALITY = (
    "[speed]\nstep_ms = 3\ndraft_ms = 0.02\nrow_ms = 0.01\npass_ms = 0.02\npass_stream_ms = 0.01\njoin_ms = 0.05\n"
    "prefill_ms_per_token = 0.001\nthrash_step_ms = 0.5\nretry_ms = 0.5\nboot_sd = 0.02\n"
    "[server]\nstop_s = 0\n"
)


@dataclass(frozen=True, slots=True)
class Look:
    """The orchestrator as it begins a boot, and the boot before it."""

    session: int
    at_s: float
    boots: int
    records: int
    ledger_mib: float
    rss_mib: float
    descriptors: int
    threads: int
    children: int
    boot_s: float
    ours_s: float


MEASURED = {
    "rss_mib": "resident memory, MiB",
    "descriptors": "open descriptors",
    "threads": "threads",
    "children": "child processes",
    "boot_s": "seconds a boot",
    "ours_s": "of these ours",
}


# --- the run ---------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """The files of the experiment."""
    folder.mkdir(parents=True, exist_ok=True)
    personality = folder / "personality.toml"
    personality.write_text(PERSONALITY)
    (folder / "production.service").write_text(UNIT)
    (folder / "matrix.yaml").write_text(MATRIX.replace("@", str(personality.resolve())))


def invoke(folder: Path, *words: str) -> tuple[str, ...]:
    """One of our commands on that experiment."""
    where = ["--out", str(folder / "artifacts")]
    if words[0] in {"matrix", "plan"}:
        where += ["--matrix", str(folder / "matrix.yaml")]
    return (sys.executable, "-m", "invoke", *words, *where)


def ledger_of(folder: Path) -> Path:
    """The ledger's path."""
    return folder / "artifacts" / NAME / "records.jsonl"


class Tail:
    """The ledger as it grows: boots that ended, records, and how long the last boot took."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = self.records = self.boots = self.begun = 0
        self.boot_s = self.ours_s = 0.0

    def look(self) -> bool:
        """Reads what came; whether a boot has begun."""
        if not self.path.exists():
            return False
        before = self.begun
        with self.path.open("rb") as file:
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.position += len(line)
                self.take(line)
        return self.begun > before

    def take(self, line: bytes) -> None:
        """One record; only two kinds are worth reading."""
        self.records += 1
        if b'"kind":"boot_started"' in line:
            self.begun += 1
        elif b'"kind":"boot_ended"' in line:
            record = orjson.loads(line)
            self.boots += 1
            self.boot_s, self.ours_s = record["seconds"], record["ours_s"]


def resident_mib(pid: int) -> float:
    """What the process holds in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def entries(folder: str) -> int:
    """How many entries a folder has."""
    return sum(1 for _ in Path(folder).iterdir())


def children_of(pid: int) -> int:
    """Processes that it has started and that live."""
    return sum(len((task / "children").read_text().split()) for task in Path(f"/proc/{pid}/task").iterdir())


def run(folder: Path, boots: int) -> None:
    """The campaign, looked at from outside, and then what its ledger costs."""
    prepare(folder)
    looks = folder / "looks.csv"
    session = 1 + max((look.session for look in read_looks(looks)), default=0)
    tail = Tail(ledger_of(folder))
    tail.look()
    begun = time.monotonic()
    with (folder / "said.log").open("ab") as said, looks.open("a", newline="") as out:
        writer = csv.writer(out)
        if out.tell() == 0:
            writer.writerow([each.name for each in fields(Look)])
        argv = invoke(folder, "matrix", "--boots", str(boots))
        process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        while process.poll() is None:
            time.sleep(0.02)
            if not tail.look():
                continue
            try:
                look = Look(
                    session=session,
                    at_s=round(time.monotonic() - begun, 3),
                    boots=tail.boots,
                    records=tail.records,
                    ledger_mib=round(tail.position / 2**20, 4),
                    rss_mib=round(resident_mib(process.pid), 3),
                    descriptors=entries(f"/proc/{process.pid}/fd"),
                    threads=entries(f"/proc/{process.pid}/task"),
                    children=children_of(process.pid),
                    boot_s=tail.boot_s,
                    ours_s=tail.ours_s,
                )
            except OSError:
                continue
            writer.writerow(astuple(look))
            out.flush()
    if process.returncode != 0:
        sys.exit(f"the campaign ended with {process.returncode}, see {folder / 'said.log'}; the same command goes on")
    cost(folder, boots)


def cost(folder: Path, boots: int) -> None:
    """What the commands take with such a ledger."""
    left = mentioning(str(folder.resolve()))
    rows = [
        ("going on, until its first boot begins", *going_on(folder, boots)),
        *((name, *timed(invoke(folder, *name.split()))) for name in ("report", "gate", "plan --boots 2")),
    ]
    report = folder / "artifacts" / NAME / "report"
    sizes = {name: (report / name).stat().st_size for name in ("report.html", "report.md", "verdicts.json")}
    lines = {"boots": boots, "left": left, "cost": rows, "sizes": sizes}
    (folder / "cost.json").write_bytes(orjson.dumps(lines, option=orjson.OPT_INDENT_2))


def going_on(folder: Path, boots: int) -> tuple[float, float, float]:
    """Until a campaign that goes on begins its first boot: seconds, of these of the CPU, and its memory then, MiB."""
    tail = Tail(ledger_of(folder))
    tail.look()
    argv = invoke(folder, "matrix", "--boots", str(boots + 1))
    began = time.monotonic()
    with (folder / "said.log").open("ab") as said:
        process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        while process.poll() is None and not tail.look():
            time.sleep(0.01)
        seconds, mib = time.monotonic() - began, resident_mib(process.pid)
        used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.terminate()
        process.wait()
    return seconds, (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK"), mib


def timed(argv: Sequence[str]) -> tuple[float, float, float]:
    """A command's seconds, of these of the CPU, and its peak memory, MiB."""
    began = time.monotonic()
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def mentioning(text: str) -> list[str]:
    """Command lines of living processes, our own apart, that hold this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words and int(path.parent.name) not in (os.getpid(), os.getppid()):
            found.append(words.strip())
    return found


# --- the same ledger without its boots -------------------------------------------------------------------------------


def grow(folder: Path, to: Path, boots: int) -> None:
    """An experiment of so many boots of each variant in `to`, from the boots of another one."""
    prepare(to)
    source, target = folder / "artifacts" / NAME, to / "artifacts" / NAME
    target.mkdir(parents=True)
    (target / "matrix.yaml").write_text((to / "matrix.yaml").read_text())
    plan = extend(read_plan(source / PLAN_FILE), boots)
    write_plan(target / PLAN_FILE, plan)
    began, made = _templates(source)
    chance = random.Random(1)  # noqa: S311 - reproducible on purpose, no secret
    with ledger_of(to).open("wb") as ledger:
        ledger.write(began)
        for boot in plan.boots_planned:
            name, lines = chance.choice(made[boot.variant])
            key = {"boot": boot.boot, "block": boot.block, "position": boot.position, "attempt": 1}
            factor = math.exp(chance.gauss(0, 0.02))
            for record in lines:
                changed = record | key
                if changed.get("tokens_per_s") is not None:
                    changed["tokens_per_s"] *= factor
                ledger.write(orjson.dumps(changed, option=orjson.OPT_APPEND_NEWLINE))
            (target / "boots").mkdir(exist_ok=True)
            (target / "boots" / boot.boot).symlink_to((source / "boots" / name).resolve())


def _templates(source: Path) -> tuple[bytes, dict[str, list[tuple[str, list[dict[str, Any]]]]]]:
    """The campaign's beginning, and of each variant its boots that ended: name and records."""
    lines = (source / "records.jsonl").read_bytes().splitlines(keepends=True)
    boots: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        record = orjson.loads(line)
        if "boot" in record:
            boots.setdefault(record["boot"], []).append(record)
    made: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {}
    for name, records in boots.items():
        if records[-1]["kind"] == "boot_ended" and records[-1]["boot_outcome"] == "completed":
            made.setdefault(records[0]["variant"], []).append((name, records))
    return lines[0], made


# --- the page --------------------------------------------------------------------------------------------------------


def read_looks(path: Path) -> list[Look]:
    """The looks so far."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        kinds = {each.name: int if each.type == "int" else float for each in fields(Look)}
        rows: Iterator[dict[str, str]] = csv.DictReader(file)
        return [Look(**{name: kinds[name](value) for name, value in row.items()}) for row in rows]


@dataclass(frozen=True, slots=True)
class Trend:
    """How something changes over the whole run, in percent of its median, with its 95 % interval."""

    median: float
    percent: float
    low: float
    high: float

    @property
    def word(self) -> str:
        """What the interval says."""
        if self.low <= 0 <= self.high or max(abs(self.low), abs(self.high)) < 1:
            return "flat"
        return "grows" if self.percent > 0 else "falls"


def trend(values: Sequence[float], boots: Sequence[int]) -> Trend:
    """By the median of all pairwise slopes; at most 1500 looks, evenly chosen, since pairs are many."""
    keep = np.unique(np.linspace(0, len(values) - 1, 1500).astype(int))
    y, x = np.asarray(values, float)[keep], np.asarray(boots, float)[keep]
    slope, _, low, high = stats.theilslopes(y, x, 0.95)
    median = float(np.median(y))
    share = 100 * (x[-1] - x[0]) / median if median else 0.0
    return Trend(median, slope * share, low * share, high * share)


def chart(looks: Sequence[Look], path: Path) -> None:
    """A small picture for each quantity."""
    figure, axes = plt.subplots(2, 3, figsize=(9, 4.2), dpi=80, layout="constrained")
    for axis, (name, label) in zip(axes.flat, MEASURED.items(), strict=True):
        axis.plot([each.boots for each in looks], [getattr(each, name) for each in looks], ".", ms=1.5, color="#2f6f9f")
        values = [getattr(each, name) for each in looks]
        axis.set_ylim(0, 1.3 * float(np.quantile(values, 0.995)) or 1)
        axis.set_title(label, fontsize=9)
        axis.tick_params(labelsize=7)
    for axis in axes[1]:
        axis.set_xlabel("boots", fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def page(folder: Path, grown: Path | None) -> None:
    """benchmarks/endurance.md."""
    costs = (grown or folder) / "cost.json"
    looks = read_looks(folder / "looks.csv")
    measured = [each for each in looks if each.boots >= min(WARM, looks[-1].boots // 2)]
    said = orjson.loads(costs.read_bytes()) if costs.exists() else None
    if said is not None:
        ledger = ledger_of(grown or folder).read_bytes()
        said["ledger"] = (
            f"{'A ledger grown from these boots' if grown else 'That ledger'}: {said['boots'] * 4} boots, "
            f"{len(ledger.splitlines())} records, {len(ledger) / 2**20:.0f} MiB."
        )
    chart(looks, Path(__file__).with_name(CHART))
    Path(__file__).with_suffix(".md").write_text(text(looks, measured, said), encoding="utf-8")
    print(text(looks, measured, said))


def text(looks: Sequence[Look], measured: Sequence[Look], said: dict[str, Any] | None) -> str:
    """The page."""
    last = looks[-1]
    hours = sum(max(e.at_s for e in looks if e.session == s) for s in {e.session for e in looks}) / 3600
    about = (
        f"`python benchmarks/endurance.py run FOLDER`: {last.boots} rehearsal boots and {last.records} records in one "
        f"experiment, by the ordinary `invoke matrix`, in {hours:.1f} h and {last.session} session"
        f"{'' if last.session == 1 else 's'}; the ledger has {last.ledger_mib:.0f} MiB. Seen from outside once a boot. "
        "The machine was shared with other work meanwhile: the seconds are no figures to compare with."
    )
    first = measured[0]
    change = (
        f"Change from boot {first.boots} to the end: Theil-Sen slope times the boots, in percent of the median. "
        f"Before that Python fills its pools: {looks[0].rss_mib:.0f} MiB at the first boot, {first.rss_mib:.0f} at "
        f"boot {first.boots}, {last.rss_mib:.0f} at the last."
    )
    if last.boots < WANTED:
        about += f" Wanted were {WANTED} boots: it stands at {last.boots}, and the same command goes on."
    lines = [
        "# Endurance",
        "",
        about,
        "",
        f"![six quantities against boots]({CHART})",
        "",
        change,
        "",
        "| | median | change over the run | 95 % interval | |",
        "|---|---|---|---|---|",
    ]
    for name, label in MEASURED.items():
        found = trend([getattr(each, name) for each in measured], [each.boots for each in measured])
        lines.append(
            f"| {label} | {found.median:.4g} | {found.percent:+.2f} % | {found.low:+.2f} % to {found.high:+.2f} % "
            f"| {found.word} |"
        )
    if said is not None:
        header = "| command | seconds | of the CPU | peak memory, MiB |"
        lines += ["", said["ledger"], "", header, "|---|---|---|---|"]
        lines += [f"| {name} | {seconds:.1f} | {cpu:.1f} | {mib:.0f} |" for name, seconds, cpu, mib in said["cost"]]
        sizes = ", ".join(f"{name} {size / 1024:.0f} KiB" for name, size in said["sizes"].items())
        left = said["left"]
        lines += ["", f"Sizes: {sizes}.", f"Processes of ours left at the end: {len(left)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "page", "grow"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("to", type=Path, nargs="?")
    parser.add_argument("--boots", type=int, default=500, help="of each of the four variants")
    chosen = parser.parse_args()
    if chosen.what == "page":
        page(chosen.folder, chosen.to)
    elif chosen.what == "grow":
        grow(chosen.folder, chosen.to, chosen.boots)
        cost(chosen.to, chosen.boots)
    else:
        run(chosen.folder, chosen.boots)


if __name__ == "__main__":
    main()
