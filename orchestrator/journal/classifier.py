"""Journal entries, one by one → what killed this boot.

`Classifier` is fed while the journal is followed: `alarm` is set by the first entry that means that the start can no
longer succeed, `answer()` may be asked at any time. Starts that systemd's automatic restart joins are one chain,
answered by its first death. Pure: no input or output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Literal

from orchestrator.journal import lines
from orchestrator.journal.entries import TOO_LONG, read
from orchestrator.journal.rules import Rule, RuleSet, load_rules, words_of
from orchestrator.journal.start import NO_REASON, Hit, KernelEvent, Start
from orchestrator.records import Answer, Evidence, JournalEntry, Timeline

Event = Literal["ready", "served", "stop_requested"]

DEFAULT: RuleSet = load_rules()

_ACCESS = re.compile(r'"(?P<verb>GET|POST) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3})')
_STATS = re.compile(
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs(?:, (?:Swapped|Waiting): (?P<waiting>\d+) reqs)?(?:, Pending: (?P<pending>\d+) reqs)?"
)
_VICTIM = re.compile(
    r"(?:Killed process |pid=|\bpid )(?P<pid>\d+)(?: ?[(,] ?(?:name=)?(?P<name>[^,()]+))?|^(?P<comm>[^\[\]]+)\[(?P<pid2>\d+)\]"
)
_CGROUP = re.compile(r"task_memcg=(?P<group>[^,]+)")
_TASK = re.compile(r"\btask=(?P<name>[^,]+),pid=(?P<pid>\d+)")
_UNIT_PID = re.compile(r"Killing process (?P<pid>\d+) |Main PID: (?P<main>\d+)")
# These tell where the boot is, whatever else their line means: they are looked at first and end no search.
MILESTONES = frozenset({"phase", "served", "ready"})
# How much is remembered of lines seen before: shapes that mean nothing, and what repeated lines mean.
_MOST_SHAPES = 1 << 16
_MOST_READINGS = 1 << 12
_LONGEST_READING = 2048
_DULL, _OK_READ, _OK_GENERATED, _PROGRESS = range(4)
_DIGITS = bytes(48 if 48 <= byte <= 57 else byte for byte in range(256))
_OK = '" 200 OK'
_TELLING = frozenset({"ERROR", "CRITICAL"})
_SERVING_SOURCES = ("serving", "loggers.py", "async_llm", "protocol.py", "v1/engine/async_llm")
_ERROR_LINE = Rule(
    name="ErrorLine",
    kind="benign",
    pattern="x",
    cause="benign_other",
    matches=("x",),
    ignores=("y",),
    source="box.toml",
)
_STATS_LINE = Rule(
    name="NoProgress",
    kind="benign",
    pattern="x",
    cause="benign_other",
    matches=("x",),
    ignores=("y",),
    source="box.toml",
)
_MARKED = Rule(name="StopAsked", kind="stop", pattern="x", matches=("x",), ignores=("y",), source="box.toml")


@dataclass(frozen=True, slots=True)
class _Reading:
    """A line without its prefix, and the rules that fit it: milestones first, then the one verdict."""

    line: lines.Line
    fits: tuple[tuple[Rule, re.Match[str]], ...]


class Chain:
    """Starts joined by systemd's automatic restart."""

    def __init__(self, unit: str | None) -> None:
        self.current = Start(unit=unit)
        self.previous: Start | None = None
        self.dead: Start | None = None
        self.noted: Start | None = None
        self.starts = 1
        self.invocations: list[str] = []

    def next_start(self, rules: RuleSet) -> None:
        """The unit starts again."""
        ended = self.current
        answer = ended.judge(dict(rules.causes))
        if answer.outcome != "benign":
            self.dead = self.dead or ended
        elif answer.cause != "healthy":
            self.noted = self.noted or ended
        self.previous = ended
        self.current = Start(unit=ended.unit)
        self.starts += 1

    def answer(self, rules: RuleSet) -> Answer:
        """The first death's answer; else the first start's that had something alarming; else the last's."""
        causes = dict(rules.causes)
        if self.dead is not None:
            return self.dead.judge(causes)
        last = self.current.judge(causes)
        if last.outcome == "benign" and self.noted is not None:
            return self.noted.judge(causes)
        return last


class Classifier:
    """Takes entries one by one and says at any time what they mean.

    Args:
        rules: What lines mean; the shipped rules by default.
        unit: Only entries of this unit (and the kernel's) count; None: all do.
        invocation: Only entries of this InvocationID (and the kernel's) count.

    Attributes:
        seen: How many entries were read, of whatever unit.
        entries: How many entries counted; `own_entries`: those that are not the kernel's.
        missing: journald itself said that it dropped entries.
        alarm: The entry that means that this start can no longer succeed; None before it, and None for everything
            after a requested stop.
        answers: Answers of the chains before the last one, oldest first, with their InvocationIDs.
    """

    def __init__(self, rules: RuleSet = DEFAULT, *, unit: str | None = None, invocation: str | None = None) -> None:
        self.rules = rules
        self.unit = unit
        self.invocation = invocation
        self.alarm: Evidence | None = None
        self.entries = 0
        self.own_entries = 0
        self.seen = 0
        self.missing = False
        self.answers: list[tuple[tuple[str, ...], Answer]] = []
        self._chain = Chain(unit)
        self._causes = dict(rules.causes)
        self._shapes: dict[bytes, int] = {}
        self._readings: dict[tuple[str, str], _Reading] = {}

    # --- in ----------------------------------------------------------------------------------------------------

    def feed(self, entry: JournalEntry) -> None:
        """Take one entry."""
        self.seen += 1
        kind = _kind(entry)
        if kind == "program" and self._passes(entry):
            self.seen -= 1
            return
        if kind != "kernel":
            if self.unit is not None and entry.unit is not None and entry.unit != self.unit:
                return
            if self.invocation is not None and entry.invocation_id != self.invocation:
                return
        self.entries += 1
        self.own_entries += kind != "kernel"
        start = self._chain.current if kind == "kernel" else self._start_of(entry, kind)
        start.entries += 1
        start.clock.begin(entry.at_us)
        if entry.message == TOO_LONG:
            self.missing = True
        dull = True
        for text in lines.split(entry.message):
            dull &= self._line(start, entry, kind, text)
            start = start if start is not self._chain.previous else self._chain.current
        if dull and kind == "program":
            self._remember(entry.message, _DULL)

    def feed_file(self, file: BinaryIO) -> None:
        """Take every entry of an open file, in whatever form it is (entries.read); dull ones are only counted."""
        # Filters look at fields that a line passed by never shows, so they see every entry.
        passing = None if self.unit is not None or self.invocation is not None else self
        for entry in read(file, passing):
            self.feed(entry)

    @property
    def invocation_now(self) -> str | None:
        """InvocationID of the start that entries belong to now."""
        return self._chain.current.invocation

    def pass_by(self, message: str) -> bool:
        """Count a line of the current start that needs no second look; False when it must be fed whole.

        A line's shape is its text with every digit as 0. Rules are found by runs of letters, so a line of a shape that
        held no rule's word can hold none either.
        """
        shape = message.encode("utf-8", "replace").translate(_DIGITS)
        meaning = self._shapes.get(shape)
        if meaning is None:
            return False
        start = self._chain.current
        if meaning != _DULL:
            if meaning == _PROGRESS:
                if ": 0.0 tokens/s" in message:
                    return False
                start.progressed()
            elif message.endswith(_OK):
                start.answered(200, generates=meaning == _OK_GENERATED)
            else:
                return False
        self.seen += 1
        self.entries += 1
        self.own_entries += 1
        start.entries += 1
        start.seq += 1
        return True

    def _passes(self, entry: JournalEntry) -> bool:
        filtered = self.unit is not None or self.invocation is not None
        return not filtered and entry.invocation_id == self._chain.current.invocation and self.pass_by(entry.message)

    def _remember(self, message: str, meaning: int) -> None:
        if len(message) <= _LONGEST_READING:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[message.encode("utf-8", "replace").translate(_DIGITS)] = meaning

    def mark(self, event: Event, at_us: int | None = None) -> None:
        """What the orchestrator itself knows: the server is ready, has served, or was asked to stop."""
        start = self._chain.current
        if event == "ready":
            start.is_ready(at_us)
        elif event == "served":
            start.is_ready(at_us)
            start.ok_requests += 1
        elif not (start.faults or start.deaths):
            start.stop_marked = True
            line = lines.Line(body="a stop was requested")
            start.stop = start.stop or start.hit(_MARKED, max(self.entries - 1, 0), line, at_us)

    def _start_of(self, entry: JournalEntry, kind: str) -> Start:
        """The start that an entry belongs to; opens a new one, or a new chain, where one begins."""
        chain = self._chain
        current = chain.current
        if current.unit is None and entry.unit is not None:
            current.unit = entry.unit
        told = entry.invocation_id
        if told is None or told == current.invocation:
            if current.restarted and kind == "program":
                chain.next_start(self.rules)
                chain.current.invocation = told
            return chain.current
        if current.invocation is None:
            current.invocation = told
            chain.invocations.append(told)
            return current
        if chain.previous is not None and told == chain.previous.invocation:
            return chain.previous
        if current.restarted:
            chain.next_start(self.rules)
        else:
            self.answers.append((tuple(chain.invocations), self._finished(chain)))
            self._chain = chain = Chain(self.unit or current.unit)
            self.alarm = None
        chain.current.invocation = told
        chain.invocations.append(told)
        return chain.current

    def _finished(self, chain: Chain) -> Answer:
        return chain.answer(self.rules).model_copy(update={"evidence_may_be_missing": self.missing})

    # --- one line ----------------------------------------------------------------------------------------------

    def _line(self, start: Start, entry: JournalEntry, kind: str, text: str) -> bool:
        """Take one line; True when it holds nothing that any rule looks for."""
        start.seq += 1
        if kind == "program" and text.endswith((" OK", "Error", "Request", "Found")) and self._access(start, text):
            return False
        reading = self._read(kind, text)
        if reading is None:
            return True
        line = reading.line
        if kind == "program":
            if line.pid is not None:
                start.pids.add(line.pid)
            if line.source.startswith(_SERVING_SOURCES) or line.source.endswith("_parser.py"):
                start.serving = True
            if line.body.startswith("Traceback"):
                start.traceback(line.proc)
            elif self._stats(start, entry, line):
                return False
        for rule, found in reading.fits:
            if self._apply(start, entry, line, rule, found):
                return False
        if line.is_frame:
            # Frames are found by names alone, never by numbers, so this one's shape means nothing either.
            return not reading.fits
        if line.level in _TELLING:
            self._telling(start, entry, line)
        return False

    def _read(self, kind: str, text: str) -> _Reading | None:
        """What a line says to the rules, None when none of their words stands in it. The same text is read once."""
        known = self._readings.get((kind, text))
        if known is not None:
            return known
        rules = self.rules
        words = words_of(text)
        if not rules.always and rules.keys.isdisjoint(words):
            return None
        line = lines.parse(text)
        frame = kind == "program" and line.is_frame
        fits: list[tuple[Rule, re.Match[str]]] = []
        verdict = False
        for rule in rules.candidates(words):
            milestone = rule.kind in MILESTONES
            if rule.transport != kind or (rule.kind == "frame") != frame or (verdict and not milestone):
                continue
            found = rule.regex.search(line.body)
            if found is not None:
                fits.append((rule, found))
                verdict |= not milestone
        fits.sort(key=lambda fit: fit[0].kind not in MILESTONES)
        reading = _Reading(line, tuple(fits))
        if len(text) <= _LONGEST_READING:
            if len(self._readings) >= _MOST_READINGS:
                self._readings.clear()
            self._readings[kind, text] = reading
        return reading

    def _access(self, start: Start, text: str) -> bool:
        found = _ACCESS.search(text)
        if found is None:
            return False
        path = found["path"]
        generates = found["verb"] == "POST" and "/v1/" in path and "lora" not in path
        status = int(found["status"])
        start.answered(status, generates=generates)
        if text.endswith(_OK):
            self._remember(text, _OK_GENERATED if generates else _OK_READ)
        if 400 <= status < 500 and generates:
            return False
        return True

    def _stats(self, start: Start, entry: JournalEntry, line: lines.Line) -> bool:
        if "Avg generation throughput" not in line.body:
            return False
        found = _STATS.search(line.body)
        if found is None:
            return False
        waiting = int(found["waiting"] or 0) + int(found["pending"] or 0)
        tokens = float(found["prompt"]) + float(found["generation"])
        if tokens > 0:
            self._remember_stats(line, entry)
        start.stats(start.hit(_STATS_LINE, entry.index, line, entry.at_us), int(found["running"]), waiting, tokens)
        return True

    def _remember_stats(self, line: lines.Line, entry: JournalEntry) -> None:
        if line.body in entry.message and "\n" not in entry.message:
            self._remember(entry.message, _PROGRESS)

    def _telling(self, start: Start, entry: JournalEntry, line: lines.Line) -> None:
        self._telling_hit(start, start.hit(_ERROR_LINE, entry.index, line, entry.at_us))

    @staticmethod
    def _telling_hit(start: Start, hit: Hit) -> None:
        if start.stopping():
            return
        if len(start.first_errors) < 5:
            start.first_errors.append(hit)
        else:
            start.last_errors.append(hit)

    def _apply(self, start: Start, entry: JournalEntry, line: lines.Line, rule: Rule, found: re.Match[str]) -> bool:
        """What a rule that fits does; True when no later rule shall look at the line."""
        kind = rule.kind
        if kind == "phase":
            start.milestone(rule, found.groupdict(), entry.at_us)
            return False
        if kind == "frame":
            start.frame(rule, line.proc)
            return True
        if kind == "served":
            start.serving = True
            start.idle = False
            return False
        if kind == "ready":
            start.is_ready(entry.at_us)
            return False
        if kind == "chain":
            self._chain_event(start, rule)
            return True
        if kind == "missing":
            self.missing = True
            return True
        if start.knows(rule, line.proc):
            return True
        if rule.name == "Dumping":
            start.dump(line.body)
        hit = start.hit(rule, entry.index, line, entry.at_us)
        if rule.transport == "kernel":
            self._kernel(start, hit, found.string)
            return True
        self._verdict(start, hit)
        return True

    def _verdict(self, start: Start, hit: Hit) -> None:
        rule = hit.rule
        if rule.kind == "stop" and rule.cause is not None and not start.serving:
            if not start.stopping():
                start.note(start.faults, hit)
            return
        if rule.kind == "fault" and rule.rank == NO_REASON and start.serving and rule.cause == "engine_dead_no_root":
            self._telling_hit(start, hit)
            return
        if rule.kind == "stop":
            if not (start.faults or start.deaths) or start.recoveries > max(
                h.recoveries for h in (*start.faults, *start.deaths)
            ):
                start.stop = start.stop or hit
            return
        if start.stopping():
            if rule.kind == "exit" and rule.cause == "sigkill_unattributed":
                start.slow_stop = start.slow_stop or hit
            if rule.kind == "exit":
                start.note(start.exits, hit) if rule.clean else None
            return
        if rule.kind == "benign":
            start.note(start.benign, hit)
            return
        kept = {"fault": start.faults, "death": start.deaths, "exit": start.exits}[rule.kind]
        start.note(kept, hit)
        if rule.alarm and self.alarm is None:
            self.alarm = hit.evidence()

    def _kernel(self, start: Start, hit: Hit, text: str) -> None:
        pid, name = None, None
        task = _TASK.search(text)
        found = _VICTIM.search(text)
        if task is not None:
            pid, name = int(task["pid"]), task["name"]
        elif found is not None:
            pid = int(found["pid"] or found["pid2"])
            name = (found["name"] or found["comm"] or "").strip() or None
        group = _CGROUP.search(text)
        event = KernelEvent(hit, pid, name, group["group"] if group else None)
        if start.stopping() or len(start.kernel) >= 50:
            return
        start.kernel.append(event)
        sure = (pid is not None and pid in start.pids) or (
            event.cgroup is not None and start.unit is not None and start.unit in event.cgroup
        )
        if sure and hit.rule.alarm and self.alarm is None:
            self.alarm = hit.evidence()

    def _chain_event(self, start: Start, rule: Rule) -> None:
        if rule.name == "ScheduledRestart":
            start.restarted = True
        elif start is self._chain.current and (start.restarted or start.exits):
            same = start.restarted or start.invocation is not None
            if same:
                invocation = start.invocation
                self._chain.next_start(self.rules)
                self._chain.current.invocation = invocation
            else:
                self.answers.append((tuple(self._chain.invocations), self._finished(self._chain)))
                self._chain = Chain(self.unit or start.unit)
            self.alarm = None if not start.restarted else self.alarm

    # --- out ---------------------------------------------------------------------------------------------------

    def answer(self) -> Answer:
        """The answer on the last chain of starts, as far as its entries go."""
        return self._finished(self._chain)

    def all_answers(self) -> tuple[tuple[tuple[str, ...], Answer], ...]:
        """InvocationIDs and answer of every chain, oldest first."""
        return (*self.answers, (tuple(self._chain.invocations), self.answer()))

    def timeline(self) -> Timeline:
        """Where the start-up time of the current start went."""
        return self._chain.current.clock.timeline()


def _kind(entry: JournalEntry) -> str:
    if entry.transport == "kernel":
        return "kernel"
    manager = entry.identifier is not None and entry.identifier.startswith("systemd")
    return "journal" if manager and entry.transport in ("journal", "syslog", None) else "program"


def classify(entries: Iterable[JournalEntry], rules: RuleSet = DEFAULT) -> Answer:
    """The answer on the last chain of starts in these entries."""
    classifier = Classifier(rules)
    for entry in entries:
        classifier.feed(entry)
    return classifier.answer()
