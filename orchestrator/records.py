"""The shared vocabulary: frozen record types and their units. Imports nothing of ours.

Units stand in the names (`_s` seconds, `_ms` milliseconds, `_us` microseconds, `_mib` MiB, `tok/s` where `unit` says
so). What does not exist is `None`, never 0; no field ever holds NaN or infinity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic.dataclasses import dataclass as checked
from pydantic_core import CoreSchema, core_schema

SCHEMA_VERSION = 1

CacheState = Literal["cold", "clear", "warm", "as-is"]
CACHE_STATES: tuple[CacheState, ...] = ("cold", "clear", "warm", "as-is")
BootOutcome = Literal["completed", "crashed", "not_ready", "disturbed", "aborted"]
CountedOutcome = Literal["completed", "crashed", "not_ready"]
Outcome = Literal["startup_failure", "fatal", "benign"]
StepName = Literal[
    "clean_slate",
    "cold",
    "settle",
    "render",
    "start",
    "ready",
    "first_request",
    "headroom",
    "sanity",
    "trials",
    "stop",
]
STEPS: tuple[StepName, ...] = (
    "clean_slate",
    "cold",
    "settle",
    "render",
    "start",
    "ready",
    "first_request",
    "headroom",
    "sanity",
    "trials",
    "stop",
)
Reproducibility = Literal["REPRODUCES", "DOES_NOT_REPRODUCE", "UNDECIDED"]
VariantAnswer = Literal["WINNER", "CONTENDER", "DOMINATED", "REJECTED", "UNDECIDED"]
ThreeAnswers = Literal["PASS", "FAIL", "UNDECIDED"]
THROUGHPUT = "tokens_per_s"
LEVEL_HELP = "a whole number of concurrent streams, from 1; or 8@8000: streams@prompt tokens"
_LEVEL = re.compile(r"([1-9][0-9]{0,6})(?:@([1-9][0-9]{0,6}))?", re.ASCII)


def now() -> str:
    """The present moment, UTC, ISO 8601 with milliseconds and `Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@cache
def _fields(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


class Frozen(BaseModel):
    """A finished thing: it never changes, and holds no NaN or infinity. Unknown keys of a later version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def model_post_init(self, _context: Any, /) -> None:
        """One set of field names for all of a class: a set of its own is more than half of what a record takes."""
        object.__setattr__(self, "__pydantic_fields_set__", _fields(type(self)))

    @classmethod
    def made(cls, values: dict[str, Any]) -> Self:
        """One of these from a value for each field, which were checked elsewhere; ten times as fast as pydantic's."""
        new = object.__new__(cls)
        object.__setattr__(new, "__dict__", values)
        object.__setattr__(new, "__pydantic_fields_set__", _fields(cls))
        object.__setattr__(new, "__pydantic_extra__", None)
        object.__setattr__(new, "__pydantic_private__", None)
        return new


# --- levels --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Level:
    """One load of an experiment: how many streams, and how long their prompts are. Spelled `8`, or `8@8000`.

    `input_tokens` is None where prompt length is no factor: an experiment with one length names it in no level. Levels
    ascend by length, then by concurrency. In JSON a level without a length is a number, any other is its spelling.
    """

    concurrency: int
    input_tokens: int | None = None

    def __str__(self) -> str:
        """The spelling, in tables, claims, constraints, series and file names."""
        return f"{self.concurrency}" if self.input_tokens is None else f"{self.concurrency}@{self.input_tokens}"

    def __lt__(self, other: Level) -> bool:
        return (self.input_tokens or 0, self.concurrency) < (other.input_tokens or 0, other.concurrency)

    def covers(self, other: Level) -> bool:
        """Whether `other` is meant by who names this level: without a length, that concurrency at every length."""
        return self.concurrency == other.concurrency and self.input_tokens in (None, other.input_tokens)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The level of a spelling.

        Raises:
            ValueError: it is none; says what is accepted.
        """
        match = _LEVEL.fullmatch(text)
        if match is None:
            raise ValueError(f"`{text}` is no level; accepted: {LEVEL_HELP}")
        return cls(int(match[1]), None if match[2] is None else int(match[2]))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A number or a spelling, in both directions; a key of a mapping is always text."""
        return core_schema.no_info_plain_validator_function(
            cls._taken,
            serialization=core_schema.plain_serializer_function_ser_schema(cls._given),
        )

    @classmethod
    def _taken(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, int | str) and not isinstance(value, bool):
            return cls.parse(str(value))
        raise ValueError(f"{value!r} is no level; accepted: {LEVEL_HELP}")

    def _given(self) -> int | str:
        return self.concurrency if self.input_tokens is None else str(self)


def level_of(concurrency: int, input_tokens: int | None, lengths: Sequence[int]) -> Level:
    """The level of a load in an experiment with these prompt lengths: only one of several is named."""
    return _same_level(concurrency, input_tokens if len(lengths) > 1 else None)


def levels_of(concurrency: Iterable[int], lengths: Sequence[int]) -> tuple[Level, ...]:
    """Every concurrency at every prompt length, in the order in which a boot measures them."""
    return tuple(sorted(level_of(streams, length, lengths) for streams in concurrency for length in lengths or (None,)))


@cache
def _same_level(concurrency: int, input_tokens: int | None) -> Level:
    """A hundred thousand trials have few levels: one object of each is made once, and found by identity."""
    return Level(concurrency, input_tokens)


class Objective(Frozen):
    """What the winner is best in: a metric, as the weighted geometric mean over levels.

    No `levels`: all that every ranked variant has measured. `weights`: of levels, 1 where none is given. A level
    without a prompt length speaks of every length.
    """

    metric: str = THROUGHPUT
    levels: tuple[Level, ...] = ()
    weights: dict[Level, float] = Field(default_factory=dict)

    def weight(self, level: Level) -> float:
        """What a level counts: its own weight before that of its concurrency at any length."""
        return self.weights.get(level, self.weights.get(Level(level.concurrency), 1.0))


# --- raw, kept as it came ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command on the box answered."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry of the journal, or one line of a plain log.

    `index` counts from 0 over the input. `at_us` is `__REALTIME_TIMESTAMP` (microseconds since the epoch).
    `transport` is journald's (`stdout`, `journal`, `kernel`, `syslog` …). `fields` are journald's own fields, as far as
    the classifier uses them.
    """

    index: int
    message: str
    at_us: int | None = None
    invocation_id: str | None = None
    unit: str | None = None
    identifier: str | None = None
    pid: int | None = None
    transport: str | None = None
    cursor: str | None = None
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request as the client saw it. Times are seconds of the client's monotonic clock.

    `status` is the HTTP status (None: no answer); `error` is None when the request succeeded. `chunk_at_s` is the
    arrival of each streamed chunk that held text. `completion_tokens` is the server's `usage`.
    """

    sent_at_s: float
    ended_at_s: float
    first_token_at_s: float | None
    chunk_at_s: tuple[float, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    chunks: int
    words: int
    finish_reason: str | None
    status: int | None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token."""
        return None if self.first_token_at_s is None else self.first_token_at_s - self.sent_at_s


# --- what the journal says -----------------------------------------------------------------------------------------


class Evidence(Frozen):
    """One telling entry: `entry` counts from 0 over the input, `rule` is the CamelCase reason."""

    entry: int
    rule: str
    text: str
    at_us: int | None = None


class Timeline(Frozen):
    """Where the start-up time went, from the engine's own lines. Seconds; None where no line told."""

    engine_version: str | None = None
    imports_s: float | None = None
    config_s: float | None = None
    weights_s: float | None = None
    compile_s: float | None = None
    profiling_s: float | None = None
    kv_cache_s: float | None = None
    graph_capture_s: float | None = None
    warmup_s: float | None = None
    ready_s: float | None = None
    compile_state: Literal["compiled", "loaded", "mixed", "no_compile", "unknown"] = "unknown"
    weights_gib: float | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    graph_capture_gib: float | None = None
    num_batched_tokens: int | None = None


class Answer(Frozen):
    """The classifier's answer on one start, in the words of the case vocabulary."""

    outcome: Outcome
    phase: str
    cause: str
    complete: bool
    evidence_may_be_missing: bool = False
    evidence: tuple[Evidence, ...] = ()
    permanent: bool | None = None
    advice: str | None = None
    timeline: Timeline | None = None


# --- what was measured ---------------------------------------------------------------------------------------------

# As `Frozen`, but with slots: a trial holds seven of these, and a night's ledger a hundred thousand trials.
_MEASURED = ConfigDict(extra="ignore", allow_inf_nan=False)


@checked(frozen=True, slots=True, config=_MEASURED)
class Rulers:
    """The same window by every ruler, tok/s (words/s and chunks/s for those two). Only `counter` is the measurement."""

    counter: float | None = None
    usage: float | None = None
    chunks: float | None = None
    words: float | None = None
    logger: float | None = None


@checked(frozen=True, slots=True, config=_MEASURED)
class Quantiles:
    """Milliseconds over one trial; None without observations."""

    n: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


@checked(frozen=True, slots=True, config=_MEASURED)
class Deltas:
    """Increase of the server's counters over a span; None where the server does not export the family."""

    seconds: float
    generation_tokens: float | None = None
    prompt_tokens: float | None = None
    requests_by_reason: dict[str, float] = field(default_factory=dict)
    preemptions: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    spec_drafts: float | None = None
    spec_draft_tokens: float | None = None
    spec_accepted_tokens: float | None = None
    spec_accepted_per_position: tuple[float, ...] = ()
    counter_reset: bool = False


@checked(frozen=True, slots=True, config=_MEASURED)
class GpuUse:
    """One GPU over one window, from samples twice a second; None: this GPU does not tell (MIG, an old board).

    `throttle`: reason for a lower clock → share of the samples that named it (0..1); empty: none was seen. `samples`
    counts all of the window. `memory_clock_mhz` is the lowest seen, `power_limit_w` the last.
    """

    index: int
    samples: int
    utilisation_mean_percent: float | None = None
    memory_used_max_mib: float | None = None
    sm_clock_min_mhz: float | None = None
    sm_clock_mean_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_mean_w: float | None = None
    power_limit_w: float | None = None
    temperature_max_c: float | None = None
    throttle: dict[str, float] | None = None


class ProductionState(Frozen):
    """What was there before the campaign's first change, and must be there after its last."""

    unit: str
    active: bool
    enabled: bool | None = None
    command: tuple[str, ...] = ()
    drop_ins: tuple[str, ...] = ()


# --- the records of the ledger -------------------------------------------------------------------------------------


class Record(Frozen):
    """One line of records.jsonl."""

    v: Literal[1] = 1
    at: str = Field(default_factory=now)


class BootRecord(Record):
    """A record of one boot. `boot` is unique in the experiment; `attempt` counts repeats of the same planned boot."""

    boot: str
    variant: str
    cache: CacheState
    block: int
    position: int
    attempt: int = 1


class CampaignStarted(Record):
    """The campaign began, or went on after an interruption.

    `changes` counts per variant the flags that differ from production's; `production_variant` is the one that differs
    in none. `commands` are the variants' command lines as composed, `base_command` production's.
    `memory_bandwidth_gb_s` and `weights_gib` are what matrix.yaml says of one card, `checkpoint_gib` what the models'
    files come to on one, by variant.
    """

    kind: Literal["campaign_started"] = "campaign_started"
    experiment: str
    box: str
    rehearsal: bool
    seed: int
    boots_planned: int | None
    fingerprint: dict[str, str | None] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    production: ProductionState | None = None
    resumed: bool = False
    variants: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    tolerance: float = 0.05
    production_variant: str | None = None
    changes: dict[str, int] = Field(default_factory=dict)
    commands: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    base_command: tuple[str, ...] = ()
    load: dict[str, Any] = Field(default_factory=dict)
    headroom: bool = True
    objective: Objective = Objective()
    constraints: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()

    @property
    def input_tokens(self) -> tuple[int, ...]:
        """The prompt lengths of its load, ascending; empty where it names none, or the prompts are the user's own."""
        given = self.load.get("input_tokens") if self.load.get("prompts") is None else None
        lengths = given if isinstance(given, list | tuple) else [given]
        return tuple(sorted({length for length in lengths if isinstance(length, int)}))

    @property
    def levels(self) -> tuple[Level, ...]:
        """What each boot measures, in order."""
        return levels_of(self.concurrency, self.input_tokens)

    memory_bandwidth_gb_s: float | None = None
    weights_gib: float | None = None
    checkpoint_gib: dict[str, float] = Field(default_factory=dict)


class BootStarted(BootRecord):
    """A planned boot began."""

    kind: Literal["boot_started"] = "boot_started"
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)


class StepEnded(BootRecord):
    """One stage of a boot ended. `engine_s`: the part in which the engine started, worked, died or was under load."""

    kind: Literal["step"] = "step"
    name: StepName
    seconds: float
    engine_s: float = 0.0
    outcome: Literal["ok", "failed", "skipped", "disturbed"]
    detail: str | None = None
    facts: dict[str, Any] = Field(default_factory=dict)


class JournalAnswered(BootRecord):
    """What the journal says about this boot."""

    kind: Literal["journal_answer"] = "journal_answer"
    answer: Answer


class TrialEnded(BootRecord):
    """One load at one concurrency and one prompt length inside one boot.

    `input_tokens` is about how long its prompts were; None in a ledger that is older than several lengths: the one of
    its campaign. `tokens_per_s` is the counter's increase in the window over its wall time; None when the trial is not
    valid or failed. `valid` is False when the rig was disturbed (`invalid_reasons`); `failed` when the variant failed
    under load: a 5xx, a cut stream, an engine death (`errors`: kind → count). `gpu`: the GPUs in the window, None
    without any.
    """

    kind: Literal["trial"] = "trial"
    concurrency: int
    input_tokens: int | None = None
    window_s: float | None
    tokens: float | None
    tokens_per_s: float | None
    valid: bool
    invalid_reasons: tuple[str, ...] = ()
    failed: bool = False
    errors: dict[str, int] = Field(default_factory=dict)
    requests_sent: int = 0
    requests_ok: int = 0
    rulers: Rulers = Rulers()
    deltas: Deltas | None = None
    whole: Deltas | None = None
    client_tokens: int | None = None
    ttft_ms: Quantiles = Quantiles()
    itl_ms: Quantiles = Quantiles()
    e2e_ms: Quantiles = Quantiles()
    window_started_at: str | None = None
    warnings: tuple[str, ...] = ()
    gpu: tuple[GpuUse, ...] | None = None


class BootEnded(BootRecord):
    """A boot ended. `died`: the engine died, at whatever step; `step` is where the boot ended."""

    kind: Literal["boot_ended"] = "boot_ended"
    boot_outcome: BootOutcome
    why: str
    step: StepName | None = None
    died: bool = False
    seconds: float | None = None
    ours_s: float | None = None
    cache_proof: str | None = None


class CampaignEnded(Record):
    """The campaign ended. `restored`: production is as it was before."""

    kind: Literal["campaign_ended"] = "campaign_ended"
    outcome: Literal["complete", "interrupted", "terminated", "box_lost", "budget_spent", "failed"]
    restored: bool
    why: str | None = None


AnyRecord = Annotated[
    CampaignStarted | BootStarted | StepEnded | JournalAnswered | TrialEnded | BootEnded | CampaignEnded,
    Field(discriminator="kind"),
]
RECORD: TypeAdapter[AnyRecord] = TypeAdapter(AnyRecord)


# --- what the analysis speaks of -----------------------------------------------------------------------------------


class LevelResult(Frozen):
    """One boot's value at one level, tok/s.

    `input_tokens`: as in `Level`. `value` is None where the variant failed under load (`failed`), where the rig was
    disturbed (`valid` is False), or where nobody measured (`measured` is False). `metrics` are other numbers of the
    same trial by name (`ttft_p99_ms`).
    """

    concurrency: int
    input_tokens: int | None = None
    value: float | None
    failed: bool = False
    valid: bool = True
    measured: bool = True
    metrics: dict[str, float] = Field(default_factory=dict)

    @property
    def level(self) -> Level:
        """Where it was measured."""
        return Level(self.concurrency, self.input_tokens)


class BootResult(Frozen):
    """One planned boot that counts, as the analysis sees it: from a ledger or from a hand-recorded series.

    Disturbed and aborted boots are the rig's; they are counted in `Series` and have no result. `died_before_trials` is
    `cold_boot_fatal`'s witness: the engine died, or was not ready by the deadline, before the trials;
    `died_under_load`: it died in a trial. `covariates` are numbers that may explain a drift (`start_temperature_c`).
    """

    boot: str
    variant: str
    cache: CacheState
    block: int
    position: int
    outcome: CountedOutcome
    why: str = ""
    died: bool = False
    died_before_trials: bool = False
    died_under_load: bool = False
    cause: str | None = None
    phase: str | None = None
    levels: tuple[LevelResult, ...] = ()
    at: str | None = None
    covariates: dict[str, float] = Field(default_factory=dict)


class Series(Frozen):
    """Everything that a verdict is made of.

    `concurrency` and `caches` are what was planned for every variant; both are empty for a hand-recorded series, whose
    cells are those that it mentions. `input_tokens` are the prompt lengths, where all are known; of several each level
    names its own. `changes`: flags that differ from production, a variant. `refute_looks` and
    `vouch_looks` are the numbers of boots after which an adaptive plan may refute and vouch, each at its α; both empty:
    one look, at all boots that there are. `notes` are warnings about where the boots come from. `undeclared_look` says
    which look is taken that the plan did not declare. `blocked`: boots of one block number stood together in time.
    """

    experiment: str
    box: str | None = None
    rehearsal: bool = False
    tolerance: float = 0.05
    boots_planned: int | None = None
    production: str | None = None
    variants: tuple[str, ...] = ()
    changes: dict[str, int] = Field(default_factory=dict)
    concurrency: tuple[int, ...] = ()
    input_tokens: tuple[int, ...] = ()
    boots: tuple[BootResult, ...] = ()
    confounded: str | None = None
    caches: tuple[CacheState, ...] = ()
    boots_disturbed: dict[str, int] = Field(default_factory=dict)
    boots_aborted: dict[str, int] = Field(default_factory=dict)
    plan: str = "fixed"
    refute_looks: tuple[int, ...] = ()
    vouch_looks: tuple[int, ...] = ()
    refute_alpha: float = 0.05
    vouch_alpha: float = 0.05
    notes: tuple[str, ...] = ()
    objective: Objective = Objective()
    constraints: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    undeclared_look: str | None = None
    blocked: bool = False

    @property
    def levels(self) -> tuple[Level, ...]:
        """What was planned for every variant."""
        return levels_of(self.concurrency, self.input_tokens)

    def length(self, level: Level) -> int | None:
        """The prompt length at a level: its own, else the only one; None where nobody knows it."""
        return level.input_tokens or (self.input_tokens[0] if len(self.input_tokens) == 1 else None)

    def named(self, level: Level) -> Level:
        """A level as a person may name it, as it is called here: the only prompt length is named nowhere."""
        return Level(level.concurrency) if self.input_tokens == (level.input_tokens,) else level


def with_one_length(boots: Iterable[BootResult]) -> tuple[tuple[BootResult, ...], tuple[int, ...]]:
    """Boots and their prompt lengths, as `Series` has them: where all levels name one length, none names it.

    No lengths where some level does not say its own.
    """
    boots = tuple(boots)
    lengths = {result.input_tokens for boot in boots for result in boot.levels}
    known = tuple(sorted(length for length in lengths if length is not None))
    if None in lengths:
        return boots, ()
    if len(known) != 1:
        return boots, known
    short = (tuple(x.model_copy(update={"input_tokens": None}) for x in boot.levels) for boot in boots)
    return tuple(b.model_copy(update={"levels": own}) for b, own in zip(boots, short, strict=True)), known


class ConstraintVerdict(Frozen):
    """Whether a variant holds a constraint: by one-sided 95 % bounds of its boots' geometric mean, level by level."""

    constraint: str
    answer: ThreeAnswers
    sentence: str


class ClaimVerdict(Frozen):
    """Whether a claim of matrix.yaml holds."""

    claim: str
    answer: ThreeAnswers
    sentence: str


class CellVerdict(Frozen):
    """Variant × cache state × level.

    `level` is how claims and tables call it: `concurrency`, and the prompt length where there are several.
    `input_tokens` is that length, None where nobody knows it. `by_boot` has one entry for each boot of the variant that
    counts, None where it has no valid value here. `estimate` is the geometric mean of the boots with its 95 % t
    interval. `spread*` are sd of logs with one-sided 95 % bounds. `more_boots` would settle it if the spread stays.
    `decided_at`: boots at the look that settled it.
    `agrees_below_six`: a pull-request plan's word where five boots are within the tolerance, too few to vouch.
    """

    concurrency: int
    input_tokens: int | None = None
    level: Level
    cache: CacheState
    unit: str = "tok/s"
    by_boot: tuple[float | None, ...]
    estimate: float | None
    interval: tuple[float, float] | None
    reproducibility: Reproducibility
    spread: float | None
    spread_lower: float | None
    spread_upper: float | None
    more_boots: int | None
    hidden_mode_rate: float | None
    decided_at: int | None = None
    agrees_below_six: bool = False


class VariantVerdict(Frozen):
    """One variant's answer with every reason and number.

    `objective` is in the objective's unit (tok/s unless the matrix says otherwise), the weighted geometric mean of the
    boots' values at `objective_levels`. `ratio_to_winner` is its ratio to the winner's, with the 95 % interval of boots
    that have all those levels: Welch's, or `paired` within blocks where blocks differ (`compared`). `failure_rate`
    holds the one-sided 95 % Clopper-Pearson bounds on the share of boots that crash or are not ready. `changes`: flags
    that differ from production's, None where unknown. `remarks`: what `Verdicts.sentence` does not say of the winner.
    """

    name: str
    verdict: VariantAnswer
    reasons: tuple[str, ...] = ()
    boots: int
    boots_failed: int
    boots_disturbed: int = 0
    boots_aborted: int = 0
    sentence: str
    remarks: tuple[str, ...] = ()
    objective: float | None = None
    objective_levels: tuple[Level, ...] = ()
    ratio_to_winner: float | None = None
    ratio_interval: tuple[float, float] | None = None
    p_holm: float | None = None
    compared: Literal["welch", "paired"] | None = None
    failure_rate: tuple[float, float] | None = None
    confounded: str | None = None
    tied: bool = False
    changes: int | None = None
    constraints: tuple[ConstraintVerdict, ...] = ()
    cells: tuple[CellVerdict, ...] = ()

    @property
    def why(self) -> str:
        """The sentence as it follows name and verdict, which it does not say again."""
        said = self.sentence.removeprefix(f"{self.name} ").removeprefix(f"is {self.verdict.lower()}: ")
        return said.removeprefix("is a contender: ").removeprefix("is ")


class Verdicts(Frozen):
    """verdicts.json; written by alias, so that `"schema": 1` stands first."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    experiment: str
    box: str | None
    rehearsal: bool
    tolerance: float
    boots_planned: int | None
    winner: str | None
    provisional: bool | None
    production: str | None = None
    sentence: str = ""
    confounded: str | None = None
    objective_cache: CacheState | None = None
    objective_levels: tuple[Level, ...] = ()
    objective_metric: str = THROUGHPUT
    objective_unit: str = "tok/s"
    objective_weights: dict[Level, float] = Field(default_factory=dict)
    input_tokens: tuple[int, ...] = ()
    claims: tuple[ClaimVerdict, ...] = ()
    plan: str = "fixed"
    refute_looks: tuple[int, ...] = ()
    vouch_looks: tuple[int, ...] = ()
    refute_alpha: float = 0.05
    vouch_alpha: float = 0.05
    notes: tuple[str, ...] = ()
    undeclared_look: str | None = None
    variants: tuple[VariantVerdict, ...] = ()

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
