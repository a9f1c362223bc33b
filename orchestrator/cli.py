"""The `coldboot` program: the same tasks as `invoke` in a checkout, anywhere."""

from __future__ import annotations

import sys

from invoke.program import Program

from orchestrator import __version__, early

if early.is_program(sys.argv[0]):  # loading takes seconds, and Ctrl-C counts in them too
    early.until_begun()

from orchestrator.commands import NAMESPACE

_SHOWN = ("--help[", "--list[", "--version", "--print-completion-script")


class ColdbootProgram(Program):
    """Invoke's program; its help leaves out the options that are for tasks which run shell commands of their own."""

    def print_help(self) -> None:
        """Usage, the options that concern a user of ours, and the commands."""
        sys.stdout.write(f"Usage: {self.binary} COMMAND [OPTIONS]     {self.binary} --help COMMAND says them\n\n")
        options = self.initial_context.help_tuples()
        self.print_columns([(names, told) for names, told in options if any(one in names for one in _SHOWN)])
        self.list_tasks()


main = ColdbootProgram(name="Coldboot", binary="coldboot", namespace=NAMESPACE, version=__version__).run
