"""What an experiment is for: its metrics, and the grammar of constraints and claims. Pure; one grammar for all rooms.

ttft_p99_ms <= 800 at 8             a constraint: every variant has to hold it
spec-1 >= 1.5x spec-3 at 1          a claim: one variant against another, or against a number of tok/s
spec-1 >= no-spec at 1, 8@8000      levels: streams, at every prompt length or at the one behind @
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.records import THROUGHPUT, Level

LATENCIES = tuple(
    f"{what}_{quantile}_ms" for what in ("ttft", "itl", "e2e") for quantile in ("p50", "p90", "p99", "max")
)
UNITS: Mapping[str, str] = {THROUGHPUT: "tok/s", **dict.fromkeys(LATENCIES, "ms")}
METRICS = tuple(UNITS)
LOWER_IS_BETTER = frozenset(LATENCIES)

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_SIGN = r"(?P<sign>>=|<=|≥|≤|>|<)"
_ONE_LEVEL = r"[0-9]+(?:@[0-9]+)?"
_LEVELS = rf"(?:\s+at\s+(?P<levels>{_ONE_LEVEL}(?:\s*,\s*{_ONE_LEVEL})*))?"
_CONSTRAINT = re.compile(
    rf"\s*(?P<metric>[a-z][a-z0-9_]*)\s*{_SIGN}\s*(?P<value>{_NUMBER})\s*(?P<unit>tok/s|ms|s)?{_LEVELS}\s*", re.ASCII
)
_CLAIM = re.compile(
    rf"\s*(?P<one>\S.*?)\s*{_SIGN}\s*(?:(?P<factor>{_NUMBER})\s*[x×*]\s+)?(?P<other>\S.*?){_LEVELS}\s*", re.ASCII
)
_VALUE = re.compile(rf"(?P<value>{_NUMBER})(?:\s*tok/s)?", re.ASCII)
CONSTRAINT_HELP = f"METRIC <= NUMBER at LEVELS, such as 'ttft_p99_ms <= 800 at 8'; metrics: {', '.join(METRICS)}"
CLAIM_HELP = "such as 'spec-1 >= 1.5x spec-3 at 1', 'spec-1 >= no-spec' or 'spec-1 >= 60 tok/s at 1'"


class GoalError(ValueError):
    """Text that is no constraint, or no claim; its message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """`metric` is at most (else at least) `value` at each of `levels`; no levels: at every one that was measured."""

    text: str
    metric: str
    at_most: bool
    value: float
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """`one` is at least (else at most) `factor` times `other`, or `value` tok/s; no levels: all that both have."""

    text: str
    one: str
    at_least: bool
    factor: float
    other: str | None
    value: float | None
    levels: tuple[Level, ...]


def parse_constraint(text: str) -> Constraint:
    """A constraint from its text; `>` means `>=`, and `s` is taken as a thousand `ms`.

    Raises:
        GoalError: it is none.
    """
    match = _CONSTRAINT.fullmatch(text)
    if match is None:
        raise GoalError(f"`{text}` is no constraint")
    metric, unit, value = match["metric"], match["unit"], float(match["value"])
    if metric not in UNITS:
        raise GoalError(f"`{metric}` is no metric")
    if unit not in (None, UNITS[metric]) and (unit, UNITS[metric]) != ("s", "ms"):
        raise GoalError(f"{metric} is in {UNITS[metric]}, not in {unit}")
    value *= 1000 if unit == "s" else 1
    if value <= 0:
        raise GoalError("a limit is above 0")
    return Constraint(" ".join(text.split()), metric, match["sign"] in ("<=", "<", "≤"), value, _levels(match))


def parse_claim(text: str, variants: frozenset[str]) -> Claim:
    """A claim from its text. `variants`: names that are there, since a name may look like a number.

    Raises:
        GoalError: it is none; whether its variants are there is for the caller to say.
    """
    match = _CLAIM.fullmatch(text)
    if match is None:
        raise GoalError(f"{text!r} is no claim")
    value = _VALUE.fullmatch(match["other"]) if match["factor"] is None else None
    if match["other"] in variants:
        value = None
    factor = float(match["factor"] or 1)
    if factor <= 0 or (value is not None and float(value["value"]) <= 0):
        raise GoalError(f"{text!r}: a factor and a value are above 0")
    return Claim(
        text=" ".join(text.split()),
        one=match["one"],
        at_least=match["sign"] in (">=", ">", "≥"),
        factor=factor,
        other=None if value is not None else match["other"],
        value=float(value["value"]) if value is not None else None,
        levels=_levels(match),
    )


def _levels(match: re.Match[str]) -> tuple[Level, ...]:
    found = (one.partition("@") for one in re.findall(_ONE_LEVEL, match["levels"] or ""))
    return tuple(sorted({Level(int(streams), int(length) if length else None) for streams, _, length in found}))
