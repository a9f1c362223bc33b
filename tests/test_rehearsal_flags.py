"""vLLM's command line on the rehearsal engine."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from orchestrator.rehearsal import flags, personality

BOX = personality.load()
UNIT = Path(__file__).parent.parent / "examples" / "vllm-qwen.service"


def parse(line, **environ):
    return flags.parse(shlex.split(line), BOX, environ)


def production():
    text = UNIT.read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")
    words = shlex.split(command)
    return words[words.index("vllm.entrypoints.openai.api_server") + 1 :]


def test_the_units_command_is_understood_whole():
    got = flags.parse(production(), BOX, {})
    assert got.served_names == ("qwen3-27b",)
    assert (got.tensor_parallel_size, got.gpu_memory_utilization, got.max_num_seqs) == (2, 0.97, 128)
    assert (got.max_model_len, got.kv_cache_dtype, got.prefix_caching) == (98304, "fp8", True)
    assert (got.spec_method, got.spec_tokens, got.host, got.port) == ("mtp", 3, "0.0.0.0", 8080)
    assert got.non_default["default_chat_template_kwargs"] == {"enable_thinking": False}
    assert list(got.non_default)[:3] == ["model", "served_model_name", "tensor_parallel_size"]


@pytest.mark.parametrize(
    "line",
    [
        "--max-num-seqs 7",
        "--max-num-seqs=7",
        "--max_num_seqs 7",
        "--max_num_seqs=7",
        "--max-num-seq 7",
        "--max-num-seqs 3 --max-num-seqs 7",
        "org/model --max-num-seqs 7",
    ],
)
def test_one_flag_in_every_spelling(line):
    assert parse(line).max_num_seqs == 7


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("-tp 4", "tensor_parallel_size", 4),
        ("-q awq", "quantization", "awq"),
        ("--max-model-len 32k", "max_model_len", 32000),
        ("--max-model-len 32K", "max_model_len", 32768),
        ("--kv-cache-memory-bytes 2.5G", "kv_cache_memory_bytes", 2684354560),
        ("--kv-cache-memory 1g", "kv_cache_memory_bytes", 1000000000),
        ("--no-enable-prefix-caching", "prefix_caching", False),
        ("--served-model-name a b", "served_names", ("a", "b")),
        ("--model a --served-model-name=b", "served_names", ("b",)),
        ("org/model", "served_names", ("org/model",)),
        ("-O0", "compiles", False),
        ("-O 0", "captures", False),
        ("-O3", "compiles", True),
        ("--enforce-eager", "captures", False),
        ("""-cc '{"cudagraph_mode": "NONE"}'""", "captures", False),
        ("""--compilation-config '{"mode": 0}'""", "compiles", False),
        ("-cc.cudagraph_mode=NONE", "captures", False),
        ("--cudagraph-capture-sizes 1 2 4", "capture_sizes", (1, 2, 4)),
        ("--api-key one two", "api_keys", ("one", "two")),
        ("--dtype half", "dtype", "float16"),
        ("--seed -1", "seed", -1),
        ("--disable-log-stats", "log_stats", False),
        ("--disable-access-log-for-endpoints /health,/metrics", "quiet_endpoints", ("/health", "/metrics")),
        ("""--speculative-config '{"method": "mtp", "num_speculative_tokens": 4}'""", "spec_tokens", 4),
        ("--speculative-config.method mtp --speculative-config.num_speculative_tokens 3", "spec_tokens", 3),
        ("-sc.method=mtp -sc.num_speculative_tokens=3", "spec_method", "mtp"),
        ("--spec-method mtp", "spec_tokens", 1),
    ],
)
def test_a_flag_sets_its_field(line, field, value):
    assert getattr(parse(line), field) == value


def test_the_api_key_of_the_environment_counts_unless_the_command_line_has_one():
    assert parse("", VLLM_API_KEY="env").api_keys == ("env",)
    assert parse("--api-key flag", VLLM_API_KEY="env").api_keys == ("flag",)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--num-speculative-tokens 3 x", "unrecognized arguments: --num-speculative-tokens x"),
        ("--cuda-graph-sizes=8", "unrecognized arguments: --cuda-graph-sizes=8"),
        ("-z --also-not", "unrecognized arguments: -z --also-not"),
        ("--port", "argument --port: expected one argument"),
        ("--port --host x", "argument --port: expected one argument"),
        ("--port x", "argument --port: invalid int value: 'x'"),
        ("--gpu-memory-utilization high", "argument --gpu-memory-utilization: invalid float value: 'high'"),
        ("--speculative-config {", "argument --speculative-config: invalid loads value: '{'"),
        ("--cudagraph-capture-sizes", "argument --cudagraph-capture-sizes: expected at least one argument"),
        ("--enforce-eager=1", "argument --enforce-eager: ignored explicit argument '1'"),
        ("--spec 3", "ambiguous option: --spec could match --spec-method, --spec-model, --spec-tokens, --spec"),
    ],
)
def test_a_wrong_command_line_is_refused_in_argparses_words(line, says):
    with pytest.raises(flags.UsageError) as caught:
        parse(line)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            """--spec-tokens 3 --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'""",
            "both --spec-tokens",
        ),
        ("""--spec-method mtp --speculative-config '{"method": "mtp"}'""", "both --spec-method"),
        ("--spec-tokens 0 --spec-method mtp", "greater than 0"),
        ("--spec-tokens 3", "without speculative model"),
        ("--gpu-memory-utilization 1.2", "at most 1"),
        ("--max-model-len 300000", "greater than the derived max_model_len"),
        ("--max-num-seqs 0", "max_num_seqs must be at least 1"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(line, says):
    with pytest.raises(flags.ConfigError, match=says):
        parse(line)


def test_every_option_of_the_usage_text_is_known():
    usage = flags.usage()
    names = {line.split()[1] for line in (Path(flags.__file__).parent / "data" / "flags.txt").read_text().splitlines()}
    assert len(names) == 274
    assert all(f"[--{name}" in usage for name in names)
