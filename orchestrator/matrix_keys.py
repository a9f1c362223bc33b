"""The keys of matrix.yaml: one field a key, with its meaning, what is accepted, and its default.

The JSON Schema and the page docs/matrix.md are made from these models (`matrix_pages`); the checks that span several
keys are in `matrix_check`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from orchestrator.goals import METRICS
from orchestrator.records import THROUGHPUT, CacheState, Frozen, Level

FlagValue: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any]

# --- durations -----------------------------------------------------------------------------------------------------

_UNITS_S = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "hour": 3600.0, "d": 86400.0}
_UNITS_S |= {"second": 1.0, "minute": 60.0, "hr": 3600.0, "day": 86400.0, "": 1.0}
_UNITS_S |= {f"{unit}s": _UNITS_S[unit] for unit in ("sec", "second", "min", "minute", "hr", "hour", "day")}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)")
LONGEST_S = 1000 * 86400.0
DURATION = 'seconds as a number, or text such as "90s", "5min", "1h30m"'


def duration(value: object) -> float:
    """Seconds of a duration: 90, 1.5, "90", "90s", "5min", "1h30m", "2 days".

    Raises:
        ValueError: it is none, or negative; says what is accepted.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return _bounded(value, value)
    if not isinstance(value, str):
        # pydantic takes a ValueError for the answer, and a TypeError for a mistake of ours.
        raise ValueError(f"{value!r} is no duration; accepted: {DURATION}")  # noqa: TRY004 - see above
    text, at, total = value.strip().lower(), 0, 0.0
    while at < len(text) and (part := _PART.match(text, at)) is not None and part[2] in _UNITS_S:
        if not part[2] and (at or part.end() < len(text)):
            break  # a bare number is seconds only when it stands alone: "1h30" could be minutes
        total += float(part[1]) * _UNITS_S[part[2]]
        at = part.end()
    if not text or at < len(text):
        raise ValueError(f"`{value}` is no duration; accepted: {DURATION}")
    return _bounded(total, value)


def _bounded(seconds: float, value: object) -> float:
    """What no clock of the system could hold is a slip of the pen; NaN is no time either."""
    if not seconds <= LONGEST_S:
        shown = str(value) if isinstance(value, str) else f"{min(seconds, sys.float_info.max):g}"
        raise ValueError(f"`{shown[:40]}` is longer than {LONGEST_S / 86400:g} days; accepted: {DURATION}")
    return float(seconds)


_LEVEL_NAMES = (
    "levels of `concurrency:`, each once; with several prompt lengths `8` is each of them, `8@8000` one of them"
)
_LEVEL_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": 4096},
            {"type": "string", "pattern": "^[1-9][0-9]*(@[1-9][0-9]*)?$"},
        ]
    }
)
_TEXT_SCHEMA = {"type": "string", "pattern": r"^\s*[0-9]"}
_ABOVE_ZERO = WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _TEXT_SCHEMA]})
_FROM_ZERO = WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _TEXT_SCHEMA]})
Seconds: TypeAlias = Annotated[float, BeforeValidator(duration), Field(gt=0), _ABOVE_ZERO]
SecondsOrNone: TypeAlias = Annotated[float, BeforeValidator(duration), Field(ge=0), _FROM_ZERO]
_ENV_SCHEMA = WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}})
Port: TypeAlias = Annotated[int, Field(ge=1, le=65535)]
Streams: TypeAlias = Annotated[int, Field(ge=1, le=4096)]
Length: TypeAlias = Annotated[int, Field(ge=1, le=10**6)]


def _one_or_ascending(value: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """A list of one is that one; several ascend, as they are measured. What stands twice is for the check to say."""
    if isinstance(value, int):
        return value
    return value[0] if len(value) == 1 else tuple(sorted(value))


Lengths: TypeAlias = Annotated[
    Length | Annotated[tuple[Length, ...], Field(min_length=1)], AfterValidator(_one_or_ascending)
]

_POSITIVE = f"above 0: {DURATION}"
_PORT = "a port, 1 to 65535"
_BOOLEAN = "true or false"
_TOKENS = "a whole number, 1 to 1000000"
FLAG_VALUE = "text, a number, true (bare flag), false (--no-FLAG), a list (several values), or a mapping (JSON)"


def key(default: Any, meaning: str, accepted: str, **limits: Any) -> Any:
    """A field that is a key of matrix.yaml."""
    return Field(default, description=meaning, json_schema_extra={"accepted": accepted}, **limits)


class Keys(Frozen):
    """A part of matrix.yaml: unlike the records it refuses keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_post_init(self, _context: Any, /) -> None:
        """Unlike a record, each knows which of its keys were given: what a box says overrides what the file says."""


class LoadSpec(Keys):
    """How each trial loads the engine."""

    endpoint: Literal["chat", "completions"] = key("chat", "Which API the requests use.", "chat or completions")
    stream: bool = key(True, "Whether answers are streamed, as most clients ask for.", _BOOLEAN)  # noqa: FBT003
    input_tokens: Lengths = key(
        512,
        "How many tokens a prompt has, the chat template included. Each prompt is unique. A list: each boot measures "
        "every concurrency at every length, lengths ascending; prompt lengths are never pooled.",
        "a whole number, 1 to 1000000, or a list of these, each once",
    )
    output_tokens: int = key(256, "Exactly how many tokens each answer has.", _TOKENS, ge=1, le=10**6)
    prompts: str | None = key(
        None,
        "Instead of `input_tokens`: a file of your own prompts, relative to matrix.yaml: JSON lines, a JSON array, or "
        "ShareGPT conversations. None is sent twice to one engine; behind a serial of its own when all were sent.",
        "a path",
        min_length=1,
    )
    repeat_prompts: bool = key(
        False,  # noqa: FBT003
        "Whether prompts of the file are sent again as they are when all were sent. The prefix cache then answers for "
        "the engine, which is said and invalidates nothing.",
        _BOOLEAN,
    )
    window_s: Seconds = key(30.0, "How long the measured window lasts; all streams are busy in it.", _POSITIVE)
    window_requests: int | None = key(
        None,
        "Instead of `window_s`: the window lasts until so many requests have ended in it, and the last stream's own "
        "then, which is up to one a stream more.",
        "a whole number, 1 to 1000000",
        ge=1,
        le=10**6,
    )
    warmup_s: SecondsOrNone = key(5.0, "How long each level is loaded before its window, at least.", DURATION)
    max_warmup_s: SecondsOrNone = key(
        60.0, "When the window begins at the latest, though the rate may not have settled.", DURATION
    )
    windows: int = key(
        1,
        "How many windows each level has in one boot. They tell noise within boots from noise between them, and count "
        "as one boot: repeats within a boot are no replication.",
        "a whole number, 1 to 20",
        ge=1,
        le=20,
    )
    temperature: float = key(0.0, "Sampling temperature of the requests.", "a number, 0 to 2", ge=0, le=2)
    request_timeout_s: Seconds = key(120.0, "How long one request may take before it counts as failed.", _POSITIVE)
    sanity_tokens: int = key(
        64, "Length of each of the three greedy sanity answers.", "a whole number, 1 to 4096", ge=1, le=4096
    )
    headroom_tokens: int = key(
        16, "Length of each answer while headroom is tested.", "a whole number, 1 to 4096", ge=1, le=4096
    )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The prompt lengths, ascending; none where the prompts are the user's own."""
        if self.prompts is not None:
            return ()
        return (self.input_tokens,) if isinstance(self.input_tokens, int) else self.input_tokens

    def at(self, length: int | None) -> OneLoad:
        """The load of one trial: with prompts of this length; None where the prompts are the user's own."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "input_tokens"}
        return OneLoad(**given, **({} if length is None else {"input_tokens": length}))


class OneLoad(LoadSpec):
    """The load of one trial."""

    input_tokens: Length = 512


class Deadlines(Keys):
    """How long each step of a boot may take. A boot that is not ready in time counts as failed."""

    clean_slate_s: Seconds = key(120.0, "For the unit to be gone and the GPU memory free again.", _POSITIVE)
    ready_s: Seconds = key(900.0, "From start to the first 200 of /health.", _POSITIVE)
    first_request_s: Seconds = key(300.0, "For the first generated token.", _POSITIVE)
    headroom_s: Seconds = key(300.0, "For the long prompt, and for the prompts at once.", _POSITIVE)
    sanity_s: Seconds = key(120.0, "For the three fixed prompts.", _POSITIVE)
    trial_s: Seconds = key(600.0, "For one trial: warm-up, window, and the last answers.", _POSITIVE)
    stop_s: Seconds = key(90.0, "For the engine to stop when asked; then it is killed.", _POSITIVE)
    command_s: Seconds = key(30.0, "For any single command on the box.", _POSITIVE)
    on_end_s: Seconds = key(60.0, "For the command of `on_end:`; then it is killed.", _POSITIVE)


_COUNT = "a whole number, 1 to 1000"
QUIET_PATTERN = r"^([01]?\d|2[0-3]):[0-5]\d-([01]?\d|2[0-3]):[0-5]\d$"


class LimitKeys(Keys):
    """When a campaign ends, or leaves a variant alone, although boots are left. It gives the box back each time."""

    fatal_boots_variant: int = key(
        10,
        "A variant that died, or was not ready, in so many boots in a row is not booted any more.",
        _COUNT,
        ge=1,
        le=1000,
    )
    fatal_boots: int = key(
        20,
        "After so many such boots in a row, whatever the variants, the campaign ends: something is wrong with the box.",
        _COUNT,
        ge=1,
        le=1000,
    )
    campaign_s: Seconds | None = key(
        None, "No boot is begun that would end later than so long after the campaign's start.", _POSITIVE
    )
    quiet_hours: str | None = key(
        None,
        "Hours, of the clock of the machine where coldboot runs, in which the service is production's: no boot is "
        "begun that would end in them.",
        "HH:MM-HH:MM, such as 07:00-22:00",
        pattern=QUIET_PATTERN,
    )
    temperature_c: int | None = key(
        None,
        "A boot waits (as for its clean slate) until no GPU is hotter.",
        "a whole number, 20 to 120",
        ge=20,
        le=120,
    )
    free_disk_mib: int = key(
        256,
        "No boot is begun with less room than this, MiB, where the caches are made (with `cache: clear` the unit's "
        "own) or where the artifacts are kept.",
        "a whole number, 0 to 100000000",
        ge=0,
        le=10**8,
    )


class ObjectiveKeys(Keys):
    """What the winner is best in."""

    metric: Literal[METRICS] = key(  # type: ignore[valid-type]
        THROUGHPUT,
        "The number that decides. Of throughput the highest wins, of a latency the lowest.",
        ", ".join(METRICS),
    )
    levels: tuple[Annotated[Level, _LEVEL_SCHEMA], ...] | None = key(
        None,
        "The levels that count. Default: all that every variant in the ranking has measured.",
        _LEVEL_NAMES,
        min_length=1,
    )
    weights: dict[Annotated[Level, WithJsonSchema({"type": "string"})], Annotated[float, Field(gt=0)]] = key(
        {},
        "How much a level counts in the geometric mean over levels; 1 where nothing is given.",
        "a mapping: level, then a number above 0",
    )


class RuleKeys(Keys):
    """What one kind of line in the journal means, on this box, with this engine."""

    reason: str = Field(
        description="Its name, shown as evidence.",
        json_schema_extra={"accepted": "CamelCase, such as RaidDegraded"},
        pattern=r"^[A-Z][A-Za-z0-9]+$",
    )
    pattern: str = Field(
        description="A Python regular expression, searched in the line without its log prefix.",
        json_schema_extra={"accepted": "a regular expression"},
        min_length=1,
    )
    cause: str = Field(
        description="What it means, in the words of docs/causes.md. A `benign_…` cause makes it a line that looks "
        "alarming and is not.",
        json_schema_extra={"accepted": "a cause of docs/causes.md"},
    )
    matches: tuple[str, ...] = Field(
        description="Witnesses: lines, as they stand in the journal, that must fit.",
        json_schema_extra={"accepted": "a list of lines, at least one"},
    )
    ignores: tuple[str, ...] = Field(
        description="Witnesses: near misses, which must not fit.",
        json_schema_extra={"accepted": "a list of lines, at least one"},
    )
    unless: str | None = key(None, "Lines that this fits, too, are not meant.", "a regular expression")
    phase: str | None = key(
        None,
        "Where in the boot it happens. Default: the phase of the boot so far.",
        "exec, config, weights, profiling, kv_cache, compile, graph_capture, warmup, first_request, load or idle",
    )
    permanent: bool | None = key(
        None, "Whether the same boot would fail again. Default: what the cause says.", _BOOLEAN
    )
    advice: str | None = key(None, "What to do about it. Default: what the cause says.", "text")
    sticky: bool = key(False, "Later successes do not take it back.", _BOOLEAN)  # noqa: FBT003
    alarm: bool = key(
        False,  # noqa: FBT003
        "The start can no longer succeed once this line is seen: the boot is given up at once.",
        _BOOLEAN,
    )
    transport: Literal["program", "journal", "kernel"] = key(
        "program", "Whose lines: the program's, systemd's, or the kernel's.", "program, journal or kernel"
    )
    words: tuple[str, ...] = key(
        (),
        "At least one of these stands in every line that fits, as a whole run of letters. A rule that has them costs "
        "other lines nothing.",
        "a list of words, each at least three letters",
    )


class BoxKeys(Keys):
    """One box: the machine under test and the unit on it."""

    transport: Literal["local", "ssh"] = key(
        "local", "How the box is reached: it is this machine, or over ssh.", "local or ssh"
    )
    host: str | None = key(
        None,
        "ssh only: an alias of the ssh config, or a host name. Default: the box's name.",
        "text without spaces",
        pattern=r"^[^\s-]\S*$",
    )
    ssh_config: str | None = key(None, "ssh only: another ssh config file than ~/.ssh/config.", "a path", min_length=1)
    service: Literal["systemd", "systemd-user", "process"] = key(
        "systemd",
        "Who runs the engine: a system unit, a unit of the user's own manager, or a plain process.",
        "systemd, systemd-user or process",
    )
    unit: str | None = key(
        None,
        "The production unit. Needed for systemd and systemd-user.",
        "a unit's name, such as vllm.service",
        pattern=r"^[A-Za-z0-9:_.\\@-]+$",
        max_length=255,
    )
    unit_file: Path | None = key(
        None,
        "A file on this side that production's command is read from, instead of the installed unit. Relative to "
        "matrix.yaml.",
        "a path",
    )
    program: tuple[str, ...] | None = key(
        None,
        "Replaces what stands before the first flag of production's command. With `engine: rehearsal` the default is "
        "this Python with `-m orchestrator.rehearsal`.",
        "a list of words",
        min_length=1,
    )
    engine: Literal["vllm", "rehearsal"] = key(
        "vllm", "What serves: vLLM, or the stand-in whose results are stamped REHEARSAL.", "vllm or rehearsal"
    )
    port: Port | None = key(
        None, "Production's port. Default: the one in production's command (vLLM's own default is 8000).", _PORT
    )
    isolate: bool = key(
        True,  # noqa: FBT003
        "Serve trials on 127.0.0.1 and a port of their own, out of reach of production's clients.",
        _BOOLEAN,
    )
    isolate_port: Port | None = key(None, "Which port that is. Default: a free one.", _PORT)
    user: str | None = key(
        None,
        "ssh only: the user to log in as. Default: what the ssh config says.",
        "a user's name",
        pattern=r"^[a-z_][a-z0-9_.-]*\$?$",
    )
    sudo: bool | None = key(
        None, "Whether root's commands go through `sudo -n`. Default: when not root already.", _BOOLEAN
    )
    root: Literal["helper", "sudo"] | None = key(
        None,
        "Who does what only root may: `coldboot-box` on the box, or the box's own programs by sudo. Default: the "
        "helper where it is installed for this unit and login, else sudo.",
        "helper or sudo",
    )
    cache_root: str | None = key(
        None,
        "Where the empty cache folders of cold boots are made. Default: beside the service user's own caches.",
        "an absolute path",
        pattern=r"^/",
    )
    env: Annotated[dict[str, str], _ENV_SCHEMA] = key(
        {}, "Environment of the engine on this box, for every variant.", "NAME: text, one a line"
    )
    time_scale: float | None = key(
        None,
        "rehearsal engine only: boot phases and the logger's interval are multiplied by it, token rates never.",
        "a number above 0, at most 1",
        gt=0,
        le=1,
    )
    memory_bandwidth_gb_s: float | None = key(
        None,
        "For the bandwidth wall: what the memory of one card gives at most, GB/s. Default: by the card's name.",
        "a number above 0",
        gt=0,
    )
    weights_gib: float | None = key(
        None,
        "For the bandwidth wall: how much weight one card reads in a step, GiB; a mixture of experts reads less than "
        "it holds. Default: what the engine's log says, else the checkpoint's size.",
        "a number above 0",
        gt=0,
    )
    dead_man_s: Seconds = key(
        900.0, "The box restores production by itself when nothing was heard from us for so long.", _POSITIVE
    )
    reconnect_s: Seconds = key(
        900.0, "How long a box that was lost in mid campaign is tried again; a reboot must fit into it.", _POSITIVE
    )
    load: LoadSpec | None = key(None, "What differs from the top-level `load:` on this box.", "a mapping")
    deadlines: Deadlines | None = key(None, "What differs from the top-level `deadlines:` on this box.", "a mapping")


_VARIANT_SCHEMA: dict[str, Any] = {
    "type": ["object", "null"],
    "properties": {
        "unset": {
            "type": "array",
            "items": {"type": "string"},
            "uniqueItems": True,
            "description": "Flags of production that this variant leaves out.",
        },
        "env": {
            "type": "object",
            "additionalProperties": {"type": ["string", "number", "null"]},
            "description": "Environment variables; null takes one away.",
        },
        "program": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": "Replaces what stands before the first flag of production's command, for this variant.",
        },
    },
    "additionalProperties": {
        "type": ["string", "number", "boolean", "array", "object"],
        "description": f"A flag of the engine. Accepted: {FLAG_VALUE}.",
    },
}
NAME = "letters, digits, `-`, `_` and `.`, beginning with a letter, a digit or `_`"
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
MAX_NAME = 64

Boots: TypeAlias = Annotated[int, Field(ge=1, le=1000)] | Literal["auto"]
BOOTS = "a whole number, 1 to 1000, or auto"
_LEVELS = "a list of whole numbers, 1 to 4096, each once"
_CACHES = "cold, clear, warm, as-is, or a list of these, each once"


_LEVELS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {
        "anyOf": [
            {"type": "array", "minItems": 1, "description": "Values of the flag of this name, or of env.NAME."},
            {"type": "object", "minProperties": 1, "additionalProperties": _VARIANT_SCHEMA},
        ]
    },
}


class GridKeys(Keys):
    """Variants that are made from factors: every combination of their levels, each a plain variant with a name."""

    factors: Annotated[dict[str, Any], WithJsonSchema(_LEVELS_SCHEMA)] = Field(
        description="What varies. `FLAG: [values]` or `env.NAME: [values]`; or a name of your own, with labelled "
        "levels that each say all that belongs together: `venv: {v26: {…}, v32: {…}}`.",
        json_schema_extra={
            "accepted": "a mapping: factor, then a list of values, or a mapping label: keys of a variant"
        },
        min_length=1,
    )
    linked: tuple[Annotated[tuple[str, ...], Field(min_length=2)], ...] = key(
        (), "Factors that go through their levels together, not in every combination.", "a list of lists of factors"
    )
    exclude: Annotated[
        tuple[dict[str, Any], ...],
        WithJsonSchema({"type": "array", "items": {"type": "object", "minProperties": 1}}),
    ] = key(
        (), "Combinations that are left out: each has all these levels.", "a list of mappings, factor: value or label"
    )
    common: Annotated[dict[str, Any], WithJsonSchema(_VARIANT_SCHEMA)] = key(
        {}, "What all variants of the grid have in common.", "the keys of a variant"
    )
    name: str | None = key(
        None,
        "How they are called: `{factor}` stands for its level (`spec-tokens-3`, or a label), `{factor!}` for the value "
        "alone (`3`). Default: all factors, joined by `_`.",
        "text with factors in braces",
        min_length=1,
    )


class MatrixFile(Keys):
    """The experiment: what is compared, on which box, how often."""

    experiment: str | None = key(
        None,
        "Names the experiment and its folder under artifacts/. Default: the file's name without its ending.",
        NAME,
        pattern=NAME_PATTERN,
        max_length=MAX_NAME,
    )
    box: str | None = key(
        None, "The box that is used unless `--box` names another. Default: the only one.", "a name under `boxes:`"
    )
    boots: Boots | None = key(None, "How often each variant boots, when `--boots` is not given.", BOOTS)
    seed: int = key(
        1, "Seed of the run order and of the prompts.", "a whole number, 0 to 4294967295", ge=0, le=2**32 - 1
    )
    concurrency: tuple[Streams, ...] = key(
        (1, 2, 4, 8),
        "How many requests run at once, one trial for each level; always run in ascending order.",
        _LEVELS,
        min_length=1,
    )
    cache: CacheState | Annotated[tuple[CacheState, ...], Field(min_length=1)] = key(
        "cold", "The state of the compile caches before a boot. Several are separate cells, never pooled.", _CACHES
    )
    tolerance: float = key(
        0.05,
        "The widest boot-to-boot spread (sd of logs, near the coefficient of variation) that still reproduces.",
        "a number above 0, below 1",
        gt=0,
        lt=1,
    )
    headroom: bool | Literal["on", "off"] = key(
        True,  # noqa: FBT003
        "Whether each boot is tried with a long prompt and with several at once before its trials.",
        "true, false, on or off",
    )
    production: str | None = key(
        None,
        "Which variant is what production runs now. Default: the one whose flags equal production's.",
        "a name under `variants:`",
    )
    limits: LimitKeys = key(LimitKeys(), "When a campaign ends before its boots are done.", "a mapping")
    on_end: tuple[str, ...] | None = key(
        None,
        "A command of yours that is run on this side when a campaign has ended or failed, without a shell. What "
        "happened is in its environment: COLDBOOT_OUTCOME, COLDBOOT_WINNER and more, see docs/reference.md.",
        "a list of words, such as [./notify, night]",
        min_length=1,
    )
    objective: ObjectiveKeys = key(ObjectiveKeys(), "What the winner is best in.", "a mapping")
    constraints: tuple[str, ...] = key(
        (),
        "What every variant has to hold, such as `ttft_p99_ms <= 800 at 8`; without levels at each that was measured. "
        "One that surely misses it is rejected.",
        "a list of METRIC <= NUMBER at LEVELS",
    )
    claims: tuple[str, ...] = key(
        (),
        "What is to be shown, such as `spec-1 >= 1.5x spec-3 at 1`; `invoke gate` checks them.",
        "a list of VARIANT >= FACTORx VARIANT at LEVELS, or VARIANT >= NUMBER tok/s at LEVELS",
    )
    include: tuple[Annotated[str, Field(min_length=1)], ...] = key(
        (),
        "Files with more keys, relative to this one. What stands here counts before them, and a later one before an "
        "earlier one; boxes, variants, grids, load and deadlines are put together name by name. A box, variant or grid "
        "of the same name is taken whole.",
        "a list of paths",
    )
    rules: tuple[RuleKeys, ...] = key(
        (), "What lines in the journal mean, before the rules that are shipped.", "a list of rules"
    )
    load: LoadSpec = key(LoadSpec(), "How each trial loads the engine.", "a mapping")
    deadlines: Deadlines = key(Deadlines(), "How long each step of a boot may take.", "a mapping")
    boxes: dict[str, BoxKeys] = Field(
        description="The boxes, by name. A box's name is not a number.",
        json_schema_extra={"accepted": "a mapping: name, then the keys of a box"},
        min_length=1,
    )
    grids: dict[str, GridKeys] = key(
        {},
        "Variants made from factors, after those that are written out, by a name of your own.",
        "a mapping: name, grid",
    )
    variants: Annotated[
        dict[str, Any],
        WithJsonSchema(
            {
                "type": "object",
                "propertyNames": {"pattern": NAME_PATTERN, "maxLength": MAX_NAME},
                "additionalProperties": _VARIANT_SCHEMA,
            }
        ),
    ] = Field(
        default={},
        description="What is compared, by name: the flags that differ from production's command. `{}` is production "
        "as it is. `unset:` is a list of flags to leave out, `env:` a mapping of environment variables (null takes one "
        "away), `program:` another program before the first flag; every other key is a flag. Accepted for a flag: "
        f"{FLAG_VALUE}.",
        json_schema_extra={"accepted": "a mapping: name, then flags"},
    )
