"""`invoke --list`: the commands of Coldboot, and those that keep this checkout honest."""

from __future__ import annotations

import sys
from typing import Any

from invoke.collection import Collection
from invoke.context import Context
from invoke.tasks import task

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
    _run(context, f'pytest -m "not vllm" {args}')


@task(help={"args": "further arguments for pytest"})
def test_box(context: Context, args: str = "") -> None:
    """The tests on the real systemd box."""
    _run(context, f"pytest -m box {args}")


namespace = Collection()
for _name, _task in NAMESPACE.tasks.items():
    namespace.add_task(_task, name=_name)
_own: tuple[Any, ...] = (check, test, test_box)
for _task in _own:
    namespace.add_task(_task)
