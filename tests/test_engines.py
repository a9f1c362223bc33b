"""Variants applied to production's command: what each way of saying it becomes, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import pytest

from orchestrator.box.engines import (
    ENGINES,
    Launch,
    Problem,
    canonical,
    is_rehearsal,
    parse_flags,
    spell,
    split_program,
)
from orchestrator.records import Timeline

VLLM = ENGINES["vllm"]
REHEARSAL = ENGINES["rehearsal"]
PROGRAM = ("/home/alex/vllm-venv/bin/python", "-m", "vllm.entrypoints.openai.api_server")
# fmt: off
SEED = (
    *PROGRAM,
    "--model", "/models/qwen", "--served-model-name", "qwen3-27b", "--tensor-parallel-size", "2",
    "--gpu-memory-utilization", "0.97", "--max-model-len", "98304", "--max-num-seqs", "128",
    "--enable-prefix-caching", "--spec-method", "qwen3_5_mtp", "--spec-tokens", "3",
    "--default-chat-template-kwargs", '{"enable_thinking": false}', "--host", "0.0.0.0", "--port", "8080",
)
# fmt: on


@dataclass(frozen=True)
class V:
    name: str = "v"
    set: dict[str, object] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)


def launch(base=SEED, engine=VLLM, *, host="127.0.0.1", port=18080, program=None, **change) -> Launch:
    made = engine.compose(base, V(**change), host=host, port=port, program=program)
    assert isinstance(made, Launch), [str(problem) for problem in made]
    return made


def problems(base=SEED, *, port=18080, **change) -> list[str]:
    made = VLLM.compose(base, V(**change), host="127.0.0.1", port=port)
    assert not isinstance(made, Launch)
    assert all(isinstance(problem, Problem) for problem in made)
    return [str(problem) for problem in made]


def flags(made: Launch) -> dict[str, tuple[str, ...]]:
    return {flag.name: flag.words for flag in parse_flags(split_program(made.argv)[1])[1]}


def test_a_variant_changes_its_flag_in_place_and_we_listen_on_loopback_and_a_port_of_our_own():
    made = launch(set={"spec-tokens": 1})
    at = SEED.index("--spec-tokens")
    assert made.argv[: at + 2] == (*SEED[:at], "--spec-tokens", "1")
    assert made.argv[-4:] == ("--host", "127.0.0.1", "--port", "18080")
    assert (made.port, made.model, made.api_key) == (18080, "qwen3-27b", None)
    assert "0.0.0.0" not in made.argv
    assert "8080" not in made.argv


def test_the_production_variant_is_productions_own_words_but_for_where_it_listens():
    made = launch()
    assert made.argv == (*SEED[:-4], "--host", "127.0.0.1", "--port", "18080")
    assert VLLM.changes(SEED, made) == 0


def test_without_isolation_nothing_is_touched():
    made = launch(host=None, port=None)
    assert made.argv == SEED
    assert made.port == 8080


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("spec-tokens", 5, ("--spec-tokens", "5")),
        ("gpu_memory_utilization", 0.9, ("--gpu-memory-utilization", "0.9")),
        ("tp", 1, ("--tensor-parallel-size", "1")),
        ("-tp", 1, ("--tensor-parallel-size", "1")),
        ("enforce-eager", True, ("--enforce-eager",)),
        ("enable-prefix-caching", False, ("--no-enable-prefix-caching",)),
        ("no-enable-prefix-caching", True, ("--no-enable-prefix-caching",)),
        ("no-enable-prefix-caching", False, ("--enable-prefix-caching",)),
        ("cudagraph-capture-sizes", [1, 2, 4], ("--cudagraph-capture-sizes", "1", "2", "4")),
        (
            "speculative-config",
            {"method": "ngram", "ü": None},
            ("--speculative-config", '{"method": "ngram", "ü": null}'),
        ),
        ("middleware", "--x", ("--middleware=--x",)),
        ("max-model-len", -1, ("--max-model-len", "-1")),
        ("chat-template", "", ("--chat-template", "")),
        ("-O", 3, ("--optimization-level", "3")),
        ("-cc.cudagraph_mode", "FULL", ("--compilation-config.cudagraph_mode", "FULL")),
    ],
)
def test_each_kind_of_value_has_its_spelling(name, value, words):
    assert spell(name, value) == words


@pytest.mark.parametrize(
    ("word", "name", "values", "negated"),
    [
        (("--a-b", "1"), "a-b", ("1",), False),
        (("--a_b=1",), "a-b", ("1",), False),
        (("--a=",), "a", ("",), False),
        (("-O2",), "optimization-level", ("2",), False),
        (("-O", "2"), "optimization-level", ("2",), False),
        (("-tp=4",), "tensor-parallel-size", ("4",), False),
        (("-cc.cudagraph_mode=FULL",), "compilation-config.cudagraph_mode", ("FULL",), False),
        (("--no-async-scheduling",), "async-scheduling", (), True),
        (("--sizes", "1", "2", "-3"), "sizes", ("1", "2", "-3"), False),
        (("--json", '{"a": "--b"}'), "json", ('{"a": "--b"}',), False),
        (("--kv-cache-memory", "40G"), "kv-cache-memory-bytes", ("40G",), False),
    ],
)
def test_each_spelling_is_read(word, name, values, negated):
    _, (flag,) = parse_flags(word)
    assert (flag.name, flag.values, flag.negated, flag.words) == (name, values, negated, word)


def test_a_variant_finds_the_flag_under_every_spelling():
    base = (*PROGRAM, "--model", "m", "-tp", "2", "--max_num_seqs=8", "--no-async-scheduling", "-O1")
    made = launch(
        base, set={"tensor-parallel-size": 1, "max-num-seqs": 4, "async-scheduling": True, "optimization-level": 0}
    )
    assert made.argv[3:-4] == (
        *("--model", "m", "--tensor-parallel-size", "1", "--max-num-seqs", "4"),
        *("--async-scheduling", "--optimization-level", "0"),
    )
    assert VLLM.changes(base, made) == 4


def test_a_repeated_flag_is_replaced_once_and_unset_everywhere():
    base = (*PROGRAM, "--model", "m", "--lora", "a", "--x", "--lora", "b")
    assert flags(launch(base, set={"lora": "c"}))["lora"] == ("--lora", "c")
    assert launch(base, set={"lora": "c"}).argv.count("--lora") == 1
    assert "--lora" not in launch(base, unset=("lora",)).argv


def test_the_same_value_in_other_words_changes_nothing():
    base = (*PROGRAM, "--model", "m", "--max_num_seqs=8")
    made = launch(base, set={"max-num-seqs": 8})
    assert "--max_num_seqs=8" in made.argv
    assert VLLM.changes(base, made) == 0


def test_null_takes_a_flag_away_and_does_not_mind_that_it_was_not_there():
    made = launch(set={"spec-tokens": None, "spec-model": None})
    assert "--spec-tokens" not in made.argv
    assert VLLM.changes(SEED, made) == 1


def test_unset_of_a_flag_that_is_not_there_names_those_that_are():
    (what,) = problems(unset=("spec-token",))
    assert what.startswith("production has no flag --spec-token to unset (did you mean spec-tokens?); it has: ")
    assert "gpu-memory-utilization, host, max-model-len" in what


def test_every_problem_is_told_at_once():
    found = problems(set={"port": 1, "spec-tokens": 1, "spec_tokens": 2}, unset=("spec-tokens", "nope"))
    assert len(found) == 4
    assert found[0] == "--port is ours while the box has `isolate: true`"
    assert found[1] == "--spec-tokens is set twice, as spec-tokens and as spec_tokens"
    assert found[2] == "--spec-tokens is both set and unset"


def test_a_shell_in_execstart_is_refused_with_what_to_do():
    (what,) = problems(("/bin/bash", "-lc", "source venv/bin/activate && vllm serve m --port 1"))
    assert "runs a shell (/bin/bash)" in what
    assert "unit_file" in what


def test_a_container_in_execstart_is_refused_because_our_environment_would_not_reach_it():
    (what,) = problems(("/usr/bin/docker", "run", "--gpus", "all", "vllm/vllm-openai", "--model", "m"))
    assert what.startswith("ExecStart runs docker: ")


def test_the_environment_of_a_variant_and_what_it_takes_away():
    made = launch(env={"VLLM_USE_V1": "1", "HTTP_PROXY": None})
    assert made.env == {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "VLLM_USE_V1": "1"}
    assert made.unset_env == ("HTTP_PROXY",)


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (SEED, PROGRAM),
        (("/v/vllm", "serve", "m", "--port", "1"), ("/v/vllm", "serve")),
        (("/usr/bin/numactl", "-N", "0", "/v/vllm", "serve", "m"), ("/usr/bin/numactl", "-N", "0", "/v/vllm", "serve")),
        (
            ("/usr/bin/env", "A=b", "python3", "-u", "-m", "x.y", "--z"),
            ("/usr/bin/env", "A=b", "python3", "-u", "-m", "x.y"),
        ),
        (("/usr/bin/python3", "/srv/api_server.py", "--model", "m"), ("/usr/bin/python3", "/srv/api_server.py")),
        (("/opt/engine", "--model", "m"), ("/opt/engine",)),
        (("/opt/engine", "--script", "x.py"), ("/opt/engine",)),
    ],
)
def test_where_the_program_ends_and_its_flags_begin(argv, program):
    assert split_program(argv)[0] == program


def test_vllm_serve_keeps_its_positional_model_and_another_program_gets_it_as_a_flag():
    base = ("/v/vllm", "serve", "org/model", "--max-num-seqs", "4")
    assert launch(base).argv[:3] == ("/v/vllm", "serve", "org/model")
    assert launch(base).model == "org/model"
    made = launch(base, REHEARSAL)
    assert made.argv[:5] == (sys.executable, "-m", "orchestrator.rehearsal", "--model", "org/model")
    assert REHEARSAL.changes(base, made) == 0


def test_the_rehearsal_replaces_the_program_and_stamps_itself_whoever_configures_it():
    made = launch(engine=REHEARSAL, set={"spec-tokens": 1})
    assert made.argv[:3] == (sys.executable, "-m", "orchestrator.rehearsal")
    assert REHEARSAL.rehearsal
    assert is_rehearsal(made.argv)
    assert is_rehearsal(launch(program=("/x/python", "-m", "orchestrator.rehearsal")).argv)
    assert not is_rehearsal(SEED)
    assert REHEARSAL.changes(SEED, made) == 1
    assert REHEARSAL.own_env(state="/s", time_scale=0.02) == {
        "COLDBOOT_REHEARSAL_STATE": "/s",
        "COLDBOOT_REHEARSAL_TIME_SCALE": "0.02",
    }


def test_isolation_is_plain_http_on_loopback():
    made = launch((*SEED, "--ssl-certfile", "c", "--ssl-keyfile", "k", "--uds", "/run/x", "--api-key", "sk-1"))
    assert not any("ssl" in word or word == "--uds" for word in made.argv)
    assert made.api_key == "sk-1"
    assert "sk-1" not in repr(replace(made, argv=()))


@pytest.mark.parametrize(
    ("extra", "batch_in_log", "tokens"),
    [
        ((), None, 2048),
        ((), 8192, 8192),
        (("--max-num-batched-tokens", "4K"), None, 4096),
        (("--max-num-batched-tokens", "4K", "--max-model-len", "2k"), 8192, 2000 - 16 - 64),
        (("--max-model-len", "auto"), 512, 512),
        (("--max-model-len", "10"), None, 1),
    ],
)
def test_the_headroom_prompt_fills_a_batch_within_the_models_length(extra, batch_in_log, tokens):
    made = launch((*PROGRAM, "--model", "m", *extra))
    assert VLLM.headroom_tokens(made, Timeline(num_batched_tokens=batch_in_log), output_tokens=16) == tokens


def test_silence_about_compiling_is_believed_of_an_engine_that_was_told_not_to():
    eager = launch(set={"enforce-eager": True})
    assert VLLM.cache_proof(Timeline(), eager) == "no_compile"
    assert VLLM.cache_proof(Timeline(), launch(set={"-O": 0})) == "no_compile"
    assert VLLM.cache_proof(Timeline(), launch()) == "unknown"
    assert VLLM.cache_proof(Timeline(compile_state="loaded"), eager) == "loaded"


def test_every_store_of_the_engine_is_below_the_cold_root():
    env = VLLM.cold_env("/c/b1")
    assert len(env) == 12
    assert all(value.startswith("/c/b1/") for value in env.values())
    assert "HOME" not in env


def test_the_loggers_claim():
    line = (
        "(APIServer pid=1) INFO 11-30 12:00:00 [loggers.py:273] Engine 000: Avg prompt throughput: 2160.9 tokens/s, "
        "Avg generation throughput: 3717.8 tokens/s, Running: 6 reqs"
    )
    assert VLLM.logger_tokens_per_s(line) == 3717.8
    assert VLLM.logger_tokens_per_s("Avg prompt throughput: 1.0 tokens/s") is None


def test_the_name_of_a_flag_whatever_its_spelling():
    assert canonical("--served_model_name") == ("served-model-name", False)
    assert canonical("--speculative-config.num_speculative_tokens") == (
        "speculative-config.num_speculative_tokens",
        False,
    )
