"""The user's own prompts: a file of JSON lines, one JSON array, or ShareGPT conversations; every bad line is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import PROBLEMS_SHOWN, ProblemsError

MAX_BYTES = 64 << 20
MAX_PROMPT_CHARS = 2_000_000
MAX_NAMED = PROBLEMS_SHOWN  # a file of nothing but bad lines may have millions
FORMS = 'a string, {"prompt": "…"}, {"messages": […]}, or a ShareGPT conversation'


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file as read: its prompts, where each stands (line, or entry of an array, from 1), and its bytes."""

    path: Path
    prompts: tuple[str, ...]
    places: tuple[int, ...]
    raw: bytes
    array: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return hashlib.sha256(self.raw).hexdigest()

    def where(self, index: int) -> str:
        """`prompts.jsonl:17` or `prompts.json: entry 17`."""
        return f"{self.path}: entry {self.places[index]}" if self.array else f"{self.path}:{self.places[index]}"


def read_prompts(path: Path) -> PromptFile:
    """The prompts of a file. Of a conversation it is the first thing that the user says.

    Raises:
        ProblemsError: every line that is empty, over-long or not understood, each `file:line: what`.
    """
    # A pipe would be waited for, and cannot be read again in the next session.
    if path.exists() and not path.is_file():
        raise ProblemsError([f"{path}: cannot be read: it is no regular file"])
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProblemsError([f"{path}: cannot be read: {error.strerror or error}"]) from error
    if len(raw) > MAX_BYTES:
        raise ProblemsError(
            [f"{path}: larger than {MAX_BYTES >> 20} MiB; take a part of it, a thousand prompts are many"]
        )
    return parse_prompts(raw, path)


def parse_prompts(raw: bytes, path: Path) -> PromptFile:
    """The same from a file's bytes; `path` is its name in what is said.

    Raises:
        ProblemsError: as above.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ProblemsError([f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8"]) from error
    array = text.lstrip().startswith("[")
    found: list[tuple[int, str]] = []
    problems: list[str] = []
    wrong = 0
    for place, row in _rows(text, array=array):
        prompt, problem = _read(row)
        if problem is None:
            found.append((place, prompt))
            continue
        wrong += 1
        if wrong <= MAX_NAMED:
            at = f": entry {place}" if array and not isinstance(row, _Bad) else f":{place}"
            problems.append(f"{path}{at}: {problem}")
    if wrong:
        raise ProblemsError(problems, count=wrong)
    if not found:
        raise ProblemsError([f"{path}: no prompt in it"])
    places, prompts = zip(*found, strict=True)
    return PromptFile(path, prompts, places, raw, array)


@dataclass(frozen=True, slots=True)
class _Bad:
    """Text that is no JSON: why, and in which line of it."""

    why: str
    line: int = 1


def _rows(text: str, *, array: bool) -> Iterator[tuple[int, object]]:
    """(line or entry, what stands there)."""
    if array:
        entries = _loads(text)
        if isinstance(entries, _Bad):
            yield entries.line, entries
        elif isinstance(entries, list):
            yield from enumerate(entries, start=1)
        return
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        yield number, _loads(line) if line.strip() else ""


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return _Bad(f"{error.msg} at column {error.colno}", error.lineno)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        return _Bad(f"cannot be read as JSON: {error}")


def _read(row: object) -> tuple[str, str | None]:
    """(prompt, what is wrong with it)."""
    if isinstance(row, _Bad):
        return "", row.why
    prompt = _prompt_of(row)
    if prompt is None:
        return "", f"no prompt; accepted: {FORMS}"
    if not prompt.strip():
        return "", "the prompt is empty"
    if len(prompt) > MAX_PROMPT_CHARS:
        return "", f"{len(prompt)} characters; at most {MAX_PROMPT_CHARS}"
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        return "", "half a surrogate pair"
    return prompt, None


def _prompt_of(row: object) -> str | None:
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    turns = row.get("conversations") or row.get("conversation") or row.get("messages")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) in ("human", "user"):
            return _said(turn.get("value", turn.get("content")))
    return None


def _said(content: object) -> str | None:
    """The text of a turn: as it is, or in the parts of the chat API."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    said = [text for text in texts if isinstance(text, str)]
    return "\n".join(said) if said else None
