"""What several tasks take from the command line: each option's help, once, and its check; all problems at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.errors import ProblemsError, UsageError
from orchestrator.matrix import duration
from orchestrator.plan import LOOKS, PlanName
from orchestrator.records import CACHE_STATES, CacheState

DEFAULT_OUT = "artifacts"
DEFAULT_MATRIX = "matrix.yaml"

HELP: Mapping[str, str] = {
    "boots": "cold boots of each variant, or auto (default 3, or the file's `boots:`)",
    "plan": "an adaptive plan: nightly (with auto), pull-request or smoke",
    "box": "a box of matrix.yaml",
    "only": "these variants, separated by commas",
    "cache": "cold (default), clear, warm or as-is",
    "seed": "of the order of boots and of the prompts",
    "out": "where experiments are kept",
    "experiment": "another name than the file's",
    "drain": "wait so long for running requests, as 5min",
    "yes": "the production service may be taken down",
    "matrix": "another file than matrix.yaml",
}
NEWEST = "its name (default: the newest)"


def told(*shared: str, **own: str) -> dict[str, str]:
    """The help of a task's options: those of the table by name, and its own; `_` in a name is `-`."""
    return {name: HELP[name] for name in shared} | {name.replace("_", "-"): text for name, text in own.items()}


@contextmanager
def all_problems() -> Iterator[Callable[..., Any]]:
    """Checks of several options: what is wrong is told at the end, all of it.

    Yields:
        What calls a check with its arguments and returns its value, or None where it does not hold.

    Raises:
        UsageError: one option is wrong.
        ProblemsError: several are.
    """
    found: list[UsageError] = []

    def check(parse: Callable[..., Any], *arguments: object) -> Any:
        try:
            return parse(*arguments)
        except UsageError as error:
            found.append(error)
            return None

    yield check
    if len(found) == 1:
        raise found[0]
    if found:
        raise ProblemsError([str(error) for error in found])


def seconds(name: str, text: str | None) -> float | None:
    """A duration, as 90s, 5min or 1h30m."""
    if text is None:
        return None
    try:
        return duration(text)
    except ValueError as error:
        raise UsageError(f"--{name}: {error}", hint="a duration, as 90s, 5min or 1h30m") from error


def number(name: str, text: str | None) -> int | None:
    """A whole number."""
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal():
        raise UsageError(f"--{name}: {text!r} is no whole number")
    return int(text)


def plan_name(text: str | None) -> PlanName | None:
    """The name of a plan."""
    if text is not None and text not in LOOKS:
        raise UsageError(f"--plan: {text!r}; accepted: {', '.join(LOOKS)}")
    return text  # type: ignore[return-value]


def names(option: str, text: str | None) -> tuple[str, ...]:
    """Names, separated by commas; none where the option was not given."""
    found = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not found:
        # An empty variable of a script must not mean everything.
        raise UsageError(f"--{option}: {text!r} names nothing; accepted: names, separated by commas")
    return found


def folder(option: str, text: str) -> Path:
    """A folder's path."""
    return _path(option, text, f"a folder, such as {DEFAULT_OUT}")


def file(option: str, text: str) -> Path:
    """A file's path."""
    return _path(option, text, "a file")


def _path(option: str, text: str, accepted: str) -> Path:
    """An empty variable of a script must not mean the folder that we stand in."""
    if not text.strip():
        raise UsageError(f"--{option}: an empty path; accepted: {accepted}")
    return Path(text)


def cache_states(text: str | None) -> tuple[CacheState, ...]:
    """Cache states, separated by commas."""
    states = names("cache", text)
    if any(state not in CACHE_STATES for state in states):
        raise UsageError(f"--cache: {text!r}; accepted: {', '.join(CACHE_STATES)}")
    return states  # type: ignore[return-value]
