"""Journal entries, one by one → what killed this boot.

`Classifier` is fed while the journal is followed: `alarm` is set by the first entry that means that the start can no
longer succeed, `answer()` may be asked at any time. Pure but for `feed_file`, which reads what it is given.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import BinaryIO, Literal

from orchestrator.journal import lines
from orchestrator.journal.chains import Chain
from orchestrator.journal.entries import TOO_LONG, read
from orchestrator.journal.reading import Meaning, Reader
from orchestrator.journal.rules import NO_REASON, Rule, RuleSet, load_rules
from orchestrator.journal.start import Hit, KernelEvent, Start
from orchestrator.records import Answer, Evidence, JournalEntry, Timeline

Event = Literal["ready", "served", "stop_requested"]

DEFAULT: RuleSet = load_rules()

_OK = '" 200 OK'
_ACCESS_ENDS = (" OK", "Error", "Request", "Found", "Entity", "Allowed", "Unauthorized", "Unavailable")
_ACCESS = re.compile(r'"(?P<verb>GET|POST) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3})')
_STATS = re.compile(
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs"
    r"(?:, (?:Swapped|Waiting): (?P<waiting>\d+) reqs)?(?:, Pending: (?P<pending>\d+) reqs)?"
)
_VICTIM = re.compile(
    r"(?:Killed process |pid=|\bpid )(?P<pid>\d+)(?: ?[(,] ?(?:name=)?(?P<name>[^,()]+))?"
    r"|^(?P<comm>[^\[\]]+)\[(?P<pid2>\d+)\]"
)
_TASK = re.compile(r"\btask=(?P<name>[^,]+),pid=(?P<pid>\d+)")
_CGROUP = re.compile(r"task_memcg=(?P<group>[^,]+)")
_LOUD = frozenset({"ERROR", "CRITICAL"})
_SERVING_SOURCES = ("serving", "loggers.py", "async_llm", "protocol.py", "v1/engine/async_llm")
_MOST_UNITS = 64
_MOST_KERNEL_EVENTS = 50


def _own(name: str, kind: Literal["benign", "stop"]) -> Rule:
    """What the classifier itself notes; it fits no line."""
    return Rule(name=name, kind=kind, pattern=r"(?!)|^own$", cause="benign_other", matches=("own",), ignores=("-",))


_ERROR_LINE = _own("ErrorLine", "benign")
_NO_PROGRESS = _own("NoProgress", "benign")
_STOP_ASKED = _own("StopAsked", "stop")


class Classifier:
    """Takes entries one by one and says at any time what they mean.

    Args:
        rules: What lines mean; the shipped rules by default.
        unit: Only entries of this unit (and the kernel's) count; None: the unit whose lines look like an engine's.
        invocation: Only entries of this InvocationID (and the kernel's) count.

    Attributes:
        seen: How many entries were read, of whatever unit; `own_entries`: those that counted, less the kernel's.
        missing: journald itself said that it dropped entries.
        alarm: The entry that means that this start can no longer succeed; None before it, and None for everything
            after a requested stop.
    """

    def __init__(self, rules: RuleSet = DEFAULT, *, unit: str | None = None, invocation: str | None = None) -> None:
        self.rules = rules
        self.unit = unit
        self.invocation = invocation
        self.alarm: Evidence | None = None
        self.seen = 0
        self.own_entries = 0
        self.missing = False
        self._told = 0
        self._ended: list[tuple[tuple[str, ...], Answer]] = []
        self._chain = Chain(rules.causes, Start(unit=unit))
        self._past: deque[str] = deque(maxlen=256)
        self._others: dict[str, Classifier] = {}
        self._reader = Reader(rules)
        self._handlers: dict[str, Callable[[Start, JournalEntry, lines.Line, Rule, re.Match[str]], None]] = {
            "phase": self._on_phase,
            "served": self._on_served,
            "ready": self._on_ready,
            "frame": self._on_frame,
            "chain": self._on_chain,
            "missing": self._on_missing,
        }

    # --- in ------------------------------------------------------------------------------------------------------

    def feed(self, entry: JournalEntry) -> None:
        """Take one entry."""
        kind = _kind(entry)
        if kind == "program" and entry.invocation_id == self.invocation_now and self._may_pass(entry):
            return
        self._take(entry, kind)

    def _take(self, entry: JournalEntry, kind: str) -> None:
        """Take one entry that is not passed by."""
        self.seen += 1
        if kind == "kernel":
            for other in self._others.values():
                other.feed(entry)
        elif not self._counts(entry):
            return
        start = self._chain.current if kind == "kernel" else self._start_of(entry, kind)
        if start is None:
            return
        self.own_entries += kind != "kernel"
        self.missing |= entry.message == TOO_LONG
        start.clock.begin(entry.at_us)
        dull = True
        for text in lines.split(entry.message):
            dull &= self._line(start, entry, kind, text)
        if dull and kind == "program":
            self._reader.remember(entry.message, Meaning.DULL)

    def feed_file(self, file: BinaryIO) -> None:
        """Take every entry of an open file, in whatever form it is (entries.read); dull ones are only counted."""
        # Filters look at fields that a line passed by never shows, so with a filter every entry is made.
        for entry in read(file, None if self._filtered() else self):
            self._take(entry, _kind(entry))

    def mark(self, event: Event, at_us: int | None = None) -> None:
        """What the orchestrator itself knows: the server is ready, has served, or was asked to stop."""
        start = self._chain.current
        if event == "stop_requested":
            line = lines.Line(body="a stop was requested")
            start.asked_to_stop(start.hit(_STOP_ASKED, max(self.seen - 1, 0), line, at_us))
            return
        start.is_ready(at_us)
        start.ok_requests += event == "served"

    @property
    def invocation_now(self) -> str | None:
        """InvocationID of the start that entries belong to now."""
        return self._chain.current.invocation

    def pass_by(self, message: str) -> bool:
        """Count a program's line of the current start that needs no second look; False when it must be fed whole."""
        start = self._chain.current
        meaning = None if start.restarted else self._reader.meaning(message)
        if meaning is None:  # or a start waits for its restart's first line, which must be seen
            return False
        if meaning is not Meaning.DULL:
            if meaning is Meaning.PROGRESS:
                if ": 0.0 tokens/s" in message:
                    return False
                start.progressed()
            elif message.endswith(_OK):
                start.answered(200, generates=meaning is Meaning.GENERATED)
            else:
                return False
        self.seen += 1
        self.own_entries += 1
        start.seq += 1
        return True

    def _filtered(self) -> bool:
        return self.unit is not None or self.invocation is not None

    def _may_pass(self, entry: JournalEntry) -> bool:
        same = entry.unit is None or entry.unit == self._chain.current.unit
        return same and not self._filtered() and self.pass_by(entry.message)

    def _counts(self, entry: JournalEntry) -> bool:
        """Whether the entry is for this classifier; those of other units go to classifiers of their own."""
        if self.invocation is not None and entry.invocation_id != self.invocation:
            return False
        own = self.unit or self._chain.current.unit
        if entry.unit is None or own is None or entry.unit == own:
            return True
        if self.unit is None and (entry.unit in self._others or len(self._others) < _MOST_UNITS):
            other = self._others.setdefault(
                entry.unit, Classifier(self.rules, unit=entry.unit, invocation=self.invocation)
            )
            other.feed(entry)
        return False

    def _start_of(self, entry: JournalEntry, kind: str) -> Start | None:
        """The start that an entry belongs to; opens a new one, or a new chain, where one begins. None: long past."""
        chain, current, told = self._chain, self._chain.current, entry.invocation_id
        current.unit = current.unit or entry.unit
        if told is None or told == current.invocation:
            return chain.next_start(told) if current.restarted and kind == "program" else current
        if current.invocation is None:
            chain.name(told)
            return current
        if chain.previous is not None and told == chain.previous.invocation:
            return chain.previous
        if told in self._past:
            return None
        if current.restarted:
            return chain.next_start(told)
        return self._new_chain(told)

    def _new_chain(self, invocation: str | None) -> Start:
        ended = self._chain
        self._ended.append((tuple(ended.invocations), self._finished()))
        self._past.extend(ended.invocations)
        self._chain = Chain(self.rules.causes, Start(unit=ended.current.unit))
        self._chain.name(invocation)
        self.alarm = None
        return self._chain.current

    # --- one line ------------------------------------------------------------------------------------------------

    def _line(self, start: Start, entry: JournalEntry, kind: str, text: str) -> bool:
        """Take one line; True when it holds nothing that any rule looks for."""
        start.seq += 1
        if kind == "program" and text.endswith(_ACCESS_ENDS) and self._access(start, text):
            return False
        reading = self._reader.read(kind, text)
        if reading is None:
            return True
        line = reading.line
        if kind == "program" and self._program(start, entry, line):
            return False
        for rule, found in reading.fits:
            self._told += rule.source != "box.toml"
            handler = self._handlers.get(rule.kind, self._on_verdict)
            handler(start, entry, line, rule, found)
        if line.is_frame:
            # Frames are found by names alone, never by numbers, so this one's shape means nothing either.
            return not reading.fits
        if line.level in _LOUD and all(rule.kind in ("phase", "served", "ready") for rule, _ in reading.fits):
            start.error(start.hit(_ERROR_LINE, entry.index, line, entry.at_us))
        return False

    def _access(self, start: Start, text: str) -> bool:
        """An access-log line; False when it is none, or one that a rule should see (a refused request)."""
        found = _ACCESS.search(text)
        if found is None:
            return False
        generates = found["verb"] == "POST" and "/v1/" in found["path"] and "lora" not in found["path"]
        status = int(found["status"])
        start.answered(status, generates=generates)
        if text.endswith(_OK):
            self._reader.remember(text, Meaning.GENERATED if generates else Meaning.ANSWERED)
        return not (generates and 400 <= status < 500)

    def _program(self, start: Start, entry: JournalEntry, line: lines.Line) -> bool:
        """What a program's line tells besides its rules; True when it was the engine's periodic line."""
        if line.pid is not None:
            start.pids.add(line.pid)
        if line.source.startswith(_SERVING_SOURCES) or line.source.endswith("_parser.py"):
            start.serving = True
        if line.body.startswith("Traceback"):
            start.traceback(line.proc)
        found = _STATS.search(line.body) if "Avg generation throughput" in line.body else None
        if found is None:
            return False
        tokens = float(found["prompt"]) + float(found["generation"])
        if tokens > 0 and "\n" not in entry.message:
            self._reader.remember(entry.message, Meaning.PROGRESS)
        hit = start.hit(_NO_PROGRESS, entry.index, line, entry.at_us)
        start.stats(hit, int(found["running"]), int(found["waiting"] or 0) + int(found["pending"] or 0), tokens)
        return True

    # --- what rules do -------------------------------------------------------------------------------------------

    def _on_phase(self, start: Start, entry: JournalEntry, _line: lines.Line, rule: Rule, found: re.Match[str]) -> None:
        start.milestone(rule, found.groupdict(), entry.at_us)

    def _on_served(
        self, start: Start, _entry: JournalEntry, _line: lines.Line, _rule: Rule, _found: re.Match[str]
    ) -> None:
        start.serving = True
        start.idle = False

    def _on_ready(
        self, start: Start, entry: JournalEntry, _line: lines.Line, _rule: Rule, _found: re.Match[str]
    ) -> None:
        start.is_ready(entry.at_us)

    def _on_frame(
        self, start: Start, _entry: JournalEntry, line: lines.Line, rule: Rule, _found: re.Match[str]
    ) -> None:
        start.frame(rule, line.proc)

    def _on_missing(
        self, _start: Start, _entry: JournalEntry, _line: lines.Line, _rule: Rule, _found: re.Match[str]
    ) -> None:
        self.missing = True

    def _on_chain(
        self, start: Start, _entry: JournalEntry, _line: lines.Line, rule: Rule, _found: re.Match[str]
    ) -> None:
        if rule.name == "ScheduledRestart":
            start.restarted = True
        elif start is self._chain.current and start.restarted:
            self._chain.next_start(start.invocation)
        elif start is self._chain.current and start.exits:
            # Ended and started again by hand: one chain only when systemd gave both the same InvocationID.
            if start.invocation is not None:
                self._chain.next_start(start.invocation)
            else:
                self._new_chain(None)

    def _on_verdict(
        self, start: Start, entry: JournalEntry, line: lines.Line, rule: Rule, found: re.Match[str]
    ) -> None:
        if start.knows(rule, line.proc):
            return
        if rule.name == "Dumping":
            start.dump(line.body)
        hit = start.hit(rule, entry.index, line, entry.at_us)
        if rule.transport == "kernel":
            self._kernel(start, hit, found.string)
        elif rule.kind == "stop" and (rule.cause is None or start.serving):
            start.asked_to_stop(hit)
        elif start.stop is not None:
            _after_stop(start, hit)
        elif rule.kind == "fault" and rule.rank == NO_REASON and rule.cause == "engine_dead_no_root" and start.serving:
            # While serving, an exception that no rule names is a request's: it only tells, when something else died.
            start.error(hit)
        else:
            kept = {"death": start.deaths, "exit": start.exits, "benign": start.benign}.get(rule.kind, start.faults)
            start.note(kept, hit)
            self._ring(hit, sure=True)

    def _kernel(self, start: Start, hit: Hit, text: str) -> None:
        """A kernel entry about some process: kept with whose it is; judged when more is known, unless it is plain."""
        task, victim, group = _TASK.search(text), _VICTIM.search(text), _CGROUP.search(text)
        pid, name = None, None
        if task is not None:
            pid, name = int(task["pid"]), task["name"]
        elif victim is not None:
            pid = int(victim["pid"] or victim["pid2"])
            name = (victim["name"] or victim["comm"] or "").strip() or None
        if start.stop is not None or len(start.kernel) >= _MOST_KERNEL_EVENTS:
            return
        start.kernel.append(KernelEvent(hit, pid, name, group["group"] if group else None))
        ours = group is not None and start.unit is not None and start.unit in group["group"]
        self._ring(hit, sure=ours or pid in start.pids)

    def _ring(self, hit: Hit, *, sure: bool) -> None:
        if sure and hit.rule.alarm and self.alarm is None:
            self.alarm = hit.evidence()

    # --- out -----------------------------------------------------------------------------------------------------

    def answer(self) -> Answer:
        """The answer on the last chain of starts, as far as its entries go."""
        return self._engine()._finished()  # noqa: SLF001  one of our own kind

    def all_answers(self) -> tuple[tuple[tuple[str, ...], Answer], ...]:
        """InvocationIDs and answer of every chain, oldest first."""
        engine = self._engine()
        return (*engine._ended, (tuple(engine._chain.invocations), engine._finished()))  # noqa: SLF001  the same

    def timeline(self) -> Timeline:
        """Where the start-up time of the current start went."""
        return self._engine()._chain.current.clock.timeline()  # noqa: SLF001  the same

    def _finished(self) -> Answer:
        return self._chain.answer().model_copy(update={"evidence_may_be_missing": self.missing})

    def _engine(self) -> Classifier:
        """Of several units in one journal, the one whose lines look most like an engine's; the first when none does."""
        return max((self, *self._others.values()), key=lambda unit: unit._told)  # noqa: SLF001  the same


def _after_stop(start: Start, hit: Hit) -> None:
    """After a requested stop everything is noise, but that it needed SIGKILL, or that it ended, is told."""
    if hit.rule.kind == "exit" and hit.rule.cause == "sigkill_unattributed":
        start.slow_stop = start.slow_stop or hit
    elif hit.rule.kind == "exit":
        start.note(start.exits, hit)


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
