"""What an experiment is for: its metrics, and the grammar of constraints and claims. Pure; one grammar for all rooms.

ttft_p99_ms <= 800 at 8             a constraint: every variant has to hold it
spec-1 >= 1.5x spec-3 at 1          a claim: one variant against another, or against a number of tok/s
spec-1 >= no-spec at 1, 8@8000      levels: streams, at every prompt length or at the one behind @
"""

from __future__ import annotations

import math
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

_SHOWN = 60
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_SIGN = r"(?P<sign>>=|<=|≥|≤|>|<)"
_ONE_LEVEL = r"[0-9]{1,7}(?:@[0-9]{1,7})?"
_LEVELS = rf"(?:\s+at\s+(?P<levels>{_ONE_LEVEL}(?:\s*,\s*{_ONE_LEVEL})*))?"
_CONSTRAINT = re.compile(
    rf"\s*(?P<metric>[a-z][a-z0-9_]*)\s*{_SIGN}\s*(?P<value>{_NUMBER})\s*(?P<unit>tok/s|ms|s)?{_LEVELS}\s*", re.ASCII
)
_CLAIM = re.compile(
    rf"\s*(?P<one>\S.*?)\s*{_SIGN}\s*(?:(?P<factor>{_NUMBER})\s*[x×*]\s+)?(?P<other>\S.*?){_LEVELS}\s*", re.ASCII
)
_VALUE = re.compile(rf"(?P<value>{_NUMBER})(?:\s*tok/s)?", re.ASCII)
_SIGNS = re.compile(r"[<>=!~≠≥≤]+")
_SIGN_NAMES = (">=", "<=", "≥", "≤", ">", "<")
# What the lenient grammar takes for the name of a variant, where none is called so; the first that fits is told.
_MISREAD = tuple(
    (re.compile(pattern, re.ASCII | re.DOTALL), told)
    for pattern, told in (
        (r".*?\sat(?:\s+(.*))?", "`at {}` names no levels, write 8, or 1, 8, or 8@8000 (streams@prompt tokens)"),
        (rf"({_NUMBER}\s*[x×*])", "no variant stands behind the factor `{}`"),
        (rf"({_NUMBER}[x×*])\S.*", "a space stands between a factor, here `{}`, and its variant"),
        (r"([-+.]?[0-9][0-9.,_eE+-]*)\s*[x×*]\s+.*", "`{}` is no factor, write a number such as 2 or 1.5"),
        (rf"({_NUMBER}\s+\D\S*)", "`{}` is no value, write a number of tok/s such as 60 or 60 tok/s"),
        (r"([-+.]?[0-9][0-9.,_eE+-]*)", "`{}` is no value, write a number of tok/s such as 60 or 60 tok/s"),
    )
)
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
    if value == math.inf:
        raise GoalError(f"`{shortened(match['value'])}` is too large")
    return Constraint(" ".join(text.split()), metric, match["sign"] in ("<=", "<", "≤"), value, _levels(match))


def parse_claim(text: str, variants: frozenset[str]) -> Claim:
    """A claim from its text. `variants`: names that are there, since a name may look like a number.

    Raises:
        GoalError: it is none, or a part of it can be no variant's name; whether other names are there is for the caller
            to say.
    """
    match = _CLAIM.fullmatch(text)
    if match is None:
        raise GoalError(f"`{shortened(text)}` is no claim{_slip(text)}")
    value = None
    if match["factor"] is None and match["other"] not in variants:
        value = _VALUE.fullmatch(match["other"])
    strange = {match["one"], match["other"]} - variants if value is None else {match["one"]} - variants
    if variants and strange and (slip := _slip(text, match["other"] if value is None else None)):
        raise GoalError(f"`{shortened(text)}` is no claim{slip}")
    factor = float(match["factor"] or 1)
    for what, number in (("factor", match["factor"]), ("value", value and value["value"])):
        if number and not 0 < float(number) < math.inf:
            raise GoalError(
                f"`{shortened(text)}`: {what} {shortened(number)}, where a finite number above 0 has to stand"
            )
    if value is None and match["one"] == match["other"]:
        raise GoalError(f"`{shortened(text)}` compares a variant with itself")
    return Claim(
        text=" ".join(text.split()),
        one=match["one"],
        at_least=match["sign"] in (">=", ">", "≥"),
        factor=factor,
        other=None if value is not None else match["other"],
        value=float(value["value"]) if value is not None else None,
        levels=_levels(match),
    )


def shortened(text: str) -> str:
    """Text as given, cut so that it leaves room for what is wrong with it."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _slip(text: str, right: str | None = None) -> str:
    """What is wrong with a claim whose parts do not fit, read from the left; `right` is what stands behind the sign.

    Empty where it has the form of a claim: then a name is wrong.
    """
    signs = _SIGNS.findall(text)
    if not text.strip() or len(signs) != 1 or signs[0] not in _SIGN_NAMES:
        found = " and ".join(f"`{shortened(sign)}`" for sign in signs[:3]) or "no sign"
        return f": {found} where one of >= and <= has to stand"
    before, _, behind = text.partition(signs[0])
    if not before.strip() or not behind.strip():
        return f": nothing stands {'behind' if before.strip() else 'before'} `{signs[0]}`"
    read = ((told, pattern.fullmatch(right)) for pattern, told in _MISREAD if right is not None)
    return next((f": {told.format(shortened(match[1] or ''))}" for told, match in read if match is not None), "")


def _levels(match: re.Match[str]) -> tuple[Level, ...]:
    found = (one.partition("@") for one in re.findall(_ONE_LEVEL, match["levels"] or ""))
    return tuple(sorted({Level(int(streams), int(length) if length else None) for streams, _, length in found}))
