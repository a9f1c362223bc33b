"""The `coldboot` program: the same tasks as `invoke` in a checkout, anywhere."""

from __future__ import annotations

import sys

from invoke.program import Program

from orchestrator import __version__, early

if early.is_program(sys.argv[0]):  # loading takes seconds, and Ctrl-C counts in them too
    early.until_begun()

from orchestrator.commands import NAMESPACE

main = Program(name="Coldboot", binary="coldboot", namespace=NAMESPACE, version=__version__).run
