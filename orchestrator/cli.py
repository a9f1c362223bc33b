"""The `coldboot` program: the same tasks as `invoke` in a checkout, anywhere."""

from __future__ import annotations

from invoke.program import Program

from orchestrator import __version__
from orchestrator.commands import NAMESPACE

main = Program(name="Coldboot", binary="coldboot", namespace=NAMESPACE, version=__version__).run
