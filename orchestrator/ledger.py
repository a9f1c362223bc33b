"""The wall: append-only records of one experiment, and the raw files beside them.

Left of it nobody computes a statistic, right of it nobody touches a box. A record is one JSON object on one line,
appended whole by one write and flushed to the disk before the next step begins. Only the last line can be torn (a
power cut, a full disk); it is set aside when the ledger is opened again, never glued to the next record.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import orjson
from pydantic import BaseModel, ValidationError

from orchestrator.errors import LedgerError
from orchestrator.quickread import trial_reader
from orchestrator.records import (
    RECORD,
    AnyRecord,
    BootEnded,
    BootStarted,
    CampaignEnded,
    CampaignStarted,
    TrialEnded,
)

RECORDS = "records.jsonl"
BOOTS = "boots"
_OUTLINE = (CampaignStarted, BootStarted, BootEnded, CampaignEnded)
_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700


@dataclass(frozen=True, slots=True)
class Contents:
    """What a ledger file holds: the records, and the torn tail (bytes after the last whole record)."""

    records: tuple[AnyRecord, ...]
    whole_bytes: int
    torn: bytes


def _record(line: bytes, without: Collection[str], trial: Callable[[bytes], TrialEnded | None]) -> AnyRecord | None:
    quick = trial(line)
    if quick is not None:
        return quick
    try:
        data = orjson.loads(line)
        for name in without:
            data.pop(name, None)
        return RECORD.validate_python(data)
    except (orjson.JSONDecodeError, ValidationError, AttributeError, TypeError):
        return None  # what has no keys to leave out is no record


def parse(data: bytes, name: str = RECORDS) -> Contents:
    """Records of a ledger's bytes.

    Only the last line may be torn: without its newline, or holding no record (a disk that filled up, zeros after a
    power cut).

    Raises:
        LedgerError: a line before the last one is no record; names the line.
    """
    with _no_collector():
        return _parse(io.BytesIO(data), name)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Records hold no cycles, and looking for some again and again takes longer than reading a hundred thousand.

    Nor are they looked through later: what is there now is left to its reference counts.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()


def _parse(file: BinaryIO, name: str, without: Collection[str] = ()) -> Contents:
    records: list[AnyRecord] = []
    trial = trial_reader(frozenset(without))
    position = 0
    bad: tuple[int, int] | None = None
    torn = b""
    for number, raw in enumerate(file, start=1):
        if bad is not None:
            torn += raw
            if not raw.strip(b"\x00\r\n "):
                continue
            raise LedgerError(
                f"{name}:{bad[1]}: not a record of this version, and more records follow it",
                hint="restore the file from a copy, or begin afresh with --new",
            )
        record = _record(raw, without, trial) if raw.endswith(b"\n") else None
        if record is None:
            bad, torn = (position, number), raw
        else:
            records.append(record)
        position += len(raw)
    return Contents(tuple(records), position if bad is None else bad[0], torn)


def contents(folder: Path, *, without: Collection[str] = ()) -> Contents:
    """What the ledger of an experiment's folder holds; nothing when there is none yet.

    Args:
        folder: The experiment's.
        without: Keys of records that the reader has no use for; they are as if they had not been written.
    """
    path = folder / RECORDS
    try:
        with path.open("rb") as file, _no_collector():
            return _parse(file, str(path), without)
    except FileNotFoundError:
        return Contents((), 0, b"")
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}") from error


def read(folder: Path) -> tuple[AnyRecord, ...]:
    """All whole records of an experiment's folder, in order; empty when there is no ledger yet."""
    return contents(folder).records


def to_line(record: BaseModel) -> bytes:
    """One record as one line. `kind` and `v` stand in it always, NaN and infinity never."""
    return orjson.dumps(record.model_dump(mode="json", by_alias=True), option=orjson.OPT_APPEND_NEWLINE)


def private_folder(path: Path) -> Path:
    """A folder that only its owner can read: journals and commands may tell more than a person thinks."""
    try:
        if path.parent.name == BOOTS:
            path.parent.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        path.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}") from error
    return path


def write_private(path: Path, data: bytes) -> None:
    """A whole file at once, private, on the disk before the old one is gone."""
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE_FILE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}") from error


def _write_whole(fd: int, line: bytes) -> None:
    if os.write(fd, line) != len(line):
        raise OSError(errno.ENOSPC, "no space left for a whole record")
    os.fsync(fd)


def _slim(record: AnyRecord) -> AnyRecord:
    """What the outline keeps of a record: thousands of commands would be most of a long campaign's memory."""
    return record.model_copy(update={"command": (), "env": {}}) if isinstance(record, BootStarted) else record


class Ledger:
    """The one writer of an experiment's records. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Opens (or creates) the ledger, takes its lock, and sets a torn tail aside.

        Raises:
            LedgerError: another campaign writes here, or the file cannot be used.
        """
        self.folder = private_folder(folder)
        self.path = folder / RECORDS
        self.set_aside: Path | None = None
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _PRIVATE_FILE)
        except OSError as error:
            raise LedgerError(f"{self.path}: {error.strerror}") from error
        try:
            self._lock()
            self._outline = [_slim(record) for record in self._open() if isinstance(record, _OUTLINE)]
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LedgerError(
                f"{self.path}: another campaign is writing to this experiment",
                hint="wait for it, or name another experiment with --experiment",
            ) from error

    def _open(self) -> tuple[AnyRecord, ...]:
        held = contents(self.folder)
        if held.torn:
            count = len(tuple(self.folder.glob("records.torn-*")))
            self.set_aside = self.folder / f"records.torn-{count + 1}"
            write_private(self.set_aside, held.torn)
            os.ftruncate(self._fd, held.whole_bytes)
        return held.records

    @property
    def outline(self) -> tuple[AnyRecord, ...]:
        """Which campaigns and boots began and ended, in order: all that a plan needs to know what remains.

        Boots are here without their commands and environments. Steps and trials are read from the file by who wants
        them, so a campaign of a day keeps flat memory.
        """
        return tuple(self._outline)

    def append(self, record: AnyRecord) -> None:
        """One record, whole and on the disk when this returns.

        Raises:
            LedgerError: the disk is full or failed; what was half written is taken back.
        """
        line = to_line(record)
        size = os.fstat(self._fd).st_size
        try:
            _write_whole(self._fd, line)
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise LedgerError(
                f"{self.path}: {error.strerror}; the record was not kept",
                hint="make room and run the same command again: it goes on where it stopped",
            ) from error
        if isinstance(record, _OUTLINE):
            self._outline.append(_slim(record))

    def boot_folder(self, boot: str) -> Path:
        """The folder of one boot's raw files."""
        return private_folder(self.folder / BOOTS / boot)

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
