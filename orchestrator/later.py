"""Rooms that a command needs only when it runs: `invoke --list` and `invoke report` do not wait for the machine's side.

All commands stand in one module, and each needs other rooms. Reading them all takes longer than most commands do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class Later:
    """Stands for a module, which is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def load(self) -> None:
        """Now."""
        importlib.import_module(self._name)


def load_for(function: Callable[..., object]) -> None:
    """Loads the rooms that a function names: before it begins, so that nothing of it is interrupted by that."""
    for name in function.__code__.co_names:
        room = function.__globals__.get(name)
        if isinstance(room, Later):
            room.load()
