"""Secrets out of what is kept and shown: API keys, tokens, passwords. Imports nothing of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "[redacted]"
_NAME = re.compile(r"(?:api[-_]?key|token(?!s|iz)|secret|passw(?:or)?d|credential|authorization)", re.IGNORECASE)
_IN_TEXT = (
    re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{6,}"),
    re.compile(r"(?i)(--(?:[\w-]*-)?(?:api-key|hf-token|token|password|secret)[= ])\S+"),
    re.compile(
        r"(?i)(['\"]?(?:api_key|hf_token|VLLM_API_KEY|HF_TOKEN|HUGGING_FACE_HUB_TOKEN)['\"]?\s*[:=]\s*)(\[[^\]]*\]|['\"]?[^\s,'\"}]+['\"]?)"
    ),
    re.compile(
        r"\b((?:[A-Z0-9]+_)*(?:API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_[A-Z0-9]+)*=)"
        r"('[^']*'|\"[^\"]*\"|[^\s'\"]+)"
    ),
    re.compile(r"()\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"()\bsk-[A-Za-z0-9_-]{16,}"),
)


def is_secret(name: str) -> bool:
    """Whether a flag or variable of this name holds a secret (`--api-key`, `HF_TOKEN`; not `spec-tokens`)."""
    return _NAME.search(name) is not None


def redact_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line with the values of secret flags hidden."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        if word.startswith("-"):
            name, equals, _value = word.partition("=")
            secret = is_secret(name)
            shown.append(f"{name}={HIDDEN}" if secret and equals else word)
            hide_next = secret and not equals
        else:
            shown.append(HIDDEN if hide_next else word)
    return tuple(shown)


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    """An environment with the values of secret variables hidden."""
    return {name: HIDDEN if is_secret(name) else value for name, value in env.items()}


def redact_text(text: str) -> str:
    """A log line or message with what looks like a secret hidden."""
    for pattern in _IN_TEXT:
        text = pattern.sub(lambda match: f"{match.group(1)}{HIDDEN}", text)
    return text
