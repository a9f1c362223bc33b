"""vLLM's log lines: its logger on stdout, uvicorn and tracebacks on stderr, with the prefixes of 0.26."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_DATA = Path(__file__).with_name("data")
_STDOUT, _STDERR = 1, 2


class Log:
    """Writes as one of vLLM's processes.

    Args:
        process: ``APIServer``, ``EngineCore`` or ``Worker_TP<n>``.
        pid: Its process id, which need not be ours: the engine writes for its workers.
    """

    def __init__(self, process: str, pid: int | None = None) -> None:
        self.prefix = f"({process} pid={pid or os.getpid()}) "

    def at_info(self, source: str, message: str) -> None:
        """A logger line; ``source`` is ``file.py:line``."""
        self._logger("INFO", source, message)

    def at_warning(self, source: str, message: str) -> None:
        """The same at level WARNING."""
        self._logger("WARNING", source, message)

    def at_error(self, source: str, message: str) -> None:
        """The same at level ERROR."""
        self._logger("ERROR", source, message)

    def uvicorn(self, message: str, level: str = "INFO") -> None:
        """A line of uvicorn's own logger (stderr)."""
        _write(_STDERR, f"{self.prefix}{level + ':':<10}{message}\n")

    def access(self, message: str) -> None:
        """A line of uvicorn's access logger (stdout)."""
        _write(_STDOUT, f"{self.prefix}{'INFO:':<10}{message}\n")

    def raw(self, lines: Iterable[str]) -> None:
        """Lines without time, as tracebacks on stderr have them."""
        _write(_STDERR, "".join(f"{self.prefix}{line}\n" for line in lines))

    def plain(self, text: str) -> None:
        """Text on stdout with the prefix alone, as other libraries' loggers write."""
        _write(_STDOUT, f"{self.prefix}{text}\n")

    def bar(self, title: str, total: int, seconds: float) -> None:
        """A finished tqdm bar: one line with bare carriage returns in it (stderr)."""
        if total < 1:
            return
        rate = total / max(seconds, 0.01)
        text = f"\r{title}:   0%|          | 0/{total} [00:00<?, ?it/s]"
        for quarter in (1, 2, 3, 4):
            done = max(total * quarter // 4, 1)
            eighths = done * 80 // total
            block = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
            left = int((total - done) / rate)
            progress = f"{done * 100 // total:3d}%|{block:<10}| {done}/{total}"
            text += f"\r{title}: {progress} [00:00<00:{left:02d}, {rate:.2f}it/s]"
        _write(_STDERR, f"{self.prefix}{text}\n")

    def _logger(self, level: str, source: str, message: str) -> None:
        head = f"{self.prefix}{level} {time.strftime('%m-%d %H:%M:%S')} [{source}] "
        _write(_STDOUT, "\r\n".join(head + line for line in message.split("\n")) + "\n")


def _write(descriptor: int, text: str) -> None:
    data = text.encode()
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BrokenPipeError:
            return


def traceback(*names: str, error: str, **substitutions: str) -> list[str]:
    """A recorded traceback; ``error`` is its last line: exception class and text."""
    return [*frames(*names, **substitutions), error]


def frames(*names: str, **substitutions: str) -> list[str]:
    """The frames of a recorded traceback.

    Args:
        names: Sections of ``data/tracebacks.txt``, one below the other.
        substitutions: Values for ``@@name@@``.
    """
    text = (_DATA / "tracebacks.txt").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("=== ") if part}
    body = "".join(sections[name] for name in names)
    return fill(body, **substitutions).splitlines()


def fill(text: str, **substitutions: str) -> str:
    """Puts values for ``@@name@@`` into a text."""
    for key, value in substitutions.items():
        text = text.replace(f"@@{key}@@", value)
    return text


def engine_config() -> str:
    """The long configuration text of ``Initializing a V1 LLM engine``, with ``@@name@@`` in it."""
    return (_DATA / "engine_config.txt").read_text(encoding="utf-8").rstrip("\n")
