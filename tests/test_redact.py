"""Secrets stay out of what is kept and shown."""

from __future__ import annotations

import pytest

from orchestrator.redact import HIDDEN, redact_argv, redact_env, redact_text


def test_the_value_of_a_secret_flag_is_hidden_in_both_forms():
    argv = ("vllm", "--api-key", "abc", "--port", "80", "--api-key=def", "--hf-token", "hf_x")
    assert redact_argv(argv) == (
        "vllm",
        "--api-key",
        HIDDEN,
        "--port",
        "80",
        f"--api-key={HIDDEN}",
        "--hf-token",
        HIDDEN,
    )


@pytest.mark.parametrize("flag", ["--spec-tokens", "--max-num-batched-tokens", "--tokenizer", "--tokenizer-mode"])
def test_flags_that_only_speak_of_tokens_are_kept(flag):
    assert redact_argv((flag, "3")) == (flag, "3")


def test_every_value_of_a_repeated_secret_is_hidden():
    assert redact_argv(("--api-key", "one", "two", "--port", "1")) == ("--api-key", HIDDEN, HIDDEN, "--port", "1")


def test_secret_variables_are_hidden_and_others_kept():
    assert redact_env({"VLLM_API_KEY": "x", "HF_TOKEN": "y", "VLLM_CACHE_ROOT": "/c"}) == {
        "VLLM_API_KEY": HIDDEN,
        "HF_TOKEN": HIDDEN,
        "VLLM_CACHE_ROOT": "/c",
    }


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("non-default args: {'api_key': ['sesame'], 'port': 8080}", "sesame"),
        ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ("run with --api-key sesame --port 1", "sesame"),
        ("token hf_abcdefghijklmnop1234 refused", "hf_abcdefghijklmnop1234"),
        ("HF_TOKEN=sesame vllm serve", "sesame"),
    ],
)
def test_secrets_in_log_lines_are_hidden(line, secret):
    assert secret not in redact_text(line)
    assert HIDDEN in redact_text(line)


def test_a_line_without_secrets_is_unchanged():
    line = "Avg generation throughput: 66.9 tokens/s, Running: 1 reqs"
    assert redact_text(line) == line
