"""The boot before the engine: banner, arguments, model configuration, the port."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping
from types import FrameType

from orchestrator.rehearsal import caches as cache_store
from orchestrator.rehearsal.flags import Settings
from orchestrator.rehearsal.log import Log
from orchestrator.rehearsal.personality import Personality
from orchestrator.rehearsal.startup import IR_PRIORITY
from orchestrator.rehearsal.wire import Phases


def configure(settings: Settings, personality: Personality, scale: float, environ: Mapping[str, str]) -> Log:
    """The part of the boot before the engine: banner, arguments, model configuration."""
    boot, log = personality.boot, Log("APIServer")
    phases = Phases(scale)
    phases.spend(boot.import_api_s)
    _banner(log, settings, personality, environ)
    log.at_info("api_utils.py:273", f"non-default args: {dict(settings.non_default)!r}")
    root = cache_store.cache_root(environ)
    architectures = [personality.architecture, *([personality.draft_architecture] if settings.spec_tokens else [])]
    for number, architecture in enumerate(architectures):
        info = cache_store.model_info(root, architecture)
        if not info.is_file():
            phases.spend(boot.inspect_s)
            with contextlib.suppress(OSError):
                cache_store.save_model_info(info, architecture)
        log.at_info("model.py:623", f"Resolved architecture: {architecture}")
        length = personality.max_model_len if number else settings.max_model_len
        log.at_info("model.py:1788", f"Using max model len {length}")
    if settings.spec_tokens > 1:
        log.at_warning(
            "speculative.py:901",
            "Enabling num_speculative_tokens > 1 will run multiple times of forward on same MTP layer,which may result "
            "in lower acceptance rate",
        )
    if settings.spec_tokens and settings.max_model_len < personality.max_model_len:
        log.at_info(
            "speculative.py:1126",
            f"Overriding draft model max model len from {personality.max_model_len} to {settings.max_model_len}",
        )
    log.at_info(
        "scheduler.py:252",
        f"Chunked prefill is enabled with max_num_batched_tokens={settings.max_num_batched_tokens}.",
    )
    log.at_info("vllm.py:1109", "Asynchronous scheduling is enabled.")
    log.at_info("kernel.py:295", IR_PRIORITY)
    return log


def bind(settings: Settings) -> socket.socket:
    """Binds the port without listening, as vLLM does before it starts its engine.

    Raises:
        OSError: Somebody listens there, or the address is not ours.
    """
    host = settings.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the socket says that it speaks TCP: else each later request of a
    # connection waits 40 ms for an acknowledgement, which no uvicorn does.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, settings.port))
    return listener


def note_signals(noted: list[int]) -> None:
    """Swallows SIGTERM until the event loop runs, but remembers it."""

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)


def _banner(log: Log, settings: Settings, personality: Personality, environ: Mapping[str, str]) -> None:
    version = personality.engine_version
    if environ.get("VLLM_DISABLE_LOG_LOGO") == "1":
        log.at_info("api_utils.py:345", f"vLLM server version {version}, serving model {settings.model}")
        return
    log.at_info(
        "api_utils.py:345",
        "\n       █     █     █▄   ▄█\n"
        f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}\n"
        f"  █▄█▀ █     █     █     █  model   {settings.model}\n"
        "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀\n",
    )
