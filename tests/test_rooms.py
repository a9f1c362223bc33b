"""Who may import whom: the rooms of docs/design, held by a look at every import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "orchestrator"

SHARED = {"errors", "records", "redact", "failpoints", "orchestrator"}
DESIGN = {"goals", "matrix", "matrix_keys", "matrix_check", "matrix_grid", "yamlfile", "promptfile"}
# The keys of `rules:` are the journal's own rules, checked where they are written.
MACHINE = {
    "box",
    "journal",
    "load",
    "sizing",
    "asking",
    "trial",
    "trialspec",
    "streams",
    "rulers",
    "client",
    "wire",
    "prompts",
    "scrape",
    "watch",
    "interrupts",
    "hangs",
    "life",
    "exercise",
    "boot",
}
CYCLE = {"life", "exercise", "boot"}
ANALYSIS = {"stats", "verdict", "series", "report", "gate"}

ALLOWED = {
    "errors": set(),
    "records": set(),
    "redact": set(),
    "failpoints": set(),
    "hangs": {"records"},
    "stats": set(),
    "rehearsal": set(),
    "interrupts": {"errors"},
    "early": set(),
    "later": set(),
    "yamlfile": {"errors"},
    "promptfile": {"errors"},
    "matrix": SHARED | DESIGN | {"journal"},
    "matrix_keys": SHARED | DESIGN,
    "matrix_check": SHARED | DESIGN | {"journal"},
    "matrix_grid": SHARED | DESIGN,
    "matrix_pages": SHARED | DESIGN,
    "plan": SHARED | DESIGN,
    "journal": SHARED,
    "ledger": SHARED | {"quickread"},
    "quickread": SHARED,
    "box": SHARED | DESIGN | {"journal"},
    "load": SHARED | {"client", "prompts", "scrape", "trial", "trialspec", "rulers", "sizing", "asking"},
    "sizing": SHARED | {"client", "prompts", "asking"},
    "asking": SHARED | {"client"},
    "trial": SHARED | {"client", "prompts", "scrape", "rulers", "trialspec", "streams"},
    "streams": SHARED | {"client", "prompts", "trialspec"},
    "trialspec": SHARED | {"client", "scrape", "rulers"},
    "rulers": SHARED | {"scrape"},
    "client": SHARED | {"wire"},
    "wire": set(),
    "prompts": SHARED,
    "scrape": SHARED,
    "watch": SHARED | {"journal"},
    "life": SHARED | DESIGN | (MACHINE - CYCLE),
    "exercise": SHARED | DESIGN | (MACHINE - CYCLE) | {"life", "ledger"},
    "boot": SHARED | DESIGN | (MACHINE - {"boot"}) | {"ledger"},
    "survey": SHARED | DESIGN | (MACHINE - CYCLE) | {"plan", "ledger", "progress", "forecast"},
    "forecast": SHARED | DESIGN | {"plan", "ledger", "stats"},
    "sketch": SHARED | DESIGN | {"box"},
    "outlook": SHARED | DESIGN | {"box", "survey", "forecast", "progress"},
    "campaign": SHARED
    | DESIGN
    | MACHINE
    | {"plan", "ledger", "progress", "survey", "custody", "brakes", "orphans", "advice", "on_end"},
    "brakes": SHARED | DESIGN,
    "orphans": SHARED | DESIGN | {"box"},
    "custody": SHARED | DESIGN | (MACHINE - CYCLE) | {"plan", "ledger", "progress", "survey"},
    "progress": SHARED,
    "adopt": SHARED | DESIGN | {"box"},
    "doctor": SHARED | DESIGN | {"box", "scrape", "survey", "plan", "progress"},
    "live": SHARED | {"progress", "ledger"},
    "advice": SHARED | DESIGN | {"plan"},
    "on_end": SHARED,
    "closing": SHARED | {"report", "progress"},
    "options": SHARED | DESIGN | {"plan"},
    "goals": SHARED,
    "verdict": SHARED | {"goals", "stats", "matrix", "plan"},
    "simulate": SHARED | {"matrix", "plan", "verdict"},
    "twins": SHARED | DESIGN,
    "noise": SHARED | {"plan", "stats", "verdict"},
    "series": SHARED | {"yamlfile", "foreign"},
    "foreign": SHARED,
    "gate": SHARED | {"stats", "verdict", "series"},
    "report": SHARED | {"verdict", "stats", "progress"},
}
FRONT = {"commands", "outermost", "kept", "cli", "__init__"}


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [
                f"{node.module}.{alias.name}" if node.module == "orchestrator" else str(node.module)
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "orchestrator":
                found.add("orchestrator" if len(parts) == 1 or parts[1].startswith("__") else parts[1])
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if room_of(path) not in FRONT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_it_may(path):
    room = room_of(path)
    assert room in ALLOWED, f"{room} has no place in the design yet"
    assert imports(path) - {room} <= ALLOWED[room]


def test_the_helper_is_a_program_of_its_own():
    assert imports(ROOT / "box" / "coldboot_box.py") == set()


def test_the_look_would_see_a_forbidden_import(tmp_path):
    wrong = tmp_path / "verdict.py"
    wrong.write_text("from orchestrator.box import facts\nfrom orchestrator import load\n")
    assert imports(wrong) == {"box", "load"}
    assert not imports(wrong) <= ALLOWED["verdict"]
