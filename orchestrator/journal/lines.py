r"""One line as the program printed it: the log prefixes of every generation taken off, the rest kept.

Shapes (vLLM 0.6 to 0.32, Ray, SGLang, collectors in front):
`INFO 11-30 14:51:53 [core.py:116] text` · `INFO 10-24 07:20:26 registry.py:272] text` ·
`(EngineCore_DP0 pid=1) (Worker_TP7 pid=2) ERROR … [f.py:1] text` · `[rank0]: text` · `INFO:     text` (uvicorn) ·
`2025-11-03 05:17:04,315 - module - ERROR - text` · `[2025-01-30 01:52:44 TP2] text` · `worker0[info]text\n` ·
`vllm-1  | text` · `2025-11-19T20:16:36.09Z stderr F text` · `2026-01-01 00:00:10.1 | ERROR | core.py:7 | text` ·
`{"level": "ERROR", "message": "text"}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PROC = re.compile(r"\(([A-Za-z][^()]*?)[ ,]+pid=(\d+)[^()]*\)")
# What collectors, containers and clusters put in front of a line.
_FOREIGN = re.compile(
    r"(?:(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?"
    r"|\[\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)?\]"
    r"|(?:stdout|stderr) [FP]|\[resource\.[^\]]*\]|[A-Za-z][\w.-]*\s+\|(?=\s)"
    r"|\[(?:Trace|Debug|Info|Warning|Error|Fatal)\]"
    r"|\(Process\)|(?:DEBUG|INFO|WARNING|ERROR)(?=\s\d{4}-\d\d-\d\dT))\s+)+"
)
_PREFIX = re.compile(
    r"(?:[\w.-]+\[(?:info|error|warn|warning|debug)\](?: (?! ))?)?"
    r"(?P<procs>(?:\([A-Za-z][^()]*?pid=\d+[^()]*\)\s?)*)"
    r"(?:\[(?P<sglang>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*)\]\s?)?"
    r"(?:\[rank(?P<rank>\d+)\]:\s?(?!\[))?"
    r"(?:-\s[\w.]+\s-\s(?P<level3>[A-Z]+)\s-\s|\|\s*(?P<level4>[A-Z]+)\s*\|\s*(?P<src4>[^\s|]+?)(?::\d+)?\s+[|-]\s)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
    r"(?:\s(?P<clock>\d\d-\d\d \d\d:\d\d:\d\d)\s\[?(?P<src>[^\]\s:]+):\d+\]\s?|:\s+))?"
)
_LINE_BREAKS = re.compile(r"[\r\n]+")
_KEEP = 8192


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its prefix. `proc` names the innermost process (`Worker_TP7:2`), empty when the line has none."""

    body: str
    proc: str = ""
    pid: int | None = None
    level: str = ""
    source: str = ""
    clock: str = ""

    @property
    def is_frame(self) -> bool:
        """A line of a Python traceback's middle: quoted code or a frame. Code that is quoted is not a symptom."""
        return self.body.startswith(("    ", '  File "', "  ^", "  ~"))


def split(message: str) -> list[str]:
    """The lines of one entry: colours gone, progress bars and multi-line messages apart, very long lines cut.

    Of a line over 16 KiB the first and the last 8 KiB are kept: what names a fault stands at either end.
    """
    if "\x1b" in message:
        message = _ANSI.sub("", message)
    parts = _LINE_BREAKS.split(message) if "\n" in message or "\r" in message else [message]
    return [part if len(part) <= 2 * _KEEP else f"{part[:_KEEP]} … {part[-_KEEP:]}" for part in parts if part.strip()]


def _unwrapped(text: str) -> tuple[str, str]:
    """The text and level of a line that is a JSON object of its own; the line itself when it is none."""
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text, ""
    names = ("message", "msg", "log", "text")
    inner = next((value for name in names if isinstance(value := fields.get(name), str)), text)
    level = fields.get("level") or fields.get("levelname") or fields.get("severity")
    return inner.strip("\r\n"), level.upper() if isinstance(level, str) else ""


def parse(text: str) -> Line:
    """Take the prefixes off one line."""
    outer = ""
    if text.startswith('{"') and text.endswith("}"):
        text, outer = _unwrapped(text)
    foreign = _FOREIGN.match(text)
    if foreign is not None:
        text = text[foreign.end() :]
    found = _PREFIX.match(text)
    if found is None:  # every part is optional, so this cannot be; kept so that no line is ever lost
        return Line(body=text)
    proc, pid = "", None
    if found["procs"]:
        known = _PROC.findall(found["procs"])
        if known:
            proc, pid = f"{known[-1][0]}:{known[-1][1]}", int(known[-1][1])
    elif found["rank"] is not None:
        proc = f"rank{found['rank']}"
    elif found["sglang"] is not None:
        proc = found["sglang"][20:] or "sglang"
    return Line(
        body=text[found.end() :].rstrip().removesuffix("\\n"),
        proc=proc,
        pid=pid,
        level=found["level"] or found["level3"] or found["level4"] or outer,
        source=found["src"] or found["src4"] or "",
        clock=found["clock"] or "",
    )
