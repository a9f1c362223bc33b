"""OpenAI's requests as vLLM validates them: what comes in, or the error that goes out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from orchestrator.rehearsal import text
from orchestrator.rehearsal.flags import Settings

_DEFAULT_COMPLETION_TOKENS = 16
_ENDLESS = 1 << 40


class Refusal(Exception):
    """A request that gets an error as its answer.

    Args:
        message: What vLLM says.
        status: HTTP status.
        kind: vLLM's ``type``.
        param: The field, if vLLM names it.
    """

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class Work:
    """A valid generation request.

    Attributes:
        chat: Asked at the chat endpoint.
        prompt_tokens: Length of the prompt.
        blocks: Hashes of its full prefix blocks.
        seed: Seed of the answer.
        max_tokens: Most tokens of the answer.
        eos_at: Tokens after which the answer ends by itself.
        sampled: Not greedy.
    """

    chat: bool
    model: str
    prompt: str
    prompt_tokens: int
    blocks: list[int]
    seed: int
    max_tokens: int
    eos_at: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    sampled: bool


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        Refusal: It is none.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        detail = f"'msg': 'JSON decode error', 'ctx': {{'error': {str(error)!r}}}"
        message = f"[{{'type': 'json_invalid', 'loc': ('body', 0), {detail}}}]"
        raise Refusal(message, kind="Bad Request") from None
    if not isinstance(body, dict):
        message = "[{'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Input should be a valid dictionary'}]"
        raise Refusal(message, kind="Bad Request")
    return body


def check_model(body: dict[str, Any], settings: Settings) -> str:
    """The model that a request names, or the served one.

    Raises:
        Refusal: It is not served here.
    """
    model = body.get("model") or settings.served_names[0]
    if model not in settings.served_names:
        raise Refusal(f"The model `{model}` does not exist.", 404, "NotFoundError", "model")
    return str(model)


def prompt_of(body: dict[str, Any], *, chat: bool) -> tuple[str, list[str | int]]:
    """A request's prompt as text and as tokens.

    Raises:
        Refusal: There is none, or it is of a form that is not served here.
    """
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refusal(
                "[{'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required'}]", kind="Bad Request"
            )
        rendered = "".join(f"<|im_start|>{m.get('role', 'user')}\n{_content(m)}<|im_end|>\n" for m in messages)
        rendered += "<|im_start|>assistant\n"
        return rendered, list(text.pieces(rendered))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, list(text.pieces(prompt))
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return " ".join(map(str, prompt)), list(prompt)
    raise Refusal("Either prompt or prompt_embeds must be provided and non-empty.")


def work_of(body: dict[str, Any], settings: Settings, *, chat: bool) -> Work:
    """Validates a generation request.

    Raises:
        Refusal: vLLM would refuse it.
    """
    model = check_model(body, settings)
    prompt, tokens = prompt_of(body, chat=chat)
    stream = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if body.get("stream_options") and not stream:
        raise Refusal("Stream options can only be defined when `stream=True`.")
    sampling = _sampling(body)
    maximum = body.get("max_tokens") if not chat else body.get("max_completion_tokens", body.get("max_tokens"))
    default = settings.max_model_len - len(tokens) if chat else _DEFAULT_COMPLETION_TOKENS
    max_tokens = default if maximum is None else maximum
    if not isinstance(max_tokens, int) or (max_tokens < 1 and len(tokens) < settings.max_model_len):
        raise Refusal(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if len(tokens) + max_tokens > settings.max_model_len or len(tokens) >= settings.max_model_len:
        total = len(tokens) + max(max_tokens, 0)
        raise Refusal(
            f"This model's maximum context length is {settings.max_model_len} tokens. However, you requested "
            f"{max(max_tokens, 0)} output tokens and your prompt contains {len(tokens)} input tokens, for a total of "
            f"{total} tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    minimum = body.get("min_tokens") or 0
    if minimum < 0:
        raise Refusal(f"min_tokens must be greater than or equal to 0, got {minimum}.", param="min_tokens")
    if minimum > max_tokens:
        raise Refusal(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {minimum}.", param="min_tokens"
        )
    seed = text.seed_of(prompt, sampling)
    stop = body.get("stop") or ()
    usage = bool(options.get("include_usage")) or settings.force_usage
    return Work(
        chat=chat,
        model=model,
        prompt=prompt,
        prompt_tokens=len(tokens),
        blocks=text.block_hashes(tokens, settings.block_size) if settings.prefix_caching else [],
        seed=seed,
        max_tokens=max_tokens,
        eos_at=_ENDLESS if body.get("ignore_eos") else max(text.natural_length(seed), minimum),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=stream,
        include_usage=usage,
        continuous_usage=usage and bool(options.get("continuous_usage_stats")),
        echo=bool(body.get("echo")) and not chat,
        sampled=sampling is not None,
    )


def _sampling(body: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a sampled request adds to the seed of its answer; ``None`` for a greedy one."""
    temperature = body.get("temperature", 1.0)
    temperature = 1.0 if temperature is None else temperature
    if not isinstance(temperature, int | float) or temperature < 0:
        raise Refusal(f"temperature must be non-negative, got {temperature}.", param="temperature")
    top_p = body.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise Refusal(f"top_p must be in (0, 1], got {top_p}.", param="top_p")
    count = body.get("n")
    if count not in {None, 1}:
        raise Refusal(f"n must be 1 on the rehearsal engine, got {count}.", param="n")
    if temperature == 0:
        return None
    return (temperature, top_p, body.get("top_k"), body.get("seed"))


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
