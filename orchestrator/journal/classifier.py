"""Journal entries, one by one → what killed this boot.

`Classifier` is fed while the journal is followed: `alarm` is set by the first entry that means that the start can no
longer succeed, `answer()` may be asked at any time. Pure but for `feed_file`, which reads what it is given.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import BinaryIO, Literal, NamedTuple

from orchestrator.journal import lines
from orchestrator.journal.chains import Chain
from orchestrator.journal.entries import DIGITS, TOO_LONG, Moment, Source, moment_us, read
from orchestrator.journal.reading import Fit, Meaning, Reader, Step, without_cursor
from orchestrator.journal.rules import NO_REASON, Rule, RuleSet, load_rules
from orchestrator.journal.start import Hit, KernelEvent, Start
from orchestrator.records import Answer, Evidence, JournalEntry, Timeline

Event = Literal["ready", "served", "stop_requested"]

DEFAULT: RuleSet = load_rules()

_OK = '" 200 OK'
_OK_QUOTED = b'\\" 200 OK"'
_VICTIM = re.compile(
    r"(?:Killed process |pid=|\bpid )(?P<pid>\d+)(?: ?[(,] ?(?:name=)?(?P<name>[^,()]+))?"
    r"|^(?P<comm>[^\[\]]+)\[(?P<pid2>\d+)\]"
)
_TASK = re.compile(r"\btask=(?P<name>[^,]+),pid=(?P<pid>\d+)")
_CGROUP = re.compile(r"task_memcg=(?P<group>[^,]+)")
_MOST_UNITS = 64
_MOST_KERNEL_EVENTS = 50
_MOST_CHAINS = 512
_MOST_SHAPES = 8192
_LONGEST_LINE = 2048


def _own(name: str, kind: Literal["benign", "stop"], cause: str = "benign_other") -> Rule:
    """What the classifier itself notes; it fits no line."""
    return Rule(name=name, kind=kind, pattern=r"(?!)|^own$", cause=cause, matches=("own",), ignores=("-",))


class Where(NamedTuple):
    """The entry that is being read."""

    entry: int
    at_us: int | None


_ERROR_LINE = _own("ErrorLine", "benign")
_NO_PROGRESS = _own("NoProgress", "benign")
_STOP_ASKED = _own("StopAsked", "stop")
_REFUSED = _own("RequestRefused", "benign", "benign_request_rejected")


class _Known(NamedTuple):
    """What lines of JSON of one shape mean, and where in them the InvocationID, the unit and the status stand."""

    meaning: Meaning
    id_at: int
    unit_at: int
    status_at: int


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
        self._ended: deque[tuple[tuple[str, ...], Answer]] = deque(maxlen=_MOST_CHAINS)
        self._chain = Chain(rules.causes, Start(unit=unit))
        self._past: dict[str, None] = {}
        self._shapes: dict[bytes, _Known] = {}
        self._shapes_of: Source | None = None
        self._shapes_id = self._shapes_unit = b""
        self._others: dict[str, Classifier] = {}
        self._reader = Reader(rules)
        self._handlers: dict[str, Callable[[Start, Where, lines.Line, Fit], None]] = {
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
        self._take(entry, _kind(entry))

    def _take(self, entry: JournalEntry, kind: str) -> None:
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
        self._read(start, kind, entry.message, entry.index, entry.at_us)

    def feed_file(self, file: BinaryIO) -> None:
        """Take every entry of an open file, in whatever form it is (entries.read)."""
        # Filters look at fields that a line taken early never shows, so with a filter every entry is made.
        for entry in read(file, None if self._filtered() else self):
            self._take(entry, _kind(entry))

    def mark(self, event: Event, at_us: int | None = None) -> None:
        """What the orchestrator itself knows: the server is ready, has served, or was asked to stop."""
        start = self._chain.current
        if event == "stop_requested":
            line = lines.Line(body="a stop was requested")
            start.asked_to_stop(start.hit(_STOP_ASKED, Where(max(self.seen - 1, 0), at_us), line))
            start.ended_seq = start.seq if start.ended_seq is None else start.ended_seq
            return
        start.is_ready(at_us)
        start.ok_requests += event == "served"

    def take_line(self, line: bytes) -> bool:
        """Take a line of JSON of the start that is followed now, when lines of its shape are known; else False."""
        start = self._chain.current
        if start.restarted or self._shapes_of is None or start.invocation != self._shapes_of.invocation:
            return False
        bare = without_cursor(line)
        known = self._shapes.get(bare.translate(DIGITS))
        if known is None or not bare.startswith(self._shapes_id, known.id_at):
            return False
        if not bare.startswith(self._shapes_unit, known.unit_at):
            return False
        if known.meaning is Meaning.PROGRESS:
            if b": 0.0 tokens/s" in bare:
                return False
            start.progressed()
        elif known.meaning is not Meaning.DULL:
            if not bare.startswith(_OK_QUOTED, known.status_at):
                return False
            start.answered(200, generates=known.meaning is Meaning.GENERATED)
        self.seen += 1
        self.own_entries += 1
        start.seq += 1
        return True

    def take_early(
        self, source: Source | None, message: str, index: int, moment: Moment, line: bytes | None = None
    ) -> bool:
        """Take a program's message of the start that is followed now, or of one long past; False: feed its entry.

        So most entries of a file need never be made.
        """
        start = self._chain.current
        invocation = None
        if source is not None:
            invocation = source.invocation
            if source.unit != start.unit:
                return False
        if invocation != start.invocation:
            previous = self._chain.previous
            if invocation not in self._past or (previous is not None and previous.invocation == invocation):
                return False
            self.seen += 1
            return True
        if start.restarted:  # waits for its restart's first line, which must be fed
            return False
        self.seen += 1
        self.own_entries += 1
        meaning = self._read(start, "program", message, index, moment)
        if meaning is not None and source is not None and line is not None and len(line) <= _LONGEST_LINE:
            self._learn(source, line, meaning)
        return True

    def _learn(self, source: Source, line: bytes, meaning: Meaning) -> None:
        """What all lines of JSON of this line's shape mean, as long as they are of this source."""
        if source != self._shapes_of or len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
            self._shapes_of = source
            self._shapes_id = f'"{source.invocation}"'.encode()
            self._shapes_unit = f'"{source.unit}"'.encode()
        bare = without_cursor(line)
        at = bare.find(self._shapes_id), bare.find(self._shapes_unit), bare.find(_OK_QUOTED)
        # A line that writes them in another way (escaped) is parsed every time.
        if at[0] >= 0 and at[1] >= 0 and (at[2] >= 0 or meaning in (Meaning.DULL, Meaning.PROGRESS)):
            self._shapes[bare.translate(DIGITS)] = _Known(meaning, *at)

    def _filtered(self) -> bool:
        return self.unit is not None or self.invocation is not None

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
        self._past.update(dict.fromkeys(ended.invocations))
        while len(self._past) > _MOST_CHAINS:
            del self._past[next(iter(self._past))]
        self._chain = Chain(self.rules.causes, Start(unit=ended.current.unit))
        self._chain.name(invocation)
        self.alarm = None
        return self._chain.current

    # --- one message ---------------------------------------------------------------------------------------------

    def _read(self, start: Start, kind: str, message: str, index: int, moment: Moment) -> Meaning | None:
        """Take what a message says; its meaning, when its shape says all."""
        reader = self._reader
        reading = reader.known(kind, message)
        if reading is None:
            if kind == "program":
                meaning = reader.meaning(message)
                if meaning is not None and self._repeats(start, meaning, message):
                    start.seq += 1
                    return meaning
            reading = reader.read(kind, message)
        before = start.seq
        if reading.steps:
            where = Where(index, moment_us(moment))
            start.clock.begin(where.at_us)
            for step in reading.steps:
                start.seq = before + step.at
                self._step(start, where, step)
        start.seq = before + reading.lines
        return None

    def _repeats(self, start: Start, meaning: Meaning, message: str) -> bool:
        """Take a message whose shape says all; False when its numbers matter after all."""
        if meaning is Meaning.DULL:
            return True
        if meaning is Meaning.PROGRESS:
            if ": 0.0 tokens/s" in message:
                return False
            start.progressed()
            return True
        if not message.endswith(_OK):
            return False
        start.answered(200, generates=meaning is Meaning.GENERATED)
        return True

    def _step(self, start: Start, where: Where, step: Step) -> None:
        """Take one line."""
        _, line, fits, access, stats, error, serves, traceback = step
        if access is not None:
            start.answered(access.status, generates=access.generates)
            if access.generates and 400 <= access.status < 500:
                self._on_verdict(start, where, line, Fit(_REFUSED, {}, line.body))
            return
        if line.pid is not None:
            start.pids.add(line.pid)
        if serves:
            start.serving = True
        if traceback:
            start.traceback(line.proc)
        if stats is not None:
            start.stats(start.hit(_NO_PROGRESS, where, line), *stats)
            return
        for fit in fits:
            self._told += fit.rule.source != "box.toml"
            self._handlers.get(fit.rule.kind, self._on_verdict)(start, where, line, fit)
        if error and start.is_news(line.body):
            start.error(start.hit(_ERROR_LINE, where, line))

    # --- what rules do -------------------------------------------------------------------------------------------

    def _on_phase(self, start: Start, where: Where, _line: lines.Line, fit: Fit) -> None:
        start.milestone(fit.rule, fit.values, where.at_us)

    def _on_served(self, start: Start, _where: Where, _line: lines.Line, fit: Fit) -> None:
        start.serving = True
        start.idle = False
        if fit.rule.answers:
            start.ok_requests += 1

    def _on_ready(self, start: Start, where: Where, _line: lines.Line, _fit: Fit) -> None:
        start.is_ready(where.at_us)

    def _on_frame(self, start: Start, _where: Where, line: lines.Line, fit: Fit) -> None:
        start.frame(fit.rule, line.proc)

    def _on_missing(self, _start: Start, _where: Where, _line: lines.Line, _fit: Fit) -> None:
        self.missing = True

    def _on_chain(self, start: Start, _where: Where, _line: lines.Line, fit: Fit) -> None:
        if fit.rule.name == "ScheduledRestart":
            start.restarted = True
        elif start is self._chain.current and start.restarted:
            self._chain.next_start(start.invocation)
        elif start is self._chain.current and start.exits:
            # Ended and started again by hand: one chain only when systemd gave both the same InvocationID.
            if start.invocation is not None:
                self._chain.next_start(start.invocation)
            else:
                self._new_chain(None)

    def _on_verdict(self, start: Start, where: Where, line: lines.Line, fit: Fit) -> None:
        rule = fit.rule
        if start.knows(rule, line.proc):
            return
        if rule.name == "Dumping":
            start.dump(line.body)
        hit = start.hit(rule, where, line)
        if rule.transport == "kernel":
            self._kernel(start, hit, fit.text)
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
