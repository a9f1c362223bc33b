"""`invoke --list`: the commands of Coldboot, and those that keep this checkout honest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from invoke.collection import Collection
from invoke.context import Context
from invoke.tasks import task

from orchestrator import early

if early.is_program(sys.argv[0]):  # loading takes seconds, and Ctrl-C counts in them too
    early.until_begun()

from orchestrator.commands import NAMESPACE

_PYTHON = sys.executable


def _run(context: Context, *commands: str) -> None:
    for command in commands:
        context.run(f"{_PYTHON} -m {command}", pty=False)


@task
def check(context: Context) -> None:
    """Lint and types."""
    _run(context, "ruff check .", "ruff format --check .", "mypy")


@task(help={"args": "further arguments for pytest"})
def test(context: Context, args: str = "") -> None:
    """All tests that need no real vLLM; those of the real box run as root on Debian, else say why not."""
    _run(context, f'pytest -m "not vllm and not faults" {args}')


@task(help={"args": "further arguments for pytest"})
def test_box(context: Context, args: str = "") -> None:
    """The tests on the real systemd box."""
    _run(context, f'pytest -m "box and not faults" {args}')


@task(
    help={
        "table": "write the table here too, as docs/faults.md",
        "results": "one line a cell is added here; the table has the last result of each",
        "args": "further arguments for pytest, as -k 'ssh and trials'",
    }
)
def test_faults(
    context: Context, table: str | None = None, results: str = "artifacts/faults.jsonl", args: str = ""
) -> None:
    """Every place of a campaign times every fault, on the real systemd box, for both kinds of caches: two hours."""
    Path(results).parent.mkdir(parents=True, exist_ok=True)
    told = {"COLDBOOT_FAULTS": str(Path(results).resolve())}
    ran = context.run(f"{_PYTHON} -m pytest tests/box/test_faults.py {args}", pty=False, warn=True, env=told)
    made = context.run(f"{_PYTHON} tests/box/faults.py {results}", pty=False, hide=table is not None)
    if table is not None and made is not None:
        Path(table).write_text(made.stdout, encoding="utf-8")
    if ran is None or ran.failed:
        sys.exit(1)


@task(help={"args": "further arguments for pytest"})
def test_vllm(context: Context, args: str = "") -> None:
    """A real campaign on a real vLLM (CPU build) on the real box: half an hour; see tests/vllm/README.md."""
    _run(context, f"pytest tests/box/test_vllm_box.py {args}")


namespace = Collection()
for _name, _task in NAMESPACE.tasks.items():
    namespace.add_task(_task, name=_name)
_own: tuple[Any, ...] = (check, test, test_box, test_faults, test_vllm)
for _task in _own:
    namespace.add_task(_task)
