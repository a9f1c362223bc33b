"""What Coldboot itself costs per boot, over ssh on a real systemd box, as a table of steps.

    python benchmarks/overhead.py [--boots 3] [--root sudo|helper]

Needs root on Debian: it starts the box of the tests (systemd-nspawn), runs a campaign on it with the rehearsal engine
as a unit of another user than the login, which has no root of its own, and reads the ledger. `--root helper`: by
coldboot-box, as is recommended; `--root sudo`: by sudo for exact commands. The limits stand beside what was measured:
at most 1.0 s of overhead a boot, ready noticed within 100 ms of /health turning 200, a fatal entry within 500 ms of its
journal time. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "box")]

from nspawn import Box, base_tree  # noqa: E402 - the tests' own box
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from test_campaign_box import MATRIX, PORT, UNIT, UNIT_TEXT  # noqa: E402 - the same unit and matrix

from orchestrator.box import caches, helper  # noqa: E402
from orchestrator.box.services import make_service  # noqa: E402
from orchestrator.box.transports import connect  # noqa: E402
from orchestrator.matrix import load_matrix  # noqa: E402

STEPS = ("clean_slate", "cold", "render", "start", "ready", "first_request", "headroom", "sanity", "trials", "stop")


def campaign(box: Box, folder: Path, boots: int, root: str) -> tuple[list[dict[str, Any]], float]:
    """Runs it; gives the records and the orchestrator's peak memory, MiB."""
    text = MATRIX.format(alias=box.alias, ssh_config=box.ssh_config, unit=UNIT, dead_man_s=60)
    (folder / "matrix.yaml").write_text(text)
    box.sh(("useradd", "-m", "svc"))
    box.write_unit(UNIT, UNIT_TEXT.replace("User=alex\nGroup=alex", "User=svc"))
    spec = load_matrix(folder / "matrix.yaml").target
    transport = connect(spec)
    service = make_service(transport, spec, folder)
    unit = service.look()
    if root == "helper":
        roots = (caches.cache_place(unit, spec.cache_root),)
        box.sh(("sh", "-s"), feed=helper.install_script(unit.name, box.login, roots))
    else:
        box.write_sudoers(service.sudo_lines())
    transport.close()
    box.sh(("systemctl", "start", UNIT))
    words = ("matrix", "--boots", str(boots), "--yes", "--matrix", str(folder / "matrix.yaml"), "--out", str(folder))
    subprocess.run((sys.executable, "-m", "invoke", *words), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "boxed" / "records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def ready_lines(folder: Path, boot: str) -> float | None:
    """Epoch seconds at which the engine said that its start-up was complete: it listens a moment later."""
    for line in (folder / "boxed" / "boots" / boot / "journal.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "Application startup complete" in str(entry.get("MESSAGE")):
            return int(entry["__REALTIME_TIMESTAMP"]) / 1e6
    return None


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boots", type=int, default=3)
    parser.add_argument("--root", choices=("sudo", "helper"), default="helper")
    told = parser.parse_args()
    boots = told.boots
    begun = time.monotonic()
    with Box(base_tree()) as box, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records, rss_mib = campaign(box, folder, boots, told.root)
        ours: dict[tuple[str, str], list[float]] = defaultdict(list)
        total: dict[str, list[float]] = defaultdict(list)
        ready: list[float] = []
        fatal: list[float] = []
        for record in records:
            if record["kind"] == "step":
                ours[record["variant"], record["name"]].append(record["seconds"] - record["engine_s"])
                facts = record["facts"]
                if "noticed_after_s" in facts:
                    fatal.append(facts["noticed_after_s"])
                if "noticed_at_s" in facts and (said := ready_lines(folder, record["boot"])) is not None:
                    ready.append(facts["noticed_at_s"] - said)
            if record["kind"] == "boot_ended":
                total[record["variant"]].append(record["ours_s"])
    table = Table(title=f"our own seconds per step, median of {boots} boots over ssh, root by {told.root}")
    table.add_column("step")
    names = sorted(total)
    for variant in names:
        table.add_column(variant, justify="right")
    for step in STEPS:
        values = [ours.get((variant, step)) for variant in names]
        table.add_row(step, *("–" if not value else f"{statistics.median(value):.3f}" for value in values))
    table.add_section()
    table.add_row("whole boot", *(f"{statistics.median(total[variant]):.3f}" for variant in names))
    table.add_row("whole boot, worst", *(f"{max(total[variant]):.3f}" for variant in names))
    console = Console()
    console.print(table)
    limits = Table(title="limits")
    for column in ("what", "measured", "limit"):
        limits.add_column(column)
    worst = max(max(values) for values in total.values())
    limits.add_row("overhead of ours per boot", f"{worst:.2f} s at worst", "1.0 s")
    limits.add_row("ready noticed after the engine said so", _range(ready), "100 ms")
    limits.add_row("fatal entry noticed after its journal time", _range(fatal), "500 ms")
    limits.add_row("peak memory of the orchestrator", f"{rss_mib:.0f} MiB", "200 MiB")
    limits.add_row("this benchmark", f"{time.monotonic() - begun:.0f} s (production on port {PORT} included)", "–")
    console.print(limits)


def _range(values: list[float]) -> str:
    if not values:
        return "not seen"
    return f"{1000 * statistics.median(values):.0f} ms in the median, {1000 * max(values):.0f} ms at worst"


if __name__ == "__main__":
    main()
