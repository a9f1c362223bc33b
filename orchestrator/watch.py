"""One boot's journal, followed while the boot goes on.

A thread reads the entries as they come, keeps them beside the ledger, and hands each to the classifier. Whoever waits
for the engine asks `alarm`: it is set as soon as an entry means that this boot can no longer succeed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import orjson

from orchestrator.errors import BoxError
from orchestrator.journal import Classifier
from orchestrator.records import Answer, Evidence, JournalEntry, Timeline
from orchestrator.redact import redact_text

_MAX_LOGGER_SAMPLES = 4096


class EntryStream(Protocol):
    """Entries of one unit as they come; iteration ends when the stream is closed or breaks (`BoxError`)."""

    def __iter__(self) -> Iterator[JournalEntry]:
        """The entries, oldest first."""
        ...

    def close(self) -> None:
        """Ends the iteration, also when it waits."""
        ...


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def to_journal_line(entry: JournalEntry) -> bytes:
    """One entry in the form of `journalctl -o json`, so that `invoke classify` reads a boot's journal again."""
    fields: dict[str, str] = dict(entry.fields)
    named = {
        "__REALTIME_TIMESTAMP": None if entry.at_us is None else str(entry.at_us),
        "_SYSTEMD_INVOCATION_ID": entry.invocation_id,
        "_SYSTEMD_UNIT": entry.unit,
        "SYSLOG_IDENTIFIER": entry.identifier,
        "_PID": None if entry.pid is None else str(entry.pid),
        "_TRANSPORT": entry.transport,
        "MESSAGE": entry.message,
    }
    for name, value in named.items():
        if value is not None:
            fields.setdefault(name, value)
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


class Watch:
    """Follows one boot from `begin` to `close`; after it, `answer()` speaks of everything that was seen."""

    def __init__(
        self,
        stream: EntryStream,
        classifier: Classifier,
        sink: Path,
        logger_rate: Callable[[str], float | None] = lambda _message: None,
    ) -> None:
        """`logger_rate` reads tok/s from the engine's periodic line, or None from any other line."""
        self._stream = stream
        self._classifier = classifier
        self._sink = sink
        self._logger_rate = logger_rate
        self._lock = threading.Lock()
        self._alarmed = threading.Event()
        self._progress = threading.Condition()
        self._seen = 0
        self._samples: list[tuple[float, float]] = []
        self.alarm_seen_at_s: float | None = None
        self.broken: BoxError | None = None
        self._thread = threading.Thread(target=self._follow, name="journal", daemon=True)

    def begin(self) -> None:
        """Starts to follow."""
        self._thread.start()

    def close(self) -> None:
        """Stops following; what was seen stays."""
        self._stream.close()
        self._thread.join(timeout=5)

    @property
    def alarm(self) -> Evidence | None:
        """The entry that means that this boot can no longer succeed; None so far."""
        if not self._alarmed.is_set():
            return None
        with self._lock:
            return self._classifier.alarm

    @property
    def seen(self) -> int:
        """How many entries came."""
        return self._seen

    def wait(self, timeout_s: float) -> Evidence | None:
        """Waits for an alarm, at most `timeout_s`; the alarm or None."""
        self._alarmed.wait(timeout_s)
        return self.alarm

    def settle(self, quiet_s: float, deadline_s: float) -> None:
        """Waits until no entry came for `quiet_s` (a traceback's last lines are on their way), at most `deadline_s`."""
        end = time.monotonic() + deadline_s
        with self._progress:
            while time.monotonic() < end and self._thread.is_alive():
                before = self._seen
                self._progress.wait(min(quiet_s, max(0.0, end - time.monotonic())))
                if self._seen == before:
                    return

    def mark(self, event: Literal["ready", "served", "stop_requested"]) -> None:
        """Tells the classifier what we know ourselves."""
        with self._lock:
            self._classifier.mark(event, time.time_ns() // 1000)

    def answer(self) -> Answer:
        """What the journal says so far."""
        with self._lock:
            return self._classifier.answer()

    def timeline(self) -> Timeline:
        """Where the start-up time went, so far."""
        with self._lock:
            return self._classifier.timeline()

    def logger_samples(self) -> tuple[tuple[float, float], ...]:
        """(epoch seconds, tok/s) of the engine's own periodic lines."""
        with self._lock:
            return tuple(self._samples)

    def _follow(self) -> None:
        try:
            with open(self._sink, "ab", buffering=0, opener=_private) as sink:
                for entry in self._stream:
                    self._take(entry, sink)
        except BoxError as error:
            self.broken = error
        except OSError as error:
            self.broken = BoxError(f"{self._sink}: {error.strerror}", hint="make room where the artifacts are kept")
        with self._progress:
            self._progress.notify_all()

    def _take(self, raw: JournalEntry, sink: BinaryIO) -> None:
        # vLLM prints the API key of its command line; from here on nobody sees it, the evidence included.
        entry = replace(raw, message=redact_text(raw.message))
        sink.write(to_journal_line(entry))
        rate = self._logger_rate(entry.message)
        with self._lock:
            self._classifier.feed(entry)
            if rate is not None and len(self._samples) < _MAX_LOGGER_SAMPLES:
                at = time.time() if entry.at_us is None else entry.at_us / 1e6
                self._samples.append((at, rate))
            alarmed = self._classifier.alarm is not None
        if alarmed and not self._alarmed.is_set():
            self.alarm_seen_at_s = time.time()
            self._alarmed.set()
        with self._progress:
            self._seen += 1
            self._progress.notify_all()
